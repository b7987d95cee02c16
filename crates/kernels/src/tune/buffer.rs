//! Buffers of a trial.

use std::ops::{Deref, DerefMut};

use crate::Element;

/// Elements that start on a cache line, as those of tensors do: a vector that lies across two lines takes twice as long.
pub(super) struct Buffer<T> {
    memory: Vec<T>,
    start: usize,
    len: usize,
}

/// Bytes of a cache line.
const LINE: usize = 64;

impl<T: Element> Buffer<T> {
    /// Elements that are NaN, so that their memory has been met.
    pub(super) fn new(len: usize) -> Buffer<T> {
        let slack = LINE / size_of::<T>();
        let memory = vec![T::nan(); len + slack];
        let start = memory.as_ptr().align_offset(LINE).min(slack);
        Buffer { memory, start, len }
    }
}

impl<T> Deref for Buffer<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        &self.memory[self.start..][..self.len]
    }
}

impl<T> DerefMut for Buffer<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        &mut self.memory[self.start..][..self.len]
    }
}
