//! Saves and loads a model's state as safetensors under PyTorch's key names, reads weights that PyTorch saved or that ONNX files
//! have, and saves and loads whole training runs.
//!
//! A run's folder holds one folder per checkpoint, `step-0000000938`, with `model.safetensors`, `optimizer.safetensors`
//! and `training.json`. It is written under a temporary name and renamed when it is complete and on disk, so that a crash at any
//! moment leaves a complete checkpoint; the two newest are kept. Loading reads and checks everything (checksums, names, shapes,
//! types) before it changes anything. It accepts only regular files, and knows their lengths before it allocates memory for them.

mod numbers;
mod old_torch_file;
#[cfg(feature = "onnx")]
mod onnx_file;
mod pickle;
mod run;
mod torch_file;
mod weights;

use std::io::{self, Read};
use std::path::{Path, PathBuf};

use convoke_autograd::{DType, MemoryFormat, Stored, Tensor};
use convoke_files::{escaped, open_regular, reserve, write_out};
use half::{bf16, f16};
use safetensors::tensor::{Metadata, SafeTensors, TensorInfo};

pub use run::exists;
pub(crate) use run::{load, save};
pub use weights::{LoadedWeights, OtherShape, WeightOptions, load_weights};
pub(crate) use weights::{last_layer, layer_of};

use crate::{Module, ModuleExt, State};
use numbers::{Conversion, Numbers, described, mismatch, read_value};

/// Why a checkpoint could not be written or read. Nothing was changed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// The operating system refused.
    #[error("cannot {action} {}: {}", escaped(file.display()), escaped(source))]
    Io {
        /// The file or folder.
        file: PathBuf,
        /// What was tried, as a verb.
        action: &'static str,
        /// What the system said.
        source: io::Error,
    },
    /// There is no checkpoint in the folder.
    #[error("{}: no checkpoint here (expected a folder named step-...)", escaped(folder.display()))]
    Missing {
        /// The folder.
        folder: PathBuf,
    },
    /// A file is cut off, damaged or not of this format.
    #[error("{}: {}", escaped(file.display()), escaped(reason))]
    Damaged {
        /// The file.
        file: PathBuf,
        /// What is wrong in it.
        reason: String,
    },
    /// A file is whole, but of a kind that is not read, or it names anything else than tensors. Says what to do.
    #[error("{}: {}", escaped(file.display()), escaped(reason))]
    Unsupported {
        /// The file.
        file: PathBuf,
        /// What it is, and what to do.
        reason: String,
    },
    /// The weights in a file do not fit the model as [`WeightOptions`] demand.
    #[error(
        "{}: the weights do not fit the model: {found} (`new_head` keeps a last layer for other classes as it is, `partial` \
         loads what fits)",
        escaped(file.display())
    )]
    Weights {
        /// The file.
        file: PathBuf,
        /// What fits and what does not.
        found: Box<LoadedWeights>,
    },
    /// The checkpoint is complete, but belongs to another run or model.
    #[error(
        "{}: {}: the checkpoint has {}, this run needs {}",
        escaped(file.display()),
        escaped(field),
        escaped(found),
        escaped(expected)
    )]
    Mismatch {
        /// The file.
        file: PathBuf,
        /// The tensor or setting that differs.
        field: String,
        /// What is needed.
        expected: String,
        /// What was found.
        found: String,
    },
    /// The names in the file and in the model differ.
    #[error("{}: the file does not fit the model{keys}", escaped(file.display()))]
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

pub(crate) fn failed(file: &Path, action: &'static str) -> impl FnOnce(io::Error) -> CheckpointError {
    let file = file.to_owned();
    move |source| CheckpointError::Io { file, action, source }
}

pub(crate) fn damaged(file: &Path, reason: impl std::fmt::Display) -> CheckpointError {
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
/// The file appears under its name only when it is complete; a link of this name is replaced, not followed.
///
/// # Errors
/// If the file cannot be written, or a lazy layer has no parameters yet.
pub fn save_model(model: &(impl Module + ?Sized), file: &Path) -> Result<()> {
    model.check_all_initialized()?;
    write_out(file, &to_safetensors(&model_values(model))?).map_err(failed(file, "write"))
}

/// Loads what [`save_model`] (or PyTorch, through safetensors) wrote into a model of the same structure.
///
/// As in PyTorch's `load_state_dict`, numbers are converted to the model's type (from F16, BF16, F32 or F64), and if the file has
/// no `num_batches_tracked` (PyTorch before 0.4.1), those counters stay as they are.
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
#[non_exhaustive]
pub struct IncompatibleKeys {
    /// What the model has and the file lacks: left as it was.
    pub missing: Vec<String>,
    /// What the file has and the model lacks: not loaded.
    pub unexpected: Vec<String>,
}

impl std::fmt::Display for IncompatibleKeys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        list(f, "missing", &self.missing)?;
        list(f, "unexpected", &self.unexpected)
    }
}

/// Adds the number and the first of these names to a message, if there are any.
fn list(f: &mut std::fmt::Formatter<'_>, what: &str, names: &[impl std::fmt::Display]) -> std::fmt::Result {
    if names.is_empty() {
        return Ok(());
    }
    let shown: Vec<_> = names.iter().take(SHOWN).map(|name| escaped(name).to_string()).collect();
    let more = if names.len() > SHOWN { ", ..." } else { "" };
    write!(f, "; {} {what}: {}{more}", names.len(), shown.join(", "))
}

/// How many names a message has.
const SHOWN: usize = 8;

fn load_keys(model: &(impl Module + ?Sized), file: &Path, strict: bool) -> Result<IncompatibleKeys> {
    model.check_all_initialized()?;
    let bytes = read(file)?;
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
            *value = read_stored(file, &stored, name, value, Conversion::AnyFloat)?;
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

/// Sets values that [`from_safetensors`] has checked against this model.
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

/// The bytes of a safetensors file with these values, in the order that the format requires: larger types first, then by name.
pub(crate) fn to_safetensors(values: &[(String, Value)]) -> Result<Vec<u8>> {
    let info = |(name, value): &'_ (String, Value)| {
        let (dtype, shape) = described(value);
        (dtype, name.clone(), shape.to_vec())
    };
    let mut order: Vec<_> = values.iter().map(|named| (info(named), &named.1)).collect();
    order.sort_by(|((left, name, _), _), ((right, other, _), _)| right.cmp(left).then(name.cmp(other)));
    let (mut infos, mut end) = (Vec::with_capacity(order.len()), 0);
    for ((dtype, name, shape), value) in &order {
        let start = end;
        end += match value {
            Value::Tensor(tensor) => tensor.len() * tensor.dtype().size(),
            Value::Count(_) => size_of::<i64>(),
        };
        let (name, shape) = (name.clone(), shape.clone());
        infos.push((name, TensorInfo { dtype: *dtype, shape, data_offsets: (start, end) }));
    }
    let metadata = Metadata::new(None, infos).expect("names and sizes are in order");
    let mut header = serde_json::to_vec(&metadata).expect("names and numbers");
    header.resize(header.len().next_multiple_of(size_of::<u64>()), b' ');
    let mut bytes = convoke_memory::with_capacity(size_of::<u64>() + header.len() + end)
        .map_err(convoke_autograd::Error::from)?;
    bytes.extend_from_slice(&(header.len() as u64).to_le_bytes());
    bytes.extend_from_slice(&header);
    for (_, value) in order {
        match value {
            Value::Count(count) => bytes.extend_from_slice(&count.to_le_bytes()),
            Value::Tensor(tensor) => match tensor.dtype() {
                DType::F32 => put(tensor, f32::to_le_bytes, &mut bytes)?,
                DType::F64 => put(tensor, f64::to_le_bytes, &mut bytes)?,
                DType::F16 => put(tensor, f16::to_le_bytes, &mut bytes)?,
                DType::BF16 => put(tensor, bf16::to_le_bytes, &mut bytes)?,
            },
        }
    }
    Ok(bytes)
}

/// Appends the elements in N, C, H, W order; `bytes` has room for them.
fn put<T: Stored, const SIZE: usize>(
    tensor: &Tensor,
    number: impl Fn(T) -> [u8; SIZE],
    bytes: &mut Vec<u8>,
) -> Result<()> {
    let contiguous = tensor.detach().to_format(MemoryFormat::Contiguous)?;
    contiguous.data::<T>()?.iter().for_each(|&x| bytes.extend_from_slice(&number(x)));
    Ok(())
}

/// Parses the header of a safetensors file.
fn open<'a>(file: &Path, bytes: &'a [u8]) -> Result<SafeTensors<'a>> {
    check_values(file, header(bytes).unwrap_or_default())?;
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
    expected.iter().map(|(name, like)| read_stored(file, &stored, name, like, Conversion::None)).collect()
}

/// The value of this name in a safetensors file, of the kind, shape and type of `like`.
fn read_stored(
    file: &Path,
    stored: &SafeTensors<'_>,
    name: &str,
    like: &Value,
    conversion: Conversion,
) -> Result<Value> {
    let view = stored.tensor(name).map_err(|_| mismatch(file, name, like, None))?;
    read_value(file, name, &Numbers::of(&view), like, conversion)
}

/// Whether the bytes end where the last tensor does; `None` if the header cannot be read.
///
/// [`SafeTensors::deserialize`] compares this too, but with a sum that overflows for a hostile header.
fn ends_with_its_tensors(bytes: &[u8]) -> Option<bool> {
    let header = header(bytes)?;
    Some(data_len(header)? == (bytes.len() - size_of::<u64>() - header.len()) as u64)
}

/// The header of a safetensors file, behind its length.
fn header(bytes: &[u8]) -> Option<&[u8]> {
    let (len, rest) = bytes.split_first_chunk()?;
    rest.get(..usize::try_from(u64::from_le_bytes(*len)).ok()?)
}

/// Fails if a header has more than [`MOST_VALUES`] values. Parsing takes memory for each of them, however short it is.
fn check_values(file: &Path, header: &[u8]) -> Result<()> {
    match header.iter().filter(|byte| **byte == b',').count() {
        commas if commas > MOST_VALUES => {
            Err(damaged(file, format!("not whole: a header of more than {MOST_VALUES} values")))
        }
        _ => Ok(()),
    }
}

/// The bytes of all tensors that a header describes.
fn data_len(header: &[u8]) -> Option<u64> {
    serde_json::from_slice::<Metadata>(header).ok().map(|metadata| metadata.data_len() as u64)
}

/// Longer headers are refused; a hundred thousand tensors need less.
const LARGEST_HEADER: u64 = 16 << 20;
/// Headers of more values are refused: a value of two bytes takes a hundred when it is parsed. A tensor has some ten.
const MOST_VALUES: usize = 1 << 20;

/// The bytes of a safetensors file. The tensors are read only if the header describes exactly the file's length, so that a huge
/// sparse file takes no memory.
fn read(file: &Path) -> Result<Vec<u8>> {
    let mut opened = open_regular(file).map_err(failed(file, "read"))?;
    let mut left = opened.metadata().map_err(failed(file, "read"))?.len();
    let mut bytes = Vec::new();
    let mut read = |bytes: &mut Vec<u8>, more: u64| {
        let more = more.min(left);
        left -= more;
        reserve(bytes, more)
            .and_then(|()| opened.by_ref().take(more).read_to_end(bytes))
            .map_err(failed(file, "read"))
            .map(|_| left)
    };
    read(&mut bytes, 8)?;
    let len = bytes.first_chunk().map_or(0, |len| u64::from_le_bytes(*len));
    if len > LARGEST_HEADER {
        return Err(damaged(
            file,
            format!("not whole: a header of {len} bytes, where at most {LARGEST_HEADER} are read"),
        ));
    }
    let left = read(&mut bytes, len)?;
    check_values(file, header(&bytes).unwrap_or_default())?;
    match data_len(bytes.get(8..).unwrap_or_default()) {
        Some(len) if len == left => drop(read(&mut bytes, left)?),
        Some(_) => return Err(damaged(file, "not whole: its header describes another length")),
        None => {}
    }
    // If the header cannot be parsed, the caller's parser reports why.
    Ok(bytes)
}
