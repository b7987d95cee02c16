//! Padding, and cropping by negative padding.

use super::index::pick;
use crate::error::invalid;
use crate::{Result, Tensor};

/// What stands beyond the borders.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum PadMode {
    /// A number.
    Constant(f64),
    /// The elements mirrored at the border, which is not repeated.
    Reflect,
    /// The element at the border. PyTorch's "replicate".
    Edge,
    /// The elements of the other side. PyTorch's "circular".
    Wrap,
}

impl Tensor {
    /// More elements, or fewer where a number is negative, before and after those of each axis, from the first axis on. As ONNX's
    /// Pad; PyTorch's `pad` counts axes from the last. Keeps the memory format.
    ///
    /// # Errors
    /// If there are not as many pairs as axes, more is cropped than there is, or a side is padded by more elements than its axis
    /// can be mirrored or repeated to.
    pub fn pad(&self, pads: &[[isize; 2]], mode: PadMode) -> Result<Tensor> {
        let refused = |what: &str| invalid("pad", format!("{what}: {pads:?} of {:?}", self.shape()));
        if pads.len() != self.shape().len() {
            return Err(refused("there must be a pair for each axis"));
        }
        let mut axes = Vec::with_capacity(pads.len());
        for (&size, &[before, after]) in self.shape().iter().zip(pads) {
            if [before, after] == [0, 0] {
                axes.push(None);
                continue;
            }
            let size = size as isize;
            let padded = size.checked_add(before).and_then(|sum| sum.checked_add(after));
            let padded = padded
                .filter(|&padded| padded < 1 << 48)
                .ok_or_else(|| refused("the result is too large"))?;
            if padded < 0 {
                return Err(refused("more is cropped than there is"));
            }
            let most = match mode {
                PadMode::Constant(_) => isize::MAX,
                PadMode::Reflect => size - 1,
                PadMode::Edge if size > 0 => isize::MAX,
                PadMode::Edge => 0,
                PadMode::Wrap => size,
            };
            if before.max(after) > most.max(0) {
                return Err(refused("there are too few elements to mirror or repeat"));
            }
            let index = |at: isize| match mode {
                _ if (0..size).contains(&at) => Some(at as usize),
                PadMode::Constant(_) => None,
                PadMode::Reflect if at < 0 => Some(-at as usize),
                PadMode::Reflect => Some((2 * (size - 1) - at) as usize),
                PadMode::Edge => Some(at.clamp(0, size - 1) as usize),
                PadMode::Wrap => Some(at.rem_euclid(size) as usize),
            };
            // What no memory holds must not be listed either.
            let mut indices = Vec::new();
            indices
                .try_reserve_exact(padded as usize)
                .map_err(|_| refused("there is no memory for the result"))?;
            let first = before.checked_neg().ok_or_else(|| refused("more is cropped than there is"))?;
            indices.extend((first..first + padded).map(index));
            axes.push(Some(indices));
        }
        let fill = if let PadMode::Constant(value) = mode { value } else { 0.0 };
        pick("pad", self, axes, fill)
    }
}
