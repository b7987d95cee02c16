//! What `train --output DIR` writes, and what other commands find there.
//!
//! ```text
//! DIR/model.json         what the model is: name, classes, size of the images, normalisation
//!     model.onnx         its layers, if it came from an ONNX file
//!     best.safetensors   the weights after the best epoch
//!     last.safetensors   those after the last step
//!     metrics.jsonl      a line for each epoch
//!     run.toml           the flags of the run
//!     report.html
//!     checkpoint/        for --resume
//! ```
//! Each file appears whole. Weights are written before the checkpoint of the same step, so a run that is killed and resumed writes
//! them again.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{Args, ValueEnum, value_parser};
use convoke_files::{FolderLock, create_folder, escaped, remove_leftovers};
use serde::Serialize;

use crate::nn::data::DatasetInfo;
use crate::nn::training::{ModelCard, Trainer, Validation};
use crate::nn::{checkpoint, onnx};

use super::failure::{Failure, Result};
use super::flags::values::{name, time};
use super::model_file::is_onnx;
use super::settings::{SETTINGS, Settings};
use super::text::shell;
use super::{console, output};

pub(crate) const CARD: &str = "model.json";
pub(crate) const GRAPH: &str = "model.onnx";
pub(crate) const BEST: &str = "best.safetensors";
pub(crate) const LAST: &str = "last.safetensors";
pub(crate) const METRICS: &str = "metrics.jsonl";
const REPORT: &str = "report.html";
pub(crate) const CHECKPOINT: &str = "checkpoint";
/// Where runs have their folders that no flag names.
pub(crate) const RUNS: &str = "runs";

/// Where the trained model goes, which epoch is the best, and when a run ends early.
#[derive(Args, Clone)]
pub(crate) struct KeepArgs {
    /// The folder of the run [default: runs/NAME-N, after the data].
    ///
    /// It gets the trained model (model.json, best.safetensors, last.safetensors), metrics.jsonl, report.html, the run's flags (run.toml),
    /// and a checkpoint after each epoch. `evaluate`, `predict`, `export` and `train --resume` take the folder.
    #[arg(long, value_name = "DIR", help_heading = "Output")]
    pub(crate) output: Option<PathBuf>,

    /// Keep nothing of the run. Runs on noise (DATA random) keep nothing anyway.
    #[arg(long, conflicts_with = "output", help_heading = "Output")]
    pub(crate) no_output: bool,

    /// By what the best epoch is chosen, on the validation images [default: mean-iou if pixels have classes, accuracy if images
    /// have, else loss].
    #[arg(long, value_enum, value_name = "METRIC", help_heading = "Training")]
    pub(crate) best_by: Option<Metric>,

    /// End the run after this many epochs without a better result on the validation images [default: 3 once they are all right, if no
    /// flag says how long the run is].
    #[arg(long, value_name = "EPOCHS", value_parser = value_parser!(u32).range(1..), help_heading = "Training")]
    pub(crate) patience: Option<u32>,

    /// Write losses, learning rate, speed and the results of validation as TensorBoard reads them, and at the end the images with the
    /// highest loss; look at them with `tensorboard --logdir DIR`.
    #[arg(long, value_name = "DIR", help_heading = "Output")]
    pub(crate) tensorboard: Option<PathBuf>,

    /// End the run after this time, as if its steps were done: 90s, 30m, 2h.
    #[arg(long, value_name = "TIME", value_parser = time, help_heading = "Training")]
    pub(crate) time_limit: Option<Duration>,

    /// The flags of the run, for its folder.
    #[arg(skip)]
    pub(crate) settings: Settings,
}

/// A result of validation by which epochs are compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Metric {
    /// The share of images or pixels whose most likely class is the right one.
    Accuracy,
    /// The share of images whose class is among the five most likely.
    Top5,
    /// Intersection over union, averaged over the classes of pixels.
    MeanIou,
    /// The harmonic mean of recall and precision, averaged over labels.
    F1,
    /// The mean loss; less is better.
    Loss,
}

/// The folder of `--output`.
pub(crate) struct ModelFolder {
    folder: PathBuf,
    _held: FolderLock,
}

/// A line of `metrics.jsonl`.
#[derive(Serialize)]
struct EpochMetrics {
    epoch: usize,
    /// Steps until the end of the epoch.
    steps: usize,
    /// The learning rate of the epoch's last step.
    learning_rate: f64,
    /// The mean over the epoch's steps.
    train_loss: f64,
    validation_loss: f64,
    accuracy: Option<f64>,
    top5_accuracy: Option<f64>,
    mean_iou: Option<f64>,
    mean_f1: Option<f64>,
    /// Whether it was the best epoch so far.
    best: bool,
}

impl ModelFolder {
    /// The folder that the flags name, if they do.
    ///
    /// # Errors
    /// If it cannot be written to, another run uses it, or it holds a model already and the run does not resume.
    pub(crate) fn open(folder: &Path, resume: bool) -> Result<ModelFolder> {
        output::check_folder("--output", folder)?;
        let held = output::hold_folder("--output", folder)?;
        // What is saved and pruned there must not be somewhere else.
        if std::fs::symlink_metadata(folder.join(CHECKPOINT)).is_ok_and(|found| found.is_symlink()) {
            return Err(Failure::Usage(format!(
                "--output: {CHECKPOINT} in {} is a link to another folder: remove it, or name that folder with --checkpoint",
                escaped(folder.display())
            )));
        }
        let holds_model = [BEST, LAST].iter().any(|file| folder.join(file).exists());
        if holds_model && !resume {
            return Err(Failure::Usage(format!(
                "--output: {} already holds a model: add --resume to continue its run, or name another folder",
                escaped(folder.display())
            )));
        }
        remove_leftovers(folder);
        Ok(ModelFolder { folder: folder.to_owned(), _held: held })
    }

    /// The checkpoint of a run with `--output`.
    pub(crate) fn checkpoint_in(folder: &Path) -> PathBuf {
        folder.join(CHECKPOINT)
    }

    /// Where the report goes.
    pub(crate) fn report(&self) -> Result<PathBuf> {
        self.place(REPORT)
    }

    fn place(&self, file: &str) -> Result<PathBuf> {
        place("--output", &self.folder.join(file))
    }

    /// Prints where the model is, and what to do with it; `photos` is the folder of photographs that it was trained on.
    pub(crate) fn announce(&self, finished: bool, photos: Option<&str>) {
        output::announce("--output", &self.folder);
        if finished {
            let folder = shell(self.folder.display());
            let photos = photos.map_or_else(String::new, |photos| format!(" {}", shell(photos)));
            console::note(&format!(
                "next: `convoke evaluate {folder}{photos}`, `convoke predict {folder} IMAGE...`, `convoke export {folder} --to model.onnx`"
            ));
        }
    }

    /// A new folder `runs/NAME-N` with the next number.
    pub(crate) fn new_for(name: &str) -> Result<PathBuf> {
        let runs = Path::new(RUNS);
        let refused = |folder: &Path, error: std::io::Error| {
            let folder = escaped(folder.display());
            Failure::Run(format!(
                "cannot make the folder {folder} for the run: {error}; name another place with --output, or keep nothing with --no-output"
            ))
        };
        create_folder(runs).map_err(|error| refused(runs, error))?;
        let number = |entry: std::io::Result<fs::DirEntry>| -> Option<u64> {
            entry.ok()?.file_name().to_str()?.strip_prefix(name)?.strip_prefix('-')?.parse().ok()
        };
        let taken = fs::read_dir(runs).map_err(|error| refused(runs, error))?.filter_map(number).max();
        for number in taken.unwrap_or(0).saturating_add(1).. {
            let folder = runs.join(format!("{name}-{number}"));
            match fs::create_dir(&folder) {
                Ok(()) => return Ok(folder),
                // Another run has begun just now.
                Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(refused(&folder, error)),
            }
        }
        unreachable!("numbers do not end")
    }

    /// Writes what stays the same over the run.
    pub(crate) fn begin(&self, trainer: &Trainer, settings: &Settings) -> Result<()> {
        settings.write(&self.folder, &self.place(SETTINGS)?)?;
        let mut card = trainer.card();
        if copy_graph(&card, "--output", &self.folder)? {
            card.model = GRAPH.into();
        }
        Ok(card.write(&self.place(CARD)?)?)
    }

    /// Writes the weights, and after an epoch whose validation was the best so far also those of the best. If the run keeps an average
    /// of the weights, that is what is written, as it is what was validated.
    pub(crate) fn save(&self, trainer: &Trainer, metric: Metric) -> Result<()> {
        let save = |file: &str| {
            let place = self.place(file)?;
            let saved = trainer.with_averaged_weights(|model| checkpoint::save_model(model, &place));
            saved.map_err(Failure::of_training)?.map_err(Failure::from)
        };
        save(LAST)?;
        let validations = trainer.validations();
        let last = validations.last().filter(|last| trainer.batch() == 0 && last.epoch == trainer.epoch());
        if last.is_some() && last == best(validations, metric) {
            save(BEST)?;
        }
        output::write_silently("--output", &self.place(METRICS)?, lines(trainer, metric)?.as_bytes())
    }
}

/// Where a file of a run goes. A pipe, a device or a link that has its name is removed: such names are the run's own.
fn place(flag: &str, file: &Path) -> Result<PathBuf> {
    let is_other = std::fs::symlink_metadata(file).is_ok_and(|found| !found.is_file() && !found.is_dir());
    if is_other {
        std::fs::remove_file(file).map_err(|error| {
            Failure::Run(format!("{flag}: cannot replace {}: {error}", escaped(file.display())))
        })?;
    }
    Ok(file.to_owned())
}

/// Copies the layers of a model that came from an ONNX file into a folder, because what is in a folder opens no file outside of it.
/// False if the model is not from an ONNX file.
pub(crate) fn copy_graph(card: &ModelCard, flag: &str, folder: &Path) -> Result<bool> {
    let source = Path::new(&card.model);
    if !is_onnx(source) {
        return Ok(false);
    }
    let definition = onnx::read(source)?.definition;
    let graph = place(flag, &folder.join(GRAPH))?;
    onnx::save(&graph, &definition, &BTreeMap::new(), &onnx::WriteOptions::default())?;
    Ok(true)
}

/// A line for each epoch that was validated.
fn lines(trainer: &Trainer, metric: Metric) -> Result<String> {
    let (validations, batches) = (trainer.validations(), trainer.batches_per_epoch());
    let mut lines = String::new();
    for (index, validation) in validations.iter().enumerate() {
        let steps = validation.epoch * batches;
        let losses = trainer.losses().get(steps.saturating_sub(batches)..steps).unwrap_or_default();
        let epoch = EpochMetrics {
            epoch: validation.epoch,
            steps,
            learning_rate: trainer.learning_rate_of((steps as u64).saturating_sub(1)),
            train_loss: losses.iter().sum::<f64>() / losses.len() as f64,
            validation_loss: validation.loss,
            accuracy: validation.accuracy,
            top5_accuracy: validation.top5_accuracy,
            mean_iou: validation.mean_iou,
            mean_f1: validation.mean_f1,
            best: best(&validations[..=index], metric) == Some(validation),
        };
        lines.push_str(&serde_json::to_string(&epoch)?);
        lines.push('\n');
    }
    Ok(lines)
}

/// The best of some epochs; of equally good ones the one with the least loss, then the first. None if none has the metric.
pub(crate) fn best(validations: &[Validation], metric: Metric) -> Option<&Validation> {
    let value = |of: &Validation| metric.of(of).filter(|value| !value.is_nan());
    let known = validations.iter().filter_map(|of| Some((of, value(of)?)));
    let is_better = |(next, value): (&Validation, f64), (best, most): (&Validation, f64)| {
        value > most || value == most && next.loss < best.loss
    };
    known.reduce(|best, next| if is_better(next, best) { next } else { best }).map(|(best, _)| best)
}

/// Whether an epoch has the most that its metric can be, and no epoch after it had less loss for so long that none is expected to. The
/// rest of a run would not change the best weights then.
pub(crate) fn is_exhausted(validations: &[Validation], metric: Metric) -> bool {
    const LONG: usize = 3;
    // The five likeliest classes may hold the right one while others are likelier, and a loss has no least value that is reached.
    let has_most = !matches!(metric, Metric::Top5 | Metric::Loss);
    let is_perfect = |best: &Validation| has_most && metric.of(best) == Some(1.0);
    best(validations, metric).is_some_and(is_perfect) && epochs_without_gain(validations, metric) >= LONG
}

/// Epochs since the best one.
pub(crate) fn epochs_without_gain(validations: &[Validation], metric: Metric) -> usize {
    let last = validations.last().map_or(0, |last| last.epoch);
    last - best(validations, metric).map_or(0, |best| best.epoch)
}

impl Metric {
    /// The result of an epoch; larger is better.
    fn of(self, epoch: &Validation) -> Option<f64> {
        match self {
            Metric::Accuracy => epoch.accuracy,
            Metric::Top5 => epoch.top5_accuracy,
            Metric::MeanIou => epoch.mean_iou,
            Metric::F1 => epoch.mean_f1,
            Metric::Loss => Some(-epoch.loss),
        }
    }

    /// The usual one for such data.
    pub(crate) fn usual(info: &DatasetInfo) -> Metric {
        match (info.targets.are_classes(), info.targets.are_of_pixels()) {
            (true, false) => Metric::Accuracy,
            (true, true) => Metric::MeanIou,
            (false, _) => Metric::Loss,
        }
    }
}

/// The metric that the flags choose, or the usual one for the data.
///
/// # Errors
/// If such data has no such metric.
pub(crate) fn metric(args: &KeepArgs, info: &DatasetInfo) -> Result<Metric> {
    let (classes, of_pixels) = (info.targets.are_classes(), info.targets.are_of_pixels());
    let usual = Metric::usual(info);
    let chosen = args.best_by.unwrap_or(usual);
    let reason = match chosen {
        Metric::Top5 if !classes || of_pixels => "has no class for each image",
        Metric::Top5 if info.classes <= 5 => "has no more than five classes",
        Metric::MeanIou if !classes || !of_pixels => "has no class for each pixel",
        Metric::F1 if !info.targets.are_labels() => "does not have any number of labels an image",
        Metric::Accuracy if !classes => "has no classes",
        _ => return Ok(chosen),
    };
    Err(Failure::Usage(format!("--best-by {}: {} {reason}; it has {}", name(chosen), info.name, name(usual))))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn epoch(epoch: usize, loss: f64, accuracy: Option<f64>) -> Validation {
        let json =
            serde_json::json!({ "epoch": epoch, "loss": loss, "accuracy": accuracy, "mean_iou": null });
        serde_json::from_value(json).unwrap()
    }

    #[test]
    fn the_best_epoch() {
        let epochs = [
            epoch(1, 2.0, Some(0.5)),
            epoch(2, 1.0, Some(0.75)),
            epoch(3, 1.5, Some(0.75)),
            epoch(4, 0.9, Some(0.75)),
            epoch(5, 0.5, None),
        ];
        let number = |metric| best(&epochs, metric).map(|best| best.epoch);
        assert_eq!(
            (number(Metric::Accuracy), number(Metric::Loss), number(Metric::Top5)),
            (Some(4), Some(5), None)
        );
        assert_eq!(epochs_without_gain(&epochs, Metric::Accuracy), 1);
        assert_eq!(
            (epochs_without_gain(&epochs, Metric::Top5), epochs_without_gain(&[], Metric::Loss)),
            (5, 0)
        );
    }

    #[test]
    fn a_run_is_exhausted_when_all_is_right_and_the_loss_stays() {
        let losses = |losses: &[f64], accuracy: f64| -> Vec<Validation> {
            (1..).zip(losses).map(|(number, loss)| epoch(number, *loss, Some(accuracy))).collect()
        };
        for (epochs, metric, expected) in [
            (losses(&[0.5, 0.6, 0.6, 0.5], 1.0), Metric::Accuracy, true),
            (losses(&[0.5, 0.6, 0.6], 1.0), Metric::Accuracy, false),
            (losses(&[0.5, 0.4, 0.3, 0.2], 1.0), Metric::Accuracy, false),
            (losses(&[0.5, 0.6, 0.6, 0.5], 0.99), Metric::Accuracy, false),
            (losses(&[0.5, 0.6, 0.6, 0.5], 1.0), Metric::Loss, false),
            (Vec::new(), Metric::Accuracy, false),
        ] {
            assert_eq!(is_exhausted(&epochs, metric), expected, "{epochs:?}");
        }
    }
}
