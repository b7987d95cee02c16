//! Backward-weights in channels-last: vectors of channels, several output pixels at once, sums of every tap.

use pulp::{Simd, WithSimd};

use super::blocks::{BLOCK, BlockKernel, Place, Run, each_block, list_runs, load, store};
use super::gather::{Gather, Phase};
use crate::Cpu;
use crate::conv::gemm_views::reduce_partials;
use crate::conv::plan::ConvKernel;
use crate::memory_format::transpose;
use crate::simd;

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

    /// Sums of taps x channels.
    fn sums_len(&self) -> usize {
        self.gather[0].kernel * self.gather[1].kernel * self.channels
    }

    pub(super) fn workspace_len(&self) -> usize {
        self.workers * self.sums_len()
    }
}

impl ConvKernel<f32> for PixelWeights {
    fn run(&self, cpu: &Cpu, [x, dy]: [&[f32]; 2], output: &mut [f32], workspace: &mut [f32]) {
        let rows = self.batch * self.gather[0].output;
        let work = dy.len() * (output.len() / self.channels);
        let parts = workspace.chunks_mut(self.sums_len()).enumerate();
        cpu.for_each(work, parts, |(worker, sums)| {
            let rows = [worker, worker + 1].map(|worker| rows * worker / self.workers);
            simd::run(cpu.isa(), Rows { weights: self, x, dy, rows, sums });
        });
        reduce_partials(workspace, self.sums_len());
        let taps = output.len() / self.channels;
        transpose(cpu, taps, self.channels, &workspace[..self.sums_len()], output);
    }
}

/// A task: the output rows `[first, end)`, counted over all images.
struct Rows<'a> {
    weights: &'a PixelWeights,
    x: &'a [f32],
    dy: &'a [f32],
    rows: [usize; 2],
    sums: &'a mut [f32],
}

impl WithSimd for Rows<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Rows { weights, x, dy, rows: [first, end], sums } = self;
        let [height, width] = &weights.gather;
        let channels = weights.channels;
        let image_len = height.source * width.source * channels;
        let row_len = width.output * channels;
        let phase = &width.phases[0];
        let mut runs = Vec::new();
        sums.fill(0.0);
        for row in first..end {
            let image = &x[row / height.output * image_len..][..image_len];
            list_runs(&mut runs, &weights.gather, channels, (row % height.output, phase), image);
            let dy = &dy[row * row_len..][..row_len];
            let line = Line { width, phase, channels, runs: &runs, dy, sums };
            each_block(simd, width, phase, channels, line);
        }
    }
}

/// One row of outputs.
struct Line<'a> {
    width: &'a Gather,
    phase: &'a Phase,
    channels: usize,
    runs: &'a [Run],
    dy: &'a [f32],
    /// Taps x channels.
    sums: &'a mut [f32],
}

impl BlockKernel for Line<'_> {
    #[inline(always)]
    unsafe fn block<S: Simd, const TAPS: usize, const SCALE: usize, const CHECKED: bool>(
        &mut self,
        simd: S,
        Place { q, channel, mask, step }: Place<S::m32s>,
    ) {
        let channels = self.channels;
        let first = q * self.width.scale;
        let exists = |b: usize| !CHECKED || q + b < self.phase.count;
        let mut dy = [simd.splat_f32s(0.0); BLOCK];
        for (b, dy) in dy.iter_mut().enumerate() {
            if exists(b) {
                let from = self.dy.as_ptr().wrapping_add((q + b) * channels + channel);
                // SAFETY: output q + b exists, by the check or by the caller's promise.
                *dy = unsafe { load::<S, CHECKED>(simd, mask, from) };
            }
        }
        for run in self.runs {
            let source = run.source.wrapping_add(first * channels + channel);
            let mut sums = [simd.splat_f32s(0.0); TAPS];
            for i in 0..(BLOCK - 1) * SCALE + TAPS {
                let column = run.column + (first + i * step) as isize;
                if i % SCALE >= TAPS || CHECKED && column as usize >= self.width.source {
                    continue;
                }
                // SAFETY: the column is inside, by the check or by the caller's promise.
                let x = unsafe { load::<S, CHECKED>(simd, mask, source.wrapping_add(i * step * channels)) };
                for b in 0..BLOCK {
                    if i >= b * SCALE && i - b * SCALE < TAPS && exists(b) {
                        sums[i - b * SCALE] = simd.mul_add_f32s(x, dy[b], sums[i - b * SCALE]);
                    }
                }
            }
            for (tap, sum) in sums.into_iter().enumerate() {
                // In a forward gather a run's taps are neighbours in the kernel.
                let total = self.sums.as_mut_ptr().wrapping_add(run.taps + tap * channels + channel);
                // SAFETY: every tap has the mask's channels.
                unsafe {
                    let sum = simd.add_f32s(load::<S, CHECKED>(simd, mask, total), sum);
                    store::<S, CHECKED>(simd, mask, total, sum);
                }
            }
        }
    }
}
