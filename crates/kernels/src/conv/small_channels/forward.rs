//! Forward: blocks of neighbouring outputs x output channels, summed over the taps.

use pulp::{Simd, WithSimd};

use super::kernel::{Ahead, OuterProductBlock, Steps, block_rows};
use super::rows::InputRows;
use super::{pack, place_in_filter, taps};
use crate::conv::even::even_parts;
use crate::conv::plan::TypedKernel;
use crate::conv::problem::ConvProblem;
use crate::conv::workspace::{LINE, aligned};
use crate::gemm::Update;
use crate::stream::{self, Streaming};
use crate::{Cpu, MemoryFormat, simd};

/// Forward of one problem.
pub(super) struct Forward {
    problem: ConvProblem,
    lanes: usize,
    workers: usize,
    input: InputRows,
    /// From one row of a block to the next in its left operand: outputs, or output channels where contiguous.
    stride: usize,
    /// Offsets of each tap in the left and the right operand.
    steps: Steps,
}

impl Forward {
    pub(super) fn new(problem: &ConvProblem, cpu: &Cpu) -> Option<Forward> {
        let lanes = cpu.isa().lanes();
        let input = InputRows::new(problem, 2 * lanes)?;
        let places = input.taps().into_iter().enumerate();
        let (units, stride, steps) = match problem.format {
            MemoryFormat::ChannelsLast => (
                problem.batch * problem.height.output(),
                input.step(),
                Steps::new(places.map(|(tap, place)| [place, tap * 2 * lanes])),
            ),
            MemoryFormat::Contiguous => (
                problem.batch * problem.out_channels,
                taps(problem),
                Steps::new(places.map(|(tap, place)| [tap, place])),
            ),
        };
        let workers = cpu.threads().min(units);
        Some(Forward { problem: *problem, lanes, workers, input, stride, steps })
    }

    /// Floats of the packed filters.
    fn filters_len(&self) -> usize {
        match self.problem.format {
            MemoryFormat::ChannelsLast => {
                taps(&self.problem) * self.problem.out_channels.next_multiple_of(2 * self.lanes)
            }
            MemoryFormat::Contiguous => 0,
        }
    }

    fn worker_len(&self) -> usize {
        self.input.len().next_multiple_of(LINE)
    }

    pub(super) fn workspace_len(&self) -> usize {
        LINE + self.filters_len().next_multiple_of(LINE) + self.workers * self.worker_len()
    }

    fn image<'a>(&self, x: &'a [f32], index: usize) -> &'a [f32] {
        let len = self.problem.input_len() / self.problem.batch;
        &x[index * len..][..len]
    }
}

impl TypedKernel<f32> for Forward {
    fn run(&self, cpu: &Cpu, [x, weight]: [&[f32]; 2], y: &mut [f32], workspace: &mut [f32]) {
        let p = &self.problem;
        let work = p.flops() as usize;
        let (filters, scratch) = aligned(workspace).split_at_mut(self.filters_len().next_multiple_of(LINE));
        let scratch = scratch.chunks_exact_mut(self.worker_len());
        let [batch, k, oh, ow] = p.output_shape();
        match p.format {
            MemoryFormat::ChannelsLast => {
                let t = taps(p);
                pack(filters, 2 * self.lanes, [t, k], |tap, k| weight[k * t + place_in_filter(p, tap)]);
                let filters = &*filters;
                let rows = (batch * oh).div_ceil(self.workers);
                let streams = stream::pays(y, k);
                let tasks = y.chunks_mut(rows * ow * k).zip(scratch).enumerate();
                cpu.for_each(work, tasks, |(worker, (y, input))| {
                    let first = worker * rows;
                    simd::run(cpu.isa(), Pixels { forward: self, x, filters, first, y, streams, input });
                });
            }
            MemoryFormat::Contiguous => {
                let planes = (batch * k).div_ceil(self.workers);
                let tasks = y.chunks_mut(planes * oh * ow).zip(scratch).enumerate();
                cpu.for_each(work, tasks, |(worker, (y, input))| {
                    let first = worker * planes;
                    simd::run(cpu.isa(), Planes { forward: self, x, weight, first, y, input });
                });
            }
        }
    }
}

/// A run of output rows, channels-last.
struct Pixels<'a> {
    forward: &'a Forward,
    x: &'a [f32],
    /// [panel of 2 vectors of K][tap][2 lanes].
    filters: &'a [f32],
    /// The first row, counted over all images.
    first: usize,
    y: &'a mut [f32],
    /// Whether y is written by streaming stores.
    streams: bool,
    input: &'a mut [f32],
}

impl WithSimd for Pixels<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Forward { problem: p, input, stride, steps, .. } = self.forward;
        let [_, k, oh, ow] = p.output_shape();
        let panel_width = 2 * S::F32_LANES;
        let streaming = self.streams.then(Streaming::begin);
        for (row, y) in (self.first..).zip(self.y.chunks_exact_mut(ow * k)) {
            input.copy(self.forward.image(self.x, row / oh), row % oh, self.input);
            let mut ahead = Ahead([input.fresh(self.x, row + 1..row + 2), &[]]);
            // All channels of an output one after another: y is written in order.
            for outputs in even_parts(ow, block_rows::<S>()) {
                for (first, panel) in
                    (0..k).step_by(panel_width).zip(self.filters.chunks_exact(panel_width * steps.len()))
                {
                    simd.vectorize(OuterProductBlock {
                        a: &self.input[outputs.start * input.step()..],
                        rows: outputs.len(),
                        stride: *stride,
                        b: panel,
                        steps: steps.all(),
                        out: &mut y[outputs.start * k + first..],
                        pitch: k,
                        columns: panel_width.min(k - first),
                        update: Update::Overwrite,
                        streaming: streaming.as_ref(),
                        ahead: ahead.next(steps.len()),
                    });
                }
            }
        }
    }
}

/// A run of output planes, contiguous.
struct Planes<'a> {
    forward: &'a Forward,
    x: &'a [f32],
    weight: &'a [f32],
    /// The first plane, counted over all images.
    first: usize,
    y: &'a mut [f32],
    input: &'a mut [f32],
}

impl WithSimd for Planes<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Forward { problem: p, input, stride, steps, .. } = self.forward;
        let [_, k, oh, ow] = p.output_shape();
        let width = 2 * S::F32_LANES;
        let mut first = self.first;
        let mut rest = self.y;
        while !rest.is_empty() {
            // The planes of one image.
            let channel = first % k;
            let planes = (k - channel).min(rest.len() / (oh * ow));
            let (y, others) = rest.split_at_mut(planes * oh * ow);
            let image = self.forward.image(self.x, first / k);
            for row in 0..oh {
                input.copy(image, row, self.input);
                for channels in even_parts(planes, block_rows::<S>()) {
                    for column in (0..ow).step_by(width) {
                        simd.vectorize(OuterProductBlock {
                            a: &self.weight[(channel + channels.start) * steps.len()..],
                            rows: channels.len(),
                            stride: *stride,
                            b: &self.input[column..],
                            steps: steps.all(),
                            out: &mut y[(channels.start * oh + row) * ow + column..],
                            pitch: oh * ow,
                            columns: width.min(ow - column),
                            update: Update::Overwrite,
                            streaming: None,
                            ahead: &[],
                        });
                    }
                }
            }
            first += planes;
            rest = others;
        }
    }
}
