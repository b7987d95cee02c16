//! Plans the memory of graphs that are parts of another framework's model.

use std::ops::ControlFlow;
use std::sync::Arc;

use convoke_autograd::ops::Keep;
use convoke_autograd::{DType, Device, Exported, MemoryFormat, Root, Tensor, backward_from, enable_grad};
use convoke_kernels::block::BlockProblem;

use super::blocks::{self, BlockKind};
use super::search::{Fit, Found, Search, Steps};
use super::{PlannerOptions, PlannerProgress};
use crate::graph::{Definition, Graph};
use crate::modules::{ConvBnMode, FusedBlock};
use crate::training::{MemoryPrediction, TrainingError};
use crate::{Init, ModuleExt};

type Result<T> = std::result::Result<T, TrainingError>;

/// A graph as one part of a training step.
#[derive(Debug, Clone)]
pub struct GraphStep {
    /// What it computes.
    pub definition: Arc<Definition>,
    /// The type that it computes in.
    pub dtype: DType,
    /// Its inputs.
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
    /// Its order in memory.
    pub format: MemoryFormat,
    /// Whether it gets a gradient.
    pub gradient: bool,
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
    /// For each graph, what its blocks keep, in the order of its parts.
    pub keeps: Vec<Vec<Keep>>,
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

    /// The fastest plan found whose peak is at most `budget` bytes.
    ///
    /// # Errors
    /// If a dry step fails. If nothing fits, the error is `Ok(Err(plan))` with the plan of the lowest peak.
    pub fn within(&mut self, budget: usize) -> Result<std::result::Result<GraphPlan, GraphPlan>> {
        Ok(match self.search.within(budget)? {
            Fit::Fits(found) => Ok(self.plan(found)),
            Fit::Least(found) => Err(self.plan(found)),
        })
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
        Ok(self.plan(found))
    }

    fn plan(&self, found: Found) -> GraphPlan {
        GraphPlan {
            keeps: self.search.steps.by_graph(found.keeps),
            bytes_end_of_forward: found.bytes.bytes_end_of_forward,
            bytes_peak: found.bytes.bytes_peak,
            block_seconds: found.seconds,
            workspace_limit: found.workspace_limit,
        }
    }
}

/// Exactly the bytes that a step of these graphs needs, as [`GraphPlanner`] counts them, if their blocks keep `keeps`, or what they keep
/// without a plan.
///
/// # Errors
/// If a graph cannot be made or an operation fails.
pub fn graph_memory(
    device: &Device,
    steps: &[GraphStep],
    keeps: Option<&[Vec<Keep>]>,
) -> Result<MemoryPrediction> {
    let mut steps = GraphSteps::new(device, steps)?;
    if let Some(keeps) = keeps {
        steps.set_keeps(&keeps.concat());
    }
    steps.step()
}

/// Ways to keep with which a step of these graphs has at most `most` bytes in use at the end of forward, chosen without measuring: starting
/// from what blocks keep without a plan, those change first that save most for their cost by a rough estimate. If `most` cannot be
/// reached, these keep as little as that finds.
///
/// # Errors
/// If a graph cannot be made or an operation fails.
pub fn lightened(device: &Device, steps: &[GraphStep], most: usize) -> Result<Vec<Vec<Keep>>> {
    let mut steps = GraphSteps::new(device, steps)?;
    let problems: Vec<Option<BlockProblem>> =
        steps.kinds.iter().map(|kind| kind.map(|kind| kind.problem)).collect();
    let unplanned = |problem: &Option<BlockProblem>| {
        problem
            .map_or(Keep::Store, |problem| Keep::default().resolved(problem.residual, problem.pool.is_some()))
    };
    let mut keeps: Vec<Keep> = problems.iter().map(unplanned).collect();
    let mut bytes = |keeps: &[Keep]| -> Result<usize> {
        steps.set_keeps(keeps);
        Ok(steps.step()?.bytes_end_of_forward)
    };
    let mut now = bytes(&keeps)?;
    let start = now;
    let mut changes: Vec<(f64, usize, Keep)> = Vec::new();
    for (index, problem) in problems.iter().enumerate() {
        let Some(problem) = problem.filter(|_| start > most) else { continue };
        for keep in problem.candidates(false) {
            let before = std::mem::replace(&mut keeps[index], keep);
            let saved = start.saturating_sub(bytes(&keeps)?);
            keeps[index] = before;
            if saved > 0 {
                changes.push((saved as f64 / extra_seconds(&problem, keep), index, keep));
            }
        }
    }
    changes.sort_by(|a, b| b.0.total_cmp(&a.0));
    for (_, index, keep) in changes {
        if now <= most {
            break;
        }
        let before = std::mem::replace(&mut keeps[index], keep);
        match bytes(&keeps)? {
            less if less < now => now = less,
            _ => keeps[index] = before,
        }
    }
    Ok(steps.by_graph(keeps))
}

/// About how many seconds a way to keep costs, on a processor of 100 GFLOP/s that copies 10 GB/s.
fn extra_seconds(problem: &BlockProblem, keep: Keep) -> f64 {
    let convolution = problem.convolution.flops() / 1e11;
    let pass = (problem.convolution.output_len() * problem.convolution.types.output.size()) as f64 / 1e10;
    match keep {
        Keep::Recompute => convolution + pass,
        Keep::RecomputeInTiles => 2.0 * convolution + pass,
        Keep::RecomputeBoth => 2.0 * convolution + 3.0 * pass,
        _ => 2.0 * pass,
    }
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
    dtype: DType,
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
                let tensor = Tensor::zeros(&device, &input.shape, step.dtype)?.to_format(input.format)?;
                Ok(if input.gradient { tensor.with_grad() } else { tensor })
            };
            let inputs = step.inputs.iter().map(input).collect::<Result<Vec<_>>>()?;
            Ok(GraphPart { graph, inputs, outputs: step.outputs.clone(), dtype: step.dtype })
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
                    let trained = parameter.is_trained();
                    parameter.set(&parameter.value().detach().to_format(MemoryFormat::ChannelsLast)?)?;
                    parameter.set_trained(trained);
                }
            }
        }
        Ok(dry)
    }

    /// What blocks keep, for each graph.
    fn by_graph(&self, keeps: Vec<Keep>) -> Vec<Vec<Keep>> {
        let mut keeps = keeps.into_iter();
        let count = |part: &GraphPart| blocks::find(&part.graph).len();
        self.parts.iter().map(|part| keeps.by_ref().take(count(part)).collect()).collect()
    }
}

impl Steps for GraphSteps {
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
                let leaves = leaving(output, format)?;
                // The gradient comes as the output went.
                tape.extend(root.map(|root| (root, leaves.shape().to_vec(), format)));
                left.push(leaves);
            }
            tapes.push(tape);
            measured(&self.device, &mut peak, exported);
        }
        let now = self.device.memory();
        let bytes_end_of_forward = now.live_bytes - base + now.exported_bytes;
        for (part, roots) in self.parts.iter().zip(tapes).rev() {
            let upstream = |(root, shape, format): Leaving| -> Result<_> {
                Ok((root, Tensor::zeros(&self.device, &shape, part.dtype)?.to_format(format)?))
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

/// How an output was computed, its shape, and the format in which it left.
type Leaving = (Root, Vec<usize>, MemoryFormat);

/// The elements of a tensor that nobody else holds.
fn leaving(tensor: Tensor, format: MemoryFormat) -> Result<Exported> {
    let constant = tensor.detach();
    drop(tensor);
    let formatted = constant.to_format(format)?;
    drop(constant);
    Ok(formatted.export()?)
}
