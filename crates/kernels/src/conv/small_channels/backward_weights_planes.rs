//! Backward-weights in contiguous format: vectors of neighbouring outputs of dy times what taps read for them, summed by
//! lane over all outputs, and over the lanes at the end.

use std::ops::Range;

use pulp::{Simd, WithSimd};

use super::kernel::even_runs;
use super::rows::InputRows;
use super::strips::{Buffers, Strips};
use crate::conv::plan::ConvKernel;
use crate::conv::problem::ConvProblem;
use crate::conv::workspace::LINE;
use crate::{Cpu, simd};

/// Backward-weights of one problem in contiguous format.
pub(super) struct BackwardWeightsPlanes {
    problem: ConvProblem,
    lanes: usize,
    /// Sums are K x T vectors.
    strips: Strips,
    /// Floats of one channel's gradients in a strip, rows filled up to whole vectors, and a line that keeps channels from
    /// falling into the same sets of the cache.
    pitch: usize,
    input: InputRows,
    /// Offsets of the taps in the copied input.
    taps: Vec<usize>,
    /// Offsets of each vector of outputs of a strip in the copied input and in the gradients of one channel.
    steps: Vec<[usize; 2]>,
}

/// Vectors of outputs of a strip that are aimed at: enough to pay for loading and storing the sums.
const STRIP: usize = 64;

/// Output channels and taps of the largest block for vectors of this many lanes: what 32 or 16 registers hold.
fn block(lanes: usize) -> [usize; 2] {
    if lanes == 16 { [5, 4] } else { [4, 2] }
}

impl BackwardWeightsPlanes {
    /// None if one output row reads too much.
    pub(super) fn new(problem: &ConvProblem, cpu: &Cpu) -> Option<BackwardWeightsPlanes> {
        let lanes = simd::lanes(cpu.isa());
        let input = InputRows::new(problem, lanes)?;
        let [batch, k, oh, ow] = problem.output_shape();
        let vectors = ow.div_ceil(lanes);
        let strip = (STRIP / vectors).clamp(1, batch * oh);
        let steps = (0..strip)
            .flat_map(|row| (0..vectors).map(move |vector| (row, vector)))
            .map(|(row, vector)| [row * input.len() + vector * lanes, (row * vectors + vector) * lanes])
            .collect();
        let taps = input.taps();
        let pitch = (strip * vectors * lanes).next_multiple_of(LINE) + LINE;
        let lens = [problem.weight_len() * lanes, strip * input.len(), k * pitch];
        let strips = Strips::new(problem, cpu, strip, lens);
        Some(BackwardWeightsPlanes { problem: *problem, lanes, strips, pitch, input, taps, steps })
    }

    pub(super) fn workspace_len(&self) -> usize {
        self.strips.workspace_len()
    }
}

impl ConvKernel<f32> for BackwardWeightsPlanes {
    fn run(&self, cpu: &Cpu, [x, dy]: [&[f32]; 2], dweight: &mut [f32], workspace: &mut [f32]) {
        let sums = self.strips.sum(cpu, &self.problem, workspace, |rows, buffers| {
            simd::run(cpu.isa(), Strip { backward: self, x, dy, rows, buffers });
        });
        for (to, lanes) in dweight.iter_mut().zip(sums.chunks_exact(self.lanes)) {
            *to = lanes.iter().sum();
        }
    }
}

/// Adds one strip of rows to the sums.
struct Strip<'a> {
    backward: &'a BackwardWeightsPlanes,
    x: &'a [f32],
    dy: &'a [f32],
    /// Output rows, counted over all images.
    rows: Range<usize>,
    /// Gradients lie as [channel][row][vector], sums as [channel][tap][lane].
    buffers: Buffers<'a>,
}

impl WithSimd for Strip<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let BackwardWeightsPlanes { problem: p, pitch, input, taps, steps, .. } = self.backward;
        let Buffers { input: copied, gradients, sums } = self.buffers;
        let [_, k, oh, ow] = p.output_shape();
        let padded = ow.next_multiple_of(S::F32_LANES);
        let steps = &steps[..self.rows.len() * padded / S::F32_LANES];
        let image = p.input_len() / p.batch;
        for (row, to) in self.rows.clone().zip(copied.chunks_exact_mut(input.len())) {
            input.copy(&self.x[row / oh * image..][..image], row % oh, to);
        }
        for (channel, to) in gradients.chunks_exact_mut(*pitch).enumerate() {
            for (row, to) in self.rows.clone().zip(to.chunks_exact_mut(padded)) {
                let dy = &self.dy[((row / oh * k + channel) * oh + row % oh) * ow..][..ow];
                to[..ow].copy_from_slice(dy);
                to[ow..].fill(0.0);
            }
        }
        let [most_channels, most_taps] = block(S::F32_LANES);
        for block in even_runs(taps.len(), most_taps) {
            for channels in even_runs(k, most_channels) {
                simd.vectorize(Block {
                    gradients: &gradients[channels.start * pitch..],
                    channels: channels.len(),
                    pitch: *pitch,
                    input: copied,
                    taps: &taps[block.clone()],
                    steps,
                    sums: &mut sums[(channels.start * taps.len() + block.start) * S::F32_LANES..],
                    row: taps.len(),
                });
            }
        }
    }
}

/// `sums[q][p] += sum over (i, j) in steps of gradients[q * pitch + j..] * input[taps[p] + i..]`, all of them vectors.
struct Block<'a> {
    gradients: &'a [f32],
    channels: usize,
    /// From one channel's gradients to the next's.
    pitch: usize,
    input: &'a [f32],
    taps: &'a [usize],
    steps: &'a [[usize; 2]],
    sums: &'a mut [f32],
    /// Vectors from one channel's sums to the next's.
    row: usize,
}

impl WithSimd for Block<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let most = block(S::F32_LANES);
        macro_rules! sized {
            ($($channels:literal: $($taps:literal)*;)*) => {
                match [self.channels, self.taps.len()] {
                    $($([$channels, $taps] if $channels <= most[0] && $taps <= most[1] => {
                        self.multiply::<S, $channels, $taps>(simd);
                    })*)*
                    sizes => unreachable!("a block of {sizes:?}"),
                }
            };
        }
        sized!(1: 1 2 3 4; 2: 1 2 3 4; 3: 1 2 3 4; 4: 1 2 3 4; 5: 1 2 3 4;);
    }
}

impl Block<'_> {
    fn is_inside(&self, lanes: usize) -> bool {
        let last_tap = self.taps.iter().max().copied().unwrap_or(0);
        let last_channel = (self.channels - 1) * self.pitch;
        let inside = |&[i, j]: &[usize; 2]| {
            last_tap + i + lanes <= self.input.len() && last_channel + j + lanes <= self.gradients.len()
        };
        self.steps.iter().all(inside)
    }

    #[inline(always)]
    fn multiply<S: Simd, const Q: usize, const P: usize>(self, simd: S) {
        debug_assert!(self.is_inside(S::F32_LANES));
        let (gradients, input) = (self.gradients.as_ptr(), self.input.as_ptr());
        let taps: [usize; P] = std::array::from_fn(|p| self.taps[p]);
        let zero = simd.splat_f32s(0.0);
        let mut sums = [[zero; P]; Q];
        for &[i, j] in self.steps {
            let mut values = [zero; P];
            for p in 0..P {
                // SAFETY: each step of each tap is a vector inside the input, which tests assert above.
                values[p] = unsafe { input.add(taps[p] + i).cast::<S::f32s>().read_unaligned() };
            }
            let mut channel = gradients.wrapping_add(j);
            for q in 0..Q {
                // SAFETY: likewise of each channel inside the gradients.
                let gradient = unsafe { channel.cast::<S::f32s>().read_unaligned() };
                channel = channel.wrapping_add(self.pitch);
                for p in 0..P {
                    sums[q][p] = simd.mul_add_f32s(gradient, values[p], sums[q][p]);
                }
            }
        }
        let (to, _) = S::as_mut_simd_f32s(self.sums);
        for q in 0..Q {
            for p in 0..P {
                let to = &mut to[q * self.row + p];
                *to = simd.add_f32s(*to, sums[q][p]);
            }
        }
    }
}
