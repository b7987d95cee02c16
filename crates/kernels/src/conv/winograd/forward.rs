//! Forward and backward-data: tiles transformed, multiplied with the filters, transformed back.

use pulp::{Simd, WithSimd};

use super::filters::{Filters, TransformFilters};
use super::geometry::{Geometry, SKEW, Tile};
use super::memory::{ALIGNMENT, Queue, Shared, aligned, load, store};
use super::transforms::{Filter, Output, Transform};
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

/// What is transformed for all threads first; each thread then transforms parts of the other and multiplies them.
#[derive(Clone, Copy, PartialEq, Eq)]
enum First {
    Filters,
    Inputs,
}

/// A convolution of N x H x W x C images to N x OH x OW x K by tiles of `F`, in blocks of tiles and panels of outputs.
pub(super) struct Tiles<F> {
    geometry: Geometry<F>,
    direction: Direction,
    first: First,
    lanes: usize,
    workers: usize,
    /// Tiles of a block, a multiple of what the matrix kernel takes.
    block: usize,
    /// Vectors of outputs in a panel, an even number.
    vectors: usize,
}

/// Tiles that the matrix kernel multiplies at once: with two vectors of outputs, its sums fill the registers.
const fn rows(lanes: usize) -> usize {
    match lanes {
        16 => 8,
        _ => 6,
    }
}

impl<F: Filter> Tiles<F> {
    pub(super) fn new(problem: &ConvProblem, direction: Direction, cpu: &Cpu) -> Self {
        let forward = Geometry::of(problem);
        let geometry = match direction {
            Direction::Forward => forward,
            Direction::BackwardData => forward.turned(),
        };
        let lanes = simd::lanes(cpu.isa());
        let vectors = |outputs: usize| 2 * outputs.div_ceil(2 * lanes);
        let env = |n: &str, d: usize| std::env::var(n).map_or(d, |v| v.parse().unwrap());
        let first = if env("FIRST", if geometry.tiles() < geometry.outputs { 1 } else { 0 }) == 1 { First::Inputs } else { First::Filters };
        let panel = env("PANEL", if geometry.channels < 256 { 32 } else { 64 });
        let block = env("BLOCK", (4096 / geometry.channels).clamp(16, 64).max(4096 / geometry.channels.max(64)).max(if geometry.channels >= 256 {64} else {16}));
        let tiles = Tiles {
            geometry,
            direction,
            first,
            lanes,
            workers: 1,
            block: block.min(geometry.tiles()).next_multiple_of(rows(lanes)),
            vectors: vectors(geometry.outputs.min(panel)),
        };
        let units = match first {
            First::Filters => tiles.blocks(),
            First::Inputs => tiles.panels(),
        };
        Tiles { workers: cpu.threads().min(units), ..tiles }
    }

    /// Channels, filled up to vectors.
    fn depth(&self) -> usize {
        self.geometry.channels.next_multiple_of(self.lanes)
    }

    fn blocks(&self) -> usize {
        self.geometry.tiles().div_ceil(self.block)
    }

    /// Outputs of a panel.
    fn width(&self) -> usize {
        self.vectors * self.lanes
    }

    fn panels(&self) -> usize {
        self.geometry.outputs.div_ceil(self.width())
    }

    /// Floats between two points of a panel's filters.
    fn filter_stride(&self) -> usize {
        self.depth() * self.width() + SKEW
    }

    /// Floats between two points of a block's inputs.
    fn input_stride(&self) -> usize {
        self.block * self.depth() + SKEW
    }

    /// Floats between two points of the products of a block with a panel.
    fn product_stride(&self) -> usize {
        self.block * self.width() + SKEW
    }

    /// Floats of a panel's filters, a block's inputs and the products of both.
    fn lens(&self) -> [usize; 3] {
        [self.filter_stride(), self.input_stride(), self.product_stride()]
            .map(|stride| self.geometry.points() * stride)
    }

    /// Floats of what is transformed first, and of what each worker has.
    fn parts(&self) -> [usize; 2] {
        let [filters, inputs, products] = self.lens();
        match self.first {
            First::Filters => [self.panels() * filters, inputs + products],
            First::Inputs => [self.blocks() * inputs, filters + products],
        }
    }

    pub(super) fn workspace_len(&self) -> usize {
        let [first, worker] = self.parts();
        ALIGNMENT + self.depth() + first + self.workers * worker
    }
}

impl<F: Filter> ConvKernel<f32> for Tiles<F> {
    fn run(&self, cpu: &Cpu, [x, weight]: [&[f32]; 2], output: &mut [f32], workspace: &mut [f32]) {
        let work = output.len() * self.geometry.channels;
        let [first_len, worker_len] = self.parts();
        let [filters_len, inputs_len, _] = self.lens();
        let (zeros, rest) = aligned(workspace).split_at_mut(self.depth());
        zeros.fill(0.0);
        let (first, scratch) = rest.split_at_mut(first_len);
        let call = Call { tiles: self, cpu, x, zeros, weight, output: Shared::new(output) };
        match self.first {
            First::Filters => {
                let panels = first.chunks_mut(filters_len).enumerate();
                cpu.for_each(work, panels, |(panel, filters)| call.transform_filters(panel, filters));
                let blocks = Queue::new(self.blocks());
                cpu.for_each(work, scratch.chunks_mut(worker_len), |scratch| {
                    let (inputs, products) = scratch.split_at_mut(inputs_len);
                    for block in blocks.take() {
                        call.transform_inputs(block, inputs);
                        for (panel, filters) in first.chunks(filters_len).enumerate() {
                            call.multiply([block, panel], [inputs, filters], products);
                        }
                    }
                });
            }
            First::Inputs => {
                let blocks = first.chunks_mut(inputs_len).enumerate();
                cpu.for_each(work, blocks, |(block, inputs)| call.transform_inputs(block, inputs));
                let panels = Queue::new(self.panels());
                cpu.for_each(work, scratch.chunks_mut(worker_len), |scratch| {
                    let (filters, products) = scratch.split_at_mut(filters_len);
                    for panel in panels.take() {
                        call.transform_filters(panel, filters);
                        for (block, inputs) in first.chunks(inputs_len).enumerate() {
                            call.multiply([block, panel], [inputs, filters], products);
                        }
                    }
                });
            }
        }
    }
}

/// The operands of one run.
struct Call<'a, F> {
    tiles: &'a Tiles<F>,
    cpu: &'a Cpu,
    x: &'a [f32],
    zeros: &'a [f32],
    weight: &'a [f32],
    output: Shared<'a>,
}

impl<F: Filter> Call<'_, F> {
    fn transform_filters(&self, panel: usize, to: &mut [f32]) {
        let tiles = self.tiles;
        let filters = Filters {
            weight: self.weight,
            channels: tiles.geometry.channels,
            outputs: tiles.geometry.outputs,
            turned: tiles.direction == Direction::BackwardData,
        };
        let transform = TransformFilters {
            filters,
            first: panel * tiles.width(),
            vectors: tiles.vectors,
            to,
            stride: tiles.filter_stride(),
            filter: tiles.geometry.filter,
        };
        simd::run(self.cpu.isa(), transform);
    }

    fn transform_inputs(&self, block: usize, to: &mut [f32]) {
        simd::run(self.cpu.isa(), TransformInputs { call: self, block, to });
    }

    fn multiply(&self, [block, panel]: [usize; 2], [inputs, filters]: [&[f32]; 2], products: &mut [f32]) {
        simd::run(self.cpu.isa(), Multiply { call: self, block, panel, inputs, filters, products });
    }
}

/// Transforms the tiles of a block: V[point][tile / rows][channel / lanes][tile % rows][lane].
struct TransformInputs<'a, F> {
    call: &'a Call<'a, F>,
    block: usize,
    to: &'a mut [f32],
}

impl<F: Filter> WithSimd for TransformInputs<'_, F> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let TransformInputs { call, block, to } = self;
        let Call { tiles, x, zeros, .. } = *call;
        let (lanes, rows) = (S::F32_LANES, rows(S::F32_LANES));
        let first = block * tiles.block;
        let to = Shared::new(to);
        for tile in 0..tiles.block.min(tiles.geometry.tiles() - first) {
            let group = (tile / rows) * rows * tiles.depth() + (tile % rows) * lanes;
            let place = |vector| group + vector * rows * lanes;
            let to = (to, tiles.input_stride());
            // SAFETY: the block has a vector of each point for each of its tiles, and one thread transforms it.
            unsafe { tiles.geometry.transform_input(simd, [x, zeros], first + tile, to, place) }
        }
    }
}

/// Multiplies a block of tiles with a panel of filters and transforms the products to outputs.
struct Multiply<'a, F> {
    call: &'a Call<'a, F>,
    block: usize,
    panel: usize,
    inputs: &'a [f32],
    filters: &'a [f32],
    /// M[point][output / 2 lanes][tile][2 lanes].
    products: &'a mut [f32],
}

impl<F: Filter> WithSimd for Multiply<'_, F> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(mut self, simd: S) {
        let tiles = self.call.tiles;
        let first = self.block * tiles.block;
        let count = tiles.block.min(tiles.geometry.tiles() - first);
        match rows(S::F32_LANES) {
            8 => self.products::<S, 8>(simd, count),
            _ => self.products::<S, 6>(simd, count),
        }
        for tile in 0..count {
            self.transform_output(simd, tile, tiles.geometry.tile(first + tile));
        }
    }
}

impl<F: Filter> Multiply<'_, F> {
    /// M[point] = V[point] U[point].
    #[inline(always)]
    fn products<S: Simd, const ROWS: usize>(&mut self, simd: S, count: usize) {
        let tiles = self.call.tiles;
        let depth = tiles.depth();
        let width = 2 * S::F32_LANES;
        for point in 0..tiles.geometry.points() {
            let inputs = &self.inputs[point * tiles.input_stride()..][..tiles.block * depth];
            let filters = &self.filters[point * tiles.filter_stride()..][..tiles.width() * depth];
            let products = &mut self.products[point * tiles.product_stride()..][..tiles.block * tiles.width()];
            let panels = filters.chunks_exact(depth * width);
            for (filters, products) in panels.zip(products.chunks_exact_mut(tiles.block * width)) {
                let groups = inputs.chunks_exact(ROWS * depth).zip(products.chunks_exact_mut(ROWS * width));
                for (inputs, products) in groups.take(count.div_ceil(ROWS)) {
                    product::<S, ROWS>(simd, inputs, filters, products);
                }
            }
        }
    }

    #[inline(always)]
    fn transform_output<S: Simd>(&mut self, simd: S, index: usize, tile: Tile) {
        let Call { tiles, output, .. } = self.call;
        let lanes = S::F32_LANES;
        let [height, width] = tiles.geometry.output;
        let k = tiles.geometry.outputs;
        let (rows, columns) = (height - tile.row, width - tile.column);
        let corner = ((tile.image * height + tile.row) * width + tile.column) * k;
        let stride = tiles.product_stride();
        let points = tiles.geometry.points();
        for vector in 0..tiles.vectors {
            let first = self.panel * tiles.width() + vector * lanes;
            if first >= k {
                break;
            }
            let take = lanes.min(k - first);
            let place = ((vector / 2 * tiles.block + index) * 2 + vector % 2) * lanes;
            let products = &self.products[place..place + (points - 1) * stride + lanes];
            Output::<F>::square(
                simd,
                // SAFETY: `products` holds a vector of each point.
                |i, j| unsafe { load::<S>(products, (i * F::INPUTS + j) * stride) },
                |i, j, value| {
                    if i < rows && j < columns {
                        let place = corner + (i * width + j) * k + first;
                        // SAFETY: each output belongs to one tile and one panel, which are multiplied once.
                        let to = unsafe { output.part(place, take) };
                        if take == lanes {
                            // SAFETY: it holds all lanes.
                            unsafe { store::<S>(to, 0, value) };
                        } else {
                            simd.partial_store_f32s(to, value);
                        }
                    }
                },
            );
        }
    }
}

/// ROWS x (2 lanes) of V U: V as [channel / lanes][ROWS][lane], U as [channel][2 lanes].
#[inline(always)]
fn product<S: Simd, const ROWS: usize>(simd: S, v: &[f32], u: &[f32], m: &mut [f32]) {
    let lanes = S::F32_LANES;
    let mut sums = [[simd.splat_f32s(0.0); 2]; ROWS];
    for (v, u) in v.chunks_exact(ROWS * lanes).zip(u.chunks_exact(2 * lanes * lanes)) {
        for q in 0..lanes {
            // SAFETY: `u` holds two vectors for each of as many channels as there are lanes.
            let (low, high) = unsafe { (load::<S>(u, 2 * q * lanes), load::<S>(u, (2 * q + 1) * lanes)) };
            for row in 0..ROWS {
                let value = simd.splat_f32s(v[row * lanes + q]);
                sums[row][0] = simd.mul_add_f32s(value, low, sums[row][0]);
                sums[row][1] = simd.mul_add_f32s(value, high, sums[row][1]);
            }
        }
    }
    let (m, _) = S::as_mut_simd_f32s(m);
    for (m, sums) in m.chunks_exact_mut(2).zip(sums) {
        m.copy_from_slice(&sums);
    }
}
