//! The compiled part of `torch_convoke`: convoke's graphs, batch norm and tuner for Python, on tensors that are exchanged by DLPack.
//!
//! It knows no PyTorch. The Python package around it captures models, calls this from autograd functions, and documents what users
//! see; this is its private part, which may change with it.

mod batch_norm;
mod conv_bn;
mod dlpack;
mod engine;
mod error;
mod graph;
mod openmp;
mod planner;
mod tuning;

use pyo3::prelude::*;

#[pymodule]
mod _engine {
    #[pymodule_export]
    use super::batch_norm::{
        batch_norm_backward_elemt, batch_norm_backward_reduce, batch_norm_elemt, batch_norm_gather,
        batch_norm_moments,
    };
    #[pymodule_export]
    use super::conv_bn::conv_bn;
    #[pymodule_export]
    use super::engine::Engine;
    #[pymodule_export]
    use super::engine::{available_threads, cache_path, version};
    #[pymodule_export]
    use super::graph::{Graph, Tape};
    #[pymodule_export]
    use super::openmp::use_openmp;
    #[pymodule_export]
    use super::planner::{Plan, Planner, lighten, step_memory};
    #[pymodule_export]
    use super::tuning::{
        tuning_adopt, tuning_choices, tuning_export, tuning_import, tuning_measure, tuning_scope,
    };
}
