//! Backward-weights: dW = Gᵀ [sum over tiles of (A dY Aᵀ) ⊙ (Bᵀ d B)] G.

use pulp::{Simd, WithSimd};

use super::geometry::{Geometry, SKEW};
use super::transforms::{Filter, POINTS};
use crate::Cpu;
use crate::conv::plan::ConvKernel;
use crate::conv::problem::ConvProblem;
use crate::simd;

/// Outputs whose gradients are transformed and multiplied together.
const PANEL: usize = 32;
/// Outputs that the matrix kernel takes at once.
const ROWS: usize = 8;

/// The weight gradient of a 3x3 problem by tiles of `F`.
pub(super) struct Weights<F> {
    geometry: Geometry<F>,
    lanes: usize,
    workers: usize,
    /// Rows of tiles that are one block.
    block_rows: usize,
}

impl<F: Filter> Weights<F> {
    pub(super) fn new(problem: &ConvProblem, cpu: &Cpu) -> Self {
        let geometry = Geometry::of(problem);
        // Larger blocks read and write the sums less often; with few channels the block itself should stay in L2.
        let tiles = if problem.in_channels * problem.out_channels <= 4096 { 32 } else { 112 };
        let block_rows = (tiles / geometry.tile_columns()).clamp(1, geometry.units());
        let workers = cpu.threads().min(geometry.units().div_ceil(block_rows));
        Weights { geometry, lanes: simd::lanes(cpu.isa()), workers, block_rows }
    }

    fn block_tiles(&self) -> usize {
        self.block_rows * self.geometry.tile_columns()
    }

    /// Channels in vectors of 2 lanes.
    fn channel_panels(&self) -> usize {
        self.geometry.channels.div_ceil(2 * self.lanes)
    }

    fn output_panels(&self) -> usize {
        self.geometry.outputs.div_ceil(PANEL)
    }

    fn input_stride(&self) -> usize {
        self.channel_panels() * self.block_tiles() * 2 * self.lanes + SKEW
    }

    fn gradient_stride(&self) -> usize {
        self.block_tiles() * PANEL + SKEW
    }

    /// Floats of the sums of one point.
    fn sum_stride(&self) -> usize {
        self.output_panels() * PANEL * self.channel_panels() * 2 * self.lanes + SKEW
    }

    fn worker_len(&self) -> usize {
        self.geometry.points() * (self.input_stride() + self.gradient_stride() + self.sum_stride())
    }

    pub(super) fn workspace_len(&self) -> usize {
        self.workers * self.worker_len()
    }
}

impl<F: Filter + Send + Sync> ConvKernel<f32> for Weights<F> {
    fn run(&self, cpu: &Cpu, [x, dy]: [&[f32]; 2], output: &mut [f32], workspace: &mut [f32]) {
        let g = &self.geometry;
        let work = dy.len() * g.channels;
        let per_worker = g.units().div_ceil(self.workers);
        cpu.for_each(work, workspace.chunks_mut(self.worker_len()).enumerate(), |(worker, scratch)| {
            let (sums, rest) = scratch.split_at_mut(g.points() * self.sum_stride());
            let (inputs, gradients) = rest.split_at_mut(g.points() * self.input_stride());
            sums.fill(0.0);
            let end = ((worker + 1) * per_worker).min(g.units());
            for first in (worker * per_worker..end).step_by(self.block_rows) {
                let units = [first, (first + self.block_rows).min(end)];
                simd::run(cpu.isa(), Block { weights: self, x, dy, units, inputs, gradients, sums });
            }
        });
        let sums: Vec<&[f32]> = workspace.chunks(self.worker_len()).collect();
        let filter_len = g.channels * 9;
        cpu.for_each(work, output.chunks_mut(filter_len).enumerate(), |(output, filter)| {
            simd::run(cpu.isa(), Finish { weights: self, sums: &sums, output, filter });
        });
    }
}

/// Adds one block of tiles to the sums.
struct Block<'a, F> {
    weights: &'a Weights<F>,
    x: &'a [f32],
    dy: &'a [f32],
    /// Rows of tiles, first and end.
    units: [usize; 2],
    /// [point][channel panel][tile][2 lanes].
    inputs: &'a mut [f32],
    /// [point][outputs / ROWS][tile][ROWS], for one panel of outputs.
    gradients: &'a mut [f32],
    /// [point][output panel][outputs / ROWS][channel panel][ROWS][2 lanes].
    sums: &'a mut [f32],
}

impl<F: Filter> WithSimd for Block<'_, F> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(mut self, simd: S) {
        let w = self.weights;
        let g = &w.geometry;
        let lanes = S::F32_LANES;
        let columns = g.tile_columns();
        let count = (self.units[1] - self.units[0]) * columns;
        let stride = w.input_stride();
        if !g.channels.is_multiple_of(2 * lanes) {
            // The last panel's missing channels must not be NaN: they meet numbers in the matrix kernel.
            let last = (w.channel_panels() - 1) * w.block_tiles() * 2 * lanes;
            for point in 0..g.points() {
                self.inputs[point * stride + last..][..w.block_tiles() * 2 * lanes].fill(0.0);
            }
        }
        for tile in 0..count {
            let place = |vector: usize| {
                (vector / 2) * w.block_tiles() * 2 * lanes + tile * 2 * lanes + (vector % 2) * lanes
            };
            let unit = [self.units[0] + tile / columns, tile % columns];
            g.transform_input(simd, self.x, unit, self.inputs, stride, place);
        }
        for panel in 0..w.output_panels() {
            for tile in 0..count {
                self.transform_gradient(simd, panel, tile);
            }
            self.multiply(simd, panel, count);
        }
    }
}

impl<F: Filter> Block<'_, F> {
    #[inline(always)]
    fn transform_gradient<S: Simd>(&mut self, simd: S, panel: usize, tile: usize) {
        let w = self.weights;
        let g = &w.geometry;
        let lanes = S::F32_LANES;
        let (unit, column) = (self.units[0] + tile / g.tile_columns(), tile % g.tile_columns());
        let (image, row) = (unit / g.tile_rows(), unit % g.tile_rows());
        let ([height, width], k) = (g.output, g.outputs);
        let (top, left) = (row * F::OUTPUTS, column * F::OUTPUTS);
        let (rows, across) = ((height - top).min(F::OUTPUTS), (width - left).min(F::OUTPUTS));
        let dy = &self.dy[((image * height + top) * width + left) * k..];
        let stride = w.gradient_stride();
        let zero = simd.splat_f32s(0.0);
        // A vector may be shorter than ROWS (AVX2 has 8 lanes, the portable path 1) or longer (AVX-512).
        for vector in 0..PANEL / lanes {
            let first = panel * PANEL + vector * lanes;
            let take = lanes.min(k.saturating_sub(first));
            let mut half = [[zero; 4]; POINTS];
            for j in 0..across {
                let mut y = [zero; 4];
                for i in 0..rows {
                    if take > 0 {
                        y[i] = simd.partial_load_f32s(&dy[(i * width + j) * k + first..][..take]);
                    }
                }
                let t = F::output_gradient(simd, y);
                for i in 0..F::INPUTS {
                    half[i][j] = t[i];
                }
            }
            for i in 0..F::INPUTS {
                let t = F::output_gradient(simd, half[i]);
                for j in 0..F::INPUTS {
                    let point = (i * F::INPUTS + j) * stride;
                    store_rows(
                        simd,
                        &mut self.gradients[point..],
                        w.block_tiles(),
                        tile,
                        vector * lanes,
                        t[j],
                    );
                }
            }
        }
    }

    #[inline(always)]
    fn multiply<S: Simd>(&mut self, simd: S, panel: usize, count: usize) {
        let w = self.weights;
        let g = &w.geometry;
        let width = 2 * S::F32_LANES;
        let tiles = w.block_tiles();
        for point in 0..g.points() {
            let gradients = &self.gradients[point * w.gradient_stride()..];
            let inputs = &self.inputs[point * w.input_stride()..];
            let sums = &mut self.sums[point * w.sum_stride()..];
            for channel_panel in 0..w.channel_panels() {
                let v = &inputs[channel_panel * tiles * width..][..count * width];
                for group in 0..PANEL / ROWS {
                    if panel * PANEL + group * ROWS >= g.outputs {
                        break;
                    }
                    let z = &gradients[group * tiles * ROWS..][..count * ROWS];
                    let place = (panel * (PANEL / ROWS) + group) * w.channel_panels() + channel_panel;
                    add_product(simd, z, v, &mut sums[place * ROWS * width..][..ROWS * width]);
                }
            }
        }
    }
}

/// Stores a vector of outputs as [outputs / ROWS][tile][ROWS].
#[inline(always)]
fn store_rows<S: Simd>(simd: S, to: &mut [f32], tiles: usize, tile: usize, first: usize, value: S::f32s) {
    let lanes = S::F32_LANES;
    if lanes <= ROWS {
        let place = (first / ROWS) * tiles * ROWS + tile * ROWS + first % ROWS;
        return simd.partial_store_f32s(&mut to[place..place + lanes], value);
    }
    let mut values = [0.0f32; 64];
    simd.partial_store_f32s(&mut values[..lanes], value);
    for part in 0..lanes / ROWS {
        let place = (first / ROWS + part) * tiles * ROWS + tile * ROWS;
        to[place..place + ROWS].copy_from_slice(&values[part * ROWS..(part + 1) * ROWS]);
    }
}

/// m += zᵀ v over the tiles: z as [tile][ROWS], v as [tile][2 lanes], m as [ROWS][2 lanes].
#[inline(always)]
fn add_product<S: Simd>(simd: S, z: &[f32], v: &[f32], m: &mut [f32]) {
    let (v, _) = S::as_simd_f32s(v);
    let (m, _) = S::as_mut_simd_f32s(m);
    let mut sums = [[simd.splat_f32s(0.0); 2]; ROWS];
    for (z, v) in z.chunks_exact(ROWS).zip(v.chunks_exact(2)) {
        for row in 0..ROWS {
            let value = simd.splat_f32s(z[row]);
            sums[row][0] = simd.mul_add_f32s(value, v[0], sums[row][0]);
            sums[row][1] = simd.mul_add_f32s(value, v[1], sums[row][1]);
        }
    }
    for (m, sums) in m.chunks_exact_mut(2).zip(sums) {
        m[0] = simd.add_f32s(m[0], sums[0]);
        m[1] = simd.add_f32s(m[1], sums[1]);
    }
}

/// Transforms the sums of all workers into one output's filter gradient.
struct Finish<'a, F> {
    weights: &'a Weights<F>,
    sums: &'a [&'a [f32]],
    output: usize,
    filter: &'a mut [f32],
}

impl<F: Filter> WithSimd for Finish<'_, F> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Finish { weights: w, sums, output, filter } = self;
        let lanes = S::F32_LANES;
        let zero = simd.splat_f32s(0.0);
        for (vector, filter) in filter.chunks_mut(9 * lanes).enumerate() {
            let panel = (output / ROWS) * w.channel_panels() + vector / 2;
            let place = (panel * ROWS + output % ROWS) * 2 * lanes + (vector % 2) * lanes;
            let sum = |point: usize| {
                let parts = sums.iter().map(|sums| &sums[point * w.sum_stride() + place..][..lanes]);
                parts.fold(zero, |sum, part| simd.add_f32s(sum, simd.partial_load_f32s(part)))
            };
            let mut half = [[zero; POINTS]; 3];
            for j in 0..F::INPUTS {
                let mut m = [zero; POINTS];
                for i in 0..F::INPUTS {
                    m[i] = sum(i * F::INPUTS + j);
                }
                let t = F::filter_gradient(simd, m);
                for i in 0..3 {
                    half[i][j] = t[i];
                }
            }
            for i in 0..3 {
                let t = F::filter_gradient(simd, half[i]);
                for j in 0..3 {
                    let mut values = [0.0f32; 64];
                    simd.partial_store_f32s(&mut values[..lanes], t[j]);
                    for (channel, &value) in filter.chunks_mut(9).zip(&values) {
                        channel[3 * i + j] = value;
                    }
                }
            }
        }
    }
}
