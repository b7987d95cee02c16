//! Arrays that are known before a graph runs: stored weights, constants, and what is computed from shapes.

use convoke_autograd::{DType, Device, MemoryFormat, Result, Tensor};
use serde::{Deserialize, Serialize};

/// Numbers in contiguous order, with a shape. No dimensions: a single number.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Unchecked")]
pub struct Array {
    shape: Vec<usize>,
    data: Data,
}

/// An array as it is read, before its sizes are checked.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Unchecked {
    shape: Vec<usize>,
    data: Data,
}

impl TryFrom<Unchecked> for Array {
    type Error = String;

    fn try_from(array: Unchecked) -> std::result::Result<Array, String> {
        let Unchecked { shape, data } = array;
        let len = data.len();
        Array::new(&shape, data).ok_or_else(|| format!("an array of shape {shape:?} has {len} elements"))
    }
}

/// The elements of an [`Array`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Data {
    /// Single precision. Half precision is converted to it.
    F32(Vec<f32>),
    /// Double precision.
    F64(Vec<f64>),
    /// Whole numbers of every size.
    I64(Vec<i64>),
    /// Truth values.
    Bool(Vec<bool>),
}

impl Data {
    /// The number of elements.
    pub fn len(&self) -> usize {
        match self {
            Data::F32(data) => data.len(),
            Data::F64(data) => data.len(),
            Data::I64(data) => data.len(),
            Data::Bool(data) => data.len(),
        }
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The kind of the elements.
    pub fn kind(&self) -> Kind {
        match self {
            Data::F32(_) => Kind::F32,
            Data::F64(_) => Kind::F64,
            Data::I64(_) => Kind::I64,
            Data::Bool(_) => Kind::Bool,
        }
    }
}

/// What the elements of an [`Array`] are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Kind {
    /// Single precision.
    #[default]
    F32,
    /// Double precision.
    F64,
    /// Whole numbers.
    I64,
    /// Truth values.
    Bool,
}

impl Kind {
    /// Whether the elements are floating-point numbers.
    pub fn is_float(self) -> bool {
        matches!(self, Kind::F32 | Kind::F64)
    }
}

impl Array {
    /// An array of this shape; `None` if the elements are not as many as it says.
    pub fn new(shape: &[usize], data: Data) -> Option<Array> {
        let len = shape.iter().try_fold(1usize, |len, &size| len.checked_mul(size))?;
        (len == data.len()).then(|| Array { shape: shape.to_vec(), data })
    }

    /// A list of whole numbers.
    pub fn integers(numbers: impl IntoIterator<Item = i64>) -> Array {
        Array::list(Data::I64(numbers.into_iter().collect()))
    }

    /// A list of numbers.
    pub fn floats(numbers: impl IntoIterator<Item = f32>) -> Array {
        Array::list(Data::F32(numbers.into_iter().collect()))
    }

    /// An array of one dimension.
    pub fn list(data: Data) -> Array {
        Array { shape: vec![data.len()], data }
    }

    /// A single number.
    pub fn number(number: f32) -> Array {
        Array { shape: Vec::new(), data: Data::F32(vec![number]) }
    }

    /// A single number of the type in which a model computes.
    pub(super) fn number_of(dtype: DType, number: f64) -> Array {
        match dtype {
            DType::F64 => Array { shape: Vec::new(), data: Data::F64(vec![number]) },
            _ => Array::number(number as f32),
        }
    }

    /// The size of each dimension.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// The number of elements.
    pub fn len(&self) -> usize {
        self.data.len()
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.data.is_empty()
    }

    /// The elements.
    pub fn data(&self) -> &Data {
        &self.data
    }

    /// What the elements are.
    pub fn kind(&self) -> Kind {
        self.data.kind()
    }

    /// The same elements in another shape of equal length; `None` if the lengths differ.
    pub fn reshaped(&self, shape: &[usize]) -> Option<Array> {
        Array::new(shape, self.data.clone())
    }

    /// The elements as floating-point numbers.
    pub fn to_f64(&self) -> Vec<f64> {
        match &self.data {
            Data::F32(data) => data.iter().map(|&x| x.into()).collect(),
            Data::F64(data) => data.clone(),
            Data::I64(data) => data.iter().map(|&x| x as f64).collect(),
            Data::Bool(data) => data.iter().map(|&x| f64::from(u8::from(x))).collect(),
        }
    }

    /// The only element, if there is one. A number of single precision stands for the shortest decimal that rounds to it: a file's
    /// 0.00001 is that in double precision, too.
    pub fn only(&self) -> Option<f64> {
        match &self.data {
            Data::F32(data) => match data[..] {
                [number] => Some(number.to_string().parse().unwrap_or_else(|_| number.into())),
                _ => None,
            },
            _ if self.len() == 1 => self.to_f64().first().copied(),
            _ => None,
        }
    }

    /// The elements as whole numbers; fractions are cut off.
    pub fn to_i64(&self) -> Vec<i64> {
        match &self.data {
            Data::F32(data) => data.iter().map(|&x| x as i64).collect(),
            Data::F64(data) => data.iter().map(|&x| x as i64).collect(),
            Data::I64(data) => data.clone(),
            Data::Bool(data) => data.iter().map(|&x| x.into()).collect(),
        }
    }

    /// A tensor of these elements, or of the nearest numbers of this type.
    ///
    /// # Errors
    /// If there is no memory.
    pub fn to_tensor(&self, device: &Device, dtype: DType) -> Result<Tensor> {
        Tensor::written_elements((device, dtype), &self.shape, MemoryFormat::Contiguous, |out| {
            match &self.data {
                Data::F32(data) => out.update(|index, _| data[index].into()),
                Data::F64(data) => out.update(|index, _| data[index]),
                Data::I64(data) => out.update(|index, _| data[index] as f64),
                Data::Bool(data) => out.update(|index, _| f64::from(u8::from(data[index]))),
            }
            Ok(())
        })
    }
}
