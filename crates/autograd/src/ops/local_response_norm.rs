//! Local response normalization.

use convoke_kernels::local_response_norm::{self as kernel, LocalResponse};

use crate::error::invalid;
use crate::{Function, Needs, Operation, Result, Tensor, apply};

/// x / (k + alpha * mean square of the neighbouring channels)^beta for each value of an N x C x ... tensor, as PyTorch's
/// `local_response_norm`. Keeps the memory format. Saves x.
///
/// # Errors
/// If the tensor has fewer than three dimensions, or the window has no channels.
pub fn local_response_norm(x: &Tensor, options: &LocalResponse) -> Result<Tensor> {
    let shape = x.shape();
    if shape.len() < 3 {
        return Err(invalid(NAME, format!("expected at least 3 dimensions (N, C, ...), got {shape:?}")));
    }
    if options.size == 0 {
        return Err(invalid(NAME, format!("the window has 0 channels; the input is {shape:?}")));
    }
    apply(LocalResponseNorm { options: *options }, &[x])
}

const NAME: &str = "local_response_norm";

struct LocalResponseNorm {
    options: LocalResponse,
}

impl Function for LocalResponseNorm {
    type Saved = Tensor;

    fn name(&self) -> &'static str {
        NAME
    }

    fn describe(&self) -> Option<Operation> {
        Some(Operation::LocalResponseNorm(self.options))
    }

    fn forward(&self, inputs: &[&Tensor], _: &Needs) -> Result<(Tensor, Tensor)> {
        let x = inputs[0];
        let extent = x.extent(NAME)?;
        let y = x.elements_like(|y| {
            let cpu = x.device().compute();
            Ok(kernel::local_response_norm(cpu, &extent, &self.options, x.elements()?, y)?)
        })?;
        Ok((y, x.keep()))
    }

    fn backward(&self, x: Tensor, upstream: Tensor, _: &Needs) -> Result<Vec<Option<Tensor>>> {
        let extent = x.extent(NAME)?;
        let dx = x.elements_like(|dx| {
            let (cpu, dy) = (x.device().compute(), upstream.elements()?);
            Ok(kernel::local_response_norm_backward(cpu, &extent, &self.options, x.elements()?, dy, dx)?)
        })?;
        Ok(vec![Some(dx)])
    }
}
