//! Rows of pixels in channels-last, in blocks: what the gather and the weight gradient share.

use pulp::{MemMask, Simd};

use super::gather::{Gather, Phase};

/// Output pixels that share the loads of weights and inputs.
pub(super) const BLOCK: usize = 8;

/// What some taps that read neighbouring source elements of one row read.
pub(super) struct Run {
    /// Channel 0 of the pixel that output 0 reads through the first tap; may lie outside the row.
    pub(super) source: *const f32,
    /// The column of that pixel.
    pub(super) column: isize,
    /// Place of the first tap in taps x channels.
    pub(super) taps: usize,
}

/// The runs through which the outputs of one phase of row `row` read.
#[inline(always)]
pub(super) fn list_runs(
    runs: &mut Vec<Run>,
    [height, width]: &[Gather; 2],
    channels: usize,
    (row, phase): (usize, &Phase),
    image: &[f32],
) {
    runs.clear();
    let (rows, q) = height.phase(row);
    for tap in &rows.taps {
        let Some(index) = height.source_index(q, tap) else { continue };
        let line = image[index * width.source * channels..].as_ptr();
        let starts = phase.taps.iter().step_by(run_len(phase, width.scale));
        runs.extend(starts.map(|start| Run {
            source: line.wrapping_offset(start.offset * channels as isize),
            column: start.offset,
            taps: (tap.kernel * width.kernel + start.kernel) * channels,
        }));
    }
}

/// Taps of a run: all of a phase if there is a kernel for so many, else one.
fn run_len(phase: &Phase, scale: usize) -> usize {
    match (phase.taps.len(), scale) {
        (taps @ (2 | 3 | 5 | 7), 1) | (taps @ (3 | 5), 2) if phase.is_dense() => taps,
        _ => 1,
    }
}

/// Where a block lies: outputs from `q` on, one vector of channels from `channel` on.
#[derive(Clone, Copy)]
pub(super) struct Place<M> {
    pub(super) q: usize,
    pub(super) channel: usize,
    /// The channels that exist.
    pub(super) mask: MemMask<M>,
    /// Columns from one input of the block to the next.
    pub(super) step: usize,
}

/// What is done for each block of a row.
pub(super) trait BlockKernel {
    /// Runs have TAPS taps and outputs read SCALE inputs apart.
    ///
    /// # Safety
    /// The mask's channels exist. If not `CHECKED`, the mask has all lanes, and the BLOCK outputs exist and read inside
    /// the row through every tap.
    unsafe fn block<S: Simd, const TAPS: usize, const SCALE: usize, const CHECKED: bool>(
        &mut self,
        simd: S,
        place: Place<S::m32s>,
    );
}

/// Runs the kernel for all blocks of a row of a phase.
#[inline(always)]
pub(super) fn each_block<S: Simd>(
    simd: S,
    width: &Gather,
    phase: &Phase,
    channels: usize,
    kernel: impl BlockKernel,
) {
    match (run_len(phase, width.scale), width.scale) {
        (2, _) => blocks::<S, 2, 1>(simd, phase, channels, 1, kernel),
        (3, 1) => blocks::<S, 3, 1>(simd, phase, channels, 1, kernel),
        (3, _) => blocks::<S, 3, 2>(simd, phase, channels, 1, kernel),
        (5, 1) => blocks::<S, 5, 1>(simd, phase, channels, 1, kernel),
        (5, _) => blocks::<S, 5, 2>(simd, phase, channels, 1, kernel),
        (7, _) => blocks::<S, 7, 1>(simd, phase, channels, 1, kernel),
        _ => blocks::<S, 1, 1>(simd, phase, channels, width.scale, kernel),
    }
}

#[inline(always)]
fn blocks<S: Simd, const TAPS: usize, const SCALE: usize>(
    simd: S,
    phase: &Phase,
    channels: usize,
    step: usize,
    mut kernel: impl BlockKernel,
) {
    let lanes = S::F32_LANES;
    let whole = channels - channels % lanes;
    let mask = |lanes: usize| MemMask::new(simd.mask_between_m32s(0, lanes as u32).mask());
    let (all, rest) = (mask(lanes), mask(channels - whole));
    let [first, end] = phase.interior;
    for q in (0..phase.count).step_by(BLOCK) {
        let interior = first <= q && q + BLOCK <= end;
        for channel in (0..channels).step_by(lanes) {
            let mask = if channel < whole { all } else { rest };
            let place = Place { q, channel, mask, step };
            // SAFETY: the mask has the channels that are left: all lanes below `whole`.
            unsafe {
                if interior && channel < whole {
                    kernel.block::<S, TAPS, SCALE, false>(simd, place);
                } else {
                    kernel.block::<S, TAPS, SCALE, true>(simd, place);
                }
            }
        }
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
        if MASKED { simd.mask_load_ptr_f32s(mask, from) } else { from.cast::<S::f32s>().read_unaligned() }
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
