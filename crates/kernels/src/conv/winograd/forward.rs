//! Forward over blocks of tiles, generic over the filter and the vector type.

use pulp::{Simd, WithSimd};

use super::geometry::{Geometry, SKEW};
use super::transforms::{Filter, POINTS};
use crate::Cpu;
use crate::conv::plan::ConvKernel;
use crate::conv::problem::ConvProblem;
use crate::simd;

/// Which convolution the tiles compute.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Direction {
    Forward,
    /// Forward of dy with the filters turned round and channels exchanged.
    BackwardData,
}

/// Tiles that the matrix kernel multiplies at once.
const ROWS: usize = 8;

/// A convolution of N x H x W x C images to N x OH x OW x K by tiles of `F`.
pub(super) struct Tiles<F> {
    geometry: Geometry<F>,
    direction: Direction,
    lanes: usize,
    workers: usize,
    /// Rows of tiles that are one block.
    block_rows: usize,
}

impl<F> std::ops::Deref for Tiles<F> {
    type Target = Geometry<F>;

    fn deref(&self) -> &Geometry<F> {
        &self.geometry
    }
}

impl<F: Filter> Tiles<F> {
    pub(super) fn new(problem: &ConvProblem, direction: Direction, cpu: &Cpu) -> Self {
        let mut geometry = Geometry::of(problem);
        if direction == Direction::BackwardData {
            geometry = Geometry {
                input: geometry.output,
                output: geometry.input,
                padding: geometry.padding.map(|pad| 2 - pad),
                channels: geometry.outputs,
                outputs: geometry.channels,
                ..geometry
            };
        }
        let lanes = simd::lanes(cpu.isa());
        let mut tiles = Tiles { geometry, direction, lanes, workers: 1, block_rows: 1 };
        // Transformed input of a block and one panel of filters share the L2 cache, taken as 1 MiB.
        const L2: usize = 1 << 18;
        let points = tiles.points();
        let panel = points * tiles.filter_stride();
        let per_tile = points * (tiles.padded_channels() + 2 * lanes);
        let fit = (L2.saturating_sub(panel) * 3 / 4 / per_tile).clamp(2 * ROWS, 96);
        tiles.block_rows = (fit / tiles.tile_columns()).clamp(1, tiles.units());
        tiles.workers = cpu.threads().min(tiles.units().div_ceil(tiles.block_rows));
        tiles
    }

    fn padded_channels(&self) -> usize {
        self.channels.next_multiple_of(self.lanes)
    }

    fn panels(&self) -> usize {
        self.outputs.div_ceil(2 * self.lanes)
    }

    /// Floats of one point's filters for one panel of outputs.
    fn filter_stride(&self) -> usize {
        self.padded_channels() * 2 * self.lanes + SKEW
    }

    /// Tiles of a block, rounded up to what the matrix kernel takes.
    fn block_tiles(&self) -> usize {
        (self.block_rows * self.tile_columns()).next_multiple_of(ROWS)
    }

    /// Floats of one point's inputs of a block.
    fn input_stride(&self) -> usize {
        self.block_tiles() * self.padded_channels() + SKEW
    }

    /// Floats of one point's products of a block with one panel.
    fn product_stride(&self) -> usize {
        self.block_tiles() * 2 * self.lanes + SKEW
    }

    fn filters_len(&self) -> usize {
        self.panels() * self.points() * self.filter_stride()
    }

    fn worker_len(&self) -> usize {
        self.points() * (self.input_stride() + self.product_stride())
    }

    pub(super) fn workspace_len(&self) -> usize {
        self.filters_len() + self.workers * self.worker_len()
    }
}

impl<F: Filter + Send + Sync> ConvKernel<f32> for Tiles<F> {
    fn run(&self, cpu: &Cpu, [x, weight]: [&[f32]; 2], output: &mut [f32], workspace: &mut [f32]) {
        let (filters, scratch) = workspace.split_at_mut(self.filters_len());
        let panel_len = self.points() * self.filter_stride();
        let work = output.len() * self.channels;
        cpu.for_each(work, filters.chunks_mut(panel_len).enumerate(), |(panel, filters)| {
            simd::run(cpu.isa(), Filters { tiles: self, weight, panel, filters });
        });
        let filters = &*filters;
        let row_len = self.output[1] * self.outputs;
        let units: Vec<&mut [f32]> = output
            .chunks_mut(self.output[0] * row_len)
            .flat_map(|image| image.chunks_mut(F::OUTPUTS * row_len))
            .collect();
        let mut blocks = Vec::new();
        let mut first = 0;
        let mut rest = units.into_iter();
        while first < self.units() {
            let block: Vec<&mut [f32]> = rest.by_ref().take(self.block_rows).collect();
            let count = block.len();
            blocks.push((first, block));
            first += count;
        }
        let per_worker = blocks.len().div_ceil(self.workers);
        let mut blocks = blocks.into_iter();
        let tasks = scratch
            .chunks_mut(self.worker_len())
            .map(|scratch| (blocks.by_ref().take(per_worker).collect::<Vec<_>>(), scratch));
        cpu.for_each(work, tasks, |(blocks, scratch)| {
            let (inputs, products) = scratch.split_at_mut(self.points() * self.input_stride());
            for (first, rows) in blocks {
                simd::run(cpu.isa(), Block { tiles: self, x, filters, first, rows, inputs, products });
            }
        });
    }
}

/// Transforms the filters of one panel: U[point][channel][2 lanes].
struct Filters<'a, F> {
    tiles: &'a Tiles<F>,
    weight: &'a [f32],
    panel: usize,
    filters: &'a mut [f32],
}

impl<F: Filter> WithSimd for Filters<'_, F> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Filters { tiles, weight, panel, filters } = self;
        let lanes = S::F32_LANES;
        let first = panel * 2 * lanes;
        let stride = tiles.filter_stride();
        let (channels, outputs) = (tiles.channels, tiles.outputs);
        // The nine taps of one channel for one vector of outputs.
        let mut taps = [[0.0f32; 64]; 9];
        for channel in 0..tiles.padded_channels() {
            for half in 0..2 {
                for lane in 0..lanes {
                    let k = first + half * lanes + lane;
                    let inside = channel < channels && k < outputs;
                    for tap in 0..9 {
                        taps[tap][lane] = match tiles.direction {
                            _ if !inside => 0.0,
                            Direction::Forward => weight[(k * channels + channel) * 9 + tap],
                            Direction::BackwardData => weight[(channel * outputs + k) * 9 + 8 - tap],
                        };
                    }
                }
                let tap = |r: usize, s: usize| simd.partial_load_f32s(&taps[3 * r + s][..lanes]);
                let zero = simd.splat_f32s(0.0);
                let mut columns = [[zero; 3]; POINTS];
                for s in 0..3 {
                    let transformed = F::filter(simd, [tap(0, s), tap(1, s), tap(2, s)]);
                    for i in 0..F::INPUTS {
                        columns[i][s] = transformed[i];
                    }
                }
                for i in 0..F::INPUTS {
                    let transformed = F::filter(simd, columns[i]);
                    for j in 0..F::INPUTS {
                        let place = (i * F::INPUTS + j) * stride + channel * 2 * lanes + half * lanes;
                        simd.partial_store_f32s(&mut filters[place..place + lanes], transformed[j]);
                    }
                }
            }
        }
    }
}

/// One block of tile rows, from input to output.
struct Block<'a, 'b, F> {
    tiles: &'a Tiles<F>,
    x: &'a [f32],
    filters: &'a [f32],
    /// The first row of tiles, counted over all images.
    first: usize,
    /// Output of each row of tiles.
    rows: Vec<&'b mut [f32]>,
    inputs: &'a mut [f32],
    products: &'a mut [f32],
}

impl<F: Filter> WithSimd for Block<'_, '_, F> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(mut self, simd: S) {
        let tiles = self.tiles;
        let columns = tiles.tile_columns();
        let count = self.rows.len() * columns;
        let (lanes, stride) = (S::F32_LANES, tiles.input_stride());
        for tile in 0..count {
            // Inputs of tiles lie as [point][tile / ROWS][channel / lanes][tile % ROWS][lane].
            let group = (tile / ROWS) * ROWS * tiles.padded_channels() + (tile % ROWS) * lanes;
            let unit = [self.first + tile / columns, tile % columns];
            let place = |vector| group + vector * ROWS * lanes;
            tiles.geometry.transform_input(simd, self.x, unit, self.inputs, stride, place);
        }
        for panel in 0..tiles.panels() {
            self.multiply(simd, panel, count);
            for tile in 0..count {
                self.transform_output(simd, panel, tile);
            }
        }
    }
}

impl<F: Filter> Block<'_, '_, F> {
    /// M[point] = V[point] U[point] for one panel of outputs; products lie as [point][tile][2 lanes].
    #[inline(always)]
    fn multiply<S: Simd>(&mut self, simd: S, panel: usize, count: usize) {
        let tiles = self.tiles;
        let points = tiles.points();
        let depth = tiles.padded_channels();
        let width = 2 * S::F32_LANES;
        for point in 0..points {
            let filters = &self.filters[(panel * points + point) * tiles.filter_stride()..][..depth * width];
            for group in 0..count.div_ceil(ROWS) {
                let inputs =
                    &self.inputs[point * tiles.input_stride() + group * ROWS * depth..][..ROWS * depth];
                let products = &mut self.products[point * tiles.product_stride() + group * ROWS * width..]
                    [..ROWS * width];
                product(simd, inputs, filters, products);
            }
        }
    }

    #[inline(always)]
    fn transform_output<S: Simd>(&mut self, simd: S, panel: usize, tile: usize) {
        let tiles = self.tiles;
        let lanes = S::F32_LANES;
        let columns = tiles.tile_columns();
        let (row, column) = (tile / columns, tile % columns);
        let [_, width] = tiles.output;
        let k = tiles.outputs;
        let y = &mut *self.rows[row];
        let rows = (y.len() / (width * k)).min(F::OUTPUTS);
        let across = (width - column * F::OUTPUTS).min(F::OUTPUTS);
        let stride = tiles.product_stride();
        let zero = simd.splat_f32s(0.0);
        for vector in 0..2 {
            let first = panel * 2 * lanes + vector * lanes;
            if first >= k {
                break;
            }
            let take = lanes.min(k - first);
            let mut half = [[zero; POINTS]; 4];
            for j in 0..F::INPUTS {
                let mut m = [zero; POINTS];
                for i in 0..F::INPUTS {
                    let place = (i * F::INPUTS + j) * stride + tile * 2 * lanes + vector * lanes;
                    m[i] = simd.partial_load_f32s(&self.products[place..][..lanes]);
                }
                let t = F::output(simd, m);
                for i in 0..F::OUTPUTS {
                    half[i][j] = t[i];
                }
            }
            for i in 0..rows {
                let t = F::output(simd, half[i]);
                for j in 0..across {
                    let place = (i * width + column * F::OUTPUTS + j) * k + first;
                    simd.partial_store_f32s(&mut y[place..][..take], t[j]);
                }
            }
        }
    }
}

/// ROWS x (2 lanes) of V U: V as [channel / lanes][ROWS][lane], U as [channel][2 lanes].
#[inline(always)]
fn product<S: Simd>(simd: S, v: &[f32], u: &[f32], m: &mut [f32]) {
    let lanes = S::F32_LANES;
    let (u, _) = S::as_simd_f32s(u);
    let (m, _) = S::as_mut_simd_f32s(m);
    let zero = simd.splat_f32s(0.0);
    let mut sums = [[zero; 2]; ROWS];
    for (v, u) in v.chunks_exact(ROWS * lanes).zip(u.chunks_exact(2 * lanes)) {
        for q in 0..lanes {
            let (low, high) = (u[2 * q], u[2 * q + 1]);
            for row in 0..ROWS {
                let value = simd.splat_f32s(v[row * lanes + q]);
                sums[row][0] = simd.mul_add_f32s(value, low, sums[row][0]);
                sums[row][1] = simd.mul_add_f32s(value, high, sums[row][1]);
            }
        }
    }
    for (m, sums) in m.chunks_exact_mut(2).zip(sums) {
        m[0] = sums[0];
        m[1] = sums[1];
    }
}
