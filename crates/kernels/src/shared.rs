//! An output that several threads write, each in places of its own.

use std::marker::PhantomData;

/// A slice of which parts are handed out without a look at who else has them.
#[derive(Clone, Copy)]
pub(crate) struct Shared<'a, T> {
    start: *mut T,
    len: usize,
    slice: PhantomData<&'a mut [T]>,
}

// SAFETY: it only lets its holders write elements, and `part` asks them to keep to different places.
unsafe impl<T: Send> Send for Shared<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for Shared<'_, T> {}

impl<'a, T> Shared<'a, T> {
    pub(crate) fn new(slice: &'a mut [T]) -> Shared<'a, T> {
        Shared { start: slice.as_mut_ptr(), len: slice.len(), slice: PhantomData }
    }

    /// Elements `at..at + len`.
    ///
    /// # Safety
    /// They lie inside, and nobody else has a reference to any of them while this one lives.
    #[inline(always)]
    #[allow(clippy::mut_from_ref)]
    pub(crate) unsafe fn part(&self, at: usize, len: usize) -> &mut [T] {
        debug_assert!(at + len <= self.len);
        // SAFETY: inside the slice and not aliased, as the caller promises.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(at), len) }
    }

    /// Where the element at `at` lies.
    ///
    /// # Safety
    /// It lies inside.
    #[inline(always)]
    pub(crate) unsafe fn pointer(&self, at: usize) -> *mut T {
        debug_assert!(at < self.len);
        // SAFETY: inside the slice, as the caller promises.
        unsafe { self.start.add(at) }
    }
}
