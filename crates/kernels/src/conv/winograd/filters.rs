//! The transform of filters, U = G g Gᵀ, for a panel of outputs.

use std::marker::PhantomData;
use std::ops::Range;

use pulp::{Simd, WithSimd};

use super::memory::{Grid, LANES, load};
use super::transforms::{Filter, Taps, Transform, column_of};
use crate::shared::Shared;

/// K x C x 3 x 3 filters, or for backward-data C x K x 3 x 3 filters turned by 180 degrees.
#[derive(Clone, Copy)]
pub(super) struct Filters<'a> {
    pub(super) weight: &'a [f32],
    /// C and K of the pass.
    pub(super) channels: usize,
    pub(super) outputs: usize,
    pub(super) turned: bool,
}

impl Filters<'_> {
    /// Copies the taps from `channels` to `outputs`, at most `lanes` of each, as taps[channel][tap][lane].
    #[inline(always)]
    fn taps(&self, channels: Range<usize>, outputs: Range<usize>, lanes: usize, taps: &mut [f32]) {
        for (i, channel) in channels.enumerate() {
            for (lane, output) in outputs.clone().enumerate() {
                let to = &mut taps[i * 9 * lanes..][..9 * lanes];
                let place = match self.turned {
                    false => output * self.channels + channel,
                    true => channel * self.outputs + output,
                };
                let filter = &self.weight[place * 9..][..9];
                for tap in 0..9 {
                    to[tap * lanes + lane] = filter[if self.turned { 8 - tap } else { tap }];
                }
            }
        }
    }
}

/// Transforms a panel's filters for some channels: U[point][output / pair][channel][pair], a pair being `vectors`.
pub(super) struct TransformFilters<'a, F> {
    pub(super) filters: Filters<'a>,
    /// Whole pairs of outputs; what lies beyond K is zero.
    pub(super) outputs: Range<usize>,
    pub(super) vectors: usize,
    /// Whole vectors of channels; what lies beyond C is zero.
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
        let TransformFilters { filters, outputs, vectors, channels, to, stride, .. } = self;
        let lanes = S::F32_LANES;
        let points = Grid::of_points(F::INPUTS, stride);
        let to = Shared::new(to);
        let mut taps = [0.0f32; LANES * 9 * LANES];
        for vector in 0..outputs.len() / lanes {
            let output = outputs.start + vector * lanes;
            for start in channels.clone().step_by(lanes) {
                let ends = [(start + lanes).min(filters.channels), (output + lanes).min(filters.outputs)];
                if ends[0] < start + lanes || ends[1] < output + lanes {
                    taps.fill(0.0);
                }
                filters.taps(start..ends[0], output..ends[1], lanes, &mut taps);
                for channel in 0..lanes {
                    let row =
                        (vector / vectors * channels.len() + start - channels.start + channel) * vectors;
                    let place = (row + vector % vectors) * lanes;
                    assert!(points.fits::<S>(F::INPUTS, place, to.len()), "a filter beyond its panel");
                    let load = |r, s| {
                        // SAFETY: `channel` is below `lanes`, r and s are below 3: a vector ends at 9 * lanes * lanes or before,
                        // and `taps` has 9 * LANES * LANES floats. No vector has more than LANES.
                        unsafe { load::<S, f32>(&taps, (channel * 9 + 3 * r + s) * lanes) }
                    };
                    Taps::<F>::square(
                        simd,
                        |s| column_of(simd, 3, |r| load(r, s)),
                        // SAFETY: `fits` has checked that the last point's vector is inside, and no other point's vector lies
                        // behind it. `to` was made of a slice that only this call uses.
                        |i, j, value| unsafe { points.store::<S, f32>((to, place), [i, j], value) },
                    );
                }
            }
        }
    }
}
