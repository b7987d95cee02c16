//! Allocations that return an error when there is no memory; the standard library's would end the process.
//!
//! Use these functions for anything as large as a user's data, batch or message. Small objects, such as names, rows of
//! tables and numbers per channel, are allocated as usual. A program that must not abort when memory for those is missing
//! installs `convoke_kernels::backstop::Backstop` as its allocator, which asks [`may_fail`] whether the caller handles an
//! error.

use std::cell::Cell;

mod alone;

pub use alone::{Alone, Started, Starting};

/// The operating system refused memory, or the size is more than any machine has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("out of memory: {bytes} bytes cannot be had")]
pub struct OutOfMemory {
    /// How many bytes were requested; `usize::MAX` if the number does not fit.
    pub bytes: usize,
}

impl OutOfMemory {
    /// The error for a request of `len` elements of this type.
    pub fn of<T>(len: usize) -> OutOfMemory {
        OutOfMemory { bytes: len.saturating_mul(size_of::<T>()) }
    }
}

/// A result with [`OutOfMemory`].
pub type Result<T> = std::result::Result<T, OutOfMemory>;

thread_local! {
    static MAY_FAIL: Cell<bool> = const { Cell::new(false) };
}

/// Whether the calling thread is within [`attempt`], and so handles an error when an allocation fails.
pub fn may_fail() -> bool {
    MAY_FAIL.try_with(Cell::get).unwrap_or(false)
}

/// Runs `allocate`, which may allocate memory only by calls that return an error on failure, and waits for nothing else. While another
/// thread is [`Alone`], this waits.
pub fn attempt<R>(allocate: impl FnOnce() -> R) -> R {
    // Within another attempt, that one holds it.
    let _allocating = if may_fail() { None } else { alone::Allocating::new() };
    without_waiting(allocate)
}

/// As [`attempt`], for the message of a process that ends: it does not wait for other threads.
pub fn without_waiting<R>(allocate: impl FnOnce() -> R) -> R {
    struct Restore(bool);

    impl Drop for Restore {
        fn drop(&mut self) {
            MAY_FAIL.set(self.0);
        }
    }

    let _restore = Restore(MAY_FAIL.replace(true));
    allocate()
}

/// An empty vector with room for `len` elements.
///
/// # Errors
/// If there is no memory for it.
pub fn with_capacity<T>(len: usize) -> Result<Vec<T>> {
    let mut values = Vec::new();
    reserve(&mut values, len)?;
    Ok(values)
}

/// Makes room for `more` elements after the present ones.
///
/// # Errors
/// If there is no memory for it.
pub fn reserve<T>(values: &mut Vec<T>, more: usize) -> Result<()> {
    attempt(|| values.try_reserve_exact(more))
        .map_err(|_| OutOfMemory::of::<T>(values.len().saturating_add(more)))
}

/// A vector of `len` copies of `value`.
///
/// # Errors
/// If there is no memory for it.
pub fn filled<T: Clone>(len: usize, value: T) -> Result<Vec<T>> {
    let mut values = with_capacity(len)?;
    values.resize(len, value);
    Ok(values)
}

/// Cuts `values` to `len` elements, or extends it to `len` with copies of `value`.
///
/// # Errors
/// If there is no memory for it.
pub fn resize<T: Clone>(values: &mut Vec<T>, len: usize, value: T) -> Result<()> {
    reserve(values, len.saturating_sub(values.len()))?;
    values.resize(len, value);
    Ok(())
}

/// A copy of a slice.
///
/// # Errors
/// If there is no memory for it.
pub fn copied<T: Clone>(from: &[T]) -> Result<Vec<T>> {
    let mut values = with_capacity(from.len())?;
    values.extend_from_slice(from);
    Ok(values)
}

/// The items of an iterator of known length.
///
/// # Errors
/// If there is no memory for it.
pub fn collected<T>(from: impl ExactSizeIterator<Item = T>) -> Result<Vec<T>> {
    let mut values = with_capacity(from.len())?;
    values.extend(from);
    Ok(values)
}

/// Checks that the system can give `bytes` now, before code runs that would not survive a refusal. Free memory inside the
/// allocator does not count, because stacks and machine code do not come from it.
///
/// # Errors
/// If the system refuses them.
pub fn check(bytes: usize) -> Result<()> {
    Reserve::new(bytes).map(drop)
}

/// Memory that the system has promised and nobody uses: dropped just before code that would not survive a refusal, it is there for
/// that code, whatever was allocated since.
pub struct Reserve(#[expect(dead_code, reason = "it is only held")] memmap2::MmapMut);

impl Reserve {
    /// Asks the system for `bytes` and holds them.
    ///
    /// # Errors
    /// If the system refuses `bytes`.
    pub fn new(bytes: usize) -> Result<Reserve> {
        memmap2::MmapMut::map_anon(bytes.max(1)).map(Reserve).map_err(|_| OutOfMemory { bytes })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_nobody_has_is_an_error_with_its_bytes() {
        for len in [usize::MAX, usize::MAX / 8, 1 << 47] {
            let bytes = len.saturating_mul(8);
            assert_eq!(with_capacity::<u64>(len), Err(OutOfMemory { bytes }));
            assert_eq!(filled(len, 1.0f64), Err(OutOfMemory { bytes }));
            assert_eq!(resize(&mut vec![1u64], len, 0).map_err(|error| error.bytes), Err(bytes));
        }
        assert_eq!(check(1 << 60), Err(OutOfMemory { bytes: 1 << 60 }));
        assert!(OutOfMemory { bytes: 7 }.to_string().contains("out of memory: 7 bytes"));
    }

    #[test]
    fn what_there_is_has_the_values_and_no_more_room_than_asked_for() {
        assert_eq!(filled(3, 7u8), Ok(vec![7; 3]));
        assert_eq!(copied(&[1, 2]), Ok(vec![1, 2]));
        assert_eq!(collected((0..4).map(|x| x * x)), Ok(vec![0, 1, 4, 9]));
        let mut values = vec![1, 2, 3];
        assert_eq!((resize(&mut values, 5, 9), &values[..]), (Ok(()), &[1, 2, 3, 9, 9][..]));
        assert_eq!((resize(&mut values, 1, 9), &values[..]), (Ok(()), &[1][..]));
    }

    #[test]
    fn only_attempts_may_fail() {
        assert!(!may_fail());
        attempt(|| {
            attempt(|| assert!(may_fail()));
            assert!(may_fail(), "the outer one goes on");
            std::thread::scope(|scope| scope.spawn(|| assert!(!may_fail())).join().unwrap());
        });
        assert!(!may_fail());
        let panicked = std::panic::catch_unwind(|| attempt(|| std::panic::resume_unwind(Box::new(1))));
        assert!(panicked.is_err() && !may_fail());
    }
}
