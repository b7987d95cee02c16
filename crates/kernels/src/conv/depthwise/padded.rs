//! A plane copied with its padding, so that vectors along a row may read through every tap without a check.

use pulp::Simd;

use super::gather::{Gather, Phase, Tap};
use crate::conv::plan::NotApplicable;
use crate::memory_format::MOST_ELEMENTS;

/// Output rows that a kernel computes at once.
pub(super) const ROWS: usize = 8;

/// The layout of a padded source plane: padded rows, each split by column modulo the scale.
///
/// Outputs are rounded up to whole vectors and ROWS rows; what they read beyond the source is 0.
pub(super) struct Padded {
    /// Zeros before the source, by axis.
    before: [usize; 2],
    rows: usize,
    /// Columns that are equal modulo this lie together.
    scale: usize,
    /// Floats of one such part of a row.
    pitch: usize,
}

/// The range that all outputs of an axis, rounded up, read: the number of zeros before the source, and the range's end,
/// counted from the first of these zeros.
fn reach(gather: &Gather, multiple: usize) -> (usize, usize) {
    let taps = || gather.phases.iter().flat_map(|phase| phase.taps.iter().map(move |tap| (phase, tap)));
    let before = taps().map(|(_, tap)| tap.offset.min(0).unsigned_abs()).max().unwrap_or(0);
    let last = |(phase, tap): (&Phase, &Tap)| {
        let outputs = phase.count.next_multiple_of(multiple);
        (before + gather.scale * (outputs - 1)).saturating_add_signed(tap.offset)
    };
    (before, taps().map(last).max().unwrap_or(0) + 1)
}

impl Padded {
    pub(super) fn new([height, width]: &[Gather; 2], lanes: usize) -> Result<Padded, NotApplicable> {
        let (top, rows) = reach(height, ROWS);
        let (left, columns) = reach(width, lanes);
        let pitch = columns.div_ceil(width.scale).next_multiple_of(lanes);
        let len = pitch.checked_mul(width.scale).and_then(|row| row.checked_mul(rows));
        if len.is_none_or(|len| len > MOST_ELEMENTS) {
            return Err(NotApplicable(format!("a padded plane of {rows} x {columns} is too large")));
        }
        Ok(Padded { before: [top, left], rows, scale: width.scale, pitch })
    }

    pub(super) fn row_len(&self) -> usize {
        self.scale * self.pitch
    }

    pub(super) fn len(&self) -> usize {
        self.rows * self.row_len()
    }

    /// Where output (0, 0) of a phase reads through a tap; output (i, j) reads `height.scale * i` rows and j floats on.
    pub(super) fn place(&self, row: &Tap, column: &Tap) -> usize {
        let at = |axis: usize, tap: &Tap| {
            self.before[axis].checked_add_signed(tap.offset).expect("`before` covers the lowest offset")
        };
        let (row, column) = (at(0, row), at(1, column));
        row * self.row_len() + column % self.scale * self.pitch + column / self.scale
    }

    /// Copies a plane with rows of `width` floats into the padded one, whose padding is already 0.
    #[inline(always)]
    pub(super) fn fill<S: Simd>(&self, simd: S, plane: &[f32], width: usize, padded: &mut [f32]) {
        let [top, left] = self.before;
        let rows = padded.chunks_exact_mut(self.row_len()).skip(top);
        for (source, row) in plane.chunks_exact(width).zip(rows) {
            if self.scale == 1 {
                let to = &mut row[left.min(self.pitch)..];
                let len = to.len().min(width);
                copy(simd, &source[..len], &mut to[..len]);
                continue;
            }
            for (part, to) in row.chunks_exact_mut(self.pitch).enumerate() {
                // The part's first column that is not padding; the index includes the padding.
                let first = left + (part + self.scale - left % self.scale) % self.scale;
                let from = source.get(first - left..).unwrap_or(&[]);
                let to = to.get_mut(first / self.scale..).unwrap_or(&mut []);
                let whole = from.len() / self.scale;
                // A constant step lets the compiler use vectors.
                if self.scale == 2 {
                    to.iter_mut().zip(from.chunks_exact(2)).for_each(|(to, from)| *to = from[0]);
                } else {
                    to.iter_mut().zip(from.chunks_exact(self.scale)).for_each(|(to, from)| *to = from[0]);
                }
                if let (Some(to), Some(&from)) = (to.get_mut(whole), from.get(whole * self.scale)) {
                    *to = from;
                }
            }
        }
    }
}

/// Copies a short row inline: a call would take longer than the copy.
#[inline(always)]
pub(super) fn copy<S: Simd>(simd: S, from: &[f32], to: &mut [f32]) {
    for (from, to) in from.chunks(S::F32_LANES).zip(to.chunks_mut(S::F32_LANES)) {
        simd.partial_store_f32s(to, simd.partial_load_f32s(&from[..to.len()]));
    }
}
