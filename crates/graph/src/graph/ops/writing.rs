//! What operators write nodes of ONNX files with, in a version of ONNX's operators.

use std::borrow::Cow;
use std::collections::HashMap;

use super::super::known::Answer;
use super::super::{Array, Data, Kind, Node};
use super::reading::Names;

/// What is known of a value of a file.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct About<'a> {
    pub(crate) kind: Kind,
    /// The number of dimensions.
    pub(crate) rank: Option<usize>,
    /// The number of elements, if it is at most a list: as of a shape, which is the number of dimensions of what is reshaped to it.
    pub(crate) len: Option<usize>,
    /// The elements, of a stored value or a constant.
    pub(crate) array: Option<&'a Array>,
}

impl<'a> About<'a> {
    /// A stored array.
    pub(crate) fn of(array: &'a Array) -> About<'a> {
        let (rank, len) = (Some(array.shape().len()), Some(array.len()));
        About { kind: array.kind(), rank, len, array: Some(array) }
    }
}

/// What is known of the inputs of a node, for one of its outputs.
pub(crate) struct Operands<'s, 'a> {
    /// Inputs; `None` if they are left out.
    pub(crate) inputs: &'s [Option<About<'a>>],
    pub(crate) output: usize,
}

impl<'a> Operands<'_, 'a> {
    /// An input; nothing is known of one that is left out.
    pub(super) fn at(&self, place: usize) -> About<'a> {
        self.inputs.get(place).copied().flatten().unwrap_or_default()
    }

    /// Whether an input is not left out.
    pub(super) fn given(&self, place: usize) -> bool {
        self.inputs.get(place).is_some_and(Option::is_some)
    }

    pub(super) fn rank(&self, place: usize) -> Option<usize> {
        self.at(place).rank
    }

    pub(super) fn len(&self, place: usize) -> Option<usize> {
        self.at(place).len
    }

    /// The kind of the first input, with this number of dimensions.
    pub(super) fn ranked(&self, rank: Option<usize>) -> About<'a> {
        About { kind: self.at(0).kind, rank, ..About::default() }
    }

    /// What all inputs broadcast to, of the kind of the first.
    pub(super) fn broadcast(&self) -> About<'a> {
        let most = |of: fn(&About<'_>) -> Option<usize>| {
            self.inputs.iter().try_fold(0, |most: usize, input| Some(most.max(of(input.as_ref()?)?)))
        };
        About { len: most(|input| input.len), ..self.ranked(most(|input| input.rank)) }
    }
}

/// The value of an attribute.
pub(crate) enum Value<'a> {
    Int(i64),
    Float(f32),
    Ints(Vec<i64>),
    Text(&'static str),
    Array(Cow<'a, Array>),
}

/// A node of a file that is written.
#[derive(Default)]
pub(crate) struct OnnxNode<'a> {
    pub(crate) operator: &'static str,
    pub(crate) name: String,
    pub(crate) inputs: Vec<String>,
    pub(crate) outputs: Vec<String>,
    pub(crate) attributes: Vec<(&'static str, Value<'a>)>,
}

impl<'a> OnnxNode<'a> {
    pub(super) fn new(operator: &'static str) -> OnnxNode<'a> {
        OnnxNode { operator, ..OnnxNode::default() }
    }

    fn with(mut self, name: &'static str, value: Value<'a>) -> OnnxNode<'a> {
        self.attributes.push((name, value));
        self
    }

    pub(super) fn int(self, name: &'static str, int: impl Into<i64>) -> OnnxNode<'a> {
        self.with(name, Value::Int(int.into()))
    }

    pub(super) fn axis(self, name: &'static str, axis: isize) -> OnnxNode<'a> {
        self.int(name, axis as i64)
    }

    pub(super) fn size(self, name: &'static str, size: usize) -> OnnxNode<'a> {
        self.int(name, number(size))
    }

    pub(super) fn float(self, name: &'static str, float: f64) -> OnnxNode<'a> {
        self.with(name, Value::Float(float as f32))
    }

    pub(super) fn ints(self, name: &'static str, ints: impl IntoIterator<Item = i64>) -> OnnxNode<'a> {
        self.with(name, Value::Ints(ints.into_iter().collect()))
    }

    /// An attribute with a number for each axis. Without numbers it is left out, as ONNX has the same defaults.
    pub(super) fn sizes(self, name: &'static str, sizes: &[usize]) -> OnnxNode<'a> {
        match sizes {
            [] => self,
            _ => self.ints(name, sizes.iter().map(|&size| number(size))),
        }
    }

    pub(super) fn text(self, name: &'static str, text: &'static str) -> OnnxNode<'a> {
        self.with(name, Value::Text(text))
    }

    /// The name of one of these values.
    pub(super) fn choice<T: PartialEq>(
        self,
        name: &'static str,
        value: T,
        choices: &[(&'static str, T)],
    ) -> Answer<OnnxNode<'a>> {
        let choice = choices.iter().find(|(_, own)| *own == value);
        Ok(self.text(name, choice.ok_or_else(|| format!("its {name} has no name"))?.0))
    }

    pub(super) fn array(self, name: &'static str, array: Cow<'a, Array>) -> OnnxNode<'a> {
        self.with(name, Value::Array(array))
    }

    /// The node with other inputs.
    pub(super) fn reads(self, inputs: Vec<String>) -> OnnxNode<'a> {
        OnnxNode { inputs, ..self }
    }
}

/// A size as the format holds it.
pub(crate) fn number(size: usize) -> i64 {
    i64::try_from(size).unwrap_or(i64::MAX)
}

/// A file's nodes as they are made.
pub(crate) struct Writing<'a> {
    pub(crate) nodes: Vec<OnnxNode<'a>>,
    pub(crate) names: Names,
    pub(crate) values: HashMap<&'a str, About<'a>>,
    /// The version of ONNX's operators.
    pub(crate) opset: i64,
    /// Whether batch norms and dropouts are written as they train.
    pub(crate) training: bool,
}

impl<'a> Writing<'a> {
    /// Adds a node; those that it depends on are there.
    pub(crate) fn node(&mut self, node: &'a Node) -> Answer<()> {
        if node.outputs.iter().all(String::is_empty) {
            return Err("it has no output".into());
        }
        let mut own = node.op.write(&mut NodeWriter { file: self, node })?;
        while own.inputs.last().is_some_and(String::is_empty) {
            own.inputs.pop();
        }
        self.nodes.push(own);
        let about = |name: &String| (!name.is_empty()).then(|| self.about(name));
        let inputs: Vec<Option<About<'a>>> = node.inputs.iter().map(about).collect();
        for (output, name) in node.outputs.iter().enumerate().filter(|(_, name)| !name.is_empty()) {
            self.values.insert(name, node.op.gives(&Operands { inputs: &inputs, output }));
        }
        Ok(())
    }

    pub(crate) fn about(&self, name: &str) -> About<'a> {
        self.values.get(name).copied().unwrap_or_default()
    }
}

/// A node of a definition while it is written.
pub(crate) struct NodeWriter<'w, 'a> {
    pub(super) file: &'w mut Writing<'a>,
    pub(super) node: &'a Node,
}

impl<'a> NodeWriter<'_, 'a> {
    /// The node itself, without attributes.
    pub(super) fn op(&self) -> OnnxNode<'a> {
        self.named(self.node.op.name())
    }

    /// The node itself, as one of this operator.
    pub(super) fn named(&self, operator: &'static str) -> OnnxNode<'a> {
        let Node { name, inputs, outputs, .. } = self.node;
        let (name, inputs, outputs) = (name.clone(), inputs.clone(), outputs.clone());
        OnnxNode { operator, name, inputs, outputs, attributes: Vec::new() }
    }

    /// Fails before a version.
    pub(super) fn needs(&self, opset: i64, what: &str) -> Answer<()> {
        match self.file.opset >= opset {
            true => Ok(()),
            false => Err(format!("{what} needs at least version {opset}")),
        }
    }

    /// The name of an input, empty if it is left out.
    pub(super) fn input(&self, place: usize) -> &'a str {
        self.node.inputs.get(place).map_or("", String::as_str)
    }

    pub(super) fn about(&self, place: usize) -> About<'a> {
        self.file.about(self.input(place))
    }

    /// The elements of an input, if they are known.
    pub(super) fn known(&self, place: usize) -> Option<&'a Array> {
        self.about(place).array
    }

    /// The whole numbers of an input that becomes an attribute; `None` if it is left out.
    pub(super) fn integers(&self, place: usize, since: i64) -> Answer<Option<Vec<i64>>> {
        match (self.input(place), self.known(place)) {
            ("", _) => Ok(None),
            (_, Some(array)) => Ok(Some(array.to_i64())),
            (name, None) => {
                Err(format!("its input {name} is computed, which needs at least version {since}"))
            }
        }
    }

    /// Adds a node before the node itself; gives the name of its output.
    pub(super) fn before(&mut self, what: &str, node: OnnxNode<'a>, inputs: &[&str]) -> String {
        let name = self.fresh(what);
        let (inputs, outputs) = (inputs.iter().map(|&name| name.to_owned()).collect(), vec![name.clone()]);
        self.file.nodes.push(OnnxNode { name: name.clone(), inputs, outputs, ..node });
        name
    }

    /// A name that no value has, for something of this node.
    pub(super) fn fresh(&mut self, what: &str) -> String {
        let output = self.node.outputs.iter().find(|name| !name.is_empty()).map_or("", String::as_str);
        self.file.names.fresh(&format!("{output}/{what}"))
    }

    /// Adds an array before the node itself.
    pub(super) fn array(&mut self, what: &str, array: Array) -> String {
        self.before(what, OnnxNode::new("Constant").array("value", Cow::Owned(array)), &[])
    }

    /// Adds whole numbers before the node itself.
    pub(super) fn list(&mut self, what: &str, numbers: impl IntoIterator<Item = i64>) -> String {
        self.array(what, Array::integers(numbers))
    }

    /// Adds a number before the node itself, of the kind of its first input.
    pub(super) fn number(&mut self, what: &str, number: f64) -> Answer<String> {
        let data = self.floats(vec![number]);
        Ok(self.array(what, Array::new(&[], data).ok_or("it has no number")?))
    }

    /// Numbers of the kind of the first input.
    pub(super) fn floats(&self, numbers: Vec<f64>) -> Data {
        match self.about(0).kind {
            Kind::F64 => Data::F64(numbers),
            Kind::F32 | Kind::I64 | Kind::Bool => {
                Data::F32(numbers.into_iter().map(|number| number as f32).collect())
            }
        }
    }
}
