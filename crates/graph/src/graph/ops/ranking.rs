//! The order of numbers, and which are first in it. NaN is larger than all numbers, as in PyTorch.

use std::cmp::Ordering;

/// A tensor in contiguous order as lines along an axis: each has `len` elements, which are `inner` apart.
#[derive(Debug, Clone, Copy)]
pub(super) struct Lines {
    pub(super) axis: usize,
    pub(super) len: usize,
    pub(super) inner: usize,
}

impl Lines {
    /// The lines of a tensor of this shape along one of its axes.
    pub(super) fn of(shape: &[usize], axis: usize) -> Lines {
        // A tensor without elements may have sizes of any product.
        let inner = shape[axis + 1..].iter().fold(1, |inner: usize, &size| inner.saturating_mul(size));
        Lines { axis, len: shape[axis], inner }
    }

    /// The same lines with another number of elements.
    pub(super) fn with_len(self, len: usize) -> Lines {
        Lines { len, ..self }
    }

    /// The shape of a tensor of such lines; `like` has this shape but for the length of its lines.
    pub(super) fn shape(self, like: &[usize]) -> Vec<usize> {
        let mut shape = like.to_vec();
        shape[self.axis] = self.len;
        shape
    }

    /// Where each line begins, in a tensor of this number of elements.
    pub(super) fn starts(self, elements: usize) -> impl Iterator<Item = usize> {
        let block = self.len.saturating_mul(self.inner);
        (0..elements / block.max(1)).flat_map(move |row| (0..self.inner).map(move |at| row * block + at))
    }

    /// The elements of the line that begins at `start`.
    pub(super) fn places(self, start: usize) -> impl Iterator<Item = usize> {
        (0..self.len).map(move |place| start + place * self.inner)
    }
}

/// Compares two numbers.
fn compare<N: PartialOrd>(a: &N, b: &N) -> Ordering {
    let is_nan = |x: &N| x.partial_cmp(x).is_none();
    a.partial_cmp(b).unwrap_or_else(|| is_nan(a).cmp(&is_nan(b)))
}

/// The places of the first numbers of a list in falling order, or in rising order; of equal ones the first comes first.
pub(super) fn first<N: PartialOrd>(numbers: &[N], count: usize, falling: bool) -> Vec<usize> {
    let mut places: Vec<usize> = (0..numbers.len()).collect();
    let order = |&a: &usize, &b: &usize| {
        let rising = compare(&numbers[a], &numbers[b]);
        if falling { rising.reverse() } else { rising }.then(a.cmp(&b))
    };
    if (1..places.len()).contains(&count) {
        places.select_nth_unstable_by(count - 1, order);
    }
    places.truncate(count);
    places.sort_unstable_by(order);
    places
}

/// The place of the largest or smallest number of a list, the last or the first of equal ones. NaN is the extreme of both kinds.
pub(super) fn extreme<N: PartialOrd>(numbers: impl Iterator<Item = N>, smallest: bool, last: bool) -> usize {
    let mut found: Option<(usize, N)> = None;
    for (place, number) in numbers.enumerate() {
        let replaces = found.as_ref().is_none_or(|(_, best)| {
            let is_nan = |x: &N| x.partial_cmp(x).is_none();
            match compare(&number, best) {
                Ordering::Equal => last,
                _ if is_nan(&number) => true,
                _ if is_nan(best) => false,
                Ordering::Less => smallest,
                Ordering::Greater => !smallest,
            }
        });
        if replaces {
            found = Some((place, number));
        }
    }
    found.map_or(0, |(place, _)| place)
}
