//! The buffers of a device, whose memory serves again after it was freed, and whose bytes are counted exactly.

use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;

use bytemuck::Pod;

use super::arena::{Allocation, Arena};
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
    /// Bytes that tensors use in memory of others: see `Tensor::borrowed`. Not among `live_bytes`.
    pub borrowed_bytes: usize,
    /// Bytes of buffers that were handed out: see `Tensor::export`. Not among `live_bytes` any more.
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
struct Counters {
    live_bytes: usize,
    peak_bytes: usize,
    borrowed_bytes: usize,
    exported_bytes: usize,
    timeline: Option<(Instant, Vec<TimelinePoint>)>,
}

/// The buffers of one device.
pub(crate) struct Heap {
    arena: Arena,
    counters: Mutex<Counters>,
    /// Fill buffers with NaN before they are handed out, to expose code that reads before it writes.
    poison: bool,
}

impl Heap {
    pub(crate) fn new(poison: bool) -> Arc<Heap> {
        Arc::new(Heap { arena: Arena::default(), counters: Mutex::default(), poison })
    }

    fn counters(&self) -> MutexGuard<'_, Counters> {
        // A panic elsewhere cannot leave these counters half-changed: nothing in here panics between two writes.
        self.counters.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    pub(crate) fn stats(&self) -> MemoryStats {
        let Counters { live_bytes, peak_bytes, borrowed_bytes, exported_bytes, .. } = *self.counters();
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
        let mut counters = self.counters();
        counters.peak_bytes = counters.live_bytes;
    }

    pub(crate) fn trim(&self) {
        self.arena.trim();
    }

    pub(crate) fn start_timeline(&self) -> Instant {
        let mut counters = self.counters();
        let first = TimelinePoint { seconds: 0.0, live_bytes: counters.live_bytes };
        let start = Instant::now();
        counters.timeline = Some((start, vec![first]));
        start
    }

    pub(crate) fn take_timeline(&self) -> Vec<TimelinePoint> {
        self.counters().timeline.take().map_or_else(Vec::new, |(_, points)| points)
    }

    /// Counts `bytes` in memory of others until the result is dropped.
    pub(crate) fn count_borrowed(self: &Arc<Self>, bytes: usize) -> BorrowedBytes {
        self.counters().borrowed_bytes += bytes;
        BorrowedBytes { bytes, heap: self.clone() }
    }

    /// A buffer of `len` elements with arbitrary content.
    pub(crate) fn take<T: Pod>(self: &Arc<Self>, len: usize) -> Result<Buffer<T>> {
        let refused = Error::Buffer { elements: len, element_size: size_of::<T>() };
        // No allocation is larger than isize::MAX; rounding such a size up to whole lines does not overflow.
        let bytes = len.checked_mul(size_of::<T>()).filter(|&bytes| bytes <= isize::MAX as usize);
        let Some(bytes) = bytes else { return Err(refused) };
        let Some(allocation) = self.arena.take(bytes) else { return Err(refused) };
        self.counters().count(bytes);
        let mut taken = Bytes { allocation, len: bytes, exported: false, heap: self.clone() };
        if self.poison {
            taken.elements_mut::<u8>().fill(0xff);
        }
        Ok(Buffer { bytes: taken, element: PhantomData })
    }
}

impl Counters {
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

/// A number of bytes in memory of others that is counted as [`MemoryStats::borrowed_bytes`] until this is dropped.
pub struct BorrowedBytes {
    bytes: usize,
    heap: Arc<Heap>,
}

impl Drop for BorrowedBytes {
    fn drop(&mut self) {
        self.heap.counters().borrowed_bytes -= self.bytes;
    }
}

/// Bytes that return to their device when dropped.
pub struct Bytes {
    allocation: Allocation,
    len: usize,
    /// Whether it was handed out, and is counted apart.
    exported: bool,
    heap: Arc<Heap>,
}

impl Bytes {
    /// The bytes as elements of any type, without an incomplete element at the end.
    pub fn elements<T: Pod>(&self) -> &[T] {
        let size = size_of::<T>();
        bytemuck::cast_slice(&self.allocation.bytes()[..self.len / size * size])
    }

    /// As [`Bytes::elements`].
    pub fn elements_mut<T: Pod>(&mut self) -> &mut [T] {
        let size = size_of::<T>();
        bytemuck::cast_slice_mut(&mut self.allocation.bytes_mut()[..self.len / size * size])
    }
}

impl Bytes {
    /// The same bytes, counted as handed out.
    pub fn exported(mut self) -> Bytes {
        if !std::mem::replace(&mut self.exported, true) {
            let mut counters = self.heap.counters();
            counters.live_bytes -= self.len;
            counters.exported_bytes += self.len;
            counters.mark();
        }
        self
    }
}

impl Drop for Bytes {
    fn drop(&mut self) {
        let mut counters = self.heap.counters();
        match self.exported {
            true => counters.exported_bytes -= self.len,
            false => counters.live_bytes -= self.len,
        }
        counters.mark();
    }
}

/// A run of elements whose memory returns to its device when dropped.
pub struct Buffer<T: Pod> {
    bytes: Bytes,
    element: PhantomData<T>,
}

impl<T: Pod> Buffer<T> {
    /// The bytes of the elements, without their type.
    pub fn into_bytes(self) -> Bytes {
        self.bytes
    }
}

/// The first `len` elements of the buffer in `scratch`, which is replaced by a larger one if it is too short.
///
/// # Errors
/// If there is no memory.
pub fn at_least<'a, T: Pod>(
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
        let heap = Heap::new(false);
        let a = heap.take::<f32>(100).unwrap();
        let b = heap.take::<f64>(10).unwrap();
        assert_eq!(heap.stats().live_bytes, 480);
        drop(a);
        assert_eq!((heap.stats().live_bytes, heap.stats().peak_bytes), (80, 480));
        let again = heap.take::<u8>(400).unwrap();
        assert_eq!(heap.stats().fresh_allocations, 2, "the freed buffer serves again");
        drop((again, b));
        assert_eq!(heap.stats().live_bytes, 0);
        heap.reset_peak();
        assert_eq!(heap.stats().peak_bytes, 0);
        heap.trim();
        assert_eq!(heap.stats().cached_bytes, 0);
    }

    #[test]
    fn fresh_buffers_are_zeros_that_start_on_a_line() {
        let heap = Heap::new(false);
        let lens = [1, 16, 17, 1000, 1 << 16, (1 << 16) + 1, 1 << 22];
        let buffers = lens.map(|len| heap.take::<f32>(len).unwrap());
        for (buffer, len) in buffers.iter().zip(lens) {
            assert_eq!((buffer.len(), buffer.as_ptr().align_offset(64)), (len, 0));
            assert!(buffer.iter().all(|&x| x.to_bits() == 0));
        }
        let lines: usize = lens.iter().map(|len| (4 * len).div_ceil(64)).sum();
        assert_eq!(heap.arena.reached(), 64 * lines, "whole lines count, room to align them does not");
        drop(buffers);
        assert_eq!(heap.stats().cached_bytes, 64 * lines);
    }

    /// A training step resets the peak at its beginning, when all its buffers are in the cache.
    #[test]
    fn a_reset_peak_costs_no_cached_buffer() {
        let heap = Heap::new(false);
        drop([8, 4].map(|mib| heap.take::<u8>(mib << 20).unwrap()));
        heap.reset_peak();
        let other = heap.take::<u8>(3 << 20).unwrap();
        let both = [8, 4].map(|mib| heap.take::<u8>(mib << 20).unwrap());
        assert_eq!(heap.stats().fresh_allocations, 3, "the two served again");
        drop((other, both));
    }

    #[test]
    fn what_was_freed_serves_buffers_of_other_sizes() {
        let heap = Heap::new(false);
        drop(heap.take::<u8>(64 << 20).unwrap());
        let small: Vec<_> = (0..8).map(|_| heap.take::<u8>(4 << 20).unwrap()).collect();
        let stats = heap.stats();
        assert_eq!((stats.live_bytes, stats.cached_bytes), (32 << 20, 32 << 20));
        assert_eq!(stats.fresh_allocations, 1);
        drop(small);
        assert_eq!(heap.stats().cached_bytes, 64 << 20);
        let larger = heap.take::<u8>(65 << 20).unwrap();
        assert_eq!((heap.stats().fresh_allocations, heap.stats().cached_bytes), (2, 64 << 20));
        drop(larger);
    }

    #[test]
    fn memory_that_cannot_be_had_is_an_error_and_is_not_counted() {
        let heap = Heap::new(false);
        let before = heap.stats();
        for len in [usize::MAX, usize::MAX / 8, 1 << 47] {
            let error = heap.take::<f64>(len).unwrap_err().to_string();
            assert!(error.contains(&format!("{len} elements of 8 bytes")), "{error}");
        }
        assert_eq!(heap.stats(), before);
    }

    #[test]
    fn poison_fills_with_nan_and_empty_buffers_are_fine() {
        let heap = Heap::new(true);
        assert!(heap.take::<f32>(5).unwrap().iter().all(|x| x.is_nan()));
        assert!(heap.take::<f64>(5).unwrap().iter().all(|x| x.is_nan()));
        assert!(heap.take::<f32>(0).unwrap().is_empty());
    }
}
