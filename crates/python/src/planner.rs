//! Memory plans for Python: what the blocks of a model's subgraphs keep, within a budget.

use std::ops::ControlFlow;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use convoke_autograd::Error;
use convoke_nn::planner::{
    GraphInput, GraphKeep, GraphPlan, GraphPlanner, GraphStep, PlannerOptions, graph_memory, lightened,
};
use convoke_nn::training::TrainingError;
use pyo3::prelude::*;

use crate::engine::Engine;
use crate::error::released;
use crate::graph::{Graph, format};

/// A graph as a part of a step: the graph; for each input its shape, whether it is in channels-last, and whether it gets a gradient; and
/// the names of the parameters that get none, and of those that are in channels-last.
type Step<'py> = (Bound<'py, Graph>, Vec<(Vec<usize>, bool, bool)>, Vec<String>, Vec<String>);

fn steps(steps: Vec<Step<'_>>) -> Vec<GraphStep> {
    let step = |(graph, inputs, frozen, channels_last): Step<'_>| {
        let input =
            |(shape, channels_last, gradient)| GraphInput { shape, format: format(channels_last), gradient };
        graph.get().step(inputs.into_iter().map(input).collect(), frozen, channels_last)
    };
    steps.into_iter().map(step).collect()
}

/// An error of a plan as one of an operation, which it is: no training run is involved.
fn plain(error: TrainingError) -> Error {
    match error {
        TrainingError::Tensor(error) => error,
        error => Error::Invalid { operation: "plan", reason: error.to_string() },
    }
}

/// Plans the memory of a step that consists of several graphs.
#[pyclass(frozen, module = "torch_convoke._engine")]
pub(crate) struct Planner {
    planner: Mutex<GraphPlanner>,
}

/// What each graph keeps, as [`Graph::set_keeps`] takes it; bytes after forward, and at the peak; seconds of all blocks; the workspace
/// limit.
type Plan = (Vec<(Vec<String>, Vec<bool>)>, usize, usize, f64, Option<usize>);

fn named(plan: GraphPlan) -> Plan {
    let named =
        |keep: GraphKeep| (keep.blocks.iter().map(|keep| keep.name().to_owned()).collect(), keep.recomputed);
    (
        plan.keeps.into_iter().map(named).collect(),
        plan.bytes_end_of_forward,
        plan.bytes_peak,
        plan.block_seconds,
        plan.workspace_limit,
    )
}

#[pymethods]
impl Planner {
    /// Times the blocks of the graphs, for about `seconds` at most.
    #[new]
    fn new(py: Python<'_>, engine: &Engine, graphs: Vec<Step<'_>>, seconds: f64) -> PyResult<Planner> {
        let (device, steps) = (engine.device.clone(), steps(graphs));
        let time_budget = Duration::from_secs_f64(seconds.clamp(0.0, 1e6));
        let planner = released(py, || {
            let options = PlannerOptions { time_budget, ..PlannerOptions::default() };
            // Ctrl-C ends the timing.
            let mut interrupted = None;
            let mut check = |_| match Python::attach(|py| py.check_signals()) {
                Ok(()) => ControlFlow::Continue(()),
                Err(error) => {
                    interrupted = Some(error);
                    ControlFlow::Break(())
                }
            };
            let planner = GraphPlanner::new(&device, &steps, &options, &mut check).map_err(plain)?;
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
            Ok(match planner.within(budget).map_err(plain)? {
                Ok(plan) => (true, named(plan)),
                Err(plan) => (false, named(plan)),
            })
        })
    }
}

/// Makes the graphs keep at most `most` bytes after forward, chosen without measuring, or as little as that finds.
#[pyfunction]
pub(crate) fn lighten(py: Python<'_>, engine: &Engine, graphs: Vec<Step<'_>>, most: usize) -> PyResult<()> {
    let models: Vec<_> = graphs.iter().map(|(graph, ..)| graph.clone()).collect();
    let (device, steps) = (engine.device.clone(), steps(graphs));
    let keeps = released(py, || lightened(&device, &steps, most).map_err(plain))?;
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
    let keeps: Vec<_> = graphs.iter().map(|(graph, ..)| graph.get().keeps()).collect();
    let (device, steps) = (engine.device.clone(), steps(graphs));
    released(py, || {
        let bytes = graph_memory(&device, &steps, Some(&keeps)).map_err(plain)?;
        Ok((bytes.bytes_end_of_forward, bytes.bytes_peak))
    })
}
