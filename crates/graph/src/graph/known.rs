//! Evaluates nodes whose inputs are all known before a graph runs: arithmetic of shapes, and what follows from constants.
//!
//! An operation either builds its output from elements of its inputs ([`assembled`]), at places that a [`Walk`] gives, or
//! computes floating-point numbers ([`floats`]) or whole numbers ([`integers`]). Floating-point numbers are computed in double
//! precision and rounded once. These functions check the size of an output before they ask for its memory. Iterators of
//! elements may go on for ever; an output takes as many as it has. So nothing runs over the axes of an output without elements,
//! whose other sizes may be huge.

#[cfg(test)]
mod tests;

use std::cell::Cell;

use super::run::Inputs;
use super::{Array, Data, Kind, Op};

/// A result with the reason why there is none, in words.
pub(super) type Answer<T> = Result<T, String>;

/// The most elements that a model may compute of known ones, for each that it stores and besides: a file of a few bytes must not take
/// gigabytes, or minutes, before it runs.
const ELEMENTS: usize = 1 << 25;
const FOR_EACH: usize = 8;
/// The most dimensions of an array.
const MAX_RANK: usize = 64;

thread_local! {
    /// The most elements of an output of the operation that this thread evaluates.
    static MOST: Cell<usize> = const { Cell::new(ELEMENTS) };
}

/// How many elements may still be read and computed on known arrays.
pub(super) struct Budget {
    left: usize,
}

impl Budget {
    /// The budget of a model that stores so many elements.
    pub(super) fn of(stored: usize) -> Budget {
        Budget { left: stored.saturating_mul(FOR_EACH).saturating_add(ELEMENTS) }
    }

    fn charge(&mut self, elements: usize) {
        self.left = self.left.saturating_sub(elements);
    }
}

/// The outputs of a node whose inputs are all known; `None` if the operation is not one for known values (it then runs on
/// tensors). An error is the reason only; it names neither node nor operator.
pub(super) fn evaluate(op: &Op, inputs: &Inputs<'_>, budget: &mut Budget) -> Option<Answer<Vec<Array>>> {
    let arrays = || (0..inputs.len()).filter_map(|at| inputs.optional_known(at).ok()?);
    budget.charge(arrays().map(Array::len).sum());
    if let Some(array) = arrays().find(|array| array.shape().len() > MAX_RANK) {
        return Some(Err(format!("an input has {} dimensions, more than {MAX_RANK}", array.shape().len())));
    }
    MOST.set(budget.left);
    let result = op.known(inputs);
    if let Some(Ok(arrays)) = &result {
        budget.charge(arrays.iter().map(Array::len).sum());
    }
    result
}

/// The shape of two operands together: aligned at their last sizes, sizes of 1 are repeated. `None` if others differ.
pub(super) fn broadcast(a: &[usize], b: &[usize]) -> Option<Vec<usize>> {
    let rank = a.len().max(b.len());
    let size = |shape: &[usize], axis: usize| {
        (axis + shape.len()).checked_sub(rank).and_then(|axis| shape.get(axis)).copied().unwrap_or(1)
    };
    (0..rank)
        .map(|axis| match (size(a, axis), size(b, axis)) {
            (a, b) if a == b || b == 1 => Some(a),
            (1, b) => Some(b),
            _ => None,
        })
        .collect()
}

/// A type of elements.
pub(super) trait Number: Copy {
    /// An element, converted as by ONNX's Cast: fractions are cut off, and what is not 0 is true.
    fn read(data: &Data, at: usize) -> Self;

    fn data(elements: Vec<Self>) -> Data;
}

macro_rules! number {
    ($type:ty, $kind:ident, $float:expr, $integer:expr, $bool:expr) => {
        impl Number for $type {
            fn read(data: &Data, at: usize) -> $type {
                match data {
                    Data::F32(data) => $float(f64::from(data[at])),
                    Data::F64(data) => $float(data[at]),
                    Data::I64(data) => $integer(data[at]),
                    Data::Bool(data) => $bool(data[at]),
                }
            }

            fn data(elements: Vec<$type>) -> Data {
                Data::$kind(elements)
            }
        }
    };
}

number!(f32, F32, |x: f64| x as f32, |x: i64| x as f32, |x: bool| f32::from(u8::from(x)));
number!(f64, F64, |x: f64| x, |x: i64| x as f64, |x: bool| f64::from(u8::from(x)));
number!(i64, I64, |x: f64| x as i64, |x: i64| x, i64::from);
number!(bool, Bool, |x: f64| x != 0.0, |x: i64| x != 0, |x: bool| x);

/// The places in an array of the elements of an output, in the output's order; from the last it returns to the first.
#[derive(Debug, Clone)]
pub(super) struct Walk {
    /// The output's axes of more than one element, the last one first.
    axes: Vec<Axis>,
    at: isize,
}

#[derive(Debug, Clone)]
struct Axis {
    size: usize,
    index: usize,
    /// The distance in the array between neighbours.
    step: isize,
}

impl Walk {
    /// Starts at `at` in the array and takes these steps along each axis of the output, which must stay inside of the array.
    pub(super) fn new(shape: &[usize], steps: &[isize], at: isize) -> Walk {
        let axes = shape.iter().zip(steps).rev().filter(|(size, _)| **size > 1);
        Walk { axes: axes.map(|(&size, &step)| Axis { size, index: 0, step }).collect(), at }
    }

    /// The places in an array of shape `from` that is broadcast to `shape`.
    pub(super) fn broadcast(from: &[usize], shape: &[usize]) -> Walk {
        let mut steps = vec![0; shape.len().saturating_sub(from.len())];
        steps.extend(from.iter().zip(steps_of(from)).map(|(&size, step)| if size == 1 { 0 } else { step }));
        Walk::new(shape, &steps, 0)
    }

    pub(super) fn step(&mut self) -> usize {
        let at = self.at as usize;
        for axis in &mut self.axes {
            axis.index += 1;
            if axis.index < axis.size {
                self.at += axis.step;
                break;
            }
            axis.index = 0;
            self.at -= axis.step * (axis.size as isize - 1);
        }
        at
    }
}

impl Iterator for Walk {
    type Item = usize;

    fn next(&mut self) -> Option<usize> {
        Some(self.step())
    }
}

/// The distance between neighbours along each axis. If there are no elements they mean nothing, and may have overflowed.
pub(super) fn steps_of(shape: &[usize]) -> Vec<isize> {
    let mut steps = vec![1isize; shape.len()];
    for axis in (1..shape.len()).rev() {
        steps[axis - 1] = steps[axis].wrapping_mul(shape[axis] as isize);
    }
    steps
}

pub(super) fn check_rank(rank: usize) -> Answer<()> {
    if rank <= MAX_RANK {
        Ok(())
    } else {
        Err(format!("there would be {rank} dimensions, more than {MAX_RANK}"))
    }
}

/// The number of elements of an output, unless it is more than the model may still compute.
pub(super) fn bounded(shape: &[usize]) -> Answer<usize> {
    check_rank(shape.len())?;
    let len = shape.iter().try_fold(1usize, |len, &size| len.checked_mul(size));
    let most = MOST.get();
    len.filter(|&len| len <= most).ok_or_else(|| {
        format!("the output would be {shape:?}, more than the {most} elements that a model of its size may still compute before it runs")
    })
}

/// Room for the elements of an output.
pub(super) fn room<T>(len: usize) -> Answer<Vec<T>> {
    convoke_memory::with_capacity(len).map_err(|error| error.to_string())
}

/// An output of these elements, of which there must be enough.
pub(super) fn built<N: Number>(shape: &[usize], elements: impl Iterator<Item = Answer<N>>) -> Answer<Array> {
    let len = bounded(shape)?;
    let mut data = room(len)?;
    for element in elements.take(len) {
        data.push(element?);
    }
    Array::new(shape, N::data(data)).ok_or_else(|| format!("there are not enough elements for {shape:?}"))
}

/// An output of one kind whose elements are elsewhere, possibly of another kind.
pub(super) fn assembled<'a>(
    kind: Kind,
    shape: &[usize],
    places: impl Iterator<Item = (&'a Data, usize)>,
) -> Answer<Array> {
    fn of<'a, N: Number>(shape: &[usize], places: impl Iterator<Item = (&'a Data, usize)>) -> Answer<Array> {
        built(shape, places.map(|(data, at)| Ok(N::read(data, at))))
    }
    match kind {
        Kind::F32 => of::<f32>(shape, places),
        Kind::F64 => of::<f64>(shape, places),
        Kind::I64 => of::<i64>(shape, places),
        Kind::Bool => of::<bool>(shape, places),
    }
}

/// An output of one array's elements.
pub(super) fn picked(x: &Array, shape: &[usize], places: impl Iterator<Item = usize>) -> Answer<Array> {
    assembled(x.kind(), shape, places.map(|at| (x.data(), at)))
}

/// An output of floating-point numbers, rounded to a kind.
pub(super) fn floats(kind: Kind, shape: &[usize], elements: impl Iterator<Item = f64>) -> Answer<Array> {
    match kind {
        Kind::F32 => built(shape, elements.map(|x| Ok(x as f32))),
        _ => built(shape, elements.map(Ok)),
    }
}

/// An output of whole numbers, or why one of them cannot be computed.
pub(super) fn integers(shape: &[usize], elements: impl Iterator<Item = Answer<i64>>) -> Answer<Array> {
    built(shape, elements)
}

/// A copy in a shape of as many elements.
pub(super) fn copied(x: &Array, shape: &[usize]) -> Answer<Array> {
    fn copy<T: Clone>(data: &[T]) -> Answer<Vec<T>> {
        convoke_memory::copied(data).map_err(|error| error.to_string())
    }
    check_rank(shape.len())?;
    let data = match x.data() {
        Data::F32(data) => Data::F32(copy(data)?),
        Data::F64(data) => Data::F64(copy(data)?),
        Data::I64(data) => Data::I64(copy(data)?),
        Data::Bool(data) => Data::Bool(copy(data)?),
    };
    Array::new(shape, data)
        .ok_or_else(|| format!("{:?} and {shape:?} have different numbers of elements", x.shape()))
}

/// The kind of arrays that an operation treats alike.
pub(super) fn common_kind(arrays: &[&Array]) -> Answer<Kind> {
    let first = arrays.first().ok_or("there are no inputs")?.kind();
    match arrays.iter().find(|array| array.kind() != first) {
        None => Ok(first),
        Some(_) if arrays.iter().all(|array| array.kind().is_float()) => Ok(Kind::F64),
        Some(other) => Err(format!("inputs have {} and {}", described(arrays[0]), described(other))),
    }
}

/// An axis that may be counted from the end.
pub(super) fn axis_of(axis: i64, rank: usize) -> Answer<usize> {
    place_of(axis, rank).ok_or_else(|| format!("there is no axis {axis} in {rank} dimensions"))
}

/// An index that may be counted from the end; `None` if it is outside.
pub(super) fn place_of(index: i64, size: usize) -> Option<usize> {
    let size = i128::try_from(size).ok()?;
    let place = i128::from(index) + if index < 0 { size } else { 0 };
    (0..size).contains(&place).then_some(place as usize)
}

/// Different axes that may be counted from the end.
pub(super) fn axes_of(axes: &[i64], rank: usize) -> Answer<Vec<usize>> {
    let mut seen = vec![false; rank];
    let mut result = Vec::new();
    for &axis in axes {
        let axis = axis_of(axis, rank)?;
        if std::mem::replace(&mut seen[axis], true) {
            return Err(format!("axis {axis} is listed twice"));
        }
        result.push(axis);
    }
    Ok(result)
}

/// A list of sizes as a shape.
pub(super) fn shape_of(sizes: &[i64]) -> Answer<Vec<usize>> {
    check_rank(sizes.len())?;
    sizes.iter().map(|&size| usize::try_from(size).map_err(|_| format!("{size} is not a size"))).collect()
}

/// A size as an element.
pub(super) fn whole(size: usize) -> Answer<i64> {
    i64::try_from(size).map_err(|_| TOO_LARGE.into())
}

pub(super) const TOO_LARGE: &str = "a whole number does not fit into 64 bits";

/// The product of sizes; it has a meaning only where there are elements.
pub(super) fn product(sizes: &[usize]) -> usize {
    sizes.iter().fold(1, |product, &size| product.saturating_mul(size))
}

/// What an array is, for messages.
pub(super) fn described(array: &Array) -> String {
    let kind = match array.kind() {
        Kind::F32 => "numbers of single precision",
        Kind::F64 => "numbers of double precision",
        Kind::I64 => "whole numbers",
        Kind::Bool => "truth values",
    };
    format!("{kind} of shape {:?}", array.shape())
}

/// Arrays that are broadcast to one shape, and read at one place after the other.
pub(super) struct Broadcast<'a> {
    pub(super) shape: Vec<usize>,
    pub(super) operands: Vec<Operand<'a>>,
}

pub(super) struct Operand<'a> {
    pub(super) data: &'a Data,
    walk: Walk,
}

impl Operand<'_> {
    /// The next place.
    pub(super) fn place(&mut self) -> usize {
        self.walk.step()
    }

    /// The element at the next place.
    pub(super) fn step<N: Number>(&mut self) -> N {
        N::read(self.data, self.walk.step())
    }
}

impl<'a> Broadcast<'a> {
    pub(super) fn new(arrays: &[&'a Array]) -> Answer<Broadcast<'a>> {
        let mut shape = Vec::new();
        for array in arrays {
            shape = broadcast(&shape, array.shape())
                .ok_or_else(|| format!("shape {:?} does not broadcast with {shape:?}", array.shape()))?;
        }
        bounded(&shape)?;
        let operand =
            |array: &&'a Array| Operand { data: array.data(), walk: Walk::broadcast(array.shape(), &shape) };
        let operands = arrays.iter().map(operand).collect();
        Ok(Broadcast { shape, operands })
    }

    /// All operands combined from the first to the last, at one place after the other.
    pub(super) fn combined<N: Number>(
        &mut self,
        combine: impl Fn(N, N) -> Answer<N>,
    ) -> impl Iterator<Item = Answer<N>> {
        let operands = &mut self.operands;
        std::iter::repeat_with(move || {
            let (first, others) = operands.split_first_mut().ok_or("there are no inputs")?;
            others.iter_mut().try_fold(first.step(), |result, other| combine(result, other.step()))
        })
    }
}

/// Different functions of floating-point and of whole numbers, of each element.
pub(super) fn map(
    x: &Array,
    of_float: impl Fn(f64) -> f64,
    of_integer: impl Fn(i64) -> Answer<i64>,
) -> Answer<Array> {
    match x.data() {
        Data::F32(data) => floats(Kind::F32, x.shape(), data.iter().map(|&x| of_float(x.into()))),
        Data::F64(data) => floats(Kind::F64, x.shape(), data.iter().map(|&x| of_float(x))),
        Data::I64(data) => integers(x.shape(), data.iter().map(|&x| of_integer(x))),
        Data::Bool(_) => Err(not_numbers(x)),
    }
}

pub(super) fn not_numbers(array: &Array) -> String {
    format!("the input must be numbers, but is {}", described(array))
}

/// The larger number; NaN if either is.
pub(super) fn larger(a: f64, b: f64) -> f64 {
    if a.is_nan() || a > b { a } else { b }
}

/// A whole number without its fraction.
pub(super) fn truncated(x: f64) -> Answer<i64> {
    if x.abs() < -(i64::MIN as f64) { Ok(x as i64) } else { Err(TOO_LARGE.into()) }
}
