//! Runs an algorithm that computes in f32 on tensors that are stored in 16 bits, by copying them.

use std::sync::Arc;

use super::workspace_sum;
use crate::conv::plan::{Accuracy, ConvAlgorithm, ConvKernel, ConvOperands, ConvPlan, NotApplicable};
use crate::conv::problem::{ConvProblem, ConvTypes, Pass};
use crate::convert::convert;
use crate::{Cpu, MemoryFormat, Slice, SliceMut};

/// Runs the first of `inner` that applies on copies in the type in which kernels compute.
pub(super) struct Widen {
    pub(super) name: String,
    pub(super) inner: Vec<Arc<dyn ConvAlgorithm>>,
}

impl ConvAlgorithm for Widen {
    fn name(&self) -> &str {
        &self.name
    }

    fn revision(&self) -> u32 {
        self.inner[0].revision()
    }

    fn accuracy(&self) -> Accuracy {
        self.inner[0].accuracy()
    }

    fn is_deterministic(&self) -> bool {
        self.inner[0].is_deterministic()
    }

    fn formats(&self) -> &'static [MemoryFormat] {
        &[MemoryFormat::Contiguous, MemoryFormat::ChannelsLast]
    }

    fn plan(&self, problem: &ConvProblem, pass: Pass, cpu: &Cpu) -> Result<ConvPlan, NotApplicable> {
        let types = problem.types;
        if types.are_one() {
            return Err(NotApplicable(format!("kernels compute in {types} itself")));
        }
        let wide = problem.with(|spec| spec.types = ConvTypes::all(types.accumulator));
        let wide = wide.map_err(|error| NotApplicable(error.to_string()))?;
        let mut reasons = Vec::new();
        let plans = self.inner.iter().map(|inner| inner.checked_plan(&wide, pass, cpu));
        let inner = plans.filter_map(|plan| plan.map_err(|reason| reasons.push(reason)).ok()).next();
        let inner =
            inner.ok_or_else(|| NotApplicable(format!("in {}: {}", types.accumulator, reasons[0])))?;
        let (x, y) = (wide.input_len(), wide.output_len());
        let workspace = workspace_sum(&[x, y, inner.workspace_len()])?;
        // The copies are read as often as the tensors would be, and are written once.
        let cost = inner.cost().moving((x + y) * (types.input.size() + types.accumulator.size()));
        let operations = inner.operations();
        let kernel = Arc::new(Copies { types, inner });
        let plan = ConvPlan::new(self, (problem, pass), cpu, workspace, kernel);
        Ok(plan.with_cost(cost).with_operations(operations))
    }
}

struct Copies {
    types: ConvTypes,
    /// The plan for the copies.
    inner: ConvPlan,
}

impl ConvKernel for Copies {
    fn types(&self) -> ConvTypes {
        self.types
    }

    fn run(
        &self,
        cpu: &Cpu,
        [a, b]: [Slice<'_>; 2],
        output: SliceMut<'_>,
        mut workspace: SliceMut<'_>,
    ) -> crate::Result<()> {
        let inner = &self.inner;
        let (x, y) = (inner.problem().input_len(), inner.problem().output_len());
        let [a_len, b_len] = match inner.pass() {
            Pass::Forward => [x, y],
            Pass::BackwardData => [y, x],
            Pass::BackwardWeights => [x, y],
        };
        let (copies, scratch) = workspace.reborrow().split_at(a_len + b_len);
        let (mut first, mut second) = copies.split_at(a_len);
        convert(cpu, a, first.reborrow())?;
        let first = first.into_slice();
        match inner.pass() {
            Pass::Forward => inner.run(ConvOperands::forward(first, b, second.reborrow()), scratch)?,
            Pass::BackwardData => {
                inner.run(ConvOperands::backward_data(first, b, second.reborrow()), scratch)?;
            }
            Pass::BackwardWeights => {
                convert(cpu, b, second.reborrow())?;
                return inner.run(ConvOperands::backward_weights(first, second.as_slice(), output), scratch);
            }
        }
        convert(cpu, second.as_slice(), output)
    }
}
