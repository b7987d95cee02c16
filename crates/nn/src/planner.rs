//! Chooses what each block of a model keeps for backward, to fit a memory budget.
//!
//! A [`Planner`] times each kind of block with each [`Keep`], and gets the exact bytes of a step by running it on a dry device.
//! It then searches for the fastest plan within a budget, or for the whole [curve](Planner::curve) of memory against time.
//! docs/memory.md explains how.

use std::collections::BTreeMap;
use std::ops::ControlFlow;

use convoke_autograd::Device;
use convoke_autograd::ops::Keep;

use convoke_graph::planner::blocks::{self, BlockKind};
use convoke_graph::planner::search::{Choice, Found, Search, Steps, limited};
pub use convoke_graph::planner::{
    GraphInput, GraphKeep, GraphPlan, GraphPlanner, GraphStep, MemoryPlan, PlanMismatch, PlannedBlock,
    PlannerOptions, PlannerProgress, graph_memory, lightened,
};

use crate::ConfigError;
use crate::data::Datasets;
use crate::modules::{ConvBnMode, FusedBlock};
use crate::training::{DrySteps, MemoryPrediction, TrainingConfig, TrainingError};

type Result<T> = std::result::Result<T, TrainingError>;

impl Steps for DrySteps {
    type Error = TrainingError;

    fn blocks(&self) -> Vec<(String, &dyn FusedBlock)> {
        blocks::find(self.model())
    }

    fn kinds(&self) -> &[Option<BlockKind>] {
        DrySteps::kinds(self)
    }

    fn step(&mut self) -> Result<MemoryPrediction> {
        DrySteps::step(self)
    }
}

/// Plans what the blocks of one model keep, for one batch size.
///
/// ```no_run
/// use std::ops::ControlFlow;
///
/// use convoke_autograd::Device;
/// use convoke_nn::data::{digits::digits, silent};
/// use convoke_nn::models::Models;
/// use convoke_nn::planner::{Planner, PlannerOptions};
/// use convoke_nn::training::{Trainer, TrainingConfig};
///
/// let (device, data) = (Device::cpu()?, digits(1, 4096, 1024, &silent)?.into());
/// let model = Models::builtin().get("mnist-cnn").expect("it is built in").clone();
/// let config = TrainingConfig { batch_size: 1024, ..TrainingConfig::new(model) };
/// // Times each kind of block, which takes up to a minute.
/// let planner = Planner::new(&device, &config, &data, &PlannerOptions::default(), &mut |_| ControlFlow::Continue(()))?;
/// let plan = planner.expect("it was not stopped").within(400_000_000)?;
/// println!("{} bytes at the peak", plan.bytes_peak);
/// Trainer::new(&device, config, data)?.set_memory_plan(&plan)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Planner {
    device: Device,
    config: TrainingConfig,
    data: Datasets,
    search: Search<DrySteps>,
}

impl Planner {
    /// Times the blocks of a run's model on `device`. `progress` may stop that: the result is then `Ok(None)`.
    ///
    /// The Conv+BN blocks are fused, whatever `config` says.
    ///
    /// # Errors
    /// If the run could not start, or an operation fails.
    pub fn new(
        device: &Device,
        config: &TrainingConfig,
        data: &Datasets,
        options: &PlannerOptions,
        progress: &mut dyn FnMut(PlannerProgress) -> ControlFlow<()>,
    ) -> Result<Option<Planner>> {
        let config = TrainingConfig { conv_bn: ConvBnMode::Fused, ..config.clone() };
        let dry = DrySteps::new(device, config.clone(), data.clone())?;
        let search = Search::new(device, dry, options, progress)?;
        Ok(search.map(|search| Planner { device: device.clone(), config, data: data.clone(), search }))
    }

    fn plan(&self, found: &Found) -> MemoryPlan {
        let blocks = self.search.blocks.iter().zip(&found.keeps).map(|(block, &keep)| {
            let Choice { seconds, saved, .. } = block.choice(keep);
            PlannedBlock { path: block.path.clone(), keep, bytes_saved: saved, seconds }
        });
        MemoryPlan {
            model: self.config.model.to_string(),
            batch_size: self.config.batch_size,
            threads: self.device.compute().threads(),
            blocks: blocks.collect(),
            bytes_end_of_forward: found.bytes.bytes_end_of_forward,
            bytes_peak: found.bytes.bytes_peak,
            block_seconds: found.seconds,
            workspace_limit: found.workspace_limit,
        }
    }

    /// Plans from the fastest to the smallest: each has a lower peak than all faster ones.
    ///
    /// # Errors
    /// If a dry step fails.
    pub fn curve(&mut self) -> Result<Vec<MemoryPlan>> {
        let found = self.search.curve()?;
        Ok(found.iter().map(|found| self.plan(found)).collect())
    }

    /// The fastest plan found whose steps never have more than `budget` bytes in use. If none fits, convolutions are also limited
    /// to less workspace.
    ///
    /// # Errors
    /// If no plan fits: [`TrainingError::Budget`], which tells by how much the smallest plan misses and which batch size would
    /// fit.
    pub fn within(&mut self, budget: usize) -> Result<MemoryPlan> {
        let found = self.search.within(budget)?;
        found.map(|found| self.plan(&found)).map_err(|least| self.nothing_fits(budget, &least))
    }

    fn nothing_fits(&self, budget: usize, least: &Found) -> TrainingError {
        let paths = self.search.blocks.iter().map(|block| block.path.clone());
        let keeps: BTreeMap<String, Keep> = paths.zip(least.keeps.iter().copied()).collect();
        let at_most = self.config.batch_size;
        let fits = limited(self.device.tuner(), least.workspace_limit, || {
            largest_batch(&self.device, &self.config, &self.data, budget, Some(&keeps), at_most)
        });
        TrainingError::Budget {
            model: self.config.model.to_string(),
            batch_size: self.config.batch_size,
            budget,
            needed: least.bytes.bytes_peak,
            fits: fits.ok().flatten(),
        }
    }

    /// The largest batch size whose steps fit a budget: with blocks that keep what `plan` says or, without a plan, with separate
    /// layers. At most the number of training images in `data`, which must be of the run's kind. `None` if not even one image
    /// fits.
    ///
    /// # Errors
    /// If a dry step fails.
    pub fn largest_batch(
        &self,
        budget: usize,
        plan: Option<&MemoryPlan>,
        data: &Datasets,
    ) -> Result<Option<usize>> {
        let keeps =
            plan.map(|plan| plan.blocks.iter().map(|block| (block.path.clone(), block.keep)).collect());
        let limit = plan.and_then(|plan| plan.workspace_limit);
        limited(self.device.tuner(), limit, || {
            largest_batch(&self.device, &self.config, data, budget, keeps.as_ref(), data.train.len())
        })
    }

    /// The plan with the lowest peak that the search finds, however slow.
    ///
    /// # Errors
    /// If a dry step fails.
    pub fn smallest(&mut self) -> Result<MemoryPlan> {
        let found = self.search.smallest()?;
        Ok(self.plan(&found))
    }

    /// The bytes of this run with separate layers.
    ///
    /// # Errors
    /// If a dry step fails.
    pub fn separate(&self) -> Result<MemoryPrediction> {
        let config = TrainingConfig { conv_bn: ConvBnMode::Separate, ..self.config.clone() };
        DrySteps::new(&self.device, config, self.data.clone())?.step()
    }

    /// The plan that a run without a plan follows: what its blocks keep by default.
    ///
    /// # Errors
    /// If a dry step fails.
    pub fn unplanned(&mut self) -> Result<MemoryPlan> {
        let found = self.search.unplanned()?;
        Ok(self.plan(&found))
    }
}

/// The largest batch size, at most `at_most`, whose steps fit a budget. Without `keeps`, layers are separate.
fn largest_batch(
    device: &Device,
    config: &TrainingConfig,
    data: &Datasets,
    budget: usize,
    keeps: Option<&BTreeMap<String, Keep>>,
    at_most: usize,
) -> Result<Option<usize>> {
    let conv_bn = if keeps.is_some() { ConvBnMode::Fused } else { ConvBnMode::Separate };
    let fits = |batch_size: usize| -> Result<bool> {
        let config = TrainingConfig { batch_size, conv_bn, ..config.clone() };
        let mut dry = DrySteps::new(device, config, data.clone())?;
        if let Some(keeps) = keeps {
            convoke_graph::planner::apply(keeps, dry.model()).map_err(ConfigError::from)?;
        }
        Ok(dry.step()?.bytes_peak <= budget)
    };
    let (mut fitting, mut too_large) = (0, at_most + 1);
    while too_large - fitting > 1 {
        let middle = fitting + (too_large - fitting) / 2;
        match fits(middle)? {
            true => fitting = middle,
            false => too_large = middle,
        }
    }
    Ok((fitting > 0).then_some(fitting))
}
