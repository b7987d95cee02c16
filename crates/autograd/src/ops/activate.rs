//! Activations that a normalisation can apply in the same pass.

use convoke_kernels::activation::{self, Activation};

use super::pointwise::pointwise;
use crate::{Function, Needs, Operation, Result, Tensor, apply};

impl Tensor {
    /// max(0, x); NaN stays NaN. Saves its output.
    ///
    /// # Errors
    /// If the tensor is f16 or bf16, or there is no memory.
    pub fn relu(&self) -> Result<Tensor> {
        activate(self, Activation::Relu)
    }
}

/// The activation of every element. Saves its output, or its input where [`Activation::needs_input`] says so; the identity is `x`
/// itself.
///
/// # Errors
/// If a leaky ReLU's slope is not above 0 and finite, or the bounds of a clip make no sense.
pub fn activate(x: &Tensor, activation: Activation) -> Result<Tensor> {
    match (activation, activation.pointwise()) {
        (Activation::Identity, _) => Ok(x.clone()),
        (_, Some(function)) => pointwise(x, function),
        (_, None) => apply(Activate { activation }, &[x]),
    }
}

struct Activate {
    activation: Activation,
}

impl Function for Activate {
    /// The output. The next operation usually saves it too, so this takes no extra memory.
    type Saved = Tensor;

    fn name(&self) -> &'static str {
        match self.activation {
            Activation::Relu => "relu",
            _ => "activate",
        }
    }

    fn describe(&self) -> Option<Operation> {
        Some(Operation::Activate(self.activation))
    }

    fn forward(&self, inputs: &[&Tensor], _: &Needs) -> Result<(Tensor, Tensor)> {
        let x = inputs[0];
        let y = x.elements_like(|y| {
            Ok(activation::activate(x.device().compute(), self.activation, x.elements()?, y)?)
        })?;
        Ok((y.clone(), y))
    }

    fn backward(&self, y: Tensor, upstream: Tensor, _: &Needs) -> Result<Vec<Option<Tensor>>> {
        let dx = y.elements_like(|dx| {
            let (cpu, y, dy) = (y.device().compute(), y.elements()?, upstream.elements()?);
            Ok(activation::activation_backward(cpu, self.activation, y, dy, dx)?)
        })?;
        Ok(vec![Some(dx)])
    }
}
