//! Modules, initialisers, optimizers, data sets, models, training runs and checkpoints.
//!
//! A [`Module`] maps a tensor to a tensor and holds [`Parameter`]s under PyTorch's names; `#[derive(Module)]` implements it.
//! [`training::Trainer`] combines a model, an [`Optimizer`] and a data set. It never prints; it reports every step to its caller.

mod all_reduce;
mod batch;
pub mod checkpoint;
mod clip;
mod config_error;
pub mod data_parallel;
mod difference;
mod float_json;
pub mod metrics;
pub mod models;
pub mod objective;
mod optimizer;
mod parameter_rules;
pub mod planner;
mod precision;
mod schedule;
pub mod training;

// The code that `#[derive(Module)]` generates refers to this crate as `::convoke_nn`, also when it is used inside this crate.
extern crate self as convoke_nn;

pub use all_reduce::all_reduce;
pub use batch::batch;
pub use clip::clip_grad_norm;
pub use config_error::ConfigError;
#[doc(inline)]
pub use convoke_data as data;
pub use convoke_derive::Module;
#[doc(inline)]
pub use convoke_graph::*;
pub use optimizer::{Optimizer, OptimizerOptions, OptimizerSpec, OptimizerSpecs, Rule};
pub use parameter_rules::{Decay, ParameterRules};
pub use precision::Precision;
pub use schedule::{Schedule, SchedulePoint, StepLr};
