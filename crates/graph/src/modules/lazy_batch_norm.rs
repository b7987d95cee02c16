//! Batch norm that learns its number of channels from its first input.

use std::sync::OnceLock;

use convoke_autograd::{Result, Tensor};

use super::{BatchNorm, BatchNormConfig, NormMode};
use crate::{Forward, Init, Module, Part, Parts};

/// As PyTorch's `LazyBatchNorm1d`: see [`LazyBatchNorm`].
pub type LazyBatchNorm1d = LazyBatchNorm<1>;

/// As PyTorch's `LazyBatchNorm2d`: see [`LazyBatchNorm`].
pub type LazyBatchNorm2d = LazyBatchNorm<2>;

/// As PyTorch's `LazyBatchNorm3d`: see [`LazyBatchNorm`].
pub type LazyBatchNorm3d = LazyBatchNorm<3>;

/// A [`BatchNorm`] that gets its number of channels from its first input.
///
/// Before that it has no parameters, and an optimizer and a checkpoint refuse its model.
/// Run one forward first, in [`convoke_autograd::no_grad`] and evaluation, or call [`LazyBatchNorm::initialize`].
pub struct LazyBatchNorm<const SPATIAL: usize> {
    init: Init,
    config: BatchNormConfig,
    /// The switches of the layer; they exist before the layer does.
    mode: NormMode,
    layer: OnceLock<BatchNorm<SPATIAL>>,
}

impl<const SPATIAL: usize> LazyBatchNorm<SPATIAL> {
    /// A batch norm whose number of channels is not known yet.
    pub fn new(init: &Init, config: BatchNormConfig) -> Self {
        LazyBatchNorm { init: init.clone(), config, mode: NormMode::new(&config), layer: OnceLock::new() }
    }

    /// The layer, if it has seen its first input.
    pub fn layer(&self) -> Option<&BatchNorm<SPATIAL>> {
        self.layer.get()
    }

    /// Makes the layer for `channels` channels, unless it exists.
    ///
    /// # Errors
    /// If there are no channels.
    pub fn initialize(&self, channels: usize) -> Result<&BatchNorm<SPATIAL>> {
        if let Some(layer) = self.layer.get() {
            return Ok(layer);
        }
        let layer = BatchNorm::new(&self.init, channels, self.config)?.with_mode(&self.mode);
        Ok(self.layer.get_or_init(|| layer))
    }

    /// See [`BatchNorm::set_frozen`].
    pub fn set_frozen(&self, frozen: bool) {
        self.mode.set_frozen(frozen);
    }
}

impl<const SPATIAL: usize> Forward for LazyBatchNorm<SPATIAL> {
    fn forward(&self, input: &Tensor) -> Result<Tensor> {
        if let Some(layer) = self.layer.get() {
            return layer.forward(input);
        }
        BatchNorm::<SPATIAL>::check_rank(input)?;
        self.initialize(input.shape()[1])?.forward(input)
    }
}

impl<const SPATIAL: usize> Module for LazyBatchNorm<SPATIAL> {
    fn parts<'a>(&'a self, parts: &mut Parts<'a>) {
        match self.layer.get() {
            Some(layer) => layer.parts(parts),
            None => {
                parts.add("", &self.mode);
                parts.push("", Part::Uninitialized("LazyBatchNorm"));
            }
        }
    }
}
