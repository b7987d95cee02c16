//! Batch norm over rows that hold every channel once: channels-last memory, or N x C.

use super::PairSums;
use super::coefficients::{Channel, Coefficients};
use crate::buffer::Buffer;
use crate::cpu::multiversion;
use crate::{Cpu, Element, scratch, stream};

/// Elements of a wide row, at least: neighbouring rows of few channels are taken as one.
const WIDE: usize = 64;
/// Tasks that a tensor is cut into: depends on nothing else, so that sums do not change with the number of threads.
const BLOCKS: usize = 64;
/// Elements of a task, at least.
const SMALLEST: usize = 1 << 13;
/// Elements that are computed in cache before they are streamed.
const STAGED: usize = 512;

/// A tensor of rows.
pub(super) struct Rows {
    channels: usize,
    /// Elements of a wide row.
    width: usize,
    /// Elements of a task.
    block: usize,
}

impl Rows {
    pub(super) fn new(channels: usize, rows: usize) -> Rows {
        let width = channels * WIDE.div_ceil(channels.max(1));
        let wide_rows = (rows * channels).div_ceil(width.max(1));
        let per_block = wide_rows.div_ceil(BLOCKS).max(SMALLEST.div_ceil(width.max(1)));
        Rows { channels, width, block: (per_block * width).max(1) }
    }

    /// How often a wide row holds each channel.
    fn times(&self) -> usize {
        self.width / self.channels.max(1)
    }

    /// Sums of x - pilot and of its square.
    pub(super) fn sums<T: Element>(&self, cpu: &Cpu, x: &[T], pilots: &[f64]) -> PairSums {
        let pilots = Buffer::repeat(pilots, self.times());
        self.reduce(cpu, x, |_, x, [a, b]| sum_rows(cpu, x, &pilots, a, b))
    }

    /// Sums of g and of g (x - mean).
    pub(super) fn gradient_sums<T: Element>(
        &self,
        cpu: &Cpu,
        (x, dy): (&[T], &[T]),
        means: &[f64],
        c: Coefficients<T>,
    ) -> PairSums {
        let (means, c) = (Buffer::repeat(means, self.times()), c.repeated(self.times()));
        self.reduce(cpu, x, |start, x, [a, b]| {
            sum_gradient_rows(cpu, x, &dy[start..][..x.len()], &means, &c, a, b);
        })
    }

    /// Sums that `task` takes of each block and of what starts at the same place in others, added in order.
    fn reduce<T: Element>(
        &self,
        cpu: &Cpu,
        x: &[T],
        task: impl Fn(usize, &[T], [&mut [f64]; 2]) + Send + Sync,
    ) -> PairSums {
        let (blocks, part) = (x.len().div_ceil(self.block), 2 * self.width);
        scratch::with(blocks * part, |parts| {
            let items = parts.chunks_mut(part.max(1)).zip(x.chunks(self.block)).enumerate();
            cpu.for_each(x.len(), items, |(index, (part, x))| {
                part.fill(0.0);
                task(index * self.block, x, part.split_at_mut(self.width).into());
            });
            let mut total = PairSums::zeros(self.width);
            parts
                .chunks(part.max(1))
                .map(|part| part.split_at(self.width))
                .for_each(|(a, b)| total.add(a, b));
            total.folded(self.channels)
        })
    }

    pub(super) fn normalize<T: Element>(&self, cpu: &Cpu, x: Option<&[T]>, c: Coefficients<T>, y: &mut [T]) {
        let c = c.repeated(self.times());
        self.each(cpu, x.is_some(), y, |start, y| {
            normalize_rows(cpu, x.map(|x| &x[start..][..y.len()]), y, &c);
        });
    }

    pub(super) fn gradient<T: Element>(
        &self,
        cpu: &Cpu,
        (x, dy): (Option<&[T]>, &[T]),
        c: Coefficients<T>,
        dx: &mut [T],
    ) {
        let c = c.repeated(self.times());
        self.each(cpu, x.is_some(), dx, |start, dx| {
            gradient_rows(cpu, x.map(|x| &x[start..][..dx.len()]), &dy[start..][..dx.len()], dx, &c);
        });
    }

    /// Runs `task` on the start and the elements of every block of `out`; where `overwrites` says that it does not read
    /// them, large outputs are streamed.
    ///
    /// From the end to the start: what was read last for the sums is what caches still hold.
    fn each<T: Element>(
        &self,
        cpu: &Cpu,
        overwrites: bool,
        out: &mut [T],
        task: impl Fn(usize, &mut [T]) + Send + Sync,
    ) {
        let streams = overwrites && stream::pays_to_copy(out);
        cpu.for_each(out.len(), out.chunks_mut(self.block).enumerate().rev(), |(index, out)| {
            let start = index * self.block;
            if !streams {
                return task(start, out);
            }
            let piece = self.width * (STAGED / self.width).max(1);
            let mut staged = Buffer::filled(piece.min(out.len()), T::zero());
            for (index, out) in out.chunks_mut(piece).enumerate() {
                let staged = &mut staged[..out.len()];
                task(start + index * piece, staged);
                stream::copy(cpu, staged, out);
            }
            stream::fence();
        });
    }
}

/// Wide rows up to this lie so near to each other that hardware foresees what is read when several are read in turn.
const NARROW: usize = 128;
/// Channels of a wide row between two looks ahead.
const STRIP: usize = 64;

/// Fetches what is read after the next of several rows that are read in turn, from one channel of each on: in the order
/// of memory, where hardware does not.
#[inline(always)]
fn fetch_ahead<T, const ROWS: usize>(rows: &[T], start: usize) {
    if rows.len() > ROWS * NARROW {
        let there = rows.as_ptr().wrapping_add(2 * rows.len() + ROWS * start);
        stream::prefetch_to_l2(there.cast(), ROWS * STRIP * size_of::<T>() / size_of::<f32>());
    }
}

// Loops over indices, with every slice cut to the same length before, are what the compiler vectorises here.
multiversion! {
    #[allow(clippy::needless_range_loop)]
    fn sum_rows<T: Element>(rows: &[T], pilots: &[f64], sums: &mut [f64], squares: &mut [f64]) {
        let width = pilots.len();
        let (sums, squares) = (&mut sums[..width], &mut squares[..width]);
        // Four rows between a load and a store of the sums.
        let mut quads = rows.chunks_exact(4 * width);
        for quad in &mut quads {
            let (a, rest) = quad.split_at(width);
            let (b, rest) = rest.split_at(width);
            let (c, d) = rest.split_at(width);
            let (a, b, c, d) = (&a[..width], &b[..width], &c[..width], &d[..width]);
            for start in (0..width).step_by(STRIP) {
                fetch_ahead::<T, 4>(quad, start);
                for i in start..(start + STRIP).min(width) {
                    let pilot = pilots[i];
                    let (a, b) = (a[i].f64() - pilot, b[i].f64() - pilot);
                    let (c, d) = (c[i].f64() - pilot, d[i].f64() - pilot);
                    sums[i] += (a + b) + (c + d);
                    squares[i] += (a * a + b * b) + (c * c + d * d);
                }
            }
        }
        for row in quads.remainder().chunks(width) {
            for (((sum, square), &pilot), x) in sums.iter_mut().zip(squares.iter_mut()).zip(pilots).zip(row) {
                let d = x.f64() - pilot;
                *sum += d;
                *square += d * d;
            }
        }
    }

    #[allow(clippy::needless_range_loop)]
    fn sum_gradient_rows<T: Element>(
        x: &[T], dy: &[T], means: &[f64], c: &Coefficients<T>, sums: &mut [f64], centered: &mut [f64],
    ) {
        let width = means.len();
        let (sums, centered) = (&mut sums[..width], &mut centered[..width]);
        let (mean, scale, shift) = (&c.mean[..width], &c.scale[..width], &c.shift[..width]);
        let relu = c.relu;
        let zero = T::zero();
        let channel = |i: usize| Channel {
            mean: mean[i], scale: scale[i], shift: shift[i], mean_g: zero, slope: zero, offset: zero,
        };
        let in_pairs = x.len() / (2 * width) * (2 * width);
        let pairs = x[..in_pairs].chunks_exact(2 * width).zip(dy[..in_pairs].chunks_exact(2 * width));
        for (x, dy) in pairs {
            let ((x0, x1), (dy0, dy1)) = (x.split_at(width), dy.split_at(width));
            let (x0, x1, dy0, dy1) = (&x0[..width], &x1[..width], &dy0[..width], &dy1[..width]);
            for start in (0..width).step_by(STRIP) {
                fetch_ahead::<T, 2>(x, start);
                fetch_ahead::<T, 2>(dy, start);
                for i in start..(start + STRIP).min(width) {
                    let c = channel(i);
                    let g0 = c.behind_activation(x0[i], dy0[i], relu).f64();
                    let g1 = c.behind_activation(x1[i], dy1[i], relu).f64();
                    sums[i] += g0 + g1;
                    centered[i] += g0 * (x0[i].f64() - means[i]) + g1 * (x1[i].f64() - means[i]);
                }
            }
        }
        for (x, dy) in x[in_pairs..].chunks(width).zip(dy[in_pairs..].chunks(width)) {
            let len = x.len();
            let (x, dy) = (&x[..len], &dy[..len]);
            let (means, sums, centered) = (&means[..len], &mut sums[..len], &mut centered[..len]);
            for i in 0..len {
                let g = channel(i).behind_activation(x[i], dy[i], relu).f64();
                sums[i] += g;
                centered[i] += g * (x[i].f64() - means[i]);
            }
        }
    }

    #[allow(clippy::needless_range_loop)]
    fn normalize_rows<T: Element>(x: Option<&[T]>, y: &mut [T], c: &Coefficients<T>) {
        let all = c.mean.len();
        let (relu, zero) = (c.relu, T::zero());
        for (row, y) in y.chunks_mut(all).enumerate() {
            let width = y.len();
            let (mean, scale, shift) = (&c.mean[..width], &c.scale[..width], &c.shift[..width]);
            let channel = |i: usize| Channel {
                mean: mean[i], scale: scale[i], shift: shift[i], mean_g: zero, slope: zero, offset: zero,
            };
            match x {
                Some(x) => {
                    let x = &x[row * all..][..width];
                    for i in 0..width {
                        y[i] = channel(i).forward(x[i], relu);
                    }
                }
                None => for i in 0..width {
                    y[i] = channel(i).forward(y[i], relu);
                },
            }
        }
    }

    #[allow(clippy::needless_range_loop)]
    fn gradient_rows<T: Element>(x: Option<&[T]>, dy: &[T], dx: &mut [T], c: &Coefficients<T>) {
        let all = c.mean.len();
        let (relu, constant) = (c.relu, c.constant);
        for (row, (dx, dy)) in dx.chunks_mut(all).zip(dy.chunks(all)).enumerate() {
            let width = dx.len();
            let dy = &dy[..width];
            let (mean, scale, shift) = (&c.mean[..width], &c.scale[..width], &c.shift[..width]);
            let (mean_g, slope, offset) = (&c.mean_g[..width], &c.slope[..width], &c.offset[..width]);
            let channel = |i: usize| Channel {
                mean: mean[i], scale: scale[i], shift: shift[i], mean_g: mean_g[i], slope: slope[i], offset: offset[i],
            };
            match x {
                Some(x) => {
                    let x = &x[row * all..][..width];
                    for i in 0..width {
                        dx[i] = channel(i).backward(x[i], dy[i], relu, constant);
                    }
                }
                None => for i in 0..width {
                    dx[i] = channel(i).backward(dx[i], dy[i], relu, constant);
                },
            }
        }
    }
}
