//! Spans of `tracing` around kernels: a subscriber sees which kernels run, how long, and on how many bytes.

use crate::{Slice, SliceMut};

/// The target of every span of this workspace.
pub const TARGET: &str = "convoke";

/// Enters a span of a kernel that reads and writes at least all of these slices, until the end of the scope.
///
/// Without a subscriber it costs one read of an atomic number.
macro_rules! span {
    ($name:literal, $($slice:expr),+ $(,)?) => {
        let _span = tracing::trace_span!(
            target: $crate::profile::TARGET,
            $name,
            bytes = (0usize $(+ $crate::profile::InMemory::bytes_in_memory(&$slice))+) as u64,
        )
        .entered();
    };
}
pub(crate) use span;

/// What a span counts.
pub(crate) trait InMemory {
    fn bytes_in_memory(&self) -> usize;
}

impl<T> InMemory for &[T] {
    fn bytes_in_memory(&self) -> usize {
        size_of_val(*self)
    }
}

impl<T> InMemory for &mut [T] {
    fn bytes_in_memory(&self) -> usize {
        size_of_val(*self)
    }
}

impl InMemory for Slice<'_> {
    fn bytes_in_memory(&self) -> usize {
        self.len() * self.dtype().size()
    }
}

impl InMemory for SliceMut<'_> {
    fn bytes_in_memory(&self) -> usize {
        self.as_slice().bytes_in_memory()
    }
}
