//! What is to be known of a trained model besides its weights: `model.json`.

use std::borrow::Cow;
use std::path::Path;

use convoke_files::{read_text, write_out};
use serde::{Deserialize, Serialize};

use super::Trainer;
use crate::checkpoint::{CheckpointError, damaged, failed};
use crate::data::{DatasetInfo, PhotoOrigin, ValueScale};

const FORMAT: &str = "convoke model 1";
/// Larger files are refused: 4096 names of classes need a small part of this.
const LARGEST: u64 = 1 << 24;

/// What a trained model is and what it takes: enough to build it again and to prepare images for it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ModelCard {
    format: String,
    /// The model's name, or a path to its ONNX file.
    pub model: String,
    /// The data that it was trained on: shape of the images, number of classes, and by what pixels are normalised.
    pub data: DatasetInfo,
    /// The names of the classes, labels or numbers; none if they are only numbered.
    #[serde(default)]
    pub class_names: Vec<String>,
    /// The scale of the numbers that it predicts, if it predicts numbers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub value_scale: Option<ValueScale>,
    /// How photographs are prepared for it, if it was trained on photographs.
    #[serde(default)]
    pub photos: Option<PhotoOrigin>,
    /// The version of this library that wrote it.
    #[serde(default)]
    pub version: String,
}

impl ModelCard {
    /// The card of a model for data of this kind.
    pub fn new(model: &str, data: DatasetInfo) -> ModelCard {
        ModelCard {
            format: FORMAT.into(),
            model: model.to_owned(),
            data,
            class_names: Vec::new(),
            value_scale: None,
            photos: None,
            version: env!("CARGO_PKG_VERSION").into(),
        }
    }

    /// The name of a class, or its number.
    pub fn class_name(&self, class: usize) -> Cow<'_, str> {
        self.class_names.get(class).map_or_else(|| class.to_string().into(), |name| name.into())
    }

    /// Reads a `model.json`.
    ///
    /// # Errors
    /// If the file cannot be read, is no such file, or describes what cannot be.
    pub fn read(file: &Path) -> Result<ModelCard, CheckpointError> {
        let text = read_text(file, LARGEST).map_err(failed(file, "read"))?;
        ModelCard::from_json(&text).map_err(|reason| damaged(file, reason))
    }

    /// Reads the text of a `model.json`.
    ///
    /// # Errors
    /// Why it is none, or describes what cannot be.
    pub fn from_json(text: &str) -> Result<ModelCard, String> {
        let card: ModelCard = serde_json::from_str(text).map_err(|error| error.to_string())?;
        if card.format != FORMAT {
            return Err(format!("format: expected {FORMAT:?}, found {:?}", card.format));
        }
        card.data.check().map_err(|error| error.to_string())?;
        let (names, classes) = (card.class_names.len(), card.data.classes);
        if names != 0 && names != classes {
            return Err(format!("class_names: {names} names for {classes} classes"));
        }
        if let Some(scale) = &card.value_scale {
            scale.check(&card.data.name, classes).map_err(|error| error.to_string())?;
        }
        if let Some(photos) = &card.photos {
            let range = |name: &str, value: f64| match value > 0.0 && value <= 1.0 {
                true => Ok(()),
                false => Err(format!("{name}: {value} is not above 0 and at most 1")),
            };
            range("crop_fraction", photos.crop_fraction)?;
            range("validation_share", photos.validation_share)?;
        }
        Ok(card)
    }

    /// The text of its `model.json`.
    pub fn to_json(&self) -> String {
        serde_json::to_string_pretty(self).expect("a card has only texts and finite numbers")
    }

    /// Writes it; the file appears whole or not at all.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn write(&self, file: &Path) -> Result<(), CheckpointError> {
        let json = format!("{}\n", self.to_json());
        write_out(file, json.as_bytes()).map_err(failed(file, "write"))
    }
}

impl Trainer {
    /// The card of the run's model: images have the size that it sees in evaluation.
    pub fn card(&self) -> ModelCard {
        let data = &self.data.train;
        ModelCard {
            class_names: data.class_names().to_vec(),
            photos: data.photos(),
            value_scale: data.value_scale(),
            ..ModelCard::new(self.config.model.name(), data.info().clone())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::Targets;

    fn card() -> ModelCard {
        let photos =
            PhotoOrigin { folder: Some("a b".into()), crop_fraction: 0.875, validation_share: 0.2, seed: 7 };
        ModelCard {
            class_names: vec!["cat".into(), "dog \"x\"".into()],
            photos: Some(photos),
            ..ModelCard::new("resnet18", DatasetInfo::of_noise("folder", [3, 8, 9], 2, Targets::Image))
        }
    }

    #[test]
    fn is_read_as_it_was_written() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("model.json");
        card().write(&file).unwrap();
        assert_eq!(ModelCard::read(&file).unwrap(), card());
        assert_eq!((card().class_name(1), card().class_name(2)), ("dog \"x\"".into(), "2".into()));
    }

    #[test]
    fn what_cannot_be_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("model.json");
        let refused = |text: String, part: &str| {
            std::fs::write(&file, text).unwrap();
            let error = ModelCard::read(&file).unwrap_err().to_string();
            assert!(error.contains("model.json") && error.contains(part), "{error}");
        };
        let json = |change: &dyn Fn(&mut ModelCard)| {
            let mut card = card();
            change(&mut card);
            serde_json::to_string(&card).unwrap()
        };
        refused(json(&|card| card.format = "other".into()), "format");
        refused(json(&|card| card.data.classes = 3), "class_names");
        let scale = ValueScale { mean: vec![0.0], std: vec![1.0] };
        refused(json(&|card| card.value_scale = Some(scale.clone())), "mean of values");
        refused(json(&|card| card.data.height = usize::MAX), "image shape");
        refused(json(&|card| card.photos.as_mut().unwrap().crop_fraction = 0.0), "crop_fraction");
        refused("[1]".into(), "");
        refused("{".into(), "");
    }
}
