//! What a stored array starts with.

use std::sync::Arc;

use convoke_autograd::{DType, Result, Tensor};
use serde::{Deserialize, Serialize};

use super::rewrite::to_array;
use super::{Array, Data, Kind};
use crate::Init;

/// What a [`Stored`](super::Stored) array starts with: elements, or how they are made when a model is.
///
/// Elements that are drawn come from the [`Init`] of the model, so another seed gives others, and the definition takes no memory
/// for them. On a dry device nothing is drawn.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub enum Initial {
    /// The elements themselves.
    Array(Arc<Array>),
    /// The same number everywhere.
    Constant {
        /// The size of each dimension.
        shape: Vec<usize>,
        /// The number.
        value: f64,
    },
    /// Normally distributed numbers of mean 0.
    Normal {
        /// The size of each dimension.
        shape: Vec<usize>,
        /// The standard deviation.
        std: f64,
    },
    /// Uniform numbers in [-bound, bound).
    Uniform {
        /// The size of each dimension.
        shape: Vec<usize>,
        /// The bound.
        bound: f64,
    },
}

impl From<Array> for Initial {
    fn from(array: Array) -> Initial {
        Initial::Array(Arc::new(array))
    }
}

impl Initial {
    /// The size of each dimension.
    pub fn shape(&self) -> &[usize] {
        match self {
            Initial::Array(array) => array.shape(),
            Initial::Constant { shape, .. }
            | Initial::Normal { shape, .. }
            | Initial::Uniform { shape, .. } => shape,
        }
    }

    /// The number of elements; the largest number if there are more.
    pub fn len(&self) -> usize {
        let shape = self.shape();
        match shape.contains(&0) {
            true => 0,
            false => shape.iter().fold(1, |len, &size| len.saturating_mul(size)),
        }
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// What the elements are. Elements that are not given are of single precision.
    pub fn kind(&self) -> Kind {
        self.array().map_or(Kind::F32, |array| array.kind())
    }

    /// The elements, if they are given.
    pub fn array(&self) -> Option<&Arc<Array>> {
        match self {
            Initial::Array(array) => Some(array),
            _ => None,
        }
    }

    /// Whether every element is this number.
    pub(super) fn is_all(&self, number: f64) -> bool {
        match self {
            Initial::Array(array) => array.to_f64().iter().all(|&element| element == number),
            Initial::Constant { value, .. } => *value == number,
            _ => false,
        }
    }

    /// A new tensor of the elements, of the device and type of `init`.
    ///
    /// # Errors
    /// If there is no memory, or the type is for storage only.
    pub fn to_tensor(&self, init: &Init) -> Result<Tensor> {
        match self {
            Initial::Array(array) => array.to_tensor(&init.device, init.dtype),
            Initial::Constant { shape, value } => Tensor::full(&init.device, shape, init.dtype, *value),
            Initial::Normal { shape, std } => Ok(init.normal(shape, *std)?.value().detach()),
            Initial::Uniform { shape, bound } => Ok(init.uniform(shape, *bound)?.value().detach()),
        }
    }

    /// The elements as an array. Elements that are drawn come from `init`.
    ///
    /// # Errors
    /// If there is no memory.
    pub fn to_array(&self, init: &Init) -> Result<Arc<Array>> {
        match (self.array(), self.constant()?) {
            (Some(array), _) => Ok(array.clone()),
            (None, Some(array)) => Ok(Arc::new(array)),
            (None, None) => {
                let init = Init { dtype: DType::F32, ..init.clone() };
                Ok(Arc::new(to_array(&self.to_tensor(&init)?)?))
            }
        }
    }

    /// The array of [`Initial::Constant`].
    pub(crate) fn constant(&self) -> std::result::Result<Option<Array>, convoke_memory::OutOfMemory> {
        let Initial::Constant { shape, value } = self else { return Ok(None) };
        Ok(Array::new(shape, Data::F32(convoke_memory::filled(self.len(), *value as f32)?)))
    }
}
