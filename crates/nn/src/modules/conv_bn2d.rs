//! Convolution, batch norm and an optional ReLU as one block.

use convoke_autograd::ops::{self, Activation, ConvBnParameters};
use convoke_autograd::{Result, Tensor, fold_conv_bn2d};

use super::{BatchNorm2d, Conv2d};
use crate::{Module, Parameter};

/// How a [`ConvBn2d`] block runs. Values, gradients and running statistics are the same either way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ConvBnMode {
    /// One operation that saves only the convolution's input and convolves again in backward.
    #[default]
    Fused,
    /// Convolution, batch norm and ReLU one after the other, each saving what it needs.
    Separate,
}

impl std::fmt::Display for ConvBnMode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            ConvBnMode::Fused => "fused",
            ConvBnMode::Separate => "separate",
        })
    }
}

/// A convolution, its batch norm and an activation: children `conv` and `bn`, in either [`ConvBnMode`].
pub struct ConvBn2d {
    /// The convolution.
    pub conv: Conv2d,
    /// The batch norm over its output.
    pub bn: BatchNorm2d,
    activation: Activation,
    mode: ConvBnMode,
}

impl ConvBn2d {
    /// Joins two layers; `bn` must have as many channels as `conv` gives, which forward checks.
    pub fn new(conv: Conv2d, bn: BatchNorm2d, activation: Activation, mode: ConvBnMode) -> ConvBn2d {
        ConvBn2d { conv, bn, activation, mode }
    }

    /// The convolution, with a bias, that computes what this block does in evaluation, before its activation.
    ///
    /// # Errors
    /// If the batch norm keeps no running statistics, or has another number of channels than the convolution gives.
    pub fn fold(&self) -> Result<Conv2d> {
        let norm = self.bn.evaluation()?;
        let (weight, bias) = self.with_parameters(|parameters| fold_conv_bn2d(parameters, &norm))?;
        Ok(Conv2d::from_parts(Parameter::new(&weight), Some(Parameter::new(&bias)), *self.conv.options()))
    }

    fn with_parameters<R>(&self, run: impl FnOnce(&ConvBnParameters<'_>) -> R) -> R {
        let [bias, gamma, beta] =
            [&self.conv.bias, &self.bn.weight, &self.bn.bias].map(|p| p.as_ref().map(Parameter::value));
        run(&ConvBnParameters {
            weight: &self.conv.weight.value(),
            bias: bias.as_ref(),
            gamma: gamma.as_ref(),
            beta: beta.as_ref(),
        })
    }
}

impl Module for ConvBn2d {
    fn forward(&self, input: &Tensor) -> Result<Tensor> {
        if self.mode == ConvBnMode::Separate {
            let normalized = self.bn.forward(&self.conv.forward(input)?)?;
            return match self.activation {
                Activation::Identity => Ok(normalized),
                Activation::Relu => normalized.relu(),
            };
        }
        let norm = self.bn.options(self.conv.weight.value().shape()[0], self.activation)?;
        let (output, moments) =
            self.with_parameters(|parameters| ops::conv_bn2d(input, parameters, self.conv.options(), &norm))?;
        self.bn.observe(moments.as_ref())?;
        Ok(output)
    }

    fn children(&self) -> Vec<(&str, &dyn Module)> {
        vec![("conv", &self.conv), ("bn", &self.bn)]
    }
}
