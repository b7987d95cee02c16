//! The flags of a training run, which `train` and `compare` take.

use std::path::{Path, PathBuf};

use crate::cli::failure::{Failure, Result};
use crate::cli::registry::{Data, data_parser, datasets, model, model_parser, optimizer_parser};
use crate::cli::run::{BatchSize, DataSource, Epochs, Length, Run};
use crate::cli::{model_file, open_model, places, published};
use crate::nn::data::{DatasetSpec, Listed};
use crate::nn::models::ModelSpec;
use crate::nn::{OptimizerOptions, OptimizerSpec, Precision, Rule};
use clap::{Args, value_parser};

use super::augment::Augment;
use super::memory::{MemoryArgs, PlannerArgs};
use super::photos::PhotoArgs;
use super::place::Place;
use super::ranks::RankArgs;
use super::recipe::{RecipeArgs, ScheduleName};
use super::tuning::TuningArgs;
use super::values::{given, name, not_negative, positive, precision};

/// What to train on, how, and where the results go.
#[derive(Args)]
pub(crate) struct RunArgs {
    /// What to train on: a folder of photographs, or a data set by name.
    ///
    /// A folder holds a folder of images for each class; or train and val, with the classes in each; or images and masks; or images and
    /// labels.csv, with any number of labels or numbers to predict. What it holds is seen by itself. Names are those of --data.
    #[arg(value_name = "DATA", conflicts_with = "data_dir")]
    pub(crate) place: Option<PathBuf>,

    /// The kind of DATA, where it is not what is seen in the folder, or the data set without DATA [default: auto].
    ///
    /// `auto` is MNIST if its files are there, else `digits`. The model mnist-cnn takes mnist and digits; segnet, unet,
    /// fcn-resnet50 and deeplabv3-resnet50 take camvid and masks; resnet20 takes all data with a class for each image, the other models
    /// such data of 32 x 32 pixels or more; random fits every model.
    #[arg(long, value_parser = data_parser(), help_heading = "Data")]
    pub(crate) data: Option<Data>,

    /// Folder with the data set's files, as DATA names it [default: see `convoke info`].
    #[arg(long, value_name = "DIR", help_heading = "Data")]
    pub(crate) data_dir: Option<PathBuf>,

    /// Fetch the data set's files if they are missing.
    ///
    /// MNIST has 11 MB, CIFAR-10 170 MB. Files are checked by SHA-256; HTTPS_PROXY is used.
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

    /// The model, by name or as an ONNX file.
    ///
    /// The default is segnet for camvid and masks, resnet20 for cifar10, resnet18 for other photographs, else mnist-cnn.
    #[arg(long, value_parser = model_parser(), help_heading = "Model")]
    pub(crate) model: Option<ModelSpec>,

    /// Start from these weights: `imagenet`, the folder of a run, or a file (*.safetensors, *.pt, *.pth, *.onnx).
    ///
    /// `imagenet` stands for the weights that torchvision publishes for the model (`convoke info MODEL`); --download fetches them once. Those
    /// of a run are the best ones, and its model is the default. In a file arrays have PyTorch's names. If the data has another number of
    /// classes than the weights, the last layer keeps its new values.
    #[arg(long, value_name = "WEIGHTS", help_heading = "Model")]
    pub(crate) weights: Option<PathBuf>,

    /// Type of activations and their gradients.
    ///
    /// bf16 takes half of the memory of f32, and on processors that multiply it less time (see `convoke info`). Weights, statistics, sums,
    /// losses and all files stay f32.
    #[arg(long, value_parser = precision(), default_value = "f32", help_heading = "Model")]
    pub(crate) precision: Precision,

    /// Times to go through the training images [default: 5 to 50 for photographs, else 1].
    ///
    /// The fewer photographs, the more epochs: as many as give 300 steps, with --weights 100 and at most 20. With --steps alone there are as
    /// many epochs as the steps need.
    #[arg(long, value_name = "N", value_parser = value_parser!(u32).range(1..=1_000_000), help_heading = "Training")]
    pub(crate) epochs: Option<u32>,

    /// Stop after this many steps, even within an epoch.
    #[arg(long, value_name = "N", value_parser = value_parser!(u64).range(1..), help_heading = "Training")]
    pub(crate) steps: Option<u64>,

    /// Images a step [default: 32 for photographs, 8 where pixels have classes, else 128].
    ///
    /// The ranks share them. The last step of an epoch takes what is left, if it is more than one image. Without this flag a step takes no
    /// more images than there are.
    #[arg(long, value_name = "N", value_parser = value_parser!(u32).range(1..), help_heading = "Training")]
    pub(crate) batch_size: Option<u32>,

    /// The optimizer, which updates parameters by their gradients.
    #[arg(long, value_parser = optimizer_parser(), default_value = "adamw", help_heading = "Training")]
    pub(crate) optimizer: OptimizerSpec,

    /// Learning rate, the largest of the schedule.
    ///
    /// The default is 1 for adadelta, 0.01 for sgd, and 0.001 for adamw and adam; with --weights for photographs 0.3 times as much; with
    /// one-cycle, without --weights and not for photographs three times as much, but 1 for adadelta.
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

    /// Threads that kernels use [default: all of this machine's].
    ///
    /// The ranks of a process share them. If there are more threads than processors, they wait for each other.
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

    /// Go on with a run after its newest checkpoint [default of RUN: the newest run in runs].
    ///
    /// RUN is the folder of a run of `train`, which holds its flags. A flag that is given beside it changes what may change, such as
    /// --epochs or --threads; what would make another run of it is refused. The losses are, bit for bit, those of an uninterrupted run.
    /// With --checkpoint and no RUN, the run is the one in that folder, and all flags have to be given again.
    #[arg(long, value_name = "RUN", num_args = 0..=1, help_heading = "Output")]
    pub(crate) resume: Option<Option<PathBuf>>,

    /// Write a page with loss curves and memory over a step, as one self-contained file.
    #[arg(long, value_name = "FILE.html", help_heading = "Output")]
    pub(crate) report: Option<PathBuf>,

    /// Write the results as JSON; `-` is standard output, and then nothing else goes there.
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    pub(crate) json: Option<PathBuf>,
}

/// The share of the usual learning rate with which pretrained layers are trained on photographs.
const FINE: f64 = 0.3;

impl RunArgs {
    /// The run that the flags ask for.
    ///
    /// # Errors
    /// If flags do not fit each other.
    pub(crate) fn resolve(mut self) -> Result<Run> {
        self.recipe.check(&self.optimizer, self.momentum)?;
        self.find_place()?;
        let choice = self.choice();
        let named = match choice {
            Data::Named(spec) => Some(spec),
            Data::Auto | Data::Random => None,
        };
        // What `auto` may stand for has the usual size and length.
        let (is_of_pixels, has_photos) =
            (named.is_some_and(DatasetSpec::is_of_pixels), named.is_some_and(DatasetSpec::takes_photos));
        let usual_batch = match (is_of_pixels, has_photos) {
            (true, _) => 8,
            (false, true) => 32,
            (false, false) => 128,
        };
        let usual_epochs = match (has_photos, self.weights.is_some()) {
            (false, _) => Epochs::Given(1),
            (true, false) => Epochs::For { steps: 300, within: [5, 50] },
            // What is known already is learnt sooner.
            (true, true) => Epochs::For { steps: 100, within: [5, 20] },
        };
        let batch = BatchSize {
            images: self.batch_size.unwrap_or(usual_batch) as usize,
            is_given: self.batch_size.is_some(),
        };
        let epochs = match (self.epochs, self.steps) {
            (None, Some(_)) => Epochs::OfSteps,
            (Some(epochs), _) => Epochs::Given(epochs.into()),
            (None, None) => usual_epochs,
        };
        let length = Length { epochs, steps: self.steps };
        // A new last layer on pretrained ones has the first epoch for itself.
        let frozen_epochs = self.recipe.frozen_epochs.unwrap_or_else(|| self.fine_tunes().into());
        let (model, weights) = self.model()?;
        let rule = self.rule(length);
        let is_from_imagenet = self.names_imagenet();
        Ok(Run {
            settings: self.settings(&model, &rule, batch.images),
            parameters: self.recipe.parameters(&self.optimizer, (rule.learning_rate(), self.fine_tunes())),
            source: DataSource {
                choice,
                spec: self.dataset(),
                data_dir: self.data_dir,
                download: self.download,
                augment: self.augment,
                photos: self.photos,
                workers: self.workers,
            },
            model,
            is_from_imagenet,
            weights,
            batch,
            length,
            frozen_epochs: frozen_epochs.into(),
            rule,
            precision: self.precision,
            recipe: self.recipe,
            label_smoothing: self.label_smoothing,
            seed: self.seed,
            threads: self.threads,
            stop_on_nan: !self.continue_on_nan,
            ranks: self.ranks,
            memory: self.memory,
            tuning: self.tuning,
            checkpoint: self.checkpoint,
            resume: self.resume.is_some(),
            report: self.report,
            json: self.json,
        })
    }

    /// Replaces DATA by what it stands for.
    fn find_place(&mut self) -> Result<()> {
        let Some(place) = self.place.take() else { return Ok(()) };
        let Place { data, folder } = Place::of(&place)?;
        // A folder may be of another kind than it seems.
        if let (Some(other), None) = (self.data, &folder)
            && other != data
        {
            return Err(Failure::Usage(format!(
                "--data {other}: DATA is {data} already: leave one of them out"
            )));
        }
        self.data = self.data.or(Some(data));
        self.data_dir = folder;
        Ok(())
    }

    fn choice(&self) -> Data {
        self.data.unwrap_or(Data::Auto)
    }

    /// The model with the weights that it starts with, and their file.
    fn model(&self) -> Result<(ModelSpec, Option<PathBuf>)> {
        let usual = || match self.choice() {
            Data::Named(spec) => model(spec.model().unwrap_or("mnist-cnn")),
            Data::Auto | Data::Random => model("mnist-cnn"),
        };
        let Some(weights) = &self.weights else {
            return Ok((self.model.clone().unwrap_or_else(usual), None));
        };
        let (model, file) = if self.names_imagenet() {
            let model = self.model.clone().unwrap_or_else(usual);
            let file = published::file(&model)?;
            (model, file)
        } else if weights.is_dir() {
            let (trained, file) = open_model::of_run(weights)?;
            (self.model.clone().unwrap_or(trained), file)
        } else {
            (self.model.clone().unwrap_or_else(usual), weights.clone())
        };
        Ok((model_file::with_weights(model, &file), Some(file)))
    }

    /// Whether --weights names those for ImageNet, and not a file.
    fn names_imagenet(&self) -> bool {
        self.weights
            .as_deref()
            .is_some_and(|weights| weights == Path::new(published::IMAGENET) && !weights.exists())
    }

    /// The data set that the flags name; none for noise.
    fn dataset(&self) -> Option<&'static DatasetSpec> {
        match self.choice() {
            Data::Named(spec) => Some(spec),
            Data::Random => None,
            Data::Auto => {
                let builtin = |name| datasets().get(name).expect("it is built in");
                let mnist = builtin("mnist");
                let folder = || places::dataset_folder(self.data_dir.as_deref(), mnist.name());
                let there = self.download || folder().is_some_and(|folder| mnist.is_present(&folder));
                Some(if there { mnist } else { builtin("digits") })
            }
        }
    }

    /// Whether photographs are learnt by a model that knows others.
    fn fine_tunes(&self) -> bool {
        self.weights.is_some() && self.dataset().is_some_and(DatasetSpec::takes_photos)
    }

    fn rule(&self, length: Length) -> Rule {
        let mut options = OptimizerOptions::default();
        (options.momentum, options.nesterov) = (self.momentum, self.recipe.nesterov);
        let rule = self.optimizer.rule(&options);
        // At the top of a cycle, and with random weights, steps may be larger. Photographs are few, and so are the steps: running
        // statistics do not follow then.
        let rises = self.recipe.schedule_name(length.is_open()) == ScheduleName::OneCycle;
        let is_steady = self.weights.is_some() || self.dataset().is_some_and(DatasetSpec::takes_photos);
        let peak = match (self.fine_tunes(), rises && !is_steady) {
            (true, _) => FINE,
            (false, true) => self.optimizer.peak(),
            (false, false) => 1.0,
        };
        let learning_rate = self.lr.unwrap_or(peak * rule.learning_rate());
        let weight_decay = self.weight_decay.unwrap_or(rule.weight_decay());
        rule.with_learning_rate(learning_rate).with_weight_decay(weight_decay)
    }

    /// The settings that must be the same on all processes that train one model, by the names of the flags. Those that may differ are
    /// left out, such as threads, the folder of the data, the output, and how the first rank chooses convolutions for all.
    fn settings(&self, model: &ModelSpec, rule: &Rule, batch_size: usize) -> Vec<(&'static str, String)> {
        let RunArgs {
            place: _,
            data: _,
            data_dir: _,
            weights,
            download: _,
            workers: _,
            augment,
            photos,
            model: _,
            precision,
            epochs,
            steps,
            batch_size: _,
            optimizer,
            lr: _,
            momentum,
            weight_decay,
            label_smoothing,
            recipe,
            seed,
            threads: _,
            continue_on_nan,
            ranks: RankArgs { ranks: _, mpi: _, sync_bn, send_gradients, rank_timeout },
            memory:
                MemoryArgs {
                    memory_budget,
                    memory_plan,
                    planner: PlannerArgs { inexact_memory: _, plan_time: _ },
                },
            tuning: _,
            checkpoint,
            resume,
            report: _,
            json: _,
        } = self;
        let mut settings = vec![
            ("--data", self.choice().to_string()),
            ("--augment", name(*augment)),
            ("--model", model.to_string()),
            ("--weights", given(&weights.as_ref().map(|file| file.display()))),
            ("--precision", precision.to_string()),
            ("--epochs", given(epochs)),
            ("--steps", given(steps)),
            ("--batch-size", batch_size.to_string()),
            ("--optimizer", optimizer.name().to_owned()),
            ("--lr", rule.learning_rate().to_string()),
            ("--momentum", momentum.to_string()),
            ("--weight-decay", given(weight_decay)),
            ("--label-smoothing", label_smoothing.to_string()),
            ("--seed", seed.to_string()),
            ("--continue-on-nan", continue_on_nan.to_string()),
            ("--sync-bn", sync_bn.to_string()),
            ("--send-gradients", send_gradients.to_string()),
            ("--rank-timeout", rank_timeout.as_secs_f64().to_string()),
            ("--memory-budget", given(memory_budget)),
            ("--memory-plan", given(&memory_plan.as_ref().map(|file| file.display()))),
            ("--checkpoint", given(&checkpoint.as_ref().map(|folder| folder.display()))),
            ("--resume", resume.is_some().to_string()),
        ];
        settings.extend(photos.settings());
        settings.extend(recipe.settings());
        settings
    }
}
