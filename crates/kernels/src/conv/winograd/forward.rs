//! Forward and backward-data: tiles transformed, multiplied with the filters, transformed back.

use std::ops::Range;

use pulp::{Simd, WithSimd};

use super::filters::{Filters, TransformFilters};
use super::geometry::{Geometry, SKEW, Tile};
use super::memory::{ALIGNMENT, LANES, Queue, Shared, aligned, load, store};
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

/// What is transformed for all threads first. The other is transformed in parts that each thread then multiplies.
#[derive(Clone, Copy, PartialEq, Eq)]
enum First {
    /// Then blocks of tiles, of all channels.
    Filters,
    /// Then panels of filters, some channels at a time, for one block of all tiles.
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
    /// Channels that are multiplied at once, whole vectors.
    depth: usize,
    /// Outputs of a panel, an even number of vectors.
    width: usize,
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
        let (tiles, c) = (geometry.tiles(), geometry.channels);
        // Few tiles: filters are the larger part. They are used where they have been transformed, in the L2 cache
        // beside the products of all tiles.
        let first = if tiles <= 256.min(geometry.outputs) { First::Inputs } else { First::Filters };
        let (block, depth, panel) = match first {
            First::Inputs => (tiles, c.min(64), 32),
            // A block's inputs and products share the L2 cache with a panel of filters.
            First::Filters if c < 256 => (24, c, 32),
            // Neither inputs nor filters fit: larger products read both less often.
            First::Filters => (64, c, 64),
        };
        let block = if first == First::Filters { block.min(tiles.div_ceil(cpu.threads())) } else { block };
        let tiles = Tiles {
            geometry,
            direction,
            first,
            lanes,
            workers: 1,
            block: block.next_multiple_of(rows(lanes)),
            depth: depth.next_multiple_of(lanes),
            width: geometry.outputs.min(panel).next_multiple_of(2 * lanes),
        };
        let units = match first {
            First::Filters => tiles.blocks(),
            First::Inputs => tiles.panels(),
        };
        Tiles { workers: cpu.threads().min(units), ..tiles }
    }

    fn rows(&self) -> usize {
        rows(self.lanes)
    }

    fn block_tiles(&self, block: usize) -> Range<usize> {
        let start = block * self.block;
        start..(start + self.block).min(self.geometry.tiles())
    }

    fn blocks(&self) -> usize {
        self.geometry.tiles().div_ceil(self.block)
    }

    fn panels(&self) -> usize {
        self.geometry.outputs.div_ceil(self.width)
    }

    /// Parts of the channels.
    fn slices(&self) -> usize {
        self.geometry.channels.div_ceil(self.depth)
    }

    /// Floats between two points of a panel's filters.
    fn filter_stride(&self) -> usize {
        self.depth * self.width + SKEW
    }

    /// Floats between two points of a block's inputs.
    fn input_stride(&self) -> usize {
        self.block * self.depth + SKEW
    }

    /// Floats between two points of the products of a block with a panel.
    fn product_stride(&self) -> usize {
        self.block * self.width + SKEW
    }

    /// Floats of a panel's filters and of a block's inputs for one slice of channels, and of the products of both.
    fn lens(&self) -> [usize; 3] {
        [self.filter_stride(), self.input_stride(), self.product_stride()]
            .map(|stride| self.geometry.points() * stride)
    }

    /// Floats of what is transformed first, and of what each worker has.
    fn parts(&self) -> [usize; 2] {
        let [filters, inputs, products] = self.lens();
        match self.first {
            First::Filters => [self.panels() * filters, inputs + products],
            First::Inputs => [self.slices() * inputs, filters + products],
        }
    }

    fn zeros_len(&self) -> usize {
        self.geometry.channels.next_multiple_of(LANES)
    }

    pub(super) fn workspace_len(&self) -> usize {
        let [first, worker] = self.parts();
        ALIGNMENT + self.zeros_len() + first + self.workers * worker
    }
}

impl<F: Filter> ConvKernel<f32> for Tiles<F> {
    fn run(&self, cpu: &Cpu, [x, weight]: [&[f32]; 2], output: &mut [f32], workspace: &mut [f32]) {
        let work = output.len() * self.geometry.channels;
        let [first_len, worker_len] = self.parts();
        let [filters_len, inputs_len, _] = self.lens();
        let (zeros, rest) = aligned(workspace).split_at_mut(self.zeros_len());
        zeros.fill(0.0);
        let (first, scratch) = rest.split_at_mut(first_len);
        let call = Call { tiles: self, cpu, x, zeros, weight, output: Shared::new(output) };
        match self.first {
            First::Filters => {
                let panels = first.chunks_mut(filters_len).enumerate();
                cpu.for_each(work, panels, |(panel, filters)| call.transform_filters([panel, 0], filters));
                let blocks = Queue::new(self.blocks());
                cpu.for_each(work, scratch.chunks_mut(worker_len), |scratch| {
                    let (inputs, products) = scratch.split_at_mut(inputs_len);
                    for block in blocks.take() {
                        let tiles = self.block_tiles(block);
                        call.transform_inputs(tiles.clone(), tiles.start, Shared::new(inputs));
                        for (panel, filters) in first.chunks(filters_len).enumerate() {
                            call.multiply([inputs, filters], products, tiles.len(), 0);
                            call.transform_outputs(products, tiles.clone(), panel);
                        }
                    }
                });
            }
            First::Inputs => {
                let tiles = self.block_tiles(0);
                let inputs = Shared::new(first);
                let groups = tiles.clone().step_by(self.rows());
                cpu.for_each(work, groups, |start| {
                    // Each group of tiles writes places of its own.
                    call.transform_inputs(start..(start + self.rows()).min(tiles.end), 0, inputs);
                });
                let first = &*first;
                let panels = Queue::new(self.panels());
                cpu.for_each(work, scratch.chunks_mut(worker_len), |scratch| {
                    let (filters, products) = scratch.split_at_mut(filters_len);
                    for panel in panels.take() {
                        for (slice, inputs) in first.chunks(inputs_len).enumerate() {
                            call.transform_filters([panel, slice], filters);
                            call.multiply([inputs, filters], products, tiles.len(), slice);
                        }
                        call.transform_outputs(products, tiles.clone(), panel);
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
    fn transform_filters(&self, [panel, slice]: [usize; 2], to: &mut [f32]) {
        let tiles = self.tiles;
        let filters = Filters {
            weight: self.weight,
            channels: tiles.geometry.channels,
            outputs: tiles.geometry.outputs,
            turned: tiles.direction == Direction::BackwardData,
        };
        let transform = TransformFilters {
            filters,
            outputs: panel * tiles.width..(panel + 1) * tiles.width,
            channels: slice * tiles.depth..(slice + 1) * tiles.depth,
            to,
            stride: tiles.filter_stride(),
            filter: tiles.geometry.filter,
        };
        simd::run(self.cpu.isa(), transform);
    }

    fn transform_inputs(&self, tiles: Range<usize>, first: usize, to: Shared<'_>) {
        simd::run(self.cpu.isa(), TransformInputs { call: self, tiles, first, to });
    }

    /// Multiplies `count` tiles.
    fn multiply(&self, [inputs, filters]: [&[f32]; 2], products: &mut [f32], count: usize, slice: usize) {
        simd::run(self.cpu.isa(), Multiply { tiles: self.tiles, inputs, filters, products, count, slice });
    }

    fn transform_outputs(&self, products: &[f32], tiles: Range<usize>, panel: usize) {
        simd::run(self.cpu.isa(), TransformOutputs { call: self, products, tiles, panel });
    }
}

/// Transforms tiles of a block: V[slice][point][tile / rows][channel / lanes][tile % rows][lane].
struct TransformInputs<'a, F> {
    call: &'a Call<'a, F>,
    tiles: Range<usize>,
    /// Where the block starts.
    first: usize,
    to: Shared<'a>,
}

impl<F: Filter> WithSimd for TransformInputs<'_, F> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Call { tiles, x, zeros, .. } = *self.call;
        let (lanes, rows) = (S::F32_LANES, rows(S::F32_LANES));
        let [_, slice_len, _] = tiles.lens();
        let vectors = tiles.depth / lanes;
        for tile in self.tiles {
            let index = tile - self.first;
            let group = (index / rows) * rows * tiles.depth + (index % rows) * lanes;
            let place = |vector| vector / vectors * slice_len + group + vector % vectors * rows * lanes;
            let to = (self.to, tiles.input_stride());
            // SAFETY: the block has a vector of each point for each of its tiles, and one thread transforms it.
            unsafe { tiles.geometry.transform_input(simd, [x, zeros], tile, to, place) }
        }
    }
}

/// Multiplies a block's inputs with a panel's filters, M[point][output / 2 lanes][tile][2 lanes] = V U, and adds that
/// of all but the first slice of channels.
struct Multiply<'a, F> {
    tiles: &'a Tiles<F>,
    inputs: &'a [f32],
    filters: &'a [f32],
    products: &'a mut [f32],
    /// Tiles of the block.
    count: usize,
    slice: usize,
}

impl<F: Filter> WithSimd for Multiply<'_, F> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        match rows(S::F32_LANES) {
            8 => self.blocked::<S, 8>(simd),
            _ => self.blocked::<S, 6>(simd),
        }
    }
}

impl<F: Filter> Multiply<'_, F> {
    #[inline(always)]
    fn blocked<S: Simd, const ROWS: usize>(self, simd: S) {
        let Tiles { block, depth, width, .. } = *self.tiles;
        let pair = 2 * S::F32_LANES;
        // The last slice may have fewer channels.
        let rest = self.tiles.geometry.channels - self.slice * depth;
        let channels = depth.min(rest.next_multiple_of(S::F32_LANES));
        for point in 0..self.tiles.geometry.points() {
            let inputs = &self.inputs[point * self.tiles.input_stride()..][..block * depth];
            let filters = &self.filters[point * self.tiles.filter_stride()..][..width * depth];
            let products = &mut self.products[point * self.tiles.product_stride()..][..block * width];
            let pairs = filters.chunks_exact(depth * pair).zip(products.chunks_exact_mut(block * pair));
            for (filters, products) in pairs {
                let groups = inputs.chunks_exact(ROWS * depth).zip(products.chunks_exact_mut(ROWS * pair));
                for (inputs, products) in groups.take(self.count.div_ceil(ROWS)) {
                    product::<S, ROWS>(simd, &inputs[..ROWS * channels], filters, products, self.slice == 0);
                }
            }
        }
    }
}

/// m = v u, or m += v u: v as [channel / lanes][ROWS][lane], u as [channel][2 lanes], m as [ROWS][2 lanes].
#[inline(always)]
fn product<S: Simd, const ROWS: usize>(simd: S, v: &[f32], u: &[f32], m: &mut [f32], fresh: bool) {
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
        for half in 0..2 {
            m[half] = if fresh { sums[half] } else { simd.add_f32s(m[half], sums[half]) };
        }
    }
}

/// Transforms a block's products with a panel to outputs.
struct TransformOutputs<'a, F> {
    call: &'a Call<'a, F>,
    products: &'a [f32],
    tiles: Range<usize>,
    panel: usize,
}

impl<F: Filter> WithSimd for TransformOutputs<'_, F> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        for index in 0..self.tiles.len() {
            self.tile(simd, index);
        }
    }
}

impl<F: Filter> TransformOutputs<'_, F> {
    #[inline(always)]
    fn tile<S: Simd>(&self, simd: S, index: usize) {
        let Call { tiles, output, .. } = self.call;
        let lanes = S::F32_LANES;
        let Tile { image, row, column } = tiles.geometry.tile(self.tiles.start + index);
        let [height, width] = tiles.geometry.output;
        let k = tiles.geometry.outputs;
        let (rows, columns) = (height - row, width - column);
        let corner = ((image * height + row) * width + column) * k;
        let stride = tiles.product_stride();
        let points = tiles.geometry.points();
        let start = self.panel * tiles.width;
        for (vector, first) in (start..k.min(start + tiles.width)).step_by(lanes).enumerate() {
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
                        // SAFETY: each output belongs to one tile and one panel, which are transformed once.
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
