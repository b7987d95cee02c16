//! Reshaping: the same elements under another shape.

use super::{checked_axes, checked_axis};
use crate::error::invalid;
use crate::tensor::checked_len;
use crate::{DType, Function, MemoryFormat, Needs, Operation, Result, Tensor, apply};

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

    /// Joins the axes from `first` to `last`, which count from the last if negative: PyTorch's `flatten` with `start_dim` and
    /// `end_dim`.
    ///
    /// # Errors
    /// If there are no such axes, or `last` comes before `first`.
    pub fn flatten_dims(&self, first: isize, last: isize) -> Result<Tensor> {
        let shape = self.shape();
        let [from, to] = [first, last].map(|axis| checked_axis("flatten", axis, shape));
        let (from, to) = (from?, to?);
        if to < from {
            return Err(invalid("flatten", format!("axis {last} of {shape:?} comes before axis {first}")));
        }
        let joined = shape[from..=to].iter().product();
        self.reshape(&[&shape[..from], &[joined], &shape[to + 1..]].concat())
    }

    /// Leaves out axes of size 1, which count from the last if negative; all such axes if `axes` is empty.
    ///
    /// # Errors
    /// If there is no such axis, one is named twice, or its size is not 1.
    pub fn squeeze(&self, axes: &[isize]) -> Result<Tensor> {
        let shape = self.shape();
        let found = checked_axes("squeeze", axes, shape)?;
        if let Some(axis) = found.iter().find(|&&axis| shape[axis] != 1) {
            return Err(invalid("squeeze", format!("axis {axis} of {shape:?} does not have size 1")));
        }
        let goes = |axis: &usize| if axes.is_empty() { shape[*axis] == 1 } else { found.contains(axis) };
        let left: Vec<usize> = (0..shape.len()).filter(|axis| !goes(axis)).map(|axis| shape[axis]).collect();
        self.reshape(&left)
    }

    /// New axes of size 1: `axes` are their places in the new shape, from the last if negative.
    ///
    /// # Errors
    /// If there is no such place, or one is named twice.
    pub fn unsqueeze(&self, axes: &[isize]) -> Result<Tensor> {
        let mut shape = vec![0; self.shape().len() + axes.len()];
        let found = checked_axes("unsqueeze", axes, &shape).map_err(|_| {
            let reason = format!("{axes:?} are not different places for new axes in {:?}", self.shape());
            invalid("unsqueeze", reason)
        })?;
        let mut own = self.shape().iter();
        for (axis, size) in shape.iter_mut().enumerate() {
            *size = if found.contains(&axis) { 1 } else { *own.next().expect("one for each other place") };
        }
        self.reshape(&shape)
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

    fn describe(&self) -> Option<Operation> {
        Some(Operation::Reshape)
    }

    fn takes(&self, _: usize, _: DType) -> bool {
        true
    }

    fn forward(&self, inputs: &[&Tensor], _: &Needs) -> Result<(Tensor, Self::Saved)> {
        let x = inputs[0];
        if checked_len("reshape", &self.shape)? != x.len() {
            let reason =
                format!("{:?} and {:?} do not hold the same number of elements", x.shape(), self.shape);
            return Err(invalid("reshape", reason));
        }
        let y = x.laid_out(MemoryFormat::Contiguous)?.reshaped(&self.shape);
        Ok((y, (x.shape().to_vec(), x.format())))
    }

    fn backward(
        &self,
        (shape, format): Self::Saved,
        upstream: Tensor,
        _: &Needs,
    ) -> Result<Vec<Option<Tensor>>> {
        let contiguous = upstream.laid_out(MemoryFormat::Contiguous)?;
        drop(upstream);
        Ok(vec![Some(contiguous.reshaped(&shape).laid_out(format)?)])
    }
}
