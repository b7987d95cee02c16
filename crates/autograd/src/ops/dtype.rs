//! Converting a tensor's elements to another type.

use crate::{DType, Function, Needs, Operation, Result, Tensor, apply};

impl Tensor {
    /// The nearest values of another type (ties to even); shares the elements if they already have that type.
    ///
    /// Backward converts the gradient back to this tensor's type, so sums of gradients are rounded to it.
    ///
    /// # Errors
    /// If there is no memory.
    pub fn to_dtype(&self, dtype: DType) -> Result<Tensor> {
        apply(ToDType { dtype }, &[self])
    }
}

struct ToDType {
    dtype: DType,
}

impl Function for ToDType {
    type Saved = DType;

    fn name(&self) -> &'static str {
        "to_dtype"
    }

    fn describe(&self) -> Option<Operation> {
        Some(Operation::Convert(self.dtype))
    }

    fn takes(&self, _: usize, _: DType) -> bool {
        true
    }

    fn forward(&self, inputs: &[&Tensor], _: &Needs) -> Result<(Tensor, DType)> {
        Ok((inputs[0].in_dtype(self.dtype)?, inputs[0].dtype()))
    }

    fn backward(&self, dtype: DType, upstream: Tensor, _: &Needs) -> Result<Vec<Option<Tensor>>> {
        Ok(vec![Some(upstream.in_dtype(dtype)?)])
    }
}
