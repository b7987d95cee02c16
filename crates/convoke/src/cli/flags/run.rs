//! The flags of a training run, which `train` and `compare` take.

use std::path::PathBuf;

use crate::cli::failure::{Failure, Result};
use crate::cli::registry::{Data, data_parser, datasets, model, model_parser};
use crate::cli::{model_file, places};
use crate::nn::data::DatasetSpec;
use crate::nn::models::ModelSpec;
use crate::nn::objective::Objective;
use crate::nn::{Rule, Schedule};
use clap::{Args, value_parser};

use super::augment::Augment;
use super::memory::MemoryArgs;
use super::optimizer::{OptimizerName, rule};
use super::photos::PhotoArgs;
use super::ranks::RankArgs;
use super::recipe::{ClassWeights, RecipeArgs, ScheduleName};
use super::tuning::TuningArgs;
use super::values::{not_negative, positive};

/// What to train on, how, and where the results go.
#[derive(Args)]
pub(crate) struct RunArgs {
    /// What to train on. `auto` is MNIST if its files are there, else `digits`. The model mnist-cnn takes mnist and digits;
    /// segnet and unet take camvid and masks; resnet20 takes all data with a class for each image, the other models such data of
    /// 32 x 32 pixels or more; random fits every model.
    #[arg(long, value_parser = data_parser(), default_value = "auto", help_heading = "Data")]
    pub(crate) data: Data,

    /// Folder with the data set's files [default: see `convoke info`].
    #[arg(long, value_name = "DIR", help_heading = "Data")]
    pub(crate) data_dir: Option<PathBuf>,

    /// Fetch the data set's files if they are missing (MNIST: 11 MB, CIFAR-10: 170 MB; checked by SHA-256; uses HTTPS_PROXY).
    #[arg(long, help_heading = "Data")]
    pub(crate) download: bool,

    /// How training images are varied at random; seed, epoch and image decide it.
    #[arg(long, value_enum, default_value_t = Augment::Auto, help_heading = "Data")]
    pub(crate) augment: Augment,

    #[command(flatten)]
    pub(crate) photos: PhotoArgs,

    /// Threads that load images ahead of the steps, for data sets that are not held in memory [default: one for each of
    /// --threads, up to 4]. Their number changes only the speed.
    #[arg(long, value_name = "N", value_parser = value_parser!(u16).range(0..=256), help_heading = "Data")]
    pub(crate) workers: Option<u16>,

    /// The model, by name or as an ONNX file [default: segnet for camvid and masks, resnet20 for cifar10, resnet18 for
    /// folder, else mnist-cnn].
    #[arg(long, value_parser = model_parser(), help_heading = "Model")]
    pub(crate) model: Option<ModelSpec>,

    /// Start from the weights of this file: *.safetensors, *.pt and *.pth of PyTorch, or *.onnx, by PyTorch's names. If the data has
    /// another number of classes than the file, the last layer keeps its new values.
    #[arg(long, value_name = "FILE", help_heading = "Model")]
    pub(crate) weights: Option<PathBuf>,

    /// Times to go through the training images [default: what --steps needs; without it 5 for folder and masks, else 1].
    #[arg(long, value_name = "N", value_parser = value_parser!(u32).range(1..=1_000_000), help_heading = "Training")]
    pub(crate) epochs: Option<u32>,

    /// Stop after this many steps, even within an epoch.
    #[arg(long, value_name = "N", value_parser = value_parser!(u64).range(1..), help_heading = "Training")]
    pub(crate) steps: Option<u64>,

    /// Images a step, shared among the ranks; the last step of an epoch takes what is left, if it is more than one image [default: 8
    /// where pixels have classes, 32 for folder, else 128; all there are, if they are fewer].
    #[arg(long, value_name = "N", value_parser = value_parser!(u32).range(1..), help_heading = "Training")]
    pub(crate) batch_size: Option<u32>,

    /// The optimizer, which updates parameters by their gradients.
    #[arg(long, value_enum, default_value_t = OptimizerName::Adamw, help_heading = "Training")]
    pub(crate) optimizer: OptimizerName,

    /// Learning rate, the largest of the schedule [default: adadelta 1, sgd 0.01, adamw and adam 0.001; with one-cycle and without
    /// --weights three times as much, but adadelta 1].
    #[arg(long, value_name = "X", value_parser = positive, help_heading = "Training")]
    pub(crate) lr: Option<f64>,

    /// Momentum of sgd.
    #[arg(long, value_name = "X", default_value_t = 0.9, value_parser = not_negative, help_heading = "Training")]
    pub(crate) momentum: f64,

    /// L2 penalty of sgd, adadelta and adam, decoupled decay of adamw [default: adamw 0.01, others 0].
    #[arg(long, value_name = "X", value_parser = not_negative, help_heading = "Training")]
    pub(crate) weight_decay: Option<f64>,

    /// What part of each label is spread over all classes: 0 to 1.
    #[arg(long, value_name = "X", default_value_t = 0.0, value_parser = not_negative, help_heading = "Training")]
    pub(crate) label_smoothing: f64,

    #[command(flatten)]
    pub(crate) recipe: RecipeArgs,

    /// Seed of starting values, data order, dropout, and of generated data sets.
    #[arg(long, value_name = "N", default_value_t = 1, help_heading = "Training")]
    pub(crate) seed: u64,

    /// Threads that kernels use, shared among the ranks of a process [default: all of this machine's]. If there are more threads
    /// than processors, they wait for each other.
    #[arg(long, value_name = "N", value_parser = value_parser!(u16).range(1..=1024), help_heading = "Training")]
    pub(crate) threads: Option<u16>,

    /// Go on when the loss is NaN or infinite, instead of stopping with an error that names the step.
    #[arg(long, help_heading = "Training")]
    pub(crate) continue_on_nan: bool,

    #[command(flatten)]
    pub(crate) ranks: RankArgs,

    #[command(flatten)]
    pub(crate) memory: MemoryArgs,

    #[command(flatten)]
    pub(crate) tuning: TuningArgs,

    /// Save model, optimizer and position here after each epoch, after the last step, and on Ctrl-C.
    #[arg(long, value_name = "DIR", help_heading = "Output")]
    pub(crate) checkpoint: Option<PathBuf>,

    /// Continue the run in --checkpoint (or --output) after its newest checkpoint; the losses are, bit for bit, those of an
    /// uninterrupted run.
    #[arg(long, help_heading = "Output")]
    pub(crate) resume: bool,

    /// Write a page with loss curves and memory over a step, as one self-contained file.
    #[arg(long, value_name = "FILE.html", help_heading = "Output")]
    pub(crate) report: Option<PathBuf>,

    /// Write the results as JSON; `-` is standard output, and then nothing else goes there.
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    pub(crate) json: Option<PathBuf>,
}

impl RunArgs {
    pub(crate) fn model(&self) -> ModelSpec {
        let usual = || match self.data {
            Data::Named(spec) => model(spec.model().unwrap_or("mnist-cnn")),
            Data::Auto | Data::Random => model("mnist-cnn"),
        };
        let model = self.model.clone().unwrap_or_else(usual);
        match &self.weights {
            Some(file) => model_file::with_weights(model, file),
            None => model,
        }
    }

    /// The data set that the flags name; none for noise.
    pub(crate) fn dataset(&self) -> Option<&'static DatasetSpec> {
        match self.data {
            Data::Named(spec) => Some(spec),
            Data::Random => None,
            Data::Auto => {
                let builtin = |name| datasets().get(name).expect("it is built in");
                let mnist = builtin("mnist");
                let there =
                    self.download || self.folder(mnist).is_some_and(|folder| mnist.is_present(&folder));
                Some(if there { mnist } else { builtin("digits") })
            }
        }
    }

    /// Where the files of this data set are.
    pub(crate) fn folder(&self, spec: &DatasetSpec) -> Option<PathBuf> {
        self.data_dir.clone().or_else(|| places::default_dataset_folder(spec.name()))
    }

    pub(crate) fn batch_size(&self) -> usize {
        // What `auto` may stand for has the usual size, so no file is looked for here.
        let usual = match self.data {
            Data::Named(spec) if spec.usual().is_some_and(|info| info.targets.are_of_pixels()) => 8,
            Data::Named(spec) if spec.takes_photos() => 32,
            _ => 128,
        };
        self.batch_size.unwrap_or(usual) as usize
    }

    /// Images a step with this many images to train on: a default is no more than there are.
    pub(crate) fn batch_size_of(&self, images: usize) -> usize {
        match self.batch_size {
            Some(given) => given as usize,
            None => self.batch_size().min(images.max(1)),
        }
    }

    /// The steps that the flags ask for, of epochs of this many batches.
    pub(crate) fn total_steps(&self, batches: usize) -> u64 {
        let spanned = self.spanned_steps(batches);
        self.steps.map_or(spanned, |steps| steps.min(spanned))
    }

    /// The schedule of epochs of this many batches. --steps may end a run within its epochs; then the schedule is as without it, so
    /// that the run can be resumed.
    pub(crate) fn schedule(&self, batches: usize) -> Schedule {
        self.recipe.schedule(self.spanned_steps(batches), self.is_open())
    }

    /// Whether only --steps says how long the run is, so that it may well be prolonged.
    fn is_open(&self) -> bool {
        self.epochs.is_none() && self.steps.is_some()
    }

    /// The steps of all epochs.
    fn spanned_steps(&self, batches: usize) -> u64 {
        // Called in each step, so it must not look for the files of `auto`, which has no photographs.
        let usual = if matches!(self.data, Data::Named(spec) if spec.takes_photos()) { 5 } else { 1 };
        match (self.epochs, self.steps) {
            (None, Some(steps)) => steps,
            (epochs, _) => u64::from(epochs.unwrap_or(usual)).saturating_mul(batches as u64),
        }
    }

    /// The model's own objective, with smoothed labels and class weights if they are asked for; `balanced` gives these for the
    /// training data.
    pub(crate) fn objective(&self, balanced: impl FnOnce() -> Result<Vec<f64>>) -> Result<Objective> {
        let mut own = self.model().objective();
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

    pub(crate) fn rule(&self) -> Rule {
        let mut rule = rule(self.optimizer, self.lr);
        // At the top of a cycle, and with random weights, steps may be larger.
        let rises = self.recipe.schedule_name(self.is_open()) == ScheduleName::OneCycle;
        if self.lr.is_none() && rises && self.weights.is_none() && self.optimizer != OptimizerName::Adadelta {
            rule = rule.with_learning_rate(3.0 * rule.learning_rate());
        }
        if let Rule::Sgd(sgd) = &mut rule {
            sgd.momentum = self.momentum;
            sgd.nesterov = self.recipe.nesterov;
        }
        match self.weight_decay {
            Some(weight_decay) => rule.with_weight_decay(weight_decay),
            None => rule,
        }
    }
}
