//! A training run: a model, an optimizer and a data set, step by step, with checkpoints.

use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use convoke_autograd::ops::{Reduction, nll_loss};
use convoke_autograd::{Device, MemoryFormat, Tensor, TimelinePoint, inference_mode};
use convoke_kernels::tune::Choice;
use serde::{Deserialize, Serialize};

use crate::checkpoint::{self, CheckpointError, Value};
use crate::data::{Dataset, TrainTest};
use crate::models::Model;
use crate::modules::ConvBnMode;
use crate::random::{GeneratorState, permutation};
use crate::{Generator, Init, Module, ModuleExt, Optimizer, Rule, StepLr};

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
    /// Images a step; the last batch of an epoch may be smaller.
    pub batch_size: usize,
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
    /// A tensor operation failed.
    #[error(transparent)]
    Tensor(#[from] convoke_autograd::Error),
    /// A checkpoint could not be written or read.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
}

type Result<T> = std::result::Result<T, TrainingError>;

/// What one step did.
#[derive(Debug, Clone)]
pub struct StepReport {
    /// The step, from 1.
    pub step: u64,
    /// Mean loss of the batch, before the update.
    pub loss: f64,
    /// Images in the batch.
    pub images: usize,
    /// Wall-clock seconds of the whole step.
    pub seconds: f64,
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
    /// Mean loss.
    pub loss: f64,
    /// Share of images whose likeliest class is the right one.
    pub accuracy: f64,
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
    order: Vec<u32>,
    losses: Vec<f64>,
    record: bool,
}

impl Trainer {
    /// A run from its beginning.
    ///
    /// # Errors
    /// If the model does not take images of this shape or number of classes, or the batch size does not fit.
    pub fn new(device: &Device, config: TrainingConfig, data: Arc<TrainTest>) -> Result<Trainer> {
        let info = data.train.info();
        config.model.check(info).map_err(TrainingError::Config)?;
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
        Ok(Trainer {
            optimizer: Optimizer::new(config.rule, model.as_ref())?,
            schedule: StepLr { base: config.rule.learning_rate(), step_size: 1, gamma: config.lr_gamma },
            order: permutation(config.seed, 0, data.train.len()),
            device: device.clone(),
            random: init.random,
            epoch: 0,
            batch: 0,
            losses: Vec::new(),
            record: false,
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
        let state = loaded.state;
        let file = loaded.path.join("training.json");
        trainer.check_settings(&file, &state)?;
        let [(model_file, model_bytes), (optimizer_file, optimizer_bytes)] = &loaded.files[..] else {
            unreachable!("two files were asked for")
        };
        let model_values = checkpoint::model_values(trainer.model.as_ref());
        let model_values = checkpoint::from_safetensors(model_file, model_bytes, &model_values)?;
        let (tensors, steps) = trainer.optimizer.state();
        let names: Vec<&String> = steps.iter().map(|(name, _)| name).collect();
        if !state.optimizer_steps.iter().map(|(name, _)| name).eq(names.iter().copied()) {
            return Err(mismatch(&file, "optimizer_steps", &names, &state.optimizer_steps));
        }
        let expected: Vec<_> =
            tensors.into_iter().map(|(name, tensor)| (name, Value::Tensor(tensor))).collect();
        let slots = checkpoint::from_safetensors(optimizer_file, optimizer_bytes, &expected)?;
        drop(expected);
        // Everything was read and fits: only now does anything change.
        device.tuner().adopt(device.compute().isa(), state.convolutions);
        checkpoint::set_model(trainer.model.as_ref(), model_values)?;
        let slots = slots.into_iter().filter_map(|slot| match slot {
            Value::Tensor(tensor) => Some(tensor),
            Value::Count(_) => None,
        });
        trainer
            .optimizer
            .restore(slots.collect(), state.optimizer_steps.iter().map(|(_, steps)| *steps).collect());
        trainer.random.restore(&state.random);
        trainer.epoch = state.epoch;
        trainer.batch = state.batch;
        trainer.losses = state.losses;
        trainer.order = permutation(trainer.config.seed, trainer.epoch, trainer.data.train.len());
        Ok(trainer)
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
        let compared: [(&str, String, String); 8] = [
            ("model", own.model.to_string(), saved.model.to_string()),
            ("data", own.data, saved.data.clone()),
            ("train_images", own.train_images.to_string(), saved.train_images.to_string()),
            ("batch_size", own.batch_size.to_string(), saved.batch_size.to_string()),
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
        let tensors = self.optimizer.state().0;
        let tensors: Vec<_> =
            tensors.into_iter().map(|(name, tensor)| (name, Value::Tensor(tensor))).collect();
        let files = [
            (MODEL_FILE, checkpoint::to_safetensors(&checkpoint::model_values(self.model.as_ref()))?),
            (OPTIMIZER_FILE, checkpoint::to_safetensors(&tensors)?),
        ];
        Ok(checkpoint::save(folder, self.steps(), &self.state(), &files)?)
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
        self.data.train.len().div_ceil(self.config.batch_size)
    }

    /// The loss of every step so far, of earlier parts of a resumed run too.
    pub fn losses(&self) -> &[f64] {
        &self.losses
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
        let start = Instant::now();
        self.device.reset_peak();
        let record = std::mem::take(&mut self.record);
        if record {
            self.device.start_timeline();
        }
        self.model.train();
        self.optimizer.set_learning_rate(self.schedule.at(self.epoch));
        let first = self.batch * self.config.batch_size;
        let end = (first + self.config.batch_size).min(self.order.len());
        let chosen = &self.order[first..end];
        let (images, labels) = batch(&self.device, &self.data.train, chosen)?;
        let loss = nll_loss(&self.model.forward(&images)?, &labels, Reduction::Mean, None)?;
        drop(images);
        let bytes_end_of_forward = self.device.memory().live_bytes;
        let end_of_forward = start.elapsed().as_secs_f64();
        let value = loss.item()?;
        let step = self.steps() + 1;
        if !value.is_finite() && self.config.stop_on_nan {
            return Err(TrainingError::NotFinite { step, epoch: self.epoch + 1, loss: value });
        }
        let gradients = loss.backward()?;
        drop(loss);
        self.optimizer.step(gradients)?;
        self.losses.push(value);
        self.batch += 1;
        let images = chosen.len();
        if self.batch == self.batches_per_epoch() {
            self.batch = 0;
            self.epoch += 1;
            self.order = permutation(self.config.seed, self.epoch, self.order.len());
        }
        Ok(StepReport {
            step,
            loss: value,
            images,
            seconds: start.elapsed().as_secs_f64(),
            bytes_end_of_forward,
            bytes_peak: self.device.memory().peak_bytes,
            timeline: record.then(|| StepTimeline { points: self.device.take_timeline(), end_of_forward }),
        })
    }

    /// Loss and accuracy over the test set, in evaluation mode. `progress` is told (done, total) images and may stop it.
    ///
    /// # Errors
    /// If an operation fails. `Ok(None)` if it was stopped.
    pub fn evaluate(
        &self,
        progress: &mut dyn FnMut(usize, usize) -> ControlFlow<()>,
    ) -> Result<Option<Evaluation>> {
        let test = &self.data.test;
        self.model.eval();
        let (mut loss, mut correct) = (0.0, 0);
        let order: Vec<u32> = (0..test.len() as u32).collect();
        let size = self.config.batch_size.min(1000);
        for (index, chosen) in order.chunks(size).enumerate() {
            let (images, labels) = batch(&self.device, test, chosen)?;
            inference_mode(|| -> Result<()> {
                let output = self.model.forward(&images)?;
                loss += nll_loss(&output, &labels, Reduction::Sum, None)?.item()?;
                correct += count_correct(&output, &labels)?;
                Ok(())
            })?;
            let done = index * size + chosen.len();
            if progress(done, test.len()).is_break() {
                return Ok(None);
            }
        }
        let images = test.len().max(1) as f64;
        Ok(Some(Evaluation { loss: loss / images, accuracy: correct as f64 / images }))
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

/// The chosen images, scaled to 0..1 and normalised by channel, and their labels.
fn batch(device: &Device, data: &Dataset, chosen: &[u32]) -> Result<(Tensor, Vec<i64>)> {
    let info = data.info();
    let plane = info.height * info.width;
    let shape = [chosen.len(), info.channels, info.height, info.width];
    let scales: Vec<(f32, f32)> =
        info.mean.iter().zip(&info.std).map(|(mean, std)| (1.0 / (255.0 * std), mean / std)).collect();
    let images = Tensor::build(device, &shape, MemoryFormat::Contiguous, |out: &mut [f32]| {
        for (out, &index) in out.chunks_mut(info.image_len().max(1)).zip(chosen) {
            let planes = out.chunks_mut(plane).zip(data.image(index as usize).chunks(plane));
            for ((out, pixels), &(scale, shift)) in planes.zip(&scales) {
                out.iter_mut().zip(pixels).for_each(|(x, &byte)| *x = f32::from(byte) * scale - shift);
            }
        }
        Ok(())
    })?;
    // Convolutions are fastest in channels-last, and every layer keeps the format it is given.
    let images = images.to_format(MemoryFormat::ChannelsLast)?;
    Ok((images, chosen.iter().map(|&index| i64::from(data.labels()[index as usize])).collect()))
}

/// How many rows of N x classes have their largest value at the label.
fn count_correct(output: &Tensor, labels: &[i64]) -> Result<usize> {
    let classes = output.shape()[1];
    let likeliest =
        |row: &[f32]| (0..classes).reduce(|best, class| if row[class] > row[best] { class } else { best });
    let rows = output.data::<f32>()?.chunks(classes);
    Ok(rows
        .zip(labels)
        .filter(|(row, label)| likeliest(row).is_some_and(|class| class as i64 == **label))
        .count())
}
