//! The buffers of a device, whose memory serves again after it was freed, and whose bytes are counted exactly.

use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;

use bytemuck::Pod;

use super::arena::{Allocation, Arena};
use crate::{DType, Device, Error, Result, Slice, SliceMut};

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

    /// Bytes for `len` elements of `size` bytes each, with arbitrary content.
    pub(crate) fn take(self: &Arc<Self>, len: usize, size: usize) -> Result<Bytes> {
        let refused = Error::Buffer { elements: len, element_size: size };
        // No allocation is larger than isize::MAX; rounding such a size up to whole lines does not overflow.
        let bytes = len.checked_mul(size).filter(|&bytes| bytes <= isize::MAX as usize);
        let Some(bytes) = bytes else { return Err(refused) };
        let Some(allocation) = self.arena.take(bytes) else { return Err(refused) };
        self.counters().count(bytes);
        let mut taken = Bytes { allocation, len: bytes, exported: false, heap: self.clone() };
        if self.poison {
            taken.elements_mut::<u8>().fill(0xff);
        }
        Ok(taken)
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

/// A run of elements, of a type that is known at run time, whose memory returns to its device when dropped.
pub struct Buffer {
    bytes: Bytes,
    dtype: DType,
}

impl Buffer {
    pub(crate) fn new(bytes: Bytes, dtype: DType) -> Buffer {
        Buffer { bytes, dtype }
    }

    /// The type of the elements.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The number of elements.
    pub fn len(&self) -> usize {
        self.elements().len()
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.elements().is_empty()
    }

    /// The elements, to be read.
    pub fn elements(&self) -> Slice<'_> {
        Slice::whole(self.dtype, self.bytes.elements())
    }

    /// The elements, to be written.
    pub fn elements_mut(&mut self) -> SliceMut<'_> {
        SliceMut::whole(self.dtype, self.bytes.elements_mut())
    }

    /// The bytes of the elements, without their type.
    pub fn into_bytes(self) -> Bytes {
        self.bytes
    }
}

impl std::fmt::Debug for Buffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.elements().fmt(f)
    }
}

/// The first `len` elements of the buffer in `scratch`, which is replaced by a larger one if it is too short, or of another type.
///
/// # Errors
/// If there is no memory.
pub fn at_least<'a>(
    scratch: &'a mut Option<Buffer>,
    device: &Device,
    dtype: DType,
    len: usize,
) -> Result<SliceMut<'a>> {
    if scratch.as_ref().is_none_or(|buffer| buffer.dtype() != dtype || buffer.len() < len) {
        // Free the old buffer first.
        *scratch = None;
        *scratch = Some(device.buffer(dtype, len)?);
    }
    Ok(scratch.as_mut().expect("taken above").elements_mut().part(0..len))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_exact_and_buffers_come_back() {
        let heap = Heap::new(false);
        let a = heap.take(100, 4).unwrap();
        let b = heap.take(10, 8).unwrap();
        assert_eq!(heap.stats().live_bytes, 480);
        drop(a);
        assert_eq!((heap.stats().live_bytes, heap.stats().peak_bytes), (80, 480));
        let again = heap.take(400, 1).unwrap();
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
        let buffers = lens.map(|len| heap.take(len, 4).unwrap());
        for (buffer, len) in buffers.iter().zip(lens) {
            let buffer = buffer.elements::<f32>();
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
        drop([8, 4].map(|mib| heap.take(mib << 20, 1).unwrap()));
        heap.reset_peak();
        let other = heap.take(3 << 20, 1).unwrap();
        let both = [8, 4].map(|mib| heap.take(mib << 20, 1).unwrap());
        assert_eq!(heap.stats().fresh_allocations, 3, "the two served again");
        drop((other, both));
    }

    #[test]
    fn what_was_freed_serves_buffers_of_other_sizes() {
        let heap = Heap::new(false);
        drop(heap.take(64 << 20, 1).unwrap());
        let small: Vec<_> = (0..8).map(|_| heap.take(4 << 20, 1).unwrap()).collect();
        let stats = heap.stats();
        assert_eq!((stats.live_bytes, stats.cached_bytes), (32 << 20, 32 << 20));
        assert_eq!(stats.fresh_allocations, 1);
        drop(small);
        assert_eq!(heap.stats().cached_bytes, 64 << 20);
        let larger = heap.take(65 << 20, 1).unwrap();
        assert_eq!((heap.stats().fresh_allocations, heap.stats().cached_bytes), (2, 64 << 20));
        drop(larger);
    }

    #[test]
    fn memory_that_cannot_be_had_is_an_error_and_is_not_counted() {
        let heap = Heap::new(false);
        let before = heap.stats();
        for len in [usize::MAX, usize::MAX / 8, 1 << 47] {
            let error = heap.take(len, 8).err().unwrap().to_string();
            assert!(error.contains(&format!("{len} elements of 8 bytes")), "{error}");
        }
        assert_eq!(heap.stats(), before);
    }

    #[test]
    fn poison_fills_with_nan_and_empty_buffers_are_fine() {
        let heap = Heap::new(true);
        assert!(heap.take(5, 4).unwrap().elements::<f32>().iter().all(|x| x.is_nan()));
        assert!(heap.take(5, 8).unwrap().elements::<f64>().iter().all(|x| x.is_nan()));
        assert!(heap.take(0, 4).unwrap().elements::<u8>().is_empty());
    }
}
