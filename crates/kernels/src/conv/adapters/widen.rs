//! Runs an algorithm that computes in f32 on tensors that are stored in 16 bits, by copying them.
//!
//! Small tensors are copied whole. Of larger ones, each thread copies some images at a time, and computes these alone: the copies stay in its
//! cache, where whole ones would go through memory twice, and take room.

use std::sync::Arc;

use super::workspace_sum;
use crate::conv::plan::{Accuracy, ConvAlgorithm, ConvKernel, ConvOperands, ConvPlan, Cost, NotApplicable};
use crate::conv::problem::{ConvProblem, ConvTypes, Pass};
use crate::convert::convert;
use crate::elementwise::add_assign;
use crate::{Cpu, MemoryFormat, Result, Slice, SliceMut};

/// Raised when the way of copying changes.
const REVISION: u32 = 1;

/// Elements of x and y that a thread copies at a time: one MiB of f32, which leaves room for weights in an L2 cache.
const PIECE: usize = 256 * 1024;
/// A piece has at least this many times as many elements as the weight, since each piece packs or transforms the weight again.
const WEIGHTS: usize = 4;

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
        1000 * REVISION + self.inner[0].revision()
    }

    fn accuracy(&self, types: &ConvTypes) -> Accuracy {
        self.inner[0].accuracy(types)
    }

    fn is_deterministic(&self) -> bool {
        self.inner[0].is_deterministic()
    }

    fn formats(&self) -> &'static [MemoryFormat] {
        &[MemoryFormat::Contiguous, MemoryFormat::ChannelsLast]
    }

    fn plan(
        &self,
        problem: &ConvProblem,
        pass: Pass,
        cpu: &Cpu,
    ) -> std::result::Result<ConvPlan, NotApplicable> {
        let types = problem.types;
        if types.are_one() {
            return Err(NotApplicable(format!("kernels compute in {types} itself")));
        }
        let wide = problem.with(|spec| spec.types = ConvTypes::all(types.accumulator));
        let wide = wide.map_err(|error| NotApplicable(error.to_string()))?;
        if let Some(pieces) = Pieces::new(self, (problem, &wide), pass, cpu) {
            let pieces = pieces?;
            let (workspace, cost, operations) =
                (pieces.workspace_len()?, pieces.cost(problem), pieces.operations());
            let plan = ConvPlan::new(self, (problem, pass), cpu, workspace, Arc::new(pieces));
            return Ok(plan.with_cost(cost).with_operations(operations));
        }
        let inner = self.inner_plan(&wide, pass, cpu)?;
        let (x, y) = (wide.input_len(), wide.output_len());
        let workspace = workspace_sum(&[x, y, inner.workspace_len()])?;
        // The copies are read as often as the tensors would be, and are written once.
        let cost = inner.cost().moving((x + y) * (types.input.size() + types.accumulator.size()));
        let operations = inner.operations();
        let plan = ConvPlan::new(self, (problem, pass), cpu, workspace, Arc::new(Whole { types, inner }));
        Ok(plan.with_cost(cost).with_operations(operations))
    }
}

impl Widen {
    /// The plan of the first algorithm that applies to the problem in the type in which kernels compute.
    fn inner_plan(
        &self,
        wide: &ConvProblem,
        pass: Pass,
        cpu: &Cpu,
    ) -> std::result::Result<ConvPlan, NotApplicable> {
        let mut reasons = Vec::new();
        let plans = self.inner.iter().map(|inner| inner.checked_plan(wide, pass, cpu));
        let plan = plans.filter_map(|plan| plan.map_err(|reason| reasons.push(reason)).ok()).next();
        plan.ok_or_else(|| NotApplicable(format!("in {}: {}", wide.types, reasons[0])))
    }
}

/// Whole tensors, copied by all threads.
struct Whole {
    types: ConvTypes,
    /// The plan for the copies.
    inner: ConvPlan,
}

impl ConvKernel for Whole {
    fn types(&self) -> ConvTypes {
        self.types
    }

    fn run(
        &self,
        cpu: &Cpu,
        inputs: [Slice<'_>; 2],
        output: SliceMut<'_>,
        workspace: SliceMut<'_>,
    ) -> Result<()> {
        on_copies(&self.inner, cpu, inputs, output, workspace)
    }
}

/// Runs `inner` on copies at the start of the workspace, made by the threads of `cpu`.
fn on_copies(
    inner: &ConvPlan,
    cpu: &Cpu,
    [a, b]: [Slice<'_>; 2],
    output: SliceMut<'_>,
    workspace: SliceMut<'_>,
) -> Result<()> {
    let (x, y) = (inner.problem().input_len(), inner.problem().output_len());
    let [a_len, b_len] = if inner.pass() == Pass::BackwardData { [y, x] } else { [x, y] };
    let (copies, scratch) = workspace.split_at(a_len + b_len);
    let (mut first, mut second) = copies.split_at(a_len);
    convert(cpu, a, first.reborrow())?;
    let first = first.into_slice();
    match inner.pass() {
        Pass::Forward => inner.run(ConvOperands::forward(first, b, second.reborrow()), scratch)?,
        Pass::BackwardData => inner.run(ConvOperands::backward_data(first, b, second.reborrow()), scratch)?,
        Pass::BackwardWeights => {
            convert(cpu, b, second.reborrow())?;
            return inner.run(ConvOperands::backward_weights(first, second.as_slice(), output), scratch);
        }
    }
    convert(cpu, second.as_slice(), output)
}

/// The same computation with each row of an image as an image of its own, where no output reads more than one pixel.
fn by_rows(problem: &ConvProblem) -> ConvProblem {
    if problem.format != MemoryFormat::ChannelsLast || !problem.reads_one_pixel() {
        return *problem;
    }
    let rows = problem.with(|spec| {
        spec.batch *= spec.height.input;
        spec.height.input = 1;
    });
    rows.unwrap_or(*problem)
}

/// Images in pieces, each copied and computed by one thread.
struct Pieces {
    types: ConvTypes,
    count: usize,
    /// Threads that have pieces.
    workers: usize,
    /// Plans for a piece and for the last one, which may be smaller; on one thread.
    plan: ConvPlan,
    last: ConvPlan,
}

impl Pieces {
    /// The pieces of a problem, which is `wide` in the type in which kernels compute, or why none of `inner` can run one. `None` if copies of
    /// whole tensors serve better.
    fn new(
        inner: &Widen,
        (problem, wide): (&ConvProblem, &ConvProblem),
        pass: Pass,
        cpu: &Cpu,
    ) -> Option<std::result::Result<Pieces, NotApplicable>> {
        let wide = &by_rows(wide);
        let image = (wide.input_len() + wide.output_len()) / wide.batch;
        let least = wide.weight_len().checked_mul(WEIGHTS)?.div_ceil(image);
        let most = (PIECE / image).max(least).max(1);
        let rounds = wide.batch.div_ceil(most * cpu.threads());
        // As many pieces for each thread, of about the same size.
        let images = wide.batch.div_ceil(rounds * cpu.threads());
        let count = wide.batch.div_ceil(images);
        if count < cpu.threads() || images < least {
            return None;
        }
        let each = count.div_ceil(cpu.threads());
        let plan_of = |images: usize| {
            let piece = wide.with(|spec| spec.batch = images);
            let piece = piece.map_err(|error| NotApplicable(error.to_string()))?;
            inner.inner_plan(&piece, pass, &cpu.one_thread())
        };
        let last = wide.batch - (count - 1) * images;
        let plans = || {
            let [plan, last] = [plan_of(images)?, plan_of(last)?];
            Ok(Pieces { types: problem.types, count, workers: count.div_ceil(each), plan, last })
        };
        Some(plans())
    }

    /// Elements of a weight's gradient, of which a worker of backward-weights has two: its sum, and that of a piece.
    fn gradient_len(&self) -> usize {
        if self.plan.pass() == Pass::BackwardWeights { self.plan.problem().weight_len() } else { 0 }
    }

    fn worker_len(&self) -> std::result::Result<usize, NotApplicable> {
        let (problem, gradient) = (self.plan.problem(), self.gradient_len());
        let inner = self.plan.workspace_len().max(self.last.workspace_len());
        workspace_sum(&[gradient, gradient, problem.input_len(), problem.output_len(), inner])
    }

    fn workspace_len(&self) -> std::result::Result<usize, NotApplicable> {
        workspace_sum(&vec![self.worker_len()?; self.workers])
    }

    fn cost(&self, problem: &ConvProblem) -> Cost {
        let piece = self.plan.cost();
        let bytes = problem.types.bytes(problem) as f64;
        Cost { flops: piece.flops * self.count as f64, bytes, ..piece }
    }

    fn operations(&self) -> f64 {
        self.plan.operations() * (self.count - 1) as f64 + self.last.operations()
    }

    /// Each worker's part of the workspace.
    fn workspaces<'a>(
        &self,
        workspace: &'a mut SliceMut<'_>,
    ) -> impl Iterator<Item = SliceMut<'a>> + Send + use<'a> {
        let len = self.worker_len().expect("the plan has found that it fits");
        workspace.reborrow().chunks_mut(len).take(self.workers)
    }

    /// Computes a piece on the calling thread.
    fn run_piece(&self, piece: usize, inputs: [Slice<'_>; 2], output: SliceMut<'_>, workspace: SliceMut<'_>) {
        let plan = if piece + 1 == self.count { &self.last } else { &self.plan };
        on_copies(plan, plan.cpu(), inputs, output, workspace).expect("planned for these operands");
    }

    /// Backward-weights: each worker adds up the gradients of its pieces, which are always the same ones.
    fn sum_weights(
        &self,
        (cpu, work): (&Cpu, usize),
        [x, dy]: [Slice<'_>; 2],
        mut output: SliceMut<'_>,
        mut workspace: SliceMut<'_>,
    ) -> Result<()> {
        let problem = self.plan.problem();
        let (x_len, y_len, len) = (problem.input_len(), problem.output_len(), problem.weight_len());
        let (one, each) = (self.plan.cpu(), self.count.div_ceil(self.workers));
        cpu.for_each(work, self.workspaces(&mut workspace).enumerate(), |(worker, workspace)| {
            let (mut sum, workspace) = workspace.split_at(len);
            let (mut gradient, mut workspace) = workspace.split_at(len);
            let pieces = x.chunks(x_len).zip(dy.chunks(y_len)).enumerate();
            for (index, (piece, (x, dy))) in pieces.skip(worker * each).take(each).enumerate() {
                let to = if index == 0 { &mut sum } else { &mut gradient };
                self.run_piece(piece, [x, dy], to.reborrow(), workspace.reborrow());
                if index > 0 {
                    let added = add_assign(one, gradient.as_slice(), sum.reborrow());
                    added.expect("both are gradients of the weight");
                }
            }
        });
        for (worker, workspace) in self.workspaces(&mut workspace).enumerate() {
            let sum = workspace.into_slice().part(0..len);
            match worker {
                0 => output.reborrow().copy_from(sum)?,
                _ => add_assign(cpu, sum, output.reborrow())?,
            }
        }
        Ok(())
    }
}

impl ConvKernel for Pieces {
    fn types(&self) -> ConvTypes {
        self.types
    }

    fn run(
        &self,
        cpu: &Cpu,
        [a, b]: [Slice<'_>; 2],
        output: SliceMut<'_>,
        mut workspace: SliceMut<'_>,
    ) -> Result<()> {
        let problem = self.plan.problem();
        let (x, y) = (problem.input_len(), problem.output_len());
        let work = (problem.flops() * self.count as f64) as usize;
        let [a_len, output_len] = match self.plan.pass() {
            Pass::Forward => [x, y],
            Pass::BackwardData => [y, x],
            Pass::BackwardWeights => return self.sum_weights((cpu, work), [a, b], output, workspace),
        };
        let pieces = a.chunks(a_len).zip(output.chunks_mut(output_len)).enumerate();
        let workspaces = self.workspaces(&mut workspace);
        cpu.for_each_with(work, workspaces, pieces, |workspace, (piece, (a, output))| {
            self.run_piece(piece, [a, b], output, workspace.reborrow());
        });
        Ok(())
    }
}
