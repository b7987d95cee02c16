//! Runs an algorithm of one memory format on tensors of the other, by copying them.

use std::sync::Arc;

use super::{on_copies, workspace_sum};
use crate::conv::plan::{Accuracy, ConvAlgorithm, ConvPlan, NotApplicable, TypedKernel, kernel_of};
use crate::conv::problem::{ConvProblem, ConvTypes, Pass};
use crate::memory_format::{Extent, convert};
use crate::{Cpu, Element, MemoryFormat};

/// Runs `inner` on copies in the other memory format, if it does not take the problem's own.
pub(super) struct Relayout {
    pub(super) name: String,
    pub(super) inner: Arc<dyn ConvAlgorithm>,
}

impl ConvAlgorithm for Relayout {
    fn name(&self) -> &str {
        &self.name
    }

    fn revision(&self) -> u32 {
        self.inner.revision()
    }

    fn formats(&self) -> &'static [MemoryFormat] {
        match self.inner.formats() {
            [MemoryFormat::ChannelsLast] => &[MemoryFormat::Contiguous],
            _ => &[MemoryFormat::ChannelsLast],
        }
    }

    fn accuracy(&self, types: &ConvTypes) -> Accuracy {
        self.inner.accuracy(types)
    }

    fn is_deterministic(&self) -> bool {
        self.inner.is_deterministic()
    }

    fn plan(&self, problem: &ConvProblem, pass: Pass, cpu: &Cpu) -> Result<ConvPlan, NotApplicable> {
        if self.inner.formats().contains(&problem.format) {
            return Err(NotApplicable(format!("{} takes {} itself", self.inner.name(), problem.format)));
        }
        let format = match problem.format {
            MemoryFormat::Contiguous => MemoryFormat::ChannelsLast,
            MemoryFormat::ChannelsLast => MemoryFormat::Contiguous,
        };
        let other = problem.with(|spec| spec.format = format).map_err(|e| NotApplicable(e.to_string()))?;
        let inner = self.inner.checked_plan(&other, pass, cpu)?;
        let workspace = workspace_sum(&[problem.input_len(), problem.output_len(), inner.workspace_len()])?;
        let operations = inner.operations();
        let kernel = Copies { problem: *problem, inner };
        let copied = 2 * (problem.input_len() + problem.output_len()) * problem.types.input.size();
        let cost = kernel.inner.cost().moving(copied);
        let plan = ConvPlan::new(self, (problem, pass), cpu, workspace, kernel_of(problem, kernel)?);
        Ok(plan.with_cost(cost).with_operations(operations))
    }
}

struct Copies {
    problem: ConvProblem,
    /// The plan in the other format.
    inner: ConvPlan,
}

impl<T: Element> TypedKernel<T> for Copies {
    fn run(&self, cpu: &Cpu, inputs: [&[T]; 2], output: &mut [T], workspace: &mut [T]) {
        let p = &self.problem;
        let [batch, channels, h, w] = p.input_shape();
        let sides = [Extent { batch, channels, spatial: h * w, format: p.format }, p.output_extent()];
        let gather = |extent: &Extent, from: &[T], to: &mut [T]| {
            convert(cpu, extent, from.into(), to.into()).expect("lengths of the problem");
        };
        let scatter = |extent: &Extent, from: &[T], to: &mut [T]| {
            let extent = Extent { format: self.inner.problem().format, ..*extent };
            convert(cpu, &extent, from.into(), to.into()).expect("lengths of the problem");
        };
        on_copies(&self.inner, &sides, inputs, output, workspace, gather, scatter);
    }
}
