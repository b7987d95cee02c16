//! What operators run with: the operands of a node, and how a node is refused.

use std::cell::Cell;
use std::sync::Arc;

use convoke_autograd::{DType, Device, Error, Tensor};

use super::Array;
use super::known::place_of;

/// A value while a graph runs.
#[derive(Clone)]
pub(super) enum Value {
    /// Computed by this run.
    Tensor(Tensor),
    /// Known before it.
    Known(Arc<Array>),
}

/// Why a node did not run.
#[derive(Debug)]
pub(super) enum Refusal {
    /// The node asks for something that there is not.
    Node(String),
    /// An operation failed.
    Operation(Error),
}

impl From<Error> for Refusal {
    fn from(error: Error) -> Refusal {
        Refusal::Operation(error)
    }
}

impl From<String> for Refusal {
    fn from(reason: String) -> Refusal {
        Refusal::Node(reason)
    }
}

pub(super) type Result<T> = std::result::Result<T, Refusal>;

pub(super) fn refuse<T>(reason: impl Into<String>) -> Result<T> {
    Err(Refusal::Node(reason.into()))
}

/// Where a graph runs.
#[derive(Clone)]
pub(super) struct Place {
    pub(super) device: Device,
    pub(super) dtype: DType,
    /// The batch that the graph was written for, if it was written for one, and the batch that runs.
    pub(super) batch: Option<[usize; 2]>,
}

/// The operands of a node.
pub(super) struct Inputs<'a> {
    values: &'a [Option<Value>],
    pub(super) place: &'a Place,
    /// How many outputs are asked for.
    pub(super) outputs: usize,
    /// Whether the operation took an operand that is known as a tensor.
    as_tensor: Vec<Cell<bool>>,
}

impl<'a> Inputs<'a> {
    pub(super) fn new(values: &'a [Option<Value>], place: &'a Place, outputs: usize) -> Inputs<'a> {
        Inputs { values, place, outputs, as_tensor: vec![Cell::new(false); values.len()] }
    }

    /// Whether an operand that is known was taken as a tensor: it can be converted once, before the graph runs.
    pub(super) fn took_as_tensor(&self, index: usize) -> bool {
        self.as_tensor[index].get()
    }

    pub(super) fn len(&self) -> usize {
        self.values.len()
    }

    pub(super) fn get(&self, index: usize) -> Option<&'a Value> {
        self.values.get(index)?.as_ref()
    }

    pub(super) fn shape(&self, index: usize) -> Result<Vec<usize>> {
        match self.get(index) {
            Some(Value::Tensor(tensor)) => Ok(tensor.shape().to_vec()),
            Some(Value::Known(array)) => Ok(array.shape().to_vec()),
            None => refuse(format!("input {index} is missing")),
        }
    }

    pub(super) fn optional_tensor(&self, index: usize) -> Result<Option<Tensor>> {
        match self.get(index) {
            None => Ok(None),
            Some(Value::Tensor(tensor)) => Ok(Some(tensor.clone())),
            Some(Value::Known(array)) => {
                self.as_tensor[index].set(true);
                Ok(Some(array.to_tensor(&self.place.device, self.place.dtype)?))
            }
        }
    }

    pub(super) fn tensor(&self, index: usize) -> Result<Tensor> {
        match self.optional_tensor(index)? {
            Some(tensor) => Ok(tensor),
            None => refuse(format!("input {index} is missing")),
        }
    }

    pub(super) fn optional_known(&self, index: usize) -> Result<Option<&'a Array>> {
        match self.get(index) {
            None => Ok(None),
            Some(Value::Known(array)) => Ok(Some(array)),
            Some(Value::Tensor(_)) => refuse(format!(
                "input {index} depends on the values of the model's input; here it must follow from shapes and constants"
            )),
        }
    }

    pub(super) fn known(&self, index: usize) -> Result<&'a Array> {
        match self.optional_known(index)? {
            Some(array) => Ok(array),
            None => refuse(format!("input {index} is missing")),
        }
    }

    /// Whole numbers, such as sizes.
    pub(super) fn integers(&self, index: usize) -> Result<Vec<isize>> {
        Ok(to_isize(self.known(index)?))
    }

    pub(super) fn optional_integers(&self, index: usize) -> Result<Option<Vec<isize>>> {
        Ok(self.optional_known(index)?.map(to_isize))
    }

    /// The only element of an operand that is known.
    pub(super) fn optional_number(&self, index: usize) -> Result<Option<f64>> {
        match self.optional_known(index)? {
            Some(array) if array.len() == 1 => Ok(array.only()),
            Some(array) => {
                refuse(format!("input {index} has the shape {:?}, expected one number", array.shape()))
            }
            None => Ok(None),
        }
    }

    /// The number that an operand holds, if it is known and has at most `rank` dimensions: then broadcasting with it leaves the
    /// shape of a tensor of `rank` dimensions.
    pub(super) fn scalar(&self, index: usize, rank: usize) -> Option<f64> {
        match self.get(index) {
            Some(Value::Known(array)) if array.shape().len() <= rank => array.only(),
            _ => None,
        }
    }
}

pub(super) fn to_isize(array: &Array) -> Vec<isize> {
    // All sizes are below 2^48, so saturating keeps "beyond the end".
    let saturating = |x: i64| isize::try_from(x).unwrap_or(if x < 0 { isize::MIN } else { isize::MAX });
    array.to_i64().into_iter().map(saturating).collect()
}

/// The place of an axis that counts from the last if it is negative.
pub(super) fn axis_in(x: &Tensor, axis: isize) -> Result<usize> {
    match place_of(axis as i64, x.shape().len()) {
        Some(place) => Ok(place),
        None => refuse(format!("there is no axis {axis} in {:?}", x.shape())),
    }
}
