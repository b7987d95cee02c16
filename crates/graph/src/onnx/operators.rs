//! The operators that are read, by their names.

use std::sync::LazyLock;

use super::Result;
use super::error::OnnxError;
use super::functions::{is_own_domain, label};
use super::proto::{GRAPH, GRAPHS, NodeProto};
use crate::graph::ops::readers;
use crate::graph::ops::reading::Reader;

/// Operators of other domains that are ONNX's own of the same name.
const MICROSOFT: [(&str, &str); 1] = [("com.microsoft", "Gelu")];

/// The names of the operators that [`read`](super::read()) understands, sorted.
pub fn operators() -> &'static [&'static str] {
    static NAMES: LazyLock<Vec<&'static str>> = LazyLock::new(|| {
        let mut names: Vec<&'static str> = readers().map(|reader| reader.0).collect();
        names.sort_unstable();
        names
    });
    &NAMES
}

/// The operator of a node.
pub(super) fn find(node: &NodeProto) -> Result<&'static Reader> {
    let name = node.op_type.as_deref().unwrap_or_default();
    let domain = node.domain.as_deref().unwrap_or_default();
    let (node_name, operator) = (label(node), name.to_owned());
    let has_graph = node.attribute.iter().any(|attribute| {
        attribute.g.is_some()
            || !attribute.graphs.is_empty()
            || matches!(attribute.r#type, Some(GRAPH | GRAPHS))
    });
    if has_graph || matches!(name, "If" | "Loop" | "Scan") {
        return Err(OnnxError::Subgraph { node: node_name, operator });
    }
    if (is_own_domain(domain) || MICROSOFT.contains(&(domain, name)))
        && let Some(found) = readers().find(|reader| reader.0 == name)
    {
        return Ok(found);
    }
    let quantized = ["uantize", "QLinear", "Integer", "MatMulNBits", "QGemm", "QAttention"];
    if quantized.iter().any(|part| name.contains(part)) {
        return Err(OnnxError::Quantized { node: node_name, operator });
    }
    let domain = if is_own_domain(domain) { String::new() } else { domain.to_owned() };
    Err(OnnxError::UnknownOperator { node: node_name, operator, domain })
}
