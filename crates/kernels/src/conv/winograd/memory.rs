//! Loads and stores of whole vectors without bounds checks in release builds.

use pulp::Simd;

use crate::shared::Shared;

/// Most floats of a vector.
pub(super) const LANES: usize = 16;

/// The vector at `from[at..]`.
///
/// # Safety
/// `from` holds a whole vector there.
#[inline(always)]
pub(super) unsafe fn load<S: Simd>(from: &[f32], at: usize) -> S::f32s {
    debug_assert!(at + S::F32_LANES <= from.len());
    // SAFETY: the caller promises that a vector's floats from `at` on are in the slice; every bit pattern is a vector.
    unsafe { from.as_ptr().add(at).cast::<S::f32s>().read_unaligned() }
}

/// Writes a vector to `to[at..]`.
///
/// # Safety
/// `to` holds a whole vector there.
#[inline(always)]
pub(super) unsafe fn store<S: Simd>(to: &mut [f32], at: usize, value: S::f32s) {
    debug_assert!(at + S::F32_LANES <= to.len());
    // SAFETY: the caller promises that a vector's floats from `at` on are in the slice.
    unsafe { to.as_mut_ptr().add(at).cast::<S::f32s>().write_unaligned(value) }
}

/// A square of vectors in memory: the floats from one row to the next, and from one column to the next.
///
/// An address is a sum of two terms that whole rows or columns share. If addresses were multiplied out for each vector, they
/// would take as long as the vectors' own arithmetic.
#[derive(Clone, Copy)]
pub(super) struct Grid {
    pub(super) row: usize,
    pub(super) column: usize,
}

impl Grid {
    /// Rows of `side` vectors, where each vector follows `stride` floats after the one before.
    pub(super) fn of_points(side: usize, stride: usize) -> Grid {
        Grid { row: side * stride, column: stride }
    }

    /// Floats from the first vector to that in row `i` and column `j`.
    #[inline(always)]
    pub(super) fn place(self, [i, j]: [usize; 2]) -> usize {
        i * self.row + j * self.column
    }

    /// Whether a slice of `len` has whole vectors in all of `side` rows and columns from `at` on.
    #[inline(always)]
    pub(super) fn fits<S: Simd>(self, side: usize, at: usize, len: usize) -> bool {
        at + self.place([side - 1, side - 1]) + S::F32_LANES <= len
    }

    /// The vector in row `i` and column `j`.
    ///
    /// # Safety
    /// `from` holds a whole vector there.
    #[inline(always)]
    pub(super) unsafe fn load<S: Simd>(self, from: &[f32], [i, j]: [usize; 2]) -> S::f32s {
        debug_assert!(self.place([i, j]) + S::F32_LANES <= from.len());
        // SAFETY: the caller promises that a vector's floats from `place([i, j])` on, which is the sum of these two terms, are in
        // the slice; every bit pattern is a vector.
        unsafe { from.as_ptr().add(i * self.row).add(j * self.column).cast::<S::f32s>().read_unaligned() }
    }

    /// Writes the vector in row `i` and column `j`, counted from `to[at..]`.
    ///
    /// # Safety
    /// `to` holds a whole vector there, and nobody else uses it.
    #[inline(always)]
    pub(super) unsafe fn store<S: Simd>(
        self,
        (to, at): (Shared<'_, f32>, usize),
        [i, j]: [usize; 2],
        value: S::f32s,
    ) {
        // SAFETY: the caller promises that a vector's floats from `at + place([i, j])` on, which is the sum of these terms, are
        // in the slice, and that nobody else uses them.
        unsafe {
            let row = to.pointer(at + i * self.row);
            row.add(j * self.column).cast::<S::f32s>().write_unaligned(value);
        }
    }
}
