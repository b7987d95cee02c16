//! Makes a definition of a file.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::Path;

use convoke_files::escaped;
use prost::Message;
use prost::bytes::Bytes;

use super::attributes::Attributes;
use super::error::{OnnxError, Refusal};
use super::functions::{Versioned, inlined, label, opset_of};
use super::operators::{self, Operator};
use super::proto::{GraphProto, ModelProto, NodeProto, TensorProto, ValueProto, element};
use super::sequences::without_sequences;
use super::tensor::{TensorSource, kind_of, shape};
use super::{Model, NEWEST_OPSET, OLDEST_OPSET, Result, scan};
use crate::graph::{Array, Definition, Dimension, Input, Node, Op, Stored, in_order};

/// A name that is made from another one keeps at most this many of its characters.
const LONGEST_BEGIN: usize = 256;

fn damaged(reason: impl std::fmt::Display) -> OnnxError {
    OnnxError::Damaged { reason: reason.to_string() }
}

/// Reads a model whose other files are in a folder.
pub(super) fn model(bytes: Bytes, folder: Option<&Path>) -> Result<Model> {
    let limit = scan::limit(bytes.len() as u64);
    let size = scan::decoded_size(&bytes).map_err(damaged)?;
    let mut source = TensorSource::new(folder, limit);
    source.spend(size)?;
    convoke_memory::check(usize::try_from(size).unwrap_or(usize::MAX))?;
    let mut model = ModelProto::decode(bytes).map_err(damaged)?;
    let opset = opset_of(&model.opset_import)
        .ok_or_else(|| damaged("it does not say which version of ONNX's operators it uses"))?;
    if !(OLDEST_OPSET..=NEWEST_OPSET).contains(&opset) {
        return Err(OnnxError::Opset { opset });
    }
    let mut graph = model.graph.take().ok_or_else(|| damaged("it holds no graph"))?;
    let mut nodes = inlined(&mut graph, &model.functions, opset, &mut source)?;
    without_sequences(&mut nodes, &graph, &mut source)?;
    let operators = nodes.iter().map(|node| operators::find(&node.node)).collect::<Result<Vec<_>>>()?;
    let mut definition = Reader::new(&graph, &nodes, source)?.definition(graph, nodes, operators)?;
    leave_out_zero_biases(&mut definition)?;
    let entries = model.metadata_props.into_iter();
    let metadata: BTreeMap<String, String> =
        entries.map(|entry| (entry.key.unwrap_or_default(), entry.value.unwrap_or_default())).collect();
    Ok(Model {
        definition,
        metadata,
        opset,
        ir_version: model.ir_version.unwrap_or(0),
        producer: model.producer_name.unwrap_or_default(),
        producer_version: model.producer_version.unwrap_or_default(),
    })
}

/// Leaves out biases of convolutions that are a single 0, repeated: PyTorch's newer exporter writes them where there are none. Only
/// without them can the convolutions run as one with batch norms.
fn leave_out_zero_biases(definition: &mut Definition) -> Result<()> {
    let is_zero = |array: &Array| array.only() == Some(0.0);
    let stored =
        definition.stored.iter().filter(|stored| stored.values.array().is_some_and(|array| is_zero(array)));
    let mut zeros: HashSet<String> = stored.map(|stored| stored.name.clone()).collect();
    let mut repeated: HashSet<String> = HashSet::new();
    for node in in_order(definition)? {
        let stays = || node.inputs.first().is_some_and(|input| zeros.contains(input));
        let found = match &node.op {
            Op::Constant(array) if is_zero(array) => &mut zeros,
            Op::Identity | Op::Cast(_) | Op::CastLike if stays() => &mut zeros,
            Op::Expand if stays() => &mut repeated,
            _ => continue,
        };
        found.extend(node.outputs.first().cloned());
    }
    for node in &mut definition.nodes {
        if matches!(node.op, Op::Conv(_) | Op::ConvTranspose(_))
            && node.inputs.get(2).is_some_and(|bias| repeated.contains(bias))
        {
            node.inputs.truncate(2);
        }
    }
    Ok(())
}

/// A tensor alone.
pub(super) fn tensor(bytes: Bytes) -> Result<Array> {
    let mut source = TensorSource::new(None, scan::limit(bytes.len() as u64));
    source.spend(scan::decoded_tensor_size(&bytes).map_err(damaged)?)?;
    source.array(TensorProto::decode(bytes).map_err(damaged)?)
}

/// What operators are read with: the nodes so far, and names and ranks of values.
pub(super) struct Reader {
    nodes: Vec<Node>,
    names: HashSet<String>,
    count: u64,
    ranks: HashMap<String, usize>,
    /// What reads the values of nodes, and the graph's outputs.
    used: HashSet<String>,
    pub(super) source: TensorSource,
}

/// The number of dimensions of a value, if the file says it.
fn rank_of(value: &ValueProto) -> Option<usize> {
    Some(value.r#type.as_ref()?.tensor_type.as_ref()?.shape.as_ref()?.dim.len())
}

impl Reader {
    fn new(graph: &GraphProto, nodes: &[Versioned], source: TensorSource) -> Result<Reader> {
        let mut ranks = HashMap::new();
        for value in graph.value_info.iter().chain(&graph.output).chain(&graph.input) {
            if let (Some(name), Some(rank)) = (&value.name, rank_of(value)) {
                ranks.insert(name.clone(), rank);
            }
        }
        for tensor in &graph.initializer {
            ranks.insert(tensor.name.clone().unwrap_or_default(), tensor.dims.len());
        }
        let mut used: HashSet<String> = nodes.iter().flat_map(|node| &node.node.input).cloned().collect();
        used.extend(graph.output.iter().filter_map(|value| value.name.clone()));
        used.remove("");
        let stored = graph.initializer.iter().map(|tensor| &tensor.name);
        if stored.clone().any(|name| name.as_deref().unwrap_or_default().is_empty()) {
            return Err(damaged("a stored tensor has no name"));
        }
        let given = stored.chain(graph.input.iter().map(|value| &value.name)).flatten();
        let names = given.chain(nodes.iter().flat_map(|node| &node.node.output)).cloned().collect();
        Ok(Reader { nodes: Vec::new(), names, count: 0, ranks, used, source })
    }

    fn definition(
        mut self,
        mut graph: GraphProto,
        nodes: Vec<Versioned>,
        operators: Vec<&'static Operator>,
    ) -> Result<Definition> {
        if let Some(sparse) = graph.sparse_initializer.first() {
            let name = sparse.values.as_ref().and_then(|values| values.name.clone()).unwrap_or_default();
            let reason =
                "it is sparse, which is not supported: export the model with dense weights".to_owned();
            return Err(OnnxError::Tensor { name, reason });
        }
        let stored: HashSet<&str> =
            graph.initializer.iter().filter_map(|tensor| tensor.name.as_deref()).collect();
        let given = |value: &&ValueProto| !stored.contains(value.name.as_deref().unwrap_or_default());
        let inputs = graph.input.iter().filter(given).map(input).collect::<Result<Vec<_>>>()?;
        for (node, operator) in nodes.into_iter().zip(operators) {
            self.node(node, operator)?;
        }
        let mut stored = Vec::new();
        for tensor in std::mem::take(&mut graph.initializer) {
            let name = tensor.name.clone().unwrap_or_default();
            if self.used.contains(&name) {
                stored.push(Stored { name, values: self.source.array(tensor)?.into(), trained: None });
            }
        }
        Ok(Definition {
            name: graph.name.unwrap_or_default(),
            inputs,
            outputs: graph.output.into_iter().map(|value| value.name.unwrap_or_default()).collect(),
            nodes: self.nodes,
            stored,
        })
    }

    /// Reads a node; what it needs before it, first.
    fn node(&mut self, node: Versioned, operator: &Operator) -> Result<()> {
        let Versioned { node, opset } = node;
        let name = label(&node);
        let op_type = node.op_type.clone().unwrap_or_default();
        let (op, inputs, outputs) = self.read(node, opset, operator).map_err(|refusal| match refusal {
            Refusal::Because(reason) => OnnxError::Node { node: name.clone(), operator: op_type, reason },
            Refusal::Error(error) => error,
        })?;
        self.nodes.push(Node { name, op, inputs, outputs });
        Ok(())
    }

    fn read(
        &mut self,
        node: NodeProto,
        opset: i64,
        operator: &Operator,
    ) -> std::result::Result<(Op, Vec<String>, Vec<String>), Refusal> {
        let NodeProto { input, mut output, attribute, .. } = node;
        let reference =
            attribute.iter().find(|a| a.ref_attr_name.as_ref().is_some_and(|name| !name.is_empty()));
        if let Some(reference) = reference {
            let name = escaped(reference.name.as_deref().unwrap_or_default());
            return Err(
                format!("its attribute {name} refers to that of a function, and it is in none").into()
            );
        }
        let (least, most) = operator.1;
        if input.len() > most {
            return Err(format!("it has {} inputs, at most {most} are expected", input.len()).into());
        }
        for place in 0..least {
            if input.get(place).is_none_or(String::is_empty) {
                return Err(format!("its input {place} is missing, at least {least} are expected").into());
            }
        }
        if !operator.gives_many() {
            let second = output.iter().skip(1).find(|name| self.used.contains(*name));
            if let Some(name) = second {
                return Err(format!(
                    "its output {} is read, and only the first output is supported",
                    escaped(name)
                )
                .into());
            }
            output.truncate(1);
        }
        if output.first().is_none_or(String::is_empty) && !operator.gives_many() {
            return Err("it has no output".into());
        }
        let attributes = Attributes::new(attribute);
        let mut step = Step { attributes, inputs: input, outputs: output, opset, reader: self };
        let op = (operator.2)(&mut step)?;
        let Step { attributes, mut inputs, outputs, .. } = step;
        attributes.done()?;
        while inputs.last().is_some_and(String::is_empty) {
            inputs.pop();
        }
        Ok((op, inputs, outputs))
    }

    /// A name that no value has.
    fn fresh(&mut self, name: String) -> String {
        let mut fresh = name.clone();
        while !self.names.insert(fresh.clone()) {
            self.count += 1;
            fresh = format!("{name}_{}", self.count);
        }
        fresh
    }
}

fn value_error(name: &str, reason: &str) -> OnnxError {
    OnnxError::Value { name: name.to_owned(), reason: reason.to_owned() }
}

/// An input of the graph.
fn input(value: &ValueProto) -> Result<Input> {
    let name = value.name.clone().unwrap_or_default();
    let tensor = value.r#type.as_ref().and_then(|value| value.tensor_type.as_ref());
    let Some(tensor) = tensor else {
        return Err(value_error(&name, "it is no tensor, and only tensors are supported as inputs"));
    };
    let data_type = tensor.elem_type.unwrap_or(0);
    let Some(kind) = kind_of(data_type) else {
        let reason = format!("it is of the type {}, which is not supported", element::name(data_type));
        return Err(value_error(&name, &reason));
    };
    let Some(dims) = &tensor.shape else { return Ok(Input { name, kind, shape: None }) };
    // Some writers write 0 or -1 for a size that is not known.
    let sizes: Vec<i64> = dims.dim.iter().map(|dim| dim.dim_value.unwrap_or(0).max(0)).collect();
    let sizes = shape(&sizes).map_err(|reason| value_error(&name, &reason))?;
    let dimension = |(size, dim): (usize, &super::proto::DimensionProto)| match size {
        0 => Dimension::Open(dim.dim_param.clone().unwrap_or_default()),
        size => Dimension::Fixed(size),
    };
    let shape = sizes.into_iter().zip(&dims.dim).map(dimension).collect();
    Ok(Input { name, kind, shape: Some(shape) })
}

/// A node while it is read: what of it is not read yet, and the nodes before it.
pub(super) struct Step<'a> {
    /// The attributes that are not read yet.
    pub(super) attributes: Attributes,
    /// The names of its inputs, empty for those that are left out.
    pub(super) inputs: Vec<String>,
    /// The names of its outputs.
    pub(super) outputs: Vec<String>,
    /// The version of ONNX's operators.
    pub(super) opset: i64,
    reader: &'a mut Reader,
}

impl Step<'_> {
    /// The name of an input, empty if it is left out.
    pub(super) fn input(&self, place: usize) -> &str {
        self.inputs.get(place).map_or("", String::as_str)
    }

    /// Sets an input; those before it that are not there are left out.
    pub(super) fn set_input(&mut self, place: usize, name: String) {
        while self.inputs.len() <= place {
            self.inputs.push(String::new());
        }
        self.inputs[place] = name;
    }

    /// Makes an array an input.
    pub(super) fn set_array(&mut self, place: usize, what: &str, array: Array) {
        let name = self.before(Op::Constant(array), Vec::new(), what);
        self.set_input(place, name);
    }

    /// Adds a node before this one; gives the name of its output.
    pub(super) fn before(&mut self, op: Op, inputs: Vec<String>, what: &str) -> String {
        let output = self.outputs.iter().find(|name| !name.is_empty()).map_or("", String::as_str);
        let begin: String = output.chars().take(LONGEST_BEGIN).collect();
        let name = self.reader.fresh(format!("{begin}/{what}"));
        self.reader.nodes.push(Node { name: name.clone(), op, inputs, outputs: vec![name.clone()] });
        name
    }

    /// The number of dimensions of a value, if the file says it.
    pub(super) fn rank(&self, name: &str) -> Option<usize> {
        self.reader.ranks.get(name).copied()
    }

    /// The array of an attribute of this name, which must be there.
    pub(super) fn array(&mut self, name: &str) -> std::result::Result<Array, Refusal> {
        let tensor = self.attributes.tensor(name)?;
        let tensor = tensor.ok_or_else(|| format!("its attribute {name} is missing"))?;
        Ok(self.reader.source.array(*tensor)?)
    }
}
