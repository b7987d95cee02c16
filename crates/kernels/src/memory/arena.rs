//! An allocator of bytes in runs of any length. Neighbouring free runs are merged.
//!
//! A program that allocates and frees the same runs in the same order, as the steps of a training run do, gets the same
//! addresses each time. Only the first time needs fresh memory, which costs page faults.

use std::collections::BTreeMap;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::aligned::LINE_BYTES;

/// Allocations of at most this many bytes use separate chunks, so that they do not fragment the holes that larger ones leave.
const SMALL: usize = 256 << 10;
/// The smallest chunk in bytes, for small and for large allocations. This is address space, which takes no memory until it is
/// written.
const CHUNK: [usize; 2] = [4 << 20, 64 << 20];
/// Bytes of a large page, on the processors that have them. A step passes over hundreds of megabytes, and with pages of 4 KiB the
/// processor looks up addresses more than once for each kilobyte that it moves.
const LARGE_PAGE: usize = 2 << 20;

/// The allocator of [`Allocation`]s. Clones share its memory, which lives as long as any clone or allocation.
#[derive(Clone, Default)]
pub(super) struct Arena {
    chunks: Arc<Mutex<Chunks>>,
}

/// Bytes that start on a cache line: zeros in fresh memory, else whatever earlier allocations left there.
pub(super) struct Allocation {
    place: Place,
    address: NonNull<u8>,
    arena: Arc<Mutex<Chunks>>,
}

// SAFETY: no other allocation has its bytes, which any thread may use, and the arena that it returns them to is behind a lock.
unsafe impl Send for Allocation {}
// SAFETY: through a shared allocation, its bytes can only be read, which any number of threads may do at once.
unsafe impl Sync for Allocation {}

/// Where an allocation lies.
#[derive(Clone, Copy)]
struct Place {
    /// The index of the chunk; `usize::MAX` for one without bytes, which is in no chunk.
    chunk: usize,
    start: usize,
    len: usize,
}

#[derive(Default)]
struct Chunks {
    /// A freed chunk leaves `None` in its place, so that the other indices stay valid.
    all: Vec<Option<Chunk>>,
    /// How many allocations went beyond the bytes that a chunk had reached.
    fresh: usize,
}

/// A run of address space. The bytes beyond `reached` have never been allocated.
struct Chunk {
    memory: Memory,
    small: bool,
    /// The lengths of the holes below `reached`, by where they start. No two holes touch.
    free: BTreeMap<usize, usize>,
    reached: usize,
}

impl Arena {
    /// `len` bytes, in the smallest hole that is large enough, or in fresh memory; `None` if the operating
    /// system has no memory left.
    pub(super) fn take(&self, len: usize) -> Option<Allocation> {
        let place = |place, address| Allocation { place, address, arena: self.chunks.clone() };
        if len == 0 {
            return Some(place(
                Place { chunk: usize::MAX, start: 0, len: 0 },
                NonNull::<Line>::dangling().cast(),
            ));
        }
        let lines = len.checked_next_multiple_of(LINE_BYTES)?;
        let mut chunks = self.chunks();
        let (chunk, start) = chunks.hole(lines).or_else(|| chunks.fresh(lines))?;
        let memory = chunks.all[chunk].as_mut().expect("it has this hole");
        memory.occupy(start, lines);
        // SAFETY: `occupy` asserts that `start..start + lines` ends within the chunk's memory, which has `memory.len` bytes from
        // `base` on.
        let address = unsafe { memory.memory.base.add(start) };
        Some(place(Place { chunk, start, len: lines }, address))
    }

    /// Bytes that allocations use or have used, and that may therefore be resident.
    pub(super) fn reached(&self) -> usize {
        self.chunks().all.iter().flatten().map(|chunk| chunk.reached).sum()
    }

    /// How many allocations, so far, got memory that no earlier one had used.
    pub(super) fn fresh(&self) -> usize {
        self.chunks().fresh
    }

    /// Gives the memory of all chunks without allocations back to the operating system.
    pub(super) fn trim(&self) {
        for place in &mut self.chunks().all {
            if place.as_ref().is_some_and(Chunk::is_free) {
                *place = None;
            }
        }
    }

    fn chunks(&self) -> MutexGuard<'_, Chunks> {
        lock(&self.chunks)
    }
}

fn lock(chunks: &Mutex<Chunks>) -> MutexGuard<'_, Chunks> {
    // A poisoned lock is safe to use: nothing panics between two changes that belong together.
    chunks.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Chunks {
    fn of_size(&self, len: usize) -> impl Iterator<Item = (usize, &Chunk)> {
        let chunks = self.all.iter().enumerate().filter_map(|(index, chunk)| Some((index, chunk.as_ref()?)));
        chunks.filter(move |(_, chunk)| chunk.small == (len <= SMALL))
    }

    /// The chunk and the start of the smallest hole of at least `len` bytes, the first one if several have that size.
    fn hole(&self, len: usize) -> Option<(usize, usize)> {
        let holes = self
            .of_size(len)
            .flat_map(|(index, chunk)| chunk.free.iter().map(move |(&start, &hole)| (hole, index, start)));
        holes.filter(|&(hole, ..)| hole >= len).min().map(|(_, index, start)| (index, start))
    }

    /// The chunk and the start of a run of `len` bytes after the last allocation of a chunk, in a new chunk if no chunk has
    /// room. At least the end of the run is fresh memory.
    fn fresh(&mut self, len: usize) -> Option<(usize, usize)> {
        let place = self.behind(len).or_else(|| Some((self.new_chunk(len)?, 0)))?;
        self.fresh += 1;
        Some(place)
    }

    /// As [`Chunks::fresh`] in the chunks that exist: it picks the one whose `reached` grows least.
    fn behind(&self, len: usize) -> Option<(usize, usize)> {
        let behind = self.of_size(len).filter_map(|(index, chunk)| {
            let start = chunk.end_of_allocations();
            (chunk.memory.len - start >= len).then_some((start + len - chunk.reached, index, start))
        });
        behind.min().map(|(_, index, start)| (index, start))
    }

    /// The index of a new chunk with room for `len` bytes.
    fn new_chunk(&mut self, len: usize) -> Option<usize> {
        let small = len <= SMALL;
        let so_far: usize = self.of_size(len).map(|(_, chunk)| chunk.memory.len).sum();
        // Each new chunk is as large as all earlier chunks of its kind together: a few large chunks have few boundaries,
        // which no hole can cross. If there is not enough address space for that, the chunk gets just `len` bytes.
        let wanted = so_far.max(CHUNK[usize::from(!small)]).max(len);
        let aligned = if small { LINE_BYTES } else { LARGE_PAGE };
        let memory = Memory::zeros(wanted, aligned).or_else(|| Memory::zeros(len, LINE_BYTES))?;
        let chunk = Chunk { memory, small, free: BTreeMap::new(), reached: 0 };
        let vacant = self.all.iter().position(Option::is_none);
        let index = vacant.unwrap_or_else(|| {
            self.all.push(None);
            self.all.len() - 1
        });
        self.all[index] = Some(chunk);
        Some(index)
    }
}

impl Chunk {
    /// Where the last allocation ends. All bytes from there on are free: the last hole, if it ends at `reached`, then fresh memory.
    fn end_of_allocations(&self) -> usize {
        match self.free.last_key_value() {
            Some((&start, &len)) if start + len == self.reached => start,
            _ => self.reached,
        }
    }

    fn is_free(&self) -> bool {
        self.end_of_allocations() == 0
    }

    /// Marks `start..start + len` as used. It must begin where a hole begins, or at `reached`.
    fn occupy(&mut self, start: usize, len: usize) {
        let end = start + len;
        assert!(end <= self.memory.len, "an allocation beyond its chunk");
        let hole = self.free.remove(&start).map_or(start, |hole| start + hole);
        assert!(hole >= end || hole == self.reached, "an allocation in the way of another");
        if hole > end {
            self.free.insert(end, hole - end);
        }
        self.reached = self.reached.max(end);
    }

    /// Frees `start..start + len` and merges it with neighbouring holes.
    fn release(&mut self, mut start: usize, len: usize) {
        let mut end = start + len;
        if let Some(next) = self.free.remove(&end) {
            end += next;
        }
        if let Some((&before, &hole)) = self.free.range(..start).next_back()
            && before + hole == start
        {
            start = before;
        }
        self.free.insert(start, end - start);
    }
}

impl Allocation {
    /// The bytes of the allocation: the requested length, rounded up to whole cache lines.
    pub(super) fn bytes(&self) -> &[u8] {
        // SAFETY: the arena gave these bytes, which were initialised as zeros, to this allocation alone, and the chunk lives as
        // long as the allocation, which holds the arena, which frees only chunks without allocations.
        unsafe { std::slice::from_raw_parts(self.address.as_ptr(), self.place.len) }
    }

    /// As [`Allocation::bytes`].
    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: the arena gave these bytes, which were initialised as zeros, to this allocation alone, and the chunk lives as
        // long as the allocation, which holds the arena, which frees only chunks without allocations. The allocation is borrowed
        // mutably, so that nobody else can get its bytes meanwhile.
        unsafe { std::slice::from_raw_parts_mut(self.address.as_ptr(), self.place.len) }
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        let Place { chunk, start, len } = self.place;
        if len > 0
            && let Some(chunk) = &mut lock(&self.arena).all[chunk]
        {
            chunk.release(start, len);
        }
    }
}

/// A type with the alignment of a cache line.
#[repr(align(64))]
struct Line;

/// Zeros from the operating system, which take no memory until they are written.
struct Memory {
    /// Where the bytes begin, at the start of a cache line or of a large page.
    base: NonNull<u8>,
    len: usize,
    /// The whole allocation, with room to align `base`. Asked for zeros with a larger alignment, the allocator would write
    /// them all.
    room: NonNull<[u8]>,
}

// SAFETY: it is the only owner of its allocation, which any thread may use and free.
unsafe impl Send for Memory {}

impl Memory {
    /// `len` bytes, a multiple of a cache line, from a multiple of `aligned` on, which is a power of two; `None` if there is not enough
    /// memory.
    fn zeros(len: usize, aligned: usize) -> Option<Memory> {
        let bytes = len.checked_add(aligned - 1)?;
        let room =
            convoke_memory::attempt(|| bytemuck::allocation::try_zeroed_slice_box::<u8>(bytes)).ok()?;
        let room = NonNull::from(Box::leak(room));
        let first = room.cast::<u8>();
        // SAFETY: `room` has `aligned - 1` bytes more than `len`, and the next multiple of `aligned` is at most `aligned - 1` bytes from
        // its start. `align_offset` returns that distance: a byte pointer can always be aligned.
        let base = unsafe { first.add(first.as_ptr().align_offset(aligned)) };
        if aligned == LARGE_PAGE {
            ask_for_large_pages(base, len);
        }
        Some(Memory { base, len, room })
    }
}

/// Asks the system for large pages where the bytes fill them, which `base` begins. It may have none, or be told to use none.
fn ask_for_large_pages(base: NonNull<u8>, len: usize) {
    #[cfg(target_os = "linux")]
    // SAFETY: the pages lie within one allocation, and what backs them changes none of their bytes. What it returns does not matter.
    unsafe {
        libc::madvise(base.as_ptr().cast(), len / LARGE_PAGE * LARGE_PAGE, libc::MADV_HUGEPAGE);
    }
    #[cfg(not(target_os = "linux"))]
    let _ = (base, len);
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: `zeros` leaked this box, and a chunk is dropped only when no allocation has any of its bytes.
        drop(unsafe { Box::from_raw(self.room.as_ptr()) });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: usize = 1 << 20;

    #[test]
    fn blocks_are_lines_of_zeros_at_first() {
        let arena = Arena::default();
        let lens = [0, 1, 64, 65, 1000, SMALL, SMALL + 1, 3 * MIB];
        let blocks = lens.map(|len| arena.take(len).unwrap());
        for (block, len) in blocks.iter().zip(lens) {
            assert_eq!(
                (block.bytes().len(), block.bytes().as_ptr().align_offset(64)),
                (len.next_multiple_of(64), 0)
            );
            assert!(block.bytes().iter().all(|&byte| byte == 0));
        }
        assert_eq!(arena.reached(), lens.iter().map(|len| len.next_multiple_of(64)).sum::<usize>());
    }

    #[test]
    fn large_blocks_fill_large_pages() {
        let arena = Arena::default();
        let blocks = [SMALL + 1, 80 * MIB, 300 * MIB].map(|len| arena.take(len).unwrap());
        for chunk in lock(&arena.chunks).all.iter().flatten() {
            assert_eq!(chunk.memory.base.align_offset(LARGE_PAGE), 0);
        }
        drop(blocks);
    }

    #[test]
    fn free_neighbours_become_one() {
        let arena = Arena::default();
        let take = |mib: usize| arena.take(mib * MIB).unwrap();
        let [a, b, c, d] = [1, 2, 3, 4].map(take);
        // In any order.
        drop(c);
        drop(a);
        drop(b);
        let six = take(6);
        assert_eq!(arena.reached(), 10 * MIB, "the three serve as one");
        drop((six, d));
        let [first, second] = [5, 5].map(take);
        assert_eq!(arena.reached(), 10 * MIB);
        drop((first, second));
        // The last hole grows into fresh memory.
        let all = take(12);
        assert_eq!((arena.reached(), arena.fresh()), (12 * MIB, 5));
        drop(all);
        arena.trim();
        assert_eq!(arena.reached(), 0);
    }

    #[test]
    fn the_smallest_hole_serves() {
        let arena = Arena::default();
        let take = |mib: usize| arena.take(mib * MIB).unwrap();
        let blocks = [3, 1, 2, 1].map(take);
        let [three, between, two, end] = blocks;
        let place = two.bytes().as_ptr();
        drop((three, two));
        assert_eq!(take(2).bytes().as_ptr(), place);
        drop((between, end));
    }

    #[test]
    fn small_blocks_do_not_cut_the_holes_of_large_ones() {
        let arena = Arena::default();
        let large = arena.take(8 * MIB).unwrap();
        let place = large.bytes().as_ptr();
        drop(large);
        let small = arena.take(100).unwrap();
        assert_eq!(arena.take(8 * MIB).unwrap().bytes().as_ptr(), place);
        drop(small);
    }

    #[test]
    fn memory_that_nobody_has_is_refused() {
        let arena = Arena::default();
        for len in [usize::MAX, usize::MAX - 63, isize::MAX as usize, 1 << 47] {
            assert!(arena.take(len).is_none());
        }
        assert_eq!(arena.reached(), 0);
    }

    /// Allocations taken and given back in random order never overlap, keep what was written, and leave nothing behind.
    #[test]
    fn blocks_are_apart_and_keep_their_values() {
        let arena = Arena::default();
        let mut blocks: Vec<(u8, Allocation)> = Vec::new();
        let mut random = 1u64;
        let mut draw = |below: usize| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (random >> 33) as usize % below
        };
        for round in 0..3000 {
            if blocks.len() < 40 && draw(2) == 0 {
                let below = if draw(3) == 0 { 2 * SMALL } else { 4000 };
                let len = 1 + draw(below);
                let mut block = arena.take(len).unwrap();
                let mark = (round % 251) as u8;
                block.bytes_mut().fill(mark);
                blocks.push((mark, block));
            } else if !blocks.is_empty() {
                let (mark, block) = blocks.swap_remove(draw(blocks.len()));
                assert!(block.bytes().iter().all(|&byte| byte == mark), "round {round}");
            }
        }
        let reached = arena.reached();
        drop(blocks);
        assert!(lock(&arena.chunks).all.iter().flatten().all(Chunk::is_free));
        assert!(reached < 40 * 2 * SMALL, "{reached}");
    }

    #[test]
    fn the_same_order_gives_the_same_addresses() {
        let arena = Arena::default();
        let kept: Vec<Allocation> = (1..4).map(|mib| arena.take(mib * MIB).unwrap()).collect();
        let step = || {
            let mut held: Vec<Allocation> =
                (1..20).map(|index| arena.take(index * 70_000).unwrap()).collect();
            let scratch = arena.take(5 * MIB).unwrap();
            held.retain(|block| block.bytes().len() % 3 != 0);
            let late = arena.take(2 * MIB).unwrap();
            let address = |block: &Allocation| block.bytes().as_ptr() as usize;
            let mut places: Vec<usize> = held.iter().map(address).collect();
            places.extend([address(&scratch), address(&late)]);
            places
        };
        let first = step();
        let reached = arena.reached();
        // From the second step on no memory is fresh, so the best fits are the same.
        let second = step();
        assert_eq!((step(), arena.reached()), (second.clone(), reached));
        assert_eq!(first.len(), second.len());
        drop(kept);
    }
}
