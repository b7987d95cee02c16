//! Checkpoints of training runs: one folder per step, complete at every moment, with every byte covered by a checksum.
//!
//! ```text
//! RUN/step-0000000938/training.json           what the run is and where it stands; lengths and SHA-256 sums of the other files
//!                     model.safetensors
//!                     optimizer.safetensors
//!                     average.safetensors     only if the run averages its weights: as model.safetensors, with the averages
//! ```
//! The second line of `training.json` is the SHA-256 of the rest of it (`sed 2d training.json | sha256sum`), so that no changed,
//! missing or added byte of a checkpoint passes. Checkpoints of format 1 had no such line, and are refused.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use convoke_files::{NewFolder, create_folder, moved_aside_from, read_bounded, remove_leftovers};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::{CheckpointError, Result, damaged, failed};

/// A file of a checkpoint, as `training.json` records it.
#[derive(Serialize, Deserialize)]
struct FileRecord {
    name: String,
    bytes: u64,
    sha256: String,
}

/// `training.json` without its checksum.
#[derive(Serialize, Deserialize)]
struct Manifest<S> {
    format: String,
    files: Vec<FileRecord>,
    state: S,
}

/// What all formats of `training.json` have. The rest is skipped and takes no memory, whatever it is.
#[derive(Deserialize)]
struct Format {
    format: String,
}

const FORMAT: &str = "convoke training checkpoint 2";
const MANIFEST: &str = "training.json";
/// A longer manifest is refused; ten million steps need nearly this. What is read of one takes some ten times its length.
const LARGEST_MANIFEST: u64 = 1 << 28;
const KEPT: usize = 2;

fn sha256(parts: &[&[u8]]) -> String {
    let mut hash = Sha256::new();
    parts.iter().for_each(|part| hash.update(part));
    hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The line with the checksum of the text before it and the text after it.
fn seal(before: &[u8], after: &[u8]) -> String {
    format!("  \"sha256\": \"{}\",\n", sha256(&[before, after]))
}

/// Inserts the checksum of an object's JSON as its second line.
fn sealed(json: &str) -> Option<String> {
    let (before, after) = json.split_at(json.find('\n')? + 1);
    Some(format!("{before}{}{after}", seal(before.as_bytes(), after.as_bytes())))
}

/// Removes the checksum from the JSON if it is right. Returns whether it was.
fn unseal(json: &mut Vec<u8>) -> bool {
    let line_end =
        |from: usize| json.get(from..)?.iter().position(|byte| *byte == b'\n').map(|place| from + place + 1);
    let Some(line) = line_end(0).and_then(|start| Some(start..line_end(start)?)) else { return false };
    let right = json[line.clone()] == *seal(&json[..line.start], &json[line.end..]).as_bytes();
    if right {
        json.drain(line);
    }
    right
}

fn step_name(step: u64) -> String {
    format!("step-{step:010}")
}

/// Writes the checkpoint of `step` into `folder`, and removes all but the newest two.
///
/// A later step in the folder is an error: it belongs to another run, and would be kept instead of what is saved now.
pub(crate) fn save<S: Serialize>(
    folder: &Path,
    step: u64,
    state: &S,
    files: &[(&str, Vec<u8>)],
) -> Result<()> {
    if let Some(newest) = checkpoints(folder)?.pop().filter(|newest| newest.step > step) {
        return Err(CheckpointError::Mismatch {
            file: newest.path,
            field: "step".into(),
            expected: format!("at most {step}"),
            found: newest.step.to_string(),
        });
    }
    create_folder(folder).map_err(failed(folder, "create"))?;
    remove_leftovers(folder);
    let target = folder.join(step_name(step));
    let record = |(name, bytes): &(&str, Vec<u8>)| FileRecord {
        name: (*name).into(),
        bytes: bytes.len() as u64,
        sha256: sha256(&[bytes]),
    };
    let manifest = Manifest { format: FORMAT.into(), files: files.iter().map(record).collect(), state };
    let json = serde_json::to_string_pretty(&manifest).map_err(|error| damaged(&target, error))?;
    let json = sealed(&json).expect("an object has lines");
    let new = NewFolder::new_in(folder).map_err(failed(&target, "create"))?;
    for (name, bytes) in files {
        new.write(name, bytes).map_err(failed(&target.join(name), "write"))?;
    }
    new.write(MANIFEST, json.as_bytes()).map_err(failed(&target.join(MANIFEST), "write"))?;
    new.finish(&target).map_err(failed(&target, "rename to"))?;
    prune(folder)
}

/// Removes all but the newest two steps, and folders that were moved aside for a checkpoint that is now complete.
fn prune(folder: &Path) -> Result<()> {
    let whole = checkpoints(folder)?;
    let mut steps: Vec<u64> = whole.iter().map(|found| found.step).collect();
    steps.dedup();
    let oldest = steps.iter().rev().nth(KEPT - 1).copied().unwrap_or(0);
    let replaced =
        |found: &Found| !found.own && whole.iter().any(|other| other.own && other.step == found.step);
    let all = step_folders(folder)?;
    all.iter().filter(|found| found.step < oldest || replaced(found)).for_each(|found| remove(&found.path));
    Ok(())
}

/// Removes what is no longer needed. A failure does no harm and is ignored.
fn remove(path: &Path) {
    let _ = fs::remove_dir_all(path).or_else(|_| fs::remove_file(path));
}

/// A folder that is named like a checkpoint. The newest sorts last.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Found {
    step: u64,
    /// Whether it has its original name; otherwise it was moved aside for another checkpoint of the same step.
    own: bool,
    path: PathBuf,
}

/// The checkpoints in a folder, oldest first. A folder without a manifest was left by a crash and does not count.
fn checkpoints(folder: &Path) -> Result<Vec<Found>> {
    let mut found = step_folders(folder)?;
    found.retain(|found| found.path.join(MANIFEST).symlink_metadata().is_ok());
    Ok(found)
}

/// The folders that are named like checkpoints, in the order of steps.
fn step_folders(folder: &Path) -> Result<Vec<Found>> {
    let entries = match fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(failed(folder, "read")(error)),
    };
    let mut found = Vec::new();
    for entry in entries {
        let path = entry.map_err(failed(folder, "read"))?.path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let original = moved_aside_from(name);
        let name = original.unwrap_or(name);
        let step = name.strip_prefix("step-").and_then(|step| step.parse().ok());
        if let Some(step) = step.filter(|step| step_name(*step) == name) {
            found.push(Found { step, own: original.is_none(), path });
        }
    }
    found.sort();
    Ok(found)
}

/// Whether the folder holds a checkpoint.
///
/// # Errors
/// If the folder cannot be read.
pub fn exists(folder: &Path) -> Result<bool> {
    Ok(!checkpoints(folder)?.is_empty())
}

/// The newest checkpoint of a folder: its state, and its other files with verified checksums.
pub(crate) struct Loaded<S> {
    /// `training.json`.
    pub(crate) manifest: PathBuf,
    /// The step that the folder is named for.
    pub(crate) step: u64,
    pub(crate) state: S,
    pub(crate) files: Vec<(PathBuf, Vec<u8>)>,
}

/// Loads the newest checkpoint; `names` says which of its files are wanted.
pub(crate) fn load<S: for<'a> Deserialize<'a>>(
    folder: &Path,
    names: impl FnOnce(&S) -> Vec<&'static str>,
) -> Result<Loaded<S>> {
    let Found { step, path, .. } =
        checkpoints(folder)?.pop().ok_or_else(|| CheckpointError::Missing { folder: folder.to_owned() })?;
    let manifest_path = path.join(MANIFEST);
    let mut json = read_bounded(&manifest_path, LARGEST_MANIFEST).map_err(failed(&manifest_path, "read"))?;
    let sealed = unseal(&mut json);
    // Compare the format first: a later format may have another state, and no checksum or another one.
    let format = serde_json::from_slice::<Format>(&json).map(|found| found.format);
    match format {
        Ok(format) if format != FORMAT => return Err(other_format(manifest_path, format)),
        _ if !sealed => {
            let reason = "its second line is not the SHA-256 of the rest of it: cut off or changed";
            return Err(damaged(&manifest_path, reason));
        }
        _ => {}
    }
    let manifest: Manifest<S> =
        serde_json::from_slice(&json).map_err(|error| damaged(&manifest_path, error))?;
    drop(json);
    let mut files = Vec::new();
    for name in names(&manifest.state) {
        let file = path.join(name);
        let record = manifest.files.iter().find(|record| record.name == name);
        let record = record.ok_or_else(|| damaged(&manifest_path, format!("files: {name} is not listed")))?;
        let bytes = read_bounded(&file, record.bytes).map_err(failed(&file, "read"))?;
        if sha256(&[&bytes]) != record.sha256 {
            return Err(damaged(&file, "its SHA-256 is not the one in training.json: cut off or changed"));
        }
        files.push((file, bytes));
    }
    Ok(Loaded { manifest: manifest_path, step, state: manifest.state, files })
}

fn other_format(file: PathBuf, found: String) -> CheckpointError {
    CheckpointError::Mismatch { file, field: "format".into(), expected: FORMAT.into(), found }
}
