//! Copies between tensors whose axes lie in any order in memory.

use crate::{Cpu, Element, MemoryFormat};

/// Four axes of a tensor: sizes, and distances between neighbours.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Axes {
    pub(super) sizes: [usize; 4],
    pub(super) strides: [usize; 4],
}

impl Axes {
    /// A dense tensor of N x C x H x W in this format.
    pub(super) fn dense(format: MemoryFormat, sizes: [usize; 4]) -> Axes {
        let [_, c, h, w] = sizes;
        let strides = match format {
            MemoryFormat::Contiguous => [c * h * w, h * w, w, 1],
            MemoryFormat::ChannelsLast => [h * w * c, 1, w * c, c],
        };
        Axes { sizes, strides }
    }

    /// The same elements with the first two axes exchanged.
    pub(super) fn exchanged(self) -> Axes {
        let swap = |[a, b, c, d]: [usize; 4]| [b, a, c, d];
        Axes { sizes: swap(self.sizes), strides: swap(self.strides) }
    }

    /// The first `[h, w]` of the last two axes.
    pub(super) fn cropped(self, [h, w]: [usize; 2]) -> Axes {
        let [a, b, ..] = self.sizes;
        Axes { sizes: [a, b, h, w], ..self }
    }

    /// Every `[h, w]`-th element of the last two axes, with the sizes unchanged.
    pub(super) fn spread(self, [h, w]: [usize; 2]) -> Axes {
        let [a, b, c, d] = self.strides;
        Axes { strides: [a, b, c * h, d * w], ..self }
    }
}

#[derive(Clone, Copy)]
struct Axis {
    size: usize,
    from: usize,
    to: usize,
}

/// Edge of the square tiles in which two axes are transposed, so that the cache lines of both sides stay in L1.
const TILE: usize = 16;

/// Copies the elements that `source` locates in `from` to where `target`, of the same sizes, locates them in `to`.
///
/// The elements of `to` in between keep their content. Threads take ranges of the target's slowest axis.
pub(super) fn copy<T: Element>(cpu: &Cpu, source: Axes, from: &[T], target: Axes, to: &mut [T]) {
    assert_eq!(source.sizes, target.sizes, "a copy between tensors of different shapes");
    let mut axes: Vec<Axis> = (0..4)
        .map(|i| Axis { size: source.sizes[i], from: source.strides[i], to: target.strides[i] })
        .filter(|axis| axis.size != 1)
        .collect();
    axes.sort_by_key(|axis| std::cmp::Reverse(axis.to));
    let Some((&outer, _)) = axes.split_first() else {
        to[0] = from[0];
        return;
    };
    let rows = TILE.min(outer.size.div_ceil(cpu.threads()));
    let work = source.sizes.iter().product();
    let blocks = to.chunks_mut(rows * outer.to).take(outer.size.div_ceil(rows));
    cpu.for_each(work, blocks.enumerate(), |(block, to)| {
        let first = block * rows;
        let mut axes = axes.clone();
        axes[0].size = rows.min(outer.size - first);
        copy_block(axes, &from[first * outer.from..], to);
    });
}

fn copy_block<T: Element>(mut axes: Vec<Axis>, from: &[T], to: &mut [T]) {
    let Some(inner) = axes.pop() else { return };
    // The axis with the smallest step in the source, unless the innermost axis has a smaller or equal one.
    let fastest = axes.iter().enumerate().min_by_key(|(_, axis)| axis.from);
    let across = match fastest {
        Some((index, axis)) if axis.from < inner.from => Some(axes.remove(index)),
        _ => None,
    };
    let mut position = [0usize; 3];
    let steps: usize = axes.iter().map(|axis| axis.size).product();
    for _ in 0..steps {
        let offset = |stride: fn(&Axis) -> usize| -> usize {
            axes.iter().zip(position).map(|(axis, at)| at * stride(axis)).sum()
        };
        let (from, to) = (&from[offset(|axis| axis.from)..], &mut to[offset(|axis| axis.to)..]);
        match across {
            Some(across) => copy_plane(across, inner, from, to),
            None => copy_run(inner, from, to),
        }
        for (axis, at) in axes.iter().zip(&mut position).rev() {
            *at += 1;
            if *at < axis.size {
                break;
            }
            *at = 0;
        }
    }
}

#[inline(always)]
fn copy_run<T: Element>(axis: Axis, from: &[T], to: &mut [T]) {
    if axis.from == 1 && axis.to == 1 {
        return to[..axis.size].copy_from_slice(&from[..axis.size]);
    }
    let values = from.iter().step_by(axis.from).take(axis.size);
    for (to, &value) in to.iter_mut().step_by(axis.to).zip(values) {
        *to = value;
    }
}

fn copy_plane<T: Element>(across: Axis, inner: Axis, from: &[T], to: &mut [T]) {
    for first in (0..across.size).step_by(TILE) {
        for start in (0..inner.size).step_by(TILE) {
            let run = Axis { size: TILE.min(inner.size - start), ..inner };
            for row in first..(first + TILE).min(across.size) {
                let from = &from[row * across.from + start * inner.from..];
                copy_run(run, from, &mut to[row * across.to + start * inner.to..]);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_order_of_axes_on_several_threads() {
        let sizes = [3, 17, 5, 19];
        let count: usize = sizes.iter().product();
        let from: Vec<f64> = (0..count).map(|i| i as f64).collect();
        let formats = [MemoryFormat::Contiguous, MemoryFormat::ChannelsLast];
        for (source, target) in formats.iter().flat_map(|&a| formats.map(|b| (a, b))) {
            for (threads, exchange) in [(1, false), (3, true), (2, false), (4, true)] {
                let source = Axes::dense(source, sizes);
                let target = match exchange {
                    true => Axes::dense(target, [17, 3, 5, 19]).exchanged(),
                    false => Axes::dense(target, sizes),
                };
                let mut to = vec![f64::NAN; count];
                copy(&Cpu::new(threads).unwrap(), source, &from, target, &mut to);
                for index in 0..count {
                    let [_, c, h, w] = sizes;
                    let position = [index / (c * h * w), index / (h * w) % c, index / w % h, index % w];
                    let at = |axes: &Axes| -> usize {
                        axes.strides.iter().zip(position).map(|(stride, at)| stride * at).sum()
                    };
                    assert_eq!(
                        to[at(&target)],
                        from[at(&source)],
                        "{source:?} to {target:?} at {position:?}"
                    );
                }
            }
        }
    }

    #[test]
    fn a_single_element_and_places_apart() {
        let one = Axes::dense(MemoryFormat::Contiguous, [1, 1, 1, 1]);
        let mut to = [0.0f32];
        copy(&Cpu::single(), one, &[7.0], one, &mut to);
        assert_eq!(to, [7.0]);
        let source = Axes::dense(MemoryFormat::Contiguous, [1, 1, 2, 2]);
        let target = Axes::dense(MemoryFormat::Contiguous, [1, 1, 3, 3]).cropped([2, 2]).spread([2, 2]);
        let mut to = [0.0f32; 9];
        copy(&Cpu::single(), source, &[1., 2., 3., 4.], target, &mut to);
        assert_eq!(to, [1., 0., 2., 0., 0., 0., 3., 0., 4.]);
    }
}
