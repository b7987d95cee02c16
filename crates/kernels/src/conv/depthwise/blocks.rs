//! Rows of channels-last pixels, processed in blocks; shared by the gather and the weight gradient.

use pulp::{MemMask, Simd};

use super::gather::{Gather, Phase, Tap};
use crate::simd;
use crate::simd::registers;
use crate::stream::prefetch_to_l2;

/// Output pixels that share the loads of weights and inputs.
pub(super) const BLOCK: usize = 8;

/// A row of the kernel, and the row of the source that it reads.
struct KernelRow {
    /// Channel 0 of the source row's first pixel.
    source: *const f32,
    /// The offset of the row in taps x channels.
    place: usize,
}

/// A column of the kernel.
struct KernelColumn {
    /// The pixel that output 0 reads; may lie outside the row.
    offset: isize,
    /// The offset of the column in taps x channels, relative to that of its row.
    place: usize,
}

/// One phase of one row of outputs.
pub(super) struct Line<'a> {
    pub(super) phase: &'a Phase,
    rows: &'a [KernelRow],
    columns: &'a [KernelColumn],
    channels: usize,
    /// Pixels of a source row, and (`scale`) the pixels from what one output reads to what the next output reads.
    source: usize,
    scale: usize,
    /// Floats from one output of the phase to the next.
    pub(super) output_step: usize,
}

/// Buffers for what a row reads and for the inputs of a block at an edge.
#[derive(Default)]
pub(super) struct Scratch {
    rows: Vec<KernelRow>,
    columns: Vec<KernelColumn>,
    inputs: Vec<*const f32>,
}

/// Where a block lies: outputs from `q` on, one vector of channels from `channel` on.
#[derive(Clone, Copy)]
pub(super) struct Place<'a, M> {
    pub(super) q: usize,
    pub(super) channel: usize,
    /// The channels that exist.
    pub(super) mask: MemMask<M>,
    /// Channel 0 of each kernel row's inputs, if the block is at an edge.
    inputs: &'a [*const f32],
}

/// What is done for each block of a row.
pub(super) trait BlockKernel {
    /// The most kernel columns that share inputs on CPUs with 16 registers: with more, the compiler spills some to the stack.
    const MOST_TAPS: usize;

    /// EDGE: the inputs are read from the list, and some outputs may not exist. MASKED: some channels may not exist.
    ///
    /// TAPS: the number of kernel columns, where they read neighbouring pixels, so that outputs share some of a block's
    /// INPUTS pixels of each source row. Both are 0 if there is no code for this width, or if the pixels are not neighbours.
    ///
    /// # Safety
    /// - The lanes from `place.channel` on, or those of `place.mask` if MASKED, are channels of `line`.
    /// - If not EDGE, outputs `place.q..place.q + BLOCK` of the phase exist and read inside the row through every tap. If
    ///   EDGE, output `place.q` exists, and `place.inputs` has INPUTS pointers for each kernel row, or BLOCK for each column
    ///   if TAPS is 0; from each of them all channels are readable.
    /// - If TAPS is not 0, there are TAPS columns, each offset is one more than the previous, and INPUTS is [`inputs`] of
    ///   TAPS and the line's scale.
    /// - The kernel's own slices have all channels of each tap and of each output of the phase.
    unsafe fn block<S: Simd, const EDGE: bool, const MASKED: bool, const TAPS: usize, const INPUTS: usize>(
        &mut self,
        simd: S,
        line: &Line<'_>,
        place: Place<'_, S::m32s>,
    );
}

/// One phase of a row of outputs, and what it reads.
pub(super) struct Outputs<'a> {
    pub(super) gather: &'a [Gather; 2],
    /// The row's number in its image.
    pub(super) row: usize,
    pub(super) phase: &'a Phase,
    /// The source's pixels.
    pub(super) image: &'a [f32],
    /// One pixel of zeros: what is read outside of the image.
    pub(super) zeros: &'a [f32],
    /// What the next row will be the first to use, besides the image.
    pub(super) next: Option<*const f32>,
}

/// Runs `kernel` for all blocks of these outputs.
///
/// # Safety
/// The kernel's own slices have all channels, as many as `zeros`, of each tap, [row][column], and of each output of the phase.
#[inline(always)]
pub(super) unsafe fn each_block<S: Simd, K: BlockKernel>(
    simd: S,
    scratch: &mut Scratch,
    outputs: &Outputs<'_>,
    kernel: &mut K,
) {
    let &Outputs { gather: [_, width], phase, image, zeros, next, .. } = outputs;
    let channels = zeros.len();
    let below = scratch.list_kernel(outputs);
    let below = image.as_ptr().wrapping_add(below * width.source * channels);
    let Scratch { rows, columns, inputs: list } = scratch;
    let output_step = width.phases.len() * channels;
    let line = Line { phase, rows, columns, channels, source: width.source, scale: width.scale, output_step };
    line.check_interior();
    let count = line.neighbours(if registers::<S>() >= 32 { usize::MAX } else { K::MOST_TAPS });
    let row = Row { line, zeros, ahead: [Some(below), next] };
    // SAFETY: where there are TAPS columns, they are neighbours, and INPUTS is what they read at this scale. `check_interior`
    // has checked that the outputs of the interior read inside the row through every tap. The slices of `kernel` are as the
    // caller promises.
    unsafe {
        match (count, width.scale) {
            (2, 1) => row.each_block::<S, 2, { inputs(2, 1) }>(simd, list, kernel),
            (3, 1) => row.each_block::<S, 3, { inputs(3, 1) }>(simd, list, kernel),
            (5, 1) => row.each_block::<S, 5, { inputs(5, 1) }>(simd, list, kernel),
            (7, 1) => row.each_block::<S, 7, { inputs(7, 1) }>(simd, list, kernel),
            (3, 2) => row.each_block::<S, 3, { inputs(3, 2) }>(simd, list, kernel),
            (5, 2) => row.each_block::<S, 5, { inputs(5, 2) }>(simd, list, kernel),
            _ => row.each_block::<S, 0, 0>(simd, list, kernel),
        }
    }
}

impl Scratch {
    /// Lists the rows of the kernel that read inside the image, and all columns. Returns the source row after those that are
    /// read; 0 if none is.
    #[inline(always)]
    fn list_kernel(&mut self, outputs: &Outputs<'_>) -> usize {
        let &Outputs { gather: [height, width], row, phase, image, zeros, .. } = outputs;
        let channels = zeros.len();
        let row_len = width.source * channels;
        let (vertical, q) = height.phase(row);
        self.rows.clear();
        let mut below = 0;
        for r in &vertical.taps {
            let Some(index) = height.source_index(q, r) else { continue };
            below = below.max(index + 1);
            let source = image[index * row_len..][..row_len].as_ptr();
            self.rows.push(KernelRow { source, place: r.kernel * width.kernel * channels });
        }
        let column = |s: &Tap| KernelColumn { offset: s.offset, place: s.kernel * channels };
        self.columns.clear();
        self.columns.extend(phase.taps.iter().map(column));
        below
    }
}

/// Pixels of a source row that a block reads, if `taps` kernel columns read neighbouring pixels.
const fn inputs(taps: usize, scale: usize) -> usize {
    (BLOCK - 1) * scale + taps
}

/// A line, and what else its blocks need.
struct Row<'a> {
    line: Line<'a>,
    /// One pixel of zeros.
    zeros: &'a [f32],
    /// The memory that the next row will be the first to read, and the first to write.
    ahead: [Option<*const f32>; 2],
}

impl Row<'_> {
    /// Runs `kernel` for all blocks and meanwhile prefetches what lies ahead. Blocks touch too many places at once for the
    /// hardware to notice that, over time, all of memory is read in order.
    ///
    /// # Safety
    /// What [`BlockKernel::block`] requires of TAPS, INPUTS and the kernel's own slices. The outputs of the phase's interior
    /// exist and read inside the row through every tap.
    #[inline(always)]
    unsafe fn each_block<S: Simd, const TAPS: usize, const INPUTS: usize>(
        self,
        simd: S,
        inputs: &mut Vec<*const f32>,
        kernel: &mut impl BlockKernel,
    ) {
        let Row { line, zeros, ahead } = self;
        let Line { phase, channels, scale, .. } = line;
        let lanes = S::F32_LANES;
        let whole = channels - channels % lanes;
        let mask = |lanes: usize| simd.mask_between_m32s(0, lanes as u32);
        let (all, rest) = (mask(lanes), mask(channels - whole));
        let [first, end] = phase.interior;
        // A block's share of the rows ahead; strides above 2 skip much of them.
        let shares = [BLOCK * lanes * (scale * scale).min(4), BLOCK * lanes];
        let mut ahead = simd::array::<_, 2>(|i| (ahead[i], shares[i]));
        for q in (0..phase.count).step_by(BLOCK) {
            let edge = q < first || q + BLOCK > end;
            if edge || whole < channels {
                line.list_inputs::<TAPS, INPUTS>(q, zeros, inputs);
            }
            for channel in (0..whole).step_by(lanes) {
                prefetch_shares(&mut ahead);
                let place = Place { q, channel, mask: all, inputs };
                // SAFETY: all lanes from `channel` on lie below `whole`, so that they are channels. A block that is not at an
                // edge lies in the interior; for one at an edge the inputs have been listed just now, pixels of a source row or
                // of zeros. The rest is what the caller promises.
                unsafe {
                    if edge {
                        kernel.block::<S, true, false, TAPS, INPUTS>(simd, &line, place);
                    } else {
                        kernel.block::<S, false, false, TAPS, INPUTS>(simd, &line, place);
                    }
                }
            }
            if whole < channels {
                let place = Place { q, channel: whole, mask: rest, inputs };
                // SAFETY: the mask has the channels from `whole` on. EDGE holds, and the inputs have been listed just now, pixels
                // of a source row or of zeros. The rest is what the caller promises.
                unsafe { kernel.block::<S, true, true, TAPS, INPUTS>(simd, &line, place) };
            }
        }
    }
}

/// Prefetches the next share of each place, and moves it on by that.
#[inline(always)]
fn prefetch_shares(ahead: &mut [(Option<*const f32>, usize); 2]) {
    for (ahead, share) in ahead {
        if let Some(ahead) = ahead {
            prefetch_to_l2(*ahead, *share);
            *ahead = ahead.wrapping_add(*share);
        }
    }
}

impl Line<'_> {
    /// # Panics
    /// If an output of the phase's interior does not exist, or reads outside of the row through a tap.
    #[inline(always)]
    fn check_interior(&self) {
        let Line { phase, columns, .. } = self;
        // Of the outputs in the interior, the first and the last read furthest out, through the first and the last tap.
        let [first, end] = phase.interior;
        let inside = |q: usize, column: &KernelColumn| {
            (self.scale * q).checked_add_signed(column.offset).is_some_and(|pixel| pixel < self.source)
        };
        assert!(end <= phase.count && columns.is_sorted_by_key(|column| column.offset));
        assert!(
            first >= end || columns.iter().all(|column| inside(first, column) && inside(end - 1, column))
        );
    }

    /// The number of columns, if they read neighbouring pixels and are at most `most`; else 0.
    #[inline(always)]
    fn neighbours(&self, most: usize) -> usize {
        let neighbours = self.columns.is_sorted_by(|left, right| left.offset + 1 == right.offset);
        if neighbours && self.columns.len() <= most { self.columns.len() } else { 0 }
    }

    /// Lists what the block from output `q` on reads, as [`BlockKernel::block`] takes it: for each kernel row INPUTS pixels
    /// or, if TAPS is 0, BLOCK for each column. Pixels outside of the row are `zeros`.
    #[inline(always)]
    fn list_inputs<const TAPS: usize, const INPUTS: usize>(
        &self,
        q: usize,
        zeros: &[f32],
        inputs: &mut Vec<*const f32>,
    ) {
        // Copies, which stay in registers while the list is written.
        let Line { rows, columns, channels, source, scale, .. } = *self;
        inputs.clear();
        for row in rows {
            let mut list = |first: isize, step: usize, count: usize| {
                inputs.extend((0..count).map(|i| match ((q * scale + i * step) as isize + first) as usize {
                    column if column < source => row.source.wrapping_add(column * channels),
                    _ => zeros.as_ptr(),
                }))
            };
            match TAPS {
                0 => columns.iter().for_each(|column| list(column.offset, scale, BLOCK)),
                _ => list(columns[0].offset, 1, INPUTS),
            }
        }
    }

    /// Calls `add(offset in taps x channels, what the block's outputs read there)` for all taps.
    ///
    /// # Safety
    /// As for [`BlockKernel::block`], but for the kernel's own slices.
    #[inline(always)]
    pub(super) unsafe fn each_tap<
        S: Simd,
        const EDGE: bool,
        const MASKED: bool,
        const TAPS: usize,
        const INPUTS: usize,
    >(
        &self,
        simd: S,
        Place { q, channel, mask, inputs }: Place<'_, S::m32s>,
        mut add: impl FnMut(usize, [S::f32s; BLOCK]),
    ) {
        let listed = if TAPS > 0 { INPUTS } else { self.columns.len() * BLOCK };
        for (r, row) in self.rows.iter().enumerate() {
            // The input that is `pixel` pixels from the block's start or, if EDGE, listed at `place`.
            let input = |pixel: isize, place: usize| {
                // SAFETY: if EDGE, the caller promises a list of `listed` places for each kernel row, `place` is below that, and
                // all channels are readable there. Else it promises that outputs q to q + BLOCK - 1 read inside the row through
                // every tap, which `pixel` counts from output q's column 0 on. The lanes from `channel` on, those of the mask
                // if MASKED, are channels.
                unsafe {
                    let from = match EDGE {
                        true => *inputs.get_unchecked(r * listed + place),
                        false => {
                            let column = (q * self.scale) as isize + pixel;
                            row.source.offset(column * self.channels as isize)
                        }
                    };
                    load::<S, MASKED>(simd, mask, from.add(channel))
                }
            };
            if TAPS > 0 {
                // Each input is loaded once. The scale is a constant here.
                let scale = (INPUTS - TAPS) / (BLOCK - 1);
                let first = self.columns[0].offset;
                let inputs: [_; INPUTS] = simd::array(|i| input(first + i as isize, i));
                for s in 0..TAPS {
                    add(row.place + self.columns[s].place, simd::array(|b| inputs[s + b * scale]));
                }
            } else {
                for (s, column) in self.columns.iter().enumerate() {
                    let input = |b| input(column.offset + (b * self.scale) as isize, s * BLOCK + b);
                    add(row.place + column.place, simd::array(input));
                }
            }
        }
    }
}

/// Loads a vector or, if MASKED, only its lanes in the mask.
///
/// # Safety
/// From `from` on, the floats of a vector must be readable, if MASKED those that the mask has.
#[inline(always)]
pub(super) unsafe fn load<S: Simd, const MASKED: bool>(
    simd: S,
    mask: MemMask<S::m32s>,
    from: *const f32,
) -> S::f32s {
    // SAFETY: the caller promises the floats of a vector, or those that the mask has, and a masked load reads no others.
    unsafe {
        if MASKED {
            // Avoids pulp's detour around masked instructions, which pays for stores: some CPUs are slow at masked ones.
            simd.mask_load_ptr_f32s(MemMask::new(mask.mask()), from)
        } else {
            from.cast::<S::f32s>().read_unaligned()
        }
    }
}

/// Writes a vector or, if MASKED, only its lanes in the mask.
///
/// # Safety
/// From `to` on, the floats of a vector must be writable, if MASKED those that the mask has.
#[inline(always)]
pub(super) unsafe fn store<S: Simd, const MASKED: bool>(
    simd: S,
    mask: MemMask<S::m32s>,
    to: *mut f32,
    value: S::f32s,
) {
    // SAFETY: the caller promises the floats of a vector, or those that the mask has, and a masked store writes no others.
    unsafe {
        if MASKED {
            simd.mask_store_ptr_f32s(mask, to, value);
        } else {
            to.cast::<S::f32s>().write_unaligned(value);
        }
    }
}
