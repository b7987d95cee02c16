//! Forward and backward-data: rows of what a pixel reads times panels of weights.

use half::bf16;

use super::pack::{Weights, pack_weights};
use super::unit::{Factors, GROUP, ROWS, Ready, SIDE, Sums, Unit};
use crate::Cpu;
use crate::conv::direct::geometry::Phase;
use crate::conv::problem::{ConvAxis, ConvProblem, Pass};
use crate::conv::workspace::{LINE, aligned};
use crate::shared::Shared;

/// The most elements of a task's rows: with the panels in use, they stay in the L2 cache.
const ROW_ELEMENTS: usize = 256 * 1024;
/// The most target pixels of a task.
const TASK_PIXELS: usize = 512;

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
struct Tensor {
    /// Rows and columns.
    size: [usize; 2],
    channels: usize,
    group_channels: usize,
}

/// Target pixels that use the same taps: a phase of rows by a phase of columns.
struct Lattice {
    rows: Phase,
    columns: Phase,
    /// Rows and columns of an image's target pixels.
    targets: [usize; 2],
    /// Terms of a sum, and these rounded up to what the unit takes at a time.
    terms: usize,
    padded: usize,
    /// Whether the channels that a tap reads follow those of the tap before it, in source and row.
    contiguous: bool,
    /// Whether a row is a pixel's channels of the source, as they lie there.
    in_place: bool,
    task_pixels: usize,
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
            sum.checked_add(lattice.padded.checked_mul(SIDE)?.checked_mul(blocks)?)
        })?;
        let mut rows = lattices.iter().map(|lattice| {
            let pixels = if lattice.in_place { SIDE } else { lattice.task_pixels.next_multiple_of(SIDE) };
            lattice.padded.checked_mul(pixels)
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
                    let (panel, later) = std::mem::take(&mut rest).split_at_mut(lattice.padded * SIDE);
                    jobs.push((lattice, [group, block], panel));
                    rest = later;
                }
            }
        }
        cpu.for_each(weight.len(), jobs.into_iter(), |(lattice, place, panel)| {
            let columns = (self.target.group_channels - place[1] * SIDE).min(SIDE);
            let depth = self.source.group_channels;
            panel[lattice.terms / 2 * 2 * SIDE..].fill(bf16::ZERO);
            let mut first = 0;
            for row in &lattice.rows.taps {
                for column in &lattice.columns.taps {
                    let weights = self.weights(weight, place, [row.kernel, column.kernel]);
                    pack_weights(&weights, first, [depth, columns], panel);
                    first += depth;
                }
            }
        });
    }

    pub(super) fn run(
        &self,
        cpu: &Cpu,
        (source, weight): (&[bf16], &[f32]),
        target: &mut [bf16],
        workspace: &mut [f32],
    ) {
        let (panels, rows) =
            bytemuck::cast_slice_mut::<f32, bf16>(aligned(workspace)).split_at_mut(self.panels);
        self.pack(cpu, weight, panels);
        if !self.complete {
            cpu.for_each(target.len(), target.chunks_mut(1 << 16), |chunk| chunk.fill(bf16::ZERO));
        }
        let (panels, target) = (&*panels, Shared::new(target));
        let mut at = 0;
        let mut tasks = Vec::new();
        for lattice in &self.phases {
            let pixels = self.problem.batch * lattice.targets[0] * lattice.targets[1];
            let firsts = (0..pixels).step_by(lattice.task_pixels);
            tasks.extend(firsts.map(|first| (lattice, at, first..pixels.min(first + lattice.task_pixels))));
            at += lattice.padded * self.target.group_channels.next_multiple_of(SIDE) * self.problem.groups;
        }
        let len = self.rows.next_multiple_of(2 * LINE);
        let work = self.problem.flops() as usize;
        cpu.for_each_with(
            work,
            rows.chunks_exact_mut(len),
            tasks.into_iter(),
            |rows, (lattice, at, part)| {
                let task = Task { of: self, lattice, source, panels: &panels[at..], target };
                // SAFETY: a plan was made because this machine has the unit.
                let ready = unsafe { self.unit.ready() };
                task.run(&ready, part, rows);
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
    let taps = rows.taps.len().checked_mul(columns.taps.len())?;
    let terms = taps.checked_mul(source.group_channels)?;
    let padded = terms.checked_next_multiple_of(unit.terms())?;
    let targets = [Lattice::targets(&rows, target.size[0]), Lattice::targets(&columns, target.size[1])];
    let adjacent = columns.taps.windows(2).all(|taps| taps[1].offset - taps[0].offset == 1);
    let one_tap = |phase: &Phase, axis: usize| {
        phase.taps.len() == 1
            && phase.taps[0].offset == 0
            && [phase.first, phase.step, phase.source_step] == [0, 1, 1]
            && source.size[axis] == target.size[axis]
    };
    let in_place = one_tap(&rows, 0) && one_tap(&columns, 1) && padded == source.group_channels;
    let pixels = problem.batch * targets[0] * targets[1];
    let most = (ROW_ELEMENTS / padded.max(1)).clamp(SIDE, TASK_PIXELS);
    // Even for all threads, and whole products.
    let tasks = pixels.div_ceil(most).next_multiple_of(cpu.threads());
    let task_pixels = pixels.div_ceil(tasks.max(1)).next_multiple_of(SIDE);
    let contiguous = adjacent && problem.groups == 1;
    Some(Lattice { rows, columns, targets, terms, padded, contiguous, in_place, task_pixels })
}

/// Some target pixels of a lattice.
struct Task<'a> {
    of: &'a Correlate,
    lattice: &'a Lattice,
    source: &'a [bf16],
    panels: &'a [bf16],
    target: Shared<'a, bf16>,
}

impl Task<'_> {
    fn run(&self, ready: &Ready, part: std::ops::Range<usize>, rows: &mut [bf16]) {
        let (of, lattice) = (self.of, self.lattice);
        let (count, padded, channels) = (part.len(), lattice.padded, of.target.group_channels);
        let pixels: Vec<Pixel> = part.clone().map(|index| lattice.pixel(index)).collect();
        let targets: Vec<usize> = pixels.iter().map(|pixel| self.target_of(pixel)).collect();
        let panel_len = padded * SIDE;
        let mut sums: Sums = [0.0; SIDE * SIDE];
        for group in 0..of.problem.groups {
            // The last rows are copied in any case, so that whole groups of rows can be read.
            let whole = if lattice.in_place { count / SIDE * SIDE } else { 0 };
            for (pixel, row) in pixels[whole..].iter().zip(rows.chunks_exact_mut(padded)) {
                self.gather(pixel, group, row);
            }
            for block in 0..channels.div_ceil(SIDE) {
                let index = group * channels.div_ceil(SIDE) + block;
                let panel = &self.panels[index * panel_len..][..panel_len];
                let columns = (channels - block * SIDE).min(SIDE);
                let channel = group * channels + block * SIDE;
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
                    assert!(a.len() >= (height.next_multiple_of(ROWS) - 1) * a_row + padded);
                    let factors = Factors {
                        a: a.as_ptr(),
                        a_row,
                        a_group: GROUP,
                        b: panel.as_ptr(),
                        b_pair: 2 * SIDE,
                        terms: padded,
                        segments: 1,
                        a_segment: 0,
                        b_segment: 0,
                    };
                    // SAFETY: the slice of `a` reaches to the end of the last row that is read, as asserted, and the panel has `padded`
                    // terms of all columns.
                    unsafe { ready.multiply(&factors, [height, columns], &mut sums) };
                    // SAFETY: places are those of pixels of the target, and `columns` channels of a group follow `channel`. Pixels of a
                    // lattice, and lattices, are different, so no other task writes to these pixels.
                    unsafe {
                        let to = self.target.pointer(channel);
                        ready.narrow(&sums, to, &targets[first..first + height], columns);
                    }
                }
            }
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

    /// Copies what a target pixel reads of a group: [row of taps][tap][channel], then zeros.
    fn gather(&self, pixel: &Pixel, group: usize, row: &mut [bf16]) {
        let (source, lattice) = (&self.of.source, self.lattice);
        let [height, width] = source.size;
        let depth = source.group_channels;
        let taps = &lattice.columns.taps;
        let (row, padding) = row.split_at_mut(lattice.terms);
        padding.fill(bf16::ZERO);
        let first_column = (pixel.numbers[1] * lattice.columns.source_step) as isize;
        for (tap, run) in lattice.rows.taps.iter().zip(row.chunks_exact_mut(taps.len() * depth)) {
            let source_row = (pixel.numbers[0] * lattice.rows.source_step) as isize + tap.offset;
            if source_row < 0 || source_row as usize >= height {
                run.fill(bf16::ZERO);
                continue;
            }
            let line = (pixel.image * height + source_row as usize) * width;
            if lattice.contiguous {
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
            for (tap, to) in taps.iter().zip(run.chunks_exact_mut(depth)) {
                let column = first_column + tap.offset;
                match column >= 0 && (column as usize) < width {
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
