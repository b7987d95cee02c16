//! Predicts how much memory a run's steps take, without computing them.

use convoke_autograd::Device;
pub use convoke_graph::planner::MemoryPrediction;
use convoke_graph::planner::{self, blocks};

use super::{Result, StepReport, Trainer, TrainingConfig};
use crate::data::Datasets;
use crate::data_parallel::shard;
use crate::{ConfigError, Module};

/// Exactly the bytes that the steps of a run with this configuration will report: for a run alone on `device`, from its second
/// step on and for whole batches.
///
/// It goes through steps of the run on a [dry](Device::dry) device: algorithms are chosen, perhaps by measuring, as the run
/// itself would choose them, but nothing is computed.
///
/// # Errors
/// As [`Trainer::new`]; if an operation fails.
pub fn predict_memory(
    device: &Device,
    config: TrainingConfig,
    data: impl Into<Datasets>,
) -> Result<MemoryPrediction> {
    DrySteps::new(device, config, data)?.step()
}

/// A run on a [dry](Device::dry) device, which tells the bytes of its steps.
pub(crate) struct DrySteps {
    trainer: Trainer,
    kinds: Vec<Option<blocks::BlockKind>>,
}

impl DrySteps {
    /// A run after its first step; algorithms are chosen as for `device`.
    pub(crate) fn new(
        device: &Device,
        config: TrainingConfig,
        data: impl Into<Datasets>,
    ) -> Result<DrySteps> {
        // Values on a dry device are meaningless, so a loss may be NaN.
        let mut config = TrainingConfig { stop_on_nan: false, ..config };
        // The steps that train everything on images of full size take the most.
        config.parameters.frozen_steps = 0;
        config.progressive = None;
        let device = device.dry();
        let mut dry = DrySteps { trainer: Trainer::new(&device, config, data)?, kinds: Vec::new() };
        let weights = blocks::weights(dry.model());
        device.start_block_runs();
        dry.step()?;
        dry.kinds = blocks::kinds(&weights, &device.take_block_runs());
        Ok(dry)
    }

    /// The kind of each block of the model, in its order; `None` for a block that runs as separate layers or needs no gradient.
    pub(crate) fn kinds(&self) -> &[Option<blocks::BlockKind>] {
        &self.kinds
    }

    pub(crate) fn model(&self) -> &dyn Module {
        self.trainer.model()
    }

    /// The bytes of a step with a whole batch.
    pub(crate) fn step(&mut self) -> Result<MemoryPrediction> {
        // Start at a whole batch: the last one of an epoch may be smaller.
        self.trainer.batch = 0;
        let StepReport { bytes_end_of_forward, bytes_peak, .. } = self.trainer.step()?;
        Ok(MemoryPrediction::new(bytes_end_of_forward, bytes_peak))
    }
}

impl Trainer {
    /// The bytes of this run's steps, as [`predict_memory`] gives them. The run does not change.
    ///
    /// With several ranks, this counts this rank's part of a whole batch, without the buffers that carry gradients between ranks.
    ///
    /// # Errors
    /// As [`predict_memory`].
    pub fn predict_memory(&self) -> Result<MemoryPrediction> {
        let ranks = self.communicator();
        let own = shard(self.config.batch_size, ranks.rank(), ranks.world_size()).len();
        let config = TrainingConfig { batch_size: own.max(1), ..self.config.clone() };
        let mut dry = DrySteps::new(&self.device, config, self.data.clone())?;
        planner::copy(self.model(), dry.model()).map_err(ConfigError::from)?;
        dry.step()
    }
}
