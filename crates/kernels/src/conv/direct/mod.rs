//! Direct convolution: registers hold a block of outputs, and the input is read in place. f32, channels-last.
//!
//! ```text
//! forward           y[pixel][k]    = sum over taps and c of x[pixel at tap][c] w[tap][c][k]
//! backward-data     dx[pixel][c]   = sum over taps and k of dy[pixel at tap][k] w[tap][k][c]
//! backward-weights  dw[tap][c][k]  = sum over pixels of x[pixel at tap][c] dy[pixel][k]
//! ```
//! A tap is a kernel element (r, s). Forward and backward-data are one loop (see [`correlate`]): a block is some target
//! pixels by a few vectors of output channels. For each tap, an indirection table says where the source pixel of each target
//! pixel lies, so that a block may continue across rows and images. Backward-data with a stride is one such correlation for
//! each residue of the target's position, with only the taps that reach it: no product is wasted. With groups, a task first
//! copies what it reads, a few groups at a time: see [`slab`]. Groups that are too narrow for a vector are joined into one,
//! with weights of zero between different groups (so infinities and NaNs of one reach the others). Backward-weights of 1 x 1
//! kernels packs both tensors: see [`pointwise_weights`].
//! Dukhan: "The Indirect Convolution Algorithm", 2019. Georganas et al.: "Anatomy of High-Performance Deep Learning
//! Convolutions on SIMD Architectures", SC 2018.

// Register blocks are written with their indices, as the formulas are.
#![allow(clippy::needless_range_loop)]

mod correlate;
pub(super) mod geometry;
mod panels;
mod pointwise_weights;
mod registers;
mod slab;
mod weights;

use correlate::Correlate;
use pointwise_weights::PointwiseSums;
use weights::WeightSums;

use super::plan::{ConvAlgorithm, ConvPlan, Cost, NotApplicable, kernel};
use super::problem::{ConvProblem, ConvTypes, Pass};
use crate::memory_format::MOST_ELEMENTS;
use crate::{Cpu, MemoryFormat};

/// Direct convolution in registers.
pub(super) struct Direct;

/// The most kernel elements: an indirection table is held for a few hundred pixels.
const MOST_TAPS: usize = 1 << 14;

/// Refuses what neither this algorithm nor those for bf16 take: other formats, depthwise convolution, very large kernels.
pub(in crate::conv) fn check_shape(problem: &ConvProblem) -> Result<(), NotApplicable> {
    let not = |reason: &str| Err(NotApplicable(reason.into()));
    if problem.format != MemoryFormat::ChannelsLast {
        return not("for channels-last only");
    }
    if problem.group_in_channels() == 1 && problem.group_out_channels() == 1 {
        return not("needs more than one channel a group");
    }
    let taps = problem.height.kernel.checked_mul(problem.width.kernel);
    if taps.is_none_or(|taps| taps > MOST_TAPS) {
        return not("needs a kernel of at most 16384 elements");
    }
    Ok(())
}

impl ConvAlgorithm for Direct {
    fn name(&self) -> &'static str {
        "direct"
    }

    fn revision(&self) -> u32 {
        7
    }

    fn formats(&self) -> &'static [MemoryFormat] {
        &[MemoryFormat::ChannelsLast]
    }

    fn plan(&self, problem: &ConvProblem, pass: Pass, cpu: &Cpu) -> Result<ConvPlan, NotApplicable> {
        let not = |reason: &str| Err(NotApplicable(reason.into()));
        if problem.types != ConvTypes::F32 {
            return not("for f32 only");
        }
        check_shape(problem)?;
        let (workspace, kernel) = match pass {
            Pass::Forward | Pass::BackwardData => {
                let correlate = Correlate::new(problem, pass, cpu);
                (correlate.workspace_len(cpu), kernel::<f32>(correlate))
            }
            Pass::BackwardWeights if PointwiseSums::takes(problem) => {
                let sums = PointwiseSums::new(problem, cpu);
                (sums.workspace_len(), kernel::<f32>(sums))
            }
            Pass::BackwardWeights => {
                let sums = WeightSums::new(problem, cpu);
                (sums.workspace_len(), kernel::<f32>(sums))
            }
        };
        match workspace.filter(|&len| len <= MOST_ELEMENTS) {
            Some(len) => {
                let plan = ConvPlan::new(self, (problem, pass), cpu, len, kernel);
                Ok(plan.with_cost(cost(problem, pass, cpu)))
            }
            None => not("the workspace is too large"),
        }
    }
}

/// Short sums and vectors that are not full cost most.
fn cost(problem: &ConvProblem, pass: Pass, cpu: &Cpu) -> Cost {
    let (c, k) = (problem.group_in_channels(), problem.group_out_channels());
    let (sum, across) = if pass == Pass::BackwardData { (k, c) } else { (c, k) };
    let filled = across as f64 / across.next_multiple_of(cpu.isa().lanes()) as f64;
    let sum = sum * registers::joined(cpu.isa(), problem.groups, across, false);
    Cost::direct(problem, 0.85 * filled * sum as f64 / (sum as f64 + 6.0))
}
