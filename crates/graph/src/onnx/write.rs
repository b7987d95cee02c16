//! Makes a file of a definition.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::Path;

use convoke_files::write_whole;
use prost::Message;

use super::error::OnnxError;
use super::proto::*;
use super::{NEWEST_OPSET, OLDEST_WRITTEN, Result, build};
use crate::graph::ops::reading::Names;
use crate::graph::ops::writing::{About, Writing};
use crate::graph::{Array, Definition, Dimension, Kind, Op, in_order};

/// The version that is written unless a model needs a newer one.
const USUAL_OPSET: i64 = 17;

/// A message of protobuf has fewer bytes than 2 GiB.
const LARGEST_MESSAGE: u64 = (1 << 31) - 1;

/// How [`write()`] writes a model.
#[derive(Debug, Clone, PartialEq)]
pub struct WriteOptions {
    /// The version of ONNX's operators, 13 to 24. Older ones are read by more programs. None is the lowest from 17 on that can hold the
    /// model.
    pub opset: Option<i64>,
    /// The program that writes the file.
    pub producer: String,
    /// The version of that program.
    pub producer_version: String,
    /// Notes, by their keys.
    pub metadata: BTreeMap<String, String>,
    /// What the first dimension of inputs and outputs is named where it is open and has no name.
    pub batch: Option<String>,
    /// The shapes of inputs and outputs by their names, where they differ from the definition's or it has none.
    pub shapes: BTreeMap<String, Vec<Dimension>>,
    /// Whether batch norms take statistics from the batch and dropouts drop, as in PyTorch's `TrainingMode.TRAINING`.
    pub training: bool,
}

impl Default for WriteOptions {
    fn default() -> WriteOptions {
        WriteOptions {
            opset: None,
            producer: "convoke".to_owned(),
            producer_version: env!("CARGO_PKG_VERSION").to_owned(),
            metadata: BTreeMap::new(),
            batch: Some("batch".to_owned()),
            shapes: BTreeMap::new(),
            training: false,
        }
    }
}

/// The bytes of a file with a model. Its weights are `values` by their names, and the definition's own where there are none:
/// those must be given, not drawn.
///
/// # Errors
/// If the version is not known, a node cannot be expressed in it, a value is not defined, the file would have more than 2 GiB,
/// or there is no memory.
pub fn write(
    definition: &Definition,
    values: &BTreeMap<String, Array>,
    options: &WriteOptions,
) -> Result<Vec<u8>> {
    if let Some(opset) = options.opset {
        return in_version(opset, definition, values, options);
    }
    let mut written = in_version(USUAL_OPSET, definition, values, options);
    for opset in USUAL_OPSET + 1..=NEWEST_OPSET {
        if !matches!(written, Err(OnnxError::Unwritable { .. })) {
            break;
        }
        written = in_version(opset, definition, values, options);
    }
    written
}

/// As [`write()`], in this version of ONNX's operators.
fn in_version(
    opset: i64,
    definition: &Definition,
    values: &BTreeMap<String, Array>,
    options: &WriteOptions,
) -> Result<Vec<u8>> {
    if !(OLDEST_WRITTEN..=NEWEST_OPSET).contains(&opset) {
        return Err(OnnxError::WriteOpset { opset });
    }
    let constants = constants(definition, values)?;
    let stored: BTreeMap<&str, &Array> = definition
        .stored
        .iter()
        .map(|stored| {
            let name = stored.name.as_str();
            let array = values.get(name).or(stored.values.array().map(|array| &**array));
            match array.or(constants.get(name)) {
                Some(array) => Ok((name, array)),
                None => Err(OnnxError::Value {
                    name: name.to_owned(),
                    reason: "it is drawn when a model is made: pass the values of that model".to_owned(),
                }),
            }
        })
        .collect::<Result<_>>()?;
    let nodes = in_order(definition)?;
    let constants =
        nodes.iter().filter_map(|node| if let Op::Constant(array) = &node.op { Some(array) } else { None });
    check_size(stored.values().copied().chain(constants).map(build::byte_len).sum())?;
    let mut writing = writing(definition, &stored, opset, options);
    for node in nodes {
        writing.node(node).map_err(|reason| {
            let (node, operator) = (node.name.clone(), node.op.name());
            OnnxError::Unwritable { node, operator, opset, reason }
        })?;
    }
    let outputs = definition.outputs.iter().map(|name| {
        let About { kind, rank, .. } = writing.about(name);
        let shape = rank.map(|rank| vec![Dimension::Open(String::new()); rank]);
        value(name, (kind, shape), options)
    });
    let output: Vec<ValueProto> = outputs.collect();
    let inputs = definition.inputs.iter();
    let input = inputs.map(|input| value(&input.name, (input.kind, input.shape.clone()), options)).collect();
    let mut node = writing.nodes.into_iter().map(build::node).collect::<Result<Vec<_>>>()?;
    let used = node.iter().flat_map(|node| &node.input).chain(&definition.outputs);
    let used: HashSet<String> = used.cloned().collect();
    let is_used = |name: &String| used.contains(name);
    node.retain(|node| node.op_type.as_deref() != Some("Constant") || node.output.iter().any(is_used));
    let order = definition.stored.iter().filter(|stored| is_used(&stored.name));
    let initializer = order
        .map(|found| build::tensor(&found.name, stored[found.name.as_str()]))
        .collect::<Result<Vec<_>>>()?;
    let text = |text: &str| Some(text.to_owned());
    let name = if definition.name.is_empty() { "model" } else { &definition.name };
    let model = ModelProto {
        ir_version: Some(ir_version(opset)),
        producer_name: text(&options.producer),
        producer_version: text(&options.producer_version),
        graph: Some(GraphProto {
            node,
            name: text(name),
            initializer,
            input,
            output,
            ..GraphProto::default()
        }),
        opset_import: vec![OpsetProto { domain: text(""), version: Some(opset) }],
        metadata_props: options
            .metadata
            .iter()
            .map(|(key, value)| EntryProto { key: text(key), value: text(value) })
            .collect(),
        functions: Vec::new(),
    };
    check_size(model.encoded_len() as u64)?;
    let mut bytes = convoke_memory::with_capacity(model.encoded_len())?;
    // A vector takes what there is, and it has the room.
    model.encode(&mut bytes).map_err(|error| OnnxError::TooLarge { reason: error.to_string() })?;
    Ok(bytes)
}

/// A file without nodes, and what is known of inputs and stored values.
fn writing<'a>(
    definition: &'a Definition,
    stored: &BTreeMap<&'a str, &'a Array>,
    opset: i64,
    options: &WriteOptions,
) -> Writing<'a> {
    let mut names = Names::default();
    let inputs = definition.inputs.iter().map(|input| &input.name);
    names.taken.extend(inputs.chain(definition.nodes.iter().flat_map(|node| &node.outputs)).cloned());
    names.taken.extend(stored.keys().map(|name| (*name).to_owned()));
    let mut values: HashMap<&str, About> =
        stored.iter().map(|(name, array)| (*name, About::of(array))).collect();
    for input in &definition.inputs {
        let shape = options.shapes.get(&input.name).or(input.shape.as_ref());
        let (kind, rank) = (input.kind, shape.map(Vec::len));
        values.insert(&input.name, About { kind, rank, ..About::default() });
    }
    Writing { nodes: Vec::new(), names, values, opset, training: options.training }
}

/// Writes a model to a file, whole or not at all. See [`write()`].
///
/// # Errors
/// As [`write()`], and if the file cannot be written.
pub fn save(
    path: &Path,
    definition: &Definition,
    values: &BTreeMap<String, Array>,
    options: &WriteOptions,
) -> Result<()> {
    let bytes = write(definition, values, options)?;
    write_whole(path, &bytes).map_err(|source| OnnxError::Io {
        action: "write",
        file: path.to_owned(),
        source,
    })
}

/// The stored arrays whose elements are all the same number, as far as `values` has none for them.
fn constants<'a>(
    definition: &'a Definition,
    values: &BTreeMap<String, Array>,
) -> Result<BTreeMap<&'a str, Array>> {
    let open = definition.stored.iter().filter(|stored| !values.contains_key(&stored.name));
    let arrays = open.filter_map(|stored| {
        let array = stored.values.constant().transpose()?;
        Some(array.map(|array| (stored.name.as_str(), array)).map_err(OnnxError::from))
    });
    arrays.collect()
}

fn check_size(bytes: u64) -> Result<()> {
    if bytes <= LARGEST_MESSAGE {
        return Ok(());
    }
    let reason = format!(
        "the model has {bytes} bytes, and an ONNX file at most {LARGEST_MESSAGE}; weights in files of their own are not written"
    );
    Err(OnnxError::TooLarge { reason })
}

/// The version of the file format that came with a version of the operators.
fn ir_version(opset: i64) -> i64 {
    match opset {
        ..=14 => 7,
        15..=18 => 8,
        19 | 20 => 9,
        21 | 22 => 10,
        23 => 11,
        _ => 12,
    }
}

fn value(name: &str, (kind, shape): (Kind, Option<Vec<Dimension>>), options: &WriteOptions) -> ValueProto {
    let mut shape = options.shapes.get(name).cloned().or(shape);
    if let (Some([Dimension::Open(first), ..]), Some(batch), true) =
        (shape.as_deref_mut(), &options.batch, kind.is_float())
        && first.is_empty()
    {
        first.clone_from(batch);
    }
    build::value(name, kind, shape.as_deref())
}
