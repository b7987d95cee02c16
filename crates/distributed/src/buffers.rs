//! Memory of messages, kept from one call to the next: touching fresh memory takes longer than summing what is in it.

use std::ops::{Deref, DerefMut};
use std::sync::{Mutex, PoisonError};

use convoke_memory::{OutOfMemory, attempt};

/// Smaller buffers are left to the allocator, which keeps them itself.
const SMALLEST: usize = 1 << 13;
/// How many words are kept, in this process: 128 MiB. The oldest go first.
const MOST: usize = 1 << 24;

static SPARE: Mutex<Vec<Vec<u64>>> = Mutex::new(Vec::new());

/// Words that are kept for reuse when they are dropped.
pub(crate) struct Buffer(Vec<u64>);

impl Buffer {
    /// At least `len` words, with arbitrary contents.
    pub(crate) fn with_at_least(len: usize) -> Result<Buffer, OutOfMemory> {
        let mut spare = SPARE.lock().unwrap_or_else(PoisonError::into_inner);
        let fits =
            |words: &&Vec<u64>| len >= SMALLEST && (len..=len.saturating_mul(2)).contains(&words.len());
        let best = spare.iter().filter(fits).map(Vec::len).min();
        let found = best.and_then(|best| spare.iter().position(|words| words.len() == best));
        let found = found.map(|index| spare.remove(index));
        drop(spare);
        match found {
            Some(words) => Ok(Buffer(words)),
            // Zeros that are not touched yet take no memory, even if a peer claims a length that it never sends.
            None => match attempt(|| bytemuck::allocation::try_zeroed_slice_box(len)) {
                Ok(words) => Ok(Buffer(words.into_vec())),
                Err(()) => Err(OutOfMemory::of::<u64>(len)),
            },
        }
    }

    /// The words, which are then the caller's.
    #[cfg(feature = "mpi")]
    pub(crate) fn into_box(mut self) -> Box<[u64]> {
        std::mem::take(&mut self.0).into_boxed_slice()
    }
}

#[cfg(feature = "mpi")]
impl From<Box<[u64]>> for Buffer {
    fn from(words: Box<[u64]>) -> Buffer {
        Buffer(words.into_vec())
    }
}

impl From<Vec<u64>> for Buffer {
    fn from(words: Vec<u64>) -> Buffer {
        Buffer(words)
    }
}

impl Deref for Buffer {
    type Target = [u64];

    fn deref(&self) -> &[u64] {
        &self.0
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u64] {
        &mut self.0
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if !(SMALLEST..=MOST).contains(&self.0.len()) {
            return;
        }
        let mut spare = SPARE.lock().unwrap_or_else(PoisonError::into_inner);
        spare.push(std::mem::take(&mut self.0));
        let mut kept: usize = spare.iter().map(Vec::len).sum();
        let too_many = spare.iter().take_while(|words| {
            let too_many = kept > MOST;
            kept -= words.len();
            too_many
        });
        let too_many = too_many.count();
        spare.drain(..too_many);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kept() -> usize {
        SPARE.lock().unwrap().iter().map(Vec::len).sum()
    }

    #[test]
    fn buffers_come_again_and_not_too_many_are_kept() {
        // No other test in this process has buffers of these sizes.
        let at_least = |len| Buffer::with_at_least(len).unwrap();
        let mut buffer = at_least(50_000);
        buffer[49_999] = 7;
        drop(buffer);
        let again = at_least(40_000);
        assert_eq!((again.len(), again[49_999]), (50_000, 7), "the same memory");
        assert_eq!(at_least(40_000).len(), 40_000, "it is in use");
        drop(again);
        assert_eq!(at_least(19_000).len(), 19_000, "too large for that");
        drop([MOST / 2, MOST / 2, MOST / 2].map(at_least));
        assert!((MOST / 2..=MOST).contains(&kept()), "{}", kept());
        drop(at_least(MOST + 1));
        assert!(kept() <= MOST, "{}", kept());
        for len in [usize::MAX, 1 << 60, 1 << 47] {
            let bytes = len.saturating_mul(8);
            assert_eq!(Buffer::with_at_least(len).map(drop), Err(OutOfMemory { bytes }));
        }
    }
}
