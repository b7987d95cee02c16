//! The two passes: blocks of panels, and how threads share them.

use crate::simd::registers;
use pulp::{Simd, WithSimd};

use super::panels::{COLUMNS, Columns, DEPTH, Target, pack_rows, product, rows};
use crate::Cpu;
use crate::conv::gemm_views::{Split, reduce_partials};
use crate::conv::plan::TypedKernel;
use crate::conv::problem::ConvProblem;
use crate::simd;

/// y = W columns, for every image and group.
pub(super) struct Forward {
    problem: ConvProblem,
    registers: usize,
    /// The number of parts of a group's output channels that different threads may take.
    parts: usize,
    workers: usize,
}

impl Forward {
    pub(super) fn new(problem: &ConvProblem, cpu: &Cpu) -> Forward {
        let (k, tasks) = (problem.group_out_channels(), problem.batch * problem.groups);
        let enough = |parts: &usize| k.is_multiple_of(*parts) && tasks * parts >= cpu.threads();
        let parts = (1..=k.min(cpu.threads())).find(enough).unwrap_or(1);
        let workers = cpu.threads().min(tasks * parts);
        Forward { problem: *problem, registers: cpu.isa().registers(), parts, workers }
    }

    /// Output channels of a task.
    fn task_rows(&self) -> usize {
        self.problem.group_out_channels() / self.parts
    }

    fn depth(&self) -> usize {
        self.problem.weight_len() / self.problem.out_channels
    }

    /// Packed weights of a task.
    fn panel_len(&self) -> usize {
        self.task_rows().next_multiple_of(rows(self.registers)) * self.depth()
    }

    fn packed_len(&self) -> usize {
        self.problem.groups * self.parts * self.panel_len()
    }

    pub(super) fn workspace_len(&self) -> usize {
        self.packed_len() + self.workers * DEPTH * COLUMNS
    }
}

impl TypedKernel<f32> for Forward {
    fn run(&self, cpu: &Cpu, [x, weight]: [&[f32]; 2], output: &mut [f32], workspace: &mut [f32]) {
        let p = &self.problem;
        let (packed, scratch) = workspace.split_at_mut(self.packed_len());
        let height = rows(self.registers);
        let filters = weight.chunks(self.task_rows() * self.depth());
        cpu.for_each(weight.len(), packed.chunks_mut(self.panel_len()).zip(filters), |(packed, weight)| {
            // The weights are packed in the blocks of the sum in which they are multiplied.
            let mut rest = packed;
            for first in (0..self.depth()).step_by(DEPTH) {
                let end = (first + DEPTH).min(self.depth());
                let block = self.panel_len() / self.depth() * (end - first);
                let (now, later) = rest.split_at_mut(block);
                pack_rows(weight, [self.task_rows(), self.depth()], [first, end], height, now);
                rest = later;
            }
        });
        let packed = &*packed;
        let pixels = p.height.output() * p.width.output();
        let task_len = self.task_rows() * pixels;
        let tasks = p.batch * p.groups * self.parts;
        let per_worker = tasks.div_ceil(self.workers);
        let shares = output.chunks_mut(per_worker * task_len).zip(scratch.chunks_mut(DEPTH * COLUMNS));
        cpu.for_each(p.flops() as usize, shares.enumerate(), |(worker, (y, columns))| {
            for (index, y) in y.chunks_mut(task_len).enumerate() {
                let task = worker * per_worker + index;
                let group_image = task / self.parts; // image * groups + group
                let image_len = p.group_in_channels() * p.height.input * p.width.input;
                let image = &x[group_image * image_len..][..image_len];
                let filters = task % (p.groups * self.parts);
                let weight = &packed[filters * self.panel_len()..][..self.panel_len()];
                simd::run(cpu.isa(), ForwardTask { forward: self, image, weight, columns, y });
            }
        });
    }
}

/// Some output channels of one image.
struct ForwardTask<'a> {
    forward: &'a Forward,
    image: &'a [f32],
    weight: &'a [f32],
    columns: &'a mut [f32],
    y: &'a mut [f32],
}

impl WithSimd for ForwardTask<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let ForwardTask { forward, image, weight, columns, y } = self;
        let p = &forward.problem;
        let (width, height) = (2 * S::F32_LANES, rows(registers::<S>()));
        let pixels = p.height.output() * p.width.output();
        let source = Columns { problem: p, image };
        for first in (0..pixels).step_by(COLUMNS) {
            let end = (first + COLUMNS).min(pixels);
            let mut weight = weight;
            for j in (0..forward.depth()).step_by(DEPTH) {
                let depth = DEPTH.min(forward.depth() - j);
                source.pack([j, depth], [first, end], width, columns);
                for (index, b) in
                    columns.chunks(depth * width).enumerate().take((end - first).div_ceil(width))
                {
                    let pixel = first + index * width;
                    for (panel, a) in
                        weight.chunks(depth * height).enumerate().take(forward.task_rows().div_ceil(height))
                    {
                        let row = panel * height;
                        let target = Target {
                            data: &mut y[row * pixels + pixel..],
                            stride: pixels,
                            rows: height.min(forward.task_rows() - row),
                            columns: width.min(end - pixel),
                            add: j > 0,
                        };
                        product(simd, a, b, target);
                    }
                }
                weight = &weight[forward.task_rows().next_multiple_of(height) * depth..];
            }
        }
    }
}

/// dW = sum over images of dy columnsᵀ, for every group.
pub(super) struct Weights {
    problem: ConvProblem,
    registers: usize,
    workers: usize,
}

impl Weights {
    pub(super) fn new(problem: &ConvProblem, cpu: &Cpu) -> Weights {
        let workers = Split::new(problem.batch, cpu).workers;
        Weights { problem: *problem, registers: cpu.isa().registers(), workers }
    }

    /// Packed dy of one block of pixels.
    fn rows_len(&self) -> usize {
        self.problem.group_out_channels().next_multiple_of(rows(self.registers)) * DEPTH
    }

    pub(super) fn workspace_len(&self) -> usize {
        self.workers * (self.problem.weight_len() + self.rows_len() + DEPTH * COLUMNS)
    }
}

impl TypedKernel<f32> for Weights {
    fn run(&self, cpu: &Cpu, [x, dy]: [&[f32]; 2], output: &mut [f32], workspace: &mut [f32]) {
        let p = &self.problem;
        let split = Split::new(p.batch, cpu);
        let (sums, scratch) = workspace.split_at_mut(self.workers * p.weight_len());
        let shares = x.chunks(p.input_len() / p.batch * split.images);
        let shares = shares.zip(dy.chunks(p.output_len() / p.batch * split.images));
        let scratch = scratch.chunks_mut(self.rows_len() + DEPTH * COLUMNS);
        let tasks = shares.zip(sums.chunks_mut(p.weight_len()).zip(scratch));
        cpu.for_each(p.flops() as usize, tasks, |((x, dy), (sums, scratch))| {
            let (rows, columns) = scratch.split_at_mut(self.rows_len());
            simd::run(cpu.isa(), WeightsTask { weights: self, x, dy, sums, rows, columns });
        });
        reduce_partials(sums, p.weight_len());
        output.copy_from_slice(&sums[..p.weight_len()]);
    }
}

/// The sums over some images.
struct WeightsTask<'a> {
    weights: &'a Weights,
    x: &'a [f32],
    dy: &'a [f32],
    sums: &'a mut [f32],
    rows: &'a mut [f32],
    columns: &'a mut [f32],
}

impl WithSimd for WeightsTask<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let WeightsTask { weights, x, dy, sums, rows: packed, columns } = self;
        let p = &weights.problem;
        let (width, height) = (2 * S::F32_LANES, rows(registers::<S>()));
        let pixels = p.height.output() * p.width.output();
        let (k, j_end) = (p.group_out_channels(), p.weight_len() / p.out_channels);
        let image_len = p.group_in_channels() * p.height.input * p.width.input;
        sums.fill(0.0);
        // Images and their groups follow one another in both tensors.
        for (index, (image, dy)) in x.chunks(image_len).zip(dy.chunks(k * pixels)).enumerate() {
            let sums = &mut sums[index % p.groups * k * j_end..][..k * j_end];
            let source = Columns { problem: p, image };
            for first in (0..pixels).step_by(DEPTH) {
                let end = (first + DEPTH).min(pixels);
                let depth = end - first;
                pack_rows(dy, [k, pixels], [first, end], height, packed);
                for j in (0..j_end).step_by(COLUMNS) {
                    let count = COLUMNS.min(j_end - j);
                    source.pack_transposed([j, count], [first, end], width, columns);
                    for (panel, b) in columns.chunks(depth * width).enumerate().take(count.div_ceil(width)) {
                        let column = j + panel * width;
                        for (panel, a) in packed.chunks(depth * height).enumerate().take(k.div_ceil(height)) {
                            let row = panel * height;
                            let target = Target {
                                data: &mut sums[row * j_end + column..],
                                stride: j_end,
                                rows: height.min(k - row),
                                columns: width.min(j_end - column),
                                add: true,
                            };
                            product(simd, a, b, target);
                        }
                    }
                }
            }
        }
    }
}
