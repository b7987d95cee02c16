//! Softmax and log-softmax over the channels, or what [`Extent::along`] puts in their place; each with its backward pass.

use crate::channels::{LANES, lane_sum};
use crate::element::PieceOf;
use crate::isa::multiversion;
use crate::memory_format::Extent;
use crate::operand::kernels;
use crate::profile::span;
use crate::transpose::transpose;
use crate::{Cpu, Element, Result, Stored};

kernels! {
    /// y = exp(x) / (sum over channels of exp(x)), for each position; stable for large values.
    ///
    /// # Errors
    /// If a length is not the extent's.
    pub fn softmax<S: Stored>(cpu: &Cpu, extent: &Extent; x: &[S]; y: &mut [S]) -> Result<()> {
        span!("softmax", x, y);
        extent.check("softmax", &[("x", x.len()), ("y", y.len())])?;
        if each_row(cpu, extent, [x], y, |width, [x], y| softmax_rows(cpu, width, x, y)) {
            return Ok(());
        }
        each_block(cpu, extent, [x], y, |slabs, [x], y, scratch| softmax_block(cpu, slabs, x, y, scratch));
        Ok(())
    }

    /// dx = y * (dy - (sum over channels of y * dy)), with `y` the output of [`softmax`].
    ///
    /// # Errors
    /// If a length is not the extent's.
    pub fn softmax_backward<S: Stored>(cpu: &Cpu, extent: &Extent; y: &[S], dy: &[S]; dx: &mut [S]) -> Result<()> {
        span!("softmax backward", y, dy, dx);
        extent.check("softmax backward", &[("y", y.len()), ("dy", dy.len()), ("dx", dx.len())])?;
        if each_row(cpu, extent, [y, dy], dx, |width, [y, dy], dx| {
            softmax_backward_rows(cpu, width, y, dy, dx)
        }) {
            return Ok(());
        }
        each_block(cpu, extent, [y, dy], dx, |slabs, [y, dy], dx, scratch| {
            softmax_backward_block(cpu, slabs, y, dy, dx, scratch)
        });
        Ok(())
    }

    /// y = x - log(sum over channels of exp(x)), for each position; stable for large values.
    ///
    /// # Errors
    /// If a length is not the extent's.
    pub fn log_softmax<S: Stored>(cpu: &Cpu, extent: &Extent; x: &[S]; y: &mut [S]) -> Result<()> {
        span!("log_softmax", x, y);
        extent.check("log_softmax", &[("x", x.len()), ("y", y.len())])?;
        if each_row(cpu, extent, [x], y, |width, [x], y| log_softmax_rows(cpu, width, x, y)) {
            return Ok(());
        }
        // Numbers of 16 bits show nothing of a logarithm's last bits.
        let exact = S::DTYPE.computes();
        each_block(cpu, extent, [x], y, |slabs, [x], y, scratch| {
            log_softmax_block(cpu, slabs, x, y, scratch, exact);
        });
        Ok(())
    }

    /// dx = dy - exp(y) * (sum over channels of dy), with `y` the output of [`log_softmax`].
    ///
    /// # Errors
    /// If a length is not the extent's.
    pub fn log_softmax_backward<S: Stored>(cpu: &Cpu, extent: &Extent; y: &[S], dy: &[S]; dx: &mut [S]) -> Result<()> {
        span!("log_softmax backward", y, dy, dx);
        extent.check("log_softmax backward", &[("y", y.len()), ("dy", dy.len()), ("dx", dx.len())])?;
        if each_row(cpu, extent, [y, dy], dx, |width, [y, dy], dx| {
            log_softmax_backward_rows(cpu, width, y, dy, dx);
        }) {
            return Ok(());
        }
        each_block(cpu, extent, [y, dy], dx, |slabs, [y, dy], dx, scratch| {
            log_softmax_backward_block(cpu, slabs, y, dy, dx, scratch)
        });
        Ok(())
    }
}

/// The approximate number of elements in a task.
const TASK: usize = 1 << 14;
/// The approximate number of elements in a block: first-level caches hold it along with other data.
const BLOCK: usize = 1 << 10;
/// A transposed block has a multiple of this number of positions, so that loops over them take whole vectors.
const RUN: usize = 64;
/// Rows of at least this many channels that lie together are taken as they are; blocks of shorter ones are transposed.
const ROW: usize = 32;
/// The approximate number of elements in a piece of a slab that is too large for a task, and the least of its positions.
const PIECE: usize = 1 << 12;
const PIECE_POSITIONS: usize = 32;

/// Runs `run` on all rows of channels, if these lie together and are long; else returns false.
fn each_row<S: Stored, const N: usize>(
    cpu: &Cpu,
    extent: &Extent,
    inputs: [&[S]; N],
    output: &mut [S],
    run: impl Fn(usize, [&[S::Compute]; N], &mut [S::Compute]) + Sync + Send,
) -> bool {
    let width = extent.channels;
    if width < ROW || extent.around_channels().1 != 1 {
        return false;
    }
    let task = width * TASK.div_ceil(width);
    cpu.for_each(4 * output.len(), output.chunks_mut(task).enumerate(), |(index, output)| {
        let elements = index * task..index * task + output.len();
        let inputs = inputs.map(|input| &input[elements.clone()]);
        S::Compute::write((cpu, width), inputs, output, |_, inputs, output| run(width, inputs, output));
    });
    true
}

/// How to loop over a tensor: a slab holds every channel of some positions once, channel by channel.
#[derive(Clone, Copy)]
struct Slabs {
    channels: usize,
    /// Positions in a slab, which are contiguous within one channel. 1 in channels-last.
    inner: usize,
    /// Elements in a block, which is whole slabs.
    block: usize,
    /// Elements in a task, which is whole blocks.
    task: usize,
}

/// Runs `run` on all blocks of a tensor; in each, the positions of one channel are contiguous.
fn each_block<S: Stored, const N: usize>(
    cpu: &Cpu,
    extent: &Extent,
    inputs: [&[S]; N],
    output: &mut [S],
    run: impl Fn(Slabs, [&[S::Compute]; N], &mut [S::Compute], &mut Scratch<S::Compute>) + Sync + Send,
) {
    if output.is_empty() {
        return;
    }
    let slabs = Slabs::of(extent);
    let run = |slabs, inputs: [&[S]; N], output: &mut [S], scratch: &mut Scratch<S::Compute>| {
        // A block is one unit.
        let on = (cpu, output.len().max(1));
        S::Compute::write(on, inputs, output, |_, inputs, output| run(slabs, inputs, output, scratch));
    };
    let work = 4 * output.len();
    let width = (PIECE / slabs.channels).max(PIECE_POSITIONS);
    if slabs.channels * slabs.inner > TASK && slabs.inner > width {
        let pieces = pieces(&slabs, width, output);
        return cpu.for_each(work, pieces.into_iter(), |piece| piece.run(&slabs, inputs, &run));
    }
    let task = slabs.task;
    cpu.for_each(work, output.chunks_mut(task).enumerate(), |(index, output)| {
        let elements = index * task..index * task + output.len();
        let inputs = inputs.map(|input| &input[elements.clone()]);
        let mut scratch = slabs.scratch();
        let mut turned: [Vec<S>; N] = std::array::from_fn(|_| slabs.turned());
        let mut turned_output = slabs.turned();
        for (index, output) in output.chunks_mut(slabs.block).enumerate() {
            let elements = index * slabs.block..index * slabs.block + output.len();
            let inputs = inputs.map(|input| &input[elements.clone()]);
            if slabs.inner > 1 {
                run(slabs, inputs, output, &mut scratch);
                continue;
            }
            // In channels-last, the inputs are transposed first and the output is transposed back.
            let (len, positions) = (output.len(), output.len() / slabs.channels);
            for (input, turned) in inputs.iter().zip(&mut turned) {
                transpose(cpu, positions, slabs.channels, input, &mut turned[..len]);
            }
            let inputs = std::array::from_fn(|index| &turned[index][..len]);
            run(Slabs { inner: positions, ..slabs }, inputs, &mut turned_output[..len], &mut scratch);
            transpose(cpu, slabs.channels, positions, &turned_output[..len], output);
        }
    });
}

/// Some positions of a slab that is large: every channel's elements at them.
struct Piece<'a, T> {
    /// Where its first element lies in the tensor.
    first: usize,
    /// The piece's part of each channel's row of the output.
    rows: Vec<&'a mut [T]>,
}

/// Cuts slabs into pieces of at most `width` positions: a batch of one large image would else be a single task.
fn pieces<'a, T>(slabs: &Slabs, width: usize, output: &'a mut [T]) -> Vec<Piece<'a, T>> {
    let slab_len = slabs.channels * slabs.inner;
    let mut pieces = Vec::new();
    for (index, slab) in output.chunks_mut(slab_len).enumerate() {
        let mut rows: Vec<_> = slab.chunks_mut(slabs.inner).map(|row| row.chunks_mut(width)).collect();
        for start in (0..slabs.inner).step_by(width) {
            let rows = rows.iter_mut().filter_map(Iterator::next).collect();
            pieces.push(Piece { first: index * slab_len + start, rows });
        }
    }
    pieces
}

impl<S: Stored> Piece<'_, S> {
    /// Runs `run` on a copy of the piece's elements, and writes its output to the rows.
    fn run<const N: usize>(
        self,
        slabs: &Slabs,
        inputs: [&[S]; N],
        run: &impl Fn(Slabs, [&[S]; N], &mut [S], &mut Scratch<S::Compute>),
    ) {
        let Slabs { channels, inner: stride, .. } = *slabs;
        let inner = self.rows[0].len();
        let block = channels * inner;
        let slabs = Slabs { channels, inner, block, task: block };
        let copies = inputs.map(|input| {
            let mut copy = Vec::with_capacity(block);
            for channel in 0..channels {
                let start = self.first + channel * stride;
                copy.extend_from_slice(&input[start..start + inner]);
            }
            copy
        });
        let mut output = vec![S::of(0.0); block];
        run(slabs, std::array::from_fn(|index| &copies[index][..]), &mut output, &mut slabs.scratch());
        for (row, output) in self.rows.into_iter().zip(output.chunks(inner)) {
            row.copy_from_slice(output);
        }
    }
}

impl Slabs {
    fn of(extent: &Extent) -> Slabs {
        let (_, inner) = extent.around_channels();
        let slab = (extent.channels * inner).max(1);
        let run = if inner == 1 { RUN } else { 1 };
        let block = slab * BLOCK.div_ceil(slab).next_multiple_of(run);
        Slabs { channels: extent.channels, inner, block, task: block * TASK.div_ceil(block) }
    }

    /// A buffer for a transposed block; empty if blocks are not transposed.
    fn turned<S: Stored>(self) -> Vec<S> {
        vec![S::of(0.0); if self.inner == 1 { self.block } else { 0 }]
    }

    fn scratch<T: Element>(self) -> Scratch<T> {
        // The number of positions in a block.
        let positions = self.block / self.channels.max(1);
        Scratch {
            largest: vec![T::zero(); positions],
            sums: vec![0.0; positions],
            values: vec![T::zero(); self.block],
        }
    }
}

/// The memory that a block needs besides its operands.
struct Scratch<T> {
    largest: Vec<T>,
    sums: Vec<f64>,
    values: Vec<T>,
}

multiversion! {
    fn softmax_rows<T: Element>(width: usize, x: &[T], y: &mut [T]) {
        for (x, y) in x.chunks_exact(width).zip(y.chunks_exact_mut(width)) {
            let largest = largest_of(x);
            for (y, &x) in y.iter_mut().zip(x) {
                *y = (x - largest).vector_exp_negative();
            }
            let factor = T::of(1.0 / sum_of(y));
            y.iter_mut().for_each(|y| *y *= factor);
        }
    }

    fn softmax_backward_rows<T: Element>(width: usize, y: &[T], dy: &[T], dx: &mut [T]) {
        let rows = y.chunks_exact(width).zip(dy.chunks_exact(width));
        for ((y, dy), dx) in rows.zip(dx.chunks_exact_mut(width)) {
            for ((dx, &y), &dy) in dx.iter_mut().zip(y).zip(dy) {
                *dx = y * dy;
            }
            let sum = T::of(sum_of(dx));
            for ((dx, &y), &dy) in dx.iter_mut().zip(y).zip(dy) {
                *dx = y * (dy - sum);
            }
        }
    }

    fn log_softmax_rows<T: Element>(width: usize, x: &[T], y: &mut [T]) {
        for (x, y) in x.chunks_exact(width).zip(y.chunks_exact_mut(width)) {
            let largest = largest_of(x);
            for (y, &x) in y.iter_mut().zip(x) {
                *y = (x - largest).vector_exp_negative();
            }
            let log = T::of(sum_of(y).ln());
            for (y, &x) in y.iter_mut().zip(x) {
                *y = x - largest - log;
            }
        }
    }

    fn log_softmax_backward_rows<T: Element>(width: usize, y: &[T], dy: &[T], dx: &mut [T]) {
        let rows = y.chunks_exact(width).zip(dy.chunks_exact(width));
        for ((y, dy), dx) in rows.zip(dx.chunks_exact_mut(width)) {
            let sum = T::of(sum_of(dy));
            for ((dx, &y), &dy) in dx.iter_mut().zip(y).zip(dy) {
                *dx = dy - y.vector_exp_negative() * sum;
            }
        }
    }

    fn softmax_block<T: Element>(slabs: Slabs, x: &[T], y: &mut [T], scratch: &mut Scratch<T>) {
        let Slabs { channels, inner, .. } = slabs;
        let Scratch { largest, sums, .. } = scratch;
        shift(slabs, x, y, largest);
        for y in y.iter_mut() {
            *y = y.vector_exp();
        }
        sum_channels(slabs, y, sums);
        for (y, sums) in y.chunks_mut(channels * inner).zip(sums.chunks_mut(inner)) {
            for sum in sums.iter_mut() {
                *sum = 1.0 / *sum;
            }
            for y in y.chunks_mut(inner) {
                for (y, &factor) in y.iter_mut().zip(&*sums) {
                    *y *= T::of(factor);
                }
            }
        }
    }

    fn softmax_backward_block<T: Element>(
        slabs: Slabs,
        y: &[T],
        dy: &[T],
        dx: &mut [T],
        scratch: &mut Scratch<T>
    ) {
        let Slabs { channels, inner, .. } = slabs;
        let Scratch { sums, values, .. } = scratch;
        let (values, slab) = (&mut values[..y.len()], channels * inner);
        for ((value, &y), &dy) in values.iter_mut().zip(y).zip(dy) {
            *value = y * dy;
        }
        sum_channels(slabs, values, sums);
        let slabs = dx.chunks_mut(slab).zip(dy.chunks(slab)).zip(y.chunks(slab)).zip(sums.chunks(inner));
        for (((dx, dy), y), sums) in slabs {
            for ((dx, dy), y) in dx.chunks_mut(inner).zip(dy.chunks(inner)).zip(y.chunks(inner)) {
                for (((dx, &dy), &y), &sum) in dx.iter_mut().zip(dy).zip(y).zip(sums) {
                    *dx = y * (dy - T::of(sum));
                }
            }
        }
    }

    fn log_softmax_block<T: Element>(
        slabs: Slabs,
        x: &[T],
        y: &mut [T],
        scratch: &mut Scratch<T>,
        exact: bool
    ) {
        let Slabs { channels, inner, .. } = slabs;
        let Scratch { largest, sums, values } = scratch;
        let (values, slab) = (&mut values[..x.len()], channels * inner);
        shift(slabs, x, y, largest);
        for (value, &y) in values.iter_mut().zip(&*y) {
            *value = y.vector_exp();
        }
        sum_channels(slabs, values, sums);
        for (y, sums) in y.chunks_mut(slab).zip(sums.chunks_mut(inner)) {
            match exact {
                true => sums.iter_mut().for_each(|sum| *sum = sum.ln()),
                false => sums.iter_mut().for_each(|sum| *sum = T::of(*sum).vector_ln().f64()),
            }
            for y in y.chunks_mut(inner) {
                for (y, &sum) in y.iter_mut().zip(&*sums) {
                    *y -= T::of(sum);
                }
            }
        }
    }

    fn log_softmax_backward_block<T: Element>(
        slabs: Slabs,
        y: &[T],
        dy: &[T],
        dx: &mut [T],
        scratch: &mut Scratch<T>
    ) {
        let Slabs { channels, inner, .. } = slabs;
        let Scratch { sums, values, .. } = scratch;
        let (values, slab) = (&mut values[..y.len()], channels * inner);
        for (value, &y) in values.iter_mut().zip(y) {
            *value = y.vector_exp();
        }
        sum_channels(slabs, dy, sums);
        let slabs = dx.chunks_mut(slab).zip(dy.chunks(slab)).zip(values.chunks(slab)).zip(sums.chunks(inner));
        for (((dx, dy), values), sums) in slabs {
            for ((dx, dy), values) in dx.chunks_mut(inner).zip(dy.chunks(inner)).zip(values.chunks(inner)) {
                for (((dx, &dy), &value), &sum) in dx.iter_mut().zip(dy).zip(values).zip(sums) {
                    *dx = dy - value * T::of(sum);
                }
            }
        }
    }
}

/// The largest value; NaN if there is one.
#[inline(always)]
fn largest_of<T: Element>(values: &[T]) -> T {
    // NaN is kept: a comparison alone would drop it.
    let larger = |largest: T, x: T| if x > largest || x.is_nan() { x } else { largest };
    let mut lanes = [T::neg_infinity(); 4 * LANES];
    let mut chunks = values.chunks_exact(lanes.len());
    for chunk in &mut chunks {
        for (largest, &x) in lanes.iter_mut().zip(chunk) {
            *largest = larger(*largest, x);
        }
    }
    for (largest, &x) in lanes.iter_mut().zip(chunks.remainder()) {
        *largest = larger(*largest, x);
    }
    lanes.into_iter().fold(T::neg_infinity(), larger)
}

/// The sum of the values, taken as interleaved f64 sums.
#[inline(always)]
fn sum_of<T: Element>(values: &[T]) -> f64 {
    lane_sum(values, |value| value.f64())
}

/// y = x minus the largest value over the channels at each position, so that no exponential overflows.
#[inline(always)]
fn shift<T: Element>(slabs: Slabs, x: &[T], y: &mut [T], largest: &mut [T]) {
    let Slabs { channels, inner, .. } = slabs;
    let slab = channels * inner;
    for ((x, y), largest) in x.chunks(slab).zip(y.chunks_mut(slab)).zip(largest.chunks_mut(inner)) {
        largest.fill(T::neg_infinity());
        for row in x.chunks(inner) {
            for (largest, &x) in largest.iter_mut().zip(row) {
                // NaN is kept: a comparison alone would drop it.
                *largest = if x > *largest || x.is_nan() { x } else { *largest };
            }
        }
        for (x, y) in x.chunks(inner).zip(y.chunks_mut(inner)) {
            for ((y, &x), &largest) in y.iter_mut().zip(x).zip(&*largest) {
                *y = x - largest;
            }
        }
    }
}

/// The sum over the channels at each position.
#[inline(always)]
fn sum_channels<T: Element>(slabs: Slabs, values: &[T], sums: &mut [f64]) {
    let Slabs { channels, inner, .. } = slabs;
    for (values, sums) in values.chunks(channels * inner).zip(sums.chunks_mut(inner)) {
        sums.fill(0.0);
        for row in values.chunks(inner) {
            for (sum, value) in sums.iter_mut().zip(row) {
                *sum += value.f64();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MemoryFormat;

    #[test]
    fn large_values_do_not_overflow() {
        let extent = Extent { batch: 2, channels: 3, spatial: 1, format: MemoryFormat::Contiguous };
        let x = [1e4f32, 1e4, 1e4, -1e4, 0.0, 1e4];
        let mut y = [f32::NAN; 6];
        log_softmax(&Cpu::single(), &extent, (&x).into(), (&mut y).into()).unwrap();
        assert!((y[0] + 3f32.ln()).abs() <= 1e-6);
        assert_eq!(&y[3..], &[-2e4, -1e4, 0.0]);
    }
}
