//! Loads and stores of whole vectors without bounds checks in release builds.

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
