//! Backward-weights: for each tap, products of source channels and output gradients, summed over the pixels.

use std::ops::Range;

use pulp::{Simd, WithSimd};

use super::geometry::{Lattice, Pair, Phase};
use super::panels::{Panel, Panels};
use super::registers::{by_block, fitting, joined, last_mask, most_rows};
use super::slab::{Reading, prefetch};
use crate::conv::even::even_parts;
use crate::conv::plan::TypedKernel;
use crate::conv::problem::ConvProblem;
use crate::conv::workspace::{LINE, aligned};
use crate::simd::registers;
use crate::stream;
use crate::{Cpu, Isa, simd};

/// The most vectors of a panel: few, to leave registers for many input channels, 16 of which share a pixel's cache line.
const MOST_VECTORS: usize = 2;
/// Output pixels whose gradients are packed and used together: a panel of them stays in the L1 cache.
const TILE_PIXELS: usize = 192;
/// Output pixels that are used together if the sums do not fit the L2 cache, where they are read and written once a tile.
const TILE_PIXELS_OF_LARGE_SUMS: usize = 448;
/// Output pixels that are used together for groups, whose sums are small, that are read in place.
const TILE_PIXELS_OF_GROUPS: usize = 96;
/// The most pixels times taps of a tile.
const TABLE_LEN: usize = 16 * 1024;

/// How many parts the tiles of pixels and the panels of the sums are split into; a thread takes one part of each.
///
/// Each part of the pixels needs its own sums, which are added in the end. If `all_read`, each part of the panels has to read
/// a tensor that all panels are multiplied with, which may take half as long as a panel's products.
pub(super) fn parts(cpu: &Cpu, tiles: usize, panels: usize, all_read: bool) -> [usize; 2] {
    let pixel_parts = |panel_parts: usize| (cpu.threads() / panel_parts).min(tiles);
    let time = |panel_parts: usize| {
        let pixel_parts = pixel_parts(panel_parts);
        let of_tile = 2 * panels.div_ceil(panel_parts) + usize::from(all_read);
        tiles.div_ceil(pixel_parts) * of_tile + 2 * pixel_parts * panels / cpu.threads()
    };
    let most = cpu.threads().min(panels);
    let panel_parts = (1..=most).rev().min_by_key(|&parts| time(parts)).expect("there is a panel");
    [pixel_parts(panel_parts), panel_parts]
}

/// The weight gradient of one problem.
pub(super) struct WeightSums {
    isa: Isa,
    reading: Reading,
    /// Panels of the gradient: lanes along K.
    panels: Panels,
    phases: [Vec<Phase>; 2],
    output: [usize; 2],
    pixels: usize,
    out_channels: usize,
    kernel_columns: usize,
    tile_pixels: usize,
    /// See [`parts`].
    pixel_parts: usize,
    panel_parts: usize,
    work: usize,
}

impl WeightSums {
    pub(super) fn new(problem: &ConvProblem, cpu: &Cpu) -> Self {
        let across = problem.group_out_channels();
        let joined = joined(cpu.isa(), problem.groups, across, false);
        let isa = fitting(cpu.isa(), across * joined);
        let panels = Panels::of_outputs(problem, isa.lanes(), MOST_VECTORS).joining(joined);
        let problem = &problem.with_groups(panels.groups);
        let axes = [&problem.height, &problem.width];
        let output = axes.map(|axis| axis.output());
        let pixels = problem.batch * output.iter().product::<usize>();
        let source = problem.batch * problem.height.input * problem.width.input;
        let reading = Reading::new(problem, [source, problem.in_channels], [pixels, problem.out_channels]);
        let wanted = match problem.groups {
            1 if problem.weight_len() > 256 * 1024 => TILE_PIXELS_OF_LARGE_SUMS,
            1 => TILE_PIXELS,
            _ => TILE_PIXELS_OF_GROUPS,
        };
        let most = TABLE_LEN / panels.taps;
        let copied = reading.targets([problem.batch, output[0], output[1]], cpu);
        let tile_pixels = copied
            .filter(|&wanted| wanted <= most)
            .unwrap_or_else(|| pixels.div_ceil(pixels.div_ceil(wanted.min(most))));
        let tiles = pixels.div_ceil(tile_pixels);
        let [pixel_parts, panel_parts] = parts(cpu, tiles, panels.count(), panels.groups == 1);
        WeightSums {
            isa,
            reading,
            panels,
            phases: axes.map(Phase::forward),
            output,
            pixels,
            out_channels: problem.out_channels,
            kernel_columns: problem.width.kernel,
            tile_pixels,
            pixel_parts,
            panel_parts,
            work: problem.flops() as usize,
        }
    }

    /// Floats of a task's slab, and of the packed gradients of one panel of a tile.
    fn scratch_lens(&self) -> [usize; 2] {
        [self.reading.slab_len(), self.panels.most_vectors() * self.panels.lanes * self.tile_pixels]
    }

    /// Floats of the scratch of a part of the pixels.
    fn scratch_len(&self) -> usize {
        self.panel_parts * self.scratch_lens().iter().sum::<usize>()
    }

    pub(super) fn workspace_len(&self) -> Option<usize> {
        let part = self.panels.len()?.checked_add(self.scratch_len())?;
        part.checked_mul(self.pixel_parts)?.checked_add(LINE)
    }
}

impl TypedKernel<f32> for WeightSums {
    fn run(&self, cpu: &Cpu, [x, dy]: [&[f32]; 2], dweight: &mut [f32], workspace: &mut [f32]) {
        let workspace = aligned(workspace);
        let sums_len = self.panels.offset(self.panels.count());
        let [slab_len, gradients_len] = self.scratch_lens();
        let (scratch, sums) = workspace.split_at_mut(self.pixel_parts * self.scratch_len());
        let sums = &mut sums[..self.pixel_parts * sums_len];
        let pixel_parts = sums.chunks_mut(sums_len).zip(scratch.chunks_mut(self.scratch_len()));
        let tasks = pixel_parts.enumerate().flat_map(|(part, (mut sums, scratch))| {
            let tiles = self.pixels.div_ceil(self.tile_pixels);
            let tiles = part * tiles / self.pixel_parts..(part + 1) * tiles / self.pixel_parts;
            let most = self.panels.count().div_ceil(self.panel_parts);
            let scratch = scratch.chunks_mut(slab_len + gradients_len);
            even_parts(self.panels.count(), most).zip(scratch).map(move |(panels, scratch)| {
                let len = self.panels.offset(panels.end) - self.panels.offset(panels.start);
                let (task_sums, rest) = std::mem::take(&mut sums).split_at_mut(len);
                sums = rest;
                let (slab, gradients) = scratch.split_at_mut(slab_len);
                Task { all: self, x, dy, tiles: tiles.clone(), panels, sums: task_sums, gradients, slab }
            })
        });
        cpu.for_each(self.work, tasks, |task| simd::run(self.isa, task));
        let parts: Vec<&[f32]> = sums.chunks(sums_len).collect();
        self.panels.unpack_sum(cpu, &parts, dweight);
    }
}

/// Some panels' sums over some tiles of pixels.
struct Task<'a> {
    all: &'a WeightSums,
    x: &'a [f32],
    dy: &'a [f32],
    tiles: Range<usize>,
    panels: Range<usize>,
    /// The panels, laid out as in [`Panels`].
    sums: &'a mut [f32],
    /// [pixel of the tile][lane], of one panel at a time.
    gradients: &'a mut [f32],
    slab: &'a mut [f32],
}

impl WithSimd for Task<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let all = self.all;
        let panels = &all.panels;
        let lattice = Lattice {
            rows: &all.phases[0][0],
            columns: &all.phases[1][0],
            target: all.output,
            kernel_columns: all.kernel_columns,
        };
        let start = panels.offset(self.panels.start);
        self.sums.fill(0.0);
        let groups = panels.panel(self.panels.start).group..panels.panel(self.panels.end - 1).group + 1;
        for tile in self.tiles.clone() {
            let first = tile * all.tile_pixels;
            let run = first..(first + all.tile_pixels).min(all.pixels);
            let dy = &self.dy[run.start * all.out_channels..run.end * all.out_channels];
            let pixels = lattice.pixels(run);
            let places = all.reading.places(|| lattice.reach(&pixels, None), self.x, &[], self.slab);
            let taps = lattice.pairs(&pixels, &places);
            for groups in places.groups(groups.clone(), 1) {
                let first = places.load(simd, groups.clone());
                let indices = panels.of_groups(groups);
                let indices = indices.start.max(self.panels.start)..indices.end.min(self.panels.end);
                // Lanes of a tile's pixel from one panel to another.
                let lanes = |from: usize, to: usize| {
                    (panels.offset(to) - panels.offset(from)) / (panels.taps * panels.depth)
                };
                for index in indices.clone() {
                    let panel = panels.panel(index);
                    let width = panel.vectors * S::F32_LANES;
                    // One panel at a time, so that it stays in the L1 cache.
                    let gradients = &mut self.gradients[..all.tile_pixels * width];
                    let first_panel = index == indices.start;
                    // The first panel prefetches what all of these groups will read.
                    let asks = panels.groups > 1 && first_panel;
                    let ahead = if asks { lanes(index, indices.end) } else { 0 };
                    let channel = panel.group * panels.width + panel.first;
                    pack_gradients(simd, dy, all.out_channels, [channel, ahead], panel, gradients);
                    let sums = &mut self.sums[panels.offset(index) - start..panels.offset(index + 1) - start];
                    for channels in even_parts(panels.depth, most_rows(registers::<S>(), panel.vectors)) {
                        let channel = places.group(panel.group - first) + channels.start;
                        let rows = channels.len();
                        let sums = sums.chunks_exact_mut(panels.depth * width);
                        for (pairs, sums) in taps.iter().zip(sums) {
                            let sums = &mut sums[channels.start * width..][..rows * width];
                            // SAFETY: the pairs' sources come from `places`, which have the channels of each group that `load`
                            // has just loaded, `places.group` from there: `rows` of them lie from `channel` on. Their targets
                            // are pixels of the tile, and the gradients hold the panel's vectors for each of these.
                            unsafe {
                                by_block!(
                                    rows,
                                    panel.vectors,
                                    add_products::<S>(simd, pairs, channel, first_panel, gradients, sums)
                                );
                            }
                        }
                    }
                }
            }
        }
    }
}

/// Packs a panel's channels of each pixel as [pixel][lane]; what is beyond the channels is zero.
#[inline(always)]
fn pack_gradients<S: Simd>(
    simd: S,
    dy: &[f32],
    channels: usize,
    [first, ahead]: [usize; 2],
    panel: Panel,
    gradients: &mut [f32],
) {
    let last = last_mask(simd, panel.channels);
    let (gradients, _) = S::as_mut_simd_f32s(gradients);
    for (pixel, to) in dy.chunks_exact(channels).zip(gradients.chunks_exact_mut(panel.vectors)) {
        prefetch(&pixel[first..channels.min(first + ahead)], channels);
        let (from, rest) = S::as_simd_f32s(&pixel[first..][..panel.channels]);
        for (to, &from) in to.iter_mut().zip(from) {
            *to = from;
        }
        if let Some(mask) = last {
            // SAFETY: the rest are the floats of the panel's channels beyond whole vectors, as many as the mask has lanes.
            to[from.len()] = unsafe { simd.mask_load_ptr_f32s(mask, rest.as_ptr()) };
        }
    }
}

/// sums[c][v] += the sum over the pairs of x[channel + c] * gradients[pixel][v], for M channels and V vectors.
///
/// So few channels of a pixel are read at a time that the hardware cannot predict the next ones: they are prefetched if
/// `asks`.
///
/// # Safety
/// For each pair, M floats are readable from `channel` floats after the source, and the gradients have V vectors for each
/// pixel up to the target.
#[inline(always)]
unsafe fn add_products<S: Simd, const M: usize, const V: usize>(
    simd: S,
    pairs: &[Pair],
    channel: usize,
    asks: bool,
    gradients: &[f32],
    sums: &mut [f32],
) {
    let mut products = [[simd.splat_f32s(0.0); V]; M];
    let gradients = gradients.as_ptr().cast::<S::f32s>();
    let ahead = if asks { 2 * M - 1 } else { 0 };
    for pair in pairs {
        // SAFETY: the caller promises M floats from `channel` on after the source, and V vectors of gradients for the target.
        unsafe {
            let x = pair.source.add(channel);
            stream::prefetch_to_l2(x.wrapping_add(ahead), 1);
            let dy: [_; V] = simd::array(|v| gradients.add(pair.target * V + v).read_unaligned());
            for m in 0..M {
                let x = simd.splat_f32s(*x.add(m));
                for v in 0..V {
                    products[m][v] = simd.mul_add_f32s(x, dy[v], products[m][v]);
                }
            }
        }
    }
    let (sums, _) = S::as_mut_simd_f32s(sums);
    let (sums, _) = sums.as_chunks_mut::<V>();
    for m in 0..M {
        for v in 0..V {
            sums[m][v] = simd.add_f32s(sums[m][v], products[m][v]);
        }
    }
}
