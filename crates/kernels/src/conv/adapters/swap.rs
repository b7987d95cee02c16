//! The swaps: a pass computed as another pass of a related problem.
//!
//! ```text
//! forward           y[n,k]  = sum over c of x[n,c] * w[k,c]    is a weight gradient over a "batch" of C images
//! backward-weights  dw[k,c] = sum over n of x[n,c] * dy[n,k]   is a forward convolution of C images by K filters dy
//! backward-data     dx = forward convolution of dy, spread by the stride and padded, with filters turned round
//! ```
//! The first two swap batch with channels and stride with dilation: the large output takes the role of the kernel. Dieleman
//! and Schlüter's meta-optimizer for Theano offered them for every implementation; a swap wins where the other pass's
//! blocking suits the sizes better.

use std::sync::Arc;

use super::strided::{Axes, copy};
use super::workspace_sum;
use crate::conv::plan::{
    Accuracy, ConvAlgorithm, ConvOperands, ConvPlan, Cost, NotApplicable, TypedKernel, kernel_of,
};
use crate::conv::problem::{ConvAxis, ConvProblem, ConvSpec, ConvTypes, Pass};
use crate::{Cpu, Element, MemoryFormat};

/// Runs every pass as another pass, by the first of `inner` that applies.
pub(super) struct Swap {
    pub(super) name: String,
    pub(super) inner: Vec<Arc<dyn ConvAlgorithm>>,
}

impl ConvAlgorithm for Swap {
    fn name(&self) -> &str {
        &self.name
    }

    fn revision(&self) -> u32 {
        // The last two digits count this file's own changes.
        100 * self.inner[0].revision() + 2
    }

    fn accuracy(&self, types: &ConvTypes) -> Accuracy {
        self.inner[0].accuracy(types)
    }

    fn is_deterministic(&self) -> bool {
        self.inner[0].is_deterministic()
    }

    fn plan(&self, problem: &ConvProblem, pass: Pass, cpu: &Cpu) -> Result<ConvPlan, NotApplicable> {
        let (related, through) = match pass {
            Pass::Forward => (exchanged(problem)?, Pass::BackwardWeights),
            Pass::BackwardWeights => (exchanged(problem)?, Pass::Forward),
            Pass::BackwardData => (turned(problem)?, Pass::Forward),
        };
        let mut reasons = Vec::new();
        let plans = self.inner.iter().map(|inner| inner.checked_plan(&related, through, cpu));
        let inner = plans.filter_map(|plan| plan.map_err(|reason| reasons.push(reason)).ok()).next();
        let inner =
            inner.ok_or_else(|| NotApplicable(format!("as {through} of {related}: {}", reasons[0])))?;
        let copies = match pass {
            Pass::BackwardData => [spread_len(problem, &related), related.weight_len(), 0],
            _ => [related.input_len(), related.weight_len(), related.output_len()],
        };
        let workspace = workspace_sum(&[copies[0], copies[1], copies[2], inner.workspace_len()])?;
        // Transposing reads and writes each element, at a fraction of the speed of a plain copy.
        let copied = 4 * copies.iter().sum::<usize>() * problem.types.input.size();
        let cost = inner.cost().moving(copied);
        // No algorithm is at its best with a kernel of an output's size.
        let slower = if pass == Pass::BackwardData { 1.0 } else { 3.0 };
        let cost = Cost { flops: slower * cost.flops, ..cost };
        let operations = inner.operations();
        let kernel = Swapped { problem: *problem, pass, inner };
        let plan = ConvPlan::new(self, (problem, pass), cpu, workspace, kernel_of(problem, kernel)?);
        Ok(plan.with_cost(cost).with_operations(operations))
    }
}

fn related(spec: ConvSpec) -> Result<ConvProblem, NotApplicable> {
    ConvProblem::new(spec).map_err(|error| NotApplicable(format!("the swapped problem: {error}")))
}

/// C images of N channels, convolved with K filters of the output's size: its "output" has the kernel's size.
fn exchanged(p: &ConvProblem) -> Result<ConvProblem, NotApplicable> {
    if p.groups != 1 {
        return Err(NotApplicable("exchanging batch and channels needs one group".into()));
    }
    let axis = |axis: &ConvAxis| {
        let read = (axis.output() - 1) * axis.stride + axis.kernel_span();
        match read.checked_sub(axis.pad_before).filter(|&inside| inside > 0) {
            Some(inside) => Ok(ConvAxis {
                input: axis.input.min(inside), // without what no output reads
                kernel: axis.output(),
                stride: axis.dilation,
                dilation: axis.stride,
                ..*axis
            }),
            None => Err(NotApplicable("only padding is read".into())),
        }
    };
    related(ConvSpec {
        batch: p.in_channels,
        in_channels: p.batch,
        out_channels: p.out_channels,
        height: axis(&p.height)?,
        width: axis(&p.width)?,
        ..**p
    })
}

/// The forward problem that computes dx from dy.
fn turned(p: &ConvProblem) -> Result<ConvProblem, NotApplicable> {
    let axis = |axis: &ConvAxis| {
        let spread = (axis.output() - 1) * axis.stride + 1;
        let span = axis.kernel_span();
        match (span - 1).checked_sub(axis.pad_before) {
            Some(pad_before) => {
                // The wanted outputs read up to `end`. If dy ends before it, padding follows; if dy is longer, the rest is
                // not needed.
                let end = (axis.input + span - 1).checked_sub(pad_before).filter(|&end| end > 0);
                let end = end.ok_or_else(|| NotApplicable("only padding is read".into()))?;
                Ok(ConvAxis {
                    input: spread.min(end),
                    kernel: axis.kernel,
                    stride: 1,
                    pad_before,
                    pad_after: end.saturating_sub(spread),
                    dilation: axis.dilation,
                })
            }
            None => Err(NotApplicable("needs a padding smaller than the kernel's span".into())),
        }
    };
    related(ConvSpec {
        in_channels: p.out_channels,
        out_channels: p.in_channels,
        height: axis(&p.height)?,
        width: axis(&p.width)?,
        ..**p
    })
}

/// Elements of the copy of dy in backward-data; 0 if dy can be used without a copy.
fn spread_len(problem: &ConvProblem, related: &ConvProblem) -> usize {
    // Equal shapes are not enough: dy spread by a stride and then cut may happen to have dy's own width.
    let serves = |axis: &ConvAxis, related: &ConvAxis| {
        axis.output() == related.input && (axis.stride == 1 || axis.output() == 1)
    };
    let same = serves(&problem.height, &related.height) && serves(&problem.width, &related.width);
    if same { 0 } else { related.input_len() }
}

struct Swapped {
    problem: ConvProblem,
    pass: Pass,
    /// The plan for the related problem.
    inner: ConvPlan,
}

impl<T: Element> TypedKernel<T> for Swapped {
    fn run(&self, cpu: &Cpu, [a, b]: [&[T]; 2], output: &mut [T], workspace: &mut [T]) {
        let (p, related) = (&self.problem, self.inner.problem());
        let run = |operands: ConvOperands<'_>, scratch: &mut [T]| {
            self.inner.run(operands, scratch.into()).expect("planned for these operands");
        };
        if self.pass == Pass::BackwardData {
            let (dy, rest) = workspace.split_at_mut(spread_len(p, related));
            let (weight, scratch) = rest.split_at_mut(related.weight_len());
            turn_weights(cpu, p, b, weight);
            let dy = self.spread(cpu, a, dy);
            return run(ConvOperands::forward(dy, &*weight, output), scratch);
        }
        let (x, rest) = workspace.split_at_mut(related.input_len());
        let (filters, rest) = rest.split_at_mut(related.weight_len());
        let (small, scratch) = rest.split_at_mut(related.output_len());
        let [.., height, width] = related.input_shape();
        let source = Axes::dense(p.format, p.input_shape()).cropped([height, width]);
        let target = Axes::dense(related.format, related.input_shape()).exchanged();
        copy(cpu, source, a, target, x);
        // x * w = y: w is C "images" of K channels here, y the K x N "weight".
        let weight = Axes::dense(MemoryFormat::Contiguous, p.weight_shape());
        let images = Axes::dense(related.format, related.output_shape()).exchanged();
        let y = Axes::dense(p.format, p.output_shape());
        let large = Axes::dense(MemoryFormat::Contiguous, related.weight_shape()).exchanged();
        if self.pass == Pass::Forward {
            copy(cpu, weight, b, images, small);
            run(ConvOperands::backward_weights(&*x, &*small, &mut *filters), scratch);
            copy(cpu, large, filters, y, output);
        } else {
            copy(cpu, y, b, large, filters);
            run(ConvOperands::forward(&*x, &*filters, &mut *small), scratch);
            copy(cpu, images, small, weight, output);
        }
    }
}

impl Swapped {
    /// dy with `stride - 1` zeros between neighbours, without the elements that no gradient needs.
    fn spread<'a, T: Element>(&self, cpu: &Cpu, dy: &'a [T], buffer: &'a mut [T]) -> &'a [T] {
        let (p, related) = (&self.problem, self.inner.problem());
        if buffer.is_empty() {
            return dy;
        }
        buffer.fill(T::zero());
        let kept = |axis: &ConvAxis, related: &ConvAxis| (related.input - 1) / axis.stride + 1;
        let sizes = [kept(&p.height, &related.height), kept(&p.width, &related.width)];
        let source = Axes::dense(p.format, p.output_shape()).cropped(sizes);
        let target = Axes::dense(p.format, related.input_shape())
            .cropped(sizes)
            .spread([p.height.stride, p.width.stride]);
        copy(cpu, source, dy, target, buffer);
        buffer
    }
}

/// Each group's K x C filters as C x K filters, turned by 180 degrees.
fn turn_weights<T: Element>(cpu: &Cpu, p: &ConvProblem, weight: &[T], turned: &mut [T]) {
    let taps = p.height.kernel * p.width.kernel;
    let (c, k) = (p.group_in_channels(), p.group_out_channels());
    cpu.for_each(weight.len(), turned.chunks_mut(k * taps).enumerate(), |(channel, filters)| {
        let (group, channel) = (channel / c, channel % c);
        for (output, filter) in filters.chunks_mut(taps).enumerate() {
            let from = &weight[((group * k + output) * c + channel) * taps..][..taps];
            for (to, &value) in filter.iter_mut().zip(from.iter().rev()) {
                *to = value;
            }
        }
    });
}
