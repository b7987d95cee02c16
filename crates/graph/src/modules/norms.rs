//! Normalisations that need no running statistics: group, layer, instance and local response norm.

use convoke_autograd::ops::{self, GroupNormOptions, LayerNormOptions, LayerNormOver, LocalResponse};
use convoke_autograd::{Error, Result, Tensor};

use crate::{Forward, Init, Module, Parameter};

/// Weight 1 and bias 0 of this shape, if they are wanted. An eps that makes no sense is refused.
fn affine(
    operation: &'static str,
    init: &Init,
    shape: &[usize],
    (eps, wanted): (f64, bool),
) -> Result<[Option<Parameter>; 2]> {
    let reason = match eps {
        _ if shape.is_empty() || shape.contains(&0) => {
            format!("nothing to normalise: the shape is {shape:?}")
        }
        eps if eps.is_nan() || eps < 0.0 => format!("eps is {eps}, it must be 0 or more"),
        _ => {
            let parameter = |value| wanted.then(|| init.constant(shape, value)).transpose();
            return Ok([parameter(1.0)?, parameter(0.0)?]);
        }
    };
    Err(Error::Invalid { operation, reason })
}

/// Group normalization of N x C x ..., as PyTorch's `GroupNorm`. It computes the same in training and in evaluation.
#[derive(Module)]
pub struct GroupNorm {
    /// C, if there is one.
    pub weight: Option<Parameter>,
    /// C, if there is one.
    pub bias: Option<Parameter>,
    #[module(skip)]
    options: GroupNormOptions,
}

impl GroupNorm {
    /// A norm of `channels` channels; `affine` says whether there are a weight, of 1, and a bias, of 0.
    ///
    /// # Errors
    /// If the groups do not divide the channels, there are none of either, or eps is negative or not a number.
    pub fn new(init: &Init, channels: usize, options: GroupNormOptions, affine: bool) -> Result<GroupNorm> {
        let operation = "GroupNorm";
        if !channels.is_multiple_of(options.groups) || options.groups == 0 {
            let reason = format!("{} groups do not divide {channels} channels", options.groups);
            return Err(Error::Invalid { operation, reason });
        }
        let [weight, bias] = self::affine(operation, init, &[channels], (options.eps, affine))?;
        Ok(GroupNorm { weight, bias, options })
    }
}

impl Forward for GroupNorm {
    fn forward(&self, input: &Tensor) -> Result<Tensor> {
        let [weight, bias] = [&self.weight, &self.bias].map(|p| p.as_ref().map(Parameter::value));
        ops::group_norm(input, weight.as_ref(), bias.as_ref(), &self.options)
    }
}

/// Layer normalization over the last axes, as PyTorch's `LayerNorm`, or over the channels of each pixel, as ConvNeXt's
/// `LayerNorm2d`.
#[derive(Module)]
pub struct LayerNorm {
    /// The weight, in the shape of what is normalised together, if there is one.
    pub weight: Option<Parameter>,
    /// The bias, in the same shape, if there is one.
    pub bias: Option<Parameter>,
    #[module(skip)]
    shape: Vec<usize>,
    #[module(skip)]
    options: LayerNormOptions,
}

impl LayerNorm {
    /// A norm over the last axes, which have this shape; `affine` says whether there are a weight, of 1, and a bias, of 0.
    ///
    /// # Errors
    /// If the shape has no axes or a size of 0, or eps is negative or not a number.
    pub fn new(init: &Init, shape: &[usize], eps: f64, affine: bool) -> Result<LayerNorm> {
        LayerNorm::over(init, shape, LayerNormOptions { over: LayerNormOver::Last(shape.len()), eps }, affine)
    }

    /// A norm over the channels of each pixel of N x C x ....
    ///
    /// # Errors
    /// As [`LayerNorm::new`].
    pub fn channels(init: &Init, channels: usize, eps: f64, affine: bool) -> Result<LayerNorm> {
        LayerNorm::over(init, &[channels], LayerNormOptions { over: LayerNormOver::Channels, eps }, affine)
    }

    fn over(init: &Init, shape: &[usize], options: LayerNormOptions, affine: bool) -> Result<LayerNorm> {
        let [weight, bias] = self::affine("LayerNorm", init, shape, (options.eps, affine))?;
        Ok(LayerNorm { weight, bias, shape: shape.to_vec(), options })
    }
}

impl Forward for LayerNorm {
    fn forward(&self, input: &Tensor) -> Result<Tensor> {
        let (shape, expected) = (input.shape(), &self.shape);
        let fits = match self.options.over {
            LayerNormOver::Last(_) => shape.ends_with(expected),
            LayerNormOver::Channels => shape.get(1) == expected.first(),
        };
        if !fits {
            let reason = format!("made for {expected:?}, the input has shape {shape:?}");
            return Err(Error::Invalid { operation: "LayerNorm", reason });
        }
        let [weight, bias] = [&self.weight, &self.bias].map(|p| p.as_ref().map(Parameter::value));
        ops::layer_norm(input, weight.as_ref(), bias.as_ref(), &self.options)
    }
}

/// Instance normalization of N x C x H x W, as PyTorch's `InstanceNorm2d` without running statistics. It computes the same in
/// training and in evaluation.
#[derive(Module)]
pub struct InstanceNorm2d {
    /// C, if there is one.
    pub weight: Option<Parameter>,
    /// C, if there is one.
    pub bias: Option<Parameter>,
    #[module(skip)]
    channels: usize,
    #[module(skip)]
    eps: f64,
}

impl InstanceNorm2d {
    /// A norm of `channels` channels; `affine` says whether there are a weight, of 1, and a bias, of 0.
    ///
    /// # Errors
    /// If there are no channels, or eps is negative or not a number.
    pub fn new(init: &Init, channels: usize, eps: f64, affine: bool) -> Result<InstanceNorm2d> {
        let [weight, bias] = self::affine("InstanceNorm2d", init, &[channels], (eps, affine))?;
        Ok(InstanceNorm2d { weight, bias, channels, eps })
    }
}

impl Forward for InstanceNorm2d {
    fn forward(&self, input: &Tensor) -> Result<Tensor> {
        if !matches!(input.shape(), &[_, channels, _, _] if channels == self.channels) {
            let (channels, shape) = (self.channels, input.shape());
            let reason = format!("expected a 4D input of {channels} channels, got {shape:?}");
            return Err(Error::Invalid { operation: "InstanceNorm2d", reason });
        }
        let [weight, bias] = [&self.weight, &self.bias].map(|p| p.as_ref().map(Parameter::value));
        ops::instance_norm(input, weight.as_ref(), bias.as_ref(), self.eps)
    }
}

/// Local response normalization, as PyTorch's `LocalResponseNorm`.
#[derive(Module, Debug, Clone, Copy)]
pub struct LocalResponseNorm(#[module(skip)] pub LocalResponse);

impl Forward for LocalResponseNorm {
    fn forward(&self, input: &Tensor) -> Result<Tensor> {
        ops::local_response_norm(input, &self.0)
    }
}
