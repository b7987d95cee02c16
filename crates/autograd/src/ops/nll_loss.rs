//! Negative log-likelihood, and cross-entropy on top of it.

use std::sync::Arc;

use convoke_kernels::loss;

use super::log_softmax;
use crate::tensor::dispatch;
use crate::{Function, MemoryFormat, Needs, Result, Tensor, apply};

/// What the losses of single positions become.
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
                let extent = convoke_kernels::memory_format::Extent {
                    batch: shape[0],
                    channels: shape[1],
                    spatial: shape[2..].iter().product(),
                    format,
                };
                Ok(loss::nll_backward(&extent, &self.targets, self.ignore, factor, dx)?)
            })
        })?;
        Ok(vec![Some(dx)])
    }
}
