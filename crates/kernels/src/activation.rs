//! ReLU and dropout, each with its backward.

use crate::cpu::multiversion;
use crate::elementwise::{chunks, chunks_mut};
use crate::error::{check_len, invalid};
use crate::{Cpu, Element, Result};

multiversion! {
    fn relu_chunk<T: Element>(x: &[T], y: &mut [T]) {
        for (y, &x) in y.iter_mut().zip(x) {
            // Written so that NaN passes, as in PyTorch.
            *y = if x <= T::zero() { T::zero() } else { x };
        }
    }

    fn relu_backward_chunk<T: Element>(y: &[T], dy: &[T], dx: &mut [T]) {
        for ((dx, &y), &dy) in dx.iter_mut().zip(y).zip(dy) {
            *dx = if y <= T::zero() { T::zero() } else { dy };
        }
    }

    fn dropout_chunk<T: Element>(first: usize, key: u64, p: f64, x: &[T], y: &mut [T]) {
        // The probability as a threshold on 32 random bits; a p of 1 drops every element.
        let threshold = (p * 4294967296.0) as u64;
        let scale = if p < 1.0 { T::of(1.0 / (1.0 - p)) } else { T::zero() };
        for (index, (y, &x)) in y.iter_mut().zip(x).enumerate() {
            let keep = random_bits(key, (first + index) as u64) >> 32 >= threshold;
            *y = if keep { x * scale } else { T::zero() };
        }
    }
}

/// y = max(0, x); NaN stays NaN.
///
/// # Errors
/// If the lengths differ.
pub fn relu<T: Element>(cpu: &Cpu, x: &[T], y: &mut [T]) -> Result<()> {
    check_len("relu", "y", y.len(), x.len())?;
    cpu.for_each(x.len(), chunks(x).zip(chunks_mut(y)), |(x, y)| relu_chunk(cpu, x, y));
    Ok(())
}

/// dx = dy where `y`, the output (or the input) of [`relu`], is positive, else 0.
///
/// # Errors
/// If the lengths differ.
pub fn relu_backward<T: Element>(cpu: &Cpu, y: &[T], dy: &[T], dx: &mut [T]) -> Result<()> {
    check_len("relu backward", "dy", dy.len(), y.len())?;
    check_len("relu backward", "dx", dx.len(), y.len())?;
    let items = chunks(y).zip(chunks(dy)).zip(chunks_mut(dx));
    cpu.for_each(y.len(), items, |((y, dy), dx)| relu_backward_chunk(cpu, y, dy, dx));
    Ok(())
}

/// Inverted dropout: each element is dropped with probability `p`, the others are divided by 1 - p.
///
/// Which are dropped depends on `key` and the element's index only, so that backward is the same function applied
/// to dy, and no mask is stored.
///
/// # Errors
/// If the lengths differ or `p` is not in [0, 1].
pub fn dropout<T: Element>(cpu: &Cpu, x: &[T], p: f64, key: u64, y: &mut [T]) -> Result<()> {
    check_len("dropout", "y", y.len(), x.len())?;
    if !(0.0..=1.0).contains(&p) {
        return Err(invalid("dropout", format!("the probability must lie in [0, 1], not {p}")));
    }
    let first = chunks(x).scan(0, |first, chunk| {
        let this = *first;
        *first += chunk.len();
        Some(this)
    });
    let items = first.zip(chunks(x)).zip(chunks_mut(y));
    cpu.for_each(x.len(), items, |((first, x), y)| dropout_chunk(cpu, first, key, p, x, y));
    Ok(())
}

/// The key whose element 0 is element `elements` of `key`: with it a part of a tensor is dropped as it would be in the whole.
pub fn dropout_skip(key: u64, elements: u64) -> u64 {
    key.wrapping_add(elements.wrapping_mul(GAMMA))
}

/// The step of SplitMix64.
const GAMMA: u64 = 0x9e37_79b9_7f4a_7c15;

/// The `index`-th output of SplitMix64 seeded with `key` (Steele, Lea, Flood: "Fast splittable pseudorandom number
/// generators", 2014), computed without the ones before it.
#[inline(always)]
fn random_bits(key: u64, index: u64) -> u64 {
    let mut z = key.wrapping_add((index + 1).wrapping_mul(GAMMA));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn relu_passes_nan_and_zeroes_negatives() {
        let x = [-1.0f32, 0.0, 2.0, f32::NAN, -0.0];
        let mut y = [9.0; 5];
        relu(&Cpu::single(), &x, &mut y).unwrap();
        assert_eq!(&y[..3], &[0.0, 0.0, 2.0]);
        assert!(y[3].is_nan());
        assert_eq!(y[4], 0.0);
        let mut dx = [f32::NAN; 5];
        relu_backward(&Cpu::single(), &y, &[5.0; 5], &mut dx).unwrap();
        assert_eq!(dx, [0.0, 0.0, 5.0, 5.0, 0.0]);
        assert!(relu(&Cpu::single(), &x, &mut [0.0; 4]).is_err());
    }

    #[test]
    fn dropout_keeps_the_mean_and_repeats_itself() {
        let x = vec![1.0f32; 100_003];
        let (mut y, mut again) = (vec![f32::NAN; x.len()], vec![f32::NAN; x.len()]);
        for p in [0.0, 0.1, 0.5, 0.9] {
            dropout(&Cpu::single(), &x, p, 7, &mut y).unwrap();
            dropout(&Cpu::new(3).unwrap().with_isa(crate::Isa::Portable).unwrap(), &x, p, 7, &mut again)
                .unwrap();
            assert_eq!(y, again);
            let kept = y.iter().filter(|&&y| y != 0.0).count() as f64 / x.len() as f64;
            // Five standard deviations of a binomial share.
            let bound = 5.0 * (p * (1.0 - p) / x.len() as f64).sqrt();
            assert!((kept - (1.0 - p)).abs() <= bound, "p {p}: kept {kept}");
            assert!(y.iter().all(|&y| y == 0.0 || y == (1.0 / (1.0 - p)) as f32));
        }
        let cut = 70_001;
        dropout(&Cpu::single(), &x, 0.5, 7, &mut y).unwrap();
        let rest = &mut again[cut..];
        dropout(&Cpu::single(), &x[cut..], 0.5, dropout_skip(7, cut as u64), rest).unwrap();
        assert_eq!(y[cut..], *rest, "a part is dropped as in the whole");
        dropout(&Cpu::single(), &x, 1.0, 7, &mut y).unwrap();
        assert!(y.iter().all(|&y| y == 0.0));
        assert!(dropout(&Cpu::single(), &x, f64::NAN, 7, &mut y).is_err());
    }
}
