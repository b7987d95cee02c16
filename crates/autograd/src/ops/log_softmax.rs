//! Log-softmax over the channels.

use convoke_kernels::loss;

use crate::{Function, Needs, Result, Tensor, apply};
use convoke_kernels::dispatch;

/// x - log(sum over channels of exp(x)) at every position of an N x C x ... tensor, as PyTorch's with `dim=1`.
///
/// # Errors
/// If the tensor has fewer than two dimensions.
pub fn log_softmax(x: &Tensor) -> Result<Tensor> {
    apply(LogSoftmax, &[x])
}

struct LogSoftmax;

impl Function for LogSoftmax {
    /// The output.
    type Saved = Tensor;

    fn name(&self) -> &'static str {
        "log_softmax"
    }

    fn forward(&self, inputs: &[&Tensor], _: &Needs) -> Result<(Tensor, Tensor)> {
        let x = inputs[0];
        let extent = x.extent("log_softmax")?;
        let y = dispatch!(x.dtype(), T => Tensor::build(x.device(), x.shape(), x.format(), |y: &mut [T]| {
            Ok(loss::log_softmax(x.device().compute(), &extent, x.data::<T>()?, y)?)
        }))?;
        Ok((y.clone(), y))
    }

    fn backward(&self, y: Tensor, upstream: Tensor, _: &Needs) -> Result<Vec<Option<Tensor>>> {
        let extent = y.extent("log_softmax")?;
        let dx = dispatch!(y.dtype(), T => Tensor::build(y.device(), y.shape(), y.format(), |dx: &mut [T]| {
            let cpu = y.device().compute();
            Ok(loss::log_softmax_backward(cpu, &extent, y.data::<T>()?, upstream.data::<T>()?, dx)?)
        }))?;
        Ok(vec![Some(dx)])
    }
}
