//! Batch normalization, with batch statistics or with constant ones, and an optional ReLU in the same pass.

use std::sync::Arc;

use convoke_kernels::batch_norm::{
    self as kernel, Activation, BackwardSums, EpsPlace, Moments, Normalization,
};
use convoke_kernels::memory_format::Extent;
use convoke_kernels::{DType, Element, Stored};

use super::{check_vector, same_dtype};
use crate::error::invalid;
use crate::tensor::dispatch;
use crate::{Function, Needs, Result, Tensor, apply_with_saved};

/// The statistics that normalise.
#[derive(Debug, Clone)]
pub enum Statistics {
    /// The mean and biased variance of this batch; gradients flow through them.
    Batch,
    /// The statistics of the batches of all ranks together. Gradients flow through them, including the gradients of the other
    /// ranks' outputs. The gradients of weight and bias are this rank's share only.
    Synchronized(Arc<dyn Synchronize>),
    /// Given statistics, by channel, such as running statistics in evaluation. Gradients do not flow through them. A variance of
    /// 0 with eps 0 gives NaN.
    Constant {
        /// Mean by channel.
        mean: Arc<[f64]>,
        /// Variance by channel.
        variance: Arc<[f64]>,
    },
}

/// Combines the statistics of all ranks. Each rank makes the same calls in the same order: one in forward and one in backward.
pub trait Synchronize: std::fmt::Debug + Send + Sync {
    /// The moments over all ranks' values; `mine` are those over this rank's.
    ///
    /// # Errors
    /// If communication between ranks fails.
    fn moments(&self, mine: &Moments) -> Result<Moments>;

    /// The sums over all ranks' values; `mine` are those over this rank's.
    ///
    /// # Errors
    /// If communication between ranks fails.
    fn sums(&self, mine: &BackwardSums) -> Result<BackwardSums>;
}

/// How [`batch_norm`] and [`crate::ops::conv_bn2d`] normalise.
#[derive(Debug, Clone)]
pub struct BatchNormOptions {
    /// The statistics.
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
/// Also returns the batch's moments if they were computed, for the caller's running statistics. Saves x and two
/// numbers per channel; with a ReLU, its mask is recomputed from x.
///
/// If x is f16 or bf16, the output has the same type. Weight, bias, their gradients and the arithmetic are then f32, and the
/// statistics are those of the stored values.
///
/// # Errors
/// If weight, bias or statistics do not have one number per channel; if training gets only one value per channel; if eps is
/// negative or not a number.
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

    fn takes(&self, _: DType) -> bool {
        true
    }

    fn forward(&self, inputs: &[&Tensor], _: &Needs) -> Result<(Tensor, Saved)> {
        let x = inputs[0];
        let weight = self.weight.then(|| inputs[1]);
        let bias = self.bias.then(|| inputs[1 + usize::from(self.weight)]);
        let (y, normalizer) = if x.dtype().computes() {
            Normalizer::forward("batch_norm", &self.options, x, weight, bias)?
        } else {
            let wide = x.in_dtype(DType::F32)?;
            let (y, normalizer) =
                Normalizer::forward_in_place("batch_norm", &self.options, wide, weight, bias)?;
            (y.in_dtype(x.dtype())?, normalizer)
        };
        Ok((y, Saved { x: x.detach(), normalizer }))
    }

    fn backward(
        &self,
        Saved { x, normalizer }: Saved,
        upstream: Tensor,
        needs: &Needs,
    ) -> Result<Vec<Option<Tensor>>> {
        let wanted = [self.weight && needs.input(1), self.bias && needs.input(1 + usize::from(self.weight))];
        let for_x = needs.input(0);
        let dtype = x.dtype();
        let (dx, sums) = if dtype.computes() {
            normalizer.gradients(&x, &upstream, for_x, wanted)?
        } else {
            let (mut wide, dy) = (x.in_dtype(DType::F32)?, upstream.in_dtype(DType::F32)?);
            drop((x, upstream));
            let sums = normalizer.gradients_in_place(&mut wide, &dy, for_x, wanted)?;
            (for_x.then(|| wide.in_dtype(dtype)).transpose()?, sums)
        };
        let [weight, bias] = normalizer.parameter_gradients(sums.as_ref(), wanted)?;
        let mut gradients = vec![dx];
        gradients.extend(self.weight.then_some(weight));
        gradients.extend(self.bias.then_some(bias));
        Ok(gradients)
    }
}

/// The statistics and parameters of one normalisation, shared by separate and fused batch norm.
#[derive(Clone)]
pub(super) struct Normalizer {
    pub(super) moments: Option<Moments>,
    ranks: Option<Arc<dyn Synchronize>>,
    mean: Arc<[f64]>,
    inverse_std: Arc<[f64]>,
    /// See [`Normalization::inverse_root`].
    inverse_root: Option<Arc<[f64]>>,
    weight: Option<Tensor>,
    bias: Option<Tensor>,
    activation: Activation,
}

impl Normalizer {
    /// Computes the statistics of `x`, or uses the given ones.
    fn new(
        operation: &'static str,
        options: &BatchNormOptions,
        x: &Tensor,
        weight: Option<&Tensor>,
        bias: Option<&Tensor>,
    ) -> Result<Normalizer> {
        if matches!(options.statistics, Statistics::Constant { .. }) {
            return Normalizer::of_moments(operation, options, x, weight, bias, None);
        }
        let extent = check(operation, options, x, weight, bias)?;
        let moments = dispatch!(x.dtype(), T => {
            kernel::stats(x.device().compute(), &extent, x.data::<T>()?)?
        });
        Normalizer::of_moments(operation, options, x, weight, bias, Some(moments))
    }

    /// Computes the statistics of `x` from its moments, or uses the given ones.
    pub(super) fn of_moments(
        operation: &'static str,
        options: &BatchNormOptions,
        x: &Tensor,
        weight: Option<&Tensor>,
        bias: Option<&Tensor>,
        moments: Option<Moments>,
    ) -> Result<Normalizer> {
        check(operation, options, x, weight, bias)?;
        if let Statistics::Constant { mean, variance } = &options.statistics {
            let inverse_std = kernel::inverse_std(variance, options.eps, options.eps_place);
            return Ok(Normalizer::of(None, mean.clone(), inverse_std, options, weight, bias));
        }
        let mut moments = moments.expect("the caller takes them, but for constant statistics");
        if let Statistics::Synchronized(ranks) = &options.statistics {
            moments = ranks.moments(&moments)?;
            check_count(operation, moments.count, x)?;
        }
        let inverse_std = moments.inverse_std(options.eps, options.eps_place);
        Ok(Normalizer::of_batch(moments, inverse_std, options, weight, bias))
    }

    fn of_batch(
        moments: Moments,
        inverse_std: Vec<f64>,
        options: &BatchNormOptions,
        weight: Option<&Tensor>,
        bias: Option<&Tensor>,
    ) -> Normalizer {
        let mean = moments.mean.clone().into();
        Normalizer::of(Some(moments), mean, inverse_std, options, weight, bias)
    }

    fn of(
        moments: Option<Moments>,
        mean: Arc<[f64]>,
        inverse_std: Vec<f64>,
        options: &BatchNormOptions,
        weight: Option<&Tensor>,
        bias: Option<&Tensor>,
    ) -> Normalizer {
        let inverse_root = moments.as_ref().and_then(|moments| moments.inverse_root(options.eps_place));
        Normalizer {
            moments,
            inverse_root: inverse_root.map(Arc::from),
            ranks: match &options.statistics {
                Statistics::Synchronized(ranks) => Some(ranks.clone()),
                _ => None,
            },
            mean,
            inverse_std: inverse_std.into(),
            weight: weight.map(Tensor::detach),
            bias: bias.map(Tensor::detach),
            activation: options.activation,
        }
    }

    /// [`Normalizer::new`], and the output.
    fn forward(
        operation: &'static str,
        options: &BatchNormOptions,
        x: &Tensor,
        weight: Option<&Tensor>,
        bias: Option<&Tensor>,
    ) -> Result<(Tensor, Normalizer)> {
        let cpu = x.device().compute();
        if !matches!(options.statistics, Statistics::Batch) {
            let normalizer = Normalizer::new(operation, options, x, weight, bias)?;
            let extent = x.extent(operation)?;
            let y = dispatch!(x.dtype(), T => x.build_like(|y: &mut [T]| {
                Ok(kernel::normalize(cpu, &extent, x.data::<T>()?, &normalizer.by::<T>()?, y)?)
            }))?;
            return Ok((y, normalizer));
        }
        let extent = check(operation, options, x, weight, bias)?;
        let mut statistics = None;
        let y = dispatch!(x.dtype(), T => {
            let layer = kernel::Affine {
                weight: weight.map(|weight| weight.data::<T>()).transpose()?,
                bias: bias.map(|bias| bias.data::<T>()).transpose()?,
                eps: options.eps,
                eps_place: options.eps_place,
                activation: options.activation,
            };
            x.build_like(|y: &mut [T]| {
                statistics = Some(kernel::forward_training(cpu, &extent, x.data::<T>()?, &layer, y)?);
                Ok(())
            })
        })?;
        let (moments, inverse_std) = statistics.expect("set by what built y");
        Ok((y, Normalizer::of_batch(moments, inverse_std, options, weight, bias)))
    }

    /// [`Normalizer::forward`] of a tensor that is no longer needed: the output uses its buffer.
    pub(super) fn forward_in_place(
        operation: &'static str,
        options: &BatchNormOptions,
        mut x: Tensor,
        weight: Option<&Tensor>,
        bias: Option<&Tensor>,
    ) -> Result<(Tensor, Normalizer)> {
        let normalizer = Normalizer::new(operation, options, &x, weight, bias)?;
        let extent = x.extent(operation)?;
        let cpu = x.device().compute().clone();
        dispatch!(x.dtype(), T => {
            let by = normalizer.by::<T>()?;
            x.update(|x: &mut [T]| Ok(kernel::normalize_in_place(&cpu, &extent, &by, x)?))
        })?;
        Ok((x, normalizer))
    }

    /// A normalizer that computes x - mean only.
    pub(super) fn centering(&self) -> Normalizer {
        Normalizer {
            inverse_std: vec![1.0; self.mean.len()].into(),
            inverse_root: None,
            weight: None,
            bias: None,
            activation: Activation::Identity,
            ..self.clone()
        }
    }

    /// The same for values that are already centered, without the activation.
    pub(super) fn of_centered(&self) -> Normalizer {
        Normalizer { mean: vec![0.0; self.mean.len()].into(), ..self.without_activation() }
    }

    pub(super) fn without_activation(&self) -> Normalizer {
        Normalizer { activation: Activation::Identity, ..self.clone() }
    }

    /// This normalisation in the form that kernels take.
    pub(super) fn by<T: Element>(&self) -> Result<Normalization<'_, T>> {
        Ok(Normalization {
            mean: &self.mean,
            inverse_std: &self.inverse_std,
            inverse_root: self.inverse_root.as_deref(),
            weight: self.weight.as_ref().map(|weight| weight.data::<T>()).transpose()?,
            bias: self.bias.as_ref().map(|bias| bias.data::<T>()).transpose()?,
            activation: self.activation,
        })
    }

    /// The gradient of x, if `for_x`, and the sums for the gradients of weight and bias that are `wanted`.
    fn gradients(
        &self,
        x: &Tensor,
        dy: &Tensor,
        for_x: bool,
        wanted: [bool; 2],
    ) -> Result<(Option<Tensor>, Option<BackwardSums>)> {
        let extent = x.extent("batch_norm backward")?;
        let cpu = x.device().compute();
        dispatch!(x.dtype(), T => {
            let (pair, by) = ((x.data::<T>()?, dy.data::<T>()?), self.by::<T>()?);
            if for_x && self.moments.is_some() && self.ranks.is_none() {
                let mut sums = None;
                let dx = x.build_like(|dx: &mut [T]| {
                    sums = Some(kernel::backward_training(cpu, &extent, pair, &by, dx)?);
                    Ok(())
                })?;
                return Ok((Some(dx), sums));
            }
            let sums = self.backward_sums(x, dy, for_x, wanted)?;
            let through = self.through(sums.as_ref().filter(|_| for_x))?;
            let through = through.as_ref().map(|(sums, count)| (sums, *count));
            let gradient = |dx: &mut [T]| Ok(kernel::backward_elemt(cpu, &extent, pair, &by, through, dx)?);
            Ok((for_x.then(|| x.build_like(gradient)).transpose()?, sums))
        })
    }

    /// [`Normalizer::gradients`] in the buffer of x: if `for_x`, x becomes its gradient.
    pub(super) fn gradients_in_place(
        &self,
        x: &mut Tensor,
        dy: &Tensor,
        for_x: bool,
        wanted: [bool; 2],
    ) -> Result<Option<BackwardSums>> {
        let sums = self.backward_sums(x, dy, for_x, wanted)?;
        if for_x {
            let extent = x.extent("batch_norm backward")?;
            let cpu = x.device().compute().clone();
            let through = self.through(sums.as_ref())?;
            let through = through.as_ref().map(|(sums, count)| (sums, *count));
            dispatch!(x.dtype(), T => {
                let (by, dy) = (self.by::<T>()?, dy.data::<T>()?);
                x.update(|x: &mut [T]| {
                    Ok(kernel::backward_elemt_in_place(&cpu, &extent, dy, &by, through, x)?)
                })
            })?;
        }
        Ok(sums)
    }

    /// Whether the gradient of x (if `for_x`) or the `wanted` gradients of weight and bias need sums over the batch.
    pub(super) fn needs_sums(&self, for_x: bool, wanted: [bool; 2]) -> bool {
        (for_x && self.moments.is_some()) || wanted.contains(&true)
    }

    /// The sums that the gradient of x (if `for_x`) and the `wanted` gradients of weight and bias need, if they need any.
    fn backward_sums(
        &self,
        x: &Tensor,
        dy: &Tensor,
        for_x: bool,
        wanted: [bool; 2],
    ) -> Result<Option<BackwardSums>> {
        if !self.needs_sums(for_x, wanted) {
            return Ok(None);
        }
        let extent = x.extent("batch_norm backward")?;
        let sums = dispatch!(x.dtype(), T => {
            let cpu = x.device().compute();
            kernel::backward_reduce(cpu, &extent, x.data::<T>()?, dy.data::<T>()?, &self.by::<T>()?)?
        });
        Ok(Some(sums))
    }

    /// The sums over the batches of all ranks and the number of values per channel, if gradients flow through the statistics.
    pub(super) fn through(&self, sums: Option<&BackwardSums>) -> Result<Option<(BackwardSums, usize)>> {
        let Some((sums, moments)) = sums.zip(self.moments.as_ref()) else { return Ok(None) };
        let sums = self.ranks.as_ref().map_or_else(|| Ok(sums.clone()), |ranks| ranks.sums(sums))?;
        Ok(Some((sums, moments.count)))
    }

    /// The gradients of weight and bias that are `wanted`.
    pub(super) fn parameter_gradients(
        &self,
        sums: Option<&BackwardSums>,
        wanted: [bool; 2],
    ) -> Result<[Option<Tensor>; 2]> {
        let Some(sums) = sums else { return Ok([None, None]) };
        let gradient = |of: &Option<Tensor>, wanted: bool, value: &dyn Fn(usize) -> f64| {
            let Some(of) = of.as_ref().filter(|_| wanted) else { return Ok(None) };
            let gradient = dispatch!(of.dtype(), T => of.build_like(|out: &mut [T]| {
                out.iter_mut().enumerate().for_each(|(channel, out)| *out = T::of(value(channel)));
                Ok(())
            }))?;
            Ok(Some(gradient))
        };
        let of_weight = |channel: usize| sums.g_centered[channel] * self.inverse_std[channel];
        Ok([
            gradient(&self.weight, wanted[0], &of_weight)?,
            gradient(&self.bias, wanted[1], &|channel| sums.g[channel])?,
        ])
    }
}

/// Gives PyTorch's error for a single value per channel in training.
fn check_count(operation: &'static str, count: usize, x: &Tensor) -> Result<()> {
    match count {
        1 => {
            let shape = x.shape();
            let reason =
                format!("Expected more than 1 value per channel when training, got input size {shape:?}");
            Err(invalid(operation, reason))
        }
        _ => Ok(()),
    }
}

/// Checks that everything fits `x`, and returns its extent.
fn check(
    operation: &'static str,
    options: &BatchNormOptions,
    x: &Tensor,
    weight: Option<&Tensor>,
    bias: Option<&Tensor>,
) -> Result<Extent> {
    let extent = x.extent(operation)?;
    kernel::check_eps(operation, options.eps)?;
    let operands: Vec<&Tensor> = [Some(x), weight, bias].into_iter().flatten().collect();
    same_dtype(operation, &operands)?;
    check_vector(operation, "the weight", weight, extent.channels)?;
    check_vector(operation, "the bias", bias, extent.channels)?;
    match &options.statistics {
        Statistics::Batch => check_count(operation, extent.batch * extent.spatial, x).map(|()| extent),
        // The number of values is only known after the ranks have exchanged theirs.
        Statistics::Synchronized(_) => Ok(extent),
        Statistics::Constant { mean, variance } => {
            let given = [("mean", mean.len()), ("variance", variance.len())];
            let Some((what, found)) = given.into_iter().find(|&(_, found)| found != extent.channels) else {
                return Ok(extent);
            };
            let (shape, channels) = (x.shape(), extent.channels);
            let reason =
                format!("the {what} has {found} values, the input {shape:?} has {channels} channels");
            Err(invalid(operation, reason))
        }
    }
}
