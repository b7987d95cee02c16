//! Vectors that start on a cache line, as tensors do: loading a vector that crosses two lines takes twice as long.

use std::ops::{Deref, DerefMut};

use convoke_memory::OutOfMemory;

use crate::Stored;

/// A run of elements that starts on a cache line.
pub(crate) struct AlignedVec<T> {
    memory: Vec<T>,
    start: usize,
    len: usize,
}

/// Bytes of a cache line.
pub(crate) const LINE_BYTES: usize = 64;

impl<T: Stored> AlignedVec<T> {
    /// `len` elements of this value. Aborts if there is no memory, so use it only for sizes as small as a row of a tensor.
    pub(crate) fn filled(len: usize, value: T) -> AlignedVec<T> {
        let slack = LINE_BYTES / size_of::<T>();
        AlignedVec::of(vec![value; len + slack], len)
    }

    /// As [`AlignedVec::filled`], but returns an error if there is no memory: for sizes as large as a tensor.
    pub(crate) fn try_filled(len: usize, value: T) -> Result<AlignedVec<T>, OutOfMemory> {
        let slack = LINE_BYTES / size_of::<T>();
        Ok(AlignedVec::of(convoke_memory::filled(len.saturating_add(slack), value)?, len))
    }

    /// The first `len` elements of `memory` from a cache line on; `memory` is one cache line longer than that.
    fn of(memory: Vec<T>, len: usize) -> AlignedVec<T> {
        let start = memory.as_ptr().align_offset(LINE_BYTES).min(memory.len() - len);
        AlignedVec { memory, start, len }
    }

    /// `values`, `times` times in a row.
    pub(crate) fn repeat(values: &[T], times: usize) -> AlignedVec<T> {
        let mut all = AlignedVec::filled(values.len() * times, T::default());
        all.chunks_exact_mut(values.len().max(1)).for_each(|part| part.copy_from_slice(values));
        all
    }
}

impl<T> Deref for AlignedVec<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        &self.memory[self.start..][..self.len]
    }
}

impl<T> DerefMut for AlignedVec<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        &mut self.memory[self.start..][..self.len]
    }
}
