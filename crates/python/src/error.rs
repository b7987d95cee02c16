//! Errors and panics as Python's exceptions, with the same words.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

use convoke_autograd::Error;
use pyo3::exceptions::{PyMemoryError, PyRuntimeError};
use pyo3::prelude::*;

/// An error of an operation as an exception.
pub(crate) fn exception(error: Error) -> PyErr {
    let out_of_memory =
        matches!(error, Error::Memory { .. } | Error::Kernel(convoke_kernels::Error::Memory(_)));
    match out_of_memory {
        true => PyMemoryError::new_err(error.to_string()),
        false => PyRuntimeError::new_err(error.to_string()),
    }
}

/// Runs `work` without the interpreter's lock, so that other threads run.
pub(crate) fn released<T: Send>(
    py: Python<'_>,
    work: impl FnOnce() -> convoke_autograd::Result<T> + Send,
) -> PyResult<T> {
    let result = py.detach(|| catch_unwind(AssertUnwindSafe(work)));
    match result {
        Ok(result) => result.map_err(exception),
        Err(panic) => Err(PyRuntimeError::new_err(format!(
            "convoke failed, which is a mistake in it; please report it: {}",
            words(&*panic)
        ))),
    }
}

/// What a panic says.
fn words(panic: &(dyn Any + Send)) -> &str {
    match (panic.downcast_ref::<&str>(), panic.downcast_ref::<String>()) {
        (Some(text), _) => text,
        (None, Some(text)) => text,
        (None, None) => "no reason was given",
    }
}
