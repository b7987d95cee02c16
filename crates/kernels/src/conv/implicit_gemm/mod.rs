//! Implicit GEMM: im2col's matrix product without the matrix.
//!
//! ```text
//! forward           y  = W columns         tiles of columns are packed from x, block by block
//! backward-weights  dW = dy columnsᵀ       the same tiles, transposed
//! ```
//! A matrix multiplication packs its operands into panels anyway; here the packing reads the input itself, so the columns
//! never exist. This is for contiguous tensors, where packing copies runs of pixels.
//! Chetlur et al.: "cuDNN: Efficient Primitives for Deep Learning", 2014.

mod panels;
mod passes;

use passes::{Forward, Weights};

use super::gemm_views::columns_cost;
use super::plan::{ConvAlgorithm, ConvPlan, NotApplicable, kernel};
use super::problem::{ConvProblem, ConvTypes, Pass};
use crate::memory_format::MOST_ELEMENTS;
use crate::{Cpu, MemoryFormat};

/// Implicit GEMM.
pub(super) struct ImplicitGemm;

impl ConvAlgorithm for ImplicitGemm {
    fn name(&self) -> &str {
        "implicit-gemm"
    }

    fn revision(&self) -> u32 {
        1
    }

    fn formats(&self) -> &'static [MemoryFormat] {
        &[MemoryFormat::Contiguous]
    }

    fn plan(&self, problem: &ConvProblem, pass: Pass, cpu: &Cpu) -> Result<ConvPlan, NotApplicable> {
        let not = |reason: &str| Err(NotApplicable(reason.into()));
        if problem.types != ConvTypes::F32 {
            return not("for f32 only");
        }
        if problem.format != MemoryFormat::Contiguous {
            return not("for contiguous tensors only");
        }
        // Packed weights, or the sums of every thread, are no larger than a tensor may be.
        if problem.weight_len() > MOST_ELEMENTS / (2 * cpu.threads()) {
            return not("the weights are too large");
        }
        let (workspace, kernel) = match pass {
            Pass::Forward => {
                let forward = Forward::new(problem, cpu);
                (forward.workspace_len(), kernel::<f32>(forward))
            }
            Pass::BackwardWeights => {
                let weights = Weights::new(problem, cpu);
                (weights.workspace_len(), kernel::<f32>(weights))
            }
            Pass::BackwardData => return not("backward-data is its forward: implicit-gemm+swap"),
        };
        let cost = columns_cost(problem, pass, cpu, 0.6);
        Ok(ConvPlan::new(self, (problem, pass), cpu, workspace, kernel).with_cost(cost))
    }
}
