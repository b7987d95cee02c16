//! Backward-weights of contiguous tensors: vectors along the rows of padded planes, sums of several taps at once.

use pulp::{MemMask, Simd, WithSimd};

use super::gather::Gather;
use super::padded::Padded;
use crate::Cpu;
use crate::conv::plan::{NotApplicable, TypedKernel};
use crate::simd;

/// Taps whose sums stay in registers.
const TAPS: usize = 9;

/// The weight gradient from N x C planes.
pub(super) struct PlaneWeights {
    /// How y gathers x.
    gather: [Gather; 2],
    padded: Padded,
    channels: usize,
    /// The most channels that a worker takes.
    share: usize,
    workers: usize,
    lanes: usize,
}

impl PlaneWeights {
    pub(super) fn new(
        gather: [Gather; 2],
        [_, channels]: [usize; 2],
        cpu: &Cpu,
    ) -> Result<PlaneWeights, NotApplicable> {
        let lanes = cpu.isa().lanes();
        let padded = Padded::new(&gather, lanes)?;
        let share = channels.div_ceil(cpu.threads());
        Ok(PlaneWeights { gather, padded, channels, share, workers: channels.div_ceil(share), lanes })
    }

    fn taps(&self) -> usize {
        self.gather[0].kernel * self.gather[1].kernel
    }

    /// Floats of the sums of one channel: a vector for each tap.
    fn sums_len(&self) -> usize {
        self.taps().next_multiple_of(TAPS) * self.lanes
    }

    pub(super) fn workspace_len(&self) -> usize {
        self.workers * (self.padded.len() + self.sums_len())
    }
}

impl TypedKernel<f32> for PlaneWeights {
    fn run(&self, cpu: &Cpu, [x, dy]: [&[f32]; 2], output: &mut [f32], workspace: &mut [f32]) {
        let work = dy.len() * self.taps();
        let shares = output.chunks_mut(self.share * self.taps());
        let tasks = shares.zip(workspace.chunks_mut(self.workspace_len() / self.workers)).enumerate();
        cpu.for_each(work, tasks, |(worker, (filters, scratch))| {
            let first = worker * self.share;
            simd::run(cpu.isa(), Task { weights: self, first, x, dy, filters, scratch });
        });
    }
}

/// The filters of some channels, from `first` on.
struct Task<'a> {
    weights: &'a PlaneWeights,
    first: usize,
    x: &'a [f32],
    dy: &'a [f32],
    filters: &'a mut [f32],
    scratch: &'a mut [f32],
}

impl WithSimd for Task<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Task { weights, first, x, dy, filters, scratch } = self;
        let [height, width] = &weights.gather;
        let (x_plane, y_plane) = (height.source * width.source, height.output * width.output);
        let (padded, sums) = scratch.split_at_mut(weights.padded.len());
        padded.fill(0.0);
        let taps = &width.phases[0].taps;
        let places =
            height.phases[0].taps.iter().flat_map(|r| taps.iter().map(|s| weights.padded.place(r, s)));
        let mut places: Vec<usize> = places.collect();
        // The last group is filled up with a tap whose sums are not read.
        places.resize(places.len().next_multiple_of(TAPS), places[0]);
        for (channel, filter) in filters.chunks_exact_mut(weights.taps()).enumerate() {
            sums.fill(0.0);
            let planes = x.chunks_exact(x_plane).zip(dy.chunks_exact(y_plane));
            for (x, dy) in planes.skip(first + channel).step_by(weights.channels) {
                weights.padded.fill(simd, x, width.source, padded);
                for (places, sums) in
                    places.chunks_exact(TAPS).zip(sums.chunks_exact_mut(TAPS * S::F32_LANES))
                {
                    add_plane(simd, weights, places, padded, dy, sums);
                }
            }
            for (weight, sum) in filter.iter_mut().zip(sums.chunks_exact(S::F32_LANES)) {
                *weight = simd.reduce_sum_f32s(simd.partial_load_f32s(sum));
            }
        }
    }
}

/// Adds one plane's products to the sums of TAPS taps, through which output (0, 0) reads at `places`.
#[inline(always)]
fn add_plane<S: Simd>(
    simd: S,
    weights: &PlaneWeights,
    places: &[usize],
    padded: &[f32],
    dy: &[f32],
    sums: &mut [f32],
) {
    let [height, width] = &weights.gather;
    let row_step = height.scale * weights.padded.row_len();
    let (sums, _) = S::as_mut_simd_f32s(sums);
    let mut totals = [simd.splat_f32s(0.0); TAPS];
    let whole = width.output - width.output % S::F32_LANES;
    let rest = MemMask::new(simd.mask_between_m32s(0, (width.output - whole) as u32).mask());
    for (row, dy) in dy.chunks_exact(width.output).enumerate() {
        for column in (0..width.output).step_by(S::F32_LANES) {
            // SAFETY: `dy` is a row of `width.output` floats. Below `whole`, a multiple of the lanes, a vector from `column` on
            // ends at `whole` or before; from there on the mask has the rest of the row.
            let dy = unsafe {
                let from = dy.as_ptr().add(column);
                if column < whole {
                    from.cast::<S::f32s>().read_unaligned()
                } else {
                    simd.mask_load_ptr_f32s(rest, from)
                }
            };
            let source = &padded[row * row_step + column..];
            for (total, &place) in totals.iter_mut().zip(places) {
                let x = &source[place..][..S::F32_LANES];
                // SAFETY: `x` has been cut to as many floats as a vector has, and any bits are floats.
                let x = unsafe { x.as_ptr().cast::<S::f32s>().read_unaligned() };
                *total = simd.mul_add_f32s(x, dy, *total);
            }
        }
    }
    for (sum, total) in sums.iter_mut().zip(totals) {
        *sum = simd.add_f32s(*sum, total);
    }
}
