//! Upsampling by whole factors, with its backward pass, in both memory formats.

use crate::error::invalid;
use crate::memory_format::{Extent, MOST_ELEMENTS, MemoryFormat};
use crate::operand::kernels;
use crate::profile::span;
use crate::separable::{self, Lists, Read, Sizes};
use crate::{Cpu, Element, Result};

/// How values between the pixels of the input are computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum UpsampleMode {
    /// Each pixel becomes a block of copies of it.
    #[default]
    Nearest,
    /// The four pixels around a place are weighted by their distance from it. Pixels are squares with their values at the
    /// centres, as in PyTorch's `bilinear` with `align_corners=False`.
    Bilinear,
}

impl std::fmt::Display for UpsampleMode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            UpsampleMode::Nearest => "nearest",
            UpsampleMode::Bilinear => "bilinear",
        })
    }
}

/// A valid upsampling of N x C x H x W by whole factors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct UpsampleProblem {
    batch: usize,
    channels: usize,
    size: [usize; 2],
    factor: [usize; 2],
    mode: UpsampleMode,
    format: MemoryFormat,
}

impl UpsampleProblem {
    /// Validates an upsampling of N x C x H x W to N x C x (H `factor[0]`) x (W `factor[1]`).
    ///
    /// # Errors
    /// A size or a factor of 0; an output of more than 2^40 elements.
    pub fn new(
        [batch, channels]: [usize; 2],
        size: [usize; 2],
        factor: [usize; 2],
        mode: UpsampleMode,
        format: MemoryFormat,
    ) -> Result<UpsampleProblem> {
        let shape = [batch, channels, size[0], size[1]];
        if shape.contains(&0) {
            return Err(invalid("upsampling", format!("no size of the input {shape:?} may be 0")));
        }
        if factor.contains(&0) {
            return Err(invalid("upsampling", format!("the factors {factor:?} must not be 0")));
        }
        let sizes = shape.iter().chain(&factor);
        let len = sizes.copied().try_fold(1usize, |len, size| len.checked_mul(size));
        if len.is_none_or(|len| len > MOST_ELEMENTS) {
            return Err(invalid("upsampling", format!("{shape:?} times {factor:?} is too large")));
        }
        Ok(UpsampleProblem { batch, channels, size, factor, mode, format })
    }

    /// N, C, OH, OW.
    pub fn output_shape(&self) -> [usize; 4] {
        let [height, width] = self.output_size();
        [self.batch, self.channels, height, width]
    }

    /// The input as N x C x (H W).
    pub fn input_extent(&self) -> Extent {
        self.extent(self.size)
    }

    /// The output as N x C x (OH OW).
    pub fn output_extent(&self) -> Extent {
        self.extent(self.output_size())
    }

    fn output_size(&self) -> [usize; 2] {
        [0, 1].map(|axis| self.size[axis] * self.factor[axis])
    }

    fn extent(&self, [height, width]: [usize; 2]) -> Extent {
        let Self { batch, channels, format, .. } = *self;
        Extent { batch, channels, spatial: height * width, format }
    }

    fn sizes(&self) -> Sizes {
        Sizes::new(self.format, self.channels, self.size, self.output_size())
    }

    /// For every output along an axis, the inputs that it reads.
    fn reads<T: Element>(&self, axis: usize) -> Vec<Read<T>> {
        let (size, factor) = (self.size[axis], self.factor[axis]);
        let read = |output: usize| match self.mode {
            UpsampleMode::Nearest => Read::copy(output / factor),
            UpsampleMode::Bilinear => {
                // The output's centre is (2 output + 1 - factor) / (2 factor) inputs after the first input's centre. Before
                // the first and after the last input's centre, only the nearest input counts.
                let from_first = (2 * output + 1).saturating_sub(factor);
                let (place, rest) = (from_first / (2 * factor), from_first % (2 * factor));
                let share = if place + 1 < size { rest as f64 / (2 * factor) as f64 } else { 0.0 };
                Read { place, weights: [T::of(1.0 - share), T::of(share)] }
            }
        };
        (0..size * factor).map(read).collect()
    }
}

kernels! {
    /// y = x upsampled.
    ///
    /// # Errors
    /// If a length is not the problem's.
    pub fn upsample<T>(cpu: &Cpu, problem: &UpsampleProblem; x: &[T]; y: &mut [T]) -> Result<()> {
        span!("upsample", x, y);
        problem.input_extent().check("upsampling", &[("x", x.len())])?;
        problem.output_extent().check("upsampling", &[("y", y.len())])?;
        let reads = [0, 1].map(|axis| problem.reads::<T>(axis));
        separable::mix(cpu, problem.sizes(), &reads, x, y);
        Ok(())
    }

    /// dx of [`upsample`]: the weighted sum of dy over the outputs that read the input.
    ///
    /// # Errors
    /// As [`upsample`].
    pub fn upsample_backward<T>(cpu: &Cpu, problem: &UpsampleProblem; dy: &[T]; dx: &mut [T]) -> Result<()> {
        span!("upsample backward", dy, dx);
        problem.input_extent().check("upsampling backward", &[("dx", dx.len())])?;
        problem.output_extent().check("upsampling backward", &[("dy", dy.len())])?;
        let lists = [0, 1].map(|axis| Lists::of_readers(&problem.reads::<T>(axis), problem.size[axis]));
        separable::sum(cpu, problem.sizes().transposed(), &lists, dy, dx);
        Ok(())
    }
}
