//! A training run: a model, an optimizer and a data set, step by step, with checkpoints; on one rank or several.

mod average;
mod card;
mod evaluation;
mod memory;
mod progressive;
mod range_test;
mod ranked;
mod ranks;
mod resume;
mod step;

use std::sync::Arc;

use convoke_autograd::Device;
use convoke_distributed::Communicator;
use serde::Serialize;

use crate::checkpoint::CheckpointError;
use crate::data::{Augmentation, DataError, Dataset, DatasetInfo, Datasets, Loader, Mixing, Target};
use crate::data_parallel::{DataParallel, DataParallelOptions, Sampler, Sampling, shard};
use crate::models::{ModelOptions, ModelSpec};
use crate::modules::ConvBnMode;
use crate::objective::Objective;
use crate::planner::MemoryPlan;
use crate::{
    ConfigError, Generator, Init, Module, ModuleExt, Optimizer, Parameter, ParameterRules, Precision, Rule,
    Schedule,
};

use average::Average;
pub use card::ModelCard;
pub use evaluation::{Evaluation, EvaluationOptions, EvaluationProgress, Predictor, Validation, evaluate};
pub(crate) use memory::DrySteps;
pub use memory::{MemoryPrediction, predict_memory};
pub use progressive::ProgressiveResizing;
pub use range_test::{RangeTest, range_test};
pub use ranked::JudgedImage;
pub use resume::SavedModel;
pub use step::{StepReport, StepTimeline};

/// The configuration of a run.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TrainingConfig {
    /// The model.
    pub model: ModelSpec,
    /// How its Conv+BN blocks run.
    pub conv_bn: ConvBnMode,
    /// The type of activations and their gradients. Images are converted to it before the model, and the model's output to f32 before
    /// the loss.
    pub precision: Precision,
    /// The loss to minimise, and the metrics that evaluation reports with it.
    pub objective: Objective,
    /// The optimizer, with the learning rate that the schedule begins with or, if it rises first, leads to.
    pub rule: Rule,
    /// How the learning rate changes.
    pub schedule: Schedule,
    /// Steps at the beginning in which the learning rate rises linearly: see [`Schedule::factor`].
    pub warmup_steps: u64,
    /// What is trained, and what has a learning rate or a decay of its own.
    pub parameters: ParameterRules,
    /// The largest norm of a step's gradients: see [`crate::clip_grad_norm`]. `None` leaves them as they are.
    pub clip_norm: Option<f64>,
    /// The decay of the exponential moving average of the weights, with which the model is then evaluated; above 0 and below 1.
    /// `None` keeps no average. Parameters and running statistics are averaged after each step, with a decay of at most (1 + t) /
    /// (10 + t) after step t, as timm's `ModelEmaV3` with a warm-up does.
    pub ema: Option<f64>,
    /// Images per step, over all ranks; the last batch of an epoch may be smaller.
    pub batch_size: usize,
    /// Which training images an epoch has.
    pub sampling: Sampling,
    /// How training images are randomly changed.
    pub augmentation: Augmentation,
    /// How training images are mixed with each other.
    pub mixing: Mixing,
    /// Whether the first epochs show smaller images, which only data sets can do that are made to any size: see [`Dataset::resized`].
    pub progressive: Option<ProgressiveResizing>,
    /// Whether batch norms take their statistics over the batches of all ranks, once there are several
    /// ([`Trainer::join`]).
    pub sync_bn: bool,
    /// The type in which gradients travel between ranks: see [`DataParallelOptions::gradients`].
    pub send_gradients: Precision,
    /// Seed of initial parameters, data order, augmentation and dropout.
    pub seed: u64,
    /// Whether a loss that is not finite is an error, and the norm of gradients that are clipped.
    pub stop_on_nan: bool,
}

impl TrainingConfig {
    /// The default configuration for a model: its default objective, fused blocks, f32, AdamW with a constant learning rate of 0.001,
    /// batches of 128 images without augmentation, seed 1.
    pub fn new(model: ModelSpec) -> TrainingConfig {
        TrainingConfig {
            objective: model.objective(),
            model,
            conv_bn: ConvBnMode::default(),
            precision: Precision::default(),
            rule: Rule::adamw(0.001),
            schedule: Schedule::Constant,
            warmup_steps: 0,
            parameters: ParameterRules::default(),
            clip_norm: None,
            ema: None,
            batch_size: 128,
            sampling: Sampling::default(),
            augmentation: Augmentation::default(),
            mixing: Mixing::default(),
            progressive: None,
            sync_bn: false,
            send_gradients: Precision::default(),
            seed: 1,
            stop_on_nan: true,
        }
    }

    /// The data as the model sees it: images have the size that augmentation gives them.
    fn seen(&self, info: &DatasetInfo) -> std::result::Result<DatasetInfo, ConfigError> {
        let [height, width] = self.augmentation.size(info)?;
        Ok(DatasetInfo { height, width, ..info.clone() })
    }

    /// Checks that everything fits the data, and that the numbers are in range. Returns the data as the model sees it.
    fn check(&self, data: &Datasets) -> std::result::Result<DatasetInfo, ConfigError> {
        let (info, images) = (data.train.info(), data.train.len());
        self.model.check(info)?;
        let seen = self.seen(info)?;
        self.model.check(&seen)?;
        self.objective.check(info)?;
        check_same_kind(info, data.test.info())?;
        for part in [&data.train, &data.test] {
            let (images, most) = (part.len(), u32::MAX as usize);
            if images > most {
                return Err(ConfigError::TooManyImages { images, most, data: part.info().name.clone() });
            }
        }
        if self.batch_size == 0 || self.batch_size > images {
            let (batch_size, data) = (self.batch_size, info.name.clone());
            return Err(ConfigError::BatchSize { batch_size, images, data });
        }
        self.check_mixing(info)?;
        self.check_resizing(data.train.as_ref())?;
        self.schedule.check(self.warmup_steps)?;
        self.parameters.check(self.rule.learning_rate())?;
        match (self.clip_norm, self.ema) {
            (Some(norm), _) if !(norm > 0.0 && norm <= f64::MAX) => Err(ConfigError::ClipNorm(norm)),
            (_, Some(decay)) if !(decay > 0.0 && decay < 1.0) => Err(ConfigError::Ema(decay)),
            _ => Ok(seen),
        }
    }

    fn check_mixing(&self, info: &DatasetInfo) -> std::result::Result<(), ConfigError> {
        if let Some((name, strength)) = self.mixing.out_of_range() {
            return Err(ConfigError::MixingStrength { name, strength });
        }
        let (classes, of_pixels) = (info.targets.are_classes(), info.targets.are_of_pixels());
        if !self.mixing.is_on() || (classes && !of_pixels) {
            return Ok(());
        }
        let found = if classes { "a class for each pixel" } else { "values" };
        Err(ConfigError::NothingToMix { data: info.name.clone(), found })
    }

    /// The model has to take images of all sizes that epochs show.
    fn check_resizing(&self, data: &dyn Dataset) -> std::result::Result<(), ConfigError> {
        let Some(progressive) = self.progressive else { return Ok(()) };
        progressive.check()?;
        let info = data.info();
        let first = progressive.first(info);
        resized(data, [first.height, first.width])?;
        let fits = self.seen(&first).and_then(|seen| self.model.check(&seen));
        fits.map_err(|error| ConfigError::FirstImages(error.into()))
    }

    /// Fails if the model would be another one for the smaller images of the first epochs.
    fn check_model_of_sizes(&self, device: &Device, model: &dyn Module, info: &DatasetInfo) -> Result<()> {
        let Some(progressive) = self.progressive else { return Ok(()) };
        let first = progressive.first(info);
        let other = self.build(&Init::new(&device.dry(), self.seed), &self.seen(&first)?)?;
        let shapes = |model: &dyn Module| -> Vec<(String, Vec<usize>)> {
            let parameters = model.parameters();
            parameters.iter().map(|(name, own)| (name.clone(), own.value().shape().to_vec())).collect()
        };
        match shapes(model) == shapes(other.as_ref()) {
            true => Ok(()),
            false => {
                let (model, height, width) = (self.model.name().to_owned(), first.height, first.width);
                Err(ConfigError::OneModelSize { model, height, width }.into())
            }
        }
    }

    /// A new model for data that looks like `seen` to it, with what the run freezes.
    fn build(&self, init: &Init, seen: &DatasetInfo) -> Result<Box<dyn Module>> {
        let options = ModelOptions { conv_bn: self.conv_bn, image: seen.shape(), classes: seen.classes };
        let model = self.model.build(init, &options)?;
        self.parameters.freeze(model.as_ref())?;
        Ok(model)
    }
}

/// Why a run could not start or go on.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TrainingError {
    /// The configuration does not fit the data, or the other ranks' configurations.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The loss is NaN or infinite.
    #[error(
        "the loss of step {step} (epoch {epoch}) is {loss}: training diverged; the parameters are those before it"
    )]
    NotFinite {
        /// The step, from 1.
        step: u64,
        /// The epoch, from 1.
        epoch: usize,
        /// The loss.
        loss: f64,
    },
    /// The norm of gradients that are to be clipped is NaN or infinite.
    #[error(
        "the norm of the gradients of step {step} (epoch {epoch}) is {norm}: training diverged; the parameters are those before \
         it"
    )]
    NormNotFinite {
        /// The step, from 1.
        step: u64,
        /// The epoch, from 1.
        epoch: usize,
        /// The norm.
        norm: f64,
    },
    /// Every pixel of a batch has the ignored label.
    #[error(
        "no pixel has a label in the batch of step {step} (epoch {epoch}): all are {ignore}, which stands for no class; there is \
         nothing to learn from it"
    )]
    NoLabel {
        /// The step, from 1.
        step: u64,
        /// The epoch, from 1.
        epoch: usize,
        /// The label that is ignored.
        ignore: i64,
    },
    /// No memory plan fits the budget.
    #[error(
        "{model} needs at least {:.1} MB at batch size {batch_size}, {:.1} MB more than the budget of {:.1} MB{}",
        megabytes(*needed),
        megabytes(needed.saturating_sub(*budget)),
        megabytes(*budget),
        fits.map_or(String::new(), |fits| format!("; batch size {fits} would fit"))
    )]
    Budget {
        /// The model.
        model: String,
        /// Images per step.
        batch_size: usize,
        /// Bytes allowed.
        budget: usize,
        /// The peak of the smallest plan.
        needed: usize,
        /// The largest batch size that would fit, if one does.
        fits: Option<usize>,
    },
    /// A tensor operation failed.
    #[error(transparent)]
    Tensor(#[from] convoke_autograd::Error),
    /// A checkpoint could not be written or read.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// Communication between the ranks failed.
    #[error(transparent)]
    Ranks(#[from] convoke_distributed::Error),
}

impl TrainingError {
    /// Whether this rank failed only because communication with other ranks did: then another rank knows the cause.
    pub fn is_about_other_ranks(&self) -> bool {
        matches!(
            self,
            TrainingError::Ranks(_) | TrainingError::Tensor(convoke_autograd::Error::Communication { .. })
        )
    }
}

/// Opens a `tracing` span for a part of a step; dropping it ends the span.
fn span(part: &'static str) -> tracing::span::EnteredSpan {
    tracing::trace_span!(target: convoke_kernels::profile::TARGET, "training", part).entered()
}

fn megabytes(bytes: usize) -> f64 {
    bytes as f64 / 1e6
}

type Result<T> = std::result::Result<T, TrainingError>;

/// A run in progress: a model, its optimizer, the data, and how far it is.
///
/// ```
/// use std::ops::ControlFlow;
///
/// use convoke_autograd::Device;
/// use convoke_nn::data::{digits::digits, silent};
/// use convoke_nn::models::Models;
/// use convoke_nn::training::{Trainer, TrainingConfig};
/// use convoke_nn::Rule;
///
/// let data = digits(1, 64, 32, &silent)?;
/// let model = Models::builtin().get("mnist-cnn").expect("it is built in").clone();
/// let config = TrainingConfig { rule: Rule::adamw(0.002), batch_size: 16, ..TrainingConfig::new(model) };
/// let mut trainer = Trainer::new(&Device::cpu()?, config, data)?;
/// while trainer.epoch() < 1 {
///     let step = trainer.step()?;
///     println!("step {}: loss {:.4}", step.step, step.loss);
/// }
/// let judged = trainer.evaluate(&mut |_, _| ControlFlow::Continue(()))?.expect("it was not stopped");
/// println!("loss {:.4}, accuracy {:.0?} %", judged.loss, judged.accuracy.map(|share| 100.0 * share));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Trainer {
    device: Device,
    config: TrainingConfig,
    data: Datasets,
    train_loader: Loader,
    test_loader: Loader,
    model: Box<dyn Module>,
    optimizer: Optimizer,
    /// What is trained once [`ParameterRules::frozen_steps`] are over; empty from then on.
    thawed_later: Vec<Parameter>,
    /// The moving average of the weights, if the run keeps one.
    average: Option<Average>,
    random: Generator,
    /// Finished epochs.
    epoch: usize,
    /// Finished batches of the current epoch.
    batch: usize,
    sampler: Sampler,
    losses: Vec<f64>,
    validations: Vec<Validation>,
    record: bool,
    /// The workspace limit of the memory plan, in bytes.
    workspace_limit: Option<usize>,
    /// The ranks of the run: only this one until [`Trainer::join`].
    parallel: DataParallel,
}

impl Trainer {
    /// A new run, at its beginning.
    ///
    /// # Errors
    /// If the model or the objective does not fit the data, or if the batch size or a number of the rule, the schedule or another
    /// setting is out of range.
    pub fn new(device: &Device, config: TrainingConfig, data: impl Into<Datasets>) -> Result<Trainer> {
        let data = data.into();
        let seen = config.check(&data)?;
        let init = Init::new(device, config.seed);
        let model = config.build(&init, &seen)?;
        config.check_model_of_sizes(device, model.as_ref(), data.train.info())?;
        let workers = default_workers(device, [&data.train, &data.test]);
        let parallel =
            DataParallel::new(model.as_ref(), &Communicator::solo(), DataParallelOptions::default())?;
        let optimizer = Optimizer::with_rules(config.rule.clone(), model.as_ref(), &config.parameters)?;
        // The optimizer has them: they are trained later.
        let thawed_later = config.parameters.thawed_later(model.as_ref());
        thawed_later.iter().for_each(|parameter| parameter.set_trained(false));
        Ok(Trainer {
            optimizer,
            thawed_later,
            average: config.ema.map(|decay| Average::new(model.as_ref(), decay)).transpose()?,
            sampler: sampler(&config, data.train.as_ref())?,
            device: device.clone(),
            random: init.random,
            epoch: 0,
            batch: 0,
            losses: Vec::new(),
            validations: Vec::new(),
            record: false,
            workspace_limit: None,
            parallel,
            train_loader: loader(&data.train, workers)?,
            test_loader: loader(&data.test, workers)?,
            config,
            data,
            model,
        })
    }

    /// Makes the model's blocks keep what a plan says, from the next step on. The plan's workspace limit goes to the device's
    /// tuner. For a run on several ranks, see [`Trainer::join_with_plan`].
    ///
    /// # Errors
    /// If the plan is for another model or batch size than the run's, if its blocks are not those of the model, or if blocks run
    /// as separate layers.
    pub fn set_memory_plan(&mut self, plan: &MemoryPlan) -> Result<()> {
        let (model, images) = (self.config.model.name(), self.most_images());
        if plan.model != model {
            let (plan, model) = (plan.model.clone(), model.to_owned());
            return Err(ConfigError::PlannedModel { plan, model }.into());
        }
        if plan.batch_size != images {
            return Err(ConfigError::PlannedBatchSize { plan: plan.batch_size, images }.into());
        }
        plan.apply(self.model.as_ref()).map_err(ConfigError::from)?;
        self.limit_workspace(plan.workspace_limit);
        Ok(())
    }

    /// Lets convolutions use at most this many bytes of workspace, from the next step on.
    fn limit_workspace(&mut self, bytes: Option<usize>) {
        self.workspace_limit = bytes;
        self.device.tuner().limit_workspace(bytes);
    }

    /// The images of a whole batch that the last rank has; no rank has more.
    fn most_images(&self) -> usize {
        let world_size = self.communicator().world_size();
        shard(self.config.batch_size, world_size - 1, world_size).len()
    }

    /// Height and width of the images that an epoch shows, from 0, before augmentation cuts them.
    pub fn image_size(&self, epoch: usize) -> [usize; 2] {
        let info = self.data.train.info();
        let full = [info.height, info.width];
        self.config.progressive.map_or(full, |progressive| progressive.size(epoch, full))
    }

    /// Loads images of the current epoch's size from here on.
    fn resize(&mut self) -> Result<()> {
        let (info, size) = (self.train_loader.data().info(), self.image_size(self.epoch));
        if [info.height, info.width] == size {
            return Ok(());
        }
        let data = match size == self.image_size(usize::MAX) {
            true => self.data.train.clone(),
            false => resized(self.data.train.as_ref(), size)?,
        };
        self.train_loader = loader(&data, self.train_loader.workers())?;
        // Buffers of the last size would stay beside those of this one.
        self.device.trim();
        Ok(())
    }

    /// Prepares batches on `workers` threads while earlier steps run. With 0, each step prepares its own batch. The batches are
    /// the same either way. The default is 0 if the data is in memory or the device is dry, else the device's number of threads,
    /// at most four.
    ///
    /// # Errors
    /// If the threads cannot be started.
    pub fn set_workers(&mut self, workers: usize) -> Result<()> {
        self.train_loader = loader(&self.data.train, workers)?;
        self.test_loader = loader(&self.data.test, workers)?;
        Ok(())
    }

    /// The model.
    pub fn model(&self) -> &dyn Module {
        self.model.as_ref()
    }

    /// Finished epochs.
    pub fn epoch(&self) -> usize {
        self.epoch
    }

    /// Finished batches of the current epoch.
    pub fn batch(&self) -> usize {
        self.batch
    }

    /// Steps done.
    pub fn steps(&self) -> u64 {
        self.losses.len() as u64
    }

    /// Steps in one epoch.
    pub fn batches_per_epoch(&self) -> usize {
        self.sampler.batches()
    }

    /// The loss of every step so far, including the steps before a resume.
    pub fn losses(&self) -> &[f64] {
        &self.losses
    }

    /// Returns unused buffers to the operating system: after [`Trainer::set_memory_plan`], the next steps may need other buffers.
    pub fn trim(&self) {
        self.device.trim();
    }

    /// Records the bytes in use over the next step, for its report.
    pub fn record_next_step(&mut self) {
        self.record = true;
    }
}

/// The number of batches that are prepared ahead of the current one.
const AHEAD: usize = 2;

/// See [`Trainer::set_workers`].
fn default_workers<const N: usize>(device: &Device, data: [&Arc<dyn Dataset>; N]) -> usize {
    let in_memory = data.iter().all(|data| data.is_in_memory());
    if in_memory || device.is_dry() { 0 } else { device.compute().threads().min(4) }
}

/// The order in which a run sees its training images.
fn sampler(config: &TrainingConfig, data: &dyn Dataset) -> std::result::Result<Sampler, ConfigError> {
    let (seed, batch_size, len) = (config.seed, config.batch_size, data.len());
    if config.sampling == Sampling::Shuffled {
        return Ok(Sampler::new(seed, len, batch_size));
    }
    let class = |index: usize| match data.target(index) {
        Ok(Target::Class(class)) => Ok(Some(class)),
        Ok(Target::Bytes(class)) => Ok(class.first().map(|&class| class.into())),
        Ok(_) => Ok(None),
        Err(error) => {
            let (dataset, reason) = (data.info().name.clone(), error.to_string());
            Err(ConfigError::Data(DataError::Sample { dataset, index, reason }))
        }
    };
    let is_of_pixels = data.info().targets.are_of_pixels();
    let classes = match is_of_pixels {
        true => None,
        false => (0..len).map(class).collect::<std::result::Result<Option<Vec<i64>>, _>>()?,
    };
    classes.map(|classes| Sampler::balanced(seed, &classes, batch_size)).ok_or_else(|| {
        let found = if is_of_pixels { "a class for each pixel" } else { "values" };
        ConfigError::NothingToBalance { data: data.info().name.clone(), found }
    })
}

/// The same data with images of another size.
fn resized(data: &dyn Dataset, size: [usize; 2]) -> std::result::Result<Arc<dyn Dataset>, ConfigError> {
    data.resized(size).ok_or_else(|| ConfigError::OneImageSize { data: data.info().name.clone() })
}

fn loader(data: &Arc<dyn Dataset>, workers: usize) -> Result<Loader> {
    Ok(Loader::new(data.clone(), workers).map_err(ConfigError::Data)?)
}

/// Fails unless the test set has the kind of images and targets that the training set has.
fn check_same_kind(train: &DatasetInfo, test: &DatasetInfo) -> std::result::Result<(), ConfigError> {
    let kind =
        |info: &DatasetInfo| format!("{:?} in {} classes, {:?}", info.shape(), info.classes, info.targets);
    match kind(train) == kind(test) {
        true => Ok(()),
        false => {
            let (data, train, test) = (train.name.clone(), kind(train), kind(test));
            Err(ConfigError::TestSet { data, train, test })
        }
    }
}
