//! Resizing of images to any size, with its backward pass, in both memory formats.

use serde::{Deserialize, Serialize};

use crate::error::invalid;
use crate::memory_format::{Extent, MemoryFormat, check_shape};
use crate::operand::kernels;
use crate::profile::span;
use crate::separable::{self, Lists, Read, Sizes};
use crate::{Cpu, Element, Result};

/// How values between the pixels of the input are computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum ResizeMode {
    /// The value of one pixel.
    Nearest(Rounding),
    /// The four pixels around a place are weighted by their distance from it.
    Bilinear,
}

/// Which of two pixels is the nearest one of a place between them. The names are ONNX's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
pub enum Rounding {
    /// The pixel before, as PyTorch's `nearest` does with [`Coordinates::Asymmetric`].
    #[default]
    Floor,
    /// The pixel after.
    Ceil,
    /// The nearer one; in the middle, the pixel before.
    RoundPreferFloor,
    /// The nearer one; in the middle, the pixel after. With [`Coordinates::HalfPixel`], PyTorch's `nearest-exact`.
    RoundPreferCeil,
    /// The pixel before along an axis that grows, the pixel after along one that shrinks: ONNX Runtime before opset 11.
    FloorOrCeil,
}

/// Which place of the input the output at `o` shows. The names are ONNX's. `step` is 1 / scale, or input size / output size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
pub enum Coordinates {
    /// (o + 0.5) step - 0.5: pixels are squares with their values at the centres. PyTorch's `align_corners=False`.
    #[default]
    HalfPixel,
    /// o step: the first pixels lie on each other. PyTorch's `nearest`.
    Asymmetric,
    /// o (input - 1) / (output - 1): the first and the last pixels lie on each other. PyTorch's `align_corners=True`.
    AlignCorners,
    /// As `HalfPixel`, but the middles of input and output lie on each other where the output has less than input x scale pixels.
    HalfPixelSymmetric,
}

/// One axis of a resize.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ResizeAxis {
    input: usize,
    output: usize,
    scale: Option<f64>,
}

impl ResizeAxis {
    /// From `input` to `output` pixels.
    pub fn to_size(input: usize, output: usize) -> ResizeAxis {
        ResizeAxis { input, output, scale: None }
    }

    /// From `input` to `input * scale` pixels, rounded down. Coordinates use this scale, not the quotient of the sizes, as in
    /// PyTorch and ONNX. A scale that is not positive gives no pixel, which [`ResizeProblem::new`] refuses.
    pub fn by_scale(input: usize, scale: f64) -> ResizeAxis {
        // The conversion saturates, and makes 0 of NaN.
        ResizeAxis::to_size_by_scale(input, (input as f64 * scale).floor() as usize, scale)
    }

    /// From `input` to `output` pixels, where coordinates use this scale.
    pub fn to_size_by_scale(input: usize, output: usize, scale: f64) -> ResizeAxis {
        ResizeAxis { input, output, scale: Some(scale) }
    }

    /// Where the output's first pixel begins in [`Coordinates::HalfPixelSymmetric`], in pixels of the input.
    fn begin(&self) -> f32 {
        let (input, output) = (self.input as f32, self.output as f32);
        self.scale.map_or(0.0, |scale| input / 2.0 * (1.0 - output / (input * scale as f32)))
    }
}

/// The sizes and rules of a resize of N x C x H x W before they are validated.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ResizeSpec {
    /// N, at least 1.
    pub batch: usize,
    /// C.
    pub channels: usize,
    /// Height and width.
    pub axes: [ResizeAxis; 2],
    /// How values are computed.
    pub mode: ResizeMode,
    /// Where they are taken from.
    pub coordinates: Coordinates,
    /// The order of input and output in memory.
    pub format: MemoryFormat,
}

/// A valid resize.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ResizeProblem {
    spec: ResizeSpec,
}

impl ResizeProblem {
    /// Validates a resize.
    ///
    /// # Errors
    /// A size of 0; a scale that is not positive and finite; an input or output of more than 2^40 elements.
    pub fn new(spec: ResizeSpec) -> Result<ResizeProblem> {
        let bad = |reason: String| Err(invalid("resize", reason));
        if let Some(scale) =
            spec.axes.iter().filter_map(|axis| axis.scale).find(|&s| !(s > 0.0 && s.is_finite()))
        {
            return bad(format!("the scale {scale} must be positive and finite"));
        }
        for (name, size) in [("input", spec.axes.map(|a| a.input)), ("output", spec.axes.map(|a| a.output))] {
            let shape = [spec.batch, spec.channels, size[0], size[1]];
            if shape.contains(&0) {
                return bad(format!("no size of the {name} {shape:?} may be 0"));
            }
            check_shape("resize", name, &shape)?;
        }
        Ok(ResizeProblem { spec })
    }

    /// N, C, OH, OW.
    pub fn output_shape(&self) -> [usize; 4] {
        let [height, width] = self.spec.axes.map(|axis| axis.output);
        [self.spec.batch, self.spec.channels, height, width]
    }

    /// The input as N x C x (H W).
    pub fn input_extent(&self) -> Extent {
        self.extent(self.spec.axes.map(|axis| axis.input))
    }

    /// The output as N x C x (OH OW).
    pub fn output_extent(&self) -> Extent {
        self.extent(self.spec.axes.map(|axis| axis.output))
    }

    fn extent(&self, [height, width]: [usize; 2]) -> Extent {
        let ResizeSpec { batch, channels, format, .. } = self.spec;
        Extent { batch, channels, spatial: height * width, format }
    }

    fn sizes(&self) -> Sizes {
        let ResizeSpec { channels, axes, format, .. } = self.spec;
        Sizes::new(format, channels, axes.map(|axis| axis.input), axes.map(|axis| axis.output))
    }

    /// For every output along each axis, the inputs that it reads.
    fn reads<T: Element>(&self) -> [Vec<Read<T>>; 2] {
        let ResizeSpec { axes, mode, coordinates, .. } = self.spec;
        axes.map(|axis| {
            let read = |output| match mode {
                ResizeMode::Nearest(rounding) => Read::copy(axis.nearest(coordinates, rounding, output)),
                ResizeMode::Bilinear => axis.between(coordinates, output),
            };
            (0..axis.output).map(read).collect()
        })
    }
}

impl ResizeAxis {
    /// The nearest input. Quotient and product are rounded to f32, as PyTorch and ONNX Runtime do: where a place lies between
    /// two pixels by a hair, this decides which of them is read.
    fn nearest(&self, coordinates: Coordinates, rounding: Rounding, output: usize) -> usize {
        let (input_size, output_size) = (self.input as f32, self.output as f32);
        let step = self.scale.map_or(input_size / output_size, |scale| (1.0 / scale) as f32);
        let place = match coordinates {
            Coordinates::HalfPixel => f64::from((output as f32 + 0.5) * step) - 0.5,
            Coordinates::HalfPixelSymmetric => {
                let scale = self.scale.map_or(output_size / input_size, |scale| scale as f32);
                f64::from(self.begin() + (output as f32 + 0.5) / scale - 0.5)
            }
            Coordinates::Asymmetric => f64::from(output as f32 * step),
            Coordinates::AlignCorners if self.output == 1 => 0.0,
            Coordinates::AlignCorners => {
                f64::from(output as f32 * ((input_size - 1.0) / (output_size - 1.0)))
            }
        };
        let rounded = match rounding {
            Rounding::FloorOrCeil if step > 1.0 => place.ceil(),
            Rounding::Floor | Rounding::FloorOrCeil => place.floor(),
            Rounding::Ceil => place.ceil(),
            Rounding::RoundPreferFloor => (place - 0.5).ceil(),
            Rounding::RoundPreferCeil => (place + 0.5).floor(),
        };
        // The conversion saturates.
        (rounded as usize).min(self.input - 1)
    }

    /// The two inputs around a place. Before the first and after the last pixel, only that one counts.
    fn between<T: Element>(&self, coordinates: Coordinates, output: usize) -> Read<T> {
        let last = self.input - 1;
        let step = self.scale.map_or(self.input as f64 / self.output as f64, |scale| 1.0 / scale);
        let place = match coordinates {
            Coordinates::HalfPixel => (output as f64 + 0.5) * step - 0.5,
            Coordinates::HalfPixelSymmetric => f64::from(self.begin()) + (output as f64 + 0.5) * step - 0.5,
            Coordinates::Asymmetric => output as f64 * step,
            Coordinates::AlignCorners if self.output == 1 => 0.0,
            Coordinates::AlignCorners => output as f64 * last as f64 / (self.output - 1) as f64,
        };
        let place = place.clamp(0.0, last as f64);
        let first = (place.floor() as usize).min(last);
        let share = if first < last { place - first as f64 } else { 0.0 };
        Read { place: first, weights: [T::of(1.0 - share), T::of(share)] }
    }
}

kernels! {
    /// y = x resized.
    ///
    /// # Errors
    /// If a length is not the problem's.
    pub fn resize<S: Stored>(cpu: &Cpu, problem: &ResizeProblem; x: &[S]; y: &mut [S]) -> Result<()> {
        span!("resize", x, y);
        problem.input_extent().check("resize", &[("x", x.len())])?;
        problem.output_extent().check("resize", &[("y", y.len())])?;
        separable::mix(cpu, problem.sizes(), &problem.reads::<S::Compute>(), x, y);
        Ok(())
    }

    /// dx of [`resize`]: the weighted sum of dy over the outputs that read the input, in order.
    ///
    /// # Errors
    /// As [`resize`].
    pub fn resize_backward<S: Stored>(cpu: &Cpu, problem: &ResizeProblem; dy: &[S]; dx: &mut [S]) -> Result<()> {
        span!("resize backward", dy, dx);
        problem.input_extent().check("resize backward", &[("dx", dx.len())])?;
        problem.output_extent().check("resize backward", &[("dy", dy.len())])?;
        let sizes = problem.sizes().transposed();
        let [rows, columns] = problem.reads::<S::Compute>();
        let lists = [Lists::of_readers(&rows, sizes.to[0]), Lists::of_readers(&columns, sizes.to[1])];
        separable::sum(cpu, sizes, &lists, dy, dx);
        Ok(())
    }
}
