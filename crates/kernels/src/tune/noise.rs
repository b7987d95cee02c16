//! Random inputs of a trial, the same each time.

use crate::memory::AlignedVec;
use crate::{Cpu, Element, Result};

/// Elements that a thread takes at a time.
pub(super) const CHUNK: usize = 1 << 16;

/// Uniform numbers in -1..1.
pub(super) fn noise<T: Element>(cpu: &Cpu, len: usize, seed: u64) -> Result<AlignedVec<T>> {
    let mut values = AlignedVec::try_filled(len, T::nan())?;
    cpu.for_each(len, values.chunks_mut(CHUNK).enumerate(), |(chunk, values)| {
        let mut random = Generator::new(seed + 1000 * chunk as u64);
        for value in values {
            *value = T::of(random.next() as f64 / (1u64 << 31) as f64 - 1.0);
        }
    });
    Ok(values)
}

/// SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", 2014).
pub(super) struct Generator {
    state: u64,
}

impl Generator {
    pub(super) fn new(seed: u64) -> Generator {
        Generator { state: seed }
    }

    fn next(&mut self) -> u32 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 32) as u32
    }

    pub(super) fn below(&mut self, limit: usize) -> usize {
        ((u128::from(self.next()) * limit as u128) >> 32) as usize
    }
}
