//! Linear maps of images that handle one axis after the other: resizing, adaptive averages, and their gradients.
//!
//! A row of outputs is a weighted sum of rows of inputs, which is then gathered along the width. Gradients gather too, from the
//! transposed lists, instead of scattering: so no two tasks write the same place, and no sum depends on the number of threads.

use num_traits::Zero;

use crate::element::PieceOf;
use crate::isa::multiversion;
use crate::{Cpu, Element, MemoryFormat, Stored};

/// The sizes of a map from planes (or, with more than one lane, images) to planes.
#[derive(Clone, Copy)]
pub(crate) struct Sizes {
    /// The contiguous elements of a pixel.
    pub(crate) lanes: usize,
    /// Height and width of what is read.
    pub(crate) from: [usize; 2],
    /// Height and width of what is written.
    pub(crate) to: [usize; 2],
}

impl Sizes {
    /// The sizes of a map of `channels` channels in this format.
    pub(crate) fn new(format: MemoryFormat, channels: usize, from: [usize; 2], to: [usize; 2]) -> Sizes {
        let lanes = match format {
            MemoryFormat::Contiguous => 1,
            MemoryFormat::ChannelsLast => channels,
        };
        Sizes { lanes, from, to }
    }

    /// The sizes of the gradient of the map.
    pub(crate) fn transposed(self) -> Sizes {
        Sizes { from: self.to, to: self.from, ..self }
    }

    /// Elements of a row, and of a plane, of what is read.
    fn read(&self) -> (usize, usize) {
        let row = self.from[1] * self.lanes;
        (row, self.from[0] * row)
    }

    /// Elements of a row of what is written.
    fn written_row(&self) -> usize {
        self.to[1] * self.lanes
    }
}

/// How one output along an axis is computed: as a mixture of the inputs at `place` and at `place + 1`. If the second weight
/// is 0, the second input is not read.
pub(crate) struct Read<T> {
    pub(crate) place: usize,
    pub(crate) weights: [T; 2],
}

impl<T: Element> Read<T> {
    /// A copy of one input.
    pub(crate) fn copy(place: usize) -> Read<T> {
        Read { place, weights: [T::one(), T::zero()] }
    }

    fn is_copy(&self) -> bool {
        self.weights[1] == T::zero()
    }
}

/// The inputs that each output along an axis sums up, with their weights, in order.
pub(crate) struct Lists<T> {
    /// Where in `inputs` the list of each output begins, and where that of the last one ends.
    bounds: Vec<usize>,
    inputs: Vec<(usize, T)>,
}

impl<T: Element> Lists<T> {
    /// One list for each output.
    pub(crate) fn new(lists: impl Iterator<Item = impl Iterator<Item = (usize, T)>>) -> Lists<T> {
        let (mut bounds, mut inputs) = (vec![0], Vec::new());
        for list in lists {
            inputs.extend(list);
            bounds.push(inputs.len());
        }
        Lists { bounds, inputs }
    }

    /// Which outputs read each of the `inputs` inputs, in order: what the gradient sums up.
    pub(crate) fn transposed(&self, inputs: usize) -> Lists<T> {
        let mut found: Vec<Vec<(usize, T)>> = vec![Vec::new(); inputs];
        for output in 0..self.bounds.len() - 1 {
            for &(input, weight) in self.of(output) {
                found[input].push((output, weight));
            }
        }
        Lists::new(found.into_iter().map(Vec::into_iter))
    }

    /// The transposed lists of a mixture of `inputs` inputs.
    pub(crate) fn of_readers(reads: &[Read<T>], inputs: usize) -> Lists<T> {
        let list = |read: &Read<T>| {
            let pairs = (read.place..).zip(read.weights);
            pairs.filter(|&(_, weight)| weight != T::zero()).collect::<Vec<_>>().into_iter()
        };
        Lists::new(reads.iter().map(list)).transposed(inputs)
    }

    fn of(&self, output: usize) -> &[(usize, T)] {
        &self.inputs[self.bounds[output]..self.bounds[output + 1]]
    }
}

/// The approximate number of elements in a task: few enough that the load is balanced, enough that the overhead of a task
/// is small.
const TASK: usize = 1 << 14;

/// y from x, where each output mixes at most two inputs along each axis: `[rows, columns]`.
pub(crate) fn mix<S: Stored>(
    cpu: &Cpu,
    sizes: Sizes,
    [rows, columns]: &[Vec<Read<S::Compute>>; 2],
    x: &[S],
    y: &mut [S],
) {
    let ((x_row, plane), y_row) = (sizes.read(), sizes.written_row());
    let at_once = TASK.div_ceil(y_row);
    cpu.for_each(y.len(), y.chunks_mut(at_once * y_row).enumerate(), |(task, y)| {
        let mut mixed = vec![S::Compute::zero(); x_row];
        for (row, y) in (task * at_once..).zip(y.chunks_mut(y_row)) {
            let read = &rows[row % rows.len()];
            let x = &x[row / rows.len() * plane + read.place * x_row..];
            if read.is_copy() && columns.iter().all(Read::is_copy) {
                stretch_copies(cpu, sizes.lanes, columns, &x[..x_row], y);
                continue;
            }
            let stretched = |x: &[S::Compute], y: &mut [S]| {
                S::Compute::write((cpu, y_row), [], y, |_, [], y| stretch(cpu, sizes.lanes, columns, x, y));
            };
            if read.is_copy() {
                S::Compute::read((cpu, x_row), [&x[..x_row]], |_, [x]| stretched(x, y));
                continue;
            }
            let both = [&x[..x_row], &x[x_row..2 * x_row]];
            S::Piece::read((cpu, x_row), both, |_, [a, b]| mix_rows(cpu, read.weights, a, b, &mut mixed));
            stretched(&mixed, y);
        }
    });
}

/// y from x, where each output sums up what is listed along each axis: `[rows, columns]`. An empty list gives 0.
pub(crate) fn sum<S: Stored>(
    cpu: &Cpu,
    sizes: Sizes,
    [rows, columns]: &[Lists<S::Compute>; 2],
    x: &[S],
    y: &mut [S],
) {
    let ((x_row, plane), y_row) = (sizes.read(), sizes.written_row());
    // A row of outputs reads its share of a plane, or writes more than that.
    let at_once = TASK.div_ceil((plane / sizes.to[0]).max(y_row).max(1));
    cpu.for_each(x.len().max(y.len()), y.chunks_mut(at_once * y_row).enumerate(), |(task, y)| {
        let mut sums = vec![S::Compute::zero(); x_row];
        for (row, y) in (task * at_once..).zip(y.chunks_mut(y_row)) {
            let x = &x[row / sizes.to[0] * plane..][..plane];
            // The rows from the first to the last that are listed.
            let list = rows.of(row % sizes.to[0]);
            let (first, end) = (list.first().map_or(0, |row| row.0), list.last().map_or(0, |row| row.0 + 1));
            let read = &x[first * x_row..end * x_row];
            sums.fill(S::Compute::zero());
            S::Piece::read((cpu, read.len().max(1)), [read], |_, [x]| {
                add_up(cpu, x_row, (list, first), x, &mut sums);
            });
            S::Compute::write((cpu, y_row), [], y, |_, [], y| gather(cpu, sizes.lanes, columns, &sums, y));
        }
    });
}

multiversion! {
    fn mix_rows<A: Stored>(weights: [A::Compute; 2], first: &[A], second: &[A], out: &mut [A::Compute]) {
        for ((out, first), second) in out.iter_mut().zip(first).zip(second) {
            *out = first.wide() * weights[0] + second.wide() * weights[1];
        }
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

    /// As [`stretch`], where each output is one of the inputs.
    fn stretch_copies<S: Stored>(lanes: usize, reads: &[Read<S::Compute>], x: &[S], y: &mut [S]) {
        match lanes {
            1 => y.iter_mut().zip(reads).for_each(|(y, read)| *y = x[read.place]),
            _ => {
                for (y, read) in y.chunks_exact_mut(lanes).zip(reads) {
                    y.copy_from_slice(&x[read.place * lanes..][..lanes]);
                }
            }
        }
    }

    /// The weighted sum of the rows of `from` that are listed, in order; the first of them has this index. It adds two at a time, because
    /// every addition reads and writes `sums` in memory.
    fn add_up<A: Stored>(
        row: usize, list: (&[(usize, A::Compute)], usize), from: &[A], sums: &mut [A::Compute],
    ) {
        let (list, start) = list;
        let sums = &mut sums[..row];
        if list.is_empty() {
            sums.fill(A::Compute::zero());
        }
        let line = |at: usize| &from[(at - start) * row..][..row];
        let (pairs, last) = list.as_chunks::<2>();
        for (index, &[(a, first), (b, second)]) in pairs.iter().enumerate() {
            for (sum, (a, b)) in sums.iter_mut().zip(line(a).iter().zip(line(b))) {
                let two = a.wide() * first + b.wide() * second;
                *sum = if index == 0 { two } else { *sum + two };
            }
        }
        for &(at, weight) in last {
            for (sum, value) in sums.iter_mut().zip(line(at)) {
                let one = value.wide() * weight;
                *sum = if pairs.is_empty() { one } else { *sum + one };
            }
        }
    }

    /// Computes a row of outputs from a sum of rows.
    fn gather<T: Element>(lanes: usize, lists: &Lists<T>, from: &[T], to: &mut [T]) {
        for (output, to) in to.chunks_exact_mut(lanes).enumerate() {
            let list = lists.of(output);
            let (chunks, rest) = to.as_chunks_mut::<TOGETHER>();
            let mut place = 0;
            for sums in chunks {
                *sums = listed(list, |at| &from[at * lanes + place..]);
                place += TOGETHER;
            }
            let (chunks, rest) = rest.as_chunks_mut::<FEW>();
            for sums in chunks {
                *sums = listed(list, |at| &from[at * lanes + place..]);
                place += FEW;
            }
            for sum in rest {
                [*sum] = listed(list, |at| &from[at * lanes + place..]);
                place += 1;
            }
        }
    }
}

/// Numbers of a pixel that are computed together: the compiler makes vectors of them, while a loop over all may take the few of a pixel one
/// by one.
const TOGETHER: usize = 16;
/// Numbers of a pixel that are computed together where fewer than [`TOGETHER`] are left.
const FEW: usize = 4;

#[inline(always)]
fn mix_pixel<T: Element>(weights: [T; 2], first: &[T], second: &[T], out: &mut [T]) {
    let rest = mix_chunks::<T, TOGETHER>(weights, [first, second], out);
    let rest = mix_chunks::<T, FEW>(weights, rest.0, rest.1);
    mix_chunks::<T, 1>(weights, rest.0, rest.1);
}

/// Mixes as many numbers as are in whole chunks of N, and returns the others.
#[inline(always)]
fn mix_chunks<'a, T: Element, const N: usize>(
    weights: [T; 2],
    [first, second]: [&'a [T]; 2],
    out: &'a mut [T],
) -> ([&'a [T]; 2], &'a mut [T]) {
    let (first, first_rest) = first.as_chunks::<N>();
    let (second, second_rest) = second.as_chunks::<N>();
    let (out, rest) = out.as_chunks_mut::<N>();
    for ((out, first), second) in out.iter_mut().zip(first).zip(second) {
        for index in 0..N {
            out[index] = first[index] * weights[0] + second[index] * weights[1];
        }
    }
    ([first_rest, second_rest], rest)
}

/// The weighted sums of the first N numbers at the places of a list, in order, two at a time.
#[inline(always)]
fn listed<'a, T: Element, const N: usize>(list: &[(usize, T)], from: impl Fn(usize) -> &'a [T]) -> [T; N] {
    let numbers = |at: usize| from(at).first_chunk::<N>().expect("every pixel has N numbers from there on");
    let mut sums = [T::zero(); N];
    let (pairs, last) = list.as_chunks::<2>();
    for (index, &[(a, first), (b, second)]) in pairs.iter().enumerate() {
        let (a, b) = (numbers(a), numbers(b));
        for lane in 0..N {
            let two = a[lane] * first + b[lane] * second;
            sums[lane] = if index == 0 { two } else { sums[lane] + two };
        }
    }
    for &(at, weight) in last {
        let values = numbers(at);
        for lane in 0..N {
            let one = values[lane] * weight;
            sums[lane] = if pairs.is_empty() { one } else { sums[lane] + one };
        }
    }
    sums
}
