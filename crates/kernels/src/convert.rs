//! Conversion between the types that tensors store.

use crate::elementwise::{chunks, chunks_mut};
use crate::error::check_len;
use crate::isa::multiversion;
use crate::profile::span;
use crate::{Cpu, DType, Result, Slice, SliceMut, Stored, dispatch_stored};

multiversion! {
    pub(crate) fn widen<A: Stored>(from: &[A], to: &mut [f32]) {
        A::widen(from, to);
    }

    pub(crate) fn narrow<B: Stored>(from: &[f32], to: &mut [B]) {
        B::narrow(from, to);
    }

    fn through_f64<A: Stored, B: Stored>(from: &[A], to: &mut [B]) {
        for (to, from) in to.iter_mut().zip(from) {
            *to = B::of(from.f64());
        }
    }
}

/// Converts `from` to another type: to the nearest value, ties to even, rounded once. NaN stays NaN, and values that are
/// too large become infinite, as in IEEE 754.
///
/// # Errors
/// If the lengths differ.
pub fn convert(cpu: &Cpu, from: Slice<'_>, to: SliceMut<'_>) -> Result<()> {
    span!("type conversion", from, to);
    check_len("conversion", "the output", to.len(), from.len())?;
    match (from.dtype(), to.dtype()) {
        (dtype, DType::F32) => dispatch_stored!(dtype, A => {
            let pairs = chunks(from.of::<A>()?).zip(chunks_mut(to.of()?));
            cpu.for_each(from.len(), pairs, |(from, to)| widen(cpu, from, to));
        }),
        (DType::F32, dtype) => dispatch_stored!(dtype, B => {
            let pairs = chunks(from.of()?).zip(chunks_mut(to.of::<B>()?));
            cpu.for_each(from.len(), pairs, |(from, to)| narrow(cpu, from, to));
        }),
        (a, b) => dispatch_stored!(a, A => dispatch_stored!(b, B => {
            let pairs = chunks(from.of::<A>()?).zip(chunks_mut(to.of::<B>()?));
            cpu.for_each(from.len(), pairs, |(from, to)| through_f64(cpu, from, to));
        })),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};

    use super::*;
    use crate::Isa;

    /// Values of f32 in every binade, at and next to the ties of both half types, and the special values.
    fn values() -> Vec<f32> {
        let beside = |bits: u32| [bits.wrapping_sub(1), bits, bits.wrapping_add(1)];
        let bits = (0..=u16::MAX).flat_map(|upper| {
            let ties = [0, 0x1000, 0x3000, 0x8000].map(|low| u32::from(upper) << 16 | low);
            ties.into_iter().flat_map(beside)
        });
        bits.map(f32::from_bits).collect()
    }

    /// Checks by distances that `found` is the value nearest to `exact`: no neighbour may be nearer, nor as near and even.
    fn check_nearest<H: Stored>(found: H, exact: f64, neighbours: [H; 2], even: bool) {
        if exact.is_nan() {
            assert!(found.f64().is_nan(), "{exact} became {found}");
            return;
        }
        if found.f64() == exact || found.f64().is_infinite() {
            return;
        }
        let distance = |x: H| (x.f64() - exact).abs();
        for other in neighbours {
            let (here, there) = (distance(found), distance(other));
            assert!(
                here < there || (here == there && even) || there.is_nan(),
                "{exact}: {found}, not {other}"
            );
        }
    }

    #[test]
    fn every_value_goes_to_the_nearest_one_with_every_instruction_set() {
        let values = values();
        for isa in Isa::available() {
            let cpu = Cpu::new(2).unwrap().with_isa(isa).unwrap();
            let mut halves = vec![f16::NAN; values.len()];
            let mut brains = vec![bf16::NAN; values.len()];
            convert(&cpu, (&values).into(), (&mut halves).into()).unwrap();
            convert(&cpu, (&values).into(), (&mut brains).into()).unwrap();
            let wide: Vec<f64> = values.iter().map(|&value| value.into()).collect();
            let mut of_wide = vec![f16::NAN; values.len()];
            convert(&cpu, (&wide).into(), (&mut of_wide).into()).unwrap();
            assert!(halves.iter().zip(&of_wide).all(|(a, b)| a == b || (a.is_nan() && b.is_nan())));
            for ((&value, &half), &brain) in values.iter().zip(&halves).zip(&brains) {
                let bits = half.to_bits();
                let beside = [bits.wrapping_sub(1), bits.wrapping_add(1)].map(f16::from_bits);
                check_nearest(half, value.into(), beside, bits % 2 == 0);
                assert!(!half.is_infinite() || value.abs() >= 65520.0, "{value} became {half}");
                let bits = brain.to_bits();
                let beside = [bits.wrapping_sub(1), bits.wrapping_add(1)].map(bf16::from_bits);
                check_nearest(brain, value.into(), beside, bits % 2 == 0);
                assert!(!brain.is_infinite() || value.abs() >= 3.394e38, "{value} became {brain}");
            }
        }
    }

    #[test]
    fn what_fits_comes_back_as_it_was() {
        let cpu = Cpu::single();
        let all: Vec<u16> = (0..=u16::MAX).collect();
        fn there_and_back<H: Stored, W: Stored>(cpu: &Cpu, all: &[u16], is_nan: fn(u16) -> bool) {
            let halves: Vec<H> = all.iter().map(|&bits| bytemuck::cast(bits)).collect();
            let (mut wide, mut back) = (vec![W::of(7.0); all.len()], vec![H::of(7.0); all.len()]);
            convert(cpu, (&halves).into(), (&mut wide).into()).unwrap();
            convert(cpu, (&wide).into(), (&mut back).into()).unwrap();
            for ((&bits, wide), back) in all.iter().zip(&wide).zip(&back) {
                let same = bits == bytemuck::cast::<H, u16>(*back);
                assert!(if is_nan(bits) { back.f64().is_nan() } else { same }, "{bits:#x}: {wide}, {back}");
            }
        }
        let f16_nan: fn(u16) -> bool = |bits| f16::from_bits(bits).is_nan();
        let bf16_nan: fn(u16) -> bool = |bits| bf16::from_bits(bits).is_nan();
        there_and_back::<f16, f32>(&cpu, &all, f16_nan);
        there_and_back::<f16, f64>(&cpu, &all, f16_nan);
        there_and_back::<bf16, f32>(&cpu, &all, bf16_nan);
        there_and_back::<bf16, f64>(&cpu, &all, bf16_nan);
    }

    #[test]
    fn f64_is_rounded_once() {
        fn nearest<H: Stored>(x: f64) -> f64 {
            let mut y = [H::of(7.0)];
            convert(&Cpu::single(), (&[x]).into(), (&mut y).into()).unwrap();
            y[0].f64()
        }
        // The values differ from the tie between 1 and the next half-precision number by less than f32 resolves: through
        // f32 they would round to even, to 1.
        let little = 2f64.powi(-40);
        for sign in [1.0, -1.0] {
            let (tie, next) = (1.0 + 2f64.powi(-11), 1.0 + 2f64.powi(-10));
            assert_eq!(
                [tie - little, tie, tie + little].map(|x| nearest::<f16>(sign * x)),
                [sign, sign, sign * next]
            );
            let (tie, next) = (1.0 + 2f64.powi(-8), 1.0 + 2f64.powi(-7));
            assert_eq!(
                [tie - little, tie, tie + little].map(|x| nearest::<bf16>(sign * x)),
                [sign, sign, sign * next]
            );
            // The smallest subnormals, and values that are too large.
            assert_eq!(
                [2f64.powi(-25) + 2f64.powi(-70), 2f64.powi(-25)].map(|x| nearest::<f16>(sign * x)),
                [sign * 2f64.powi(-24), 0.0]
            );
            assert_eq!(nearest::<bf16>(sign * f64::from_bits(1)), 0.0);
            assert_eq!(
                [65519.999, 65520.0].map(|x| nearest::<f16>(sign * x)),
                [sign * 65504.0, sign * f64::INFINITY]
            );
            assert_eq!(nearest::<bf16>(sign * 1e300), sign * f64::INFINITY);
            assert_eq!(nearest::<f16>(sign * f64::INFINITY), sign * f64::INFINITY);
        }
        assert!(nearest::<f16>(f64::NAN).is_nan() && nearest::<bf16>(f64::NAN).is_nan());
        let error =
            convert(&Cpu::single(), (&[1.0f32; 2]).into(), (&mut [f16::NAN]).into()).unwrap_err().to_string();
        assert!(error.contains("the output has 1 elements, expected 2"), "{error}");
    }
}
