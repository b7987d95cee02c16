//! Memory of a device: an arena, and the buffers in it, whose bytes are counted exactly.

mod aligned;
mod arena;
mod heap;

pub(crate) use aligned::{AlignedVec, LINE_BYTES};
pub(crate) use heap::Heap;
pub use heap::{BorrowedBytes, Buffer, Bytes, MemoryStats, TimelinePoint, at_least};
