//! The input rows that one output row reads, copied with their padding, so that no kernel checks borders.

use std::ops::Range;

use crate::MemoryFormat;
use crate::conv::problem::ConvProblem;

/// The layout of the copies.
///
/// Channels-last: R lines of (padded W) x C. Contiguous: C x R lines for each residue of the column modulo the stride
/// that a tap reads, so that what one tap reads for neighbouring outputs lies together.
pub(super) struct InputRows {
    problem: ConvProblem,
    /// Columns modulo the stride that are copied; channels-last copies every column.
    residues: Vec<usize>,
    /// Floats of a line.
    pitch: usize,
}

/// The most floats of all lines: 16 MiB.
const LARGEST: usize = 1 << 22;

impl InputRows {
    /// `None` if one output row reads too much. `slack` zeros follow each line of the contiguous format.
    pub(super) fn new(problem: &ConvProblem, slack: usize) -> Option<InputRows> {
        let w = &problem.width;
        let (residues, pitch) = match problem.format {
            MemoryFormat::ChannelsLast => {
                (vec![0], (w.pad_before + w.input + w.pad_after).checked_mul(problem.in_channels)?)
            }
            MemoryFormat::Contiguous => {
                // A tap reads at least one line, so more taps than this cannot fit.
                let taps = Some(w.kernel).filter(|&taps| taps <= LARGEST)?;
                let mut residues: Vec<usize> = (0..taps).map(|s| s * w.dilation % w.stride).collect();
                residues.sort_unstable();
                residues.dedup();
                (residues, (w.kernel_span() - 1) / w.stride + w.output() + slack)
            }
        };
        let rows = InputRows { problem: *problem, residues, pitch };
        let lines = rows.lines_per_row()?.checked_mul(problem.height.kernel)?;
        lines.checked_mul(pitch).filter(|&len| len <= LARGEST)?;
        Some(rows)
    }

    /// Lines of one input row.
    fn lines_per_row(&self) -> Option<usize> {
        match self.problem.format {
            MemoryFormat::ChannelsLast => Some(1),
            MemoryFormat::Contiguous => self.problem.in_channels.checked_mul(self.residues.len()),
        }
    }

    /// Floats of the copies for one output row.
    pub(super) fn len(&self) -> usize {
        self.lines_per_row().expect("checked when made") * self.problem.height.kernel * self.pitch
    }

    /// Where the first output's value of each tap lies: taps as (c, r, s), or (r, s, c) for channels-last.
    pub(super) fn taps(&self) -> Vec<usize> {
        let p = &self.problem;
        let (c, r, s) = (p.in_channels, p.height.kernel, p.width.kernel);
        let columns = (0..s).map(|s| s * p.width.dilation);
        match p.format {
            MemoryFormat::ChannelsLast => (0..r)
                .flat_map(|r| columns.clone().map(move |column| (r, column)))
                .flat_map(|(r, column)| (0..c).map(move |channel| r * self.pitch + column * c + channel))
                .collect(),
            MemoryFormat::Contiguous => (0..c * r)
                .flat_map(|row| columns.clone().map(move |column| (row, column)))
                .map(|(row, column)| {
                    let stride = p.width.stride;
                    let residue = self.residues.binary_search(&(column % stride)).expect("a tap's residue");
                    (row * self.residues.len() + residue) * self.pitch + column / stride
                })
                .collect(),
        }
    }

    /// Floats from what a tap reads for one output to what it reads for the next.
    pub(super) fn step(&self) -> usize {
        match self.problem.format {
            MemoryFormat::ChannelsLast => self.problem.width.stride * self.problem.in_channels,
            MemoryFormat::Contiguous => 1,
        }
    }

    /// The part of `x` that output rows `rows`, counted over all images, read and the output row before them does not. Only
    /// the part in the first row's image, and for channels-last only.
    pub(super) fn fresh<'a>(&self, x: &'a [f32], rows: Range<usize>) -> &'a [f32] {
        let p = &self.problem;
        let h = &p.height;
        let (image, first) = (rows.start / h.output(), rows.start % h.output());
        if image >= p.batch || rows.is_empty() {
            return &[];
        }
        let last = (first + rows.len()).min(h.output()) - 1;
        let read = first.checked_sub(1).map_or(0, |before| before * h.stride + h.kernel_span());
        let inside = |row: usize| row.saturating_sub(h.pad_before).min(h.input);
        let end = inside(last * h.stride + h.kernel_span());
        let start = inside(read.max(first * h.stride)).min(end);
        let line = p.width.input * p.in_channels;
        &x[(image * h.input + start) * line..(image * h.input + end) * line]
    }

    /// Copies what output rows `rows`, counted over all images, read of `x`, one row after the other.
    #[inline(always)]
    pub(super) fn copy_all(&self, x: &[f32], rows: Range<usize>, to: &mut [f32]) {
        let (height, image) = (self.problem.height.output(), self.problem.input_len() / self.problem.batch);
        for (row, to) in rows.zip(to.chunks_exact_mut(self.len())) {
            self.copy(&x[row / height * image..][..image], row % height, to);
        }
    }

    /// Copies what output row `row` reads of an image. Inlined, to be compiled for the caller's instruction set.
    #[inline(always)]
    pub(super) fn copy(&self, image: &[f32], row: usize, to: &mut [f32]) {
        let p = &self.problem;
        let (h, w) = (&p.height, &p.width);
        match p.format {
            MemoryFormat::ChannelsLast => {
                let (left, len) = (w.pad_before * p.in_channels, w.input * p.in_channels);
                for (r, line) in to.chunks_exact_mut(self.pitch).take(h.kernel).enumerate() {
                    let Some(ih) = h.input_index(row, r) else {
                        line.fill(0.0);
                        continue;
                    };
                    line[..left].fill(0.0);
                    line[left..left + len].copy_from_slice(&image[ih * len..][..len]);
                    line[left + len..].fill(0.0);
                }
            }
            MemoryFormat::Contiguous => {
                let mut lines = to.chunks_exact_mut(self.pitch);
                for plane in image.chunks_exact(h.input * w.input) {
                    for r in 0..h.kernel {
                        let from = h.input_index(row, r).map(|ih| &plane[ih * w.input..][..w.input]);
                        for (&residue, line) in self.residues.iter().zip(&mut lines) {
                            self.copy_residue(from, residue, line);
                        }
                    }
                }
            }
        }
    }

    /// Copies every stride-th column of a padded row, from column `residue` on.
    #[inline(always)]
    fn copy_residue(&self, from: Option<&[f32]>, residue: usize, line: &mut [f32]) {
        let w = &self.problem.width;
        let first = w.pad_before.saturating_sub(residue).div_ceil(w.stride);
        let end = (w.pad_before + w.input).saturating_sub(residue).div_ceil(w.stride);
        let (first, end) = (first.min(line.len()), end.min(line.len()));
        let Some(from) = from.filter(|_| first < end) else { return line.fill(0.0) };
        line[..first].fill(0.0);
        line[end..].fill(0.0);
        let from = &from[first * w.stride + residue - w.pad_before..];
        let to = &mut line[first..end];
        match w.stride {
            1 => to.copy_from_slice(&from[..end - first]),
            2 => every::<2>(from, to),
            4 => every::<4>(from, to),
            stride => to.iter_mut().zip(from.iter().step_by(stride)).for_each(|(to, &from)| *to = from),
        }
    }
}

/// Every N-th element; a constant stride lets the compiler use vectors.
#[inline(always)]
fn every<const N: usize>(from: &[f32], to: &mut [f32]) {
    for (i, to) in to.iter_mut().enumerate() {
        *to = from[i * N];
    }
}
