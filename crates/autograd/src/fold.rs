//! Folds a batch norm with constant statistics into the convolution before it: for inference, outside any tape.

use convoke_kernels::batch_norm as kernel;

use crate::error::invalid;
use crate::ops::{BatchNormOptions, ConvBnParameters, Statistics, elements, four_dimensions, same_dtype};
use crate::{Error, MemoryFormat, Result, Tensor};

/// Weight and bias of a single convolution that computes the same as this convolution and the batch norm after it, before the
/// activation.
///
/// For inference: both are constants.
///
/// # Errors
/// If the statistics are those of each batch, which are not constant; if types or sizes do not fit; if eps is negative.
pub fn fold_conv_bn2d(
    parameters: &ConvBnParameters<'_>,
    norm: &BatchNormOptions,
) -> Result<(Tensor, Tensor)> {
    let operation = "fold_conv_bn2d";
    let ConvBnParameters { weight, bias, gamma, beta } = *parameters;
    let Statistics::Constant { mean, variance } = &norm.statistics else {
        return Err(invalid(operation, "a batch's own statistics cannot be folded"));
    };
    let operands: Vec<&Tensor> = [Some(weight), bias, gamma, beta].into_iter().flatten().collect();
    same_dtype(operation, &operands)?;
    if let Some(operand) = operands.iter().find(|operand| !operand.dtype().computes()) {
        return Err(Error::StorageOnly { operation, dtype: operand.dtype() });
    }
    let channels = four_dimensions(operation, "weight", weight)?[0];
    if mean.len() != channels {
        let reason = format!("the statistics have {} channels, the convolution gives {channels}", mean.len());
        return Err(invalid(operation, reason));
    }
    kernel::check_eps(operation, norm.eps)?;
    let inverse_std = kernel::inverse_std(variance, norm.eps, norm.eps_place);
    let weight = weight.in_format(MemoryFormat::Contiguous)?;
    let by = kernel::Normalization {
        mean,
        inverse_std: &inverse_std,
        inverse_root: None,
        weight: elements(gamma)?,
        bias: elements(beta)?,
        activation: kernel::Activation::Identity,
    };
    let mut shift = match bias {
        Some(bias) => bias.detach(),
        None => Tensor::zeros(weight.device(), &[channels], weight.dtype())?,
    };
    let mut folded = weight;
    kernel::fold(&by, kernel::FilterOrder::OutputFirst, folded.elements_mut()?, shift.elements_mut()?)?;
    Ok((folded, shift))
}
