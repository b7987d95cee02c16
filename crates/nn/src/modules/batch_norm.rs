//! The batch-norm layer: parameters, running statistics, training and evaluation.

use std::sync::atomic::{AtomicBool, Ordering};

use convoke_autograd::ops::{self, Activation, BatchNormOptions, Convention, Moments, Statistics};
use convoke_autograd::{DType, Element, Error, Result, Tensor};

use crate::{Buffer, Counter, Init, Module, Parameter, State};

/// How a batch norm is made. The default is PyTorch's.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BatchNormConfig {
    /// What momentum, running variance and eps mean.
    pub convention: Convention,
    /// Keeps the divisor from 0.
    pub eps: f64,
    /// Of the new or of the old value in the running statistics, as the convention says; `None` is the average over
    /// all batches so far.
    pub momentum: Option<f64>,
    /// Whether there are weight and bias.
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
    /// With the defaults of a framework.
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
pub type BatchNorm2d = BatchNorm<2>;

/// Batch normalization of N x C or N x C x L, as PyTorch's `BatchNorm1d`: see [`BatchNorm`].
pub type BatchNorm1d = BatchNorm<1>;

/// Batch normalization of N x C x D x H x W, as PyTorch's `BatchNorm3d`: see [`BatchNorm`].
pub type BatchNorm3d = BatchNorm<3>;

/// Batch normalization of N x C x ... with so many spatial dimensions; one may be absent, and is then 1.
///
/// In training each channel is normalised by its batch's mean and biased variance, and the running statistics move
/// towards the batch's mean and (by default *unbiased*) variance, once a forward. In evaluation the running ones normalise.
pub struct BatchNorm<const SPATIAL: usize> {
    /// Gamma, C.
    pub weight: Option<Parameter>,
    /// Beta, C.
    pub bias: Option<Parameter>,
    running: Option<Running>,
    channels: usize,
    config: BatchNormConfig,
    training: AtomicBool,
    frozen: AtomicBool,
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

    fn move_towards<T: Element>(
        &self,
        convention: &Convention,
        weight: f64,
        moments: &Moments,
    ) -> Result<()> {
        let (mut mean, mut var) = (self.mean.value(), self.var.value());
        mean.update(|mean: &mut [T]| {
            var.update(|var: &mut [T]| Ok(convention.update(weight, moments, mean, var)?))
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
        _ => panic!("batch norm has 1, 2 or 3 spatial dimensions"),
    };

    /// A batch norm of `channels` channels: weight 1, bias 0, running mean 0, running variance 1.
    ///
    /// # Errors
    /// If there are no channels.
    pub fn new(init: &Init, channels: usize, config: BatchNormConfig) -> Result<Self> {
        if channels == 0 {
            return Err(Error::Invalid { operation: Self::NAME, reason: "0 channels".into() });
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
            training: AtomicBool::new(true),
            frozen: AtomicBool::new(false),
        })
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

    /// Fixes the statistics, or frees them: a frozen layer evaluates, also while the model trains.
    ///
    /// For fine-tuning with batches too small for statistics of their own. Weight and bias still train, unless
    /// [`Parameter::set_trained`] freezes them too. A layer that keeps no running statistics has none to fix.
    pub fn set_frozen(&self, frozen: bool) {
        self.frozen.store(frozen, Ordering::Relaxed);
    }

    /// Whether [`BatchNorm::set_frozen`] has fixed the statistics.
    pub fn is_frozen(&self) -> bool {
        self.frozen.load(Ordering::Relaxed)
    }

    fn is_training(&self) -> bool {
        self.training.load(Ordering::Relaxed) && !self.is_frozen()
    }

    /// What the operation needs to know in the present mode, for an input of `channels` channels.
    pub(super) fn options(&self, channels: usize, activation: Activation) -> Result<BatchNormOptions> {
        if channels != self.channels {
            // Without weight, bias and running statistics nobody else would notice.
            let reason = format!("the layer has {} channels, its input {channels}", self.channels);
            return Err(Error::Invalid { operation: Self::NAME, reason });
        }
        let statistics = match &self.running {
            Some(running) if !self.is_training() => running.statistics()?,
            _ => Statistics::Batch,
        };
        Ok(self.options_with(statistics, activation))
    }

    /// What the operation needs to know in evaluation, by running statistics.
    pub(super) fn evaluation(&self) -> Result<BatchNormOptions> {
        let Some(running) = &self.running else {
            let reason = "the layer keeps no running statistics".into();
            return Err(Error::Invalid { operation: Self::NAME, reason });
        };
        Ok(self.options_with(running.statistics()?, Activation::Identity))
    }

    fn options_with(&self, statistics: Statistics, activation: Activation) -> BatchNormOptions {
        let (eps, eps_place) = (self.config.eps, self.config.convention.eps_place);
        BatchNormOptions { statistics, eps, eps_place, activation }
    }

    /// Moves the running statistics towards a batch's, in training. Once a forward, never in a recomputation.
    pub(super) fn observe(&self, moments: Option<&Moments>) -> Result<()> {
        let (Some(running), Some(moments), true) = (&self.running, moments, self.is_training()) else {
            return Ok(());
        };
        if moments.count == 0 {
            return Ok(());
        }
        running.batches.set(running.batches.value() + 1);
        let convention = &self.config.convention;
        let weight = convention.new_weight(self.config.momentum, running.batches.value() as u64);
        match running.mean.value().dtype() {
            DType::F32 => running.move_towards::<f32>(convention, weight, moments),
            DType::F64 => running.move_towards::<f64>(convention, weight, moments),
        }
    }

    /// The layer followed by `activation`.
    pub(super) fn forward_with(&self, input: &Tensor, activation: Activation) -> Result<Tensor> {
        let rank = input.shape().len();
        if rank != SPATIAL + 2 && (SPATIAL, rank) != (1, 2) {
            let expected = if SPATIAL == 1 { "2D or 3D".into() } else { format!("{}D", SPATIAL + 2) };
            let reason = format!("expected {expected} input (got {rank}D input)");
            return Err(Error::Invalid { operation: Self::NAME, reason });
        }
        let (weight, bias) =
            (self.weight.as_ref().map(Parameter::value), self.bias.as_ref().map(Parameter::value));
        let (output, moments) = ops::batch_norm(
            input,
            weight.as_ref(),
            bias.as_ref(),
            &self.options(input.shape()[1], activation)?,
        )?;
        self.observe(moments.as_ref())?;
        Ok(output)
    }
}

impl<const SPATIAL: usize> Module for BatchNorm<SPATIAL> {
    fn forward(&self, input: &Tensor) -> Result<Tensor> {
        self.forward_with(input, Activation::Identity)
    }

    fn state(&self) -> Vec<(&'static str, State)> {
        let parameters = [("weight", &self.weight), ("bias", &self.bias)];
        let mut state: Vec<_> = parameters
            .into_iter()
            .filter_map(|(name, parameter)| Some((name, State::Parameter(parameter.clone()?))))
            .collect();
        if let Some(running) = &self.running {
            state.push(("running_mean", State::Buffer(running.mean.clone())));
            state.push(("running_var", State::Buffer(running.var.clone())));
            state.push(("num_batches_tracked", State::Counter(running.batches.clone())));
        }
        state
    }

    fn set_training(&self, training: bool) {
        self.training.store(training, Ordering::Relaxed);
    }
}

fn to_f64(tensor: &Tensor) -> Result<Vec<f64>> {
    Ok(match tensor.dtype() {
        DType::F32 => tensor.data::<f32>()?.iter().map(|&x| f64::from(x)).collect(),
        DType::F64 => tensor.data::<f64>()?.to_vec(),
    })
}
