//! An output that several threads write, each its own elements.

use std::marker::PhantomData;

/// A slice that gives out mutable parts without a check that they do not overlap.
#[derive(Clone, Copy)]
pub(crate) struct Shared<'a, T> {
    start: *mut T,
    len: usize,
    slice: PhantomData<&'a mut [T]>,
}

// SAFETY: it stands for the `&mut [T]` that it was made of, which may go to another thread if `T` may.
unsafe impl<T: Send> Send for Shared<'_, T> {}
// SAFETY: the only calls that give several threads access to elements are `part` and `pointer`, whose contracts make them
// use different elements. Each element is then used by one thread at a time, as if it had been sent there: `T: Send` is
// enough.
unsafe impl<T: Send> Sync for Shared<'_, T> {}

impl<'a, T> Shared<'a, T> {
    pub(crate) fn new(slice: &'a mut [T]) -> Shared<'a, T> {
        Shared { start: slice.as_mut_ptr(), len: slice.len(), slice: PhantomData }
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Elements `at..at + len`.
    ///
    /// # Panics
    /// If they are not all inside the slice.
    ///
    /// # Safety
    /// Nobody else reads or writes any of them while this reference lives.
    #[inline(always)]
    #[allow(clippy::mut_from_ref)]
    pub(crate) unsafe fn part(&self, at: usize, len: usize) -> &mut [T] {
        assert!(at <= self.len && len <= self.len - at, "elements {at} to {at} + {len} of {}", self.len);
        // SAFETY: `at..at + len` are elements of the slice that this was made of, which is borrowed for as long as this lives,
        // and the caller promises that nobody else uses them meanwhile.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(at), len) }
    }

    /// The address of the element at `at`, which need not be valid.
    #[inline(always)]
    pub(crate) fn address(&self, at: usize) -> *const T {
        self.start.wrapping_add(at)
    }

    /// Where the element at `at` lies.
    ///
    /// # Safety
    /// `at` is inside the slice.
    #[inline(always)]
    pub(crate) unsafe fn pointer(&self, at: usize) -> *mut T {
        debug_assert!(at < self.len);
        // SAFETY: the caller promises that `at` is below the length of the slice that this was made of.
        unsafe { self.start.add(at) }
    }
}
