//! Data sets of images: a trait for your own, readers of MNIST, CIFAR-10 and CamVid, generated digits and noise, random crops and
//! flips, and batches that threads load ahead. This crate does not know tensors.
//!
//! A [`Dataset`] gives samples by index, and need not hold them in memory. The data sets of this crate are [`InMemory`], bytes
//! exactly as they were stored or drawn, except for folders of photographs, which are decoded when they are asked for. Scaling and
//! normalisation happen when a batch is made ([`Loader`]), so that the 70,000 images of MNIST take 55 MB and not four times as much.
//!
//! Features add the readers of compressed files (`gzip`: MNIST, CIFAR-10), of PNG files (`png`: CamVid), of folders of photographs
//! (`images`, which includes `png`), and downloads (`download`).
//!
//! Architecture invariant: nothing here prints or reads the environment. Long work reports through [`Progress`].

mod augmentation;
#[cfg(feature = "png")]
pub mod camvid;
mod catalog;
#[cfg(feature = "gzip")]
pub mod cifar10;
mod class_counts;
mod dataset;
pub mod digits;
#[cfg(feature = "download")]
pub mod download;
mod error;
mod generated;
#[cfg(feature = "gzip")]
pub mod idx;
mod in_memory;
mod loader;
mod mixing;
#[cfg(feature = "gzip")]
pub mod mnist;
#[cfg(feature = "png")]
mod moments;
mod noise;
#[cfg(feature = "images")]
pub mod photos;
#[cfg(feature = "png")]
mod png_file;
mod progress;
mod random;
mod sample;
mod spec;
#[cfg(feature = "gzip")]
mod tar;
mod targets;
mod threads;

pub use augmentation::{Augmentation, View, Views};
pub use catalog::{Catalog, Listed, NameError};
pub use class_counts::class_counts;
pub use dataset::{Dataset, DatasetInfo, Datasets, MAX_CLASSES, PhotoOrigin, TrainTest, ValueScale, from_fn};
pub use digits::digits;
pub use error::{DataError, MirrorFailure};
pub use in_memory::InMemory;
pub use loader::{Loader, Request};
pub use mixing::{MAX_STRENGTH, Mix, Mixing};
pub use noise::noise;
pub use progress::{Progress, ProgressEvent, ProgressUnit, silent};
pub use sample::{Pixels, Sample};
pub use spec::{DatasetSpec, DatasetSpecs, LoadError, LoadOptions};
pub use targets::{Target, TargetBatch, Targets};

#[cfg(any(feature = "gzip", feature = "png"))]
pub(crate) use in_memory::check_labels;

/// Lets the fuzz targets call readers of bytes that are private.
#[cfg(all(fuzzing, feature = "gzip", feature = "png"))]
#[doc(hidden)]
#[allow(missing_docs)]
pub mod fuzzing {
    use std::io::{Cursor, Read};
    use std::path::Path;

    use super::DataError;

    pub fn read_tar(bytes: &[u8], limit: u64) -> Result<Vec<(String, Vec<u8>)>, DataError> {
        let mut archive = super::tar::Archive::new(bytes, Path::new("x.tar"), limit);
        let mut files = Vec::new();
        while let Some(mut file) = archive.next_file()? {
            let mut contents = Vec::new();
            let failed = DataError::io(Path::new("x.tar"), "read");
            file.read_to_end(&mut contents).map_err(failed)?;
            files.push((file.name().to_owned(), contents));
        }
        Ok(files)
    }

    pub fn read_png(
        bytes: &[u8],
        classes: bool,
        size: Option<[usize; 2]>,
    ) -> Result<([usize; 2], Vec<u8>), DataError> {
        use super::png_file::{Content, decode};
        let content = if classes { Content::Classes } else { Content::Rgb };
        let raster = decode(Cursor::new(bytes), Path::new("x.png"), content, size)?;
        Ok((raster.size, raster.bytes))
    }

    #[cfg(feature = "images")]
    pub fn photo_size(bytes: &[u8]) -> Result<[usize; 2], DataError> {
        super::photos::size_of_bytes(bytes, Path::new("x"))
    }
}

/// What the tests of readers share.
#[cfg(all(test, any(feature = "gzip", feature = "png")))]
mod testing {
    use std::fs;
    use std::path::Path;

    use super::{DataError, Progress, TrainTest, silent};

    /// The error's text after one of the files of a sound folder was replaced; it must name that file.
    #[track_caller]
    pub(super) fn refusal(
        folder: &Path,
        load: impl Fn(&Path, &Progress<'_>) -> Result<TrainTest, DataError>,
        name: &str,
        bytes: &[u8],
    ) -> String {
        let file = folder.join(name);
        fs::write(&file, bytes).unwrap();
        let message = load(folder, &silent).expect_err("must be refused").to_string();
        let rest = message.strip_prefix(&format!("{}: ", file.display()));
        rest.unwrap_or_else(|| panic!("expected {} named first, found {message}", file.display())).to_owned()
    }
}
