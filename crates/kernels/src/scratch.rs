//! Scratch memory for a kernel's sums, kept by each thread.

use std::cell::Cell;

use crate::memory::AlignedVec;

thread_local! {
    static KEPT: Cell<Option<AlignedVec<f64>>> = const { Cell::new(None) };
}

/// Calls `task` with `len` numbers of any value. The calling thread keeps the memory for the next call.
///
/// If it were freed after each call, the allocator would return it to the operating system, since it keeps little at the
/// end of its heap. The next call would then have a page fault for every 4 KiB, which costs more than the summing.
pub(crate) fn with<R>(len: usize, task: impl FnOnce(&mut [f64]) -> R) -> R {
    // Taken out of its place, so that a nested call finds none and allocates its own.
    let kept = KEPT.take().filter(|numbers| numbers.len() >= len);
    let mut numbers = kept.unwrap_or_else(|| AlignedVec::filled(len, 0.0));
    let result = task(&mut numbers[..len]);
    KEPT.set(Some(numbers));
    result
}

#[cfg(test)]
mod tests {
    #[test]
    fn calls_within_calls_have_their_own_numbers() {
        let place = super::with(100, |outer| {
            outer.fill(1.0);
            super::with(50, |inner| inner.fill(2.0));
            assert!(outer.iter().all(|&x| x == 1.0));
            outer.as_ptr()
        });
        assert_eq!(super::with(100, |again| again.as_ptr()), place, "the larger one is kept");
    }
}
