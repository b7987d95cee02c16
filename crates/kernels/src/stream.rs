//! Hints for memory that no cache holds: stores that pass the caches by, and lines fetched before they are needed.
//!
//! An ordinary store reads the cache line that it changes. Where an output is too large to stay in a cache, that is a third
//! of the traffic for nothing: a streaming store of a whole line does not read it.

use pulp::{Simd, WithSimd};

use crate::{Cpu, simd};

/// Floats of a cache line.
pub(crate) const LINE: usize = 16;

/// Bytes of outputs that are streamed: more than last-level caches hold of it when the next operation reads it.
const LARGE: usize = 32 << 20;

/// Whether `output` should be written by [`store`], in runs of `run` floats from its start: it must be large, and runs
/// whole cache lines.
pub(crate) fn pays(output: &[f32], run: usize) -> bool {
    let line = LINE * size_of::<f32>();
    size_of_val(output) >= LARGE && run.is_multiple_of(LINE) && output.as_ptr().addr().is_multiple_of(line)
}

/// Writes a vector past the caches, where the machine can. [`fence`] must follow the last one on each thread.
///
/// # Safety
/// `to` is valid for a vector and aligned to its size.
#[inline(always)]
pub(crate) unsafe fn store<S: Simd>(_: S, to: *mut f32, value: S::f32s) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_mm256_stream_ps, _mm512_stream_ps};
        // SAFETY: vectors of these sizes are the ones of AVX-512 and AVX, and `to` is aligned.
        unsafe {
            match size_of::<S::f32s>() {
                64 => return _mm512_stream_ps(to, std::mem::transmute_copy(&value)),
                32 => return _mm256_stream_ps(to, std::mem::transmute_copy(&value)),
                _ => {}
            }
        }
    }
    // SAFETY: as the caller says.
    unsafe { to.cast::<S::f32s>().write_unaligned(value) }
}

/// Copies a cache line past the caches. [`fence`] must follow the last one on each thread.
#[inline(always)]
pub(crate) fn copy_line<S: Simd>(simd: S, from: &[f32], to: &mut [f32]) {
    let line = to.as_mut_ptr();
    assert!(from.len() == LINE && to.len() == LINE && line.addr().is_multiple_of(LINE * size_of::<f32>()));
    for (v, &vector) in S::as_simd_f32s(from).0.iter().enumerate() {
        // SAFETY: `to` is a line, and starts as one.
        unsafe { store(simd, line.add(v * S::F32_LANES), vector) };
    }
}

/// Whether `output` should be written by [`copy`]: it must be large.
pub(crate) fn pays_to_copy<T>(output: &[T]) -> bool {
    size_of_val(output) >= LARGE
}

/// Copies past the caches what makes whole cache lines of `to`. [`fence`] must follow the last one on each thread.
pub(crate) fn copy<T: bytemuck::Pod>(cpu: &Cpu, from: &[T], to: &mut [T]) {
    struct Lines<'a>(&'a [f32], &'a mut [f32]);
    impl WithSimd for Lines<'_> {
        type Output = ();

        #[inline(always)]
        fn with_simd<S: Simd>(self, simd: S) {
            for (from, to) in self.0.chunks_exact(LINE).zip(self.1.chunks_exact_mut(LINE)) {
                copy_line(simd, from, to);
            }
        }
    }
    let (from, to): (&[f32], &mut [f32]) = (bytemuck::cast_slice(from), bytemuck::cast_slice_mut(to));
    let head = to.as_ptr().align_offset(LINE * size_of::<f32>()).min(to.len());
    let (first, to) = to.split_at_mut(head);
    let (first_from, from) = from.split_at(head);
    first.copy_from_slice(first_from);
    let whole = to.len() / LINE * LINE;
    to[whole..].copy_from_slice(&from[whole..]);
    simd::run(cpu.isa(), Lines(&from[..whole], &mut to[..whole]));
}

/// Makes what this thread has streamed visible to others, as its ordinary stores are.
pub(crate) fn fence() {
    // SAFETY: every CPU of x86-64 has it.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
}

/// Starts to fetch `len` floats into the L1 cache; the addresses may be any.
#[inline(always)]
pub(crate) fn prefetch(from: *const f32, len: usize) {
    fetch::<true>(from, len);
}

/// Starts to fetch `len` floats into the L2 cache; the addresses may be any.
#[inline(always)]
pub(crate) fn prefetch_to_l2(from: *const f32, len: usize) {
    fetch::<false>(from, len);
}

/// Into the L1 cache, or else into L2 only.
#[inline(always)]
fn fetch<const L1: bool>(from: *const f32, len: usize) {
    for line in (0..len).step_by(LINE) {
        let line = from.wrapping_add(line);
        #[cfg(target_arch = "x86_64")]
        {
            use std::arch::x86_64::{_MM_HINT_T0, _MM_HINT_T1, _mm_prefetch};
            // SAFETY: a hint, which no address makes fault.
            unsafe {
                match L1 {
                    true => _mm_prefetch::<_MM_HINT_T0>(line.cast()),
                    false => _mm_prefetch::<_MM_HINT_T1>(line.cast()),
                }
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = line;
    }
}
