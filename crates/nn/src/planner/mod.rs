//! What every block of a model keeps for backward, chosen for a budget of memory.
//!
//! A [`Planner`] times each kind of block with each way to [`Keep`], and knows the bytes of a step exactly, because it goes
//! through steps on a dry device. It then looks for the plan that takes the least time within a budget, or for the whole
//! [curve](Planner::curve) of memory against time. docs/memory.md tells how.

mod blocks;
mod search;
mod timing;

use std::collections::BTreeMap;

use convoke_autograd::ops::Keep;
use serde::{Deserialize, Serialize};

use crate::Module;
use crate::modules::ConvBnMode;

pub(crate) use blocks::BlockKind;
pub use search::{Planner, PlannerOptions, PlannerProgress};

/// What every fused block of a model keeps, and what that costs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct MemoryPlan {
    /// The model's name.
    pub model: String,
    /// Images a step.
    pub batch_size: usize,
    /// Threads that the times are for.
    pub threads: usize,
    /// In the order of the model.
    pub blocks: Vec<PlannedBlock>,
    /// Bytes in use when forward has ended: parameters, optimizer state and what is kept. Exact.
    pub bytes_end_of_forward: usize,
    /// The most bytes in use at any moment of a step, gradients and workspaces included. Exact.
    pub bytes_peak: usize,
    /// Seconds of all blocks, forward and backward: the sum of what each took alone.
    pub block_seconds: f64,
    /// Bytes of workspace that a convolution may need, if nothing fitted without a limit. Times are without it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workspace_limit: Option<usize>,
}

/// One block of a plan.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PlannedBlock {
    /// Its path in the model.
    pub path: String,
    /// What it keeps.
    #[serde(with = "keep_name")]
    pub keep: Keep,
    /// Bytes that it keeps until its backward, less than if it kept everything.
    pub bytes_saved: usize,
    /// Seconds of its forward and backward, as measured.
    pub seconds: f64,
}

impl MemoryPlan {
    /// Makes the blocks of `model` keep what the plan says.
    ///
    /// # Errors
    /// The first block that only one of the two has; nothing has changed then.
    pub fn apply(&self, model: &dyn Module) -> std::result::Result<(), String> {
        let keeps = self.blocks.iter().map(|block| (block.path.clone(), block.keep)).collect();
        apply(&keeps, model)
    }
}

/// The keeps of a model's blocks, by path.
pub(crate) fn keeps(model: &dyn Module) -> BTreeMap<String, Keep> {
    blocks::find(model).into_iter().map(|(path, block)| (path, block.keep())).collect()
}

/// Makes the blocks of `model` keep these.
pub(crate) fn apply(keeps: &BTreeMap<String, Keep>, model: &dyn Module) -> std::result::Result<(), String> {
    let blocks = blocks::find(model);
    if let Some((path, _)) = blocks.iter().find(|(path, _)| !keeps.contains_key(path)) {
        return Err(format!("the memory plan has no block {path:?}"));
    }
    if let Some(path) = keeps.keys().find(|&path| blocks.iter().all(|(known, _)| known != path)) {
        return Err(format!("the memory plan has a block {path:?}, which the model has not"));
    }
    if let Some((path, _)) = blocks.iter().find(|(_, block)| block.mode() != ConvBnMode::Fused) {
        return Err(format!("a memory plan is for fused blocks, and {path:?} runs as separate layers"));
    }
    blocks.into_iter().for_each(|(path, block)| block.set_keep(keeps[&path]));
    Ok(())
}

/// Makes the blocks of `model` keep what those of another of the same kind keep; separate layers keep what they must.
pub(crate) fn copy(from: &dyn Module, model: &dyn Module) -> std::result::Result<(), String> {
    let fused = blocks::find(from).iter().all(|(_, block)| block.mode() == ConvBnMode::Fused);
    if fused { apply(&keeps(from), model) } else { Ok(()) }
}

/// A [`Keep`] as its name.
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
