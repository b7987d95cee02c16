//! Backward-weights in channels-last: blocks of taps x output channels, summed over the outputs of a strip of rows.

use std::ops::Range;

use pulp::{Simd, WithSimd};

use super::kernel::{Block, block_rows, even_runs};
use super::rows::InputRows;
use super::{LINE, aligned, place_in_filter};
use crate::conv::gemm_views::reduce_partials;
use crate::conv::plan::ConvKernel;
use crate::conv::problem::ConvProblem;
use crate::gemm::Update;
use crate::{Cpu, simd};

/// Backward-weights of one problem in channels-last.
pub(super) struct BackwardWeights {
    problem: ConvProblem,
    workers: usize,
    input: InputRows,
    /// Output rows of a strip.
    strip: usize,
    /// From the gradients of one output to those of the next, as the kernel reads them.
    pitch: usize,
    /// Runs of taps that lie together in the copied input: S * C of them, or C where dilated.
    run: usize,
    /// Offsets of the taps in the copied input.
    taps: Vec<usize>,
    /// Offsets of each output of a strip in the copied input and in the gradients.
    steps: Vec<[usize; 2]>,
}

/// Outputs of a strip that are aimed at: enough to pay for loading and storing the sums, few enough for the L1 cache.
const STRIP: usize = 128;

impl BackwardWeights {
    /// None if one output row reads too much.
    pub(super) fn new(problem: &ConvProblem, cpu: &Cpu) -> Option<BackwardWeights> {
        let lanes = simd::lanes(cpu.isa());
        let input = InputRows::new(problem, 0)?;
        let [batch, k, oh, ow] = problem.output_shape();
        let strip = (STRIP / ow).clamp(1, batch * oh);
        let pitch = k.next_multiple_of(lanes);
        let steps = (0..strip)
            .flat_map(|row| (0..ow).map(move |column| (row, column)))
            .map(|(row, column)| [row * input.len() + column * input.step(), (row * ow + column) * pitch])
            .collect();
        let workers = cpu.threads().min(batch * oh);
        let taps = input.taps();
        let run = match problem.width.dilation {
            1 => problem.width.kernel * problem.in_channels,
            _ => problem.in_channels,
        };
        Some(BackwardWeights { problem: *problem, workers, input, strip, pitch, run, taps, steps })
    }

    /// Floats of a worker's sums, T x K with K rounded up to whole vectors.
    fn sums_len(&self) -> usize {
        (self.taps.len() * self.pitch).next_multiple_of(LINE)
    }

    fn input_len(&self) -> usize {
        (self.strip * self.input.len()).next_multiple_of(LINE)
    }

    /// Floats of the gradients of a strip, copied to whole vectors.
    fn gradients_len(&self) -> usize {
        if self.pitch == self.problem.out_channels {
            0
        } else {
            (self.steps.len() * self.pitch).next_multiple_of(LINE)
        }
    }

    fn worker_len(&self) -> usize {
        self.input_len() + self.gradients_len()
    }

    pub(super) fn workspace_len(&self) -> usize {
        LINE + self.workers * (self.sums_len() + self.worker_len())
    }
}

impl ConvKernel<f32> for BackwardWeights {
    fn run(&self, cpu: &Cpu, [x, dy]: [&[f32]; 2], dweight: &mut [f32], workspace: &mut [f32]) {
        let p = &self.problem;
        let [batch, _, oh, _] = p.output_shape();
        let rows = (batch * oh).div_ceil(self.workers);
        let (all_sums, scratch) = aligned(workspace).split_at_mut(self.workers * self.sums_len());
        let tasks = all_sums
            .chunks_exact_mut(self.sums_len())
            .zip(scratch.chunks_exact_mut(self.worker_len()))
            .enumerate();
        cpu.for_each(p.flops() as usize, tasks, |(worker, (sums, scratch))| {
            let rows = worker * rows..((worker + 1) * rows).min(batch * oh);
            let (input, gradients) = scratch.split_at_mut(self.input_len());
            sums.fill(0.0);
            for first in rows.clone().step_by(self.strip) {
                let rows = first..(first + self.strip).min(rows.end);
                simd::run(cpu.isa(), Strip { backward: self, x, dy, rows, input, gradients, sums });
            }
        });
        reduce_partials(all_sums, self.sums_len());
        for (k, filter) in dweight.chunks_exact_mut(self.taps.len()).enumerate() {
            for (tap, sums) in all_sums.chunks_exact(self.pitch).take(self.taps.len()).enumerate() {
                filter[place_in_filter(p, tap)] = sums[k];
            }
        }
    }
}

impl BackwardWeights {
    /// Copies gradients to rows of whole vectors, filled up with zeros.
    fn whole_vectors<'a>(&self, dy: &[f32], to: &'a mut [f32]) -> &'a [f32] {
        let k = self.problem.out_channels;
        let outputs = dy.len() / k;
        for (dy, to) in dy.chunks_exact(k).zip(to.chunks_exact_mut(self.pitch)) {
            to[..k].copy_from_slice(dy);
            to[k..].fill(0.0);
        }
        &to[..outputs * self.pitch]
    }
}

/// Adds one strip of rows to the sums.
struct Strip<'a> {
    backward: &'a BackwardWeights,
    x: &'a [f32],
    dy: &'a [f32],
    /// Output rows, counted over all images.
    rows: Range<usize>,
    input: &'a mut [f32],
    gradients: &'a mut [f32],
    /// [tap][K].
    sums: &'a mut [f32],
}

impl WithSimd for Strip<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let BackwardWeights { problem: p, input, pitch, run, taps, steps, .. } = self.backward;
        let [_, k, oh, ow] = p.output_shape();
        let outputs = self.rows.len() * ow;
        let dy = &self.dy[self.rows.start * ow * k..][..outputs * k];
        let gradients = if *pitch == k { dy } else { self.backward.whole_vectors(dy, self.gradients) };
        let image = p.input_len() / p.batch;
        for (row, to) in self.rows.zip(self.input.chunks_exact_mut(input.len())) {
            input.copy(&self.x[row / oh * image..][..image], row % oh, to);
        }
        let width = 2 * S::F32_LANES;
        for first in (0..*pitch).step_by(width) {
            for (taps, sums) in taps.chunks_exact(*run).zip(self.sums.chunks_exact_mut(run * pitch)) {
                for block in even_runs(*run, block_rows(S::F32_LANES)) {
                    simd.vectorize(Block {
                        a: &self.input[taps[block.start]..],
                        rows: block.len(),
                        stride: 1,
                        b: &gradients[first..],
                        steps: &steps[..outputs],
                        out: &mut sums[block.start * pitch + first..],
                        pitch: *pitch,
                        columns: width.min(pitch - first),
                        update: Update::Add,
                    });
                }
            }
        }
    }
}
