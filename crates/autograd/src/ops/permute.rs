//! Other orders of axes, and of parts of axes: permutations, depth to space, channel shuffle.

use convoke_kernels::strided::{Places, Take, TakeAxis};

use super::{checked_axes, checked_axis, four_dimensions};
use crate::error::invalid;
use crate::{DType, Function, MemoryFormat, Needs, Operation, Result, Tensor, apply};

impl Tensor {
    /// The axes in another order: axis i of the result is axis `axes[i]`, counted from the last if negative.
    ///
    /// The result shares the elements if one of the memory formats has them in this order, such as N x C x H x W from
    /// N x H x W x C in memory; else it has the tensor's format.
    ///
    /// # Errors
    /// If `axes` does not hold every axis once.
    pub fn permute(&self, axes: &[isize]) -> Result<Tensor> {
        let rank = self.shape().len();
        if axes.len() != rank {
            let reason = format!("{axes:?} are not the {rank} axes of {:?}", self.shape());
            return Err(invalid("permute", reason));
        }
        self.permuted("permute", checked_axes("permute", axes, self.shape())?)
    }

    /// Two axes exchanged, otherwise as [`Tensor::permute`].
    ///
    /// # Errors
    /// If there are no such axes.
    pub fn transpose(&self, first: isize, second: isize) -> Result<Tensor> {
        let [first, second] = [first, second].map(|axis| checked_axis("transpose", axis, self.shape()));
        let mut axes: Vec<usize> = (0..self.shape().len()).collect();
        axes.swap(first?, second?);
        self.permuted("transpose", axes)
    }

    fn permuted(&self, name: &'static str, axes: Vec<usize>) -> Result<Tensor> {
        let from = (0..axes.len()).map(|axis| vec![axis]).collect();
        let to = axes.into_iter().map(|axis| vec![axis]).collect();
        apply(Rearrange { name, factors: self.shape().to_vec(), from, to }, &[self])
    }
}

/// Which part of the channels of [`depth_to_space`] is the place in a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum DepthOrder {
    /// Row, column, then channel: ONNX's DCR.
    BlockFirst,
    /// Channel, then row and column: ONNX's CRD, PyTorch's `pixel_shuffle`.
    ChannelFirst,
}

/// N x (C b b) x H x W to N x C x (H b) x (W b), with `block` b: the channels of a pixel become a block of pixels.
///
/// # Errors
/// If x does not have four dimensions, or `block` is 0 or its square does not divide the channels.
pub fn depth_to_space(x: &Tensor, block: usize, order: DepthOrder) -> Result<Tensor> {
    let name = "depth_to_space";
    let [batch, channels, height, width] = four_dimensions(name, "input", x)?;
    let square = block.checked_mul(block).filter(|&square| square > 0 && channels.is_multiple_of(square));
    let Some(square) = square else {
        let reason = format!("blocks of {block} x {block} do not divide the channels of {:?}", x.shape());
        return Err(invalid(name, reason));
    };
    let factors = vec![batch, block, block, channels / square, height, width];
    let [deep, wide] = blocks(order);
    apply(Rearrange { name, factors, from: deep, to: wide }, &[x])
}

/// N x C x (H b) x (W b) to N x (C b b) x H x W: the inverse of [`depth_to_space`]. PyTorch's `pixel_unshuffle` is
/// [`DepthOrder::ChannelFirst`], ONNX's SpaceToDepth [`DepthOrder::BlockFirst`].
///
/// # Errors
/// If x does not have four dimensions, or `block` does not divide height and width.
pub fn space_to_depth(x: &Tensor, block: usize, order: DepthOrder) -> Result<Tensor> {
    let name = "space_to_depth";
    let [batch, channels, height, width] = four_dimensions(name, "input", x)?;
    if block == 0 || !height.is_multiple_of(block) || !width.is_multiple_of(block) {
        let reason = format!("blocks of {block} x {block} do not divide height and width of {:?}", x.shape());
        return Err(invalid(name, reason));
    }
    if block.checked_mul(block).and_then(|square| square.checked_mul(channels)).is_none() {
        let reason = format!("blocks of {block} x {block} and the channels of {:?} are too large", x.shape());
        return Err(invalid(name, reason));
    }
    let factors = vec![batch, block, block, channels, height / block, width / block];
    let [deep, wide] = blocks(order);
    apply(Rearrange { name, factors, from: wide, to: deep }, &[x])
}

/// The axes of the tensor with deep pixels, and of that with blocks, as parts: batch, row and column in a block, channel, and
/// row and column of the block.
fn blocks(order: DepthOrder) -> [Vec<Vec<usize>>; 2] {
    let channels = match order {
        DepthOrder::BlockFirst => vec![1, 2, 3],
        DepthOrder::ChannelFirst => vec![3, 1, 2],
    };
    [vec![vec![0], channels, vec![4], vec![5]], vec![vec![0], vec![3], vec![4, 1], vec![5, 2]]]
}

/// The channels of N x (G K) x ... in the order N x (K G) x ...: the first channel of each of the `groups`, then the second of
/// each, and so on. PyTorch's `channel_shuffle`.
///
/// # Errors
/// If there are fewer than two dimensions, or the groups do not divide the channels.
pub fn channel_shuffle(x: &Tensor, groups: usize) -> Result<Tensor> {
    let name = "channel_shuffle";
    let &[batch, channels, ref spatial @ ..] = x.shape() else {
        return Err(invalid(name, format!("expected at least 2 dimensions, got {:?}", x.shape())));
    };
    if groups == 0 || !channels.is_multiple_of(groups) {
        return Err(invalid(name, format!("{groups} groups do not divide the channels of {:?}", x.shape())));
    }
    let factors = [&[batch, groups, channels / groups], spatial].concat();
    let axes = |channels: [usize; 2]| {
        let rest = (3..factors.len()).map(|factor| vec![factor]);
        [vec![0], channels.to_vec()].into_iter().chain(rest).collect()
    };
    let (from, to) = (axes([1, 2]), axes([2, 1]));
    apply(Rearrange { name, factors, from, to }, &[x])
}

/// Puts the elements in another order: each axis is a product of factors, which come in another order or on another axis.
struct Rearrange {
    name: &'static str,
    /// The sizes of the factors.
    factors: Vec<usize>,
    /// The factors of each axis of the input, from the outermost.
    from: Vec<Vec<usize>>,
    /// The factors of each axis of the output.
    to: Vec<Vec<usize>>,
}

impl Rearrange {
    fn shape(&self, axes: &[Vec<usize>]) -> Vec<usize> {
        axes.iter().map(|factors| factors.iter().map(|&factor| self.factors[factor]).product()).collect()
    }

    /// The stride of each factor in a tensor with these axes.
    fn strides(&self, axes: &[Vec<usize>], format: MemoryFormat) -> Vec<usize> {
        let mut strides = vec![0; self.factors.len()];
        for (factors, mut stride) in axes.iter().zip(format.strides(&self.shape(axes))) {
            for &factor in factors.iter().rev() {
                strides[factor] = stride;
                stride *= self.factors[factor].max(1);
            }
        }
        strides
    }

    /// The factors of these axes in their order in memory, from the outermost.
    fn order(axes: &[Vec<usize>], format: MemoryFormat) -> Vec<usize> {
        format.axes(axes.len()).into_iter().flat_map(|axis| axes[axis].iter().copied()).collect()
    }

    /// x, which has the axes `from`, with the axes `to`, in one of the formats. It shares the elements if one of these has them
    /// in the same order; else it has the first of the formats.
    fn run(&self, x: &Tensor, [from, to]: [&[Vec<usize>]; 2], formats: &[MemoryFormat]) -> Result<Tensor> {
        let shape = self.shape(to);
        let strides = self.strides(from, x.format());
        let same = |format: &&MemoryFormat| {
            let others = self.strides(to, **format);
            (0..strides.len()).all(|factor| self.factors[factor] <= 1 || strides[factor] == others[factor])
        };
        if let Some(&format) = formats.iter().find(same) {
            return Ok(x.relabeled(&shape, format));
        }
        let format = formats[0];
        let axis = |factor: usize| TakeAxis {
            size: self.factors[factor],
            places: Places::Stride(strides[factor] as isize),
        };
        let axes: Vec<TakeAxis<'_>> = Rearrange::order(to, format).into_iter().map(axis).collect();
        let take = Take { operation: self.name, axes, start: 0, fill: 0.0 };
        Tensor::build_elements((x.device(), x.dtype()), &shape, format, |y| {
            Ok(take.run(x.device().compute(), x.elements()?, y)?)
        })
    }
}

impl Function for Rearrange {
    type Saved = MemoryFormat;

    fn name(&self) -> &'static str {
        self.name
    }

    fn describe(&self) -> Option<Operation> {
        Some(Operation::Rearrange {
            factors: self.factors.clone(),
            from: self.from.clone(),
            to: self.to.clone(),
        })
    }

    fn takes(&self, _: usize, _: DType) -> bool {
        true
    }

    fn forward(&self, inputs: &[&Tensor], _: &Needs) -> Result<(Tensor, MemoryFormat)> {
        let x = inputs[0];
        let all = match (self.to.len() > 2, x.format()) {
            (false, _) => &[MemoryFormat::Contiguous][..],
            (true, MemoryFormat::Contiguous) => &[MemoryFormat::Contiguous, MemoryFormat::ChannelsLast],
            (true, MemoryFormat::ChannelsLast) => &[MemoryFormat::ChannelsLast, MemoryFormat::Contiguous],
        };
        Ok((self.run(x, [&self.from, &self.to], all)?, x.format()))
    }

    fn backward(&self, format: MemoryFormat, upstream: Tensor, _: &Needs) -> Result<Vec<Option<Tensor>>> {
        Ok(vec![Some(self.run(&upstream, [&self.to, &self.from], &[format])?)])
    }
}
