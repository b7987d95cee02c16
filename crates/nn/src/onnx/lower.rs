//! Expresses operations in a version of ONNX's operators.

mod decomposed;
mod described;
mod simple;

use std::collections::{BTreeMap, HashMap, HashSet};

use super::error::{OnnxError, Refusal};
use super::proto::NodeProto;
use super::{Result, WriteOptions, build};
use crate::graph::{Array, Definition, Kind, Node, Op};

/// What an expression gives: nothing, or why there is none.
type Lowered<T = ()> = std::result::Result<T, Refusal>;

/// A file's nodes as they are made.
pub(super) struct Lowering<'a> {
    pub(super) nodes: Vec<NodeProto>,
    opset: i64,
    training: bool,
    names: HashSet<String>,
    count: u64,
    /// Values that are known: stored ones and constants.
    arrays: HashMap<&'a str, &'a Array>,
    kinds: HashMap<&'a str, Kind>,
    ranks: HashMap<&'a str, usize>,
    /// The lengths of lists, as of shapes.
    lens: HashMap<&'a str, usize>,
}

impl<'a> Lowering<'a> {
    pub(super) fn new(
        definition: &'a Definition,
        stored: &BTreeMap<&'a str, &'a Array>,
        opset: i64,
        options: &WriteOptions,
    ) -> Lowering<'a> {
        let mut names: HashSet<String> = definition.inputs.iter().map(|input| input.name.clone()).collect();
        names.extend(stored.keys().map(|name| (*name).to_owned()));
        names.extend(definition.nodes.iter().flat_map(|node| &node.outputs).cloned());
        let mut lowering = Lowering {
            nodes: Vec::new(),
            opset,
            training: options.training,
            names,
            count: 0,
            arrays: stored.iter().map(|(name, array)| (*name, *array)).collect(),
            kinds: stored.iter().map(|(name, array)| (*name, array.kind())).collect(),
            ranks: stored.iter().map(|(name, array)| (*name, array.shape().len())).collect(),
            lens: stored.iter().map(|(name, array)| (*name, array.len())).collect(),
        };
        for input in &definition.inputs {
            lowering.kinds.insert(&input.name, input.kind);
            let shape = options.shapes.get(&input.name).or(input.shape.as_ref());
            lowering.ranks.extend(shape.map(|shape| (input.name.as_str(), shape.len())));
        }
        lowering
    }

    /// Adds a node; those that it depends on are there.
    pub(super) fn node(&mut self, node: &'a Node) -> Result<()> {
        let has_output = node.outputs.iter().any(|name| !name.is_empty());
        let lowered = if has_output { self.lower(node) } else { Err(Refusal::from("it has no output")) };
        lowered.map_err(|refusal| match refusal {
            Refusal::Because(reason) => OnnxError::Unwritable {
                node: node.name.clone(),
                operator: node.op.name(),
                opset: self.opset,
                reason,
            },
            Refusal::Error(error) => error,
        })?;
        self.describe(node);
        if let (Op::Constant(array), Some(name)) = (&node.op, node.outputs.first()) {
            self.arrays.insert(name, array);
        }
        Ok(())
    }

    /// Fails before a version.
    fn needs(&self, opset: i64, what: &str) -> Lowered {
        match self.opset >= opset {
            true => Ok(()),
            false => Err(format!("{what} needs at least version {opset}").into()),
        }
    }

    /// Adds the node itself, with its inputs and outputs.
    fn emit(&mut self, node: &Node, proto: NodeProto) -> Lowered {
        self.emit_with(node, proto, node.inputs.clone())
    }

    /// Adds the node itself, with other inputs.
    fn emit_with(&mut self, node: &Node, proto: NodeProto, mut input: Vec<String>) -> Lowered {
        while input.last().is_some_and(String::is_empty) {
            input.pop();
        }
        let name = Some(node.name.clone());
        self.nodes.push(NodeProto { input, output: node.outputs.clone(), name, ..proto });
        Ok(())
    }

    /// Adds a node before the node itself; gives the name of its output.
    fn before(&mut self, node: &Node, (what, proto): (&str, NodeProto), inputs: &[&str]) -> String {
        let output = node.outputs.iter().find(|name| !name.is_empty()).map_or("", String::as_str);
        let fresh = self.fresh(&format!("{output}/{what}"));
        self.nodes.push(NodeProto {
            input: inputs.iter().map(|name| (*name).to_owned()).collect(),
            output: vec![fresh.clone()],
            name: Some(fresh.clone()),
            ..proto
        });
        fresh
    }

    /// A name that no value has.
    fn fresh(&mut self, name: &str) -> String {
        let mut fresh = name.to_owned();
        while !self.names.insert(fresh.clone()) {
            self.count += 1;
            fresh = format!("{name}_{}", self.count);
        }
        fresh
    }

    /// Adds an array before the node itself.
    fn array(&mut self, node: &Node, what: &str, array: &Array) -> Lowered<String> {
        let proto = NodeProto::new("Constant").tensor("value", build::tensor("", array)?);
        Ok(self.before(node, (what, proto), &[]))
    }

    /// Adds a number before the node itself, of the kind of its first input.
    fn number(&mut self, node: &Node, what: &str, number: f64) -> Lowered<String> {
        let data = match self.kind(input(node, 0)) {
            Kind::F64 => crate::graph::Data::F64(vec![number]),
            _ => crate::graph::Data::F32(vec![number as f32]),
        };
        let array = Array::new(&[], data).ok_or("it has no number")?;
        self.array(node, what, &array)
    }

    /// The kind of a value.
    fn kind(&self, name: &str) -> Kind {
        self.kinds.get(name).copied().unwrap_or(Kind::F32)
    }

    /// The whole numbers of an input that becomes an attribute; `None` if it is left out.
    fn integers(&self, node: &Node, place: usize, since: i64) -> Lowered<Option<Vec<i64>>> {
        let name = input(node, place);
        if name.is_empty() {
            return Ok(None);
        }
        match self.arrays.get(name) {
            Some(array) => Ok(Some(array.to_i64())),
            None => Err(format!("its input {name} is computed, which needs at least version {since}").into()),
        }
    }
}

/// The name of an input, empty if it is left out.
fn input(node: &Node, place: usize) -> &str {
    node.inputs.get(place).map_or("", String::as_str)
}
