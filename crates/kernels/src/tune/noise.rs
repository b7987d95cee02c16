//! Random inputs of a trial, the same each time.

use crate::memory::AlignedVec;
use crate::random::random_bits;
use crate::{Cpu, Result, Stored};

/// Elements that a thread takes at a time.
pub(super) const CHUNK: usize = 1 << 16;

/// Uniform numbers in -1..1.
pub(super) fn noise<T: Stored>(cpu: &Cpu, len: usize, seed: u64) -> Result<AlignedVec<T>> {
    let mut values = AlignedVec::try_filled(len, T::of(f64::NAN))?;
    cpu.for_each(len, values.chunks_mut(CHUNK).enumerate(), |(chunk, values)| {
        let mut random = Generator::new(seed + 1000 * chunk as u64);
        for value in values {
            *value = T::of(random.next() as f64 / (1u64 << 31) as f64 - 1.0);
        }
    });
    Ok(values)
}

/// Random numbers in turn.
pub(super) struct Generator {
    seed: u64,
    index: u64,
}

impl Generator {
    pub(super) fn new(seed: u64) -> Generator {
        Generator { seed, index: 0 }
    }

    fn next(&mut self) -> u32 {
        let bits = random_bits(self.seed, self.index);
        self.index += 1;
        (bits >> 32) as u32
    }

    pub(super) fn below(&mut self, limit: usize) -> usize {
        ((u128::from(self.next()) * limit as u128) >> 32) as usize
    }
}
