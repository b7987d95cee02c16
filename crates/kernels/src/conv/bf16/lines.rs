//! Lines of the source, copied with zeros around them, so that what target pixels read lies in them as the products take it.
//!
//! A row of a product's first factor is a target pixel's, and its terms are those of a row of taps: neighbouring pixels of a line of the
//! source. The next target pixel's begin a step further on. At the end of a line follow some pixels that are no target's; their sums are
//! dropped. Then comes the next line, so that a product has rows of several.

use std::ops::Range;

use half::bf16;

use super::correlate::{Lattice, Tensor};
use super::taps::TapPlaces;
use super::unit::{NOWHERE, ROWS, SIDE};
use crate::conv::workspace::LINE;
use crate::isa::multiversion;

/// How a lattice's tasks copy lines.
pub(super) struct Lines {
    /// Target pixels of a line, with those that are dropped.
    positions: usize,
    /// Elements from a target pixel to the next, and from a line to the next.
    step: usize,
    line: usize,
    /// Elements of zeros before the first line.
    before: usize,
    /// The lines that rows of taps read for the first row of targets. Lines of a residue follow one another.
    rows_of_taps: TapPlaces,
    /// The images of a task, and the rows of targets of each; more than one image only with all rows.
    images: usize,
    rows: usize,
}

/// The most elements that a task copies: they stay in the L2 cache with a panel of weights. With few weights, to which products return
/// soon, fewer are better.
const MOST_ELEMENTS: usize = 256 * 1024;
const LEAST_ELEMENTS: usize = 32 * 1024;
/// The most elements of a task's lines if its targets are only one row.
const LIMIT: usize = 8 * 1024 * 1024;

impl Lines {
    /// The lines of a lattice, in tasks for `threads` threads. `weights` is the number of its weights.
    pub(super) fn new(
        lattice: &Lattice,
        source: &Tensor,
        batch: usize,
        (weights, threads): (usize, usize),
    ) -> Option<Lines> {
        let (rows, columns) = (&lattice.rows, &lattice.columns);
        let [target_rows, target_columns] = lattice.targets;
        let offsets = || columns.taps.iter().map(|tap| tap.offset);
        let (least, most) = (offsets().min()?, offsets().max()?);
        let width = source.size[1];
        let left = usize::try_from(-least).unwrap_or(0);
        let reach = (target_columns.checked_sub(1)? * columns.source_step).checked_add_signed(most)?;
        let right = (reach + 1).saturating_sub(width);
        // Zeros between two lines are right of the one and left of the other.
        let positions = width.checked_add(left.max(right))?.div_ceil(columns.source_step).max(target_columns);
        let step = columns.source_step.checked_mul(source.channels)?;
        let line = positions.checked_mul(step)?;
        let row_offsets: Vec<isize> = rows.taps.iter().map(|tap| tap.offset).collect();
        let rows_of_taps = TapPlaces::new(&row_offsets, rows.source_step);
        let lines = Lines {
            positions,
            step,
            line,
            before: left.checked_mul(source.channels)?,
            rows_of_taps,
            images: 1,
            rows: target_rows,
        };
        lines.len(lattice, 1).filter(|&len| len <= LIMIT)?;
        let budget = weights.saturating_mul(2).clamp(LEAST_ELEMENTS, MOST_ELEMENTS);
        let image = lines.len(lattice, target_rows).unwrap_or(usize::MAX);
        // Even for all threads.
        if image <= budget && batch >= threads {
            let tasks = batch.div_ceil(budget / image).next_multiple_of(threads);
            return Some(Lines { images: batch.div_ceil(tasks), ..lines });
        }
        let parts = image.div_ceil(budget).max(threads.div_ceil(batch)).min(target_rows);
        Some(Lines { rows: target_rows.div_ceil(parts), ..lines })
    }

    /// Elements that a task copies at most.
    pub(super) fn most(&self, lattice: &Lattice) -> Option<usize> {
        self.len(lattice, self.rows)?.checked_mul(self.images)
    }

    /// The number of elements that are written for one image: its lines for `rows` rows of targets, and the zeros around them.
    fn len(&self, lattice: &Lattice, rows: usize) -> Option<usize> {
        let lines =
            rows.checked_add(self.rows_of_taps.reach())?.checked_mul(self.rows_of_taps.residues.len())?;
        let copied = lines.checked_mul(self.line)?.checked_add(self.before)?;
        // The last row of the last product, and its terms.
        let last =
            (rows.checked_mul(self.positions)?.checked_next_multiple_of(ROWS)? - 1).checked_mul(self.step)?;
        let segments = self.segments(lattice, rows);
        let segment = segments.iter().map(|&[a, _]| a).max()?;
        let read = last.checked_add(segment)?.checked_add(lattice.segment.padded)?;
        copied.max(read).checked_next_multiple_of(2 * LINE)
    }

    /// Where the segments of both factors begin.
    pub(super) fn segments(&self, lattice: &Lattice, rows: usize) -> Vec<[usize; 2]> {
        let panel = lattice.segment.padded * SIDE;
        let pixel = self.step / lattice.columns.source_step;
        let columns = lattice.columns.taps.iter().step_by(lattice.segment.taps);
        let firsts: Vec<isize> = columns.map(|tap| tap.offset * pixel as isize).collect();
        let starts = self.rows_of_taps.taps.iter().flat_map(|&[residue, line]| {
            let line = self.before + (residue * (rows + self.rows_of_taps.reach()) + line) * self.line;
            firsts.iter().map(move |&first| line.wrapping_add_signed(first))
        });
        starts.enumerate().map(|(index, a)| [a, index * panel]).collect()
    }

    /// The pixels of each task, by number.
    pub(super) fn tasks(&self, lattice: &Lattice, batch: usize) -> impl Iterator<Item = Range<usize>> {
        let [rows, columns] = lattice.targets;
        let (image, step, images) = (rows * columns, self.rows * columns, self.images);
        (0..batch).step_by(images).flat_map(move |first| {
            let end = batch.min(first + images) * image;
            let step = if images > 1 { images * image } else { step };
            (first * image..end).step_by(step).map(move |start| start..end.min(start + step))
        })
    }

    /// Copies the lines of a task's part of an image, from this row of targets on.
    pub(super) fn copy(
        &self,
        (lattice, source): (&Lattice, &Tensor),
        (image, first_row): (&[bf16], usize),
        to: &mut [bf16],
        rows: usize,
    ) {
        let [height, width] = source.size;
        let row_len = width * source.channels;
        let (before, rest) = to.split_at_mut(self.before);
        before.fill(bf16::ZERO);
        let count = rows + self.rows_of_taps.reach();
        let (lines, after) = rest.split_at_mut(self.rows_of_taps.residues.len() * count * self.line);
        after.fill(bf16::ZERO);
        let residues = self.rows_of_taps.residues.iter();
        for (residue, lines) in residues.zip(lines.chunks_exact_mut(count * self.line)) {
            for (number, line) in lines.chunks_exact_mut(self.line).enumerate() {
                let row = (first_row + number) as isize + self.rows_of_taps.lowest;
                let row = row * lattice.rows.source_step as isize + *residue as isize;
                if row < 0 || row as usize >= height {
                    line.fill(bf16::ZERO);
                    continue;
                }
                let (inside, beyond) = line.split_at_mut(row_len);
                inside.copy_from_slice(&image[row as usize * row_len..][..row_len]);
                beyond.fill(bf16::ZERO);
            }
        }
    }

    /// Where target pixels of some rows begin in the target, from its first one on, or [`NOWHERE`].
    pub(super) fn places(&self, lattice: &Lattice, target: &Tensor, rows: usize) -> Vec<usize> {
        let mut places = vec![NOWHERE; rows * self.positions];
        for (row, places) in places.chunks_exact_mut(self.positions).enumerate() {
            let first = row * lattice.rows.step * target.size[1];
            for (column, place) in places.iter_mut().enumerate().take(lattice.targets[1]) {
                *place = (first + column * lattice.columns.step) * target.channels;
            }
        }
        places
    }

    /// Elements from a target pixel to the next.
    pub(super) fn step(&self) -> usize {
        self.step
    }

    /// As [`Lines::most`], of one image of a task.
    pub(super) fn image_len(&self, lattice: &Lattice, rows: usize) -> usize {
        self.len(lattice, rows).expect("the plan has found that it fits")
    }
}

multiversion! {
    /// Whether none is infinite or NaN.
    pub(super) fn are_finite<>(numbers: &[bf16]) -> bool {
        const EXPONENT: u16 = 0x7f80;
        numbers.iter().fold(0, |most: u16, number| most.max(number.to_bits() & EXPONENT)) < EXPONENT
    }
}
