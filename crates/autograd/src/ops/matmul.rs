//! Products of matrices, and of stacks of matrices that broadcast.

use convoke_kernels::matmul as kernel;

use super::broadcast::broadcast_shape;
use super::{of_type, same_dtype};
use crate::error::invalid;
use crate::{Function, MemoryFormat, Needs, Operation, Result, Tensor, apply};

impl Tensor {
    /// The product of matrices in the last two axes, by NumPy's rules: axes before these broadcast; a vector is a row on the left
    /// and a column on the right, and that axis is left out of the result. The result is contiguous.
    ///
    /// # Errors
    /// If an operand has no axis, shapes do not fit or types differ.
    pub fn matmul(&self, other: &Tensor) -> Result<Tensor> {
        let transposed = [false; 2];
        apply(MatMul { operation: "matmul", transposed }, &[self, other])
    }
}

/// What [`gemm`] computes besides a product.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GemmOptions {
    /// The factor of the product.
    pub alpha: f64,
    /// The factor of `c`.
    pub beta: f64,
    /// Whether `a` is taken transposed.
    pub transpose_a: bool,
    /// Whether `b` is taken transposed.
    pub transpose_b: bool,
}

impl Default for GemmOptions {
    fn default() -> GemmOptions {
        GemmOptions { alpha: 1.0, beta: 1.0, transpose_a: false, transpose_b: false }
    }
}

/// alpha a b + beta c of matrices, as ONNX's Gemm; c broadcasts to the product's shape.
///
/// # Errors
/// If an operand is not a matrix, shapes do not fit or types differ.
pub fn gemm(a: &Tensor, b: &Tensor, c: Option<&Tensor>, options: &GemmOptions) -> Result<Tensor> {
    let &GemmOptions { alpha, beta, transpose_a, transpose_b } = options;
    if a.shape().len() != 2 || b.shape().len() != 2 {
        let reason = format!("expected matrices, got a {:?} and b {:?}", a.shape(), b.shape());
        return Err(invalid("gemm", reason));
    }
    let product = apply(MatMul { operation: "gemm", transposed: [transpose_a, transpose_b] }, &[a, b])?;
    let scaled = |x: &Tensor, factor: f64| if factor == 1.0 { Ok(x.clone()) } else { x.scale(factor) };
    let product = scaled(&product, alpha)?;
    let Some(c) = c else { return Ok(product) };
    if broadcast_shape("gemm", product.shape(), c.shape())? != product.shape() {
        let reason = format!("c {:?} does not broadcast to the product {:?}", c.shape(), product.shape());
        return Err(invalid("gemm", reason));
    }
    product.add(&scaled(&of_type(c, &product)?, beta)?)
}

/// The product of stacks of matrices, each stack's taken transposed or not.
struct MatMul {
    operation: &'static str,
    transposed: [bool; 2],
}

/// An operand as a stack of matrices.
#[derive(Debug, Clone)]
struct Stack {
    /// The axes before the last two.
    batch: Vec<usize>,
    rows: usize,
    columns: usize,
}

/// Two stacks and their product.
#[derive(Debug, Clone)]
struct Shapes {
    a: Stack,
    b: Stack,
    /// The axes of the result before the last two.
    batch: Vec<usize>,
    /// The result's shape.
    output: Vec<usize>,
}

impl MatMul {
    fn shapes(&self, a: &[usize], b: &[usize]) -> Result<Shapes> {
        let refused = |what: &str| invalid(self.operation, format!("{what}: a {a:?} and b {b:?}"));
        let stack = |shape: &[usize], side: usize| match *shape {
            [] => Err(refused("an operand without axes")),
            [size] if side == 0 => Ok(Stack { batch: vec![], rows: 1, columns: size }),
            [size] => Ok(Stack { batch: vec![], rows: size, columns: 1 }),
            [ref batch @ .., rows, columns] => Ok(Stack { batch: batch.to_vec(), rows, columns }),
        };
        let (left, right) = (stack(a, 0)?, stack(b, 1)?);
        let [m, k] = left.taken(self.transposed[0]);
        let [other, n] = right.taken(self.transposed[1]);
        if k != other {
            return Err(refused("the inner sizes differ"));
        }
        let batch = broadcast_shape(self.operation, &left.batch, &right.batch)
            .map_err(|_| refused("the axes before the matrices do not broadcast"))?;
        let mut output = batch.clone();
        output.extend((a.len() > 1).then_some(m));
        output.extend((b.len() > 1).then_some(n));
        Ok(Shapes { a: left, b: right, batch, output })
    }
}

impl Stack {
    /// Rows and columns, as they are multiplied.
    fn taken(&self, transposed: bool) -> [usize; 2] {
        if transposed { [self.columns, self.rows] } else { [self.rows, self.columns] }
    }

    fn count(&self) -> usize {
        self.batch.iter().product()
    }

    /// The matrix that belongs to each place of a batch to which this broadcasts.
    fn matrices(&self, batch: &[usize]) -> Vec<usize> {
        let mut matrices = vec![0];
        let new = batch.len() - self.batch.len();
        for (axis, &size) in batch.iter().enumerate() {
            let own = if axis < new { 1 } else { self.batch[axis - new] };
            let next =
                |&matrix: &usize| (0..size).map(move |index| matrix * own + if own == 1 { 0 } else { index });
            matrices = matrices.iter().flat_map(next).collect();
        }
        matrices
    }
}

/// One side of a product: a stack of matrices, rows and columns in memory, and whether they are exchanged.
#[derive(Clone, Copy)]
pub(super) struct Side<'a> {
    pub(super) tensor: &'a Tensor,
    pub(super) size: [usize; 2],
    pub(super) transposed: bool,
}

impl Side<'_> {
    fn taken(&self) -> [usize; 2] {
        let [rows, columns] = self.size;
        if self.transposed { [columns, rows] } else { [rows, columns] }
    }

    fn stack(&self) -> Result<kernel::Stack<'_>> {
        let Side { tensor, size, transposed } = *self;
        Ok(kernel::Stack { elements: tensor.elements()?, size, transposed })
    }
}

/// Each output matrix is the sum of products of a left and a right matrix, in this order.
type Terms = Vec<Vec<[usize; 2]>>;

/// The matrices of `terms`, as a tensor of this shape.
pub(super) fn products(
    shape: &[usize],
    left: Side<'_>,
    right: Side<'_>,
    terms: &[Vec<[usize; 2]>],
) -> Result<Tensor> {
    let of = (left.tensor.device(), left.tensor.dtype());
    let (left, right) = (left.stack()?, right.stack()?);
    Tensor::build_elements(of, shape, MemoryFormat::Contiguous, |y| {
        Ok(kernel::products(of.0.compute(), left, right, terms, y)?)
    })
}

/// The terms of each of `count` outputs, from the output of each term.
fn collected(count: usize, outputs: &[usize], terms: impl Iterator<Item = [usize; 2]>) -> Terms {
    let mut collected = vec![Vec::new(); count];
    for (&output, term) in outputs.iter().zip(terms) {
        collected[output].push(term);
    }
    collected
}

impl Function for MatMul {
    type Saved = [Tensor; 2];

    fn name(&self) -> &'static str {
        self.operation
    }

    fn describe(&self) -> Option<Operation> {
        Some(Operation::MatMul { transposed: self.transposed })
    }

    fn forward(&self, inputs: &[&Tensor], _: &Needs) -> Result<(Tensor, Self::Saved)> {
        same_dtype(self.operation, inputs)?;
        let shapes = self.shapes(inputs[0].shape(), inputs[1].shape())?;
        let a = inputs[0].laid_out(MemoryFormat::Contiguous)?;
        let b = inputs[1].laid_out(MemoryFormat::Contiguous)?;
        crate::tensor::checked_len(self.operation, &shapes.output)?;
        let merged = self.merged(&shapes);
        let (of_a, of_b) = (merged.a.matrices(&merged.batch), merged.b.matrices(&merged.batch));
        let terms: Terms = of_a.into_iter().zip(of_b).map(|(a, b)| vec![[a, b]]).collect();
        let [left, right] = self.sides(&merged, &a, &b);
        Ok((products(&shapes.output, left, right, &terms)?, [a.keep_unconverted(), b.keep_unconverted()]))
    }

    fn backward(&self, [a, b]: [Tensor; 2], upstream: Tensor, needs: &Needs) -> Result<Vec<Option<Tensor>>> {
        let dy = upstream.laid_out(MemoryFormat::Contiguous)?;
        let shapes = self.merged(&self.shapes(a.shape(), b.shape())?);
        let (of_a, of_b) = (shapes.a.matrices(&shapes.batch), shapes.b.matrices(&shapes.batch));
        let [left, right] = self.sides(&shapes, &a, &b);
        let size = [left.taken()[0], right.taken()[1]];
        let of_dy = |transposed: bool| Side { tensor: &dy, size, transposed };
        let flipped = |side: Side<'_>| !side.transposed;
        let da = || {
            // dA = dY Bᵀ; where A is taken transposed, its transpose.
            match self.transposed[0] {
                false => {
                    let terms =
                        collected(shapes.a.count(), &of_a, of_b.iter().enumerate().map(|(y, &b)| [y, b]));
                    products(a.shape(), of_dy(false), Side { transposed: flipped(right), ..right }, &terms)
                }
                true => {
                    let terms =
                        collected(shapes.a.count(), &of_a, of_b.iter().enumerate().map(|(y, &b)| [b, y]));
                    products(a.shape(), right, of_dy(true), &terms)
                }
            }
        };
        let db = || match self.transposed[1] {
            false => {
                let terms = collected(shapes.b.count(), &of_b, of_a.iter().enumerate().map(|(y, &a)| [a, y]));
                products(b.shape(), Side { transposed: flipped(left), ..left }, of_dy(false), &terms)
            }
            true => {
                let terms = collected(shapes.b.count(), &of_b, of_a.iter().enumerate().map(|(y, &a)| [y, a]));
                products(b.shape(), of_dy(true), left, &terms)
            }
        };
        Ok(vec![needs.input(0).then(da).transpose()?, needs.input(1).then(db).transpose()?])
    }
}

impl MatMul {
    /// One product instead of one for each matrix of a, if all are multiplied by the same b.
    fn merged(&self, shapes: &Shapes) -> Shapes {
        let mut merged = shapes.clone();
        if merged.b.count() == 1
            && !self.transposed[0]
            && merged.a.count() == merged.batch.iter().product::<usize>()
        {
            merged.a.rows *= merged.a.count();
            merged.a.batch.clear();
            merged.b.batch.clear();
            merged.batch.clear();
        }
        merged
    }

    fn sides<'a>(&self, shapes: &Shapes, a: &'a Tensor, b: &'a Tensor) -> [Side<'a>; 2] {
        let side = |tensor, stack: &Stack, transposed| Side {
            tensor,
            size: [stack.rows, stack.columns],
            transposed,
        };
        [side(a, &shapes.a, self.transposed[0]), side(b, &shapes.b, self.transposed[1])]
    }
}
