//! The transform of filters, U = G g Gᵀ, for a panel of outputs.

use std::marker::PhantomData;
use std::ops::Range;

use pulp::{Simd, WithSimd};

use super::memory::{Grid, LANES, load};
use super::transforms::{Filter, Taps, Transform, column_of};
use crate::shared::Shared;

/// The most taps of a filter in two dimensions.
pub(super) const TAPS: usize = 9;

/// K x C x R x S filters, or for backward-data C x K x R x S filters turned by 180 degrees.
#[derive(Clone, Copy)]
pub(super) struct Filters<'a> {
    pub(super) weight: &'a [f32],
    /// C and K of the pass.
    pub(super) channels: usize,
    pub(super) outputs: usize,
    /// R S.
    pub(super) len: usize,
    pub(super) turned: bool,
}

impl Filters<'_> {
    /// Copies the taps at `places` from `channels` to `outputs`, at most `lanes` of each, as taps[channel][tap][lane], `count` taps each.
    #[inline(always)]
    fn taps(
        &self,
        (places, count): (&[[usize; 2]], usize),
        [channels, outputs]: [Range<usize>; 2],
        lanes: usize,
        taps: &mut [f32],
    ) {
        for (i, channel) in channels.enumerate() {
            for (lane, output) in outputs.clone().enumerate() {
                let to = &mut taps[i * count * lanes..][..count * lanes];
                let place = match self.turned {
                    false => output * self.channels + channel,
                    true => channel * self.outputs + output,
                };
                let filter = &self.weight[place * self.len..][..self.len];
                for &[tap, at] in places {
                    to[tap * lanes + lane] = filter[at];
                }
            }
        }
    }
}

/// Transforms a panel's filters for some channels of all phases that are read: U[point][output / pair][channel][pair], a pair being
/// `vectors`.
pub(super) struct TransformFilters<'a, F> {
    pub(super) filters: Filters<'a>,
    /// Where the taps of each phase that is read, or of the one of the outputs, lie ([`Geometry::places`]).
    ///
    /// [`Geometry::places`]: super::geometry::Geometry::places
    pub(super) places: &'a [Vec<[usize; 2]>],
    /// Channels of a phase, whole vectors if there are several.
    pub(super) of_phase: usize,
    /// Whole pairs of outputs; what lies beyond K is zero.
    pub(super) outputs: Range<usize>,
    pub(super) vectors: usize,
    /// Whole vectors of the phases' channels; what lies beyond C is zero.
    pub(super) channels: Range<usize>,
    pub(super) to: &'a mut [f32],
    /// Floats between two points.
    pub(super) stride: usize,
    pub(super) filter: PhantomData<F>,
}

impl<F: Filter> WithSimd for TransformFilters<'_, F> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let TransformFilters { filters, places, of_phase, outputs, vectors, channels, to, stride, .. } = self;
        let lanes = S::F32_LANES;
        let points = Grid::of_points(F::INPUTS, stride);
        let to = Shared::new(to);
        let side = F::TAPS;
        let mut taps = [0.0f32; LANES * TAPS * LANES];
        for vector in 0..outputs.len() / lanes {
            let output = outputs.start + vector * lanes;
            for start in channels.clone().step_by(lanes) {
                // What lies beyond the last phase's channels are no channels.
                let phase = (start / of_phase).min(places.len() - 1);
                let (first, places) = (start - phase * of_phase, &places[phase]);
                let ends = [(first + lanes).min(filters.channels), (output + lanes).min(filters.outputs)];
                if ends[0] < first + lanes || ends[1] < output + lanes || places.len() < side * side {
                    taps.fill(0.0);
                }
                let taken = [first..ends[0], output..ends[1]];
                filters.taps((places, side * side), taken, lanes, &mut taps);
                for channel in 0..lanes {
                    let row =
                        (vector / vectors * channels.len() + start - channels.start + channel) * vectors;
                    let place = (row + vector % vectors) * lanes;
                    assert!(points.fits::<S>(F::INPUTS, place, to.len()), "a filter beyond its panel");
                    let load = |r, s| {
                        // SAFETY: `channel` is below `lanes`, r and s are below `side`: a vector ends at side² * lanes² or before,
                        // and `taps` has TAPS * LANES² floats. No filter has more than TAPS taps, no vector more than LANES.
                        unsafe { load::<S, f32>(&taps, ((channel * side + r) * side + s) * lanes) }
                    };
                    Taps::<F>::square(
                        simd,
                        |s| column_of(simd, side, |r| load(r, s)),
                        // SAFETY: `fits` has checked that the last point's vector is inside, and no other point's vector lies
                        // behind it. `to` was made of a slice that only this call uses.
                        |i, j, value| unsafe { points.store::<S, f32>((to, place), [i, j], value) },
                    );
                }
            }
        }
    }
}
