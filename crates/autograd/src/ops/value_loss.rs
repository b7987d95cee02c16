//! Losses against values: mean squared error, and binary cross-entropy of logits.

use convoke_kernels::value_loss::{self, ValueLoss};

use super::{Reduction, same_dtype};
use crate::error::invalid;
use crate::{Function, Needs, Result, Tensor, apply};

/// (x - target)^2 of every element, as PyTorch's `mse_loss`; the mean is over all elements. The result has shape `[]`.
///
/// # Errors
/// If shapes or types differ.
pub fn mse_loss(x: &Tensor, target: &Tensor, reduction: Reduction) -> Result<Tensor> {
    of("mse_loss", ValueLoss::SquaredError, [x, target], reduction)
}

/// -t log(sigmoid(x)) - (1 - t) log(1 - sigmoid(x)) of every element, as PyTorch's `binary_cross_entropy_with_logits`; the mean
/// is over all elements. Targets must be 0 to 1; as in PyTorch, this is not checked. The result has shape `[]`.
///
/// # Errors
/// If shapes or types differ.
pub fn binary_cross_entropy_with_logits(x: &Tensor, target: &Tensor, reduction: Reduction) -> Result<Tensor> {
    let loss = ValueLoss::BinaryCrossEntropyWithLogits;
    of("binary_cross_entropy_with_logits", loss, [x, target], reduction)
}

fn of(
    name: &'static str,
    loss: ValueLoss,
    [x, target]: [&Tensor; 2],
    reduction: Reduction,
) -> Result<Tensor> {
    let divisor = match reduction {
        Reduction::Mean => x.len() as f64,
        Reduction::Sum => 1.0,
    };
    apply(Loss { name, loss, divisor }, &[x, target])
}

struct Loss {
    name: &'static str,
    loss: ValueLoss,
    divisor: f64,
}

impl Function for Loss {
    /// Both inputs, in one memory format.
    type Saved = [Tensor; 2];

    fn name(&self) -> &'static str {
        self.name
    }

    fn forward(&self, inputs: &[&Tensor], _: &Needs) -> Result<(Tensor, [Tensor; 2])> {
        let [x, target] = [inputs[0], inputs[1]];
        same_dtype(self.name, inputs)?;
        if x.shape() != target.shape() {
            let (x, target) = (x.shape(), target.shape());
            return Err(invalid(self.name, format!("x is {x:?}, but the targets are {target:?}")));
        }
        let (x, target) = (x.constant(), target.in_format(x.format())?);
        let total = match x.device().is_dry() {
            true => 0.0,
            false => {
                let cpu = x.device().compute();
                value_loss::value_loss(cpu, self.loss, x.elements()?, target.elements()?)?
            }
        };
        let y = Tensor::full(x.device(), &[], x.dtype(), total / self.divisor)?;
        Ok((y, [x, target]))
    }

    fn backward(
        &self,
        [x, target]: [Tensor; 2],
        upstream: Tensor,
        needs: &Needs,
    ) -> Result<Vec<Option<Tensor>>> {
        let factor = upstream.item()? / self.divisor;
        let gradient = |of_target: bool| {
            x.elements_like(|gradient| {
                let (cpu, t) = (x.device().compute(), target.elements()?);
                let x = x.elements()?;
                match of_target {
                    false => value_loss::value_loss_backward(cpu, self.loss, factor, x, t, gradient)?,
                    true => value_loss::value_loss_backward_targets(cpu, self.loss, factor, x, t, gradient)?,
                }
                Ok(())
            })
        };
        [0, 1].map(|input| needs.input(input).then(|| gradient(input == 1)).transpose()).into_iter().collect()
    }
}
