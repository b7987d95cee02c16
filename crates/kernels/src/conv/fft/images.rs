//! Forward and backward-data: images to images, a block of tiles at a time.

use pulp::{Simd, WithSimd};

use super::SKEW;
use super::product::{Factor, Product};
use super::tiling::{AxisTiles, Tiling};
use super::transform::{self, Points, Slots, is_pair, normalisation};
use crate::Cpu;
use crate::conv::plan::TypedKernel;
use crate::conv::problem::{ConvProblem, Pass};
use crate::conv::workspace::{LINE, aligned};
use crate::simd;

/// The most tiles that are transformed, multiplied and transformed back together.
const BLOCK: usize = 12;
/// The most floats of a block's products with two vectors of kernels, unless [`BLOCK`] / 2 tiles need more: 768 KiB.
const PRODUCTS: usize = 3 << 16;

/// A convolution of N x H x W x C images to N x OH x OW x K images.
pub(super) struct Images {
    problem: ConvProblem,
    pass: Pass,
    tiling: Tiling,
    lanes: usize,
    threads: usize,
    /// Blocks that the tiles are divided into evenly.
    blocks: usize,
}

impl std::ops::Deref for Images {
    type Target = Tiling;

    fn deref(&self) -> &Tiling {
        &self.tiling
    }
}

impl Images {
    pub(super) fn new(problem: &ConvProblem, pass: Pass, tiling: Tiling, cpu: &Cpu) -> Images {
        let threads = cpu.threads();
        let tiles = tiling.tiles();
        let lanes = cpu.isa().lanes();
        let block = (PRODUCTS / (tiling.slots() * 4 * lanes)).clamp(BLOCK / 2, BLOCK);
        let blocks = tiles.div_ceil(block).next_multiple_of(threads).min(tiles);
        Images { problem: *problem, pass, tiling, lanes, threads, blocks }
    }

    fn padded_channels(&self) -> usize {
        self.channels.next_multiple_of(self.lanes)
    }

    /// Vectors of a group's outputs.
    fn vectors(&self) -> usize {
        self.outputs.div_ceil(self.lanes)
    }

    fn kernel_stride(&self) -> usize {
        self.channels * 2 * self.lanes + SKEW
    }

    /// Floats of the transformed kernels of one vector of outputs: [slot][channel][re, im].
    fn kernel_len(&self) -> usize {
        self.slots() * self.kernel_stride()
    }

    fn kernels_len(&self) -> usize {
        self.groups * self.vectors() * self.kernel_len()
    }

    /// Tiles of the largest block.
    fn block_tiles(&self) -> usize {
        self.tiles().div_ceil(self.blocks)
    }

    /// Floats of one slot of a block's inputs: [tile][re, im][channel].
    fn input_stride(&self) -> usize {
        self.block_tiles() * 2 * self.padded_channels() + SKEW
    }

    /// Floats of one slot of a block's products with two vectors of kernels: [tile][vector][re, im].
    fn product_stride(&self) -> usize {
        self.block_tiles() * 4 * self.lanes + SKEW
    }

    fn scratch_len(&self) -> usize {
        transform::scratch_len(self.size(), self.lanes).next_multiple_of(self.lanes)
    }

    fn worker_len(&self) -> usize {
        self.slots() * (self.input_stride() + self.product_stride()) + self.scratch_len()
    }

    pub(super) fn workspace_len(&self) -> usize {
        let workers = self.threads.saturating_mul(self.worker_len());
        (LINE + self.kernels_len()).saturating_add(workers)
    }

    /// Channels of the images that are read and written.
    fn image_channels(&self) -> [usize; 2] {
        [self.groups * self.channels, self.groups * self.outputs]
    }

    /// Height and width of the images that are read and written.
    fn image_sizes(&self) -> [[usize; 2]; 2] {
        let (h, w) = (&self.problem.height, &self.problem.width);
        let (x, y) = ([h.input, w.input], [h.output(), w.output()]);
        if self.pass == Pass::BackwardData { [y, x] } else { [x, y] }
    }

    /// The rows of output of every tile.
    fn output_tiles<'a>(&self, output: &'a mut [f32]) -> Vec<Vec<&'a mut [f32]>> {
        let (k, [height, width]) = (self.image_channels()[1], self.image_sizes()[1]);
        let mut tiles: Vec<Vec<&mut [f32]>> = (0..self.tiles()).map(|_| Vec::new()).collect();
        for (image, rows) in output.chunks_mut(height * width * k).enumerate() {
            for (y, row) in rows.chunks_mut(width * k).enumerate() {
                let first = (image * self.rows.count + y / self.rows.step) * self.columns.count;
                for (x, points) in row.chunks_mut(self.columns.step * k).enumerate() {
                    tiles[first + x].push(points);
                }
            }
        }
        tiles
    }
}

impl TypedKernel<f32> for Images {
    fn run(&self, cpu: &Cpu, [input, weight]: [&[f32]; 2], output: &mut [f32], workspace: &mut [f32]) {
        let work = output.len() * self.channels;
        let (kernels, scratch) = aligned(workspace).split_at_mut(self.kernels_len());
        let per_thread = (self.groups * self.vectors()).div_ceil(self.threads);
        let tasks =
            kernels.chunks_mut(per_thread * self.kernel_len()).zip(scratch.chunks_mut(self.worker_len()));
        cpu.for_each(work, tasks.enumerate(), |(thread, (kernels, scratch))| {
            for (index, kernel) in kernels.chunks_mut(self.kernel_len()).enumerate() {
                let index = thread * per_thread + index;
                simd::run(cpu.isa(), Kernel { images: self, weight, index, kernel, scratch });
            }
        });
        let kernels = &*kernels;
        let mut outputs = self.output_tiles(output).into_iter();
        let mut blocks = (0..self.blocks).map(|block| {
            let [first, end] = [block, block + 1].map(|block| block * self.tiles() / self.blocks);
            (first, outputs.by_ref().take(end - first).collect())
        });
        let per_thread = self.blocks.div_ceil(self.threads);
        let tasks = scratch
            .chunks_mut(self.worker_len())
            .map(|scratch| (blocks.by_ref().take(per_thread).collect::<Vec<_>>(), scratch));
        cpu.for_each(work, tasks, |(blocks, scratch)| {
            for (first, outputs) in blocks {
                simd::run(cpu.isa(), TileBlock { images: self, input, kernels, first, outputs, scratch });
            }
        });
    }
}

/// Transforms the kernels of one vector of outputs.
struct Kernel<'a> {
    images: &'a Images,
    weight: &'a [f32],
    /// The vector, counted over all groups.
    index: usize,
    kernel: &'a mut [f32],
    scratch: &'a mut [f32],
}

impl WithSimd for Kernel<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Kernel { images, weight, index, kernel, scratch } = self;
        let lanes = S::F32_LANES;
        let [_, channels_per_group, r, s] = images.problem.weight_shape();
        let [rows, columns] = [images.rows.taps(s * lanes), images.columns.taps(lanes)];
        let (group, first) = (index / images.vectors(), index % images.vectors() * lanes);
        let (taps, scratch) = scratch.split_at_mut(r * s * lanes);
        let scale = normalisation(images.size());
        for channel in 0..images.channels {
            taps.fill(0.0);
            for lane in 0..lanes.min(images.outputs - first) {
                let (from, to) = (group * images.channels + channel, group * images.outputs + first + lane);
                // The kernel from dx to dy, turned by 180 degrees, leads from dy to dx.
                let turned = images.pass == Pass::BackwardData;
                let kernel = if turned {
                    from * channels_per_group + first + lane
                } else {
                    to * channels_per_group + channel
                };
                for (tap, &value) in weight[kernel * r * s..][..r * s].iter().enumerate() {
                    let tap = if turned { r * s - 1 - tap } else { tap };
                    taps[tap * lanes + lane] = value * scale;
                }
            }
            let points = Points { data: taps, rows: &rows, columns: &columns, take: lanes };
            let slots = Slots { stride: images.kernel_stride(), place: channel * 2 * lanes, im: lanes };
            transform::forward(simd, images.size(), &points, (kernel, slots), scratch);
        }
    }
}

/// One block of tiles, from input to output.
struct TileBlock<'a, 'b> {
    images: &'a Images,
    input: &'a [f32],
    kernels: &'a [f32],
    /// The first tile, counted over all images.
    first: usize,
    /// Rows of output of each tile.
    outputs: Vec<Vec<&'b mut [f32]>>,
    scratch: &'a mut [f32],
}

impl WithSimd for TileBlock<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(mut self, simd: S) {
        let images = self.images;
        let slots = images.slots();
        let (inputs, rest) = self.scratch.split_at_mut(slots * images.input_stride());
        let (products, scratch) = rest.split_at_mut(slots * images.product_stride());
        let kernels_per_group = images.vectors() * images.kernel_len();
        for (group, kernels) in self.kernels.chunks(kernels_per_group).enumerate() {
            for tile in 0..self.outputs.len() {
                let place = (self.first + tile, group);
                let to = (&mut *inputs, tile * 2 * images.padded_channels());
                images.transform_input(simd, self.input, place, to, scratch);
            }
            for vector in (0..images.vectors()).step_by(2) {
                let count = (images.vectors() - vector).min(2);
                let kernels = &kernels[vector * images.kernel_len()..];
                images.multiply(simd, inputs, kernels, [self.outputs.len(), count], products);
                for (tile, rows) in self.outputs.iter_mut().enumerate() {
                    for v in 0..count {
                        let first = (vector + v) * S::F32_LANES;
                        let take = S::F32_LANES.min(images.outputs - first);
                        let place = tile * 4 * S::F32_LANES + v * 2 * S::F32_LANES;
                        let channel = group * images.outputs + first;
                        images.transform_output(simd, (products, place), rows, [channel, take], scratch);
                    }
                }
            }
        }
    }
}

impl Images {
    #[inline(always)]
    fn transform_input<S: Simd>(
        &self,
        simd: S,
        input: &[f32],
        (tile, group): (usize, usize),
        (inputs, place): (&mut [f32], usize),
        scratch: &mut [f32],
    ) {
        let lanes = S::F32_LANES;
        let (c, [height, width]) = (self.image_channels()[0], self.image_sizes()[0]);
        let [image, row, column] = self.locate(tile);
        let input = &input[image * height * width * c..][..height * width * c];
        let rows = self.rows.inputs(row, width * c);
        let columns = self.columns.inputs(column, c);
        for first in (0..self.channels).step_by(lanes) {
            let data = &input[group * self.channels + first..];
            let take = lanes.min(self.channels - first);
            let points = Points { data, rows: &rows, columns: &columns, take };
            let slots =
                Slots { stride: self.input_stride(), place: place + first, im: self.padded_channels() };
            transform::forward(simd, self.size(), &points, (&mut *inputs, slots), scratch);
        }
    }

    /// The products of `tiles` tiles with the kernels of `vectors` vectors, slot by slot.
    #[inline(always)]
    fn multiply<S: Simd>(
        &self,
        simd: S,
        inputs: &[f32],
        kernels: &[f32],
        [tiles, vectors]: [usize; 2],
        products: &mut [f32],
    ) {
        let lanes = S::F32_LANES;
        let c = self.padded_channels();
        for (slot, products) in products.chunks_exact_mut(self.product_stride()).enumerate() {
            let product = Product {
                left: Factor { data: &inputs[slot * self.input_stride()..], im: c, step: 1, next: 2 * c },
                right: Factor {
                    data: &kernels[slot * self.kernel_stride()..],
                    im: lanes,
                    step: 2 * lanes,
                    next: self.kernel_len(),
                },
                rows: tiles,
                vectors,
                depth: self.channels,
                pair: is_pair(self.size(), slot),
                accumulate: false,
                out_next: 4 * lanes,
            };
            product.write(simd, products);
        }
    }

    #[inline(always)]
    fn transform_output<S: Simd>(
        &self,
        simd: S,
        (products, place): (&[f32], usize),
        rows: &mut [&mut [f32]],
        [channel, take]: [usize; 2],
        scratch: &mut [f32],
    ) {
        let k = self.image_channels()[1];
        let columns = AxisTiles::first(rows[0].len() / k, k);
        let slots = Slots { stride: self.product_stride(), place, im: S::F32_LANES };
        let rows = rows.iter_mut().map(|row| &mut row[channel..]).enumerate();
        transform::inverse(simd, self.size(), (products, slots), rows, (&columns, take), scratch);
    }
}
