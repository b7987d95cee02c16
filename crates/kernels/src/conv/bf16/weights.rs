//! Backward-weights: dy transposed, times what rows of taps read from x.
//!
//! The batch is cut into bands: some rows of outputs of an image. Of each band in turn, or of several, all threads first write both factors
//! of the products; then they multiply, each its own part of the weight. A position is an output pixel of a band, in rows of an even
//! length. For a row of taps, the positions' rows of x lie one after the other, whatever the stride is, because rows of x are sorted by
//! their residue modulo the stride. So the product for a row of taps is one over all positions.

use std::ops::Range;
use std::sync::Arc;

use half::bf16;

use super::pack::{gather, pair_rows, transpose_rows};
use super::unit::{Factors, GROUP, ROWS, SIDE, Unit};
use crate::Cpu;
use crate::conv::problem::ConvProblem;
use crate::conv::workspace::{LINE, aligned};
use crate::shared::Shared;

/// Elements of both factors that are written before they are multiplied: they stay in the L2 caches of the threads.
const BANDS_ELEMENTS: usize = 512 * 1024;
/// With a large weight, to whose gradient each product is added, as many elements as this for each of its own, up to a limit.
const BANDS_WEIGHTS: usize = 8;
const LARGE_BANDS_ELEMENTS: usize = 4 * 1024 * 1024;

/// Floats from a product's sums to the next ones: of products that lie a power of two apart, the same elements would fall into one set of a
/// cache.
const PRODUCT: usize = SIDE * SIDE + LINE;

/// The weight gradient of one problem.
pub(super) struct WeightSums {
    unit: Unit,
    problem: ConvProblem,
    /// Rows of outputs of a band, and the bands of an image.
    band_rows: usize,
    bands: usize,
    /// Bands that are multiplied together.
    together: usize,
    /// Positions of a row.
    width: usize,
    /// Positions of a band: whole terms of the unit.
    positions: usize,
    /// The residues of rows of x that taps read, and the rows of each in a band.
    residues: Vec<usize>,
    residue_rows: usize,
    /// Columns of a group that a row of taps reads: [tap][channel], and these rounded up to whole products.
    columns: usize,
    padded: usize,
    /// Pixels of a row of x with what is beyond its ends.
    line: usize,
    /// Rows of taps of a task.
    rows_together: usize,
    /// The places of an output channel's sums among the products of a task, in the order of its weights.
    places: Arc<[i32]>,
}

impl WeightSums {
    pub(super) fn new(problem: &ConvProblem, unit: Unit, cpu: &Cpu) -> Option<WeightSums> {
        let (height, width) = (&problem.height, &problem.width);
        let (rows, c) = (height.output(), problem.group_in_channels());
        let columns = width.kernel.checked_mul(c)?;
        let padded = columns.checked_next_multiple_of(SIDE)?;
        let mut residues: Vec<usize> =
            (0..height.kernel).map(|r| r * height.dilation % height.stride).collect();
        residues.sort_unstable();
        residues.dedup();
        let positions_of_row = width.output().next_multiple_of(2);
        let line = (positions_of_row - 1).checked_mul(width.stride)?.checked_add(width.kernel_span())?;
        let sums = WeightSums {
            unit,
            problem: *problem,
            band_rows: rows,
            bands: 1,
            together: 1,
            width: positions_of_row,
            positions: 0,
            residues,
            residue_rows: 0,
            columns,
            padded,
            line,
            rows_together: 1,
            places: Arc::new([]),
        };
        let whole = sums.with_band(rows)?;
        let parts = whole.band_len()?.div_ceil(BANDS_ELEMENTS).clamp(1, rows);
        let band = sums.with_band(rows.div_ceil(parts))?;
        let bands = rows.div_ceil(band.band_rows);
        let all = bands.checked_mul(problem.batch)?;
        let elements = (BANDS_WEIGHTS * problem.weight_len()).clamp(BANDS_ELEMENTS, LARGE_BANDS_ELEMENTS);
        let together = (elements / band.band_len()?).max(cpu.threads()).clamp(1, all);
        let together = all.div_ceil(all.div_ceil(together));
        let rows_together = band.rows_of_taps(cpu);
        let places = band.places(rows_together)?;
        Some(WeightSums { bands, together, rows_together, places, ..band })
    }

    /// The same gradient, computed in bands of `rows` rows.
    fn with_band(&self, rows: usize) -> Option<WeightSums> {
        let height = &self.problem.height;
        let reach = (rows - 1).checked_mul(height.stride)?.checked_add(height.kernel_span())?;
        let positions = rows.checked_mul(self.width)?.checked_next_multiple_of(GROUP)?;
        let residue_rows = reach.div_ceil(height.stride);
        Some(WeightSums {
            band_rows: rows,
            positions,
            residue_rows,
            residues: self.residues.clone(),
            places: self.places.clone(),
            ..*self
        })
    }

    /// Elements of dy, transposed, and of x in pairs, of a band.
    fn lens(&self) -> Option<[usize; 2]> {
        let dy = self.channels()?.checked_mul(self.positions)?;
        // Rows of taps that begin late read beyond the last row.
        let rows = self.residues.len().checked_mul(self.residue_rows)?;
        let positions = rows.checked_mul(self.width)?.checked_add(GROUP)?;
        let x =
            positions.checked_mul(self.padded)?.checked_mul(self.problem.groups)?.checked_add(2 * SIDE)?;
        Some([dy, x.checked_next_multiple_of(2 * LINE)?])
    }

    /// Rows of dy, transposed: products of a group's last channels may read some that stand for no channel.
    fn channels(&self) -> Option<usize> {
        self.problem.out_channels.checked_next_multiple_of(SIDE)?.checked_add(ROWS)
    }

    fn band_len(&self) -> Option<usize> {
        let [dy, x] = self.lens()?;
        dy.checked_add(x)
    }

    /// Elements of a row of x with zeros around it, and then zeros for what a position that is no output reads.
    fn line_len(&self) -> Option<usize> {
        let line = self.line.checked_mul(self.problem.in_channels)?;
        line.checked_add(self.columns)?.checked_next_multiple_of(2 * LINE)
    }

    /// In floats.
    pub(super) fn workspace_len(&self, cpu: &Cpu) -> Option<usize> {
        let lines = self.line_len()?.checked_mul(cpu.threads())?;
        let bands = self.band_len()?.checked_mul(self.together)?;
        let products = self.products_of_row() * self.rows_together * PRODUCT * cpu.threads();
        Some(lines.checked_add(bands)? / 2 + products + LINE)
    }

    pub(super) fn run(&self, cpu: &Cpu, [x, dy]: [&[bf16]; 2], dweight: &mut [f32], workspace: &mut [f32]) {
        let len = |len: Option<usize>| len.expect("the plan has found that it fits");
        let (band_len, line_len) = (len(self.band_len()), len(self.line_len()));
        let [dy_len, _] = self.lens().expect("the plan has found that they fit");
        let halves = (self.together * band_len + cpu.threads() * line_len) / 2;
        let (halves, products) = aligned(workspace).split_at_mut(halves);
        let halves = bytemuck::cast_slice_mut::<f32, bf16>(halves);
        let products_len = self.products_of_row() * self.rows_together * PRODUCT;
        let (bands, lines) = halves.split_at_mut(self.together * band_len);
        let all = self.problem.batch * self.bands;
        let work = self.problem.flops() as usize;
        for first in (0..all).step_by(self.together) {
            let count = (all - first).min(self.together);
            // Elements that are written, as a measure of work.
            let parts = self.parts(first..first + count, bands, band_len);
            cpu.for_each_with(
                band_len * count,
                lines.chunks_exact_mut(line_len),
                parts.into_iter(),
                |line, part| match part {
                    Part::Dy { band, first, to } => self.transpose(dy, &band, first, to),
                    Part::X { band, rows, to } => self.pair(x, band, rows, (line, to)),
                },
            );
            let (bands, sums) = (&bands[..count * band_len], Shared::new(&mut *dweight));
            let [_, c, rows, _] = self.problem.weight_shape();
            let outputs = self.problem.group_out_channels().div_ceil(SIDE);
            let inputs = if self.merged() { 1 } else { c.div_ceil(SIDE) };
            let parts = rows.div_ceil(self.rows_together);
            let tasks = 0..self.problem.groups * outputs * inputs * parts;
            cpu.for_each_with(work, products.chunks_exact_mut(products_len), tasks, |memory, task| {
                let (place, part) = (task / parts, task % parts * self.rows_together);
                let (place, input) = (place / inputs, place % inputs * SIDE);
                let (group, output) = (place / outputs, place % outputs * SIDE);
                let taps = part..rows.min(part + self.rows_together);
                let products = Products { of: self, group, output, input, taps, bands, band_len, dy_len };
                products.run(memory, sums, first == 0);
            });
        }
    }

    /// Whether a product has columns of several taps, because each has few.
    fn merged(&self) -> bool {
        self.problem.group_in_channels() < SIDE
    }

    /// See the field. A task of fewer channels or rows of taps has the places of the first ones.
    fn places(&self, rows: usize) -> Option<Arc<[i32]>> {
        let (c, taps) = (self.problem.group_in_channels(), self.problem.width.kernel);
        let (inputs, tap_columns) = if self.merged() { (c, c) } else { (c.min(SIDE), SIDE) };
        let products = self.products_of_row();
        i32::try_from((rows * products).checked_mul(PRODUCT)?).ok()?;
        let place = |input: usize, r: usize, s: usize| {
            let column = s * tap_columns + input;
            ((r * products + column / SIDE) * PRODUCT + column % SIDE) as i32
        };
        let places = (0..inputs).flat_map(|input| (0..rows).map(move |r| (input, r)));
        Some(places.flat_map(|(input, r)| (0..taps).map(move |s| place(input, r, s))).collect())
    }

    /// Products of the same input channels for a row of taps.
    fn products_of_row(&self) -> usize {
        if self.merged() { self.padded / SIDE } else { self.problem.width.kernel }
    }

    /// Rows of taps whose products are written to the gradient together: all, but to have work for all threads or if they are very many.
    fn rows_of_taps(&self, cpu: &Cpu) -> usize {
        const MOST_PRODUCTS: usize = 128;
        let problem = &self.problem;
        let inputs = if self.merged() { 1 } else { problem.group_in_channels().div_ceil(SIDE) };
        let tasks = problem.groups * problem.group_out_channels().div_ceil(SIDE) * inputs;
        match tasks < 2 * cpu.threads() {
            true => 1,
            false => (MOST_PRODUCTS / self.products_of_row()).clamp(1, problem.height.kernel),
        }
    }

    /// The parts of some bands' factors that a thread writes at a time.
    fn parts<'a>(&self, bands: Range<usize>, memory: &'a mut [bf16], band_len: usize) -> Vec<Part<'a>> {
        let [dy_len, _] = self.lens().expect("the plan has found that they fit");
        let mut parts = Vec::new();
        let row = self.width * self.padded * self.problem.groups;
        for (index, memory) in bands.zip(memory.chunks_exact_mut(band_len)) {
            let band = self.band(index);
            let (dy, x) = memory.split_at_mut(dy_len);
            let groups = self.positions / GROUP;
            let few = groups.div_ceil(4);
            let group_len = dy_len / groups;
            let some = dy.chunks_mut(few * group_len).enumerate();
            parts.extend(some.map(|(part, to)| Part::Dy { band: band.clone(), first: part * few, to }));
            // Some rows at a time.
            let few = self.residue_rows.div_ceil(4);
            for (residue, rows) in x.chunks_mut(self.residue_rows * row).enumerate() {
                for (part, to) in rows.chunks_mut(few * row).enumerate() {
                    parts.push(Part::X { band: band.clone(), rows: (residue, part * few), to });
                }
            }
        }
        parts
    }

    fn band(&self, index: usize) -> Band {
        let (image, band) = (index / self.bands, index % self.bands);
        let first = band * self.band_rows;
        Band { image, rows: first..(first + self.band_rows).min(self.problem.height.output()) }
    }

    /// dy of some groups of positions: [group][channel][position], with zeros where there is no output.
    fn transpose(&self, dy: &[bf16], band: &Band, first: usize, to: &mut [bf16]) {
        let k = self.problem.out_channels;
        let (outputs, pixels) = (self.problem.height.output(), self.problem.width.output());
        let [mut row, mut column] = [first * GROUP / self.width, first * GROUP % self.width];
        let group_len = self.channels().expect("the plan has found that it fits") * GROUP;
        for to in to.chunks_exact_mut(group_len) {
            let mut rows: [Option<&[bf16]>; GROUP] = [None; GROUP];
            for from in &mut rows {
                if row < band.rows.len() && column < pixels {
                    let pixel = (band.image * outputs + band.rows.start + row) * pixels + column;
                    *from = Some(&dy[pixel * k..][..k]);
                }
                column += 1;
                if column == self.width {
                    (row, column) = (row + 1, 0);
                }
            }
            transpose_rows(&rows, k, to);
        }
    }

    /// What taps read from some rows of x: [row][position / 2][group][tap, channel][position % 2].
    fn pair(
        &self,
        x: &[bf16],
        band: Band,
        (residue, first): (usize, usize),
        (line, to): (&mut [bf16], &mut [bf16]),
    ) {
        let (height, width) = (&self.problem.height, &self.problem.width);
        let (channels, group_channels) = (self.problem.in_channels, self.problem.group_in_channels());
        let row_len = self.width * self.padded * self.problem.groups;
        let Some(&residue) = self.residues.get(residue) else {
            // Beyond the last row: what is read there is multiplied by zeros, so it must be finite.
            return to.fill(bf16::ZERO);
        };
        for (index, to) in to.chunks_mut(row_len).enumerate() {
            let position = (band.rows.start + first + index) * height.stride + residue;
            let row = position.checked_sub(height.pad_before).filter(|&row| row < height.input);
            let Some(row) = row else {
                to.fill(bf16::ZERO);
                continue;
            };
            let from =
                &x[(band.image * height.input + row) * width.input * channels..][..width.input * channels];
            let reach = self.line * channels;
            let line = if width.pad_before == 0 && reach <= from.len() && width.output() == self.width {
                from
            } else {
                let start = (width.pad_before * channels).min(reach);
                let inside = from.len().min(reach - start);
                line[..start].fill(bf16::ZERO);
                line[start..start + inside].copy_from_slice(&from[..inside]);
                line[start + inside..].fill(bf16::ZERO);
                &*line
            };
            for (pair, to) in to.chunks_exact_mut(2 * self.padded * self.problem.groups).enumerate() {
                for (group, to) in to.chunks_exact_mut(2 * self.padded).enumerate() {
                    let at = |s: usize| {
                        let pixels =
                            [2 * pair, 2 * pair + 1].map(|column| column * width.stride + s * width.dilation);
                        let [even, odd] = pixels.map(|pixel| pixel * channels + group * group_channels);
                        let beyond = 2 * pair + 1 == width.output();
                        [even, if beyond { self.line * channels } else { odd }]
                    };
                    if group_channels == channels && width.dilation == 1 {
                        pair_rows(at(0).map(|at| &line[at..at + self.columns]), to);
                    } else {
                        for (s, to) in to.chunks_mut(2 * group_channels).enumerate().take(width.kernel) {
                            pair_rows(at(s).map(|at| &line[at..at + group_channels]), to);
                        }
                    }
                }
            }
        }
    }
}

/// Some rows of outputs of an image.
#[derive(Clone)]
struct Band {
    image: usize,
    rows: Range<usize>,
}

/// A part of a band's factors.
enum Part<'a> {
    /// Groups of positions of dy from this one on.
    Dy { band: Band, first: usize, to: &'a mut [bf16] },
    /// Rows of x: the place of their residue, and the first of them.
    X { band: Band, rows: (usize, usize), to: &'a mut [bf16] },
}

/// The products of some output channels of a group with what some rows of taps read of some input channels.
struct Products<'a> {
    of: &'a WeightSums,
    group: usize,
    /// The first of 32 output channels, and of 32 input channels, within the group.
    output: usize,
    input: usize,
    /// Rows of taps.
    taps: Range<usize>,
    bands: &'a [bf16],
    band_len: usize,
    dy_len: usize,
}

impl Products<'_> {
    /// Stores the sums of the bands in the gradient, or adds them. `memory` has room for the products.
    fn run(&self, memory: &mut [f32], gradient: Shared<'_, f32>, stores: bool) {
        let of = self.of;
        let problem = &of.problem;
        // SAFETY: a plan was made because this machine has the unit.
        let ready = unsafe { of.unit.ready() };
        let [_, c, rows, columns] = problem.weight_shape();
        let channel = self.group * problem.group_out_channels() + self.output;
        let channels = (problem.group_out_channels() - self.output).min(SIDE);
        // The first column of each product, and how many it has.
        let parts: Vec<[usize; 2]> = match of.merged() {
            true => {
                (0..of.columns).step_by(SIDE).map(|first| [first, (of.columns - first).min(SIDE)]).collect()
            }
            false => (0..columns).map(|s| [s * c + self.input, (c - self.input).min(SIDE)]).collect(),
        };
        let taps = self.taps.clone();
        let all = taps.clone().flat_map(|r| parts.iter().map(move |part| (r, part)));
        for ((r, &[first, count]), memory) in all.zip(memory.chunks_exact_mut(PRODUCT)) {
            let factors = self.factors(channel, r, first, channels);
            let sums = memory.first_chunk_mut().expect("a product has room for its sums");
            // SAFETY: `factors` has checked what is read.
            unsafe { ready.multiply(&factors, [channels, count], sums) };
        }
        let inputs = self.input..if of.merged() { c } else { c.min(self.input + SIDE) };
        let run = taps.len() * columns;
        for row in 0..channels {
            let start = (channel + row) * c * rows * columns;
            let sums = &memory[row * SIDE..];
            if taps.len() == rows {
                // SAFETY: these are weights, and no other task has the same channels.
                let to = unsafe { gradient.part(start + inputs.start * run, inputs.len() * run) };
                gather(sums, &of.places, to, stores);
                continue;
            }
            for (input, places) in inputs.clone().zip(of.places.chunks_exact(of.rows_together * columns)) {
                // SAFETY: these are weights, and no other task has the same channels and rows of taps.
                let to = unsafe { gradient.part(start + (input * rows + taps.start) * columns, run) };
                gather(sums, places, to, stores);
            }
        }
    }

    /// The factors of a product: output channels from `channel` on, and columns from `column` on of what row `r` of taps reads. All that
    /// they tell can be read, for `channels` rows.
    fn factors(&self, channel: usize, r: usize, column: usize, channels: usize) -> Factors {
        let (of, problem) = (self.of, &self.of.problem);
        let shift = r * problem.height.dilation;
        let residue = of.residues.iter().position(|&residue| residue == shift % problem.height.stride);
        let residue = residue.expect("the residues are those of all taps");
        let row = residue * of.residue_rows + shift / problem.height.stride;
        let pair_len = 2 * of.padded * problem.groups;
        let a = channel * GROUP;
        let a_group = of.channels().expect("the plan has found that it fits") * GROUP;
        let b = self.dy_len + row * of.width / 2 * pair_len + self.group * 2 * of.padded + 2 * column;
        let segments = self.bands.len() / self.band_len;
        let last = (segments - 1) * self.band_len;
        assert!(
            a + channels.next_multiple_of(ROWS) * GROUP <= a_group
                && of.positions / GROUP * a_group <= self.dy_len
        );
        assert!(b + last + (of.positions / 2 - 1) * pair_len + 2 * SIDE <= self.bands.len());
        Factors {
            a: self.bands[a..].as_ptr(),
            a_row: GROUP,
            a_group,
            b: self.bands[b..].as_ptr(),
            b_pair: pair_len,
            terms: of.positions,
            segments,
            a_segment: self.band_len,
            b_segment: self.band_len,
        }
    }
}
