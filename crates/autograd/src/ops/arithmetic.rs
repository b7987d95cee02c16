//! Addition, multiplication, scaling, and sums and means of all elements.

use convoke_kernels::elementwise;
use convoke_kernels::strided::Map;

use super::broadcast::{Kind, Over, arithmetic};
use crate::{DType, Function, Needs, Operation, ReduceKind, Result, Tensor, apply};

impl Tensor {
    /// The sum of two tensors, broadcast as in [`Tensor::sub`].
    ///
    /// # Errors
    /// If the shapes do not broadcast or types differ.
    pub fn add(&self, other: &Tensor) -> Result<Tensor> {
        arithmetic(Kind::Add, self, other)
    }

    /// The product, element by element, of two tensors, broadcast as in [`Tensor::sub`].
    ///
    /// # Errors
    /// If the shapes do not broadcast or types differ.
    pub fn mul(&self, other: &Tensor) -> Result<Tensor> {
        arithmetic(Kind::Mul, self, other)
    }

    /// Every element times a number.
    ///
    /// # Errors
    /// If there is no memory.
    pub fn scale(&self, factor: f64) -> Result<Tensor> {
        apply(Scale { factor }, &[self])
    }

    /// The sum of all elements, of shape `[]`.
    ///
    /// # Errors
    /// As [`Tensor::scale`].
    pub fn sum(&self) -> Result<Tensor> {
        apply(Sum { kind: ReduceKind::Sum, divisor: 1.0, axes: self.shape().len() }, &[self])
    }

    /// The mean of all elements, of shape `[]`; NaN if there are none.
    ///
    /// # Errors
    /// As [`Tensor::scale`].
    pub fn mean(&self) -> Result<Tensor> {
        let divisor = self.len() as f64;
        apply(Sum { kind: ReduceKind::Mean, divisor, axes: self.shape().len() }, &[self])
    }
}

struct Scale {
    factor: f64,
}

fn scaled(x: &Tensor, factor: f64) -> Result<Tensor> {
    Over { operation: "scale", shape: x.shape(), format: x.format() }.map(Map::Scale(factor), [x])
}

impl Function for Scale {
    type Saved = ();

    fn name(&self) -> &'static str {
        "scale"
    }

    fn describe(&self) -> Option<Operation> {
        Some(Operation::Scale(self.factor))
    }

    fn takes(&self, _: usize, _: DType) -> bool {
        true
    }

    fn forward(&self, inputs: &[&Tensor], _: &Needs) -> Result<(Tensor, ())> {
        Ok((scaled(inputs[0], self.factor)?, ()))
    }

    fn backward(&self, (): (), upstream: Tensor, _: &Needs) -> Result<Vec<Option<Tensor>>> {
        Ok(vec![Some(scaled(&upstream, self.factor)?)])
    }
}

/// The sum of all elements, or their mean.
struct Sum {
    kind: ReduceKind,
    divisor: f64,
    /// How many axes the input has.
    axes: usize,
}

impl Function for Sum {
    /// The input's shape and format: enough to spread the gradient, without holding the input.
    type Saved = (Vec<usize>, crate::MemoryFormat);

    fn name(&self) -> &'static str {
        if self.kind == ReduceKind::Mean { "mean" } else { "sum" }
    }

    fn describe(&self) -> Option<Operation> {
        let axes = (0..self.axes).collect();
        Some(Operation::Reduce { kind: self.kind, axes, keep: false })
    }

    fn takes(&self, _: usize, _: DType) -> bool {
        true
    }

    fn forward(&self, inputs: &[&Tensor], _: &Needs) -> Result<(Tensor, Self::Saved)> {
        let x = inputs[0];
        let sum = elementwise::sum(x.device().compute(), x.elements()?)?;
        let y = Tensor::full(x.device(), &[], x.dtype(), sum / self.divisor)?;
        Ok((y, (x.shape().to_vec(), x.format())))
    }

    fn backward(
        &self,
        (shape, format): Self::Saved,
        upstream: Tensor,
        _: &Needs,
    ) -> Result<Vec<Option<Tensor>>> {
        let value = upstream.item()? / self.divisor;
        let dx = Tensor::full_in((upstream.device(), upstream.dtype()), &shape, format, value)?;
        Ok(vec![Some(dx)])
    }
}
