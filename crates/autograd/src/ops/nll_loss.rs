//! Negative log-likelihood, and cross-entropy on top of it.

use std::sync::Arc;

use convoke_kernels::class_loss::{ClassLoss, class_loss, class_loss_backward};
use convoke_kernels::memory_format::Extent;

use super::log_softmax;
use crate::{Function, MemoryFormat, Needs, Result, Tensor, apply_with_saved};

/// How the losses of all positions are combined.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Reduction {
    /// The mean of the losses over the targets that count; NaN if none does.
    #[default]
    Mean,
    /// The sum of the losses.
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
    let options = ClassOptions { ignore, ..ClassOptions::default() };
    Ok(weighted_nll_loss(log_probabilities, targets, reduction, &options)?.0)
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
    let loss = NllLoss { targets: targets.into(), reduction, options: options.clone() };
    apply_with_saved(loss, &[log_probabilities], |saved| saved.weight)
}

struct NllLoss {
    targets: Arc<[i64]>,
    reduction: Reduction,
    options: ClassOptions,
}

/// What backward needs of the input, and the sum of the weights of the targets' classes.
#[derive(Clone)]
struct SavedNllLoss {
    shape: Vec<usize>,
    format: MemoryFormat,
    weight: f64,
}

impl NllLoss {
    fn divisor(&self, weight: f64) -> f64 {
        match self.reduction {
            Reduction::Mean => weight,
            Reduction::Sum => 1.0,
        }
    }
}

impl Function for NllLoss {
    type Saved = SavedNllLoss;

    fn name(&self) -> &'static str {
        "nll_loss"
    }

    fn forward(&self, inputs: &[&Tensor], _: &Needs) -> Result<(Tensor, Self::Saved)> {
        let x = inputs[0];
        let extent = x.extent("nll_loss")?;
        let (total, weight) = match x.device().is_dry() {
            true => (0.0, self.targets.len() as f64),
            false => class_loss(&extent, &self.targets, &self.options.kernel(), x.elements()?)?,
        };
        // Targets that weigh nothing have no mean, also where smoothing gives other classes a share.
        let none = self.reduction == Reduction::Mean && weight == 0.0;
        let loss = if none { f64::NAN } else { total / self.divisor(weight) };
        let y = Tensor::full(x.device(), &[], x.dtype(), loss)?;
        Ok((y, SavedNllLoss { shape: x.shape().to_vec(), format: x.format(), weight }))
    }

    fn backward(
        &self,
        SavedNllLoss { shape, format, weight }: SavedNllLoss,
        upstream: Tensor,
        _: &Needs,
    ) -> Result<Vec<Option<Tensor>>> {
        let factor = upstream.item()? / self.divisor(weight);
        let (device, dtype) = (upstream.device(), upstream.dtype());
        let spatial = shape[2..].iter().product();
        let extent = Extent { batch: shape[0], channels: shape[1], spatial, format };
        let dx = Tensor::written_elements((device, dtype), &shape, format, |dx| {
            let options = self.options.kernel();
            Ok(class_loss_backward(device.compute(), &extent, &self.targets, &options, factor, dx)?)
        })?;
        Ok(vec![Some(dx)])
    }
}
