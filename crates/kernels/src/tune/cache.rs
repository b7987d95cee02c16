//! Tuning results on disk: one small JSON file a result, in a folder for each kind of machine.
//!
//! ```text
//! ROOT/convoke-0.1_amd-epyc-9v74-80-core-processor-f25m17s1_avx512/
//!   mb16ic64ih56iw56oc64oh56ow56kh3kw3sh1sw1ph1pw1_nhwc_f32_fwd_t2_standard.json
//! ```
//! A result is written to a temporary name and renamed. So any number of processes may write at once, the last one to write a
//! result wins, and a damaged file spoils only its own result.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use convoke_files::{create_folder, escaped, read_text, remove_leftovers, write_out, write_whole};
use serde::{Deserialize, Serialize};

use super::record::{Key, Record};
use crate::Isa;

/// The most bytes that a result's file may have; a larger one is damaged.
const LARGEST_RECORD: u64 = 1 << 20;
/// The most bytes that an export may have.
const LARGEST_EXPORT: u64 = 1 << 26;
/// Ending of a result's file.
const ENDING: &str = ".json";
/// Ending of a file that an earlier version was writing.
const UNFINISHED: &str = ".tmp";

/// Why a cache could not be read or written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CacheError {
    /// The file system refused.
    #[error("{}: {}", escaped(path.display()), escaped(error))]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// The file system's error.
        error: io::Error,
    },
    /// A file's content is not a result.
    #[error("{}: {}", escaped(path.display()), escaped(reason))]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
}

type Result<T> = std::result::Result<T, CacheError>;

/// A folder of tuning results, seen from one kind of machine.
#[derive(Debug, Clone)]
pub struct Cache {
    root: PathBuf,
    scope: String,
}

/// A file of the cache.
#[derive(Debug)]
pub struct Entry {
    /// The file.
    pub path: PathBuf,
    /// The kind of machine: the folder's name.
    pub scope: String,
    /// Its content, or what is wrong with it.
    pub record: Result<Record>,
}

/// An exported cache.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Export {
    convoke_tuning: u32,
    entries: Vec<Exported>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Exported {
    scope: String,
    record: Record,
}

/// The kind of machine whose times may be compared: version of this library, CPU model, instruction set.
pub fn scope(isa: Isa) -> String {
    let version = concat!(env!("CARGO_PKG_VERSION_MAJOR"), ".", env!("CARGO_PKG_VERSION_MINOR"));
    format!("convoke-{version}_{}_{}", cpu_model(), isa.scope())
}

/// Brand, family, model and stepping, as a file name can hold them.
fn cpu_model() -> String {
    #[cfg(target_arch = "x86_64")]
    {
        let cpuid = raw_cpuid::CpuId::new();
        let brand = cpuid.get_processor_brand_string();
        let brand = brand.as_ref().map_or("unknown", |brand| brand.as_str());
        let numbers = cpuid.get_feature_info().map_or_else(String::new, |info| {
            format!(" f{}m{}s{}", info.family_id(), info.model_id(), info.stepping_id())
        });
        slug(&(brand.to_owned() + &numbers))
    }
    #[cfg(not(target_arch = "x86_64"))]
    slug(std::env::consts::ARCH)
}

/// Lower-case letters and digits, with single dashes for all else.
fn slug(text: &str) -> String {
    let words = text.split(|c: char| !c.is_ascii_alphanumeric()).filter(|word| !word.is_empty());
    words.collect::<Vec<_>>().join("-").to_lowercase()
}

/// Whether a name that was read from a file can be used as a file name.
fn is_safe_name(name: &str) -> bool {
    let known = |c: char| c.is_ascii_alphanumeric() || "_-.".contains(c);
    !name.is_empty() && name.len() <= 240 && !name.starts_with('.') && name.chars().all(known)
}

fn is_safe_os_name(name: &OsStr) -> bool {
    name.to_str().is_some_and(is_safe_name)
}

impl Cache {
    /// The cache in this folder, which need not exist yet, for this machine with this instruction set.
    pub fn new(root: impl Into<PathBuf>, isa: Isa) -> Cache {
        Cache { root: root.into(), scope: scope(isa) }
    }

    /// The folder of all results.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The name of this kind of machine's folder.
    pub fn scope(&self) -> &str {
        &self.scope
    }

    fn path(&self, scope: &str, key: &Key) -> PathBuf {
        self.root.join(scope).join(key.file_name())
    }

    /// The result for this key, if there is one.
    ///
    /// # Errors
    /// If there is a file that cannot be read or is damaged.
    pub fn load(&self, key: &Key) -> Result<Option<Record>> {
        let path = self.path(&self.scope, key);
        match read_record(&path) {
            Ok(record) if record.key == *key => Ok(Some(record)),
            Ok(record) => {
                Err(CacheError::Damaged { path, reason: format!("it holds the result of {}", record.key) })
            }
            Err(CacheError::Io { error, .. }) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Stores a result in place of what was stored for its key.
    ///
    /// # Errors
    /// If the file system refuses; the old result is then still there.
    pub fn save(&self, record: &Record) -> Result<()> {
        self.save_in(&self.scope, record)
    }

    fn save_in(&self, scope: &str, record: &Record) -> Result<()> {
        let path = self.path(scope, &record.key);
        if !is_safe_name(scope) || !is_safe_name(&record.key.file_name()) {
            return Err(CacheError::Damaged { path, reason: "no usable file name".into() });
        }
        record.verify().map_err(|reason| CacheError::Damaged { path: path.clone(), reason })?;
        let text = serde_json::to_string_pretty(record).expect("a record is plain data");
        create_folder(&self.root.join(scope))
            .and_then(|()| write_whole(&path, text.as_bytes()))
            .map_err(|error| io_error(&path, error))
    }

    /// The folders of all kinds of machines. A folder whose name this cache would never give is not its own.
    fn folders(&self) -> Result<impl Iterator<Item = PathBuf>> {
        let own = |path: &PathBuf| path.is_dir() && path.file_name().is_some_and(is_safe_os_name);
        Ok(list(&self.root)?.into_iter().filter(own))
    }

    /// Every file of every kind of machine, sorted by path.
    ///
    /// # Errors
    /// If a folder cannot be listed. A cache that does not exist has no entries.
    pub fn entries(&self) -> Result<Vec<Entry>> {
        let mut entries = Vec::new();
        for folder in self.folders()? {
            entries.extend(self.entries_in(&name_of(&folder))?);
        }
        Ok(entries)
    }

    /// Every file of this kind of machine, sorted by path.
    ///
    /// # Errors
    /// As [`Cache::entries`].
    pub fn own_entries(&self) -> Result<Vec<Entry>> {
        self.entries_in(&self.scope)
    }

    fn entries_in(&self, scope: &str) -> Result<Vec<Entry>> {
        let files = files(&self.root.join(scope))?;
        let records = files.into_iter().filter(|path| name_of(path).ends_with(ENDING));
        Ok(records.map(|path| Entry { scope: scope.to_owned(), record: read_record(&path), path }).collect())
    }

    /// Deletes the files that `unwanted` selects, and what interrupted writers left behind. Returns how many were deleted.
    ///
    /// # Errors
    /// The first error of the file system, if it refuses; the other files are deleted all the same.
    pub fn prune(&self, unwanted: impl Fn(&Entry) -> bool) -> Result<usize> {
        let mut doomed: Vec<PathBuf> =
            self.entries()?.into_iter().filter(&unwanted).map(|entry| entry.path).collect();
        let mut count = 0;
        for folder in self.folders()? {
            count += remove_leftovers(&folder);
            let files = files(&folder)?;
            doomed
                .extend(files.into_iter().filter(|path| name_of(path).ends_with(UNFINISHED) && is_old(path)));
        }
        let mut refused = None;
        for path in &doomed {
            match fs::remove_file(path) {
                Ok(()) => count += 1,
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => drop(refused.get_or_insert_with(|| io_error(path, error))),
            }
        }
        refused.map_or(Ok(count), Err)
    }

    /// Writes every valid result to one file. Returns how many.
    ///
    /// # Errors
    /// If the file system refuses.
    pub fn export(&self, path: &Path) -> Result<usize> {
        let entries: Vec<Exported> = self
            .entries()?
            .into_iter()
            .filter_map(|entry| Some(Exported { scope: entry.scope, record: entry.record.ok()? }))
            .collect();
        let count = entries.len();
        let text = serde_json::to_string_pretty(&Export { convoke_tuning: 1, entries })
            .expect("records are plain data");
        write_out(path, text.as_bytes()).map_err(|error| io_error(path, error))?;
        Ok(count)
    }

    /// Adds the results of an exported file that are not here yet. Returns how many were added and how many were not.
    ///
    /// # Errors
    /// If the file cannot be read, is not an export, or holds a result that makes no sense: then nothing is added.
    pub fn import(&self, path: &Path) -> Result<[usize; 2]> {
        let text = read(path, LARGEST_EXPORT)?;
        let damaged = |reason: String| CacheError::Damaged { path: path.to_owned(), reason };
        let export: Export = serde_json::from_str(&text)
            .map_err(|error| damaged(format!("not an exported cache: {error}")))?;
        if export.convoke_tuning != 1 {
            return Err(damaged(format!(
                "an export of form {}, this version reads 1",
                export.convoke_tuning
            )));
        }
        for Exported { scope, record } in &export.entries {
            record.verify().map_err(|reason| damaged(format!("{}: {reason}", record.key)))?;
            if !is_safe_name(scope) || !is_safe_name(&record.key.file_name()) {
                return Err(damaged(format!("{} in {scope}: no usable file name", record.key)));
            }
        }
        let mut counts = [0, 0];
        for Exported { scope, record } in &export.entries {
            if self.path(scope, &record.key).exists() {
                counts[1] += 1;
            } else {
                self.save_in(scope, record)?;
                counts[0] += 1;
            }
        }
        Ok(counts)
    }
}

fn io_error(path: &Path, error: io::Error) -> CacheError {
    CacheError::Io { path: path.to_owned(), error }
}

fn name_of(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// Whether a file has not been written to for an hour.
fn is_old(path: &Path) -> bool {
    let modified = fs::metadata(path).and_then(|metadata| metadata.modified());
    modified.is_ok_and(|at| at.elapsed().is_ok_and(|age| age.as_secs() > 3600))
}

/// The paths in a folder, sorted; none if it does not exist.
fn list(folder: &Path) -> Result<Vec<PathBuf>> {
    let entries = match fs::read_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(|error| io_error(folder, error))?,
    };
    let paths: io::Result<Vec<PathBuf>> = entries.map(|entry| Ok(entry?.path())).collect();
    let mut paths = paths.map_err(|error| io_error(folder, error))?;
    paths.sort();
    Ok(paths)
}

/// The same without folders: whatever their names, they are not results, and whoever made them may need what they hold.
fn files(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut paths = list(folder)?;
    paths.retain(|path| fs::symlink_metadata(path).is_ok_and(|found| !found.is_dir()));
    Ok(paths)
}

fn read(path: &Path, limit: u64) -> Result<String> {
    read_text(path, limit).map_err(|error| match error.kind() {
        io::ErrorKind::InvalidData | io::ErrorKind::FileTooLarge => {
            CacheError::Damaged { path: path.to_owned(), reason: error.to_string() }
        }
        _ => io_error(path, error),
    })
}

fn read_record(path: &Path) -> Result<Record> {
    let text = read(path, LARGEST_RECORD)?;
    let record = serde_json::from_str(&text).map_err(|error| error.to_string());
    record
        .and_then(|record: Record| record.verify().map(|()| record))
        .map_err(|reason| CacheError::Damaged { path: path.to_owned(), reason })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_machines_and_files() {
        assert_eq!(slug("AMD EPYC(TM) 9V74  80-Core"), "amd-epyc-tm-9v74-80-core");
        let own = scope(Isa::AVX512);
        assert!(is_safe_name(&own) && own.ends_with("_avx512"), "{own}");
        for bad in ["", ".", "..", "a/b", "a\\b", ".hidden", "a\0", "ä"] {
            assert!(!is_safe_name(bad), "{bad:?}");
        }
    }
}
