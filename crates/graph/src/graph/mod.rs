//! A model as data: nodes over named values.

mod array;
mod builder;
mod class_activation;
mod describe;
mod fuse;
mod head;
mod initial;
mod input;
mod known;
mod module;
mod network;
pub(crate) mod ops;
mod order;
mod plan;
mod record;
mod rewrite;
mod roles;
mod run;

pub use array::{Array, Data, Kind};
pub use builder::{Bias, Builder, ConvSpec, PoolSpec, Scheme, Value, Weights};
pub use convoke_autograd::{Arithmetic, ReduceKind};
pub use describe::{Description, StepDescription};
#[doc(hidden)]
pub use head::Ending;
pub use initial::Initial;
pub use input::{Dimension, Input};
pub use module::Graph;
pub use ops::*;
pub(crate) use order::{Disorder, in_order};
pub use record::{record, record_all};

use serde::{Deserialize, Serialize};

/// A model as data. Values have names; each is an input, a [`Stored`] array, or the output of one node.
///
/// [`Builder`] makes one. It holds no tensors, so it can be built on any device, in any type, any number of times. It can also be
/// written as JSON, with serde, and read from it.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Definition {
    /// The model's name, for messages.
    pub name: String,
    /// What it is given.
    pub inputs: Vec<Input>,
    /// The names of the values that it gives.
    pub outputs: Vec<String>,
    /// What it computes, in any order.
    pub nodes: Vec<Node>,
    /// What it starts with.
    pub stored: Vec<Stored>,
}

/// A step of the computation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Node {
    /// The name of the node, for messages.
    pub name: String,
    /// What it computes.
    pub op: Op,
    /// The names of the values that it reads; an empty name is an input that is left out.
    pub inputs: Vec<String>,
    /// The names of its outputs; an empty name is one that nobody reads.
    pub outputs: Vec<String>,
}

/// An array that belongs to the model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Stored {
    /// The name of the value, also in checkpoints.
    pub name: String,
    /// The elements of the array, or how they are made.
    pub values: Initial,
    /// Whether it is trained. `None` if nobody said so, as in an ONNX file: then it follows from who reads it.
    pub trained: Option<bool>,
}
