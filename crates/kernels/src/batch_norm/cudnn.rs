//! Batch norm with the interface of cuDNN's calls: `cudnnBatchNormalizationForwardTraining`, `ForwardInference`, `Backward`.
//!
//! For code that is ported from cuDNN, or written against its semantics. Differences from cuDNN: there are no blending
//! factors alpha and beta (they are 1 and 0), and statistics that are not saved are recomputed in f64.

use super::{Activation, Affine, Convention, EpsPlace, Normalization, inverse_std, stats};
use crate::error::{check_len, invalid};
use crate::memory_format::Extent;
use crate::{Cpu, Element, Result};

/// Which values share statistics and parameters: `cudnnBatchNormMode_t`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Mode {
    /// The values of a channel; parameters have the shape 1 x C x 1 x 1. For convolutions.
    Spatial,
    /// The values at one place in all images; parameters have the shape 1 x C x H x W, in x's memory format. For fully
    /// connected layers.
    PerActivation,
}

impl Mode {
    /// The tensor's shape in this mode: every set of values that shares statistics is a channel.
    fn view(self, extent: &Extent) -> Result<Extent> {
        extent.len()?;
        Ok(match self {
            Mode::Spatial => *extent,
            Mode::PerActivation => {
                Extent { channels: extent.channels * extent.spatial, spatial: 1, ..*extent }
            }
        })
    }

    /// The number of statistics, and of parameters of each kind, for a tensor.
    ///
    /// # Errors
    /// If the size of the tensor overflows.
    pub fn parameters(self, extent: &Extent) -> Result<usize> {
        Ok(self.view(extent)?.channels)
    }
}

/// The optional outputs of [`forward_training`] besides y.
#[derive(Debug, Default)]
pub struct TrainingOutputs<'a, T> {
    /// `resultRunningMean` and `resultRunningVariance`, updated with the exponential average factor; the variance is unbiased.
    pub running: Option<[&'a mut [T]; 2]>,
    /// `resultSaveMean` and `resultSaveInvVariance` (1 / sqrt(variance + epsilon)), for backward.
    pub saved: Option<[&'a mut [T]; 2]>,
}

/// y = scale (x - mean) / sqrt(variance + epsilon) + bias with the batch's mean and biased variance.
///
/// `running = (1 - exponential_average_factor) running + exponential_average_factor new`. A factor of 1 / (1 + n) in call
/// n, counted from 0, gives the average of all calls.
///
/// # Errors
/// If a length does not fit, or epsilon is negative; nothing is written then.
#[allow(clippy::too_many_arguments)]
pub fn forward_training<T: Element>(
    cpu: &Cpu,
    mode: Mode,
    extent: &Extent,
    x: &[T],
    [scale, bias]: [&[T]; 2],
    exponential_average_factor: f64,
    epsilon: f64,
    y: &mut [T],
    mut outputs: TrainingOutputs<'_, T>,
) -> Result<()> {
    let operation = "cudnn forward_training";
    let extent = mode.view(extent)?;
    check_epsilon(operation, epsilon)?;
    if exponential_average_factor.is_nan() {
        return Err(invalid(operation, "the exponential average factor is not a number"));
    }
    check_len(operation, "y", y.len(), extent.len()?)?;
    check_len(operation, "the scale", scale.len(), extent.channels)?;
    check_len(operation, "the bias", bias.len(), extent.channels)?;
    for (pair, names) in [
        (&outputs.running, ["the running mean", "the running variance"]),
        (&outputs.saved, ["the saved mean", "the saved inverse variance"]),
    ] {
        for (values, name) in pair.iter().flatten().zip(names) {
            check_len(operation, name, values.len(), extent.channels)?;
        }
    }
    let layer = Affine {
        weight: Some(scale),
        bias: Some(bias),
        eps: epsilon,
        eps_place: EpsPlace::InsideRoot,
        activation: Activation::Identity,
    };
    let (moments, inverse_std) = super::forward_training(cpu, &extent, x, &layer, y)?;
    if let Some([mean, variance]) = &mut outputs.running {
        Convention::cudnn().update(exponential_average_factor, &moments, mean, variance)?;
    }
    if let Some(saved) = &mut outputs.saved {
        for (saved, values) in saved.iter_mut().zip([&moments.mean, &inverse_std]) {
            saved.iter_mut().zip(values).for_each(|(saved, &value)| *saved = T::of(value));
        }
    }
    Ok(())
}

/// y = scale (x - mean) / sqrt(variance + epsilon) + bias with `estimatedMean` and `estimatedVariance`.
///
/// # Errors
/// If a length does not fit, or epsilon is negative.
#[allow(clippy::too_many_arguments)]
pub fn forward_inference<T: Element>(
    cpu: &Cpu,
    mode: Mode,
    extent: &Extent,
    x: &[T],
    [scale, bias]: [&[T]; 2],
    [estimated_mean, estimated_variance]: [&[T]; 2],
    epsilon: f64,
    y: &mut [T],
) -> Result<()> {
    let operation = "cudnn forward_inference";
    check_epsilon(operation, epsilon)?;
    let [mean, variance] = [estimated_mean, estimated_variance].map(to_f64);
    let extent = mode.view(extent)?;
    check_len(operation, "the estimated mean", mean.len(), extent.channels)?;
    check_len(operation, "the estimated variance", variance.len(), extent.channels)?;
    let inverse_std = inverse_std(&variance, epsilon, EpsPlace::InsideRoot);
    let by = Normalization {
        mean: &mean,
        inverse_std: &inverse_std,
        inverse_root: None,
        weight: Some(scale),
        bias: Some(bias),
        activation: Activation::Identity,
    };
    super::normalize(cpu, &extent, x, &by, y)
}

/// The gradients of x (`dx`), scale and bias (`resultBnScaleDiff`, `resultBnBiasDiff`).
///
/// `saved` is what [`forward_training`] saved, in the element type; without it the statistics are computed from `x` again,
/// in f64.
///
/// # Errors
/// If a length does not fit, or epsilon is negative; nothing is written then.
#[allow(clippy::too_many_arguments)]
pub fn backward<T: Element>(
    cpu: &Cpu,
    mode: Mode,
    extent: &Extent,
    (x, dy): (&[T], &[T]),
    scale: &[T],
    epsilon: f64,
    saved: Option<[&[T]; 2]>,
    dx: &mut [T],
    [dscale, dbias]: [&mut [T]; 2],
) -> Result<()> {
    let operation = "cudnn backward";
    check_epsilon(operation, epsilon)?;
    let extent = mode.view(extent)?;
    check_len(operation, "dx", dx.len(), extent.len()?)?;
    check_len(operation, "the gradient of the scale", dscale.len(), extent.channels)?;
    check_len(operation, "the gradient of the bias", dbias.len(), extent.channels)?;
    let (mean, inverse_std) = match saved {
        None => {
            let moments = stats(cpu, &extent, x)?;
            let inverse_std = moments.inverse_std(epsilon, EpsPlace::InsideRoot);
            (moments.mean, inverse_std)
        }
        Some([mean, inverse_variance]) => {
            check_len(operation, "the saved mean", mean.len(), extent.channels)?;
            check_len(operation, "the saved inverse variance", inverse_variance.len(), extent.channels)?;
            (to_f64(mean), to_f64(inverse_variance))
        }
    };
    let by = Normalization {
        mean: &mean,
        inverse_std: &inverse_std,
        inverse_root: None,
        weight: Some(scale),
        bias: None,
        activation: Activation::Identity,
    };
    let sums = super::backward_training(cpu, &extent, (x, dy), &by, dx)?;
    for (channel, (dscale, dbias)) in dscale.iter_mut().zip(dbias).enumerate() {
        *dscale = T::of(sums.g_centered[channel] * inverse_std[channel]);
        *dbias = T::of(sums.g[channel]);
    }
    Ok(())
}

fn to_f64<T: Element>(values: &[T]) -> Vec<f64> {
    values.iter().map(|value| value.f64()).collect()
}

fn check_epsilon(operation: &'static str, epsilon: f64) -> Result<()> {
    // cuDNN's CUDNN_BN_MIN_EPSILON is 0 since version 7.5; NaN fails too.
    if epsilon >= 0.0 {
        return Ok(());
    }
    Err(invalid(operation, format!("epsilon is {epsilon}, it must be 0 or more")))
}
