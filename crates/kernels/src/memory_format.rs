//! The two orders in which a tensor's elements lie in memory, and the conversion between them.

use crate::error::{check_len, invalid};
use crate::profile::span;
use crate::transpose::transpose;
use crate::{Cpu, Result, Slice, SliceMut, dispatch_stored};

/// The order of a tensor's elements in memory; its shape is N, C, H, W (or N, C, ...) in both formats.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum MemoryFormat {
    /// N, C, H, W: the last dimension is contiguous.
    #[default]
    Contiguous,
    /// N, H, W, C: the channels of one pixel lie together, as in PyTorch's `channels_last`.
    ChannelsLast,
}

impl std::fmt::Display for MemoryFormat {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            MemoryFormat::Contiguous => "nchw",
            MemoryFormat::ChannelsLast => "nhwc",
        })
    }
}

impl MemoryFormat {
    /// How many elements apart neighbours along each axis of a shape lie; a size of 0 counts as 1. Channels-last needs three axes
    /// or more.
    pub fn strides(self, shape: &[usize]) -> Vec<usize> {
        let (mut strides, mut step) = (vec![0; shape.len()], 1);
        for axis in self.axes(shape.len()).into_iter().rev() {
            strides[axis] = step;
            step *= shape[axis].max(1);
        }
        strides
    }

    /// The axes in their order in memory, from the outermost to the innermost. Channels-last needs three axes or more.
    pub fn axes(self, rank: usize) -> Vec<usize> {
        match self {
            MemoryFormat::Contiguous => (0..rank).collect(),
            MemoryFormat::ChannelsLast => [0].into_iter().chain(2..rank).chain([1]).collect(),
        }
    }
}

/// The most elements that a tensor of a problem may have: 2^40, far above any memory, far below overflow.
pub(crate) const MOST_ELEMENTS: usize = 1 << 40;

/// The product of sizes; `None` if it overflows.
fn product(sizes: &[usize]) -> Option<usize> {
    sizes.iter().try_fold(1usize, |product, &size| product.checked_mul(size))
}

/// Refuses a shape of more than [`MOST_ELEMENTS`]. `name` is what has this shape.
pub(crate) fn check_shape(operation: &'static str, name: &str, shape: &[usize]) -> Result<()> {
    match product(shape).is_some_and(|len| len <= MOST_ELEMENTS) {
        true => Ok(()),
        false => Err(invalid(operation, format!("the {name} of shape {shape:?} is too large"))),
    }
}

/// The shape of a tensor of N x C x (spatial) elements, and their order in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Extent {
    /// N.
    pub batch: usize,
    /// C.
    pub channels: usize,
    /// The product of the spatial dimensions; 1 if there are none.
    pub spatial: usize,
    /// The order of the elements in memory.
    pub format: MemoryFormat,
}

impl Extent {
    /// Number of elements.
    ///
    /// # Errors
    /// If the product of the sizes that are not 0 does not fit `usize`, even where another size is 0: kernels multiply any
    /// two of the sizes.
    #[allow(clippy::len_without_is_empty)] // it may fail, so there is no cheap `is_empty` to pair it with
    pub fn len(&self) -> Result<usize> {
        let sizes = [self.batch, self.channels, self.spatial];
        match product(&sizes.map(|size| size.max(1))) {
            Some(_) => Ok(sizes.iter().product()),
            None => Err(invalid("extent", format!("the size of {self:?} overflows"))),
        }
    }

    /// Checks that each operand has this extent's number of elements, and returns it.
    pub(crate) fn check(&self, operation: &'static str, lens: &[(&'static str, usize)]) -> Result<usize> {
        let expected = self.len()?;
        lens.iter().try_for_each(|&(operand, len)| check_len(operation, operand, len, expected))?;
        Ok(expected)
    }

    /// The extent of a tensor of this shape in which `axis` takes the place of the channels: for kernels that work by channel. Its
    /// order of the elements is the tensor's in memory.
    ///
    /// # Errors
    /// If there is no such axis, the product of the sizes overflows, or the shape has too few dimensions for channels-last.
    pub fn along(shape: &[usize], format: MemoryFormat, axis: usize) -> Result<Extent> {
        let Some(&channels) = shape.get(axis) else {
            let reason =
                format!("there is no axis {axis}: the shape {shape:?} has {} dimensions", shape.len());
            return Err(invalid("extent", reason));
        };
        let sizes: Vec<usize> = shape.iter().map(|&size| size.max(1)).collect();
        if product(&sizes).is_none() {
            return Err(invalid("extent", format!("the size of {shape:?} overflows")));
        }
        if format == MemoryFormat::ChannelsLast && shape.len() < 3 {
            let reason = format!("channels-last needs 3 dimensions or more, got {shape:?}");
            return Err(invalid("extent", reason));
        }
        let order = format.axes(shape.len());
        let place = order.iter().position(|&other| other == axis).expect("every axis is in the order");
        let product = |axes: &[usize]| axes.iter().map(|&axis| shape[axis]).product();
        let (batch, spatial) = (product(&order[..place]), product(&order[place + 1..]));
        Ok(Extent { batch, channels, spatial, format: MemoryFormat::Contiguous })
    }

    /// `(outer, inner)`: the tensor as `outer` x C x `inner`, with the channel in the middle.
    ///
    /// Channels-last tensors are (N x spatial) x C x 1.
    pub(crate) fn around_channels(&self) -> (usize, usize) {
        match self.format {
            MemoryFormat::Contiguous => (self.batch, self.spatial),
            MemoryFormat::ChannelsLast => (self.batch * self.spatial, 1),
        }
    }
}

/// Copies `from`, which is in `extent.format`, into `to` in the other format.
///
/// # Errors
/// If a length differs from `extent`'s.
pub fn convert(cpu: &Cpu, extent: &Extent, from: Slice<'_>, to: SliceMut<'_>) -> Result<()> {
    span!("memory format conversion", from, to);
    let lens = [("the input", from.len()), ("the output", to.len())];
    let len = extent.check("memory format conversion", &lens)?;
    let image = extent.channels * extent.spatial;
    if len == 0 {
        return Ok(());
    }
    let (rows, columns) = match extent.format {
        MemoryFormat::Contiguous => (extent.channels, extent.spatial),
        MemoryFormat::ChannelsLast => (extent.spatial, extent.channels),
    };
    dispatch_stored!(from.dtype(), T => {
        let images = from.of::<T>()?.chunks(image).zip(to.of()?.chunks_mut(image));
        cpu.for_each(len, images, |(from, to)| transpose(cpu, rows, columns, from, to));
    });
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_and_back() {
        let extent = Extent { batch: 2, channels: 3, spatial: 37, format: MemoryFormat::Contiguous };
        let x: Vec<f32> = (0..222).map(|i| i as f32).collect();
        let (mut last, mut back) = (vec![f32::NAN; 222], vec![f32::NAN; 222]);
        let cpu = Cpu::single();
        convert(&cpu, &extent, (&x).into(), (&mut last).into()).unwrap();
        assert_eq!(&last[..4], &[0., 37., 74., 1.]);
        let reverse = Extent { format: MemoryFormat::ChannelsLast, ..extent };
        convert(&cpu, &reverse, (&last).into(), (&mut back).into()).unwrap();
        assert_eq!(x, back);
        assert!(convert(&cpu, &extent, x[1..].into(), (&mut last).into()).is_err());
    }
}
