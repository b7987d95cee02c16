//! Rows of pixels in channels-last, in blocks: what the gather and the weight gradient share.

use pulp::{MemMask, Simd};

use super::gather::{Gather, Phase};
use crate::stream::prefetch_to_l2;

/// Output pixels that share the loads of weights and inputs.
pub(super) const BLOCK: usize = 8;

/// What one kernel element reads in one row.
pub(super) struct RowTap {
    /// Channel 0 of the pixel that output 0 reads; may lie outside the row.
    pub(super) source: *const f32,
    /// The column of that pixel.
    column: isize,
    /// Place of the kernel element in taps x channels.
    pub(super) place: usize,
}

/// One phase of one row of outputs.
pub(super) struct Line<'a> {
    pub(super) phase: &'a Phase,
    /// Floats from one output of the phase to the next in the source, and in the output.
    pub(super) steps: [usize; 2],
    pub(super) taps: &'a [RowTap],
}

/// Buffers for the taps of a row and for the inputs of a block at an edge.
#[derive(Default)]
pub(super) struct Scratch {
    taps: Vec<RowTap>,
    inputs: Vec<[*const f32; BLOCK]>,
}

/// Where a block lies: outputs from `q` on, one vector of channels from `channel` on.
#[derive(Clone, Copy)]
pub(super) struct Place<'a, M> {
    pub(super) q: usize,
    pub(super) channel: usize,
    /// The channels that exist.
    pub(super) mask: MemMask<M>,
    /// Channel 0 of what each tap reads, if the block is at an edge.
    pub(super) inputs: &'a [[*const f32; BLOCK]],
}

/// What is done for each block of a row.
pub(super) trait BlockKernel {
    /// EDGE: inputs are those listed, and outputs may be missing. MASKED: channels may be missing.
    ///
    /// # Safety
    /// The mask's channels exist, all lanes if not MASKED. If not EDGE, the BLOCK outputs exist and read inside the row
    /// through every tap.
    unsafe fn block<S: Simd, const EDGE: bool, const MASKED: bool>(
        &mut self,
        simd: S,
        line: &Line<'_>,
        place: Place<'_, S::m32s>,
    );
}

/// Runs `kernel` for all blocks of a phase of output row `row` of an image; pixels outside read as `zeros`.
///
/// Meanwhile it prefetches what the next row is the first to read, and what follows `next`, if anything: blocks touch too many
/// places at once for the hardware to see that, by and by, all of memory is read in order.
#[inline(always)]
pub(super) fn each_block<S: Simd>(
    simd: S,
    Scratch { taps, inputs }: &mut Scratch,
    [height, width]: &[Gather; 2],
    (row, phase): (usize, &Phase),
    (image, zeros): (&[f32], &[f32]),
    next: Option<*const f32>,
    kernel: &mut impl BlockKernel,
) {
    let channels = zeros.len();
    let (rows, q) = height.phase(row);
    taps.clear();
    let mut below = 0;
    for r in &rows.taps {
        let Some(index) = height.source_index(q, r) else { continue };
        below = below.max(index + 1);
        let line = image[index * width.source * channels..].as_ptr();
        taps.extend(phase.taps.iter().map(|s| RowTap {
            source: line.wrapping_offset(s.offset * channels as isize),
            column: s.offset,
            place: (r.kernel * width.kernel + s.kernel) * channels,
        }));
    }
    let steps = [width.scale * channels, width.phases.len() * channels];
    let line = Line { phase, steps, taps };
    let lanes = S::F32_LANES;
    let whole = channels - channels % lanes;
    let [all, rest] = [lanes, channels - whole].map(|lanes| simd.mask_between_m32s(0, lanes as u32));
    let [first, end] = phase.interior;
    // A block's share of the next rows; strides above 2 skip much of them.
    let source_share = BLOCK * lanes * (height.scale * width.scale).min(4);
    let mut source_ahead = image.as_ptr().wrapping_add(below * width.source * channels);
    let mut ahead = next.unwrap_or(std::ptr::null());
    let mut prefetch_shares = || {
        prefetch_to_l2(source_ahead, source_share);
        if next.is_some() {
            prefetch_to_l2(ahead, BLOCK * lanes);
        }
        source_ahead = source_ahead.wrapping_add(source_share);
        ahead = ahead.wrapping_add(BLOCK * lanes);
    };
    for q in (0..phase.count).step_by(BLOCK) {
        let edge = q < first || q + BLOCK > end;
        if edge || whole < channels {
            inputs.clear();
            inputs.extend(line.taps.iter().map(|tap| {
                let mut pixels = [zeros.as_ptr(); BLOCK];
                for (b, pixel) in pixels.iter_mut().enumerate() {
                    let column = tap.column + ((q + b) * width.scale) as isize;
                    if (column as usize) < width.source {
                        *pixel = tap.source.wrapping_add((q + b) * line.steps[0]);
                    }
                }
                pixels
            }));
        }
        for channel in (0..whole).step_by(lanes) {
            prefetch_shares();
            let place = Place { q, channel, mask: all, inputs };
            // SAFETY: all lanes lie below `whole`, and a block that is not at an edge reads inside the row.
            unsafe {
                if edge {
                    kernel.block::<S, true, false>(simd, &line, place);
                } else {
                    kernel.block::<S, false, false>(simd, &line, place);
                }
            }
        }
        if whole < channels {
            // SAFETY: the mask has the channels that are left.
            unsafe {
                kernel.block::<S, true, true>(simd, &line, Place { q, channel: whole, mask: rest, inputs })
            };
        }
    }
}

/// What tap `t` reads for output `b` of a block; `source` is what it reads for output 0, `step` apart, if all is inside.
///
/// # Safety
/// As [`BlockKernel::block`]; the block has tap `t` and output `b`.
#[inline(always)]
pub(super) unsafe fn input<S: Simd, const EDGE: bool, const MASKED: bool>(
    simd: S,
    Place { channel, mask, inputs, .. }: Place<'_, S::m32s>,
    [t, b]: [usize; 2],
    source: *const f32,
    step: usize,
) -> S::f32s {
    // SAFETY: what is listed may be read; without a list all inputs are inside.
    unsafe {
        let from = match EDGE {
            true => inputs.get_unchecked(t)[b].add(channel),
            false => source.wrapping_add(b * step),
        };
        load::<S, MASKED>(simd, mask, from)
    }
}

/// A vector, or what the mask has of it.
///
/// # Safety
/// `from` must be readable for it.
#[inline(always)]
pub(super) unsafe fn load<S: Simd, const MASKED: bool>(
    simd: S,
    mask: MemMask<S::m32s>,
    from: *const f32,
) -> S::f32s {
    // SAFETY: as the caller promises.
    unsafe {
        if MASKED {
            // Without pulp's detour around masked instructions: it pays for stores, which some CPUs are slow at.
            simd.mask_load_ptr_f32s(MemMask::new(mask.mask()), from)
        } else {
            from.cast::<S::f32s>().read_unaligned()
        }
    }
}

/// Writes a vector, or what the mask has of it.
///
/// # Safety
/// `to` must be writable for it.
#[inline(always)]
pub(super) unsafe fn store<S: Simd, const MASKED: bool>(
    simd: S,
    mask: MemMask<S::m32s>,
    to: *mut f32,
    value: S::f32s,
) {
    // SAFETY: as the caller promises.
    unsafe {
        if MASKED {
            simd.mask_store_ptr_f32s(mask, to, value);
        } else {
            to.cast::<S::f32s>().write_unaligned(value);
        }
    }
}
