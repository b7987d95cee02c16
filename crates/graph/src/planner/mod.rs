//! Chooses what each block of a model keeps for backward, to fit a memory budget.
//!
//! A [`search::Search`] times each kind of block with each [`Keep`], and gets the exact bytes of a step by running it on a dry device.
//! Then it looks for the fastest plan within a budget. A [`GraphPlanner`] plans graphs; the planner of training runs is in
//! `convoke-nn`. docs/memory.md explains how.

pub mod blocks;
mod graphs;
mod remembered;
pub mod search;
mod timing;

use std::collections::BTreeMap;

use convoke_autograd::ops::Keep;
use serde::{Deserialize, Serialize};

use crate::Module;
use crate::modules::ConvBnMode;

pub use graphs::{GraphInput, GraphKeep, GraphPlan, GraphPlanner, GraphStep, graph_memory, lightened};
pub use search::{PlannerOptions, PlannerProgress};

/// The bytes of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemoryPrediction {
    /// Bytes in use at the end of forward.
    pub bytes_end_of_forward: usize,
    /// The most bytes in use at any moment of the step.
    pub bytes_peak: usize,
}

impl MemoryPrediction {
    #[doc(hidden)]
    pub fn new(bytes_end_of_forward: usize, bytes_peak: usize) -> MemoryPrediction {
        MemoryPrediction { bytes_end_of_forward, bytes_peak }
    }
}

/// What each fused block of a model keeps for backward, and what that costs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct MemoryPlan {
    /// The model's name.
    pub model: String,
    /// Images per step.
    pub batch_size: usize,
    /// The number of threads with which the times were measured.
    pub threads: usize,
    /// The blocks, in the order of the model.
    pub blocks: Vec<PlannedBlock>,
    /// Bytes in use at the end of forward: parameters, optimizer state and what is kept. Exact.
    pub bytes_end_of_forward: usize,
    /// The most bytes in use at any moment of a step, gradients and workspaces included. Exact.
    pub bytes_peak: usize,
    /// Seconds of forward and backward of all blocks: the sum of each block's own time, measured alone.
    pub block_seconds: f64,
    /// The most workspace, in bytes, that a convolution may use. Only set if no plan fits without a limit. The times are those
    /// without it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workspace_limit: Option<usize>,
}

/// One block of a plan.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PlannedBlock {
    /// The path of the block in the model.
    pub path: String,
    /// What it keeps.
    #[serde(with = "keep_name")]
    pub keep: Keep,
    /// How many fewer bytes are in use at the end of forward than with [`Keep::Store`].
    pub bytes_saved: usize,
    /// Seconds of its forward and backward, as measured.
    pub seconds: f64,
}

impl MemoryPlan {
    /// Makes the blocks of `model` keep what the plan says.
    ///
    /// # Errors
    /// If plan and model have different blocks (the message names the first), or a block runs as separate layers. The model is
    /// then unchanged.
    pub fn apply(&self, model: &dyn Module) -> Result<(), PlanMismatch> {
        let keeps = self.blocks.iter().map(|block| (block.path.clone(), block.keep)).collect();
        apply(&keeps, model)
    }
}

/// Why a memory plan is not for a model.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanMismatch {
    /// The model has a block that the plan has not.
    #[error("the memory plan has no block {0:?}")]
    Missing(String),
    /// The plan has a block that the model has not.
    #[error("the memory plan has a block {0:?}, which the model has not")]
    Unknown(String),
    /// A block does not run fused.
    #[error("a memory plan is for fused blocks, and {0:?} runs as separate layers")]
    Separate(String),
}

/// What each block of a model keeps, by path.
pub fn keeps(model: &dyn Module) -> BTreeMap<String, Keep> {
    blocks::find(model).into_iter().map(|(path, block)| (path, block.keep())).collect()
}

/// Makes each block of `model` keep what `keeps` says for its path.
///
/// # Errors
/// As [`MemoryPlan::apply`].
pub fn apply(keeps: &BTreeMap<String, Keep>, model: &dyn Module) -> Result<(), PlanMismatch> {
    let blocks = blocks::find(model);
    if let Some((path, _)) = blocks.iter().find(|(path, _)| !keeps.contains_key(path)) {
        return Err(PlanMismatch::Missing(path.clone()));
    }
    if let Some(path) = keeps.keys().find(|&path| blocks.iter().all(|(known, _)| known != path)) {
        return Err(PlanMismatch::Unknown(path.clone()));
    }
    if let Some((path, _)) = blocks.iter().find(|(_, block)| block.mode() != ConvBnMode::Fused) {
        return Err(PlanMismatch::Separate(path.clone()));
    }
    blocks.into_iter().for_each(|(path, block)| block.set_keep(keeps[&path]));
    Ok(())
}

/// Makes the blocks of `model` keep what those of `from`, a model of the same kind, keep. Does nothing if the blocks of `from`
/// run as separate layers, which always keep the same.
///
/// # Errors
/// If the models have different blocks.
pub fn copy(from: &dyn Module, model: &dyn Module) -> Result<(), PlanMismatch> {
    let fused = blocks::find(from).iter().all(|(_, block)| block.mode() == ConvBnMode::Fused);
    if fused { apply(&keeps(from), model) } else { Ok(()) }
}

/// Serializes a [`Keep`] as its name.
mod keep_name {
    use convoke_autograd::ops::Keep;
    use serde::{Deserialize, Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(keep: &Keep, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(keep.name())
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Keep, D::Error> {
        let name = String::deserialize(from)?;
        Keep::named(&name).ok_or_else(|| {
            let names = Keep::ALL.map(Keep::name).join(", ");
            serde::de::Error::custom(format!("{name:?} is not one of {names}"))
        })
    }
}
