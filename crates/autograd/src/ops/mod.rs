//! The built-in operations with their backward, one topic per file. Each is a [`crate::Function`], as your own would be.

mod adaptive_pool2d;
mod arithmetic;
mod batch_norm;
mod broadcast;
mod compare;
mod concat;
mod conv2d;
mod conv3d;
mod conv_bn2d;
mod conv_transpose2d;
mod dropout;
mod dtype;
mod group_norm;
mod index;
mod layer_norm;
mod linear;
mod local_response_norm;
mod matmul;
mod memory_format;
mod nll_loss;
mod one_dimension;
mod pad;
mod permute;
mod pointwise;
mod pool2d;
mod prelu;
mod reduce;
mod reshape;
mod resize2d;
mod softmax;
mod value_loss;

pub use adaptive_pool2d::{adaptive_avg_pool2d, adaptive_max_pool2d};
pub use batch_norm::{
    BatchNormBlock, BatchNormOptions, Statistics, Synchronize, batch_norm, batch_norm_block,
};
pub use compare::choose;
pub use concat::{cat, concat, stack};
pub use conv_bn2d::{ConvBnBlock, ConvBnParameters, Keep, conv_bn_block2d, conv_bn2d};
pub use conv_transpose2d::{ConvTransposeOptions, conv_transpose2d};
pub use conv2d::{ConvOptions, Padding, conv2d};
pub use conv3d::{Conv3dOptions, ConvTranspose3dOptions, conv_transpose3d, conv3d};
pub use convoke_kernels::batch_norm::{
    Activation, BackwardSums, Convention, EpsPlace, Moments, Momentum, RunningVariance,
};
pub use convoke_kernels::dropout::dropout_skip;
pub use convoke_kernels::local_response_norm::LocalResponse;
pub use convoke_kernels::resize::{Coordinates, ResizeMode, Rounding};
pub use dropout::dropout;
pub use group_norm::{GroupNormOptions, group_norm, instance_norm};
pub use index::Slice;
pub use layer_norm::{LayerNormOptions, LayerNormOver, layer_norm};
pub use linear::linear;
pub use local_response_norm::local_response_norm;
pub use matmul::{GemmOptions, gemm};
pub use nll_loss::{ClassOptions, Reduction, cross_entropy, nll_loss, weighted_nll_loss};
pub use one_dimension::{Conv1dOptions, Pool1dOptions, avg_pool1d, conv1d, max_pool1d};
pub use pad::PadMode;
pub use permute::{DepthOrder, channel_shuffle, depth_to_space, space_to_depth};
pub use pointwise::{Pointwise, activate, pointwise};
pub use pool2d::{PoolOptions, avg_pool2d, max_pool2d};
pub use prelu::prelu;
pub use resize2d::{ResizeOptions, ResizeTo, resize2d};
pub use softmax::{log_softmax, log_softmax_along, softmax};
pub use value_loss::{binary_cross_entropy_with_logits, mse_loss};

use crate::error::invalid;
use crate::{Error, MemoryFormat, Result, Tensor};

/// N, C, H, W of a tensor that must have four dimensions.
pub(crate) fn four_dimensions(operation: &'static str, operand: &str, tensor: &Tensor) -> Result<[usize; 4]> {
    tensor.shape().try_into().map_err(|_| {
        let shape = tensor.shape();
        invalid(operation, format!("expected a 4D {operand} (got {}D: {shape:?})", shape.len()))
    })
}

/// A tensor of 0 images of this shape, with the device, type and format of `like`.
pub(crate) fn empty(shape: &[usize], like: &Tensor) -> Result<Tensor> {
    let shape = [&[0], &shape[1..]].concat();
    Tensor::zeros(like.device(), &shape, like.dtype())?.in_format(like.format())
}

/// Checks that all operands have the element type of the first.
pub(crate) fn same_dtype(operation: &'static str, tensors: &[&Tensor]) -> Result<()> {
    match tensors.iter().find(|tensor| tensor.dtype() != tensors[0].dtype()) {
        Some(other) => Err(Error::DType { operation, expected: tensors[0].dtype(), found: other.dtype() }),
        None => Ok(()),
    }
}

/// Checks that parameters have the type in which kernels compute with numbers of x's type.
pub(crate) fn check_parameters(
    operation: &'static str,
    x: &Tensor,
    parameters: &[Option<&Tensor>],
) -> Result<()> {
    let expected = x.dtype().computed_in();
    match parameters.iter().flatten().find(|parameter| parameter.dtype() != expected) {
        Some(other) => Err(Error::DType { operation, expected, found: other.dtype() }),
        None => Ok(()),
    }
}

/// Checks that an operand, if there is one, is a vector with one number per channel.
fn check_vector(
    operation: &'static str,
    operand: &str,
    vector: Option<&Tensor>,
    channels: usize,
) -> Result<()> {
    match vector {
        Some(vector) if vector.shape() != [channels] => Err(invalid(
            operation,
            format!("{operand} has shape {:?}, expected [{channels}]: one number a channel", vector.shape()),
        )),
        _ => Ok(()),
    }
}

/// A parameter in the type of the tensor that it is combined with.
fn of_type(parameter: &Tensor, with: &Tensor) -> Result<Tensor> {
    if parameter.dtype() == with.dtype() { Ok(parameter.clone()) } else { parameter.to_dtype(with.dtype()) }
}

/// The elements of a parameter, if there is one.
pub(crate) fn elements(parameter: Option<&Tensor>) -> Result<Option<convoke_kernels::Slice<'_>>> {
    parameter.map(Tensor::elements).transpose()
}

/// The axis that a number means, counted from the last if it is negative.
pub(crate) fn checked_axis(operation: &'static str, axis: isize, shape: &[usize]) -> Result<usize> {
    let own = if axis < 0 { axis.checked_add_unsigned(shape.len()) } else { Some(axis) };
    own.and_then(|own| usize::try_from(own).ok())
        .filter(|&own| own < shape.len())
        .ok_or_else(|| invalid(operation, format!("there is no axis {axis} in {shape:?}")))
}

/// The axes that some numbers mean, all different.
fn checked_axes(operation: &'static str, axes: &[isize], shape: &[usize]) -> Result<Vec<usize>> {
    let mut found = Vec::with_capacity(axes.len());
    for &axis in axes {
        let axis = checked_axis(operation, axis, shape)?;
        if found.contains(&axis) {
            return Err(invalid(operation, format!("{axes:?} name axis {axis} of {shape:?} twice")));
        }
        found.push(axis);
    }
    Ok(found)
}

/// The number of runs in memory along an axis, and the elements between neighbours on it: the tensor is, in memory, outer x the
/// axis x inner.
fn around(tensor: &Tensor, axis: usize) -> [usize; 2] {
    let order = tensor.format().axes(tensor.shape().len());
    let at = order.iter().position(|&other| other == axis).expect("an axis of the tensor");
    let product = |axes: &[usize]| axes.iter().map(|&axis| tensor.shape()[axis]).product();
    [product(&order[..at]), product(&order[at + 1..])]
}

/// The elements in contiguous order in another shape, without history.
fn contiguous_as(tensor: &Tensor, shape: &[usize]) -> Result<Tensor> {
    Ok(tensor.laid_out(MemoryFormat::Contiguous)?.reshaped(shape))
}
