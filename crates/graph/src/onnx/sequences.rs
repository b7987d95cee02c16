//! Splits into sequences, of which single parts are taken: PyTorch's exporter writes `split` so. Each part becomes a slice.

use std::collections::{HashMap, HashSet};

use super::functions::{Versioned, is_own_domain};
use super::proto::{AttributeProto, GraphProto, NodeProto, TensorProto, element};
use super::tensor::TensorSource;
use super::{Result, build};
use crate::graph::{Array, Kind};

/// Longer lists of numbers are no sizes of parts.
const MOST_PARTS: i64 = 1 << 12;

fn is(node: &NodeProto, op_type: &str) -> bool {
    node.op_type.as_deref() == Some(op_type) && is_own_domain(node.domain.as_deref().unwrap_or_default())
}

fn attribute<'a>(node: &'a NodeProto, name: &str) -> Option<&'a AttributeProto> {
    node.attribute.iter().find(|attribute| attribute.name.as_deref() == Some(name))
}

/// Where the parts of a sequence begin, and end where that is known.
struct Parts {
    x: String,
    axis: i64,
    split: Split,
}

enum Split {
    /// All of this size; the last may be smaller.
    Every(i64),
    Sizes(Vec<i64>),
}

impl Parts {
    /// The range of a part along the axis.
    fn range(&self, part: i64) -> Option<[i64; 2]> {
        let part = usize::try_from(part).ok()?;
        match &self.split {
            Split::Every(size) => {
                let start = size.checked_mul(i64::try_from(part).ok()?)?;
                Some([start, start.checked_add(*size)?])
            }
            Split::Sizes(sizes) => {
                let size = sizes.get(part)?;
                let start = sizes[..part].iter().try_fold(0i64, |start, &size| start.checked_add(size))?;
                Some([start, start.checked_add(*size)?])
            }
        }
    }
}

/// Puts a slice in the place of each part that is taken of a sequence, where sizes and places are stored. Other sequences stay, and
/// are refused later.
pub(super) fn without_sequences(
    nodes: &mut Vec<Versioned>,
    graph: &GraphProto,
    source: &mut TensorSource,
) -> Result<()> {
    if !nodes.iter().any(|node| is(&node.node, "SplitToSequence")) {
        return Ok(());
    }
    let numbers = integers(nodes, graph, source)?;
    let mut sequences: HashMap<String, Parts> = HashMap::new();
    for Versioned { node, .. } in nodes.iter().filter(|node| is(&node.node, "SplitToSequence")) {
        let (Some(x), Some(output)) = (node.input.first(), node.output.first()) else { continue };
        let axis = attribute(node, "axis").and_then(|axis| axis.i).unwrap_or(0);
        let split = match node.input.get(1).and_then(|name| numbers.get(name)) {
            Some((0, size)) => Split::Every(size[0]),
            Some((_, sizes)) => Split::Sizes(sizes.clone()),
            None => continue,
        };
        sequences.insert(output.clone(), Parts { x: x.clone(), axis, split });
    }
    let mut read = Vec::with_capacity(nodes.len());
    for Versioned { node, opset } in std::mem::take(nodes) {
        let parts =
            node.input.first().and_then(|name| sequences.get(name)).filter(|_| is(&node, "SequenceAt"));
        let place = node.input.get(1).and_then(|name| numbers.get(name)).and_then(|(_, place)| place.first());
        let range = parts.zip(place).and_then(|(parts, &place)| Some((parts, parts.range(place)?)));
        let (Some((parts, [start, end])), Some(output)) = (range, node.output.first()) else {
            read.push(Versioned { node, opset });
            continue;
        };
        let mut input = vec![parts.x.clone()];
        for (what, number) in [("start", start), ("end", end), ("axis", parts.axis)] {
            let name = format!("{output}/{what}");
            read.push(Versioned { node: constant(&name, number)?, opset });
            input.push(name);
        }
        let slice = NodeProto {
            input,
            output: node.output.clone(),
            name: node.name.clone(),
            op_type: Some("Slice".into()),
            ..NodeProto::default()
        };
        read.push(Versioned { node: slice, opset });
    }
    // A sequence that is still read stays.
    let still: HashSet<String> = read.iter().flat_map(|node| &node.node.input).cloned().collect();
    read.retain(|Versioned { node, .. }| {
        !is(node, "SplitToSequence") || node.output.iter().any(|name| still.contains(name))
    });
    *nodes = read;
    Ok(())
}

/// A node that gives a list of one number.
fn constant(name: &str, number: i64) -> Result<NodeProto> {
    let value = build::tensor("", &Array::integers([number]))?;
    let (output, op_type) = (vec![name.to_owned()], Some("Constant".into()));
    Ok(NodeProto { output, op_type, ..NodeProto::default() }.tensor("value", value))
}

/// Short lists of whole numbers that are stored, with their number of dimensions.
fn integers(
    nodes: &[Versioned],
    graph: &GraphProto,
    source: &mut TensorSource,
) -> Result<HashMap<String, (usize, Vec<i64>)>> {
    let short = |tensor: &&TensorProto| {
        let whole = [element::INT32, element::INT64].contains(&tensor.data_type.unwrap_or(0));
        whole && matches!(tensor.dims[..], [] | [1..=MOST_PARTS])
    };
    let mut numbers = HashMap::new();
    let mut add = |name: &str, tensor: &TensorProto| -> Result<()> {
        let array = source.array(tensor.clone())?;
        if array.kind() == Kind::I64 && !array.is_empty() {
            numbers.insert(name.to_owned(), (array.shape().len(), array.to_i64()));
        }
        Ok(())
    };
    for tensor in graph.initializer.iter().filter(short) {
        add(tensor.name.as_deref().unwrap_or_default(), tensor)?;
    }
    for Versioned { node, .. } in nodes.iter().filter(|node| is(&node.node, "Constant")) {
        let tensor = attribute(node, "value").and_then(|value| value.t.as_deref());
        if let (Some(tensor), Some(output)) = (tensor.filter(short), node.output.first()) {
            add(output, tensor)?;
        }
    }
    Ok(numbers)
}
