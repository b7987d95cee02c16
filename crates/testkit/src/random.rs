//! Random inputs from a seed: the same on every machine and with every version of the `rand` crates' distributions.

use std::ops::RangeInclusive;

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::ToF64;

/// A floating-point type that test data can be made of: `f32` or `f64`.
pub trait Element: ToF64 {
    /// Not a number.
    const NAN: Self;
    /// The nearest number of this type.
    fn from_f64(value: f64) -> Self;
}

impl Element for f32 {
    const NAN: Self = f32::NAN;
    fn from_f64(value: f64) -> Self {
        value as f32
    }
}

impl Element for f64 {
    const NAN: Self = f64::NAN;
    fn from_f64(value: f64) -> Self {
        value
    }
}

/// `len` numbers uniform in `[low, high)` (rounding to `f32` may reach `high`).
pub fn uniform<T: Element>(seed: u64, len: usize, low: f64, high: f64) -> Vec<T> {
    Random::new(seed).uniform(len, low, high)
}

/// `len` normally distributed numbers.
pub fn normal<T: Element>(seed: u64, len: usize, mean: f64, std: f64) -> Vec<T> {
    Random::new(seed).normal(len, mean, std)
}

/// `len` times NaN: what an output buffer should hold before the operation that must write all of it.
pub fn poisoned<T: Element>(len: usize) -> Vec<T> {
    vec![T::NAN; len]
}

/// A stream of random test data, for problems whose sizes are random too.
///
/// ```
/// let mut random = convoke_testkit::Random::new(7);
/// let (channels, stride) = (random.integer(1..=17), *random.pick(&[1, 2, 3]));
/// let x: Vec<f32> = random.normal(channels * stride, 0.0, 1.0);
/// assert_eq!(x.len(), channels * stride);
/// ```
#[derive(Clone, Debug)]
pub struct Random(ChaCha8Rng);

impl Random {
    /// The stream that belongs to `seed`.
    pub fn new(seed: u64) -> Self {
        Self(ChaCha8Rng::seed_from_u64(seed))
    }

    /// `len` numbers uniform in `[low, high)` (rounding to `f32` may reach `high`).
    pub fn uniform<T: Element>(&mut self, len: usize, low: f64, high: f64) -> Vec<T> {
        (0..len).map(|_| T::from_f64(low + (high - low) * self.fraction())).collect()
    }

    /// `len` normally distributed numbers (Box and Muller's transform).
    pub fn normal<T: Element>(&mut self, len: usize, mean: f64, std: f64) -> Vec<T> {
        (0..len)
            .map(|_| {
                // 1 - fraction lies in (0, 1], whose logarithm is finite.
                let radius = (-2.0 * (1.0 - self.fraction()).ln()).sqrt();
                let angle = std::f64::consts::TAU * self.fraction();
                T::from_f64(mean + std * radius * angle.cos())
            })
            .collect()
    }

    /// An integer of the range.
    ///
    /// # Panics
    /// When the range is empty.
    pub fn integer(&mut self, range: RangeInclusive<usize>) -> usize {
        let (low, high) = range.into_inner();
        assert!(low <= high, "the range {low}..={high} is empty");
        // The bias of the remainder, below 2^-32 for test sizes, does not matter here.
        low + (self.0.next_u64() % (high - low + 1) as u64) as usize
    }

    /// One of the choices.
    ///
    /// # Panics
    /// When there is none.
    pub fn pick<'a, T>(&mut self, choices: &'a [T]) -> &'a T {
        assert!(!choices.is_empty(), "nothing to pick from");
        &choices[self.integer(0..=choices.len() - 1)]
    }

    /// True or false, equally likely.
    pub fn flag(&mut self) -> bool {
        self.0.next_u64() & 1 == 1
    }

    fn fraction(&mut self) -> f64 {
        (self.0.next_u64() >> 11) as f64 / (1u64 << 53) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seeds_decide() {
        assert_eq!(uniform::<f32>(1, 9, 0.0, 1.0), uniform::<f32>(1, 9, 0.0, 1.0));
        assert_ne!(uniform::<f64>(1, 9, 0.0, 1.0), uniform::<f64>(2, 9, 0.0, 1.0));
        assert!(poisoned::<f32>(3).iter().all(|v| v.is_nan()));
    }

    #[test]
    fn moments_are_as_asked() {
        let len = 100_000;
        for (values, mean, variance) in [
            (uniform::<f64>(1, len, -1.0, 3.0), 1.0, 16.0 / 12.0),
            (normal::<f64>(2, len, -2.0, 0.5), -2.0, 0.25),
        ] {
            let actual_mean = values.iter().sum::<f64>() / len as f64;
            let actual = values.iter().map(|v| (v - actual_mean).powi(2)).sum::<f64>() / len as f64;
            assert!((actual_mean - mean).abs() < 0.02, "mean {actual_mean}");
            assert!((actual / variance - 1.0).abs() < 0.02, "variance {actual}");
        }
    }

    #[test]
    fn integers_reach_both_ends() {
        let mut random = Random::new(5);
        let seen: Vec<usize> = (0..200).map(|_| random.integer(3..=5)).collect();
        assert!((3..=5).all(|value| seen.contains(&value)) && seen.iter().all(|v| (3..=5).contains(v)));
        assert!((30..=70).contains(&(0..100).filter(|_| random.flag()).count()));
    }
}
