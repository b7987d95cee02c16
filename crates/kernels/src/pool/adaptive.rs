//! Pooling to a chosen output size: the windows divide the input as evenly as they can, and overlap where it does not divide.

use super::global::{global_average_pool, global_average_pool_backward};
use crate::channels::LANES;
use crate::element::PieceOf;
use crate::error::{check_len, invalid};
use crate::isa::multiversion;
use crate::memory_format::{Extent, MemoryFormat, check_shape};
use crate::operand::kernels;
use crate::separable::{self, Lists, Sizes};
use crate::{Cpu, Element, Result};

/// The approximate number of elements in a task of whole planes.
const TASK: usize = 1 << 14;

/// A valid adaptive pooling of N x C x H x W to N x C x OH x OW.
///
/// Window i of an axis is `floor(i input / output)..ceil((i + 1) input / output)`, as in PyTorch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct AdaptivePool {
    batch: usize,
    channels: usize,
    input: [usize; 2],
    output: [usize; 2],
    format: MemoryFormat,
}

impl AdaptivePool {
    /// Validates an adaptive pooling.
    ///
    /// # Errors
    /// A size of 0, a tensor of more than 2^40 elements.
    pub fn new(
        [batch, channels]: [usize; 2],
        input: [usize; 2],
        output: [usize; 2],
        format: MemoryFormat,
    ) -> Result<AdaptivePool> {
        for (name, size) in [("input", input), ("output", output)] {
            let shape = [batch, channels, size[0], size[1]];
            if shape.contains(&0) {
                return Err(invalid("adaptive pooling", format!("no size of the {name} {shape:?} may be 0")));
            }
            check_shape("adaptive pooling", name, &shape)?;
        }
        Ok(AdaptivePool { batch, channels, input, output, format })
    }

    /// N, C, OH, OW.
    pub fn output_shape(&self) -> [usize; 4] {
        [self.batch, self.channels, self.output[0], self.output[1]]
    }

    /// The input as N x C x (H W).
    pub fn input_extent(&self) -> Extent {
        self.extent(self.input)
    }

    /// The output as N x C x (OH OW).
    pub fn output_extent(&self) -> Extent {
        self.extent(self.output)
    }

    /// The window of a pooling with equal windows that do not overlap, if this is one.
    pub fn even_window(&self) -> Option<[usize; 2]> {
        let divides = (0..2).all(|axis| self.input[axis].is_multiple_of(self.output[axis]));
        divides.then(|| [0, 1].map(|axis| self.input[axis] / self.output[axis]))
    }

    fn extent(&self, [height, width]: [usize; 2]) -> Extent {
        let Self { batch, channels, format, .. } = *self;
        Extent { batch, channels, spatial: height * width, format }
    }

    fn sizes(&self) -> Sizes {
        Sizes::new(self.format, self.channels, self.input, self.output)
    }

    fn is_global(&self) -> bool {
        self.output == [1, 1]
    }

    /// The inputs of an output along an axis.
    fn window(&self, axis: usize, output: usize) -> std::ops::Range<usize> {
        let (from, to) = (self.input[axis], self.output[axis]);
        // Each size is at most 2^40, so the product may exceed 64 bits.
        let at = |index: usize| index as u128 * from as u128;
        (at(output) / to as u128) as usize..at(output + 1).div_ceil(to as u128) as usize
    }

    /// The inputs of each output along an axis, each with its share in the mean.
    fn shares<T: Element>(&self) -> [Lists<T>; 2] {
        [0, 1].map(|axis| {
            Lists::new((0..self.output[axis]).map(|output| {
                let window = self.window(axis, output);
                let share = T::of(1.0 / window.len() as f64);
                window.map(move |input| (input, share))
            }))
        })
    }
}

kernels! {
    /// The mean of each window.
    ///
    /// # Errors
    /// If a length is not the problem's.
    pub fn adaptive_average_pool<S: Stored>(cpu: &Cpu, problem: &AdaptivePool; x: &[S]; y: &mut [S]) -> Result<()> {
        if problem.is_global() {
            return global_average_pool(cpu, &problem.input_extent(), x.into(), y.into());
        }
        crate::profile::span!("adaptive average pooling", x, y);
        problem.input_extent().check("adaptive average pooling", &[("x", x.len())])?;
        problem.output_extent().check("adaptive average pooling", &[("y", y.len())])?;
        separable::sum(cpu, problem.sizes(), &problem.shares::<S::Compute>(), x, y);
        Ok(())
    }

    /// dx of [`adaptive_average_pool`]: each window's dy is spread evenly.
    ///
    /// # Errors
    /// As [`adaptive_average_pool`].
    pub fn adaptive_average_pool_backward<S: Stored>(cpu: &Cpu, problem: &AdaptivePool; dy: &[S]; dx: &mut [S]) -> Result<()> {
        if problem.is_global() {
            return global_average_pool_backward(cpu, &problem.input_extent(), dy.into(), dx.into());
        }
        crate::profile::span!("adaptive average pooling backward", dy, dx);
        problem.input_extent().check("adaptive average pooling backward", &[("dx", dx.len())])?;
        problem.output_extent().check("adaptive average pooling backward", &[("dy", dy.len())])?;
        let [rows, columns] = problem.shares::<S::Compute>();
        let lists = [rows.transposed(problem.input[0]), columns.transposed(problem.input[1])];
        separable::sum(cpu, problem.sizes().transposed(), &lists, dy, dx);
        Ok(())
    }

    /// The largest value of each window, and the place in its plane (row-major) where it was.
    ///
    /// Of equal values the first wins. NaN wins over every number, and of several NaNs the last wins, as in PyTorch.
    ///
    /// # Errors
    /// If a length is not the problem's, or a plane has more places than u32 counts.
    pub fn adaptive_max_pool<S: Stored>(
        cpu: &Cpu, problem: &AdaptivePool, places: &mut [u32];
        x: &[S];
        y: &mut [S]
    ) -> Result<()> {
        let operation = "adaptive max pooling";
        crate::profile::span!("adaptive max pooling", x, y);
        problem.input_extent().check(operation, &[("x", x.len())])?;
        problem.output_extent().check(operation, &[("y", y.len())])?;
        check_len(operation, "the places", places.len(), y.len())?;
        let Sizes { lanes, from: [height, width], to: [rows, columns] } = problem.sizes();
        if height * width > u32::MAX as usize {
            return Err(invalid(
                operation,
                format!("planes of {height} x {width} have more places than u32"),
            ));
        }
        if problem.is_global() && lanes == 1 {
            let (plane, planes) = (height * width, TASK.div_ceil(height * width));
            let items = x.chunks(planes * plane).zip(y.chunks_mut(planes).zip(places.chunks_mut(planes)));
            cpu.for_each(x.len(), items, |(x, (y, places))| {
                S::Compute::map(cpu, x, y, |x, y| largest_of_planes(cpu, plane, x, y, places));
            });
            return Ok(());
        }
        let (plane, y_row) = (height * width * lanes, columns * lanes);
        let windows: Vec<_> = (0..columns).map(|output| problem.window(1, output)).collect();
        let items = y.chunks_mut(y_row).zip(places.chunks_mut(y_row)).enumerate();
        cpu.for_each(x.len(), items, |(row, (y, places))| {
            let x = &x[row / rows * plane..][..plane];
            let lines = problem.window(0, row % rows);
            S::Compute::map(cpu, x, y, |x, y| {
                let outputs = y.chunks_mut(lanes).zip(places.chunks_mut(lanes));
                for (columns, (y, places)) in windows.iter().zip(outputs) {
                    let first = lines.start * width + columns.start;
                    y.copy_from_slice(&x[first * lanes..][..lanes]);
                    places.fill(first as u32);
                    for line in lines.clone() {
                        let start = line * width + columns.start;
                        let pixels = &x[start * lanes..][..columns.len() * lanes];
                        keep_larger(cpu, start as u32, pixels, y, places);
                    }
                }
            });
        });
        Ok(())
    }

    /// dx of [`adaptive_max_pool`]: each window's dy goes to the place that was largest.
    ///
    /// # Errors
    /// If a length is not the problem's. Places that are not in a plane are ignored.
    pub fn adaptive_max_pool_backward<S: Stored>(
        cpu: &Cpu, problem: &AdaptivePool, places: &[u32];
        dy: &[S];
        dx: &mut [S]
    ) -> Result<()> {
        let operation = "adaptive max pooling backward";
        crate::profile::span!("adaptive max pooling backward", dy, dx);
        problem.input_extent().check(operation, &[("dx", dx.len())])?;
        problem.output_extent().check(operation, &[("dy", dy.len())])?;
        check_len(operation, "the places", places.len(), dy.len())?;
        let Sizes { lanes, from: [height, width], to: [rows, columns] } = problem.sizes();
        let (input, output) = (height * width * lanes, rows * columns * lanes);
        // Windows overlap, so a task is of whole planes (or images).
        let (work, planes) = (dx.len(), TASK.div_ceil(input));
        let items = dx.chunks_mut(planes * input);
        let items = items.zip(dy.chunks(planes * output).zip(places.chunks(planes * output)));
        cpu.for_each(work, items, |(dx, (dy, places))| {
            S::Compute::map(cpu, dy, dx, |dy, dx| {
                dx.fill(S::Compute::default());
                let sources = dy.chunks(output).zip(places.chunks(output));
                for (dx, (dy, places)) in dx.chunks_mut(input).zip(sources) {
                    for (index, (&dy, &place)) in dy.iter().zip(places).enumerate() {
                        if let Some(dx) = dx.get_mut(place as usize * lanes + index % lanes) {
                            *dx += dy;
                        }
                    }
                }
            });
        });
        Ok(())
    }
}

/// The larger of two; NaN if there is one.
#[inline(always)]
fn larger<T: Element>(largest: T, x: T) -> T {
    if x > largest || x.is_nan() { x } else { largest }
}

multiversion! {
    /// The largest value of each plane of `len` elements, and its place. The value is found first, as that vectorises.
    fn largest_of_planes<T: Element>(len: usize, x: &[T], y: &mut [T], places: &mut [u32]) {
        for ((plane, y), found) in x.chunks_exact(len).zip(y).zip(places) {
            let (chunks, rest) = plane.as_chunks::<LANES>();
            let mut lanes = [T::neg_infinity(); LANES];
            for chunk in chunks {
                for (lane, &x) in lanes.iter_mut().zip(chunk) {
                    *lane = larger(*lane, x);
                }
            }
            let largest = lanes.iter().chain(rest).fold(T::neg_infinity(), |largest, &x| larger(largest, x));
            let place = match largest.is_nan() {
                true => plane.iter().rposition(|x| x.is_nan()),
                false => plane.iter().position(|&x| x == largest),
            };
            let place = place.expect("the largest is one of them");
            (*y, *found) = (plane[place], place as u32);
        }
    }

    /// Replaces what is smaller than a pixel; the first pixel is at `start` in its plane.
    fn keep_larger<T: Element>(start: u32, pixels: &[T], y: &mut [T], places: &mut [u32]) {
        for (place, pixel) in (start..).zip(pixels.chunks_exact(y.len())) {
            for ((&x, y), found) in pixel.iter().zip(y.iter_mut()).zip(places.iter_mut()) {
                let larger = x > *y || x.is_nan();
                *y = if larger { x } else { *y };
                *found = if larger { place } else { *found };
            }
        }
    }
}
