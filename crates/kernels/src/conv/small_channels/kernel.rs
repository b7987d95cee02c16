//! The matrix kernel of all passes: a block of sums of outer products, held in registers.

use pulp::{MemMask, Simd, WithSimd};

use crate::conv::workspace::LINE;
use crate::gemm::Update;
use crate::stream;

/// Rows of the largest block for vectors of this many lanes: what 32 or 16 registers hold beside two vectors of B.
pub(super) fn block_rows(lanes: usize) -> usize {
    if lanes == 16 { 14 } else { 6 }
}

/// `0..len` in as few runs of at most `most` as possible, of equal length but for one.
pub(super) fn even_runs(len: usize, most: usize) -> impl Iterator<Item = std::ops::Range<usize>> {
    let runs = len.div_ceil(most);
    (0..runs).map(move |run| run * len / runs..(run + 1) * len / runs)
}

/// Memory that will be read soon, for blocks to fetch while they compute.
pub(super) struct Ahead<'a>(pub(super) [&'a [f32]; 2]);

impl<'a> Ahead<'a> {
    /// The next part, what a block of so many steps fetches.
    pub(super) fn next(&mut self, steps: usize) -> &'a [f32] {
        let Some(rest) = self.0.iter_mut().find(|rest| !rest.is_empty()) else { return &[] };
        let (part, others) = rest.split_at(rest.len().min(steps * LINE));
        *rest = others;
        part
    }
}

/// `out[p][..columns] = sum over (i, j) in steps of a[p * stride + i] * b[j..j + columns]`, or += that.
///
/// At most [`block_rows`] rows and two vectors of columns. Whole vectors of `b` are read. Where `out` is streamed, its rows
/// are overwritten and whole vectors.
pub(super) struct Block<'a> {
    pub(super) a: &'a [f32],
    pub(super) rows: usize,
    pub(super) stride: usize,
    pub(super) b: &'a [f32],
    pub(super) steps: &'a [[usize; 2]],
    pub(super) out: &'a mut [f32],
    /// From one row of `out` to the next.
    pub(super) pitch: usize,
    pub(super) columns: usize,
    pub(super) update: Update,
    /// Whether `out` is written by streaming stores.
    pub(super) streams: bool,
    /// What is fetched into the caches meanwhile, a line in each step.
    pub(super) ahead: &'a [f32],
}

impl WithSimd for Block<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        debug_assert!(self.is_inside(S::F32_LANES));
        match (self.columns <= S::F32_LANES, self.streams) {
            (true, false) => self.dispatch::<S, 1, false>(simd),
            (true, true) => self.dispatch::<S, 1, true>(simd),
            (false, false) => self.dispatch::<S, 2, false>(simd),
            (false, true) => self.dispatch::<S, 2, true>(simd),
        }
    }
}

impl Block<'_> {
    fn is_inside(&self, lanes: usize) -> bool {
        let vectors = self.columns.div_ceil(lanes);
        let row = (self.rows - 1) * self.stride;
        let steps_inside =
            |&[i, j]: &[usize; 2]| row + i < self.a.len() && j + vectors * lanes <= self.b.len();
        (1..=2).contains(&vectors)
            && self.steps.iter().all(steps_inside)
            && (self.rows - 1) * self.pitch + self.columns <= self.out.len()
            && (!self.streams || self.is_in_vectors(lanes))
    }

    /// Whether whole vectors overwrite `out`.
    fn is_in_vectors(&self, lanes: usize) -> bool {
        self.update == Update::Overwrite
            && self.columns.is_multiple_of(lanes)
            && self.pitch.is_multiple_of(lanes)
            && self.out.as_ptr().addr().is_multiple_of(lanes * size_of::<f32>())
    }

    #[inline(always)]
    fn dispatch<S: Simd, const V: usize, const STREAMS: bool>(self, simd: S) {
        macro_rules! sized {
            ($($rows:literal)*) => {
                match self.rows {
                    // SAFETY: the caller's slices hold what is read and written, which tests assert above.
                    $($rows if $rows <= block_rows(S::F32_LANES) => unsafe { self.multiply::<S, $rows, V, STREAMS>(simd) },)*
                    rows => unreachable!("a block of {rows} rows"),
                }
            };
        }
        sized!(1 2 3 4 5 6 7 8 9 10 11 12 13 14)
    }

    /// # Safety
    /// `rows`, `stride`, `steps`, `pitch` and `columns` stay inside `a`, `b` and `out`.
    #[inline(always)]
    unsafe fn multiply<S: Simd, const P: usize, const V: usize, const STREAMS: bool>(self, simd: S) {
        let lanes = S::F32_LANES;
        let (a, b) = (self.a.as_ptr(), self.b.as_ptr());
        // Without anything to fetch, the same line again and again.
        let (mut ahead, line) = if self.ahead.is_empty() { (b, 0) } else { (self.ahead.as_ptr(), LINE) };
        let zero = simd.splat_f32s(0.0);
        let mut sums = [[zero; V]; P];
        for &[i, j] in self.steps {
            stream::prefetch(ahead, 1);
            ahead = ahead.wrapping_add(line);
            let mut vectors = [zero; V];
            for v in 0..V {
                // SAFETY: whole vectors of `b` are inside.
                vectors[v] = unsafe { b.add(j + v * lanes).cast::<S::f32s>().read_unaligned() };
            }
            // One pointer that walks down the rows: one for each row would leave the compiler too few registers.
            let mut value = a.wrapping_add(i);
            for p in 0..P {
                // SAFETY: inside `a`.
                let row = simd.splat_f32s(unsafe { *value });
                value = value.wrapping_add(self.stride);
                for v in 0..V {
                    sums[p][v] = simd.mul_add_f32s(row, vectors[v], sums[p][v]);
                }
            }
        }
        // One plain loop for each way to write, which the compiler unrolls, and code of its own to stream with: sums stay in
        // registers.
        macro_rules! write {
            (|$place:ident, $sum:ident, $v:ident| $write:expr) => {{
                let mut row = self.out.as_mut_ptr();
                for p in 0..P {
                    for $v in 0..V {
                        let ($place, $sum) = (row.wrapping_add($v * lanes), sums[p][$v]);
                        // SAFETY: rows of `columns` elements at `pitch` are inside `out`, masks leave out the rest, and
                        // where streamed they start at whole vectors.
                        unsafe { $write };
                    }
                    row = row.wrapping_add(self.pitch);
                }
            }};
        }
        let last = self.columns - (V - 1) * lanes;
        let add = self.update == Update::Add;
        if STREAMS {
            write!(|place, sum, v| stream::store(simd, place, sum));
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
