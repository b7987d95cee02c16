//! CIFAR-10: 60,000 colour photographs of 32x32 pixels in ten classes, in their binary form: an archive, or its files.
//!
//! ```text
//! cifar-10-binary.tar.gz                   the archive, read where it lies, or
//! cifar-10-batches-bin/data_batch_1.bin    what it holds: 10,000 images a file, 1 to 5 for training
//! cifar-10-batches-bin/test_batch.bin      to test
//! ```
//! A record is a byte of class and 3 x 32 x 32 bytes of pixels: red, green, blue. Some of the training batches may be missing.
//!
//! A. Krizhevsky, "Learning multiple layers of features from tiny images", 2009.

use std::cell::Cell;
use std::fs::File;
use std::io::{self, BufReader, Read};
use std::path::{Path, PathBuf};
use std::rc::Rc;

use convoke_files::{open_regular, reserve};

#[cfg(feature = "download")]
use super::download::{DownloadOptions, RemoteFile, fetch_files};
use super::idx::{decompressed, read_error};
use super::progress::report;
use super::tar::{Archive, fill};
use super::{
    Augmentation, DataError, DatasetInfo, DatasetSpec, InMemory, Progress, ProgressEvent, ProgressUnit,
    TrainTest,
};

/// The classes; a label is a place in this list.
pub const CLASSES: [&str; 10] =
    ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"];
/// Where the archive can be downloaded.
pub const MIRRORS: [&str; 1] = ["https://www.cs.toronto.edu/~kriz/"];
/// The archive.
pub const ARCHIVE: &str = "cifar-10-binary.tar.gz";
/// The folder in the archive, which may also lie unpacked.
pub const FOLDER: &str = "cifar-10-batches-bin";
/// Means of the channels of the 50,000 training images scaled to 0..1, the customary constants.
pub const MEAN: [f32; 3] = [0.4914, 0.4822, 0.4465];
/// Standard deviations of the channels, likewise.
pub const STD: [f32; 3] = [0.2470, 0.2435, 0.2616];
/// Files, and decompressed archives, of more bytes are refused: this is nearly three times the size of the whole set.
pub const MAX_DATA_BYTES: u64 = 1 << 29;

const CHANNELS: usize = 3;
const SIDE: usize = 32;
const IMAGE: usize = CHANNELS * SIDE * SIDE;
/// The class and the pixels.
const RECORD: usize = 1 + IMAGE;
const STAGE: &str = "loading cifar10";
/// Images read between two reports of progress.
const IMAGES_PER_REPORT: usize = 1000;
/// The files, the training ones first.
const FILES: [&str; 6] = [
    "data_batch_1.bin",
    "data_batch_2.bin",
    "data_batch_3.bin",
    "data_batch_4.bin",
    "data_batch_5.bin",
    "test_batch.bin",
];
const TEST: usize = FILES.len() - 1;

/// Size and SHA-256 as several libraries state them (gomlx, torchvision for Ruby); the origin's page has the MD5 sum of the
/// same file, c32a1d4ab5d03f1284b67883e8d87530.
#[cfg(feature = "download")]
const REMOTE: RemoteFile<'static> = RemoteFile {
    name: ARCHIVE,
    size: 170_052_171,
    sha256: "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
};

/// What a folder holds: the archive, or files.
enum Cifar10Source {
    Archive(PathBuf),
    /// The file of each name in [`FILES`] that is there.
    Files([Option<PathBuf>; FILES.len()]),
}

impl Cifar10Source {
    /// The archive is taken first, so that a download repairs a folder that also holds damaged files.
    fn find(folder: &Path) -> Result<Cifar10Source, DataError> {
        let archive = folder.join(ARCHIVE);
        if archive.exists() && !archive.is_dir() {
            return Ok(Cifar10Source::Archive(archive));
        }
        let places = [folder.join(FOLDER), folder.to_owned()];
        for place in places {
            let files =
                FILES.map(|name| Some(place.join(name)).filter(|file| file.exists() && !file.is_dir()));
            if files.iter().any(Option::is_some) {
                check_all(&place, &files)?;
                return Ok(Cifar10Source::Files(files));
            }
        }
        let names = [ARCHIVE.to_owned(), format!("{FOLDER}/{}", FILES[0]), FILES[0].to_owned()];
        Err(DataError::Missing { folder: folder.to_owned(), names: names.to_vec() })
    }

    fn files(&self) -> Vec<&PathBuf> {
        match self {
            Cifar10Source::Archive(archive) => vec![archive],
            Cifar10Source::Files(files) => files.iter().flatten().collect(),
        }
    }
}

/// Fails unless a training batch and the test batch are there; `place` is where they were looked for.
fn check_all<T>(place: &Path, found: &[Option<T>; FILES.len()]) -> Result<(), DataError> {
    let missing = |names: &[&str]| {
        Err(DataError::Missing {
            folder: place.to_owned(),
            names: names.iter().map(|&name| name.to_owned()).collect(),
        })
    };
    if found[..TEST].iter().all(Option::is_none) {
        return missing(&FILES[..TEST]);
    }
    if found[TEST].is_none() { missing(&FILES[TEST..]) } else { Ok(()) }
}

/// Whether the archive, or a training and the test batch, lie in `folder`; they are not opened.
pub fn is_present(folder: &Path) -> bool {
    Cifar10Source::find(folder).is_ok()
}

/// Loads the training and the test set from a folder with the archive, with the unpacked folder, or with the files themselves; an
/// archive comes before files. Of the five training batches, those that are there are used, in their order.
///
/// # Errors
/// [`DataError::Missing`] if there is no training batch or no test batch; [`DataError::Malformed`] or [`DataError::Io`] if a
/// file cannot be read, is damaged or cut off, holds no whole number of records, a label that is no class, or more than
/// [`MAX_DATA_BYTES`]; [`DataError::Cancelled`] if `progress` says so.
pub fn load(folder: &Path, progress: &Progress<'_>) -> Result<TrainTest, DataError> {
    let source = Cifar10Source::find(folder)?;
    let mut loading = Loading { progress, done: Rc::default(), total: 0 };
    for file in source.files() {
        loading.total += file.metadata().map_err(DataError::io(file, "examine"))?.len();
    }
    loading.report()?;
    let mut batches: [Option<Batch>; FILES.len()] = Default::default();
    match &source {
        Cifar10Source::Archive(archive) => loading.archive(archive, &mut batches)?,
        Cifar10Source::Files(files) => {
            for (file, batch) in files.iter().zip(&mut batches) {
                *batch = file.as_ref().map(|file| loading.file(file)).transpose()?;
            }
        }
    }
    let mut batches = batches.into_iter().collect::<Vec<_>>();
    let test = batches.pop().flatten().unwrap_or_default();
    let mut train = Batch::default();
    for mut batch in batches.into_iter().flatten() {
        let more = batch.images.len() as u64;
        reserve(&mut train.images, more).map_err(DataError::io(folder, "read"))?;
        train.images.append(&mut batch.images);
        train.labels.append(&mut batch.labels);
    }
    let set = |batch: Batch| InMemory::new(info(), batch.images, batch.labels)?.with_class_names(&CLASSES);
    let sets = TrainTest::new(set(train)?, set(test)?);
    loading.done.set(loading.total);
    loading.report()?;
    Ok(sets)
}

/// Downloads the whole archive (170 MB) into `folder`, unless it is there with the right contents. [`load`] then reads it.
///
/// The customary mirrors are [`MIRRORS`]. Size and SHA-256 are checked; see [`fetch_files`].
///
/// # Errors
/// The errors of [`fetch_files`].
#[cfg(feature = "download")]
pub fn download(folder: &Path, options: &DownloadOptions, progress: &Progress<'_>) -> Result<(), DataError> {
    fetch_files(folder, &[REMOTE], options, progress)
}

/// The data set by name.
pub(super) fn spec() -> DatasetSpec {
    let spec = DatasetSpec::of_folder(
        "cifar10",
        "Small photographs of ten kinds of things (Krizhevsky); as many training batches as are there",
        load,
    )
    .with_info(info())
    .with_model("resnet20")
    // As in the paper on residual networks.
    .with_augmentation(Augmentation { flip: true, crop: Some([SIDE, SIDE]), padding: 4 })
    .with_files(
        is_present,
        "CIFAR-10 is not there, or not all of it: add --download to fetch it (170 MB), or name its folder with --data-dir",
    );
    #[cfg(feature = "download")]
    let spec = spec.with_mirrors(MIRRORS, download);
    spec
}

/// What is known of the set before any file is read.
pub fn info() -> DatasetInfo {
    DatasetInfo::of_images("cifar10", [CHANNELS, SIDE, SIDE], CLASSES.len(), [&MEAN, &STD])
}

/// What one file holds.
#[derive(Default)]
struct Batch {
    images: Vec<u8>,
    labels: Vec<u8>,
}

/// How far loading is, in bytes of the files as they are stored.
struct Loading<'a> {
    progress: &'a Progress<'a>,
    done: Rc<Cell<u64>>,
    total: u64,
}

impl Loading<'_> {
    fn report(&self) -> Result<(), DataError> {
        // A file may grow while it is read; the report must still make sense.
        let (done, total) = (self.done.get().min(self.total), Some(self.total));
        report(self.progress, ProgressEvent { stage: STAGE, done, total, unit: ProgressUnit::Bytes })
    }

    fn open(&self, file: &Path) -> Result<BufReader<Counted>, DataError> {
        let opened = open_regular(file).map_err(DataError::io(file, "open"))?;
        Ok(BufReader::with_capacity(1 << 16, Counted { file: opened, done: self.done.clone() }))
    }

    fn file(&self, file: &Path) -> Result<Batch, DataError> {
        let len = file.metadata().map_err(DataError::io(file, "examine"))?.len();
        let mut reader = self.open(file)?;
        let batch = self.records(&mut reader, len, file)?;
        // The file may have grown since.
        match reader.read(&mut [0]) {
            Ok(0) => Ok(batch),
            Ok(_) => Err(wrong_len(file, "more".into())),
            Err(error) => Err(DataError::io(file, "read")(error)),
        }
    }

    /// Reads the batches in an archive; all of it is read, so that its checksum is compared.
    fn archive(&self, file: &Path, batches: &mut [Option<Batch>; FILES.len()]) -> Result<(), DataError> {
        let reader = decompressed(self.open(file)?).map_err(|error| read_error(file, "contents", error))?;
        let mut archive = Archive::new(reader, file, MAX_DATA_BYTES);
        while let Some(mut entry) = archive.next_file()? {
            let name = entry.name().rsplit('/').next().unwrap_or_default();
            let Some(index) = FILES.iter().position(|&known| known == name) else { continue };
            let path = file.join(entry.name().trim_start_matches('/'));
            if batches[index].is_some() {
                return Err(DataError::malformed(&path, "name", "one file of this name", "two"));
            }
            let len = entry.len();
            batches[index] = Some(self.records(&mut entry, len, &path)?);
        }
        check_all(file, batches)
    }

    /// The records in the next `len` bytes of a reader; errors name `file`.
    fn records(&self, reader: &mut impl Read, len: u64, file: &Path) -> Result<Batch, DataError> {
        if len == 0 || !len.is_multiple_of(RECORD as u64) || len > MAX_DATA_BYTES {
            return Err(wrong_len(file, len.to_string()));
        }
        let (mut batch, mut record) = (Batch::default(), [0; RECORD]);
        let records = len / RECORD as u64;
        for (bytes, each) in [(&mut batch.labels, 1), (&mut batch.images, IMAGE as u64)] {
            reserve(bytes, records * each).map_err(DataError::io(file, "read"))?;
        }
        for index in 0..records {
            let start = index * RECORD as u64;
            let read = fill(reader, &mut record).map_err(|error| read_error(file, "record", error))?;
            if read < RECORD {
                let found = format!("{} bytes (the file is cut off)", start + read as u64);
                return Err(DataError::malformed(file, "size", format!("{len} bytes"), found));
            }
            let [label, pixels @ ..] = &record;
            if usize::from(*label) >= CLASSES.len() {
                let found = format!("{label} at byte {start}, in image {index}");
                return Err(DataError::malformed(
                    file,
                    "label",
                    format!("0 to {}", CLASSES.len() - 1),
                    found,
                ));
            }
            batch.labels.push(*label);
            batch.images.extend_from_slice(pixels);
            if batch.labels.len().is_multiple_of(IMAGES_PER_REPORT) {
                self.report()?;
            }
        }
        Ok(batch)
    }
}

fn wrong_len(file: &Path, found: String) -> DataError {
    let expected = format!("a multiple of {RECORD} bytes, above 0 and at most {MAX_DATA_BYTES}");
    DataError::malformed(file, "size", expected, found)
}

/// A file that counts the bytes that are read of it.
struct Counted {
    file: File,
    done: Rc<Cell<u64>>,
}

impl Read for Counted {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.file.read(buffer)?;
        self.done.set(self.done.get() + count as u64);
        Ok(count)
    }
}

#[cfg(test)]
mod tests;
