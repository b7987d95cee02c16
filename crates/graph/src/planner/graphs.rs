//! Plans the memory of graphs that are parts of another framework's model.

use std::ops::ControlFlow;
use std::sync::Arc;

use convoke_autograd::ops::Keep;
use convoke_autograd::{
    DType, Device, Error, Exported, MemoryFormat, Result, Root, Tensor, backward_from, enable_grad,
};
use convoke_kernels::Recomputed;

use super::blocks::{self, BlockKind};
use super::search::{Found, Search, Steps};
use super::{MemoryPrediction, PlannerOptions, PlannerProgress};
use crate::graph::{Definition, Graph};
use crate::modules::{ConvBnMode, FusedBlock, NormMode};
use crate::{Init, ModuleExt};

/// A graph as one part of a training step.
#[derive(Debug, Clone)]
pub struct GraphStep {
    /// What it computes.
    pub definition: Arc<Definition>,
    /// The type of its parameters.
    pub dtype: DType,
    /// The inputs of the graph.
    pub inputs: Vec<GraphInput>,
    /// The parameters that get no gradient.
    pub frozen: Vec<String>,
    /// The parameters that are in channels-last.
    pub channels_last: Vec<String>,
    /// See [`Graph::set_working_format`].
    pub working_format: Option<MemoryFormat>,
    /// The formats in which its outputs leave; those that they have, if there are fewer.
    pub outputs: Vec<MemoryFormat>,
}

/// An input of a [`GraphStep`].
#[derive(Debug, Clone)]
pub struct GraphInput {
    /// The size of each dimension.
    pub shape: Vec<usize>,
    /// The type of its elements.
    pub dtype: DType,
    /// The order of the input in memory.
    pub format: MemoryFormat,
    /// Whether it gets a gradient.
    pub gradient: bool,
}

/// What a graph keeps for backward.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct GraphKeep {
    /// What each block keeps, in the order of the graph's parts.
    pub blocks: Vec<Keep>,
    /// Whether the output of each batch norm is recomputed, in the order of the graph's parts: see [`NormMode::set_recomputed`].
    pub recomputed: Vec<bool>,
}

impl GraphKeep {
    /// What a graph keeps now.
    pub fn of(graph: &Graph) -> GraphKeep {
        GraphKeep {
            blocks: blocks::find(graph).into_iter().map(|(_, block)| block.keep()).collect(),
            recomputed: blocks::norms(graph).into_iter().map(NormMode::is_recomputed).collect(),
        }
    }

    /// Makes a graph keep this, from the next forward on.
    pub fn apply(&self, graph: &Graph) {
        for ((_, block), keep) in blocks::find(graph).into_iter().zip(&self.blocks) {
            block.set_keep(*keep);
        }
        for (norm, recomputed) in blocks::norms(graph).into_iter().zip(&self.recomputed) {
            norm.set_recomputed(*recomputed);
        }
    }
}

/// Plans what the blocks of graphs keep. In a step the graphs run forward one after the other, and then backward in reverse order.
///
/// Bytes are those of convoke: what is saved, workspaces, outputs, gradients, and gradients of outputs. Inputs, parameters and
/// statistics are the other framework's, and so is what it computes between the graphs.
pub struct GraphPlanner {
    search: Search<GraphSteps>,
}

/// What each block keeps, and what that costs.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct GraphPlan {
    /// For each graph, what it keeps.
    pub keeps: Vec<GraphKeep>,
    /// Bytes in use after all forwards. Exact.
    pub bytes_end_of_forward: usize,
    /// The most bytes in use at any moment of the step. Exact.
    pub bytes_peak: usize,
    /// Seconds of forward and backward of all blocks: the sum of each block's own time, measured alone.
    pub block_seconds: f64,
    /// The most workspace, in bytes, that a convolution may use: see [`convoke_kernels::tune::Tuner::limit_workspace`]. Only set if no
    /// plan fits without a limit.
    pub workspace_limit: Option<usize>,
}

impl GraphPlanner {
    /// Times the graphs' blocks on `device`. `progress` may stop that: the result is then `Ok(None)`.
    ///
    /// # Errors
    /// If a graph cannot be made or an operation fails.
    pub fn new(
        device: &Device,
        steps: &[GraphStep],
        options: &PlannerOptions,
        progress: &mut dyn FnMut(PlannerProgress) -> ControlFlow<()>,
    ) -> Result<Option<GraphPlanner>> {
        let search = Search::new(device, GraphSteps::new(device, steps)?, options, progress)?;
        Ok(search.map(|search| GraphPlanner { search }))
    }

    /// The fastest plan found whose peak is at most `budget` bytes; `Ok(Err(plan))`, with the plan of the lowest peak, if nothing
    /// fits.
    ///
    /// # Errors
    /// If a dry step fails.
    pub fn within(&mut self, budget: usize) -> Result<std::result::Result<GraphPlan, GraphPlan>> {
        let search = |planner: &mut GraphPlanner| {
            let found = planner.search.within(budget)?;
            Ok(found.map(|found| planner.plan(found)).map_err(|least| planner.plan(least)))
        };
        let least = match search(self)? {
            Ok(plan) => return Ok(Ok(plan)),
            Err(least) => least,
        };
        let with_norms = self.with_norms_recomputed(search)?;
        Ok(match with_norms {
            Some(Ok(plan)) => Ok(plan),
            Some(Err(plan)) if plan.bytes_peak < least.bytes_peak => Err(plan),
            _ => Err(least),
        })
    }

    /// What `work` gives while the outputs of batch norms that are no part of a block are recomputed; `None` if that saves nothing.
    /// This is a last resort: its time is not measured.
    fn with_norms_recomputed<R>(
        &mut self,
        work: impl FnOnce(&mut GraphPlanner) -> Result<R>,
    ) -> Result<Option<R>> {
        let before = self.search.steps.step()?.bytes_end_of_forward;
        self.recompute_norms(true);
        let after = self.search.steps.step().map(|bytes| bytes.bytes_end_of_forward);
        let result = after.and_then(|after| (after < before).then(|| work(self)).transpose());
        self.recompute_norms(false);
        result
    }

    fn recompute_norms(&mut self, recomputed: bool) {
        self.search.steps.set_recomputed(recomputed);
        self.search.forget();
    }

    /// What the blocks keep without a plan.
    ///
    /// # Errors
    /// If a dry step fails.
    pub fn unplanned(&mut self) -> Result<GraphPlan> {
        let found = self.search.unplanned()?;
        Ok(self.plan(found))
    }

    /// The plan with the lowest peak that the search finds, however slow.
    ///
    /// # Errors
    /// If a dry step fails.
    pub fn smallest(&mut self) -> Result<GraphPlan> {
        let found = self.search.smallest()?;
        let plan = self.plan(found);
        let with_norms = self.with_norms_recomputed(|planner| {
            let found = planner.search.smallest()?;
            Ok(planner.plan(found))
        })?;
        Ok(with_norms.filter(|with_norms| with_norms.bytes_peak < plan.bytes_peak).unwrap_or(plan))
    }

    fn plan(&self, found: Found) -> GraphPlan {
        self.search.steps.set_keeps(&found.keeps);
        GraphPlan {
            keeps: self.search.steps.keeps(),
            bytes_end_of_forward: found.bytes.bytes_end_of_forward,
            bytes_peak: found.bytes.bytes_peak,
            block_seconds: found.seconds,
            workspace_limit: found.workspace_limit,
        }
    }
}

/// Exactly the bytes that a step of these graphs needs, as [`GraphPlanner`] counts them, if they keep `keeps`, or what they keep without a
/// plan.
///
/// # Errors
/// If a graph cannot be made or an operation fails.
pub fn graph_memory(
    device: &Device,
    steps: &[GraphStep],
    keeps: Option<&[GraphKeep]>,
) -> Result<MemoryPrediction> {
    let mut steps = GraphSteps::new(device, steps)?;
    for (part, keep) in steps.parts.iter().zip(keeps.unwrap_or_default()) {
        keep.apply(&part.graph);
    }
    steps.step()
}

/// What the graphs keep so that a step has at most `most` bytes in use at the end of forward, chosen without measuring: starting from
/// what they keep without a plan, the change that saves most bytes for its work is made next. If `most` cannot be reached, they keep
/// as little as that finds.
///
/// # Errors
/// If a graph cannot be made or an operation fails.
pub fn lightened(device: &Device, steps: &[GraphStep], most: usize) -> Result<Vec<GraphKeep>> {
    let mut steps = GraphSteps::new(device, steps)?;
    let mut now = steps.cost()?;
    if now.bytes <= most {
        return Ok(steps.keeps());
    }
    let mut changes = steps.changes(now)?;
    while now.bytes > most {
        // The first prices are estimates from below, and a price rises with what is changed before. So the cheapest change is priced
        // again until it stays the cheapest.
        changes.sort_by(|a, b| a.price.total_cmp(&b.price));
        let Some(&Priced { change, .. }) = changes.first() else { break };
        let before = steps.make(change);
        let after = steps.cost()?;
        let price = after.price(now, most);
        let is_cheapest = changes.get(1).is_none_or(|next| price <= next.price);
        if price.is_finite() && is_cheapest {
            now = after;
            changes.remove(0);
            continue;
        }
        steps.make(before);
        match price.is_finite() {
            true => changes[0].price = price,
            false => drop(changes.remove(0)),
        }
    }
    Ok(steps.keeps())
}

/// What a step costs.
#[derive(Debug, Clone, Copy)]
struct Cost {
    /// Bytes at the end of forward.
    bytes: usize,
    /// About how many seconds recomputing takes.
    seconds: f64,
}

impl Cost {
    /// Seconds that each byte fewer than `before` costs, where fewer than `most` bring nothing; infinite if no byte is saved.
    fn price(self, before: Cost, most: usize) -> f64 {
        match before.bytes.saturating_sub(self.bytes.max(most)) {
            0 => f64::INFINITY,
            saved => (self.seconds - before.seconds) / saved as f64,
        }
    }
}

/// About how long recomputing takes, on a processor of 100 GFLOP/s that copies 10 GB/s.
fn seconds(work: Recomputed) -> f64 {
    work.flops as f64 / 1e11 + work.bytes as f64 / 1e10
}

/// One thing less to keep.
#[derive(Debug, Clone, Copy)]
enum Change {
    /// The block of this number keeps this.
    Block(usize, Keep),
    /// Whether the output of the batch norm of this number is recomputed.
    Norm(usize, bool),
}

struct Priced {
    change: Change,
    price: f64,
}

/// Graphs on a dry device.
struct GraphSteps {
    device: Device,
    parts: Vec<GraphPart>,
    kinds: Vec<Option<BlockKind>>,
}

struct GraphPart {
    graph: Graph,
    inputs: Vec<Tensor>,
    outputs: Vec<MemoryFormat>,
}

impl GraphSteps {
    /// The graphs after a first step.
    fn new(device: &Device, steps: &[GraphStep]) -> Result<GraphSteps> {
        let device = device.dry();
        let part = |step: &GraphStep| -> Result<GraphPart> {
            let init = Init { dtype: step.dtype, ..Init::new(&device, 0) };
            let mut graph = Graph::new(&step.definition, &init, ConvBnMode::Fused)?;
            graph.set_working_format(step.working_format);
            for (name, parameter) in graph.parameters() {
                parameter.set_trained(!step.frozen.contains(&name));
            }
            let input = |input: &GraphInput| -> Result<Tensor> {
                let tensor = Tensor::zeros(&device, &input.shape, input.dtype)?.to_format(input.format)?;
                Ok(if input.gradient { tensor.with_grad() } else { tensor })
            };
            let inputs = step.inputs.iter().map(input).collect::<Result<Vec<_>>>()?;
            Ok(GraphPart { graph, inputs, outputs: step.outputs.clone() })
        };
        let parts = steps.iter().map(part).collect::<Result<Vec<_>>>()?;
        let mut dry = GraphSteps { device, parts, kinds: Vec::new() };
        let weights: Vec<usize> = dry.parts.iter().flat_map(|part| blocks::weights(&part.graph)).collect();
        dry.device.start_block_runs();
        dry.step()?;
        dry.kinds = blocks::kinds(&weights, &dry.device.take_block_runs());
        // Only now, as blocks are found by the address of a weight that is in the order of kernels.
        for (part, step) in dry.parts.iter().zip(steps) {
            for (name, parameter) in part.graph.parameters() {
                if step.channels_last.contains(&name) {
                    parameter.set(&parameter.value().detach().to_format(MemoryFormat::ChannelsLast)?)?;
                }
            }
        }
        Ok(dry)
    }

    /// What each graph keeps now.
    fn keeps(&self) -> Vec<GraphKeep> {
        self.parts.iter().map(|part| GraphKeep::of(&part.graph)).collect()
    }

    /// The batch norms of all graphs.
    fn norms(&self) -> Vec<&NormMode> {
        self.parts.iter().flat_map(|part| blocks::norms(&part.graph)).collect()
    }

    fn set_recomputed(&self, recomputed: bool) {
        self.norms().into_iter().for_each(|norm| norm.set_recomputed(recomputed));
    }

    /// What a step costs with what the graphs keep now.
    fn cost(&mut self) -> Result<Cost> {
        let before = self.device.recomputed();
        let bytes = self.step()?.bytes_end_of_forward;
        let after = self.device.recomputed();
        let work = Recomputed { flops: after.flops - before.flops, bytes: after.bytes - before.bytes };
        Ok(Cost { bytes, seconds: seconds(work) })
    }

    /// Makes a change, and gives the one that undoes it.
    fn make(&self, change: Change) -> Change {
        match change {
            Change::Block(index, keep) => {
                let (_, block) = self.blocks()[index];
                let before = block.keep();
                block.set_keep(keep);
                Change::Block(index, before)
            }
            Change::Norm(index, recomputed) => {
                let norm = self.norms()[index];
                let before = norm.is_recomputed();
                norm.set_recomputed(recomputed);
                Change::Norm(index, before)
            }
        }
    }

    /// The changes that may save bytes, with prices estimated from below.
    fn changes(&mut self, now: Cost) -> Result<Vec<Priced>> {
        let mut changes = Vec::new();
        for (index, kind) in self.kinds.iter().enumerate() {
            let Some(BlockKind { problem, .. }) = kind else { continue };
            let kept = Keep::default().resolved(problem.residual, problem.pool.is_some());
            let size = problem.convolution.types.output.size();
            let (x, y) = (problem.convolution.input_len() * size, problem.convolution.output_len() * size);
            let convolution = Recomputed { flops: problem.convolution.flops() as u64, bytes: (x + y) as u64 };
            let passes = Recomputed { flops: 0, bytes: 2 * y as u64 };
            // Tiles only lower the peak.
            for (keep, seconds, saved) in [
                (Keep::Renormalize, seconds(passes), y),
                (Keep::Recompute, seconds(convolution), y),
                (Keep::RecomputeBoth, seconds(convolution) + seconds(passes), 2 * y),
            ] {
                if keep != kept {
                    let price = seconds / saved as f64;
                    changes.push(Priced { change: Change::Block(index, keep), price });
                }
            }
        }
        // If all batch norms are parts of blocks, this changes nothing.
        self.set_recomputed(true);
        let price = self.cost()?.price(now, 0);
        self.set_recomputed(false);
        if price.is_finite() {
            let norms = 0..self.norms().len();
            changes.extend(norms.map(|index| Priced { change: Change::Norm(index, true), price }));
        }
        Ok(changes)
    }
}

impl Steps for GraphSteps {
    type Error = Error;

    fn blocks(&self) -> Vec<(String, &dyn FusedBlock)> {
        let numbered = self.parts.iter().enumerate();
        numbered
            .flat_map(|(number, part)| {
                let found = blocks::find(&part.graph).into_iter();
                found.map(move |(path, block)| (format!("{number}.{path}"), block))
            })
            .collect()
    }

    fn kinds(&self) -> &[Option<BlockKind>] {
        &self.kinds
    }

    fn step(&mut self) -> Result<MemoryPrediction> {
        // Inputs and parameters are not counted.
        let base = self.device.memory().live_bytes;
        let mut peak = 0;
        // What has left belongs to the other framework until the end of the step.
        let mut left: Vec<Exported> = Vec::new();
        let mut tapes: Vec<Vec<Leaving>> = Vec::new();
        let measured = |device: &Device, peak: &mut usize, exported: usize| {
            *peak = (*peak).max(device.memory().peak_bytes - base + exported);
        };
        for part in &self.parts {
            self.device.reset_peak();
            let exported = self.device.memory().exported_bytes;
            let outputs = enable_grad(|| part.graph.run(&part.inputs))?;
            let mut tape = Vec::new();
            for (place, output) in outputs.into_iter().enumerate() {
                let format = part.outputs.get(place).copied().unwrap_or(output.format());
                let root = output.requires_grad().then(|| output.root()).transpose()?;
                let dtype = output.dtype();
                let leaves = leaving(output, format)?;
                // The gradient comes as the output went.
                tape.extend(root.map(|root| (root, (leaves.shape().to_vec(), dtype), format)));
                left.push(leaves);
            }
            tapes.push(tape);
            measured(&self.device, &mut peak, exported);
        }
        let now = self.device.memory();
        let bytes_end_of_forward = now.live_bytes - base + now.exported_bytes;
        for (part, roots) in self.parts.iter().zip(tapes).rev() {
            let upstream = |(root, (shape, dtype), format): Leaving| -> Result<_> {
                Ok((root, Tensor::zeros(&self.device, &shape, dtype)?.to_format(format)?))
            };
            let roots = roots.into_iter().map(upstream).collect::<Result<Vec<_>>>()?;
            self.device.reset_peak();
            let exported = self.device.memory().exported_bytes;
            let mut gradients = backward_from(roots, false)?;
            let leaves = part.graph.parameters().into_iter().map(|(_, parameter)| parameter.value());
            for leaf in leaves.chain(part.inputs.iter().cloned()) {
                if let Some(gradient) = gradients.take(&leaf) {
                    let format = gradient.format();
                    left.push(leaving(gradient, format)?);
                }
            }
            measured(&self.device, &mut peak, exported);
        }
        Ok(MemoryPrediction { bytes_end_of_forward, bytes_peak: peak.max(bytes_end_of_forward) })
    }
}

/// How an output was computed, its shape and type, and the format in which it left.
type Leaving = (Root, (Vec<usize>, DType), MemoryFormat);

/// The elements of a tensor that nobody else holds.
fn leaving(tensor: Tensor, format: MemoryFormat) -> Result<Exported> {
    let constant = tensor.detach();
    drop(tensor);
    let formatted = constant.to_format(format)?;
    drop(constant);
    formatted.export()
}
