//! Resizing of images to any size.

use convoke_kernels::resize::{
    self, Coordinates, ResizeAxis, ResizeMode, ResizeProblem, ResizeSpec, Rounding,
};

use super::four_dimensions;
use crate::error::refused;
use crate::planes::{OfPlanes, PlaneMap};
use crate::{Cpu, DType, Operation, Result, Tensor, apply};
use convoke_kernels::{Slice, SliceMut};

/// The size that a resize gives, height before width.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum ResizeTo {
    /// So many pixels.
    Size([usize; 2]),
    /// So many times the pixels of the input, rounded down. Places in the input follow from these factors, not from the sizes.
    Scale([f64; 2]),
    /// So many pixels, where places in the input follow from factors.
    SizeByScale {
        /// The output's size.
        size: [usize; 2],
        /// The factors.
        scale: [f64; 2],
    },
}

/// How [`resize2d`] resizes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ResizeOptions {
    /// The output's size.
    pub to: ResizeTo,
    /// How values between the pixels of the input are computed.
    pub mode: ResizeMode,
    /// Which place of the input an output shows.
    pub coordinates: Coordinates,
}

impl ResizeOptions {
    /// PyTorch's `interpolate` with the mode `nearest`.
    pub fn nearest(to: ResizeTo) -> ResizeOptions {
        let mode = ResizeMode::Nearest(Rounding::Floor);
        ResizeOptions { to, mode, coordinates: Coordinates::Asymmetric }
    }

    /// PyTorch's `interpolate` with the mode `bilinear`.
    pub fn bilinear(to: ResizeTo, align_corners: bool) -> ResizeOptions {
        let coordinates = if align_corners { Coordinates::AlignCorners } else { Coordinates::HalfPixel };
        ResizeOptions { to, mode: ResizeMode::Bilinear, coordinates }
    }

    fn axis(&self, index: usize, input: usize) -> ResizeAxis {
        match self.to {
            ResizeTo::Size(size) => ResizeAxis::to_size(input, size[index]),
            ResizeTo::Scale(scale) => ResizeAxis::by_scale(input, scale[index]),
            ResizeTo::SizeByScale { size, scale } => {
                ResizeAxis::to_size_by_scale(input, size[index], scale[index])
            }
        }
    }
}

/// N x C x H x W to N x C x OH x OW, as PyTorch's `interpolate` and ONNX's `Resize` (without antialiasing). Keeps the memory
/// format. Saves nothing.
///
/// # Errors
/// If the tensor does not have four dimensions, a size other than N is 0, a scale is not positive and finite, or the output is
/// too large.
pub fn resize2d(x: &Tensor, options: &ResizeOptions) -> Result<Tensor> {
    let [batch, channels, height, width] = four_dimensions(NAME, "input", x)?;
    let spec = ResizeSpec {
        // If there are no images, the problem is that of one image, and nothing runs.
        batch: batch.max(1),
        channels,
        axes: [options.axis(0, height), options.axis(1, width)],
        mode: options.mode,
        coordinates: options.coordinates,
        format: x.format(),
    };
    let explain =
        |reason: String| format!("{reason}; the input is {:?}, resized to {:?}", x.shape(), options.to);
    let problem = ResizeProblem::new(spec).map_err(refused(NAME, explain))?;
    apply(OfPlanes::new(Resize { options: *options, problem }, x), &[x])
}

const NAME: &str = "resize2d";

struct Resize {
    options: ResizeOptions,
    problem: ResizeProblem,
}

impl PlaneMap for Resize {
    fn name(&self) -> &'static str {
        NAME
    }

    fn describe(&self) -> Operation {
        Operation::Resize(self.options)
    }

    fn takes(&self, _: DType) -> bool {
        true
    }

    fn output_shape(&self) -> [usize; 4] {
        self.problem.output_shape()
    }

    fn forward(&self, cpu: &Cpu, x: Slice<'_>, y: SliceMut<'_>) -> convoke_kernels::Result<()> {
        resize::resize(cpu, &self.problem, x, y)
    }

    fn backward(&self, cpu: &Cpu, dy: Slice<'_>, dx: SliceMut<'_>) -> convoke_kernels::Result<()> {
        resize::resize_backward(cpu, &self.problem, dy, dx)
    }
}
