//! Backward-weights: dW = Gᵀ [sum over tiles of (A dY Aᵀ) ⊙ (Bᵀ d B)] G.

use std::ops::Range;

use pulp::{Simd, WithSimd};

use super::block::{add_to, rows, vectors};
use super::filters::TAPS;
use super::geometry::{Geometry, SKEW};
use super::groups::GroupKernel;
use super::memory::{Grid, LANES, Number, store};
use super::transforms::{Filter, TapsGradient, Transform, column_of};
use crate::Cpu;
use crate::shared::Shared;
use crate::simd::{self, registers};
use crate::stream::Ahead;

/// The gradient of a problem's filters by tiles of `F`.
///
/// A chunk of tiles of both images is transformed; then blocks of outputs x channels sum the products of its tiles.
#[derive(Clone, Copy)]
pub(super) struct Weights<F, T> {
    geometry: Geometry<F, T>,
    /// Channels of a phase, in whole pairs if there are several.
    of_phase: usize,
    /// Groups of threads with their own chunks and sums.
    teams: usize,
    /// Threads of a team, which share its chunk and split the blocks.
    threads: usize,
    /// Tiles of a chunk.
    chunk: usize,
    /// Outputs and channels of a block.
    block: [usize; 2],
    /// Vectors of a pair of channels, which are multiplied at once: 1 or 2.
    vectors: usize,
}

impl<F: Filter, T: Number> Weights<F, T> {
    pub(super) fn new(geometry: Geometry<F, T>, cpu: &Cpu) -> Self {
        let lanes = cpu.isa().lanes();
        let vectors = vectors(geometry.channels, lanes);
        let of_phase = geometry.channels_of_phase(vectors * lanes);
        let (c, k, tiles) = (geometry.sources() * of_phase, geometry.outputs, geometry.tiles());
        // Each thread has its own chunks, which stay in its cache, while there is room for as many sums.
        let (teams, threads, chunk) = match c * k {
            ..=16384 => (cpu.threads(), 1, 32.min(tiles.div_ceil(cpu.threads()))),
            _ => (1, cpu.threads(), 128),
        };
        let chunk = tiles.div_ceil(tiles.div_ceil(chunk));
        // The sums of a block fit the L2 cache.
        let block = [k.min(64).next_multiple_of(group(lanes)), c.min(64).next_multiple_of(vectors * lanes)];
        let teams = teams.min(tiles.div_ceil(chunk));
        Weights { geometry, of_phase, teams, threads, chunk, block, vectors }
    }

    /// Channels of all phases.
    fn channels(&self) -> usize {
        self.geometry.sources() * self.of_phase
    }

    /// Blocks of outputs and of channels.
    fn blocks(&self) -> [usize; 2] {
        [self.geometry.outputs.div_ceil(self.block[0]), self.channels().div_ceil(self.block[1])]
    }

    /// The first output and the first channel of a block.
    fn first_of(&self, block: usize) -> [usize; 2] {
        let across = self.blocks()[1];
        [block / across * self.block[0], block % across * self.block[1]]
    }

    fn chunks(&self) -> usize {
        self.geometry.tiles().div_ceil(self.chunk)
    }

    /// Floats between two points of a chunk's gradients and inputs.
    fn strides(&self) -> [usize; 2] {
        [0, 1].map(|side| self.blocks()[side] * self.block[side] * self.chunk + SKEW)
    }

    /// Floats between two points of the sums of a block.
    fn sum_stride(&self) -> usize {
        self.block[0] * self.block[1] + SKEW
    }

    /// Floats of the sums of a block.
    fn block_len(&self) -> usize {
        self.geometry.points() * self.sum_stride()
    }

    /// Blocks whose sums a team holds. If there is only one chunk, each thread finishes block after block in the same memory.
    fn held_blocks(&self) -> usize {
        let blocks = self.blocks()[0] * self.blocks()[1];
        if self.chunks() == 1 { blocks.min(self.threads) } else { blocks }
    }

    /// Floats of a chunk's gradients, of its inputs, and of a team's sums.
    fn lens(&self) -> [usize; 3] {
        let points = self.geometry.points();
        let [gradients, inputs] = self.strides();
        [points * gradients, points * inputs, self.held_blocks() * self.block_len()]
    }

    fn zeros_len(&self) -> usize {
        self.geometry.zeros_len(self.geometry.channels.max(self.geometry.outputs))
    }
}

/// Outputs whose gradients lie together.
const fn group(lanes: usize) -> usize {
    if lanes < 8 { 8 } else { lanes }
}

impl<F: Filter, T: Number> GroupKernel for Weights<F, T> {
    type First = T;
    type Second = T;
    type Output = f32;

    fn workspace_len(&self) -> usize {
        self.zeros_len() + self.teams * self.lens().iter().sum::<usize>()
    }

    fn run(
        &self,
        cpu: &Cpu,
        group: usize,
        inputs: (&[T], &[T]),
        output: Shared<'_, f32>,
        workspace: &mut [f32],
    ) {
        let geometry = Geometry { group, ..self.geometry };
        Weights { geometry, ..*self }.run_group(cpu, inputs, output, workspace);
    }
}

impl<F: Filter, T: Number> Weights<F, T> {
    /// Computes the gradient of the filters of the geometry's group.
    fn run_group(&self, cpu: &Cpu, (x, dy): (&[T], &[T]), output: Shared<'_, f32>, workspace: &mut [f32]) {
        let work = self.geometry.work();
        let (zeros, scratch) = workspace.split_at_mut(self.zeros_len());
        zeros.fill(0.0);
        let zeros = bytemuck::cast_slice(zeros);
        let call = Call { weights: self, cpu, work, x, dy, zeros, output };
        let [gradients_len, inputs_len, sums_len] = self.lens();
        let team_len = gradients_len + inputs_len + sums_len;
        if self.teams == 1 {
            return call.sum(cpu, 0..self.chunks(), scratch, true);
        }
        let per_team = self.chunks().div_ceil(self.teams);
        let one = cpu.one_thread();
        cpu.for_each(work, scratch.chunks_mut(team_len).enumerate(), |(team, scratch)| {
            let end = ((team + 1) * per_team).min(self.chunks());
            call.sum(&one, (team * per_team).min(end)..end, scratch, false);
        });
        let teams = self.chunks().div_ceil(per_team);
        let blocks = 0..self.blocks()[0] * self.blocks()[1];
        cpu.for_each(work, blocks, |block| {
            let sums = |team: usize| {
                let at = team * team_len + gradients_len + inputs_len + block * self.block_len();
                &scratch[at..][..self.block_len()]
            };
            call.finish(block, &(0..teams).map(sums).collect::<Vec<_>>());
        });
    }
}

/// The operands of one run.
struct Call<'a, F, T> {
    weights: &'a Weights<F, T>,
    cpu: &'a Cpu,
    work: usize,
    x: &'a [T],
    dy: &'a [T],
    zeros: &'a [T],
    output: Shared<'a, f32>,
}

impl<F: Filter, T: Number> Call<'_, F, T> {
    /// Sums these chunks with the threads of `cpu`, and transforms the sums back if `finish`.
    fn sum(&self, cpu: &Cpu, chunks: Range<usize>, scratch: &mut [f32], finish: bool) {
        let w = self.weights;
        let isa = self.cpu.isa();
        let [gradients_len, inputs_len, sums_len] = w.lens();
        let (gradients, rest) = scratch.split_at_mut(gradients_len);
        let (inputs, rest) = rest.split_at_mut(inputs_len);
        let sums = &mut rest[..sums_len];
        let (start, end) = (chunks.start, chunks.end);
        for chunk in chunks {
            let first = chunk * w.chunk;
            let count = w.chunk.min(w.geometry.tiles() - first);
            {
                let (gradients, inputs) = (Shared::new(gradients), Shared::new(inputs));
                const STEP: usize = 4;
                cpu.for_each(self.work, (0..count).step_by(STEP), |tile| {
                    let tiles = [tile, (tile + STEP).min(count)];
                    simd::run(isa, TransformTiles { call: self, first, tiles, gradients, inputs });
                });
            }
            let (gradients, inputs) = (&*gradients, &*inputs);
            let add = |block: usize, sums: &mut [f32]| {
                let ahead = &mut match chunk + 1 < end {
                    true => self.ahead(first + count..first + 2 * count, block),
                    false => Ahead::nothing(),
                };
                let fresh = chunk == start;
                simd::run(isa, Add { weights: w, block, count, gradients, inputs, sums, fresh, ahead });
                if finish && chunk + 1 == end {
                    self.finish(block, &[sums]);
                }
            };
            let blocks = w.blocks()[0] * w.blocks()[1];
            let held = sums.chunks_mut(w.block_len());
            if w.held_blocks() == blocks {
                cpu.for_each(self.work, held.enumerate(), |(block, sums)| add(block, sums));
            } else {
                cpu.for_each_with(self.work, held, 0..blocks, |sums, block| add(block, sums));
            }
        }
    }

    /// What the products of a block fetch meanwhile: its share of the next chunk of both images.
    fn ahead(&self, next: Range<usize>, block: usize) -> Ahead<2> {
        let w = self.weights;
        let blocks = w.blocks();
        let part = |image: &[T]| {
            let numbers = w.geometry.numbers_of(image.len(), next.clone());
            let share = numbers.len() / (blocks[0] * blocks[1]);
            (image.as_ptr().wrapping_add(numbers.start + block * share), share)
        };
        let lanes = self.cpu.isa().lanes();
        let first = w.first_of(block);
        let rows = w.block[0].min(w.geometry.outputs - first[0]).div_ceil(group(lanes)) * group(lanes)
            / rows(self.cpu.isa().registers(), w.vectors);
        let pairs = w.block[1].min(w.channels() - first[1]).div_ceil(w.vectors * lanes);
        Ahead::of([part(self.x), part(self.dy)], w.geometry.points() * rows * pairs)
    }

    /// Transforms the sums of all teams into the filter gradients of a block.
    fn finish(&self, block: usize, sums: &[&[f32]]) {
        simd::run(self.cpu.isa(), Finish { call: self, block, sums });
    }
}

/// Transforms tiles of both images.
struct TransformTiles<'a, F, T> {
    call: &'a Call<'a, F, T>,
    /// Where the chunk starts.
    first: usize,
    /// Tiles of the chunk, first and end.
    tiles: [usize; 2],
    /// Z[point][output / group][tile][group].
    gradients: Shared<'a, f32>,
    /// V[point][channel / pair][tile][pair], with the channels of one phase after those of another.
    inputs: Shared<'a, f32>,
}

impl<F: Filter, T: Number> WithSimd for TransformTiles<'_, F, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        match self.call.weights.geometry.steps()[0] {
            1 => self.run::<S, 1>(simd),
            _ => self.run::<S, 2>(simd),
        }
    }
}

impl<F: Filter, T: Number> TransformTiles<'_, F, T> {
    #[inline(always)]
    fn run<S: Simd, const STEP: usize>(self, simd: S) {
        let Call { weights: w, x, dy, zeros, .. } = *self.call;
        let (g, lanes) = (&w.geometry, S::F32_LANES);
        let [gradient_stride, input_stride] = w.strides();
        let [first, end] = self.tiles;
        let tiles = g.each_tile(self.first + first..self.first + end);
        for (index, tile) in (first..end).zip(tiles) {
            let place = |vector: usize, side: usize| {
                let per_side = side / lanes;
                (vector / per_side * w.chunk + index) * side + vector % per_side * lanes
            };
            // SAFETY: `place` differs for each tile of the chunk, and each tile is transformed by one task only (`tiles` of the
            // tasks do not overlap), while nobody reads the chunk.
            unsafe {
                let (to, stride) = (self.inputs, input_stride);
                for source in 0..g.sources() {
                    let before = source * w.of_phase / lanes;
                    let at = (&tile, source);
                    g.transform_input::<S, STEP>(simd, [x, zeros], at, (to, stride), |v| {
                        place(before + v, w.vectors * lanes)
                    });
                }
                let (to, stride) = (self.gradients, gradient_stride);
                let side = group(lanes);
                g.transform_gradient(simd, [dy, zeros], &tile, (to, stride), |v| place(v, side));
            }
        }
    }
}

/// Adds the products of a chunk to the sums of a block.
struct Add<'a, F, T> {
    weights: &'a Weights<F, T>,
    block: usize,
    /// Tiles of the chunk.
    count: usize,
    gradients: &'a [f32],
    inputs: &'a [f32],
    /// [point][output / group][channel / pair][output % group][pair].
    sums: &'a mut [f32],
    /// Whether the sums hold nothing yet.
    fresh: bool,
    /// What is fetched meanwhile.
    ahead: &'a mut Ahead<2>,
}

impl<F: Filter, T: Number> WithSimd for Add<'_, F, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let vectors = self.weights.vectors;
        match (rows(registers::<S>(), vectors), vectors) {
            (_, 1) => self.blocked::<S, 8, 1>(simd),
            (8, _) => self.blocked::<S, 8, 2>(simd),
            _ => self.blocked::<S, 4, 2>(simd),
        }
    }
}

impl<F: Filter, T: Number> Add<'_, F, T> {
    #[inline(always)]
    fn blocked<S: Simd, const ROWS: usize, const V: usize>(self, simd: S) {
        let w = self.weights;
        let (group, width) = (group(S::F32_LANES), V * S::F32_LANES);
        let [gradient_stride, input_stride] = w.strides();
        let [outputs, channels] = w.first_of(self.block);
        let groups = w.block[0].min(w.geometry.outputs - outputs).div_ceil(group);
        let panels = w.block[1].min(w.channels() - channels).div_ceil(width);
        for point in 0..w.geometry.points() {
            let phases = w.geometry.phases_of(point);
            let has = phases.start * w.of_phase..phases.end * w.of_phase;
            let gradients = &self.gradients[point * gradient_stride + outputs * w.chunk..];
            let inputs = &self.inputs[point * input_stride + channels * w.chunk..];
            let sums = &mut self.sums[point * w.sum_stride()..];
            for i in 0..groups {
                let z = &gradients[i * w.chunk * group..][..self.count * group];
                for j in (0..panels).filter(|j| has.contains(&(channels + j * width))) {
                    let v = &inputs[j * w.chunk * width..][..self.count * width];
                    let sums = &mut sums[(i * w.block[1] / width + j) * group * width..][..group * width];
                    for (part, sums) in sums.chunks_exact_mut(ROWS * width).enumerate() {
                        self.ahead.step();
                        add_product::<S, ROWS, V>(simd, (z, group, part * ROWS), v, sums, self.fresh);
                    }
                }
            }
        }
    }
}

/// m += zᵀ v over the tiles, or m = zᵀ v: z as [tile][group], of which ROWS are used, v as [tile][V vectors], m as [ROWS][V
/// vectors].
#[inline(always)]
fn add_product<S: Simd, const ROWS: usize, const V: usize>(
    simd: S,
    (z, group, first): (&[f32], usize, usize),
    v: &[f32],
    m: &mut [f32],
    fresh: bool,
) {
    let (v, _) = S::as_simd_f32s(v);
    let mut sums = [[simd.splat_f32s(0.0); V]; ROWS];
    for (z, v) in z.chunks_exact(group).zip(v.as_chunks::<V>().0) {
        let z = &z[first..first + ROWS];
        for row in 0..ROWS {
            let value = simd.splat_f32s(z[row]);
            for half in 0..V {
                sums[row][half] = simd.mul_add_f32s(value, v[half], sums[row][half]);
            }
        }
    }
    add_to(simd, sums, m, fresh);
}

/// Transforms the sums of all teams into the filter gradients of a block.
struct Finish<'a, F, T> {
    call: &'a Call<'a, F, T>,
    block: usize,
    sums: &'a [&'a [f32]],
}

impl<F: Filter, T: Number> WithSimd for Finish<'_, F, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Call { weights: w, output, .. } = *self.call;
        let lanes = S::F32_LANES;
        let (group, width) = (group(lanes), w.vectors * lanes);
        let (k, c) = (w.geometry.outputs, w.geometry.channels);
        let len = w.geometry.kernel.iter().product::<usize>();
        let filters = w.geometry.group * k;
        let first = w.first_of(self.block);
        let points = Grid::of_points(F::INPUTS, w.sum_stride());
        let (one, others) = self.sums.split_first().expect("there is a team");
        for column in (0..w.block[1].min(w.channels() - first[1])).step_by(lanes) {
            let phase = w.geometry.phase((first[1] + column) / w.of_phase);
            let channel = (first[1] + column) % w.of_phase;
            if channel >= c {
                continue;
            }
            let places = w.geometry.places(&phase);
            for row in 0..w.block[0].min(k - first[0]) {
                let panel = row / group * (w.block[1] / width) + column / width;
                let place = (panel * group + row % group) * width + column % width;
                let mut taps = [0.0f32; TAPS * LANES];
                let fits = |team: &[f32]| points.fits::<S>(F::INPUTS, place, team.len());
                assert!(self.sums.iter().all(|team| fits(team)), "a filter's sums beyond their block");
                TapsGradient::<F>::square(
                    simd,
                    |j| {
                        column_of(simd, F::INPUTS, |i| {
                            if i >= phase.points[0] || j >= phase.points[1] {
                                return simd.splat_f32s(0.0);
                            }
                            // SAFETY: `fits` has checked that the last point's vector is inside of each team's sums, and no
                            // other point's vector lies behind it; `square` and `column_of` use only points within this side.
                            let sum = |team: &[f32]| unsafe { points.load::<S>(&team[place..], [i, j]) };
                            others.iter().fold(sum(one), |all, other| simd.add_f32s(all, sum(other)))
                        })
                    },
                    // SAFETY: `square` stores `F::TAPS` squared vectors, of at most LANES: `taps` has room for the most of these.
                    |r, s, value| unsafe { store::<S>(&mut taps, (F::TAPS * r + s) * lanes, value) },
                );
                for lane in 0..lanes.min(c - channel) {
                    let filter = ((filters + first[0] + row) * c + channel + lane) * len;
                    for &[tap, at] in &places {
                        // SAFETY: each filter, channel and phase belongs to one block of one group, and each block is finished by
                        // one task. So nobody else writes this tap.
                        unsafe { output.part(filter + at, 1)[0] = taps[tap * lanes + lane] };
                    }
                }
            }
        }
    }
}
