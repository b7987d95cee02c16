//! Streams of random numbers, the same on every machine.

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// A stream. `domain` keeps the streams of one use apart from those of others with the same seed; `part` and `index` tell its own
/// streams apart.
pub(crate) fn stream(domain: [u8; 16], seed: u64, part: u64, index: u64) -> ChaCha8Rng {
    let mut key = [0; 32];
    key[..16].copy_from_slice(&domain);
    key[16..24].copy_from_slice(&seed.to_le_bytes());
    key[24..].copy_from_slice(&part.to_le_bytes());
    let mut random = ChaCha8Rng::from_seed(key);
    random.set_stream(index);
    random
}

/// A whole number below `count`; the bias is below count / 2^64. Written by hand, because a library's way may change between
/// versions.
pub(crate) fn below(random: &mut ChaCha8Rng, count: usize) -> usize {
    ((u128::from(random.next_u64()) * count as u128) >> 64) as usize
}
