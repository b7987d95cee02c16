//! One axis of forward or backward-data. Both have the same form: outputs gather source elements through taps.

use crate::conv::problem::ConvAxis;

/// A kernel element and where it reads: output q of the phase reads source element `scale * q + offset`.
#[derive(Clone, Copy)]
pub(super) struct Tap {
    pub(super) kernel: usize,
    pub(super) offset: isize,
}

/// Outputs a fixed step apart, which read through the same taps.
pub(super) struct Phase {
    /// From left to right. Empty if the stride skips these outputs: they are 0.
    pub(super) taps: Vec<Tap>,
    /// The number of outputs.
    pub(super) count: usize,
    /// The outputs `[first, end)` whose taps all read inside the source.
    pub(super) interior: [usize; 2],
}

impl Phase {
    fn new(mut taps: Vec<Tap>, count: usize, source: usize, scale: usize) -> Phase {
        taps.sort_by_key(|tap| tap.offset);
        // How many outputs read below `limit` through the tap.
        let below = |limit: usize, tap: &Tap| {
            limit.checked_add_signed(-tap.offset).unwrap_or(0).div_ceil(scale).min(count)
        };
        let first = taps.iter().map(|tap| below(0, tap)).max().unwrap_or(0);
        let end = taps.iter().map(|tap| below(source, tap)).min().unwrap_or(count);
        Phase { taps, count, interior: [first, end] }
    }
}

/// One axis: output i is number `i / phases.len()` of phase `i % phases.len()`.
pub(super) struct Gather {
    pub(super) kernel: usize,
    pub(super) source: usize,
    pub(super) output: usize,
    /// Source elements from one output of a phase to the next.
    pub(super) scale: usize,
    pub(super) phases: Vec<Phase>,
}

impl Gather {
    /// y gathers x: one phase, a stride apart in x.
    pub(super) fn forward(axis: &ConvAxis) -> Gather {
        let tap =
            |kernel| Tap { kernel, offset: (kernel * axis.dilation) as isize - axis.pad_before as isize };
        let (source, output, scale) = (axis.input, axis.output(), axis.stride);
        let phase = Phase::new((0..axis.kernel).map(tap).collect(), output, source, scale);
        Gather { kernel: axis.kernel, source, output, scale, phases: vec![phase] }
    }

    /// dx gathers dy. In forward, y at o read x at i through kernel element k where `i = stride o + dilation k - padding`. So
    /// dx at i reads dy at `(i + padding - dilation k) / stride` if that is an integer; i modulo the stride decides for which
    /// k it is.
    pub(super) fn backward(axis: &ConvAxis) -> Gather {
        let (source, output) = (axis.output(), axis.input);
        let stride = axis.stride as isize;
        let step = axis.stride.min(output);
        let phase = |first: usize| {
            let taps = (0..axis.kernel).filter_map(|kernel| {
                let distance = (first + axis.pad_before) as isize - (kernel * axis.dilation) as isize;
                (distance % stride == 0).then_some(Tap { kernel, offset: distance / stride })
            });
            Phase::new(taps.collect(), (output - first).div_ceil(step), source, 1)
        };
        Gather { kernel: axis.kernel, source, output, scale: 1, phases: (0..step).map(phase).collect() }
    }

    /// The phase of output `i`, and its number in that phase.
    #[inline(always)]
    pub(super) fn phase(&self, i: usize) -> (&Phase, usize) {
        (&self.phases[i % self.phases.len()], i / self.phases.len())
    }

    /// The source element that output `q` of a phase reads through `tap`; `None` if that lies outside.
    #[inline(always)]
    pub(super) fn source_index(&self, q: usize, tap: &Tap) -> Option<usize> {
        (self.scale * q).checked_add_signed(tap.offset).filter(|&index| index < self.source)
    }
}
