//! ReLU: y = max(0, x).

use convoke_kernels::activation;

use crate::tensor::dispatch;
use crate::{Function, Needs, Result, Tensor, apply};

impl Tensor {
    /// max(0, x); NaN stays NaN. Saves its output.
    ///
    /// # Errors
    /// None for now; the signature is that of every operation.
    pub fn relu(&self) -> Result<Tensor> {
        apply(Relu, &[self])
    }
}

struct Relu;

impl Function for Relu {
    /// The output: the operation after it saves it too, so that it costs nothing more.
    type Saved = Tensor;

    fn name(&self) -> &'static str {
        "relu"
    }

    fn forward(&self, inputs: &[&Tensor], _: &Needs) -> Result<(Tensor, Tensor)> {
        let x = inputs[0];
        let y = dispatch!(x.dtype(), T => Tensor::build(x.device(), x.shape(), x.format(), |y: &mut [T]| {
            Ok(activation::relu(x.device().compute(), x.data::<T>()?, y)?)
        }))?;
        Ok((y.clone(), y))
    }

    fn backward(&self, y: Tensor, upstream: Tensor, _: &Needs) -> Result<Vec<Option<Tensor>>> {
        let dx = dispatch!(y.dtype(), T => Tensor::build(y.device(), y.shape(), y.format(), |dx: &mut [T]| {
            let cpu = y.device().compute();
            Ok(activation::relu_backward(cpu, y.data::<T>()?, upstream.data::<T>()?, dx)?)
        }))?;
        Ok(vec![Some(dx)])
    }
}
