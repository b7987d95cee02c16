//! Batch norm in channels-last memory or N x C, where each row holds every channel once.

use num_traits::Zero;

use super::coefficients::{Channel, Coefficients, Map};
use super::parts::{Part, Totals, moments, pilot, pilot_places};
use crate::activation::with_activation;
use crate::element::PieceOf;
use crate::isa::multiversion;
use crate::memory::AlignedVec;
use crate::memory_format::Extent;
use crate::pointwise::formulas::Formula;
use crate::stream::{self, Streaming};
use crate::{Cpu, Stored, scratch};

/// The minimum of elements in a wide row: neighbouring rows of few channels are treated as one wide row.
const WIDE: usize = 64;
/// Tasks that a tensor is cut into where nothing is summed.
const BLOCKS: usize = 64;
/// The minimum of elements in a task.
const SMALLEST: usize = 1 << 13;
/// Bytes that are computed into a buffer in cache before they are streamed.
const STAGED: usize = 2048;

/// A tensor of rows.
pub(super) struct Rows {
    channels: usize,
    /// Rows in an image.
    spatial: usize,
    /// Elements in a wide row.
    width: usize,
    /// Elements in a task.
    block: usize,
}

impl Rows {
    pub(super) fn new(extent: &Extent) -> Rows {
        let Extent { batch, channels, spatial, .. } = *extent;
        let rows = batch * spatial;
        let width = channels * WIDE.div_ceil(channels.max(1));
        let wide_rows = (rows * channels).div_ceil(width.max(1));
        let per_block = wide_rows.div_ceil(BLOCKS).max(SMALLEST.div_ceil(width.max(1)));
        Rows { channels, spatial, width, block: (per_block * width).max(1) }
    }

    /// How often a wide row holds each channel.
    fn times(&self) -> usize {
        self.width / self.channels.max(1)
    }

    /// Merges the moments of each part of `x` into `totals`.
    pub(super) fn moments<S: Stored>(&self, cpu: &Cpu, parts: &[Part], x: &[S], totals: &mut Totals) {
        self.reduce(cpu, parts, x, totals, |_, x, [mean, m2]| {
            scratch::with(3 * self.width, |memory| {
                let (pilots, sums) = memory.split_at_mut(self.width);
                let [a, b] = zeros(sums);
                S::Piece::read((cpu, self.width), [x], |start, [x]| {
                    if start == 0 {
                        pilot_rows(cpu, x, self.channels, pilots);
                    }
                    sum_rows(cpu, x, pilots, a, b);
                });
                fold(a, mean);
                fold(b, m2);
                moments_of_sums(cpu, (x.len() / self.channels) as f64, pilots, mean, m2);
            });
        });
    }

    /// Merges the sums of g and of g (x - mean) over each part into `totals`.
    pub(super) fn gradient_sums<S: Stored>(
        &self,
        cpu: &Cpu,
        parts: &[Part],
        (x, dy): (&[S], &[S]),
        means: &[f64],
        c: Coefficients<S::Compute>,
        totals: &mut Totals,
    ) {
        let (means, c) = (AlignedVec::repeat(means, self.times()), c.repeated(self.times()));
        self.reduce(cpu, parts, x, totals, |start, x, [g, g_centered]| {
            let dy = &dy[start..][..x.len()];
            scratch::with(2 * self.width, |sums| {
                let [a, b] = zeros(sums);
                with_activation!(c.activation, act => {
                    S::Piece::read((cpu, self.width), [x, dy], |_, both| {
                        sum_gradient_rows(cpu, both, &means, &c, act, a, b);
                    });
                });
                fold(a, g);
                fold(b, g_centered);
            });
        });
    }

    /// Runs `task` on the start and the elements of each part of `x`, and merges its two numbers per channel in order.
    fn reduce<S: Stored>(
        &self,
        cpu: &Cpu,
        parts: &[Part],
        x: &[S],
        totals: &mut Totals,
        task: impl Fn(usize, &[S], [&mut [f64]; 2]) + Send + Sync,
    ) {
        let channels = self.channels;
        scratch::with(2 * channels * parts.len(), |results| {
            cpu.for_each(x.len(), parts.iter().zip(results.chunks_mut(2 * channels)), |(part, result)| {
                let elements = part.elements(channels, self.spatial);
                task(elements.start, &x[elements], result.split_at_mut(channels).into());
            });
            for (part, result) in parts.iter().zip(results.chunks(2 * channels)) {
                totals.join(cpu, 0, part, result.split_at(channels));
            }
        });
    }

    /// y = map(x, residual); without `x`, y is mapped in place.
    pub(super) fn map<S: Stored>(
        &self,
        cpu: &Cpu,
        map: impl Map<S::Compute>,
        x: Option<[&[S]; 2]>,
        c: Coefficients<S::Compute>,
        y: &mut [S],
    ) {
        let c = c.repeated(self.times());
        let on = (cpu, self.width);
        self.each(cpu, x.is_some(), y, |start, y| {
            with_activation!(c.activation, act => match x {
                Some(both) => {
                    let both = both.map(|x| &x[start..][..y.len()]);
                    S::Piece::write(on, both, y, |_, both, y| map_rows(cpu, map, act, Some(both), y, &c));
                }
                None => S::Piece::update(on, [], y, |_, [], y| map_rows(cpu, map, act, None, y, &c)),
            });
        });
    }

    pub(super) fn gradient<S: Stored>(
        &self,
        cpu: &Cpu,
        (x, dy): (Option<&[S]>, &[S]),
        c: Coefficients<S::Compute>,
        dx: &mut [S],
    ) {
        let c = c.repeated(self.times());
        let on = (cpu, self.width);
        self.each(cpu, x.is_some(), dx, |start, dx| {
            let dy = &dy[start..][..dx.len()];
            with_activation!(c.activation, act => match x {
                Some(x) => {
                    let both = [&x[start..][..dx.len()], dy];
                    S::Piece::write(on, both, dx, |_, [x, dy], dx| gradient_rows(cpu, Some(x), dy, act, dx, &c));
                }
                None => S::Piece::update(on, [dy], dx, |_, [dy], dx| gradient_rows(cpu, None, dy, act, dx, &c)),
            });
        });
    }

    /// Runs `task` on the start and the elements of every block of `out`. `overwrites` says that `task` does not read the
    /// elements; then large outputs are streamed.
    ///
    /// It goes from the last block to the first, because caches still hold what was read last for the sums.
    fn each<S: Stored>(
        &self,
        cpu: &Cpu,
        overwrites: bool,
        out: &mut [S],
        task: impl Fn(usize, &mut [S]) + Send + Sync,
    ) {
        let streams = overwrites && stream::pays_to_copy(out);
        cpu.for_each(out.len(), out.chunks_mut(self.block).enumerate().rev(), |(index, out)| {
            let start = index * self.block;
            if !streams {
                return task(start, out);
            }
            let piece = self.width * (STAGED / size_of::<S>() / self.width).max(1);
            let mut staged = AlignedVec::filled(piece.min(out.len()), S::default());
            let streaming = Streaming::begin();
            for (index, out) in out.chunks_mut(piece).enumerate() {
                let staged = &mut staged[..out.len()];
                task(start + index * piece, staged);
                stream::copy(cpu, &streaming, staged, out);
            }
        });
    }
}

/// Up to this width, wide rows lie so close together that the hardware prefetches well when several are read in turn.
const NARROW: usize = 128;
/// Channels of a wide row between two calls of [`fetch_ahead`].
const STRIP: usize = 64;

/// Prefetches for a loop that reads groups of `ROWS` wide rows, all rows of a group in turn. While `rows` is read from
/// channel `start` on, this fetches a strip of the group after the next one, in the order of memory, if the rows are too
/// wide for the hardware to prefetch them.
#[inline(always)]
fn fetch_ahead<T, const ROWS: usize>(rows: &[T], start: usize) {
    if rows.len() > ROWS * NARROW {
        let there = rows.as_ptr().wrapping_add(2 * rows.len() + ROWS * start);
        stream::prefetch_to_l2(there.cast(), ROWS * STRIP * size_of::<T>() / size_of::<f32>());
    }
}

/// The two halves of `sums`, filled with zeros.
fn zeros(sums: &mut [f64]) -> [&mut [f64]; 2] {
    sums.fill(0.0);
    sums.split_at_mut(sums.len() / 2).into()
}

/// Adds up the sums of a wide row, which repeats the channels, to one sum per channel.
fn fold(wide: &[f64], sums: &mut [f64]) {
    let (first, others) = wide.split_at(sums.len());
    sums.copy_from_slice(first);
    for other in others.chunks_exact(sums.len()) {
        sums.iter_mut().zip(other).for_each(|(sum, other)| *sum += other);
    }
}

// The functions below loop over indices, with every slice cut to the same length first, because the compiler vectorises such loops.
multiversion! {
    /// The pilots of the channels, repeated over a wide row.
    fn pilot_rows<S: Stored>(rows: &[S], channels: usize, pilots: &mut [f64]) {
        let places = pilot_places(rows.len() / channels);
        let [a, b, c, d] = places.map(|place| &rows[place * channels..][..channels]);
        let (first, others) = pilots.split_at_mut(channels);
        for (((p, &a), &b), (&c, &d)) in first.iter_mut().zip(a).zip(b).zip(c.iter().zip(d)) {
            *p = pilot([a, b, c, d].map(S::wide));
        }
        others.chunks_exact_mut(channels).for_each(|other| other.copy_from_slice(first));
    }

    /// Replaces the sums of differences from the pilots, and of their squares, by means and squared deviations.
    fn moments_of_sums<>(count: f64, pilots: &[f64], sums: &mut [f64], squares: &mut [f64]) {
        for ((sum, square), &pilot) in sums.iter_mut().zip(squares).zip(pilots) {
            (*sum, *square) = moments(pilot, *sum, *square, count);
        }
    }

    #[allow(clippy::needless_range_loop)]
    fn sum_rows<S: Stored>(rows: &[S], pilots: &[f64], sums: &mut [f64], squares: &mut [f64]) {
        let width = pilots.len();
        let (sums, squares) = (&mut sums[..width], &mut squares[..width]);
        // Each load and store of the sums serves four rows.
        let mut quads = rows.chunks_exact(4 * width);
        for quad in &mut quads {
            let (a, rest) = quad.split_at(width);
            let (b, rest) = rest.split_at(width);
            let (c, d) = rest.split_at(width);
            let (a, b, c, d) = (&a[..width], &b[..width], &c[..width], &d[..width]);
            for start in (0..width).step_by(STRIP) {
                fetch_ahead::<S, 4>(quad, start);
                for i in start..(start + STRIP).min(width) {
                    let pilot = pilots[i];
                    let (a, b) = (a[i].wide().f64() - pilot, b[i].wide().f64() - pilot);
                    let (c, d) = (c[i].wide().f64() - pilot, d[i].wide().f64() - pilot);
                    sums[i] += (a + b) + (c + d);
                    squares[i] += (a * a + b * b) + (c * c + d * d);
                }
            }
        }
        for row in quads.remainder().chunks(width) {
            for (((sum, square), &pilot), x) in sums.iter_mut().zip(squares.iter_mut()).zip(pilots).zip(row) {
                let d = x.wide().f64() - pilot;
                *sum += d;
                *square += d * d;
            }
        }
    }

    #[allow(clippy::needless_range_loop)]
    fn sum_gradient_rows<S: Stored, A: Formula<S::Compute>>(
        x_and_dy: [&[S]; 2], means: &[f64], c: &Coefficients<S::Compute>, act: A, sums: &mut [f64], centered: &mut [f64],
    ) {
        let [x, dy] = x_and_dy;
        let width = means.len();
        let (sums, centered) = (&mut sums[..width], &mut centered[..width]);
        let (mean, scale, shift) = (&c.mean[..width], &c.scale[..width], &c.shift[..width]);
        let zero = S::Compute::zero();
        let channel = |i: usize| Channel {
            mean: mean[i], scale: scale[i], shift: shift[i], mean_g: zero, slope: zero,
        };
        let in_pairs = x.len() / (2 * width) * (2 * width);
        let pairs = x[..in_pairs].chunks_exact(2 * width).zip(dy[..in_pairs].chunks_exact(2 * width));
        for (x, dy) in pairs {
            let ((x0, x1), (dy0, dy1)) = (x.split_at(width), dy.split_at(width));
            let (x0, x1, dy0, dy1) = (&x0[..width], &x1[..width], &dy0[..width], &dy1[..width]);
            for start in (0..width).step_by(STRIP) {
                fetch_ahead::<S, 2>(x, start);
                fetch_ahead::<S, 2>(dy, start);
                for i in start..(start + STRIP).min(width) {
                    let c = channel(i);
                    let (x0, x1) = (x0[i].wide(), x1[i].wide());
                    let g0 = c.behind_activation(x0, dy0[i].wide(), act).f64();
                    let g1 = c.behind_activation(x1, dy1[i].wide(), act).f64();
                    sums[i] += g0 + g1;
                    centered[i] += g0 * (x0.f64() - means[i]) + g1 * (x1.f64() - means[i]);
                }
            }
        }
        for (x, dy) in x[in_pairs..].chunks(width).zip(dy[in_pairs..].chunks(width)) {
            let len = x.len();
            let (x, dy) = (&x[..len], &dy[..len]);
            let (means, sums, centered) = (&means[..len], &mut sums[..len], &mut centered[..len]);
            for i in 0..len {
                let x = x[i].wide();
                let g = channel(i).behind_activation(x, dy[i].wide(), act).f64();
                sums[i] += g;
                centered[i] += g * (x.f64() - means[i]);
            }
        }
    }

    #[allow(clippy::needless_range_loop)]
    fn map_rows<S: Stored, M: Map<S::Compute>, A: Formula<S::Compute>>(
        map: M, act: A, x: Option<[&[S]; 2]>, y: &mut [S], c: &Coefficients<S::Compute>,
    ) {
        let all = c.mean.len();
        let zero = S::Compute::zero();
        for (row, y) in y.chunks_mut(all).enumerate() {
            let width = y.len();
            let (mean, scale, shift) = (&c.mean[..width], &c.scale[..width], &c.shift[..width]);
            let channel = |i: usize| Channel {
                mean: mean[i], scale: scale[i], shift: shift[i], mean_g: zero, slope: zero,
            };
            match x {
                // The slices are cut right before the loop: if the compiler loses track of the lengths, the end of a row is
                // not vectorised.
                Some([x, residual]) => {
                    let (x, residual) = (&x[row * all..][..width], &residual[row * all..][..width]);
                    for i in 0..width {
                        y[i] = S::nearest(map.map(channel(i), x[i].wide(), residual[i].wide(), act));
                    }
                }
                None => for i in 0..width {
                    y[i] = S::nearest(map.map(channel(i), y[i].wide(), zero, act));
                },
            }
        }
    }

    #[allow(clippy::needless_range_loop)]
    fn gradient_rows<S: Stored, A: Formula<S::Compute>>(
        x: Option<&[S]>, dy: &[S], act: A, dx: &mut [S], c: &Coefficients<S::Compute>,
    ) {
        let all = c.mean.len();
        let constant = c.constant;
        for (row, (dx, dy)) in dx.chunks_mut(all).zip(dy.chunks(all)).enumerate() {
            let width = dx.len();
            let dy = &dy[..width];
            let (mean, scale, shift) = (&c.mean[..width], &c.scale[..width], &c.shift[..width]);
            let (mean_g, slope) = (&c.mean_g[..width], &c.slope[..width]);
            let channel = |i: usize| Channel {
                mean: mean[i], scale: scale[i], shift: shift[i], mean_g: mean_g[i], slope: slope[i],
            };
            match x {
                Some(x) => {
                    let x = &x[row * all..][..width];
                    for i in 0..width {
                        dx[i] = S::nearest(channel(i).backward(x[i].wide(), dy[i].wide(), act, constant));
                    }
                }
                None => for i in 0..width {
                    dx[i] = S::nearest(channel(i).backward(dx[i].wide(), dy[i].wide(), act, constant));
                },
            }
        }
    }
}
