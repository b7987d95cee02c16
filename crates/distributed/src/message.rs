//! Numbers on their way from one rank to others.

use std::sync::Arc;

mod sealed {
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for f64 {}
    impl Sealed for u64 {}
    impl Sealed for u8 {}
}

/// A type of numbers that ranks exchange: `f32`, `f64`, `u64` or `u8`.
pub trait Number: sealed::Sealed + bytemuck::Pod + Send + Sync {
    /// Its name.
    const DTYPE: &'static str;

    /// The sum of numbers, in their order. Of f32 it is taken in f64 and rounded once; of integers it wraps around.
    fn sum(numbers: impl Iterator<Item = Self>) -> Self;
}

impl Number for f32 {
    const DTYPE: &'static str = "f32";

    fn sum(numbers: impl Iterator<Item = f32>) -> f32 {
        f64::sum(numbers.map(f64::from)) as f32
    }
}

impl Number for f64 {
    const DTYPE: &'static str = "f64";

    fn sum(numbers: impl Iterator<Item = f64>) -> f64 {
        // Not `Iterator::sum`, which starts at -0.0.
        numbers.reduce(|sum, number| sum + number).unwrap_or(0.0)
    }
}

impl Number for u64 {
    const DTYPE: &'static str = "u64";

    fn sum(numbers: impl Iterator<Item = u64>) -> u64 {
        numbers.fold(0, u64::wrapping_add)
    }
}

impl Number for u8 {
    const DTYPE: &'static str = "u8";

    fn sum(numbers: impl Iterator<Item = u8>) -> u8 {
        numbers.fold(0, u8::wrapping_add)
    }
}

/// A copy of some numbers, shared by those who read it.
#[derive(Clone)]
pub(crate) struct Message {
    /// Aligned for every [`Number`].
    words: Arc<[u64]>,
    bytes: usize,
}

impl Message {
    pub(crate) fn new<T: Number>(numbers: &[T]) -> Message {
        let bytes = size_of_val(numbers);
        let mut words: Arc<[u64]> = std::iter::repeat_n(0, bytes.div_ceil(size_of::<u64>())).collect();
        let unshared = Arc::get_mut(&mut words).expect("new");
        bytemuck::cast_slice_mut(unshared)[..numbers.len()].copy_from_slice(numbers);
        Message { words, bytes }
    }

    /// Without numbers.
    pub(crate) fn empty() -> Message {
        Message::new::<u8>(&[])
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// The numbers, which must be of the type they were made of.
    pub(crate) fn numbers<T: Number>(&self) -> &[T] {
        &bytemuck::cast_slice(&self.words)[..self.bytes / size_of::<T>()]
    }
}
