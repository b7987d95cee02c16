//! Spans of `tracing` around kernels: a subscriber sees which kernels run, how long, and on how many bytes.

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
            bytes = (0usize $(+ size_of_val(&*$slice))+) as u64,
        )
        .entered();
    };
}
pub(crate) use span;
