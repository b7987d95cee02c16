//! Convolution, and its transpose.

use std::borrow::Cow;

use convoke_autograd::ops::{self, Conv3dOptions, ConvOptions, ConvTranspose3dOptions, ConvTransposeOptions};

use super::windows::{
    Images, MOST_AXES, Pads, axes, explicit, padding, read_pads, read_per_axis, write_pads,
};
use super::*;

/// How a convolution steps over its input, one number for each spatial axis; two for padding.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Conv {
    /// Step between outputs.
    pub strides: Vec<usize>,
    /// How the input is padded.
    pub pads: Pads,
    /// Step between kernel elements.
    pub dilations: Vec<usize>,
    /// Groups of channels that do not mix.
    pub group: usize,
}

/// How a transposed convolution steps over its output.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ConvTranspose {
    /// Step, padding, dilation and groups of the convolution that it transposes.
    pub conv: Conv,
    /// Rows and columns that are added at the end.
    pub output_padding: Vec<usize>,
    /// The output's spatial sizes, from which padding follows.
    pub output_shape: Option<Vec<usize>>,
}

pub(super) const CONV: Operator<Conv> = Operator {
    read: &[Reader("Conv", (2, 3), |node| {
        let axes = read_axes(node)?;
        Ok(Op::Conv(Conv::read(node, axes)?))
    })],
    write: |conv, to| Ok(conv.write(to)),
    known: Known::Never,
    run: Run::One(run_conv),
    uses: weights,
    gives: |conv, from| conv.gives(from),
};

pub(super) const CONV_TRANSPOSE: Operator<ConvTranspose> = Operator {
    read: &[Reader("ConvTranspose", (2, 3), |node| {
        let axes = read_axes(node)?;
        let conv = Conv::read(node, axes)?;
        let output_padding = read_per_axis(node, "output_padding", (axes, 0))?;
        let output_shape = node.attributes.sizes("output_shape")?;
        if output_shape.as_ref().is_some_and(|shape| shape.len() != axes) {
            return Err(format!("its output_shape does not have {axes} numbers"));
        }
        Ok(Op::ConvTranspose(ConvTranspose { conv, output_padding, output_shape }))
    })],
    write: |transposed, to| {
        let node = transposed.conv.write(to).sizes("output_padding", &transposed.output_padding);
        Ok(match &transposed.output_shape {
            Some(shape) => node.sizes("output_shape", shape),
            None => node,
        })
    },
    known: Known::Never,
    run: Run::One(run_conv_transpose),
    uses: weights,
    gives: |transposed, from| transposed.conv.gives(from),
};

/// The number of spatial axes, by what says it: the kernel, another attribute, the weight or the input.
fn read_axes(node: &mut NodeReader<'_>) -> Answer<usize> {
    let kernel = node.attributes.sizes("kernel_shape")?.map(|kernel| kernel.len());
    let tensor = |place| node.rank(place).and_then(|rank| rank.checked_sub(2));
    let axes = kernel.or_else(|| tensor(1)).or_else(|| tensor(0));
    let axes =
        axes.or_else(|| node.attributes.count("strides")).or_else(|| node.attributes.count("dilations"));
    match axes.ok_or("the shape of its weight is not known: export it with kernel_shape")? {
        axes @ 1..=MOST_AXES => Ok(axes),
        axes => Err(format!("it has {axes} spatial axes")),
    }
}

impl Conv {
    fn read(node: &mut NodeReader<'_>, axes: usize) -> Answer<Conv> {
        Ok(Conv {
            strides: read_per_axis(node, "strides", (axes, 1))?,
            pads: read_pads(node, axes)?,
            dilations: read_per_axis(node, "dilations", (axes, 1))?,
            group: node.attributes.size("group")?.unwrap_or(1),
        })
    }

    fn write<'a>(&self, to: &NodeWriter<'_, 'a>) -> OnnxNode<'a> {
        let kernel = to.known(1).and_then(|weight| weight.shape().get(2..)).unwrap_or_default();
        let node = to.op().sizes("kernel_shape", kernel);
        let node = node.sizes("strides", &self.strides).sizes("dilations", &self.dilations);
        write_pads(node, &self.pads).size("group", self.group)
    }

    fn gives<'a>(&self, from: &Operands<'_, 'a>) -> About<'a> {
        from.ranked(if self.strides.is_empty() { from.rank(0) } else { Some(self.strides.len() + 2) })
    }

    /// The options of a convolution of images or signals of this size.
    pub(in crate::graph) fn options(&self, spatial: &[usize], kernel: &[usize]) -> Result<ConvOptions> {
        let pads = self.pads.resolve(spatial, [kernel, &self.strides, &self.dilations])?;
        Ok(ConvOptions {
            stride: axes(spatial.len(), &self.strides, 1)?,
            padding: padding(&pads),
            dilation: axes(spatial.len(), &self.dilations, 1)?,
            groups: self.group,
        })
    }

    /// As [`Pads::crop`].
    fn crop(&self, x: Tensor, kernel: &[usize]) -> Result<(Tensor, Cow<'_, Conv>)> {
        // Of what a convolution leaves out, ONNX Runtime spares one pixel.
        let (x, pads) = self.pads.crop(x, [kernel, &self.strides, &self.dilations], 1)?;
        let conv =
            if pads == self.pads { Cow::Borrowed(self) } else { Cow::Owned(Conv { pads, ..self.clone() }) };
        Ok((x, conv))
    }

    fn in_volumes(&self, x: &Tensor, weight: &Tensor) -> Result<Conv3dOptions> {
        let kernel = &weight.shape()[2..];
        let pads = self.pads.resolve(&x.shape()[2..], [kernel, &self.strides, &self.dilations])?;
        Ok(Conv3dOptions {
            stride: three(&self.strides)?,
            padding: [0, 1, 2].map(|axis| pads[axis]),
            dilation: three(&self.dilations)?,
            groups: self.group,
        })
    }
}

impl ConvTranspose {
    /// What is cut off the output before and after each axis, and what is added after it.
    fn ends(&self, input: &[usize], kernel: &[usize]) -> Result<(Vec<[usize; 2]>, Vec<usize>)> {
        let conv = &self.conv;
        let rank = input.len();
        let of = |numbers: &[usize], axis: usize, none: usize| numbers.get(axis).copied().unwrap_or(none);
        let mut output_padding: Vec<usize> =
            (0..rank).map(|axis| of(&self.output_padding, axis, 0)).collect();
        let same = matches!(conv.pads, Pads::SameUpper | Pads::SameLower);
        let wanted = match &self.output_shape {
            Some(shape) if shape.len() == rank => Some(shape.clone()),
            Some(shape) => {
                return refuse(format!("the output shape {shape:?} does not have {rank} spatial sizes"));
            }
            None if same => Some(
                input.iter().enumerate().map(|(axis, &size)| size * of(&conv.strides, axis, 1)).collect(),
            ),
            None => None,
        };
        let pads = match wanted {
            None => conv.pads.resolve(input, [kernel, &conv.strides, &conv.dilations])?,
            Some(wanted) => (0..rank)
                .map(|axis| {
                    let span =
                        of(kernel, axis, 1).saturating_sub(1).saturating_mul(of(&conv.dilations, axis, 1));
                    let full = input[axis].saturating_sub(1).saturating_mul(of(&conv.strides, axis, 1));
                    let full =
                        full.saturating_add(span).saturating_add(1).saturating_add(output_padding[axis]);
                    // What is missing is added at the end.
                    output_padding[axis] =
                        output_padding[axis].saturating_add(wanted[axis].saturating_sub(full));
                    let total = full.saturating_sub(wanted[axis]);
                    let (less, more) = (total / 2, total - total / 2);
                    if conv.pads == Pads::SameUpper { [less, more] } else { [more, less] }
                })
                .collect(),
        };
        Ok((pads, output_padding))
    }
}

/// The input and the weight of a convolution.
fn operands(inputs: &Inputs<'_>) -> Result<[Images; 2]> {
    let (x, weight) = (Images::new(inputs.tensor(0)?)?, Images::new(inputs.tensor(1)?)?);
    if x.signals != weight.signals {
        let [weight, x] = [&weight, &x].map(|images| images.tensor.shape());
        return refuse(format!("the weight {weight:?} is not for its input {x:?}"));
    }
    Ok([x, weight])
}

/// The input and the weight of a convolution, if both are of volumes.
fn volumes(inputs: &Inputs<'_>) -> Result<Option<[Tensor; 2]>> {
    let operands = [inputs.tensor(0)?, inputs.tensor(1)?];
    Ok(operands.iter().all(|operand| operand.shape().len() == 5).then_some(operands))
}

/// One number for each axis of volumes.
fn three(numbers: &[usize]) -> Result<[usize; 3]> {
    match *numbers {
        [] => Ok([1; 3]),
        [depth, height, width] => Ok([depth, height, width]),
        _ => refuse(format!("{numbers:?} are not one number for each axis of volumes")),
    }
}

fn run_conv(conv: &Conv, inputs: &Inputs<'_>) -> Result<Tensor> {
    if let Some([x, weight]) = volumes(inputs)? {
        let (x, conv) = conv.crop(x, &weight.shape()[2..])?;
        let options = conv.in_volumes(&x, &weight)?;
        return Ok(ops::conv3d(&x, &weight, inputs.optional_tensor(2)?.as_ref(), &options)?);
    }
    let [mut x, weight] = operands(inputs)?;
    let (cropped, conv) = conv.crop(x.tensor, weight.spatial())?;
    x.tensor = cropped;
    let options = conv.options(x.spatial(), weight.spatial())?;
    x.back(ops::conv2d(&x.tensor, &weight.tensor, inputs.optional_tensor(2)?.as_ref(), &options)?)
}

fn run_conv_transpose(transposed: &ConvTranspose, inputs: &Inputs<'_>) -> Result<Tensor> {
    let conv = &transposed.conv;
    if let Some([x, weight]) = volumes(inputs)? {
        let (pads, output_padding) = transposed.ends(&x.shape()[2..], &weight.shape()[2..])?;
        let conv = Conv { pads: explicit(&pads), ..conv.clone() }.in_volumes(&x, &weight)?;
        let options = ConvTranspose3dOptions { conv, output_padding: three(&output_padding)? };
        return Ok(ops::conv_transpose3d(&x, &weight, inputs.optional_tensor(2)?.as_ref(), &options)?);
    }
    let [x, weight] = operands(inputs)?;
    let (pads, output_padding) = transposed.ends(x.spatial(), weight.spatial())?;
    let options = ConvTransposeOptions {
        stride: x.axes(&conv.strides, 1)?,
        padding: padding(&pads),
        output_padding: x.axes(&output_padding, 0)?,
        dilation: x.axes(&conv.dilations, 1)?,
        groups: conv.group,
    };
    x.back(ops::conv_transpose2d(&x.tensor, &weight.tensor, inputs.optional_tensor(2)?.as_ref(), &options)?)
}
