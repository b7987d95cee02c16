//! Softmax and log-softmax along an axis.

use convoke_kernels::memory_format::Extent;
use convoke_kernels::softmax as kernel;

use crate::error::invalid;
use crate::{DType, Function, Needs, Operation, Result, Tensor, apply};

/// exp(x) / (sum of exp(x) along `axis`), as PyTorch's with `dim=axis`; stable for large values. Saves its output.
///
/// # Errors
/// If the tensor has no such axis.
pub fn softmax(x: &Tensor, axis: usize) -> Result<Tensor> {
    apply(Softmax { axis, log: false }, &[x])
}

/// x - log(sum of exp(x) along `axis`), as PyTorch's with `dim=axis`; stable for large values. Saves its output.
///
/// # Errors
/// If the tensor has no such axis.
pub fn log_softmax_along(x: &Tensor, axis: usize) -> Result<Tensor> {
    apply(Softmax { axis, log: true }, &[x])
}

/// [`log_softmax_along`] the channels of an N x C x ... tensor.
///
/// # Errors
/// If the tensor has fewer than two dimensions.
pub fn log_softmax(x: &Tensor) -> Result<Tensor> {
    x.extent("log_softmax")?;
    log_softmax_along(x, 1)
}

struct Softmax {
    axis: usize,
    log: bool,
}

impl Softmax {
    /// The tensor with the axis in the place of the channels.
    fn extent(&self, x: &Tensor) -> Result<Extent> {
        if self.axis >= x.shape().len() {
            let shape = x.shape();
            let reason = format!("there is no axis {}: the shape {shape:?} has {}", self.axis, shape.len());
            return Err(invalid(self.name(), reason));
        }
        Ok(Extent::along(x.shape(), x.format(), self.axis)?)
    }
}

impl Function for Softmax {
    /// The output.
    type Saved = Tensor;

    fn name(&self) -> &'static str {
        if self.log { "log_softmax" } else { "softmax" }
    }

    fn takes(&self, _: usize, _: DType) -> bool {
        true
    }

    fn describe(&self) -> Option<Operation> {
        Some(Operation::Softmax { axis: self.axis, log: self.log })
    }

    fn forward(&self, inputs: &[&Tensor], _: &Needs) -> Result<(Tensor, Tensor)> {
        let x = inputs[0];
        let extent = self.extent(x)?;
        let y = x.elements_like(|y| {
            let (cpu, x) = (x.device().compute(), x.elements()?);
            match self.log {
                true => kernel::log_softmax(cpu, &extent, x, y)?,
                false => kernel::softmax(cpu, &extent, x, y)?,
            }
            Ok(())
        })?;
        Ok((y.clone(), y))
    }

    fn backward(&self, y: Tensor, upstream: Tensor, _: &Needs) -> Result<Vec<Option<Tensor>>> {
        let extent = self.extent(&y)?;
        let dx = y.elements_like(|dx| {
            let (cpu, y, dy) = (y.device().compute(), y.elements()?, upstream.elements()?);
            match self.log {
                true => kernel::log_softmax_backward(cpu, &extent, y, dy, dx)?,
                false => kernel::softmax_backward(cpu, &extent, y, dy, dx)?,
            }
            Ok(())
        })?;
        Ok(vec![Some(dx)])
    }
}
