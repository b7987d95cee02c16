//! A device for Python: threads, memory, and the tuner with its cache.

use std::path::PathBuf;
use std::time::Duration;

use convoke_autograd::{Cpu, Device, DeviceOptions};
use convoke_kernels::tune::{Effort, Tuner, TunerOptions};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::error::released;

/// Threads, memory, and the tuner that chooses algorithms.
///
/// A process needs one for each number of threads. After a fork, the child needs its own.
#[pyclass(frozen, weakref, module = "torch_convoke._engine")]
pub(crate) struct Engine {
    pub(crate) device: Device,
}

#[pymethods]
impl Engine {
    /// threads: 1 to 1024. cache: the folder of tuning results, or None to keep none. effort: "heuristic", "measure" or "exhaustive".
    /// budget: seconds that timing may take in all; after that, algorithms are chosen by estimate. budget_each: those for one choice.
    #[new]
    #[pyo3(signature = (threads, cache = None, effort = "measure", budget = 30.0, budget_each = 1.0))]
    fn new(
        py: Python<'_>,
        threads: usize,
        cache: Option<PathBuf>,
        effort: &str,
        budget: f64,
        budget_each: f64,
    ) -> PyResult<Engine> {
        let effort = match effort {
            "heuristic" => Effort::Heuristic,
            "measure" => Effort::Measure,
            "exhaustive" => Effort::Exhaustive,
            other => {
                let reason = format!("effort must be heuristic, measure or exhaustive, not {other:?}");
                return Err(PyValueError::new_err(reason));
            }
        };
        let duration = |seconds: f64| match seconds {
            seconds if seconds >= 0.0 => Ok(Duration::from_secs_f64(seconds.min(1e9))),
            other => Err(PyValueError::new_err(format!("a budget must be 0 seconds or more, not {other}"))),
        };
        let (total_budget, budget) = (duration(budget)?, duration(budget_each)?);
        let options = TunerOptions { effort, total_budget, budget, cache, ..TunerOptions::default() };
        released(py, || {
            let tuner = Tuner::new(options)?;
            Ok(Engine {
                device: Device::new(DeviceOptions { tuner, ..DeviceOptions::new(Cpu::new(threads)?) }),
            })
        })
    }

    /// An engine that checks shapes and computes nothing.
    fn dry(&self) -> Engine {
        Engine { device: self.device.dry() }
    }

    /// The number of threads, the caller's included.
    #[getter]
    fn threads(&self) -> usize {
        self.device.compute().threads()
    }

    /// The instruction set that kernels use, such as "AVX-512".
    #[getter]
    fn isa(&self) -> String {
        self.device.compute().isa().to_string()
    }

    /// Bytes in use now, the most since the last `reset_peak`, bytes borrowed from Python, and bytes given to Python.
    fn memory(&self) -> (usize, usize, usize, usize) {
        let stats = self.device.memory();
        (stats.live_bytes, stats.peak_bytes, stats.borrowed_bytes, stats.exported_bytes)
    }

    /// Starts the peak of `memory` anew.
    fn reset_peak(&self) {
        self.device.reset_peak();
    }

    /// Returns cached memory to the operating system.
    fn trim(&self) {
        self.device.trim();
    }

    /// From now on, a convolution may use at most this many bytes of workspace; None removes the limit.
    fn limit_workspace(&self, bytes: Option<usize>) {
        self.device.tuner().limit_workspace(bytes);
    }

    /// Measures one of the choices that were made by estimate because `budget` was spent: the one that took the most time so far, among
    /// those asked for at least so often that took at least so many seconds. Gives whether one was measured, and how many wait still.
    fn measure_next(
        &self,
        py: Python<'_>,
        at_least_uses: u64,
        at_least_seconds: f64,
    ) -> PyResult<(bool, usize)> {
        let at_least = Duration::try_from_secs_f64(at_least_seconds)
            .map_err(|error| PyValueError::new_err(format!("{at_least_seconds} are no seconds: {error}")))?;
        released(py, || {
            let tuner = self.device.tuner();
            Ok((tuner.measure_next(at_least_uses, at_least).is_some(), tuner.pending()))
        })
    }

    /// How many choices wait to be measured.
    #[getter]
    fn pending(&self) -> usize {
        self.device.tuner().pending()
    }

    /// The algorithms chosen so far: (problem, pass, algorithm).
    fn choices(&self) -> Vec<(String, String, String)> {
        let choices = self.device.tuner().choices().into_iter();
        choices.map(|choice| (choice.key.problem, choice.key.pass, choice.algorithm)).collect()
    }
}

/// The processors that this process may use: those of its affinity mask, and no more than its container's quota.
#[pyfunction]
pub(crate) fn available_threads() -> usize {
    std::thread::available_parallelism().map_or(1, |count| count.get().min(1024))
}

/// Where the program and the package keep tuning results; None if the system has no folder for caches.
#[pyfunction]
pub(crate) fn cache_path() -> Option<PathBuf> {
    directories::ProjectDirs::from("", "", "convoke").map(|dirs| dirs.cache_dir().join("tuning"))
}

/// The version of the engine.
#[pyfunction]
pub(crate) fn version() -> &'static str {
    env!("CARGO_PKG_VERSION")
}
