//! Changing a tensor's order in memory; its values and shape stay.

use crate::{DType, Function, MemoryFormat, Needs, Operation, Result, Tensor, apply};

impl Tensor {
    /// The same tensor with its elements in another order in memory; shares the elements if they already have that order.
    ///
    /// # Errors
    /// If channels-last is asked for and the tensor has fewer than three dimensions.
    pub fn to_format(&self, format: MemoryFormat) -> Result<Tensor> {
        apply(ToFormat { format }, &[self])
    }
}

struct ToFormat {
    format: MemoryFormat,
}

impl Function for ToFormat {
    type Saved = MemoryFormat;

    fn name(&self) -> &'static str {
        "to_format"
    }

    fn describe(&self) -> Option<Operation> {
        Some(Operation::Format)
    }

    fn takes(&self, _: usize, _: DType) -> bool {
        true
    }

    fn forward(&self, inputs: &[&Tensor], _: &Needs) -> Result<(Tensor, MemoryFormat)> {
        Ok((inputs[0].in_format(self.format)?, inputs[0].format()))
    }

    fn backward(&self, format: MemoryFormat, upstream: Tensor, _: &Needs) -> Result<Vec<Option<Tensor>>> {
        Ok(vec![Some(upstream.in_format(format)?)])
    }
}
