//! Backward-weights: products of transformed tiles of x and dy are summed over the tiles and transformed back once.

use pulp::{Simd, WithSimd};

use super::SKEW;
use super::product::{Factor, Product};
use super::tiling::Tiling;
use super::transform::{self, MAX_TILE, Places, Points, Slots, is_pair, normalisation};
use crate::Cpu;
use crate::conv::plan::TypedKernel;
use crate::conv::problem::ConvProblem;
use crate::conv::workspace::{LINE, aligned};
use crate::simd;

/// The weight gradient of a problem.
///
/// Tiles are divided evenly into pieces. Each thread transforms a piece. Then the threads divide the slots among themselves,
/// and each sums its slots over the pieces of all threads. So there is one set of sums, and a run's rounding depends only on
/// the number of threads.
pub(super) struct Weights {
    problem: ConvProblem,
    tiling: Tiling,
    lanes: usize,
    threads: usize,
    pieces: usize,
}

impl std::ops::Deref for Weights {
    type Target = Tiling;

    fn deref(&self) -> &Tiling {
        &self.tiling
    }
}

impl Weights {
    pub(super) fn new(problem: &ConvProblem, tiling: Tiling, cpu: &Cpu) -> Weights {
        let (threads, lanes) = (cpu.threads(), cpu.isa().lanes());
        let mut weights = Weights { problem: *problem, tiling, lanes, threads, pieces: 1 };
        // Long pieces update the sums less often; short ones, 2 to 8 MiB, stay in the caches.
        let per_tile = weights.slots() * 2 * weights.padded().iter().sum::<usize>();
        let most = ((weights.sums_len() / 2).clamp(1 << 19, 1 << 21) / per_tile).clamp(8, 128);
        weights.pieces = tiling.tiles().div_ceil(most).next_multiple_of(threads).min(tiling.tiles());
        weights
    }

    /// C and K of a group in whole vectors.
    fn padded(&self) -> [usize; 2] {
        [self.channels, self.outputs].map(|channels| channels.next_multiple_of(self.lanes))
    }

    /// Floats of one slot of a piece's tiles of x and of dy: [tile][re, im][channel].
    fn strides(&self) -> [usize; 2] {
        let tiles = self.tiles().div_ceil(self.pieces);
        self.padded().map(|channels| tiles * 2 * channels + SKEW)
    }

    fn piece_len(&self) -> usize {
        self.slots() * self.strides().iter().sum::<usize>()
    }

    /// Floats of one slot's sums: [channel][vector of outputs][re, im].
    fn sum_stride(&self) -> usize {
        self.channels * 2 * self.padded()[1] + SKEW
    }

    fn sums_len(&self) -> usize {
        self.slots() * self.sum_stride()
    }

    fn scratch_len(&self) -> usize {
        let taps = self.problem.height.kernel * self.problem.width.kernel * self.lanes;
        (taps + transform::scratch_len(self.size(), self.lanes)).next_multiple_of(LINE)
    }

    pub(super) fn workspace_len(&self) -> usize {
        let workers = self.threads.saturating_mul(self.piece_len() + self.scratch_len());
        (LINE + self.sums_len()).saturating_add(workers)
    }

    /// First tile and end of a piece.
    fn piece(&self, piece: usize) -> [usize; 2] {
        [piece, piece + 1].map(|piece| piece * self.tiles() / self.pieces)
    }
}

impl TypedKernel<f32> for Weights {
    fn run(&self, cpu: &Cpu, [x, dy]: [&[f32]; 2], output: &mut [f32], workspace: &mut [f32]) {
        let work = dy.len() * self.channels;
        let (sums, rest) = aligned(workspace).split_at_mut(self.sums_len());
        let (pieces, scratch) = rest.split_at_mut(self.threads * self.piece_len());
        let kernel_len = self.channels * self.problem.height.kernel * self.problem.width.kernel;
        for (group, output) in output.chunks_mut(self.outputs * kernel_len).enumerate() {
            for first in (0..self.pieces).step_by(self.threads) {
                let count = (self.pieces - first).min(self.threads);
                let tasks = pieces.chunks_mut(self.piece_len()).zip(scratch.chunks_mut(self.scratch_len()));
                cpu.for_each(work, tasks.take(count).enumerate(), |(index, (piece, scratch))| {
                    let tiles = self.piece(first + index);
                    simd::run(cpu.isa(), Piece { weights: self, x, dy, group, tiles, piece, scratch });
                });
                let pieces: Vec<(usize, &[f32])> = (first..)
                    .zip(pieces.chunks(self.piece_len()).take(count))
                    .map(|(index, piece)| (self.piece(index)[1] - self.piece(index)[0], piece))
                    .collect();
                let slots = sums.chunks_mut(self.sum_stride()).enumerate();
                cpu.for_each(work, slots, |(slot, sums)| {
                    let accumulate = first > 0;
                    simd::run(cpu.isa(), Sum { weights: self, pieces: &pieces, slot, accumulate, sums });
                });
            }
            let per_thread = self.outputs.div_ceil(self.lanes).div_ceil(self.threads);
            let sums = &*sums;
            let tasks = output
                .chunks_mut(per_thread * self.lanes * kernel_len)
                .zip(scratch.chunks_mut(self.scratch_len()));
            cpu.for_each(work, tasks.enumerate(), |(thread, (output, scratch))| {
                for (index, output) in output.chunks_mut(self.lanes * kernel_len).enumerate() {
                    let vector = thread * per_thread + index;
                    simd::run(cpu.isa(), Finish { weights: self, sums, vector, output, scratch });
                }
            });
        }
    }
}

/// Transforms a piece's tiles of x and dy.
struct Piece<'a> {
    weights: &'a Weights,
    x: &'a [f32],
    dy: &'a [f32],
    group: usize,
    /// First tile and end.
    tiles: [usize; 2],
    piece: &'a mut [f32],
    scratch: &'a mut [f32],
}

impl WithSimd for Piece<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Piece { weights: w, x, dy, group, tiles: [first, end], piece, scratch } = self;
        let (inputs, gradients) = piece.split_at_mut(w.slots() * w.strides()[0]);
        let [c, k] = [w.channels, w.outputs].map(|channels| w.groups * channels);
        let (h, v) = (&w.problem.height, &w.problem.width);
        for tile in first..end {
            let [image, row, column] = w.locate(tile);
            let places = [w.rows.inputs(row, v.input * c), w.columns.inputs(column, c)];
            let image_x = &x[image * h.input * v.input * c + group * w.channels..];
            let to = (&mut *inputs, tile - first);
            w.transform(simd, (image_x, 0), &places, to, scratch);
            let places =
                [w.rows.output_gradients(row, v.output() * k), w.columns.output_gradients(column, k)];
            let image_dy = &dy[image * h.output() * v.output() * k + group * w.outputs..];
            let to = (&mut *gradients, tile - first);
            w.transform(simd, (image_dy, 1), &places, to, scratch);
        }
    }
}

impl Weights {
    /// Transforms a tile of x (`side` 0) or dy (`side` 1).
    #[inline(always)]
    fn transform<S: Simd>(
        &self,
        simd: S,
        (data, side): (&[f32], usize),
        [rows, columns]: &[Places; 2],
        (to, tile): (&mut [f32], usize),
        scratch: &mut [f32],
    ) {
        let lanes = S::F32_LANES;
        let (channels, im) = ([self.channels, self.outputs][side], self.padded()[side]);
        for first in (0..channels).step_by(lanes) {
            let points = Points { data: &data[first..], rows, columns, take: lanes.min(channels - first) };
            let slots = Slots { stride: self.strides()[side], place: tile * 2 * im + first, im };
            transform::forward(simd, self.size(), &points, (&mut *to, slots), scratch);
        }
    }
}

/// Adds the products of some pieces to the sums of one slot.
struct Sum<'a> {
    weights: &'a Weights,
    /// Tiles and transforms of each piece.
    pieces: &'a [(usize, &'a [f32])],
    slot: usize,
    accumulate: bool,
    sums: &'a mut [f32],
}

impl WithSimd for Sum<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Sum { weights: w, pieces, slot, accumulate, sums } = self;
        let lanes = S::F32_LANES;
        let ([c, k], strides) = (w.padded(), w.strides());
        for (index, &(tiles, piece)) in pieces.iter().enumerate() {
            let (inputs, gradients) = piece.split_at(w.slots() * strides[0]);
            let product = Product {
                left: Factor { data: &inputs[slot * strides[0]..], im: c, step: 2 * c, next: 1 },
                right: Factor { data: &gradients[slot * strides[1]..], im: k, step: 2 * k, next: lanes },
                rows: w.channels,
                vectors: k / lanes,
                depth: tiles,
                pair: is_pair(w.size(), slot),
                accumulate: accumulate || index > 0,
                out_next: 2 * k,
            };
            product.write(simd, sums);
        }
    }
}

/// Transforms the sums of one vector of outputs back.
struct Finish<'a> {
    weights: &'a Weights,
    sums: &'a [f32],
    vector: usize,
    /// [output][channel][R][S].
    output: &'a mut [f32],
    scratch: &'a mut [f32],
}

impl WithSimd for Finish<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Finish { weights: w, sums, vector, output, scratch } = self;
        let lanes = S::F32_LANES;
        let (r, s) = (w.problem.height.kernel, w.problem.width.kernel);
        let (taps, scratch) = scratch.split_at_mut(r * s * lanes);
        let mut columns = [None; MAX_TILE];
        for column in 0..s {
            columns[w.columns.gradient_position(column)] = Some(column * lanes);
        }
        let scale = normalisation(w.size());
        for channel in 0..w.channels {
            let place = channel * 2 * w.padded()[1] + vector * 2 * lanes;
            let slots = Slots { stride: w.sum_stride(), place, im: lanes };
            let rows = taps.chunks_exact_mut(s * lanes).enumerate();
            let rows = rows.map(|(row, taps)| (w.rows.gradient_position(row), taps));
            transform::inverse(simd, w.size(), (sums, slots), rows, (&columns, lanes), scratch);
            let kernels = output.chunks_exact_mut(w.channels * r * s);
            for (lane, kernel) in kernels.enumerate() {
                let kernel = &mut kernel[channel * r * s..][..r * s];
                for (tap, taps) in kernel.iter_mut().zip(taps.chunks_exact(lanes)) {
                    *tap = taps[lane] * scale;
                }
            }
        }
    }
}
