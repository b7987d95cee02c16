//! Numbers on their way from one rank to others.

use std::ops::Range;
use std::sync::Arc;

use convoke_memory::OutOfMemory;
use half::bf16;

use crate::buffers::Buffer;

mod sealed {
    use half::bf16;

    /// What sums need of a type of numbers.
    pub trait Sealed: Copy {
        /// The type that sums are computed in.
        type Wide: Copy + Default;

        fn widen(self) -> Self::Wide;

        fn add(sum: Self::Wide, number: Self::Wide) -> Self::Wide;

        fn narrow(sum: Self::Wide) -> Self;
    }

    macro_rules! sealed {
        ($number:ty, $wide:ty, $add:expr, $narrow:expr) => {
            impl Sealed for $number {
                type Wide = $wide;

                fn widen(self) -> $wide {
                    self.into()
                }

                fn add(sum: $wide, number: $wide) -> $wide {
                    $add(sum, number)
                }

                fn narrow(sum: $wide) -> $number {
                    $narrow(sum)
                }
            }
        };
    }

    sealed!(bf16, f32, std::ops::Add::add, bf16::from_f32);
    sealed!(f32, f64, std::ops::Add::add, |sum| sum as f32);
    sealed!(f64, f64, std::ops::Add::add, std::convert::identity);
    sealed!(u64, u64, u64::wrapping_add, std::convert::identity);
    sealed!(u8, u8, u8::wrapping_add, std::convert::identity);
}

/// A type of numbers that ranks exchange: `f32`, `f64`, `bf16`, `u64` or `u8`.
///
/// Sums of f32 are taken in f64, those of bf16 in f32, and each is rounded once; sums of integers wrap around.
pub trait Number: sealed::Sealed + bytemuck::Pod + Send + Sync {
    /// The name of the type.
    const DTYPE: &'static str;
}

impl Number for f32 {
    const DTYPE: &'static str = "f32";
}

impl Number for bf16 {
    const DTYPE: &'static str = "bf16";
}

impl Number for f64 {
    const DTYPE: &'static str = "f64";
}

impl Number for u64 {
    const DTYPE: &'static str = "u64";
}

impl Number for u8 {
    const DTYPE: &'static str = "u8";
}

/// Sums the numbers at each place over all messages, in their order. The messages have at least as many numbers as `sums`.
pub(crate) fn sum<T: Number>(messages: &[Message], sums: &mut [T]) {
    /// Sums are computed block by block, so that one message is read at a time and the wide sums stay in the cache.
    const BLOCK: usize = 512;
    let Some((first, others)) = messages.split_first() else { return };
    let mut wide = [T::Wide::default(); BLOCK];
    for (block, sums) in sums.chunks_mut(BLOCK).enumerate() {
        let range = block * BLOCK..block * BLOCK + sums.len();
        // The first number is not added to zero, which would turn -0.0 to 0.0.
        let numbers = wide.iter_mut().zip(&first.numbers::<T>()[range.clone()]);
        numbers.for_each(|(sum, number)| *sum = number.widen());
        for other in others {
            let numbers = wide.iter_mut().zip(&other.numbers::<T>()[range.clone()]);
            numbers.for_each(|(sum, number)| *sum = T::add(*sum, number.widen()));
        }
        sums.iter_mut().zip(&wide).for_each(|(sum, &wide)| *sum = T::narrow(wide));
    }
}

/// A copy of some numbers, or a part of one, shared by those who read it.
#[derive(Clone)]
pub(crate) struct Message {
    /// Aligned for every [`Number`].
    words: Arc<Buffer>,
    /// Where in the words the numbers start and end, in bytes.
    range: Range<usize>,
}

impl Message {
    pub(crate) fn new<T: Number>(numbers: &[T]) -> Result<Message, OutOfMemory> {
        Message::write(numbers.len(), |message| message.copy_from_slice(numbers))
    }

    /// As [`Message::new`], of a few kilobytes at most.
    #[cfg(feature = "mpi")]
    pub(crate) fn small(bytes: &[u8]) -> Message {
        let mut words = vec![0; bytes.len().div_ceil(size_of::<u64>())];
        bytemuck::cast_slice_mut(&mut words)[..bytes.len()].copy_from_slice(bytes);
        Message { words: Arc::new(words.into()), range: 0..bytes.len() }
    }

    /// `len` numbers, which `write` writes; it must overwrite all of them, as their contents are arbitrary.
    pub(crate) fn write<T: Number>(len: usize, write: impl FnOnce(&mut [T])) -> Result<Message, OutOfMemory> {
        let bytes = len.checked_mul(size_of::<T>()).ok_or(OutOfMemory::of::<T>(len))?;
        let mut words = Buffer::with_at_least(bytes.div_ceil(size_of::<u64>()))?;
        write(&mut bytemuck::cast_slice_mut(&mut words)[..len]);
        Ok(Message { words: Arc::new(words), range: 0..bytes })
    }

    /// The first `bytes` bytes of these words.
    #[cfg(feature = "mpi")]
    pub(crate) fn from_words(words: Buffer, bytes: usize) -> Message {
        assert!(bytes <= size_of_val(&words[..]), "no more than there is");
        Message { words: Arc::new(words), range: 0..bytes }
    }

    /// Without numbers.
    pub(crate) fn empty() -> Message {
        Message { words: Arc::new(Vec::new().into()), range: 0..0 }
    }

    /// The numbers in `range`, not copied; they must be of the type that they were made from.
    pub(crate) fn part<T: Number>(&self, range: Range<usize>) -> Message {
        let [start, end] = [range.start, range.end].map(|index| self.range.start + index * size_of::<T>());
        assert!(end <= self.range.end, "a part of what is there");
        Message { words: self.words.clone(), range: start..end }
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.words)[self.range.clone()]
    }

    /// The numbers, which must be of the type that they were made from.
    pub(crate) fn numbers<T: Number>(&self) -> &[T] {
        bytemuck::cast_slice(self.bytes())
    }
}

/// What a rank gives to all ranks, itself included.
pub(crate) enum Outgoing {
    /// One message for all ranks.
    Same(Message),
    /// A message for each rank, in the order of the ranks.
    Each(Vec<Message>),
}

impl Outgoing {
    /// What `rank` gets.
    pub(crate) fn to(&self, rank: usize) -> &Message {
        match self {
            Outgoing::Same(message) => message,
            Outgoing::Each(messages) => &messages[rank],
        }
    }

    /// The bytes that ranks other than `rank` get, each counted once.
    pub(crate) fn bytes_beside(&self, rank: usize, world_size: usize) -> usize {
        match self {
            Outgoing::Same(_) if world_size == 1 => 0,
            Outgoing::Same(message) => message.bytes().len(),
            Outgoing::Each(messages) => {
                let others = messages.iter().enumerate().filter(|&(other, _)| other != rank);
                others.map(|(_, message)| message.bytes().len()).sum()
            }
        }
    }
}
