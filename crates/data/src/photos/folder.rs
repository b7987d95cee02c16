//! Photographs whose class is the folder they lie in.
//!
//! ```text
//! DIR/train/CLASS/IMAGE   DIR/val/CLASS/IMAGE   DIR/test/CLASS/IMAGE
//! DIR/CLASS/IMAGE
//! ```
//! `val` may also be called `valid` or `validation`. Without it, training is validated on `test`, and without that, or in the second
//! form, on a share of each class. Classes are sorted by name. Images may lie in folders within a class's. What is hidden, and what is
//! no image by its name, is left out.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::super::dataset::{SampleResult, TargetResult};
use super::super::threads::threads;
use super::super::{
    DataError, Dataset, DatasetInfo, MAX_CLASSES, PhotoOrigin, Pixels, Progress, Sample, Target, TrainTest,
    ValueScale,
};
use super::augmentation::PhotoAugmentation;
use super::cache::{Budget, Cache};
use super::geometry::Preparation;
use super::labels::labels_part;
use super::layout::{Layout, PhotoPart, part_folder};
use super::listing::{EXTENSIONS, Lister, absolute, joined};
use super::measure::{MeanAndStd, Normalisation, Skipped, sound};
use super::photo::Photo;
use super::split::{Split, train_and_validation};
use super::view;

const NAME: &str = "folder";
const LAYOUTS: &str = "train/CLASS/IMAGE and val/CLASS/IMAGE, or CLASS/IMAGE, with a folder for each class and images that are \
                       JPEG, PNG, GIF, TIFF, WebP or BMP files";

/// How a folder of photographs is loaded.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct FolderOptions {
    /// What images are brought to.
    pub preparation: Preparation,
    /// The share of each class that is for validation, if the folder has no such part: above 0 and below 1. Of two images or more,
    /// at least one is.
    pub validation_share: f64,
    /// The seed by which these are chosen.
    pub seed: u64,
    /// By what pixels are normalised.
    pub normalisation: Normalisation,
    /// How training varies the images.
    pub augmentation: PhotoAugmentation,
    /// Whether links may lead out of the folder.
    pub follow_links: bool,
    /// Whether images that cannot be decoded are left out. Each image is decoded once for that.
    pub skip_broken: bool,
    /// Bytes of memory that decoded images may stay in, so that later epochs need not decode them; 0 keeps none. Training and
    /// validation share them.
    pub cache_bytes: usize,
}

impl Default for FolderOptions {
    fn default() -> FolderOptions {
        FolderOptions {
            preparation: Preparation::default(),
            validation_share: 0.2,
            seed: 1,
            normalisation: Normalisation::default(),
            augmentation: PhotoAugmentation::default(),
            follow_links: false,
            skip_broken: false,
            cache_bytes: 0,
        }
    }
}

impl FolderOptions {
    pub(super) fn split(&self) -> Split {
        Split { share: self.validation_share, seed: self.seed }
    }

    /// Checks all settings.
    ///
    /// # Errors
    /// [`DataError::Inconsistent`] naming the setting.
    pub fn check(&self) -> Result<(), DataError> {
        self.preparation.check()?;
        self.augmentation.check()?;
        self.normalisation.check(self.preparation.channels)?;
        self.split().check()
    }
}

/// Photographs with a class each, or with labels or numbers, decoded when they are asked for.
#[derive(Clone, Debug)]
pub struct PhotoFolder {
    info: DatasetInfo,
    dir: Arc<Path>,
    options: FolderOptions,
    class_names: Arc<[String]>,
    files: Arc<[File]>,
    skipped: Skipped,
    scale: Option<ValueScale>,
    cache: Arc<Cache<Photo>>,
}

/// What the parts of a set share.
pub(super) struct Set {
    info: DatasetInfo,
    dir: Arc<Path>,
    options: FolderOptions,
    class_names: Arc<[String]>,
    budget: Budget,
    /// The scale of numbers to predict.
    pub(super) scale: Option<ValueScale>,
}

impl Set {
    pub(super) fn new(dir: &Path, options: &FolderOptions, class_names: &[String], info: DatasetInfo) -> Set {
        let budget = Budget::new(options.cache_bytes);
        let (dir, options, class_names) = (dir.into(), options.clone(), class_names.into());
        Set { info, dir, options, class_names, budget, scale: None }
    }

    /// A part of these files, from which others were left out.
    pub(super) fn part(&self, files: Vec<File>, skipped: Skipped) -> Result<PhotoFolder, DataError> {
        Ok(PhotoFolder {
            info: self.info.clone(),
            dir: self.dir.clone(),
            options: self.options.clone(),
            class_names: self.class_names.clone(),
            cache: Arc::new(Cache::new(files.len(), &self.budget)?),
            files: files.into(),
            skipped,
            scale: self.scale.clone(),
        })
    }
}

/// An image: its path below the set's folder, and what is to be learnt about it.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct File {
    pub(super) path: PathBuf,
    pub(super) target: FileTarget,
}

/// What is to be learnt about an image.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum FileTarget {
    Class(usize),
    /// Numbers, or 0 or 1 for each label.
    Values(Box<[f32]>),
}

impl File {
    fn target(&self) -> Target<'_> {
        match &self.target {
            FileTarget::Class(class) => Target::Class(*class as i64),
            FileTarget::Values(values) => Target::Values(values[..].into()),
        }
    }

    /// The class of an image that has one.
    pub(super) fn class(&self) -> Option<usize> {
        if let FileTarget::Class(class) = self.target { Some(class) } else { None }
    }
}

/// Loads the training and the validation part of a folder. No image is opened, unless `options` ask for it.
///
/// # Errors
/// [`DataError::Io`] if a folder cannot be listed; [`DataError::Malformed`] naming the folder or link if the folder has none of the
/// layouts, a class has no image or a name that is not UTF-8, the validation part has a class that the training part lacks, or a
/// link leads out of the folder or to a folder that was listed already; [`DataError::Inconsistent`] for a setting that cannot be;
/// [`DataError::Cancelled`] if `progress` says so. If images are measured, also the errors of [`Photo::open`].
pub fn folder(
    dir: &Path,
    options: &FolderOptions,
    progress: &Progress<'_>,
) -> Result<TrainTest<PhotoFolder>, DataError> {
    threads()?;
    options.check()?;
    let mut lister = Lister::new(dir, options.follow_links, progress)?;
    let Layout { train, validation } = Layout::find(&lister, dir, |_| true)?;
    let class_names = &classes(&mut lister, dir, &train)?;
    let train = files(&mut lister, dir, &train, class_names)?;
    let validation = validation.map(|below| files(&mut lister, dir, &below, class_names)).transpose()?;
    let unread = lister.finish()?;
    let [(train, train_skipped), (validation, validation_skipped)] = train_and_validation(
        train,
        validation,
        |files| checked(dir, options, files, progress),
        |files| split(dir, &options.split(), files),
    )?;
    let preparation = &options.preparation;
    let image = |index: usize| open(dir, &train[index])?.interleaved(preparation);
    let numbers = options.normalisation.of_training((train.len(), preparation.channels), image, progress)?;
    let set = Set::new(dir, options, class_names, info(options, class_names.len(), &numbers));
    let train = set.part(train, [unread, train_skipped].concat())?;
    Ok(TrainTest::new(train, set.part(validation, validation_skipped)?))
}

/// Loads one part for evaluation, which may lack some of the classes. Without a name it is the folders of classes in `dir` itself.
///
/// # Errors
/// As [`folder`]; [`DataError::Missing`] if there is no such part; [`DataError::Inconsistent`] if `options` ask for a normalisation
/// that only the training part could give.
pub fn folder_part(
    dir: &Path,
    PhotoPart { name, class_names }: PhotoPart<'_>,
    options: &FolderOptions,
    progress: &Progress<'_>,
) -> Result<PhotoFolder, DataError> {
    threads()?;
    options.check()?;
    let numbers = options.normalisation.of_part(options.preparation.channels)?;
    let mut lister = Lister::new(dir, options.follow_links, progress)?;
    let below = part_folder(&lister, dir, name)?;
    let files = files(&mut lister, dir, &below, class_names)?;
    let unread = lister.finish()?;
    let (files, skipped) = checked(dir, options, files, progress)?;
    let set = Set::new(dir, options, class_names, info(options, class_names.len(), &numbers));
    set.part(files, [unread, skipped].concat())
}

impl PhotoFolder {
    /// Another part of the same folder, such as `test`, prepared and normalised as this one.
    ///
    /// # Errors
    /// As [`folder_part`].
    pub fn part(&self, name: &str, progress: &Progress<'_>) -> Result<PhotoFolder, DataError> {
        let normalisation = Normalisation::Given { mean: self.info.mean.clone(), std: self.info.std.clone() };
        let options = FolderOptions { normalisation, ..self.options.clone() };
        let part = PhotoPart { name: Some(name), class_names: &self.class_names };
        match self.info.name == NAME {
            true => folder_part(&self.dir, part, &options, progress),
            false => labels_part(&self.dir, (part, self.info.targets), &options, progress),
        }
    }

    /// The names of the classes; a label is a place in this list.
    pub fn class_names(&self) -> &[String] {
        &self.class_names
    }

    /// The path of an image below the data set's folder.
    ///
    /// # Panics
    /// If `index` is not below [`Dataset::len`].
    pub fn path(&self, index: usize) -> &Path {
        &self.files[index].path
    }

    /// The class of an image, if images have one.
    ///
    /// # Panics
    /// If `index` is not below [`Dataset::len`].
    pub fn label(&self, index: usize) -> Option<usize> {
        self.files[index].class()
    }

    /// How many images each class has.
    pub fn class_counts(&self) -> Vec<usize> {
        let mut counts = vec![0; self.class_names.len()];
        self.files.iter().filter_map(File::class).for_each(|class| counts[class] += 1);
        counts
    }
}

impl Dataset for PhotoFolder {
    fn info(&self) -> &DatasetInfo {
        &self.info
    }

    fn len(&self) -> usize {
        self.files.len()
    }

    fn class_names(&self) -> &[String] {
        &self.class_names
    }

    fn photos(&self) -> Option<PhotoOrigin> {
        Some(PhotoOrigin {
            folder: absolute(&self.dir),
            crop_fraction: self.options.preparation.crop_fraction,
            validation_share: self.options.validation_share,
            seed: self.options.seed,
        })
    }

    fn file(&self, index: usize) -> Option<PathBuf> {
        (index < self.len()).then(|| self.dir.join(self.path(index)))
    }

    fn skipped(&self) -> &[(PathBuf, String)] {
        &self.skipped
    }

    fn variation(&self) -> Option<String> {
        Some(format!("{:?}, {:?}", self.options.preparation, self.options.augmentation))
    }

    fn resized(&self, size: [usize; 2]) -> Option<Arc<dyn Dataset>> {
        let mut resized = self.clone();
        resized.options.preparation.size = size;
        [resized.info.height, resized.info.width] = size;
        // Decoded photographs are kept as they are, for all sizes.
        Some(Arc::new(resized))
    }

    fn target(&self, index: usize) -> TargetResult<'_> {
        Ok(self.files[index].target())
    }

    fn value_scale(&self) -> Option<ValueScale> {
        self.scale.clone()
    }

    fn sample(&self, index: usize, seed: Option<u64>) -> SampleResult<'_> {
        let preparation = &self.options.preparation;
        let photo = self.cache.get(index, Photo::bytes, || open(&self.dir, &self.files[index]))?;
        let drawn = self.options.augmentation.drawn(seed, photo.size(), preparation.size);
        let image = view::image(&photo, &drawn, preparation, &self.info.mean)?;
        Ok(Sample { image: Pixels::Interleaved(image.into()), target: self.files[index].target() })
    }
}

/// Opens an image of the set in this folder; errors name its path below the folder.
pub(super) fn open(dir: &Path, file: &File) -> Result<Photo, DataError> {
    Photo::open_as(&dir.join(&file.path), &file.path)
}

fn info(options: &FolderOptions, classes: usize, numbers: &MeanAndStd) -> DatasetInfo {
    info_of(NAME, options, classes, numbers)
}

/// The info of images that are prepared by these options, with a class each.
pub(super) fn info_of(
    name: &str,
    options: &FolderOptions,
    classes: usize,
    (mean, std): &MeanAndStd,
) -> DatasetInfo {
    let Preparation { size: [height, width], channels, .. } = options.preparation;
    DatasetInfo::of_images(name, [channels, height, width], classes, [mean, std])
}

/// The names of the classes: those of the folders in the training part that have images. The part is `below` the set's folder.
fn classes(lister: &mut Lister<'_>, dir: &Path, below: &Path) -> Result<Vec<String>, DataError> {
    let folder = joined(dir, below);
    let names = folders_with_images(lister, dir, (below, "class name"))?;
    let entries = lister.entries(below)?;
    let found = match names.len() {
        2..=MAX_CLASSES => return Ok(names),
        0 if entries.is_empty() => "an empty folder".to_owned(),
        0 => match entries.iter().filter(|entry| !entry.is_folder).count() {
            0 => "folders without images".to_owned(),
            1 => "one file and no folder of a class with images".to_owned(),
            files => format!("{files} files and no folder of a class with images"),
        },
        1 => format!("images in one folder of a class, {}", names[0]),
        count => {
            let expected = format!("2 to {MAX_CLASSES} folders of classes");
            return Err(DataError::malformed(&folder, "classes", expected, count.to_string()));
        }
    };
    Err(DataError::malformed(&folder, "layout", format!("{LAYOUTS}; at least two classes"), found))
}

/// The names of the folders that have images, in a folder `below` the set's. `field` is what errors call a name.
pub(super) fn folders_with_images(
    lister: &Lister<'_>,
    dir: &Path,
    (below, field): (&Path, &'static str),
) -> Result<Vec<String>, DataError> {
    let mut names = Vec::new();
    for name in lister.folders(below)? {
        let utf8 = |name| DataError::malformed(&joined(dir, below).join(name), field, "UTF-8", "other bytes");
        let name = name.into_string().map_err(utf8)?;
        if lister.has_files(&below.join(&name), &EXTENSIONS)? {
            names.push(name);
        }
    }
    Ok(names)
}

/// A folder of a class or label, with its images.
pub(super) struct Folder {
    pub(super) path: PathBuf,
    pub(super) images: Vec<PathBuf>,
    /// The place of its name among the names that are known.
    pub(super) place: usize,
}

/// The folders in a folder `below` the set's whose names are those of classes or labels, which `what` is one of. Those without images are
/// left out; a name that is not known is an error.
pub(super) fn known_folders(
    lister: &mut Lister<'_>,
    dir: &Path,
    below: &Path,
    (what, names): (&'static str, &[String]),
) -> Result<Vec<Folder>, DataError> {
    let mut folders = Vec::new();
    for name in lister.folders(below)? {
        let path = below.join(&name);
        let images = lister.files(&path, &EXTENSIONS)?;
        if images.is_empty() {
            lister.leave_out(&path, &format!("a {what} without images"));
            continue;
        }
        let Some(place) = names.iter().position(|known| name == known.as_str()) else {
            let expected = format!("a {what} of the training part");
            return Err(DataError::malformed(&dir.join(path), what, expected, "one that it lacks"));
        };
        folders.push(Folder { path, images, place });
    }
    Ok(folders)
}

/// The images of a part, by class.
fn files(
    lister: &mut Lister<'_>,
    dir: &Path,
    below: &Path,
    class_names: &[String],
) -> Result<Vec<File>, DataError> {
    let mut files = Vec::new();
    for Folder { images, place, .. } in known_folders(lister, dir, below, ("class", class_names))? {
        files.extend(images.into_iter().map(|path| File { path, target: FileTarget::Class(place) }));
    }
    match files.is_empty() {
        true => Err(DataError::malformed(&joined(dir, below), "layout", LAYOUTS, "no folder of a class")),
        false => Ok(files),
    }
}

fn no_images(folder: &Path, found: &str) -> DataError {
    let expected = format!("images, files that end in {}", EXTENSIONS.join(", "));
    DataError::malformed(folder, "contents", expected, found)
}

/// The files that can be decoded, if the others are to be left out; else all.
pub(super) fn checked(
    dir: &Path,
    options: &FolderOptions,
    files: Vec<File>,
    progress: &Progress<'_>,
) -> Result<(Vec<File>, Skipped), DataError> {
    if !options.skip_broken {
        return Ok((files, Skipped::new()));
    }
    // A file of each class.
    let mut had_images = BTreeMap::new();
    for file in &files {
        had_images.entry(file.class()).or_insert_with(|| file.path.clone());
    }
    let path = |file: &File| file.path.clone();
    let (files, skipped) = sound(files, path, |file| open(dir, file).map(|_| ()), progress)?;
    for file in &files {
        had_images.remove(&file.class());
    }
    match had_images.into_values().next() {
        Some(broken) => {
            let folder = dir.join(broken);
            let folder = folder.parent().unwrap_or(dir);
            Err(no_images(folder, "only such that cannot be decoded"))
        }
        None => Ok((files, skipped)),
    }
}

/// Divides files, which are sorted by class if they have one, into those for training and those for validation.
pub(super) fn split(
    dir: &Path,
    split: &Split,
    files: Vec<File>,
) -> Result<(Vec<File>, Vec<File>), DataError> {
    let mut is_validation = Vec::with_capacity(files.len());
    for class in files.chunk_by(|a, b| a.class() == b.class()) {
        let paths: Vec<&Path> = class.iter().map(|file| file.path.as_path()).collect();
        is_validation.extend(split.of(&paths));
    }
    Split::divided(files, &is_validation).ok_or_else(|| {
        let expected = "a class with two images or more, as one of them is for validation";
        DataError::malformed(dir, "contents", expected, "one image a class")
    })
}

#[cfg(test)]
mod tests;
