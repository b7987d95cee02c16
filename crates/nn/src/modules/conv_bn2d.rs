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
    /// The batch norm over its output; `None` once [`Module::fold`] has made it a part of the convolution.
    pub bn: Option<BatchNorm2d>,
    activation: Activation,
    mode: ConvBnMode,
}

impl ConvBn2d {
    /// Joins two layers; `bn` must have as many channels as `conv` gives, which forward checks.
    pub fn new(conv: Conv2d, bn: BatchNorm2d, activation: Activation, mode: ConvBnMode) -> ConvBn2d {
        ConvBn2d { conv, bn: Some(bn), activation, mode }
    }

    /// activation(bn(conv(input)) + residual): the end of a residual block (He, Zhang, Ren, Sun: "Deep residual learning for
    /// image recognition", 2015).
    ///
    /// # Errors
    /// As forward, and if `residual` has another shape or type than the convolution's output.
    pub fn forward_added(&self, input: &Tensor, residual: &Tensor) -> Result<Tensor> {
        let sum = self.forward_with(input, Activation::Identity)?.add(residual)?;
        match self.activation {
            Activation::Identity => Ok(sum),
            Activation::Relu => sum.relu(),
            Activation::LeakyRelu { .. } => {
                let reason = "a leaky ReLU has no operation of its own: use the fused mode".into();
                Err(convoke_autograd::Error::Invalid { operation: "ConvBn2d", reason })
            }
        }
    }

    fn forward_with(&self, input: &Tensor, activation: Activation) -> Result<Tensor> {
        let Some(bn) = self.bn.as_ref().filter(|_| self.mode == ConvBnMode::Fused) else {
            let mut y = self.conv.forward(input)?;
            if let Some(bn) = &self.bn {
                y = bn.forward(&y)?;
            }
            return match activation {
                Activation::Identity => Ok(y),
                Activation::Relu => y.relu(),
                Activation::LeakyRelu { .. } => {
                    let reason = "a leaky ReLU has no operation of its own: use the fused mode".into();
                    Err(convoke_autograd::Error::Invalid { operation: "ConvBn2d", reason })
                }
            };
        };
        let norm = bn.options(self.conv.weight.value().shape()[0], activation)?;
        let (output, moments) = with_parameters(&self.conv, bn, |parameters| {
            ops::conv_bn2d(input, parameters, self.conv.options(), &norm)
        })?;
        bn.observe(moments.as_ref())?;
        Ok(output)
    }
}

/// The convolution, with a bias, that computes what this one and `bn` do in evaluation; `None` without running statistics.
pub(super) fn folded(conv: &Conv2d, bn: &BatchNorm2d) -> Result<Option<Conv2d>> {
    let Some(norm) = bn.evaluation()? else { return Ok(None) };
    let (weight, bias) = with_parameters(conv, bn, |parameters| fold_conv_bn2d(parameters, &norm))?;
    Ok(Some(Conv2d::from_parts(Parameter::new(&weight), Some(Parameter::new(&bias)), *conv.options())))
}

fn with_parameters<R>(conv: &Conv2d, bn: &BatchNorm2d, run: impl FnOnce(&ConvBnParameters<'_>) -> R) -> R {
    let [bias, gamma, beta] = [&conv.bias, &bn.weight, &bn.bias].map(|p| p.as_ref().map(Parameter::value));
    run(&ConvBnParameters {
        weight: &conv.weight.value(),
        bias: bias.as_ref(),
        gamma: gamma.as_ref(),
        beta: beta.as_ref(),
    })
}

impl Module for ConvBn2d {
    fn forward(&self, input: &Tensor) -> Result<Tensor> {
        self.forward_with(input, self.activation)
    }

    fn fold(&mut self) -> Result<usize> {
        let Some(conv) = self.bn.as_ref().map(|bn| folded(&self.conv, bn)).transpose()?.flatten() else {
            return Ok(0);
        };
        self.conv = conv;
        self.bn = None;
        Ok(1)
    }

    fn children(&self) -> Vec<(&str, &dyn Module)> {
        let bn = self.bn.iter().map(|bn| ("bn", bn as &dyn Module));
        [("conv", &self.conv as &dyn Module)].into_iter().chain(bn).collect()
    }
}
