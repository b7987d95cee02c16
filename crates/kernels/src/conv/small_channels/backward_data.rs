//! Backward-data: dy times the filters into a buffer, from which the elements of dx gather their taps.
//!
//! The buffer holds the products of a tile, a run of output rows: what each output sends back through each tap. Its layout is
//! [output][tap] in channels-last and [tap][output] where contiguous, like dy's. Each element of dx sums its taps in a
//! register and is read and written once a tile.

use std::ops::Range;

use pulp::{Simd, WithSimd};

use super::gather::Gather;
use super::kernel::{Ahead, OuterProductBlock, Steps, block_rows};
use super::{pack, place_in_filter, taps};
use crate::conv::even::even_parts;
use crate::conv::plan::TypedKernel;
use crate::conv::problem::ConvProblem;
use crate::conv::workspace::{LINE, aligned};
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
    steps: Steps,
    gather: Gather,
}

/// The size of the buffer to aim at, in floats: with the filters beside it, it should stay in an L2 cache of 1 MiB.
const TILE: usize = 1 << 17;

/// The most floats that one output row may take in the buffer, and the most elements of a row of dx.
const LARGEST: usize = 1 << 22;

impl BackwardData {
    /// `None` if one row is too large.
    pub(super) fn new(problem: &ConvProblem, cpu: &Cpu) -> Option<BackwardData> {
        let lanes = cpu.isa().lanes();
        let (t, k) = (taps(problem), problem.out_channels);
        let [oh, ow] = [problem.height.output(), problem.width.output()];
        let row = (t.next_multiple_of(lanes)).checked_mul(ow + lanes).filter(|&row| row <= LARGEST)?;
        (problem.width.input.checked_mul(problem.in_channels)).filter(|&line| line <= LARGEST)?;
        let tile_rows = (TILE / row).clamp(1, oh);
        let panel = 2 * lanes;
        let (pitch, stride, steps) = match problem.format {
            MemoryFormat::ChannelsLast => {
                (t.next_multiple_of(lanes), k, Steps::new((0..k).map(|k| [k, k * panel])))
            }
            // The extra cache line keeps the rows of neighbouring taps from falling into the same sets of the cache.
            MemoryFormat::Contiguous => (
                (tile_rows * ow).next_multiple_of(LINE) + LINE,
                1,
                Steps::new((0..k).map(|k| [k * t, k * panel])),
            ),
        };
        let workers = cpu.threads().min(problem.batch * problem.height.input);
        let gather = Gather::new(problem, lanes, pitch);
        Some(BackwardData { problem: *problem, lanes, workers, tile_rows, pitch, stride, steps, gather })
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

    /// Splits dx into each worker's bands of input rows.
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

impl TypedKernel<f32> for BackwardData {
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
                    MemoryFormat::ChannelsLast => self.multiply_pixels(simd, dy, &tile),
                    MemoryFormat::Contiguous => self.multiply_planes(simd, dy, &tile),
                }
                self.gather(simd, &tile, &rows, &mut planes);
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
        let dy = &dy[tile.start * ow * k..];
        for outputs in even_parts(tile.len() * ow, block_rows::<S>()) {
            // What the next block reads.
            let next = &dy[outputs.end * k..];
            let mut ahead = Ahead([&next[..next.len().min(outputs.len() * k)], &[]]);
            for (first, panel) in (0..*pitch).step_by(width).zip(self.filters.chunks_exact(k * width)) {
                simd.vectorize(OuterProductBlock {
                    a: &dy[outputs.start * k..],
                    rows: outputs.len(),
                    stride: *stride,
                    b: panel,
                    steps: steps.all(),
                    out: &mut self.buffer[outputs.start * pitch + first..],
                    pitch: *pitch,
                    columns: width.min(pitch - first),
                    update: Update::Overwrite,
                    streaming: None,
                    ahead: ahead.next(k),
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
                let dy = &dy[first..first + columns];
                let ((from, rest), (whole, _)) = (S::as_simd_f32s(dy), S::as_mut_simd_f32s(to));
                // Copied vector by vector: too few for a call of memcpy.
                for (to, from) in whole.iter_mut().zip(from) {
                    *to = *from;
                }
                to[columns - rest.len()..columns].copy_from_slice(rest);
                to[columns..].fill(0.0);
            }
            for taps in even_parts(taps(p), block_rows::<S>()) {
                simd.vectorize(OuterProductBlock {
                    a: &self.filters[taps.start..],
                    rows: taps.len(),
                    stride: *stride,
                    b: self.panel,
                    steps: steps.all(),
                    out: &mut self.buffer[taps.start * pitch + first - start..],
                    pitch: *pitch,
                    columns,
                    update: Update::Overwrite,
                    streaming: None,
                    ahead: &[],
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

    /// Adds the tile's products to these rows of dx.
    #[inline(always)]
    fn gather<S: Simd>(&self, simd: S, tile: &Range<usize>, rows: &Range<usize>, planes: &mut [&mut [f32]]) {
        let BackwardData { problem: p, pitch, gather, .. } = self.backward;
        let mut bases = Vec::with_capacity(p.height.kernel);
        for (channel, plane) in planes.iter_mut().enumerate() {
            let line = plane.len() / rows.len();
            for (row, dx) in rows.clone().zip(plane.chunks_exact_mut(line)) {
                bases.clear();
                bases.extend(self.kernel_rows(row, tile).map(|(r, output)| match p.format {
                    MemoryFormat::ChannelsLast => {
                        output * p.width.output() * pitch + r * p.width.kernel * p.in_channels
                    }
                    MemoryFormat::Contiguous => {
                        (channel * p.height.kernel + r) * p.width.kernel * pitch + output * p.width.output()
                    }
                }));
                if !bases.is_empty() {
                    gather.add(simd, self.buffer, &bases, dx);
                }
            }
        }
    }
}
