//! Max pooling by runs: the kernels go over y, or dx, once for every window element.

use num_traits::{Float, Zero};

use super::runs::{span, strided};
use super::{PoolProblem, WindowIndex};
use crate::conv::ConvAxis;
use crate::element::PieceOf;
use crate::isa::multiversion;
use crate::{Cpu, Element, Stored};

impl PoolProblem {
    /// For each output pixel, the first element of its window that lies inside the input; 0 for a window that is all padding.
    fn first_taps<I: WindowIndex>(&self) -> Vec<I> {
        let first = |axis: &ConvAxis| -> Vec<Option<usize>> {
            let inside = |o: usize| (0..axis.kernel).find(|&k| axis.input_index(o, k).is_some());
            (0..axis.output()).map(inside).collect()
        };
        let (rows, columns) = (first(&self.height), first(&self.width));
        let tap = |r: Option<usize>, s: Option<usize>| r.zip(s).map_or(0, |(r, s)| r * self.width.kernel + s);
        rows.iter().flat_map(|&r| columns.iter().map(move |&s| I::store(tap(r, s)))).collect()
    }

    /// Whether the windows cover every input, and whether no two windows overlap.
    fn windows(&self) -> [bool; 2] {
        let axes = [&self.height, &self.width];
        let covered = |axis: &&ConvAxis| {
            axis.dilation == 1
                && axis.stride <= axis.kernel
                && (axis.output() - 1) * axis.stride + axis.kernel >= axis.input + axis.pad_before
        };
        let disjoint = |axis: &&ConvAxis| axis.stride > (axis.kernel - 1) * axis.dilation;
        [axes.iter().all(covered), axes.iter().all(disjoint)]
    }
}

pub(super) fn forward<S: Stored, I: WindowIndex>(
    cpu: &Cpu,
    problem: &PoolProblem,
    x: &[S],
    y: &mut [S],
    indices: Option<&mut [I]>,
) {
    let (input, output, lanes) = problem.task();
    let stride = problem.width.stride;
    match indices {
        Some(indices) => {
            let first_taps = problem.first_taps::<I>();
            let items = x.chunks(input).zip(y.chunks_mut(output)).zip(indices.chunks_mut(output));
            cpu.for_each(x.len(), items, |((x, y), indices)| {
                for (indices, &tap) in indices.chunks_mut(lanes).zip(&first_taps) {
                    indices.fill(tap);
                }
                S::Piece::map(cpu, x, y, |x, y| {
                    y.fill(S::Piece::of(f64::NEG_INFINITY));
                    problem.each_run(|run| {
                        let (x, range) = (&x[run.input * lanes..], run.outputs(lanes));
                        let (y, indices) = (&mut y[range.clone()], &mut indices[range]);
                        max_with_index(cpu, stride, lanes, I::store(run.tap), x, y, indices);
                    });
                });
            });
        }
        None => cpu.for_each(x.len(), x.chunks(input).zip(y.chunks_mut(output)), |(x, y)| {
            S::Piece::map(cpu, x, y, |x, y| {
                y.fill(S::Piece::of(f64::NEG_INFINITY));
                problem.each_run(|run| {
                    max_only(cpu, stride, lanes, &x[run.input * lanes..], &mut y[run.outputs(lanes)]);
                });
            });
        }),
    }
}

pub(super) fn backward<S: Stored, I: WindowIndex>(
    cpu: &Cpu,
    problem: &PoolProblem,
    dy: &[S],
    indices: &[I],
    dx: &mut [S],
) {
    let (input, output, lanes) = problem.task();
    let (work, stride) = (dx.len(), problem.width.stride);
    let [covered, disjoint] = problem.windows();
    let items = dx.chunks_mut(input).zip(dy.chunks(output)).zip(indices.chunks(output));
    cpu.for_each(work, items, |((dx, dy), indices)| {
        // Sums of several outputs are rounded once.
        match disjoint {
            true => S::Piece::map(cpu, dy, dx, |dy, dx| {
                spread(problem, !covered, (dy, indices), dx, |tap, dy, indices, dx| {
                    write_where_taken(cpu, stride, lanes, tap, dy, indices, dx);
                });
            }),
            false => S::Compute::map(cpu, dy, dx, |dy, dx| {
                spread(problem, true, (dy, indices), dx, |tap, dy, indices, dx| {
                    add_where_taken(cpu, stride, lanes, tap, dy, indices, dx);
                });
            }),
        }
    });
}

/// Gives each run of outputs, with its indices and dx from its first input on, to `put`. `clears` says whether dx becomes zeros first.
#[inline(always)]
fn spread<S: Stored, I: WindowIndex>(
    problem: &PoolProblem,
    clears: bool,
    (dy, indices): (&[S], &[I]),
    dx: &mut [S],
    put: impl Fn(I, &[S], &[I], &mut [S]),
) {
    if clears {
        dx.fill(S::default());
    }
    let (_, _, lanes) = problem.task();
    problem.each_run(|run| {
        let outputs = run.outputs(lanes);
        put(I::store(run.tap), &dy[outputs.clone()], &indices[outputs], &mut dx[run.input * lanes..]);
    });
}

multiversion! {
    fn max_only<S: Stored>(stride: usize, lanes: usize, x: &[S], y: &mut [S]) {
        let x = &x[..span(stride, lanes, y.len())];
        strided(stride, lanes, y.len(), |to, from| {
            // SAFETY: `strided` visits places below y's length, and below `span`, x's length.
            let (y, value) = unsafe { (y.get_unchecked_mut(to), *x.get_unchecked(from)) };
            let wide = value.wide();
            *y = if (wide > y.wide()) | wide.is_nan() { value } else { *y };
        });
    }

    fn max_with_index<S: Stored, I: WindowIndex>(
        stride: usize, lanes: usize, tap: I, x: &[S], y: &mut [S], indices: &mut [I],
    ) {
        let x = &x[..span(stride, lanes, y.len())];
        let indices = &mut indices[..y.len()];
        strided(stride, lanes, y.len(), |to, from| {
            // SAFETY: `strided` visits places below y's length, which is also that of the indices, and below `span`, x's
            // length.
            let (y, index, value) =
                unsafe { (y.get_unchecked_mut(to), indices.get_unchecked_mut(to), *x.get_unchecked(from)) };
            let wide = value.wide();
            let larger = (wide > y.wide()) | wide.is_nan();
            *y = if larger { value } else { *y };
            *index = if larger { tap } else { *index };
        });
    }

    fn write_where_taken<S: Stored, I: WindowIndex>(
        stride: usize, lanes: usize, tap: I, dy: &[S], indices: &[I], dx: &mut [S],
    ) {
        let dx = &mut dx[..span(stride, lanes, dy.len())];
        let indices = &indices[..dy.len()];
        strided(stride, lanes, dy.len(), |to, from| {
            // SAFETY: `strided` visits places below dy's length, which is also that of the indices, and below `span`, dx's
            // length.
            let (dy, index, dx) =
                unsafe { (*dy.get_unchecked(to), *indices.get_unchecked(to), dx.get_unchecked_mut(from)) };
            // Adding to 0 gives the same bits as a sum: -0 becomes 0.
            let zero = S::Compute::zero();
            *dx = S::nearest(zero + if index == tap { dy.wide() } else { zero });
        });
    }

    fn add_where_taken<T: Element, I: WindowIndex>(
        stride: usize, lanes: usize, tap: I, dy: &[T], indices: &[I], dx: &mut [T],
    ) {
        let dx = &mut dx[..span(stride, lanes, dy.len())];
        let indices = &indices[..dy.len()];
        strided(stride, lanes, dy.len(), |to, from| {
            // SAFETY: `strided` visits places below dy's length, which is also that of the indices, and below `span`, dx's
            // length.
            let (dy, index, dx) =
                unsafe { (*dy.get_unchecked(to), *indices.get_unchecked(to), dx.get_unchecked_mut(from)) };
            *dx += if index == tap { dy } else { T::zero() };
        });
    }
}
