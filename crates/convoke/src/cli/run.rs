//! What a training run does: the flags of `train` and `compare`, resolved once, before anything is loaded.

use std::path::{Path, PathBuf};

use crate::nn::data::{Augmentation, Dataset, DatasetSpec, Mixing};
use crate::nn::data_parallel::Sampler;
use crate::nn::models::ModelSpec;
use crate::nn::modules::ConvBnMode;
use crate::nn::objective::Objective;
use crate::nn::training::{ProgressiveResizing, TrainingConfig};
use crate::nn::{ParameterRules, Precision, Rule};

use super::failure::{Failure, Result};
use super::flags::augment::Augment;
use super::flags::memory::MemoryArgs;
use super::flags::photos::PhotoArgs;
use super::flags::ranks::RankArgs;
use super::flags::recipe::{ClassWeights, RecipeArgs};
use super::flags::tuning::TuningArgs;
use super::places;
use super::registry::Data;

/// A training run. What depends on the data, such as the number of steps, is found by its functions once the data is there.
pub(crate) struct Run {
    /// The model, with the weights that it starts with.
    pub(crate) model: ModelSpec,
    /// The file of those weights, if they are not random.
    pub(crate) weights: Option<PathBuf>,
    /// Whether these are weights for ImageNet that are known by name.
    pub(crate) is_from_imagenet: bool,
    pub(crate) precision: Precision,
    pub(crate) source: DataSource,
    pub(crate) batch: BatchSize,
    pub(crate) length: Length,
    /// Epochs at the beginning in which only the last layer is trained.
    pub(crate) frozen_epochs: u64,
    pub(crate) rule: Rule,
    pub(crate) parameters: ParameterRules,
    pub(crate) recipe: RecipeArgs,
    pub(crate) label_smoothing: f64,
    pub(crate) seed: u64,
    /// The number of threads, if the flags say it.
    pub(crate) threads: Option<u16>,
    pub(crate) stop_on_nan: bool,
    pub(crate) ranks: RankArgs,
    pub(crate) memory: MemoryArgs,
    pub(crate) tuning: TuningArgs,
    pub(crate) checkpoint: Option<PathBuf>,
    pub(crate) resume: bool,
    pub(crate) report: Option<PathBuf>,
    pub(crate) json: Option<PathBuf>,
    /// What must be the same on all processes that train one model, by the names of the flags.
    pub(crate) settings: Vec<(&'static str, String)>,
}

/// What to train on.
pub(crate) struct DataSource {
    pub(crate) choice: Data,
    /// The data set; none for noise.
    pub(crate) spec: Option<&'static DatasetSpec>,
    /// The folder that the flags name.
    pub(crate) data_dir: Option<PathBuf>,
    pub(crate) download: bool,
    pub(crate) augment: Augment,
    pub(crate) photos: PhotoArgs,
    /// Threads that load images ahead, if the flags say how many.
    pub(crate) workers: Option<u16>,
}

/// How many images a step has.
#[derive(Clone, Copy)]
pub(crate) struct BatchSize {
    pub(crate) images: usize,
    /// Whether the flags name it. If not, a step has no more images than there are.
    pub(crate) is_given: bool,
}

/// How long a run is.
#[derive(Clone, Copy)]
pub(crate) struct Length {
    pub(crate) epochs: Epochs,
    /// The most steps.
    pub(crate) steps: Option<u64>,
}

/// How many epochs a run has.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Epochs {
    Given(u64),
    /// As many as the steps need, which alone say how long the run is, so that it may well be prolonged.
    OfSteps,
    /// As many as give this many steps, but some at least and at most: few photographs are shown more often than many.
    For {
        steps: u64,
        within: [u64; 2],
    },
}

impl Length {
    /// The steps of all epochs, which have this many batches. The schedule spans these, so that a run that --steps ends within its epochs
    /// can be resumed.
    fn spanned_steps(self, batches: usize) -> u64 {
        match self.epochs_of(batches) {
            Some(epochs) => epochs.saturating_mul(batches as u64),
            None => self.steps.unwrap_or(0),
        }
    }

    /// The epochs, each of which has this many batches; none if the steps alone say how long the run is.
    pub(crate) fn epochs_of(self, batches: usize) -> Option<u64> {
        match self.epochs {
            Epochs::Given(epochs) => Some(epochs),
            Epochs::OfSteps => None,
            Epochs::For { steps, within: [least, most] } => {
                Some(steps.div_ceil(batches.max(1) as u64).clamp(least, most))
            }
        }
    }

    /// The steps of the run, whose epochs have this many batches.
    pub(crate) fn total_steps(self, batches: usize) -> u64 {
        let spanned = self.spanned_steps(batches);
        self.steps.map_or(spanned, |steps| steps.min(spanned))
    }

    /// Whether no flag says how long it is.
    pub(crate) fn is_usual(self) -> bool {
        matches!(self.epochs, Epochs::For { .. }) && self.steps.is_none()
    }

    /// Whether only the steps say how long it is.
    pub(crate) fn is_open(self) -> bool {
        self.epochs == Epochs::OfSteps
    }
}

impl DataSource {
    /// Where the files of a data set are.
    pub(crate) fn folder(&self, spec: &DatasetSpec) -> Option<PathBuf> {
        places::dataset_folder(self.data_dir.as_deref(), spec.name())
    }

    /// What the data is called: the folder of photographs, or the data set.
    pub(crate) fn title(&self) -> String {
        let folder = self.data_dir.as_deref().filter(|_| self.spec.is_some_and(DatasetSpec::takes_photos));
        // "." has a name, too.
        let folder = folder.and_then(|folder| std::path::absolute(folder).ok());
        let name =
            folder.as_deref().and_then(Path::file_name).map(|name| name.to_string_lossy().into_owned());
        let is_plain = |c: char| c.is_alphanumeric() || "._-".contains(c);
        match name {
            Some(name) => name.chars().map(|c| if is_plain(c) { c } else { '-' }).collect(),
            // `auto` has become one of them.
            None => self.spec.map_or_else(|| self.choice.to_string(), |spec| spec.name().to_owned()),
        }
    }

    /// How images are varied that are in memory.
    fn augmentation(&self) -> Augmentation {
        match (self.augment, self.choice) {
            (Augment::Auto, Data::Named(spec)) => spec.augmentation(),
            _ => Augmentation::default(),
        }
    }
}

impl Run {
    /// The model as it is trained on this data: its last layer gives what there is to learn.
    pub(crate) fn model_for(&self, data: &dyn Dataset) -> ModelSpec {
        self.model.predicting(data.info().targets, data.value_scale().as_ref())
    }

    /// The configuration to train on this data; `balanced` gives the weights of classes with which all count alike.
    pub(crate) fn config(
        &self,
        conv_bn: ConvBnMode,
        data: &dyn Dataset,
        balanced: impl FnOnce() -> Result<Vec<f64>>,
    ) -> Result<TrainingConfig> {
        let (images, model) = (data.len(), self.model_for(data));
        let BatchSize { images: batch_size, is_given } = self.batch;
        let batch_size = if is_given { batch_size } else { batch_size.min(images.max(1)) };
        let batches = Sampler::batches_of(images, batch_size);
        let steps = self.length.spanned_steps(batches);
        let frozen_steps = self.frozen_epochs.saturating_mul(batches as u64);
        // Images have their full size in the last fifth of the epochs.
        let epochs = 4 * steps.div_ceil(batches.max(1) as u64) / 5;
        let progressive = self.recipe.progressive;
        let progressive =
            progressive.map(|initial_scale| ProgressiveResizing { initial_scale, epochs: epochs as usize });
        Ok(TrainingConfig {
            objective: self.objective(&model, balanced)?,
            model,
            conv_bn,
            precision: self.precision,
            rule: self.rule.clone(),
            schedule: self.recipe.schedule(steps, self.length.is_open()),
            warmup_steps: self.recipe.warmup,
            parameters: ParameterRules { frozen_steps, ..self.parameters.clone() },
            clip_norm: self.recipe.clip_norm,
            ema: self.recipe.ema,
            batch_size,
            seed: self.seed,
            sampling: self.recipe.sampler.into(),
            augmentation: self.source.augmentation(),
            mixing: Mixing { mixup: self.recipe.mixup, cutmix: self.recipe.cutmix },
            progressive,
            sync_bn: self.ranks.sync_bn,
            send_gradients: self.ranks.send_gradients,
            stop_on_nan: self.stop_on_nan,
        })
    }

    /// The model's own objective, with smoothed labels and class weights if they are asked for.
    fn objective(&self, model: &ModelSpec, balanced: impl FnOnce() -> Result<Vec<f64>>) -> Result<Objective> {
        let mut own = model.objective();
        if let Some(weights) = &self.recipe.class_weights {
            let weights = match weights {
                ClassWeights::Balanced => balanced()?,
                ClassWeights::Given(weights) => weights.clone(),
            };
            own = own
                .with_class_weights(weights)
                .map_err(|error| Failure::Usage(format!("--class-weights: {error}")))?;
        }
        match self.label_smoothing {
            0.0 => Ok(own),
            smoothing => own
                .with_label_smoothing(smoothing)
                .map_err(|error| Failure::Usage(format!("--label-smoothing: {error}"))),
        }
    }
}
