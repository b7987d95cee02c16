//! What is known about values: kinds, numbers of dimensions, and lengths of lists, which are the numbers of dimensions of what is
//! reshaped to them.

use super::{Lowering, input};
use crate::graph::{Kind, Node, Op};

impl<'a> Lowering<'a> {
    /// The kind of a value, and its number of dimensions if it is known.
    pub(in crate::onnx) fn described(&self, name: &str) -> (Kind, Option<usize>) {
        (self.kind(name), self.ranks.get(name).copied())
    }

    /// Notes what a node gives.
    pub(super) fn describe(&mut self, node: &'a Node) {
        let kind_of = |place| self.kind(input(node, place));
        let kind = match &node.op {
            Op::Shape { .. } | Op::Size | Op::NonZero | Op::ArgMax(_) => Kind::I64,
            Op::Compare(_) | Op::Not => Kind::Bool,
            Op::Cast(kind) => *kind,
            Op::CastLike | Op::Where => kind_of(1),
            Op::OneHot { .. } => kind_of(2),
            Op::Constant(array) | Op::ConstantOfShape(array) => array.kind(),
            _ => kind_of(0),
        };
        let (rank, len) = (self.rank(node), self.list_len(node));
        for (place, name) in node.outputs.iter().enumerate().filter(|(_, name)| !name.is_empty()) {
            // The second output of a TopK has places.
            let is_place = place > 0 && matches!(node.op, Op::TopK { .. });
            self.kinds.insert(name, if is_place { Kind::I64 } else { kind });
            self.ranks.extend(rank.map(|rank| (name.as_str(), rank)));
            self.lens.extend(len.map(|len| (name.as_str(), len)));
        }
    }

    fn rank(&self, node: &Node) -> Option<usize> {
        let rank = |place| self.ranks.get(input(node, place)).copied();
        let len = |place| self.lens.get(input(node, place)).copied();
        match &node.op {
            Op::Conv(conv) if !conv.strides.is_empty() => Some(conv.strides.len() + 2),
            Op::ConvTranspose(transpose) if !transpose.conv.strides.is_empty() => {
                Some(transpose.conv.strides.len() + 2)
            }
            Op::MaxPool(pool) | Op::AveragePool(pool) => Some(pool.kernel.len() + 2),
            Op::AdaptiveAveragePool(_) | Op::DepthToSpace { .. } | Op::SpaceToDepth { .. } => Some(4),
            Op::Flatten { .. } | Op::Gemm(_) | Op::NonZero => Some(2),
            Op::Shape { .. } | Op::Range => Some(1),
            Op::Size => Some(0),
            Op::Constant(array) => Some(array.shape().len()),
            Op::ConstantOfShape(_) => len(0),
            Op::Reshape { .. } => len(1),
            Op::Resize(_) => rank(0).or_else(|| len(2)).or_else(|| len(3)),
            Op::Transpose { order } if !order.is_empty() => Some(order.len()),
            Op::Expand => Some(rank(0)?.max(len(1)?)),
            Op::Arithmetic(_) | Op::Mean | Op::Mod { .. } | Op::Compare(_) | Op::Where => {
                (0..node.inputs.len()).try_fold(0, |most, place| Some(most.max(rank(place)?)))
            }
            Op::MatMul => match (rank(0)?, rank(1)?) {
                (a, b) if a >= 2 && b >= 2 => Some(a.max(b)),
                // A vector's only axis goes.
                (a, b) => a.max(b).checked_sub(if a == 1 && b == 1 { 1 } else { usize::from(a.min(b) == 1) }),
            },
            Op::Concat { .. } => (0..node.inputs.len()).find_map(rank),
            Op::Reduce(reduce) if !reduce.keep_dims => {
                let all = if reduce.no_axes_is_identity { 0 } else { rank(0)? };
                let axes = if input(node, 1).is_empty() { all } else { len(1)? };
                rank(0)?.checked_sub(axes)
            }
            Op::ArgMax(extreme) if !extreme.keep_dims => rank(0)?.checked_sub(1),
            Op::Squeeze => rank(0)?.checked_sub(len(1)?),
            Op::Unsqueeze => rank(0)?.checked_add(len(1)?),
            Op::Gather { .. } => (rank(0)?.checked_add(rank(1)?)?).checked_sub(1),
            Op::OneHot { .. } => rank(0)?.checked_add(1),
            _ => rank(0),
        }
    }

    /// The number of elements of what a node gives, if that is at most a list.
    fn list_len(&self, node: &Node) -> Option<usize> {
        let len = |place| self.lens.get(input(node, place)).copied();
        match &node.op {
            Op::Constant(array) => Some(array.len()),
            Op::Size => Some(1),
            Op::Shape { start, end } => {
                let rank = *self.ranks.get(input(node, 0))?;
                let place = |axis: isize| {
                    let from_end = axis.checked_add_unsigned(rank).unwrap_or(0);
                    if axis < 0 { from_end } else { axis }.clamp(0, rank as isize).unsigned_abs()
                };
                Some(end.map_or(rank, place).saturating_sub(place(*start)))
            }
            Op::Concat { .. } => {
                (0..node.inputs.len()).try_fold(0usize, |sum, place| sum.checked_add(len(place)?))
            }
            Op::Slice => {
                let (starts, ends) = (self.arrays.get(input(node, 1))?, self.arrays.get(input(node, 2))?);
                let ([start], [end]) = (&starts.to_i64()[..], &ends.to_i64()[..]) else { return None };
                if !input(node, 4).is_empty() || self.ranks.get(input(node, 0)) != Some(&1) {
                    return None;
                }
                let all = i64::try_from(len(0)?).ok()?;
                let place = |axis: i64| if axis < 0 { axis.saturating_add(all) } else { axis }.clamp(0, all);
                usize::try_from((place(*end) - place(*start)).max(0)).ok()
            }
            Op::Gather { .. } if self.ranks.get(input(node, 0)) == Some(&1) => len(1),
            Op::Unsqueeze | Op::Squeeze | Op::Cast(_) | Op::CastLike | Op::Identity => len(0),
            Op::Reshape { .. } | Op::Elementwise(_) | Op::Pointwise(_) => len(0),
            Op::Arithmetic(_) | Op::Mean | Op::Mod { .. } => {
                (0..node.inputs.len()).try_fold(0, |most: usize, place| Some(most.max(len(place)?)))
            }
            _ => None,
        }
    }
}
