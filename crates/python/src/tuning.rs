//! Tuning results for Python: the folder that the program shares, as one file, and an engine's choices.

use std::io;
use std::path::PathBuf;

use convoke_autograd::Isa;
use convoke_kernels::tune::{Cache, CacheError, Choice, scope};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::engine::Engine;
use crate::error::released;

/// The name of this kind of machine in a file of tuning results.
#[pyfunction]
pub(crate) fn tuning_scope() -> String {
    scope(Isa::detect())
}

/// Writes every sound result of a folder to one file. Gives how many.
#[pyfunction]
pub(crate) fn tuning_export(py: Python<'_>, folder: PathBuf, file: PathBuf) -> PyResult<usize> {
    py.detach(|| Cache::new(folder, Isa::detect()).export(&file)).map_err(exception)
}

/// Adds the results of a file to a folder where it has none. Gives how many were added and how many were there.
#[pyfunction]
pub(crate) fn tuning_import(py: Python<'_>, folder: PathBuf, file: PathBuf) -> PyResult<[usize; 2]> {
    py.detach(|| Cache::new(folder, Isa::detect()).import(&file)).map_err(exception)
}

/// The choices that an engine has made, as a list in JSON: the key of each, and its algorithm.
#[pyfunction]
pub(crate) fn tuning_choices(py: Python<'_>, engine: &Engine) -> PyResult<String> {
    // Somebody else may hold the tuner, and measure, for a second.
    let choices = py.detach(|| engine.device.tuner().choices());
    serde_json::to_string(&choices).map_err(wrong)
}

/// Makes an engine take these choices over, from what [`tuning_choices`] gives.
#[pyfunction]
pub(crate) fn tuning_adopt(py: Python<'_>, engine: &Engine, choices: &str) -> PyResult<()> {
    let choices: Vec<Choice> = serde_json::from_str(choices).map_err(wrong)?;
    let isa = engine.device.compute().isa();
    py.detach(|| engine.device.tuner().adopt(isa, choices));
    Ok(())
}

/// Measures what a choice, in JSON, was made for, unless a result is stored. Gives whether it was measured. Choices for other operations
/// than convolutions stay as they are.
#[pyfunction]
pub(crate) fn tuning_measure(py: Python<'_>, engine: &Engine, choice: &str) -> PyResult<bool> {
    let choice: Choice = serde_json::from_str(choice).map_err(wrong)?;
    let Some((problem, pass)) = choice.key.convolution() else { return Ok(false) };
    released(py, || {
        let (tuner, cpu) = (engine.device.tuner(), engine.device.compute());
        if tuner.cached(&problem, pass, cpu).is_some() {
            return Ok(false);
        }
        tuner.tune(&problem, pass, cpu, &mut |_| ())?;
        Ok(true)
    })
}

/// The error of text that is not what this file writes.
fn wrong(error: serde_json::Error) -> PyErr {
    PyValueError::new_err(format!("not a choice: {error}"))
}

/// `OSError` and its kinds where the file system refuses, else `ValueError`.
fn exception(error: CacheError) -> PyErr {
    match &error {
        CacheError::Io { error: cause, .. } => io::Error::new(cause.kind(), error.to_string()).into(),
        _ => PyValueError::new_err(error.to_string()),
    }
}
