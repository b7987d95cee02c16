//! Spans of `tracing` around kernels: a subscriber sees what runs, how long, and on how much.

/// The target of every span of this workspace.
pub const TARGET: &str = "convoke";

/// Enters a span of a kernel that reads and writes at least all of these slices, until the end of the scope.
///
/// Where nobody listens it costs a look at an atomic number.
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
