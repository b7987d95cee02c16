//! Memory plans: made for a run as its flags ask, or read from the file that `convoke plan --json` wrote.

use std::ops::ControlFlow;
use std::path::Path;

use crate::Device;
use crate::nn::data::Datasets;
use crate::nn::modules::Keep;
use crate::nn::planner::{MemoryPlan, Planner, PlannerProgress};
use crate::nn::training::TrainingConfig;
use convoke_files::{escaped, read_text};
use serde::{Deserialize, Serialize};

use super::console::Console;
use super::failure::{Failure, Result};
use super::flags::memory::{MemoryArgs, PlannerArgs};
use super::statistics::Ratio;
use super::text;

/// What `plan --json` writes, and `--memory-plan` reads.
#[derive(Serialize, Deserialize)]
pub(crate) struct Document {
    /// The plan for the budget, or the fastest.
    pub(crate) plan: Option<MemoryPlan>,
    #[serde(default)]
    pub(crate) curve: Vec<Point>,
    #[serde(default)]
    pub(crate) largest_batch: Option<LargestBatches>,
}

/// A plan, or separate layers, with the memory and time taken.
#[derive(Clone, Serialize, Deserialize)]
pub(crate) struct Point {
    /// `separate`, `unplanned` or the number of the plan.
    pub(crate) name: String,
    pub(crate) bytes_end_of_forward: usize,
    pub(crate) bytes_peak: usize,
    /// The sum of the blocks' times, each block timed alone.
    pub(crate) block_seconds: Option<f64>,
    /// The median of whole steps, if steps were asked for.
    pub(crate) step_seconds: Option<f64>,
    /// Between these lie the times of half of the steps.
    #[serde(default)]
    pub(crate) step_seconds_quartiles: Option<[f64; 2]>,
    /// The time of a step over that of one with separate layers.
    #[serde(default)]
    pub(crate) step_ratio: Option<Ratio>,
    /// The name of another plan that takes no more memory and, within noise, no more time. Tables and charts leave this one out then,
    /// unless it was chosen.
    #[serde(default)]
    pub(crate) beaten_by: Option<String>,
    /// What its blocks keep.
    pub(crate) plan: Option<MemoryPlan>,
    /// The times of the steps, in the order of rounds.
    #[serde(skip)]
    pub(crate) times: Vec<f64>,
}

impl Point {
    /// A point without times; bytes are those at the end of forward and at the peak.
    pub(crate) fn new(name: &str, [bytes_end_of_forward, bytes_peak]: [usize; 2]) -> Point {
        Point {
            name: name.into(),
            bytes_end_of_forward,
            bytes_peak,
            block_seconds: None,
            step_seconds: None,
            step_seconds_quartiles: None,
            step_ratio: None,
            beaten_by: None,
            plan: None,
            times: Vec::new(),
        }
    }
}

#[derive(Clone, Copy, Serialize, Deserialize)]
pub(crate) struct LargestBatches {
    pub(crate) separate: Option<usize>,
    pub(crate) unplanned: Option<usize>,
    pub(crate) planned: Option<usize>,
}

/// A run that a plan is for.
pub(crate) struct Job<'a> {
    pub(crate) device: &'a Device,
    pub(crate) config: &'a TrainingConfig,
    pub(crate) data: &'a Datasets,
}

/// The plan for a run, if the flags ask for one.
pub(crate) fn of_run(args: &MemoryArgs, job: &Job<'_>, console: &Console) -> Result<Option<MemoryPlan>> {
    if let Some(file) = &args.memory_plan {
        return read(file, job.config).map(Some);
    }
    let Some(budget) = args.memory_budget else { return Ok(None) };
    let budget = usize::try_from(budget.as_u64()).unwrap_or(usize::MAX);
    let mut planner = planner(job, &args.planner, console)?;
    let plan = planner.within(budget).map_err(Failure::of_training)?;
    console.line(&format!(
        "memory plan: {} at most, {} when forward has ended; blocks {}{}",
        text::bytes(plan.bytes_peak as f64),
        text::bytes(plan.bytes_end_of_forward as f64),
        counts(&plan),
        plan.workspace_limit.map_or_else(String::new, |limit| {
            format!("; convolutions with at most {} of workspace", text::bytes(limit as f64))
        })
    ));
    Ok(Some(plan))
}

/// A planner that has timed the blocks of a run's model, with progress.
pub(crate) fn planner(job: &Job<'_>, args: &PlannerArgs, console: &Console) -> Result<Planner> {
    let mut stage = None;
    let mut progress = |at: PlannerProgress| -> ControlFlow<()> {
        let stage = stage.get_or_insert_with(|| console.stage("timing blocks", 0, Some(at.total as u64)));
        stage.set(at.done as u64, "");
        console.control()
    };
    let planner = Planner::new(job.device, job.config, job.data, &args.options(), &mut progress)
        .map_err(Failure::of_training)?;
    if let Some(stage) = stage {
        stage.end();
    }
    planner.ok_or_else(|| Failure::Interrupted("interrupted while blocks were timed".into()))
}

/// `3 recompute, 1 store`.
pub(crate) fn counts(plan: &MemoryPlan) -> String {
    let count = |keep: Keep| plan.blocks.iter().filter(|block| block.keep == keep).count();
    let parts = Keep::ALL.into_iter().map(|keep| (count(keep), keep)).filter(|(count, _)| *count > 0);
    parts.map(|(count, keep)| format!("{count} {keep}")).collect::<Vec<String>>().join(", ")
}

/// The most bytes that a plan file may have.
const LARGEST: u64 = 16 << 20;

fn read(file: &Path, config: &TrainingConfig) -> Result<MemoryPlan> {
    let failed = |reason: String| {
        Failure::Run(format!("--memory-plan: {}: {}", escaped(file.display()), escaped(reason)))
    };
    let text = read_text(file, LARGEST).map_err(|error| failed(error.to_string()))?;
    let document: Document =
        serde_json::from_str(&text).map_err(|error| failed(format!("no plan: {error}")))?;
    let plan = document.plan.ok_or_else(|| failed("it holds no plan".into()))?;
    if plan.model != config.model.name() {
        let (model, other) = (plan.model, &config.model);
        return Err(failed(format!(
            "the plan is for {model}, the run trains {other}: add --model {model}, or make a plan with `convoke plan --model {other}`"
        )));
    }
    Ok(plan)
}
