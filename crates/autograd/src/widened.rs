//! Inputs of a type that a function does not take: converted for its forward, and its gradients converted back.

use std::ops::Range;
use std::sync::Arc;

use convoke_kernels::{SliceMut, convert};

use crate::error::invalid;
use crate::storage::Recipe;
use crate::{DType, Function, Needs, Result, Tensor};

/// The inputs of one call that are converted to the type in which kernels compute.
pub(crate) struct Widened {
    /// The type of each input that is converted; empty if none is.
    from: Vec<Option<DType>>,
}

impl Widened {
    /// What a function does not take of its inputs.
    ///
    /// # Errors
    /// If that is of a type in which kernels compute.
    pub(crate) fn new<F: Function>(function: &F, inputs: &[&Tensor]) -> Result<Widened> {
        let mut from = Vec::new();
        for (index, dtype) in inputs.iter().map(|input| input.dtype()).enumerate() {
            if function.takes(index, dtype) {
                continue;
            }
            if dtype.computes() {
                let reason = format!("input {index} is {dtype}, which it does not take");
                return Err(invalid(function.name(), reason));
            }
            from.resize(inputs.len(), None);
            from[index] = Some(dtype);
        }
        Ok(Widened { from })
    }

    fn of(&self, input: usize) -> Option<DType> {
        self.from.get(input).copied().flatten()
    }

    /// The inputs as constants, as the function takes them.
    pub(crate) fn inputs(&self, inputs: &[&Tensor], needs: &Needs) -> Result<Vec<Tensor>> {
        let input = |(index, input): (usize, &&Tensor)| match self.of(index) {
            Some(_) => widen(input, needs),
            None => Ok(input.constant()),
        };
        inputs.iter().enumerate().map(input).collect()
    }

    /// The function's output, in the type of the first input.
    pub(crate) fn output(&self, output: Tensor) -> Result<Tensor> {
        narrow(output, self.of(0))
    }

    /// The gradient of the function's own output.
    pub(crate) fn upstream(&self, upstream: Tensor) -> Result<Tensor> {
        match self.of(0) {
            Some(dtype) if upstream.dtype() == dtype => upstream.in_dtype(dtype.computed_in()),
            _ => Ok(upstream),
        }
    }

    /// Runs a backward without the sums of converted inputs, which have another type than its gradients.
    pub(crate) fn without_sums<R>(
        &self,
        sums: &mut [Option<Tensor>],
        run: impl FnOnce(&mut [Option<Tensor>]) -> R,
    ) -> R {
        if self.from.is_empty() {
            return run(sums);
        }
        let held: Vec<_> =
            sums.iter_mut().enumerate().map(|(index, sum)| self.of(index).and_then(|_| sum.take())).collect();
        let result = run(sums);
        for (sum, held) in sums.iter_mut().zip(held) {
            *sum = held.or(sum.take());
        }
        result
    }

    /// The gradients in the types of the inputs.
    pub(crate) fn gradients(&self, gradients: Vec<Option<Tensor>>) -> Result<Vec<Option<Tensor>>> {
        let gradient = |(index, gradient): (usize, Option<Tensor>)| {
            gradient.map(|gradient| narrow(gradient, self.of(index))).transpose()
        };
        gradients.into_iter().enumerate().map(gradient).collect()
    }
}

/// A tensor of the type in which kernels compute with numbers of `dtype`, in that type; a tensor of another type as it is.
fn narrow(tensor: Tensor, dtype: Option<DType>) -> Result<Tensor> {
    match dtype {
        Some(dtype) if tensor.dtype() == dtype.computed_in() => tensor.in_dtype(dtype),
        _ => Ok(tensor),
    }
}

/// The numbers in the type in which kernels compute. A function that [keeps](Tensor::keep) them for backward does not hold them twice:
/// they are converted again.
fn widen(narrow: &Tensor, needs: &Needs) -> Result<Tensor> {
    let wide = narrow.in_dtype(narrow.dtype().computed_in())?;
    match needs.any() && !narrow.shape().is_empty() {
        true => Ok(wide.with_recipe(Arc::new(Widening { narrow: narrow.keep() }))),
        false => Ok(wide),
    }
}

/// Converts numbers again.
struct Widening {
    narrow: Tensor,
}

impl Recipe for Widening {
    fn images(&self) -> usize {
        self.narrow.shape()[0]
    }

    fn write(&self, images: Range<usize>, out: SliceMut<'_>) -> Result<()> {
        let mut scratch = None;
        let narrow = self.narrow.images(images, &mut scratch)?;
        Ok(convert::convert(self.narrow.device().compute(), narrow, out)?)
    }

    fn prepare(&self) -> Result<bool> {
        Ok(!self.narrow.has_elements())
    }

    fn converts(&self) -> bool {
        true
    }
}
