//! Forward and backward-data: target pixels in blocks, each the sum over its taps of source channels times weights.

use pulp::{MemMask, Simd, WithSimd};

use super::geometry::{Block, Lattice, Phase};
use super::panels::{Panel, Panels};
use super::registers::{by_block, even_parts, fitting, last_mask, most_rows};
use super::slab::Reading;
use crate::conv::plan::ConvKernel;
use crate::conv::problem::{ConvProblem, Pass};
use crate::conv::workspace::{LINE, aligned};
use crate::{Cpu, Isa, simd};

/// Floats of a panel that are multiplied before the next channels are: half of a common L2 cache.
const PANEL_FLOATS: usize = 128 * 1024;
/// Target pixels of a task, for each phase: enough for a panel from L2 to serve several register blocks.
const TASK_PIXELS: usize = 168;
/// The same where all panels together are larger than `PANEL_FLOATS` by far: they come from L3.
const TASK_PIXELS_OF_LARGE_WEIGHTS: usize = 448;
/// The same for groups that are read in place: each uses a part of a pixel's cache lines, and what all of them use
/// should stay in L2.
const TASK_PIXELS_OF_GROUPS: usize = 42;
/// Floats of a way of the L1 cache, on most CPUs.
const WAY: usize = 1024;
/// Source pixels that are spread at a time.
const SPREAD_PIXELS: usize = 64;
/// Entries of a task's indirection tables, at most.
const TABLE_LEN: usize = 16 * 1024;

/// Forward, or backward-data, of one problem.
pub(super) struct Correlate {
    isa: Isa,
    panels: Panels,
    reading: Reading,
    /// Phases of rows and of columns.
    phases: [Vec<Phase>; 2],
    /// Every target pixel belongs to a phase; else some have no tap and are zero.
    complete: bool,
    /// Rows and columns of the target.
    target: [usize; 2],
    target_channels: usize,
    source_channels: usize,
    /// Floats from a source pixel to the next as tasks read them: more than channels if they are spread first.
    source_step: usize,
    source_pixels: usize,
    kernel_columns: usize,
    /// Target pixels of a task.
    task_pixels: usize,
    tasks: usize,
    /// Channels that are summed over at a time.
    depth: usize,
    work: usize,
}

impl Correlate {
    pub(super) fn new(problem: &ConvProblem, pass: Pass, cpu: &Cpu) -> Self {
        let across = match pass {
            Pass::Forward => problem.group_out_channels(),
            _ => problem.group_in_channels(),
        };
        let isa = fitting(cpu.isa(), across);
        let lanes = simd::lanes(isa);
        let axes = [&problem.height, &problem.width];
        let (panels, phases, target, source_channels, target_channels) = match pass {
            Pass::Forward => (
                Panels::of_outputs(problem, lanes),
                axes.map(Phase::forward),
                axes.map(|axis| axis.output()),
                problem.in_channels,
                problem.out_channels,
            ),
            _ => (
                Panels::of_inputs(problem, lanes),
                axes.map(Phase::backward_data),
                axes.map(|axis| axis.input),
                problem.out_channels,
                problem.in_channels,
            ),
        };
        let complete = match pass {
            Pass::Forward => true,
            _ => axes.iter().zip(&phases).all(|(axis, phases)| phases.len() == axis.stride.min(axis.input)),
        };
        let lattices = phases.each_ref().map(Vec::len).iter().product::<usize>().max(1);
        let taps = phases.each_ref().map(|phases| phases.iter().map(Phase::taps).max().unwrap_or(1));
        let table_pixels = TABLE_LEN / taps.iter().product::<usize>();
        let source = match pass {
            Pass::Forward => axes.map(|axis| axis.input),
            _ => axes.map(|axis| axis.output()),
        };
        let pixels = problem.batch * target.iter().product::<usize>();
        let source_pixels = problem.batch * source.iter().product::<usize>();
        let source_step = match pass {
            Pass::Forward => spread(source_channels, problem.width.stride, problem),
            _ => spread(source_channels, 1, problem),
        };
        let reading = Reading::new(problem, [source_pixels, source_step], [pixels, target_channels]);
        let per_lattice = match problem.groups {
            1 if problem.weight_len() > 2 * PANEL_FLOATS => TASK_PIXELS_OF_LARGE_WEIGHTS,
            1 => TASK_PIXELS,
            _ => TASK_PIXELS_OF_GROUPS,
        };
        let most = table_pixels.max(1) * lattices;
        let copied = reading.targets([problem.batch, target[0], target[1]], cpu);
        let task_pixels = copied.filter(|&wanted| wanted <= most).unwrap_or_else(|| {
            let tasks = pixels.div_ceil(most.min(per_lattice * lattices)).next_multiple_of(cpu.threads());
            pixels.div_ceil(tasks)
        });
        let tap_floats = panels.taps * panels.vectors().min(2) * lanes;
        let depth = (PANEL_FLOATS / tap_floats).max(16);
        Correlate {
            isa,
            reading,
            depth: panels.depth.div_ceil(panels.depth.div_ceil(depth)),
            panels,
            phases,
            complete,
            target,
            target_channels,
            source_channels,
            source_step,
            source_pixels,
            kernel_columns: problem.width.kernel,
            task_pixels,
            tasks: pixels.div_ceil(task_pixels),
            work: problem.flops() as usize,
        }
    }

    /// Threads that have a slab each.
    fn workers(&self, cpu: &Cpu) -> usize {
        cpu.threads().min(self.tasks)
    }

    pub(super) fn workspace_len(&self, cpu: &Cpu) -> Option<usize> {
        let slabs = self.workers(cpu) * self.reading.slab_len();
        self.panels.len()?.checked_add(self.source_step + self.spread_len() + 2 * LINE + slabs)
    }

    /// Floats of the spread source.
    fn spread_len(&self) -> usize {
        if self.source_step > self.source_channels { self.source_pixels * self.source_step } else { 0 }
    }
}

/// Floats from a source pixel to the next, for targets that read pixels `stride` apart: usually its channels.
///
/// If these pixels lie a way of the L1 cache apart, all of a register block's fall into one set, which does not hold
/// them: they are then spread, if there are kernel elements enough to pay for the copy.
fn spread(channels: usize, stride: usize, problem: &ConvProblem) -> usize {
    let taps = problem.height.kernel * problem.width.kernel;
    let crowded = (stride * channels).is_multiple_of(WAY) && channels >= 8 * LINE;
    if crowded && problem.groups == 1 && taps > 1 { channels + LINE } else { channels }
}

impl ConvKernel<f32> for Correlate {
    fn run(&self, cpu: &Cpu, [source, weight]: [&[f32]; 2], target: &mut [f32], workspace: &mut [f32]) {
        let (zeros, workspace) = workspace.split_at_mut(self.source_step);
        zeros.fill(0.0);
        let spread_len = self.spread_len();
        let (pixels, workspace) = workspace.split_at_mut(spread_len);
        let apart = source.chunks(SPREAD_PIXELS * self.source_channels);
        let work = apart.zip(pixels.chunks_mut(SPREAD_PIXELS * self.source_step));
        cpu.for_each(spread_len, work, |(source, pixels)| {
            for (from, to) in source.chunks(self.source_channels).zip(pixels.chunks_mut(self.source_step)) {
                to[..from.len()].copy_from_slice(from);
            }
        });
        let source = if pixels.is_empty() { source } else { &*pixels };
        let slab_len = self.reading.slab_len();
        let (slabs, panels) = aligned(workspace).split_at_mut(self.workers(cpu) * slab_len);
        self.panels.pack(cpu, weight, panels);
        let tasks = target.chunks_mut(self.task_pixels * self.target_channels).enumerate();
        let (zeros, panels) = (&*zeros, &*panels);
        cpu.for_each_with(self.work, slabs.chunks_mut(slab_len), tasks, |slab, (task, target)| {
            let first = task * self.task_pixels;
            simd::run(self.isa, Task { correlate: self, first, source, zeros, slab, panels, target });
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
    panels: &'a [f32],
    target: &'a mut [f32],
}

impl WithSimd for Task<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let c = self.correlate;
        if !c.complete {
            self.target.fill(0.0);
        }
        let run = self.first..self.first + self.target.len() / c.target_channels;
        let most = most_rows(S::F32_LANES, c.panels.vectors().min(2));
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
        let reach = lattices.iter().fold(None, |reach, (lattice, pixels)| lattice.reach(pixels, reach));
        let places = c.reading.places(reach.unwrap_or(0..0), self.source, self.zeros, self.slab);
        let blocks: Vec<Block> = lattices
            .into_iter()
            .flat_map(|(lattice, pixels)| lattice.blocks(pixels, most, &places))
            .collect();
        for groups in places.groups(0..c.panels.groups) {
            let first = places.load(simd, groups.clone());
            for index in c.panels.of_groups(groups) {
                let panel = c.panels.panel(index);
                let channel = places.group(panel.group - first);
                let weights = &self.panels[c.panels.offset(index)..c.panels.offset(index + 1)];
                for depth in even_parts(c.panels.depth, c.depth) {
                    for block in &blocks {
                        let depth = depth.clone();
                        let product = Product { correlate: c, panel, channel, depth, weights, block };
                        product.multiply(simd, self.target);
                    }
                }
            }
        }
    }
}

/// One block's pixels by one panel's channels, over some of the channels of the source.
struct Product<'a> {
    correlate: &'a Correlate,
    panel: Panel,
    /// The group's first, from where the block's sources lie.
    channel: usize,
    /// Within the group.
    depth: std::ops::Range<usize>,
    weights: &'a [f32],
    block: &'a Block,
}

impl Product<'_> {
    #[inline(always)]
    fn multiply<S: Simd>(&self, simd: S, target: &mut [f32]) {
        by_block!(self.block.targets.len(), self.panel.vectors, multiply::<S>(simd, self, target));
    }
}

/// Target pixels P by V vectors of channels. Overwrites the target for the first channels, else adds.
#[inline(always)]
fn multiply<S: Simd, const P: usize, const V: usize>(simd: S, product: &Product<'_>, target: &mut [f32]) {
    let Product { correlate, panel, channel, depth, weights, block } = product;
    let panels = &correlate.panels;
    let width = V * S::F32_LANES;
    let channel = channel + depth.start;
    let last = last_mask(simd, panel.channels);
    let target_start = target.as_mut_ptr();
    let targets: [_; P] = std::array::from_fn(|p| {
        let first = block.targets[p] * correlate.target_channels + panel.group * panels.width + panel.first;
        assert!(first + panel.channels <= target.len());
        target_start.wrapping_add(first)
    });
    let mut sums = [[simd.splat_f32s(0.0); V]; P];
    if depth.start > 0 {
        // SAFETY: each target has the panel's channels, as many as V vectors with the last one's mask.
        sums = targets.map(|target| unsafe { load(simd, target, last) });
    }
    for (&tap, sources) in block.taps.iter().zip(block.sources.as_chunks::<P>().0) {
        let weights = &weights[(tap * panels.depth + depth.start) * width..][..depth.len() * width];
        // SAFETY: `channel` leads from a source to the group's channels of a pixel or of zeros, and the depth lies in them.
        // The weights are `depth` times V vectors.
        unsafe {
            let sources = sources.map(|source| source.add(channel));
            add_products::<S, P, V>(simd, &mut sums, &sources, weights.as_ptr(), depth.len());
        }
    }
    for p in 0..P {
        // SAFETY: as for loading.
        unsafe { store(simd, targets[p], sums[p], last) };
    }
}

/// V vectors, of which `last` masks the last one if that is not full.
///
/// # Safety
/// Their floats must be readable.
#[inline(always)]
unsafe fn load<S: Simd, const V: usize>(
    simd: S,
    from: *const f32,
    last: Option<MemMask<S::m32s>>,
) -> [S::f32s; V] {
    std::array::from_fn(|v| {
        // SAFETY: the caller's promise.
        unsafe {
            let from = from.add(v * S::F32_LANES);
            match last {
                Some(mask) if v == V - 1 => simd.mask_load_ptr_f32s(mask, from),
                _ => from.cast::<S::f32s>().read_unaligned(),
            }
        }
    })
}

/// The reverse of [`load`].
///
/// # Safety
/// The vectors' floats must be writable.
#[inline(always)]
unsafe fn store<S: Simd, const V: usize>(
    simd: S,
    to: *mut f32,
    vectors: [S::f32s; V],
    last: Option<MemMask<S::m32s>>,
) {
    for v in 0..V {
        // SAFETY: the caller's promise.
        unsafe {
            let to = to.add(v * S::F32_LANES);
            match last {
                Some(mask) if v == V - 1 => simd.mask_store_ptr_f32s(mask, to, vectors[v]),
                _ => to.cast::<S::f32s>().write_unaligned(vectors[v]),
            }
        }
    }
}

/// sums[p][v] += sources[p][c] * weights[c][v] over `depth` channels.
///
/// # Safety
/// Each source must be readable for `depth` floats, the weights for `depth * V` vectors.
#[inline(always)]
unsafe fn add_products<S: Simd, const P: usize, const V: usize>(
    simd: S,
    sums: &mut [[S::f32s; V]; P],
    sources: &[*const f32; P],
    weights: *const f32,
    depth: usize,
) {
    let weights = weights.cast::<S::f32s>();
    let mut c = 0;
    // SAFETY: `c` stays below `depth`, within what the caller has promised.
    unsafe {
        // With one vector, the sources' addresses are too many to stay in registers: some channels for each load of one,
        // as many as there are registers for weights.
        while V == 1 && S::F32_LANES == 16 && c + 4 <= depth {
            add_turn::<S, P, V, 4>(simd, sums, sources, weights, c);
            c += 4;
        }
        while V == 1 && S::F32_LANES < 16 && c + 2 <= depth {
            add_turn::<S, P, V, 2>(simd, sums, sources, weights, c);
            c += 2;
        }
        while c < depth {
            let w: [_; V] = std::array::from_fn(|v| weights.add(c * V + v).read_unaligned());
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
    sources: &[*const f32; P],
    weights: *const S::f32s,
    c: usize,
) {
    // SAFETY: as the caller promises.
    unsafe {
        let w: [_; U] = std::array::from_fn(|u| weights.add(c + u).read_unaligned());
        for p in 0..P {
            for u in 0..U {
                let x = simd.splat_f32s(*sources[p].add(c + u));
                sums[p][0] = simd.mul_add_f32s(x, w[u], sums[p][0]);
            }
        }
    }
}
