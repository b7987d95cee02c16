//! Backward-weights of a 1 x 1 kernel without groups and padding: x and dy are packed, a tile of pixels at a time.
//!
//! ```text
//! dw[k][c] = sum over pixels of dy[pixel][k] x[pixel][c]
//! ```
//! Each element is used only a few times, so reading it must be cheap. In the tensors, neighbouring pixels' channels often
//! lie a power of two apart, so that the same channels of many pixels fall into a few sets of the L1 cache. After packing, a
//! register block reads dense memory, and the next tile is fetched meanwhile.

use std::ops::Range;

use pulp::{Simd, WithSimd};

use super::registers::{by_block, fitting, last_mask, load, most_rows, most_vectors, store};
use super::weights::parts;
use crate::conv::even::even_parts;
use crate::conv::plan::TypedKernel;
use crate::conv::problem::{ConvAxis, ConvProblem};
use crate::conv::workspace::{LINE, aligned};
use crate::shared::Shared;
use crate::{Cpu, Isa, simd, stream};

/// The most floats of a panel of x: with a register block's part of dy it stays in the L1 cache.
const PANEL_FLOATS: usize = 6 * 1024;
/// The most pixels of a tile.
const MOST_PIXELS: usize = 384;

/// The weight gradient of one problem.
pub(super) struct PointwiseSums {
    isa: Isa,
    axes: [ConvAxis; 2],
    /// Output pixels.
    pixels: usize,
    in_channels: usize,
    out_channels: usize,
    tile_pixels: usize,
    /// Input channels of a panel (whole vectors), and output channels of a register block.
    width: usize,
    rows: usize,
    /// See [`parts`].
    pixel_parts: usize,
    panel_parts: usize,
    work: usize,
}

impl PointwiseSums {
    /// Whether this code applies to the problem.
    pub(super) fn takes(problem: &ConvProblem) -> bool {
        let point = |axis: &ConvAxis| axis.kernel == 1 && axis.pad_before == 0 && axis.pad_after == 0;
        problem.groups == 1 && point(&problem.height) && point(&problem.width)
    }

    pub(super) fn new(problem: &ConvProblem, cpu: &Cpu) -> Self {
        let in_channels = problem.in_channels;
        let isa = fitting(cpu.isa(), in_channels);
        let (lanes, registers) = (isa.lanes(), isa.registers());
        let vectors = in_channels.div_ceil(lanes).min(most_vectors(registers));
        let width = vectors * lanes;
        let pixels = problem.batch * problem.height.output() * problem.width.output();
        let tile_pixels = pixels.div_ceil(pixels.div_ceil((PANEL_FLOATS / width).min(MOST_PIXELS)));
        let (tiles, panels) = (pixels.div_ceil(tile_pixels), in_channels.div_ceil(width));
        let [pixel_parts, panel_parts] = parts(cpu, tiles, panels, true);
        PointwiseSums {
            isa,
            axes: [problem.height, problem.width],
            pixels,
            in_channels,
            out_channels: problem.out_channels,
            tile_pixels,
            width,
            rows: most_rows(registers, vectors),
            pixel_parts,
            panel_parts,
            work: problem.flops() as usize,
        }
    }

    /// Floats of a task's packed dy, and of one packed panel of x, as whole lines.
    fn scratch_lens(&self) -> [usize; 2] {
        let dy = self.out_channels.next_multiple_of(self.rows) * self.tile_pixels;
        [dy, self.width * self.tile_pixels].map(|len| len.next_multiple_of(LINE))
    }

    pub(super) fn workspace_len(&self) -> Option<usize> {
        let sums = (self.in_channels * self.out_channels).checked_mul(self.pixel_parts - 1)?;
        let scratch =
            self.scratch_lens().iter().sum::<usize>().checked_mul(self.pixel_parts * self.panel_parts)?;
        sums.checked_add(scratch)?.checked_add(LINE)
    }

    /// Where the channels that an output pixel reads start in x.
    #[inline(always)]
    fn source(&self, pixel: usize) -> usize {
        let [height, width] = &self.axes;
        let pixel = if height.stride == 1 && width.stride == 1 {
            pixel
        } else {
            let (row, column) = (pixel / width.output(), pixel % width.output());
            let (image, row) = (row / height.output(), row % height.output());
            (image * height.input + row * height.stride) * width.input + column * width.stride
        };
        pixel * self.in_channels
    }
}

impl TypedKernel<f32> for PointwiseSums {
    fn run(&self, cpu: &Cpu, [x, dy]: [&[f32]; 2], dweight: &mut [f32], workspace: &mut [f32]) {
        let [dy_len, x_len] = self.scratch_lens();
        let scratch_len = self.pixel_parts * self.panel_parts * (dy_len + x_len);
        let (scratch, others) = aligned(workspace).split_at_mut(scratch_len);
        let others = &mut others[..(self.pixel_parts - 1) * dweight.len()];
        // The first part's sums are stored in the result itself.
        let len = dweight.len();
        let parts = [&mut *dweight].into_iter().chain(others.chunks_exact_mut(len));
        let parts: Vec<_> = parts.map(Shared::new).collect();
        let (tiles, panels) = (self.pixels.div_ceil(self.tile_pixels), self.in_channels.div_ceil(self.width));
        let tasks = parts.iter().enumerate().flat_map(|(part, &sums)| {
            let tiles = part * tiles / self.pixel_parts..(part + 1) * tiles / self.pixel_parts;
            even_parts(panels, panels.div_ceil(self.panel_parts))
                .map(move |panels| (tiles.clone(), panels, sums))
        });
        cpu.for_each(self.work, tasks.zip(scratch.chunks_exact_mut(dy_len + x_len)), |(task, scratch)| {
            let (tiles, panels, sums) = task;
            let (packed_dy, packed_x) = scratch.split_at_mut(dy_len);
            simd::run(self.isa, Task { all: self, x, dy, tiles, panels, sums, packed_dy, packed_x });
        });
        for other in others.chunks_exact(len) {
            let rows = dweight.chunks_mut(self.in_channels).zip(other.chunks(self.in_channels));
            cpu.for_each(other.len(), rows, |(row, other)| {
                row.iter_mut().zip(other).for_each(|(sum, &value)| *sum += value);
            });
        }
    }
}

/// Some panels' sums over some tiles of pixels.
struct Task<'a> {
    all: &'a PointwiseSums,
    x: &'a [f32],
    dy: &'a [f32],
    tiles: Range<usize>,
    panels: Range<usize>,
    /// [k][c]; the task uses only its panels' channels.
    sums: Shared<'a, f32>,
    /// [block of rows][pixel of the tile][row]
    packed_dy: &'a mut [f32],
    /// [pixel of the tile][lane], of one panel at a time.
    packed_x: &'a mut [f32],
}

impl WithSimd for Task<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Task { all, x, dy, tiles, panels, sums, packed_dy, packed_x } = self;
        let &PointwiseSums { in_channels, out_channels, width, rows, tile_pixels, pixels, .. } = all;
        let channels = |panel: usize| panel * width..in_channels.min((panel + 1) * width);
        let mine = channels(panels.start).start..channels(panels.end - 1).end;
        let end = pixels.min(tiles.end * tile_pixels);
        for index in tiles.clone() {
            let tile = index * tile_pixels..end.min((index + 1) * tile_pixels);
            let dy_of = |tile: &Range<usize>| &dy[tile.start * out_channels..tile.end * out_channels];
            by_block!(rows, 1, pack_dy::<S>(simd, dy_of(&tile), out_channels, packed_dy));
            let next = tile.end..end.min(tile.end + tile_pixels);
            let blocks = out_channels.div_ceil(rows);
            // Before each register block, prefetches a part of what the next tile will pack.
            let fetch = |block: usize| {
                let blocks = blocks * panels.len();
                let part = |place: usize| next.start + place * next.len() / blocks;
                let part = part(block)..part(block + 1);
                part.clone().for_each(|pixel| {
                    let x = x.as_ptr().wrapping_add(all.source(pixel) + mine.start);
                    stream::prefetch_to_l2(x, mine.len());
                });
                stream::prefetch_to_l2(dy_of(&part).as_ptr(), dy_of(&part).len());
            };
            for panel in panels.clone() {
                let channels = channels(panel);
                let vectors = channels.len().div_ceil(S::F32_LANES);
                let places = tile.clone().map(|pixel| all.source(pixel) + channels.start);
                by_block!(1, vectors, pack_x::<S>(simd, x, places, channels.len(), packed_x));
                for block in 0..blocks {
                    fetch((panel - panels.start) * blocks + block);
                    let first = block * rows;
                    let block = PointwiseBlock {
                        pixels: tile.len(),
                        x: packed_x,
                        dy: &packed_dy[first * tile.len()..],
                        rows,
                        sums: (sums, first * in_channels + channels.start),
                        row_len: in_channels,
                        channels: channels.len(),
                        fresh: index == tiles.start,
                    };
                    by_block!(rows.min(out_channels - first), vectors, add_products::<S>(simd, &block));
                }
            }
        }
    }
}

/// Packs a tile's dy as [block of M channels][pixel][channel of the block]. Channels that the last block lacks are left as they
/// are.
#[inline(always)]
fn pack_dy<S: Simd, const M: usize, const V: usize>(_: S, dy: &[f32], channels: usize, packed: &mut [f32]) {
    let block = dy.len() / channels * M;
    assert!(packed.len() >= block * channels.div_ceil(M));
    for (pixel, dy) in dy.chunks_exact(channels).enumerate() {
        let (whole, rest) = dy.as_chunks::<M>();
        let mut to = packed.as_mut_ptr().wrapping_add(pixel * M);
        for channels in whole {
            // SAFETY: `to` is `pixel * M` floats from the start of one of the blocks; there are channels / M of them, rounded
            // up. A block has M floats for each pixel, so M floats follow, and the assertion has checked that all blocks are
            // in `packed`.
            unsafe { to.cast::<[f32; M]>().write_unaligned(*channels) };
            to = to.wrapping_add(block);
        }
        if !rest.is_empty() {
            // SAFETY: `to` is `pixel * M` floats from the start of the last block, which has M floats for each pixel, too, and
            // the rest are fewer. `packed` is borrowed mutably, so that the two do not overlap.
            unsafe { to.copy_from_nonoverlapping(rest.as_ptr(), rest.len()) };
        }
    }
}

/// Packs V vectors of x from each of these places as [pixel][lane]; lanes beyond the channels are zero.
#[inline(always)]
fn pack_x<S: Simd, const M: usize, const V: usize>(
    simd: S,
    x: &[f32],
    places: impl Iterator<Item = usize>,
    channels: usize,
    packed: &mut [f32],
) {
    let last = last_mask(simd, channels);
    assert!(V == channels.div_ceil(S::F32_LANES), "{channels} channels in {V} vectors");
    let (packed, _) = S::as_mut_simd_f32s(packed);
    for (place, to) in places.zip(packed.as_chunks_mut::<V>().0) {
        let x = &x[place..][..channels];
        // SAFETY: `x` has been cut to the channels: V vectors, where `last` masks the last one if that is not full.
        *to = unsafe { load::<S, V>(simd, x.as_ptr(), last) };
    }
}

/// What a register block multiplies.
struct PointwiseBlock<'a> {
    pixels: usize,
    /// [pixel][lane]
    x: &'a [f32],
    /// [pixel][row]
    dy: &'a [f32],
    rows: usize,
    /// Where its sums start.
    sums: (Shared<'a, f32>, usize),
    /// Floats from a row of the sums to the next.
    row_len: usize,
    /// Input channels.
    channels: usize,
    /// Whether these are the first products, which overwrite the sums.
    fresh: bool,
}

/// sums[m][v] (+)= the sum over the pixels of dy[m] x[v], for M output channels and V vectors of input channels.
#[inline(always)]
fn add_products<S: Simd, const M: usize, const V: usize>(simd: S, block: &PointwiseBlock<'_>) {
    let &PointwiseBlock { pixels, x, dy, rows, sums: (sums, first), row_len, channels, fresh } = block;
    // SAFETY: tasks that share sums have different panels, and so different channels of each row: nobody else uses these.
    let sums: [_; M] = simd::array(|m| unsafe { sums.part(first + m * row_len, channels) }.as_mut_ptr());
    sums.iter().for_each(|sums| stream::prefetch(sums.cast_const(), V * S::F32_LANES));
    let mut products = [[simd.splat_f32s(0.0); V]; M];
    assert!(M <= rows && x.len() >= pixels * V * S::F32_LANES && dy.len() >= pixels * rows);
    let (mut x, mut dy) = (x.as_ptr().cast::<S::f32s>(), dy.as_ptr());
    for _ in 0..pixels {
        // SAFETY: the assertion has checked that there are V vectors of x and `rows` floats of dy, M or more, for each of
        // `pixels`; both pointers advance by one pixel in each turn.
        unsafe {
            let x: [_; V] = simd::array(|v| x.add(v).read_unaligned());
            for m in 0..M {
                let dy = simd.splat_f32s(*dy.add(m));
                for v in 0..V {
                    products[m][v] = simd.mul_add_f32s(dy, x[v], products[m][v]);
                }
            }
        }
        (x, dy) = (x.wrapping_add(V), dy.wrapping_add(rows));
    }
    let last = last_mask(simd, channels);
    assert!(V == channels.div_ceil(S::F32_LANES), "{channels} channels in {V} vectors");
    for m in 0..M {
        // SAFETY: `part` has checked that `channels` floats of each row are inside: V vectors, where `last` masks the last
        // one if that is not full.
        unsafe {
            if !fresh {
                let before = load::<S, V>(simd, sums[m], last);
                (0..V).for_each(|v| products[m][v] = simd.add_f32s(products[m][v], before[v]));
            }
            store(simd, sums[m], products[m], last);
        }
    }
}
