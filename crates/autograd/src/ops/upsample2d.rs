//! Upsampling by whole factors.

use convoke_kernels::upsample::{self, UpsampleMode, UpsampleProblem};

use super::four_dimensions;
use crate::error::refused;
use crate::planes::{OfPlanes, PlaneMap};
use crate::{Cpu, Operation, Result, Tensor, apply};
use convoke_kernels::{Slice, SliceMut};

/// N x C x H x W to N x C x (H `factor[0]`) x (W `factor[1]`), as PyTorch's `interpolate` with `scale_factor=factor` and
/// `align_corners=False`. Keeps the memory format. Saves nothing.
///
/// # Errors
/// If the tensor does not have four dimensions, a factor or a size other than N is 0, or the output is too large.
pub fn upsample2d(x: &Tensor, factor: [usize; 2], mode: UpsampleMode) -> Result<Tensor> {
    let operation = "upsample2d";
    let [batch, channels, height, width] = four_dimensions(operation, "input", x)?;
    // If there are no images, the problem is that of one image, and nothing runs.
    let explain = |reason: String| format!("{reason}; the input is {:?}", x.shape());
    let problem = UpsampleProblem::new([batch.max(1), channels], [height, width], factor, mode, x.format())
        .map_err(refused(operation, explain))?;
    apply(OfPlanes::new(Upsample { factor, mode, problem }, x), &[x])
}

struct Upsample {
    factor: [usize; 2],
    mode: UpsampleMode,
    problem: UpsampleProblem,
}

impl PlaneMap for Upsample {
    fn name(&self) -> &'static str {
        "upsample2d"
    }

    fn describe(&self) -> Operation {
        Operation::Upsample { factor: self.factor, mode: self.mode }
    }

    fn output_shape(&self) -> [usize; 4] {
        self.problem.output_shape()
    }

    fn forward(&self, cpu: &Cpu, x: Slice<'_>, y: SliceMut<'_>) -> convoke_kernels::Result<()> {
        upsample::upsample(cpu, &self.problem, x, y)
    }

    fn backward(&self, cpu: &Cpu, dy: Slice<'_>, dx: SliceMut<'_>) -> convoke_kernels::Result<()> {
        upsample::upsample_backward(cpu, &self.problem, dy, dx)
    }
}
