//! CamVid: street scenes seen from a car, with a class for each pixel; read from folders of PNG files.
//!
//! ```text
//! train/NAME.png   trainannot/NAME.png     367 images and their classes
//! val/NAME.png     valannot/NAME.png       101
//! test/NAME.png    testannot/NAME.png      233
//! ```
//! This is the form with 11 classes that came with SegNet; images may have any size, all of them the same.
//!
//! G. J. Brostow, J. Fauqueur, R. Cipolla, "Semantic object classes in video: a high-definition ground truth
//! database", 2009. V. Badrinarayanan, A. Kendall, R. Cipolla, "SegNet: a deep convolutional encoder-decoder
//! architecture for image segmentation", 2017.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use rayon::prelude::*;

use super::moments::Moments;
use super::png_file::{self, Content};
use super::progress::report_images;
use super::sample::planes;
use super::threads::threads;
use super::{
    Augmentation, DataError, DatasetInfo, DatasetSpec, InMemory, Progress, Targets, TrainTest, check_labels,
};

/// The classes; a label is a place in this list.
pub const CLASSES: [&str; 11] = [
    "Sky",
    "Building",
    "Pole",
    "Road",
    "Pavement",
    "Tree",
    "SignSymbol",
    "Fence",
    "Car",
    "Pedestrian",
    "Bicyclist",
];
/// The label of pixels without a class.
pub const VOID: u8 = 11;
/// Sets of more bytes are refused, images and labels together.
pub const MAX_DATA_BYTES: u64 = 4 << 30;

/// Height and width of the images, as they are distributed for segmentation by SegNet's authors.
const USUAL_SIZE: [usize; 2] = [360, 480];

const NAME: &str = "camvid";
const STAGE: &str = "loading camvid";
const CHANNELS: usize = 3;
/// Images decoded between two reports of progress.
const IMAGES_PER_REPORT: usize = 16;

/// CamVid in its three parts; all have the same [`DatasetInfo`].
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Parts {
    /// What a model learns from.
    pub train: InMemory,
    /// What settings are chosen on.
    pub val: InMemory,
    /// What a model is judged on.
    pub test: InMemory,
}

/// Whether the folders that [`load`] reads lie in `folder`; they are not opened.
pub fn is_present(folder: &Path) -> bool {
    ["train", "trainannot", "test", "testannot"].iter().all(|name| folder.join(name).is_dir())
}

/// Loads the training and the test set. Mean and standard deviation are those of the training set's pixels.
///
/// The work is spread over the current rayon pool.
///
/// # Errors
/// [`DataError::Missing`] if a folder is not there or has no PNG file, or an image has no annotation or an annotation no
/// image; [`DataError::Malformed`] or [`DataError::Io`] if a file cannot be read, is no 8-bit RGB image or no annotation
/// (8-bit grey, or palette indices), or has not the size of the first image, or no pixel of a part has a label;
/// [`DataError::LabelRange`] for a label that is neither a class nor [`VOID`]; [`DataError::Inconsistent`] beyond
/// [`MAX_DATA_BYTES`]; [`DataError::TooLarge`] if it does not fit into memory; [`DataError::Cancelled`] if `progress` says so.
pub fn load(folder: &Path, progress: &Progress<'_>) -> Result<TrainTest, DataError> {
    let [train, test] = load_named(folder, ["train", "test"], progress)?;
    Ok(TrainTest::new(train, test))
}

/// The data set by name.
pub(super) fn spec() -> DatasetSpec {
    DatasetSpec::of_folder(
        "camvid",
        "Street scenes with a class for each pixel (Brostow et al.), as PNG files; not downloaded",
        load,
    )
    .with_info_of_any_size(info(USUAL_SIZE))
    .with_model("segnet")
    .with_augmentation(Augmentation { flip: true, crop: Some([96, 128]), padding: 0 })
    .with_files(
        is_present,
        "CamVid is not there: name the folder that holds train, trainannot, test and testannot with --data-dir \
         (docs/sync-batch-norm.md)",
    )
}

/// As [`load`], with the validation set.
///
/// # Errors
/// As [`load`].
pub fn load_parts(folder: &Path, progress: &Progress<'_>) -> Result<Parts, DataError> {
    let [train, val, test] = load_named(folder, ["train", "val", "test"], progress)?;
    Ok(Parts { train, val, test })
}

/// The parts of these names; the first one gives size, mean and standard deviation.
fn load_named<const N: usize>(
    folder: &Path,
    names: [&str; N],
    progress: &Progress<'_>,
) -> Result<[InMemory; N], DataError> {
    threads()?;
    // Listed first, so that a missing file is reported before seconds are spent on the others.
    let pairs = names.iter().map(|name| pairs(folder, name)).collect::<Result<Vec<_>, _>>()?;
    let images: usize = pairs.iter().map(Vec::len).sum();
    let size = png_file::read(&pairs[0][0].image, Content::Rgb, None)?.size;
    let mut info = info(size);
    check_len(images, &info)?;
    let step = |done: usize| report_images(progress, STAGE, [done, images]);
    step(0)?;
    let mut done = 0;
    let mut read_part = |pairs: &Vec<Pair>| {
        let room = |each: usize| {
            convoke_memory::with_capacity(pairs.len() * each).map_err(|_| too_large(images, &info))
        };
        let (mut pixels, mut labels) = (room(info.image_len())?, room(info.label_len())?);
        for chunk in pairs.chunks(IMAGES_PER_REPORT) {
            let read: Vec<_> = chunk.par_iter().map(|pair| pair.read(&info)).collect();
            // In order, so that of several errors the first is always returned.
            for pair in read {
                let (image, classes) = pair?;
                pixels.extend(image);
                labels.extend(classes);
            }
            done += chunk.len();
            step(done)?;
        }
        Ok((pixels, labels))
    };
    let parts = pairs.iter().map(&mut read_part).collect::<Result<Vec<_>, DataError>>()?;
    for (name, (_, labels)) in names.iter().zip(&parts) {
        if labels.iter().all(|&label| label == VOID) {
            return Err(DataError::malformed(
                &folder.join(format!("{name}annot")),
                "labels",
                "a class for at least one pixel of all images",
                format!("{VOID}, which stands for no class, everywhere: no pixel has a label"),
            ));
        }
    }
    let mut moments = Moments::new(CHANNELS);
    moments.add_planes(&parts[0].0, info.height * info.width);
    (info.mean, info.std) = moments.mean_and_std();
    let sets = parts
        .into_iter()
        .map(|(pixels, labels)| InMemory::new(info.clone(), pixels, labels)?.with_class_names(&CLASSES));
    let sets = sets.collect::<Result<Vec<_>, _>>()?;
    Ok(sets.try_into().expect("one set for each name"))
}

/// Bounds the memory that a set takes.
fn check_len(images: usize, info: &DatasetInfo) -> Result<(), DataError> {
    let bytes = (images as u64).checked_mul(info.image_len().saturating_add(info.label_len()) as u64);
    match bytes.is_some_and(|bytes| bytes <= MAX_DATA_BYTES) {
        true => Ok(()),
        false => {
            let expected = format!("at most {MAX_DATA_BYTES} bytes, images and labels together");
            let found = format!("{images} images of {} x {}", info.height, info.width);
            Err(DataError::inconsistent(&info.name, "size", expected, found))
        }
    }
}

fn too_large(images: usize, info: &DatasetInfo) -> DataError {
    let image_bytes = info.image_len().saturating_add(info.label_len());
    DataError::TooLarge { dataset: info.name.clone(), images, image_bytes }
}

/// The info of a set of images of this height and width, before any pixel is read.
pub fn info([height, width]: [usize; 2]) -> DatasetInfo {
    let (shape, unscaled) = ([CHANNELS, height, width], [&[0.0; CHANNELS][..], &[1.0; CHANNELS]]);
    DatasetInfo {
        targets: Targets::Pixels { ignore: Some(VOID as i64) },
        ..DatasetInfo::of_images(NAME, shape, CLASSES.len(), unscaled)
    }
}

/// An image and its annotation.
struct Pair {
    image: PathBuf,
    annotation: PathBuf,
}

impl Pair {
    /// The pixels, C x H x W, and their classes, H x W.
    fn read(&self, info: &DatasetInfo) -> Result<(Vec<u8>, Vec<u8>), DataError> {
        let size = Some([info.height, info.width]);
        let image = png_file::read(&self.image, Content::Rgb, size)?;
        let annotation = png_file::read(&self.annotation, Content::Classes, size)?;
        check_labels(&self.annotation.display().to_string(), &annotation.bytes, 1, info)?;
        Ok((planes(&image.bytes, CHANNELS)?, annotation.bytes))
    }
}

/// The images of a part with their annotations, in the order of their names.
fn pairs(folder: &Path, part: &str) -> Result<Vec<Pair>, DataError> {
    let annotations = format!("{part}annot");
    let (images, classes) = (png_names(folder, part)?, png_names(folder, &annotations)?);
    let (image_folder, class_folder) = (folder.join(part), folder.join(annotations));
    for (names, others, folder) in [(&images, &classes, &class_folder), (&classes, &images, &image_folder)] {
        if let Some(name) = names.iter().find(|name| others.binary_search(name).is_err()) {
            let names = vec![name.to_string_lossy().into_owned()];
            return Err(DataError::Missing { folder: folder.clone(), names });
        }
    }
    let pair = |name: &OsString| Pair { image: image_folder.join(name), annotation: class_folder.join(name) };
    Ok(images.iter().map(pair).collect())
}

/// The names of the PNG files in a folder of the set, in order; there is at least one.
fn png_names(folder: &Path, part: &str) -> Result<Vec<OsString>, DataError> {
    let path = folder.join(part);
    let missing = |folder: &Path, name: &str| DataError::Missing {
        folder: folder.to_owned(),
        names: vec![name.to_owned()],
    };
    let entries = match fs::read_dir(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Err(missing(folder, part)),
        entries => entries.map_err(DataError::io(&path, "list"))?,
    };
    let mut names = Vec::new();
    for entry in entries {
        let name = entry.map_err(DataError::io(&path, "list"))?.file_name();
        if Path::new(&name).extension().is_some_and(|extension| extension.eq_ignore_ascii_case("png")) {
            names.push(name);
        }
    }
    names.sort();
    if names.is_empty() { Err(missing(&path, "*.png")) } else { Ok(names) }
}

#[cfg(test)]
mod tests;
