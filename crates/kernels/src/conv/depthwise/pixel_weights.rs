//! Backward-weights in channels-last: vectors of channels, several output pixels at once, sums of every tap.

use pulp::{Simd, WithSimd};

use super::blocks::{BLOCK, BlockKernel, Line, Outputs, Place, Scratch, each_block, load, store};
use super::gather::Gather;
use crate::Cpu;
use crate::conv::gemm_views::reduce_partials;
use crate::conv::plan::TypedKernel;
use crate::simd;
use crate::transpose::transpose;

/// The weight gradient from N x H x W x C tensors.
pub(super) struct PixelWeights {
    /// How y gathers x.
    gather: [Gather; 2],
    batch: usize,
    channels: usize,
    workers: usize,
}

impl PixelWeights {
    pub(super) fn new(gather: [Gather; 2], [batch, channels]: [usize; 2], cpu: &Cpu) -> PixelWeights {
        let workers = cpu.threads().min(batch * gather[0].output);
        PixelWeights { gather, batch, channels, workers }
    }

    /// The length of the sums: taps x channels.
    fn sums_len(&self) -> usize {
        self.gather[0].kernel * self.gather[1].kernel * self.channels
    }

    /// The sums of each worker, and a pixel of zeros.
    pub(super) fn workspace_len(&self) -> usize {
        self.workers * self.sums_len() + self.channels
    }
}

impl TypedKernel<f32> for PixelWeights {
    fn run(&self, cpu: &Cpu, [x, dy]: [&[f32]; 2], output: &mut [f32], workspace: &mut [f32]) {
        let rows = self.batch * self.gather[0].output;
        let work = dy.len() * (output.len() / self.channels);
        let (parts, zeros) = workspace.split_at_mut(self.workers * self.sums_len());
        zeros.fill(0.0);
        let zeros = &*zeros;
        cpu.for_each(work, parts.chunks_mut(self.sums_len()).enumerate(), |(worker, sums)| {
            let rows = [worker, worker + 1].map(|worker| rows * worker / self.workers);
            simd::run(cpu.isa(), Rows { weights: self, x, dy, zeros, rows, sums });
        });
        reduce_partials(parts, self.sums_len());
        let taps = output.len() / self.channels;
        transpose(cpu, taps, self.channels, &parts[..self.sums_len()], output);
    }
}

/// A task: the output rows `[first, end)`, counted over all images.
struct Rows<'a> {
    weights: &'a PixelWeights,
    x: &'a [f32],
    dy: &'a [f32],
    /// One pixel of zeros.
    zeros: &'a [f32],
    rows: [usize; 2],
    sums: &'a mut [f32],
}

impl WithSimd for Rows<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Rows { weights, x, dy, zeros, rows: [first, end], sums } = self;
        let [height, width] = &weights.gather;
        let channels = weights.channels;
        let image_len = height.source * width.source * channels;
        let row_len = width.output * channels;
        let mut scratch = Scratch::default();
        sums.fill(0.0);
        assert!(sums.len() >= height.kernel * width.kernel * channels, "sums of each tap");
        for row in first..end {
            let image = &x[row / height.output * image_len..][..image_len];
            let dy = &dy[row * row_len..][..row_len];
            let mut products = Products { dy, sums };
            let outputs = Outputs {
                gather: &weights.gather,
                row: row % height.output,
                phase: &width.phases[0],
                image,
                zeros,
                next: Some(dy.as_ptr().wrapping_add(row_len)),
            };
            // SAFETY: `sums` have all channels of each tap, and `dy` those of a row's outputs, which are one phase.
            unsafe { each_block(simd, &mut scratch, &outputs, &mut products) };
        }
    }
}

/// One row of outputs.
struct Products<'a> {
    dy: &'a [f32],
    /// Taps x channels.
    sums: &'a mut [f32],
}

impl BlockKernel for Products<'_> {
    const MOST_TAPS: usize = 3;

    #[inline(always)]
    unsafe fn block<S: Simd, const EDGE: bool, const MASKED: bool, const TAPS: usize, const INPUTS: usize>(
        &mut self,
        simd: S,
        line: &Line<'_>,
        place: Place<'_, S::m32s>,
    ) {
        let Place { q, channel, mask, .. } = place;
        let mut dy = [simd.splat_f32s(0.0); BLOCK];
        for (b, dy) in dy.iter_mut().enumerate() {
            if EDGE && q + b >= line.phase.count {
                break;
            }
            let pixel = &self.dy[(q + b) * line.output_step + channel..];
            // SAFETY: output q + b exists: by the check if EDGE, else by the caller's promise. So does its pixel, which has
            // all channels: from `channel` on, those of a vector, or those of the mask.
            *dy = unsafe { load::<S, MASKED>(simd, mask, pixel.as_ptr()) };
        }
        let add = |tap: usize, inputs: [S::f32s; BLOCK]| {
            // Two sums, for half the latency.
            let mut sums = [simd.splat_f32s(0.0); 2];
            for b in 0..BLOCK {
                sums[b % 2] = simd.mul_add_f32s(inputs[b], dy[b], sums[b % 2]);
            }
            let total = self.sums.as_mut_ptr().wrapping_add(tap + channel);
            // SAFETY: the caller promises that the sums have all channels of each tap; the lanes from `channel` on, without
            // those that the mask leaves out, are some of these.
            unsafe {
                let sum = simd.add_f32s(sums[0], sums[1]);
                let sum = simd.add_f32s(load::<S, MASKED>(simd, mask, total), sum);
                store::<S, MASKED>(simd, mask, total, sum);
            }
        };
        // SAFETY: the caller promises what `each_tap` asks for.
        unsafe { line.each_tap::<S, EDGE, MASKED, TAPS, INPUTS>(simd, place, add) };
    }
}
