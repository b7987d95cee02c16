//! `--optimizer`: the optimizers by name.

use crate::nn::Rule;
use clap::ValueEnum;

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum OptimizerName {
    Adadelta,
    Sgd,
    Adamw,
    Adam,
}

/// The rule of an optimizer, with this learning rate or its default one; all else is as without more flags.
pub(crate) fn rule(optimizer: OptimizerName, learning_rate: Option<f64>) -> Rule {
    match optimizer {
        OptimizerName::Adadelta => Rule::adadelta(learning_rate.unwrap_or(1.0)),
        OptimizerName::Sgd => Rule::sgd(learning_rate.unwrap_or(0.01)),
        OptimizerName::Adamw => Rule::adamw(learning_rate.unwrap_or(0.001)),
        OptimizerName::Adam => Rule::adam(learning_rate.unwrap_or(0.001)),
    }
}
