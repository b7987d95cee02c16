//! Reads and writes models in the ONNX format.
//!
//! [`read()`] makes a [`Definition`] of a file, whatever its version: attributes that became inputs are inputs, deprecated operators
//! are expressed by others. [`write()`] does the reverse. A file may come from anywhere, so nothing in it is trusted: sizes are
//! checked before memory is allocated, and names are escaped in messages.

mod build;
mod error;
mod functions;
mod operators;
mod proto;
mod read;
mod scan;
mod sequences;
mod tensor;
#[cfg(test)]
mod tests;
mod write;

pub use error::OnnxError;
pub use operators::operators;
pub use write::{WriteOptions, save, write};

use std::collections::BTreeMap;
use std::path::Path;

use convoke_files::read_bounded;
use prost::bytes::Bytes;

use crate::graph::{Definition, Op};

/// A result with an [`OnnxError`].
type Result<T> = std::result::Result<T, OnnxError>;

/// The oldest version of ONNX's operators that is read.
const OLDEST_OPSET: i64 = 7;
/// The newest version of ONNX's operators that is read and written.
const NEWEST_OPSET: i64 = 24;
/// The oldest version that is written.
const OLDEST_WRITTEN: i64 = 13;
/// Longer files are refused.
const LARGEST_FILE: u64 = 4 << 30;

/// How PyTorch's exporter keeps batch norms, and with them the names of weights.
#[doc(hidden)]
pub const KEEPING_NAMES: &str = "torch.onnx.export(..., training=torch.onnx.TrainingMode.PRESERVE, do_constant_folding=False, \
                                        dynamo=False), or with dynamo=True and optimize=False";

/// A model of a file.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Model {
    /// What it computes, and its weights.
    pub definition: Definition,
    /// The file's notes, by their keys.
    pub metadata: BTreeMap<String, String>,
    /// The version of ONNX's operators that the file was written with.
    pub opset: i64,
    /// The version of the file format.
    pub ir_version: i64,
    /// The program that wrote the file: `pytorch`.
    pub producer: String,
    /// The version of that program.
    pub producer_version: String,
}

impl Model {
    /// What to know about the file before training the model: that its batch norms are gone, and how to get them.
    pub fn note(&self) -> Option<String> {
        let has = |wanted: fn(&Op) -> bool| self.definition.nodes.iter().any(|node| wanted(&node.op));
        let convolves = has(|op| matches!(op, Op::Conv(_) | Op::ConvTranspose(_)));
        let normalizes = has(|op| {
            matches!(op, Op::BatchNorm(_) | Op::GroupNorm(_) | Op::InstanceNorm(_) | Op::LayerNorm(_))
        });
        (convolves && !normalizes && self.producer.starts_with("pytorch")).then(|| format!(
            "the model has no batch norms: if it had some in PyTorch, its exporter folded them into the convolutions, and \
             without them it trains badly. To keep them, export with {KEEPING_NAMES}"
        ))
    }
}

/// Reads the model of a file. Weights may lie in other files, within the same folder.
///
/// # Errors
/// If the file cannot be read, is damaged or longer than 4 GiB, or holds what is not supported; the error names it.
pub fn read(path: &Path) -> Result<Model> {
    let folder = path.parent().unwrap_or(Path::new(""));
    of_file(path, |bytes| read::model(bytes, Some(folder)))
}

/// What is read of a file.
fn of_file<T>(path: &Path, read: impl FnOnce(Bytes) -> Result<T>) -> Result<T> {
    let failed = |source| OnnxError::Io { action: "read", file: path.to_owned(), source };
    let bytes = read_bounded(path, LARGEST_FILE).map_err(failed)?;
    read(Bytes::from(bytes))
        .map_err(|error| OnnxError::File { file: path.to_owned(), error: Box::new(error) })
}

/// Reads the tensor of a file (`*.pb`), such as the inputs and outputs that come with ONNX's own tests.
///
/// # Errors
/// As [`read()`].
pub fn read_tensor(path: &Path) -> Result<crate::graph::Array> {
    of_file(path, read::tensor)
}

/// Reads a model from bytes. Weights may lie in files within `folder`, if there is one.
///
/// # Errors
/// As [`read()`].
pub fn read_bytes(bytes: &[u8], folder: Option<&Path>) -> Result<Model> {
    read::model(Bytes::from(convoke_memory::copied(bytes)?), folder)
}
