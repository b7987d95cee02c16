//! The batch-norm layer: parameters, running statistics, training and evaluation.

use std::sync::Arc;

use convoke_autograd::ops::{
    self, Activation, BatchNormBlock, BatchNormOptions, Convention, Moments, Statistics,
};
use convoke_autograd::{DType, Error, Result, Tensor};
use convoke_distributed::Communicator;

use super::NormMode;
use super::sync_batch_norm::Ranks;
use crate::{Buffer, Counter, Forward, Init, Module, Parameter, Part, Parts};

/// The options of a batch norm. The default is PyTorch's.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BatchNormConfig {
    /// What momentum, running variance and eps mean.
    pub convention: Convention,
    /// Keeps the divisor from 0.
    pub eps: f64,
    /// The weight of the new or of the old value in the running statistics, as the convention says; `None` averages over all
    /// batches so far.
    pub momentum: Option<f64>,
    /// Whether there are weight and bias. To have only one of them, set the layer's field of the other to `None`.
    pub affine: bool,
    /// Whether running statistics are kept; without them evaluation uses the batch's.
    pub track_running_stats: bool,
}

impl Default for BatchNormConfig {
    fn default() -> BatchNormConfig {
        BatchNormConfig::of(Convention::pytorch())
    }
}

impl BatchNormConfig {
    /// The defaults of a framework.
    pub fn of(convention: Convention) -> BatchNormConfig {
        BatchNormConfig {
            convention,
            eps: convention.default_eps,
            momentum: Some(convention.default_momentum),
            affine: true,
            track_running_stats: true,
        }
    }
}

/// Batch normalization of N x C x H x W, as PyTorch's `BatchNorm2d`: see [`BatchNorm`].
///
/// ```
/// use convoke_autograd::ops::Convention;
/// use convoke_autograd::{DType, Device, Tensor};
/// use convoke_graph::modules::{BatchNorm2d, BatchNormConfig};
/// use convoke_graph::{Forward, Init, ModuleExt};
///
/// let device = Device::cpu()?;
/// let init = Init::new(&device, 0);
/// let pytorch = BatchNorm2d::new(&init, 8, BatchNormConfig::default())?;
/// // momentum 0.99 weighs the old value, and the running variance is the biased one.
/// let keras = BatchNorm2d::new(&init, 8, BatchNormConfig::of(Convention::keras()))?;
///
/// let images = Tensor::full(&device, &[4, 8, 5, 5], DType::F32, 3.0)?;
/// let normalised = pytorch.forward(&images)?; // by the batch's statistics, and the running ones move
/// pytorch.eval();
/// let by_running = pytorch.forward(&images)?;
/// # let _ = (keras, normalised, by_running);
/// # Ok::<(), convoke_graph::Error>(())
/// ```
pub type BatchNorm2d = BatchNorm<2>;

/// Batch normalization of N x C or N x C x L, as PyTorch's `BatchNorm1d`: see [`BatchNorm`].
pub type BatchNorm1d = BatchNorm<1>;

/// Batch normalization of N x C x D x H x W, as PyTorch's `BatchNorm3d`: see [`BatchNorm`].
pub type BatchNorm3d = BatchNorm<3>;

/// Batch normalization of any input from N x C on, as PyTorch's `SyncBatchNorm`: see [`BatchNorm`] and
/// [`BatchNorm::synchronized`].
pub type SyncBatchNorm = BatchNorm<ANY>;

/// Any number of spatial dimensions.
pub const ANY: usize = usize::MAX;

/// Batch normalization of N x C x ... with `SPATIAL` spatial dimensions, or any number with [`ANY`]. With `SPATIAL` 1, N x C is
/// also accepted.
///
/// In training, each channel is normalised by the batch's mean and biased variance, and the running statistics move towards the
/// batch's mean and (by default *unbiased*) variance once per forward. In evaluation, the running statistics normalise.
pub struct BatchNorm<const SPATIAL: usize> {
    /// Gamma, C.
    pub weight: Option<Parameter>,
    /// Beta, C.
    pub bias: Option<Parameter>,
    running: Option<Running>,
    channels: usize,
    config: BatchNormConfig,
    mode: NormMode,
}

/// What a [`BatchNorm`] is made of.
pub(crate) struct NormParts {
    pub(crate) weight: Option<Parameter>,
    pub(crate) bias: Option<Parameter>,
    pub(crate) mean: Buffer,
    pub(crate) var: Buffer,
}

struct Running {
    mean: Buffer,
    var: Buffer,
    batches: Counter,
}

impl Running {
    fn statistics(&self) -> Result<Statistics> {
        let [mean, variance] = [&self.mean, &self.var].map(|buffer| to_f64(&buffer.value()));
        Ok(Statistics::Constant { mean: mean?.into(), variance: variance?.into() })
    }

    fn move_towards(&self, convention: &Convention, weight: f64, moments: &Moments) -> Result<()> {
        let (mut mean, mut var) = (self.mean.value(), self.var.value());
        mean.update_elements(|mean| {
            var.update_elements(|var| Ok(convention.update(weight, moments, mean, var)?))
        })?;
        self.mean.set(&mean)?;
        self.var.set(&var)
    }
}

impl<const SPATIAL: usize> BatchNorm<SPATIAL> {
    /// The name in messages.
    const NAME: &'static str = match SPATIAL {
        1 => "BatchNorm1d",
        2 => "BatchNorm2d",
        3 => "BatchNorm3d",
        ANY => "SyncBatchNorm",
        _ => panic!("batch norm has 1, 2 or 3 spatial dimensions"),
    };

    /// A batch norm of `channels` channels: weight 1, bias 0, running mean 0, running variance 1.
    ///
    /// # Errors
    /// If there are no channels, eps is negative or not a number, or the momentum is not a number.
    pub fn new(init: &Init, channels: usize, config: BatchNormConfig) -> Result<Self> {
        let reason = match config.eps {
            _ if channels == 0 => Some("0 channels".into()),
            eps if eps.is_nan() || eps < 0.0 => Some(format!("eps is {eps}, it must be 0 or more")),
            _ if config.momentum.is_some_and(f64::is_nan) => Some("the momentum is not a number".into()),
            _ => None,
        };
        if let Some(reason) = reason {
            return Err(Error::Invalid { operation: Self::NAME, reason });
        }
        let parameter = |value| config.affine.then(|| init.constant(&[channels], value)).transpose();
        let buffer = |value| -> Result<Buffer> {
            Ok(Buffer::new(&Tensor::full(&init.device, &[channels], init.dtype, value)?))
        };
        let running = match config.track_running_stats {
            true => Some(Running { mean: buffer(0.0)?, var: buffer(1.0)?, batches: Counter::default() }),
            false => None,
        };
        Ok(BatchNorm {
            weight: parameter(1.0)?,
            bias: parameter(0.0)?,
            running,
            channels,
            config,
            mode: NormMode::new(&config),
        })
    }

    /// A layer of parameters that exist.
    pub(crate) fn from_parts(parts: NormParts, config: BatchNormConfig) -> Self {
        let NormParts { weight, bias, mean, var } = parts;
        let channels = mean.value().len();
        let running = Some(Running { mean, var, batches: Counter::default() });
        BatchNorm { weight, bias, running, channels, config, mode: NormMode::new(&config) }
    }

    /// The switches of this layer.
    pub(crate) fn mode(&self) -> &NormMode {
        &self.mode
    }

    /// The counter of batches, if running statistics are kept.
    pub(crate) fn batches(&self) -> Option<&Counter> {
        self.running.as_ref().map(|running| &running.batches)
    }

    /// The layer with statistics over the ranks of a communicator: in training every rank must run the same layers in the
    /// same order, forward and backward. For the layers of a model that exists, see
    /// [`crate::ModuleExt::convert_sync_batchnorm`].
    pub fn synchronized(self, communicator: &Communicator) -> Self {
        self.mode.set_communicator(Some(communicator));
        self
    }

    /// The layer with switches that it shares with another.
    pub(super) fn with_mode(self, mode: &NormMode) -> Self {
        BatchNorm { mode: mode.clone(), ..self }
    }

    /// Switches this layer to training, or to evaluation; [`crate::ModuleExt::train`] does so in a whole model.
    pub fn set_training(&self, training: bool) {
        self.mode.training().set(training);
    }

    /// C.
    pub fn num_features(&self) -> usize {
        self.channels
    }

    /// How the layer was made.
    pub fn config(&self) -> &BatchNormConfig {
        &self.config
    }

    /// The ranks over whose batches statistics are taken in training, if any: see [`crate::ModuleExt::convert_sync_batchnorm`].
    pub fn communicator(&self) -> Option<Communicator> {
        self.mode.communicator()
    }

    /// Running mean, C, if kept.
    pub fn running_mean(&self) -> Option<Tensor> {
        self.running.as_ref().map(|running| running.mean.value())
    }

    /// Running (unbiased) variance, C, if kept.
    pub fn running_var(&self) -> Option<Tensor> {
        self.running.as_ref().map(|running| running.var.value())
    }

    /// How many training forwards the running statistics have seen, if kept.
    pub fn num_batches_tracked(&self) -> Option<i64> {
        self.running.as_ref().map(|running| running.batches.value())
    }

    /// Freezes the statistics, or unfreezes them: a frozen layer uses its running statistics even while the model trains.
    ///
    /// This is for fine-tuning with batches that are too small for useful statistics. Weight and bias still train, unless
    /// [`Parameter::set_trained`] freezes them too. A layer without running statistics has none to freeze.
    pub fn set_frozen(&self, frozen: bool) {
        self.mode.set_frozen(frozen);
    }

    /// Whether [`BatchNorm::set_frozen`] has frozen the statistics.
    pub fn is_frozen(&self) -> bool {
        self.mode.is_frozen()
    }

    /// Stops running statistics from moving in training, or lets them move again, like setting the attribute
    /// `track_running_stats` of an existing layer in PyTorch.
    ///
    /// As in PyTorch, evaluation still uses the running statistics that the layer has, and a layer that was made without them
    /// does not get any: only [`BatchNormConfig::track_running_stats`] decides that.
    pub fn set_track_running_stats(&self, track: bool) {
        self.mode.set_track_running_stats(track);
    }

    /// Whether running statistics move in training, if the layer has them.
    pub fn track_running_stats(&self) -> bool {
        self.mode.track_running_stats()
    }

    /// Running mean 0, running variance 1, no batches seen.
    ///
    /// # Errors
    /// If there is no memory.
    pub fn reset_running_stats(&self) -> Result<()> {
        let Some(running) = &self.running else { return Ok(()) };
        for (buffer, value) in [(&running.mean, 0.0), (&running.var, 1.0)] {
            let old = buffer.value();
            buffer.set(&Tensor::full(old.device(), old.shape(), old.dtype(), value)?)?;
        }
        running.batches.set(0);
        Ok(())
    }

    /// Resets the layer to its initial state: [`BatchNorm::reset_running_stats`], weight 1 and bias 0.
    ///
    /// # Errors
    /// If there is no memory.
    pub fn reset_parameters(&self) -> Result<()> {
        self.reset_running_stats()?;
        for (parameter, value) in [(&self.weight, 1.0), (&self.bias, 0.0)] {
            let Some(parameter) = parameter else { continue };
            let old = parameter.value();
            parameter.set(&Tensor::full(old.device(), old.shape(), old.dtype(), value)?)?;
        }
        Ok(())
    }

    /// The layer's tensors with their Keras names, in the order of Keras' `get_weights()`: those of gamma, beta, moving_mean and
    /// moving_variance that it has.
    fn keras_order(&self) -> Vec<(&'static str, Slot<'_>)> {
        let parameters = [("gamma", &self.weight), ("beta", &self.bias)];
        let parameters =
            parameters.into_iter().filter_map(|(name, value)| Some((name, Slot::Parameter(value.as_ref()?))));
        let running = self.running.iter().flat_map(|running| {
            [("moving_mean", Slot::Buffer(&running.mean)), ("moving_variance", Slot::Buffer(&running.var))]
        });
        parameters.chain(running).collect()
    }

    /// The arrays of Keras' `layer.get_weights()`: those of gamma, beta, moving_mean and moving_variance that the layer has.
    ///
    /// # Errors
    /// If there is no memory.
    pub fn keras_weights(&self) -> Result<Vec<Vec<f64>>> {
        self.keras_order().iter().map(|(_, slot)| to_f64(&slot.value())).collect()
    }

    /// Takes the arrays of Keras' `layer.get_weights()`: gamma, beta, moving_mean and moving_variance. As in Keras, the list has
    /// no array for a weight (`scale=False`), a bias (`center=False`) or running statistics that the layer lacks.
    ///
    /// The moving variance is taken as it is. Where another convention accumulated it, [`Convention::convert_variance`]
    /// turns it into this layer's.
    ///
    /// # Errors
    /// If there are too few or too many arrays, or one does not hold one number per channel. Nothing has changed then.
    pub fn set_keras_weights(&self, arrays: &[&[f64]]) -> Result<()> {
        let slots = self.keras_order();
        let refused = |reason: String| Err(Error::Invalid { operation: "set_keras_weights", reason });
        if arrays.len() != slots.len() {
            let names: Vec<_> = slots.iter().map(|(name, _)| *name).collect();
            return refused(format!("found {} arrays, expected {}: {names:?}", arrays.len(), slots.len()));
        }
        let wrong = slots.iter().zip(arrays).find(|(_, array)| array.len() != self.channels);
        if let Some(((name, _), array)) = wrong {
            return refused(format!(
                "{name} has {} values, the layer {} channels",
                array.len(),
                self.channels
            ));
        }
        let tensors: Vec<Tensor> = slots
            .iter()
            .zip(arrays)
            .map(|((_, slot), array)| like(&slot.value(), array))
            .collect::<Result<_>>()?;
        slots.iter().zip(&tensors).try_for_each(|((_, slot), tensor)| slot.set(tensor))
    }

    /// The operation's options in the current mode, for an input of `channels` channels.
    pub(super) fn options(&self, channels: usize) -> Result<BatchNormOptions> {
        if channels != self.channels {
            // Without weight, bias and running statistics, no later check would notice.
            let reason = format!("the layer has {} channels, its input {channels}", self.channels);
            return Err(Error::Invalid { operation: Self::NAME, reason });
        }
        let statistics = match &self.running {
            Some(running) if !self.mode.uses_batch() => running.statistics()?,
            _ => match self.communicator().filter(|ranks| self.mode.uses_batch() && ranks.world_size() > 1) {
                Some(communicator) => {
                    Statistics::Synchronized(Arc::new(Ranks { communicator, layer: Self::NAME }))
                }
                None => Statistics::Batch,
            },
        };
        Ok(self.options_with(statistics))
    }

    /// The operation's options in evaluation; `None` without running statistics.
    pub(super) fn evaluation(&self) -> Result<Option<BatchNormOptions>> {
        let statistics = self.running.as_ref().map(Running::statistics).transpose()?;
        Ok(statistics.map(|statistics| self.options_with(statistics)))
    }

    fn options_with(&self, statistics: Statistics) -> BatchNormOptions {
        let (eps, eps_place) = (self.config.eps, self.config.convention.eps_place);
        BatchNormOptions { statistics, eps, eps_place }
    }

    /// Moves the running statistics towards a batch's, in training. Call it once per forward, and never in a recomputation.
    pub(super) fn observe(&self, moments: Option<&Moments>) -> Result<()> {
        let moves = self.mode.uses_batch() && self.track_running_stats();
        let (Some(running), Some(moments), true) = (&self.running, moments, moves) else {
            return Ok(());
        };
        if moments.count == 0 {
            return Ok(());
        }
        running.batches.set(running.batches.value() + 1);
        let convention = &self.config.convention;
        let weight = convention.new_weight(self.config.momentum, running.batches.value() as u64);
        running.move_towards(convention, weight, moments)
    }

    /// PyTorch's error for an input of the wrong rank.
    pub(super) fn check_rank(input: &Tensor) -> Result<()> {
        let rank = input.shape().len();
        let (fits, expected) = match SPATIAL {
            ANY => (rank >= 2, "at least 2D".into()),
            1 => (rank == 2 || rank == 3, "2D or 3D".into()),
            _ => (rank == SPATIAL + 2, format!("{}D", SPATIAL + 2)),
        };
        if !fits {
            let reason = format!("expected {expected} input (got {rank}D input)");
            return Err(Error::Invalid { operation: Self::NAME, reason });
        }
        Ok(())
    }

    /// Runs the layer and an activation after it as one operation, which saves a pass over memory in each direction.
    ///
    /// # Errors
    /// If the input does not fit the layer.
    pub fn forward_with(&self, input: &Tensor, activation: Activation) -> Result<Tensor> {
        Self::check_rank(input)?;
        let (weight, bias) =
            (self.weight.as_ref().map(Parameter::value), self.bias.as_ref().map(Parameter::value));
        let norm = self.options(input.shape()[1])?;
        let block = BatchNormBlock { norm, activation, recomputed: self.mode.is_recomputed() };
        let (output, moments) = ops::batch_norm_block(input, weight.as_ref(), bias.as_ref(), &block)?;
        self.observe(moments.as_ref())?;
        Ok(output)
    }
}

impl<const SPATIAL: usize> Forward for BatchNorm<SPATIAL> {
    fn forward(&self, input: &Tensor) -> Result<Tensor> {
        self.forward_with(input, Activation::Identity)
    }
}

impl<const SPATIAL: usize> Module for BatchNorm<SPATIAL> {
    fn parts<'a>(&'a self, parts: &mut Parts<'a>) {
        parts.add("", &self.mode);
        push_affine(self, "", parts);
        parts.add("weight", &self.weight);
        parts.add("bias", &self.bias);
        if let Some(running) = &self.running {
            parts.add("running_mean", &running.mean);
            parts.add("running_var", &running.var);
            parts.add("num_batches_tracked", &running.batches);
        }
    }
}

/// Adds a layer's weight and bias as those of a batch norm.
pub(crate) fn push_affine<'a, const SPATIAL: usize>(
    layer: &'a BatchNorm<SPATIAL>,
    name: &str,
    parts: &mut Parts<'a>,
) {
    layer.weight.iter().chain(&layer.bias).for_each(|parameter| parts.push(name, Part::Affine(parameter)));
}

/// A parameter or a buffer.
enum Slot<'a> {
    Parameter(&'a Parameter),
    Buffer(&'a Buffer),
}

impl Slot<'_> {
    fn value(&self) -> Tensor {
        match self {
            Slot::Parameter(parameter) => parameter.value(),
            Slot::Buffer(buffer) => buffer.value(),
        }
    }

    fn set(&self, value: &Tensor) -> Result<()> {
        match self {
            Slot::Parameter(parameter) => parameter.set(value),
            Slot::Buffer(buffer) => buffer.set(value),
        }
    }
}

fn to_f64(tensor: &Tensor) -> Result<Vec<f64>> {
    tensor.detach().to_dtype(DType::F64)?.to_vec()
}

/// A vector of these values, of the type and on the device of another tensor.
fn like(tensor: &Tensor, values: &[f64]) -> Result<Tensor> {
    Tensor::from_slice(tensor.device(), &[values.len()], values)?.to_dtype(tensor.dtype())
}
