//! The models, data sets and optimizers that flags may name: the built-in ones, and those that the caller of [`super::main`] adds.

use std::ffi::OsStr;
use std::fmt;
use std::path::Path;
use std::sync::OnceLock;

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};

use crate::nn::data::{DatasetSpec, DatasetSpecs, Listed, NameError};
use crate::nn::models::{ModelSpec, Models};
use crate::nn::{OptimizerSpec, OptimizerSpecs};

use super::model_file;

/// What the program knows by name.
#[derive(Debug, Clone)]
pub struct Registry {
    models: Models,
    datasets: DatasetSpecs,
    optimizers: OptimizerSpecs,
}

impl Registry {
    /// The built-in models, data sets and optimizers.
    pub fn builtin() -> Registry {
        Registry {
            models: Models::builtin(),
            datasets: DatasetSpecs::builtin(),
            optimizers: OptimizerSpecs::builtin(),
        }
    }

    /// The registry with one more model, for `--model`.
    ///
    /// # Errors
    /// If its name is taken, or is not a valid name.
    pub fn with_model(self, model: ModelSpec) -> Result<Registry, NameError> {
        Ok(Registry { models: self.models.with(model)?, ..self })
    }

    /// The registry with one more data set, for `--data`.
    ///
    /// # Errors
    /// If its name is taken, or is not a valid name.
    pub fn with_dataset(self, dataset: DatasetSpec) -> Result<Registry, NameError> {
        if [AUTO, RANDOM].contains(&dataset.name()) {
            return Err(NameError::Taken { kind: DatasetSpec::KIND, name: dataset.name().to_owned() });
        }
        Ok(Registry { datasets: self.datasets.with(dataset)?, ..self })
    }

    /// The same, and one more optimizer, for `--optimizer`.
    ///
    /// # Errors
    /// If its name is taken, or is not a valid name.
    pub fn with_optimizer(self, optimizer: OptimizerSpec) -> Result<Registry, NameError> {
        Ok(Registry { optimizers: self.optimizers.with(optimizer)?, ..self })
    }
}

/// MNIST if its files are there, else digits.
const AUTO: &str = "auto";
/// Noise in the model's own shape.
pub(crate) const RANDOM: &str = "random";

/// A process reads its one command line once, so this is set once.
static REGISTRY: OnceLock<Registry> = OnceLock::new();

/// Sets the registry, before anything reads it.
///
/// # Panics
/// If it has been set or read before.
pub(crate) fn set(registry: Registry) {
    assert!(REGISTRY.set(registry).is_ok(), "the registry of a process is set once");
}

fn registry() -> &'static Registry {
    REGISTRY.get_or_init(Registry::builtin)
}

/// All models.
pub(crate) fn models() -> &'static Models {
    &registry().models
}

/// All data sets.
pub(crate) fn datasets() -> &'static DatasetSpecs {
    &registry().datasets
}

/// The model of this name.
///
/// # Panics
/// If there is none: for names that clap has checked, or that are built in.
pub(crate) fn model(name: &str) -> ModelSpec {
    models().get(name).unwrap_or_else(|error| panic!("{error}")).clone()
}

/// The model of this name, which may be written as torchvision does: `mobilenet_v2`.
pub(crate) fn find_model(name: &str) -> Option<ModelSpec> {
    let find = |name: &str| models().get(name).ok().cloned();
    find(name).or_else(|| find(&name.replace('_', "-")))
}

/// Reads `--model`: the name of a model, or an ONNX file.
pub(crate) fn model_parser() -> impl TypedValueParser<Value = ModelSpec> {
    ModelParser
}

#[derive(Clone)]
struct ModelParser;

impl TypedValueParser for ModelParser {
    type Value = ModelSpec;

    fn parse_ref(
        &self,
        command: &clap::Command,
        arg: Option<&clap::Arg>,
        value: &OsStr,
    ) -> std::result::Result<ModelSpec, clap::Error> {
        if model_file::is_onnx(Path::new(value)) {
            return model_file::spec(Path::new(value)).map_err(|reason| {
                clap::Error::raw(clap::error::ErrorKind::ValueValidation, format!("{reason}\n"))
                    .with_cmd(command)
            });
        }
        if let Some(model) = value.to_str().and_then(find_model) {
            return Ok(model);
        }
        PossibleValuesParser::new(models().names()).parse_ref(command, arg, value).map(|name| model(&name))
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        Some(Box::new(models().names().map(PossibleValue::new).chain([PossibleValue::new("FILE.onnx")])))
    }
}

/// Reads `--optimizer`.
pub(crate) fn optimizer_parser() -> impl TypedValueParser<Value = OptimizerSpec> {
    let optimizers = &registry().optimizers;
    PossibleValuesParser::new(optimizers.names())
        .map(|name| optimizers.get(&name).unwrap_or_else(|error| panic!("{error}")).clone())
}

/// What `--data` asks for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Data {
    /// MNIST if its files are there, else digits.
    Auto,
    /// Noise with random labels in the model's own shape, made from the seed: to measure speed and memory, not to learn from.
    /// Four batches to train, one to test.
    Random,
    /// A data set of the registry.
    Named(&'static DatasetSpec),
}

impl Data {
    /// What this name asks for, if it is one.
    pub(crate) fn named(name: &str) -> Option<Data> {
        match (name, datasets().get(name)) {
            (AUTO, _) => Some(Data::Auto),
            (RANDOM, _) => Some(Data::Random),
            (_, spec) => spec.ok().map(Data::Named),
        }
    }

    /// Whether it is one data set, whose images need not be the user's.
    pub(crate) fn is_set(self) -> bool {
        matches!(self, Data::Named(spec) if !spec.takes_photos())
    }
}

impl fmt::Display for Data {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Data::Auto => AUTO,
            Data::Random => RANDOM,
            Data::Named(spec) => spec.name(),
        })
    }
}

/// Reads `--data`.
pub(crate) fn data_parser() -> impl TypedValueParser<Value = Data> {
    let auto = PossibleValue::new(AUTO).help("MNIST if its files are there, else digits");
    let random = PossibleValue::new(RANDOM).help(
        "Noise with random labels in the model's own shape, from the seed: to measure speed and memory, not to learn from. Four \
         batches to train, one to test",
    );
    let named = datasets().iter().map(|spec| PossibleValue::new(spec.name()).help(spec.about()));
    let values: Vec<PossibleValue> = [auto].into_iter().chain(named).chain([random]).collect();
    PossibleValuesParser::new(values).map(|name| Data::named(&name).expect("one of the names"))
}
