//! Arithmetic of two tensors by NumPy's rules of broadcasting.

use convoke_kernels::Slice;
use convoke_kernels::strided::{Axis, Fold, Map, Reduction, Walk};

use super::same_dtype;
use crate::error::invalid;
pub(super) use crate::operation::Arithmetic as Kind;
use crate::tensor::checked_len;
use crate::{DType, Function, MemoryFormat, Needs, Operation, Result, Tensor, apply};

impl Tensor {
    /// The difference of two tensors, broadcast as in NumPy: shapes are aligned at their last sizes, and sizes of 1 are repeated.
    ///
    /// The output has the memory format of the operand that has all its dimensions; of the larger one if both do, and of the first
    /// if they have one shape.
    ///
    /// # Errors
    /// If the shapes do not broadcast or types differ.
    pub fn sub(&self, other: &Tensor) -> Result<Tensor> {
        arithmetic(Kind::Sub, self, other)
    }

    /// The quotient of two tensors, broadcast as in [`Tensor::sub`].
    ///
    /// # Errors
    /// As [`Tensor::sub`].
    pub fn div(&self, other: &Tensor) -> Result<Tensor> {
        arithmetic(Kind::Div, self, other)
    }

    /// Each element to the power of the other's, broadcast as in [`Tensor::sub`].
    ///
    /// # Errors
    /// As [`Tensor::sub`].
    pub fn pow(&self, exponent: &Tensor) -> Result<Tensor> {
        arithmetic(Kind::Pow, self, exponent)
    }

    /// The larger of two elements, NaN if either is, broadcast as in [`Tensor::sub`]. Equal elements get half of the gradient
    /// each.
    ///
    /// # Errors
    /// As [`Tensor::sub`].
    pub fn maximum(&self, other: &Tensor) -> Result<Tensor> {
        arithmetic(Kind::Max, self, other)
    }

    /// The smaller of two elements, otherwise as [`Tensor::maximum`].
    ///
    /// # Errors
    /// As [`Tensor::sub`].
    pub fn minimum(&self, other: &Tensor) -> Result<Tensor> {
        arithmetic(Kind::Min, self, other)
    }

    /// Every element plus a number.
    ///
    /// # Errors
    /// If there is no memory.
    pub fn add_scalar(&self, number: f64) -> Result<Tensor> {
        arithmetic(Kind::Add, self, &self.number(number)?)
    }

    /// Every element to the power of a number, as PyTorch's `pow` of one: roots of -0 are -0, those of -infinity NaN.
    ///
    /// # Errors
    /// As [`Tensor::add_scalar`].
    pub fn pow_scalar(&self, exponent: f64) -> Result<Tensor> {
        apply(Binary { kind: Kind::Pow, exponent: Some(exponent) }, &[self, &self.number(exponent)?])
    }

    /// The larger of each element and a number, otherwise as [`Tensor::maximum`].
    ///
    /// # Errors
    /// As [`Tensor::add_scalar`].
    pub fn maximum_scalar(&self, number: f64) -> Result<Tensor> {
        arithmetic(Kind::Max, self, &self.number(number)?)
    }

    /// The smaller of each element and a number, otherwise as [`Tensor::maximum`].
    ///
    /// # Errors
    /// As [`Tensor::add_scalar`].
    pub fn minimum_scalar(&self, number: f64) -> Result<Tensor> {
        arithmetic(Kind::Min, self, &self.number(number)?)
    }

    /// The elements repeated along axes of size 1, and along new ones before the first, so that the shape is `shape`. A size of 1
    /// in `shape` keeps the tensor's own size, as in ONNX. A view in PyTorch, here a copy.
    ///
    /// # Errors
    /// If the shapes do not broadcast.
    pub fn expand(&self, shape: &[usize]) -> Result<Tensor> {
        apply(Expand { shape: broadcast_shape("expand", self.shape(), shape)? }, &[self])
    }

    /// A number as a constant of this tensor's type.
    fn number(&self, number: f64) -> Result<Tensor> {
        Tensor::full(self.device(), &[], self.dtype(), number)
    }
}

/// The shape to which two shapes broadcast.
pub(super) fn broadcast_shape(operation: &'static str, a: &[usize], b: &[usize]) -> Result<Vec<usize>> {
    let rank = a.len().max(b.len());
    let size =
        |shape: &[usize], axis: usize| (axis + shape.len()).checked_sub(rank).map_or(1, |at| shape[at]);
    let shape: Option<Vec<usize>> = (0..rank)
        .map(|axis| match (size(a, axis), size(b, axis)) {
            (a, b) if a == b => Some(a),
            (1, size) | (size, 1) => Some(size),
            _ => None,
        })
        .collect();
    let shape =
        shape.ok_or_else(|| invalid(operation, format!("the shapes {a:?} and {b:?} do not broadcast")))?;
    checked_len(operation, &shape)?;
    Ok(shape)
}

/// The shape to which operands broadcast, and the memory format of the largest of those that have all its dimensions; of equally
/// large ones the first.
pub(super) fn broadcast_operands(
    operation: &'static str,
    operands: &[&Tensor],
) -> Result<(Vec<usize>, MemoryFormat)> {
    let shape = operands
        .iter()
        .try_fold(Vec::new(), |shape, operand| broadcast_shape(operation, &shape, operand.shape()))?;
    let whole = operands.iter().filter(|operand| operand.shape().len() == shape.len());
    let whole = whole.reduce(|first, other| if other.len() > first.len() { other } else { first });
    let format = whole.map_or(MemoryFormat::Contiguous, |whole| whole.format());
    Ok((shape, format))
}

pub(super) fn arithmetic(kind: Kind, a: &Tensor, b: &Tensor) -> Result<Tensor> {
    apply(Binary { kind, exponent: None }, &[a, b])
}

struct Binary {
    kind: Kind,
    /// The second operand of a power, where it is a number.
    exponent: Option<f64>,
}

/// A tensor's shape and format, without its elements.
#[derive(Debug, Clone)]
pub(super) struct Like {
    shape: Vec<usize>,
    format: MemoryFormat,
}

impl Like {
    pub(super) fn of(tensor: &Tensor) -> Like {
        Like { shape: tensor.shape().to_vec(), format: tensor.format() }
    }
}

/// The operands that backward reads, and the shapes of both.
#[derive(Clone)]
struct SavedBinary {
    a: Option<Tensor>,
    b: Option<Tensor>,
    likes: [Like; 2],
}

impl Function for Binary {
    type Saved = SavedBinary;

    fn name(&self) -> &'static str {
        match self.kind {
            Kind::Add => "add",
            Kind::Sub => "sub",
            Kind::Mul => "mul",
            Kind::Div => "div",
            Kind::Pow => "pow",
            Kind::Max => "maximum",
            Kind::Min => "minimum",
        }
    }

    fn describe(&self) -> Option<Operation> {
        Some(Operation::Arithmetic(self.kind))
    }

    fn takes(&self, _: usize, _: DType) -> bool {
        true
    }

    fn forward(&self, inputs: &[&Tensor], needs: &Needs) -> Result<(Tensor, SavedBinary)> {
        let (operation, [a, b]) = (self.name(), [inputs[0], inputs[1]]);
        same_dtype(operation, inputs)?;
        let (shape, format) = broadcast_operands(operation, inputs)?;
        let turned =
            (a.shape() == b.shape() && b.format() != format).then(|| b.in_format(format)).transpose()?;
        let b = turned.as_ref().unwrap_or(b);
        let over = Over { operation, shape: &shape, format };
        let y = match self.kind {
            Kind::Pow if let Some(exponent) = self.exponent => over.map(Map::PowerOf(exponent), [a]),
            Kind::Add => over.map(Map::Add, [a, b]),
            Kind::Sub => over.map(Map::Subtract, [a, b]),
            Kind::Mul => over.map(Map::Multiply, [a, b]),
            Kind::Div => over.map(Map::Divide, [a, b]),
            Kind::Pow => over.map(Map::Power, [a, b]),
            Kind::Max => over.map(Map::Larger, [a, b]),
            Kind::Min => over.map(Map::Smaller, [a, b]),
        }?;
        let [of_a, of_b] = match self.kind {
            Kind::Add | Kind::Sub => [false, false],
            Kind::Mul => [needs.input(1), needs.input(0)],
            Kind::Div => [needs.input(1), needs.any()],
            Kind::Pow if self.exponent.is_some() => [needs.input(0), false],
            Kind::Pow | Kind::Max | Kind::Min => [needs.any(); 2],
        };
        let likes = [Like::of(a), Like::of(inputs[1])];
        Ok((y, SavedBinary { a: of_a.then(|| a.constant()), b: of_b.then(|| b.constant()), likes }))
    }

    fn backward(&self, saved: SavedBinary, upstream: Tensor, needs: &Needs) -> Result<Vec<Option<Tensor>>> {
        let SavedBinary { a, b, likes: [like_a, like_b] } = saved;
        let a = || a.as_ref().expect("saved for this gradient");
        let b = || b.as_ref().expect("saved for this gradient");
        let dy = &upstream;
        let over = Over { operation: self.name(), shape: dy.shape(), format: dy.format() };
        let da = || match self.kind {
            Kind::Pow if let Some(exponent) = self.exponent => {
                over.map(Map::PowerOfGradient(exponent), [dy, a()])?.laid_out(like_a.format)
            }
            Kind::Add | Kind::Sub => over.gradient(&like_a, Map::Value, [dy]),
            Kind::Mul => over.gradient(&like_a, Map::Multiply, [dy, b()]),
            Kind::Div => over.gradient(&like_a, Map::Divide, [dy, b()]),
            Kind::Pow => over.gradient(&like_a, Map::BaseGradient, [dy, a(), b()]),
            Kind::Max => over.gradient(&like_a, Map::LargerShare, [dy, a(), b()]),
            Kind::Min => over.gradient(&like_a, Map::SmallerShare, [dy, a(), b()]),
        };
        let db = || match self.kind {
            Kind::Add => over.gradient(&like_b, Map::Value, [dy]),
            Kind::Sub => over.gradient(&like_b, Map::Scale(-1.0), [dy]),
            Kind::Mul => over.gradient(&like_b, Map::Multiply, [dy, a()]),
            Kind::Div => over.gradient(&like_b, Map::DivisorGradient, [dy, a(), b()]),
            Kind::Pow => over.gradient(&like_b, Map::ExponentGradient, [dy, a(), b()]),
            Kind::Max => over.gradient(&like_b, Map::LargerShare, [dy, b(), a()]),
            Kind::Min => over.gradient(&like_b, Map::SmallerShare, [dy, b(), a()]),
        };
        // A sum's gradient may be the upstream gradient itself.
        let same = |like: &Like| matches!(self.kind, Kind::Add) && like.shape == dy.shape();
        let gradient =
            |input: usize, like: &Like, compute: &dyn Fn() -> Result<Tensor>| match needs.input(input) {
                false => Ok(None),
                true if same(like) || (input == 0 && self.kind == Kind::Sub && like.shape == dy.shape()) => {
                    Ok(Some(dy.clone()))
                }
                true => compute().map(Some),
            };
        Ok(vec![gradient(0, &like_a, &da)?, gradient(1, &like_b, &db)?])
    }
}

struct Expand {
    shape: Vec<usize>,
}

impl Function for Expand {
    type Saved = Like;

    fn name(&self) -> &'static str {
        "expand"
    }

    fn describe(&self) -> Option<Operation> {
        Some(Operation::Expand)
    }

    fn takes(&self, _: usize, _: DType) -> bool {
        true
    }

    fn forward(&self, inputs: &[&Tensor], _: &Needs) -> Result<(Tensor, Like)> {
        let x = inputs[0];
        let same_rank = x.shape().len() == self.shape.len();
        let format = if same_rank { x.format() } else { MemoryFormat::Contiguous };
        let over = Over { operation: "expand", shape: &self.shape, format };
        Ok((over.map(Map::Value, [x])?, Like::of(x)))
    }

    fn backward(&self, like: Like, dy: Tensor, _: &Needs) -> Result<Vec<Option<Tensor>>> {
        let over = Over { operation: "expand", shape: dy.shape(), format: dy.format() };
        Ok(vec![Some(over.gradient(&like, Map::Value, [&dy])?)])
    }
}

/// The elements of a shape, in the order of a memory format, for functions of operands that broadcast to it.
#[derive(Clone, Copy)]
pub(super) struct Over<'a> {
    pub(super) operation: &'static str,
    pub(super) shape: &'a [usize],
    pub(super) format: MemoryFormat,
}

impl Over<'_> {
    /// The function of the operands, as a tensor of this shape and format.
    pub(super) fn map<const N: usize>(&self, function: Map, operands: [&Tensor; N]) -> Result<Tensor> {
        let (axes, first) = (self.axes(&vec![true; self.shape.len()], &operands), operands[0]);
        let of = (first.device(), first.dtype());
        let walk = Walk::new(self.operation, &axes, elements(operands)?)?;
        Tensor::build_elements(of, self.shape, self.format, |y| Ok(walk.map(of.0.compute(), function, y)?))
    }

    /// The function of the operands, folded over the axes that are not kept: a tensor of this format with sizes of 1 there.
    pub(super) fn fold<const N: usize>(
        &self,
        kept: &[bool],
        reduction: Reduction,
        (function, operands): (Map, [&Tensor; N]),
    ) -> Result<Tensor> {
        let shape: Vec<usize> =
            self.shape.iter().zip(kept).map(|(&size, &kept)| if kept { size } else { 1 }).collect();
        let (axes, first) = (self.axes(kept, &operands), operands[0]);
        let of = (first.device(), first.dtype());
        let walk = Walk::new(self.operation, &axes, elements(operands)?)?;
        Tensor::build_elements(of, &shape, self.format, |y| {
            Ok(walk.fold(of.0.compute(), function, reduction, y)?)
        })
    }

    /// The function of the operands, summed over the axes along which an operand like this was repeated.
    pub(super) fn gradient<const N: usize>(
        &self,
        like: &Like,
        function: Map,
        operands: [&Tensor; N],
    ) -> Result<Tensor> {
        let own = &like.shape;
        let new = self.shape.len() - own.len();
        let kept: Vec<bool> =
            (0..self.shape.len()).map(|axis| axis >= new && own[axis - new] == self.shape[axis]).collect();
        let sum = match kept.iter().all(|&kept| kept) {
            true => self.map(function, operands)?,
            false => self.fold(&kept, Reduction { fold: Fold::Sum, divisor: 1.0 }, (function, operands))?,
        };
        if new == 0 {
            return sum.laid_out(like.format);
        }
        sum.laid_out(MemoryFormat::Contiguous)?.reshaped(own).laid_out(like.format)
    }

    /// The axes in the order of the format, with the strides of each operand.
    fn axes<const N: usize>(&self, kept: &[bool], operands: &[&Tensor; N]) -> Vec<Axis<N>> {
        let lies_so = |operand: &&Tensor| operand.format() == self.format && operand.shape() == self.shape;
        if operands.iter().all(lies_so) && kept.iter().all(|&kept| kept) {
            // One run, whatever the shape.
            return vec![Axis { size: operands[0].len(), strides: [1; N], kept: true }];
        }
        let rank = self.shape.len();
        let strides = operands.map(|operand| operand.format().strides(operand.shape()));
        let stride = |index: usize, axis: usize| {
            let own = operands[index].shape();
            match (axis + own.len()).checked_sub(rank) {
                Some(at) if own[at] != 1 => strides[index][at],
                _ => 0,
            }
        };
        let axis = |axis| Axis {
            size: self.shape[axis],
            strides: std::array::from_fn(|index| stride(index, axis)),
            kept: kept[axis],
        };
        self.format.axes(rank).into_iter().map(axis).collect()
    }
}

fn elements<const N: usize>(operands: [&Tensor; N]) -> Result<[Slice<'_>; N]> {
    let mut all = [Slice::empty(operands[0].dtype()); N];
    for (elements, operand) in all.iter_mut().zip(operands) {
        *elements = operand.elements()?;
    }
    Ok(all)
}
