//! The models that flags may name: those of [`Models::builtin`], and what whoever calls [`super::main`] adds.

use std::sync::OnceLock;

use crate::nn::models::{ModelSpec, Models};
use clap::builder::{PossibleValuesParser, TypedValueParser};

/// A process has one command line, which is read once.
static MODELS: OnceLock<Models> = OnceLock::new();

/// Says which there are, before anything asks.
///
/// # Panics
/// If they have been said.
pub(crate) fn set(models: Models) {
    assert!(MODELS.set(models).is_ok(), "the models of a process are set once");
}

/// All of them.
pub(crate) fn models() -> &'static Models {
    MODELS.get_or_init(Models::builtin)
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
