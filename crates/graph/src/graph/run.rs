//! What operators run with: the operands of a node, and how a node is refused.

use std::cell::Cell;
use std::sync::Arc;

use convoke_autograd::{DType, Device, Error, Tensor};

use super::known::{Answer, described, place_of};
use super::ops::Use;
use super::{Array, Data, Op};

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

impl From<convoke_kernels::Error> for Refusal {
    fn from(error: convoke_kernels::Error) -> Refusal {
        Refusal::Operation(error.into())
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
    /// The type of what depends on the inputs. Where that is one of 16 bits, the model's parameters have the type in which kernels
    /// compute.
    pub(super) dtype: DType,
    /// The batch that the graph was written for, if it was written for one, and the batch that runs.
    pub(super) batch: Option<[usize; 2]>,
}

/// The operands of a node.
pub(super) struct Inputs<'a> {
    op: &'a Op,
    values: &'a [Option<Value>],
    pub(super) place: &'a Place,
    /// The type of the operands that are no weights: that of the place, unless all follow from parameters.
    dtype: DType,
    /// How many outputs are asked for.
    pub(super) outputs: usize,
    /// The type in which the operation took an operand that is known as a tensor.
    as_tensor: Vec<Cell<Option<DType>>>,
}

impl<'a> Inputs<'a> {
    pub(super) fn new(
        op: &'a Op,
        values: &'a [Option<Value>],
        place: &'a Place,
        outputs: usize,
    ) -> Inputs<'a> {
        let mut types = values.iter().flatten().filter_map(|value| match value {
            Value::Tensor(tensor) => Some(tensor.dtype()),
            Value::Known(_) => None,
        });
        let first = types.next();
        let of_parameters = first.filter(|&first| first != place.dtype && types.all(|other| other == first));
        let dtype = of_parameters.unwrap_or(place.dtype);
        Inputs { op, values, place, dtype, outputs, as_tensor: vec![Cell::new(None); values.len()] }
    }

    /// The type in which an operand that is known was taken as a tensor, if it was: it can be converted once, before the graph runs.
    pub(super) fn taken_as(&self, index: usize) -> Option<DType> {
        self.as_tensor[index].get()
    }

    /// The type that an operand should have. Weights keep the type in which kernels compute.
    fn wanted(&self, index: usize) -> DType {
        match self.op.uses(index) {
            Use::Weight | Use::Statistic if index > 0 => self.dtype.computed_in(),
            _ => self.dtype,
        }
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

    /// An operand, if it is there. What follows from parameters is converted where it meets what follows from the inputs.
    pub(super) fn optional_tensor(&self, index: usize) -> Result<Option<Tensor>> {
        let wanted = self.wanted(index);
        match self.get(index) {
            None => Ok(None),
            Some(Value::Tensor(tensor)) => Ok(Some(follow(tensor, wanted)?)),
            Some(Value::Known(array)) => {
                self.as_tensor[index].set(Some(wanted));
                Ok(Some(array.to_tensor(&self.place.device, wanted)?))
            }
        }
    }

    pub(super) fn tensor(&self, index: usize) -> Result<Tensor> {
        match self.optional_tensor(index)? {
            Some(tensor) => Ok(tensor),
            None => refuse(format!("input {index} is missing")),
        }
    }

    pub(super) fn optional_known(&self, index: usize) -> Answer<Option<&'a Array>> {
        match self.get(index) {
            None => Ok(None),
            Some(Value::Known(array)) => Ok(Some(array)),
            Some(Value::Tensor(_)) => Err(format!(
                "input {index} depends on the values of the model's input; here it must follow from shapes and constants"
            )),
        }
    }

    pub(super) fn known(&self, index: usize) -> Answer<&'a Array> {
        self.optional_known(index)?.ok_or_else(|| format!("input {index} is missing"))
    }

    /// All operands, which must be known; none may be left out.
    pub(super) fn all_known(&self) -> Answer<Vec<&'a Array>> {
        (0..self.len()).map(|index| self.known(index)).collect()
    }

    /// An operand that lists whole numbers, such as sizes: one dimension, or a single number.
    pub(super) fn list(&self, index: usize) -> Answer<&'a [i64]> {
        self.optional_list(index)?.ok_or_else(|| format!("input {index} is missing"))
    }

    pub(super) fn optional_list(&self, index: usize) -> Answer<Option<&'a [i64]>> {
        let Some(array) = self.optional_known(index)? else { return Ok(None) };
        match array.data() {
            Data::I64(data) if array.shape().len() <= 1 => Ok(Some(data)),
            _ => {
                Err(format!("input {index} must be a list of whole numbers, but it has {}", described(array)))
            }
        }
    }

    /// An operand of one element.
    pub(super) fn number(&self, index: usize) -> Answer<&'a Array> {
        self.optional_number(index)?.ok_or_else(|| format!("input {index} is missing"))
    }

    pub(super) fn optional_number(&self, index: usize) -> Answer<Option<&'a Array>> {
        match self.optional_known(index)? {
            Some(array) if array.len() != 1 => {
                Err(format!("input {index} must be a single number, but it has {}", described(array)))
            }
            array => Ok(array),
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

/// What follows from parameters, in the type of what it is combined with, if that is one of 16 bits.
pub(super) fn follow(parameter: &Tensor, dtype: DType) -> convoke_autograd::Result<Tensor> {
    match parameter.dtype() != dtype && parameter.dtype() == dtype.computed_in() {
        true => parameter.to_dtype(dtype),
        false => Ok(parameter.clone()),
    }
}

/// An axis, an index or a bound as a number of this machine. All sizes are below 2^48, so saturating keeps "beyond the end".
pub(super) fn to_isize(number: i64) -> isize {
    isize::try_from(number).unwrap_or(if number < 0 { isize::MIN } else { isize::MAX })
}

/// The place of an axis that counts from the last if it is negative.
pub(super) fn axis_in(x: &Tensor, axis: isize) -> Result<usize> {
    match place_of(axis as i64, x.shape().len()) {
        Some(place) => Ok(place),
        None => refuse(format!("there is no axis {axis} in {:?}", x.shape())),
    }
}
