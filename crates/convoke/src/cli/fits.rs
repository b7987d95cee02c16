//! Checks that a model and a data set go together, and says what does if they do not.

use crate::nn::data::{DatasetInfo, DatasetSpec};
use crate::nn::models::ModelSpec;

use super::failure::{Failure, Result};
use super::registry::{RANDOM, datasets, models};

/// Fails if the model cannot be trained on this data; the error lists data and models that would fit.
pub(crate) fn check(model: &ModelSpec, info: &DatasetInfo) -> Result<()> {
    let Err(error) = model.check(info) else { return Ok(()) };
    let fits = |spec: &&DatasetSpec| {
        spec.usual().is_some_and(|info| model.predicting(info.targets, None).check(info).is_ok())
    };
    // Noise is made in the shape that the model takes.
    let data: Vec<&str> = datasets().iter().filter(fits).map(DatasetSpec::name).chain([RANDOM]).collect();
    let models = models().iter().filter(|model| model.predicting(info.targets, None).check(info).is_ok());
    let models: Vec<&str> = models.map(ModelSpec::name).collect();
    let models = if models.is_empty() { "none".into() } else { models.join(", ") };
    Err(Failure::Usage(format!(
        "{error}\n--data that fits {model}: {}\n--model that fits {}: {models}",
        data.join(", "),
        info.name
    )))
}
