//! 2-D convolution.

use convoke_kernels::conv::{
    BiasGradient, ConvAxis, ConvProblem, ConvSpec, ConvTypes, Filter, Gradient, TiledConv,
};

use super::{check_parameters, check_vector, four_dimensions};
use crate::error::{invalid, refused};
use crate::{Buffer, DType, Function, MemoryFormat, Needs, Operation, Result, Tensor, apply};

/// Zeros around the input, with a width for each side.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Padding {
    /// Rows above.
    pub top: usize,
    /// Rows below.
    pub bottom: usize,
    /// Columns to the left.
    pub left: usize,
    /// Columns to the right.
    pub right: usize,
}

impl Padding {
    /// The same padding on all four sides.
    pub fn all(padding: usize) -> Padding {
        Padding::symmetric([padding, padding])
    }

    /// `[height, width]`: above and below, left and right.
    pub fn symmetric([height, width]: [usize; 2]) -> Padding {
        Padding { top: height, bottom: height, left: width, right: width }
    }
}

/// How a convolution steps over its input, height before width, as PyTorch's `conv2d` takes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConvOptions {
    /// Step between outputs.
    pub stride: [usize; 2],
    /// Zeros around the input.
    pub padding: Padding,
    /// Step between kernel elements.
    pub dilation: [usize; 2],
    /// Groups of channels that do not mix.
    pub groups: usize,
}

impl Default for ConvOptions {
    fn default() -> ConvOptions {
        ConvOptions { stride: [1, 1], padding: Padding::default(), dilation: [1, 1], groups: 1 }
    }
}

impl ConvOptions {
    /// The problem of convolving `x` with `weight`. If `x` has no images, it is that of one image, and nothing runs.
    pub(super) fn problem(
        &self,
        operation: &'static str,
        x: &Tensor,
        weight: &Tensor,
    ) -> Result<ConvProblem> {
        let [batch, in_channels, height, width] = four_dimensions(operation, "input", x)?;
        let [out_channels, group_channels, kernel_height, kernel_width] =
            four_dimensions(operation, "weight", weight)?;
        let context = || format!("input {:?}, weight {:?}", x.shape(), weight.shape());
        if group_channels.checked_mul(self.groups) != Some(in_channels) {
            let reason = format!(
                "the weight takes {group_channels} x {} groups = {} channels, the input has {in_channels} ({})",
                self.groups,
                group_channels.saturating_mul(self.groups),
                context()
            );
            return Err(invalid(operation, reason));
        }
        let spec = ConvSpec {
            batch: batch.max(1),
            in_channels,
            out_channels,
            groups: self.groups,
            height: ConvAxis {
                input: height,
                kernel: kernel_height,
                stride: self.stride[0],
                pad_before: self.padding.top,
                pad_after: self.padding.bottom,
                dilation: self.dilation[0],
            },
            width: ConvAxis {
                input: width,
                kernel: kernel_width,
                stride: self.stride[1],
                pad_before: self.padding.left,
                pad_after: self.padding.right,
                dilation: self.dilation[1],
            },
            types: ConvTypes::of(x.dtype()),
            format: x.format(),
        };
        ConvProblem::new(spec).map_err(refused(operation, |reason| format!("{reason} ({})", context())))
    }

    /// The convolution of `x` with a contiguous `weight`, checked.
    pub(super) fn tiled(
        &self,
        operation: &'static str,
        x: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
    ) -> Result<TiledConv> {
        check_parameters(operation, x, &[Some(weight), bias])?;
        let problem = self.problem(operation, x, weight)?;
        check_vector(operation, "the bias", bias, problem.out_channels)?;
        Ok(TiledConv::new(x.device(), problem, x.shape()[0]))
    }
}

/// Convolves `x` (N x C x H x W) with `weight` (K x C/groups x R x S), plus `bias` (K), as PyTorch's `conv2d`.
///
/// The output has the memory format of `x`.
///
/// # Errors
/// If the shapes do not fit: the error names both.
pub fn conv2d(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>, options: &ConvOptions) -> Result<Tensor> {
    let inputs = [Some(x), Some(weight), bias];
    apply(Conv2d { name: "conv2d", options: *options }, &inputs.into_iter().flatten().collect::<Vec<_>>())
}

/// A convolution, under the name of the operation that runs it.
pub(super) struct Conv2d {
    pub(super) name: &'static str,
    pub(super) options: ConvOptions,
}

impl Function for Conv2d {
    type Saved = (Tensor, Tensor);

    fn name(&self) -> &'static str {
        self.name
    }

    fn describe(&self) -> Option<Operation> {
        Some(Operation::Conv(self.options))
    }

    fn takes(&self, input: usize, dtype: DType) -> bool {
        input == 0 || dtype.computes()
    }

    fn forward(&self, inputs: &[&Tensor], _: &Needs) -> Result<(Tensor, Self::Saved)> {
        let (x, weight, bias) = (inputs[0], inputs[1].in_format(MemoryFormat::Contiguous)?, inputs.get(2));
        let convolution = self.options.tiled(self.name, x, &weight, bias.copied())?.in_lanes();
        let y = output(&convolution, x, &weight, bias.copied())?;
        // The weight as it came: a copy in the order of kernels would take memory until backward.
        Ok((y, (x.keep(), inputs[1].constant())))
    }

    fn backward(&self, saved: Self::Saved, upstream: Tensor, needs: &Needs) -> Result<Vec<Option<Tensor>>> {
        self.backward_onto(saved, upstream, needs, &mut [])
    }

    fn backward_onto(
        &self,
        (x, weight): Self::Saved,
        upstream: Tensor,
        needs: &Needs,
        sums: &mut [Option<Tensor>],
    ) -> Result<Vec<Option<Tensor>>> {
        let weight = weight.in_format(MemoryFormat::Contiguous)?;
        let convolution = self.options.tiled(self.name, &x, &weight, None)?.in_lanes();
        let sum = sums.first_mut().and_then(Option::take);
        gradients(&convolution, (x, weight), upstream, (needs, sum))
    }
}

/// What a convolution, which may be a transposed one, makes of `x` and a contiguous `weight`.
pub(super) fn output(
    convolution: &TiledConv,
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
) -> Result<Tensor> {
    let shape = convolution.output_shape();
    let filter = Filter { weight: weight.elements()?, bias: bias.map(Tensor::elements).transpose()? };
    Tensor::build_elements((x.device(), x.dtype()), &shape, x.format(), |y| {
        Ok(convolution.forward(x, filter, y)?)
    })
}

/// The gradients of x, the weight and the bias that are needed; that of x is added to the sum, if there is one.
pub(super) fn gradients(
    convolution: &TiledConv,
    (x, weight): (Tensor, Tensor),
    dy: Tensor,
    (needs, sum): (&Needs, Option<Tensor>),
) -> Result<Vec<Option<Tensor>>> {
    let mut bias = None;
    if needs.len() == 3 && needs.input(2) {
        let (mut gradient, mut scratch) = (BiasGradient::new(convolution)?, None);
        for images in convolution.tiles() {
            gradient.add(convolution, images.len(), dy.images(images, &mut scratch)?)?;
        }
        bias = Some(of_buffer(convolution, &[convolution.output_shape()[1]], gradient.finish())?);
    }
    let of_weight = match needs.input(1) {
        true => Some(weight_gradient(convolution, &x, &dy, weight.shape())?),
        false => None,
    };
    drop(x);
    let of_x = match needs.input(0) {
        true => Some(gradient_of_input(convolution, &weight, &dy, sum)?),
        false => None,
    };
    let gradients = [Some(of_x), Some(of_weight), (needs.len() == 3).then_some(bias)];
    Ok(gradients.into_iter().flatten().collect())
}

/// The gradient of the weight, which has this shape.
pub(super) fn weight_gradient(
    convolution: &TiledConv,
    x: &Tensor,
    dy: &Tensor,
    shape: &[usize],
) -> Result<Tensor> {
    of_buffer(convolution, shape, convolution.weight_gradient(x, dy)?)
}

/// The gradient of x, added to the sum, if there is one.
pub(super) fn gradient_of_input(
    convolution: &TiledConv,
    weight: &Tensor,
    dy: &Tensor,
    sum: Option<Tensor>,
) -> Result<Tensor> {
    input_gradient(convolution, convolution.input_gradient(dy, weight.elements()?, sum)?)
}

/// The gradient of a parameter.
pub(super) fn of_buffer(of: &TiledConv, shape: &[usize], gradient: Buffer) -> Result<Tensor> {
    Tensor::of_buffer(of.device(), shape, MemoryFormat::Contiguous, gradient)
}

/// The gradient of x as a tensor.
pub(super) fn input_gradient(of: &TiledConv, gradient: Gradient<Tensor>) -> Result<Tensor> {
    match gradient {
        Gradient::Given(gradient) => Ok(gradient),
        Gradient::New(gradient) => {
            Tensor::of_buffer(of.device(), &of.input_shape(), of.problem().format, gradient)
        }
    }
}
