//! Comparisons, and the choice between tensors by them. A truth value is 1 or 0 in a tensor of the operands' type.

use convoke_kernels::strided::Map;

use super::broadcast::{Like, Over, broadcast_operands};
use super::same_dtype;
use crate::{Compare, DType, Function, Needs, Operation, Result, Tensor, apply};

impl Tensor {
    /// 1 where the comparison of two elements holds, else 0, broadcast as in [`Tensor::sub`]. Gradients stop here.
    ///
    /// # Errors
    /// As [`Tensor::sub`].
    pub fn compare(&self, comparison: Compare, other: &Tensor) -> Result<Tensor> {
        apply(Comparison(comparison), &[&self.detach(), &other.detach()])
    }
}

/// Elements of `a` where the condition is not 0, else of `b`: PyTorch's `where`. All three broadcast as in [`Tensor::sub`], and have one
/// type. The condition has no gradient.
///
/// # Errors
/// As [`Tensor::sub`].
pub fn choose(condition: &Tensor, a: &Tensor, b: &Tensor) -> Result<Tensor> {
    apply(Choose, &[&condition.detach(), a, b])
}

struct Comparison(Compare);

impl Function for Comparison {
    type Saved = ();

    fn name(&self) -> &'static str {
        "compare"
    }

    fn describe(&self) -> Option<Operation> {
        Some(Operation::Compare(self.0))
    }

    fn takes(&self, _: usize, _: DType) -> bool {
        true
    }

    fn forward(&self, inputs: &[&Tensor], _: &Needs) -> Result<(Tensor, ())> {
        same_dtype(self.name(), inputs)?;
        let (shape, format) = broadcast_operands(self.name(), inputs)?;
        let function = match self.0 {
            Compare::Equal => Map::Equal,
            Compare::Less => Map::Less,
            Compare::LessOrEqual => Map::LessOrEqual,
            Compare::Greater => Map::Greater,
            Compare::GreaterOrEqual => Map::GreaterOrEqual,
            Compare::And => Map::And,
            Compare::Or => Map::Or,
            Compare::Xor => Map::Xor,
        };
        let over = Over { operation: self.name(), shape: &shape, format };
        Ok((over.map(function, [inputs[0], inputs[1]])?, ()))
    }

    fn backward(&self, (): (), _: Tensor, _: &Needs) -> Result<Vec<Option<Tensor>>> {
        Ok(vec![None, None])
    }
}

struct Choose;

impl Function for Choose {
    /// The condition, and the shapes of a and b.
    type Saved = (Tensor, [Like; 2]);

    fn name(&self) -> &'static str {
        "where"
    }

    fn describe(&self) -> Option<Operation> {
        Some(Operation::Choose)
    }

    fn takes(&self, _: usize, _: DType) -> bool {
        true
    }

    fn forward(&self, inputs: &[&Tensor], _: &Needs) -> Result<(Tensor, Self::Saved)> {
        let operands = [inputs[0], inputs[1], inputs[2]];
        same_dtype(self.name(), inputs)?;
        let (shape, format) = broadcast_operands(self.name(), inputs)?;
        let y = Over { operation: self.name(), shape: &shape, format }.map(Map::Choose, operands)?;
        Ok((y, (inputs[0].constant(), [1, 2].map(|input| Like::of(inputs[input])))))
    }

    fn backward(
        &self,
        (condition, likes): Self::Saved,
        dy: Tensor,
        needs: &Needs,
    ) -> Result<Vec<Option<Tensor>>> {
        let over = Over { operation: self.name(), shape: dy.shape(), format: dy.format() };
        let gradient = |input: usize, share| {
            let compute = || over.gradient(&likes[input - 1], share, [&condition, &dy]);
            needs.input(input).then(compute).transpose()
        };
        Ok(vec![None, gradient(1, Map::WhereTrue)?, gradient(2, Map::WhereFalse)?])
    }
}
