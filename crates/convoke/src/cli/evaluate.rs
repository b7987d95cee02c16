//! `convoke evaluate`: how good a trained model is on labelled images.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::Args;
use convoke_files::escaped;
use serde::Serialize;

use crate::nn::data::photos::{self, Normalisation, PhotoPart, PhotoSettings};
use crate::nn::data::{DataError, Dataset, DatasetInfo, DatasetSpec, LoadOptions, PhotoOrigin, Sample};
use crate::nn::metrics::LabelCounts;
use crate::nn::training::{Evaluation, EvaluationOptions, evaluate};

use super::console::Console;
use super::explanation::{self, Explainer};
use super::failure::{Failure, Result};
use super::flags::place::Place;
use super::flags::using::UsingArgs;
use super::in_use::InUse;
use super::quality::{ClassResults, Judged, ValueResults, percent};
use super::registry::{Data, data_parser, datasets};
use super::text::shell;
use super::{dataset, json, output, page, places, text};

/// Which model is judged on which data.
#[derive(Args)]
pub(crate) struct EvaluateArgs {
    /// The folder of a trained model (`train --output`) or of a checkpoint, one of its *.safetensors files, or an ONNX file.
    #[arg(value_name = "MODEL")]
    model: PathBuf,

    /// What it is judged on: a folder of photographs, or a data set by name [default: the data set that it was trained on].
    #[arg(value_name = "DATA", conflicts_with = "data_dir")]
    place: Option<PathBuf>,

    /// The kind of the data [default: that of the data that the model was trained on].
    #[arg(long, value_parser = data_parser())]
    data: Option<Data>,

    /// Folder with the data set's files; photographs have no default, as a model's folder may come from somebody else.
    #[arg(long, value_name = "DIR")]
    data_dir: Option<PathBuf>,

    /// Which part of the data: train, val, test, or `all` for a folder without parts [default: test if there is one, else what
    /// training was validated on].
    #[arg(long = "split", alias = "part", value_name = "NAME")]
    part: Option<String>,

    /// Leave out photographs that cannot be decoded, and list them.
    #[arg(long)]
    skip_broken: bool,

    /// The file that tells which class a colour of a mask is, as in `train`.
    #[arg(long, alias = "mask-colors", value_name = "FILE")]
    mask_colours: Option<PathBuf>,

    #[command(flatten)]
    using: UsingArgs,

    /// Write a page with the results for each class, the confusion matrix and the images with the highest loss, as one
    /// self-contained file.
    #[arg(long, value_name = "FILE.html")]
    report: Option<PathBuf>,

    /// Show in the page where the evidence lies for what the images with the highest and the lowest loss were taken for (Grad-CAM), from
    /// black (none) through purple and orange to light yellow (the most in the image). `convoke predict --explain DIR` does so for any images.
    #[arg(long, requires = "report")]
    explain: bool,
}

/// The JSON of the results.
#[derive(Serialize)]
struct Results<'a> {
    model: String,
    data: &'a str,
    images: usize,
    loss: f64,
    accuracy: Option<f64>,
    top5_accuracy: Option<f64>,
    mean_iou: Option<f64>,
    /// Where images have any number of labels: the mean of their F1.
    #[serde(skip_serializing_if = "Option::is_none")]
    mean_f1: Option<f64>,
    classes: Vec<ClassResults>,
    /// Where numbers are predicted.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    values: Vec<ValueResults>,
    /// How often images or pixels of each class (row) were taken for each (column).
    confusion: Vec<&'a [u64]>,
    version: &'static str,
}

pub(crate) fn run(args: &EvaluateArgs) -> Result<()> {
    json::check(args.using.json.as_deref())?;
    output::check("--report", args.report.as_deref())?;
    let console = Console::new()?;
    let model = InUse::open(&args.model, &args.using, &console)?;
    let explainer = match args.explain {
        true => Some(explainer(&model)?),
        false => None,
    };
    let (spec, name, data) = load(args, &model, &console)?;
    let options = {
        let mut options = EvaluationOptions::new(&model.trained.spec);
        options.batch_size = args.using.batch_size as usize;
        options.workers = args.using.workers.map(usize::from);
        options.flip = args.using.flip;
        options.precision = args.using.precision;
        options
    };
    let mut stage = console.stage("evaluating", 0, Some(data.len() as u64));
    let mut progress = |done: usize, _: usize| -> ControlFlow<()> {
        stage.set(done as u64, "");
        console.control()
    };
    let found = evaluate(model.trained.module.as_ref(), (&model.device, &data), &options, &mut progress);
    stage.end();
    let Some(evaluation) =
        found.map_err(|error| dataset::with_remedy(Some(spec), Failure::of_training(error)))?
    else {
        return Err(Failure::Interrupted("interrupted".into()));
    };
    let heat = match explainer {
        Some(explainer) => {
            let shown = evaluation.hardest.iter().chain(&evaluation.easiest);
            let shown: Vec<_> = shown.map(|image| (image.index, image.predicted)).collect();
            explainer.heat_of((&model.device, &data), &shown)?
        }
        None => BTreeMap::new(),
    };
    let judged = Judged { evaluation, data: data.clone(), card: model.trained.card.clone(), heat };
    let evaluation = &judged.evaluation;
    let title = format!("{} on {name}, {} images", escaped(&model.trained.name), text::thousands(data.len()));
    let (summary, classes) = (rows(evaluation), judged.rows());
    let between = if classes.is_empty() { "" } else { "\n" };
    let tables = format!("{}{between}{}", text::align(&summary), text::align(&classes));
    console.say(&format!("{title}\n\n{tables}"), args.using.json.as_deref())?;
    let reported = args.report.as_deref().map_or(Ok(()), |file| {
        let table = page::values(summary);
        let body = format!("{table}\n{}{}", judged.sections(), page::provenance(&[]));
        output::write("--report", file, page::document(&title, &body).as_bytes())
    });
    let counts = evaluation.confusion.as_ref().map(|confusion| (confusion.counts(), confusion.classes()));
    let results = Results {
        model: model.trained.name.clone(),
        data: &name,
        images: data.len(),
        loss: evaluation.loss,
        accuracy: evaluation.accuracy,
        top5_accuracy: evaluation.top5_accuracy,
        mean_iou: evaluation.mean_iou,
        mean_f1: evaluation.labels.as_ref().and_then(LabelCounts::mean_f1),
        classes: judged.classes(),
        values: judged.values(),
        confusion: counts.map_or_else(Vec::new, |(counts, classes)| counts.chunks(classes).collect()),
        version: env!("CARGO_PKG_VERSION"),
    };
    reported.and(json::write_value(args.using.json.as_deref(), &results))
}

/// Tells where the model sees the classes of images that have one each: the page shows images of no others.
fn explainer(model: &InUse) -> Result<Explainer<'_>> {
    let targets = model.info().targets;
    explanation::check(targets)?;
    match targets.are_labels() {
        false => Explainer::new(model),
        true => Err(Failure::Usage(
            "--explain: the page shows no images of models that give any number of labels: use predict --explain DIR".into(),
        )),
    }
}

/// The results as a table of names and values.
fn rows(evaluation: &Evaluation) -> Vec<Vec<String>> {
    let mut rows = vec![vec!["loss".to_owned(), format!("{:.4}", evaluation.loss)]];
    let shares = [
        ("accuracy", evaluation.accuracy),
        ("top-5 accuracy", evaluation.top5_accuracy),
        ("mean IoU", evaluation.mean_iou),
        ("mean F1", evaluation.labels.as_ref().and_then(LabelCounts::mean_f1)),
    ];
    for (name, share) in shares {
        rows.extend(share.map(|share| vec![name.to_owned(), percent(share)]));
    }
    rows.extend(evaluation.metrics.iter().map(|(name, value)| vec![name.clone(), format!("{value:.4}")]));
    rows
}

/// What data the model is judged on, its name with that of its part, and the data as the model takes it.
fn load(
    args: &EvaluateArgs,
    model: &InUse,
    console: &Console,
) -> Result<(&'static DatasetSpec, String, Arc<dyn Dataset>)> {
    let card = &model.trained.card;
    let place = args.place.as_deref().map(Place::of).transpose()?;
    // What a folder holds, the model knows.
    let named = place.as_ref().filter(|place| place.folder.is_none()).map(|place| place.data);
    let spec = match args.data.or(named) {
        Some(Data::Named(spec)) => spec,
        Some(Data::Random) => {
            return Err(Failure::Usage("random: there is nothing to judge in noise".into()));
        }
        Some(Data::Auto) | None => datasets().get(&card.data.name).map_err(|_| {
            Failure::Usage("which data the model was trained on is not known: name data with --data".into())
        })?,
    };
    let origin = card.photos.as_ref().filter(|_| card.data.name == spec.name());
    let trained_on = origin.and_then(|photos| photos.folder.as_deref()).map(PathBuf::from);
    let given = place.and_then(|place| place.folder).or_else(|| args.data_dir.clone());
    let folder = match given {
        Some(folder) => Some(folder),
        None if spec.takes_photos() => {
            // A folder that a file names is not opened: the file may come from a stranger.
            if let Some(folder) = &trained_on {
                return Err(Failure::Usage(format!(
                    "name the photographs to judge it on: {} has those that it was trained on and validated with",
                    shell(folder.display())
                )));
            }
            let hint = spec.hint().unwrap_or_default();
            return Err(Failure::Usage(format!("--data {spec}: {hint}")));
        }
        None => places::default_dataset_folder(spec.name()).filter(|_| spec.has_files()),
    };
    let loading = Loading { args, model, origin, console };
    let (part, data) = match (&folder, spec.takes_photos()) {
        (Some(folder), true) => {
            let same = |other: &Path| matches!((other.canonicalize(), folder.canonicalize()), (Ok(a), Ok(b)) if a == b);
            loading.photos(spec, folder, trained_on.as_deref().is_some_and(same))?
        }
        _ => loading.named(spec, folder.as_deref())?,
    };
    let data: Arc<dyn Dataset> = {
        let info =
            DatasetInfo { mean: card.data.mean.clone(), std: card.data.std.clone(), ..data.info().clone() };
        Arc::new(Normalised { data, info })
    };
    check(model, data.as_ref())?;
    dataset::report_skipped(&part, data.skipped(), console);
    let place = folder.map_or_else(String::new, |folder| format!(" in {}", escaped(folder.display())));
    Ok((spec, format!("{part} of {spec}{place}"), data))
}

/// What loading the data needs to know.
struct Loading<'a> {
    args: &'a EvaluateArgs,
    model: &'a InUse,
    /// How the photographs that it was trained on became a data set.
    origin: Option<&'a PhotoOrigin>,
    console: &'a Console,
}

impl Loading<'_> {
    /// A part of a data set that is loaded whole.
    fn named(&self, spec: &DatasetSpec, folder: Option<&Path>) -> Result<(String, Arc<dyn Dataset>)> {
        let progress = self.console.data_progress();
        let mut options = LoadOptions::new(&progress);
        let settings = self.settings();
        (options.folder, options.photos) = (folder, &settings);
        options.seed = self.origin.map_or(1, |origin| origin.seed);
        let data = spec
            .load(&options)
            .map_err(|error| dataset::failure(error, spec.hint().unwrap_or_default(), "interrupted"))?;
        match self.args.part.as_deref() {
            None | Some("test" | "val") => Ok(("validation images".into(), data.test)),
            Some("train") => Ok(("training images".into(), data.train)),
            Some(part) => Err(Failure::Usage(format!("--split {part}: {spec} has the parts train and test"))),
        }
    }

    /// A part of a folder of photographs. If it is the folder that the model was trained on, training images are not chosen unasked.
    fn photos(
        &self,
        spec: &DatasetSpec,
        folder: &Path,
        trained_on: bool,
    ) -> Result<(String, Arc<dyn Dataset>)> {
        let failure = |error: DataError| {
            let hint = "--split names a part of the folder, or `all` of it";
            dataset::failure(error.into(), hint, "interrupted")
        };
        let part = match self.args.part.as_deref() {
            Some("all") => None,
            Some(part) => Some(part),
            None => {
                let table = match self.has_table(spec) {
                    true => photos::label_parts(folder).map_err(failure)?,
                    false => BTreeSet::new(),
                };
                let is_there = |part: &&str| folder.join(part).is_dir() || table.contains(*part);
                let found = ["test", "val", "valid", "validation"].into_iter().find(is_there);
                if found.is_none() && trained_on {
                    return self.named(spec, Some(folder));
                }
                found
            }
        };
        let progress = self.console.data_progress();
        let settings = self.settings();
        let wanted = PhotoPart { name: part, class_names: &self.model.trained.card.class_names };
        let seed = self.origin.map_or(1, |origin| origin.seed);
        let load = || -> std::result::Result<Arc<dyn Dataset>, DataError> {
            let targets = self.model.info().targets;
            Ok(match targets.are_of_pixels() {
                true => Arc::new(photos::masks_part(folder, wanted, &settings.for_masks(seed), &progress)?),
                false if self.has_table(spec) => {
                    let options = settings.for_folder(seed);
                    Arc::new(photos::labels_part(folder, (wanted, targets), &options, &progress)?)
                }
                false => {
                    Arc::new(photos::folder_part(folder, wanted, &settings.for_folder(seed), &progress)?)
                }
            })
        };
        let data = load().map_err(failure)?;
        Ok((part.map_or_else(|| "all images".into(), |part| format!("the part {part}")), data))
    }

    /// Whether a table gives what is true of the photographs.
    fn has_table(&self, spec: &DatasetSpec) -> bool {
        spec.name() == "labels" || !self.model.info().targets.are_classes()
    }

    /// Photographs as the model takes them.
    fn settings(&self) -> PhotoSettings {
        let (info, usual) = (self.model.info(), PhotoSettings::default());
        PhotoSettings {
            size: Some([info.height, info.width]),
            channels: info.channels,
            crop_fraction: Some(self.model.preparation().crop_fraction),
            validation_share: self.origin.map_or(usual.validation_share, |origin| origin.validation_share),
            normalisation: Normalisation::Given { mean: info.mean.clone(), std: info.std.clone() },
            augmentation: None,
            follow_links: self.args.using.follow_links,
            skip_broken: self.args.skip_broken,
            colours: self.args.mask_colours.clone(),
            // Each image is seen once.
            cache_bytes: 0,
        }
    }
}

/// Fails unless the model can be judged on this data.
fn check(model: &InUse, data: &dyn Dataset) -> Result<()> {
    let (card, info) = (&model.trained.card, data.info());
    model.trained.spec.check(info).map_err(|error| Failure::Usage(error.to_string()))?;
    let refused = |of_model: String, of_data: String| {
        Err(Failure::Usage(format!("the model has {of_model}, {} has {of_data}", info.name)))
    };
    if card.data.classes != info.classes {
        return refused(format!("{} classes", card.data.classes), info.classes.to_string());
    }
    let (own, other) = (&card.class_names[..], data.class_names());
    let differ = own.iter().zip(other).find(|(own, other)| own != other);
    match differ {
        Some((own, other)) => refused(format!("the class {}", escaped(own)), escaped(other).to_string()),
        None => Ok(()),
    }
}

/// A data set that is normalised as the model's was.
struct Normalised {
    data: Arc<dyn Dataset>,
    info: DatasetInfo,
}

impl Dataset for Normalised {
    fn info(&self) -> &DatasetInfo {
        &self.info
    }

    fn len(&self) -> usize {
        self.data.len()
    }

    fn class_names(&self) -> &[String] {
        self.data.class_names()
    }

    fn file(&self, index: usize) -> Option<PathBuf> {
        self.data.file(index)
    }

    fn skipped(&self) -> &[(PathBuf, String)] {
        self.data.skipped()
    }

    fn is_in_memory(&self) -> bool {
        self.data.is_in_memory()
    }

    fn sample(
        &self,
        index: usize,
        seed: Option<u64>,
    ) -> std::result::Result<Sample<'_>, Box<dyn std::error::Error + Send + Sync>> {
        self.data.sample(index, seed)
    }
}
