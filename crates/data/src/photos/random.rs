//! The random numbers of one sample, the same on every machine.

use rand::Rng;
use rand_chacha::ChaCha8Rng;

use super::super::random::{below, stream};

/// The first bytes of the keys, so that the numbers differ from other uses of the same seed.
const DOMAIN: [u8; 16] = *b"photo/1\0\0\0\0\0\0\0\0\0";

/// What a stream of random numbers is for. Each use has a stream of its own, so none depends on which others are switched on.
#[derive(Clone, Copy, Debug)]
pub(super) enum Use {
    Crop = 0,
    Flip = 1,
    Jitter = 2,
    Trivial = 3,
    Erasing = 4,
}

/// A stream of random numbers. The functions are written by hand, because a library's way may change between versions.
pub(super) struct Random(ChaCha8Rng);

impl Random {
    /// The stream of one sample for one use.
    pub(super) fn of(seed: u64, purpose: Use) -> Random {
        Random(stream(DOMAIN, seed, 0, purpose as u64))
    }

    /// A number from 0 up to, but not including, 1.
    pub(super) fn unit(&mut self) -> f64 {
        (self.0.next_u64() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// A number between two others.
    pub(super) fn between(&mut self, [low, high]: [f64; 2]) -> f64 {
        low + (high - low) * self.unit()
    }

    /// A number between two others, such that its logarithm is evenly distributed. The functions are libm's, because those of
    /// the system differ in the last bits.
    pub(super) fn log_between(&mut self, range: [f64; 2]) -> f64 {
        libm::exp(self.between(range.map(libm::log)))
    }

    /// A whole number below `count`, which is at least 1.
    pub(super) fn below(&mut self, count: usize) -> usize {
        below(&mut self.0, count)
    }

    /// Whether something of this probability happens.
    pub(super) fn happens(&mut self, probability: f64) -> bool {
        self.unit() < probability
    }
}
