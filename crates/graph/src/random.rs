//! Random numbers whose state can be saved and restored.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use rand::{Rng, RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};

/// A stream of random numbers that modules share. Clones share one stream.
#[derive(Clone)]
pub struct Generator {
    random: Arc<Mutex<ChaCha8Rng>>,
    first: Arc<AtomicU64>,
}

/// The state of a [`Generator`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct GeneratorState {
    /// The 256-bit key, from the seed.
    key: [u8; 32],
    /// Numbers drawn so far, in 32-bit words.
    position: u64,
}

impl Generator {
    /// A stream from a seed.
    pub fn new(seed: u64) -> Generator {
        Generator { random: Arc::new(Mutex::new(ChaCha8Rng::seed_from_u64(seed))), first: Arc::default() }
    }

    /// Where this rank's samples begin in the batch of all ranks: 0 unless set.
    ///
    /// With this, a module that draws for each sample draws the same numbers as a single rank would for the whole batch, so that
    /// results do not depend on the number of ranks.
    pub fn first_sample(&self) -> u64 {
        self.first.load(Ordering::Relaxed)
    }

    /// Sets where this rank's samples begin in the batch of all ranks.
    pub fn set_first_sample(&self, first: u64) {
        self.first.store(first, Ordering::Relaxed);
    }

    fn lock(&self) -> MutexGuard<'_, ChaCha8Rng> {
        self.random.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// 64 random bits: a key for [`convoke_autograd::ops::dropout`].
    pub fn key(&self) -> u64 {
        self.lock().next_u64()
    }

    /// `len` numbers, uniform in [-bound, bound).
    ///
    /// # Panics
    /// If there is no memory for `len` numbers.
    pub fn uniform(&self, len: usize, bound: f64) -> Vec<f64> {
        let mut random = self.lock();
        (0..len).map(|_| (random.random::<f64>() * 2.0 - 1.0) * bound).collect()
    }

    /// `len` numbers, normally distributed around 0 with standard deviation `std`. Each takes two numbers from the stream.
    ///
    /// # Panics
    /// If there is no memory for `len` numbers.
    pub fn normal(&self, len: usize, std: f64) -> Vec<f64> {
        let mut random = self.lock();
        // Box, Muller, 1958. Only one of each pair is used, so that results do not depend on how many numbers a call draws.
        let mut one = || {
            let (u, v) = (1.0 - random.random::<f64>(), random.random::<f64>());
            (-2.0 * u.ln()).sqrt() * (std::f64::consts::TAU * v).cos() * std
        };
        (0..len).map(|_| one()).collect()
    }

    /// The state of the stream.
    pub fn state(&self) -> GeneratorState {
        let random = self.lock();
        // No run draws 2^64 words.
        GeneratorState { key: random.get_seed(), position: random.get_word_pos() as u64 }
    }

    /// Numbers drawn so far, in 32-bit words.
    #[doc(hidden)]
    pub fn position(&self) -> u64 {
        self.state().position
    }

    /// Goes to the position after `position` 32-bit words.
    #[doc(hidden)]
    pub fn set_position(&self, position: u64) {
        self.restore(&GeneratorState { position, ..self.state() });
    }

    /// Continues from another stream's state.
    pub fn restore(&self, state: &GeneratorState) {
        let mut random = ChaCha8Rng::from_seed(state.key);
        random.set_word_pos(u128::from(state.position));
        *self.lock() = random;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn restores_where_it_stood() {
        let generator = Generator::new(7);
        generator.uniform(11, 1.0);
        generator.key();
        let state = generator.state();
        let next = generator.key();
        let other = Generator::new(0);
        other.restore(&serde_json::from_str(&serde_json::to_string(&state).unwrap()).unwrap());
        assert_eq!(other.key(), next);
    }

    #[test]
    fn normal_numbers_have_the_moments_they_should() {
        let count = 200_000;
        let values = Generator::new(3).normal(count, 2.0);
        let moment = |power: i32| values.iter().map(|x| (x / 2.0).powi(power)).sum::<f64>() / count as f64;
        // The standard errors are sqrt(1, 2, 15, 96) / sqrt(count).
        for (power, expected, error) in [(1, 0.0, 1.0_f64), (2, 1.0, 2.0), (3, 0.0, 15.0), (4, 3.0, 96.0)] {
            let allowed = 5.0 * (error / count as f64).sqrt();
            assert!((moment(power) - expected).abs() <= allowed, "{power}: {}", moment(power));
        }
        let random = Generator::new(3);
        assert_eq!([random.normal(7, 2.0), random.normal(4, 2.0)].concat(), values[..11]);
    }
}
