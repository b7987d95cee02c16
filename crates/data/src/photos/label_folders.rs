//! Photographs whose labels are the folders they lie in.
//!
//! ```text
//! DIR/labels/LABEL/IMAGE         DIR/images/IMAGE
//! DIR/train/labels/LABEL/IMAGE   DIR/val/labels/LABEL/IMAGE   DIR/test/labels/LABEL/IMAGE
//! ```
//! An image with several labels lies in the folder of each, as a copy or a link, under one name. What lies in `images` alone has none of
//! the labels. Labels are sorted by name, and images may lie in folders within a label's.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::{self, File as OpenFile};
use std::io::{self, BufReader, Read};
use std::path::{Path, PathBuf};

use super::super::{DataError, MAX_CLASSES, Progress, Targets};
use super::folder::{
    File, FileTarget, Folder, FolderOptions, checked, folders_with_images, known_folders, split,
};
use super::labels::PartFiles;
use super::layout::{Layout, PhotoPart, part_folder};
use super::listing::{EXTENSIONS, Lister, has_extension, joined};
use super::measure::in_parallel;
use super::split::train_and_validation;

const LABELS: &str = "labels";
const IMAGES: &str = "images";

/// Whether a folder has folders of labels, and no folder beside them that could be a class's.
pub(super) fn are_at(folder: &Path) -> bool {
    let names = |folder: &Path| {
        let entries = fs::read_dir(folder).into_iter().flatten().flatten();
        entries.map(|entry| entry.file_name()).filter(|name| !name.as_encoded_bytes().starts_with(b"."))
    };
    let labels = folder.join(LABELS);
    let has_image =
        |label: &Path| label.is_dir() && names(label).any(|name| has_extension(&name, &EXTENSIONS));
    let is_other = |name: &OsString| name != LABELS && name != IMAGES && folder.join(name).is_dir();
    names(&labels).any(|label| has_image(&labels.join(label))) && !names(folder).any(|name| is_other(&name))
}

/// The names of the labels, and the training and the validation part.
pub(super) fn parts(
    dir: &Path,
    options: &FolderOptions,
    progress: &Progress<'_>,
) -> Result<(Vec<String>, [PartFiles; 2]), DataError> {
    let mut lister = Lister::new(dir, options.follow_links, progress)?;
    let Layout { train, validation } = Layout::find(&lister, dir, |name| name == LABELS)?;
    let names = names(&lister, dir, &train)?;
    let train = files(&mut lister, (dir, &train), &names, progress)?;
    let validation =
        validation.map(|below| files(&mut lister, (dir, &below), &names, progress)).transpose()?;
    let mut parts = train_and_validation(
        train,
        validation,
        |files| checked(dir, options, files, progress),
        |files| split(dir, &options.split(), files),
    )?;
    parts[0].1.extend(lister.finish()?);
    Ok((names, parts))
}

/// The images of one part, or of the folder itself. The labels have to be among those of the training set.
pub(super) fn part(
    dir: &Path,
    (PhotoPart { name, class_names }, targets): (PhotoPart<'_>, Targets),
    options: &FolderOptions,
    progress: &Progress<'_>,
) -> Result<PartFiles, DataError> {
    if !targets.are_labels() {
        let found = "folders of labels";
        return Err(DataError::malformed(
            dir,
            "layout",
            "a table of what the model predicts, labels.csv",
            found,
        ));
    }
    let mut lister = Lister::new(dir, options.follow_links, progress)?;
    let below = part_folder(&lister, dir, name)?;
    let files = files(&mut lister, (dir, &below), class_names, progress)?;
    let (files, mut skipped) = checked(dir, options, files, progress)?;
    skipped.extend(lister.finish()?);
    Ok((files, skipped))
}

/// The names of the labels: those of the folders that have images. The part is `below` the set's folder.
fn names(lister: &Lister<'_>, dir: &Path, below: &Path) -> Result<Vec<String>, DataError> {
    let labels = below.join(LABELS);
    let names = folders_with_images(lister, dir, (&labels, "label name"))?;
    match (1..=MAX_CLASSES).contains(&names.len()) {
        true => Ok(names),
        false => {
            let expected = format!("1 to {MAX_CLASSES} folders of labels with images");
            Err(DataError::malformed(&dir.join(labels), "labels", expected, names.len().to_string()))
        }
    }
}

/// The images of a part `below` the set's folder, each with its labels, in the order of their paths.
fn files(
    lister: &mut Lister<'_>,
    (dir, below): (&Path, &Path),
    names: &[String],
    progress: &Progress<'_>,
) -> Result<Vec<File>, DataError> {
    let mut found: BTreeMap<PathBuf, Found> = BTreeMap::new();
    let labels = below.join(LABELS);
    for Folder { path, images, place } in known_folders(lister, dir, &labels, ("label", names))? {
        add(&mut found, images, &path, Some(place));
    }
    let folder = below.join(IMAGES);
    if joined(dir, &folder).is_dir() {
        add(&mut found, lister.files(&folder, &EXTENSIONS)?, &folder, None);
    }
    check_copies(dir, &found, progress)?;
    let file = |Found { mut paths, labels }: Found| {
        let mut values = vec![0.0; names.len()];
        labels.into_iter().for_each(|label| values[label] = 1.0);
        // The last is that in `images`, whose path stays when labels come and go.
        let path = paths.pop().expect("an image has a path");
        File { path, target: FileTarget::Values(values.into()) }
    };
    let mut files: Vec<File> = found.into_values().map(file).collect();
    files.sort_by(|a, b| a.path.cmp(&b.path));
    match files.is_empty() {
        true => Err(DataError::malformed(&dir.join(labels), "contents", "images of the part", "none")),
        false => Ok(files),
    }
}

/// Where an image lies, and what labels it has.
#[derive(Default)]
struct Found {
    paths: Vec<PathBuf>,
    labels: Vec<usize>,
}

/// Adds the images of a folder, by their paths below it.
fn add(found: &mut BTreeMap<PathBuf, Found>, images: Vec<PathBuf>, folder: &Path, label: Option<usize>) {
    for path in images {
        let below = path.strip_prefix(folder).unwrap_or(&path).to_owned();
        let image = found.entry(below).or_default();
        image.paths.push(path);
        image.labels.extend(label);
    }
}

/// Fails if files of one name are different images.
fn check_copies(
    dir: &Path,
    found: &BTreeMap<PathBuf, Found>,
    progress: &Progress<'_>,
) -> Result<(), DataError> {
    let pairs = found.values().flat_map(|image| image.paths.windows(2));
    let pairs: Vec<[&Path; 2]> = pairs.map(|pair| [&*pair[0], &*pair[1]]).collect();
    let is_equal = |index: usize| {
        let [one, other] = pairs[index].map(|path| dir.join(path));
        are_equal(&one, &other).map_err(DataError::io(&other, "compare"))
    };
    let equal = in_parallel("comparing images", pairs.len(), is_equal, progress)?;
    for ([one, other], is_equal) in pairs.into_iter().zip(equal) {
        if !is_equal? {
            let expected = format!(
                "the image that {} is, as one name stands for one image: give different ones different names",
                one.display()
            );
            return Err(DataError::malformed(&dir.join(other), "contents", expected, "another one"));
        }
    }
    Ok(())
}

/// Whether two files have the same bytes.
fn are_equal(one: &Path, other: &Path) -> io::Result<bool> {
    if fs::canonicalize(one)? == fs::canonicalize(other)? {
        return Ok(true);
    }
    if fs::metadata(one)?.len() != fs::metadata(other)?.len() {
        return Ok(false);
    }
    let [one, other] =
        [OpenFile::open(one)?, OpenFile::open(other)?].map(|file| BufReader::new(file).bytes());
    for (one, other) in one.zip(other) {
        if one? != other? {
            return Ok(false);
        }
    }
    Ok(true)
}

#[cfg(test)]
mod tests;
