//! What can go wrong while data sets are read, checked, downloaded or generated.

use std::fmt;
use std::io;
use std::path::PathBuf;

use convoke_files::escaped;
use convoke_memory::OutOfMemory;

/// Why a data set could not be loaded. Nothing is half-loaded: an error means that no part of the set was returned.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DataError {
    /// The operating system refused to read or write a file.
    #[error("cannot {action} {}: {}", escaped(file.display()), escaped(source))]
    Io {
        /// The file or folder.
        file: PathBuf,
        /// What was tried, as a verb: `open`, `read`, `write`.
        action: &'static str,
        /// The system's message.
        source: io::Error,
    },
    /// A file's contents contradict its format.
    #[error("{}: {field}: expected {}, found {}", escaped(file.display()), escaped(expected), escaped(found))]
    Malformed {
        /// The file.
        file: PathBuf,
        /// The field of the file's format that is wrong, such as `magic` or `data`.
        field: &'static str,
        /// What the field should have been.
        expected: String,
        /// What it was.
        found: String,
    },
    /// None of the accepted names of a file exists.
    #[error("{}: no file named {}", escaped(folder.display()), escaped(names.join(" or ")))]
    Missing {
        /// Where it was looked for.
        folder: PathBuf,
        /// The names looked for, in order.
        names: Vec<String>,
    },
    /// The parts of a data set do not fit together.
    #[error(
        "data set {}: {field}: expected {}, found {}",
        escaped(dataset),
        escaped(expected),
        escaped(found)
    )]
    Inconsistent {
        /// The name of the data set.
        dataset: String,
        /// The part that does not fit.
        field: &'static str,
        /// What it should have been.
        expected: String,
        /// What it was.
        found: String,
    },
    /// There is not exactly one label for each image, or for each pixel.
    #[error("{}: label count: expected {}, found {labels}", escaped(origin), LabelsOf(*images, *label_len))]
    LabelCount {
        /// The label file, or the name of the data set.
        origin: String,
        /// How many images there are.
        images: usize,
        /// How many labels an image has: 1, or one for each pixel.
        label_len: usize,
        /// How many labels there are.
        labels: usize,
    },
    /// A label names a class that does not exist.
    #[error(
        "{}: label{index:?}: expected below {classes}, the number of classes{}, found {label}",
        escaped(origin),
        OrIgnored(*ignore)
    )]
    LabelRange {
        /// The label file, or the name of the data set.
        origin: String,
        /// The position of the first bad label, from 0: of the image, or of image, row and column.
        index: Vec<usize>,
        /// The bad label.
        label: i64,
        /// How many classes there are.
        classes: usize,
        /// The label that stands for no class, if there is one.
        ignore: Option<i64>,
    },
    /// A data set could not give a sample, or gave one that does not fit the data set's info.
    #[error("data set {}: sample {index}: {}", escaped(dataset), escaped(reason))]
    Sample {
        /// The name of the data set.
        dataset: String,
        /// The sample.
        index: usize,
        /// What is wrong.
        reason: String,
    },
    /// A set would not fit into memory, or is larger than what is read.
    #[error(
        "data set {}: size: expected to fit into memory, found {images} images of {image_bytes} bytes",
        escaped(dataset)
    )]
    TooLarge {
        /// The name of the data set.
        dataset: String,
        /// How many images were asked for.
        images: usize,
        /// The size of one image.
        image_bytes: usize,
    },
    /// The operating system refused memory for a part of a set.
    #[error(transparent)]
    Memory(#[from] OutOfMemory),
    /// There are no threads to read or draw a set with.
    #[error("no threads for data sets: {reason}; each needs memory for its stack")]
    Threads {
        /// The system's message.
        reason: String,
    },
    /// No mirror gave a file with the expected contents.
    #[error("cannot download {file}: every mirror failed{}", Attempts(attempts))]
    Download {
        /// The name of the file.
        file: String,
        /// Each mirror that was tried, in order; empty when there was none to try.
        attempts: Vec<MirrorFailure>,
    },
    /// A setting of a download cannot be used.
    #[error("download setting {field}: expected {expected}, found {found}")]
    Setting {
        /// The setting.
        field: &'static str,
        /// What it should have been.
        expected: String,
        /// What it was.
        found: String,
    },
    /// The caller's [`Progress`](super::Progress) asked to stop.
    #[error("cancelled during {stage}")]
    Cancelled {
        /// The stage that was running.
        stage: String,
    },
}

/// Why one mirror did not give a file.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MirrorFailure {
    /// The mirror's address.
    pub mirror: String,
    /// What happened, for people to read.
    pub reason: String,
}

/// Prints how many labels this many images have, given the labels of each image.
struct LabelsOf(usize, usize);

impl fmt::Display for LabelsOf {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            LabelsOf(images, 1) => write!(formatter, "{images}, one for each image"),
            LabelsOf(images, pixels) => {
                write!(formatter, "{}, one for each pixel of {images} images", images.saturating_mul(pixels))
            }
        }
    }
}

/// Prints what else a label may be.
struct OrIgnored(Option<i64>);

impl fmt::Display for OrIgnored {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.map_or(Ok(()), |ignore| write!(formatter, ", or {ignore}, which is ignored"))
    }
}

/// Prints each failed mirror on a line of its own.
struct Attempts<'a>(&'a [MirrorFailure]);

impl fmt::Display for Attempts<'_> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return formatter.write_str(" (the list of mirrors is empty)");
        }
        for MirrorFailure { mirror, reason } in self.0 {
            write!(formatter, "\n  {}: {}", escaped(mirror), escaped(reason))?;
        }
        Ok(())
    }
}

impl DataError {
    /// A part of a data set that does not fit.
    pub(super) fn inconsistent(
        dataset: &str,
        field: &'static str,
        expected: impl Into<String>,
        found: impl ToString,
    ) -> Self {
        let (dataset, expected) = (dataset.to_owned(), expected.into());
        Self::Inconsistent { dataset, field, expected, found: found.to_string() }
    }

    /// A constructor for `map_err`: wraps the system's error about a file.
    #[cfg(any(feature = "gzip", feature = "png"))]
    pub(super) fn io(file: &std::path::Path, action: &'static str) -> impl FnOnce(io::Error) -> Self {
        let file = file.to_owned();
        move |source| Self::Io { file, action, source }
    }

    /// A field of a file that is not what its format asks for.
    #[cfg(any(feature = "gzip", feature = "png"))]
    pub(super) fn malformed(
        file: &std::path::Path,
        field: &'static str,
        expected: impl Into<String>,
        found: impl Into<String>,
    ) -> Self {
        Self::Malformed { file: file.to_owned(), field, expected: expected.into(), found: found.into() }
    }
}
