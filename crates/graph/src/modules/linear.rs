//! The fully connected layer.

use convoke_autograd::{Error, Result, Tensor, ops};

use crate::{Forward, Init, Module, Parameter};

/// y = x Wᵀ + b, as PyTorch's `Linear`: N x inputs to N x outputs.
#[derive(Module)]
pub struct Linear {
    /// Outputs x inputs.
    pub weight: Parameter,
    /// Outputs, if there is one.
    pub bias: Option<Parameter>,
}

impl Linear {
    /// A layer from `inputs` to `outputs` features.
    ///
    /// # Errors
    /// If either is 0.
    pub fn new(init: &Init, [inputs, outputs]: [usize; 2], bias: bool) -> Result<Linear> {
        if inputs == 0 || outputs == 0 {
            let reason = format!("{inputs} inputs and {outputs} outputs: neither may be 0");
            return Err(Error::Invalid { operation: "Linear", reason });
        }
        Ok(Linear {
            weight: init.kaiming_uniform(&[outputs, inputs], inputs)?,
            bias: bias.then(|| init.kaiming_uniform(&[outputs], inputs)).transpose()?,
        })
    }
}

impl Forward for Linear {
    fn forward(&self, input: &Tensor) -> Result<Tensor> {
        let bias = self.bias.as_ref().map(Parameter::value);
        ops::linear(input, &self.weight.value(), bias.as_ref())
    }
}
