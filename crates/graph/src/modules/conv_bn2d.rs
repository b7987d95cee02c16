//! One block of a convolution, its batch norm, and an optional residual, activation and max pool.

use std::sync::{Mutex, PoisonError};

use convoke_autograd::ops::{
    self, Activation, ConvBnBlock, ConvBnParameters, ConvOptions, Keep, Padding, PoolOptions,
};
use convoke_autograd::{Result, Tensor, fold_conv_bn2d};

use super::{BatchNorm, BatchNorm2d, BatchNormConfig, Conv2d};
use crate::{Forward, Init, Module, Parameter, Part, Parts};

/// How a [`ConvBn2d`] block runs. Values, gradients and running statistics are the same either way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ConvBnMode {
    /// One operation that recomputes in backward what it did not keep: see [`Keep`].
    #[default]
    Fused,
    /// Convolution, batch norm, addition, activation and max pool one after the other, each saving what it needs.
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

/// A convolution with its batch norm that may run as one operation, which keeps for backward what it is told to. A module shows its
/// blocks as [`Part::Block`], so that a planner can plan their memory.
pub trait FusedBlock: Send + Sync {
    /// The convolution's weight.
    fn weight(&self) -> &Parameter;

    /// How it runs.
    fn mode(&self) -> ConvBnMode;

    /// What the fused block keeps for backward.
    fn keep(&self) -> Keep;

    /// Sets what the fused block keeps for backward, from the next forward on; separate layers ignore it.
    fn set_keep(&self, keep: Keep);
}

/// A convolution, its batch norm, an activation and an optional max pool. Its children are `conv` and `bn` in either
/// [`ConvBnMode`].
pub struct ConvBn2d {
    /// The convolution.
    pub conv: Conv2d,
    /// The batch norm of its output; `None` after [`Module::fold`] has merged it into the convolution.
    pub bn: Option<BatchNorm2d>,
    activation: Activation,
    pool: Option<PoolOptions>,
    mode: ConvBnMode,
    keep: Mutex<Keep>,
}

impl ConvBn2d {
    /// Joins two layers. `bn` must have the number of channels of `conv`'s output; forward checks that.
    pub fn new(conv: Conv2d, bn: BatchNorm2d, activation: Activation, mode: ConvBnMode) -> ConvBn2d {
        ConvBn2d { conv, bn: Some(bn), activation, pool: None, mode, keep: Mutex::default() }
    }

    /// A 3x3 convolution without bias that keeps height and width, PyTorch's default batch norm, and ReLU.
    ///
    /// # Errors
    /// If a number of channels is 0 or too large.
    pub fn same3x3(init: &Init, channels: [usize; 2], mode: ConvBnMode) -> Result<ConvBn2d> {
        let options = ConvOptions { padding: Padding::symmetric([1, 1]), ..ConvOptions::default() };
        let conv = Conv2d::new(init, channels, [3, 3], options, false)?;
        let bn = BatchNorm2d::new(init, channels[1], BatchNormConfig::default())?;
        Ok(ConvBn2d::new(conv, bn, Activation::Relu, mode))
    }

    /// The same block with a max pool after the activation.
    #[must_use]
    pub fn with_pool(self, pool: PoolOptions) -> ConvBn2d {
        ConvBn2d { pool: Some(pool), ..self }
    }

    /// What the fused block keeps for backward.
    pub fn keep(&self) -> Keep {
        *self.keep.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets what the fused block keeps for backward, from the next forward on; separate layers ignore it.
    pub fn set_keep(&self, keep: Keep) {
        *self.keep.lock().unwrap_or_else(PoisonError::into_inner) = keep;
    }

    /// How it runs.
    pub fn mode(&self) -> ConvBnMode {
        self.mode
    }

    /// activation(bn(conv(input)) + residual): the end of a residual block (He, Zhang, Ren, Sun: "Deep residual learning for
    /// image recognition", 2015). A fused block with a pool takes no residual.
    ///
    /// # Errors
    /// If the input or the residual does not fit.
    pub fn forward_added(&self, input: &Tensor, residual: &Tensor) -> Result<Tensor> {
        self.run(input, Some(residual))
    }

    fn run(&self, input: &Tensor, residual: Option<&Tensor>) -> Result<Tensor> {
        let layers = Layers {
            conv: ConvLayer {
                weight: &self.conv.weight,
                bias: self.conv.bias.as_ref(),
                options: self.conv.options(),
            },
            bn: self.bn.as_ref(),
            activation: self.activation,
            pool: self.pool.as_ref(),
        };
        match self.mode {
            ConvBnMode::Fused => layers.fused(input, residual, self.keep()),
            ConvBnMode::Separate => layers.separate(input, residual),
        }
    }
}

impl FusedBlock for ConvBn2d {
    fn weight(&self) -> &Parameter {
        &self.conv.weight
    }

    fn mode(&self) -> ConvBnMode {
        self.mode
    }

    fn keep(&self) -> Keep {
        self.keep()
    }

    fn set_keep(&self, keep: Keep) {
        self.set_keep(keep);
    }
}

/// A convolution's parameters and options.
#[derive(Clone, Copy)]
pub(crate) struct ConvLayer<'a> {
    pub(crate) weight: &'a Parameter,
    pub(crate) bias: Option<&'a Parameter>,
    pub(crate) options: &'a ConvOptions,
}

/// The layers of a block.
pub(crate) struct Layers<'a, const SPATIAL: usize> {
    pub(crate) conv: ConvLayer<'a>,
    /// `None` after it was folded into the convolution.
    pub(crate) bn: Option<&'a BatchNorm<SPATIAL>>,
    pub(crate) activation: Activation,
    pub(crate) pool: Option<&'a PoolOptions>,
}

impl<const SPATIAL: usize> Layers<'_, SPATIAL> {
    /// Runs the layers as one operation.
    pub(crate) fn fused(&self, input: &Tensor, residual: Option<&Tensor>, keep: Keep) -> Result<Tensor> {
        let Some(bn) = self.bn else { return self.separate(input, residual) };
        // A window with more elements than a byte can number is pooled separately.
        let fused_pool = self.pool.copied().filter(ConvBnBlock::can_pool);
        let block = ConvBnBlock {
            convolution: *self.conv.options,
            norm: bn.options(self.conv.weight.value().shape()[0])?,
            residual,
            activation: self.activation,
            pool: fused_pool,
            keep,
        };
        let (output, moments) =
            with_parameters(self.conv, bn, |parameters| ops::conv_bn_block2d(input, parameters, &block))?;
        bn.observe(moments.as_ref())?;
        pooled(output, self.pool.filter(|_| fused_pool.is_none()))
    }

    /// Runs the layers one after the other.
    pub(crate) fn separate(&self, input: &Tensor, residual: Option<&Tensor>) -> Result<Tensor> {
        let bias = self.conv.bias.map(Parameter::value);
        let mut y = ops::conv2d(input, &self.conv.weight.value(), bias.as_ref(), self.conv.options)?;
        if let Some(bn) = self.bn {
            y = bn.forward(&y)?;
        }
        if let Some(residual) = residual {
            y = y.add(residual)?;
        }
        pooled(ops::activate(&y, self.activation)?, self.pool)
    }
}

fn pooled(y: Tensor, pool: Option<&PoolOptions>) -> Result<Tensor> {
    match pool {
        Some(pool) => ops::max_pool2d(&y, pool),
        None => Ok(y),
    }
}

/// A convolution with a bias that computes what `conv` and `bn` compute in evaluation; `None` without running statistics.
pub(super) fn folded(conv: &Conv2d, bn: &BatchNorm2d) -> Result<Option<Conv2d>> {
    let layer = ConvLayer { weight: &conv.weight, bias: conv.bias.as_ref(), options: conv.options() };
    let Some([weight, bias]) = fold(layer, bn)? else { return Ok(None) };
    Ok(Some(Conv2d::from_parts(weight, Some(bias), *conv.options())))
}

/// Weight and bias of a convolution that computes what this one and the batch norm compute in evaluation; `None` without running
/// statistics.
pub(crate) fn fold<const SPATIAL: usize>(
    conv: ConvLayer<'_>,
    bn: &BatchNorm<SPATIAL>,
) -> Result<Option<[Parameter; 2]>> {
    let Some(norm) = bn.evaluation()? else { return Ok(None) };
    let (weight, bias) = with_parameters(conv, bn, |parameters| fold_conv_bn2d(parameters, &norm))?;
    Ok(Some([Parameter::new(&weight), Parameter::new(&bias)]))
}

fn with_parameters<R, const SPATIAL: usize>(
    conv: ConvLayer<'_>,
    bn: &BatchNorm<SPATIAL>,
    run: impl FnOnce(&ConvBnParameters<'_>) -> R,
) -> R {
    let [bias, gamma, beta] =
        [conv.bias, bn.weight.as_ref(), bn.bias.as_ref()].map(|parameter| parameter.map(Parameter::value));
    run(&ConvBnParameters {
        weight: &conv.weight.value(),
        bias: bias.as_ref(),
        gamma: gamma.as_ref(),
        beta: beta.as_ref(),
    })
}

impl Forward for ConvBn2d {
    fn forward(&self, input: &Tensor) -> Result<Tensor> {
        self.run(input, None)
    }
}

impl Module for ConvBn2d {
    fn parts<'a>(&'a self, parts: &mut Parts<'a>) {
        // A folded block keeps nothing, so there is nothing to plan.
        if self.bn.is_some() {
            parts.push("", Part::Block(self));
        }
        parts.add("conv", &self.conv);
        parts.add("bn", &self.bn);
    }

    fn fold(&mut self) -> Result<usize> {
        let Some(conv) = self.bn.as_ref().map(|bn| folded(&self.conv, bn)).transpose()?.flatten() else {
            return Ok(0);
        };
        self.conv = conv;
        self.bn = None;
        Ok(1)
    }
}
