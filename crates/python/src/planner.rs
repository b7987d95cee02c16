//! Memory plans for Python: what the blocks of a model's subgraphs keep, within a budget.

use std::ops::ControlFlow;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use convoke_graph::planner::{
    GraphInput, GraphKeep, GraphPlan, GraphPlanner, GraphStep, PlannerOptions, graph_memory, lightened,
};
use pyo3::prelude::*;

use crate::engine::Engine;
use crate::error::{exception, released};
use crate::graph::{Graph, dtype_named, format};

/// A graph as a part of a step: `Step` of `_run.py`.
#[derive(FromPyObject)]
pub(crate) struct Step<'py> {
    graph: Bound<'py, Graph>,
    inputs: Vec<Input>,
    /// The names of the parameters that get no gradient.
    frozen: Vec<String>,
    /// The names of the parameters in channels-last.
    channels_last: Vec<String>,
}

/// An input of a graph: `Input` of `_run.py`.
#[derive(FromPyObject)]
struct Input {
    shape: Vec<usize>,
    /// The name of its type.
    dtype: String,
    channels_last: bool,
    /// Whether it gets a gradient.
    gradient: bool,
}

fn steps(steps: Vec<Step<'_>>) -> PyResult<Vec<GraphStep>> {
    let input = |Input { shape, dtype, channels_last, gradient }: Input| {
        let dtype = dtype_named(&dtype).map_err(exception)?;
        Ok(GraphInput { shape, dtype, format: format(channels_last), gradient })
    };
    let step = |step: Step<'_>| {
        let inputs = step.inputs.into_iter().map(input).collect::<PyResult<_>>()?;
        Ok(step.graph.get().step(inputs, step.frozen, step.channels_last))
    };
    steps.into_iter().map(step).collect()
}

/// Plans the memory of a step that consists of several graphs.
#[pyclass(frozen, module = "torch_convoke._engine")]
pub(crate) struct Planner {
    planner: Mutex<GraphPlanner>,
}

/// What the graphs of a step keep, and what that costs.
#[pyclass(frozen, get_all, module = "torch_convoke._engine")]
pub(crate) struct Plan {
    /// For each graph what it keeps, as [`Graph::set_keeps`] takes it.
    keeps: Vec<(Vec<String>, Vec<bool>)>,
    bytes_end_of_forward: usize,
    bytes_peak: usize,
    /// Seconds of all blocks.
    block_seconds: f64,
    /// The most workspace of a convolution, if the plan limits it.
    workspace_limit: Option<usize>,
}

fn named(plan: GraphPlan) -> Plan {
    let named =
        |keep: GraphKeep| (keep.blocks.iter().map(|keep| keep.name().to_owned()).collect(), keep.recomputed);
    Plan {
        keeps: plan.keeps.into_iter().map(named).collect(),
        bytes_end_of_forward: plan.bytes_end_of_forward,
        bytes_peak: plan.bytes_peak,
        block_seconds: plan.block_seconds,
        workspace_limit: plan.workspace_limit,
    }
}

#[pymethods]
impl Planner {
    /// Times the blocks of the graphs, for about `seconds` at most.
    #[new]
    fn new(py: Python<'_>, engine: &Engine, graphs: Vec<Step<'_>>, seconds: f64) -> PyResult<Planner> {
        let (device, steps) = (engine.device.clone(), steps(graphs)?);
        let time_budget = Duration::from_secs_f64(seconds.clamp(0.0, 1e6));
        let planner = released(py, || {
            let options = PlannerOptions { time_budget };
            // Ctrl-C ends the timing.
            let mut interrupted = None;
            let mut check = |_| match Python::attach(|py| py.check_signals()) {
                Ok(()) => ControlFlow::Continue(()),
                Err(error) => {
                    interrupted = Some(error);
                    ControlFlow::Break(())
                }
            };
            let planner = GraphPlanner::new(&device, &steps, &options, &mut check)?;
            Ok(planner.ok_or(interrupted))
        })?;
        match planner {
            Ok(planner) => Ok(Planner { planner: Mutex::new(planner) }),
            Err(interrupted) => Err(interrupted.unwrap_or_else(|| {
                pyo3::exceptions::PyKeyboardInterrupt::new_err("the planning was stopped")
            })),
        }
    }

    /// The fastest plan within a budget of bytes, and whether it fits; if none does, the one with the lowest peak.
    fn within(&self, py: Python<'_>, budget: usize) -> PyResult<(bool, Plan)> {
        released(py, || {
            let mut planner = self.planner.lock().unwrap_or_else(PoisonError::into_inner);
            Ok(match planner.within(budget)? {
                Ok(plan) => (true, named(plan)),
                Err(plan) => (false, named(plan)),
            })
        })
    }
}

/// Makes the graphs keep at most `most` bytes after forward, chosen without measuring, or as little as that finds.
#[pyfunction]
pub(crate) fn lighten(py: Python<'_>, engine: &Engine, graphs: Vec<Step<'_>>, most: usize) -> PyResult<()> {
    let models: Vec<_> = graphs.iter().map(|step| step.graph.clone()).collect();
    let (device, steps) = (engine.device.clone(), steps(graphs)?);
    let keeps = released(py, || lightened(&device, &steps, most))?;
    for (graph, keeps) in models.iter().zip(keeps) {
        graph.get().keep(&keeps);
    }
    Ok(())
}

/// The exact bytes of a step of these graphs, as they keep now or without a plan: after forward, and at the peak.
#[pyfunction]
pub(crate) fn step_memory(
    py: Python<'_>,
    engine: &Engine,
    graphs: Vec<Step<'_>>,
) -> PyResult<(usize, usize)> {
    let keeps: Vec<_> = graphs.iter().map(|step| step.graph.get().keeps()).collect();
    let (device, steps) = (engine.device.clone(), steps(graphs)?);
    released(py, || {
        let bytes = graph_memory(&device, &steps, Some(&keeps))?;
        Ok((bytes.bytes_end_of_forward, bytes.bytes_peak))
    })
}
