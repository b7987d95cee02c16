//! Allocations that answer with an error where memory is refused, where the standard library's end the process.
//!
//! What is as large as a user's data, batch or message is allocated by these functions. Small things, such as names, rows of
//! tables and numbers a channel, are not: a program that must not be aborted for want of those either installs
//! `convoke_kernels::backstop::Backstop` as its allocator, which asks [`may_fail`] whether the caller takes an error.

use std::cell::Cell;

/// The operating system refused memory, or no machine has as much.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("out of memory: {bytes} bytes cannot be had")]
pub struct OutOfMemory {
    /// How many bytes were asked for; `usize::MAX` if a number cannot hold them.
    pub bytes: usize,
}

impl OutOfMemory {
    /// `len` elements of this type were asked for.
    pub fn of<T>(len: usize) -> OutOfMemory {
        OutOfMemory { bytes: len.saturating_mul(size_of::<T>()) }
    }
}

/// A result with [`OutOfMemory`].
pub type Result<T> = std::result::Result<T, OutOfMemory>;

/// Bytes of a thread's stack, as the standard library makes it, and what else a thread maps when it starts.
const OF_A_THREAD: usize = (2 << 20) + (256 << 10);

thread_local! {
    static MAY_FAIL: Cell<bool> = const { Cell::new(false) };
}

/// Whether the calling thread is within [`attempt`]: it takes an error for memory that it does not get.
pub fn may_fail() -> bool {
    MAY_FAIL.try_with(Cell::get).unwrap_or(false)
}

/// Runs `allocate`, which does nothing with memory but to ask for it in ways that return an error.
pub fn attempt<R>(allocate: impl FnOnce() -> R) -> R {
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

/// Makes room for `more` elements behind those that are there.
///
/// # Errors
/// If there is no memory for it.
pub fn reserve<T>(values: &mut Vec<T>, more: usize) -> Result<()> {
    attempt(|| values.try_reserve_exact(more))
        .map_err(|_| OutOfMemory::of::<T>(values.len().saturating_add(more)))
}

/// `len` times this value.
///
/// # Errors
/// If there is no memory for it.
pub fn filled<T: Clone>(len: usize, value: T) -> Result<Vec<T>> {
    let mut values = with_capacity(len)?;
    values.resize(len, value);
    Ok(values)
}

/// The first `len` elements, with `value` where there were fewer.
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

/// What an iterator of known length gives.
///
/// # Errors
/// If there is no memory for it.
pub fn collected<T>(from: impl ExactSizeIterator<Item = T>) -> Result<Vec<T>> {
    let mut values = with_capacity(from.len())?;
    values.extend(from);
    Ok(values)
}

/// Whether the system has `bytes` to give now, for what takes memory without a look at whether it gets it. What the allocator has
/// in stock does not count: stacks and machine code do not come from it.
///
/// # Errors
/// If it has not.
pub fn check(bytes: usize) -> Result<()> {
    memmap2::MmapMut::map_anon(bytes.max(1)).map(drop).map_err(|_| OutOfMemory { bytes })
}

/// Whether `count` threads would find memory for their stacks now. A thread that has its stack and no room for what it maps next
/// ends the process, so this is asked before threads are started.
///
/// # Errors
/// If they would not.
pub fn check_threads(count: usize) -> Result<()> {
    check(count.saturating_mul(OF_A_THREAD))
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
        assert_eq!(check_threads(usize::MAX), Err(OutOfMemory { bytes: usize::MAX }));
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
        assert_eq!(check_threads(1), Ok(()));
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
