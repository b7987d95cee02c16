//! Converts a file's numbers, of any type and in any order, to a model's values.

use std::path::Path;

use convoke_autograd::{DType, Device, MemoryFormat, Stored, Tensor, dispatch_stored};
use half::{bf16, f16};
use safetensors::tensor::{Dtype, TensorView};

use super::{CheckpointError, Result, Value};

/// The numbers of one tensor, as they lie in a file.
pub(super) struct Numbers<'a> {
    pub(super) dtype: Dtype,
    pub(super) shape: &'a [usize],
    /// The bytes from the first element on.
    pub(super) bytes: &'a [u8],
    /// The distance between neighbours along each dimension, in elements; `None` if elements lie in C order without gaps.
    pub(super) strides: Option<&'a [usize]>,
}

impl<'a> Numbers<'a> {
    pub(super) fn of(view: &'a TensorView<'a>) -> Numbers<'a> {
        Numbers { dtype: view.dtype(), shape: view.shape(), bytes: view.data(), strides: None }
    }
}

/// The types of numbers that may be read into a tensor.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Conversion {
    /// Only its own type.
    None,
    /// Every floating-point type.
    AnyFloat,
}

/// What safetensors calls a type.
pub(super) fn dtype(dtype: DType) -> Dtype {
    match dtype {
        DType::F32 => Dtype::F32,
        DType::F64 => Dtype::F64,
        DType::F16 => Dtype::F16,
        DType::BF16 => Dtype::BF16,
    }
}

/// The type and the shape that a value has in a file.
pub(super) fn described(value: &Value) -> (Dtype, &[usize]) {
    match value {
        Value::Tensor(tensor) => (dtype(tensor.dtype()), tensor.shape()),
        Value::Count(_) => (Dtype::I64, &[]),
    }
}

/// Why the value `name` of a file, of this type and shape (`None` if it is not there), is not read in place of `like`.
pub(super) fn mismatch(
    file: &Path,
    name: &str,
    like: &Value,
    found: Option<(Dtype, &[usize])>,
) -> CheckpointError {
    let text = |(dtype, shape): (Dtype, &[usize])| format!("{dtype:?} of shape {shape:?}");
    CheckpointError::Mismatch {
        file: file.to_owned(),
        field: name.to_owned(),
        expected: text(described(like)),
        found: found.map_or_else(|| "no such tensor".into(), text),
    }
}

/// Whether numbers of type `found` are read in place of `wanted`.
pub(super) fn readable(found: Dtype, wanted: Dtype, conversion: Conversion) -> bool {
    let float = |dtype| matches!(dtype, Dtype::F16 | Dtype::BF16 | Dtype::F32 | Dtype::F64);
    found == wanted || (conversion == Conversion::AnyFloat && float(found) && float(wanted))
}

/// The value that the numbers are, of the kind, shape and type of `like`.
pub(super) fn read_value(
    file: &Path,
    name: &str,
    numbers: &Numbers<'_>,
    like: &Value,
    conversion: Conversion,
) -> Result<Value> {
    let (wanted_dtype, wanted_shape) = described(like);
    if !readable(numbers.dtype, wanted_dtype, conversion) || numbers.shape != wanted_shape {
        return Err(mismatch(file, name, like, Some((numbers.dtype, numbers.shape))));
    }
    Ok(match like {
        Value::Count(_) => {
            let bytes = numbers
                .bytes
                .first_chunk()
                .ok_or_else(|| super::damaged(file, format!("{name} is not 8 bytes")))?;
            Value::Count(i64::from_le_bytes(*bytes))
        }
        Value::Tensor(tensor) => Value::Tensor(dispatch_stored!(tensor.dtype(), T => {
            decode::<T>(tensor.device(), numbers)?
        })),
    })
}

/// A tensor of the numbers, whatever their floating-point type.
fn decode<T: Stored>(device: &Device, numbers: &Numbers<'_>) -> Result<Tensor> {
    Ok(Tensor::build(device, numbers.shape, MemoryFormat::Contiguous, |data: &mut [T]| {
        match numbers.dtype {
            Dtype::F16 => fill(data, numbers, |bytes| f16::from_le_bytes(bytes).to_f64()),
            Dtype::BF16 => fill(data, numbers, |bytes| bf16::from_le_bytes(bytes).to_f64()),
            Dtype::F32 => fill(data, numbers, |bytes| f32::from_le_bytes(bytes).into()),
            _ => fill(data, numbers, f64::from_le_bytes),
        }
        Ok(())
    })?)
}

fn fill<T: Stored, const SIZE: usize>(
    data: &mut [T],
    numbers: &Numbers<'_>,
    number: impl Fn([u8; SIZE]) -> f64,
) {
    let stored = numbers.bytes.as_chunks().0;
    match numbers.strides {
        None => {
            for (value, bytes) in data.iter_mut().zip(stored) {
                *value = T::of(number(*bytes));
            }
        }
        Some(strides) => {
            for (value, place) in data.iter_mut().zip(Places::new(numbers.shape, strides)) {
                *value = T::of(number(stored[place]));
            }
        }
    }
}

/// The places of a tensor's elements in its storage, in C order, for ever.
struct Places<'a> {
    shape: &'a [usize],
    strides: &'a [usize],
    index: Vec<usize>,
    place: usize,
}

impl<'a> Places<'a> {
    fn new(shape: &'a [usize], strides: &'a [usize]) -> Places<'a> {
        Places { shape, strides, index: vec![0; shape.len()], place: 0 }
    }
}

impl Iterator for Places<'_> {
    type Item = usize;

    fn next(&mut self) -> Option<usize> {
        let place = self.place;
        for (index, (size, stride)) in self.index.iter_mut().zip(self.shape.iter().zip(self.strides)).rev() {
            *index += 1;
            if *index < *size {
                self.place += stride;
                break;
            }
            self.place -= (*index - 1) * stride;
            *index = 0;
        }
        Some(place)
    }
}
