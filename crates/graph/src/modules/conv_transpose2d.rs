//! The transposed convolution layer.

use convoke_autograd::ops::{self, ConvTransposeOptions};
use convoke_autograd::{Error, Result, Tensor};

use crate::{Forward, Init, Module, Parameter};

/// 2-D transposed convolution, as PyTorch's `ConvTranspose2d`: N x C x H x W to N x K x OH x OW.
#[derive(Module)]
pub struct ConvTranspose2d {
    /// C x K/groups x R x S.
    pub weight: Parameter,
    /// K, if there is one.
    pub bias: Option<Parameter>,
    #[module(skip)]
    options: ConvTransposeOptions,
}

impl ConvTranspose2d {
    /// A transposed convolution from `in_channels` to `out_channels` with a `[height, width]` kernel.
    ///
    /// # Errors
    /// A size of 0, or groups that do not divide the channels.
    pub fn new(
        init: &Init,
        [in_channels, out_channels]: [usize; 2],
        kernel: [usize; 2],
        options: ConvTransposeOptions,
        bias: bool,
    ) -> Result<ConvTranspose2d> {
        let groups = options.groups;
        let sizes = [in_channels, out_channels, kernel[0], kernel[1], groups];
        if sizes.contains(&0) || in_channels % groups != 0 || out_channels % groups != 0 {
            let reason = format!(
                "{in_channels} to {out_channels} channels with kernel {kernel:?} in {groups} groups: sizes must not \
                 be 0 and groups must divide both"
            );
            return Err(Error::Invalid { operation: "ConvTranspose2d", reason });
        }
        let shape = [in_channels, out_channels / groups, kernel[0], kernel[1]];
        // PyTorch takes the second axis of every weight for its inputs, also here, where it is the outputs'. If this product
        // overflows, the weight is too large and refused below.
        let fan_in = shape[1..].iter().fold(1, |product: usize, &size| product.saturating_mul(size));
        Ok(ConvTranspose2d {
            weight: init.kaiming_uniform(&shape, fan_in)?,
            bias: bias.then(|| init.kaiming_uniform(&[out_channels], fan_in)).transpose()?,
            options,
        })
    }

    /// How it steps over its output.
    pub fn options(&self) -> &ConvTransposeOptions {
        &self.options
    }
}

impl Forward for ConvTranspose2d {
    fn forward(&self, input: &Tensor) -> Result<Tensor> {
        let bias = self.bias.as_ref().map(Parameter::value);
        ops::conv_transpose2d(input, &self.weight.value(), bias.as_ref(), &self.options)
    }
}
