//! Backward-weights: dy transposed, times x in pairs of pixels.
//!
//! The batch is cut into bands: some rows of outputs of an image, or of all images if no output reads several rows. Of some bands in turn,
//! both factors of the products are written, and then multiplied. Each thread does so with bands of its own, as what another one has
//! written is slow to read, and the sums of all are added up at last. Only if the weight is larger than the factors, all threads write the
//! same bands, and multiply parts of the weight.
//!
//! A position is an output pixel of a band, or one of some pixels behind each row of outputs, where dy counts as zero. The pixels of x lie
//! as far apart as positions, with zeros where there is none, so what a tap reads for all positions in turn lies there in one piece: in pairs
//! that begin at even pixels, or in those that begin at odd ones. With a stride, pixels are sorted by their residues first.

use std::ops::Range;
use std::sync::Arc;

use half::bf16;

use super::pack::{Line, gather, pair_positions, transpose_places};
use super::taps::TapPlaces;
use super::unit::{Factors, GROUP, NOWHERE, ROWS, SECOND, SIDE, Unit};
use crate::Cpu;
use crate::conv::problem::ConvProblem;
use crate::conv::workspace::{LINE, aligned};
use crate::shared::Shared;
use crate::stream::{Ahead, prefetch_to_l2};

/// Elements of both factors that a thread writes before it multiplies them: they stay in its L2 cache.
const BANDS_ELEMENTS: usize = 256 * 1024;
/// Elements that all threads write together.
const LARGE_BANDS_ELEMENTS: usize = 4 * 1024 * 1024;

/// Positions that tiles multiply before others, if there are several taps.
const TILE_POSITIONS: usize = 256;
/// Positions that `vdpbf16ps` multiplies before others: the first-level cache holds what both factors have of them.
const DOT_POSITIONS: usize = 128;
/// The most pixels of a row where rows may be cut anywhere: an even number.
const SHORT_ROW: usize = 32;
/// Parts in which threads write a band's factors.
const PARTS: usize = 4;
/// From this number of channels on, it is made an odd multiple of [`SIDE`]: pairs a power of two apart would fall into few sets of a cache.
const MANY_CHANNELS: usize = 256;

/// The most taps of a task.
const MOST_TAPS_TOGETHER: usize = 128;

/// Floats from a product's sums to the next ones: of products that lie a power of two apart, the same elements would fall into one set of a
/// cache.
const PRODUCT: usize = SIDE * SIDE + LINE;

/// The weight gradient of one problem.
pub(super) struct WeightSums {
    unit: Unit,
    problem: ConvProblem,
    rows: TapPlaces,
    columns: TapPlaces,
    /// Positions of a row of outputs: an even number.
    width: usize,
    /// Images, or one that all rows of the batch are in, if no output reads several rows.
    images: usize,
    /// Rows of an image, the bands that they are cut into, and the most rows of a band.
    image_rows: usize,
    bands: usize,
    band_rows: usize,
    /// Lengths of the factors of a band.
    lens: Lens,
    /// The parts of the batch whose sums are computed apart, each by one thread; or one, whose sums all threads compute.
    owners: usize,
    /// Bands that are multiplied together.
    together: usize,
    /// Taps of a task.
    taps_together: usize,
    /// Blocks of output channels that are multiplied with one of input channels after the other.
    outputs_together: usize,
    /// The places of an output channel's sums among the products of a task, in the order of its weights.
    places: Arc<[i32]>,
}

/// Lengths of the factors of a band, in elements.
#[derive(Clone, Copy, Default)]
struct Lens {
    /// Positions: whole terms of the unit.
    positions: usize,
    /// Channels of dy with some that stand for none, and of x.
    outputs: usize,
    inputs: usize,
    /// Of the pairs of one parity of a residue of rows and columns: of all rows, and what is behind them.
    plane: usize,
    dy: usize,
    x: usize,
}

impl WeightSums {
    pub(super) fn new(problem: &ConvProblem, unit: Unit, cpu: &Cpu) -> Option<WeightSums> {
        let problem = &in_short_rows(problem);
        // From the padded beginning of x on.
        let [rows, columns] = [&problem.height, &problem.width].map(|axis| {
            let offsets: Vec<isize> = (0..axis.kernel).map(|tap| (tap * axis.dilation) as isize).collect();
            TapPlaces::new(&offsets, axis.stride)
        });
        // Positions behind a row of outputs read zeros before the next row of x, or after this one.
        let axis = &problem.width;
        let pixels = axis.input.checked_add(axis.pad_before)?.div_ceil(axis.stride);
        let read = axis.output().checked_add(columns.reach())?;
        let width = read.min(pixels).max(read - (axis.pad_before / axis.stride).min(columns.reach()));
        let mut sums = WeightSums {
            unit,
            problem: *problem,
            rows,
            columns,
            width: width.checked_next_multiple_of(2)?,
            images: problem.batch,
            image_rows: problem.height.output(),
            bands: 1,
            band_rows: 1,
            lens: Lens::default(),
            owners: 1,
            together: 1,
            taps_together: (problem.height.kernel * problem.width.kernel).min(MOST_TAPS_TOGETHER),
            outputs_together: 1,
            places: Arc::new([]),
        };
        if sums.rows.reach() == 0 {
            (sums.images, sums.image_rows) = (1, problem.batch.checked_mul(sums.image_rows)?);
        }
        let factors = sums.lens_of(sums.image_rows)?.band().checked_mul(sums.images)?;
        let weight = sums.tasks().checked_mul(sums.products_len())?;
        // In bytes, factors take half of that.
        let elements = match 4 * weight <= factors {
            true => {
                sums.owners = cpu.threads();
                BANDS_ELEMENTS
            }
            false => LARGE_BANDS_ELEMENTS,
        };
        sums.cut(elements)?;
        let all = sums.bands.checked_mul(sums.images)?;
        sums.owners = sums.owners.min(all);
        if sums.owners < cpu.threads() {
            sums.taps_together = sums.taps_of_task(cpu);
        }
        let each = all.div_ceil(sums.owners);
        let together = (elements / sums.lens.band()).clamp(1, each);
        sums.together = each.div_ceil(each.div_ceil(together));
        sums.outputs_together = (BANDS_ELEMENTS / (SIDE * sums.lens.positions * sums.together)).max(1);
        sums.places = sums.places()?;
        Some(sums)
    }

    /// Cuts images into bands. A band has at most this many elements, unless a single row has more. Each owner gets the same number of
    /// bands. Where several numbers of bands are possible, this takes the one that fills bands up with the fewest zeros.
    fn cut(&mut self, elements: usize) -> Option<()> {
        let (rows, step) = (self.image_rows, self.owners.div_ceil(self.images));
        let fewest = self.lens_of(rows)?.band().div_ceil(elements).next_multiple_of(step).min(rows);
        let all_positions = |bands: usize| match self.lens_of(rows.div_ceil(bands)) {
            Some(lens) => bands * lens.positions,
            None => usize::MAX,
        };
        let numbers = (fewest..=rows.min(2 * fewest)).step_by(step);
        self.bands = numbers.min_by_key(|&bands| all_positions(bands))?;
        self.band_rows = rows.div_ceil(self.bands);
        self.lens = self.lens_of(self.band_rows)?;
        Some(())
    }

    /// The lengths of a band that has this number of rows of outputs.
    fn lens_of(&self, rows: usize) -> Option<Lens> {
        let problem = &self.problem;
        let positions = rows.checked_mul(self.width)?.checked_next_multiple_of(GROUP)?;
        // Products of a group's last channels may read some that stand for no channel.
        let outputs = problem.out_channels.checked_next_multiple_of(SIDE)?.checked_add(ROWS)?;
        let inputs = problem.in_channels.checked_next_multiple_of(ROWS)?;
        let inputs = if inputs < MANY_CHANNELS { inputs } else { (inputs.div_ceil(SIDE) | 1) * SIDE };
        let lines = rows.checked_add(self.rows.reach())?.checked_mul(self.width)?;
        // Behind the last row of a plane, taps read zeros, and so do positions and products of the last channels behind the last plane.
        let behind = self.columns.reach().checked_next_multiple_of(2)?;
        let plane = lines.checked_add(behind)?.checked_mul(inputs)?;
        let after = GROUP.checked_mul(inputs)?.checked_add(2 * SIDE)?;
        let x = plane.checked_mul(self.planes())?.checked_add(after)?.checked_next_multiple_of(2 * LINE)?;
        let dy = positions.checked_mul(outputs)?;
        dy.checked_add(x).map(|_| Lens { positions, outputs, inputs, plane, dy, x })
    }

    /// Residues of rows and columns, each with the parities of pairs.
    fn planes(&self) -> usize {
        self.rows.residues.len() * self.columns.residues.len() * self.parities()
    }

    fn parities(&self) -> usize {
        if self.columns.reads(1) { 2 } else { 1 }
    }

    /// In floats.
    pub(super) fn workspace_len(&self) -> Option<usize> {
        self.owner_len()?.checked_mul(self.owners)?.checked_add(LINE)
    }

    /// Floats of an owner's factors and products.
    fn owner_len(&self) -> Option<usize> {
        let bands = self.lens.band().checked_mul(self.together)? / 2;
        bands.checked_add(self.tasks().checked_mul(self.products_len())?)?.checked_next_multiple_of(LINE)
    }

    /// Floats of the products of a task.
    fn products_len(&self) -> usize {
        self.taps_together.div_ceil(self.taps_of_product()) * PRODUCT
    }

    /// Blocks of output channels, blocks of input channels, and parts of the taps; of each group.
    fn blocks(&self) -> [usize; 3] {
        let problem = &self.problem;
        let [outputs, inputs] = [problem.group_out_channels(), problem.group_in_channels()];
        [outputs.div_ceil(SIDE), inputs.div_ceil(SIDE), self.taps().div_ceil(self.taps_together)]
    }

    /// What products are computed together.
    fn tasks(&self) -> usize {
        self.problem.groups * self.blocks().iter().product::<usize>()
    }

    fn products(&self, task: usize) -> Products<'_> {
        let [outputs, inputs, parts] = self.blocks();
        let (place, part) = (task / parts, task % parts * self.taps_together);
        let (group, place) = (place / (outputs * inputs), place % (outputs * inputs));
        // Some blocks of outputs with one of inputs after the other: what is read of dy stays in the L2 cache.
        let first = place / (self.outputs_together * inputs) * self.outputs_together;
        let (place, count) = (place - first * inputs, (outputs - first).min(self.outputs_together));
        let (output, input) = ((first + place % count) * SIDE, place / count * SIDE);
        let taps = part..self.taps().min(part + self.taps_together);
        Products { of: self, group, output, input, taps }
    }

    pub(super) fn run(&self, cpu: &Cpu, operands: [&[bf16]; 2], dweight: &mut [f32], workspace: &mut [f32]) {
        let len = self.owner_len().expect("the plan has found that it fits");
        let halves = self.together * self.lens.band() / 2;
        let all = self.images * self.bands;
        let each = all.div_ceil(self.owners);
        let work = self.problem.flops() as usize;
        let owners = &mut aligned(workspace)[..self.owners * len];
        let owned = owners.chunks_exact_mut(len).enumerate();
        let owned =
            owned.map(|(owner, memory)| ((owner * each).min(all)..((owner + 1) * each).min(all), memory));
        let accumulate = |(bands, memory): (Range<usize>, &mut [f32]), work: usize| {
            let (factors, sums) = memory.split_at_mut(halves);
            self.accumulate((cpu, work), operands, bands, (bytemuck::cast_slice_mut(factors), sums));
        };
        match self.owners {
            // All threads help.
            1 if cpu.threads() > 1 => owned.for_each(|owned| accumulate(owned, work)),
            _ => cpu.for_each(work, owned, |owned| accumulate(owned, 0)),
        }
        let (owners, gradient) = (&*owners, Shared::new(dweight));
        cpu.for_each(self.owners * self.problem.weight_len(), 0..self.tasks(), |task| {
            for (owner, memory) in owners.chunks_exact(len).enumerate() {
                let sums = &memory[halves + task * self.products_len()..][..self.products_len()];
                self.products(task).write(sums, gradient, owner == 0);
            }
        });
    }

    /// Computes the sums of some bands. `work` is a measure of it, or 0 for that of one thread.
    fn accumulate(
        &self,
        (cpu, work): (&Cpu, usize),
        [x, dy]: [&[bf16]; 2],
        bands: Range<usize>,
        (factors, sums): (&mut [bf16], &mut [f32]),
    ) {
        let band_len = self.lens.band();
        if bands.is_empty() {
            sums.fill(0.0);
        }
        for first in bands.clone().step_by(self.together) {
            let count = (bands.end - first).min(self.together);
            let parts = self.parts(first..first + count, factors);
            cpu.for_each(work, parts.into_iter(), |part| match part {
                Part::Dy { band, first, to } => self.transpose(dy, &band, first, to),
                Part::X { band, plane, first, to } => self.pair(x, &band, plane, first, to),
            });
            let factors = &factors[..count * band_len];
            let segments: &[[usize; 2]] = &(0..count).map(|band| [band * band_len; 2]).collect::<Vec<_>>();
            let tasks = sums.chunks_exact_mut(self.products_len()).enumerate();
            let add = |task: usize, sums: &mut [f32], ahead: &mut Ahead<2>| {
                self.products(task).add(sums, (factors, segments), first > bands.start, ahead);
            };
            if work == 0 {
                let next = first + count..bands.end.min(first + 2 * count);
                let ahead = &mut self.ahead([x, dy], next);
                tasks.take(self.tasks()).for_each(|(task, sums)| add(task, sums, ahead));
            } else {
                cpu.for_each(work, tasks.take(self.tasks()), |(task, sums)| {
                    add(task, sums, &mut Ahead::nothing());
                });
            }
        }
    }

    /// What the products of some bands fetch meanwhile: what the next ones will be written from.
    fn ahead(&self, tensors: [&[bf16]; 2], next: Range<usize>) -> Ahead<2> {
        let all = self.images * self.bands;
        let part = |tensor: &[bf16]| {
            let [start, end] = [next.start, next.end].map(|band| tensor.len() * band / all);
            (tensor.as_ptr().wrapping_add(start), end.saturating_sub(start))
        };
        let steps = self.together * self.lens.positions.div_ceil(self.positions());
        Ahead::of(tensors.map(part), self.tasks() * steps)
    }

    fn taps(&self) -> usize {
        self.problem.height.kernel * self.problem.width.kernel
    }

    /// Positions that are multiplied before others.
    fn positions(&self) -> usize {
        match self.unit {
            Unit::Dot => DOT_POSITIONS,
            Unit::Tiles if self.taps_together > self.taps_of_product() => TILE_POSITIONS,
            Unit::Tiles => usize::MAX,
        }
    }

    /// Taps whose sums are those of one product: with few input channels, two share its columns.
    fn taps_of_product(&self) -> usize {
        if self.problem.group_in_channels() <= ROWS { 2 } else { 1 }
    }

    /// See the field. A task of fewer channels or taps has the places of the first ones.
    fn places(&self) -> Option<Arc<[i32]>> {
        i32::try_from(self.products_len()).ok()?;
        let of_product = self.taps_of_product();
        let place =
            |input: usize, tap: usize| (tap / of_product * PRODUCT + tap % of_product * ROWS + input) as i32;
        let inputs = self.problem.group_in_channels().min(SIDE);
        Some(
            (0..inputs).flat_map(|input| (0..self.taps_together).map(move |tap| place(input, tap))).collect(),
        )
    }

    /// Taps of a task if all threads compute the same sums: few enough to have work for all.
    fn taps_of_task(&self, cpu: &Cpu) -> usize {
        let (tasks, of_product) = (self.tasks(), self.taps_of_product());
        let products = if tasks < 2 * cpu.threads() {
            self.taps() / of_product / (4 * cpu.threads())
        } else {
            self.taps()
        };
        (products.max(1) * of_product).min(self.taps_together)
    }

    /// A band by number: bands of an image differ by one row at most.
    fn band(&self, index: usize) -> Band {
        let (image, band) = (index / self.bands, index % self.bands);
        let start = |band: usize| band * self.image_rows / self.bands;
        Band { image, rows: start(band)..start(band + 1) }
    }

    /// The parts of some bands' factors that a thread writes at a time.
    fn parts<'a>(&self, bands: Range<usize>, memory: &'a mut [bf16]) -> Vec<Part<'a>> {
        let mut parts = Vec::new();
        for (index, memory) in bands.zip(memory.chunks_exact_mut(self.lens.band())) {
            let band = self.band(index);
            let (dy, x) = memory.split_at_mut(self.lens.dy);
            let few = (self.lens.positions / GROUP).div_ceil(PARTS);
            for (part, to) in dy.chunks_mut(few * GROUP * self.lens.outputs).enumerate() {
                parts.push(Part::Dy { band: band.clone(), first: part * few * GROUP, to });
            }
            let lines = self.band_rows + self.rows.reach();
            let (planes, after) = x.split_at_mut(self.planes() * self.lens.plane);
            after.fill(bf16::ZERO);
            for (plane, lines_of) in planes.chunks_exact_mut(self.lens.plane).enumerate() {
                let (few, line) = (lines.div_ceil(PARTS), self.width * self.lens.inputs);
                let (lines_of, behind) = lines_of.split_at_mut(lines * line);
                behind.fill(bf16::ZERO);
                for (part, to) in lines_of.chunks_mut(few * line).enumerate() {
                    parts.push(Part::X { band: band.clone(), plane, first: part * few, to });
                }
            }
        }
        parts
    }

    /// dy at some positions from `first` on: [group][channel][position], with zeros where there is no output.
    fn transpose(&self, dy: &[bf16], band: &Band, first: usize, to: &mut [bf16]) {
        let k = self.problem.out_channels;
        let (outputs, pixels) = (self.image_rows, self.problem.width.output());
        let [mut row, mut column] = [first / self.width, first % self.width];
        for to in to.chunks_exact_mut(self.lens.outputs * GROUP) {
            let mut places = [NOWHERE; GROUP];
            for place in &mut places {
                if row < band.rows.len() && column < pixels {
                    *place = ((band.image * outputs + band.rows.start + row) * pixels + column) * k;
                }
                column += 1;
                if column == self.width {
                    (row, column) = (row + 1, 0);
                }
            }
            transpose_places(dy, &places, k, to);
        }
    }

    /// Rows of x from `first` on in one plane: [row][pair][channel][pixel of the pair].
    fn pair(&self, x: &[bf16], band: &Band, plane: usize, first: usize, to: &mut [bf16]) {
        let (height, width, channels) = (&self.problem.height, &self.problem.width, self.problem.in_channels);
        let (parity, plane) = (plane % self.parities(), plane / self.parities());
        let residue = self.columns.residues[plane % self.columns.residues.len()];
        let row_residue = self.rows.residues[plane / self.columns.residues.len()];
        // The positions whose pixels lie in a row.
        let position =
            |pixel: usize| (pixel + width.pad_before).saturating_sub(residue).div_ceil(width.stride);
        let inside = position(0).min(self.width)..position(width.input).min(self.width);
        let pixel = (inside.start * width.stride + residue).saturating_sub(width.pad_before);
        let line_len = width.input * channels;
        for (index, to) in to.chunks_exact_mut(self.width * self.lens.inputs).enumerate() {
            // A band with fewer rows of outputs is written as if it had all.
            let output = band.rows.start + first + index;
            let (image, output) = match self.images == self.problem.batch {
                true => (band.image, output),
                false => (output / height.output(), output % height.output()),
            };
            let row = (output * height.stride + row_residue).checked_sub(height.pad_before);
            let row = row.filter(|&row| row < height.input && image < self.problem.batch);
            let line = row.map(|row| &x[(image * height.input + row) * line_len..][..line_len]);
            let pixels = line.and_then(|line| line.get(pixel * channels..)).unwrap_or_default();
            let inside = if pixels.is_empty() { 0..0 } else { inside.clone() };
            let line = Line { pixels, step: width.stride * channels, inside, count: channels };
            pair_positions(&line, parity, self.lens.inputs, to);
        }
    }
}

/// The same computation with rows of few pixels, where each output reads one pixel: images follow one another, so that no row ends with
/// positions that are no outputs.
fn in_short_rows(problem: &ConvProblem) -> ConvProblem {
    if !problem.reads_one_pixel() {
        return *problem;
    }
    let pixels = problem.batch * problem.height.input * problem.width.input;
    let width = (2..=SHORT_ROW).rev().step_by(2).find(|&width| pixels.is_multiple_of(width));
    let rows = width.and_then(|width| {
        let rows = problem.with(|spec| {
            spec.batch = 1;
            (spec.height.input, spec.width.input) = (pixels / width, width);
        });
        rows.ok()
    });
    rows.unwrap_or(*problem)
}

impl Lens {
    /// Elements of both factors of a band.
    fn band(&self) -> usize {
        self.x + self.dy
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
    /// Positions of dy from this one on.
    Dy { band: Band, first: usize, to: &'a mut [bf16] },
    /// Rows of a plane of x from this one on.
    X { band: Band, plane: usize, first: usize, to: &'a mut [bf16] },
}

/// The products of some output channels of a group with some of its input channels, as some taps read them.
struct Products<'a> {
    of: &'a WeightSums,
    group: usize,
    /// The first of 32 output channels, and of 32 input channels, within the group.
    output: usize,
    input: usize,
    /// Taps by number: row by row.
    taps: Range<usize>,
}

/// The factors of some bands, and where both of each band begin.
type Bands<'a> = (&'a [bf16], &'a [[usize; 2]]);

impl Products<'_> {
    fn outputs(&self) -> usize {
        (self.of.problem.group_out_channels() - self.output).min(SIDE)
    }

    fn inputs(&self) -> Range<usize> {
        self.input..self.of.problem.group_in_channels().min(self.input + SIDE)
    }

    /// Computes the sums of the bands, or adds them.
    fn add(
        &self,
        sums: &mut [f32],
        (factors, all_segments): Bands<'_>,
        mut adds: bool,
        ahead: &mut Ahead<2>,
    ) {
        let of = self.of;
        // SAFETY: a plan was made because this machine has the unit.
        let ready = unsafe { of.unit.ready() };
        let (of_product, shape) = (of.taps_of_product(), [self.outputs(), self.inputs().len()]);
        let positions = of.positions().min(of.lens.positions);
        let bands = of.positions() / of.lens.positions;
        for segments in all_segments.chunks(bands.max(1)) {
            for start in (0..of.lens.positions).step_by(positions) {
                let part = start..of.lens.positions.min(start + positions);
                let taps = self.taps.clone().step_by(of_product);
                for (tap, sums) in taps.zip(sums.chunks_exact_mut(PRODUCT)) {
                    let taps = [tap, (tap + of_product).min(self.taps.end) - 1];
                    let (factors, columns) = self.factors(taps, shape, (factors, segments), part.clone());
                    if adds {
                        // The next product's.
                        prefetch_to_l2(sums.as_ptr().wrapping_add(PRODUCT), SIDE * SIDE);
                    }
                    ahead.step();
                    let sums = sums.first_chunk_mut().expect("a product has room for its sums");
                    // SAFETY: `factors` has checked what is read.
                    unsafe { ready.multiply(&factors, [shape[0], columns], (sums, adds)) };
                }
                adds = true;
            }
        }
    }

    /// Writes sums to the gradient, or adds them to it.
    fn write(&self, products: &[f32], gradient: Shared<'_, f32>, stores: bool) {
        let (of, problem, inputs) = (self.of, &self.of.problem, self.inputs());
        let (c, all_taps, count) = (problem.group_in_channels(), of.taps(), self.taps.len());
        for row in 0..self.outputs() {
            let start = (self.group * problem.group_out_channels() + self.output + row) * c * all_taps;
            let sums = &products[row * SIDE..];
            if count == all_taps {
                // SAFETY: these are weights, and no other task has the same channels.
                let to = unsafe { gradient.part(start + inputs.start * count, inputs.len() * count) };
                gather(sums, &of.places, to, stores);
                continue;
            }
            for (input, places) in inputs.clone().zip(of.places.chunks_exact(of.taps_together)) {
                // SAFETY: these are weights, and no other task has the same channels and taps.
                let to = unsafe { gradient.part(start + input * all_taps + self.taps.start, count) };
                gather(sums, places, to, stores);
            }
        }
    }

    /// The factors of the product for one tap, or for two, over some positions of some bands, and its columns. All that they tell can be
    /// read.
    fn factors<'b>(
        &'b self,
        taps: [usize; 2],
        [outputs, inputs]: [usize; 2],
        (bands, segments): Bands<'b>,
        positions: Range<usize>,
    ) -> (Factors<'b>, usize) {
        let (of, lens) = (self.of, &self.of.lens);
        let output = self.group * of.problem.group_out_channels() + self.output;
        let input = self.group * of.problem.group_in_channels() + self.input;
        let start = |tap: usize| {
            let columns = of.columns.taps.len();
            let ([row_residue, row], [residue, pixel]) =
                (of.rows.taps[tap / columns], of.columns.taps[tap % columns]);
            // With one parity, pairs begin at even pixels.
            let plane = (row_residue * of.columns.residues.len() + residue) * of.parities() + pixel % 2;
            let position = row * of.width + pixel / 2 * 2 + positions.start;
            lens.dy + plane * lens.plane + position * lens.inputs + 2 * input
        };
        let a = positions.start * lens.outputs + output * GROUP;
        let [b, second] = taps.map(start);
        let (b_second, columns) = match taps[0] == taps[1] {
            true => (SECOND, inputs),
            false => (second as isize - b as isize, ROWS + inputs),
        };
        let band_len = lens.band();
        assert!(positions.end <= lens.positions && output + outputs.next_multiple_of(ROWS) <= lens.outputs);
        for b in [b, b.wrapping_add_signed(b_second)].into_iter().take(columns.div_ceil(ROWS)) {
            assert!(b + (positions.len() / 2 - 1) * 2 * lens.inputs + 2 * ROWS <= band_len);
        }
        assert!(segments.iter().all(|segment| segment[0].max(segment[1]) + band_len <= bands.len()));
        let factors = Factors {
            a: bands[a..].as_ptr(),
            a_row: GROUP,
            a_group: lens.outputs * GROUP,
            b: bands[b..].as_ptr(),
            b_pair: 2 * lens.inputs,
            b_second,
            terms: positions.len(),
            segments,
        };
        (factors, columns)
    }
}
