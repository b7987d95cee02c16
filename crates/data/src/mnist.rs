//! MNIST: 70,000 handwritten digits of 28x28 pixels, loaded from its four IDX files, which can be downloaded.
//!
//! Y. LeCun, L. Bottou, Y. Bengio, P. Haffner, "Gradient-based learning applied to document recognition",
//! 1998.

use std::path::{Path, PathBuf};

#[cfg(feature = "download")]
use super::download::{DownloadOptions, RemoteFile, fetch_files, sha256};
#[cfg(feature = "download")]
use super::idx;
use super::idx::IdxReader;
use super::progress::report;
use super::{
    DataError, DatasetInfo, DatasetSpec, InMemory, Progress, ProgressEvent, ProgressUnit, TrainTest,
    check_labels,
};

/// Public copies of the files; the last one is their origin and often out of service.
pub const MIRRORS: [&str; 3] = [
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
    "http://yann.lecun.com/exdb/mnist/",
];

/// Mean of the training pixels scaled to 0..1, the customary constant.
pub const MEAN: f32 = 0.1307;
/// Standard deviation of the training pixels scaled to 0..1, the customary constant.
pub const STD: f32 = 0.3081;

const SIDE: usize = 28;
const CLASSES: usize = 10;
/// A part of more images is refused, so that a small compressed file cannot fill the memory: this many take 822 MB.
pub const MAX_IMAGES: usize = 1 << 20;

/// One of the four files, in the form that is downloaded and in the form that is read.
struct MnistFile<'a> {
    /// The name without `-idx3-ubyte` and the like.
    stem: &'a str,
    /// The `idx3` or `idx1` of the name.
    kind: &'a str,
    /// The compressed file on the mirrors.
    #[cfg(feature = "download")]
    remote: RemoteFile<'a>,
    /// SHA-256 of what the compressed file holds; a copy compressed by another program is right too.
    #[cfg(feature = "download")]
    contents_sha256: &'a str,
}

// Sizes and checksums of the compressed files as published with several libraries (TensorFlow Datasets among
// them); those of the contents were computed from a copy whose MD5 sums agree with torchvision's.
const TRAIN_IMAGES: MnistFile<'static> = MnistFile {
    stem: "train-images",
    kind: "idx3",
    #[cfg(feature = "download")]
    remote: RemoteFile {
        name: "train-images-idx3-ubyte.gz",
        size: 9_912_422,
        sha256: "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
    },
    #[cfg(feature = "download")]
    contents_sha256: "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
};
const TRAIN_LABELS: MnistFile<'static> = MnistFile {
    stem: "train-labels",
    kind: "idx1",
    #[cfg(feature = "download")]
    remote: RemoteFile {
        name: "train-labels-idx1-ubyte.gz",
        size: 28_881,
        sha256: "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
    },
    #[cfg(feature = "download")]
    contents_sha256: "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
};
const TEST_IMAGES: MnistFile<'static> = MnistFile {
    stem: "t10k-images",
    kind: "idx3",
    #[cfg(feature = "download")]
    remote: RemoteFile {
        name: "t10k-images-idx3-ubyte.gz",
        size: 1_648_877,
        sha256: "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
    },
    #[cfg(feature = "download")]
    contents_sha256: "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
};
const TEST_LABELS: MnistFile<'static> = MnistFile {
    stem: "t10k-labels",
    kind: "idx1",
    #[cfg(feature = "download")]
    remote: RemoteFile {
        name: "t10k-labels-idx1-ubyte.gz",
        size: 4_542,
        sha256: "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
    },
    #[cfg(feature = "download")]
    contents_sha256: "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
};
const FILES: [MnistFile<'static>; 4] = [TRAIN_IMAGES, TRAIN_LABELS, TEST_IMAGES, TEST_LABELS];

impl MnistFile<'_> {
    /// The names under which the file is accepted. The downloaded one comes first, so that a download repairs a folder that holds
    /// a damaged file under another name.
    fn names(&self) -> Vec<String> {
        let Self { stem, kind, .. } = self;
        let spellings = [format!("{stem}-{kind}-ubyte"), format!("{stem}.{kind}-ubyte")];
        spellings.into_iter().flat_map(|name| [format!("{name}.gz"), name]).collect()
    }

    /// The first file of an accepted name that is not a folder; whether it is a regular file is checked when it is opened.
    fn find(&self, folder: &Path) -> Result<PathBuf, DataError> {
        let names = self.names();
        let found = names.iter().map(|name| folder.join(name)).find(|file| file.exists() && !file.is_dir());
        found.ok_or_else(|| DataError::Missing { folder: folder.to_owned(), names })
    }

    /// Whether the file that would be loaded holds what it should. One that cannot be read does not.
    #[cfg(feature = "download")]
    fn is_right(&self, folder: &Path) -> bool {
        let contents = self.find(folder).and_then(|file| idx::contents(&file));
        contents
            .is_ok_and(|mut contents| sha256(&mut contents).is_ok_and(|found| found == self.contents_sha256))
    }
}

/// Whether all four files lie in `folder`, plain or compressed; they are not opened.
pub fn is_present(folder: &Path) -> bool {
    FILES.iter().all(|file| file.find(folder).is_ok())
}

/// Loads the training and the test set from the four files in `folder`.
///
/// Each file may be named `train-images-idx3-ubyte` or `train-images.idx3-ubyte`, with or without `.gz`.
///
/// # Errors
/// [`DataError::Missing`] if a file is not there; [`DataError::Malformed`] or [`DataError::Io`] if one cannot
/// be read or does not hold 28x28 images; [`DataError::LabelCount`] or [`DataError::LabelRange`] if labels do
/// not fit the images; [`DataError::Cancelled`] if `progress` says so.
pub fn load(folder: &Path, progress: &Progress<'_>) -> Result<TrainTest, DataError> {
    let step = |done| {
        let total = Some(FILES.len() as u64);
        report(progress, ProgressEvent { stage: "loading mnist", done, total, unit: ProgressUnit::Files })
    };
    // Found first, so that a missing file is reported before seconds are spent on the others.
    let files = FILES.iter().map(|file| file.find(folder)).collect::<Result<Vec<_>, _>>()?;
    let mut parts = Vec::with_capacity(2);
    for (index, pair) in files.chunks(2).enumerate() {
        let done = 2 * index as u64;
        step(done)?;
        // Both headers are read before any data, so that files that do not fit take no memory.
        let (images, labels) = (IdxReader::open(&pair[0])?, IdxReader::open(&pair[1])?);
        let count = check_images(&pair[0], &images.sizes())?;
        check_label_count(&pair[1], &labels.sizes(), count)?;
        let images = images.finish()?.data;
        step(done + 1)?;
        let labels = labels.finish()?.data;
        check_labels(&pair[1].display().to_string(), &labels, count, &info())?;
        parts.push(InMemory::new(info(), images, labels)?);
    }
    step(FILES.len() as u64)?;
    let [train, test] = parts.try_into().expect("four files make two parts");
    Ok(TrainTest::new(train, test))
}

/// Downloads the four files into `folder`; those that are there, in any accepted form and with the right contents, are not
/// downloaded again.
///
/// The customary mirrors are [`MIRRORS`]. Sizes and SHA-256 sums are checked; see [`fetch_files`].
///
/// # Errors
/// The errors of [`fetch_files`].
#[cfg(feature = "download")]
pub fn download(folder: &Path, options: &DownloadOptions, progress: &Progress<'_>) -> Result<(), DataError> {
    download_files(folder, &FILES, options, progress)
}

#[cfg(feature = "download")]
fn download_files(
    folder: &Path,
    files: &[MnistFile<'_>],
    options: &DownloadOptions,
    progress: &Progress<'_>,
) -> Result<(), DataError> {
    let wrong = files.iter().filter(|file| !file.is_right(folder));
    let remotes: Vec<RemoteFile<'_>> = wrong.map(|file| file.remote).collect();
    if remotes.is_empty() { Ok(()) } else { fetch_files(folder, &remotes, options, progress) }
}

/// The data set by name.
pub(super) fn spec() -> DatasetSpec {
    let spec = DatasetSpec::of_folder("mnist", "Handwritten digits (LeCun, Cortes, Burges)", load)
        .with_info(info())
        .with_files(
            is_present,
            "MNIST is not there: add --download to fetch it (11 MB), or name its folder with --data-dir",
        );
    #[cfg(feature = "download")]
    let spec = spec.with_mirrors(MIRRORS, download);
    spec
}

/// What is known of the set before any file is read.
pub fn info() -> DatasetInfo {
    DatasetInfo::of_images("mnist", [1, SIDE, SIDE], CLASSES, [&[MEAN], &[STD]])
}

/// The number of images that a header claims, if its sizes are those of images.
fn check_images(file: &Path, sizes: &[usize]) -> Result<usize, DataError> {
    match *sizes {
        [count @ 1..=MAX_IMAGES, SIDE, SIDE] => Ok(count),
        [count, SIDE, SIDE] if count > MAX_IMAGES => {
            Err(wrong_sizes(file, format!("[N, {SIDE}, {SIDE}] with N at most {MAX_IMAGES}"), sizes))
        }
        _ => Err(wrong_sizes(file, format!("[N, {SIDE}, {SIDE}] with N above 0"), sizes)),
    }
}

/// There must be a label for each image.
fn check_label_count(file: &Path, sizes: &[usize], images: usize) -> Result<(), DataError> {
    match *sizes {
        [labels] if labels == images => Ok(()),
        [labels] => {
            Err(DataError::LabelCount { origin: file.display().to_string(), images, label_len: 1, labels })
        }
        _ => Err(wrong_sizes(file, "[N], a label for each image".to_owned(), sizes)),
    }
}

fn wrong_sizes(file: &Path, expected: String, found: &[usize]) -> DataError {
    DataError::malformed(file, "sizes", expected, format!("{found:?}"))
}

#[cfg(test)]
mod tests;
