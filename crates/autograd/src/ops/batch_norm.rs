//! Batch normalization, with batch statistics or with constant ones, and an optional ReLU in the same pass.

use std::sync::Arc;

use convoke_kernels::Element;
use convoke_kernels::batch_norm::{
    self as kernel, Activation, BackwardSums, EpsPlace, Moments, Normalization,
};
use convoke_kernels::memory_format::Extent;

use super::{check_vector, same_dtype};
use crate::error::invalid;
use crate::tensor::dispatch;
use crate::{Function, MemoryFormat, Needs, Result, Tensor, apply_with_saved};

/// Which statistics normalise.
#[derive(Debug, Clone)]
pub enum Statistics {
    /// The mean and biased variance of this batch; gradients flow through them.
    Batch,
    /// Given ones, by channel, that gradients do not flow through: running statistics in evaluation.
    Constant {
        /// Mean by channel.
        mean: Arc<[f64]>,
        /// Variance by channel.
        variance: Arc<[f64]>,
    },
}

/// How [`batch_norm`] and [`crate::ops::conv_bn2d`] normalise.
#[derive(Debug, Clone)]
pub struct BatchNormOptions {
    /// Which statistics.
    pub statistics: Statistics,
    /// Keeps the divisor from 0.
    pub eps: f64,
    /// Where eps is added.
    pub eps_place: EpsPlace,
    /// Applied to the result in the same pass over memory.
    pub activation: Activation,
}

impl Default for BatchNormOptions {
    /// Batch statistics, eps 1e-5, no activation: PyTorch's training mode.
    fn default() -> BatchNormOptions {
        BatchNormOptions {
            statistics: Statistics::Batch,
            eps: 1e-5,
            eps_place: EpsPlace::InsideRoot,
            activation: Activation::Identity,
        }
    }
}

/// (x - mean) / sqrt(variance + eps) * weight + bias for each channel of an N x C x ... tensor.
///
/// Also returns the batch's moments if they were taken, for the caller's running statistics. Saves x and two
/// numbers a channel; with a ReLU, its mask is recomputed from x.
///
/// # Errors
/// If weight, bias or statistics do not have one number a channel; if training meets one value a channel.
pub fn batch_norm(
    x: &Tensor,
    weight: Option<&Tensor>,
    bias: Option<&Tensor>,
    options: &BatchNormOptions,
) -> Result<(Tensor, Option<Moments>)> {
    let function = BatchNorm { options: options.clone(), weight: weight.is_some(), bias: bias.is_some() };
    let inputs: Vec<&Tensor> = [Some(x), weight, bias].into_iter().flatten().collect();
    apply_with_saved(function, &inputs, |saved| saved.normalizer.moments.clone())
}

struct BatchNorm {
    options: BatchNormOptions,
    weight: bool,
    bias: bool,
}

#[derive(Clone)]
struct Saved {
    x: Tensor,
    normalizer: Normalizer,
}

impl Function for BatchNorm {
    type Saved = Saved;

    fn name(&self) -> &'static str {
        "batch_norm"
    }

    fn forward(&self, inputs: &[&Tensor], _: &Needs) -> Result<(Tensor, Saved)> {
        let x = inputs[0];
        let weight = self.weight.then(|| inputs[1]);
        let bias = self.bias.then(|| inputs[1 + usize::from(self.weight)]);
        let normalizer = Normalizer::new("batch_norm", &self.options, x, weight, bias)?;
        let extent = x.extent("batch_norm")?;
        let y = dispatch!(x.dtype(), T => Tensor::build(x.device(), x.shape(), x.format(), |y: &mut [T]| {
            Ok(kernel::normalize(x.device().compute(), &extent, x.data::<T>()?, &normalizer.by::<T>()?, y)?)
        }))?;
        Ok((y, Saved { x: x.detach(), normalizer }))
    }

    fn backward(
        &self,
        Saved { x, normalizer }: Saved,
        upstream: Tensor,
        needs: &Needs,
    ) -> Result<Vec<Option<Tensor>>> {
        let sums = normalizer.backward_sums(&x, &upstream)?;
        let [weight, bias] = normalizer.parameter_gradients(&x, &sums, [self.weight, self.bias])?;
        let dx = needs.input(0).then(|| {
            let extent = x.extent("batch_norm")?;
            dispatch!(x.dtype(), T => Tensor::build(x.device(), x.shape(), x.format(), |dx: &mut [T]| {
                let pair = (x.data::<T>()?, upstream.data::<T>()?);
                let (cpu, by) = (x.device().compute(), normalizer.by::<T>()?);
                Ok(kernel::backward_elementwise(cpu, &extent, pair, &by, normalizer.through(&sums), dx)?)
            }))
        });
        let mut gradients = vec![dx.transpose()?];
        gradients.extend(self.weight.then_some(weight));
        gradients.extend(self.bias.then_some(bias));
        Ok(gradients)
    }
}

/// The statistics and parameters of one normalisation: what separate and fused batch norm share.
#[derive(Clone)]
pub(super) struct Normalizer {
    pub(super) moments: Option<Moments>,
    mean: Arc<[f64]>,
    inverse_std: Arc<[f64]>,
    weight: Option<Tensor>,
    bias: Option<Tensor>,
    activation: Activation,
}

impl Normalizer {
    /// Takes the statistics of `x`, or the given ones.
    pub(super) fn new(
        operation: &'static str,
        options: &BatchNormOptions,
        x: &Tensor,
        weight: Option<&Tensor>,
        bias: Option<&Tensor>,
    ) -> Result<Normalizer> {
        let extent = x.extent(operation)?;
        let operands: Vec<&Tensor> = [Some(x), weight, bias].into_iter().flatten().collect();
        same_dtype(operation, &operands)?;
        check_vector(operation, "the weight", weight, extent.channels)?;
        check_vector(operation, "the bias", bias, extent.channels)?;
        let (moments, mean, variance) = match &options.statistics {
            Statistics::Batch => {
                let moments = moments(operation, &extent, x)?;
                // An empty batch has no variance; 0 in its place keeps NaN out of the gradients of the parameters.
                let variance = match moments.count {
                    0 => vec![0.0; extent.channels],
                    _ => moments.biased_variance(),
                };
                let mean = moments.mean.clone();
                (Some(moments), mean.into(), variance.into())
            }
            Statistics::Constant { mean, variance } => (None, mean.clone(), variance.clone()),
        };
        for (what, values) in [("mean", &mean), ("variance", &variance)] {
            if values.len() != extent.channels {
                let reason = format!(
                    "the {what} has {} values, the input {:?} has {} channels",
                    values.len(),
                    x.shape(),
                    extent.channels
                );
                return Err(invalid(operation, reason));
            }
        }
        Ok(Normalizer {
            moments,
            inverse_std: kernel::inverse_std(&variance, options.eps, options.eps_place).into(),
            mean,
            weight: weight.map(Tensor::detach),
            bias: bias.map(Tensor::detach),
            activation: options.activation,
        })
    }

    /// What the kernels take.
    pub(super) fn by<T: Element>(&self) -> Result<Normalization<'_, T>> {
        Ok(Normalization {
            mean: &self.mean,
            inverse_std: &self.inverse_std,
            weight: self.weight.as_ref().map(|weight| weight.data::<T>()).transpose()?,
            bias: self.bias.as_ref().map(|bias| bias.data::<T>()).transpose()?,
            activation: self.activation,
        })
    }

    pub(super) fn backward_sums(&self, x: &Tensor, dy: &Tensor) -> Result<BackwardSums> {
        let extent = x.extent("batch_norm backward")?;
        dispatch!(x.dtype(), T => {
            let cpu = x.device().compute();
            Ok(kernel::backward_reduce(cpu, &extent, x.data::<T>()?, dy.data::<T>()?, &self.by::<T>()?)?)
        })
    }

    /// The sums, if gradients flow through the statistics.
    pub(super) fn through<'a>(&self, sums: &'a BackwardSums) -> Option<(&'a BackwardSums, usize)> {
        self.moments.as_ref().map(|moments| (sums, moments.count))
    }

    /// Gradients of weight and bias, where the layer has them.
    pub(super) fn parameter_gradients(
        &self,
        like: &Tensor,
        sums: &BackwardSums,
        has: [bool; 2],
    ) -> Result<[Option<Tensor>; 2]> {
        let vector = |value: &dyn Fn(usize) -> f64| {
            let (device, format) = (like.device(), MemoryFormat::Contiguous);
            dispatch!(like.dtype(), T => Tensor::build(device, &[self.mean.len()], format, |out: &mut [T]| {
                out.iter_mut().enumerate().for_each(|(channel, out)| *out = T::of(value(channel)));
                Ok(())
            }))
        };
        let weight = has[0].then(|| vector(&|channel| sums.g_centered[channel] * self.inverse_std[channel]));
        let bias = has[1].then(|| vector(&|channel| sums.g[channel]));
        Ok([weight.transpose()?, bias.transpose()?])
    }
}

/// The batch's moments; PyTorch's error for a single value a channel. No values at all give zeros.
fn moments(operation: &'static str, extent: &Extent, x: &Tensor) -> Result<Moments> {
    if extent.batch * extent.spatial == 1 {
        let reason =
            format!("Expected more than 1 value per channel when training, got input size {:?}", x.shape());
        return Err(invalid(operation, reason));
    }
    dispatch!(x.dtype(), T => Ok(kernel::moments(x.device().compute(), extent, x.data::<T>()?)?))
}
