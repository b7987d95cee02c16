//! Joining tensors along their channels.

use convoke_kernels::concat as kernel;
use convoke_kernels::memory_format::Extent;

use super::same_dtype;
use crate::error::invalid;
use crate::{DType, Function, Needs, Result, Tensor, apply};
use convoke_kernels::dispatch_stored;

/// The channels of N x C1 x ..., N x C2 x ... and so on, one tensor after the other, as PyTorch's `cat` with `dim=1`.
///
/// The output has the memory format of the first one. Saves nothing.
///
/// # Errors
/// If there is no tensor, one has fewer than two dimensions, or sizes other than C or types differ.
pub fn concat(tensors: &[&Tensor]) -> Result<Tensor> {
    let operation = "concat";
    let Some(first) = tensors.first() else {
        return Err(invalid(operation, "there must be at least one tensor"));
    };
    same_dtype(operation, tensors)?;
    let (mut shape, mut channels) = (first.shape().to_vec(), Vec::with_capacity(tensors.len()));
    let mut total = 0usize;
    for tensor in tensors {
        channels.push(tensor.extent(operation)?.channels);
        let other = tensor.shape();
        if other[0] != shape[0] || other[2..] != shape[2..] {
            let reason = format!("{:?} and {other:?} differ in more than their channels", first.shape());
            return Err(invalid(operation, reason));
        }
        total = total.checked_add(other[1]).ok_or_else(|| {
            invalid(operation, format!("{} tensors like {other:?} are too large", tensors.len()))
        })?;
    }
    shape[1] = total;
    apply(Concat { shape, channels }, tensors)
}

struct Concat {
    /// The output's shape.
    shape: Vec<usize>,
    /// The number of channels of each input.
    channels: Vec<usize>,
}

impl Function for Concat {
    type Saved = ();

    fn name(&self) -> &'static str {
        "concat"
    }

    fn takes(&self, _: DType) -> bool {
        true
    }

    fn forward(&self, inputs: &[&Tensor], _: &Needs) -> Result<(Tensor, ())> {
        let first = inputs[0];
        let alike = inputs.iter().map(|input| input.in_format(first.format()));
        let alike: Vec<Tensor> = alike.collect::<Result<_>>()?;
        let (device, format) = (first.device(), first.format());
        let y = dispatch_stored!(first.dtype(), T => Tensor::build(device, &self.shape, format, |y: &mut [T]| {
            let extent = Extent { channels: self.shape[1], ..first.extent("concat")? };
            let parts: Vec<&[T]> = alike.iter().map(Tensor::data).collect::<Result<_>>()?;
            Ok(kernel::concat(device.compute(), &extent, &parts, y)?)
        }))?;
        Ok((y, ()))
    }

    fn backward(&self, (): (), upstream: Tensor, needs: &Needs) -> Result<Vec<Option<Tensor>>> {
        let (device, format, extent) = (upstream.device(), upstream.format(), upstream.extent("concat")?);
        let mut first = 0;
        let mut gradients = Vec::with_capacity(self.channels.len());
        for (index, &channels) in self.channels.iter().enumerate() {
            let mut shape = self.shape.clone();
            shape[1] = channels;
            let take = || {
                dispatch_stored!(upstream.dtype(), T => Tensor::build(device, &shape, format, |dx: &mut [T]| {
                    Ok(kernel::take_channels(device.compute(), &extent, first, upstream.data::<T>()?, dx)?)
                }))
            };
            gradients.push(needs.input(index).then(take).transpose()?);
            first += channels;
        }
        Ok(gradients)
    }
}
