//! Upsampling by whole factors, with its backward pass, in both memory formats.
//!
//! The two axes are handled one after the other: a row of outputs is a mixture of at most two rows of inputs, stretched
//! along the width. Backward gathers instead of scattering: each row of inputs adds up the rows of outputs that read it, in
//! order. So no two tasks write the same place, and no sum depends on the number of threads.

use crate::cpu::multiversion;
use crate::error::{check_len, invalid};
use crate::memory_format::{Extent, MemoryFormat};
use crate::profile::span;
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

/// The largest number of elements of a tensor: 2^40, far above any memory, far below overflow.
const LIMIT: usize = 1 << 40;

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
        if len.is_none_or(|len| len > LIMIT) {
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

    /// The contiguous elements of a pixel.
    fn lanes(&self) -> usize {
        match self.format {
            MemoryFormat::Contiguous => 1,
            MemoryFormat::ChannelsLast => self.channels,
        }
    }

    fn check(&self, operation: &'static str, lens: [(&'static str, usize); 2]) -> Result<()> {
        check_len(operation, lens[0].0, lens[0].1, self.input_extent().len()?)?;
        check_len(operation, lens[1].0, lens[1].1, self.output_extent().len()?)
    }

    /// For every output along an axis, the inputs that it reads.
    fn reads<T: Element>(&self, axis: usize) -> Vec<Read<T>> {
        let (size, factor) = (self.size[axis], self.factor[axis]);
        let read = |output: usize| match self.mode {
            UpsampleMode::Nearest => Read { place: output / factor, weights: [T::one(), T::zero()] },
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

    /// Which outputs along an axis read each input, the transpose of [`UpsampleProblem::reads`].
    fn readers<T: Element>(&self, axis: usize) -> Readers<T> {
        let mut found: Vec<Vec<(usize, T)>> = vec![Vec::new(); self.size[axis]];
        for (output, read) in self.reads::<T>(axis).into_iter().enumerate() {
            for (place, weight) in (read.place..).zip(read.weights) {
                if weight != T::zero() {
                    found[place].push((output, weight));
                }
            }
        }
        let bounds = found.iter().scan(0, |end, readers| {
            *end += readers.len();
            Some(*end)
        });
        let bounds = std::iter::once(0).chain(bounds).collect();
        Readers { bounds, outputs: found.into_iter().flatten().collect() }
    }
}

/// How one output along an axis is computed: as a mixture of the inputs at `place` and at `place + 1`. If the second weight
/// is 0, the second input is not read.
struct Read<T> {
    place: usize,
    weights: [T; 2],
}

impl<T: Element> Read<T> {
    fn is_copy(&self) -> bool {
        self.weights[1] == T::zero()
    }
}

/// The outputs that read each input along an axis, with their weights, in order.
struct Readers<T> {
    /// Where in `outputs` the readers of each input begin, and where those of the last one end.
    bounds: Vec<usize>,
    outputs: Vec<(usize, T)>,
}

impl<T> Readers<T> {
    fn of(&self, input: usize) -> &[(usize, T)] {
        &self.outputs[self.bounds[input]..self.bounds[input + 1]]
    }
}

/// The approximate number of elements in a task: few enough that the load is balanced, enough that the overhead of a task
/// is small.
const TASK: usize = 1 << 14;

/// y = x upsampled.
///
/// # Errors
/// If a length is not the problem's.
pub fn upsample<T: Element>(cpu: &Cpu, problem: &UpsampleProblem, x: &[T], y: &mut [T]) -> Result<()> {
    span!("upsample", x, y);
    problem.check("upsampling", [("x", x.len()), ("y", y.len())])?;
    let lanes = problem.lanes();
    let (rows, columns) = (problem.reads::<T>(0), problem.reads::<T>(1));
    let (x_row, y_row) = (problem.size[1] * lanes, columns.len() * lanes);
    let plane = problem.size[0] * x_row;
    let at_once = TASK.div_ceil(y_row);
    cpu.for_each(y.len(), y.chunks_mut(at_once * y_row).enumerate(), |(task, y)| {
        let mut mixed = vec![T::zero(); x_row];
        for (row, y) in (task * at_once..).zip(y.chunks_mut(y_row)) {
            let read = &rows[row % rows.len()];
            let x = &x[row / rows.len() * plane + read.place * x_row..];
            let x = match read.is_copy() {
                true => &x[..x_row],
                false => {
                    mix(cpu, read.weights, &x[..x_row], &x[x_row..2 * x_row], &mut mixed);
                    &mixed
                }
            };
            stretch(cpu, lanes, &columns, x, y);
        }
    });
    Ok(())
}

/// dx of [`upsample`]: the weighted sum of dy over the outputs that read the input.
///
/// # Errors
/// As [`upsample`].
pub fn upsample_backward<T: Element>(
    cpu: &Cpu,
    problem: &UpsampleProblem,
    dy: &[T],
    dx: &mut [T],
) -> Result<()> {
    span!("upsample backward", dy, dx);
    problem.check("upsampling backward", [("dx", dx.len()), ("dy", dy.len())])?;
    let lanes = problem.lanes();
    let (rows, columns) = (problem.readers::<T>(0), problem.readers::<T>(1));
    let [height, width] = problem.output_size();
    let (dx_row, dy_row) = (problem.size[1] * lanes, width * lanes);
    let plane = height * dy_row;
    let at_once = TASK.div_ceil(dx_row * problem.factor[0] * problem.factor[1]);
    cpu.for_each(dy.len(), dx.chunks_mut(at_once * dx_row).enumerate(), |(task, dx)| {
        let mut sums = vec![T::zero(); dy_row];
        for (row, dx) in (task * at_once..).zip(dx.chunks_mut(dx_row)) {
            let dy = &dy[row / problem.size[0] * plane..][..plane];
            add_up(cpu, dy_row, rows.of(row % problem.size[0]), dy, &mut sums);
            gather(cpu, lanes, &columns, &sums, dx);
        }
    });
    Ok(())
}

multiversion! {
    fn mix<T: Element>(weights: [T; 2], first: &[T], second: &[T], out: &mut [T]) {
        mix_pixel(weights, first, second, out);
    }

    /// Computes a row of outputs from a row of inputs.
    fn stretch<T: Element>(lanes: usize, reads: &[Read<T>], x: &[T], y: &mut [T]) {
        if lanes == 1 {
            for (y, read) in y.iter_mut().zip(reads) {
                *y = match read.is_copy() {
                    true => x[read.place],
                    false => x[read.place] * read.weights[0] + x[read.place + 1] * read.weights[1],
                };
            }
            return;
        }
        for (y, read) in y.chunks_exact_mut(lanes).zip(reads) {
            let x = &x[read.place * lanes..];
            match read.is_copy() {
                true => y.copy_from_slice(&x[..lanes]),
                false => mix_pixel(read.weights, &x[..lanes], &x[lanes..2 * lanes], y),
            }
        }
    }

    /// The weighted sum of the rows of `from` that `readers` lists.
    fn add_up<T: Element>(row: usize, readers: &[(usize, T)], from: &[T], sums: &mut [T]) {
        add_up_pixels(row, readers, from, sums);
    }

    /// Computes a row of dx from the sum of rows of dy.
    fn gather<T: Element>(lanes: usize, readers: &Readers<T>, from: &[T], dx: &mut [T]) {
        for (input, dx) in dx.chunks_exact_mut(lanes).enumerate() {
            add_up_pixels(lanes, readers.of(input), from, dx);
        }
    }
}

#[inline(always)]
fn mix_pixel<T: Element>(weights: [T; 2], first: &[T], second: &[T], out: &mut [T]) {
    for ((out, &first), &second) in out.iter_mut().zip(first).zip(second) {
        *out = first * weights[0] + second * weights[1];
    }
}

/// `sums` = the weighted sum of the pixels (or rows) of `len` numbers in `from` that `readers` lists, in order. It adds two
/// at a time, because every addition reads and writes `sums` in memory.
#[inline(always)]
fn add_up_pixels<T: Element>(len: usize, readers: &[(usize, T)], from: &[T], sums: &mut [T]) {
    let sums = &mut sums[..len];
    let pixel = |at: usize| &from[at * len..][..len];
    let (pairs, last) = readers.as_chunks::<2>();
    for (index, &[(a, first), (b, second)]) in pairs.iter().enumerate() {
        let values = pixel(a).iter().zip(pixel(b));
        for (sum, (&a, &b)) in sums.iter_mut().zip(values) {
            let two = a * first + b * second;
            *sum = if index == 0 { two } else { *sum + two };
        }
    }
    for &(at, weight) in last {
        for (sum, &value) in sums.iter_mut().zip(pixel(at)) {
            let one = value * weight;
            *sum = if pairs.is_empty() { one } else { *sum + one };
        }
    }
}
