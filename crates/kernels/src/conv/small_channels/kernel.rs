//! The matrix kernel of all passes: a block of sums of outer products, held in registers.

use pulp::{MemMask, Simd, WithSimd};

use crate::gemm::Update;

/// Rows of the largest block for vectors of this many lanes: what 32 or 16 registers hold beside two vectors of B.
pub(super) fn block_rows(lanes: usize) -> usize {
    if lanes == 16 { 14 } else { 6 }
}

/// `0..len` in as few runs of at most `most` as possible, of equal length but for one.
pub(super) fn even_runs(len: usize, most: usize) -> impl Iterator<Item = std::ops::Range<usize>> {
    let runs = len.div_ceil(most);
    (0..runs).map(move |run| run * len / runs..(run + 1) * len / runs)
}

/// `out[p][..columns] = sum over (i, j) in steps of a[p * stride + i] * b[j..j + columns]`, or += that.
///
/// At most [`block_rows`] rows and two vectors of columns. Whole vectors of `b` are read.
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
}

impl WithSimd for Block<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        debug_assert!(self.is_inside(S::F32_LANES));
        if self.columns <= S::F32_LANES {
            self.dispatch::<S, 1>(simd);
        } else {
            self.dispatch::<S, 2>(simd);
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
    }

    #[inline(always)]
    fn dispatch<S: Simd, const V: usize>(self, simd: S) {
        macro_rules! sized {
            ($($rows:literal)*) => {
                match self.rows {
                    // SAFETY: the caller's slices hold what is read and written, which tests assert above.
                    $($rows if $rows <= block_rows(S::F32_LANES) => unsafe { self.multiply::<S, $rows, V>(simd) },)*
                    rows => unreachable!("a block of {rows} rows"),
                }
            };
        }
        sized!(1 2 3 4 5 6 7 8 9 10 11 12 13 14)
    }

    /// # Safety
    /// `rows`, `stride`, `steps`, `pitch` and `columns` stay inside `a`, `b` and `out`.
    #[inline(always)]
    unsafe fn multiply<S: Simd, const P: usize, const V: usize>(self, simd: S) {
        let lanes = S::F32_LANES;
        let (a, b) = (self.a.as_ptr(), self.b.as_ptr());
        let zero = simd.splat_f32s(0.0);
        let mut sums = [[zero; V]; P];
        for &[i, j] in self.steps {
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
        let last = self.columns - (V - 1) * lanes;
        let mask = MemMask::new(simd.mask_between_m32s(0, last as u32).mask());
        let out = self.out.as_mut_ptr();
        for p in 0..P {
            for v in 0..V {
                // SAFETY: rows of `columns` elements at `pitch` are inside `out`; the mask leaves out the rest.
                unsafe {
                    let place = out.add(p * self.pitch + v * lanes);
                    let whole = v + 1 < V || last == lanes;
                    if self.update == Update::Add {
                        let before = match whole {
                            true => place.cast::<S::f32s>().read_unaligned(),
                            false => simd.mask_load_ptr_f32s(mask, place),
                        };
                        sums[p][v] = simd.add_f32s(sums[p][v], before);
                    }
                    match whole {
                        true => place.cast::<S::f32s>().write_unaligned(sums[p][v]),
                        false => simd.mask_store_ptr_f32s(mask, place, sums[p][v]),
                    }
                }
            }
        }
    }
}
