//! Batch norm that learns its number of channels from its first input.

use std::sync::{Mutex, OnceLock, PoisonError};

use convoke_autograd::{Error, Result, Tensor};
use convoke_distributed::Communicator;

use super::{BatchNorm, BatchNormConfig};
use crate::{Init, Module, State};

/// As PyTorch's `LazyBatchNorm1d`: see [`LazyBatchNorm`].
pub type LazyBatchNorm1d = LazyBatchNorm<1>;

/// As PyTorch's `LazyBatchNorm2d`: see [`LazyBatchNorm`].
pub type LazyBatchNorm2d = LazyBatchNorm<2>;

/// As PyTorch's `LazyBatchNorm3d`: see [`LazyBatchNorm`].
pub type LazyBatchNorm3d = LazyBatchNorm<3>;

/// A [`BatchNorm`] whose number of channels is that of its first input.
///
/// Until then it holds nothing: an optimizer, a checkpoint or [`crate::checkpoint::load_model`] refuse a model with such a layer.
/// Run one forward first, in [`convoke_autograd::no_grad`] and evaluation, or call [`LazyBatchNorm::initialize`].
pub struct LazyBatchNorm<const SPATIAL: usize> {
    init: Init,
    config: BatchNormConfig,
    layer: OnceLock<BatchNorm<SPATIAL>>,
    /// Whether it trains, whether it is frozen, its ranks; also the lock under which the layer is made.
    before: Mutex<Before>,
}

/// What is said to the layer before it exists.
struct Before {
    training: bool,
    frozen: bool,
    communicator: Option<Communicator>,
}

impl<const SPATIAL: usize> LazyBatchNorm<SPATIAL> {
    /// A batch norm of a number of channels not known yet.
    pub fn new(init: &Init, config: BatchNormConfig) -> Self {
        let before = Mutex::new(Before { training: true, frozen: false, communicator: None });
        LazyBatchNorm { init: init.clone(), config, layer: OnceLock::new(), before }
    }

    /// The layer, if it has met its first input.
    pub fn layer(&self) -> Option<&BatchNorm<SPATIAL>> {
        self.layer.get()
    }

    /// Makes the layer for `channels` channels, unless it exists.
    ///
    /// # Errors
    /// If there are no channels.
    pub fn initialize(&self, channels: usize) -> Result<&BatchNorm<SPATIAL>> {
        let before = self.before.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(layer) = self.layer.get() {
            return Ok(layer);
        }
        let layer = BatchNorm::new(&self.init, channels, self.config)?;
        layer.set_training(before.training);
        layer.set_frozen(before.frozen);
        layer.set_communicator(before.communicator.as_ref());
        Ok(self.layer.get_or_init(|| layer))
    }

    /// See [`BatchNorm::set_frozen`].
    pub fn set_frozen(&self, frozen: bool) {
        self.say(|before| before.frozen = frozen, |layer| layer.set_frozen(frozen));
    }

    /// Says one thing to the layer, and remembers it for one that does not exist yet.
    fn say(&self, remember: impl FnOnce(&mut Before), say: impl FnOnce(&BatchNorm<SPATIAL>)) {
        let mut before = self.before.lock().unwrap_or_else(PoisonError::into_inner);
        remember(&mut before);
        if let Some(layer) = self.layer.get() {
            say(layer);
        }
    }
}

impl<const SPATIAL: usize> Module for LazyBatchNorm<SPATIAL> {
    fn forward(&self, input: &Tensor) -> Result<Tensor> {
        if let Some(layer) = self.layer.get() {
            return layer.forward(input);
        }
        BatchNorm::<SPATIAL>::check_rank(input)?;
        self.initialize(input.shape()[1])?.forward(input)
    }

    fn state(&self) -> Vec<(&'static str, State)> {
        self.layer.get().map(|layer| layer.state()).unwrap_or_default()
    }

    fn set_training(&self, training: bool) {
        self.say(|before| before.training = training, |layer| layer.set_training(training));
    }

    fn set_frozen_statistics(&self, frozen: bool) {
        self.set_frozen(frozen);
    }

    fn set_communicator(&self, communicator: Option<&Communicator>) {
        self.say(
            |before| before.communicator = communicator.cloned(),
            |layer| layer.set_communicator(communicator),
        );
    }

    fn check_initialized(&self) -> Result<()> {
        if self.layer.get().is_some() {
            return Ok(());
        }
        let reason = "a lazy layer has no parameters before its first input: run one forward first".into();
        Err(Error::Invalid { operation: "LazyBatchNorm", reason })
    }
}
