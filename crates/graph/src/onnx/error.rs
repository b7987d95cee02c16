//! What can be wrong with a file, or with a model that is to be written.

use std::io;
use std::path::PathBuf;

use convoke_files::escaped;
use convoke_memory::OutOfMemory;

use super::{NEWEST_OPSET, OLDEST_OPSET, OLDEST_WRITTEN, operators};
use crate::graph::Disorder;

/// Why a model cannot be read or written. Text of the file is escaped.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs)]
pub enum OnnxError {
    /// What is wrong in a file that was read by its path.
    #[error("{}: {error}", escaped(.file.display()))]
    File { file: PathBuf, error: Box<OnnxError> },
    /// The system refuses the action: to read, or to write.
    #[error("cannot {action} {}: {source}", escaped(.file.display()))]
    Io { action: &'static str, file: PathBuf, source: io::Error },
    /// The bytes are no model.
    #[error("not a whole ONNX file: {}; export the model again, or download it again", escaped(.reason))]
    Damaged { reason: String },
    /// The operators' version is not known.
    #[error(
        "the model needs version {opset} of ONNX's operators, and {OLDEST_OPSET} to {NEWEST_OPSET} are read: export it with \
         opset_version=17, or convert it with onnx.version_converter.convert_version(model, 17)"
    )]
    Opset { opset: i64 },
    /// A node has an operator that is not known. An empty domain is ONNX's own.
    #[error(
        "node {} has the operator {} of the domain {}, which is not supported; supported are: {}",
        escaped(.node), escaped(.operator), domain_name(.domain), operators().join(", ")
    )]
    UnknownOperator { node: String, operator: String, domain: String },
    /// A node is quantized.
    #[error(
        "node {} has the operator {}, so the file is quantized, and a quantized model cannot be trained: export the model \
         in f32, before it is quantized",
        escaped(.node), escaped(.operator)
    )]
    Quantized { node: String, operator: String },
    /// A node contains another graph.
    #[error(
        "node {} has the operator {} with a graph of its own (If, Loop, Scan), which is not supported: export the model \
         without branches and loops that depend on its input, for example with onnxsim",
        escaped(.node), escaped(.operator)
    )]
    Subgraph { node: String, operator: String },
    /// A node is wrong, or asks for what its operator cannot do.
    #[error("node {} ({}): {}", escaped(.node), escaped(.operator), escaped(.reason))]
    Node { node: String, operator: String, reason: String },
    /// A tensor is wrong, or of a type that is not supported.
    #[error("tensor {}: {}", escaped(.name), escaped(.reason))]
    Tensor { name: String, reason: String },
    /// A value is not defined, or defined twice, or of a type that is not supported.
    #[error("value {}: {}", escaped(.name), escaped(.reason))]
    Value { name: String, reason: String },
    /// The model holds too much for a file of its length, or for a file at all.
    #[error("{reason}")]
    TooLarge { reason: String },
    /// A node cannot be expressed in the version that is to be written.
    #[error(
        "node {} ({operator}) cannot be written with version {opset} of ONNX's operators: {reason}",
        escaped(.node)
    )]
    Unwritable { node: String, operator: &'static str, opset: i64, reason: String },
    /// The options ask for a version that is not written.
    #[error(
        "files are written with versions {OLDEST_WRITTEN} to {NEWEST_OPSET} of ONNX's operators, not {opset}"
    )]
    WriteOpset { opset: i64 },
    /// There is not enough memory.
    #[error(transparent)]
    Memory(#[from] OutOfMemory),
}

impl From<Disorder> for OnnxError {
    fn from(Disorder { value, reason }: Disorder) -> OnnxError {
        OnnxError::Value { name: value, reason }
    }
}

fn domain_name(domain: &str) -> String {
    match domain {
        "" => "ai.onnx".to_owned(),
        domain => escaped(domain).to_string(),
    }
}
