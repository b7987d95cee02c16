//! The three steps from a block of tiles to its outputs: inputs transformed, multiplied with filters, transformed back.

use std::ops::Range;

use pulp::{Simd, WithSimd};

use super::forward::{Call, Tiles};
use super::geometry::Tile;
use super::memory::{Grid, Number, load, store_part};
use super::transforms::{Filter, OUTPUTS, Output, Transform, column_of};
use crate::shared::Shared;
use crate::simd;
use crate::stream::Ahead;

/// Vectors of one side of the products that are multiplied at once: two, unless one of only a few vectors would then be all
/// zeros.
pub(super) fn vectors(channels: usize, lanes: usize) -> usize {
    match channels.div_ceil(lanes) {
        1 | 3 => 1,
        _ => 2,
    }
}

/// Rows of the other side: with these vectors, enough sums to hide the latency of multiply-adds, and few enough to stay in
/// registers.
pub(super) const fn rows(registers: usize, vectors: usize) -> usize {
    match (registers, vectors) {
        (32.., _) | (_, 1) => 8,
        _ => 4,
    }
}

/// Transforms tiles of a block: V[slice][point][tile / rows][channel / lanes][tile % rows][lane], with the channels of one phase
/// after those of another.
pub(super) struct TransformInputs<'a, F, T> {
    pub(super) call: &'a Call<'a, F, T>,
    pub(super) tiles: Range<usize>,
    /// Where the block starts.
    pub(super) first: usize,
    pub(super) to: Shared<'a, f32>,
}

impl<F: Filter, T: Number> WithSimd for TransformInputs<'_, F, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        match self.call.tiles.geometry.steps()[0] {
            1 => self.run::<S, 1>(simd),
            _ => self.run::<S, 2>(simd),
        }
    }
}

impl<F: Filter, T: Number> TransformInputs<'_, F, T> {
    #[inline(always)]
    fn run<S: Simd, const STEP: usize>(self, simd: S) {
        let Call { tiles, x, zeros, .. } = *self.call;
        let (lanes, rows) = (S::F32_LANES, tiles.rows());
        let [_, slice_len, _] = tiles.lens();
        let vectors = tiles.depth / lanes;
        let indices = self.tiles.start - self.first..;
        for (index, tile) in indices.zip(tiles.geometry.each_tile(self.tiles)) {
            let group = (index / rows) * rows * tiles.depth + (index % rows) * lanes;
            let to = (self.to, tiles.input_stride());
            for source in 0..tiles.geometry.sources() {
                let before = source * tiles.of_phase / lanes;
                let place = |vector: usize| {
                    let vector = before + vector;
                    vector / vectors * slice_len + group + vector % vectors * rows * lanes
                };
                // SAFETY: places of different tiles of a block differ: by their group of rows, or by the row in it. Each block, or
                // group of rows of one, is transformed by one task with a buffer that no other one writes (`Tiles::run_group`).
                unsafe {
                    tiles.geometry.transform_input::<S, STEP>(simd, [x, zeros], (&tile, source), to, place);
                }
            }
        }
    }
}

/// Multiplies a block's inputs with a panel's filters, M[point][output / pair][tile][pair] = V U. The product of a point's first
/// channels overwrites M, those of the other slices of channels are added. A pair is one vector or two.
pub(super) struct Multiply<'a, F, T> {
    pub(super) tiles: &'a Tiles<F, T>,
    pub(super) inputs: &'a [f32],
    pub(super) filters: &'a [f32],
    pub(super) products: &'a mut [f32],
    /// Tiles of the block.
    pub(super) count: usize,
    pub(super) slice: usize,
    /// The panel's phase.
    pub(super) target: usize,
    /// What is fetched meanwhile.
    pub(super) ahead: &'a mut Ahead<2>,
}

impl<F: Filter, T: Number> WithSimd for Multiply<'_, F, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        match (self.tiles.rows(), self.tiles.vectors) {
            (_, 1) => self.blocked::<S, 8, 1>(simd),
            (8, _) => self.blocked::<S, 8, 2>(simd),
            _ => self.blocked::<S, 4, 2>(simd),
        }
    }
}

impl<F: Filter, T: Number> Multiply<'_, F, T> {
    #[inline(always)]
    fn blocked<S: Simd, const ROWS: usize, const V: usize>(self, simd: S) {
        let Tiles { block, depth, width, .. } = *self.tiles;
        let pair = V * S::F32_LANES;
        // The last slice may have fewer channels.
        let slice = self.slice * depth..((self.slice + 1) * depth).min(self.tiles.channels());
        for point in 0..self.tiles.geometry.points() {
            let products = &mut self.products[point * self.tiles.product_stride()..][..block * width];
            let all = self.tiles.channels_of(point, self.target);
            if all.is_empty() && self.slice == 0 {
                products.fill(0.0);
            }
            let channels = slice.start.max(all.start)..slice.end.min(all.end);
            if channels.is_empty() {
                continue;
            }
            let fresh = channels.start == all.start;
            let first = channels.start - slice.start;
            let end = first + channels.len().next_multiple_of(S::F32_LANES);
            let inputs = &self.inputs[point * self.tiles.input_stride()..][..block * depth];
            let filters = &self.filters[point * self.tiles.filter_stride()..][..width * depth];
            let pairs = filters.chunks_exact(depth * pair).zip(products.chunks_exact_mut(block * pair));
            for (filters, products) in pairs {
                let filters = &filters[first * pair..];
                let groups = inputs.chunks_exact(ROWS * depth).zip(products.chunks_exact_mut(ROWS * pair));
                for (inputs, products) in groups.take(self.count.div_ceil(ROWS)) {
                    self.ahead.step();
                    let inputs = &inputs[first * ROWS..end * ROWS];
                    product::<S, ROWS, V>(simd, inputs, filters, products, fresh);
                }
            }
        }
    }
}

/// m = v u, or m += v u: v as [channel / lanes][ROWS][lane], u as [channel][V vectors], m as [ROWS][V vectors].
#[inline(always)]
fn product<S: Simd, const ROWS: usize, const V: usize>(
    simd: S,
    v: &[f32],
    u: &[f32],
    m: &mut [f32],
    fresh: bool,
) {
    let lanes = S::F32_LANES;
    let mut sums = [[simd.splat_f32s(0.0); V]; ROWS];
    for (v, u) in v.chunks_exact(ROWS * lanes).zip(u.chunks_exact(V * lanes * lanes)) {
        for q in 0..lanes {
            // SAFETY: `u` is a chunk of V vectors for each of as many channels as there are lanes; q is below `lanes` and half
            // below V.
            let u: [_; V] = simd::array(|half| unsafe { load::<S, f32>(u, (V * q + half) * lanes) });
            for row in 0..ROWS {
                let value = simd.splat_f32s(v[row * lanes + q]);
                for half in 0..V {
                    sums[row][half] = simd.mul_add_f32s(value, u[half], sums[row][half]);
                }
            }
        }
    }
    add_to(simd, sums, m, fresh);
}

/// m = sums, or m += sums: m as [ROWS][V vectors].
#[inline(always)]
pub(super) fn add_to<S: Simd, const ROWS: usize, const V: usize>(
    simd: S,
    sums: [[S::f32s; V]; ROWS],
    m: &mut [f32],
    fresh: bool,
) {
    let (m, _) = S::as_mut_simd_f32s(m);
    // One check for all rows.
    let m = m.as_chunks_mut::<V>().0.first_chunk_mut::<ROWS>().expect("m has all rows");
    for row in 0..ROWS {
        for half in 0..V {
            m[row][half] = if fresh { sums[row][half] } else { simd.add_f32s(m[row][half], sums[row][half]) };
        }
    }
}

/// Transforms a block's products with a panel to outputs.
pub(super) struct TransformOutputs<'a, F, T> {
    pub(super) call: &'a Call<'a, F, T>,
    pub(super) products: &'a [f32],
    pub(super) tiles: Range<usize>,
    pub(super) panel: usize,
}

impl<F: Filter, T: Number> WithSimd for TransformOutputs<'_, F, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        match self.call.tiles.geometry.steps()[1] {
            1 => self.run::<S, 1>(simd),
            _ => self.run::<S, 2>(simd),
        }
    }
}

impl<F: Filter, T: Number> TransformOutputs<'_, F, T> {
    #[inline(always)]
    fn run<S: Simd, const STEP: usize>(self, simd: S) {
        let panel = self.call.tiles.target_of(self.panel);
        for (index, tile) in self.call.tiles.geometry.each_tile(self.tiles.clone()).enumerate() {
            self.tile::<S, STEP>(simd, (index, &tile), panel);
        }
    }

    #[inline(always)]
    fn tile<S: Simd, const STEP: usize>(
        &self,
        simd: S,
        (index, tile): (usize, &Tile),
        (target, panel): (usize, usize),
    ) {
        let Call { tiles, output, .. } = self.call;
        let lanes = S::F32_LANES;
        let geometry = &tiles.geometry;
        let (image, first_pixel) = geometry.first_output::<STEP>(tile, target);
        let [row, column] = first_pixel;
        let [height, width] = tiles.geometry.output;
        let k = tiles.geometry.outputs;
        let pixel = k * tiles.geometry.groups;
        let points = Grid::of_points(F::INPUTS, tiles.product_stride());
        let pixels = Grid { row: STEP * width * pixel, column: STEP * pixel };
        let start = panel * tiles.width;
        let reaches = |d: usize| first_pixel[d] + (STEP * (F::OUTPUTS - 1)) as isize;
        let whole = row.min(column) >= 0 && reaches(0) < height as isize && reaches(1) < width as isize;
        // The tile's first pixel, which may lie before the images.
        let corner = (image * height * width).wrapping_add_signed(row * width as isize + column);
        let corner = corner.wrapping_mul(pixel).wrapping_add(tiles.geometry.group * k);
        for (vector, first) in (start..k.min(start + tiles.width)).step_by(lanes).enumerate() {
            let take = lanes.min(k - first);
            let v = tiles.vectors;
            let place = ((vector / v * tiles.block + index) * v + vector % v) * lanes;
            let products = &self.products[place..];
            assert!(points.fits::<S>(F::INPUTS, 0, products.len()), "a tile's products beyond their block");
            let column = |j| {
                // SAFETY: `fits` has checked that the last point's vector is inside, and no other point's vector lies behind
                // it; `square` and `column_of` use only points within this side.
                column_of(simd, F::INPUTS, |i| unsafe { points.load::<S>(products, [i, j]) })
            };
            let corner = corner.wrapping_add(first);
            if whole && take == lanes {
                assert!(pixels.fits::<S>(F::OUTPUTS, corner, output.len()), "a tile beyond the output");
                Output::<F>::square(simd, column, |i, j, value| {
                    // SAFETY: `fits` has checked that the vector of the tile's last pixel is inside, and no other pixel's
                    // vector lies behind it. Each output belongs to one tile and phase and, with its channel, to one panel of one
                    // group; each tile's products with a panel are transformed once, so that nobody else writes this.
                    unsafe { pixels.store::<S, T>((*output, corner), [i, j], value) }
                });
            } else {
                let mut square = [[simd.splat_f32s(0.0); OUTPUTS]; OUTPUTS];
                Output::<F>::square(simd, column, |i, j, value| square[i][j] = value);
                let [rows, columns] = geometry.outputs_inside::<STEP>(first_pixel);
                for (i, j) in rows.flat_map(|i| columns.clone().map(move |j| (i, j))) {
                    // SAFETY: the pixel is inside of the output and belongs to this tile and phase alone; `take` channels from
                    // `first` on are those of this vector. Each tile's products with a panel are transformed once, so
                    // that nobody else writes this.
                    let to = unsafe { output.part(corner.wrapping_add(pixels.place([i, j])), take) };
                    store_part(simd, to, square[i][j]);
                }
            }
        }
    }
}
