//! Products of matrices of stacks, with operands whose type is known at run time.

use crate::gemm::{Matrix, MatrixMut, Update, gemm};
use crate::{Cpu, Element, Result, Slice, SliceMut, dispatch};

const NAME: &str = "matmul";

/// A stack of matrices of one size, one after the other, row by row.
#[derive(Debug, Clone, Copy)]
pub struct Stack<'a> {
    /// The elements.
    pub elements: Slice<'a>,
    /// Rows and columns of each matrix in memory.
    pub size: [usize; 2],
    /// Whether each matrix is taken transposed.
    pub transposed: bool,
}

impl<'a> Stack<'a> {
    /// Rows and columns of each matrix as it is taken.
    pub fn taken(&self) -> [usize; 2] {
        let [rows, columns] = self.size;
        if self.transposed { [columns, rows] } else { [rows, columns] }
    }

    fn typed<T: Element>(self) -> Result<TypedStack<'a, T>> {
        Ok(TypedStack { elements: self.elements.of()?, stack: self })
    }
}

#[derive(Clone, Copy)]
struct TypedStack<'a, T> {
    elements: &'a [T],
    stack: Stack<'a>,
}

impl<'a, T> TypedStack<'a, T> {
    fn matrix(&self, index: usize) -> Matrix<'a, T> {
        let Stack { size: [rows, columns], transposed, .. } = self.stack;
        let elements = &self.elements[index * rows * columns..][..rows * columns];
        let matrix = Matrix::new(elements, [rows, columns], [columns, 1]);
        if transposed { matrix.t() } else { matrix }
    }
}

/// Below this many multiplications a product runs on one thread, beside others. This must not depend on the threads: other splits
/// may give other last bits.
const SMALL: usize = 1 << 18;

/// Writes one matrix to `y` for each of `terms`: the sum of the products of a left and a right matrix, at these indices of the
/// stacks, in this order. Without terms it is zeros.
///
/// # Errors
/// If the operands have several types.
///
/// # Panics
/// If there are no such matrices, or sizes do not fit.
pub fn products(
    cpu: &Cpu,
    left: Stack<'_>,
    right: Stack<'_>,
    terms: &[Vec<[usize; 2]>],
    y: SliceMut<'_>,
) -> Result<()> {
    let ([m, k], [_, n]) = (left.taken(), right.taken());
    if y.is_empty() {
        return Ok(());
    }
    let work = m.saturating_mul(n).saturating_mul(k.max(1));
    dispatch!(NAME, y.dtype(), T => {
        let (left, right) = (left.typed::<T>()?, right.typed::<T>()?);
        let items = y.of()?.chunks_mut(m * n).zip(terms);
        match work < SMALL && terms.len() > 1 {
            true => {
                let one = cpu.one_thread();
                let work = work.saturating_mul(terms.iter().map(Vec::len).sum());
                cpu.for_each(work, items, |(y, terms)| sum(&one, left, right, terms, y));
            }
            false => items.for_each(|(y, terms)| sum(cpu, left, right, terms, y)),
        }
    });
    Ok(())
}

/// One matrix of the output.
fn sum<T: Element>(
    cpu: &Cpu,
    left: TypedStack<'_, T>,
    right: TypedStack<'_, T>,
    terms: &[[usize; 2]],
    y: &mut [T],
) {
    let ([m, _], [_, n]) = (left.stack.taken(), right.stack.taken());
    if terms.is_empty() && !cpu.is_dry() {
        y.fill(T::zero());
    }
    for (index, &[a, b]) in terms.iter().enumerate() {
        let update = if index == 0 { Update::Overwrite } else { Update::Add };
        gemm(cpu, left.matrix(a), right.matrix(b), MatrixMut::new(y, [m, n], [n, 1]), update);
    }
}
