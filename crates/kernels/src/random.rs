//! Random numbers, of which any can be computed without the ones before it.

/// The step of SplitMix64.
pub(crate) const GAMMA: u64 = 0x9e37_79b9_7f4a_7c15;

/// The `index`-th output of SplitMix64 seeded with `key` (Steele, Lea, Flood: "Fast splittable pseudorandom number
/// generators", 2014), computed without the ones before it.
#[inline(always)]
pub(crate) fn random_bits(key: u64, index: u64) -> u64 {
    let mut z = key.wrapping_add((index + 1).wrapping_mul(GAMMA));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
