//! A training run: a model, an optimizer and a data set, step by step, with checkpoints; on one rank or several.

mod memory;
mod ranks;

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use convoke_autograd::ops::{Reduction, nll_loss};
use convoke_autograd::{Device, Tensor, TimelinePoint, inference_mode};
use convoke_distributed::{Communicator, Traffic};
use convoke_kernels::tune::Choice;
use serde::{Deserialize, Serialize};

use crate::checkpoint::{self, CheckpointError, Value};
use crate::data::{Augmentation, DatasetInfo, Targets, TrainTest, batch};
use crate::data_parallel::{DataParallel, DataParallelOptions, Sampler, shard};
use crate::metrics::Confusion;
use crate::models::Model;
use crate::modules::ConvBnMode;
use crate::planner::MemoryPlan;
use crate::random::GeneratorState;
use crate::{Generator, Init, Module, ModuleExt, Optimizer, Rule, StepLr};

pub(crate) use memory::DrySteps;
pub use memory::{MemoryPrediction, predict_memory};

/// What a run is.
#[derive(Debug, Clone, PartialEq)]
pub struct TrainingConfig {
    /// The model.
    pub model: Model,
    /// How its Conv+BN blocks run.
    pub conv_bn: ConvBnMode,
    /// The optimizer, with the learning rate of the first epoch.
    pub rule: Rule,
    /// What the learning rate is multiplied by after each epoch.
    pub lr_gamma: f64,
    /// Images a step, of all ranks together; the last batch of an epoch may be smaller.
    pub batch_size: usize,
    /// How training images are varied.
    pub augmentation: Augmentation,
    /// Whether batch norms take their statistics over the batches of all ranks, once there are several
    /// ([`Trainer::join`]).
    pub sync_bn: bool,
    /// Seed of starting values, data order and dropout.
    pub seed: u64,
    /// Whether a loss that is not finite is an error.
    pub stop_on_nan: bool,
}

/// Why a run could not start or go on.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TrainingError {
    /// The configuration does not fit the data.
    #[error("{0}")]
    Config(String),
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
        model: Model,
        /// Images a step.
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
    /// The ranks did not come together.
    #[error(transparent)]
    Ranks(#[from] convoke_distributed::Error),
}

impl TrainingError {
    /// Whether this rank failed because others did not come: then one of them knows the cause.
    pub fn is_about_other_ranks(&self) -> bool {
        matches!(
            self,
            TrainingError::Ranks(_) | TrainingError::Tensor(convoke_autograd::Error::Communication { .. })
        )
    }
}

/// A part of a step, for whoever listens to `tracing`, until it is dropped.
fn span(part: &'static str) -> tracing::span::EnteredSpan {
    tracing::trace_span!(target: convoke_kernels::profile::TARGET, "training", part).entered()
}

fn megabytes(bytes: usize) -> f64 {
    bytes as f64 / 1e6
}

type Result<T> = std::result::Result<T, TrainingError>;

/// What one step did.
#[derive(Debug, Clone)]
pub struct StepReport {
    /// The step, from 1.
    pub step: u64,
    /// Mean loss of the batch, before the update.
    pub loss: f64,
    /// Images in the batch, of all ranks together.
    pub images: usize,
    /// This rank's images.
    pub own_images: usize,
    /// Wall-clock seconds of the whole step.
    pub seconds: f64,
    /// What this rank sent in the step, and how long it waited for others.
    pub traffic: Traffic,
    /// Bytes in use when forward had ended: parameters, optimizer state, and what was saved for backward.
    pub bytes_end_of_forward: usize,
    /// The most bytes in use at any moment of the step.
    pub bytes_peak: usize,
    /// Bytes over the step, if asked for with [`Trainer::record_next_step`].
    pub timeline: Option<StepTimeline>,
}

/// Bytes in use over one step.
#[derive(Debug, Clone)]
pub struct StepTimeline {
    /// Bytes after every allocation and release.
    pub points: Vec<TimelinePoint>,
    /// Seconds from the start of the step to the end of forward.
    pub end_of_forward: f64,
}

/// How the model does on the test set.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Evaluation {
    /// Mean loss of what has a label: images, or pixels.
    pub loss: f64,
    /// Share of these whose likeliest class is the right one.
    pub accuracy: f64,
    /// Intersection over union, the mean over the classes that occur; where pixels have labels.
    pub mean_iou: Option<f64>,
}

/// Where a run stands: everything but tensors that a checkpoint holds.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct RunState {
    model: Model,
    data: String,
    train_images: usize,
    optimizer: String,
    learning_rate: f64,
    lr_gamma: f64,
    batch_size: usize,
    seed: u64,
    #[serde(default)]
    augmentation: Augmentation,
    epoch: usize,
    batch: usize,
    #[serde(with = "crate::float_json")]
    losses: Vec<f64>,
    optimizer_steps: Vec<(String, i64)>,
    random: GeneratorState,
    /// The convolution algorithms in use, so that a resumed run computes the same bits.
    #[serde(default)]
    convolutions: Vec<Choice>,
}

const MODEL_FILE: &str = "model.safetensors";
const OPTIMIZER_FILE: &str = "optimizer.safetensors";

/// A run in progress.
pub struct Trainer {
    device: Device,
    config: TrainingConfig,
    data: Arc<TrainTest>,
    model: Box<dyn Module>,
    optimizer: Optimizer,
    schedule: StepLr,
    random: Generator,
    /// Epochs finished.
    epoch: usize,
    /// Batches of the present epoch finished.
    batch: usize,
    sampler: Sampler,
    losses: Vec<f64>,
    record: bool,
    /// The ranks of the run: this one alone until it joins others.
    parallel: DataParallel,
}

impl Trainer {
    /// A run from its beginning.
    ///
    /// # Errors
    /// If the model does not take images of this shape or number of classes, or the batch size does not fit.
    pub fn new(device: &Device, config: TrainingConfig, data: Arc<TrainTest>) -> Result<Trainer> {
        let info = data.train.info();
        config.model.check(info).map_err(TrainingError::Config)?;
        let view =
            config.augmentation.size(info).map_err(|error| TrainingError::Config(error.to_string()))?;
        let part = DatasetInfo { height: view[0], width: view[1], ..info.clone() };
        config.model.check(&part).map_err(TrainingError::Config)?;
        if config.batch_size == 0 || config.batch_size > data.train.len() {
            return Err(TrainingError::Config(format!(
                "batch size {} must be 1 to {}, the number of training images in {}",
                config.batch_size,
                data.train.len(),
                info.name
            )));
        }
        if !(0.0..=f64::MAX).contains(&config.lr_gamma) {
            return Err(TrainingError::Config(format!(
                "lr_gamma {}: the learning rate's factor must be finite and not negative",
                config.lr_gamma
            )));
        }
        let init = Init::new(device, config.seed);
        let model = config.model.build(&init, config.conv_bn, info.channels, info.classes)?;
        let parallel =
            DataParallel::new(model.as_ref(), &Communicator::solo(), DataParallelOptions::default())?;
        Ok(Trainer {
            optimizer: Optimizer::new(config.rule, model.as_ref())?,
            schedule: StepLr { base: config.rule.learning_rate(), step_size: 1, gamma: config.lr_gamma },
            sampler: Sampler::new(config.seed, data.train.len(), config.batch_size),
            device: device.clone(),
            random: init.random,
            epoch: 0,
            batch: 0,
            losses: Vec::new(),
            record: false,
            parallel,
            config,
            data,
            model,
        })
    }

    /// The run whose newest checkpoint is in `folder`, from where it stopped: its losses go on bit for bit.
    ///
    /// # Errors
    /// As [`Trainer::new`]; if the checkpoint is damaged, or its model, data, batch size, seed or optimizer is another.
    pub fn resume(
        device: &Device,
        config: TrainingConfig,
        data: Arc<TrainTest>,
        folder: &Path,
    ) -> Result<Trainer> {
        let mut trainer = Trainer::new(device, config, data)?;
        let loaded = checkpoint::load::<RunState>(folder, &[MODEL_FILE, OPTIMIZER_FILE])?;
        let state = (loaded.path.join("training.json"), loaded.state);
        let [model, optimizer] =
            <[_; 2]>::try_from(loaded.files).unwrap_or_else(|_| unreachable!("two files were asked for"));
        trainer.restore(state, model, optimizer)?;
        Ok(trainer)
    }

    /// Continues where another run stood: its state and its two files, each with the name that errors blame.
    fn restore(
        &mut self,
        (file, state): (PathBuf, RunState),
        (model_file, model): (PathBuf, Vec<u8>),
        (optimizer_file, optimizer): (PathBuf, Vec<u8>),
    ) -> Result<()> {
        self.check_settings(&file, &state)?;
        let model_values = checkpoint::model_values(self.model.as_ref());
        let model_values = checkpoint::from_safetensors(&model_file, &model, &model_values)?;
        let (tensors, steps) = self.optimizer.state();
        let names: Vec<&String> = steps.iter().map(|(name, _)| name).collect();
        if !state.optimizer_steps.iter().map(|(name, _)| name).eq(names.iter().copied()) {
            return Err(mismatch(&file, "optimizer_steps", &names, &state.optimizer_steps));
        }
        let expected: Vec<_> =
            tensors.into_iter().map(|(name, tensor)| (name, Value::Tensor(tensor))).collect();
        let slots = checkpoint::from_safetensors(&optimizer_file, &optimizer, &expected)?;
        drop(expected);
        // Everything was read and fits: only now does anything change.
        self.device.tuner().adopt(self.device.compute().isa(), state.convolutions);
        checkpoint::set_model(self.model.as_ref(), model_values)?;
        let slots = slots.into_iter().filter_map(|slot| match slot {
            Value::Tensor(tensor) => Some(tensor),
            Value::Count(_) => None,
        });
        self.optimizer
            .restore(slots.collect(), state.optimizer_steps.iter().map(|(_, steps)| *steps).collect());
        self.random.restore(&state.random);
        self.epoch = state.epoch;
        self.batch = state.batch;
        self.losses = state.losses;
        self.sampler.set_epoch(self.epoch);
        Ok(())
    }

    fn state(&self) -> RunState {
        RunState {
            model: self.config.model,
            data: self.data.train.info().name.clone(),
            train_images: self.data.train.len(),
            optimizer: format!("{:?}", self.config.rule),
            learning_rate: self.schedule.base,
            lr_gamma: self.config.lr_gamma,
            batch_size: self.config.batch_size,
            seed: self.config.seed,
            augmentation: self.config.augmentation,
            epoch: self.epoch,
            batch: self.batch,
            losses: self.losses.clone(),
            optimizer_steps: self.optimizer.state().1,
            random: self.random.state(),
            convolutions: self.device.tuner().choices(),
        }
    }

    /// A run goes on only as what it was; the Conv+BN mode may change, its values are the same.
    fn check_settings(&self, file: &Path, saved: &RunState) -> Result<()> {
        let own = self.state();
        let compared: [(&str, String, String); 9] = [
            ("model", own.model.to_string(), saved.model.to_string()),
            ("data", own.data, saved.data.clone()),
            ("train_images", own.train_images.to_string(), saved.train_images.to_string()),
            ("batch_size", own.batch_size.to_string(), saved.batch_size.to_string()),
            ("augmentation", format!("{:?}", own.augmentation), format!("{:?}", saved.augmentation)),
            ("seed", own.seed.to_string(), saved.seed.to_string()),
            ("learning_rate", own.learning_rate.to_string(), saved.learning_rate.to_string()),
            ("lr_gamma", own.lr_gamma.to_string(), saved.lr_gamma.to_string()),
            ("optimizer", own.optimizer, saved.optimizer.clone()),
        ];
        match compared.into_iter().find(|(_, own, saved)| own != saved) {
            Some((field, own, saved)) => Err(CheckpointError::Mismatch {
                file: file.to_owned(),
                field: field.into(),
                expected: own,
                found: saved,
            }
            .into()),
            None => self
                .check_position(saved)
                .map_err(|reason| CheckpointError::Damaged { file: file.to_owned(), reason }.into()),
        }
    }

    /// Epoch, batch, losses and the optimizer's counts must be those of one moment of a run.
    fn check_position(&self, saved: &RunState) -> std::result::Result<(), String> {
        let (batches, losses) = (self.batches_per_epoch(), saved.losses.len());
        if saved.batch >= batches {
            return Err(format!("batch {} of {batches}", saved.batch));
        }
        let steps = saved.epoch.checked_mul(batches).and_then(|steps| steps.checked_add(saved.batch));
        if steps != Some(losses) {
            let (epoch, batch) = (saved.epoch, saved.batch);
            return Err(format!("epoch {epoch} and batch {batch} do not fit {losses} losses"));
        }
        let in_range = |steps: i64| usize::try_from(steps).is_ok_and(|steps| steps <= losses);
        match saved.optimizer_steps.iter().find(|(_, steps)| !in_range(*steps)) {
            Some((name, steps)) => Err(format!("optimizer_steps: {name} has {steps} after {losses} steps")),
            None => Ok(()),
        }
    }

    /// Saves model, optimizer, random state and position into `folder`, atomically.
    ///
    /// # Errors
    /// If it cannot be written; the previous checkpoint is then untouched.
    pub fn save(&self, folder: &Path) -> Result<()> {
        let [model, optimizer] = self.files()?;
        let files = [(MODEL_FILE, model), (OPTIMIZER_FILE, optimizer)];
        Ok(checkpoint::save(folder, self.steps(), &self.state(), &files)?)
    }

    /// The contents of a checkpoint's two files.
    fn files(&self) -> Result<[Vec<u8>; 2]> {
        let tensors = self.optimizer.state().0;
        let tensors: Vec<_> =
            tensors.into_iter().map(|(name, tensor)| (name, Value::Tensor(tensor))).collect();
        let model = checkpoint::to_safetensors(&checkpoint::model_values(self.model.as_ref()))?;
        Ok([model, checkpoint::to_safetensors(&tensors)?])
    }

    /// Makes the model's blocks keep what a plan says, from the next step on; joining others, rank 0's plan is for all. A limit of
    /// workspaces goes to the device's tuner.
    ///
    /// # Errors
    /// If the plan is for another model, or blocks run as separate layers.
    pub fn set_memory_plan(&mut self, plan: &MemoryPlan) -> Result<()> {
        plan.apply(self.model.as_ref()).map_err(TrainingError::Config)?;
        self.device.tuner().limit_workspace(plan.workspace_limit);
        Ok(())
    }

    /// The model.
    pub fn model(&self) -> &dyn Module {
        self.model.as_ref()
    }

    /// Epochs finished.
    pub fn epoch(&self) -> usize {
        self.epoch
    }

    /// Batches of the present epoch finished.
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

    /// The loss of every step so far, of earlier parts of a resumed run too.
    pub fn losses(&self) -> &[f64] {
        &self.losses
    }

    /// Gives buffers that are not in use back to the system: the next steps may need others, after [`Trainer::set_memory_plan`].
    pub fn trim(&self) {
        self.device.trim();
    }

    /// Records the bytes in use over the next step, for its report.
    pub fn record_next_step(&mut self) {
        self.record = true;
    }

    /// Trains on the next batch; after the last one of an epoch the next epoch begins.
    ///
    /// # Errors
    /// If the loss is not finite and the run is to stop then: parameters and optimizer are as before the step, while
    /// forward has moved running statistics and random state. If an operation fails.
    pub fn step(&mut self) -> Result<StepReport> {
        let _step = span("step");
        let start = Instant::now();
        let before = self.parallel.traffic();
        self.device.reset_peak();
        let recording = std::mem::take(&mut self.record).then(|| self.device.start_timeline());
        self.model.train();
        self.optimizer.set_learning_rate(self.schedule.at(self.epoch));
        let ranks = self.parallel.communicator();
        let shard = self.sampler.batch(self.batch, ranks.rank(), ranks.world_size());
        self.random.set_first_sample(shard.first as u64);
        let loss = if shard.samples.is_empty() && !self.config.sync_bn {
            self.parallel.mean_without_samples()?
        } else {
            let views = self.config.augmentation.views(self.config.seed, self.epoch);
            let loading = span("data");
            let (images, labels) = batch(&self.device, &self.data.train, shard.samples, Some(&views))?;
            drop(loading);
            let _forward = span("forward");
            let (sum, counted) = self.loss(&self.model.forward(&images)?, &labels)?;
            self.parallel.mean(&sum, counted)?
        };
        let bytes_end_of_forward = self.device.memory().live_bytes;
        // By the clock of the points: what backward allocates comes later by it too.
        let end_of_forward = recording.map(|start| start.elapsed().as_secs_f64());
        let value = loss.value();
        let step = self.steps() + 1;
        if !value.is_finite() && self.config.stop_on_nan {
            return Err(TrainingError::NotFinite { step, epoch: self.epoch + 1, loss: value });
        }
        let (images, own_images) = (shard.total, shard.samples.len());
        let backward = span("backward");
        let gradients = loss.backward()?;
        drop(backward);
        let optimizer = span("optimizer");
        self.optimizer.step(gradients)?;
        drop(optimizer);
        if images < self.communicator().world_size() {
            self.share_random_position()?;
        }
        self.losses.push(value);
        self.batch += 1;
        if self.batch == self.batches_per_epoch() {
            self.batch = 0;
            self.epoch += 1;
            self.sampler.set_epoch(self.epoch);
        }
        let after = self.parallel.traffic();
        Ok(StepReport {
            step,
            loss: value,
            images,
            own_images,
            traffic: Traffic {
                calls: after.calls - before.calls,
                bytes: after.bytes - before.bytes,
                seconds: after.seconds - before.seconds,
            },
            seconds: start.elapsed().as_secs_f64(),
            bytes_end_of_forward,
            bytes_peak: self.device.memory().peak_bytes,
            timeline: end_of_forward
                .map(|end_of_forward| StepTimeline { points: self.device.take_timeline(), end_of_forward }),
        })
    }

    /// Loss and accuracy over the test set, in evaluation mode, with rank 0's running statistics; ranks share the images.
    /// `progress` is told (done, total) images and may stop it, for all ranks.
    ///
    /// # Errors
    /// If an operation fails. `Ok(None)` if it was stopped.
    pub fn evaluate(
        &self,
        progress: &mut dyn FnMut(usize, usize) -> ControlFlow<()>,
    ) -> Result<Option<Evaluation>> {
        let test = &self.data.test;
        let ranks = self.parallel.communicator();
        self.share_statistics()?;
        self.model.eval();
        let (mut loss, mut confusion) = (0.0, Confusion::new(test.info().classes)?);
        let order: Vec<u32> = (0..test.len() as u32).collect();
        let size = self.evaluation_batch();
        for (index, chosen) in order.chunks(size).enumerate() {
            let own = &chosen[shard(chosen.len(), ranks.rank(), ranks.world_size())];
            if !own.is_empty() {
                let (images, labels) = batch(&self.device, test, own, None)?;
                inference_mode(|| -> Result<()> {
                    let output = self.model.forward(&images)?;
                    loss += self.loss(&output, &labels)?.0.item()?;
                    confusion.add(&output, &labels, self.ignore())?;
                    Ok(())
                })?;
            }
            let done = index * size + chosen.len();
            if self.agree(progress(done, test.len()).is_break())? {
                return Ok(None);
            }
        }
        let mut loss = [loss];
        ranks.all_reduce("loss of the evaluation", &mut loss)?;
        let mut counts = confusion.counts().to_vec();
        ranks.all_reduce("counts of the evaluation", &mut counts)?;
        let counted = counts.iter().sum::<u64>().max(1) as f64;
        let confusion = Confusion::from_counts(confusion.classes(), counts)?;
        Ok(Some(Evaluation {
            loss: loss[0] / counted,
            accuracy: confusion.accuracy().unwrap_or(0.0),
            mean_iou: confusion.mean_iou().filter(|_| matches!(test.info().targets, Targets::Pixels { .. })),
        }))
    }

    /// The sum of the losses at the labels that count, and how many do.
    fn loss(&self, output: &Tensor, labels: &[i64]) -> Result<(Tensor, usize)> {
        let ignore = self.ignore();
        let counted = labels.iter().filter(|&&label| Some(label) != ignore).count();
        Ok((nll_loss(output, labels, Reduction::Sum, ignore)?, counted))
    }

    /// The label that does not count.
    fn ignore(&self) -> Option<i64> {
        self.data.train.info().ignore().map(i64::from)
    }

    /// Images a batch of evaluation, of all ranks together.
    fn evaluation_batch(&self) -> usize {
        self.config.batch_size.min(1000)
    }
}

fn mismatch(
    file: &Path,
    field: &str,
    own: &dyn std::fmt::Debug,
    saved: &dyn std::fmt::Debug,
) -> TrainingError {
    CheckpointError::Mismatch {
        file: file.to_owned(),
        field: field.into(),
        expected: format!("{own:?}"),
        found: format!("{saved:?}"),
    }
    .into()
}
