//! Reads weights from ONNX files.

use std::path::Path;
use std::sync::Arc;

use convoke_autograd::DType;
use safetensors::tensor::Dtype;

use super::numbers::mismatch;
use super::torch_file::unsupported;
use super::{CheckpointError, Result, Value};
use crate::graph::Array;
use crate::onnx::{self, KEEPING_NAMES, OnnxError};

/// The arrays of a file that a model of it trains or has as statistics, by name.
pub(super) fn arrays(file: &Path) -> Result<Vec<(String, Arc<Array>)>> {
    let model = onnx::read(file).map_err(|error| match error {
        // The error of a checkpoint names the file.
        OnnxError::File { error, .. } => unsupported(file, error.to_string()),
        error => unsupported(file, error.to_string()),
    })?;
    Ok(model.definition.state()?)
}

/// Says what to do if names of a file are not the model's.
pub(super) fn explained(error: CheckpointError) -> CheckpointError {
    match error {
        CheckpointError::Weights { file, found } if !found.missing.is_empty() => {
            let reason = format!(
                "the names of its weights are not those of the model: {found}. Exporters rename what they join to other weights. \
                 To keep names, export the model with {KEEPING_NAMES}; or train the model in the file, without weights from another \
                 one"
            );
            unsupported(&file, reason)
        }
        error => error,
    }
}

/// The value that an array is, of the kind and type of `like`.
pub(super) fn value(file: &Path, name: &str, array: &Array, like: &Value) -> Result<Value> {
    let Value::Tensor(tensor) = like else {
        return Err(mismatch(file, name, like, Some((Dtype::F32, array.shape()))));
    };
    let computed = if tensor.dtype() == DType::F64 { DType::F64 } else { DType::F32 };
    Ok(Value::Tensor(array.to_tensor(tensor.device(), computed)?.to_dtype(tensor.dtype())?))
}
