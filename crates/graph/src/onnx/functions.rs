//! Replaces calls of a file's functions by their nodes.

use std::collections::HashMap;

use super::error::OnnxError;
use super::proto::{AttributeProto, FunctionProto, GraphProto, NodeProto, OpsetProto};
use super::tensor::TensorSource;
use super::{NEWEST_OPSET, OLDEST_OPSET, Result};
use crate::graph::ops::reading::Names;

/// Functions that call functions: how many deep.
const DEEPEST: usize = 16;

/// A node with the version of ONNX's operators that it was written with.
pub(super) struct Versioned {
    pub(super) node: NodeProto,
    pub(super) opset: i64,
}

/// The version of ONNX's operators in a list of versions.
pub(super) fn opset_of(imports: &[OpsetProto]) -> Option<i64> {
    let is_own = |import: &&OpsetProto| is_own_domain(import.domain.as_deref().unwrap_or_default());
    imports.iter().find(is_own).map(|import| import.version.unwrap_or(0))
}

/// Whether a domain is that of ONNX's own operators.
pub(super) fn is_own_domain(domain: &str) -> bool {
    matches!(domain, "" | "ai.onnx")
}

/// The nodes of a graph, without calls.
pub(super) fn inlined(
    graph: &mut GraphProto,
    functions: &[FunctionProto],
    opset: i64,
    source: &mut TensorSource,
) -> Result<Vec<Versioned>> {
    let nodes = std::mem::take(&mut graph.node);
    if functions.is_empty() {
        return Ok(nodes.into_iter().map(|node| Versioned { node, opset }).collect());
    }
    let known: HashMap<(&str, &str, &str), &FunctionProto> =
        functions.iter().map(|function| (function_key(function), function)).collect();
    let mut names = Names::default();
    names.taken.extend(nodes.iter().flat_map(|node| node.input.iter().chain(&node.output)).cloned());
    names.taken.extend(graph.initializer.iter().filter_map(|tensor| tensor.name.clone()));
    names.taken.extend(graph.input.iter().chain(&graph.output).filter_map(|value| value.name.clone()));
    let mut inlining = Inlining { names, source };
    // The next node is the last one. With each goes how deep in functions it is.
    let mut left: Vec<(Versioned, usize)> =
        nodes.into_iter().rev().map(|node| (Versioned { node, opset }, 0)).collect();
    let mut flat = Vec::new();
    while let Some((next, depth)) = left.pop() {
        let Some(function) = known.get(&node_key(&next.node)) else {
            flat.push(next);
            continue;
        };
        if depth == DEEPEST {
            return Err(refused(&next.node, format!("functions call one another more than {DEEPEST} deep")));
        }
        let opset = opset_of(&function.opset_import).unwrap_or(next.opset);
        if !(OLDEST_OPSET..=NEWEST_OPSET).contains(&opset) {
            return Err(OnnxError::Opset { opset });
        }
        let body = inlining.body(&next.node, function)?;
        left.extend(body.into_iter().rev().map(|node| (Versioned { node, opset }, depth + 1)));
    }
    Ok(flat)
}

fn text(text: &Option<String>) -> &str {
    text.as_deref().unwrap_or_default()
}

fn function_key(function: &FunctionProto) -> (&str, &str, &str) {
    (text(&function.domain), text(&function.name), text(&function.overload))
}

fn node_key(node: &NodeProto) -> (&str, &str, &str) {
    (text(&node.domain), text(&node.op_type), text(&node.overload))
}

fn refused(node: &NodeProto, reason: String) -> OnnxError {
    OnnxError::Node { node: label(node), operator: node.op_type.clone().unwrap_or_default(), reason }
}

/// The name of a node, or that of its first output.
pub(super) fn label(node: &NodeProto) -> String {
    let name = node.name.as_deref().filter(|name| !name.is_empty());
    name.or(node.output.first().map(String::as_str)).unwrap_or_default().to_owned()
}

struct Inlining<'a> {
    /// The names of all values.
    names: Names,
    source: &'a mut TensorSource,
}

impl Inlining<'_> {
    /// The nodes of a function with the values and attributes of a call.
    fn body(&mut self, call: &NodeProto, function: &FunctionProto) -> Result<Vec<NodeProto>> {
        if call.input.len() > function.input.len() || call.output.len() > function.output.len() {
            return Err(refused(call, "it has more inputs or outputs than its function".to_owned()));
        }
        let prefix = label(call);
        let mut values: HashMap<&str, String> = HashMap::new();
        for (name, value) in
            function.input.iter().zip(call.input.iter().map(Some).chain(std::iter::repeat(None)))
        {
            values.insert(name, value.cloned().unwrap_or_default());
        }
        for (name, value) in function.output.iter().zip(&call.output) {
            if !value.is_empty() && values.insert(name, value.clone()).is_some() {
                return Err(refused(call, format!("its function gives its input {name} as it is")));
            }
        }
        let mut body = Vec::new();
        for node in &function.node {
            let inner = label(node);
            let texts: usize = node.attribute.iter().map(|a| a.name.as_ref().map_or(0, String::len)).sum();
            let size = size_of::<NodeProto>() + node.attribute.len() * size_of::<AttributeProto>() + texts;
            self.source.spend(2 * size as u64)?;
            let input = self.renamed(&node.input, &mut values, &prefix)?;
            let output = self.renamed(&node.output, &mut values, &prefix)?;
            self.source.spend(prefix.len() as u64 + inner.len() as u64)?;
            let mut attribute = Vec::new();
            for own in &node.attribute {
                attribute.extend(self.attribute(own, call, function)?);
            }
            body.push(NodeProto {
                input,
                output,
                name: Some(format!("{prefix}/{inner}")),
                op_type: node.op_type.clone(),
                attribute,
                domain: node.domain.clone(),
                overload: node.overload.clone(),
            });
        }
        Ok(body)
    }

    /// The graph's names of a function's values.
    fn renamed<'f>(
        &mut self,
        names: &'f [String],
        values: &mut HashMap<&'f str, String>,
        prefix: &str,
    ) -> Result<Vec<String>> {
        let mut renamed = Vec::new();
        for name in names {
            if name.is_empty() {
                renamed.push(String::new());
                continue;
            }
            self.source.spend((prefix.len() + name.len()) as u64 + 4 * size_of::<String>() as u64)?;
            if let Some(value) = values.get(name.as_str()) {
                renamed.push(value.clone());
                continue;
            }
            let fresh = self.names.fresh(&format!("{prefix}/{name}"));
            values.insert(name, fresh.clone());
            renamed.push(fresh);
        }
        Ok(renamed)
    }

    /// An attribute of a function's node: its own, or that of the call which it refers to.
    fn attribute(
        &mut self,
        own: &AttributeProto,
        call: &NodeProto,
        function: &FunctionProto,
    ) -> Result<Option<AttributeProto>> {
        let referred = own.ref_attr_name.as_deref().filter(|name| !name.is_empty());
        let found = match referred {
            None => Some(own),
            Some(name) => {
                let named = |attribute: &&AttributeProto| attribute.name.as_deref() == Some(name);
                let given = call.attribute.iter().find(named);
                given.or_else(|| function.attribute_proto.iter().find(named))
            }
        };
        let Some(found) = found else { return Ok(None) };
        let size = 16 * (found.ints.len() + found.floats.len() + found.graphs.len());
        let tensor = found.t.as_ref().map_or(0, |tensor| {
            size_of_val(&**tensor) + 8 * tensor.dims.len() + 256 * tensor.external_data.len()
        });
        self.source.spend((size + tensor) as u64)?;
        Ok(Some(AttributeProto { name: own.name.clone(), ref_attr_name: None, ..found.clone() }))
    }
}
