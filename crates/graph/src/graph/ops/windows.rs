//! Windows over images: signals of one dimension run as images of height 1.

use convoke_autograd::ops::{PadMode, Padding};

use super::*;

/// More spatial axes are refused.
pub(super) const MOST_AXES: usize = 8;

/// The padding of a window's axes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Pads {
    /// Before each axis, then after each axis.
    Explicit(Vec<usize>),
    /// Padding for ceil(input / stride) outputs; an odd pixel is after the input.
    SameUpper,
    /// Padding for ceil(input / stride) outputs; an odd pixel is before the input.
    SameLower,
    /// No padding.
    Valid,
}

/// One number for each axis; all have the same without the attribute.
pub(super) fn read_per_axis(
    node: &mut NodeReader<'_>,
    name: &str,
    (axes, default): (usize, usize),
) -> Answer<Vec<usize>> {
    match node.attributes.sizes(name)? {
        None => Ok(vec![default; axes]),
        Some(sizes) if sizes.len() == axes => Ok(sizes),
        Some(sizes) => Err(format!("its attribute {name} has {} numbers instead of {axes}", sizes.len())),
    }
}

pub(super) fn read_pads(node: &mut NodeReader<'_>, axes: usize) -> Answer<Pads> {
    let explicit = read_per_axis(node, "pads", (2 * axes, 0))?;
    match node.attributes.text_or("auto_pad", "NOTSET")?.as_str() {
        "NOTSET" | "" => Ok(Pads::Explicit(explicit)),
        "SAME_UPPER" => Ok(Pads::SameUpper),
        "SAME_LOWER" => Ok(Pads::SameLower),
        "VALID" => Ok(Pads::Valid),
        other => Err(format!("its padding {other} is not known")),
    }
}

pub(super) fn write_pads<'a>(node: OnnxNode<'a>, pads: &Pads) -> OnnxNode<'a> {
    match pads {
        Pads::Explicit(pads) => node.sizes("pads", pads),
        Pads::SameUpper => node.text("auto_pad", "SAME_UPPER"),
        Pads::SameLower => node.text("auto_pad", "SAME_LOWER"),
        Pads::Valid => node.text("auto_pad", "VALID"),
    }
}

/// A tensor of images; signals N x C x L become N x C x 1 x L.
pub(super) struct Images {
    pub(super) tensor: Tensor,
    pub(super) signals: bool,
}

impl Images {
    pub(super) fn new(x: Tensor) -> Result<Images> {
        match *x.shape() {
            [_, _, _, _] => Ok(Images { tensor: x, signals: false }),
            [batch, channels, len] => {
                Ok(Images { tensor: x.reshape(&[batch, channels, 1, len])?, signals: true })
            }
            _ => refuse(format!("its input {:?} has neither one nor two spatial dimensions", x.shape())),
        }
    }

    pub(super) fn spatial(&self) -> &[usize] {
        &self.tensor.shape()[if self.signals { 3 } else { 2 }..]
    }

    /// The output in the dimensions of the input.
    pub(super) fn back(&self, y: Tensor) -> Result<Tensor> {
        match *y.shape() {
            [batch, channels, 1, len] if self.signals => Ok(y.reshape(&[batch, channels, len])?),
            _ => Ok(y),
        }
    }

    pub(super) fn axes(&self, numbers: &[usize], first: usize) -> Result<[usize; 2]> {
        axes(self.spatial().len(), numbers, first)
    }
}

/// One number for each of `rank` spatial axes, height before width; signals have one axis, and `first` for the height.
pub(super) fn axes(rank: usize, numbers: &[usize], first: usize) -> Result<[usize; 2]> {
    match (rank, numbers) {
        (_, []) => Ok([1, 1]),
        (1, &[own]) => Ok([first, own]),
        (2, &[height, width]) => Ok([height, width]),
        _ => refuse(format!("{numbers:?} are not one number for each spatial axis of its input")),
    }
}

impl Pads {
    /// The pixels before and after each spatial axis.
    pub(super) fn resolve(
        &self,
        input: &[usize],
        [kernel, strides, dilations]: [&[usize]; 3],
    ) -> Result<Vec<[usize; 2]>> {
        let rank = input.len();
        match self {
            Pads::Valid => Ok(vec![[0, 0]; rank]),
            Pads::Explicit(pads) if pads.is_empty() => Ok(vec![[0, 0]; rank]),
            Pads::Explicit(pads) if pads.len() == 2 * rank => {
                Ok((0..rank).map(|axis| [pads[axis], pads[axis + rank]]).collect())
            }
            Pads::Explicit(pads) => {
                refuse(format!("{pads:?} are not two numbers for each of {rank} spatial axes"))
            }
            Pads::SameUpper | Pads::SameLower => {
                let ends = self.same(input, [kernel, strides, dilations], 0);
                let size = |end: isize| usize::try_from(end).ok();
                let sizes = ends.iter().map(|&[before, after]| Some([size(before)?, size(after)?])).collect();
                match sizes {
                    Some(sizes) => Ok(sizes),
                    None => refuse("its windows leave out pixels at the borders"),
                }
            }
        }
    }

    /// What makes outputs of input / stride pixels, rounded up: pixels at the borders are left out (less than 0) where steps are longer
    /// than windows, `spared` fewer than that.
    fn same(
        &self,
        input: &[usize],
        [kernel, strides, dilations]: [&[usize]; 3],
        spared: isize,
    ) -> Vec<[isize; 2]> {
        let of = |numbers: &[usize], axis: usize| numbers.get(axis).copied().unwrap_or(1).max(1);
        let signed = |size: usize| isize::try_from(size).unwrap_or(isize::MAX);
        let ends = |axis: usize| {
            let (stride, size) = (of(strides, axis), input[axis]);
            let last = (size.div_ceil(stride).max(1) - 1).saturating_mul(stride);
            let span = (of(kernel, axis) - 1).saturating_mul(of(dilations, axis)).saturating_add(1);
            let total = signed(last.saturating_add(span)).saturating_sub(signed(size));
            let total = if total < 0 { total + spared } else { total };
            let before = if *self == Pads::SameUpper { total / 2 } else { total.saturating_add(1) / 2 };
            [before, total - before]
        };
        (0..input.len()).map(ends).collect()
    }

    /// The input without the pixels that no window reads at its borders, and the padding of what is left, where this is to be computed.
    pub(super) fn crop(&self, x: Tensor, windows: [&[usize]; 3], spared: isize) -> Result<(Tensor, Pads)> {
        let rank = windows[0].len();
        let dimensions = x.shape().len();
        if !matches!(self, Pads::SameUpper | Pads::SameLower) || dimensions < rank {
            return Ok((x, self.clone()));
        }
        let ends = self.same(&x.shape()[dimensions - rank..], windows, spared);
        let pads: Vec<_> = ends.iter().map(|ends| ends.map(|end| end.max(0).unsigned_abs())).collect();
        if ends.iter().flatten().all(|&end| end >= 0) {
            return Ok((x, explicit(&pads)));
        }
        let mut crops = vec![[0, 0]; dimensions - rank];
        crops.extend(ends.iter().map(|ends| ends.map(|end| end.min(0))));
        Ok((x.pad(&crops, PadMode::Constant(0.0))?, explicit(&pads)))
    }
}

/// Padding of height and width.
pub(super) fn padding(pads: &[[usize; 2]]) -> Padding {
    match *pads {
        [[top, bottom], [left, right]] => Padding { top, bottom, left, right },
        [[left, right]] => Padding { left, right, ..Padding::default() },
        _ => Padding::default(),
    }
}

pub(super) fn explicit(pads: &[[usize; 2]]) -> Pads {
    Pads::Explicit([0, 1].iter().flat_map(|&end| pads.iter().map(move |pad| pad[end])).collect())
}
