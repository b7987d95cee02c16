//! Dropout, which is its own backward pass.

use crate::elementwise::{chunks, chunks_mut};
use crate::error::{check_len, invalid};
use crate::isa::multiversion;
use crate::profile::span;
use crate::random::{GAMMA, random_bits};
use crate::{Cpu, Element, Result, Slice, SliceMut, dispatch};

/// Inverted dropout: each element is dropped with probability `p`, the others are divided by 1 - p.
///
/// Which elements are dropped depends only on `key` and the element's index. So backward is the same function applied to
/// dy, and no mask is stored.
///
/// # Errors
/// If the lengths differ or `p` is not in [0, 1].
pub fn dropout(cpu: &Cpu, x: Slice<'_>, p: f64, key: u64, y: SliceMut<'_>) -> Result<()> {
    dispatch!("dropout", x.dtype(), T => typed::<T>(cpu, x.of()?, p, key, y.of()?))
}

/// The key whose element 0 is element `elements` of `key`. With it, dropout of a part of a tensor drops the same elements
/// as dropout of the whole.
pub fn dropout_skip(key: u64, elements: u64) -> u64 {
    key.wrapping_add(elements.wrapping_mul(GAMMA))
}

fn typed<T: Element>(cpu: &Cpu, x: &[T], p: f64, key: u64, y: &mut [T]) -> Result<()> {
    span!("dropout", x, y);
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

multiversion! {
    fn dropout_chunk<T: Element>(first: usize, key: u64, p: f64, x: &[T], y: &mut [T]) {
        // The probability as a threshold for 32 random bits; a p of 1 drops every element.
        let threshold = (p * 4294967296.0) as u64;
        let scale = if p < 1.0 { T::of(1.0 / (1.0 - p)) } else { T::zero() };
        for (index, (y, &x)) in y.iter_mut().zip(x).enumerate() {
            let keep = random_bits(key, (first + index) as u64) >> 32 >= threshold;
            *y = if keep { x * scale } else { T::zero() };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dropout_keeps_the_mean_and_repeats_itself() {
        let x = vec![1.0f32; 100_003];
        let (mut y, mut again) = (vec![f32::NAN; x.len()], vec![f32::NAN; x.len()]);
        for p in [0.0, 0.1, 0.5, 0.9] {
            dropout(&Cpu::single(), (&x).into(), p, 7, (&mut y).into()).unwrap();
            dropout(
                &Cpu::new(3).unwrap().with_isa(crate::Isa::PORTABLE).unwrap(),
                (&x).into(),
                p,
                7,
                (&mut again).into(),
            )
            .unwrap();
            assert_eq!(y, again);
            let kept = y.iter().filter(|&&y| y != 0.0).count() as f64 / x.len() as f64;
            // Five standard deviations of a binomial share.
            let bound = 5.0 * (p * (1.0 - p) / x.len() as f64).sqrt();
            assert!((kept - (1.0 - p)).abs() <= bound, "p {p}: kept {kept}");
            assert!(y.iter().all(|&y| y == 0.0 || y == (1.0 / (1.0 - p)) as f32));
        }
        let cut = 70_001;
        dropout(&Cpu::single(), (&x).into(), 0.5, 7, (&mut y).into()).unwrap();
        let rest = &mut again[cut..];
        dropout(&Cpu::single(), x[cut..].into(), 0.5, dropout_skip(7, cut as u64), (&mut *rest).into())
            .unwrap();
        assert_eq!(y[cut..], *rest, "a part is dropped as in the whole");
        dropout(&Cpu::single(), (&x).into(), 1.0, 7, (&mut y).into()).unwrap();
        assert!(y.iter().all(|&y| y == 0.0));
        assert!(dropout(&Cpu::single(), (&x).into(), f64::NAN, 7, (&mut y).into()).is_err());
    }
}
