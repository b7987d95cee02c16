//! The transform of filters, U = G g Gᵀ, for a panel of outputs.

use std::marker::PhantomData;

use pulp::{Simd, WithSimd};

use super::memory::{LANES, load, store};
use super::transforms::{Filter, Taps, Transform};

/// K x C x 3 x 3 filters, or for backward-data C x K x 3 x 3 ones turned round.
#[derive(Clone, Copy)]
pub(super) struct Filters<'a> {
    pub(super) weight: &'a [f32],
    /// C and K of the pass.
    pub(super) channels: usize,
    pub(super) outputs: usize,
    pub(super) turned: bool,
}

impl Filters<'_> {
    /// The nine taps that lead from `channel` to `output`.
    #[inline(always)]
    fn taps(&self, channel: usize, output: usize) -> [f32; 9] {
        let place = match self.turned {
            false => output * self.channels + channel,
            true => channel * self.outputs + output,
        };
        let mut taps = [0.0; 9];
        taps.copy_from_slice(&self.weight[place * 9..][..9]);
        if self.turned {
            taps.reverse();
        }
        taps
    }
}

/// Transforms the filters of outputs from `first`: U[point][output / 2 lanes][channel][2 lanes].
///
/// Channels are as many as fill vectors; missing ones and missing outputs are zero.
pub(super) struct TransformFilters<'a, F> {
    pub(super) filters: Filters<'a>,
    pub(super) first: usize,
    /// Vectors of outputs, an even number.
    pub(super) vectors: usize,
    pub(super) to: &'a mut [f32],
    /// Floats between two points.
    pub(super) stride: usize,
    pub(super) filter: PhantomData<F>,
}

impl<F: Filter> WithSimd for TransformFilters<'_, F> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let TransformFilters { filters, first, vectors, to, stride, .. } = self;
        let lanes = S::F32_LANES;
        let channels = filters.channels.next_multiple_of(lanes);
        for pair in 0..vectors / 2 {
            let outputs = [0, 1].map(|half| {
                let first = first + (2 * pair + half) * lanes;
                [first, (first + lanes).min(filters.outputs)]
            });
            for channel in 0..channels {
                for half in 0..2 {
                    let [start, end] = outputs[half];
                    let mut taps = [0.0f32; 9 * LANES];
                    if channel < filters.channels {
                        for (lane, output) in (start..end).enumerate() {
                            for (tap, value) in filters.taps(channel, output).into_iter().enumerate() {
                                taps[tap * lanes + lane] = value;
                            }
                        }
                    }
                    let place = ((pair * channels + channel) * 2 + half) * lanes;
                    let to = &mut to[place..place + (F::INPUTS * F::INPUTS - 1) * stride + lanes];
                    Taps::<F>::square(
                        simd,
                        // SAFETY: nine vectors of at most LANES fit.
                        |r, s| unsafe { load::<S>(&taps, (3 * r + s) * lanes) },
                        // SAFETY: `to` holds a vector for each point.
                        |i, j, value| unsafe { store::<S>(to, (i * F::INPUTS + j) * stride, value) },
                    );
                }
            }
        }
    }
}
