//! Runs code that is generic over a vector type with the vectors of an instruction set.

use std::mem::MaybeUninit;

use pulp::WithSimd;

use crate::Isa;

/// Vectors of S that registers hold, as [`Isa::registers`] says.
pub(crate) const fn registers<S: pulp::Simd>() -> usize {
    if S::IS_SCALAR { 8 } else { S::REGISTER_COUNT }
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

/// Runs `op` with the vectors of `isa`, which have [`Isa::lanes`] floats.
///
/// # Panics
/// If this machine lacks `isa`; no [`crate::Cpu`] holds such an instruction set. It does not fall back to other vectors,
/// because callers rely on the lanes of `isa`.
#[inline]
pub(crate) fn run<O: WithSimd>(isa: Isa, op: O) -> O::Output {
    match isa {
        Isa::PORTABLE => op.with_simd(pulp::Scalar::new()),
        #[cfg(target_arch = "x86_64")]
        Isa::AVX512 => match pulp::x86::V4::try_new() {
            Some(simd) => pulp::Simd::vectorize(simd, op),
            None => lacking(isa),
        },
        #[cfg(target_arch = "x86_64")]
        Isa::AVX2 => match pulp::x86::V3::try_new() {
            Some(simd) => pulp::Simd::vectorize(simd, op),
            None => lacking(isa),
        },
        _ => lacking(isa),
    }
}

#[cold]
fn lacking(isa: Isa) -> ! {
    panic!("this CPU has no vectors of {isa}, which `Isa::available` has found")
}

/// Whether [`run`] finds the vectors of `isa`.
pub(crate) fn has(isa: Isa) -> bool {
    match isa {
        Isa::PORTABLE => true,
        #[cfg(target_arch = "x86_64")]
        Isa::AVX2 => pulp::x86::V3::try_new().is_some(),
        #[cfg(target_arch = "x86_64")]
        Isa::AVX512 => pulp::x86::V4::try_new().is_some(),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns lanes and registers of the vectors that it is run with.
    struct Sizes;

    impl WithSimd for Sizes {
        type Output = [usize; 2];

        fn with_simd<S: pulp::Simd>(self, _: S) -> [usize; 2] {
            [S::F32_LANES, registers::<S>()]
        }
    }

    #[test]
    fn code_runs_with_the_vectors_that_the_table_tells_or_not_at_all() {
        for isa in Isa::ALL {
            if Isa::available().contains(&isa) {
                assert_eq!(run(isa, Sizes), [isa.lanes(), isa.registers()], "{isa}");
            } else if !has(isa) {
                let refusal = std::panic::catch_unwind(|| run(isa, Sizes)).expect_err("no scalar code");
                assert!(refusal.downcast_ref::<String>().unwrap().contains(&isa.to_string()));
            }
        }
    }
}
