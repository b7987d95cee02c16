//! The convolution layer.

use convoke_autograd::ops::{self, ConvOptions};
use convoke_autograd::{Error, Result, Tensor};

use crate::{Forward, Init, Module, Parameter};

/// 2-D convolution, as PyTorch's `Conv2d`: N x C x H x W to N x K x OH x OW.
#[derive(Module)]
pub struct Conv2d {
    /// K x C/groups x R x S.
    pub weight: Parameter,
    /// K, if there is one.
    pub bias: Option<Parameter>,
    #[module(skip)]
    options: ConvOptions,
}

impl Conv2d {
    /// A convolution from `in_channels` to `out_channels` with a `[height, width]` kernel.
    ///
    /// # Errors
    /// A size of 0, or groups that do not divide the channels.
    pub fn new(
        init: &Init,
        [in_channels, out_channels]: [usize; 2],
        kernel: [usize; 2],
        options: ConvOptions,
        bias: bool,
    ) -> Result<Conv2d> {
        let groups = options.groups;
        let sizes = [in_channels, out_channels, kernel[0], kernel[1], groups];
        if sizes.contains(&0) || in_channels % groups != 0 || out_channels % groups != 0 {
            let reason = format!(
                "{in_channels} to {out_channels} channels with kernel {kernel:?} in {groups} groups: sizes must not \
                 be 0 and groups must divide both"
            );
            return Err(Error::Invalid { operation: "Conv2d", reason });
        }
        let shape = [out_channels, in_channels / groups, kernel[0], kernel[1]];
        // If this product overflows, the weight is too large and refused below.
        let fan_in = shape[1..].iter().fold(1, |product: usize, &size| product.saturating_mul(size));
        Ok(Conv2d {
            weight: init.kaiming_uniform(&shape, fan_in)?,
            bias: bias.then(|| init.kaiming_uniform(&[out_channels], fan_in)).transpose()?,
            options,
        })
    }

    /// A convolution with these parameters, which must fit the options.
    pub(super) fn from_parts(weight: Parameter, bias: Option<Parameter>, options: ConvOptions) -> Conv2d {
        Conv2d { weight, bias, options }
    }

    /// How it steps over its input.
    pub fn options(&self) -> &ConvOptions {
        &self.options
    }
}

impl Forward for Conv2d {
    fn forward(&self, input: &Tensor) -> Result<Tensor> {
        let bias = self.bias.as_ref().map(Parameter::value);
        ops::conv2d(input, &self.weight.value(), bias.as_ref(), &self.options)
    }
}
