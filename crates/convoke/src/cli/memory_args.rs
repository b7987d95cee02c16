//! The flags that say how much memory training may take, and the plan made from them.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::Device;
use crate::nn::data::Datasets;
use crate::nn::modules::Keep;
use crate::nn::planner::{MemoryPlan, Planner, PlannerOptions};
use crate::nn::training::TrainingConfig;
use bytesize::ByteSize;
use clap::Args;
use convoke_files::{escaped, read_text};

use super::console::Console;
use super::summary;
use super::train::failure;
use super::{Failure, Result};

/// How the fused blocks of a run choose what they keep for backward.
#[derive(Args)]
pub(crate) struct MemoryArgs {
    /// The most memory that a step may have in use on each rank, such as 650MB or 2GiB. Fused blocks are timed with each way to
    /// keep what backward needs, and the fastest plan that fits is used. Without a budget or a plan, each block keeps its
    /// convolution's output, and its own output too if it has a residual or a pool.
    #[arg(long, value_name = "SIZE", conflicts_with = "memory_plan", help_heading = "Memory")]
    pub(crate) memory_budget: Option<ByteSize>,

    /// Use a plan that `convoke plan --json` wrote.
    #[arg(long, value_name = "FILE", help_heading = "Memory")]
    pub(crate) memory_plan: Option<PathBuf>,

    #[command(flatten)]
    pub(crate) planner: PlannerArgs,
}

/// How plans are made.
#[derive(Args)]
pub(crate) struct PlannerArgs {
    /// Allow plans that keep rounded values (bf16), which puts gradients off by some thousandths, or that undo normalisations,
    /// which puts them off by rounding errors.
    #[arg(long, help_heading = "Memory")]
    pub(crate) inexact_memory: bool,

    /// Seconds for timing the model's blocks; after that, each kind of block that is left is timed once.
    #[arg(long, value_name = "SECONDS", default_value_t = 60.0, value_parser = super::args::not_negative,
          help_heading = "Memory")]
    pub(crate) plan_time: f64,
}

impl PlannerArgs {
    pub(crate) fn options(&self) -> PlannerOptions {
        PlannerOptions {
            time_budget: Duration::from_secs_f64(self.plan_time.min(1e9)),
            inexact: self.inexact_memory,
        }
    }
}

impl MemoryArgs {
    /// Whether the flags ask for a plan.
    pub(crate) fn is_planned(&self) -> bool {
        self.memory_budget.is_some() || self.memory_plan.is_some()
    }

    /// The plan for a run, if the flags ask for one.
    pub(crate) fn plan(
        &self,
        device: &Device,
        config: &TrainingConfig,
        data: &Datasets,
        console: &Console,
    ) -> Result<Option<MemoryPlan>> {
        if let Some(file) = &self.memory_plan {
            return read(file, config).map(Some);
        }
        let Some(budget) = self.memory_budget else { return Ok(None) };
        let budget = usize::try_from(budget.as_u64()).unwrap_or(usize::MAX);
        let mut planner = planner(device, config, data, &self.planner, console)?;
        let plan = planner.within(budget).map_err(failure)?;
        console.line(&format!(
            "memory plan: {} at most, {} when forward has ended; blocks {}{}",
            summary::bytes(plan.bytes_peak as f64),
            summary::bytes(plan.bytes_end_of_forward as f64),
            counts(&plan),
            plan.workspace_limit.map_or_else(String::new, |limit| {
                format!("; convolutions with at most {} of workspace", summary::bytes(limit as f64))
            })
        ));
        Ok(Some(plan))
    }
}

/// A planner that has timed the blocks of a run's model, with progress.
pub(crate) fn planner(
    device: &Device,
    config: &TrainingConfig,
    data: &Datasets,
    args: &PlannerArgs,
    console: &Console,
) -> Result<Planner> {
    let mut stage = None;
    let mut progress = |at: crate::nn::planner::PlannerProgress| -> ControlFlow<()> {
        let stage = stage.get_or_insert_with(|| console.stage("timing blocks", 0, Some(at.total as u64)));
        stage.set(at.done as u64, "");
        console.control()
    };
    let planner = Planner::new(device, config, data, &args.options(), &mut progress).map_err(failure)?;
    if let Some(stage) = stage {
        stage.end();
    }
    planner.ok_or_else(|| Failure::Run("interrupted while blocks were timed".into()))
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
    let document: super::plan::Document =
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
