//! How many values a register block holds, and the choice of the code compiled for a block's size.

use pulp::{MemMask, Simd};

use crate::simd::registers;
use crate::{Isa, simd};

/// The instruction set to use for `channels` along the lanes. If they fit half an AVX-512 vector, they fit a whole AVX2
/// vector, and a CPU executes as many of those per cycle, or twice as many.
pub(super) fn fitting(isa: Isa, channels: usize) -> Isa {
    match isa {
        Isa::AVX512 if channels <= Isa::AVX2.lanes() => Isa::AVX2,
        isa => isa,
    }
}

/// How many groups with this many channels along the lanes are joined into one: as many as one vector holds.
///
/// The products between different groups multiply by zeros. They cost nothing, because these lanes would otherwise be empty.
/// If `wide`, groups fill an AVX-512 vector, with twice the products: for groups of 8 channels, which fill an AVX2 vector,
/// that rarely pays.
pub(super) fn joined(isa: Isa, groups: usize, channels: usize, wide: bool) -> usize {
    let lanes = if wide { isa.lanes() } else { isa.lanes().min(Isa::AVX2.lanes()) };
    (1..=lanes / channels).rev().find(|&joined| groups.is_multiple_of(joined)).unwrap_or(1)
}

/// The most vectors of a register block.
///
/// Of the blocks that fill the registers, those nearest to a square need the fewest loads per product. Also, a few rows do
/// not evict each other from the L1 cache if they lie a power of two apart.
pub(super) const fn most_vectors(registers: usize) -> usize {
    if registers >= 32 { 4 } else { 2 }
}

/// The most rows of a register block of `vectors` columns: some registers must be left for the operands.
pub(super) const fn most_rows(registers: usize, vectors: usize) -> usize {
    match (registers, vectors) {
        (32.., 3..) => 6,
        (32.., 1) => 16,
        (32.., _) => 14,
        (16.., 1) => 12,
        (16.., _) => 6,
        _ => 4,
    }
}

/// The mask of a panel's last vector; `None` if that is full.
///
/// This avoids pulp's functions for each number of lanes: calling one costs more than a masked instruction.
#[inline(always)]
pub(super) fn last_mask<S: Simd>(simd: S, channels: usize) -> Option<MemMask<S::m32s>> {
    let last = channels % S::F32_LANES;
    (last > 0).then(|| MemMask::new(simd.mask_between_m32s(0, last as u32).mask()))
}

/// Loads V vectors; `last` masks the last one if that is not full.
///
/// # Safety
/// From `from` on, the floats of V vectors must be readable, less those that `last` masks.
#[inline(always)]
pub(super) unsafe fn load<S: Simd, const V: usize>(
    simd: S,
    from: *const f32,
    last: Option<MemMask<S::m32s>>,
) -> [S::f32s; V] {
    simd::array(|v| {
        // SAFETY: the caller promises that the floats of V vectors are readable, but for those that `last` masks in the last one,
        // and a masked load reads none of those.
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
/// From `to` on, the floats of V vectors must be writable, less those that `last` masks, by this caller alone.
#[inline(always)]
pub(super) unsafe fn store<S: Simd, const V: usize>(
    simd: S,
    to: *mut f32,
    vectors: [S::f32s; V],
    last: Option<MemMask<S::m32s>>,
) {
    for v in 0..V {
        // SAFETY: the caller promises that the floats of V vectors are writable, but for those that `last` masks in the last one,
        // and a masked store writes none of those.
        unsafe {
            let to = to.add(v * S::F32_LANES);
            match last {
                Some(mask) if v == V - 1 => simd.mask_store_ptr_f32s(mask, to, vectors[v]),
                _ => to.cast::<S::f32s>().write_unaligned(vectors[v]),
            }
        }
    }
}

/// Calls `$function::<S, rows, vectors>` for a block of at most [`most_vectors`] vectors and [`most_rows`] rows. No other blocks
/// are compiled.
macro_rules! by_block {
    ($rows:expr, $vectors:expr, $function:ident::<$simd:ident>($($argument:expr),*)) => {
        match $vectors {
            1 => by_block!(@rows $rows, 1, $function, $simd, ($($argument),*), 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16),
            2 => by_block!(@rows $rows, 2, $function, $simd, ($($argument),*), 1 2 3 4 5 6 7 8 9 10 11 12 13 14),
            3 => by_block!(@rows $rows, 3, $function, $simd, ($($argument),*), 1 2 3 4 5 6),
            4 => by_block!(@rows $rows, 4, $function, $simd, ($($argument),*), 1 2 3 4 5 6),
            vectors => unreachable!("no block has {vectors} vectors"),
        }
    };
    (@rows $rows:expr, $vectors:literal, $function:ident, $simd:ident, $arguments:tt, $($count:literal)*) => {
        match $rows {
            $($count if const { $crate::conv::direct::registers::fits::<$simd>($count, $vectors) } => {
                by_block!(@call $function, $simd, $count, $vectors, $arguments)
            })*
            rows => unreachable!("no block has {rows} rows of {} vectors", $vectors),
        }
    };
    (@call $function:ident, $simd:ident, $rows:literal, $vectors:literal, ($($argument:expr),*)) => {
        $function::<$simd, $rows, $vectors>($($argument),*)
    };
}
pub(super) use by_block;

/// Whether a block fits the registers.
pub(super) const fn fits<S: Simd>(rows: usize, vectors: usize) -> bool {
    vectors <= most_vectors(registers::<S>()) && rows <= most_rows(registers::<S>(), vectors)
}
