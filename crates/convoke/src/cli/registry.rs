//! The models and data sets that flags may name: the built-in ones, and those that the caller of [`super::main`] adds.

use std::fmt;
use std::sync::OnceLock;

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};

use crate::nn::data::{DatasetSpec, DatasetSpecs};
use crate::nn::models::{ModelSpec, Models};

/// What the program knows by name.
#[derive(Debug, Clone)]
pub struct Registry {
    models: Models,
    datasets: DatasetSpecs,
}

impl Registry {
    /// The built-in models and data sets.
    pub fn builtin() -> Registry {
        Registry { models: Models::builtin(), datasets: DatasetSpecs::builtin() }
    }

    /// The same, and one more model, for `--model`.
    ///
    /// # Errors
    /// If its name is taken, or is not a valid name.
    pub fn with_model(self, model: ModelSpec) -> Result<Registry, RegistryError> {
        Ok(Registry { models: self.models.with(model).map_err(RegistryError::new)?, ..self })
    }

    /// The same, and one more data set, for `--data`.
    ///
    /// # Errors
    /// If its name is taken, or is not a valid name.
    pub fn with_dataset(self, dataset: DatasetSpec) -> Result<Registry, RegistryError> {
        if [AUTO, RANDOM].contains(&dataset.name()) {
            return Err(RegistryError(format!("there are two data sets named {:?}", dataset.name())));
        }
        Ok(Registry { datasets: self.datasets.with(dataset).map_err(RegistryError::new)?, ..self })
    }
}

/// Why a registry does not take a model or a data set: its name is taken, or is not a valid name. The text says which.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RegistryError(String);

impl RegistryError {
    fn new(reason: impl fmt::Display) -> RegistryError {
        RegistryError(reason.to_string())
    }
}

impl fmt::Display for RegistryError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for RegistryError {}

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
    models().get(name).unwrap_or_else(|error| panic!("{error}"))
}

/// Reads `--model`.
pub(crate) fn model_parser() -> impl TypedValueParser<Value = ModelSpec> {
    PossibleValuesParser::new(models().names()).map(|name| model(&name))
}

/// What `--data` asks for.
#[derive(Clone, Copy)]
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
    fn of(name: &str) -> Data {
        match (name, datasets().get(name)) {
            (AUTO, _) => Data::Auto,
            (_, Some(spec)) => Data::Named(spec),
            (_, None) => Data::Random,
        }
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
    PossibleValuesParser::new(values).map(|name| Data::of(&name))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nn::data::{Datasets, LoadError, LoadOptions};
    use crate::nn::modules::Flatten;

    #[test]
    fn names_are_taken_once() {
        let model = |name: &str| {
            let spec = ModelSpec::new(name, [1, 1, 1], 1, |_, _| Ok(Flatten));
            Registry::builtin().with_model(spec).map_err(|error| error.to_string()).err()
        };
        let dataset = |name: &str| {
            let load =
                |_: &LoadOptions<'_>| -> Result<Datasets, LoadError> { Err("not to be loaded".into()) };
            let spec = DatasetSpec::new(name, "", load);
            Registry::builtin().with_dataset(spec).map_err(|error| error.to_string()).err()
        };
        assert_eq!((model("own"), dataset("own")), (None, None));
        for taken in ["mnist-cnn", "two words"] {
            assert!(model(taken).is_some_and(|error| error.contains(taken)), "{taken}");
        }
        for taken in ["mnist", "auto", "random", "two words"] {
            assert!(dataset(taken).is_some_and(|error| error.contains(taken)), "{taken}");
        }
    }
}
