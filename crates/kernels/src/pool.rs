//! Max and average pooling, each with its backward, in both memory formats.

use crate::conv::ConvAxis;
use crate::cpu::multiversion;
use crate::error::{check_len, invalid};
use crate::memory_format::{Extent, MemoryFormat};
use crate::{Cpu, Element, Result};

/// One spatial axis of a pooling layer, as PyTorch describes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PoolAxis {
    /// Input size.
    pub input: usize,
    /// Window size.
    pub kernel: usize,
    /// Step between windows.
    pub stride: usize,
    /// Padding on both sides, at most half the window. It never wins a maximum.
    pub padding: usize,
    /// Step between window elements.
    pub dilation: usize,
}

/// A valid 2-D pooling problem.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PoolProblem {
    batch: usize,
    channels: usize,
    format: MemoryFormat,
    height: ConvAxis,
    width: ConvAxis,
    padding: [usize; 2],
}

impl PoolProblem {
    /// Validates a pooling of N x C x H x W. With `ceil_mode` a last window that starts inside the input or the
    /// padding before it counts though it runs over the end.
    ///
    /// # Errors
    /// A size of 0, padding above half the window, a window larger than the padded input, a tensor or a window of
    /// more than 2^40 elements.
    pub fn new(
        [batch, channels]: [usize; 2],
        [height, width]: [PoolAxis; 2],
        ceil_mode: bool,
        format: MemoryFormat,
    ) -> Result<PoolProblem> {
        if batch == 0 || channels == 0 {
            return Err(invalid("pooling", format!("batch {batch} and channels {channels} must not be 0")));
        }
        let padding = [height.padding, width.padding];
        let height = axis("height", &height, ceil_mode)?;
        let width = axis("width", &width, ceil_mode)?;
        let problem = PoolProblem { batch, channels, format, height, width, padding };
        let shapes = [
            ("input", [batch, channels, height.input, width.input]),
            ("output", problem.output_shape()),
            ("window", [1, 1, height.kernel, width.kernel]),
        ];
        for (name, shape) in shapes {
            let len = shape.iter().try_fold(1usize, |len, &size| len.checked_mul(size));
            if len.is_none_or(|len| len > LIMIT) {
                return Err(invalid("pooling", format!("the {name} of shape {shape:?} is too large")));
            }
        }
        Ok(problem)
    }

    /// N, C, OH, OW.
    pub fn output_shape(&self) -> [usize; 4] {
        [self.batch, self.channels, self.height.output(), self.width.output()]
    }

    /// Elements of a window: what an index must be able to count.
    pub fn window_len(&self) -> usize {
        self.height.kernel * self.width.kernel
    }

    /// The input as N x C x (H W).
    pub fn input_extent(&self) -> Extent {
        let spatial = self.height.input * self.width.input;
        Extent { batch: self.batch, channels: self.channels, spatial, format: self.format }
    }

    /// The output as N x C x (OH OW).
    pub fn output_extent(&self) -> Extent {
        let spatial = self.height.output() * self.width.output();
        Extent { batch: self.batch, channels: self.channels, spatial, format: self.format }
    }

    /// Input and output elements of one task: a plane, or an image whose pixels hold `lanes` channels.
    fn task(&self) -> (usize, usize, usize) {
        let (input, output) = (self.input_extent().spatial, self.output_extent().spatial);
        match self.format {
            MemoryFormat::Contiguous => (input, output, 1),
            MemoryFormat::ChannelsLast => (input * self.channels, output * self.channels, self.channels),
        }
    }

    fn check(&self, operation: &'static str, lens: [(&'static str, usize); 2]) -> Result<()> {
        check_len(operation, lens[0].0, lens[0].1, self.input_extent().len()?)?;
        check_len(operation, lens[1].0, lens[1].1, self.output_extent().len()?)
    }

    /// Visits every window element inside the input, as runs along output rows; taps in row-major order.
    #[inline(always)]
    fn each_run(&self, mut visit: impl FnMut(Run)) {
        let (h, w) = (&self.height, &self.width);
        for oh in 0..h.output() {
            for r in 0..h.kernel {
                let Some(ih) = h.input_index(oh, r) else { continue };
                for s in 0..w.kernel {
                    let (first, end) = w.outputs_inside(s);
                    if first < end {
                        visit(Run {
                            tap: r * w.kernel + s,
                            output: oh * w.output() + first,
                            input: ih * w.input + first * w.stride + s * w.dilation - w.pad_before,
                            len: end - first,
                        });
                    }
                }
            }
        }
    }

    /// The first window element of each output pixel that lies inside the input; 0 for a window of padding only.
    fn first_taps<I: WindowIndex>(&self) -> Vec<I> {
        let first = |axis: &ConvAxis| -> Vec<Option<usize>> {
            let inside = |o: usize| (0..axis.kernel).find(|&k| axis.input_index(o, k).is_some());
            (0..axis.output()).map(inside).collect()
        };
        let (rows, columns) = (first(&self.height), first(&self.width));
        let tap = |r: Option<usize>, s: Option<usize>| r.zip(s).map_or(0, |(r, s)| r * self.width.kernel + s);
        rows.iter().flat_map(|&r| columns.iter().map(move |&s| I::store(tap(r, s)))).collect()
    }

    /// One over the divisor of each average, by output pixel.
    fn shares<T: Element>(&self, count_padding: bool) -> Vec<T> {
        let extent = |axis: &ConvAxis, padding: usize, o: usize| {
            let start = (o * axis.stride) as isize - padding as isize;
            let end = start + axis.kernel as isize;
            // Padding counts up to the nominal one, not what ceil_mode adds.
            let (low, high) = match count_padding {
                true => (start, end.min((axis.input + padding) as isize)),
                false => (start.max(0), end.min(axis.input as isize)),
            };
            (high - low) as f64
        };
        let mut shares = Vec::with_capacity(self.output_extent().spatial);
        for oh in 0..self.height.output() {
            for ow in 0..self.width.output() {
                let count =
                    extent(&self.height, self.padding[0], oh) * extent(&self.width, self.padding[1], ow);
                shares.push(T::of(1.0 / count));
            }
        }
        shares
    }
}

/// No size and no tensor may be larger than this: 2^40, far above any memory, far below overflow.
const LIMIT: usize = 1 << 40;

fn axis(name: &str, axis: &PoolAxis, ceil_mode: bool) -> Result<ConvAxis> {
    let &PoolAxis { input, kernel, stride, padding, dilation } = axis;
    let bad = |reason: String| Err(invalid("pooling", reason));
    if input == 0 || kernel == 0 || stride == 0 || dilation == 0 {
        return bad(format!("a size of the {name} axis is 0: {axis:?}"));
    }
    if padding > kernel / 2 {
        return bad(format!("padding {padding} is more than half of kernel {kernel} along the {name} axis"));
    }
    if [input, kernel, stride, dilation].iter().any(|&size| size > LIMIT)
        || (kernel - 1).checked_mul(dilation).is_none_or(|span| span > LIMIT)
    {
        return bad(format!("the {name} axis is too large: {axis:?}"));
    }
    let mut result = ConvAxis { input, kernel, stride, pad_before: padding, pad_after: padding, dilation };
    let span = result.kernel_span();
    if span > input + 2 * padding {
        return bad(format!(
            "the window is larger than the padded input along the {name} axis: kernel {kernel} with dilation \
             {dilation} spans {span}, input {input} with padding {padding} on both sides has {}",
            input + 2 * padding
        ));
    }
    if ceil_mode {
        let mut outputs = (input + 2 * padding - span).div_ceil(stride) + 1;
        if (outputs - 1) * stride >= input + padding {
            outputs -= 1;
        }
        let read = (outputs - 1) * stride + span;
        result.pad_after = read.saturating_sub(padding + input);
    }
    Ok(result)
}

/// An integer that stores which element of its window was the largest.
pub trait WindowIndex: Copy + PartialEq + Send + Sync {
    /// `index` as this type; it fits, as [`max_pool`] has checked.
    fn store(index: usize) -> Self;
    /// The index again.
    fn load(self) -> usize;
    /// How many different indices fit.
    const COUNT: usize;
}

macro_rules! window_index {
    ($($type:ty),*) => {$(
        impl WindowIndex for $type {
            const COUNT: usize = <$type>::MAX as usize + 1;

            #[inline(always)]
            fn store(index: usize) -> $type {
                index as $type
            }

            #[inline(always)]
            fn load(self) -> usize {
                self as usize
            }
        }
    )*};
}
window_index!(u8, u16);

/// The largest value of each window, and, where `indices` is given, which window element it was (row-major).
///
/// The first of equal values wins and NaN wins over every number, as in PyTorch.
///
/// # Errors
/// If a length is not the problem's, or a window has more elements than the index type counts.
pub fn max_pool<T: Element, I: WindowIndex>(
    cpu: &Cpu,
    problem: &PoolProblem,
    x: &[T],
    y: &mut [T],
    indices: Option<&mut [I]>,
) -> Result<()> {
    problem.check("max pooling", [("x", x.len()), ("y", y.len())])?;
    check_index::<I>("max pooling", problem)?;
    let (input, output, lanes) = problem.task();
    let stride = problem.width.stride;
    match indices {
        Some(indices) => {
            check_len("max pooling", "the indices", indices.len(), y.len())?;
            let first_taps = problem.first_taps::<I>();
            let items = x.chunks(input).zip(y.chunks_mut(output)).zip(indices.chunks_mut(output));
            cpu.for_each(x.len(), items, |((x, y), indices)| {
                y.fill(T::neg_infinity());
                for (indices, &tap) in indices.chunks_mut(lanes).zip(&first_taps) {
                    indices.fill(tap);
                }
                problem.each_run(|run| {
                    let (x, range) = (&x[run.input * lanes..], run.outputs(lanes));
                    let (y, indices) = (&mut y[range.clone()], &mut indices[range]);
                    max_with_index(cpu, stride, lanes, I::store(run.tap), x, y, indices);
                });
            });
        }
        None => cpu.for_each(x.len(), x.chunks(input).zip(y.chunks_mut(output)), |(x, y)| {
            y.fill(T::neg_infinity());
            problem.each_run(|run| {
                max_only(cpu, stride, lanes, &x[run.input * lanes..], &mut y[run.outputs(lanes)]);
            });
        }),
    }
    Ok(())
}

fn check_index<I: WindowIndex>(operation: &'static str, problem: &PoolProblem) -> Result<()> {
    if problem.window_len() > I::COUNT {
        let reason = format!("a window of {} elements needs a wider index type", problem.window_len());
        return Err(invalid(operation, reason));
    }
    Ok(())
}

/// dx: each window's dy goes to the element that was largest.
///
/// # Errors
/// As [`max_pool`].
pub fn max_pool_backward<T: Element, I: WindowIndex>(
    cpu: &Cpu,
    problem: &PoolProblem,
    dy: &[T],
    indices: &[I],
    dx: &mut [T],
) -> Result<()> {
    problem.check("max pooling backward", [("dx", dx.len()), ("dy", dy.len())])?;
    check_len("max pooling backward", "the indices", indices.len(), dy.len())?;
    check_index::<I>("max pooling backward", problem)?;
    let (input, output, lanes) = problem.task();
    let (work, stride) = (dx.len(), problem.width.stride);
    let items = dx.chunks_mut(input).zip(dy.chunks(output)).zip(indices.chunks(output));
    cpu.for_each(work, items, |((dx, dy), indices)| {
        dx.fill(T::zero());
        problem.each_run(|run| {
            let range = run.outputs(lanes);
            let (dy, indices) = (&dy[range.clone()], &indices[range]);
            add_where_taken(cpu, stride, lanes, I::store(run.tap), dy, indices, &mut dx[run.input * lanes..]);
        });
    });
    Ok(())
}

/// Output pixels `output..output + len` read, through window element `tap`, the input pixels from `input` on, a stride
/// apart.
struct Run {
    tap: usize,
    output: usize,
    input: usize,
    len: usize,
}

impl Run {
    fn outputs(&self, lanes: usize) -> std::ops::Range<usize> {
        self.output * lanes..(self.output + self.len) * lanes
    }
}

/// Runs `visit(place in a run of outputs, place in the input)` for `len` elements; the usual strides as constants, so
/// that the loops vectorise.
#[inline(always)]
fn strided(stride: usize, lanes: usize, len: usize, mut visit: impl FnMut(usize, usize)) {
    match (lanes, stride) {
        (1, 1) => (0..len).for_each(|place| visit(place, place)),
        (1, 2) => (0..len).for_each(|place| visit(place, 2 * place)),
        (1, _) => (0..len).for_each(|place| visit(place, stride * place)),
        _ => {
            for pixel in 0..len / lanes {
                (0..lanes).for_each(|lane| visit(pixel * lanes + lane, pixel * stride * lanes + lane));
            }
        }
    }
}

multiversion! {
    fn max_only<T: Element>(stride: usize, lanes: usize, x: &[T], y: &mut [T]) {
        let x = &x[..(y.len() / lanes - 1) * stride * lanes + lanes];
        strided(stride, lanes, y.len(), |to, from| {
            let value = x[from];
            y[to] = if value > y[to] || value.is_nan() { value } else { y[to] };
        });
    }

    fn max_with_index<T: Element, I: WindowIndex>(
        stride: usize, lanes: usize, tap: I, x: &[T], y: &mut [T], indices: &mut [I],
    ) {
        let x = &x[..(y.len() / lanes - 1) * stride * lanes + lanes];
        let indices = &mut indices[..y.len()];
        strided(stride, lanes, y.len(), |to, from| {
            let value = x[from];
            let larger = value > y[to] || value.is_nan();
            y[to] = if larger { value } else { y[to] };
            indices[to] = if larger { tap } else { indices[to] };
        });
    }

    fn add_where_taken<T: Element, I: WindowIndex>(
        stride: usize, lanes: usize, tap: I, dy: &[T], indices: &[I], dx: &mut [T],
    ) {
        let dx = &mut dx[..(dy.len() / lanes - 1) * stride * lanes + lanes];
        let indices = &indices[..dy.len()];
        strided(stride, lanes, dy.len(), |to, from| {
            dx[from] += if indices[to] == tap { dy[to] } else { T::zero() };
        });
    }

    fn add_run<T: Element>(stride: usize, lanes: usize, x: &[T], y: &mut [T]) {
        let x = &x[..(y.len() / lanes - 1) * stride * lanes + lanes];
        strided(stride, lanes, y.len(), |to, from| y[to] += x[from]);
    }

    fn spread_run<T: Element>(stride: usize, lanes: usize, dy: &[T], shares: &[T], dx: &mut [T]) {
        let dx = &mut dx[..(dy.len() / lanes - 1) * stride * lanes + lanes];
        strided(stride, lanes, dy.len(), |to, from| dx[from] += dy[to] * shares[to / lanes]);
    }
}

/// The mean of each window; padding counts as zeros in the divisor if `count_padding`.
///
/// # Errors
/// If a length is not the problem's, or the problem has dilation.
pub fn average_pool<T: Element>(
    cpu: &Cpu,
    problem: &PoolProblem,
    count_padding: bool,
    x: &[T],
    y: &mut [T],
) -> Result<()> {
    problem.check("average pooling", [("x", x.len()), ("y", y.len())])?;
    no_dilation(problem)?;
    let shares = problem.shares::<T>(count_padding);
    let (input, output, lanes) = problem.task();
    let stride = problem.width.stride;
    cpu.for_each(x.len(), x.chunks(input).zip(y.chunks_mut(output)), |(x, y)| {
        y.fill(T::zero());
        problem.each_run(|run| {
            add_run(cpu, stride, lanes, &x[run.input * lanes..], &mut y[run.outputs(lanes)]);
        });
        for (y, &share) in y.chunks_mut(lanes).zip(&shares) {
            y.iter_mut().for_each(|y| *y *= share);
        }
    });
    Ok(())
}

/// dx of [`average_pool`]: each window's dy is spread evenly.
///
/// # Errors
/// As [`average_pool`].
pub fn average_pool_backward<T: Element>(
    cpu: &Cpu,
    problem: &PoolProblem,
    count_padding: bool,
    dy: &[T],
    dx: &mut [T],
) -> Result<()> {
    problem.check("average pooling backward", [("dx", dx.len()), ("dy", dy.len())])?;
    no_dilation(problem)?;
    let shares = problem.shares::<T>(count_padding);
    let (input, output, lanes) = problem.task();
    let stride = problem.width.stride;
    cpu.for_each(dx.len(), dx.chunks_mut(input).zip(dy.chunks(output)), |(dx, dy)| {
        dx.fill(T::zero());
        problem.each_run(|run| {
            let (dy, shares) = (&dy[run.outputs(lanes)], &shares[run.output..run.output + run.len]);
            spread_run(cpu, stride, lanes, dy, shares, &mut dx[run.input * lanes..]);
        });
    });
    Ok(())
}

fn no_dilation(problem: &PoolProblem) -> Result<()> {
    if problem.height.dilation != 1 || problem.width.dilation != 1 {
        return Err(invalid("average pooling", "dilation is not defined for averages"));
    }
    Ok(())
}
