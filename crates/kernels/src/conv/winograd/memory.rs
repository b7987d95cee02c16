//! Loads and stores of whole vectors without bounds checks in release builds.

use half::bf16;
use pulp::Simd;

use crate::Stored;
use crate::shared::Shared;

/// Most floats of a vector.
pub(super) const LANES: usize = 16;

/// The type of images' numbers. All arithmetic is in f32: loads and stores convert.
pub(super) trait Number: Stored<Compute = f32> {
    /// The vector of the numbers from `from` on.
    ///
    /// # Safety
    /// There are as many numbers as a vector has floats.
    unsafe fn load_vector<S: Simd>(from: *const Self) -> S::f32s;

    /// Writes the nearest numbers to those of a vector from `to` on.
    ///
    /// # Safety
    /// There are as many numbers as a vector has floats, and nobody else uses them.
    unsafe fn store_vector<S: Simd>(to: *mut Self, value: S::f32s);
}

impl Number for f32 {
    #[inline(always)]
    unsafe fn load_vector<S: Simd>(from: *const f32) -> S::f32s {
        // SAFETY: the caller promises that a vector's floats are there; every bit pattern is a vector.
        unsafe { from.cast::<S::f32s>().read_unaligned() }
    }

    #[inline(always)]
    unsafe fn store_vector<S: Simd>(to: *mut f32, value: S::f32s) {
        // SAFETY: the caller promises that there is room for a vector's floats.
        unsafe { to.cast::<S::f32s>().write_unaligned(value) }
    }
}

impl Number for bf16 {
    #[inline(always)]
    unsafe fn load_vector<S: Simd>(from: *const bf16) -> S::f32s {
        let mut floats = [0.0f32; LANES];
        // SAFETY: the caller promises that there are as many numbers as a vector has floats.
        let from = unsafe { std::slice::from_raw_parts(from, S::F32_LANES) };
        bf16::widen(from, &mut floats[..S::F32_LANES]);
        // SAFETY: no vector has more than LANES floats; every bit pattern is a vector.
        unsafe { f32::load_vector::<S>(floats.as_ptr()) }
    }

    #[inline(always)]
    unsafe fn store_vector<S: Simd>(to: *mut bf16, value: S::f32s) {
        let mut floats = [0.0f32; LANES];
        // SAFETY: no vector has more than LANES floats.
        unsafe { f32::store_vector::<S>(floats.as_mut_ptr(), value) };
        // SAFETY: the caller promises that there are as many numbers as a vector has floats, and that nobody else uses them.
        let to = unsafe { std::slice::from_raw_parts_mut(to, S::F32_LANES) };
        bf16::narrow(&floats[..S::F32_LANES], to);
    }
}

/// The vector at `from[at..]`.
///
/// # Safety
/// `from` holds a whole vector there.
#[inline(always)]
pub(super) unsafe fn load<S: Simd, T: Number>(from: &[T], at: usize) -> S::f32s {
    debug_assert!(at + S::F32_LANES <= from.len());
    // SAFETY: the caller promises that a vector's numbers from `at` on are in the slice.
    unsafe { T::load_vector::<S>(from.as_ptr().add(at)) }
}

/// The vector of the numbers of `from`, which are fewer than its floats, and zeros.
#[inline(always)]
pub(super) fn load_part<S: Simd, T: Number>(simd: S, from: &[T]) -> S::f32s {
    let mut floats = [0.0; LANES];
    let floats = &mut floats[..from.len()];
    T::widen(from, floats);
    simd.partial_load_f32s(floats)
}

/// Writes the nearest numbers to those of the first floats of a vector to all of `to`.
#[inline(always)]
pub(super) fn store_part<S: Simd, T: Number>(simd: S, to: &mut [T], value: S::f32s) {
    let mut floats = [0.0; LANES];
    let floats = &mut floats[..to.len()];
    simd.partial_store_f32s(floats, value);
    T::narrow(floats, to);
}

/// Writes a vector to `to[at..]`.
///
/// # Safety
/// `to` holds a whole vector there.
#[inline(always)]
pub(super) unsafe fn store<S: Simd>(to: &mut [f32], at: usize, value: S::f32s) {
    debug_assert!(at + S::F32_LANES <= to.len());
    // SAFETY: the caller promises that a vector's floats from `at` on are in the slice.
    unsafe { f32::store_vector::<S>(to.as_mut_ptr().add(at), value) }
}

/// A square of vectors in memory: the numbers from one row to the next, and from one column to the next.
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
        unsafe { f32::load_vector::<S>(from.as_ptr().add(i * self.row).add(j * self.column)) }
    }

    /// Writes the vector in row `i` and column `j`, counted from `to[at..]`.
    ///
    /// # Safety
    /// `to` holds a whole vector there, and nobody else uses it.
    #[inline(always)]
    pub(super) unsafe fn store<S: Simd, T: Number>(
        self,
        (to, at): (Shared<'_, T>, usize),
        [i, j]: [usize; 2],
        value: S::f32s,
    ) {
        // SAFETY: the caller promises that a vector's numbers from `at + place([i, j])` on, which is the sum of these terms, are
        // in the slice, and that nobody else uses them.
        unsafe { T::store_vector::<S>(to.pointer(at + i * self.row).add(j * self.column), value) }
    }
}
