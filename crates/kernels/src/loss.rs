//! Log-softmax over channels and the negative log-likelihood, each with its backward pass.

use crate::class_loss::{ClassLoss, class_loss, class_loss_backward};
use crate::cpu::multiversion;
use crate::error::check_len;
use crate::memory_format::Extent;
use crate::profile::span;
use crate::transpose::transpose;
use crate::{Cpu, Element, Result};

/// y = x - log(sum over channels of exp(x)), for each position; stable for large values.
///
/// # Errors
/// If a length is not the extent's.
pub fn log_softmax<T: Element>(cpu: &Cpu, extent: &Extent, x: &[T], y: &mut [T]) -> Result<()> {
    span!("log_softmax", x, y);
    let len = extent.len()?;
    check_len("log_softmax", "x", x.len(), len)?;
    check_len("log_softmax", "y", y.len(), len)?;
    if len == 0 {
        return Ok(());
    }
    let slabs = Slabs::of(extent);
    cpu.for_each(4 * len, x.chunks(slabs.task).zip(y.chunks_mut(slabs.task)), |(x, y)| {
        let (mut scratch, mut turned) = (slabs.scratch(), slabs.turned::<T, 2>());
        for (x, y) in x.chunks(slabs.block).zip(y.chunks_mut(slabs.block)) {
            slabs.with_runs(cpu, [x], y, &mut turned, |slabs, [x], y| {
                log_softmax_block(cpu, slabs, x, y, &mut scratch)
            });
        }
    });
    Ok(())
}

/// dx = dy - exp(y) * (sum over channels of dy), with `y` the output of [`log_softmax`].
///
/// # Errors
/// If a length is not the extent's.
pub fn log_softmax_backward<T: Element>(
    cpu: &Cpu,
    extent: &Extent,
    y: &[T],
    dy: &[T],
    dx: &mut [T],
) -> Result<()> {
    span!("log_softmax backward", y, dy, dx);
    let len = extent.len()?;
    check_len("log_softmax backward", "y", y.len(), len)?;
    check_len("log_softmax backward", "dy", dy.len(), len)?;
    check_len("log_softmax backward", "dx", dx.len(), len)?;
    if len == 0 {
        return Ok(());
    }
    let slabs = Slabs::of(extent);
    let items = y.chunks(slabs.task).zip(dy.chunks(slabs.task)).zip(dx.chunks_mut(slabs.task));
    cpu.for_each(4 * len, items, |((y, dy), dx)| {
        let (mut scratch, mut turned) = (slabs.scratch(), slabs.turned::<T, 3>());
        let blocks = y.chunks(slabs.block).zip(dy.chunks(slabs.block)).zip(dx.chunks_mut(slabs.block));
        for ((y, dy), dx) in blocks {
            slabs.with_runs(cpu, [y, dy], dx, &mut turned, |slabs, [y, dy], dx| {
                log_softmax_backward_block(cpu, slabs, y, dy, dx, &mut scratch)
            });
        }
    });
    Ok(())
}

/// The approximate number of elements in a task.
const TASK: usize = 1 << 14;
/// The approximate number of elements in a block: first-level caches hold it along with other data.
const BLOCK: usize = 1 << 10;
/// The minimum of positions in a block that is transposed to make positions contiguous.
const RUN: usize = 16;

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

impl Slabs {
    fn of(extent: &Extent) -> Slabs {
        let (_, inner) = extent.around_channels();
        let slab = (extent.channels * inner).max(1);
        let least = if inner == 1 { RUN } else { 1 };
        let block = slab * BLOCK.div_ceil(slab).max(least);
        Slabs { channels: extent.channels, inner, block, task: block * TASK.div_ceil(block) }
    }

    /// Buffers for N transposed blocks; empty if blocks are not transposed.
    fn turned<T: Element, const N: usize>(self) -> [Vec<T>; N] {
        std::array::from_fn(|_| vec![T::zero(); if self.inner == 1 { self.block } else { 0 }])
    }

    /// Calls `run` with a block in which the positions of one channel are contiguous. In channels-last, the inputs are
    /// transposed first and the output is transposed back.
    fn with_runs<T: Element, const N: usize, const M: usize>(
        self,
        cpu: &Cpu,
        inputs: [&[T]; N],
        output: &mut [T],
        turned: &mut [Vec<T>; M],
        run: impl FnOnce(Slabs, [&[T]; N], &mut [T]),
    ) {
        if self.inner > 1 {
            return run(self, inputs, output);
        }
        let (len, positions) = (output.len(), output.len() / self.channels.max(1));
        let (to, from) = turned.split_last_mut().expect("there is room for the output");
        for (input, turned) in inputs.iter().zip(&mut *from) {
            transpose(cpu, positions, self.channels, input, &mut turned[..len]);
        }
        let inputs = std::array::from_fn(|index| &from[index][..len]);
        run(Slabs { inner: positions, ..self }, inputs, &mut to[..len]);
        transpose(cpu, self.channels, positions, &to[..len], output);
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
    fn log_softmax_block<T: Element>(slabs: Slabs, x: &[T], y: &mut [T], scratch: &mut Scratch<T>) {
        let Slabs { channels, inner, .. } = slabs;
        let Scratch { largest, sums, values } = scratch;
        let (values, slab) = (&mut values[..x.len()], channels * inner);
        // Subtract the largest value, so that no exponential overflows.
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
        for (value, &y) in values.iter_mut().zip(&*y) {
            *value = y.vector_exp();
        }
        sum_channels(slabs, values, sums);
        for (y, sums) in y.chunks_mut(slab).zip(sums.chunks_mut(inner)) {
            for sum in sums.iter_mut() {
                *sum = sum.ln();
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

/// The sum of -log_probabilities at the targets, and the number of targets that count.
///
/// `targets` holds one class per position, N x (spatial) in that order; targets equal to `ignore` do not count.
///
/// # Errors
/// If a length is not the extent's, or a target is not a class.
pub fn nll<T: Element>(
    extent: &Extent,
    log_probabilities: &[T],
    targets: &[i64],
    ignore: Option<i64>,
) -> Result<(f64, usize)> {
    let options = ClassLoss { ignore, ..ClassLoss::default() };
    let (total, weight) = class_loss(extent, log_probabilities, targets, &options)?;
    // Each weighs 1, and there are far fewer than 2^53.
    Ok((total, weight as usize))
}

/// dx = -factor at the place of each target that counts, 0 elsewhere.
///
/// # Errors
/// As [`nll`].
pub fn nll_backward<T: Element>(
    extent: &Extent,
    targets: &[i64],
    ignore: Option<i64>,
    factor: f64,
    dx: &mut [T],
) -> Result<()> {
    class_loss_backward(extent, targets, &ClassLoss { ignore, ..ClassLoss::default() }, factor, dx)
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
        log_softmax(&Cpu::single(), &extent, &x, &mut y).unwrap();
        assert!((y[0] + 3f32.ln()).abs() <= 1e-6);
        assert_eq!(&y[3..], &[-2e4, -1e4, 0.0]);
    }

    #[test]
    fn positions_and_formats_agree() {
        let x: Vec<f64> = (0..24).map(|i| f64::from(i * 7 % 11) / 3.0).collect();
        let extent = Extent { batch: 2, channels: 3, spatial: 4, format: MemoryFormat::Contiguous };
        let last = Extent { format: MemoryFormat::ChannelsLast, ..extent };
        let cpu = Cpu::single();
        let (mut x_last, mut y, mut y_last) = (vec![0.0; 24], vec![f64::NAN; 24], vec![f64::NAN; 24]);
        crate::memory_format::convert(&cpu, &extent, &x, &mut x_last).unwrap();
        log_softmax(&cpu, &extent, &x, &mut y).unwrap();
        log_softmax(&cpu, &last, &x_last, &mut y_last).unwrap();
        let targets = [0, 1, 2, 1, 255, 2, 0, 0];
        assert_eq!(
            nll(&extent, &y, &targets, Some(255)).unwrap(),
            nll(&last, &y_last, &targets, Some(255)).unwrap()
        );
        let error = nll(&extent, &y, &targets, None).unwrap_err().to_string();
        assert!(error.contains("target 255 at index 4"), "{error}");
    }
}
