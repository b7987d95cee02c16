//! The nodes of a definition in the order in which they run, with numbers instead of names.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use convoke_autograd::{Error, Result};

use super::{Definition, Initial, Node, Op};
use crate::Parameter;
use crate::modules::{ANY, BatchNorm, ConvBnMode, Dropout, FusedBlock, Keep};

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
    /// Of a convolution whose only reader is a batch norm.
    Block(Arc<Block>),
    Norm(Arc<Norm>),
    Dropout(Arc<NamedDropout>),
}

/// A batch norm with running statistics.
pub(super) struct Norm {
    pub(super) name: String,
    pub(super) layer: BatchNorm<ANY>,
}

pub(super) struct NamedDropout {
    pub(super) name: String,
    pub(super) layer: Dropout,
}

/// A convolution that can run as one with the batch norm behind it.
pub(super) struct Block {
    pub(super) name: String,
    pub(super) weight: Parameter,
    pub(super) bias: Option<Parameter>,
    pub(super) mode: ConvBnMode,
    pub(super) keep: Mutex<Keep>,
}

impl FusedBlock for Block {
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
        let mut numbers = HashMap::new();
        let mut names = Vec::new();
        let mut define = |name: &str| {
            let number = names.len();
            match numbers.insert(name.to_owned(), number) {
                Some(_) => invalid(format!("the value {} is made twice", quoted(name))),
                None => {
                    names.push(name.to_owned());
                    Ok(number)
                }
            }
        };
        let inputs = definition.inputs.iter().map(|input| define(&input.name)).collect::<Result<_>>()?;
        let mut stored = Vec::new();
        for entry in &definition.stored {
            stored.push(StoredValue { value: define(&entry.name)?, values: entry.values.clone() });
        }
        let mut made = Vec::with_capacity(definition.nodes.len());
        for node in &definition.nodes {
            let outputs: Vec<Option<usize>> = node
                .outputs
                .iter()
                .map(|name| if name.is_empty() { Ok(None) } else { define(name).map(Some) })
                .collect::<Result<_>>()?;
            if let (Op::Constant(array), &[Some(value)]) = (&node.op, &outputs[..]) {
                stored.push(StoredValue { value, values: array.clone().into() });
            }
            made.push(outputs);
        }
        let number = |name: &str, reader: &str| match numbers.get(name) {
            Some(&number) => Ok(number),
            None => invalid(format!("{reader} reads {}, which nothing makes", quoted(name))),
        };
        let outputs = definition
            .outputs
            .iter()
            .map(|name| number(name, "the model's output"))
            .collect::<Result<Vec<usize>>>()?;
        let mut nodes = Vec::new();
        for (node, outputs) in definition.nodes.iter().zip(made) {
            if matches!(node.op, Op::Constant(_)) {
                continue;
            }
            let reader = describe(node);
            let inputs = node
                .inputs
                .iter()
                .map(|name| if name.is_empty() { Ok(None) } else { number(name, &reader).map(Some) })
                .collect::<Result<Vec<_>>>()?;
            nodes.push(NetworkNode {
                name: node.name.clone(),
                op: node.op.clone(),
                inputs,
                outputs,
                layer: None,
            });
        }
        let mut network = Network { nodes, inputs, outputs, stored, names };
        network.sort()?;
        Ok(network)
    }

    /// Brings the nodes that an output needs into an order in which they can run.
    fn sort(&mut self) -> Result<()> {
        let makers = self.makers();
        // Nodes keep their order where they can: a depth-first search that starts at the nodes in order.
        let mut needed = vec![false; self.nodes.len()];
        let mut stack: Vec<usize> = self.outputs.iter().filter_map(|&value| makers[value]).collect();
        while let Some(index) = stack.pop() {
            if !std::mem::replace(&mut needed[index], true) {
                stack.extend(self.nodes[index].inputs.iter().flatten().filter_map(|&value| makers[value]));
            }
        }
        #[derive(Clone, Copy, PartialEq)]
        enum State {
            New,
            Open,
            Done,
        }
        let mut state = vec![State::New; self.nodes.len()];
        let mut order = Vec::new();
        for start in (0..self.nodes.len()).filter(|&index| needed[index]) {
            let mut path = vec![start];
            while let Some(&index) = path.last() {
                if state[index] == State::Done {
                    path.pop();
                    continue;
                }
                state[index] = State::Open;
                let inputs = self.nodes[index].inputs.iter().flatten();
                let before: Vec<usize> = inputs
                    .filter_map(|&value| makers[value])
                    .filter(|&before| state[before] != State::Done)
                    .collect();
                if let Some(&open) = before.iter().find(|&&before| state[before] == State::Open) {
                    let name = quoted(&self.nodes[open].name);
                    return invalid(format!("the node {name} depends on its own output"));
                }
                if before.is_empty() {
                    state[index] = State::Done;
                    order.push(index);
                    path.pop();
                }
                // Only the first: another may become done on the way to it.
                path.extend(before.first());
            }
        }
        self.nodes = order.into_iter().map(|index| self.nodes[index].clone()).collect();
        Ok(())
    }

    /// The nodes that read each value.
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

fn describe(node: &Node) -> String {
    format!("the node {} ({})", quoted(&node.name), node.op.name())
}

impl NetworkNode {
    /// How errors name it.
    pub(super) fn described(&self) -> String {
        let name = if self.name.is_empty() { String::new() } else { format!(" {}", quoted(&self.name)) };
        format!("node{name} ({})", self.op.name())
    }
}
