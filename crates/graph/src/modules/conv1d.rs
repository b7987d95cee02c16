//! The 1-D convolution layer.

use convoke_autograd::ops::{self, Conv1dOptions};
use convoke_autograd::{Error, Result, Tensor};

use crate::{Forward, Init, Module, Parameter};

/// 1-D convolution, as PyTorch's `Conv1d`: N x C x L to N x K x OL.
#[derive(Module)]
pub struct Conv1d {
    /// K x C/groups x S.
    pub weight: Parameter,
    /// K, if there is one.
    pub bias: Option<Parameter>,
    #[module(skip)]
    options: Conv1dOptions,
}

impl Conv1d {
    /// A convolution from `in_channels` to `out_channels` with a kernel of `kernel` elements.
    ///
    /// # Errors
    /// A size of 0, or groups that do not divide the channels.
    pub fn new(
        init: &Init,
        [in_channels, out_channels]: [usize; 2],
        kernel: usize,
        options: Conv1dOptions,
        bias: bool,
    ) -> Result<Conv1d> {
        let groups = options.groups;
        let sizes = [in_channels, out_channels, kernel, groups];
        if sizes.contains(&0) || in_channels % groups != 0 || out_channels % groups != 0 {
            let reason = format!(
                "{in_channels} to {out_channels} channels with kernel {kernel} in {groups} groups: sizes must not be 0 \
                 and groups must divide both"
            );
            return Err(Error::Invalid { operation: "Conv1d", reason });
        }
        // If this product overflows, the weight is too large and refused below.
        let fan_in = (in_channels / groups).saturating_mul(kernel);
        Ok(Conv1d {
            weight: init.kaiming_uniform(&[out_channels, in_channels / groups, kernel], fan_in)?,
            bias: bias.then(|| init.kaiming_uniform(&[out_channels], fan_in)).transpose()?,
            options,
        })
    }

    /// How it steps over its input.
    pub fn options(&self) -> &Conv1dOptions {
        &self.options
    }
}

impl Forward for Conv1d {
    fn forward(&self, input: &Tensor) -> Result<Tensor> {
        let bias = self.bias.as_ref().map(Parameter::value);
        ops::conv1d(input, &self.weight.value(), bias.as_ref(), &self.options)
    }
}
