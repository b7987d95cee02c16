//! Backward-weights in channels-last: blocks of taps x output channels, summed over the outputs of a strip of rows.

use pulp::{Simd, WithSimd};

use super::kernel::{Ahead, OuterProductBlock, Steps, block_rows};
use super::place_in_filter;
use super::rows::InputRows;
use super::strips::{Buffers, Strip, Strips};
use crate::conv::even::even_parts;
use crate::conv::plan::TypedKernel;
use crate::conv::problem::ConvProblem;
use crate::gemm::Update;
use crate::{Cpu, simd};

/// Backward-weights of one problem in channels-last.
pub(super) struct BackwardWeights {
    problem: ConvProblem,
    /// Sums lie as [tap][K], K rounded up to whole vectors; gradients are copied where they are not whole vectors.
    strips: Strips,
    input: InputRows,
    /// From the gradients of one output to those of the next, as the kernel reads them.
    pitch: usize,
    /// How many taps lie together in the copied input: S * C, or C where dilated.
    run: usize,
    /// Offsets of the taps in the copied input.
    taps: Vec<usize>,
    /// Offsets of each output of a strip in the copied input and in the gradients.
    steps: Steps,
}

/// The number of a strip's gradients to aim at: few enough for two strips and the sums in the L2 cache.
const GRADIENTS: usize = 1 << 15;

/// The size of a strip's copied input to aim at, in floats, for the same reason.
const INPUT: usize = 1 << 16;

/// The fewest and the most outputs of a strip, before rounding to whole rows: enough to pay for loading and storing the sums.
const STRIP: [usize; 2] = [128, 512];

impl BackwardWeights {
    /// `None` if one output row reads too much.
    pub(super) fn new(problem: &ConvProblem, cpu: &Cpu) -> Option<BackwardWeights> {
        let lanes = cpu.isa().lanes();
        let input = InputRows::new(problem, 0)?;
        let [batch, k, oh, ow] = problem.output_shape();
        let outputs = (GRADIENTS / k).clamp(STRIP[0], STRIP[1]);
        let strip = (outputs / ow).min(INPUT / input.len()).clamp(1, batch * oh);
        let pitch = k.next_multiple_of(lanes);
        let steps = (0..strip)
            .flat_map(|row| (0..ow).map(move |column| (row, column)))
            .map(|(row, column)| [row * input.len() + column * input.step(), (row * ow + column) * pitch]);
        let steps = Steps::new(steps);
        let taps = input.taps();
        let run = match problem.width.dilation {
            1 => problem.width.kernel * problem.in_channels,
            _ => problem.in_channels,
        };
        let gradients = if pitch == k { 0 } else { strip * ow * pitch };
        let strips = Strips::new(problem, cpu, strip, [taps.len() * pitch, strip * input.len(), gradients]);
        Some(BackwardWeights { problem: *problem, strips, input, pitch, run, taps, steps })
    }

    pub(super) fn workspace_len(&self) -> usize {
        self.strips.workspace_len()
    }
}

impl TypedKernel<f32> for BackwardWeights {
    fn run(&self, cpu: &Cpu, [x, dy]: [&[f32]; 2], dweight: &mut [f32], workspace: &mut [f32]) {
        let p = &self.problem;
        let sums = self.strips.sum(cpu, p, workspace, |rows, buffers| {
            simd::run(cpu.isa(), Strip { weights: self, x, dy, rows, buffers });
        });
        for (k, filter) in dweight.chunks_exact_mut(self.taps.len()).enumerate() {
            for (tap, sums) in sums.chunks_exact(self.pitch).take(self.taps.len()).enumerate() {
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

impl WithSimd for Strip<'_, BackwardWeights> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let BackwardWeights { problem: p, input, pitch, run, taps, steps, .. } = self.weights;
        let Buffers { input: copied, gradients, sums } = self.buffers;
        let [_, k, _, ow] = p.output_shape();
        let outputs = self.rows.len() * ow;
        let dy = &self.dy[self.rows.start * ow * k..][..outputs * k];
        let gradients = if *pitch == k { dy } else { self.weights.whole_vectors(dy, gradients) };
        let next = self.rows.end..self.rows.end + self.rows.len();
        let dy_after = &self.dy[next.start * ow * k..];
        let dy_next = &dy_after[..dy_after.len().min(outputs * k)];
        let mut ahead = Ahead([dy_next, input.fresh(self.x, next)]);
        input.copy_all(self.x, self.rows, copied);
        let width = 2 * S::F32_LANES;
        for first in (0..*pitch).step_by(width) {
            for (taps, sums) in taps.chunks_exact(*run).zip(sums.chunks_exact_mut(run * pitch)) {
                for block in even_parts(*run, block_rows::<S>()) {
                    simd.vectorize(OuterProductBlock {
                        a: &copied[taps[block.start]..],
                        rows: block.len(),
                        stride: 1,
                        b: &gradients[first..],
                        steps: steps.first(outputs),
                        out: &mut sums[block.start * pitch + first..],
                        pitch: *pitch,
                        columns: width.min(pitch - first),
                        update: Update::Add,
                        streaming: None,
                        ahead: ahead.next(outputs),
                    });
                }
            }
        }
    }
}
