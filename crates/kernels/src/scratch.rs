//! Memory for a kernel's own sums.

use std::cell::Cell;

use crate::buffer::Buffer;

thread_local! {
    static KEPT: Cell<Option<Buffer<f64>>> = const { Cell::new(None) };
}

/// Calls `task` with numbers of any value, which the calling thread keeps for the next time.
///
/// Freed after each call, they would go back to the operating system: allocators keep little at the end of their heap. A
/// page fault for every 4 KiB of the next call then costs more than summing what they stand for.
pub(crate) fn with<R>(len: usize, task: impl FnOnce(&mut [f64]) -> R) -> R {
    // Taken out, so that a call within a call finds an empty one.
    let kept = KEPT.take().filter(|numbers| numbers.len() >= len);
    let mut numbers = kept.unwrap_or_else(|| Buffer::filled(len, 0.0));
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
