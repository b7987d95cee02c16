//! Where data sets and tuning results lie.

use std::path::{Path, PathBuf};

use super::failure::{Failure, Result};

/// Where a data set's files lie if no folder is named.
pub(crate) fn default_dataset_folder(name: &str) -> Option<PathBuf> {
    directories::ProjectDirs::from("", "", "convoke").map(|dirs| dirs.data_local_dir().join(name))
}

/// Where weights lie that were fetched by name.
pub(crate) fn default_weights_folder() -> Option<PathBuf> {
    default_dataset_folder("weights")
}

/// Where the files of the data set of this name are: in the folder that is given, or in its default folder.
pub(crate) fn dataset_folder(given: Option<&Path>, name: &str) -> Option<PathBuf> {
    given.map(Path::to_owned).or_else(|| default_dataset_folder(name))
}

/// Where tuning results are kept by default.
pub(crate) fn default_cache_folder() -> Option<PathBuf> {
    directories::ProjectDirs::from("", "", "convoke").map(|dirs| dirs.cache_dir().join("tuning"))
}

/// The folder of tuning results that was named, or the default one.
pub(crate) fn cache_folder(named: Option<&Path>) -> Result<PathBuf> {
    let folder = named.map(Path::to_owned).or_else(default_cache_folder);
    folder.ok_or_else(|| {
        Failure::Usage("this system has no folder for caches: name one with --tuning-cache".into())
    })
}
