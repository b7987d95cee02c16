//! Backward-weights in contiguous format: vectors of neighbouring outputs of dy times what taps read for them, summed by
//! lane over all outputs, and over the lanes at the end.

use crate::simd::registers;
use pulp::{Simd, WithSimd};

use super::kernel::{Places, Reads, Steps};
use super::rows::InputRows;
use super::strips::{Buffers, Strip, Strips};
use crate::conv::even::even_parts;
use crate::conv::plan::TypedKernel;
use crate::conv::problem::ConvProblem;
use crate::conv::workspace::LINE;
use crate::{Cpu, simd};

/// Backward-weights of one problem in contiguous format.
pub(super) struct BackwardWeightsPlanes {
    problem: ConvProblem,
    lanes: usize,
    /// Gradients lie as [channel][row][vector], sums as [channel][tap][lane].
    strips: Strips,
    /// Floats of one channel's gradients in a strip, with rows filled up to whole vectors, and an extra cache line that keeps
    /// channels from falling into the same sets of the cache.
    pitch: usize,
    input: InputRows,
    /// Offsets of the taps in the copied input.
    taps: Vec<usize>,
    /// Offsets of each vector of outputs of a strip in the copied input and in the gradients of one channel.
    steps: Steps,
}

/// Vectors of outputs of a strip to aim at: enough to pay for loading and storing the sums.
const STRIP: usize = 64;

/// Output channels and taps of the largest block that this many registers hold.
fn block(registers: usize) -> [usize; 2] {
    if registers >= 32 { [5, 4] } else { [4, 2] }
}

impl BackwardWeightsPlanes {
    /// `None` if one output row reads too much.
    pub(super) fn new(problem: &ConvProblem, cpu: &Cpu) -> Option<BackwardWeightsPlanes> {
        let lanes = cpu.isa().lanes();
        let input = InputRows::new(problem, lanes)?;
        let [batch, k, oh, ow] = problem.output_shape();
        let vectors = ow.div_ceil(lanes);
        let strip = (STRIP / vectors).clamp(1, batch * oh);
        let steps = (0..strip)
            .flat_map(|row| (0..vectors).map(move |vector| (row, vector)))
            .map(|(row, vector)| [row * input.len() + vector * lanes, (row * vectors + vector) * lanes]);
        let steps = Steps::new(steps);
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

impl TypedKernel<f32> for BackwardWeightsPlanes {
    fn run(&self, cpu: &Cpu, [x, dy]: [&[f32]; 2], dweight: &mut [f32], workspace: &mut [f32]) {
        let sums = self.strips.sum(cpu, &self.problem, workspace, |rows, buffers| {
            simd::run(cpu.isa(), Strip { weights: self, x, dy, rows, buffers });
        });
        for (to, lanes) in dweight.iter_mut().zip(sums.chunks_exact(self.lanes)) {
            *to = lanes.iter().sum();
        }
    }
}

impl WithSimd for Strip<'_, BackwardWeightsPlanes> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let BackwardWeightsPlanes { problem: p, pitch, input, taps, steps, .. } = self.weights;
        let Buffers { input: copied, gradients, sums } = self.buffers;
        let [_, k, oh, ow] = p.output_shape();
        let padded = ow.next_multiple_of(S::F32_LANES);
        let steps = steps.first(self.rows.len() * padded / S::F32_LANES);
        input.copy_all(self.x, self.rows.clone(), copied);
        for (channel, to) in gradients.chunks_exact_mut(*pitch).enumerate() {
            for (row, to) in self.rows.clone().zip(to.chunks_exact_mut(padded)) {
                let dy = &self.dy[((row / oh * k + channel) * oh + row % oh) * ow..][..ow];
                to[..ow].copy_from_slice(dy);
                to[ow..].fill(0.0);
            }
        }
        let [most_channels, most_taps] = block(registers::<S>());
        for block in even_parts(taps.len(), most_taps) {
            for channels in even_parts(k, most_channels) {
                simd.vectorize(TapBlock {
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
struct TapBlock<'a> {
    gradients: &'a [f32],
    channels: usize,
    /// From one channel's gradients to the next's.
    pitch: usize,
    input: &'a [f32],
    taps: &'a [usize],
    steps: Places<'a>,
    sums: &'a mut [f32],
    /// Vectors from one channel's sums to the next's.
    row: usize,
}

impl WithSimd for TapBlock<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        assert!(self.is_inside(S::F32_LANES), "a block reads beyond its slices");
        let most = block(registers::<S>());
        macro_rules! sized {
            ($($channels:literal: $($taps:literal)*;)*) => {
                match [self.channels, self.taps.len()] {
                    $($([$channels, $taps] if $channels <= most[0] && $taps <= most[1] => {
                        // SAFETY: these are the numbers of channels and taps, and `is_inside` has checked that a vector of
                        // each is inside at the largest places of all steps, and so at each step.
                        unsafe { self.multiply::<S, $channels, $taps>(simd) };
                    })*)*
                    sizes => unreachable!("a block of {sizes:?}"),
                }
            };
        }
        sized!(1: 1 2 3 4; 2: 1 2 3 4; 3: 1 2 3 4; 4: 1 2 3 4; 5: 1 2 3 4;);
    }
}

impl TapBlock<'_> {
    /// Whether all that is read lies in the slices: checked once a block, outside of its loops.
    #[inline(always)]
    fn is_inside(&self, lanes: usize) -> bool {
        let last_tap = self.taps.iter().max().copied().unwrap_or(0);
        // Two vectors, those of the first and of the last tap.
        let input = Reads { count: 2, pitch: last_tap, lanes, len: self.input.len() };
        let gradients = Reads { count: self.channels, pitch: self.pitch, lanes, len: self.gradients.len() };
        self.steps.are_inside([input, gradients])
    }

    /// # Safety
    /// There are P taps. For each step (i, j), `input` has a vector at each tap + i, and `gradients` one at `q * pitch + j` for
    /// each q below Q.
    #[inline(always)]
    unsafe fn multiply<S: Simd, const Q: usize, const P: usize>(self, simd: S) {
        let (gradients, input) = (self.gradients.as_ptr(), self.input.as_ptr());
        let taps: [usize; P] = simd::array(|p| self.taps[p]);
        let zero = simd.splat_f32s(0.0);
        let mut sums = [[zero; P]; Q];
        for &[i, j] in self.steps.iter() {
            let mut values = [zero; P];
            for p in 0..P {
                // SAFETY: the caller promises a vector of the input at each tap + i.
                values[p] = unsafe { input.add(taps[p] + i).cast::<S::f32s>().read_unaligned() };
            }
            let mut channel = gradients.wrapping_add(j);
            for q in 0..Q {
                // SAFETY: `channel` is q times the pitch from j, where the caller promises a vector of the gradients.
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

#[cfg(test)]
mod tests {
    use std::panic::catch_unwind;

    use super::*;
    use crate::Isa;

    /// A block of ones with two taps, the first of which is 0, and two steps, the first of which is [0, 0].
    #[derive(Debug, Clone, Copy)]
    struct Sizes {
        channels: usize,
        pitch: usize,
        tap: usize,
        step: [usize; 2],
        /// The lengths of the input and the gradients.
        lens: [usize; 2],
    }

    /// The sums of such a block.
    fn run(isa: Isa, sizes: Sizes) -> Vec<f32> {
        let Sizes { channels, pitch, tap, step, lens } = sizes;
        let [input, gradients] = lens.map(|len| vec![1.0; len]);
        let mut sums = vec![0.0; 4 * 2 * isa.lanes()];
        let steps = Steps::new([[0, 0], step].into_iter());
        let block = TapBlock {
            gradients: &gradients,
            channels,
            pitch,
            input: &input,
            taps: &[0, tap],
            steps: steps.all(),
            sums: &mut sums,
            row: 2,
        };
        simd::run(isa, block);
        sums
    }

    #[test]
    fn a_block_beyond_its_slices_is_refused() {
        for isa in Isa::available() {
            let lanes = isa.lanes();
            let lens = [7 + 4 + lanes, 2 * 30 + 9 + lanes];
            let fits = Sizes { channels: 3, pitch: 30, tap: 7, step: [4, 9], lens };
            let sums = run(isa, fits);
            assert!(sums[..3 * 2 * lanes].iter().all(|&sum| sum == 2.0), "{isa}");
            let [input, gradients] = lens;
            for sizes in [
                Sizes { channels: 4, ..fits },
                Sizes { channels: 0, ..fits },
                Sizes { pitch: 31, ..fits },
                Sizes { pitch: 1 << 63, ..fits },
                Sizes { pitch: usize::MAX, ..fits },
                Sizes { tap: 8, ..fits },
                Sizes { tap: usize::MAX, ..fits },
                Sizes { step: [5, 9], ..fits },
                Sizes { step: [usize::MAX, 9], ..fits },
                Sizes { step: [4, 10], ..fits },
                Sizes { step: [4, usize::MAX], ..fits },
                Sizes { lens: [input - 1, gradients], ..fits },
                Sizes { lens: [input, gradients - 1], ..fits },
            ] {
                let refusal = catch_unwind(|| run(isa, sizes)).expect_err("it must be refused");
                let reason = refusal.downcast_ref::<&str>().copied().unwrap_or("another reason");
                assert!(reason.contains("beyond its slices"), "{isa} {sizes:?}: {reason}");
            }
        }
    }
}
