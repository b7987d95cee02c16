//! Saving and loading: a model's state as safetensors under PyTorch's key names, and whole training runs.
//!
//! A run's folder holds one folder a checkpoint, `step-0000000938`, with `model.safetensors`, `optimizer.safetensors`
//! and `training.json`. It is written under a temporary name and renamed when it is whole and on disk, so that a crash at
//! any moment leaves the previous checkpoint untouched; the two newest are kept. Loading reads and checks everything
//! (checksums, names, shapes, types) before it changes anything.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use convoke_autograd::{DType, Device, MemoryFormat, Stored, Tensor};
use half::{bf16, f16};
use safetensors::tensor::{Dtype, Metadata, SafeTensors, TensorView};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::{Module, ModuleExt, State};

/// Why a checkpoint could not be written or read. Nothing was changed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// The operating system refused.
    #[error("cannot {action} {}: {source}", file.display())]
    Io {
        /// The file or folder.
        file: PathBuf,
        /// What was tried, as a verb.
        action: &'static str,
        /// What the system said.
        source: std::io::Error,
    },
    /// There is no checkpoint in the folder.
    #[error("{}: no checkpoint here (expected a folder named step-...)", folder.display())]
    Missing {
        /// The folder.
        folder: PathBuf,
    },
    /// A file is cut off, damaged or not of this format.
    #[error("{}: {reason}", file.display())]
    Damaged {
        /// The file.
        file: PathBuf,
        /// What is wrong in it.
        reason: String,
    },
    /// The checkpoint is whole, but of something else.
    #[error("{}: {field}: the checkpoint has {found}, this run needs {expected}", file.display())]
    Mismatch {
        /// The file.
        file: PathBuf,
        /// The tensor or the setting that differs.
        field: String,
        /// What is needed.
        expected: String,
        /// What was found.
        found: String,
    },
    /// The names in the file and in the model differ.
    #[error("{}: the file does not fit the model{keys}", file.display())]
    Keys {
        /// The file.
        file: PathBuf,
        /// The names.
        keys: IncompatibleKeys,
    },
    /// A tensor could not be made or read.
    #[error(transparent)]
    Tensor(#[from] convoke_autograd::Error),
}

type Result<T> = std::result::Result<T, CheckpointError>;

fn io(file: &Path, action: &'static str) -> impl FnOnce(std::io::Error) -> CheckpointError {
    let file = file.to_owned();
    move |source| CheckpointError::Io { file, action, source }
}

fn damaged(file: &Path, reason: impl std::fmt::Display) -> CheckpointError {
    CheckpointError::Damaged { file: file.to_owned(), reason: reason.to_string() }
}

/// One named value of a file: a tensor, or a whole number of shape `[]`.
pub(crate) enum Value {
    /// A tensor of floating-point numbers.
    Tensor(Tensor),
    /// A count, stored as I64.
    Count(i64),
}

/// Writes the state of every module in the tree, with PyTorch's key names, as a safetensors file.
///
/// The file appears whole under its name, or not at all.
///
/// # Errors
/// If the file cannot be written, or a lazy layer has no parameters yet.
pub fn save_model(model: &(impl Module + ?Sized), file: &Path) -> Result<()> {
    model.check_all_initialized()?;
    write_atomically(file, &to_safetensors(&model_values(model))?)
}

/// Loads what [`save_model`] (or PyTorch, through safetensors) wrote into a model of the same structure.
///
/// As PyTorch's `load_state_dict`: numbers are converted to the model's type (from F16, BF16, F32 or F64), and a file
/// without `num_batches_tracked` (PyTorch before 0.4.1) leaves those counters as they are.
///
/// # Errors
/// If the file is damaged, or a name or shape differs; the model is then unchanged.
pub fn load_model(model: &(impl Module + ?Sized), file: &Path) -> Result<()> {
    load_keys(model, file, true).map(drop)
}

/// As [`load_model`], but loads what fits by name and returns the rest: PyTorch's `strict=False`.
///
/// # Errors
/// If the file is damaged, or a shape differs under the same name; the model is then unchanged.
pub fn load_model_non_strict(model: &(impl Module + ?Sized), file: &Path) -> Result<IncompatibleKeys> {
    load_keys(model, file, false)
}

/// The names that only one of a model and a file has.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct IncompatibleKeys {
    /// What the model has and the file lacks: left as it was.
    pub missing: Vec<String>,
    /// What the file has and the model lacks: not loaded.
    pub unexpected: Vec<String>,
}

impl std::fmt::Display for IncompatibleKeys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for (what, names) in [("missing", &self.missing), ("unexpected", &self.unexpected)] {
            const SHOWN: usize = 8;
            if !names.is_empty() {
                let shown = names.iter().take(SHOWN).map(String::as_str).collect::<Vec<_>>().join(", ");
                let more = if names.len() > SHOWN { ", ..." } else { "" };
                write!(f, "; {} {what}: {shown}{more}", names.len())?;
            }
        }
        Ok(())
    }
}

fn load_keys(model: &(impl Module + ?Sized), file: &Path, strict: bool) -> Result<IncompatibleKeys> {
    model.check_all_initialized()?;
    let bytes = fs::read(file).map_err(io(file, "read"))?;
    let stored = open(file, &bytes)?;
    let mut values = model_values(model);
    let names: Vec<&str> = stored.names();
    let unexpected = names.iter().filter(|name| values.iter().all(|(known, _)| known != *name));
    let missing = values.iter().map(|(name, _)| name).filter(|name| !names.contains(&name.as_str()));
    let mut keys = IncompatibleKeys {
        missing: missing.filter(|name| !may_be_absent(name)).cloned().collect(),
        unexpected: unexpected.map(|&name| name.to_owned()).collect(),
    };
    keys.unexpected.sort_unstable();
    if strict && keys != IncompatibleKeys::default() {
        return Err(CheckpointError::Keys { file: file.to_owned(), keys });
    }
    for (name, value) in &mut values {
        if names.contains(&name.as_str()) {
            *value = read_value(file, &stored, name, value, Conversion::AnyFloat)?;
        }
    }
    set_model(model, values.into_iter().map(|(_, value)| value).collect())?;
    Ok(keys)
}

/// PyTorch's batch norm did not count before version 2 of its state dict.
fn may_be_absent(name: &str) -> bool {
    name == "num_batches_tracked" || name.ends_with(".num_batches_tracked")
}

/// Everything that a model holds, by path.
pub(crate) fn model_values(model: &(impl Module + ?Sized)) -> Vec<(String, Value)> {
    let value = |state| match state {
        State::Parameter(parameter) => Value::Tensor(parameter.value()),
        State::Buffer(buffer) => Value::Tensor(buffer.value()),
        State::Counter(counter) => Value::Count(counter.value()),
    };
    model.named_state().into_iter().map(|(name, state)| (name, value(state))).collect()
}

/// Sets values that [`from_safetensors`] has compared with this model's.
pub(crate) fn set_model(model: &(impl Module + ?Sized), values: Vec<Value>) -> Result<()> {
    for ((_, state), value) in model.named_state().into_iter().zip(values) {
        match (state, value) {
            (State::Parameter(parameter), Value::Tensor(tensor)) => parameter.set(&tensor)?,
            (State::Buffer(buffer), Value::Tensor(tensor)) => buffer.set(&tensor)?,
            (State::Counter(counter), Value::Count(count)) => counter.set(count),
            _ => unreachable!("from_safetensors gives values of the kinds it was asked for"),
        }
    }
    Ok(())
}

/// The bytes of a safetensors file with these values.
pub(crate) fn to_safetensors(values: &[(String, Value)]) -> Result<Vec<u8>> {
    let mut stored = Vec::with_capacity(values.len());
    for (name, value) in values {
        stored.push((
            name,
            match value {
                Value::Tensor(tensor) => {
                    (dtype(tensor.dtype()), tensor.shape().to_vec(), contiguous_bytes(tensor)?)
                }
                Value::Count(count) => (Dtype::I64, Vec::new(), count.to_le_bytes().to_vec()),
            },
        ));
    }
    let views = stored.iter().map(|(name, (dtype, shape, bytes))| {
        let view = TensorView::new(*dtype, shape.clone(), bytes).expect("the bytes are the shape's");
        (name.as_str(), view)
    });
    Ok(safetensors::serialize(views, None).expect("names and sizes are in order"))
}

fn dtype(dtype: DType) -> Dtype {
    match dtype {
        DType::F32 => Dtype::F32,
        DType::F64 => Dtype::F64,
        DType::F16 => Dtype::F16,
        DType::BF16 => Dtype::BF16,
    }
}

/// The elements in N, C, H, W order, little-endian.
fn contiguous_bytes(tensor: &Tensor) -> Result<Vec<u8>> {
    Ok(match tensor.dtype() {
        DType::F32 => tensor.to_vec::<f32>()?.iter().flat_map(|x| x.to_le_bytes()).collect(),
        DType::F64 => tensor.to_vec::<f64>()?.iter().flat_map(|x| x.to_le_bytes()).collect(),
        DType::F16 => tensor.to_vec::<f16>()?.iter().flat_map(|x| x.to_le_bytes()).collect(),
        DType::BF16 => tensor.to_vec::<bf16>()?.iter().flat_map(|x| x.to_le_bytes()).collect(),
    })
}

/// The tensors of a safetensors file.
fn open<'a>(file: &Path, bytes: &'a [u8]) -> Result<SafeTensors<'a>> {
    if ends_with_its_tensors(bytes) == Some(false) {
        return Err(damaged(file, "not whole: its header describes another length"));
    }
    SafeTensors::deserialize(bytes).map_err(|error| damaged(file, format!("not whole: {error}")))
}

/// Reads exactly the values named in `expected`, of their kinds, shapes and types, in their order.
pub(crate) fn from_safetensors(
    file: &Path,
    bytes: &[u8],
    expected: &[(String, Value)],
) -> Result<Vec<Value>> {
    let stored = open(file, bytes)?;
    if let Some(name) =
        stored.names().into_iter().find(|name| expected.iter().all(|(known, _)| known != name))
    {
        return Err(CheckpointError::Mismatch {
            file: file.to_owned(),
            field: name.to_owned(),
            expected: "no such tensor".into(),
            found: "one".into(),
        });
    }
    expected.iter().map(|(name, like)| read_value(file, &stored, name, like, Conversion::None)).collect()
}

/// Whether the bytes end where the last tensor does; `None` if the header cannot be read.
///
/// [`SafeTensors::deserialize`] compares this too, but with a sum that overflows for a hostile header.
fn ends_with_its_tensors(bytes: &[u8]) -> Option<bool> {
    let (len, rest) = bytes.split_first_chunk()?;
    let len = usize::try_from(u64::from_le_bytes(*len)).ok()?;
    let metadata: Metadata = serde_json::from_slice(rest.get(..len)?).ok()?;
    Some(metadata.data_len() == rest.len() - len)
}

/// Which types of numbers may be read into a tensor.
#[derive(Clone, Copy, PartialEq)]
enum Conversion {
    /// Its own.
    None,
    /// Every floating-point type.
    AnyFloat,
}

fn read_value(
    file: &Path,
    stored: &SafeTensors<'_>,
    name: &str,
    like: &Value,
    conversion: Conversion,
) -> Result<Value> {
    let (wanted_dtype, wanted_shape) = match like {
        Value::Tensor(tensor) => (dtype(tensor.dtype()), tensor.shape().to_vec()),
        Value::Count(_) => (Dtype::I64, Vec::new()),
    };
    let describe = |dtype: Dtype, shape: &[usize]| format!("{dtype:?} of shape {shape:?}");
    let mismatch = |found: String| CheckpointError::Mismatch {
        file: file.to_owned(),
        field: name.to_owned(),
        expected: describe(wanted_dtype, &wanted_shape),
        found,
    };
    let view = stored.tensor(name).map_err(|_| mismatch("no such tensor".into()))?;
    let readable = view.dtype() == wanted_dtype
        || (conversion == Conversion::AnyFloat
            && wanted_dtype != Dtype::I64
            && matches!(view.dtype(), Dtype::F16 | Dtype::BF16 | Dtype::F32 | Dtype::F64));
    if !readable || view.shape() != wanted_shape {
        return Err(mismatch(describe(view.dtype(), view.shape())));
    }
    Ok(match like {
        Value::Count(_) => {
            let bytes =
                view.data().try_into().map_err(|_| damaged(file, format!("{name} is not 8 bytes")))?;
            Value::Count(i64::from_le_bytes(bytes))
        }
        Value::Tensor(tensor) => Value::Tensor(match tensor.dtype() {
            DType::F32 => decode::<f32>(tensor.device(), &view)?,
            DType::F64 => decode::<f64>(tensor.device(), &view)?,
            DType::F16 => decode::<f16>(tensor.device(), &view)?,
            DType::BF16 => decode::<bf16>(tensor.device(), &view)?,
        }),
    })
}

/// A tensor of the numbers that `view` holds, whatever their floating-point type.
fn decode<T: Stored>(device: &Device, view: &TensorView<'_>) -> Result<Tensor> {
    fn fill<T: Stored, const SIZE: usize>(data: &mut [T], bytes: &[u8], number: impl Fn([u8; SIZE]) -> f64) {
        for (value, bytes) in data.iter_mut().zip(bytes.as_chunks().0) {
            *value = T::of(number(*bytes));
        }
    }
    let bytes = view.data();
    Ok(Tensor::build(device, view.shape(), MemoryFormat::Contiguous, |data: &mut [T]| {
        match view.dtype() {
            Dtype::F16 => fill(data, bytes, |bytes| f16::from_le_bytes(bytes).to_f64()),
            Dtype::BF16 => fill(data, bytes, |bytes| bf16::from_le_bytes(bytes).to_f64()),
            Dtype::F32 => fill(data, bytes, |bytes| f32::from_le_bytes(bytes).into()),
            _ => fill(data, bytes, f64::from_le_bytes),
        }
        Ok(())
    })?)
}

/// Writes a file under a temporary name beside it, makes sure it is on disk, and renames it.
///
/// # Errors
/// If the file cannot be written; what was there before is untouched.
pub fn write_atomically(file: &Path, bytes: &[u8]) -> Result<()> {
    let mut temporary = file.as_os_str().to_owned();
    temporary.push(format!(".{}.tmp", std::process::id()));
    let temporary = PathBuf::from(temporary);
    let result = write_synced(&temporary, bytes)
        .and_then(|()| fs::rename(&temporary, file).map_err(io(file, "rename to")));
    if result.is_err() {
        // The error that matters is the one above.
        let _ = fs::remove_file(&temporary);
    }
    result
}

fn write_synced(file: &Path, bytes: &[u8]) -> Result<()> {
    let mut out = fs::File::create(file).map_err(io(file, "create"))?;
    out.write_all(bytes).map_err(io(file, "write"))?;
    out.sync_all().map_err(io(file, "write"))
}

/// A file of a checkpoint, as `training.json` records it.
#[derive(Serialize, Deserialize)]
struct FileRecord {
    name: String,
    sha256: String,
}

/// `training.json`: what the run was and where it stood, and the checksums of the other files.
#[derive(Serialize, Deserialize)]
struct Manifest<S> {
    format: String,
    files: Vec<FileRecord>,
    state: S,
}

const FORMAT: &str = "convoke training checkpoint 1";
const MANIFEST: &str = "training.json";
const KEPT: usize = 2;

fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Writes the checkpoint of `step` into `folder`, and removes all but the newest two.
///
/// A later step in the folder is an error: it belongs to another run, and would outlive what is saved now.
pub(crate) fn save<S: Serialize>(
    folder: &Path,
    step: u64,
    state: &S,
    files: &[(&str, Vec<u8>)],
) -> Result<()> {
    if let Some((newest, path)) = checkpoints(folder)?.pop().filter(|(newest, _)| *newest > step) {
        return Err(CheckpointError::Mismatch {
            file: path,
            field: "step".into(),
            expected: format!("at most {step}"),
            found: newest.to_string(),
        });
    }
    let target = folder.join(format!("step-{step:010}"));
    let hidden = |end: &str| folder.join(format!(".step-{step:010}.{}.{end}", std::process::id()));
    let (temporary, replaced) = (hidden("tmp"), hidden("old"));
    fs::create_dir_all(&temporary).map_err(io(&temporary, "create"))?;
    let records = files
        .iter()
        .map(|(name, bytes)| FileRecord { name: (*name).into(), sha256: sha256(bytes) })
        .collect();
    let manifest = Manifest { format: FORMAT.into(), files: records, state };
    let json = serde_json::to_vec_pretty(&manifest).map_err(|error| damaged(&target, error))?;
    let write_all = || -> Result<()> {
        for (name, bytes) in files {
            write_synced(&temporary.join(name), bytes)?;
        }
        write_synced(&temporary.join(MANIFEST), &json)?;
        if !target.exists() {
            return fs::rename(&temporary, &target).map_err(io(&target, "rename to"));
        }
        // The same step again: a run that was resumed and stopped at once. The old one is moved out of the way
        // first, for a crash while it is being removed would leave half a checkpoint under its name.
        remove(&replaced);
        fs::rename(&target, &replaced).map_err(io(&target, "replace"))?;
        if let Err(error) = fs::rename(&temporary, &target) {
            // The error that matters is the first one.
            let _ = fs::rename(&replaced, &target);
            return Err(io(&target, "rename to")(error));
        }
        remove(&replaced);
        Ok(())
    };
    let result = write_all();
    if result.is_err() {
        // The error that matters is the one above.
        let _ = fs::remove_dir_all(&temporary);
    }
    result?;
    if let Some((oldest, _)) = checkpoints(folder)?.into_iter().rev().nth(KEPT - 1) {
        let old = step_folders(folder)?.into_iter().filter(|(step, _)| *step < oldest);
        old.for_each(|(_, path)| remove(&path));
    }
    Ok(())
}

/// Removes what is no longer needed; if that cannot be done, it does no harm.
fn remove(path: &Path) {
    let _ = fs::remove_dir_all(path).or_else(|_| fs::remove_file(path));
}

/// The checkpoints in a folder, oldest first. What has no manifest is what a crash left of one.
fn checkpoints(folder: &Path) -> Result<Vec<(u64, PathBuf)>> {
    let mut found = step_folders(folder)?;
    found.retain(|(_, path)| path.join(MANIFEST).is_file());
    Ok(found)
}

/// What is named like a checkpoint, in the order of steps.
fn step_folders(folder: &Path) -> Result<Vec<(u64, PathBuf)>> {
    let entries = match fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(io(folder, "read")(error)),
    };
    let mut found = Vec::new();
    for entry in entries {
        let path = entry.map_err(io(folder, "read"))?.path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        if let Some(step) = name.strip_prefix("step-").and_then(|step| step.parse().ok()) {
            found.push((step, path));
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

/// The newest checkpoint of a folder: its path, its state, and its other files with their checksums compared.
pub(crate) struct Loaded<S> {
    pub(crate) path: PathBuf,
    pub(crate) state: S,
    pub(crate) files: Vec<(PathBuf, Vec<u8>)>,
}

pub(crate) fn load<S: for<'a> Deserialize<'a>>(folder: &Path, names: &[&str]) -> Result<Loaded<S>> {
    let (_, path) =
        checkpoints(folder)?.pop().ok_or_else(|| CheckpointError::Missing { folder: folder.to_owned() })?;
    let manifest_path = path.join(MANIFEST);
    let json = fs::read(&manifest_path).map_err(io(&manifest_path, "read"))?;
    // The format is compared first: a later one may have another state.
    let any: Manifest<serde_json::Value> =
        serde_json::from_slice(&json).map_err(|error| damaged(&manifest_path, error))?;
    if any.format != FORMAT {
        return Err(CheckpointError::Mismatch {
            file: manifest_path,
            field: "format".into(),
            expected: FORMAT.into(),
            found: any.format,
        });
    }
    let manifest: Manifest<S> =
        serde_json::from_slice(&json).map_err(|error| damaged(&manifest_path, error))?;
    let mut files = Vec::with_capacity(names.len());
    for name in names {
        let file = path.join(name);
        let record = manifest.files.iter().find(|record| record.name == *name);
        let record = record.ok_or_else(|| damaged(&manifest_path, format!("files: {name} is not listed")))?;
        let bytes = fs::read(&file).map_err(io(&file, "read"))?;
        if sha256(&bytes) != record.sha256 {
            return Err(damaged(&file, "its SHA-256 is not the one in training.json: cut off or changed"));
        }
        files.push((file, bytes));
    }
    Ok(Loaded { path, state: manifest.state, files })
}
