//! Negative log-likelihood, and cross-entropy on top of it.

use std::sync::Arc;

use convoke_kernels::class_loss::{ClassLoss, class_loss, class_loss_backward};
use convoke_kernels::loss;
use convoke_kernels::memory_format::Extent;

use super::log_softmax;
use crate::tensor::dispatch;
use crate::{Function, MemoryFormat, Needs, Result, Tensor, apply};

/// How the losses of all positions are combined.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Reduction {
    /// Their mean over the targets that count; NaN if none does.
    #[default]
    Mean,
    /// Their sum.
    Sum,
}

/// -log_probabilities at the target classes, of an N x C x ... tensor, as PyTorch's `nll_loss`.
///
/// `targets` holds N x ... class numbers; those equal to `ignore` do not count. The result has shape `[]`.
///
/// # Errors
/// If the number of targets is not N x ..., or one is not a class.
pub fn nll_loss(
    log_probabilities: &Tensor,
    targets: &[i64],
    reduction: Reduction,
    ignore: Option<i64>,
) -> Result<Tensor> {
    apply(NllLoss { targets: targets.into(), reduction, ignore }, &[log_probabilities])
}

/// [`nll_loss`] of [`log_softmax`], as PyTorch's `cross_entropy`.
///
/// # Errors
/// As [`nll_loss`].
pub fn cross_entropy(
    x: &Tensor,
    targets: &[i64],
    reduction: Reduction,
    ignore: Option<i64>,
) -> Result<Tensor> {
    nll_loss(&log_softmax(x)?, targets, reduction, ignore)
}

/// Options of [`weighted_nll_loss`]. The default gives [`nll_loss`].
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ClassOptions {
    /// The target that does not count.
    pub ignore: Option<i64>,
    /// The weight of each class, C numbers; `None` means 1 for all.
    pub weights: Option<Arc<[f64]>>,
    /// The share of each target that is spread over all classes: 0 to 1.
    pub label_smoothing: f64,
}

impl ClassOptions {
    fn kernel(&self) -> ClassLoss<'_> {
        let ClassOptions { ignore, weights, label_smoothing } = self;
        ClassLoss { ignore: *ignore, weights: weights.as_deref(), label_smoothing: *label_smoothing }
    }
}

/// [`nll_loss`] with class weights and label smoothing: as PyTorch's `cross_entropy`, but it takes the log-softmax of the logits.
/// Also returns the sum of the weights of all targets, which is the divisor of the mean.
///
/// # Errors
/// As [`nll_loss`]; if there is not one weight per class, or smoothing is not 0 to 1.
pub fn weighted_nll_loss(
    log_probabilities: &Tensor,
    targets: &[i64],
    reduction: Reduction,
    options: &ClassOptions,
) -> Result<(Tensor, f64)> {
    let weight = total_weight(targets, options);
    let y = match options.weights.is_none() && options.label_smoothing == 0.0 {
        true => nll_loss(log_probabilities, targets, reduction, options.ignore)?,
        false => {
            let loss = WeightedNllLoss { targets: targets.into(), reduction, options: options.clone() };
            apply(loss, &[log_probabilities])?
        }
    };
    Ok((y, weight))
}

/// The sum of the weights of all targets that count. It does not check that targets are classes; computing the loss does.
fn total_weight(targets: &[i64], options: &ClassOptions) -> f64 {
    let counted = targets.iter().filter(|&&target| Some(target) != options.ignore);
    match &options.weights {
        None => counted.count() as f64,
        Some(weights) => {
            let weight = |&target: &i64| usize::try_from(target).ok().and_then(|class| weights.get(class));
            counted.filter_map(weight).sum()
        }
    }
}

struct WeightedNllLoss {
    targets: Arc<[i64]>,
    reduction: Reduction,
    options: ClassOptions,
}

impl Function for WeightedNllLoss {
    /// The input's shape and format, and the divisor.
    type Saved = (Vec<usize>, MemoryFormat, f64);

    fn name(&self) -> &'static str {
        "nll_loss"
    }

    fn forward(&self, inputs: &[&Tensor], _: &Needs) -> Result<(Tensor, Self::Saved)> {
        let x = inputs[0];
        let extent = x.extent("nll_loss")?;
        let (total, weight) = match x.device().is_dry() {
            true => (0.0, 1.0),
            false => dispatch!(x.dtype(), T => {
                class_loss(&extent, x.data::<T>()?, &self.targets, &self.options.kernel())
            })?,
        };
        let divisor = match self.reduction {
            Reduction::Mean => weight,
            Reduction::Sum => 1.0,
        };
        let y = Tensor::full(x.device(), &[], x.dtype(), total / divisor)?;
        Ok((y, (x.shape().to_vec(), x.format(), divisor)))
    }

    fn backward(
        &self,
        (shape, format, divisor): Self::Saved,
        upstream: Tensor,
        _: &Needs,
    ) -> Result<Vec<Option<Tensor>>> {
        let factor = upstream.item()? / divisor;
        let dx = dispatch!(upstream.dtype(), T => {
            Tensor::written(upstream.device(), &shape, format, |dx: &mut [T]| {
                let options = self.options.kernel();
                Ok(class_loss_backward(&extent_of(&shape, format), &self.targets, &options, factor, dx)?)
            })
        })?;
        Ok(vec![Some(dx)])
    }
}

/// The extent of an N x C x ... tensor.
fn extent_of(shape: &[usize], format: MemoryFormat) -> Extent {
    Extent { batch: shape[0], channels: shape[1], spatial: shape[2..].iter().product(), format }
}

struct NllLoss {
    targets: Arc<[i64]>,
    reduction: Reduction,
    ignore: Option<i64>,
}

impl Function for NllLoss {
    /// The input's shape and format, and the divisor.
    type Saved = (Vec<usize>, MemoryFormat, f64);

    fn name(&self) -> &'static str {
        "nll_loss"
    }

    fn forward(&self, inputs: &[&Tensor], _: &Needs) -> Result<(Tensor, Self::Saved)> {
        let x = inputs[0];
        let extent = x.extent("nll_loss")?;
        let (total, count) = match x.device().is_dry() {
            true => (0.0, self.targets.len()),
            false => dispatch!(x.dtype(), T => {
                loss::nll(&extent, x.data::<T>()?, &self.targets, self.ignore)
            })?,
        };
        let divisor = match self.reduction {
            Reduction::Mean => count as f64,
            Reduction::Sum => 1.0,
        };
        let y = Tensor::full(x.device(), &[], x.dtype(), total / divisor)?;
        Ok((y, (x.shape().to_vec(), x.format(), divisor)))
    }

    fn backward(
        &self,
        (shape, format, divisor): Self::Saved,
        upstream: Tensor,
        _: &Needs,
    ) -> Result<Vec<Option<Tensor>>> {
        let factor = upstream.item()? / divisor;
        let dx = dispatch!(upstream.dtype(), T => {
            Tensor::written(upstream.device(), &shape, format, |dx: &mut [T]| {
                let extent = extent_of(&shape, format);
                Ok(loss::nll_backward(&extent, &self.targets, self.ignore, factor, dx)?)
            })
        })?;
        Ok(vec![Some(dx)])
    }
}
