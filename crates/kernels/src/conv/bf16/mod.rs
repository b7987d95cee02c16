//! Convolution of bf16 tensors by units of the processor that multiply bf16. Channels-last; weights and sums are f32.
//!
//! ```text
//! forward           y[pixel][k]    = sum over taps and c of x[pixel at tap][c] w[tap][c][k]
//! backward-data     dx[pixel][c]   = sum over taps and k of dy[pixel at tap][k] w[tap][k][c]
//! backward-weights  dw[k][c] of tap = sum over pixels of dy[pixel][k] x[pixel at tap][c]
//! ```
//! Each is a product of small matrices: see [`unit`]. In the first two, a row of the first factor is what a target pixel reads, gathered
//! unless it lies in the source as it is needed, and the second factor is a panel of weights, rounded to bf16. In the last, the first
//! factor is dy transposed, and the second is x in pairs of pixels.
//! Weights are rounded to bf16. Products of two bf16 are exact, and are summed in f32; numbers that are too small to be normal count as
//! zero, as these units have it.

mod correlate;
mod lines;
mod pack;
pub(super) mod split;
mod taps;
mod unit;
mod weights;

use std::sync::Arc;

use correlate::Correlate;
use half::bf16;
use unit::Target;
pub(crate) use unit::Unit;
use weights::WeightSums;

use super::direct::check_shape;
use super::plan::{ConvAlgorithm, ConvKernel, ConvPlan, Cost, NotApplicable};
use super::problem::{ConvProblem, ConvTypes, Pass};
use crate::memory_format::MOST_ELEMENTS;
use crate::{Cpu, DType, MemoryFormat, Slice, SliceMut};

/// Convolution by one of the units.
pub(super) struct Bf16(pub(super) Unit);

enum Kernel {
    Correlate(Correlate),
    Weights(WeightSums),
}

impl ConvAlgorithm for Bf16 {
    fn name(&self) -> &'static str {
        match self.0 {
            Unit::Dot => "bf16-dot",
            Unit::Tiles => "bf16-amx",
        }
    }

    fn revision(&self) -> u32 {
        3
    }

    fn formats(&self) -> &'static [MemoryFormat] {
        &[MemoryFormat::ChannelsLast]
    }

    fn plan(&self, problem: &ConvProblem, pass: Pass, cpu: &Cpu) -> Result<ConvPlan, NotApplicable> {
        check(problem, DType::BF16, (self.0, cpu))?;
        let (len, kernel) = kernel(problem, pass, (self.0, cpu)).ok_or_else(too_large)?;
        let plan = ConvPlan::new(self, (problem, pass), cpu, len, Arc::new(kernel));
        Ok(plan.with_cost(cost(self.0, problem, pass)))
    }
}

/// Refuses tensors of another type, a CPU without the unit, and shapes that no kernel here takes.
fn check(problem: &ConvProblem, dtype: DType, (unit, cpu): (Unit, &Cpu)) -> Result<(), NotApplicable> {
    if problem.types != ConvTypes::of(dtype) {
        return Err(NotApplicable(format!("for {dtype} only")));
    }
    if !unit.is_in(cpu) {
        return Err(NotApplicable(format!("needs {}", unit.name())));
    }
    check_shape(problem)
}

fn too_large() -> NotApplicable {
    NotApplicable("the workspace is too large".into())
}

/// The floats of its workspace, and the kernel; none if the workspace is too large.
fn kernel(problem: &ConvProblem, pass: Pass, (unit, cpu): (Unit, &Cpu)) -> Option<(usize, Kernel)> {
    let planned = match pass {
        Pass::BackwardWeights => {
            let sums = WeightSums::new(problem, unit, cpu)?;
            (sums.workspace_len()?, Kernel::Weights(sums))
        }
        _ => {
            let correlate = Correlate::new(problem, pass, (unit, cpu))?;
            (correlate.workspace_len(cpu)?, Kernel::Correlate(correlate))
        }
    };
    Some(planned).filter(|(len, _)| *len <= MOST_ELEMENTS)
}

/// In units of the f32 peak: `vdpbf16ps` may do twice as much, tiles more, but for the copies.
fn cost(unit: Unit, problem: &ConvProblem, pass: Pass) -> Cost {
    let across = match pass {
        Pass::BackwardData => problem.group_in_channels(),
        _ => problem.group_out_channels(),
    };
    let filled = across as f64 / across.next_multiple_of(16) as f64;
    let peak = match unit {
        Unit::Dot => 1.2,
        Unit::Tiles => 3.0,
    };
    Cost::direct(problem, peak * filled)
}

impl Kernel {
    /// Forward, or backward-data. The target is in bf16 or in f32.
    fn correlate<T: Target>(
        &self,
        cpu: &Cpu,
        operands: (&[bf16], &[f32]),
        target: &mut [T],
        workspace: &mut [f32],
    ) {
        match self {
            Kernel::Correlate(correlate) => correlate.run(cpu, operands, target, workspace),
            Kernel::Weights(_) => unreachable!("a kernel of backward-weights"),
        }
    }

    /// Backward-weights.
    fn sum(&self, cpu: &Cpu, operands: [&[bf16]; 2], dweight: &mut [f32], workspace: &mut [f32]) {
        match self {
            Kernel::Weights(sums) => sums.run(cpu, operands, dweight, workspace),
            Kernel::Correlate(_) => unreachable!("a kernel of forward or backward-data"),
        }
    }
}

impl ConvKernel for Kernel {
    fn types(&self) -> ConvTypes {
        ConvTypes::of(DType::BF16)
    }

    fn run(
        &self,
        cpu: &Cpu,
        [a, b]: [Slice<'_>; 2],
        output: SliceMut<'_>,
        workspace: SliceMut<'_>,
    ) -> crate::Result<()> {
        match self {
            Kernel::Correlate(_) => {
                self.correlate::<bf16>(cpu, (a.of()?, b.of()?), output.of()?, workspace.of()?)
            }
            Kernel::Weights(_) => self.sum(cpu, [a.of()?, b.of()?], output.of()?, workspace.of()?),
        }
        Ok(())
    }
}
