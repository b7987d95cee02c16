//! Data sets by name: the built-in ones, and your own.

use std::error::Error;
use std::fmt;
use std::path::Path;
use std::sync::Arc;

#[cfg(feature = "download")]
use super::download::DownloadOptions;
use super::{Augmentation, Catalog, DatasetInfo, Datasets, Listed, Progress};

/// Why a data set could not be loaded: a [`super::DataError`], or an error of the data set's own.
pub type LoadError = Box<dyn Error + Send + Sync>;

/// What a data set is loaded with.
#[derive(Clone, Copy)]
#[non_exhaustive]
pub struct LoadOptions<'a> {
    /// Where its files lie, if it has files.
    pub folder: Option<&'a Path>,
    /// The seed for all that is drawn at random.
    pub seed: u64,
    /// How photographs are prepared and varied, for sets of them: see [`DatasetSpec::takes_photos`].
    #[cfg(feature = "images")]
    pub photos: &'a super::photos::PhotoSettings,
    /// Is called with how far loading is, and may stop it.
    pub progress: &'a Progress<'a>,
}

impl<'a> LoadOptions<'a> {
    /// Without a folder, and from seed 1.
    pub fn new(progress: &'a Progress<'a>) -> LoadOptions<'a> {
        LoadOptions {
            folder: None,
            seed: 1,
            #[cfg(feature = "images")]
            photos: &super::photos::PhotoSettings::USUAL,
            progress,
        }
    }
}

type Load = dyn Fn(&LoadOptions<'_>) -> Result<Datasets, LoadError> + Send + Sync;
type Download = dyn Fn(&Path, Option<String>, &Progress<'_>) -> Result<(), LoadError> + Send + Sync;

/// A data set by name: how it is loaded, and what is usual for it. Commands take the user's own data sets as well as those of
/// [`Catalog::builtin`].
///
/// ```
/// use convoke_data::{DatasetInfo, DatasetSpec, Pixels, Sample, Target, Targets, TrainTest, from_fn};
///
/// let spec = DatasetSpec::new("stripes", "Stripes, upright and level", |options| {
///     let seed = options.seed as usize;
///     let part = move |len, first: usize| {
///         let info = DatasetInfo::of_noise("stripes", [1, 8, 8], 2, Targets::Image);
///         from_fn(info, len, move |index, _| {
///             let upright = (first + index).is_multiple_of(2);
///             let place = move |at: usize| if upright { at % 8 } else { at / 8 };
///             let pixels = (0..64).map(|at| if (place(at) + seed).is_multiple_of(2) { 255 } else { 0 });
///             Ok(Sample { image: Pixels::Bytes(pixels.collect()), target: Target::Class(upright.into()) })
///         })
///     };
///     Ok(TrainTest::new(part(1000, 0)?, part(100, 1000)?))
/// });
/// assert_eq!(spec.to_string(), "stripes");
/// ```
#[derive(Clone)]
pub struct DatasetSpec {
    name: Arc<str>,
    about: Arc<str>,
    load: Arc<Load>,
    usual: Option<Usual>,
    augmentation: Augmentation,
    model: Option<Arc<str>>,
    files: Option<Files>,
    download: Option<Arc<Download>>,
    photos: bool,
}

/// The info of a data set as it is usually distributed.
#[derive(Clone)]
struct Usual {
    info: DatasetInfo,
    /// Whether its files may have images of another size.
    any_size: bool,
}

/// A data set's files.
#[derive(Clone)]
struct Files {
    are_there: Arc<dyn Fn(&Path) -> bool + Send + Sync>,
    hint: Arc<str>,
}

impl DatasetSpec {
    /// A data set that `load` makes. `about` is a line of help.
    pub fn new<D: Into<Datasets>>(
        name: &str,
        about: &str,
        load: impl Fn(&LoadOptions<'_>) -> Result<D, LoadError> + Send + Sync + 'static,
    ) -> DatasetSpec {
        DatasetSpec {
            name: name.into(),
            about: about.into(),
            load: Arc::new(move |options| Ok(load(options)?.into())),
            usual: None,
            augmentation: Augmentation::default(),
            model: None,
            files: None,
            download: None,
            photos: false,
        }
    }

    /// A data set that `load` reads from a folder: the current one if none is named.
    pub fn of_folder<D: Into<Datasets>, E: Into<LoadError>>(
        name: &str,
        about: &str,
        load: impl Fn(&Path, &Progress<'_>) -> Result<D, E> + Send + Sync + 'static,
    ) -> DatasetSpec {
        DatasetSpec::new(name, about, move |options| {
            load(options.folder.unwrap_or(Path::new(".")), options.progress).map_err(Into::into)
        })
    }

    /// Adds its info as it is usually distributed, so that a model that does not fit is refused before anything is read.
    #[must_use]
    pub fn with_info(self, info: DatasetInfo) -> DatasetSpec {
        DatasetSpec { usual: Some(Usual { info, any_size: false }), ..self }
    }

    /// As [`DatasetSpec::with_info`], but the files decide what size images have.
    #[must_use]
    pub fn with_info_of_any_size(self, info: DatasetInfo) -> DatasetSpec {
        DatasetSpec { usual: Some(Usual { info, any_size: true }), ..self }
    }

    /// Adds how its training images are usually varied.
    #[must_use]
    pub fn with_augmentation(self, augmentation: Augmentation) -> DatasetSpec {
        DatasetSpec { augmentation, ..self }
    }

    /// Adds the model that is trained on it unless another is named.
    #[must_use]
    pub fn with_model(self, name: &str) -> DatasetSpec {
        DatasetSpec { model: Some(name.into()), ..self }
    }

    /// For a data set of files in the folder [`LoadOptions::folder`]: `are_there` tells whether a folder has the files, without
    /// opening one; `hint` says how to get them if they are missing.
    #[must_use]
    pub fn with_files(
        self,
        are_there: impl Fn(&Path) -> bool + Send + Sync + 'static,
        hint: &str,
    ) -> DatasetSpec {
        DatasetSpec { files: Some(Files { are_there: Arc::new(are_there), hint: hint.into() }), ..self }
    }

    /// For the user's own photographs: see [`DatasetSpec::takes_photos`].
    #[cfg(feature = "images")]
    #[must_use]
    pub(super) fn of_photos(self) -> DatasetSpec {
        DatasetSpec { photos: true, ..self }
    }

    /// For files that can be fetched into a folder. The second argument of `download` is a proxy's address.
    #[must_use]
    pub fn with_download(
        self,
        download: impl Fn(&Path, Option<String>, &Progress<'_>) -> Result<(), LoadError> + Send + Sync + 'static,
    ) -> DatasetSpec {
        DatasetSpec { download: Some(Arc::new(download)), ..self }
    }

    /// For files that `download` fetches from these mirrors.
    #[cfg(feature = "download")]
    pub(super) fn with_mirrors<const N: usize>(
        self,
        mirrors: [&'static str; N],
        download: fn(&Path, &DownloadOptions, &Progress<'_>) -> Result<(), super::DataError>,
    ) -> DatasetSpec {
        self.with_download(move |folder, proxy, progress| {
            let options = DownloadOptions { proxy, ..DownloadOptions::new(mirrors) };
            Ok(download(folder, &options, progress)?)
        })
    }

    /// Whether the pixels of its images have classes, as far as is known without its files.
    pub fn is_of_pixels(&self) -> bool {
        self.usual().is_some_and(|info| info.targets.are_of_pixels())
    }

    /// Whether it is a folder of the user's photographs, which has to be named, and whose images the settings in [`LoadOptions`]
    /// prepare and vary.
    pub fn takes_photos(&self) -> bool {
        self.photos
    }

    /// The name on the command line.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// A line of help.
    pub fn about(&self) -> &str {
        &self.about
    }

    /// The info of the data set as it is usually distributed, if that is known.
    pub fn usual(&self) -> Option<&DatasetInfo> {
        self.usual.as_ref().map(|usual| &usual.info)
    }

    /// Whether its files may have images of another size than the usual.
    pub fn has_any_size(&self) -> bool {
        self.usual.as_ref().is_none_or(|usual| usual.any_size)
    }

    /// How its training images are usually varied.
    pub fn augmentation(&self) -> Augmentation {
        self.augmentation
    }

    /// The model that is trained on it unless another is named.
    pub fn model(&self) -> Option<&str> {
        self.model.as_deref()
    }

    /// Whether it is read from files.
    pub fn has_files(&self) -> bool {
        self.files.is_some()
    }

    /// Whether its files lie in a folder; they are not opened.
    pub fn is_present(&self, folder: &Path) -> bool {
        self.files.as_ref().is_some_and(|files| (files.are_there)(folder))
    }

    /// How to get its files.
    pub fn hint(&self) -> Option<&str> {
        self.files.as_ref().map(|files| &*files.hint)
    }

    /// Whether its files can be fetched.
    pub fn can_be_downloaded(&self) -> bool {
        self.download.is_some()
    }

    /// Fetches its files into a folder.
    ///
    /// # Errors
    /// If they cannot be fetched.
    pub fn download(
        &self,
        folder: &Path,
        proxy: Option<String>,
        progress: &Progress<'_>,
    ) -> Result<(), LoadError> {
        match &self.download {
            Some(download) => download(folder, proxy, progress),
            None => Err(format!("{self} cannot be downloaded").into()),
        }
    }

    /// Loads it.
    ///
    /// # Errors
    /// If it cannot be loaded.
    pub fn load(&self, options: &LoadOptions<'_>) -> Result<Datasets, LoadError> {
        (self.load)(options)
    }
}

impl PartialEq for DatasetSpec {
    fn eq(&self, other: &DatasetSpec) -> bool {
        self.name == other.name
    }
}

impl Eq for DatasetSpec {}

impl fmt::Display for DatasetSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

impl fmt::Debug for DatasetSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DatasetSpec({:?})", self.name)
    }
}

/// The data sets that can be asked for by name.
pub type DatasetSpecs = Catalog<DatasetSpec>;

impl Listed for DatasetSpec {
    const KIND: &'static str = "data set";

    fn name(&self) -> &str {
        self.name()
    }

    fn builtin() -> Vec<DatasetSpec> {
        vec![
            super::digits::spec(),
            #[cfg(feature = "gzip")]
            super::mnist::spec(),
            #[cfg(feature = "png")]
            super::camvid::spec(),
            #[cfg(feature = "gzip")]
            super::cifar10::spec(),
            #[cfg(feature = "images")]
            super::photos::folder_spec(),
            #[cfg(feature = "images")]
            super::photos::labels_spec(),
            #[cfg(feature = "images")]
            super::photos::masks_spec(),
        ]
    }
}
