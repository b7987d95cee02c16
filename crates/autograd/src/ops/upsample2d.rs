//! Upsampling by whole factors.

use convoke_kernels::upsample::{self, UpsampleMode, UpsampleProblem};

use super::{empty, four_dimensions};
use crate::error::invalid;
use crate::{Function, Needs, Operation, Result, Tensor, apply};
use convoke_kernels::dispatch;

/// N x C x H x W to N x C x (H `factor[0]`) x (W `factor[1]`), as PyTorch's `interpolate` with `scale_factor=factor` and
/// `align_corners=False`. Keeps the memory format. Saves nothing.
///
/// # Errors
/// If the tensor does not have four dimensions, a factor or a size other than N is 0, or the output is too large.
pub fn upsample2d(x: &Tensor, factor: [usize; 2], mode: UpsampleMode) -> Result<Tensor> {
    let operation = "upsample2d";
    let [batch, channels, height, width] = four_dimensions(operation, "input", x)?;
    // If there are no images, the problem is that of one image, and nothing runs.
    let problem = UpsampleProblem::new([batch.max(1), channels], [height, width], factor, mode, x.format())
        .map_err(|error| match error {
        convoke_kernels::Error::Invalid { reason, .. } => {
            invalid(operation, format!("{reason}; the input is {:?}", x.shape()))
        }
        error => error.into(),
    })?;
    apply(Upsample { factor, mode, problem, input_shape: x.shape().to_vec() }, &[x])
}

struct Upsample {
    factor: [usize; 2],
    mode: UpsampleMode,
    problem: UpsampleProblem,
    input_shape: Vec<usize>,
}

impl Function for Upsample {
    type Saved = ();

    fn name(&self) -> &'static str {
        "upsample2d"
    }

    fn describe(&self) -> Option<Operation> {
        Some(Operation::Upsample { factor: self.factor, mode: self.mode })
    }

    fn forward(&self, inputs: &[&Tensor], _: &Needs) -> Result<(Tensor, ())> {
        let (x, shape) = (inputs[0], self.problem.output_shape());
        if x.is_empty() {
            return Ok((empty(&shape, x)?, ()));
        }
        let y = dispatch!(x.dtype(), T => Tensor::build(x.device(), &shape, x.format(), |y: &mut [T]| {
            Ok(upsample::upsample(x.device().compute(), &self.problem, x.data::<T>()?, y)?)
        }))?;
        Ok((y, ()))
    }

    fn backward(&self, (): (), upstream: Tensor, _: &Needs) -> Result<Vec<Option<Tensor>>> {
        if upstream.is_empty() {
            return Ok(vec![Some(empty(&self.input_shape, &upstream)?)]);
        }
        let (device, format) = (upstream.device(), upstream.format());
        let dx = dispatch!(upstream.dtype(), T => {
            Tensor::build(device, &self.input_shape, format, |dx: &mut [T]| {
                let dy = upstream.data::<T>()?;
                Ok(upsample::upsample_backward(device.compute(), &self.problem, dy, dx)?)
            })
        })?;
        Ok(vec![Some(dx)])
    }
}
