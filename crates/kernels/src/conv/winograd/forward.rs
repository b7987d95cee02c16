//! Forward and backward-data: tiles transformed, multiplied with the filters, transformed back.

use std::ops::Range;

use super::block::{Multiply, TransformInputs, TransformOutputs, rows, vectors};
use super::filters::{Filters, TransformFilters};
use super::geometry::{Geometry, SKEW};
use super::groups::GroupKernel;
use super::memory::Number;
use super::transforms::Filter;
use crate::Cpu;
use crate::shared::Shared;
use crate::simd;
use crate::stream::Ahead;

/// Runs of blocks for each worker.
const RUNS: usize = 8;

/// Which operand is transformed first, for all threads. The other is transformed in parts that each thread then multiplies.
#[derive(Clone, Copy, PartialEq, Eq)]
enum First {
    /// The filters; then blocks of tiles, with all channels.
    Filters,
    /// The inputs; then panels of filters, some channels at a time, for one block of all tiles.
    Inputs,
}

/// A convolution of N x H x W x C images to N x OH x OW x K by tiles of `F`, in blocks of tiles and panels of outputs. A panel belongs to
/// one phase.
#[derive(Clone, Copy)]
pub(super) struct Tiles<F, T> {
    pub(super) geometry: Geometry<F, T>,
    /// Channels of a phase that is read, in whole vectors if there are several.
    pub(super) of_phase: usize,
    first: First,
    registers: usize,
    workers: usize,
    /// Tiles of a block, a multiple of what the matrix kernel takes.
    pub(super) block: usize,
    /// Channels that are multiplied at once, whole vectors.
    pub(super) depth: usize,
    /// Outputs of a panel, in whole pairs.
    pub(super) width: usize,
    /// Vectors of a pair of outputs, which are multiplied at once: 1 or 2.
    pub(super) vectors: usize,
}

impl<F: Filter, T: Number> Tiles<F, T> {
    pub(super) fn new(geometry: Geometry<F, T>, cpu: &Cpu) -> Self {
        let (lanes, registers) = (cpu.isa().lanes(), cpu.isa().registers());
        let of_phase = geometry.channels_of_phase(lanes);
        let (tiles, c) = (geometry.tiles(), geometry.sources() * of_phase);
        let vectors = vectors(geometry.outputs, lanes);
        // With few tiles, the filters are the larger part. They are multiplied right after their transform, while they are in
        // the L2 cache beside the products of all tiles.
        let outputs = geometry.targets() * geometry.outputs;
        let first = if tiles <= 256.min(outputs) { First::Inputs } else { First::Filters };
        let (block, depth, panel) = match first {
            First::Inputs => (tiles, c.min(64), 32),
            // A block's inputs and products share the L2 cache with a panel of filters.
            First::Filters if c < 256 => (24, c, 32),
            // Neither inputs nor filters fit: larger products read both less often.
            First::Filters => (64, c, 64),
        };
        let block = if first == First::Filters { block.min(tiles.div_ceil(cpu.threads())) } else { block };
        let panel = if vectors == 1 { geometry.outputs } else { panel };
        let tiles = Tiles {
            geometry,
            of_phase,
            first,
            registers,
            workers: 1,
            block: block.next_multiple_of(rows(registers, vectors)),
            depth: depth.next_multiple_of(lanes),
            width: geometry.outputs.min(panel).next_multiple_of(vectors * lanes),
            vectors,
        };
        let units = match first {
            First::Filters => tiles.blocks(),
            First::Inputs => tiles.panels(),
        };
        Tiles { workers: cpu.threads().min(units), ..tiles }
    }

    pub(super) fn rows(&self) -> usize {
        rows(self.registers, self.vectors)
    }

    fn block_tiles(&self, block: usize) -> Range<usize> {
        let start = block * self.block;
        start..(start + self.block).min(self.geometry.tiles())
    }

    fn blocks(&self) -> usize {
        self.geometry.tiles().div_ceil(self.block)
    }

    /// Blocks that a worker takes at once, one after the other, so that it knows what it will read next. The workers should end
    /// together.
    fn run_of_blocks(&self) -> usize {
        match self.workers {
            1 => self.blocks(),
            workers => self.blocks().div_ceil(RUNS * workers),
        }
        .max(1)
    }

    /// Panels of all phases.
    fn panels(&self) -> usize {
        self.geometry.targets() * self.panels_of_phase()
    }

    fn panels_of_phase(&self) -> usize {
        self.geometry.outputs.div_ceil(self.width)
    }

    /// The phase that a panel belongs to, and its number among those of this phase.
    pub(super) fn target_of(&self, panel: usize) -> (usize, usize) {
        (panel / self.panels_of_phase(), panel % self.panels_of_phase())
    }

    /// Channels of all phases that are read.
    pub(super) fn channels(&self) -> usize {
        self.geometry.sources() * self.of_phase
    }

    /// The channels that the products of a point are sums over, for the panels of a phase; none if they are zero.
    pub(super) fn channels_of(&self, point: usize, target: usize) -> Range<usize> {
        let phases = self.geometry.phases_of(point);
        match self.geometry.turned {
            true if phases.contains(&target) => 0..self.channels(),
            true => 0..0,
            false => phases.start * self.of_phase..phases.end * self.of_phase,
        }
    }

    /// Parts of the channels.
    fn slices(&self) -> usize {
        self.channels().div_ceil(self.depth)
    }

    /// Floats between two points of a panel's filters.
    pub(super) fn filter_stride(&self) -> usize {
        self.depth * self.width + SKEW
    }

    /// Floats between two points of a block's inputs.
    pub(super) fn input_stride(&self) -> usize {
        self.block * self.depth + SKEW
    }

    /// Floats between two points of the products of a block with a panel.
    pub(super) fn product_stride(&self) -> usize {
        self.block * self.width + SKEW
    }

    /// Floats of a panel's filters and of a block's inputs for one slice of channels, and of the products of both.
    pub(super) fn lens(&self) -> [usize; 3] {
        [self.filter_stride(), self.input_stride(), self.product_stride()]
            .map(|stride| self.geometry.points() * stride)
    }

    /// Floats of the operand that is transformed first, and of each worker's part of the workspace.
    fn parts(&self) -> [usize; 2] {
        let [filters, inputs, products] = self.lens();
        match self.first {
            First::Filters => [self.panels() * filters, inputs + products],
            First::Inputs => [self.slices() * inputs, filters + products],
        }
    }

    fn zeros_len(&self) -> usize {
        self.geometry.zeros_len(self.geometry.channels)
    }
}

impl<F: Filter, T: Number> GroupKernel for Tiles<F, T> {
    type First = T;
    type Second = f32;
    type Output = T;

    fn workspace_len(&self) -> usize {
        let [first, worker] = self.parts();
        self.zeros_len() + first + self.workers * worker
    }

    fn run(
        &self,
        cpu: &Cpu,
        group: usize,
        (x, weight): (&[T], &[f32]),
        output: Shared<'_, T>,
        workspace: &mut [f32],
    ) {
        let geometry = Geometry { group, ..self.geometry };
        let weight_len = weight.len() / geometry.groups;
        let weight = &weight[group * weight_len..][..weight_len];
        Tiles { geometry, ..*self }.run_group(cpu, (x, weight), output, workspace);
    }
}

impl<F: Filter, T: Number> Tiles<F, T> {
    /// Computes the output of the geometry's group with its filters.
    fn run_group(
        &self,
        cpu: &Cpu,
        (x, weight): (&[T], &[f32]),
        output: Shared<'_, T>,
        workspace: &mut [f32],
    ) {
        let work = self.geometry.work();
        let [first_len, worker_len] = self.parts();
        let [filters_len, inputs_len, _] = self.lens();
        let (zeros, rest) = workspace.split_at_mut(self.zeros_len());
        zeros.fill(0.0);
        let (first, scratch) = rest.split_at_mut(first_len);
        let zeros = bytemuck::cast_slice(zeros);
        let call = Call { tiles: self, cpu, x, zeros, weight, output };
        match self.first {
            First::Filters => {
                let panels = first.chunks_mut(filters_len).enumerate();
                cpu.for_each(work, panels, |(panel, filters)| call.transform_filters([panel, 0], filters));
                let workers = scratch.chunks_mut(worker_len);
                let runs = (0..self.blocks()).step_by(self.run_of_blocks());
                cpu.for_each_with(work, workers, runs, |scratch, first_block| {
                    let (inputs, products) = scratch.split_at_mut(inputs_len);
                    let end = (first_block + self.run_of_blocks()).min(self.blocks());
                    for block in first_block..end {
                        let tiles = self.block_tiles(block);
                        call.transform_inputs(tiles.clone(), tiles.start, Shared::new(inputs));
                        let mut ahead = call.ahead(&tiles);
                        for (panel, filters) in first.chunks(filters_len).enumerate() {
                            call.multiply([inputs, filters], products, [tiles.len(), 0, panel], &mut ahead);
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
                let workers = scratch.chunks_mut(worker_len);
                cpu.for_each_with(work, workers, 0..self.panels(), |scratch, panel| {
                    let (filters, products) = scratch.split_at_mut(filters_len);
                    for (slice, inputs) in first.chunks(inputs_len).enumerate() {
                        call.transform_filters([panel, slice], filters);
                        let count = [tiles.len(), slice, panel];
                        call.multiply([inputs, filters], products, count, &mut Ahead::nothing());
                    }
                    call.transform_outputs(products, tiles.clone(), panel);
                });
            }
        }
    }
}

/// The operands of one run.
pub(super) struct Call<'a, F, T> {
    pub(super) tiles: &'a Tiles<F, T>,
    cpu: &'a Cpu,
    pub(super) x: &'a [T],
    pub(super) zeros: &'a [T],
    weight: &'a [f32],
    pub(super) output: Shared<'a, T>,
}

impl<F: Filter, T: Number> Call<'_, F, T> {
    fn transform_filters(&self, [panel, slice]: [usize; 2], to: &mut [f32]) {
        let tiles = self.tiles;
        let Geometry { channels, outputs, kernel, turned, .. } = tiles.geometry;
        let filters = Filters { weight: self.weight, channels, outputs, len: kernel[0] * kernel[1], turned };
        let (target, panel) = tiles.target_of(panel);
        let phases = if turned { target..target + 1 } else { 0..tiles.geometry.phases() };
        let places: Vec<_> =
            phases.map(|phase| tiles.geometry.places(&tiles.geometry.phase(phase))).collect();
        let transform = TransformFilters {
            filters,
            places: &places,
            of_phase: tiles.of_phase,
            outputs: panel * tiles.width..(panel + 1) * tiles.width,
            vectors: tiles.vectors,
            channels: slice * tiles.depth..(slice + 1) * tiles.depth,
            to,
            stride: tiles.filter_stride(),
            filter: tiles.geometry.filter,
        };
        simd::run(self.cpu.isa(), transform);
    }

    fn transform_inputs(&self, tiles: Range<usize>, first: usize, to: Shared<'_, f32>) {
        simd::run(self.cpu.isa(), TransformInputs { call: self, tiles, first, to });
    }

    /// What the products of a block fetch meanwhile: the inputs of the next block, and the outputs of this one.
    fn ahead(&self, block: &Range<usize>) -> Ahead<2> {
        let Tiles { geometry, vectors, width, .. } = *self.tiles;
        let x = geometry.numbers_of(self.x.len(), block.end..block.end + block.len());
        let y = geometry.numbers_of(self.output.len(), block.clone());
        let parts =
            [(self.x.as_ptr().wrapping_add(x.start), x.len()), (self.output.address(y.start), y.len())];
        let groups = block.len().div_ceil(self.tiles.rows());
        let pairs = self.tiles.panels() * width / (vectors * self.cpu.isa().lanes());
        Ahead::of(parts, geometry.points() * pairs * groups)
    }

    /// Multiplies `count` tiles by one slice of channels of a panel.
    fn multiply(
        &self,
        [inputs, filters]: [&[f32]; 2],
        products: &mut [f32],
        [count, slice, panel]: [usize; 3],
        ahead: &mut Ahead<2>,
    ) {
        let tiles = self.tiles;
        let (target, _) = tiles.target_of(panel);
        simd::run(self.cpu.isa(), Multiply { tiles, inputs, filters, products, count, slice, target, ahead });
    }

    fn transform_outputs(&self, products: &[f32], tiles: Range<usize>, panel: usize) {
        simd::run(self.cpu.isa(), TransformOutputs { call: self, products, tiles, panel });
    }
}
