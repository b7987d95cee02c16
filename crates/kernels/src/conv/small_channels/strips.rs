//! How threads share backward-weights: each worker adds strips of output rows to its own sums.

use std::ops::Range;

use crate::Cpu;
use crate::conv::gemm_views::reduce_partials;
use crate::conv::problem::ConvProblem;
use crate::conv::workspace::{LINE, aligned};

/// Lengths in floats, whole cache lines each.
pub(super) struct Strips {
    workers: usize,
    /// Output rows of a strip.
    rows: usize,
    /// A worker's sums.
    sums: usize,
    /// The copied input of a strip.
    input: usize,
    /// The copied gradients of a strip.
    gradients: usize,
}

/// The buffers that a worker needs to add a strip.
pub(super) struct Buffers<'a> {
    pub(super) input: &'a mut [f32],
    pub(super) gradients: &'a mut [f32],
    pub(super) sums: &'a mut [f32],
}

/// A strip, whose products are added to the sums.
pub(super) struct Strip<'a, W> {
    /// How they are computed.
    pub(super) weights: &'a W,
    pub(super) x: &'a [f32],
    pub(super) dy: &'a [f32],
    /// Output rows, counted over all images.
    pub(super) rows: Range<usize>,
    pub(super) buffers: Buffers<'a>,
}

impl Strips {
    /// For strips of `rows` rows, with `lens` floats of sums, input and gradients.
    pub(super) fn new(problem: &ConvProblem, cpu: &Cpu, rows: usize, lens: [usize; 3]) -> Strips {
        let [batch, _, height, _] = problem.output_shape();
        let [sums, input, gradients] = lens.map(|len| len.next_multiple_of(LINE));
        Strips { workers: cpu.threads().min(batch * height), rows, sums, input, gradients }
    }

    pub(super) fn workspace_len(&self) -> usize {
        LINE + self.workers * (self.sums + self.input + self.gradients)
    }

    /// Calls `add` for every strip of rows, counted over all images, and returns the sums over all workers.
    pub(super) fn sum<'a>(
        &self,
        cpu: &Cpu,
        problem: &ConvProblem,
        workspace: &'a mut [f32],
        add: impl Fn(Range<usize>, Buffers<'_>) + Sync + Send,
    ) -> &'a [f32] {
        let [batch, _, height, _] = problem.output_shape();
        let rows = (batch * height).div_ceil(self.workers);
        let (all_sums, scratch) = aligned(workspace).split_at_mut(self.workers * self.sums);
        let tasks = all_sums
            .chunks_exact_mut(self.sums)
            .zip(scratch.chunks_exact_mut(self.input + self.gradients))
            .enumerate();
        cpu.for_each(problem.flops() as usize, tasks, |(worker, (sums, scratch))| {
            let rows = worker * rows..((worker + 1) * rows).min(batch * height);
            let (input, gradients) = scratch.split_at_mut(self.input);
            sums.fill(0.0);
            for first in rows.clone().step_by(self.rows) {
                let strip = first..(first + self.rows).min(rows.end);
                add(strip, Buffers { input: &mut *input, gradients: &mut *gradients, sums: &mut *sums });
            }
        });
        reduce_partials(all_sums, self.sums);
        all_sums
    }
}
