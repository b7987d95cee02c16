//! A dilated convolution computed as one without dilation.
//!
//! ```text
//! y[o] = sum over k of x[o + d k - pad] * w[k]        o = a + d t:   y_a[t] = sum over k of x_a[t + k] * w[k]
//! ```
//! The outputs of one phase a (every d-th output) read inputs of one phase only. So each image splits into as many small
//! images as there are phases, and algorithms that support no dilation, such as Winograd's, can run on those.

use std::sync::Arc;

use super::strided::{Axes, copy};
use super::{on_copies, workspace_sum};
use crate::conv::plan::{Accuracy, ConvAlgorithm, ConvPlan, NotApplicable, TypedKernel, kernel_of};
use crate::conv::problem::{ConvAxis, ConvProblem, ConvSpec, ConvTypes, Pass};
use crate::{Cpu, Element, MemoryFormat};

/// Runs `inner`, which takes no dilation, on the phases, in a format that it takes.
pub(super) struct Phases {
    pub(super) name: String,
    pub(super) inner: Arc<dyn ConvAlgorithm>,
}

impl ConvAlgorithm for Phases {
    fn name(&self) -> &str {
        &self.name
    }

    fn revision(&self) -> u32 {
        self.inner.revision()
    }

    fn accuracy(&self, types: &ConvTypes) -> Accuracy {
        self.inner.accuracy(types)
    }

    fn is_deterministic(&self) -> bool {
        self.inner.is_deterministic()
    }

    fn plan(&self, problem: &ConvProblem, pass: Pass, cpu: &Cpu) -> Result<ConvPlan, NotApplicable> {
        let axes = [&problem.height, &problem.width];
        if axes.iter().all(|axis| axis.dilation == 1) {
            return Err(NotApplicable("there is no dilation".into()));
        }
        if axes.iter().any(|axis| axis.dilation > 1 && axis.stride > 1) {
            return Err(NotApplicable("needs stride 1 where there is a dilation".into()));
        }
        let formats = self.inner.formats();
        let format = if formats.contains(&problem.format) { problem.format } else { formats[0] };
        let related = of_phases(problem, format)?;
        let inner = self.inner.checked_plan(&related, pass, cpu)?;
        let copies = [related.input_len(), related.output_len()];
        let workspace = workspace_sum(&[copies[0], copies[1], inner.workspace_len()])?;
        // Elements that do not lie side by side are copied at a fraction of the speed of a plain copy.
        let cost = inner.cost().moving(4 * copies.iter().sum::<usize>() * problem.types.input.size());
        let operations = inner.operations();
        let kernel = InPhases { problem: *problem, inner };
        let plan = ConvPlan::new(self, (problem, pass), cpu, workspace, kernel_of(problem, kernel)?);
        Ok(plan.with_cost(cost).with_operations(operations))
    }
}

/// The problem whose images are the phases of all images: phase 0 of every image, then phase 1 of every image, and so on.
fn of_phases(p: &ConvProblem, format: MemoryFormat) -> Result<ConvProblem, NotApplicable> {
    let axis = |axis: &ConvAxis| match axis.dilation {
        1 => *axis,
        // The phases differ in their padding, so the copies hold the padding as zeros.
        dilation => ConvAxis::new(axis.output().div_ceil(dilation) + axis.kernel - 1, axis.kernel),
    };
    let unfit = || NotApplicable("the phases do not fit any memory".into());
    let phases = p.height.dilation.checked_mul(p.width.dilation).ok_or_else(unfit)?;
    let batch = p.batch.checked_mul(phases).ok_or_else(unfit)?;
    let spec = ConvSpec { batch, height: axis(&p.height), width: axis(&p.width), format, ..**p };
    ConvProblem::new(spec).map_err(|error| NotApplicable(format!("the phases: {error}")))
}

/// The elements of an axis that belong to one phase: `count` of them, from `first` on. In the phase they begin at `start`.
struct Places {
    first: usize,
    start: usize,
    count: usize,
}

/// The inputs of a phase.
fn inputs(axis: &ConvAxis, phase: usize) -> Places {
    if axis.dilation == 1 {
        return Places { first: 0, start: 0, count: axis.input };
    }
    let start = axis.pad_before.saturating_sub(phase).div_ceil(axis.dilation);
    let first = phase + axis.dilation * start - axis.pad_before;
    Places { first, start, count: axis.input.saturating_sub(first).div_ceil(axis.dilation) }
}

/// The outputs of a phase.
fn outputs(axis: &ConvAxis, phase: usize) -> Places {
    let count = axis.output().saturating_sub(phase).div_ceil(axis.dilation);
    Places { first: phase, start: 0, count }
}

struct InPhases {
    problem: ConvProblem,
    /// The plan for the phases.
    inner: ConvPlan,
}

/// One tensor, whole and split into phases.
struct Side {
    whole: [usize; 4],
    phased: [usize; 4],
    places: fn(&ConvAxis, usize) -> Places,
}

impl InPhases {
    fn input(&self) -> Side {
        Side { whole: self.problem.input_shape(), phased: self.inner.problem().input_shape(), places: inputs }
    }

    fn output(&self) -> Side {
        Side {
            whole: self.problem.output_shape(),
            phased: self.inner.problem().output_shape(),
            places: outputs,
        }
    }

    /// Calls `each` for each phase with offset and axes of its elements, first in the whole tensor, then in the tensor of
    /// phases.
    fn for_each_phase(&self, side: &Side, mut each: impl FnMut((usize, Axes), (usize, Axes))) {
        let p = &self.problem;
        let [height, width] = [&p.height, &p.width];
        let [_, channels, rows, columns] = side.phased;
        let phased = Axes::dense(self.inner.problem().format, [p.batch, channels, rows, columns]);
        let whole = Axes::dense(p.format, side.whole);
        let begin = |axes: &Axes, h: usize, w: usize| h * axes.strides[2] + w * axes.strides[3];
        let image = channels * rows * columns;
        for index in 0..height.dilation * width.dilation {
            let h = (side.places)(height, index / width.dilation);
            let w = (side.places)(width, index % width.dilation);
            let sizes = [h.count, w.count];
            if sizes.contains(&0) {
                continue;
            }
            let there = index * p.batch * image + begin(&phased, h.start, w.start);
            let apart = whole.spread([height.dilation, width.dilation]).cropped(sizes);
            each((begin(&whole, h.first, w.first), apart), (there, phased.cropped(sizes)));
        }
    }

    /// Splits `whole` into its phases, with zeros where it has no elements.
    fn gather<T: Element>(&self, cpu: &Cpu, side: &Side, whole: &[T], phased: &mut [T]) {
        phased.fill(T::zero());
        self.for_each_phase(side, |(from, source), (to, target)| {
            copy(cpu, source, &whole[from..], target, &mut phased[to..]);
        });
    }

    /// Writes the whole tensor from its phases; each element is in one phase.
    fn scatter<T: Element>(&self, cpu: &Cpu, side: &Side, phased: &[T], whole: &mut [T]) {
        self.for_each_phase(side, |(to, target), (from, source)| {
            copy(cpu, source, &phased[from..], target, &mut whole[to..]);
        });
    }
}

impl<T: Element> TypedKernel<T> for InPhases {
    fn run(&self, cpu: &Cpu, inputs: [&[T]; 2], output: &mut [T], workspace: &mut [T]) {
        let sides = [self.input(), self.output()];
        let gather = |side: &Side, whole: &[T], phased: &mut [T]| self.gather(cpu, side, whole, phased);
        let scatter = |side: &Side, phased: &[T], whole: &mut [T]| self.scatter(cpu, side, phased, whole);
        on_copies(&self.inner, &sides, inputs, output, workspace, gather, scatter);
    }
}
