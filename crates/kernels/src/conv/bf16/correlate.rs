//! Forward and backward-data: rows of what a pixel reads times panels of weights.
//!
//! Where it pays, rows lie in copied lines of the source ([`Lines`]), or in the source itself if there is one tap. Otherwise, they are
//! gathered. Terms that fill a segment up have zeros as weights; what lies in lines there is multiplied by these, so that rows are gathered,
//! too, if some number of the source is not finite.

use std::ops::Range;

use half::bf16;

use super::lines::{Lines, are_finite};
use super::pack::{Weights, pack_weights};
use super::unit::{Factors, GROUP, ROWS, Ready, SECOND, SIDE, Sums, Target, Unit};
use crate::Cpu;
use crate::conv::direct::geometry::Phase;
use crate::conv::problem::{ConvAxis, ConvProblem, Pass};
use crate::conv::workspace::{LINE, aligned};
use crate::shared::Shared;

/// The most elements of a task's rows: with the panels in use, they stay in the L2 cache.
const ROW_ELEMENTS: usize = 256 * 1024;
/// The most target pixels of a task.
const TASK_PIXELS: usize = 512;
/// Rows in lines may have this many times the terms of those that are gathered: to gather them takes longer.
const MOST_FILLED: usize = 3;

/// Forward, or backward-data, of one problem.
pub(super) struct Correlate {
    unit: Unit,
    problem: ConvProblem,
    pass: Pass,
    phases: Vec<Lattice>,
    source: Tensor,
    target: Tensor,
    /// Elements of all panels.
    panels: usize,
    /// Elements of a thread's rows.
    rows: usize,
    /// Whether every target pixel belongs to a phase; pixels that belong to none have no tap and are zero.
    complete: bool,
}

/// The source, which is read, or the target, which is written.
pub(super) struct Tensor {
    /// Rows and columns.
    pub(super) size: [usize; 2],
    pub(super) channels: usize,
    group_channels: usize,
}

/// Target pixels that use the same taps: a phase of rows by a phase of columns.
pub(super) struct Lattice {
    pub(super) rows: Phase,
    pub(super) columns: Phase,
    /// Rows and columns of an image's target pixels.
    pub(super) targets: [usize; 2],
    pub(super) segment: Segment,
    /// The segments of a sum.
    segments: usize,
    /// Whether the channels that a tap reads follow those of the tap before it, in source and row.
    contiguous: bool,
    /// Whether a row is a pixel's channels of the source, as they lie there.
    in_place: bool,
    /// The lines in which rows lie, if they are not gathered.
    lines: Option<Lines>,
    task_pixels: usize,
}

/// Terms of a sum that follow one another.
#[derive(Clone, Copy)]
pub(super) struct Segment {
    /// Taps that they belong to.
    pub(super) taps: usize,
    /// The terms, and these rounded up to what the unit takes at a time.
    terms: usize,
    pub(super) padded: usize,
}

/// Where a target pixel of a lattice lies.
#[derive(Clone, Copy)]
struct Pixel {
    image: usize,
    numbers: [usize; 2],
}

impl Lattice {
    /// Positions of an axis of the target that are in the phase.
    fn targets(phase: &Phase, size: usize) -> usize {
        size.saturating_sub(phase.first).div_ceil(phase.step)
    }

    /// Terms of a sum, with those that fill segments up.
    fn padded(&self) -> usize {
        self.segments * self.segment.padded
    }

    /// Where the terms of a tap begin.
    fn place(&self, tap: usize, depth: usize) -> usize {
        let Segment { taps, padded, .. } = self.segment;
        tap / taps * padded + tap % taps * depth
    }

    /// The pixels of each task, by number.
    fn tasks(&self, batch: usize) -> Vec<Range<usize>> {
        if let Some(lines) = &self.lines {
            return lines.tasks(self, batch).collect();
        }
        let pixels = batch * self.targets[0] * self.targets[1];
        let firsts = (0..pixels).step_by(self.task_pixels);
        firsts.map(|first| first..pixels.min(first + self.task_pixels)).collect()
    }

    fn pixel(&self, index: usize) -> Pixel {
        let [rows, columns] = self.targets;
        let (row, column) = (index / columns, index % columns);
        Pixel { image: row / rows, numbers: [row % rows, column] }
    }
}

impl Correlate {
    pub(super) fn new(problem: &ConvProblem, pass: Pass, (unit, cpu): (Unit, &Cpu)) -> Option<Correlate> {
        let axes = [&problem.height, &problem.width];
        let x = Tensor {
            size: axes.map(|axis| axis.input),
            channels: problem.in_channels,
            group_channels: problem.group_in_channels(),
        };
        let y = Tensor {
            size: axes.map(ConvAxis::output),
            channels: problem.out_channels,
            group_channels: problem.group_out_channels(),
        };
        let [source, target] = if pass == Pass::Forward { [x, y] } else { [y, x] };
        let phases = axes.map(|axis| phases_of(axis, pass));
        let complete = pass == Pass::Forward
            || axes.iter().zip(&phases).all(|(axis, phases)| phases.len() == axis.stride.min(axis.input));
        let [rows, columns] = phases;
        let mut lattices = Vec::new();
        for rows in rows {
            for columns in &columns {
                lattices.push(lattice(
                    problem,
                    [&source, &target],
                    [rows.clone(), columns.clone()],
                    (unit, cpu),
                )?);
            }
        }
        let blocks = target.group_channels.div_ceil(SIDE) * problem.groups;
        let panels = lattices.iter().try_fold(0usize, |sum, lattice| {
            sum.checked_add(lattice.padded().checked_mul(SIDE)?.checked_mul(blocks)?)
        })?;
        let mut rows = lattices.iter().map(|lattice| {
            let gathers_all = !lattice.in_place && lattice.lines.is_none();
            let pixels = if gathers_all { lattice.task_pixels.next_multiple_of(SIDE) } else { SIDE };
            let lines = lattice.lines.as_ref().map_or(Some(0), |lines| lines.most(lattice))?;
            Some(lattice.padded().checked_mul(pixels)?.max(lines))
        });
        let rows = rows.try_fold(1, |most, rows| Some(rows?.max(most)))?;
        Some(Correlate {
            unit,
            problem: *problem,
            pass,
            phases: lattices,
            source,
            target,
            panels,
            rows,
            complete,
        })
    }

    /// In floats.
    pub(super) fn workspace_len(&self, cpu: &Cpu) -> Option<usize> {
        let rows = self.rows.next_multiple_of(2 * LINE).checked_mul(cpu.threads())?;
        Some(self.panels.checked_add(rows)? / 2 + LINE)
    }

    /// The part of the weight that a panel holds.
    fn weights<'a>(&self, weight: &'a [f32], [group, block]: [usize; 2], [r, s]: [usize; 2]) -> Weights<'a> {
        let [_, c, rows, columns] = self.problem.weight_shape();
        let (of_channel, of_output) = (rows * columns, c * rows * columns);
        let first = group * self.problem.group_out_channels() * of_output + r * columns + s;
        match self.pass {
            Pass::Forward => Weights {
                all: weight,
                at: first + block * SIDE * of_output,
                depth_step: of_channel,
                column_step: of_output,
            },
            _ => Weights {
                all: weight,
                at: first + block * SIDE * of_channel,
                depth_step: of_output,
                column_step: of_channel,
            },
        }
    }

    fn pack(&self, cpu: &Cpu, weight: &[f32], panels: &mut [bf16]) {
        let blocks = self.target.group_channels.div_ceil(SIDE);
        let mut rest = panels;
        let mut jobs = Vec::new();
        for lattice in &self.phases {
            for group in 0..self.problem.groups {
                for block in 0..blocks {
                    let (panel, later) = std::mem::take(&mut rest).split_at_mut(lattice.padded() * SIDE);
                    jobs.push((lattice, [group, block], panel));
                    rest = later;
                }
            }
        }
        cpu.for_each(weight.len(), jobs.into_iter(), |(lattice, place, panel)| {
            let columns = (self.target.group_channels - place[1] * SIDE).min(SIDE);
            let depth = self.source.group_channels;
            for segment in panel.chunks_exact_mut(lattice.segment.padded * SIDE) {
                segment[lattice.segment.terms / 2 * 2 * SIDE..].fill(bf16::ZERO);
            }
            let of_row = |row| lattice.columns.taps.iter().map(move |column| [row, column]);
            for (tap, [row, column]) in lattice.rows.taps.iter().flat_map(of_row).enumerate() {
                let weights = self.weights(weight, place, [row.kernel, column.kernel]);
                pack_weights(&weights, lattice.place(tap, depth), [depth, columns], panel);
            }
        });
    }

    pub(super) fn run<T: Target>(
        &self,
        cpu: &Cpu,
        (source, weight): (&[bf16], &[f32]),
        target: &mut [T],
        workspace: &mut [f32],
    ) {
        let (panels, rows) =
            bytemuck::cast_slice_mut::<f32, bf16>(aligned(workspace)).split_at_mut(self.panels);
        self.pack(cpu, weight, panels);
        if !self.complete {
            cpu.for_each(target.len(), target.chunks_mut(1 << 16), |chunk| chunk.fill(T::of(0.0)));
        }
        let (panels, target) = (&*panels, Shared::new(target));
        let mut at = 0;
        let mut tasks = Vec::new();
        for lattice in &self.phases {
            let parts = lattice.tasks(self.problem.batch).into_iter();
            tasks.extend(parts.map(|part| (lattice, at, part)));
            at += lattice.padded() * self.target.group_channels.next_multiple_of(SIDE) * self.problem.groups;
        }
        let len = self.rows.next_multiple_of(2 * LINE);
        let work = self.problem.flops() as usize;
        cpu.for_each_with(
            work,
            rows.chunks_exact_mut(len),
            tasks.into_iter(),
            |rows, (lattice, at, part)| {
                // SAFETY: a plan was made because this machine has the unit.
                let ready = unsafe { self.unit.ready() };
                let task = Task { of: self, lattice, source, panels: &panels[at..], target, ready };
                task.run(cpu, part, rows);
            },
        );
    }
}

/// The phases of an axis of the target, with taps by rising offset.
fn phases_of(axis: &ConvAxis, pass: Pass) -> Vec<Phase> {
    let mut phases = match pass {
        Pass::Forward => Phase::forward(axis),
        _ => Phase::backward_data(axis),
    };
    phases.iter_mut().for_each(|phase| phase.taps.sort_by_key(|tap| tap.offset));
    phases
}

fn lattice(
    problem: &ConvProblem,
    [source, target]: [&Tensor; 2],
    [rows, columns]: [Phase; 2],
    (unit, cpu): (Unit, &Cpu),
) -> Option<Lattice> {
    let targets = [Lattice::targets(&rows, target.size[0]), Lattice::targets(&columns, target.size[1])];
    let taps = rows.taps.len().checked_mul(columns.taps.len())?;
    let segment = |taps: usize| {
        let terms = taps.checked_mul(source.group_channels)?;
        Some(Segment { taps, terms, padded: terms.checked_next_multiple_of(unit.terms())? })
    };
    let adjacent = columns.taps.windows(2).all(|taps| taps[1].offset - taps[0].offset == 1);
    let one_tap = |phase: &Phase, axis: usize| {
        phase.taps.len() == 1
            && phase.taps[0].offset == 0
            && [phase.first, phase.step, phase.source_step] == [0, 1, 1]
            && source.size[axis] == target.size[axis]
    };
    let whole = segment(taps)?;
    let in_place = one_tap(&rows, 0) && one_tap(&columns, 1) && whole.padded == source.group_channels;
    let pixels = problem.batch * targets[0] * targets[1];
    let most = (ROW_ELEMENTS / whole.padded.max(1)).clamp(SIDE, TASK_PIXELS);
    // Even for all threads, and whole products.
    let tasks = pixels.div_ceil(most).next_multiple_of(cpu.threads());
    let task_pixels = pixels.div_ceil(tasks.max(1)).next_multiple_of(SIDE);
    let contiguous = adjacent && problem.groups == 1;
    let gathered = Lattice {
        rows,
        columns,
        targets,
        segment: whole,
        segments: 1,
        contiguous,
        in_place,
        lines: None,
        task_pixels,
    };
    // Of one tap with a stride, lines would have pixels that nobody reads.
    let skips = taps == 1 && gathered.columns.source_step > 1;
    if in_place || skips || problem.groups > 1 || pixels == 0 {
        return Some(gathered);
    }
    let of_segment = if adjacent { gathered.columns.taps.len() } else { 1 };
    let in_lines = Lattice { segment: segment(of_segment)?, segments: taps / of_segment.max(1), ..gathered };
    let terms = in_lines.segments.checked_mul(in_lines.segment.padded)?;
    let weights = terms.checked_mul(target.group_channels)?;
    let lines = Lines::new(&in_lines, source, problem.batch, (weights, cpu.threads()));
    match lines.filter(|_| terms <= MOST_FILLED * whole.padded) {
        Some(lines) => Some(Lattice { lines: Some(lines), ..in_lines }),
        None => Some(Lattice { segment: whole, segments: 1, ..in_lines }),
    }
}

/// Some target pixels of a lattice.
struct Task<'a, T> {
    of: &'a Correlate,
    lattice: &'a Lattice,
    source: &'a [bf16],
    panels: &'a [bf16],
    target: Shared<'a, T>,
    ready: Ready,
}

impl<T: Target> Task<'_, T> {
    /// `memory` has [`Correlate::rows`] elements.
    fn run(&self, cpu: &Cpu, part: Range<usize>, memory: &mut [bf16]) {
        if let Some(lines) = &self.lattice.lines
            && self.run_in_lines(cpu, lines, part.clone(), memory)
        {
            return;
        }
        let chunk = match self.lattice.in_place {
            true => part.len(),
            false => memory.len() / self.lattice.padded() / SIDE * SIDE,
        };
        for first in part.clone().step_by(chunk) {
            self.run_gathered(first..part.end.min(first + chunk), memory);
        }
    }

    fn run_gathered(&self, part: Range<usize>, rows: &mut [bf16]) {
        let (of, lattice) = (self.of, self.lattice);
        let (count, padded, channels) = (part.len(), lattice.padded(), of.target.group_channels);
        let pixels: Vec<Pixel> = part.clone().map(|index| lattice.pixel(index)).collect();
        let targets: Vec<usize> = pixels.iter().map(|pixel| self.target_of(pixel)).collect();
        let segment = lattice.segment.padded;
        let mut sums: Sums = [0.0; SIDE * SIDE];
        let segments: Vec<[usize; 2]> =
            (0..lattice.segments).map(|index| [index * segment, index * segment * SIDE]).collect();
        for group in 0..of.problem.groups {
            // The last rows are copied in any case, so that whole groups of rows can be read.
            let whole = if lattice.in_place { count / SIDE * SIDE } else { 0 };
            for (pixel, row) in pixels[whole..].iter().zip(rows.chunks_exact_mut(padded)) {
                self.gather(pixel, group, row);
            }
            for block in 0..channels.div_ceil(SIDE) {
                for first in (0..count).step_by(SIDE) {
                    let height = (count - first).min(SIDE);
                    let (a, a_row) = match first < whole {
                        true => {
                            let from =
                                (part.start + first) * of.source.channels + group * of.source.group_channels;
                            (&self.source[from..], of.source.channels)
                        }
                        false => (&rows[(first - whole) * padded..], padded),
                    };
                    let targets = (0, &targets[first..first + height]);
                    self.multiply([group, block], (a, a_row), &segments, targets, &mut sums);
                }
            }
        }
    }

    /// As [`Task::run`], but says no if it had to multiply numbers that are not finite by zero.
    fn run_in_lines(&self, cpu: &Cpu, lines: &Lines, part: Range<usize>, memory: &mut [bf16]) -> bool {
        let (of, lattice) = (self.of, self.lattice);
        let [all_rows, columns] = lattice.targets;
        let image_pixels = all_rows * columns;
        let (images, rows) = match part.len() / image_pixels {
            0 => (1, part.len() / columns),
            images => (images, all_rows),
        };
        let Pixel { image: first_image, numbers: [first_row, _] } = lattice.pixel(part.start);
        let len = lines.image_len(lattice, rows);
        let source_len = of.source.size[0] * of.source.size[1] * of.source.channels;
        // Lines that are filled up are the only ones whose other numbers are multiplied, by zeros.
        let filled = lattice.segment.terms < lattice.segment.padded;
        for (image, to) in (first_image..first_image + images).zip(memory.chunks_exact_mut(len)) {
            let from = &self.source[image * source_len..][..source_len];
            lines.copy((lattice, &of.source), (from, first_row), to, rows);
            if filled && !are_finite(cpu, to) {
                return false;
            }
        }
        let mut sums: Sums = [0.0; SIDE * SIDE];
        let segments = lines.segments(lattice, rows);
        let places = lines.places(lattice, &of.target, rows);
        for block in 0..of.target.group_channels.div_ceil(SIDE) {
            for (image, from) in memory.chunks_exact(len).enumerate().take(images) {
                let origin = self.target_of(&lattice.pixel(part.start + image * image_pixels));
                for (index, places) in places.chunks(SIDE).enumerate() {
                    let a = &from[index * SIDE * lines.step()..];
                    self.multiply([0, block], (a, lines.step()), &segments, (origin, places), &mut sums);
                }
            }
        }
        true
    }

    /// Multiplies some rows, which lie in `a`, by a panel, and writes the sums to their places from `origin` on.
    fn multiply(
        &self,
        [group, block]: [usize; 2],
        (a, a_row): (&[bf16], usize),
        segments: &[[usize; 2]],
        (origin, places): (usize, &[usize]),
        sums: &mut Sums,
    ) {
        let (of, lattice) = (self.of, self.lattice);
        let (channels, terms) = (of.target.group_channels, lattice.segment.padded);
        let panel_len = lattice.padded() * SIDE;
        let index = group * channels.div_ceil(SIDE) + block;
        let panel = &self.panels[index * panel_len..][..panel_len];
        let columns = (channels - block * SIDE).min(SIDE);
        let last = (places.len().next_multiple_of(ROWS) - 1) * a_row + terms;
        assert!(segments.iter().all(|&[a_at, b_at]| {
            a_at <= a.len() && last <= a.len() - a_at && b_at + terms * SIDE <= panel.len()
        }));
        let factors = Factors {
            a: a.as_ptr(),
            a_row,
            a_group: GROUP,
            b: panel.as_ptr(),
            b_pair: 2 * SIDE,
            b_second: SECOND,
            terms,
            segments,
        };
        // SAFETY: the slice of `a` reaches to the end of each segment of the last row that is read, as asserted, and so does the panel,
        // whose terms have all columns.
        unsafe { self.ready.multiply(&factors, [places.len(), columns], (sums, false)) };
        // SAFETY: places are those of pixels of the target, and `columns` channels of a group follow `channel`. Pixels of a lattice, and
        // lattices, are different, so no other task writes to these pixels.
        unsafe {
            let to = self.target.pointer(origin + group * channels + block * SIDE);
            T::write(&self.ready, sums, to, places, columns);
        }
    }

    /// Where the channels of a target pixel begin.
    fn target_of(&self, pixel: &Pixel) -> usize {
        let [height, width] = self.of.target.size;
        let place = |phase: &Phase, number: usize| phase.first + number * phase.step;
        let row = place(&self.lattice.rows, pixel.numbers[0]);
        let column = place(&self.lattice.columns, pixel.numbers[1]);
        ((pixel.image * height + row) * width + column) * self.of.target.channels
    }

    /// Copies what a target pixel reads of a group: [tap][channel], with zeros where segments are filled up.
    fn gather(&self, pixel: &Pixel, group: usize, row: &mut [bf16]) {
        let (source, lattice) = (&self.of.source, self.lattice);
        let [height, width] = source.size;
        let depth = source.group_channels;
        let taps = &lattice.columns.taps;
        for segment in row.chunks_exact_mut(lattice.segment.padded) {
            segment[lattice.segment.terms..].fill(bf16::ZERO);
        }
        let first_column = (pixel.numbers[1] * lattice.columns.source_step) as isize;
        for (index, tap) in lattice.rows.taps.iter().enumerate() {
            let source_row = (pixel.numbers[0] * lattice.rows.source_step) as isize + tap.offset;
            let is_inside = source_row >= 0 && (source_row as usize) < height;
            let line = if is_inside { (pixel.image * height + source_row as usize) * width } else { 0 };
            if lattice.contiguous {
                let run = &mut row[lattice.place(index * taps.len(), depth)..][..taps.len() * depth];
                if !is_inside {
                    run.fill(bf16::ZERO);
                    continue;
                }
                let start = first_column + taps[0].offset;
                let before = (-start).clamp(0, taps.len() as isize) as usize;
                let end = (width as isize - start).clamp(before as isize, taps.len() as isize) as usize;
                let (left, rest) = run.split_at_mut(before * depth);
                let (inside, right) = rest.split_at_mut((end - before) * depth);
                left.fill(bf16::ZERO);
                right.fill(bf16::ZERO);
                if !inside.is_empty() {
                    let from = (line + (start + before as isize) as usize) * depth;
                    inside.copy_from_slice(&self.source[from..from + inside.len()]);
                }
                continue;
            }
            for (tap_column, tap) in taps.iter().enumerate() {
                let to = &mut row[lattice.place(index * taps.len() + tap_column, depth)..][..depth];
                let column = first_column + tap.offset;
                match is_inside && column >= 0 && (column as usize) < width {
                    true => {
                        let from = (line + column as usize) * source.channels + group * depth;
                        to.copy_from_slice(&self.source[from..from + depth]);
                    }
                    false => to.fill(bf16::ZERO),
                }
            }
        }
    }
}
