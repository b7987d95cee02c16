//! What can be wrong with the configuration of a run, or with a model, an objective and data that are to go together.

use std::error::Error;

use crate::data::DataError;
use crate::planner::PlanMismatch;

/// Why a run cannot be configured so: its model, objective and data do not fit each other, or a number is out of range.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// The model takes other images.
    #[error("{model} takes {takes}; {data} has {shape:?} in {classes} classes")]
    Images {
        /// The model.
        model: String,
        /// A description of the images that it takes.
        takes: String,
        /// The data set.
        data: String,
        /// Channels, height and width of its images.
        shape: [usize; 3],
        /// The number of its classes.
        classes: usize,
    },
    /// The model or the objective takes other targets.
    #[error("{name} takes {takes}; {data} has {has}")]
    Targets {
        /// The model or objective.
        name: String,
        /// The targets that it takes.
        takes: &'static str,
        /// The data set.
        data: String,
        /// The targets that it has.
        has: &'static str,
    },
    /// Test images differ in kind from training images.
    #[error("{data}: training images are {train}, but test images are {test}")]
    TestSet {
        /// The data set.
        data: String,
        /// A description of the training images and their targets.
        train: String,
        /// The same of the test images.
        test: String,
    },
    /// The objective has no labels that could be smoothed.
    #[error("label smoothing: {objective} has no labels to smooth")]
    NothingToSmooth {
        /// The objective.
        objective: String,
    },
    /// The share of smoothing is not from 0 to 1.
    #[error("label smoothing is {0}, it must be 0 to 1")]
    LabelSmoothing(f64),
    /// There is not one weight for each class.
    #[error("{weights} class weights for {classes} classes of {data}")]
    ClassWeightCount {
        /// How many weights there are.
        weights: usize,
        /// How many classes the data has.
        classes: usize,
        /// The data set.
        data: String,
    },
    /// A class weight is negative, infinite or NaN.
    #[error("a class weight is {0}, it must be finite and not negative")]
    ClassWeight(f64),
    /// A user-defined loss refuses the data, with this error of its own.
    #[error(transparent)]
    Loss(Box<dyn Error + Send + Sync>),
    /// The data, or how its images are to be varied, is impossible.
    #[error(transparent)]
    Data(#[from] DataError),
    /// The batch size is 0 or larger than the training set.
    #[error("batch size {batch_size} must be 1 to {images}, the number of training images in {data}")]
    BatchSize {
        /// The batch size.
        batch_size: usize,
        /// How many training images there are.
        images: usize,
        /// The data set.
        data: String,
    },
    /// The learning rate's factor is negative, infinite or NaN.
    #[error("lr_gamma {0}: the learning rate's factor must be finite and not negative")]
    LrGamma(f64),
    /// A memory plan does not fit the model's blocks.
    #[error(transparent)]
    MemoryPlan(#[from] PlanMismatch),
    /// A memory plan is for another model.
    #[error("the memory plan is for {plan}, the run trains {model}")]
    PlannedModel {
        /// The plan's model.
        plan: String,
        /// The run's model.
        model: String,
    },
    /// A memory plan is for steps with another number of images.
    #[error("the memory plan is for {plan} images a step, the run has {images} a step on each rank")]
    PlannedBatchSize {
        /// The plan's batch size.
        plan: usize,
        /// The images of a whole batch that the first rank has; no rank has more.
        images: usize,
    },
    /// The ranks of a run differ in their configuration or data.
    #[error("{field}: rank 0 has {first}, but rank {rank} has {other}: all ranks must run the same")]
    Ranks {
        /// What differs.
        field: String,
        /// What it is on rank 0.
        first: String,
        /// The first rank that has something else.
        rank: usize,
        /// What it is there.
        other: String,
    },
    /// The state of the run cannot be written for other ranks, or read from them.
    #[error("the state of the run cannot be given to other ranks: {0}")]
    Unreadable(#[from] serde_json::Error),
}
