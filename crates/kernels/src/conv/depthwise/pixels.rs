//! Forward and backward-data in channels-last: vectors of channels, several pixels of a row at once.

use pulp::{Simd, WithSimd};

use super::blocks::{BLOCK, BlockKernel, Place, Run, each_block, list_runs, load, store};
use super::gather::{Gather, Phase};
use crate::Cpu;
use crate::conv::plan::ConvKernel;
use crate::memory_format::transpose;
use crate::simd;

/// The gather of an N x H x W x C tensor.
pub(super) struct Pixels {
    gather: [Gather; 2],
    channels: usize,
    /// Output rows of a task, over all images.
    rows: usize,
}

impl Pixels {
    pub(super) fn new(gather: [Gather; 2], [batch, channels]: [usize; 2], cpu: &Cpu) -> Pixels {
        // A few tasks a thread, to even out; each reads its first rows' halo again.
        let rows = (batch * gather[0].output).div_ceil(4 * cpu.threads());
        Pixels { gather, channels, rows }
    }

    /// The weights as taps x channels.
    pub(super) fn workspace_len(&self) -> usize {
        self.gather[0].kernel * self.gather[1].kernel * self.channels
    }
}

impl ConvKernel<f32> for Pixels {
    fn run(&self, cpu: &Cpu, [source, weight]: [&[f32]; 2], output: &mut [f32], workspace: &mut [f32]) {
        transpose(cpu, self.channels, weight.len() / self.channels, weight, workspace);
        let weights = &*workspace;
        let row_len = self.gather[1].output * self.channels;
        let work = output.len() * (weight.len() / self.channels);
        cpu.for_each(work, output.chunks_mut(self.rows * row_len).enumerate(), |(task, output)| {
            simd::run(cpu.isa(), Rows { pixels: self, source, weights, first: task * self.rows, output });
        });
    }
}

/// A task: some rows of the output.
struct Rows<'a> {
    pixels: &'a Pixels,
    source: &'a [f32],
    weights: &'a [f32],
    first: usize,
    output: &'a mut [f32],
}

impl WithSimd for Rows<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Rows { pixels, source, weights, first, output } = self;
        let [height, width] = &pixels.gather;
        let channels = pixels.channels;
        let image_len = height.source * width.source * channels;
        let mut runs = Vec::new();
        for (row, output) in output.chunks_mut(width.output * channels).enumerate() {
            let (image, row) = ((first + row) / height.output, (first + row) % height.output);
            let image = &source[image * image_len..][..image_len];
            for (first, phase) in width.phases.iter().enumerate() {
                list_runs(&mut runs, &pixels.gather, channels, (row, phase), image);
                let output = &mut output[first * channels..];
                let line = Line { width, phase, channels, runs: &runs, weights, output };
                each_block(simd, width, phase, channels, line);
            }
        }
    }
}

/// The outputs of one phase of one row.
struct Line<'a> {
    width: &'a Gather,
    phase: &'a Phase,
    channels: usize,
    runs: &'a [Run],
    /// Taps x channels.
    weights: &'a [f32],
    /// From the phase's first output on.
    output: &'a mut [f32],
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
        let weight_step = self.phase.kernel_step() * channels as isize;
        let mut sums = [simd.splat_f32s(0.0); BLOCK];
        for run in self.runs {
            let source = run.source.wrapping_add(first * channels + channel);
            let taps = self.weights.as_ptr().wrapping_add(run.taps + channel);
            let mut weights = [simd.splat_f32s(0.0); TAPS];
            for (tap, weight) in weights.iter_mut().enumerate() {
                // SAFETY: every tap has the mask's channels.
                *weight = unsafe {
                    load::<S, CHECKED>(simd, mask, taps.wrapping_offset(tap as isize * weight_step))
                };
            }
            for i in 0..(BLOCK - 1) * SCALE + TAPS {
                let column = run.column + (first + i * step) as isize;
                if i % SCALE >= TAPS || CHECKED && column as usize >= self.width.source {
                    continue;
                }
                // SAFETY: the column is inside, by the check or by the caller's promise.
                let x = unsafe { load::<S, CHECKED>(simd, mask, source.wrapping_add(i * step * channels)) };
                for b in 0..BLOCK {
                    if i >= b * SCALE && i - b * SCALE < TAPS {
                        sums[b] = simd.mul_add_f32s(x, weights[i - b * SCALE], sums[b]);
                    }
                }
            }
        }
        let output_step = self.width.phases.len() * channels;
        for (b, sum) in sums.into_iter().enumerate() {
            if CHECKED && q + b >= self.phase.count {
                break;
            }
            let to = self.output.as_mut_ptr().wrapping_add((q + b) * output_step + channel);
            // SAFETY: output q + b exists, by the check or by the caller's promise.
            unsafe { store::<S, CHECKED>(simd, mask, to, sum) };
        }
    }
}
