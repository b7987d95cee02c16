//! Reshaping: the same elements under another shape.

use crate::error::invalid;
use crate::tensor::checked_len;
use crate::{DType, Function, MemoryFormat, Needs, Result, Tensor, apply};

impl Tensor {
    /// The elements in N, C, H, W order with another shape of equal length. Shares memory where possible.
    ///
    /// # Errors
    /// If the lengths differ.
    pub fn reshape(&self, shape: &[usize]) -> Result<Tensor> {
        apply(Reshape { shape: shape.to_vec() }, &[self])
    }

    /// Keeps the first dimension and joins the others: N x (C H W).
    ///
    /// # Errors
    /// If there are no dimensions.
    pub fn flatten(&self) -> Result<Tensor> {
        let [batch, rest @ ..] = self.shape() else {
            return Err(invalid("flatten", "a tensor of shape [] has no first dimension to keep"));
        };
        self.reshape(&[*batch, rest.iter().product()])
    }
}

struct Reshape {
    shape: Vec<usize>,
}

impl Function for Reshape {
    type Saved = (Vec<usize>, MemoryFormat);

    fn name(&self) -> &'static str {
        "reshape"
    }

    fn takes(&self, _: DType) -> bool {
        true
    }

    fn forward(&self, inputs: &[&Tensor], _: &Needs) -> Result<(Tensor, Self::Saved)> {
        let x = inputs[0];
        if checked_len("reshape", &self.shape)? != x.len() {
            let reason =
                format!("{:?} and {:?} do not hold the same number of elements", x.shape(), self.shape);
            return Err(invalid("reshape", reason));
        }
        let y = x.in_format(MemoryFormat::Contiguous)?.reshaped(&self.shape);
        Ok((y, (x.shape().to_vec(), x.format())))
    }

    fn backward(
        &self,
        (shape, format): Self::Saved,
        upstream: Tensor,
        _: &Needs,
    ) -> Result<Vec<Option<Tensor>>> {
        let contiguous = upstream.in_format(MemoryFormat::Contiguous)?;
        drop(upstream);
        Ok(vec![Some(contiguous.reshaped(&shape).in_format(format)?)])
    }
}
