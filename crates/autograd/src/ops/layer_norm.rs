//! Layer normalization: over the last axes, or over the channels of each pixel.

use convoke_kernels::group_norm::{Affine, AffineGradients};
use convoke_kernels::layer_norm as kernel;

use super::{elements, same_dtype};
use crate::error::invalid;
use crate::{Buffer, Function, MemoryFormat, Needs, Operation, Result, Tensor, apply};

/// What values a layer norm normalises together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LayerNormOver {
    /// All values along the last axes, as PyTorch's `layer_norm`. The number says how many axes these are; the parameters have their sizes.
    Last(usize),
    /// The channels of each pixel of N x C x ..., as ConvNeXt's `LayerNorm2d`. The parameters have C numbers. Fastest in
    /// channels-last; a contiguous tensor is copied to that format and back.
    Channels,
}

/// The options of [`layer_norm`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LayerNormOptions {
    /// What is normalised together.
    pub over: LayerNormOver,
    /// Added to the variance.
    pub eps: f64,
}

impl LayerNormOptions {
    /// Over so many last axes, with PyTorch's eps, 1e-5.
    pub fn last(axes: usize) -> LayerNormOptions {
        LayerNormOptions { over: LayerNormOver::Last(axes), eps: 1e-5 }
    }

    /// Over the channels, with ConvNeXt's eps, 1e-6.
    pub fn channels() -> LayerNormOptions {
        LayerNormOptions { over: LayerNormOver::Channels, eps: 1e-6 }
    }

    /// The sizes that the parameters must have, and the format in which what is normalised together lies together.
    fn parameters(&self, x: &Tensor) -> Result<(Vec<usize>, MemoryFormat)> {
        let (shape, dimensions) = (x.shape(), x.shape().len());
        match self.over {
            LayerNormOver::Last(axes) if axes > 0 && axes <= dimensions => {
                Ok((shape[dimensions - axes..].to_vec(), MemoryFormat::Contiguous))
            }
            LayerNormOver::Channels if dimensions == 2 => Ok((shape[1..].to_vec(), MemoryFormat::Contiguous)),
            LayerNormOver::Channels if dimensions > 2 => {
                Ok((shape[1..2].to_vec(), MemoryFormat::ChannelsLast))
            }
            over => {
                Err(invalid(NAME, format!("an input of shape {shape:?} cannot be normalised over {over:?}")))
            }
        }
    }
}

/// (x - mean) / sqrt(variance + eps) * weight + bias, with mean and biased variance of the values that [`LayerNormOver`] names.
///
/// Keeps the memory format. Saves x.
///
/// # Errors
/// If x has too few axes, weight or bias do not have the shape of what is normalised together, or eps is negative or NaN.
pub fn layer_norm(
    x: &Tensor,
    weight: Option<&Tensor>,
    bias: Option<&Tensor>,
    options: &LayerNormOptions,
) -> Result<Tensor> {
    let (shape, format) = options.parameters(x)?;
    let inputs: Vec<&Tensor> = [Some(x), weight, bias].into_iter().flatten().collect();
    for (name, parameter) in [("weight", weight), ("bias", bias)] {
        if let Some(parameter) = parameter.filter(|parameter| parameter.shape() != shape) {
            let found = parameter.shape();
            let reason =
                format!("the {name} has shape {found:?}, expected {shape:?}; the input is {:?}", x.shape());
            return Err(invalid(NAME, reason));
        }
    }
    convoke_kernels::batch_norm::check_eps(NAME, options.eps)?;
    let has = [weight.is_some(), bias.is_some()];
    apply(LayerNorm { over: options.over, shape, format, eps: options.eps, has }, &inputs)
}

const NAME: &str = "layer_norm";

struct LayerNorm {
    over: LayerNormOver,
    /// The shape of the parameters.
    shape: Vec<usize>,
    /// In which rows lie together.
    format: MemoryFormat,
    eps: f64,
    /// Whether there are a weight and a bias.
    has: [bool; 2],
}

#[derive(Clone)]
struct SavedLayerNorm {
    x: Tensor,
    weight: Option<Tensor>,
}

impl Function for LayerNorm {
    type Saved = SavedLayerNorm;

    fn name(&self) -> &'static str {
        NAME
    }

    fn describe(&self) -> Option<Operation> {
        Some(Operation::LayerNorm { over: self.over, eps: self.eps, has: self.has })
    }

    fn forward(&self, inputs: &[&Tensor], _: &Needs) -> Result<(Tensor, SavedLayerNorm)> {
        same_dtype(NAME, inputs)?;
        let x = inputs[0];
        let parameter = |index: usize| inputs[index].in_format(MemoryFormat::Contiguous);
        let weight = self.has[0].then(|| parameter(1)).transpose()?;
        let bias = self.has[1].then(|| parameter(1 + usize::from(self.has[0]))).transpose()?;
        let rows = x.in_format(self.format)?;
        let affine =
            Affine { weight: elements(weight.as_ref())?, bias: elements(bias.as_ref())?, eps: self.eps };
        let y = rows.elements_like(|y| {
            Ok(kernel::layer_norm(x.device().compute(), self.width(), rows.elements()?, &affine, y)?)
        })?;
        drop(rows);
        Ok((y.in_format(x.format())?, SavedLayerNorm { x: x.keep(), weight }))
    }

    fn backward(
        &self,
        saved: SavedLayerNorm,
        upstream: Tensor,
        needs: &Needs,
    ) -> Result<Vec<Option<Tensor>>> {
        let SavedLayerNorm { x, weight } = saved;
        let format = x.format();
        let (rows, dy) = (x.in_format(self.format)?, upstream.in_format(self.format)?);
        drop((x, upstream));
        let device = rows.device();
        let wanted =
            [self.has[0] && needs.input(1), self.has[1] && needs.input(1 + usize::from(self.has[0]))];
        let buffer = |wanted: bool, len: usize| wanted.then(|| device.buffer(rows.dtype(), len)).transpose();
        let mut of_x = buffer(needs.input(0), rows.len())?;
        let mut of_weight = buffer(wanted[0], self.width())?;
        let mut of_bias = buffer(wanted[1], self.width())?;
        let affine = Affine { weight: elements(weight.as_ref())?, bias: None, eps: self.eps };
        let gradients = AffineGradients {
            x: of_x.as_mut().map(Buffer::elements_mut),
            weight: of_weight.as_mut().map(Buffer::elements_mut),
            bias: of_bias.as_mut().map(Buffer::elements_mut),
        };
        let pair = (rows.elements()?, dy.elements()?);
        kernel::layer_norm_backward(device.compute(), self.width(), pair, &affine, gradients)?;
        let (device, shape) = (device.clone(), rows.shape().to_vec());
        drop((rows, dy));
        let of_x = of_x.map(|dx| Tensor::of_buffer(&device, &shape, self.format, dx)?.in_format(format));
        let vector = |gradient| Tensor::of_buffer(&device, &self.shape, MemoryFormat::Contiguous, gradient);
        let mut gradients = vec![of_x.transpose()?];
        if self.has[0] {
            gradients.push(of_weight.map(vector).transpose()?);
        }
        if self.has[1] {
            gradients.push(of_bias.map(vector).transpose()?);
        }
        Ok(gradients)
    }
}

impl LayerNorm {
    /// Elements of a row.
    fn width(&self) -> usize {
        self.shape.iter().product()
    }
}
