//! What can be wrong with the configuration of a run, or with a model, an objective and data that are to go together.

use std::error::Error;

use convoke_files::escaped;

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
        /// A description of the test images and their targets.
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
    /// The objective has scales for another number of values than the images have.
    #[error("scales for {scales} values, {data} has {values}")]
    ValueScale {
        /// How many scales there are.
        scales: usize,
        /// How many values an image has.
        values: usize,
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
    /// Samples are numbered with 32 bits.
    #[error("{data} has {images} images; at most {most} can be trained on")]
    TooManyImages {
        /// The data set.
        data: String,
        /// The number of its images.
        images: usize,
        /// The most that it may have.
        most: usize,
    },
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
    /// A step schedule changes the learning rate every 0 epochs.
    #[error("schedule: the learning rate cannot change every 0 epochs, only every epoch or less often")]
    ScheduleEpochs,
    /// The end of a cosine schedule is not from 0 to 1.
    #[error("schedule: a cosine ends at 0 to 1 of the learning rate, not at {0}")]
    FinalFraction(f64),
    /// The warm-up takes the whole run.
    #[error(
        "schedule: a warm-up of {warmup} steps leaves none of the run's {steps} steps: shorten it, or train longer"
    )]
    WarmUp {
        /// Steps of the run.
        steps: u64,
        /// Steps of the warm-up.
        warmup: u64,
    },
    /// The learning rate of the last layer is out of range.
    #[error(
        "head_lr {rate}: the last layer's learning rate must be finite and not negative, and the rule's above 0, which is {base}"
    )]
    HeadLr {
        /// The last layer's.
        rate: f64,
        /// The rule's.
        base: f64,
    },
    /// The last layer has a learning rate or steps of its own, and is frozen.
    #[error("head_lr or frozen_steps: the last layer, {}, is frozen", escaped(.0))]
    FrozenHead(String),
    /// A pattern of frozen parameters matches none.
    #[error(
        "freeze: {} matches no parameter of the model: it has {}",
        escaped(pattern),
        escaped(names.join(", "))
    )]
    FreezesNothing {
        /// The pattern.
        pattern: String,
        /// Some of the parameters.
        names: Vec<String>,
    },
    /// All parameters are frozen.
    #[error("freeze: all parameters of the model are frozen, so there is nothing to train")]
    FreezesAll,
    /// The largest norm of the gradients is not above 0.
    #[error("clip_norm {0}: the largest norm of the gradients must be above 0 and finite")]
    ClipNorm(f64),
    /// The decay of the weights' average is out of range.
    #[error("ema {0}: the decay of the weights' moving average must be above 0 and below 1")]
    Ema(f64),
    /// The scale of the first images is out of range.
    #[error(
        "initial_scale {0}: images that grow begin with a share of their size that is above 0 and below 1"
    )]
    InitialScale(f64),
    /// The model takes no images that are as small as those of the first epochs.
    #[error(
        "progressive: the images of the first epochs do not fit: {0}; a larger initial scale makes them larger"
    )]
    FirstImages(Box<ConfigError>),
    /// The model has other parameters for smaller images.
    #[error(
        "progressive: {} has other parameters for images of {height} x {width}, so it learns from one size",
        escaped(model)
    )]
    OneModelSize {
        /// The model.
        model: String,
        /// The height of the first epochs' images.
        height: usize,
        /// Their width.
        width: usize,
    },
    /// Images cannot be made smaller.
    #[error(
        "progressive: the images of {} have one size; photographs with classes, labels or numbers can be made smaller",
        escaped(data)
    )]
    OneImageSize {
        /// The data set.
        data: String,
    },
    /// The objective has no classes that could be weighted.
    #[error("class weights: {objective} has no classes to weight")]
    NothingToWeight {
        /// The objective.
        objective: String,
    },
    /// A strength of mixup or CutMix is out of range.
    #[error("{name} {strength}: must be from 0 to {}", crate::data::MAX_STRENGTH)]
    MixingStrength {
        /// `mixup` or `cutmix`.
        name: &'static str,
        /// The strength.
        strength: f64,
    },
    /// Images are to be mixed whose classes cannot be.
    #[error("mixup and cutmix mix the classes of images; {data} has {found}")]
    NothingToMix {
        /// The data set.
        data: String,
        /// What it has in their place.
        found: &'static str,
    },
    /// Classes are to be balanced where images have none.
    #[error("balanced sampling is for images with a class each; {data} has {found}")]
    NothingToBalance {
        /// The data set.
        data: String,
        /// What it has in their place.
        found: &'static str,
    },
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
        /// The images of a whole batch that the last rank has; no rank has more.
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
