//! Walks over operands with strides, for tensors of any shape: functions of elements, sums over axes, and copies.
//!
//! A [`Walk`] goes through the elements of a shape in a given order of its axes. Each operand says how far apart neighbours
//! along each axis lie, 0 where it is broadcast. Axes that lie together in all operands and in the output are merged first,
//! and axes of size 1 dropped. So an addition to a whole tensor is one run, and N x C x H x W times N x C is N C runs of H W.
//!
//! * [`Walk::map`] writes a function of up to three operands ([`Map`]).
//! * [`Walk::fold`] sums it (or multiplies it, or takes the largest) over some of the axes, without storing it in between.
//! * [`Take`] copies: slices, transpositions, padding, gathering by indices. [`add_taken`] is the gradient of the last two.
//!
//! All places are checked once, when the walk is made.

mod fold;
mod map;
mod scatter;
mod take;

pub use fold::{Fold, Reduction};
pub use map::Map;
pub use scatter::{Scatter, add_taken};
pub use take::{Places, Take, TakeAxis};

use crate::error::{check_len, invalid};
use crate::profile::InMemory;
use crate::{Result, Slice, SliceMut, Stored};

/// The approximate number of elements in a task.
const TASK: usize = 1 << 14;

/// Elements that are computed at a time: what must be gathered for them fits the first-level cache.
const BLOCK: usize = 1 << 10;

/// The most operands of a function.
const OPERANDS: usize = 3;

/// An axis of a walk over `N` operands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Axis<const N: usize> {
    /// Indices along the axis.
    pub size: usize,
    /// How far apart neighbours along the axis lie in each operand; 0 where the operand is broadcast.
    pub strides: [usize; N],
    /// Whether the output has the axis. The others are summed over.
    pub kept: bool,
}

/// A merged axis.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Level {
    size: usize,
    strides: [usize; OPERANDS],
    /// The stride of the output, 0 if it does not have the axis.
    out: usize,
}

/// A walk over operands, from the first axis (outermost) to the last. The output's elements lie in the order of the kept axes.
#[derive(Debug, Clone)]
pub struct Walk<'a> {
    operation: &'static str,
    levels: Vec<Level>,
    /// The operands; the last one also stands for those that are not there.
    operands: [Slice<'a>; OPERANDS],
    count: usize,
    /// Elements of the whole walk.
    len: usize,
    /// Elements of the output.
    outputs: usize,
}

impl<'a> Walk<'a> {
    /// A walk over one to three operands.
    ///
    /// # Errors
    /// If an axis leads out of an operand, or the number of elements overflows.
    pub fn new<const N: usize>(
        operation: &'static str,
        axes: &[Axis<N>],
        operands: [Slice<'a>; N],
    ) -> Result<Walk<'a>> {
        const { assert!(N > 0 && N <= OPERANDS) };
        let of_all = |axis: &Axis<N>| Axis {
            size: axis.size,
            strides: std::array::from_fn(|index| axis.strides[index.min(N - 1)]),
            kept: axis.kept,
        };
        let operands = std::array::from_fn(|index| operands[index.min(N - 1)]);
        Walk::of_all(operation, &axes.iter().map(of_all).collect::<Vec<_>>(), operands, N)
    }

    /// A walk over `count` operands, the last of which stands for those that are not there. Compiled once, here.
    fn of_all(
        operation: &'static str,
        axes: &[Axis<OPERANDS>],
        operands: [Slice<'a>; OPERANDS],
        count: usize,
    ) -> Result<Walk<'a>> {
        let too_large = || invalid(operation, format!("a walk over {axes:?} overflows"));
        let elements = |kept_only: bool| {
            let counted = axes.iter().filter(|axis| axis.kept || !kept_only);
            counted.map(|axis| axis.size).try_fold(1usize, usize::checked_mul)
        };
        // Sizes of 0 count as 1, so that products of some of the sizes cannot overflow either.
        let bound = axes.iter().map(|axis| axis.size.max(1)).try_fold(1usize, usize::checked_mul);
        bound.ok_or_else(too_large)?;
        let (len, outputs) = (elements(false).ok_or_else(too_large)?, elements(true).ok_or_else(too_large)?);
        for (index, operand) in operands.iter().enumerate().filter(|_| len > 0) {
            let last = axes.iter().try_fold(0usize, |last, axis| {
                (axis.size - 1).checked_mul(axis.strides[index])?.checked_add(last)
            });
            if last.ok_or_else(too_large)? >= operand.len() {
                let reason = format!("{axes:?} lead out of operand {index} of {} elements", operand.len());
                return Err(invalid(operation, reason));
            }
        }
        let mut levels: Vec<Level> = Vec::with_capacity(axes.len());
        let mut out = 1;
        for axis in axes.iter().rev() {
            let own = if axis.kept { out } else { 0 };
            if axis.kept {
                out *= axis.size;
            }
            if axis.size == 1 {
                continue;
            }
            let level = Level { size: axis.size, strides: axis.strides, out: own };
            match levels.last_mut() {
                Some(inner) if level.continues(inner) => inner.size *= level.size,
                _ => levels.push(level),
            }
        }
        levels.reverse();
        Ok(Walk { operation, levels, operands, count, len, outputs })
    }

    /// Checks the output, and that there are the operands of the function.
    fn check(&self, function: Map, y: &SliceMut<'_>) -> Result<()> {
        let (needed, count) = (function.operands(), self.count);
        assert!(needed <= count, "{}: the walk has {count} operands, not {needed}", self.operation);
        check_len(self.operation, "the output", y.len(), self.outputs)
    }

    /// Whether all operands and the output lie together, in one order.
    fn is_one_run(&self) -> bool {
        match *self.levels {
            [] => self.len == 1,
            [level] => level.strides == [1; OPERANDS] && level.out == 1,
            _ => false,
        }
    }

    fn typed_operands<S: Stored>(&self) -> Result<[&'a [S]; OPERANDS]> {
        let [a, b, c] = self.operands;
        Ok([a.of()?, b.of()?, c.of()?])
    }
}

impl InMemory for Walk<'_> {
    fn bytes_in_memory(&self) -> usize {
        self.operands[..self.count].iter().map(InMemory::bytes_in_memory).sum()
    }
}

impl Level {
    /// Whether this axis goes on where `inner`, the next one, ends, in all operands and the output.
    fn continues(&self, inner: &Level) -> bool {
        let goes_on = |own: usize, inner_stride: usize| inner_stride.checked_mul(inner.size) == Some(own);
        self.strides.iter().zip(inner.strides).all(|(&own, inner)| goes_on(own, inner))
            && goes_on(self.out, inner.out)
            // Else a summed axis of stride 0 would be merged with a kept one.
            && (self.out == 0) == (inner.out == 0)
    }
}

/// A part of a walk: some levels at one index or a range of indices, the others whole.
#[derive(Debug, Clone)]
struct Part {
    levels: Vec<Level>,
    /// The first element of the part in each operand.
    starts: [usize; OPERANDS],
    /// The first element of the part in the output.
    out: usize,
}

/// How the levels at the positions `cut` of a walk are cut into parts: all but the last of these are taken at one index at a
/// time, the last in pieces. It depends only on the levels.
#[derive(Debug)]
struct Cut<'a> {
    levels: &'a [Level],
    cut: &'a [usize],
    piece: usize,
}

impl<'a> Cut<'a> {
    /// Cuts as few of the levels at the positions `cuttable`, from the first on, as it takes to get parts of about `target`
    /// elements. A piece of the last level has at least `least` indices.
    fn new(levels: &'a [Level], cuttable: &'a [usize], target: usize, least: usize) -> Cut<'a> {
        let mut unit: usize = levels.iter().map(|level| level.size).product();
        for (index, &level) in cuttable.iter().enumerate() {
            unit /= levels[level].size.max(1);
            if unit <= target || index + 1 == cuttable.len() {
                let inner = level + 1 == levels.len();
                let piece = (target / unit.max(1)).max(if inner { least } else { 1 });
                return Cut { levels, cut: &cuttable[..=index], piece };
            }
        }
        Cut { levels, cut: &[], piece: 1 }
    }

    /// The number of pieces of the last level that is cut.
    fn pieces(&self) -> usize {
        self.cut.last().map_or(1, |&last| self.levels[last].size.div_ceil(self.piece))
    }

    /// The number of parts.
    fn parts(&self) -> usize {
        let leading = self.cut.split_last().map_or(&[][..], |(_, leading)| leading);
        leading.iter().map(|&level| self.levels[level].size).product::<usize>() * self.pieces()
    }

    fn part(&self, mut index: usize) -> Part {
        let mut part = Part { levels: self.levels.to_vec(), starts: [0; OPERANDS], out: 0 };
        let Some((&last, leading)) = self.cut.split_last() else { return part };
        let first = index % self.pieces() * self.piece;
        index /= self.pieces();
        part.narrow(last, first, self.piece.min(self.levels[last].size - first));
        for &level in leading.iter().rev() {
            let size = self.levels[level].size;
            part.narrow(level, index % size, 1);
            index /= size;
        }
        part.levels.retain(|level| level.size != 1);
        part
    }

    /// Cuts the output into those of the parts, which lie one after the other.
    fn outputs<'y, T>(&self, y: &'y mut [T]) -> impl Iterator<Item = &'y mut [T]> + use<'y, T> {
        let (row, piece) = match self.cut.last() {
            Some(&last) => {
                (self.levels[last].size * self.levels[last].out, self.piece * self.levels[last].out)
            }
            None => (y.len(), y.len()),
        };
        y.chunks_mut(row.max(1)).flat_map(move |row| row.chunks_mut(piece.max(1)))
    }
}

impl Part {
    /// Restricts a level to `count` indices from `first` on.
    fn narrow(&mut self, level: usize, first: usize, count: usize) {
        let level = &mut self.levels[level];
        level.size = count;
        for (start, stride) in self.starts.iter_mut().zip(level.strides) {
            *start += first * stride;
        }
        self.out += first * level.out;
    }

    /// Calls `visit` on blocks of at most [`BLOCK`] elements, in order.
    fn blocks(&self, mut visit: impl FnMut(&WalkBlock)) {
        const ONE: Level = Level { size: 1, strides: [0; OPERANDS], out: 0 };
        let (outer, [row, column]) = match self.levels.as_slice() {
            [] => (&[][..], [ONE, ONE]),
            [column] => (&[][..], [ONE, *column]),
            [outer @ .., row, column] => (outer, [*row, *column]),
        };
        if self.levels.iter().any(|level| level.size == 0) {
            return;
        }
        let columns = column.size.min(BLOCK);
        let rows = (BLOCK / columns).min(row.size);
        let (mut indices, mut starts, mut out) = (vec![0; outer.len()], self.starts, self.out);
        loop {
            for first_row in (0..row.size).step_by(rows) {
                for first_column in (0..column.size).step_by(columns) {
                    visit(&WalkBlock {
                        rows: rows.min(row.size - first_row),
                        columns: columns.min(column.size - first_column),
                        starts: std::array::from_fn(|index| {
                            let start = starts[index] + first_row * row.strides[index];
                            start + first_column * column.strides[index]
                        }),
                        row_strides: row.strides,
                        column_strides: column.strides,
                        out: out + first_row * row.out + first_column * column.out,
                        out_strides: [row.out, column.out],
                    });
                }
            }
            // The next index of the outer levels, as an odometer counts.
            let mut level = outer.len();
            loop {
                if level == 0 {
                    return;
                }
                level -= 1;
                let Level { size, strides, out: step } = outer[level];
                if indices[level] + 1 < size {
                    indices[level] += 1;
                    starts.iter_mut().zip(strides).for_each(|(start, stride)| *start += stride);
                    out += step;
                    break;
                }
                starts.iter_mut().zip(strides).for_each(|(start, stride)| *start -= indices[level] * stride);
                out -= indices[level] * step;
                indices[level] = 0;
            }
        }
    }
}

/// Rows x columns elements of a walk.
#[derive(Debug)]
struct WalkBlock {
    rows: usize,
    columns: usize,
    starts: [usize; OPERANDS],
    row_strides: [usize; OPERANDS],
    column_strides: [usize; OPERANDS],
    /// The output of the first element.
    out: usize,
    /// The output's strides of rows and of columns.
    out_strides: [usize; 2],
}

/// The elements of an operand in blocks, gathered where they do not lie together.
struct Gathered<T> {
    elements: Vec<T>,
    /// Which elements these are: the first one's place, rows and columns. Equal blocks need not be gathered again, such as the
    /// biases of all channels for the next pixels.
    holds: Option<[usize; 3]>,
}

impl<T: Stored> Gathered<T> {
    const fn new() -> Gathered<T> {
        Gathered { elements: Vec::new(), holds: None }
    }

    /// The block of operand `index`. All blocks come from one part, so that strides are the same.
    fn of<'a>(&'a mut self, operand: &'a [T], index: usize, block: &WalkBlock) -> &'a [T] {
        let &WalkBlock { rows, columns, .. } = block;
        let (start, row_stride) = (block.starts[index], block.row_strides[index]);
        let column_stride = block.column_strides[index];
        let len = rows * columns;
        if (columns == 1 || column_stride == 1) && (rows == 1 || row_stride == columns) {
            return &operand[start..start + len];
        }
        if self.holds != Some([start, rows, columns]) {
            self.holds = Some([start, rows, columns]);
            self.elements.resize(BLOCK, T::default());
            for (row, to) in self.elements[..len].chunks_exact_mut(columns).enumerate() {
                let from = &operand[start + row * row_stride..];
                match column_stride {
                    0 => to.fill(from[0]),
                    1 => to.copy_from_slice(&from[..columns]),
                    _ => to.iter_mut().zip(from.iter().step_by(column_stride)).for_each(|(y, &x)| *y = x),
                }
            }
        }
        &self.elements[..len]
    }
}

/// The blocks of the first `count` operands; the others are the first one again.
fn gathered<'a, T: Stored>(
    count: usize,
    operands: &[&'a [T]; OPERANDS],
    buffers: &'a mut [Gathered<T>; OPERANDS],
    block: &WalkBlock,
) -> [&'a [T]; OPERANDS] {
    let [first, second, third] = buffers;
    let a = first.of(operands[0], 0, block);
    let b = if count > 1 { second.of(operands[1], 1, block) } else { a };
    let c = if count > 2 { third.of(operands[2], 2, block) } else { a };
    [a, b, c]
}
