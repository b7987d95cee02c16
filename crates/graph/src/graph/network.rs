//! The nodes of a definition in the order in which they run, with numbers instead of names.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, PoisonError};

use convoke_autograd::{Error, Result};

use super::{Definition, Disorder, Initial, Node, Op, in_order};
use crate::modules::{ANY, BatchNorm, ConvBnMode, FusedBlock, Keep};
use crate::{Module, Parameter};

/// A definition whose names are resolved. Nodes that no output needs are left out.
pub(super) struct Network {
    /// In the order in which they run.
    pub(super) nodes: Vec<NetworkNode>,
    /// The values of the definition's inputs.
    pub(super) inputs: Vec<usize>,
    /// The values of its outputs.
    pub(super) outputs: Vec<usize>,
    /// Stored arrays, and those of constant nodes.
    pub(super) stored: Vec<StoredValue>,
    /// The name of each value.
    pub(super) names: Vec<String>,
}

#[derive(Clone)]
pub(super) struct NetworkNode {
    pub(super) name: String,
    pub(super) op: Op,
    pub(super) inputs: Vec<Option<usize>>,
    pub(super) outputs: Vec<Option<usize>>,
    /// What it has besides its operation.
    pub(super) layer: Option<Layer>,
}

/// What a node has besides its operation: state, switches.
#[derive(Clone)]
pub(super) enum Layer {
    /// The block of a convolution whose only reader is a batch norm.
    Block(Arc<FusibleConv>),
    Norm(Arc<Norm>),
    /// Dropout of elements or of samples.
    Dropout(Arc<NamedDropout>),
}

/// A batch norm with running statistics.
pub(super) struct Norm {
    pub(super) name: String,
    pub(super) layer: BatchNorm<ANY>,
}

pub(super) struct NamedDropout {
    pub(super) name: String,
    pub(super) layer: Box<dyn Module>,
}

/// A convolution that can run as one with the batch norm behind it.
pub(super) struct FusibleConv {
    pub(super) name: String,
    pub(super) weight: Parameter,
    pub(super) bias: Option<Parameter>,
    pub(super) mode: ConvBnMode,
    pub(super) keep: Mutex<Keep>,
}

impl FusedBlock for FusibleConv {
    fn weight(&self) -> &Parameter {
        &self.weight
    }

    fn mode(&self) -> ConvBnMode {
        self.mode
    }

    fn keep(&self) -> Keep {
        *self.keep.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set_keep(&self, keep: Keep) {
        *self.keep.lock().unwrap_or_else(PoisonError::into_inner) = keep;
    }
}

pub(super) struct StoredValue {
    pub(super) value: usize,
    pub(super) values: Initial,
    /// See [`super::Stored::trained`].
    pub(super) trained: Option<bool>,
}

pub(super) fn invalid<T>(reason: impl Into<String>) -> Result<T> {
    Err(Error::Invalid { operation: "graph", reason: reason.into() })
}

/// Text of a file in quotes, without characters that a terminal would obey.
pub(super) fn quoted(text: &str) -> String {
    format!("{text:?}")
}

impl Network {
    pub(super) fn new(definition: &Definition) -> Result<Network> {
        let ordered = match in_order(definition) {
            Ok(ordered) => ordered,
            Err(Disorder { value, reason }) => {
                return invalid(format!("the value {}: {reason}", quoted(&value)));
            }
        };
        let mut needed: HashSet<&str> = definition.outputs.iter().map(String::as_str).collect();
        let mut kept: Vec<&Node> = Vec::new();
        for node in ordered.into_iter().rev() {
            if node.outputs.iter().any(|name| needed.contains(name.as_str())) {
                needed.extend(node.inputs.iter().map(String::as_str).filter(|name| !name.is_empty()));
                kept.push(node);
            }
        }
        let mut numbers = HashMap::new();
        let mut names = Vec::new();
        // The number of a value, which is new if the name is.
        let mut number = |name: &String| {
            *numbers.entry(name.clone()).or_insert_with(|| {
                names.push(name.clone());
                names.len() - 1
            })
        };
        let inputs = definition.inputs.iter().map(|input| number(&input.name)).collect();
        let mut stored: Vec<StoredValue> = definition
            .stored
            .iter()
            .map(|entry| {
                let (value, values) = (number(&entry.name), entry.values.clone());
                StoredValue { value, values, trained: entry.trained }
            })
            .collect();
        let mut nodes = Vec::with_capacity(kept.len());
        for node in kept.into_iter().rev() {
            let mut numbers = |names: &[String]| -> Vec<Option<usize>> {
                names.iter().map(|name| (!name.is_empty()).then(|| number(name))).collect()
            };
            let (inputs, outputs) = (numbers(&node.inputs), numbers(&node.outputs));
            if let (Op::Constant(array), &[Some(value)]) = (&node.op, &outputs[..]) {
                stored.push(StoredValue { value, values: array.clone().into(), trained: None });
                continue;
            }
            let (name, op) = (node.name.clone(), node.op.clone());
            nodes.push(NetworkNode { name, op, inputs, outputs, layer: None });
        }
        let outputs = definition.outputs.iter().map(number).collect();
        Ok(Network { nodes, inputs, outputs, stored, names })
    }

    /// Who reads each value: the node, and the number of its input.
    pub(super) fn readers(&self) -> Vec<Vec<(usize, usize)>> {
        let mut readers = vec![Vec::new(); self.names.len()];
        for (index, node) in self.nodes.iter().enumerate() {
            for (place, value) in node.inputs.iter().enumerate() {
                if let &Some(value) = value {
                    readers[value].push((index, place));
                }
            }
        }
        readers
    }

    /// The node that makes each value.
    pub(super) fn makers(&self) -> Vec<Option<usize>> {
        let mut makers = vec![None; self.names.len()];
        for (index, node) in self.nodes.iter().enumerate() {
            node.outputs.iter().flatten().for_each(|&value| makers[value] = Some(index));
        }
        makers
    }
}

impl NetworkNode {
    /// How errors name it.
    pub(super) fn described(&self) -> String {
        let name = if self.name.is_empty() { String::new() } else { format!(" {}", quoted(&self.name)) };
        format!("node{name} ({})", self.op.name())
    }
}
