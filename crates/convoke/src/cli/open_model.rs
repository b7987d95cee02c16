//! Models that exist, as commands name them: by an ONNX file, by the folder of a checkpoint, by name.

use std::any::Any;
use std::path::Path;
use std::sync::Arc;

use convoke_files::escaped;

use crate::Device;
use crate::nn::data::DatasetInfo;
use crate::nn::graph::{Definition, Graph};
use crate::nn::models::ModelSpec;
use crate::nn::modules::ConvBnMode;
use crate::nn::training::SavedModel;
use crate::nn::{Init, checkpoint, onnx};

use super::failure::{Failure, Result};
use super::model_file::{is_onnx, spec};
use super::registry::{model, models};

type Module = dyn crate::nn::Module;

/// A model that exists, with its parameters.
pub(crate) struct OpenModel {
    pub(crate) name: String,
    pub(crate) module: Box<Module>,
    /// Channels, height and width of its images, where they are known.
    pub(crate) image: Option<[usize; 3]>,
    /// The data that it was trained on, if it was trained here.
    pub(crate) data: Option<DatasetInfo>,
}

impl OpenModel {
    /// The model as data, if it is data.
    pub(crate) fn graph(&self) -> Option<&Graph> {
        (self.module.as_ref() as &dyn Any).downcast_ref()
    }
}

/// Opens MODEL: an ONNX file, the folder of a checkpoint, or the name of a model, which then has initial parameters.
pub(crate) fn open(text: &Path, device: &Device) -> Result<OpenModel> {
    let name = text.display().to_string();
    let init = Init::new(device, 0);
    if is_onnx(text) {
        let definition = Arc::new(onnx::read(text)?.definition);
        let image = image_of(&definition);
        let module = Box::new(Graph::new(&definition, &init, ConvBnMode::Fused)?);
        return Ok(OpenModel { name, module, image, data: None });
    }
    if checkpoint::exists(text).unwrap_or(false) {
        let saved = SavedModel::open(text)?;
        let spec = match Path::new(&saved.model) {
            file if is_onnx(file) => spec(file).map_err(|error| {
                Failure::Run(format!(
                    "the checkpoint is of the model in {}: {error}",
                    escaped(file.display())
                ))
            })?,
            _ => named(&saved.model)?,
        };
        let mut options = spec.options(ConvBnMode::Fused);
        (options.image, options.classes) = (saved.data.shape(), saved.data.classes);
        let module = spec.build(&init, &options)?;
        saved.restore(module.as_ref())?;
        let image = Some(saved.data.shape());
        return Ok(OpenModel { name: saved.model, module, image, data: Some(saved.data) });
    }
    let spec = named(&name)?;
    let options = spec.options(ConvBnMode::Fused);
    Ok(OpenModel { name, module: spec.build(&init, &options)?, image: Some(spec.input()), data: None })
}

fn named(name: &str) -> Result<ModelSpec> {
    if models().get(name).is_ok() {
        return Ok(model(name));
    }
    let known = models().names().collect::<Vec<_>>().join(", ");
    let name = escaped(name);
    Err(Failure::Usage(format!(
        "MODEL {name} is neither an ONNX file (*.onnx), nor a folder with a checkpoint, nor one of the models {known}"
    )))
}

/// C, H and W of a model's first input, if it takes images of one size.
fn image_of(definition: &Definition) -> Option<[usize; 3]> {
    match definition.inputs.first()?.image()? {
        [Some(channels), Some(height), Some(width)] => Some([channels, height, width]),
        _ => None,
    }
}
