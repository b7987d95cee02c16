//! Finds the image files below a folder, without opening one.
//!
//! Links are followed once: one that leads out of the data set's folder, or to a folder whose files were found already, is an
//! error. So no link makes files of elsewhere part of a set unnoticed, and no listing is endless.

use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::super::progress::report;
use super::super::{DataError, Progress, ProgressEvent, ProgressUnit};
use super::measure::Skipped;

/// The endings of names that image files have, in lower case; files may have them in any case.
pub const EXTENSIONS: [&str; 10] = ["jpg", "jpeg", "jpe", "jfif", "png", "gif", "tif", "tiff", "webp", "bmp"];
/// The endings of images that are not read. They are told of, so that nobody misses them unknowing.
pub const OTHER_EXTENSIONS: [&str; 19] = [
    "heic", "heif", "avif", "jp2", "j2k", "jpf", "jpx", "jxl", "svg", "psd", "dng", "cr2", "cr3", "nef",
    "arw", "raf", "orf", "rw2", "pef",
];
/// The endings of masks.
pub(super) const MASK_EXTENSIONS: [&str; 1] = ["png"];

const STAGE: &str = "listing images";
const FILES_PER_REPORT: u64 = 1000;
/// Folders may be nested this deep.
const MAX_DEPTH: usize = 32;

/// Lists parts of a data set's folder.
pub(super) struct Lister<'a> {
    /// The data set's folder.
    dir: &'a Path,
    /// The path of the folder without links.
    real: PathBuf,
    follow_links: bool,
    progress: &'a Progress<'a>,
    /// Files found.
    found: u64,
    /// Images that are not read, each with the reason.
    unread: Skipped,
}

/// An entry of a folder, which may be reached by a link.
pub(super) struct Entry {
    pub(super) name: OsString,
    pub(super) is_folder: bool,
    /// Where a link leads.
    target: Option<PathBuf>,
}

/// What a walk through a folder looks for, and has found.
struct Found<'a> {
    extensions: &'a [&'a str],
    files: Vec<PathBuf>,
    seen: Seen,
}

/// Folders whose files were found, without links, each with its path below the data set's folder.
type Seen = HashMap<PathBuf, PathBuf>;

/// The images of a folder, by their names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listed {
    /// The images that can be read, in order.
    pub files: Vec<PathBuf>,
    /// The images of other kinds, such as HEIC, each with the reason why it is left out.
    pub unread: Vec<(PathBuf, String)>,
}

/// The image files below a folder, at any depth, in order, as paths that begin with the folder's; by their names.
///
/// # Errors
/// [`DataError::Io`] if a folder cannot be listed; [`DataError::Malformed`] if a link leads out of the folder, unless `follow_links`,
/// or to a folder that was listed already; [`DataError::Cancelled`] if `progress` says so.
pub fn images_below(folder: &Path, follow_links: bool, progress: &Progress<'_>) -> Result<Listed, DataError> {
    let mut lister = Lister::new(folder, follow_links, progress)?;
    let files = lister.files(Path::new(""), &EXTENSIONS)?;
    let unread = lister.finish()?.into_iter().map(|(file, reason)| (folder.join(file), reason)).collect();
    Ok(Listed { files: files.into_iter().map(|file| folder.join(file)).collect(), unread })
}

impl<'a> Lister<'a> {
    /// For the folder of a data set.
    pub(super) fn new(
        dir: &'a Path,
        follow_links: bool,
        progress: &'a Progress<'a>,
    ) -> Result<Lister<'a>, DataError> {
        let real = fs::canonicalize(dir).map_err(DataError::io(dir, "list"))?;
        Ok(Lister { dir, real, follow_links, progress, found: 0, unread: Skipped::new() })
    }

    /// The entries of a folder below the data set's, in the order of their names. What is hidden is left out, as are links to
    /// files without an image's name.
    pub(super) fn entries(&self, below: &Path) -> Result<Vec<Entry>, DataError> {
        let folder = joined(self.dir, below);
        let mut entries = Vec::new();
        for entry in fs::read_dir(&folder).map_err(DataError::io(&folder, "list"))? {
            let entry = entry.map_err(DataError::io(&folder, "list"))?;
            let name = entry.file_name();
            if name.as_encoded_bytes().starts_with(b".") {
                continue;
            }
            let path = folder.join(&name);
            let kind = entry.file_type().map_err(DataError::io(&path, "list"))?;
            if kind.is_symlink() {
                entries.extend(self.link(&path, name)?);
            } else if kind.is_dir() || kind.is_file() {
                entries.push(Entry { name, is_folder: kind.is_dir(), target: None });
            }
        }
        entries.sort_unstable_by(|a, b| a.name.as_encoded_bytes().cmp(b.name.as_encoded_bytes()));
        Ok(entries)
    }

    /// What a link stands for, if it is a folder or a file with an image's name.
    fn link(&self, path: &Path, name: OsString) -> Result<Option<Entry>, DataError> {
        let is_image = has_extension(&name, &EXTENSIONS);
        let target = match fs::canonicalize(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound && !is_image => return Ok(None),
            target => target.map_err(DataError::io(path, "follow the link"))?,
        };
        let found = fs::metadata(&target).map_err(DataError::io(path, "follow the link"))?;
        if !(found.is_dir() || found.is_file() && is_image) {
            return Ok(None);
        }
        if !self.follow_links {
            check_within((self.dir, &self.real), path, &target)?;
        }
        Ok(Some(Entry { name, is_folder: found.is_dir(), target: Some(target) }))
    }

    /// The names of the folders in a folder of the set.
    pub(super) fn folders(&self, below: &Path) -> Result<Vec<OsString>, DataError> {
        let entries = self.entries(below)?;
        Ok(entries.into_iter().filter(|entry| entry.is_folder).map(|entry| entry.name).collect())
    }

    /// The files below a folder of the set, at any depth, that have one of these endings, as paths below the set's folder, in
    /// order.
    pub(super) fn files(&mut self, below: &Path, extensions: &[&str]) -> Result<Vec<PathBuf>, DataError> {
        let real = fs::canonicalize(joined(self.dir, below))
            .map_err(DataError::io(&joined(self.dir, below), "list"))?;
        let mut found = Found { extensions, files: Vec::new(), seen: Seen::new() };
        self.walk(&mut found, below.to_owned(), real, 0)?;
        let mut files = found.files;
        files.sort_unstable_by(|a, b| order(a).cmp(order(b)));
        Ok(files)
    }

    /// Whether there is such a file below a folder of the set.
    pub(super) fn has_files(&self, below: &Path, extensions: &[&str]) -> Result<bool, DataError> {
        self.has_files_at(below, extensions, 0)
    }

    fn has_files_at(&self, below: &Path, extensions: &[&str], depth: usize) -> Result<bool, DataError> {
        let entries = self.entries(below)?;
        if entries.iter().any(|entry| !entry.is_folder && has_extension(&entry.name, extensions)) {
            return Ok(true);
        }
        // What lies deeper is an error when files are listed.
        for entry in entries.iter().filter(|entry| entry.is_folder && depth < MAX_DEPTH) {
            if self.has_files_at(&below.join(&entry.name), extensions, depth + 1)? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Notes a folder of the set that is left out.
    pub(super) fn leave_out(&mut self, below: &Path, reason: &str) {
        let reason = format!("{}: {reason}", joined(self.dir, below).display());
        self.unread.push((below.to_owned(), reason));
    }

    fn walk(
        &mut self,
        found: &mut Found<'_>,
        below: PathBuf,
        real: PathBuf,
        depth: usize,
    ) -> Result<(), DataError> {
        let folder = || joined(self.dir, &below);
        if depth > MAX_DEPTH {
            let expected = format!("at most {MAX_DEPTH} levels");
            return Err(DataError::malformed(&folder(), "folder", expected, "a deeper one"));
        }
        if let Some(earlier) = found.seen.insert(real.clone(), below.clone()) {
            let found = match below.starts_with(&earlier) {
                true => format!("a loop: it is {} again", earlier.display()),
                false => format!("{} again, by a link", earlier.display()),
            };
            return Err(DataError::malformed(&folder(), "folder", "each folder once", found));
        }
        for entry in self.entries(&below)? {
            let path = below.join(&entry.name);
            if entry.is_folder {
                let real = entry.target.unwrap_or_else(|| real.join(&entry.name));
                self.walk(found, path, real, depth + 1)?;
            } else if has_extension(&entry.name, found.extensions) {
                found.files.push(path);
                self.found += 1;
                if self.found.is_multiple_of(FILES_PER_REPORT) {
                    self.report(None)?;
                }
            } else if has_extension(&entry.name, &OTHER_EXTENSIONS) {
                let file = joined(self.dir, &path);
                let kind = file.extension().unwrap_or_default().to_string_lossy().to_uppercase();
                let reason = format!("{}: {kind} is not read: convert it to JPEG or PNG", file.display());
                self.unread.push((path, reason));
            }
        }
        Ok(())
    }

    /// Reports that all is listed. Gives the images that are not read.
    pub(super) fn finish(self) -> Result<Skipped, DataError> {
        self.report(Some(self.found))?;
        Ok(self.unread)
    }

    fn report(&self, total: Option<u64>) -> Result<(), DataError> {
        let event = ProgressEvent { stage: STAGE, done: self.found, total, unit: ProgressUnit::Files };
        report(self.progress, event)
    }
}

/// Fails if the link at `path` leads out of a data set's folder. The folder is given as it was named and without links.
pub(super) fn check_within((dir, real): (&Path, &Path), path: &Path, target: &Path) -> Result<(), DataError> {
    if target.starts_with(real) {
        return Ok(());
    }
    let expected = format!("one that stays within {}", dir.display());
    Err(DataError::malformed(path, "link", expected, format!("one to {}", target.display())))
}

/// A folder's absolute path; none if it is not UTF-8.
pub(super) fn absolute(folder: &Path) -> Option<String> {
    std::path::absolute(folder).ok()?.to_str().map(str::to_owned)
}

/// A path below the set's folder, or that folder itself.
pub(super) fn joined(dir: &Path, below: &Path) -> PathBuf {
    // Joined with an empty path, a folder would end in a separator.
    if below.as_os_str().is_empty() { dir.to_owned() } else { dir.join(below) }
}

/// What paths are sorted by: their bytes.
fn order(path: &Path) -> &[u8] {
    path.as_os_str().as_encoded_bytes()
}

/// Whether a name ends in a dot and one of these, in any case.
pub(super) fn has_extension(name: &OsStr, extensions: &[&str]) -> bool {
    let extension = Path::new(name).extension();
    extension.is_some_and(|found| extensions.iter().any(|extension| found.eq_ignore_ascii_case(extension)))
}
