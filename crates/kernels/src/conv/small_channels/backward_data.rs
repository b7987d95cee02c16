//! Backward-data: dy times the filters into a buffer, from which the elements of dx gather their taps.
//!
//! The buffer holds the products of a tile, a run of output rows: what each output sends back through each tap. It lies as
//! [output][tap] in channels-last and as [tap][output] where contiguous, as dy does. Each element of dx sums its taps in a
//! register and is read and written once a tile.

use std::ops::Range;

use pulp::{MemMask, Simd, WithSimd};

use super::kernel::{Block, block_rows, even_runs};
use super::{LINE, aligned, pack, place_in_filter, taps};
use crate::conv::plan::ConvKernel;
use crate::conv::problem::ConvProblem;
use crate::gemm::Update;
use crate::{Cpu, MemoryFormat, simd};

/// Backward-data of one problem.
pub(super) struct BackwardData {
    problem: ConvProblem,
    lanes: usize,
    workers: usize,
    /// Output rows of a tile.
    tile_rows: usize,
    /// From one row of the buffer to the next.
    pitch: usize,
    /// From one row of a block to the next in its left operand: outputs, or taps where contiguous.
    stride: usize,
    /// Offsets of each output channel in the left and the right operand.
    steps: Vec<[usize; 2]>,
}

/// Floats of the buffer that are aimed at: with the filters beside it, it should stay in an L2 cache of 1 MiB.
const TILE: usize = 1 << 17;

/// Floats of the buffer at most, where one output row needs more.
const LARGEST: usize = 1 << 24;

impl BackwardData {
    /// None if the buffer of one output row is too large.
    pub(super) fn new(problem: &ConvProblem, cpu: &Cpu) -> Option<BackwardData> {
        let lanes = simd::lanes(cpu.isa());
        let (t, k) = (taps(problem), problem.out_channels);
        let [oh, ow] = [problem.height.output(), problem.width.output()];
        let row = (t.next_multiple_of(lanes)).checked_mul(ow + lanes).filter(|&row| row <= LARGEST)?;
        let tile_rows = (TILE / row).clamp(1, oh);
        let panel = 2 * lanes;
        let (pitch, stride, steps) = match problem.format {
            MemoryFormat::ChannelsLast => {
                (t.next_multiple_of(lanes), k, (0..k).map(|k| [k, k * panel]).collect())
            }
            // The line more keeps the rows of neighbouring taps from falling into the same sets of the cache.
            MemoryFormat::Contiguous => (
                (tile_rows * ow).next_multiple_of(LINE) + LINE,
                1,
                (0..k).map(|k| [k * t, k * panel]).collect(),
            ),
        };
        let workers = cpu.threads().min(problem.batch * problem.height.input);
        Some(BackwardData { problem: *problem, lanes, workers, tile_rows, pitch, stride, steps })
    }

    /// Floats of the packed filters.
    fn filters_len(&self) -> usize {
        match self.problem.format {
            MemoryFormat::ChannelsLast => {
                self.problem.out_channels * taps(&self.problem).next_multiple_of(2 * self.lanes)
            }
            MemoryFormat::Contiguous => 0,
        }
    }

    /// Floats of the buffer.
    fn buffer_len(&self) -> usize {
        let rows = match self.problem.format {
            MemoryFormat::ChannelsLast => self.tile_rows * self.problem.width.output(),
            MemoryFormat::Contiguous => taps(&self.problem),
        };
        (rows * self.pitch).next_multiple_of(LINE)
    }

    /// Floats of dy packed for one block of outputs.
    fn panel_len(&self) -> usize {
        match self.problem.format {
            MemoryFormat::ChannelsLast => 0,
            MemoryFormat::Contiguous => (self.problem.out_channels * 2 * self.lanes).next_multiple_of(LINE),
        }
    }

    fn worker_len(&self) -> usize {
        self.buffer_len() + self.panel_len()
    }

    pub(super) fn workspace_len(&self) -> usize {
        LINE + self.filters_len().next_multiple_of(LINE) + self.workers * self.worker_len()
    }

    /// Input rows of each worker's images, cut from dx.
    fn bands<'a>(&self, dx: &'a mut [f32]) -> Vec<Vec<Band<'a>>> {
        let p = &self.problem;
        let height = p.height.input;
        let (line, planes) = match p.format {
            MemoryFormat::ChannelsLast => (p.width.input * p.in_channels, 1),
            MemoryFormat::Contiguous => (p.width.input, p.in_channels),
        };
        let per_worker = (p.batch * height).div_ceil(self.workers);
        let mut bands: Vec<Vec<Band>> = (0..self.workers).map(|_| Vec::new()).collect();
        for (image, dx) in dx.chunks_exact_mut(planes * height * line).enumerate() {
            let top = image * height;
            let workers = top / per_worker..(top + height).div_ceil(per_worker);
            for worker in workers.clone() {
                let rows =
                    (worker * per_worker).max(top) - top..((worker + 1) * per_worker - top).min(height);
                bands[worker].push(Band { image, rows, planes: Vec::with_capacity(planes) });
            }
            for plane in dx.chunks_exact_mut(height * line) {
                let mut rest = plane;
                for worker in workers.clone() {
                    let band = bands[worker].last_mut().expect("just pushed");
                    let (rows, others) = rest.split_at_mut(band.rows.len() * line);
                    band.planes.push(rows);
                    rest = others;
                }
            }
        }
        bands
    }
}

impl ConvKernel<f32> for BackwardData {
    fn run(&self, cpu: &Cpu, [dy, weight]: [&[f32]; 2], dx: &mut [f32], workspace: &mut [f32]) {
        let p = &self.problem;
        let (filters, scratch) = aligned(workspace).split_at_mut(self.filters_len().next_multiple_of(LINE));
        let t = taps(p);
        let filters = match p.format {
            MemoryFormat::Contiguous => weight,
            MemoryFormat::ChannelsLast => {
                let value = |k, tap| weight[k * t + place_in_filter(p, tap)];
                pack(filters, 2 * self.lanes, [p.out_channels, t], value);
                filters
            }
        };
        let tasks = self.bands(dx).into_iter().zip(scratch.chunks_exact_mut(self.worker_len()));
        cpu.for_each(p.flops() as usize, tasks, |(bands, scratch)| {
            let (buffer, panel) = scratch.split_at_mut(self.buffer_len());
            simd::run(cpu.isa(), Bands { backward: self, dy, filters, bands, buffer, panel });
        });
    }
}

/// Some rows of one image's dx: one slice of them, or one for each channel where contiguous.
struct Band<'a> {
    image: usize,
    rows: Range<usize>,
    planes: Vec<&'a mut [f32]>,
}

/// One worker's bands.
struct Bands<'a, 'b> {
    backward: &'a BackwardData,
    dy: &'a [f32],
    /// The weight where contiguous; else [panel of 2 vectors of taps][K][2 lanes].
    filters: &'a [f32],
    bands: Vec<Band<'b>>,
    buffer: &'a mut [f32],
    panel: &'a mut [f32],
}

impl WithSimd for Bands<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(mut self, simd: S) {
        let BackwardData { problem: p, tile_rows, .. } = self.backward;
        let h = &p.height;
        let y_image = p.output_len() / p.batch;
        for band in std::mem::take(&mut self.bands) {
            let dy = &self.dy[band.image * y_image..][..y_image];
            let Band { rows, mut planes, .. } = band;
            planes.iter_mut().for_each(|plane| plane.fill(0.0));
            // The output rows that read these input rows.
            let first = (rows.start + h.pad_before + 1).saturating_sub(h.kernel_span()).div_ceil(h.stride);
            let end = ((rows.end - 1 + h.pad_before) / h.stride + 1).min(h.output());
            for top in (first..end).step_by(*tile_rows) {
                let tile = top..(top + tile_rows).min(end);
                match p.format {
                    MemoryFormat::ChannelsLast => {
                        self.multiply_pixels(simd, dy, &tile);
                        self.gather_pixels(simd, &tile, &rows, planes[0]);
                    }
                    MemoryFormat::Contiguous => {
                        self.multiply_planes(simd, dy, &tile);
                        for (channel, plane) in planes.iter_mut().enumerate() {
                            self.gather_plane(simd, &tile, &rows, channel, plane);
                        }
                    }
                }
            }
        }
    }
}

impl Bands<'_, '_> {
    /// Fills the buffer, [output][tap], with the products of a tile.
    #[inline(always)]
    fn multiply_pixels<S: Simd>(&mut self, simd: S, dy: &[f32], tile: &Range<usize>) {
        let BackwardData { problem: p, pitch, stride, steps, .. } = self.backward;
        let (ow, k) = (p.width.output(), p.out_channels);
        let width = 2 * S::F32_LANES;
        let dy = &dy[tile.start * ow * k..tile.end * ow * k];
        for outputs in even_runs(tile.len() * ow, block_rows(S::F32_LANES)) {
            for (first, panel) in (0..*pitch).step_by(width).zip(self.filters.chunks_exact(k * width)) {
                simd.vectorize(Block {
                    a: &dy[outputs.start * k..],
                    rows: outputs.len(),
                    stride: *stride,
                    b: panel,
                    steps,
                    out: &mut self.buffer[outputs.start * pitch + first..],
                    pitch: *pitch,
                    columns: width.min(pitch - first),
                    update: Update::Overwrite,
                });
            }
        }
    }

    /// Fills the buffer, [tap][output], with the products of a tile.
    #[inline(always)]
    fn multiply_planes<S: Simd>(&mut self, simd: S, dy: &[f32], tile: &Range<usize>) {
        let BackwardData { problem: p, pitch, stride, steps, .. } = self.backward;
        let plane = p.height.output() * p.width.output();
        let (start, end) = (tile.start * p.width.output(), tile.end * p.width.output());
        let width = 2 * S::F32_LANES;
        for first in (start..end).step_by(width) {
            let columns = width.min(end - first);
            for (dy, to) in dy.chunks_exact(plane).zip(self.panel.chunks_exact_mut(width)) {
                to[..columns].copy_from_slice(&dy[first..first + columns]);
                to[columns..].fill(0.0);
            }
            for taps in even_runs(taps(p), block_rows(S::F32_LANES)) {
                simd.vectorize(Block {
                    a: &self.filters[taps.start..],
                    rows: taps.len(),
                    stride: *stride,
                    b: self.panel,
                    steps,
                    out: &mut self.buffer[taps.start * pitch + first - start..],
                    pitch: *pitch,
                    columns,
                    update: Update::Overwrite,
                });
            }
        }
    }

    /// The kernel rows through which output rows of the tile read input row `row`, each with the output row in the tile.
    fn kernel_rows(&self, row: usize, tile: &Range<usize>) -> impl Iterator<Item = (usize, usize)> {
        let h = self.backward.problem.height;
        let tile = tile.clone();
        (0..h.kernel).filter_map(move |r| {
            let place = (row + h.pad_before).checked_sub(r * h.dilation)?;
            let output = place / h.stride;
            (place.is_multiple_of(h.stride) && tile.contains(&output)).then(|| (r, output - tile.start))
        })
    }

    /// Adds what the tile sends back to the rows of dx, W x C each.
    ///
    /// Through one kernel row, an output reaches S * C elements of a dx row that lie together, or S runs of C where dilated.
    #[inline(always)]
    fn gather_pixels<S: Simd>(&self, simd: S, tile: &Range<usize>, rows: &Range<usize>, dx: &mut [f32]) {
        let BackwardData { problem: p, pitch, .. } = self.backward;
        let (w, c) = (&p.width, p.in_channels);
        let lanes = S::F32_LANES;
        let line = w.input * c;
        let step = w.stride * c;
        let (runs, run_len) = if w.dilation == 1 { (1, w.kernel * c) } else { (w.kernel, c) };
        let mut bases = Vec::with_capacity(p.height.kernel);
        for (row, dx) in rows.clone().zip(dx.chunks_exact_mut(line)) {
            bases.clear();
            let base = |(r, output)| output * w.output() * pitch + r * w.kernel * c;
            bases.extend(self.kernel_rows(row, tile).map(base));
            if bases.is_empty() {
                continue;
            }
            for (first, dx) in (0..).step_by(lanes).zip(dx.chunks_mut(lanes)) {
                let mut sum = simd.splat_f32s(0.0);
                for run in 0..runs {
                    // Lane l is element `place` + l of what the first output reaches.
                    let place = (w.pad_before * c + first) as isize - (run * w.dilation * c) as isize;
                    let from = (place + 1 - run_len as isize).max(0) as usize;
                    let end = (place + lanes as isize).max(0) as usize;
                    let outputs = from.div_ceil(step)..end.div_ceil(step).min(w.output());
                    for output in outputs {
                        let place = place - (output * step) as isize;
                        let (start, end) = ((-place).max(0), (run_len as isize - place).min(lanes as isize));
                        let mask = MemMask::new(simd.mask_between_m32s(start as u32, end as u32).mask());
                        let offset = (output * pitch + run * run_len) as isize + place;
                        for &base in &bases {
                            let from = self.buffer.as_ptr().wrapping_add(base).wrapping_offset(offset);
                            // SAFETY: the mask leaves the lanes of this run, which is inside the buffer.
                            sum = simd.add_f32s(sum, unsafe { simd.mask_load_ptr_f32s(mask, from) });
                        }
                    }
                }
                add(simd, dx, sum);
            }
        }
    }

    /// Adds what the tile sends back to the rows of one channel of dx.
    #[inline(always)]
    fn gather_plane<S: Simd>(
        &self,
        simd: S,
        tile: &Range<usize>,
        rows: &Range<usize>,
        channel: usize,
        dx: &mut [f32],
    ) {
        let BackwardData { problem: p, pitch, .. } = self.backward;
        let (h, w) = (&p.height, &p.width);
        let lanes = S::F32_LANES;
        let outputs = w.output() as isize;
        let mut bases = Vec::with_capacity(h.kernel);
        for (row, dx) in rows.clone().zip(dx.chunks_exact_mut(w.input)) {
            bases.clear();
            let base = |(r, output)| (channel * h.kernel + r) * w.kernel * pitch + output * w.output();
            bases.extend(self.kernel_rows(row, tile).map(base));
            if bases.is_empty() {
                continue;
            }
            // Columns that are `phase` modulo the stride are reached by the same taps.
            for phase in 0..w.stride.min(w.input) {
                let residue = (phase + w.pad_before) % w.stride;
                let dx = &mut dx[phase..];
                for first in (0..dx.len()).step_by(lanes * w.stride) {
                    let place = ((phase + first + w.pad_before) / w.stride) as isize;
                    let mut sum = simd.splat_f32s(0.0);
                    for s in (0..w.kernel).filter(|s| s * w.dilation % w.stride == residue) {
                        // The output of lane 0.
                        let place = place - (s * w.dilation / w.stride) as isize;
                        let (start, end) = ((-place).max(0), (outputs - place).min(lanes as isize));
                        if start >= end {
                            continue;
                        }
                        let mask = MemMask::new(simd.mask_between_m32s(start as u32, end as u32).mask());
                        for &base in &bases {
                            let from =
                                self.buffer.as_ptr().wrapping_add(base + s * pitch).wrapping_offset(place);
                            // SAFETY: the mask leaves lanes of an output row, which is inside the buffer.
                            sum = simd.add_f32s(sum, unsafe { simd.mask_load_ptr_f32s(mask, from) });
                        }
                    }
                    let dx = &mut dx[first..];
                    if w.stride == 1 {
                        let len = lanes.min(dx.len());
                        add(simd, &mut dx[..len], sum);
                    } else {
                        let mut values = [0.0; LINE];
                        simd.partial_store_f32s(&mut values[..lanes], sum);
                        for (dx, value) in dx.iter_mut().step_by(w.stride).zip(&values[..lanes]) {
                            *dx += value;
                        }
                    }
                }
            }
        }
    }
}

/// `to += values` for a slice of at most one vector.
#[inline(always)]
fn add<S: Simd>(simd: S, to: &mut [f32], values: S::f32s) {
    let mask = MemMask::new(simd.mask_between_m32s(0, to.len() as u32).mask());
    let to = to.as_mut_ptr();
    // SAFETY: the mask leaves the lanes inside the slice.
    unsafe {
        let sum = simd.add_f32s(values, simd.mask_load_ptr_f32s(mask, to));
        simd.mask_store_ptr_f32s(mask, to, sum);
    }
}
