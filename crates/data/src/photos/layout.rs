//! Which folders hold the parts of a data set.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

use super::super::DataError;
use super::listing::Lister;

pub(super) const TRAIN: &str = "train";
/// Names of the part that training is validated on, of which a set has one.
pub(super) const VALIDATION: [&str; 3] = ["val", "valid", "validation"];
/// The part that is validated on if there is none of these.
pub(super) const TEST: &str = "test";

/// The names of all parts.
pub(super) const PARTS: [&str; 5] = [VALIDATION[0], VALIDATION[1], VALIDATION[2], TRAIN, TEST];

/// Where the parts of a set are, as paths below its folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Layout {
    pub(super) train: PathBuf,
    /// `None` if a share of the training part is for validation.
    pub(super) validation: Option<PathBuf>,
}

/// Which images of a folder are loaded for evaluation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PhotoPart<'a> {
    /// The name of the part, such as `test`; without it, the folder itself holds the images.
    pub name: Option<&'a str>,
    /// The names of the training set's classes, in its order; a label is a place in this list.
    pub class_names: &'a [String],
}

impl Layout {
    /// The layout of a set. `is_content` tells whether a folder in the set's folder can be something else than a part.
    pub(super) fn find(
        lister: &Lister<'_>,
        dir: &Path,
        is_content: impl Fn(&OsStr) -> bool,
    ) -> Result<Layout, DataError> {
        let folders = lister.folders(Path::new(""))?;
        let has = |name: &str| folders.iter().any(|folder| folder == name);
        let is_part = |name: &OsString| PARTS.iter().any(|part| name == part);
        let other = folders.iter().any(|folder| !is_part(folder) && is_content(folder));
        // A class may be called train: then there are other classes beside it, and it holds images and not classes.
        if !has(TRAIN) || other && lister.folders(Path::new(TRAIN))?.is_empty() {
            return Ok(Layout { train: PathBuf::new(), validation: None });
        }
        let found: Vec<&str> = VALIDATION.into_iter().filter(|name| has(name)).collect();
        let validation = match found[..] {
            [] => has(TEST).then_some(TEST),
            [name] => Some(name),
            _ => {
                let expected = format!("one of {}", VALIDATION.join(", "));
                return Err(DataError::malformed(dir, "layout", expected, found.join(" and ")));
            }
        };
        Ok(Layout { train: TRAIN.into(), validation: validation.map(PathBuf::from) })
    }
}

/// What a part of this name may be called: the validation part has several names.
pub(super) fn names_of(part: &str) -> Vec<&str> {
    if VALIDATION.contains(&part) { VALIDATION.to_vec() } else { vec![part] }
}

/// The folder of a part of this name, or the set's own folder.
pub(super) fn part_folder(lister: &Lister<'_>, dir: &Path, part: Option<&str>) -> Result<PathBuf, DataError> {
    let Some(part) = part else { return Ok(PathBuf::new()) };
    let names = names_of(part);
    let folders = lister.folders(Path::new(""))?;
    let found = names.iter().find(|name| folders.iter().any(|folder| folder == *name));
    found.map(PathBuf::from).ok_or_else(|| DataError::Missing {
        folder: dir.to_owned(),
        names: names.iter().map(|name| (*name).to_owned()).collect(),
    })
}
