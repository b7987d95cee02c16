//! Models: modules and their parameters, models as data, their files, and what blocks keep for backward.
//!
//! A [`Module`] maps a tensor to a tensor and holds [`Parameter`]s under PyTorch's names; `#[derive(Module)]` implements it. A
//! [`graph::Graph`] is a module that is made of data. What trains them is in `convoke-nn`, which has all names of this crate.

pub mod graph;
pub mod init;
mod module;
pub mod modules;
#[cfg(feature = "onnx")]
pub mod onnx;
mod parameter;
pub mod planner;
mod random;

// The code that `#[derive(Module)]` generates refers to this crate as `::convoke_graph`, also when it is used inside this crate.
extern crate self as convoke_graph;

pub use convoke_autograd::{Error, Result};
pub use convoke_derive::GraphModule as Module;
pub use init::Init;
pub use module::{Field, Forward, Module, ModuleExt, Part, Parts, State, TrainingMode};
pub use parameter::{Buffer, Counter, Parameter};
pub use random::Generator;
#[doc(hidden)]
pub use random::GeneratorState;
