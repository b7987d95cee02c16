//! Batch norm with the interface of cuDNN's calls: `cudnnBatchNormalizationForwardTraining`, `ForwardInference`, `Backward`.
//!
//! For code that is ported from cuDNN, or written against its semantics. Differences from cuDNN: there are no blending
//! factors alpha and beta (they are 1 and 0), and statistics that are not saved are recomputed in f64.

use super::{Activation, Affine, Convention, EpsPlace, Normalization, inverse_std, stats};
use crate::error::{check_len, invalid};
use crate::memory_format::Extent;
use crate::{Cpu, Result, Slice, SliceMut};

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

/// What the calls for one layer have in common.
#[derive(Debug, Clone, Copy)]
pub struct Layer<'a> {
    /// Which values share statistics and parameters.
    pub mode: Mode,
    /// The shape of x, y and their gradients.
    pub extent: Extent,
    /// `bnScale`.
    pub scale: Slice<'a>,
    /// `bnBias`. [`backward`] does not read it.
    pub bias: Slice<'a>,
    /// Added to the variance; 0 or more.
    pub epsilon: f64,
}

/// What [`forward_training`] writes.
#[derive(Debug)]
pub struct TrainingOutputs<'a> {
    /// The normalised values.
    pub y: SliceMut<'a>,
    /// The statistics over many calls, updated with those of this call. They are optional.
    pub running: Option<Running<'a>>,
    /// `resultSaveMean` and `resultSaveInvVariance` (1 / sqrt(variance + epsilon)), for backward. They are optional.
    pub saved: Option<[SliceMut<'a>; 2]>,
}

/// Statistics over many calls: `new = (1 - exponential_average_factor) old + exponential_average_factor batch's`.
#[derive(Debug)]
pub struct Running<'a> {
    /// A factor of 1 / (1 + n) in call n, counted from 0, gives the average of all calls.
    pub exponential_average_factor: f64,
    /// `resultRunningMean`.
    pub mean: SliceMut<'a>,
    /// `resultRunningVariance`: it is unbiased.
    pub variance: SliceMut<'a>,
}

/// y = scale (x - mean) / sqrt(variance + epsilon) + bias with the batch's mean and biased variance.
///
/// # Errors
/// If a length does not fit, epsilon is negative or NaN, or the exponential average factor is NaN; nothing is written then.
#[inline(never)]
pub fn forward_training(
    cpu: &Cpu,
    layer: &Layer<'_>,
    x: Slice<'_>,
    outputs: TrainingOutputs<'_>,
) -> Result<()> {
    let operation = "cudnn forward_training";
    let extent = layer.view(operation)?;
    let TrainingOutputs { y, running, saved } = outputs;
    check_len(operation, "y", y.len(), extent.len()?)?;
    check_len(operation, "the scale", layer.scale.len(), extent.channels)?;
    check_len(operation, "the bias", layer.bias.len(), extent.channels)?;
    if let Some(Running { exponential_average_factor, mean, variance }) = &running {
        if exponential_average_factor.is_nan() {
            return Err(invalid(operation, "the exponential average factor is not a number"));
        }
        check_len(operation, "the running mean", mean.len(), extent.channels)?;
        check_len(operation, "the running variance", variance.len(), extent.channels)?;
    }
    if let Some([mean, inverse_variance]) = &saved {
        check_saved(operation, [mean.as_slice(), inverse_variance.as_slice()], &extent)?;
    }
    let affine = Affine {
        weight: Some(layer.scale),
        bias: Some(layer.bias),
        eps: layer.epsilon,
        eps_place: EpsPlace::InsideRoot,
        activation: Activation::Identity,
    };
    let (moments, inverse_std) = super::forward_training(cpu, &extent, x, &affine, y)?;
    if let Some(Running { exponential_average_factor, mean, variance }) = running {
        Convention::cudnn().update(exponential_average_factor, &moments, mean, variance)?;
    }
    for (saved, values) in saved.into_iter().flatten().zip([&moments.mean, &inverse_std]) {
        saved.update(|channel, _| values[channel]);
    }
    Ok(())
}

/// What [`forward_inference`] reads besides the layer.
#[derive(Debug, Clone, Copy)]
pub struct InferenceInputs<'a> {
    /// The values to normalise.
    pub x: Slice<'a>,
    /// `estimatedMean`.
    pub estimated_mean: Slice<'a>,
    /// `estimatedVariance`.
    pub estimated_variance: Slice<'a>,
}

/// y = scale (x - mean) / sqrt(variance + epsilon) + bias with `estimatedMean` and `estimatedVariance`.
///
/// # Errors
/// If a length does not fit, or epsilon is negative or NaN.
#[inline(never)]
pub fn forward_inference(
    cpu: &Cpu,
    layer: &Layer<'_>,
    inputs: InferenceInputs<'_>,
    y: SliceMut<'_>,
) -> Result<()> {
    let operation = "cudnn forward_inference";
    let extent = layer.view(operation)?;
    let [mean, variance] = [inputs.estimated_mean, inputs.estimated_variance].map(Slice::to_f64);
    check_len(operation, "the estimated mean", mean.len(), extent.channels)?;
    check_len(operation, "the estimated variance", variance.len(), extent.channels)?;
    let inverse_std = inverse_std(&variance, layer.epsilon, EpsPlace::InsideRoot);
    let by = Normalization { bias: Some(layer.bias), ..layer.normalization(&mean, &inverse_std) };
    super::normalize(cpu, &extent, inputs.x, &by, y)
}

/// What [`backward`] reads besides the layer.
#[derive(Debug, Clone, Copy)]
pub struct BackwardInputs<'a> {
    /// The x of forward.
    pub x: Slice<'a>,
    /// The gradient of y.
    pub dy: Slice<'a>,
    /// What [`forward_training`] saved, in the element type; without it the statistics are computed from `x` again, in f64.
    pub saved: Option<[Slice<'a>; 2]>,
}

/// What [`backward`] writes.
#[derive(Debug)]
pub struct Gradients<'a> {
    /// The gradient of x.
    pub dx: SliceMut<'a>,
    /// `resultBnScaleDiff`.
    pub scale: SliceMut<'a>,
    /// `resultBnBiasDiff`.
    pub bias: SliceMut<'a>,
}

/// The gradients of x, scale and bias.
///
/// # Errors
/// If a length does not fit, or epsilon is negative or NaN; nothing is written then.
#[inline(never)]
pub fn backward(
    cpu: &Cpu,
    layer: &Layer<'_>,
    inputs: BackwardInputs<'_>,
    gradients: Gradients<'_>,
) -> Result<()> {
    let operation = "cudnn backward";
    let extent = layer.view(operation)?;
    let BackwardInputs { x, dy, saved } = inputs;
    let Gradients { dx, scale, bias } = gradients;
    check_len(operation, "dx", dx.len(), extent.len()?)?;
    check_len(operation, "the gradient of the scale", scale.len(), extent.channels)?;
    check_len(operation, "the gradient of the bias", bias.len(), extent.channels)?;
    let (mean, inverse_std) = match saved {
        None => {
            let moments = stats(cpu, &extent, x)?;
            let inverse_std = moments.inverse_std(layer.epsilon, EpsPlace::InsideRoot);
            (moments.mean, inverse_std)
        }
        Some(saved) => {
            check_saved(operation, saved, &extent)?;
            saved.map(Slice::to_f64).into()
        }
    };
    let by = layer.normalization(&mean, &inverse_std);
    let sums = super::backward_training(cpu, &extent, (x, dy), &by, dx)?;
    scale.update(|channel, _| sums.g_centered[channel] * inverse_std[channel]);
    bias.update(|channel, _| sums.g[channel]);
    Ok(())
}

impl<'a> Layer<'a> {
    /// The tensor's shape in this mode, after a check of epsilon.
    fn view(&self, operation: &'static str) -> Result<Extent> {
        // cuDNN's CUDNN_BN_MIN_EPSILON is 0 since version 7.5.
        super::check_eps(operation, self.epsilon)?;
        self.mode.view(&self.extent)
    }

    /// The normalisation with these statistics, without the bias.
    fn normalization(&self, mean: &'a [f64], inverse_std: &'a [f64]) -> Normalization<'a> {
        Normalization {
            mean,
            inverse_std,
            inverse_root: None,
            weight: Some(self.scale),
            bias: None,
            activation: Activation::Identity,
        }
    }
}

fn check_saved(
    operation: &'static str,
    [mean, inverse_variance]: [Slice<'_>; 2],
    extent: &Extent,
) -> Result<()> {
    check_len(operation, "the saved mean", mean.len(), extent.channels)?;
    check_len(operation, "the saved inverse variance", inverse_variance.len(), extent.channels)
}
