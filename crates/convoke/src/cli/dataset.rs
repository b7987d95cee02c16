//! Finding, downloading or generating the data set.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::nn::data::photos::{EXTENSIONS, OTHER_EXTENSIONS, PhotoAugmentation, PhotoSettings};
use crate::nn::data::{DataError, Dataset, DatasetSpec, Datasets, LoadError, LoadOptions, class_counts};
use crate::nn::objective::CrossEntropy;

use super::console::Console;
use super::failure::{Failure, Result};
use super::registry::{Data, RANDOM};
use super::run::Run;
use super::{fits, places, published, system};

/// Loads what the flags ask for, if the model can be trained on it. `processes` is how many processes load it and share the memory.
pub(crate) fn load(run: &Run, processes: usize, console: &Console) -> Result<Datasets> {
    check_names(run)?;
    check_photo_flags(run)?;
    if run.is_from_imagenet {
        published::provide(&run.model, run.source.download, console)?;
    }
    let data = match run.source.spec {
        None => {
            check_generated(run, RANDOM)?;
            generate_noise(run, console)?
        }
        Some(spec) => {
            if matches!(run.source.choice, Data::Auto) && !spec.has_files() {
                let place = places::dataset_folder(run.source.data_dir.as_deref(), "mnist");
                let place = place.map_or_else(String::new, |folder| format!(" in {}", folder.display()));
                let seed = run.seed;
                console.line(&format!("no MNIST{place}: training on digits, generated from seed {seed}"));
            } else if !spec.has_files() {
                check_generated(run, spec.name())?;
            }
            load_named(spec, run, processes, console)?
        }
    };
    fits::check(&run.model_for(data.train.as_ref()), data.train.info())?;
    Ok(data)
}

/// Fails before anything is read, generated or fetched if the run's model cannot be trained on its data.
fn check_names(run: &Run) -> Result<()> {
    let Some(spec) = run.source.spec else { return Ok(()) };
    match spec.usual() {
        // Only the files show the size of the images, so sizes are not checked here.
        Some(info) => {
            let model = run.model.predicting(info.targets, None);
            let fits = spec.has_any_size() && model.check_targets(info).is_ok();
            if fits { Ok(()) } else { fits::check(&model, info) }
        }
        None => Ok(()),
    }
}

/// Fails if the flags ask for files of a data set that has none.
fn check_generated(run: &Run, name: &str) -> Result<()> {
    if run.source.download && !run.is_from_imagenet {
        let message = format!("--download: {name} is generated; --data mnist can be downloaded");
        return Err(Failure::Usage(message));
    }
    match run.source.data_dir {
        Some(_) => Err(Failure::Usage(format!("--data-dir: {name} is generated, it has no files"))),
        None => Ok(()),
    }
}

fn load_named(spec: &DatasetSpec, run: &Run, processes: usize, console: &Console) -> Result<Datasets> {
    let progress = console.data_progress();
    let failure = |error| failure(error, spec.hint().unwrap_or_default(), BEFORE);
    let mut folder = None;
    if spec.takes_photos() && run.source.data_dir.is_none() {
        return Err(Failure::Usage(format!("--data {spec}: {}", spec.hint().unwrap_or_default())));
    }
    if spec.has_files() {
        let own = run.source.folder(spec).ok_or_else(|| {
            Failure::Usage("this system has no folder for data: name one with --data-dir".into())
        })?;
        let is_for_weights = run.is_from_imagenet && !spec.can_be_downloaded();
        if run.source.download && !is_for_weights {
            if !spec.can_be_downloaded() {
                let message =
                    format!("--download: {spec} cannot be downloaded: name its folder with --data-dir");
                return Err(Failure::Usage(message));
            }
            spec.download(&own, system::proxy(), &progress).map_err(failure)?;
        }
        folder = Some(own);
    }
    let photos = photo_settings(run, spec, processes);
    let mut options = LoadOptions::new(&progress);
    (options.folder, options.seed, options.photos) = (folder.as_deref(), run.seed, &photos);
    let data = spec.load(&options).map_err(failure)?;
    for (name, part) in [("training", &data.train), ("validation", &data.test)] {
        report_skipped(name, part.skipped(), console);
    }
    Ok(data)
}

/// How the flags ask to prepare and vary photographs.
fn photo_settings(run: &Run, spec: &DatasetSpec, processes: usize) -> PhotoSettings {
    let [channels, height, width] = run.model.input();
    // Images with a class each may have any size, so the model's is taken. Those with masks keep their own.
    let (size, augmentation) = match spec.is_of_pixels() {
        true => (None, PhotoAugmentation::for_masks()),
        false => (Some([height, width]), PhotoAugmentation::default()),
    };
    let usual =
        PhotoSettings { size, channels, augmentation: Some(augmentation), ..PhotoSettings::default() };
    run.source.photos.change(usual, run.source.augment, processes)
}

/// Fails if flags about photographs are given for other data.
fn check_photo_flags(run: &Run) -> Result<()> {
    let takes_masks = run.source.spec.is_some_and(DatasetSpec::is_of_pixels);
    match run.source.spec.is_some_and(DatasetSpec::takes_photos) {
        true if run.source.photos.mask_colours.is_some() && !takes_masks => {
            Err(Failure::Usage("--mask-colours is for photographs with masks, and there are none".into()))
        }
        true => Ok(()),
        false => run.source.photos.check_absent(run.source.augment, run.source.choice),
    }
}

/// The weight of each class with which all count alike.
pub(crate) fn balanced_weights(data: &dyn Dataset, console: &Console) -> Result<Vec<f64>> {
    let counts =
        class_counts(data, &console.data_progress()).map_err(|error| failure(error.into(), "", BEFORE))?;
    Ok(CrossEntropy::balanced_weights(&counts))
}

/// A failure with what to do about it, if a photograph could not be read.
pub(crate) fn with_remedy(spec: Option<&DatasetSpec>, failure: Failure) -> Failure {
    match (spec, failure) {
        (Some(spec), Failure::Run(text))
            if spec.takes_photos() && text.contains(&format!("data set {spec}: sample ")) =>
        {
            Failure::Run(format!("{text}\n--skip-broken leaves out photographs that cannot be decoded"))
        }
        (_, failure) => failure,
    }
}

/// The ending of a file that is an image of a kind that is not read.
fn unread_kind(file: &Path) -> Option<String> {
    let kind = file.extension()?.to_str()?.to_lowercase();
    (!EXTENSIONS.contains(&kind.as_str()) && OTHER_EXTENSIONS.contains(&kind.as_str())).then_some(kind)
}

/// Tells which photographs were left out.
pub(crate) fn report_skipped(part: &str, skipped: &[(PathBuf, String)], console: &Console) {
    const LISTED: usize = 20;
    let mut kinds: BTreeMap<String, usize> = BTreeMap::new();
    let mut listed = Vec::new();
    for (file, reason) in skipped {
        match unread_kind(file) {
            Some(kind) => *kinds.entry(kind).or_default() += 1,
            None => listed.push(reason),
        }
    }
    if let Some(first) = kinds.keys().next() {
        let counts: Vec<String> = kinds.iter().map(|(kind, count)| format!("{count} .{kind}")).collect();
        console.line(&format!(
            "ignored: {} of {part}, which are not read; ImageMagick converts them: `magick mogrify -format jpg *.{first}`",
            counts.join(", ")
        ));
    }
    if listed.is_empty() {
        return;
    }
    console.line(&format!("warning: left out of {part}:"));
    for reason in listed.iter().take(LISTED) {
        console.line(&format!("  {reason}"));
    }
    if listed.len() > LISTED {
        console.line(&format!("  and {} more", listed.len() - LISTED));
    }
}

/// Four batches of noise to train, and one to test.
fn generate_noise(run: &Run, console: &Console) -> Result<Datasets> {
    let (model, batch) = (&run.model, run.batch.images);
    let ([channels, height, width], classes) = (model.input(), model.classes());
    console.line(&format!(
        "random: noise of {channels} x {height} x {width} in {classes} classes, as {model} takes it; there is nothing to \
         learn in it, only speed and memory mean something"
    ));
    let set = model.noise(run.seed, [batch.saturating_mul(4), batch], &console.data_progress());
    set.map(Datasets::from).map_err(|error| failure(error.into(), "", BEFORE))
}

/// What is said of a run that Ctrl-C ends while the data is loaded.
pub(crate) const BEFORE: &str = "interrupted before the first step";

/// How a folder of photographs may look.
const EXAMPLE: &str = "A folder for each class holds its photographs:\n\n    \
    photos/cat/1.jpg\n    photos/cat/2.jpg\n    photos/dog/1.jpg\n\n\
    With folders train and val in photos, and the classes in each, you choose what training is validated on. For a class of each pixel, \
    photos/images/1.jpg has its mask in photos/masks/1.png. For any number of labels, or for numbers to predict, photos/labels.csv names \
    an image in its first column and has a column for each label (0 or 1) or number";

/// `hint` says how to get the data; it is shown if the data is missing. `interrupted` is what is said after Ctrl-C.
pub(crate) fn failure(error: LoadError, hint: &str, interrupted: &str) -> Failure {
    match error.downcast_ref() {
        Some(DataError::Cancelled { .. }) => Failure::Interrupted(interrupted.into()),
        Some(DataError::Missing { .. }) => Failure::Run(format!("{error}\n{hint}")),
        Some(DataError::Malformed { field: "layout", .. }) => Failure::Run(format!("{error}\n{EXAMPLE}")),
        Some(DataError::Malformed { field: "class", .. }) => Failure::Run(format!(
            "{error}\nEach class needs a folder of the same name in train, with images to learn from"
        )),
        Some(DataError::Malformed { field: "link", .. }) => {
            Failure::Run(format!("{error}\n--follow-links follows links that lead out of the folder"))
        }
        _ => Failure::Run(error.to_string()),
    }
}
