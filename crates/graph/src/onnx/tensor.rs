//! Converts a file's tensors to arrays, within what the file may take.

use std::collections::HashMap;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Component, Path, PathBuf};

use convoke_files::open_regular;
use convoke_memory as memory;
use half::{bf16, f16};
use prost::bytes::Bytes;

use super::error::OnnxError;
use super::proto::{TensorProto, element};
use super::scan::{limit, varint};
use super::{LARGEST_FILE, Result};
use crate::graph::{Array, Data};

/// More dimensions are refused.
const MOST_DIMENSIONS: usize = 32;

/// Where tensors come from, and how many bytes of them may still be made.
#[derive(Debug)]
pub(super) struct TensorSource {
    /// The folder of the model, in which other files may lie.
    folder: Option<PathBuf>,
    left: u64,
    /// The files that are open, with their lengths.
    files: HashMap<PathBuf, (File, u64)>,
}

/// The bytes of an element in a file.
pub(super) fn width(data_type: i32) -> usize {
    match data_type {
        element::BOOL | element::INT8 | element::UINT8 => 1,
        element::INT16 | element::UINT16 | element::FLOAT16 | element::BFLOAT16 => 2,
        element::FLOAT | element::INT32 | element::UINT32 => 4,
        _ => 8,
    }
}

/// What is wrong with a tensor, whose name [`TensorSource::array`] adds.
fn wrong(reason: impl Into<String>) -> OnnxError {
    OnnxError::Tensor { name: String::new(), reason: reason.into() }
}

/// The numbers of a tensor, as they lie in a file.
enum Numbers {
    /// Each of the same width.
    Fixed(Vec<Bytes>),
    /// In the wire format.
    Varints(Vec<Bytes>),
}

impl TensorSource {
    /// For a model of which decoding has left this many bytes.
    pub(super) fn new(folder: Option<&Path>, left: u64) -> TensorSource {
        TensorSource { folder: folder.map(Path::to_owned), left, files: HashMap::new() }
    }

    /// Takes a part of what the file may take.
    pub(super) fn spend(&mut self, bytes: u64) -> Result<()> {
        let reason = || {
            OnnxError::TooLarge {
            reason: "the file would take more than four times its length in memory, so it is damaged or made to harm"
                .to_owned(),
        }
        };
        self.left = self.left.checked_sub(bytes).ok_or_else(reason)?;
        Ok(())
    }

    /// The array that a tensor holds.
    pub(super) fn array(&mut self, tensor: TensorProto) -> Result<Array> {
        let name = tensor.name.clone().unwrap_or_default();
        self.unnamed(tensor).map_err(|error| match error {
            OnnxError::Tensor { reason, .. } => OnnxError::Tensor { name, reason },
            error => error,
        })
    }

    fn unnamed(&mut self, tensor: TensorProto) -> Result<Array> {
        let data_type = tensor.data_type.unwrap_or(0);
        let Some(kind) = element::kind_of(data_type) else {
            return Err(wrong(format!(
                "its numbers are of the type {}, which is not supported: export the model in f32",
                element::name(data_type)
            )));
        };
        let shape = shape(&tensor.dims).map_err(wrong)?;
        let len = shape.iter().try_fold(1usize, |len, &size| len.checked_mul(size));
        let bytes = len.and_then(|len| len.checked_mul(width(data_type)));
        let (Some(len), Some(bytes)) = (len, bytes) else {
            return Err(wrong(format!("its shape {shape:?} has more elements than any machine")));
        };
        if tensor.segment.is_some() {
            return Err(wrong("it is a segment of a tensor, which is not supported"));
        }
        let numbers = self.numbers(tensor, bytes)?;
        let found = match &numbers {
            Numbers::Fixed(parts) => {
                let total: usize = parts.iter().map(Bytes::len).sum();
                (total != bytes).then_some(total / width(data_type))
            }
            Numbers::Varints(parts) => {
                let total = parts.iter().flatten().filter(|byte| **byte < 0x80).count();
                (total != len).then_some(total)
            }
        };
        if let Some(found) = found {
            return Err(wrong(format!("it holds {found} numbers, and its shape {shape:?} has {len}")));
        }
        self.spend((len as u64).saturating_mul(width(element::of(kind)) as u64))?;
        let data = match numbers {
            Numbers::Fixed(parts) => fixed(&parts, data_type, len)?,
            Numbers::Varints(parts) => varints(&parts, data_type, len)?,
        };
        Array::new(&shape, data).ok_or_else(|| wrong("its numbers do not fill its shape"))
    }

    /// The numbers, wherever they lie. `bytes` is their length if each has its width.
    fn numbers(&mut self, tensor: TensorProto, bytes: usize) -> Result<Numbers> {
        if tensor.data_location == Some(1) || !tensor.external_data.is_empty() {
            return Ok(Numbers::Fixed(vec![self.external(&tensor, bytes)?]));
        }
        if let Some(raw) = tensor.raw_data {
            return Ok(Numbers::Fixed(vec![raw]));
        }
        Ok(match tensor.data_type.unwrap_or(0) {
            element::FLOAT => Numbers::Fixed(tensor.float_data),
            element::DOUBLE => Numbers::Fixed(tensor.double_data),
            element::INT64 => Numbers::Varints(tensor.int64_data),
            element::UINT32 | element::UINT64 => Numbers::Varints(tensor.uint64_data),
            _ => Numbers::Varints(tensor.int32_data),
        })
    }

    /// Numbers of another file in the model's folder.
    fn external(&mut self, tensor: &TensorProto, bytes: usize) -> Result<Bytes> {
        let value = |key: &str| {
            let found = tensor.external_data.iter().find(|entry| entry.key.as_deref() == Some(key));
            found.and_then(|entry| entry.value.as_deref())
        };
        let number = |key: &str| -> Result<Option<u64>> {
            let refused = |_| wrong(format!("its {key} in another file is no number"));
            value(key).map(|text| text.parse().map_err(refused)).transpose()
        };
        let location = value("location").unwrap_or_default();
        let (offset, length) = (number("offset")?.unwrap_or(0), number("length")?);
        let Some(folder) = self.folder.clone() else {
            return Err(wrong(format!(
                "its numbers are in the file {location}, and the model was not read from a file: read it by its path"
            )));
        };
        let path = within(&folder, location)?;
        if !self.files.contains_key(&path) {
            let failed = |source| OnnxError::Io { action: "read", file: path.clone(), source };
            let file = open_regular(&path).map_err(failed)?;
            let len = file.metadata().map_err(failed)?.len();
            if len > LARGEST_FILE {
                return Err(wrong(format!("the file {location} is longer than {LARGEST_FILE} bytes")));
            }
            self.left = self.left.saturating_add(limit(len) - limit(0));
            self.files.insert(path.clone(), (file, len));
        }
        let Some((file, len)) = self.files.get_mut(&path) else {
            return Err(wrong(format!("the file {location} is not open")));
        };
        let wanted = bytes as u64;
        let found = length.unwrap_or(*len - offset.min(*len));
        if found != wanted {
            return Err(wrong(format!(
                "it has {found} bytes in the file {location}, and its shape needs {wanted}"
            )));
        }
        if offset.checked_add(wanted).is_none_or(|end| end > *len) {
            return Err(wrong(format!(
                "it lies beyond the end of the file {location}, which has {len} bytes: the file is not whole, or belongs to \
                 another model"
            )));
        }
        let failed = |source| OnnxError::Io { action: "read", file: path.clone(), source };
        let mut numbers = memory::filled(bytes, 0u8)?;
        file.seek(SeekFrom::Start(offset)).map_err(failed)?;
        file.read_exact(&mut numbers).map_err(failed)?;
        Ok(Bytes::from(numbers))
    }
}

/// The path of a file in a folder, through no link that leads out of it.
fn within(folder: &Path, location: &str) -> Result<PathBuf> {
    let relative = Path::new(location);
    let is_plain = relative.components().all(|part| matches!(part, Component::Normal(_) | Component::CurDir));
    if location.is_empty() || location.contains('\\') || !is_plain {
        return Err(wrong(format!(
            "its numbers are in the file {location:?}, which is not within the model's folder"
        )));
    }
    let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
    let absent =
        |error| wrong(format!("its numbers are in the file {location}, which cannot be found: {error}"));
    let path = folder.join(relative).canonicalize().map_err(absent)?;
    let folder = folder.canonicalize().map_err(absent)?;
    match path.starts_with(&folder) {
        true => Ok(path),
        false => Err(wrong(format!(
            "its numbers are in the file {location}, a link that leads out of the model's folder"
        ))),
    }
}

/// The sizes of a tensor's dimensions.
pub(super) fn shape(dims: &[i64]) -> std::result::Result<Vec<usize>, String> {
    if dims.len() > MOST_DIMENSIONS {
        return Err(format!("it has {} dimensions, at most {MOST_DIMENSIONS} are read", dims.len()));
    }
    let size = |&size: &i64| usize::try_from(size).map_err(|_| format!("its shape has the size {size}"));
    dims.iter().map(size).collect()
}

/// Numbers of equal width. Together they are as many bytes as `len` of them.
fn fixed(parts: &[Bytes], data_type: i32, len: usize) -> Result<Data> {
    Ok(match data_type {
        element::FLOAT => Data::F32(decoded(parts, len, f32::from_le_bytes)?),
        element::FLOAT16 => Data::F32(decoded(parts, len, |bytes| f16::from_le_bytes(bytes).to_f32())?),
        element::BFLOAT16 => Data::F32(decoded(parts, len, |bytes| bf16::from_le_bytes(bytes).to_f32())?),
        element::DOUBLE => Data::F64(decoded(parts, len, f64::from_le_bytes)?),
        element::BOOL => Data::Bool(decoded(parts, len, |[byte]: [u8; 1]| byte != 0)?),
        element::INT8 => Data::I64(decoded(parts, len, |bytes| i8::from_le_bytes(bytes).into())?),
        element::UINT8 => Data::I64(decoded(parts, len, |bytes| u8::from_le_bytes(bytes).into())?),
        element::INT16 => Data::I64(decoded(parts, len, |bytes| i16::from_le_bytes(bytes).into())?),
        element::UINT16 => Data::I64(decoded(parts, len, |bytes| u16::from_le_bytes(bytes).into())?),
        element::INT32 => Data::I64(decoded(parts, len, |bytes| i32::from_le_bytes(bytes).into())?),
        element::UINT32 => Data::I64(decoded(parts, len, |bytes| u32::from_le_bytes(bytes).into())?),
        element::INT64 => Data::I64(decoded(parts, len, i64::from_le_bytes)?),
        _ => {
            let numbers = decoded(parts, len, u64::from_le_bytes)?;
            if numbers.iter().any(|number| *number > i64::MAX as u64) {
                return Err(wrong("it has a number above that of 63 bits"));
            }
            // The size in memory is the same, so this takes no more of it.
            Data::I64(numbers.into_iter().map(|number| number as i64).collect())
        }
    })
}

fn decoded<T, const WIDTH: usize>(
    parts: &[Bytes],
    len: usize,
    number: impl Fn([u8; WIDTH]) -> T,
) -> Result<Vec<T>> {
    let mut numbers = memory::with_capacity(len)?;
    for part in parts {
        let (whole, rest) = part.as_chunks::<WIDTH>();
        if !rest.is_empty() {
            return Err(wrong("a part of its numbers ends within a number"));
        }
        numbers.extend(whole.iter().map(|bytes| number(*bytes)));
    }
    Ok(numbers)
}

/// Numbers of the wire format, of which there are `len`.
fn varints(parts: &[Bytes], data_type: i32, len: usize) -> Result<Data> {
    let half = |number: u64| u16::try_from(number).map_err(|_| "a half-precision number above 16 bits");
    Ok(match data_type {
        element::BOOL => Data::Bool(undone(parts, len, |number| Ok(number != 0))?),
        element::FLOAT16 => {
            Data::F32(undone(parts, len, |number| Ok(f16::from_bits(half(number)?).to_f32()))?)
        }
        element::BFLOAT16 => {
            Data::F32(undone(parts, len, |number| Ok(bf16::from_bits(half(number)?).to_f32()))?)
        }
        element::UINT32 | element::UINT64 => Data::I64(undone(parts, len, |number| {
            i64::try_from(number).map_err(|_| "a number above that of 63 bits")
        })?),
        // Negative numbers have all 64 bits.
        _ => Data::I64(undone(parts, len, |number| Ok(number as i64))?),
    })
}

fn undone<T>(
    parts: &[Bytes],
    len: usize,
    convert: impl Fn(u64) -> std::result::Result<T, &'static str>,
) -> Result<Vec<T>> {
    let mut numbers = memory::with_capacity(len)?;
    for part in parts {
        let mut rest: &[u8] = part;
        while !rest.is_empty() {
            let number = varint(&mut rest).map_err(wrong)?;
            numbers.push(convert(number).map_err(|reason| wrong(format!("it has {reason}")))?);
        }
    }
    Ok(numbers)
}
