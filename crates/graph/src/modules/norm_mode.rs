//! How a batch norm gets its statistics.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use convoke_distributed::Communicator;

use super::BatchNormConfig;
use crate::{Field, Part, Parts, TrainingMode};

/// How a batch norm gets its statistics: whether it trains, whether they are frozen, and over which ranks they are taken. Clones
/// share the same switches. With a field of this type, a module takes part in [`crate::ModuleExt::freeze_batchnorm`] and
/// [`crate::ModuleExt::convert_sync_batchnorm`].
#[derive(Debug, Clone)]
pub struct NormMode {
    training: TrainingMode,
    switches: Arc<Switches>,
}

#[derive(Debug)]
struct Switches {
    frozen: AtomicBool,
    track_running_stats: AtomicBool,
    communicator: Mutex<Option<Communicator>>,
    recomputed: AtomicBool,
}

impl NormMode {
    /// The initial mode: training, not frozen, without other ranks.
    pub fn new(config: &BatchNormConfig) -> NormMode {
        NormMode {
            training: TrainingMode::default(),
            switches: Arc::new(Switches {
                frozen: false.into(),
                track_running_stats: config.track_running_stats.into(),
                communicator: Mutex::default(),
                recomputed: false.into(),
            }),
        }
    }

    /// The switch between training and evaluation.
    pub fn training(&self) -> &TrainingMode {
        &self.training
    }

    /// Whether the batch's statistics normalise and the running statistics move.
    pub fn uses_batch(&self) -> bool {
        self.training.is_training() && !self.is_frozen()
    }

    /// Whether statistics are frozen, also in training.
    pub fn is_frozen(&self) -> bool {
        self.switches.frozen.load(Ordering::Relaxed)
    }

    /// Freezes the statistics, or unfreezes them.
    pub fn set_frozen(&self, frozen: bool) {
        self.switches.frozen.store(frozen, Ordering::Relaxed);
    }

    /// Whether running statistics move in training.
    pub fn track_running_stats(&self) -> bool {
        self.switches.track_running_stats.load(Ordering::Relaxed)
    }

    /// Stops running statistics from moving in training, or lets them move again.
    pub fn set_track_running_stats(&self, track: bool) {
        self.switches.track_running_stats.store(track, Ordering::Relaxed);
    }

    /// Whether the output is recomputed in backward: see [`NormMode::set_recomputed`].
    pub fn is_recomputed(&self) -> bool {
        self.switches.recomputed.load(Ordering::Relaxed)
    }

    /// Makes layers that would keep the output for backward recompute it from the input, which is kept in any case. That takes less
    /// memory and more time. The values are the same to the last bit. A batch norm that is part of a fused block ignores this, as the
    /// block has its own [`super::Keep`].
    pub fn set_recomputed(&self, recomputed: bool) {
        self.switches.recomputed.store(recomputed, Ordering::Relaxed);
    }

    /// The ranks over whose batches statistics are taken in training, if any.
    pub fn communicator(&self) -> Option<Communicator> {
        self.switches.communicator.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Makes training take statistics over the batches of these ranks or, with `None`, over the layer's own batch only.
    pub fn set_communicator(&self, communicator: Option<&Communicator>) {
        *self.switches.communicator.lock().unwrap_or_else(PoisonError::into_inner) = communicator.cloned();
    }
}

impl Field for NormMode {
    fn add_to<'a>(&'a self, name: &str, parts: &mut Parts<'a>) {
        parts.add(name, &self.training);
        parts.push(name, Part::Statistics(self));
    }
}
