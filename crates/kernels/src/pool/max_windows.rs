//! Max pooling by windows: each output reads its window, and in backward each input reads the windows that cover it.
//!
//! Neighbouring places that use the same window elements form a segment. Each loop over a segment handles up to nine window
//! elements at once, so that the maximum and its index, or the sum of a gradient, stay in registers.

use super::runs::span;
use super::{PoolProblem, WindowIndex};
use crate::conv::ConvAxis;
use crate::element::PieceOf;
use crate::isa::multiversion;
use crate::memory_format::MemoryFormat;
use crate::{Cpu, Element, Stored, simd};

/// A pair of places along an axis: an output and an input that its window covers.
#[derive(Clone, Copy)]
struct Tap {
    /// The element of the window.
    element: usize,
    /// The input that the output reads through this element, or the output that reads the input through it.
    other: usize,
}

/// The inputs of the window of output `o`.
fn inputs(axis: &ConvAxis, o: usize) -> impl DoubleEndedIterator<Item = Tap> {
    (0..axis.kernel).filter_map(move |k| axis.input_index(o, k).map(|other| Tap { element: k, other }))
}

/// The outputs whose windows cover input `i`, the last one first.
fn outputs(axis: &ConvAxis, i: usize) -> impl DoubleEndedIterator<Item = Tap> {
    (0..axis.kernel).filter_map(move |k| {
        let start = (i + axis.pad_before).checked_sub(k * axis.dilation)?;
        let other = start / axis.stride;
        (start % axis.stride == 0 && other < axis.output()).then_some(Tap { element: k, other })
    })
}

/// Neighbouring places along the width with the same window elements. In backward, neighbours are one stride apart.
struct Segment {
    first: usize,
    len: usize,
    /// The taps of the first place.
    taps: Vec<Tap>,
}

fn segments<Taps: Iterator<Item = Tap>>(
    places: impl Iterator<Item = usize>,
    taps: impl Fn(usize) -> Taps,
) -> Vec<Segment> {
    let mut segments: Vec<Segment> = Vec::new();
    for place in places {
        let elements = taps(place).map(|tap| tap.element);
        match segments.last_mut() {
            Some(last) if last.taps.iter().map(|tap| tap.element).eq(elements) => last.len += 1,
            _ => segments.push(Segment { first: place, len: 1, taps: taps(place).collect() }),
        }
    }
    segments
}

/// The window elements of a segment of one row.
struct Window<I> {
    elements: Vec<I>,
    /// For each element, where the segment's first place reads it in the other tensor's image or plane.
    sources: Vec<usize>,
}

impl<I: WindowIndex> Window<I> {
    fn new() -> Window<I> {
        Window { elements: Vec::new(), sources: Vec::new() }
    }

    /// Sets the window to all pairs of `rows` and `columns`; `width` is the other tensor's.
    fn set(&mut self, rows: &[Tap], columns: &[Tap], kernel_width: usize, width: usize, lanes: usize) {
        self.elements.clear();
        self.sources.clear();
        for row in rows {
            for column in columns {
                self.elements.push(I::store(row.element * kernel_width + column.element));
                self.sources.push((row.other * width + column.other) * lanes);
            }
        }
    }

    /// Calls `visit(elements, sources)` for parts of the sizes that the kernels take.
    fn each_part(&self, mut visit: impl FnMut(&[I], &[usize])) {
        let (mut elements, mut sources) = (&self.elements[..], &self.sources[..]);
        while !elements.is_empty() {
            let len = PARTS.into_iter().find(|&len| len <= elements.len()).unwrap_or(1);
            visit(&elements[..len], &sources[..len]);
            (elements, sources) = (&elements[len..], &sources[len..]);
        }
    }
}

/// Window elements that kernels handle at once: 3 x 3, 2 x 2, and single ones.
const PARTS: [usize; 3] = [9, 4, 1];

/// The minimum of elements in a task: planes may be tiny.
const TASK: usize = 1 << 14;

/// The number of images or planes in a task.
fn group(cpu: &Cpu, input: usize, total: usize) -> usize {
    (TASK / input).clamp(1, (total / input).div_ceil(cpu.threads()))
}

/// An index type of no size, for callers that do not need the indices.
#[derive(Clone, Copy, PartialEq)]
struct Unrecorded;

impl WindowIndex for Unrecorded {
    const COUNT: usize = usize::MAX;

    #[inline(always)]
    fn store(_: usize) -> Unrecorded {
        Unrecorded
    }

    #[inline(always)]
    fn load(self) -> usize {
        0
    }
}

pub(super) fn forward<S: Stored, I: WindowIndex>(
    cpu: &Cpu,
    problem: &PoolProblem,
    x: &[S],
    y: &mut [S],
    indices: Option<&mut [I]>,
) {
    match indices {
        Some(indices) => forward_into(cpu, problem, x, y, indices),
        // A vector of `Unrecorded` takes no memory.
        None => forward_into(cpu, problem, x, y, &mut vec![Unrecorded; y.len()]),
    }
}

fn forward_into<S: Stored, I: WindowIndex>(
    cpu: &Cpu,
    problem: &PoolProblem,
    x: &[S],
    y: &mut [S],
    indices: &mut [I],
) {
    let (input, output, lanes) = problem.task();
    let (height, width) = (&problem.height, &problem.width);
    let segments = segments(0..width.output(), |o| inputs(width, o));
    let group = group(cpu, input, x.len());
    let items =
        x.chunks(group * input).zip(y.chunks_mut(group * output)).zip(indices.chunks_mut(group * output));
    cpu.for_each(x.len(), items, |((x, y), indices)| {
        let (mut window, mut rows) = (Window::new(), Vec::new());
        let row_len = width.output() * lanes;
        S::Compute::map(cpu, x, y, |x, y| {
            for (place, (y, indices)) in y.chunks_mut(row_len).zip(indices.chunks_mut(row_len)).enumerate() {
                let (image, oh) = (place / height.output(), place % height.output());
                let x = &x[image * input..][..input];
                rows.clear();
                rows.extend(inputs(height, oh));
                y.fill(S::Compute::of(f64::NEG_INFINITY));
                for segment in &segments {
                    window.set(&rows, &segment.taps, width.kernel, width.input, lanes);
                    let range = segment.first * lanes..(segment.first + segment.len) * lanes;
                    let (y, indices) = (&mut y[range.clone()], &mut indices[range]);
                    indices.fill(window.elements.first().copied().unwrap_or(I::store(0)));
                    window.each_part(|elements, sources| {
                        maxima(cpu, elements, sources, [segment.len, lanes, width.stride], x, y, indices);
                    });
                }
            }
        });
    });
}

pub(super) fn backward<S: Stored, I: WindowIndex>(
    cpu: &Cpu,
    problem: &PoolProblem,
    dy: &[S],
    indices: &[I],
    dx: &mut [S],
) {
    let (input, output, lanes) = problem.task();
    let (height, width) = (&problem.height, &problem.width);
    // Inputs one stride apart are covered in the same way and form a phase; if the stride exceeds the input, each input is
    // a phase.
    let phases = width.stride.min(width.input);
    let phase = |phase: usize| segments((phase..width.input).step_by(width.stride), |i| outputs(width, i));
    let segments: Vec<Segment> = (0..phases).flat_map(phase).collect();
    // Contiguous rows are computed phase by phase and then interleaved.
    let interleaved = problem.format == MemoryFormat::Contiguous && phases > 1;
    let phase_len = width.input.div_ceil(phases);
    let group = group(cpu, input, dx.len());
    let work = dx.len();
    let items =
        dx.chunks_mut(group * input).zip(dy.chunks(group * output)).zip(indices.chunks(group * output));
    cpu.for_each(work, items, |((dx, dy), indices)| {
        let (mut window, mut rows) = (Window::new(), Vec::new());
        let mut by_phase = vec![S::Compute::default(); if interleaved { phases * phase_len } else { 0 }];
        S::Compute::map(cpu, dy, dx, |dy, dx| {
            for (place, dx) in dx.chunks_mut(width.input * lanes).enumerate() {
                let (image, ih) = (place / height.input, place % height.input);
                let (dy, indices) = (&dy[image * output..][..output], &indices[image * output..][..output]);
                rows.clear();
                // Outputs are added from top to bottom and, within a row, from right to left, as runs add them.
                rows.extend(outputs(height, ih).rev());
                let sums = if interleaved { &mut by_phase[..] } else { &mut dx[..] };
                sums.fill(S::Compute::default());
                for segment in &segments {
                    window.set(&rows, &segment.taps, width.kernel, width.output(), lanes);
                    let (first, step) = match interleaved {
                        true => (segment.first % phases * phase_len + segment.first / phases, 1),
                        false => (segment.first * lanes, phases * lanes),
                    };
                    let sums = &mut sums[first..];
                    window.each_part(|elements, sources| {
                        add_taken(cpu, elements, sources, [segment.len, lanes, step], dy, indices, sums);
                    });
                }
                if interleaved {
                    interleave(cpu, phases, &by_phase, dx);
                }
            }
        });
    });
}

/// `[count, lanes, stride]`: the number of outputs, the elements of each, and the inputs from one output's to the next one's.
#[inline(always)]
fn maxima_of<const N: usize, T: Element, I: WindowIndex>(
    elements: &[I],
    sources: &[usize],
    [count, lanes, stride]: [usize; 3],
    x: &[T],
    y: &mut [T],
    indices: &mut [I],
) {
    let len = count * lanes;
    let elements: [I; N] = simd::array(|n| elements[n]);
    let x: [&[T]; N] = simd::array(|n| &x[sources[n]..][..span(stride, lanes, len)]);
    let (y, indices) = (&mut y[..len], &mut indices[..len]);
    // The usual strides are constants, so that the loops vectorise.
    match (lanes, stride) {
        (1, 1) => {
            for to in 0..len {
                // SAFETY: `to` is below `len`, which y and the indices have, and so has each x: the span of a stride of 1.
                unsafe { larger(&elements, &x, [to, to], y, indices) };
            }
        }
        (1, 2) => {
            for to in 0..len {
                // SAFETY: `to` is below `len`, which y and the indices have; 2 * `to` is at most 2 * (len - 1), below the span
                // that each x has.
                unsafe { larger(&elements, &x, [to, 2 * to], y, indices) };
            }
        }
        _ => {
            for pixel in 0..count {
                for lane in 0..lanes {
                    let places = [pixel * lanes + lane, pixel * stride * lanes + lane];
                    // SAFETY: `pixel` is below `count` and `lane` below `lanes`, so the first place is below `len`, the
                    // length of y and the indices. The second is at most (count - 1) * stride * lanes + lanes - 1, below
                    // the span that each x has.
                    unsafe { larger(&elements, &x, places, y, indices) };
                }
            }
        }
    }
}

/// # Safety
/// `to` is a place in y and the indices, `from` one in every x.
#[inline(always)]
unsafe fn larger<const N: usize, T: Element, I: WindowIndex>(
    elements: &[I; N],
    x: &[&[T]; N],
    [to, from]: [usize; 2],
    y: &mut [T],
    indices: &mut [I],
) {
    // SAFETY: the caller promises that `to` is a place in y and in the indices.
    let (y, index) = unsafe { (y.get_unchecked_mut(to), indices.get_unchecked_mut(to)) };
    let (mut best, mut winner) = (*y, *index);
    for n in 0..N {
        // SAFETY: the caller promises that `from` is a place in every x.
        let value = unsafe { *x[n].get_unchecked(from) };
        let larger = (value > best) | value.is_nan();
        best = if larger { value } else { best };
        winner = if larger { elements[n] } else { winner };
    }
    (*y, *index) = (best, winner);
}

/// `[count, lanes, step]`: the number of inputs, the elements of each, and the distance from one to the next in `sums`.
#[inline(always)]
fn add_taken_of<const N: usize, T: Element, I: WindowIndex>(
    elements: &[I],
    sources: &[usize],
    [count, lanes, step]: [usize; 3],
    dy: &[T],
    indices: &[I],
    sums: &mut [T],
) {
    let len = count * lanes;
    let elements: [I; N] = simd::array(|n| elements[n]);
    let indices: [&[I]; N] = simd::array(|n| &indices[sources[n]..][..len]);
    let dy: [&[T]; N] = simd::array(|n| &dy[sources[n]..][..len]);
    let sums = &mut sums[..(count - 1) * step + lanes];
    let [pixels, lanes] = if step == lanes { [1, len] } else { [count, lanes] };
    for pixel in 0..pixels {
        for lane in 0..lanes {
            let places = [pixel * step + lane, pixel * lanes + lane];
            // SAFETY: the last place in the sums is (count - 1) * step + lanes - 1, or, where all is one pixel of `len` lanes and
            // `step` is the pixels' own, len - 1, which is the same. The last one in the others is len - 1. They have been cut
            // to end there.
            unsafe { add(&elements, &indices, &dy, places, sums) };
        }
    }
}

/// # Safety
/// `to` is a place in the sums, `from` one in all indices and dy.
#[inline(always)]
unsafe fn add<const N: usize, T: Element, I: WindowIndex>(
    elements: &[I; N],
    indices: &[&[I]; N],
    dy: &[&[T]; N],
    [to, from]: [usize; 2],
    sums: &mut [T],
) {
    // SAFETY: the caller promises that `to` is a place in the sums.
    let result = unsafe { sums.get_unchecked_mut(to) };
    let mut sum = *result;
    for n in 0..N {
        // SAFETY: the caller promises that `from` is a place in all indices and dy.
        let (index, dy) = unsafe { (*indices[n].get_unchecked(from), *dy[n].get_unchecked(from)) };
        sum += if index == elements[n] { dy } else { T::zero() };
    }
    *result = sum;
}

multiversion! {
    /// Updates the maxima and indices with these window elements, which the first output reads at `sources`.
    fn maxima<T: Element, I: WindowIndex>(
        elements: &[I], sources: &[usize], sizes: [usize; 3], x: &[T], y: &mut [T], indices: &mut [I],
    ) {
        match elements.len() {
            9 => maxima_of::<9, T, I>(elements, sources, sizes, x, y, indices),
            4 => maxima_of::<4, T, I>(elements, sources, sizes, x, y, indices),
            _ => maxima_of::<1, T, I>(elements, sources, sizes, x, y, indices),
        }
    }

    /// Adds dy of the windows whose maximum was one of these elements; the first input reads those windows' dy and indices
    /// at `sources`.
    fn add_taken<T: Element, I: WindowIndex>(
        elements: &[I], sources: &[usize], sizes: [usize; 3], dy: &[T], indices: &[I], sums: &mut [T],
    ) {
        match elements.len() {
            9 => add_taken_of::<9, T, I>(elements, sources, sizes, dy, indices, sums),
            4 => add_taken_of::<4, T, I>(elements, sources, sizes, dy, indices, sums),
            _ => add_taken_of::<1, T, I>(elements, sources, sizes, dy, indices, sums),
        }
    }

    /// Fills `row` with elements from each phase in turn.
    fn interleave<T: Element>(phases: usize, by_phase: &[T], row: &mut [T]) {
        let len = by_phase.len() / phases;
        if let (2, (even, odd)) = (phases, by_phase.split_at(len)) {
            let whole = row.len() / 2;
            for ((pair, &even), &odd) in row.chunks_exact_mut(2).zip(&even[..whole]).zip(&odd[..whole]) {
                pair[0] = even;
                pair[1] = odd;
            }
            if row.len() % 2 == 1 {
                row[2 * whole] = even[whole];
            }
        } else {
            for (phase, values) in by_phase.chunks_exact(len).enumerate() {
                row[phase..].iter_mut().step_by(phases).zip(values).for_each(|(to, &value)| *to = value);
            }
        }
    }
}
