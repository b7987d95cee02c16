//! The batch-norm layer: parameters, running statistics, training and evaluation.

use std::sync::atomic::{AtomicBool, Ordering};

use convoke_autograd::ops::{self, Activation, BatchNormOptions, Convention, Moments, Statistics};
use convoke_autograd::{DType, Error, Result, Tensor};

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

/// Batch normalization of N x C x H x W, as PyTorch's `BatchNorm2d`.
///
/// In training each channel is normalised by its batch's mean and biased variance, and the running statistics move
/// towards the batch's mean and (by default *unbiased*) variance, once a forward. In evaluation the running ones normalise.
pub struct BatchNorm2d {
    /// Gamma, C.
    pub weight: Option<Parameter>,
    /// Beta, C.
    pub bias: Option<Parameter>,
    running: Option<Running>,
    channels: usize,
    config: BatchNormConfig,
    training: AtomicBool,
}

struct Running {
    mean: Buffer,
    var: Buffer,
    batches: Counter,
}

impl BatchNorm2d {
    /// A batch norm of `channels` channels: weight 1, bias 0, running mean 0, running variance 1.
    ///
    /// # Errors
    /// If there are no channels.
    pub fn new(init: &Init, channels: usize, config: BatchNormConfig) -> Result<BatchNorm2d> {
        if channels == 0 {
            return Err(Error::Invalid { operation: "BatchNorm2d", reason: "0 channels".into() });
        }
        let parameter = |value| config.affine.then(|| init.constant(&[channels], value)).transpose();
        let buffer = |value| -> Result<Buffer> {
            Ok(Buffer::new(&Tensor::full(&init.device, &[channels], init.dtype, value)?))
        };
        let running = match config.track_running_stats {
            true => Some(Running { mean: buffer(0.0)?, var: buffer(1.0)?, batches: Counter::default() }),
            false => None,
        };
        Ok(BatchNorm2d {
            weight: parameter(1.0)?,
            bias: parameter(0.0)?,
            running,
            channels,
            config,
            training: AtomicBool::new(true),
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

    fn is_training(&self) -> bool {
        self.training.load(Ordering::Relaxed)
    }

    /// What the operation needs to know in the present mode, for an input of `channels` channels.
    pub(super) fn options(&self, channels: usize, activation: Activation) -> Result<BatchNormOptions> {
        if channels != self.channels {
            // Without weight, bias and running statistics nobody else would notice.
            let reason = format!("the layer has {} channels, its input {channels}", self.channels);
            return Err(Error::Invalid { operation: "BatchNorm2d", reason });
        }
        let statistics = match &self.running {
            Some(running) if !self.is_training() => Statistics::Constant {
                mean: to_f64(&running.mean.value())?.into(),
                variance: to_f64(&running.var.value())?.into(),
            },
            _ => Statistics::Batch,
        };
        let (eps, eps_place) = (self.config.eps, self.config.convention.eps_place);
        Ok(BatchNormOptions { statistics, eps, eps_place, activation })
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
        move_towards(&running.mean, &moments.mean, weight)?;
        move_towards(&running.var, &convention.variance(moments), weight)
    }

    /// The layer followed by `activation`.
    pub(super) fn forward_with(&self, input: &Tensor, activation: Activation) -> Result<Tensor> {
        if input.shape().len() != 4 {
            let reason = format!("expected 4D input (got {}D input)", input.shape().len());
            return Err(Error::Invalid { operation: "BatchNorm2d", reason });
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

impl Module for BatchNorm2d {
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

/// running = (1 - weight) * running + weight * new, computed in f64.
fn move_towards(running: &Buffer, new: &[f64], weight: f64) -> Result<()> {
    let mut value = running.value();
    let blend = |old: f64, new: f64| (1.0 - weight) * old + weight * new;
    match value.dtype() {
        DType::F32 => value.update(|data: &mut [f32]| {
            data.iter_mut().zip(new).for_each(|(old, &new)| *old = blend(f64::from(*old), new) as f32);
            Ok(())
        })?,
        DType::F64 => value.update(|data: &mut [f64]| {
            data.iter_mut().zip(new).for_each(|(old, &new)| *old = blend(*old, new));
            Ok(())
        })?,
    }
    running.set(&value)
}
