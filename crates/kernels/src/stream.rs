//! Access to memory that no cache holds: stores that bypass the caches, and prefetches.
//!
//! An ordinary store first reads the cache line that it changes. A streaming store of a whole line does not. For an output
//! that is too large to stay in a cache, that saves a third of the memory traffic.

use std::cell::Cell;
use std::marker::PhantomData;

use pulp::{Simd, WithSimd};

use crate::memory::LINE_BYTES;
use crate::{Cpu, simd};

/// Floats in a cache line.
pub(crate) const LINE: usize = LINE_BYTES / size_of::<f32>();

/// Outputs of at least this many bytes are streamed: the last-level cache would not hold them until the next operation
/// reads them.
const LARGE: usize = 32 << 20;

/// Whether `output` should be written by [`store`], in runs of `run` floats from its start: it must be large and start on a
/// cache line, and runs must be whole cache lines.
pub(crate) fn pays(output: &[f32], run: usize) -> bool {
    let starts_a_line = output.as_ptr().addr().is_multiple_of(LINE_BYTES);
    size_of_val(output) >= LARGE && run.is_multiple_of(LINE) && starts_a_line
}

/// A guard that a thread holds while it streams. Dropping it, even in a panic, makes all that the thread has streamed
/// visible to other threads, as its ordinary stores are.
pub(crate) struct Streaming(PhantomData<*mut ()>);

impl Streaming {
    pub(crate) fn begin() -> Streaming {
        Streaming(PhantomData)
    }
}

impl Drop for Streaming {
    fn drop(&mut self) {
        // SAFETY: it is an instruction of SSE, which every CPU of x86-64 has.
        #[cfg(target_arch = "x86_64")]
        unsafe {
            std::arch::x86_64::_mm_sfence();
        }
        FENCES.set(FENCES.get() + 1);
    }
}

thread_local! {
    static FENCES: Cell<usize> = const { Cell::new(0) };
}

/// How often this thread has ended streaming. For tests.
#[doc(hidden)]
pub fn fences() -> usize {
    FENCES.get()
}

/// Writes a vector and bypasses the caches, where the machine can.
///
/// # Safety
/// `to` is valid for a vector and aligned to its size. `S` is one of those that [`simd::run`] uses: where its vectors have the
/// size of AVX's or AVX-512's, the CPU has that.
#[inline(always)]
pub(crate) unsafe fn store<S: Simd>(_: S, _: &Streaming, to: *mut f32, value: S::f32s) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_mm256_stream_ps, _mm512_stream_ps};
        // SAFETY: the caller promises that the CPU has these instructions where vectors have these sizes, that `to` may be
        // written for as many bytes, and that it is aligned to them. Both sides of the transmutation are floats of that size.
        unsafe {
            match size_of::<S::f32s>() {
                64 => return _mm512_stream_ps(to, std::mem::transmute_copy(&value)),
                32 => return _mm256_stream_ps(to, std::mem::transmute_copy(&value)),
                _ => {}
            }
        }
    }
    // SAFETY: the caller promises that `to` may be written for a vector.
    unsafe { to.cast::<S::f32s>().write_unaligned(value) }
}

/// Copies a cache line and bypasses the caches.
///
/// # Safety
/// `S` is one of those that [`simd::run`] uses.
#[inline(always)]
pub(crate) unsafe fn copy_line<S: Simd>(simd: S, streaming: &Streaming, from: &[f32], to: &mut [f32]) {
    let line = to.as_mut_ptr();
    assert!(from.len() == LINE && to.len() == LINE && line.addr().is_multiple_of(LINE_BYTES));
    for (v, &vector) in S::as_simd_f32s(from).0.iter().enumerate() {
        // SAFETY: the assertion has checked that both slices are one line long and that `to` starts where a cache line does.
        // Vector v of a line lies within it, and vectors divide lines, so that each is aligned. `S` is as the caller promises.
        unsafe { store(simd, streaming, line.add(v * S::F32_LANES), vector) };
    }
}

/// Whether `output` should be written by [`copy`]: it must be large.
pub(crate) fn pays_to_copy<T>(output: &[T]) -> bool {
    size_of_val(output) >= LARGE
}

/// Copies `from` to `to`; the whole cache lines of `to` are written by streaming stores.
pub(crate) fn copy<T: bytemuck::Pod>(cpu: &Cpu, streaming: &Streaming, from: &[T], to: &mut [T]) {
    struct Lines<'a>(&'a Streaming, &'a [f32], &'a mut [f32]);
    impl WithSimd for Lines<'_> {
        type Output = ();

        #[inline(always)]
        fn with_simd<S: Simd>(self, simd: S) {
            for (from, to) in self.1.chunks_exact(LINE).zip(self.2.chunks_exact_mut(LINE)) {
                // SAFETY: it is `simd::run` that calls this.
                unsafe { copy_line(simd, self.0, from, to) };
            }
        }
    }
    let (from, to): (&[f32], &mut [f32]) = (bytemuck::cast_slice(from), bytemuck::cast_slice_mut(to));
    let head = to.as_ptr().align_offset(LINE_BYTES).min(to.len());
    let (first, to) = to.split_at_mut(head);
    let (first_from, from) = from.split_at(head);
    first.copy_from_slice(first_from);
    let whole = to.len() / LINE * LINE;
    to[whole..].copy_from_slice(&from[whole..]);
    simd::run(cpu.isa(), Lines(streaming, &from[..whole], &mut to[..whole]));
}

/// Starts to fetch `len` floats into the L1 cache; the addresses need not be valid.
#[inline(always)]
pub(crate) fn prefetch(from: *const f32, len: usize) {
    fetch::<true>(from, len);
}

/// Starts to fetch `len` floats into the L2 cache; the addresses need not be valid.
#[inline(always)]
pub(crate) fn prefetch_to_l2(from: *const f32, len: usize) {
    fetch::<false>(from, len);
}

/// Fetches into the L1 cache, or into L2 only.
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

/// Memory that is fetched into the L2 cache little by little, in the midst of arithmetic that needs it later.
pub(crate) struct Ahead<const N: usize> {
    /// Where each part starts, and its floats.
    parts: [(*const f32, usize); N],
    /// Floats of each part that a step fetches, whole cache lines.
    shares: [usize; N],
    step: usize,
}

impl<const N: usize> Ahead<N> {
    /// Each of `steps` calls of [`Ahead::step`] fetches an equal share of each part. A part is an address, which need not be valid,
    /// and a number of elements.
    pub(crate) fn of<T>(parts: [(*const T, usize); N], steps: usize) -> Ahead<N> {
        let parts = parts.map(|(start, len)| (start.cast(), len * size_of::<T>() / size_of::<f32>()));
        let shares = parts.map(|(_, len)| len.div_ceil(steps.max(1)).next_multiple_of(LINE));
        Ahead { parts, shares, step: 0 }
    }

    /// Fetches nothing.
    pub(crate) fn nothing() -> Ahead<N> {
        Ahead::of([(std::ptr::null::<f32>(), 0); N], 1)
    }

    /// Starts to fetch the next share of each part.
    #[inline(always)]
    pub(crate) fn step(&mut self) {
        for ((from, len), share) in self.parts.into_iter().zip(self.shares) {
            let at = self.step * share;
            prefetch_to_l2(from.wrapping_add(at), share.min(len.saturating_sub(at)));
        }
        self.step += 1;
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn a_task_that_panics_ends_its_streaming() {
        for threads in [1, 2] {
            let cpu = Cpu::new(threads).unwrap();
            let (begun, ended) = (AtomicUsize::new(0), AtomicUsize::new(0));
            let mut to = vec![0.0f32; 4 * LINE * 100];
            let result = catch_unwind(AssertUnwindSafe(|| {
                cpu.for_each(usize::MAX, to.chunks_mut(LINE * 100), |to| {
                    let before = fences();
                    begun.fetch_add(1, Ordering::Relaxed);
                    let result = catch_unwind(AssertUnwindSafe(|| {
                        let streaming = Streaming::begin();
                        copy(&cpu, &streaming, &[1.0; LINE * 100], to);
                        panic!("out of a task");
                    }));
                    ended.fetch_add(fences() - before, Ordering::Relaxed);
                    std::panic::resume_unwind(result.unwrap_err());
                });
            }));
            assert_eq!(result.unwrap_err().downcast_ref::<&str>(), Some(&"out of a task"));
            assert!(begun.load(Ordering::Relaxed) >= 1);
            assert_eq!(begun.into_inner(), ended.into_inner());
        }
    }
}
