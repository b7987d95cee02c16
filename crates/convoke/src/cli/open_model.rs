//! Models that exist, as commands name them: by the folder of a trained model, the folder of a checkpoint, an ONNX file, a name.

use std::any::Any;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use convoke_files::escaped;

use crate::Device;
use crate::nn::data::photos::{NO_CLASS, Normalisation};
use crate::nn::data::{DatasetInfo, Targets};
use crate::nn::graph::{Definition, Graph, record};
use crate::nn::models::ModelSpec;
use crate::nn::modules::ConvBnMode;
use crate::nn::training::{ModelCard, SavedModel};
use crate::nn::{Init, checkpoint, onnx};

use super::console;
use super::failure::{Failure, Result};
use super::model_file::{is_onnx, spec};
use super::model_folder::{BEST, CARD, GRAPH, LAST};
use super::registry::{find_model, models};

type Module = dyn crate::nn::Module;

/// Where an ONNX file holds the card of the model that it was exported from.
pub(crate) const METADATA: &str = "convoke.model";

/// A model that exists, with its parameters.
pub(crate) struct OpenModel {
    pub(crate) name: String,
    pub(crate) module: Box<Module>,
    /// Channels, height and width of its images, where they are known.
    pub(crate) image: Option<[usize; 3]>,
    /// What it was trained on, if it was trained here.
    pub(crate) card: Option<ModelCard>,
}

impl OpenModel {
    /// The model as data, if it is data.
    pub(crate) fn graph(&self) -> Option<&Graph> {
        (self.module.as_ref() as &dyn Any).downcast_ref()
    }

    /// A model that is written in Rust as data, for images of this height and width, without which they are the model's own.
    pub(crate) fn recorded(&self, size: Option<[usize; 2]>) -> Result<Graph> {
        let own = self.image.map(|[_, height, width]| [height, width]);
        let (Some([channels, ..]), Some([height, width])) = (self.image, size.or(own)) else {
            let reason =
                format!("the size of the images of the model {} is not known: give --image-size", self.name);
            return Err(Failure::Usage(reason));
        };
        let mut definition = record(self.module.as_ref(), &[channels, height, width])?;
        definition.name.clone_from(&self.name);
        Ok(Graph::new(&Arc::new(definition), &Init::new(&Device::cpu()?, 0), ConvBnMode::Fused)?)
    }
}

/// A trained model, ready to be used.
pub(crate) struct TrainedModel {
    /// The name of the model, or its file.
    pub(crate) name: String,
    pub(crate) spec: ModelSpec,
    pub(crate) module: Box<Module>,
    pub(crate) card: ModelCard,
}

/// Opens MODEL: what `train --output` or `--checkpoint` wrote, an ONNX file, or the name of a model, which then has initial
/// parameters.
pub(crate) fn open(path: &Path, device: &Device) -> Result<OpenModel> {
    let name = path.display().to_string();
    let init = Init::new(device, 0);
    if is_onnx(path) {
        let file = onnx::read(path)?;
        let image = image_of(&file.definition);
        let module = Box::new(Graph::new(&file.definition.into(), &init, ConvBnMode::Fused)?);
        return Ok(OpenModel { name, module, image, card: None });
    }
    if let Some(TrainedModel { module, card, spec, .. }) = saved(path, device)? {
        let image = Some(card.data.shape());
        return Ok(OpenModel { name: spec.name().to_owned(), module, image, card: Some(card) });
    }
    let spec = named(&name)?;
    let options = spec.options(ConvBnMode::Fused);
    let (name, module) = (spec.name().to_owned(), spec.build(&init, &options)?);
    Ok(OpenModel { name, module, image: Some(spec.input()), card: None })
}

/// Opens MODEL to use it: as [`open`], but a name alone is no trained model.
pub(crate) fn trained(path: &Path, device: &Device) -> Result<TrainedModel> {
    if is_onnx(path) {
        return of_onnx(path, device);
    }
    if let Some(model) = saved(path, device)? {
        return Ok(model);
    }
    let spec = named(&path.display().to_string())?;
    Err(Failure::Usage(format!(
        "MODEL {spec} is a model without trained weights: name the folder of `train --output`, or an ONNX file"
    )))
}

/// The model in the folder of `train --output`, or in a file of weights there, or in a folder of checkpoints; `None` if it is none
/// of these.
fn saved(path: &Path, device: &Device) -> Result<Option<TrainedModel>> {
    let name = path.display().to_string();
    let is_weights = path.extension().is_some_and(|extension| extension == "safetensors");
    let folder = if is_weights { path.parent().unwrap_or(Path::new("")) } else { path };
    let file = folder.join(CARD);
    if file.is_file() {
        let card = ModelCard::read(&file)?;
        let weights = match is_weights {
            true => path.to_owned(),
            false => weights_in(folder)?,
        };
        check_inside(&card, &file)?;
        let (spec, module) = build(&card, folder, device)?;
        checkpoint::load_model(module.as_ref(), &weights)?;
        return Ok(Some(TrainedModel { name, spec, module, card }));
    }
    if is_weights || !checkpoint::exists(path).unwrap_or(false) {
        return Ok(None);
    }
    let mut saved = SavedModel::open(path)?;
    if is_onnx(Path::new(&saved.card.model)) {
        // The file that it was trained from may be anywhere, but the run has left a copy.
        saved.card.model = GRAPH.into();
    }
    let (spec, module) = build(&saved.card, path, device)?;
    saved.restore(module.as_ref())?;
    Ok(Some(TrainedModel { name, spec, module, card: saved.card }))
}

/// Fails if a folder's card names an ONNX file that is not in the folder: the card may come from a stranger.
fn check_inside(card: &ModelCard, file: &Path) -> Result<()> {
    let model = Path::new(&card.model);
    let is_inside = model.file_name().is_some_and(|name| name == model.as_os_str());
    match !is_onnx(model) || is_inside {
        true => Ok(()),
        false => Err(Failure::Run(format!(
            "{}: its model is the file {}, which is not in its folder",
            escaped(file.display()),
            escaped(&card.model)
        ))),
    }
}

/// The weights of the best epoch, or without one the last ones.
fn weights_in(folder: &Path) -> Result<PathBuf> {
    [BEST, LAST].map(|name| folder.join(name)).into_iter().find(|file| file.is_file()).ok_or_else(|| {
        let folder = escaped(folder.display());
        Failure::Run(format!("{folder} has no weights: its training ended before anything was saved"))
    })
}

/// The model of a run, and the file of its weights: those of the best epoch, or without one the last ones.
///
/// # Errors
/// If the folder holds no run with weights.
pub(crate) fn of_run(folder: &Path) -> Result<(ModelSpec, PathBuf)> {
    let file = folder.join(CARD);
    if !file.is_file() {
        let folder = escaped(folder.display());
        return Err(Failure::Usage(format!("--weights: {folder} is no folder of a run: it holds no {CARD}")));
    }
    let card = ModelCard::read(&file)?;
    check_inside(&card, &file)?;
    let spec = match Path::new(&card.model) {
        model if is_onnx(model) => spec(&folder.join(model)).map_err(Failure::Run)?,
        _ => named(&card.model)?,
    };
    Ok((spec, weights_in(folder)?))
}

/// A new model for what a card describes; the path of an ONNX file is one below `folder`.
fn build(card: &ModelCard, folder: &Path, device: &Device) -> Result<(ModelSpec, Box<Module>)> {
    let spec = match Path::new(&card.model) {
        file if is_onnx(file) => spec(&folder.join(file))
            .map_err(|error| Failure::Run(format!("the model was trained from an ONNX file: {error}")))?,
        _ => named(&card.model)?,
    };
    let spec = spec.predicting(card.data.targets, card.value_scale.as_ref());
    spec.check_targets(&card.data).map_err(|error| Failure::Run(error.to_string()))?;
    let mut options = spec.options(ConvBnMode::Fused);
    (options.image, options.classes) = (card.data.shape(), card.data.classes);
    let module = spec.build(&Init::new(device, 0), &options)?;
    Ok((spec, module))
}

/// A model in an ONNX file: exported here, with its card, or from elsewhere.
fn of_onnx(file: &Path, device: &Device) -> Result<TrainedModel> {
    let name = file.display().to_string();
    let read = onnx::read(file)?;
    let own = read.metadata.get(METADATA).map(|json| ModelCard::from_json(json)).transpose();
    let own = own.map_err(|reason| Failure::Run(format!("{}: {METADATA}: {reason}", escaped(&name))))?;
    let mut spec = ModelSpec::of_graph(&name, read.definition)?;
    let card = match own {
        Some(card) => {
            // The layers of the file scale their output already; the loss is told by how much.
            spec = spec.predicting(card.data.targets, None);
            if let Some(scale) = card.value_scale.clone() {
                let objective = spec.objective().with_value_scale(scale);
                spec = spec.with_objective(objective);
            }
            card
        }
        None => {
            console::note(&format!(
                "note: {} does not say how its images are normalised: ImageNet's mean and standard deviation are used",
                escaped(&name)
            ));
            foreign(&spec)?
        }
    };
    let options = spec.options(ConvBnMode::Fused);
    let module = spec.build(&Init::new(device, 0), &options)?;
    Ok(TrainedModel { name, spec, module, card })
}

/// What can be said of a model from elsewhere.
fn foreign(spec: &ModelSpec) -> Result<ModelCard> {
    let (mean, std) = Normalisation::ImageNet.of_channels(spec.input()[0])?;
    let targets = match spec.targets() {
        Targets::Pixels { .. } => Targets::Pixels { ignore: Some(i64::from(NO_CLASS)) },
        targets => targets,
    };
    let data = DatasetInfo {
        targets,
        ..DatasetInfo::of_images("unknown", spec.input(), spec.classes(), [&mean, &std])
    };
    data.check()?;
    Ok(ModelCard::new(spec.name(), data))
}

fn named(name: &str) -> Result<ModelSpec> {
    if let Some(model) = find_model(name) {
        return Ok(model);
    }
    let known = models().names().collect::<Vec<_>>().join(", ");
    let name = escaped(name);
    Err(Failure::Usage(format!(
        "MODEL {name} is neither the folder of a trained model (`train --output`) or of a checkpoint, nor an ONNX file (*.onnx), nor \
         one of the models {known}"
    )))
}

/// C, H and W of a model's first input, if it takes images of one size.
fn image_of(definition: &Definition) -> Option<[usize; 3]> {
    match definition.inputs.first()?.image()? {
        [Some(channels), Some(height), Some(width)] => Some([channels, height, width]),
        _ => None,
    }
}
