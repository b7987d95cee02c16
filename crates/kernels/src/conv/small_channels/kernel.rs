//! The matrix kernel of all passes: a block of sums of outer products, held in registers.

use crate::simd::registers;
use pulp::{MemMask, Simd, WithSimd};

use crate::conv::workspace::LINE;
use crate::gemm::Update;
use crate::stream::{self, Streaming};

/// Rows of the largest block that the registers of S hold beside two vectors of B.
pub(super) const fn block_rows<S: Simd>() -> usize {
    if registers::<S>() >= 32 { 14 } else { 6 }
}

/// Memory that will be read soon, for blocks to fetch while they compute.
pub(super) struct Ahead<'a>(pub(super) [&'a [f32]; 2]);

impl<'a> Ahead<'a> {
    /// The next part: what a block of `steps` steps fetches.
    pub(super) fn next(&mut self, steps: usize) -> &'a [f32] {
        let Some(rest) = self.0.iter_mut().find(|rest| !rest.is_empty()) else { return &[] };
        let (part, others) = rest.split_at(rest.len().min(steps * LINE));
        *rest = others;
        part
    }
}

/// Places in the two operands of a product, a pair for each step, and the largest of each up to any step.
pub(super) struct Steps {
    places: Vec<[usize; 2]>,
    /// For each step, the largest places of all steps up to that one.
    most: Vec<[usize; 2]>,
}

/// The first of some [`Steps`]: no place is beyond `most`.
#[derive(Clone, Copy)]
pub(super) struct Places<'a> {
    places: &'a [[usize; 2]],
    most: [usize; 2],
}

impl Steps {
    pub(super) fn new(places: impl Iterator<Item = [usize; 2]>) -> Steps {
        let places: Vec<[usize; 2]> = places.collect();
        let most = places.iter().scan([0, 0], |[left, right], &[i, j]| {
            (*left, *right) = (i.max(*left), j.max(*right));
            Some([*left, *right])
        });
        Steps { most: most.collect(), places }
    }

    /// The first `count` steps, 1 or more.
    pub(super) fn first(&self, count: usize) -> Places<'_> {
        Places { places: &self.places[..count], most: self.most[count - 1] }
    }

    pub(super) fn all(&self) -> Places<'_> {
        self.first(self.len())
    }

    pub(super) fn len(&self) -> usize {
        self.places.len()
    }
}

impl<'a> Places<'a> {
    #[inline(always)]
    pub(super) fn iter(self) -> std::slice::Iter<'a, [usize; 2]> {
        self.places.iter()
    }

    /// Whether the elements that follow each place of the left operand, and of the right one, lie inside of that operand.
    ///
    /// The elements that follow are those from the place itself to `lanes` elements from the last of `count` places, each a
    /// `pitch` on.
    #[inline(always)]
    pub(super) fn are_inside(self, reads: [Reads; 2]) -> bool {
        let [left, right] = self.most;
        reads[0].is_inside(left) && reads[1].is_inside(right)
    }
}

/// What is read from a place: `count` times `lanes` elements, `pitch` elements apart, of a slice of `len`.
#[derive(Clone, Copy)]
pub(super) struct Reads {
    pub(super) count: usize,
    pub(super) pitch: usize,
    pub(super) lanes: usize,
    pub(super) len: usize,
}

impl Reads {
    /// A size that overflows is not inside, nor is a `count` of 0.
    #[inline(always)]
    pub(super) fn is_inside(self, place: usize) -> bool {
        let last = self.count.checked_sub(1).and_then(|last| last.checked_mul(self.pitch));
        let end = last.and_then(|last| last.checked_add(place)?.checked_add(self.lanes));
        end.is_some_and(|end| end <= self.len)
    }
}

/// `out[p][..columns] = sum over (i, j) in steps of a[p * stride + i] * b[j..j + columns]`, or += that.
///
/// At most [`block_rows`] rows and two vectors of columns. Whole vectors of `b` are read. If `out` is streamed, its rows must
/// be whole vectors, and they are overwritten.
pub(super) struct OuterProductBlock<'a> {
    pub(super) a: &'a [f32],
    pub(super) rows: usize,
    pub(super) stride: usize,
    pub(super) b: &'a [f32],
    pub(super) steps: Places<'a>,
    pub(super) out: &'a mut [f32],
    /// From one row of `out` to the next.
    pub(super) pitch: usize,
    pub(super) columns: usize,
    pub(super) update: Update,
    /// Present if `out` is written by streaming stores.
    pub(super) streaming: Option<&'a Streaming>,
    /// Memory that is prefetched meanwhile, a cache line in each step.
    pub(super) ahead: &'a [f32],
}

impl WithSimd for OuterProductBlock<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        assert!(self.is_inside(S::F32_LANES), "a block reads or writes beyond its slices");
        match (self.columns <= S::F32_LANES, self.streaming.is_some()) {
            // SAFETY: there is one vector of columns or part of it. `is_inside` has checked that what is read of `a` and `b`
            // is inside at the largest places of all steps, and so at each, and that what is written of `out` is inside; if
            // streamed, `out` is whole vectors. Blocks are run by tasks that `simd::run` calls, with the task's vectors.
            (true, false) => unsafe { self.dispatch::<S, 1, false>(simd) },
            // SAFETY: as for one vector that is not streamed, and `is_inside` has called `is_in_vectors` here.
            (true, true) => unsafe { self.dispatch::<S, 1, true>(simd) },
            // SAFETY: there is more than one vector of columns and at most two; `is_inside` has checked the rest.
            (false, false) => unsafe { self.dispatch::<S, 2, false>(simd) },
            // SAFETY: there is more than one vector of columns and at most two; `is_inside` has checked the rest, and has
            // called `is_in_vectors`.
            (false, true) => unsafe { self.dispatch::<S, 2, true>(simd) },
        }
    }
}

impl OuterProductBlock<'_> {
    /// Whether everything that [`OuterProductBlock::multiply`] requires holds: checked once a block, outside of its loops.
    #[inline(always)]
    fn is_inside(&self, lanes: usize) -> bool {
        let OuterProductBlock { rows, stride, pitch, columns, .. } = *self;
        let vectors = columns.div_ceil(lanes);
        let a = Reads { count: rows, pitch: stride, lanes: 1, len: self.a.len() };
        let b = Reads { count: 1, pitch: 0, lanes: vectors.min(2) * lanes, len: self.b.len() };
        let out = Reads { count: rows, pitch, lanes: columns, len: self.out.len() };
        (1..=2).contains(&vectors)
            && self.steps.are_inside([a, b])
            && out.is_inside(0)
            && (self.streaming.is_none() || self.is_in_vectors(lanes))
    }

    /// Whether whole vectors overwrite `out`.
    #[inline(always)]
    fn is_in_vectors(&self, lanes: usize) -> bool {
        self.update == Update::Overwrite
            && self.columns.is_multiple_of(lanes)
            && self.pitch.is_multiple_of(lanes)
            && self.out.as_ptr().addr().is_multiple_of(lanes * size_of::<f32>())
    }

    /// # Safety
    /// As [`OuterProductBlock::multiply`], but for the number of rows.
    #[inline(always)]
    unsafe fn dispatch<S: Simd, const V: usize, const STREAMS: bool>(self, simd: S) {
        macro_rules! sized {
            ($($rows:literal)*) => {
                match self.rows {
                    // SAFETY: `$rows` is the number of rows, and the rest is what the caller promises.
                    $($rows if const { $rows <= block_rows::<S>() } => unsafe {
                        self.multiply::<S, $rows, V, STREAMS>(simd)
                    },)*
                    rows => unreachable!("a block of {rows} rows"),
                }
            };
        }
        sized!(1 2 3 4 5 6 7 8 9 10 11 12 13 14)
    }

    /// # Safety
    /// - `rows` is P, and `columns` more than V - 1 vectors and at most V.
    /// - For each step (i, j), `a` has an element at `p * stride + i` for each p below P, and `b` has V vectors at j.
    /// - `out` has `columns` elements at `p * pitch` for each p below P.
    /// - If STREAMS, `streaming` is there, `out` starts at a multiple of a vector's size, `pitch` and `columns` are whole
    ///   vectors, and `S` is one of those that [`crate::simd::run`] uses.
    #[inline(always)]
    unsafe fn multiply<S: Simd, const P: usize, const V: usize, const STREAMS: bool>(self, simd: S) {
        // SAFETY: the caller promises what both ask for.
        unsafe {
            let sums = self.sums::<S, P, V>(simd);
            self.write::<S, P, V, STREAMS>(simd, sums);
        }
    }

    /// The sums over all steps; meanwhile prefetches what is ahead.
    ///
    /// # Safety
    /// What [`OuterProductBlock::multiply`] asks of `a` and `b`.
    #[inline(always)]
    unsafe fn sums<S: Simd, const P: usize, const V: usize>(&self, simd: S) -> [[S::f32s; V]; P] {
        let lanes = S::F32_LANES;
        let (a, b) = (self.a.as_ptr(), self.b.as_ptr());
        // If there is nothing to fetch, the same line is prefetched again and again.
        let (mut ahead, line) = if self.ahead.is_empty() { (b, 0) } else { (self.ahead.as_ptr(), LINE) };
        let zero = simd.splat_f32s(0.0);
        let mut sums = [[zero; V]; P];
        for &[i, j] in self.steps.iter() {
            stream::prefetch(ahead, 1);
            ahead = ahead.wrapping_add(line);
            let mut vectors = [zero; V];
            for v in 0..V {
                // SAFETY: the caller promises V vectors of `b` at j.
                vectors[v] = unsafe { b.add(j + v * lanes).cast::<S::f32s>().read_unaligned() };
            }
            // One pointer that walks down the rows: one for each row would leave the compiler too few registers.
            let mut value = a.wrapping_add(i);
            for p in 0..P {
                // SAFETY: `value` is p strides from i, where the caller promises an element of `a`.
                let row = simd.splat_f32s(unsafe { *value });
                value = value.wrapping_add(self.stride);
                for v in 0..V {
                    sums[p][v] = simd.mul_add_f32s(row, vectors[v], sums[p][v]);
                }
            }
        }
        sums
    }

    /// Writes the sums to `out`, or adds them.
    ///
    /// # Safety
    /// What [`OuterProductBlock::multiply`] asks of `out`, `columns` and `S`.
    #[inline(always)]
    unsafe fn write<S: Simd, const P: usize, const V: usize, const STREAMS: bool>(
        self,
        simd: S,
        sums: [[S::f32s; V]; P],
    ) {
        let lanes = S::F32_LANES;
        // Each way to write has a plain loop of its own, which the compiler unrolls, and streaming has code of its own: so
        // the sums stay in registers.
        macro_rules! write {
            (|$place:ident, $sum:ident, $v:ident| $write:expr) => {{
                let mut row = self.out.as_mut_ptr();
                for p in 0..P {
                    for $v in 0..V {
                        let ($place, $sum) = (row.wrapping_add($v * lanes), sums[p][$v]);
                        // SAFETY: row p of `out` has `columns` elements, which are V vectors less what the last mask leaves
                        // out. Where streamed there is no mask, and each vector is aligned: the start of `out`, `pitch`
                        // and v vectors are multiples of its size.
                        unsafe { $write };
                    }
                    row = row.wrapping_add(self.pitch);
                }
            }};
        }
        let last = self.columns - (V - 1) * lanes;
        let add = self.update == Update::Add;
        if let (true, Some(streaming)) = (STREAMS, self.streaming) {
            write!(|place, sum, v| stream::store(simd, streaming, place, sum));
        } else if last == lanes {
            if add {
                write!(|place, sum, v| {
                    let place = place.cast::<S::f32s>();
                    place.write_unaligned(simd.add_f32s(place.read_unaligned(), sum));
                });
            } else {
                write!(|place, sum, v| place.cast::<S::f32s>().write_unaligned(sum));
            }
        } else {
            let mut masks = [MemMask::new(simd.mask_between_m32s(0, lanes as u32).mask()); V];
            masks[V - 1] = MemMask::new(simd.mask_between_m32s(0, last as u32).mask());
            if add {
                write!(|place, sum, v| {
                    let before = simd.mask_load_ptr_f32s(masks[v], place);
                    simd.mask_store_ptr_f32s(masks[v], place, simd.add_f32s(before, sum));
                });
            } else {
                write!(|place, sum, v| simd.mask_store_ptr_f32s(masks[v], place, sum));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::panic::catch_unwind;

    use super::*;
    use crate::{Isa, simd};

    /// Sizes of a block; every one fits by itself.
    #[derive(Debug, Clone, Copy)]
    struct Sizes {
        rows: usize,
        stride: usize,
        pitch: usize,
        columns: usize,
        /// The lengths of a, b and out.
        lens: [usize; 3],
        place: [usize; 2],
        streams: bool,
    }

    /// `out` of a block of ones. In release mode, too, the block must not read or write beyond its slices.
    fn run(isa: Isa, sizes: Sizes) -> Vec<f32> {
        let Sizes { rows, stride, pitch, columns, lens: [a, b, out], place, streams } = sizes;
        let (a, b, mut out) = (vec![1.0; a], vec![1.0; b], vec![0.0; out]);
        let steps = Steps::new([[0, 0], place, [0, 0]].into_iter());
        let streaming = streams.then(Streaming::begin);
        let block = OuterProductBlock {
            a: &a,
            rows,
            stride,
            b: &b,
            steps: steps.all(),
            out: &mut out,
            pitch,
            columns,
            update: Update::Overwrite,
            streaming: streaming.as_ref(),
            ahead: &[],
        };
        simd::run(isa, block);
        out
    }

    #[test]
    fn a_block_beyond_its_slices_is_refused() {
        for isa in Isa::available() {
            let lanes = isa.lanes();
            // The last row's last element, and the second step's last vector, are the slices' last ones.
            let columns = 2 * lanes;
            let lens = [2 * 10 + 3 + 1, 5 + columns, 2 * 40 + columns];
            let fits = Sizes { rows: 3, stride: 10, pitch: 40, columns, lens, place: [3, 5], streams: false };
            let out = run(isa, fits);
            assert!((0..3).all(|row| out[row * 40..][..columns].iter().all(|&sum| sum == 3.0)), "{isa}");
            let half = 1 << 63;
            let refused = [
                Sizes { rows: 4, ..fits },
                Sizes { rows: 0, ..fits },
                Sizes { stride: 11, ..fits },
                Sizes { stride: half, ..fits },
                Sizes { stride: usize::MAX, ..fits },
                Sizes { pitch: 41, ..fits },
                Sizes { pitch: half, ..fits },
                Sizes { columns: 0, ..fits },
                Sizes { columns: columns + 1, ..fits },
                Sizes { columns: usize::MAX, ..fits },
                Sizes { place: [4, 5], ..fits },
                Sizes { place: [3, 6], ..fits },
                Sizes { place: [usize::MAX, 5], ..fits },
                Sizes { place: [3, usize::MAX], ..fits },
                Sizes { lens: [lens[0] - 1, lens[1], lens[2]], ..fits },
                Sizes { lens: [lens[0], lens[1] - 1, lens[2]], ..fits },
                Sizes { lens: [lens[0], lens[1], lens[2] - 1], ..fits },
                Sizes { lens: [0; 3], ..fits },
                // Only whole vectors are streamed; a portable vector is one float.
                Sizes { columns: columns - 1, pitch: 39, streams: true, ..fits },
            ];
            for sizes in refused.into_iter().take(if lanes == 1 { 18 } else { 19 }) {
                let refusal = catch_unwind(|| run(isa, sizes)).expect_err("it must be refused");
                let reason = refusal.downcast_ref::<&str>().copied().unwrap_or("another reason");
                assert!(reason.contains("beyond its slices"), "{isa} {sizes:?}: {reason}");
            }
        }
    }
}
