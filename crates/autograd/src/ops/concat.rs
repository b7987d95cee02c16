//! Joining tensors along an axis.

use convoke_kernels::concat as kernel;
use convoke_kernels::memory_format::Extent;

use super::{around, checked_axis, same_dtype};
use crate::error::invalid;
use crate::tensor::checked_len;
use crate::{DType, Function, MemoryFormat, Needs, Operation, Result, Tensor, apply};

/// The channels of N x C1 x ..., N x C2 x ... and so on, one tensor after the other, as PyTorch's `cat` with `dim=1`.
///
/// The output has the memory format of the first one. Saves nothing.
///
/// # Errors
/// If there is no tensor, one has fewer than two dimensions, or sizes other than C or types differ.
pub fn concat(tensors: &[&Tensor]) -> Result<Tensor> {
    let operation = "concat";
    for tensor in tensors {
        tensor.extent(operation)?;
    }
    joined(operation, tensors, 1)
}

/// The elements of one tensor after the other along an axis, which counts from the last if negative, as PyTorch's `cat`.
///
/// The output has the memory format of the first one. Saves nothing.
///
/// # Errors
/// If there is no tensor or no such axis, or sizes of other axes or types differ.
pub fn cat(tensors: &[&Tensor], axis: isize) -> Result<Tensor> {
    joined("cat", tensors, axis)
}

/// Tensors of one shape along a new axis, before axis `axis` of the first; -1 is after the last, as in PyTorch's `stack`.
///
/// # Errors
/// If there is no tensor or no such axis, or shapes or types differ.
pub fn stack(tensors: &[&Tensor], axis: isize) -> Result<Tensor> {
    let Some(first) = tensors.first() else {
        return Err(invalid("stack", "there must be at least one tensor"));
    };
    if let Some(other) = tensors.iter().find(|other| other.shape() != first.shape()) {
        let reason = format!("the shapes {:?} and {:?} differ", first.shape(), other.shape());
        return Err(invalid("stack", reason));
    }
    if checked_axis("stack", axis, &vec![1; first.shape().len() + 1]).is_err() {
        return Err(invalid(
            "stack",
            format!("there is no place {axis} for a new axis in {:?}", first.shape()),
        ));
    }
    let new: Vec<Tensor> = tensors.iter().map(|tensor| tensor.unsqueeze(&[axis])).collect::<Result<_>>()?;
    joined("stack", &new.iter().collect::<Vec<_>>(), axis)
}

fn joined(operation: &'static str, tensors: &[&Tensor], axis: isize) -> Result<Tensor> {
    let Some(first) = tensors.first() else {
        return Err(invalid(operation, "there must be at least one tensor"));
    };
    same_dtype(operation, tensors)?;
    let axis = checked_axis(operation, axis, first.shape())?;
    let (mut shape, mut sizes) = (first.shape().to_vec(), Vec::with_capacity(tensors.len()));
    let mut total = 0usize;
    for tensor in tensors {
        let other = tensor.shape();
        let differs = |at: usize| at != axis && other[at] != shape[at];
        if other.len() != shape.len() || (0..shape.len()).any(differs) {
            let what = if operation == "concat" { "their channels".into() } else { format!("axis {axis}") };
            let reason = format!("{:?} and {other:?} differ in more than {what}", first.shape());
            return Err(invalid(operation, reason));
        }
        sizes.push(other[axis]);
        total = total.checked_add(other[axis]).ok_or_else(|| {
            invalid(operation, format!("{} tensors like {other:?} are too large", tensors.len()))
        })?;
    }
    shape[axis] = total;
    checked_len(operation, &shape)?;
    apply(Concat { operation, axis, shape, sizes }, tensors)
}

struct Concat {
    operation: &'static str,
    axis: usize,
    /// The output's shape.
    shape: Vec<usize>,
    /// The size of each input along the axis.
    sizes: Vec<usize>,
}

/// `tensor` as outer x an axis of `size` x inner, which the kernels call batch, channels and spatial.
fn extent(tensor: &Tensor, axis: usize, size: usize) -> Extent {
    let [batch, spatial] = around(tensor, axis);
    Extent { batch, channels: size, spatial, format: MemoryFormat::Contiguous }
}

impl Function for Concat {
    type Saved = ();

    fn name(&self) -> &'static str {
        self.operation
    }

    fn describe(&self) -> Option<Operation> {
        Some(Operation::Concat { axis: self.axis })
    }

    fn takes(&self, _: usize, _: DType) -> bool {
        true
    }

    fn forward(&self, inputs: &[&Tensor], _: &Needs) -> Result<(Tensor, ())> {
        let first = inputs[0];
        let alike = inputs.iter().map(|input| input.in_format(first.format()));
        let alike: Vec<Tensor> = alike.collect::<Result<_>>()?;
        let (device, format) = (first.device(), first.format());
        let y = Tensor::build_elements((device, first.dtype()), &self.shape, format, |y| {
            let extent = extent(first, self.axis, self.shape[self.axis]);
            let parts = alike.iter().map(Tensor::elements).collect::<Result<Vec<_>>>()?;
            Ok(kernel::concat(device.compute(), &extent, &parts, y)?)
        })?;
        Ok((y, ()))
    }

    fn backward(&self, (): (), upstream: Tensor, needs: &Needs) -> Result<Vec<Option<Tensor>>> {
        let (device, format) = (upstream.device(), upstream.format());
        let extent = extent(&upstream, self.axis, self.shape[self.axis]);
        let mut first = 0;
        let mut gradients = Vec::with_capacity(self.sizes.len());
        for (index, &size) in self.sizes.iter().enumerate() {
            let mut shape = self.shape.clone();
            shape[self.axis] = size;
            let take = || {
                Tensor::build_elements((device, upstream.dtype()), &shape, format, |dx| {
                    Ok(kernel::take_channels(device.compute(), &extent, first, upstream.elements()?, dx)?)
                })
            };
            gradients.push(needs.input(index).then(take).transpose()?);
            first += size;
        }
        Ok(gradients)
    }
}
