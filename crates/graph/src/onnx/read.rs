//! Makes a definition of a file.

use std::collections::{BTreeMap, HashSet};
use std::path::Path;

use convoke_files::escaped;
use prost::Message;
use prost::bytes::Bytes;

use super::error::OnnxError;
use super::functions::{Versioned, inlined, label, opset_of};
use super::operators;
use super::proto::{AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, ValueProto, element};
use super::sequences::without_sequences;
use super::tensor::{TensorSource, shape};
use super::{Model, NEWEST_OPSET, OLDEST_OPSET, Result, scan};
use crate::graph::ops::reading::{Attribute, Attributes, NodeReader, Progress, Reader};
use crate::graph::{Array, Definition, Dimension, Input, Node, Op, Stored, in_order};

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
    let mut definition = Reading::new(&graph, &nodes, source)?.definition(graph, nodes, operators)?;
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
        let constant = matches!(&node.op, Op::Constant(array) if is_zero(array));
        if constant || node.op.is_cast() && stays() {
            zeros.extend(node.outputs.first().cloned());
        } else if matches!(node.op, Op::Expand) && stays() {
            repeated.extend(node.outputs.first().cloned());
        }
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

/// A graph while it is read.
struct Reading {
    progress: Progress,
    /// What reads the values of nodes, and the graph's outputs.
    used: HashSet<String>,
    source: TensorSource,
}

/// The number of dimensions of a value, if the file says it.
fn rank_of(value: &ValueProto) -> Option<usize> {
    Some(value.r#type.as_ref()?.tensor_type.as_ref()?.shape.as_ref()?.dim.len())
}

impl Reading {
    fn new(graph: &GraphProto, nodes: &[Versioned], source: TensorSource) -> Result<Reading> {
        let mut progress = Progress::default();
        let ranks = &mut progress.ranks;
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
        progress.names.taken =
            given.chain(nodes.iter().flat_map(|node| &node.node.output)).cloned().collect();
        Ok(Reading { progress, used, source })
    }

    fn definition(
        mut self,
        mut graph: GraphProto,
        nodes: Vec<Versioned>,
        operators: Vec<&'static Reader>,
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
            nodes: self.progress.nodes,
            stored,
        })
    }

    /// Reads a node; what it needs before it, first.
    fn node(&mut self, node: Versioned, reader: &Reader) -> Result<()> {
        let Versioned { mut node, opset } = node;
        let (name, operator) = (label(&node), node.op_type.clone().unwrap_or_default());
        let refused = |reason| OnnxError::Node { node: name.clone(), operator, reason };
        let refers = |attribute: &&AttributeProto| !attribute.ref_attr_name().is_empty();
        if let Some(reference) = node.attribute.iter().find(refers) {
            let name = escaped(reference.name());
            return Err(refused(format!(
                "its attribute {name} refers to that of a function, and it is in none"
            )));
        }
        let attributes = std::mem::take(&mut node.attribute).into_iter();
        let attributes = attributes.map(|attribute| self.attribute(attribute)).collect::<Result<Vec<_>>>()?;
        let (op, inputs, outputs) = self.read(node, (opset, attributes), reader).map_err(refused)?;
        self.progress.nodes.push(Node { name, op, inputs, outputs });
        Ok(())
    }

    fn attribute(&mut self, attribute: AttributeProto) -> Result<Attribute> {
        let AttributeProto { name, f, i, s, t, floats, ints, r#type, .. } = attribute;
        Ok(Attribute {
            name: name.unwrap_or_default(),
            kind: r#type.unwrap_or(0),
            int: i.unwrap_or(0),
            float: f.unwrap_or(0.0),
            text: s.map(|text| text.to_vec()).unwrap_or_default(),
            ints,
            floats,
            array: t.map(|tensor| self.source.array(*tensor)).transpose()?,
        })
    }

    fn read(
        &mut self,
        node: NodeProto,
        (opset, attributes): (i64, Vec<Attribute>),
        reader: &Reader,
    ) -> std::result::Result<(Op, Vec<String>, Vec<String>), String> {
        let &Reader(_, (least, most), read) = reader;
        let NodeProto { input: inputs, output: outputs, .. } = node;
        if inputs.len() > most {
            return Err(format!("it has {} inputs, at most {most} are expected", inputs.len()));
        }
        for place in 0..least {
            if inputs.get(place).is_none_or(String::is_empty) {
                return Err(format!("its input {place} is missing, at least {least} are expected"));
            }
        }
        let attributes = Attributes(attributes);
        let mut node = NodeReader { attributes, inputs, outputs, opset, progress: &mut self.progress };
        let op = read(&mut node)?;
        let NodeReader { attributes, mut inputs, mut outputs, .. } = node;
        attributes.done()?;
        while inputs.last().is_some_and(String::is_empty) {
            inputs.pop();
        }
        if let Some(name) = outputs.iter().skip(op.outputs()).find(|name| self.used.contains(*name)) {
            let known = match op.outputs() {
                1 => "output is".to_owned(),
                count => format!("{count} outputs are"),
            };
            return Err(format!(
                "its output {} is read, and only the first {known} supported",
                escaped(name)
            ));
        }
        outputs.truncate(op.outputs());
        if outputs.iter().all(String::is_empty) {
            return Err("it has no output".into());
        }
        Ok((op, inputs, outputs))
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
    let Some(kind) = element::kind_of(data_type) else {
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
