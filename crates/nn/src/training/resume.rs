//! Saves and resumes runs: their settings and their position, and checks that both fit.

use std::path::{Path, PathBuf};

use convoke_autograd::Device;
use convoke_kernels::tune::Choice;
use serde::{Deserialize, Serialize};

use super::{ModelCard, Result, Trainer, TrainingConfig, Validation};
use crate::checkpoint::{self, CheckpointError, Value, damaged};
use crate::data::{Augmentation, DatasetInfo, Datasets, Mixing};
use crate::data_parallel::Sampling;
use crate::objective::ObjectiveRecord;
use crate::optimizer::RuleSettings;
use crate::{GeneratorState, Module, ParameterRules, Precision, Schedule, difference};

/// The settings that must not change when a run resumes. The Conv+BN mode is not among them: both modes give the same values.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Settings {
    model: String,
    data: DatasetInfo,
    train_images: usize,
    /// Absent from checkpoints that are older than the choice of precisions.
    #[serde(default)]
    precision: Precision,
    /// Absent from checkpoints that are older than the choice of objectives.
    #[serde(default)]
    objective: ObjectiveRecord,
    optimizer: RuleSettings,
    /// Only in checkpoints that are older than the choice of schedules: the factor after each epoch.
    #[serde(default, skip_serializing)]
    lr_gamma: Option<f64>,
    #[serde(default)]
    schedule: Option<Schedule>,
    /// The warm-up and the next three settings are absent from older checkpoints.
    #[serde(default)]
    warmup_steps: u64,
    #[serde(default)]
    parameters: ParameterRules,
    #[serde(default)]
    clip_norm: Option<f64>,
    #[serde(default)]
    ema: Option<f64>,
    batch_size: usize,
    seed: u64,
    /// Absent from older checkpoints.
    #[serde(default)]
    sampling: Sampling,
    augmentation: Augmentation,
    /// Absent from older checkpoints.
    #[serde(default)]
    mixing: Mixing,
    /// See [`super::ProgressiveResizing`]; its epochs may be others, as a run may get longer.
    #[serde(default)]
    initial_scale: Option<f64>,
    /// See [`crate::data::Dataset::variation`].
    #[serde(default)]
    variation: Option<String>,
}

impl Settings {
    /// The settings as newer checkpoints store them.
    fn canonical(mut self) -> Settings {
        if let (None, Some(gamma)) = (self.schedule, self.lr_gamma) {
            self.schedule = Some(Schedule::Step { epochs: 1, gamma }.canonical());
        }
        self
    }
}

/// A run's settings and position: everything in a checkpoint except tensors.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct RunState {
    settings: Settings,
    epoch: usize,
    batch: usize,
    #[serde(with = "crate::float_json")]
    losses: Vec<f64>,
    /// Absent from older checkpoints.
    #[serde(default)]
    validations: Vec<Validation>,
    optimizer_steps: Vec<(String, i64)>,
    random: GeneratorState,
    /// Absent from older checkpoints.
    #[serde(default)]
    card: Option<ModelCard>,
    /// The convolution algorithms in use, so that a resumed run computes the same bits.
    convolutions: Vec<Choice>,
}

const MODEL_FILE: &str = "model.safetensors";
const OPTIMIZER_FILE: &str = "optimizer.safetensors";
const AVERAGE_FILE: &str = "average.safetensors";

/// The contents of a checkpoint's files, or those files with their paths.
pub(super) struct RunFiles<F> {
    pub(super) model: F,
    pub(super) optimizer: F,
    /// Only if the run averages its weights.
    pub(super) average: Option<F>,
}

impl Trainer {
    /// Resumes a run from the newest checkpoint in `folder`: its losses continue bit for bit.
    ///
    /// If the schedule spans the run, the number of steps may be another one than before. The next steps then have the learning rates
    /// that they have in a run of the new number of steps.
    ///
    /// # Errors
    /// As [`Trainer::new`]; if the checkpoint is damaged, if its step is not the one in its folder's name, or if its model, data,
    /// objective, batch size, augmentation, seed, optimizer or another setting differs from the configuration's.
    pub fn resume(
        device: &Device,
        config: TrainingConfig,
        data: impl Into<Datasets>,
        folder: &Path,
    ) -> Result<Trainer> {
        let mut trainer = Trainer::new(device, config, data)?;
        let loaded = checkpoint::load::<RunState>(folder, |state| {
            let average = state.settings.ema.map(|_| AVERAGE_FILE);
            [MODEL_FILE, OPTIMIZER_FILE].into_iter().chain(average).collect()
        })?;
        let (file, step, done) = (loaded.manifest, loaded.step, loaded.state.losses.len());
        if step != done as u64 {
            let reason = format!(
                "step: its folder is named for step {step}, but it is the checkpoint of step {done}, of which it has the losses: a \
                 folder keeps the name that it was saved under"
            );
            return Err(damaged(&file, reason).into());
        }
        let mut files = loaded.files.into_iter();
        let mut next = || files.next().expect("the files that were asked for");
        let (model, optimizer) = (next(), next());
        trainer.restore((file, loaded.state), RunFiles { model, optimizer, average: files.next() })?;
        Ok(trainer)
    }

    /// Continues from another run's state and its files. Errors name each by the path that comes with it.
    pub(super) fn restore(
        &mut self,
        (file, state): (PathBuf, RunState),
        files: RunFiles<(PathBuf, Vec<u8>)>,
    ) -> Result<()> {
        self.check_settings(&file, &state)?;
        let RunFiles { model: (model_file, model), optimizer: (optimizer_file, optimizer), average } = files;
        let model_values = checkpoint::model_values(self.model.as_ref());
        let average = average.map(|(file, bytes)| checkpoint::from_safetensors(&file, &bytes, &model_values));
        let average = average.transpose()?;
        let model_values = checkpoint::from_safetensors(&model_file, &model, &model_values)?;
        let expected = self.optimizer_values();
        check_names(&file, &self.optimizer.state().1, &state.optimizer_steps)?;
        let slots = checkpoint::from_safetensors(&optimizer_file, &optimizer, &expected)?;
        drop(expected);
        // Everything has been read and fits: only now change anything.
        self.device.tuner().adopt(self.device.compute().isa(), state.convolutions);
        checkpoint::set_model(self.model.as_ref(), model_values)?;
        if let (Some(own), Some(saved)) = (&self.average, average) {
            own.restore(&saved);
        }
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
        self.validations = state.validations;
        self.sampler.set_epoch(self.epoch);
        Ok(())
    }

    fn settings(&self) -> Settings {
        Settings {
            model: self.config.model.to_string(),
            data: self.data.train.info().clone(),
            train_images: self.data.train.len(),
            precision: self.config.precision,
            objective: (&self.config.objective).into(),
            optimizer: self.config.rule.settings(),
            lr_gamma: None,
            schedule: Some(self.config.schedule.canonical()),
            warmup_steps: self.config.warmup_steps,
            parameters: self.config.parameters.clone(),
            clip_norm: self.config.clip_norm,
            ema: self.config.ema,
            batch_size: self.config.batch_size,
            seed: self.config.seed,
            sampling: self.config.sampling,
            augmentation: self.config.augmentation,
            mixing: self.config.mixing,
            initial_scale: self.config.progressive.map(|progressive| progressive.initial_scale),
            variation: self.data.train.variation(),
        }
    }

    pub(super) fn state(&self) -> RunState {
        RunState {
            settings: self.settings(),
            epoch: self.epoch,
            batch: self.batch,
            losses: self.losses.clone(),
            validations: self.validations.clone(),
            optimizer_steps: self.optimizer.state().1,
            random: self.random.state(),
            card: Some(self.card()),
            convolutions: self.device.tuner().choices(),
        }
    }

    /// A run resumes only with the settings that it was saved with.
    fn check_settings(&self, file: &Path, saved: &RunState) -> Result<()> {
        let (own, mut other) = (self.settings(), saved.settings.clone().canonical());
        // A run that gets longer follows the schedule of the longer run from here.
        if let Some(steps) = own.schedule.and_then(|own| own.total_steps()) {
            other.schedule = other.schedule.map(|schedule| schedule.over(steps));
        }
        match difference::first([&own, &other]) {
            Err(error) => Err(damaged(file, error).into()),
            Ok(Some(difference)) => {
                let [expected, found] = difference.values;
                let (file, field) = (file.to_owned(), difference.field);
                Err(CheckpointError::Mismatch { file, field, expected, found }.into())
            }
            Ok(None) => self.check_position(saved).map_err(|reason| damaged(file, reason).into()),
        }
    }

    /// Epoch, batch, losses and the optimizer's step counts must belong to the same moment of a run.
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
        let RunFiles { model, optimizer, average } = self.files()?;
        let files = [(MODEL_FILE, model), (OPTIMIZER_FILE, optimizer)];
        let average = average.map(|average| (AVERAGE_FILE, average));
        let files: Vec<_> = files.into_iter().chain(average).collect();
        Ok(checkpoint::save(folder, self.steps(), &self.state(), &files)?)
    }

    /// The contents of a checkpoint's files.
    pub(super) fn files(&self) -> Result<RunFiles<Vec<u8>>> {
        let model = checkpoint::to_safetensors(&checkpoint::model_values(self.model.as_ref()))?;
        let optimizer = checkpoint::to_safetensors(&self.optimizer_values())?;
        Ok(RunFiles { model, optimizer, average: self.average_file()? })
    }

    /// The optimizer's tensors by name.
    fn optimizer_values(&self) -> Vec<(String, Value)> {
        self.optimizer.state().0.into_iter().map(|(name, tensor)| (name, Value::Tensor(tensor))).collect()
    }
}

/// The model of a checkpoint as it is evaluated, without the rest of its run: if the run averages its weights, with the averages.
pub struct SavedModel {
    /// What it is, and what it was trained on.
    pub card: ModelCard,
    file: PathBuf,
    bytes: Vec<u8>,
}

impl SavedModel {
    /// The newest checkpoint in a folder.
    ///
    /// # Errors
    /// If there is none, or it is damaged.
    pub fn open(folder: &Path) -> Result<SavedModel> {
        let loaded = checkpoint::load::<RunState>(folder, |state| {
            vec![if state.settings.ema.is_some() { AVERAGE_FILE } else { MODEL_FILE }]
        })?;
        let [(file, bytes)] =
            <[_; 1]>::try_from(loaded.files).unwrap_or_else(|_| unreachable!("one file was asked for"));
        let Settings { model, data, .. } = loaded.state.settings;
        let card = loaded.state.card.unwrap_or_else(|| ModelCard::new(&model, data));
        Ok(SavedModel { card, file, bytes })
    }

    /// Gives a model the saved parameters and buffers.
    ///
    /// # Errors
    /// If the model has others; it is unchanged then.
    pub fn restore(&self, model: &dyn Module) -> Result<()> {
        let values = checkpoint::from_safetensors(&self.file, &self.bytes, &checkpoint::model_values(model))?;
        Ok(checkpoint::set_model(model, values)?)
    }
}

/// The saved step counts must be of the same parameters as the optimizer's.
fn check_names(file: &Path, own: &[(String, i64)], saved: &[(String, i64)]) -> Result<()> {
    let name = |all: &[(String, i64)], index: usize| all.get(index).map(|(name, _)| name.clone());
    let names = |index: usize| [name(own, index), name(saved, index)];
    match (0..own.len().max(saved.len())).map(names).find(|[own, saved]| own != saved) {
        None => Ok(()),
        Some(names) => {
            let [expected, found] = names.map(|name| name.unwrap_or_else(|| "nothing more".into()));
            let (file, field) = (file.to_owned(), "optimizer_steps".into());
            Err(CheckpointError::Mismatch { file, field, expected, found }.into())
        }
    }
}
