//! Loads and stores of whole vectors without bounds checks in release builds, and an output that threads share.

use std::marker::PhantomData;

use pulp::Simd;

/// Most floats of a vector.
pub(super) const LANES: usize = 16;

/// The vector at `from[at..]`.
///
/// # Safety
/// `from` holds a whole vector there.
#[inline(always)]
pub(super) unsafe fn load<S: Simd>(from: &[f32], at: usize) -> S::f32s {
    debug_assert!(at + S::F32_LANES <= from.len());
    // SAFETY: inside the slice, as the caller promises; every bit pattern is a vector.
    unsafe { from.as_ptr().add(at).cast::<S::f32s>().read_unaligned() }
}

/// Writes a vector to `to[at..]`.
///
/// # Safety
/// `to` holds a whole vector there.
#[inline(always)]
pub(super) unsafe fn store<S: Simd>(to: &mut [f32], at: usize, value: S::f32s) {
    debug_assert!(at + S::F32_LANES <= to.len());
    // SAFETY: inside the slice, as the caller promises.
    unsafe { to.as_mut_ptr().add(at).cast::<S::f32s>().write_unaligned(value) }
}

/// A slice that several threads write, each in places of its own.
#[derive(Clone, Copy)]
pub(super) struct Shared<'a> {
    start: *mut f32,
    len: usize,
    slice: PhantomData<&'a mut [f32]>,
}

// SAFETY: it only lets its holders write floats, and `store` asks them to keep to different places.
unsafe impl Send for Shared<'_> {}
// SAFETY: as above.
unsafe impl Sync for Shared<'_> {}

impl<'a> Shared<'a> {
    pub(super) fn new(slice: &'a mut [f32]) -> Shared<'a> {
        Shared { start: slice.as_mut_ptr(), len: slice.len(), slice: PhantomData }
    }

    /// Elements `at..at + len`.
    ///
    /// # Safety
    /// They lie inside, and nobody else has a reference to any of them while this one lives.
    #[inline(always)]
    #[allow(clippy::mut_from_ref)]
    pub(super) unsafe fn part(&self, at: usize, len: usize) -> &mut [f32] {
        debug_assert!(at + len <= self.len);
        // SAFETY: inside the slice and not aliased, as the caller promises.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(at), len) }
    }
}
