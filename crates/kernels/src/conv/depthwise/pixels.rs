//! Forward and backward-data in channels-last: vectors of channels, several pixels of a row at once.

use pulp::{Simd, WithSimd};

use super::blocks::{BLOCK, BlockKernel, Line, Outputs, Place, Scratch, each_block, load, store};
use super::gather::Gather;
use crate::Cpu;
use crate::conv::plan::TypedKernel;
use crate::simd;
use crate::stream::{self, Streaming};
use crate::transpose::transpose;

/// The gather of an N x H x W x C tensor.
pub(super) struct Pixels {
    gather: [Gather; 2],
    channels: usize,
    /// Output rows of a task, over all images.
    rows: usize,
}

impl Pixels {
    pub(super) fn new(gather: [Gather; 2], [batch, channels]: [usize; 2], cpu: &Cpu) -> Pixels {
        // A few tasks a thread, to balance the load; each task reads the halo of its first rows again.
        let rows = (batch * gather[0].output).div_ceil(4 * cpu.threads());
        Pixels { gather, channels, rows }
    }

    /// The weights as taps x channels, and a pixel of zeros.
    pub(super) fn workspace_len(&self) -> usize {
        (self.gather[0].kernel * self.gather[1].kernel + 1) * self.channels
    }
}

impl TypedKernel<f32> for Pixels {
    fn run(&self, cpu: &Cpu, [source, weight]: [&[f32]; 2], output: &mut [f32], workspace: &mut [f32]) {
        let (weights, zeros) = workspace.split_at_mut(weight.len());
        transpose(cpu, self.channels, weight.len() / self.channels, weight, weights);
        zeros.fill(0.0);
        let (weights, zeros) = (&*weights, &*zeros);
        let row_len = self.gather[1].output * self.channels;
        let work = output.len() * (weight.len() / self.channels);
        let streams = stream::pays(output, self.channels);
        cpu.for_each(work, output.chunks_mut(self.rows * row_len).enumerate(), |(task, output)| {
            simd::run(
                cpu.isa(),
                Rows { pixels: self, source, weights, zeros, first: task * self.rows, output, streams },
            );
        });
    }
}

/// A task: some rows of the output.
struct Rows<'a> {
    pixels: &'a Pixels,
    source: &'a [f32],
    weights: &'a [f32],
    /// One pixel of zeros.
    zeros: &'a [f32],
    first: usize,
    output: &'a mut [f32],
    /// Whether the output is written by streaming stores.
    streams: bool,
}

impl WithSimd for Rows<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        if self.streams {
            let streaming = Streaming::begin();
            self.run::<S, true>(simd, Some(&streaming));
        } else {
            self.run::<S, false>(simd, None);
        }
    }
}

impl Rows<'_> {
    #[inline(always)]
    fn run<S: Simd, const STREAMS: bool>(self, simd: S, streaming: Option<&Streaming>) {
        let Rows { pixels, source, weights, zeros, first, output, .. } = self;
        let [height, width] = &pixels.gather;
        let channels = pixels.channels;
        let image_len = height.source * width.source * channels;
        let mut scratch = Scratch::default();
        assert!(weights.len() >= height.kernel * width.kernel * channels, "weights of each tap");
        for (row, output) in output.chunks_mut(width.output * channels).enumerate() {
            let (image, row) = ((first + row) / height.output, (first + row) % height.output);
            let image = &source[image * image_len..][..image_len];
            for (first, phase) in width.phases.iter().enumerate() {
                let next = output.as_ptr().wrapping_add((width.output + first * phase.count) * channels);
                let next = (!STREAMS).then_some(next);
                let outputs = Outputs { gather: &pixels.gather, row, phase, image, zeros, next };
                let output = &mut output[first * channels..];
                let mut sums = Sums::<STREAMS> { weights, output, streaming };
                let reach = phase.count.saturating_sub(1) * width.phases.len() * channels + channels;
                assert!(phase.count == 0 || reach <= sums.output.len(), "outputs beyond their row");
                // SAFETY: `weights` have all channels of each tap, and the outputs from this phase's first one on those of each
                // of its outputs.
                unsafe { each_block(simd, &mut scratch, &outputs, &mut sums) };
            }
        }
    }
}

/// The outputs of one phase of one row.
struct Sums<'a, const STREAMS: bool> {
    /// Taps x channels.
    weights: &'a [f32],
    /// From the phase's first output on.
    output: &'a mut [f32],
    /// Present if STREAMS.
    streaming: Option<&'a Streaming>,
}

impl<const STREAMS: bool> BlockKernel for Sums<'_, STREAMS> {
    const MOST_TAPS: usize = 7;

    #[inline(always)]
    unsafe fn block<S: Simd, const EDGE: bool, const MASKED: bool, const TAPS: usize, const INPUTS: usize>(
        &mut self,
        simd: S,
        line: &Line<'_>,
        place: Place<'_, S::m32s>,
    ) {
        let Place { q, channel, mask, .. } = place;
        let mut sums = [simd.splat_f32s(0.0); BLOCK];
        let add = |tap: usize, inputs: [S::f32s; BLOCK]| {
            // SAFETY: the caller promises that the weights have all channels of each tap; the lanes from `channel` on,
            // without those that the mask leaves out, are some of these.
            let weight =
                unsafe { load::<S, MASKED>(simd, mask, self.weights.as_ptr().wrapping_add(tap + channel)) };
            for b in 0..BLOCK {
                sums[b] = simd.mul_add_f32s(inputs[b], weight, sums[b]);
            }
        };
        // SAFETY: the caller promises what `each_tap` asks for.
        unsafe { line.each_tap::<S, EDGE, MASKED, TAPS, INPUTS>(simd, place, add) };
        let output = self.output.as_mut_ptr().wrapping_add(q * line.output_step + channel);
        for (b, sum) in sums.into_iter().enumerate() {
            if EDGE && q + b >= line.phase.count {
                break;
            }
            let output = output.wrapping_add(b * line.output_step);
            if let (true, Some(streaming)) = (STREAMS, self.streaming) {
                // SAFETY: output q + b exists, by the check if EDGE, else by the caller's promise, and has the mask's channels:
                // all of a vector, as `stream::pays` lets only pixels of whole cache lines be streamed, from an aligned start.
                // `simd::run` calls the task, with its vectors.
                unsafe { stream::store(simd, streaming, output, sum) };
            } else {
                // SAFETY: output q + b exists, by the check if EDGE, else by the caller's promise, and has the mask's channels.
                unsafe { store::<S, MASKED>(simd, mask, output, sum) };
            }
        }
    }
}
