//! Forward and backward-data: target pixels in blocks, each the sum over its taps of source channels times weights.

use std::ops::Range;

use pulp::{Simd, WithSimd};

use super::geometry::{Lattice, Phase, PixelBlock, PixelBlocks};
use super::panels::{Panel, Panels};
use super::registers::{by_block, fitting, joined, last_mask, load, most_rows, most_vectors, store};
use super::slab::Reading;
use crate::conv::even::even_parts;
use crate::conv::plan::TypedKernel;
use crate::conv::problem::{ConvAxis, ConvProblem, Pass};
use crate::conv::workspace::{LINE, aligned};
use crate::simd::registers;
use crate::stream::{self, Streaming};
use crate::{Cpu, Isa, simd};

/// The part of a panel that is multiplied before the next channels, in floats: half of a common L2 cache.
const PANEL_FLOATS: usize = 128 * 1024;
/// Register blocks that are multiplied with one panel before the next panel: enough that panels are not read too often, few
/// enough that the blocks' sources stay in the caches meanwhile.
const BLOCKS: usize = 4;
/// Target pixels of a task, for each phase.
const TASK_PIXELS: usize = 168;
/// Target pixels of a task, for each phase, of groups that are read in place: each group uses a part of a pixel's cache lines,
/// and the lines that all of them use should stay in L2.
const TASK_PIXELS_OF_GROUPS: usize = 42;
/// The most entries of a task's indirection tables.
const TABLE_LEN: usize = 16 * 1024;

/// Forward, or backward-data, of one problem.
pub(super) struct Correlate {
    isa: Isa,
    panels: Panels,
    reading: Reading,
    /// Phases of rows and of columns.
    phases: [Vec<Phase>; 2],
    /// Whether every target pixel belongs to a phase; pixels that belong to none have no tap and are zero.
    complete: bool,
    /// Rows and columns of the target.
    target: [usize; 2],
    target_channels: usize,
    source_channels: usize,
    kernel_columns: usize,
    /// Target pixels, and those of a task.
    pixels: usize,
    task_pixels: usize,
    /// Channels that are summed over at a time.
    depth: usize,
    /// The number of groups whose targets share a cache line and are collected before it is streamed; 1 if targets are
    /// written directly.
    line_groups: usize,
    work: usize,
}

/// The source, which is read, or the target, which is written.
struct Tensor {
    batch: usize,
    /// Rows and columns.
    size: [usize; 2],
    channels: usize,
}

impl Tensor {
    /// Source and target.
    fn both(problem: &ConvProblem, pass: Pass) -> [Tensor; 2] {
        let axes = [&problem.height, &problem.width];
        let (batch, [input, output]) =
            (problem.batch, [axes.map(|axis| axis.input), axes.map(|axis| axis.output())]);
        let x = Tensor { batch, size: input, channels: problem.in_channels };
        let y = Tensor { batch, size: output, channels: problem.out_channels };
        match pass {
            Pass::Forward => [x, y],
            _ => [y, x],
        }
    }

    fn pixels(&self) -> usize {
        self.batch * self.size.iter().product::<usize>()
    }
}

/// The phases of an axis of the target.
fn phases_of(axis: &ConvAxis, pass: Pass) -> Vec<Phase> {
    match pass {
        Pass::Forward => Phase::forward(axis),
        _ => Phase::backward_data(axis),
    }
}

/// Whether every position along an axis of the target belongs to one of these phases.
fn are_all(phases: &[Phase], axis: &ConvAxis, pass: Pass) -> bool {
    pass == Pass::Forward || phases.len() == axis.stride.min(axis.input)
}

/// The most target pixels of a task: if it copies what it reads, so that its tables do not get too long, and if it reads in
/// place.
fn most_pixels(phases: &[Vec<Phase>; 2], groups: usize) -> [usize; 2] {
    let lattices = phases.each_ref().map(Vec::len).iter().product::<usize>().max(1);
    let taps = phases.each_ref().map(|phases| phases.iter().map(Phase::taps).max().unwrap_or(1));
    let most = (TABLE_LEN / taps.iter().product::<usize>()).max(1) * lattices;
    let per_lattice = match groups {
        1 => TASK_PIXELS,
        _ => TASK_PIXELS_OF_GROUPS,
    };
    [most, most.min(per_lattice * lattices)]
}

impl Correlate {
    pub(super) fn new(problem: &ConvProblem, pass: Pass, cpu: &Cpu) -> Self {
        let across = match pass {
            Pass::Forward => problem.group_out_channels(),
            _ => problem.group_in_channels(),
        };
        // With a stride, backward-data has few taps compared with a block's other costs.
        let few_taps = pass == Pass::BackwardData && [problem.height.stride, problem.width.stride] != [1, 1];
        let joined = joined(cpu.isa(), problem.groups, across, few_taps);
        let isa = fitting(cpu.isa(), across * joined);
        let (lanes, most_vectors) = (isa.lanes(), most_vectors(isa.registers()));
        let panels = match pass {
            Pass::Forward => Panels::of_outputs(problem, lanes, most_vectors),
            _ => Panels::of_inputs(problem, lanes, most_vectors),
        };
        let panels = panels.joining(joined);
        let problem = &problem.with_groups(problem.groups / joined);
        let axes = [&problem.height, &problem.width];
        let phases = axes.map(|axis| phases_of(axis, pass));
        let [source, target] = Tensor::both(problem, pass);
        let pixels = target.pixels();
        let reading = Reading::new(problem, [source.pixels(), source.channels], [pixels, target.channels]);
        let [most, most_in_place] = most_pixels(&phases, problem.groups);
        let copied = reading.targets([target.batch, target.size[0], target.size[1]], cpu);
        let task_pixels = copied.filter(|&wanted| wanted <= most).unwrap_or_else(|| {
            pixels.div_ceil(pixels.div_ceil(most_in_place).next_multiple_of(cpu.threads()))
        });
        let tap_floats = panels.taps * panels.most_vectors() * lanes;
        let depth = (PANEL_FLOATS / tap_floats).max(16);
        let line_groups = match panels.width {
            width if LINE.is_multiple_of(width) && problem.groups.is_multiple_of(LINE / width) => {
                LINE / width
            }
            _ => 1,
        };
        Correlate {
            isa,
            line_groups,
            reading,
            depth: panels.depth.div_ceil(panels.depth.div_ceil(depth)),
            panels,
            complete: axes.iter().zip(&phases).all(|(axis, phases)| are_all(phases, axis, pass)),
            phases,
            target: target.size,
            target_channels: target.channels,
            source_channels: source.channels,
            kernel_columns: problem.width.kernel,
            task_pixels,
            pixels,
            work: problem.flops() as usize,
        }
    }

    /// The number of threads, which each have a slab.
    fn workers(&self, cpu: &Cpu) -> usize {
        cpu.threads().min(self.pixels.div_ceil(self.task_pixels))
    }

    pub(super) fn workspace_len(&self, cpu: &Cpu) -> Option<usize> {
        let slabs = self.workers(cpu) * self.slab_len();
        self.panels.len()?.checked_add(self.source_channels + 2 * LINE + slabs)
    }

    /// Floats of a task's copied sources and of its collected targets.
    fn slab_len(&self) -> usize {
        self.reading.slab_len() + if self.line_groups > 1 { self.task_pixels * LINE } else { 0 }
    }

    /// Whether the products give whole cache lines of the target at once.
    fn finishes_lines(&self) -> bool {
        self.line_groups > 1 || self.panels.width.is_multiple_of(LINE) && self.depth == self.panels.depth
    }
}

impl TypedKernel<f32> for Correlate {
    fn run(&self, cpu: &Cpu, [source, weight]: [&[f32]; 2], target: &mut [f32], workspace: &mut [f32]) {
        let (zeros, workspace) = workspace.split_at_mut(self.source_channels);
        zeros.fill(0.0);
        let streams = self.finishes_lines() && stream::pays(target, self.target_channels);
        let slab_len = self.slab_len();
        let (slabs, panels) = aligned(workspace).split_at_mut(self.workers(cpu) * slab_len);
        self.panels.pack(cpu, weight, panels);
        let tasks = target.chunks_mut(self.task_pixels * self.target_channels).enumerate();
        let (zeros, panels) = (&*zeros, &*panels);
        cpu.for_each_with(self.work, slabs.chunks_mut(slab_len), tasks, |slab, (task, target)| {
            let first = task * self.task_pixels;
            let (slab, collected) = slab.split_at_mut(self.reading.slab_len());
            let task =
                Task { correlate: self, first, source, zeros, slab, collected, panels, target, streams };
            simd::run(self.isa, task);
        });
    }
}

/// A run of target pixels.
struct Task<'a> {
    correlate: &'a Correlate,
    /// The first target pixel, counted over all images.
    first: usize,
    source: &'a [f32],
    zeros: &'a [f32],
    slab: &'a mut [f32],
    /// [pixel][line]: the targets of groups that share a line.
    collected: &'a mut [f32],
    panels: &'a [f32],
    target: &'a mut [f32],
    /// Whether the target is written by streaming stores.
    streams: bool,
}

impl WithSimd for Task<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let c = self.correlate;
        let streaming = self.streams.then(Streaming::begin);
        let run = self.first..self.first + self.target.len() / c.target_channels;
        let most = most_rows(registers::<S>(), c.panels.most_vectors());
        let lattice = |rows, columns| {
            let lattice = Lattice { rows, columns, target: c.target, kernel_columns: c.kernel_columns };
            let pixels = lattice.pixels(run.clone());
            (lattice, pixels)
        };
        let lattice = &lattice;
        let lattices: Vec<_> = c.phases[0]
            .iter()
            .flat_map(|rows| c.phases[1].iter().map(move |columns| lattice(rows, columns)))
            .collect();
        let reach = || lattices.iter().fold(None, |reach, (lattice, pixels)| lattice.reach(pixels, reach));
        let places = c.reading.places(reach, self.source, self.zeros, self.slab);
        let mut blocks = PixelBlocks::default();
        for (lattice, pixels) in lattices {
            lattice.add_blocks(pixels, most, &places, &mut blocks);
        }
        if !c.complete {
            self.target.fill(0.0);
            self.collected.fill(0.0);
        }
        let line_groups = if self.streams && places.hold(c.line_groups) { c.line_groups } else { 1 };
        for groups in places.groups(0..c.panels.groups, line_groups) {
            let first = places.load(simd, groups.clone());
            for line in groups.clone().step_by(line_groups) {
                let channel_of_line = line * c.panels.width;
                let mut target = if line_groups > 1 {
                    Target {
                        floats: &mut *self.collected,
                        step: LINE,
                        first: channel_of_line,
                        streaming: None,
                    }
                } else {
                    let streaming = streaming.as_ref().filter(|_| c.line_groups == 1);
                    Target { floats: &mut *self.target, step: c.target_channels, first: 0, streaming }
                };
                let indices = c.panels.of_groups(line..line + line_groups);
                let products = Products { correlate: c, panels: self.panels, blocks: &blocks };
                // SAFETY: the blocks' sources come from `places`, which have the channels of each group that `load` has just
                // loaded, `places.group` from there. The panels are those of these groups. `simd::run` calls this.
                unsafe { products.add(simd, indices, |group| places.group(group - first), &mut target) };
                if let Some(streaming) = streaming.as_ref().filter(|_| line_groups > 1) {
                    let pixels = self.target.chunks_exact_mut(c.target_channels);
                    let lines = pixels.map(|pixel| &mut pixel[channel_of_line..][..LINE]);
                    for (from, to) in self.collected.chunks_exact(LINE).zip(lines) {
                        // SAFETY: `simd::run` calls this with its vectors.
                        unsafe { stream::copy_line(simd, streaming, from, to) };
                    }
                }
            }
        }
    }
}

/// What the pixels of a run are multiplied with.
struct Products<'a> {
    correlate: &'a Correlate,
    panels: &'a [f32],
    blocks: &'a PixelBlocks,
}

impl Products<'_> {
    /// Multiplies all blocks by these panels; `channel` gives where the channels of a group start.
    ///
    /// # Safety
    /// For the group of each of these panels, each source of each block is readable from `channel` floats on, for as many
    /// floats as a group has channels to sum over. `S` is one of those that [`simd::run`] uses.
    #[inline(always)]
    unsafe fn add<S: Simd>(
        &self,
        simd: S,
        indices: Range<usize>,
        channel: impl Fn(usize) -> usize,
        target: &mut Target<'_>,
    ) {
        let Products { correlate, blocks, .. } = *self;
        let panels = &correlate.panels;
        // Without groups, the first panel prefetches the sources; the other panels then find them in the L2 cache.
        let asks = |index: usize| panels.groups == 1 && index == 0;
        for part in even_parts(blocks.len(), BLOCKS) {
            for index in indices.clone() {
                let panel = panels.panel(index);
                let channel = channel(panel.group);
                let weights = &self.panels[panels.offset(index)..panels.offset(index + 1)];
                for depth in even_parts(panels.depth, correlate.depth) {
                    for (number, block) in part.clone().zip(blocks.of(part.clone())) {
                        if let Some(next) = blocks.get(number + 1).filter(|_| asks(index)) {
                            next.prefetch(channel + depth.start, depth.len());
                        }
                        let depth = depth.clone();
                        let product = Product { correlate, panel, channel, depth, weights, block };
                        // SAFETY: the depth lies within the group's channels, which the caller promises to be readable from
                        // `channel` on.
                        unsafe { product.multiply(simd, target) };
                    }
                }
            }
        }
    }
}

/// Where the products of a run of pixels go.
struct Target<'a> {
    floats: &'a mut [f32],
    /// Floats from a pixel to the next.
    step: usize,
    /// The channel that a pixel starts with.
    first: usize,
    /// Whether it is written by streaming stores.
    streaming: Option<&'a Streaming>,
}

/// One block's pixels by one panel's channels, over some of the channels of the source.
struct Product<'a> {
    correlate: &'a Correlate,
    panel: Panel,
    /// The group's first channel, in floats from the block's sources on.
    channel: usize,
    /// The channels to sum over, within the group.
    depth: Range<usize>,
    weights: &'a [f32],
    block: PixelBlock<'a>,
}

impl Product<'_> {
    /// # Safety
    /// As for [`multiply`].
    #[inline(always)]
    unsafe fn multiply<S: Simd>(&self, simd: S, target: &mut Target<'_>) {
        // SAFETY: the caller promises what `multiply` asks for.
        unsafe { by_block!(self.block.targets.len(), self.panel.vectors, multiply::<S>(simd, self, target)) };
    }
}

/// Computes P target pixels by V vectors of channels. Overwrites the target for the first source channels, else adds to it.
///
/// # Safety
/// Each of the block's sources is readable from float `channel + depth.start` to float `channel + depth.end`. `S` is one of
/// those that [`simd::run`] uses.
#[inline(always)]
unsafe fn multiply<S: Simd, const P: usize, const V: usize>(
    simd: S,
    product: &Product<'_>,
    target: &mut Target<'_>,
) {
    let Product { correlate, panel, channel, depth, weights, block } = product;
    let panels = &correlate.panels;
    let width = V * S::F32_LANES;
    let channel = channel + depth.start;
    let last = last_mask(simd, panel.channels);
    assert!(V == panel.channels.div_ceil(S::F32_LANES), "{} channels in {V} vectors", panel.channels);
    let start = target.floats.as_mut_ptr();
    let first = panel.group * panels.width + panel.first - target.first;
    let targets: [_; P] = simd::array(|p| {
        let first = block.targets[p] * target.step + first;
        assert!(first + panel.channels <= target.floats.len());
        start.wrapping_add(first)
    });
    let mut sums = [[simd.splat_f32s(0.0); V]; P];
    if depth.start > 0 {
        // SAFETY: each target has been checked to hold the panel's channels: V vectors, where `last` masks the last one if
        // that is not full.
        sums = simd::array(|p| unsafe { load(simd, targets[p], last) });
    } else if target.streaming.is_none() && panels.groups == 1 {
        // Prefetches the targets, since each store to a line in no cache would wait for it. Small groups have too little work
        // meanwhile.
        targets.iter().for_each(|target| stream::prefetch(target.cast_const(), width));
    }
    for (&tap, sources) in block.taps.iter().zip(block.sources.as_chunks::<P>().0) {
        let weights = &weights[(tap * panels.depth + depth.start) * width..][..depth.len() * width];
        // SAFETY: the caller promises `depth` floats from `channel` on after each source. The weights have just been cut to
        // `depth` times V vectors.
        unsafe {
            let sources = simd::array(|p| sources[p].add(channel));
            let factors = Factors { sources, weights: weights.as_ptr().cast() };
            add_products::<S, P, V>(simd, &mut sums, &factors, depth.len());
        }
    }
    if let Some(streaming) = target.streaming {
        for p in 0..P {
            for v in 0..V {
                // SAFETY: the target has been checked to hold the panel's channels. Streamed targets are whole lines from a
                // line's start, by `finishes_lines` and `stream::pays`: so the panel's are V whole vectors, each aligned. The
                // caller promises that `S` is one of those that `simd::run` uses.
                unsafe { stream::store(simd, streaming, targets[p].add(v * S::F32_LANES), sums[p][v]) };
            }
        }
        return;
    }
    for p in 0..P {
        // SAFETY: the target has been checked to hold the panel's channels: V vectors, where `last` masks the last one if
        // that is not full.
        unsafe { store(simd, targets[p], sums[p], last) };
    }
}

/// What a block's pixels read through one tap, from the first channel to sum over on.
struct Factors<V, const P: usize> {
    sources: [*const f32; P],
    /// [channel][vector]
    weights: *const V,
}

/// sums[p][v] += sources[p][c] * weights[c][v] over `depth` channels.
///
/// # Safety
/// Each source must be readable for `depth` floats, the weights for `depth * V` vectors.
#[inline(always)]
unsafe fn add_products<S: Simd, const P: usize, const V: usize>(
    simd: S,
    sums: &mut [[S::f32s; V]; P],
    factors: &Factors<S::f32s, P>,
    depth: usize,
) {
    let Factors { sources, weights } = factors;
    let mut c = 0;
    // SAFETY: `c`, with what a turn takes from there on, stays below `depth`. The caller promises `depth` floats of each
    // source, and V vectors of weights for each of them.
    unsafe {
        // With one vector, there are too many source addresses to stay in registers. So each address that is loaded serves
        // several channels, as many as there are registers for weights.
        if const { V == 1 && registers::<S>() >= 32 } {
            while c + 4 <= depth {
                add_turn::<S, P, V, 4>(simd, sums, factors, c);
                c += 4;
            }
        }
        if const { V == 1 && registers::<S>() < 32 } {
            while c + 2 <= depth {
                add_turn::<S, P, V, 2>(simd, sums, factors, c);
                c += 2;
            }
        }
        while c < depth {
            let w: [_; V] = simd::array(|v| weights.add(c * V + v).read_unaligned());
            for p in 0..P {
                let x = simd.splat_f32s(*sources[p].add(c));
                for v in 0..V {
                    sums[p][v] = simd.mul_add_f32s(x, w[v], sums[p][v]);
                }
            }
            c += 1;
        }
    }
}

/// sums[p][0] += sources[p][c + u] * weights[c + u][0] over U channels.
///
/// # Safety
/// Each source must be readable for `c + U` floats, the weights for as many vectors.
#[inline(always)]
unsafe fn add_turn<S: Simd, const P: usize, const V: usize, const U: usize>(
    simd: S,
    sums: &mut [[S::f32s; V]; P],
    factors: &Factors<S::f32s, P>,
    c: usize,
) {
    let Factors { sources, weights } = factors;
    // SAFETY: the caller promises the vectors of weights and the floats of each source that `c + u` stands for, with u below U.
    unsafe {
        let w: [_; U] = simd::array(|u| weights.add(c + u).read_unaligned());
        for p in 0..P {
            for u in 0..U {
                let x = simd.splat_f32s(*sources[p].add(c + u));
                sums[p][0] = simd.mul_add_f32s(x, w[u], sums[p][0]);
            }
        }
    }
}
