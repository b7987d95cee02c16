//! The threads that data sets are read and drawn on.

use std::error::Error;
use std::sync::OnceLock;

use super::DataError;

/// Makes sure that there is a rayon pool: the one that the caller is in, or the global one. The latter is started here, because
/// without that its first use would panic if its threads could not be started.
pub(super) fn threads() -> Result<(), DataError> {
    static STARTED: OnceLock<Result<(), String>> = OnceLock::new();
    if rayon::current_thread_index().is_some() {
        return Ok(());
    }
    let start = || {
        let count = std::thread::available_parallelism().map_or(1, |count| count.get());
        let _starting = convoke_memory::Starting::new(count).map_err(|error| error.to_string())?;
        match rayon::ThreadPoolBuilder::new().build_global() {
            // An error without a cause means that the pool is there already: the program has made it.
            Err(error) if error.source().is_some() => Err(error.to_string()),
            _ => Ok(()),
        }
    };
    STARTED.get_or_init(start).clone().map_err(|reason| DataError::Threads { reason })
}
