//! A pool of reusable buffers, which counts their bytes exactly.

use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;

use bytemuck::Pod;
use convoke_kernels::arena::{Arena, Block};

use crate::{Device, Error, Result};

/// Bytes held by a device's buffers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct MemoryStats {
    /// Bytes of buffers in use: tensors, saved values, workspaces. Exact: elements times their size.
    pub live_bytes: usize,
    /// The largest `live_bytes` since the device was made or since [`crate::Device::reset_peak`].
    pub peak_bytes: usize,
    /// Bytes of freed buffers that are kept for reuse.
    pub cached_bytes: usize,
    /// How many buffers were allocated, at least in part, in memory that no earlier buffer had used.
    pub fresh_allocations: usize,
    /// Bytes that tensors use in memory of others: see [`crate::Tensor::borrowed`]. Not among `live_bytes`.
    pub borrowed_bytes: usize,
    /// Bytes of buffers that were handed out: see [`crate::Tensor::export`]. Not among `live_bytes` any more.
    pub exported_bytes: usize,
}

/// Bytes in use at one moment of a recorded timeline.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TimelinePoint {
    /// Seconds since recording began.
    pub seconds: f64,
    /// Bytes in use from then on.
    pub live_bytes: usize,
}

#[derive(Default)]
struct State {
    live_bytes: usize,
    peak_bytes: usize,
    borrowed_bytes: usize,
    exported_bytes: usize,
    timeline: Option<(Instant, Vec<TimelinePoint>)>,
}

/// The buffers of one device.
pub(crate) struct Pool {
    arena: Arena,
    state: Mutex<State>,
    /// Fill buffers with NaN before they are handed out, to expose code that reads before it writes.
    poison: bool,
}

impl Pool {
    pub(crate) fn new(poison: bool) -> Arc<Pool> {
        Arc::new(Pool { arena: Arena::default(), state: Mutex::default(), poison })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // A panic elsewhere cannot leave these counters half-changed: nothing in here panics between two writes.
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    pub(crate) fn stats(&self) -> MemoryStats {
        let State { live_bytes, peak_bytes, borrowed_bytes, exported_bytes, .. } = *self.state();
        MemoryStats {
            live_bytes,
            peak_bytes,
            cached_bytes: self.arena.reached().saturating_sub(live_bytes + exported_bytes),
            fresh_allocations: self.arena.fresh(),
            borrowed_bytes,
            exported_bytes,
        }
    }

    pub(crate) fn reset_peak(&self) {
        let mut state = self.state();
        state.peak_bytes = state.live_bytes;
    }

    pub(crate) fn trim(&self) {
        self.arena.trim();
    }

    pub(crate) fn start_timeline(&self) -> Instant {
        let mut state = self.state();
        let first = TimelinePoint { seconds: 0.0, live_bytes: state.live_bytes };
        let start = Instant::now();
        state.timeline = Some((start, vec![first]));
        start
    }

    pub(crate) fn take_timeline(&self) -> Vec<TimelinePoint> {
        self.state().timeline.take().map_or_else(Vec::new, |(_, points)| points)
    }

    /// Counts bytes of others.
    pub(crate) fn borrow_begins(&self, bytes: usize) {
        self.state().borrowed_bytes += bytes;
    }

    /// Counts them no longer.
    pub(crate) fn borrow_ends(&self, bytes: usize) {
        self.state().borrowed_bytes -= bytes;
    }

    /// A buffer of `len` elements with arbitrary content.
    pub(crate) fn take<T: Pod>(self: &Arc<Self>, len: usize) -> Result<Buffer<T>> {
        let refused = Error::Memory { elements: len, element_size: size_of::<T>() };
        // No allocation is larger than isize::MAX; rounding such a size up to whole lines does not overflow.
        let bytes = len.checked_mul(size_of::<T>()).filter(|&bytes| bytes <= isize::MAX as usize);
        let Some(bytes) = bytes else { return Err(refused) };
        let Some(block) = self.arena.take(bytes) else { return Err(refused) };
        self.state().count(bytes);
        let mut taken = Bytes { block, len: bytes, exported: false, pool: self.clone() };
        if self.poison {
            taken.elements_mut::<u8>().fill(0xff);
        }
        Ok(Buffer { bytes: taken, element: PhantomData })
    }
}

impl State {
    /// Counts a buffer that is handed out.
    fn count(&mut self, bytes: usize) {
        self.live_bytes += bytes;
        self.peak_bytes = self.peak_bytes.max(self.live_bytes);
        self.mark();
    }

    fn mark(&mut self) {
        let live_bytes = self.live_bytes;
        if let Some((start, points)) = &mut self.timeline {
            points.push(TimelinePoint { seconds: start.elapsed().as_secs_f64(), live_bytes });
        }
    }
}

/// Bytes that return to their device's pool when dropped.
pub(crate) struct Bytes {
    block: Block,
    len: usize,
    /// Whether it was handed out, and is counted apart.
    exported: bool,
    pool: Arc<Pool>,
}

impl Bytes {
    /// The bytes as elements of any type, without an incomplete element at the end.
    pub(crate) fn elements<T: Pod>(&self) -> &[T] {
        let size = size_of::<T>();
        bytemuck::cast_slice(&self.block.bytes()[..self.len / size * size])
    }

    /// As [`Bytes::elements`].
    pub(crate) fn elements_mut<T: Pod>(&mut self) -> &mut [T] {
        let size = size_of::<T>();
        bytemuck::cast_slice_mut(&mut self.block.bytes_mut()[..self.len / size * size])
    }
}

impl Bytes {
    /// The same bytes, counted as handed out.
    pub(crate) fn exported(mut self) -> Bytes {
        if !std::mem::replace(&mut self.exported, true) {
            let mut state = self.pool.state();
            state.live_bytes -= self.len;
            state.exported_bytes += self.len;
            state.mark();
        }
        self
    }
}

impl Drop for Bytes {
    fn drop(&mut self) {
        let mut state = self.pool.state();
        match self.exported {
            true => state.exported_bytes -= self.len,
            false => state.live_bytes -= self.len,
        }
        state.mark();
    }
}

/// A run of elements whose memory returns to its device's pool when dropped.
pub struct Buffer<T: Pod> {
    bytes: Bytes,
    element: PhantomData<T>,
}

impl<T: Pod> Buffer<T> {
    /// The bytes of the elements, without their type.
    pub(crate) fn into_bytes(self) -> Bytes {
        self.bytes
    }
}

/// The first `len` elements of the buffer in `scratch`, which is replaced by a larger one if it is too short.
pub(crate) fn at_least<'a, T: Pod>(
    scratch: &'a mut Option<Buffer<T>>,
    device: &Device,
    len: usize,
) -> Result<&'a mut [T]> {
    if scratch.as_ref().is_none_or(|buffer| buffer.len() < len) {
        // Free the old buffer first.
        *scratch = None;
        *scratch = Some(device.buffer(len)?);
    }
    Ok(&mut scratch.as_mut().expect("taken above")[..len])
}

impl<T: Pod> Deref for Buffer<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        self.bytes.elements()
    }
}

impl<T: Pod> DerefMut for Buffer<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        self.bytes.elements_mut()
    }
}

impl<T: Pod> std::fmt::Debug for Buffer<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Buffer of {} x {}", self.len(), std::any::type_name::<T>())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_exact_and_buffers_come_back() {
        let pool = Pool::new(false);
        let a = pool.take::<f32>(100).unwrap();
        let b = pool.take::<f64>(10).unwrap();
        assert_eq!(pool.stats().live_bytes, 480);
        drop(a);
        assert_eq!((pool.stats().live_bytes, pool.stats().peak_bytes), (80, 480));
        let again = pool.take::<u8>(400).unwrap();
        assert_eq!(pool.stats().fresh_allocations, 2, "the freed buffer serves again");
        drop((again, b));
        assert_eq!(pool.stats().live_bytes, 0);
        pool.reset_peak();
        assert_eq!(pool.stats().peak_bytes, 0);
        pool.trim();
        assert_eq!(pool.stats().cached_bytes, 0);
    }

    #[test]
    fn fresh_buffers_are_zeros_that_start_on_a_line() {
        let pool = Pool::new(false);
        let lens = [1, 16, 17, 1000, 1 << 16, (1 << 16) + 1, 1 << 22];
        let buffers = lens.map(|len| pool.take::<f32>(len).unwrap());
        for (buffer, len) in buffers.iter().zip(lens) {
            assert_eq!((buffer.len(), buffer.as_ptr().align_offset(64)), (len, 0));
            assert!(buffer.iter().all(|&x| x.to_bits() == 0));
        }
        let lines: usize = lens.iter().map(|len| (4 * len).div_ceil(64)).sum();
        assert_eq!(pool.arena.reached(), 64 * lines, "whole lines count, room to align them does not");
        drop(buffers);
        assert_eq!(pool.stats().cached_bytes, 64 * lines);
    }

    /// A training step resets the peak at its beginning, when all its buffers are in the cache.
    #[test]
    fn a_reset_peak_costs_no_cached_buffer() {
        let pool = Pool::new(false);
        drop([8, 4].map(|mib| pool.take::<u8>(mib << 20).unwrap()));
        pool.reset_peak();
        let other = pool.take::<u8>(3 << 20).unwrap();
        let both = [8, 4].map(|mib| pool.take::<u8>(mib << 20).unwrap());
        assert_eq!(pool.stats().fresh_allocations, 3, "the two served again");
        drop((other, both));
    }

    #[test]
    fn what_was_freed_serves_buffers_of_other_sizes() {
        let pool = Pool::new(false);
        drop(pool.take::<u8>(64 << 20).unwrap());
        let small: Vec<_> = (0..8).map(|_| pool.take::<u8>(4 << 20).unwrap()).collect();
        let stats = pool.stats();
        assert_eq!((stats.live_bytes, stats.cached_bytes), (32 << 20, 32 << 20));
        assert_eq!(stats.fresh_allocations, 1);
        drop(small);
        assert_eq!(pool.stats().cached_bytes, 64 << 20);
        let larger = pool.take::<u8>(65 << 20).unwrap();
        assert_eq!((pool.stats().fresh_allocations, pool.stats().cached_bytes), (2, 64 << 20));
        drop(larger);
    }

    #[test]
    fn memory_that_cannot_be_had_is_an_error_and_is_not_counted() {
        let pool = Pool::new(false);
        let before = pool.stats();
        for len in [usize::MAX, usize::MAX / 8, 1 << 47] {
            let error = pool.take::<f64>(len).unwrap_err().to_string();
            assert!(error.contains(&format!("{len} elements of 8 bytes")), "{error}");
        }
        assert_eq!(pool.stats(), before);
    }

    #[test]
    fn poison_fills_with_nan_and_empty_buffers_are_fine() {
        let pool = Pool::new(true);
        assert!(pool.take::<f32>(5).unwrap().iter().all(|x| x.is_nan()));
        assert!(pool.take::<f64>(5).unwrap().iter().all(|x| x.is_nan()));
        assert!(pool.take::<f32>(0).unwrap().is_empty());
    }
}
