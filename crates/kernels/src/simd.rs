//! Runs code that is generic over a vector type with the vectors of an instruction set.

use std::mem::MaybeUninit;

use pulp::WithSimd;

use crate::Isa;

/// Floats in one vector.
pub(crate) fn lanes(isa: Isa) -> usize {
    match isa {
        Isa::Avx512 => 16,
        Isa::Avx2 => 8,
        Isa::Portable => 1,
    }
}

/// `[value(0), value(1), ...]`, as [`std::array::from_fn`] and `map` of an array make it. Those two can be interrupted by a panic
/// half-way, and what they do to be ready for that made up a sixth of what the compiler had to read of this crate.
#[inline(always)]
pub(crate) fn array<T: Copy, const N: usize>(mut value: impl FnMut(usize) -> T) -> [T; N] {
    let mut values = [const { MaybeUninit::<T>::uninit() }; N];
    let mut index = 0;
    while index < N {
        values[index].write(value(index));
        index += 1;
    }
    // SAFETY: the loop has written all N values, and `MaybeUninit<T>` has the layout of T.
    unsafe { (&raw const values).cast::<[T; N]>().read() }
}

/// Runs `op` with the vectors of `isa`, which have [`lanes`] floats.
///
/// # Panics
/// If this machine lacks `isa`; no [`crate::Cpu`] holds such an instruction set. It does not fall back to other vectors,
/// because callers rely on the lanes of `isa`.
#[inline]
pub(crate) fn run<O: WithSimd>(isa: Isa, op: O) -> O::Output {
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => match pulp::x86::V4::try_new() {
            Some(simd) => pulp::Simd::vectorize(simd, op),
            None => lacking(isa),
        },
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => match pulp::x86::V3::try_new() {
            Some(simd) => pulp::Simd::vectorize(simd, op),
            None => lacking(isa),
        },
        #[cfg(not(target_arch = "x86_64"))]
        Isa::Avx512 | Isa::Avx2 => lacking(isa),
        Isa::Portable => op.with_simd(pulp::Scalar::new()),
    }
}

#[cold]
fn lacking(isa: Isa) -> ! {
    panic!("this CPU has no vectors of {isa}, which `Isa::available` has found")
}

/// Whether [`run`] finds the vectors of `isa`.
pub(crate) fn has(isa: Isa) -> bool {
    match isa {
        Isa::Portable => true,
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => pulp::x86::V3::try_new().is_some(),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => pulp::x86::V4::try_new().is_some(),
        #[cfg(not(target_arch = "x86_64"))]
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the lanes of the vectors that it is run with.
    struct Lanes;

    impl WithSimd for Lanes {
        type Output = usize;

        fn with_simd<S: pulp::Simd>(self, _: S) -> usize {
            S::F32_LANES
        }
    }

    #[test]
    fn code_runs_with_as_many_lanes_as_are_told_or_not_at_all() {
        for isa in [Isa::Portable, Isa::Avx2, Isa::Avx512] {
            if Isa::available().contains(&isa) {
                assert_eq!(run(isa, Lanes), lanes(isa), "{isa}");
            } else {
                assert!(!has(isa) || isa > Isa::detect(), "{isa}");
            }
            if !has(isa) {
                let refusal = std::panic::catch_unwind(|| run(isa, Lanes)).expect_err("no scalar code");
                assert!(refusal.downcast_ref::<String>().unwrap().contains(&isa.to_string()));
            }
        }
    }
}
