//! The flags that say how much memory training may take.

use std::path::PathBuf;
use std::time::Duration;

use crate::nn::planner::PlannerOptions;
use bytesize::ByteSize;
use clap::Args;

use super::values::{seconds_or_none, size};

/// How the fused blocks of a run choose what they keep for backward.
#[derive(Args)]
pub(crate) struct MemoryArgs {
    /// The most memory that a step may have in use on each rank, such as 650MB or 2GiB.
    ///
    /// Fused blocks are timed with each way to keep what backward needs, and the fastest plan that fits is used. Without a budget or a plan,
    /// each block keeps its convolution's output, and its own output too if it has a residual or a pool.
    #[arg(long, value_name = "SIZE", value_parser = size, conflicts_with = "memory_plan", help_heading = "Memory")]
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
    /// Has no effect any more: all plans are exact.
    #[arg(long, hide = true)]
    pub(crate) inexact_memory: bool,

    /// Seconds for timing the model's blocks; after that, each kind of block that is left is timed once.
    #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = seconds_or_none,
          help_heading = "Memory")]
    pub(crate) plan_time: Duration,
}

impl PlannerArgs {
    pub(crate) fn options(&self) -> PlannerOptions {
        PlannerOptions { time_budget: self.plan_time }
    }
}

impl MemoryArgs {
    /// Whether the flags ask for a plan.
    pub(crate) fn is_planned(&self) -> bool {
        self.memory_budget.is_some() || self.memory_plan.is_some()
    }
}
