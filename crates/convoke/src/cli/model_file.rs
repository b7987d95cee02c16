//! Models in files: ONNX, and weights for a model.

use std::path::Path;
use std::sync::Once;

use convoke_files::escaped;

use crate::Error;
use crate::nn::checkpoint::{CheckpointError, WeightOptions};
use crate::nn::models::ModelSpec;
use crate::nn::{checkpoint, onnx};

use super::console;

/// Whether a path names an ONNX file.
pub(crate) fn is_onnx(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("onnx"))
}

/// A model to train, from an ONNX file.
pub(crate) fn spec(path: &Path) -> std::result::Result<ModelSpec, String> {
    let file = onnx::read(path).map_err(|error| error.to_string())?;
    if let Some(note) = file.note() {
        console::note(&format!("note: {}: {note}", escaped(path.display())));
    }
    let name = path.display().to_string();
    ModelSpec::of_graph(&name, file.definition).map_err(|error| error.to_string())
}

/// `spec` for a model that starts with the weights of a file.
pub(crate) fn with_weights(spec: ModelSpec, file: &Path) -> ModelSpec {
    let (file, said) = (file.to_owned(), Once::new());
    spec.starting_from(move |model| {
        let options = WeightOptions { new_head: true, ..WeightOptions::default() };
        let loaded = checkpoint::load_weights(model, &file, &options).map_err(|error| {
            // The library's message names its options.
            let reason = match &error {
                CheckpointError::Weights { file, found } => format!(
                    "{}: the weights do not fit the model: {found}; only the last layer may differ, by its number of classes",
                    escaped(file.display())
                ),
                _ => error.to_string(),
            };
            Error::Invalid { operation: "--weights", reason }
        })?;
        // Each rank loads them.
        said.call_once(|| console::note(&format!("weights: {}: {loaded}", escaped(file.display()))));
        Ok(())
    })
}
