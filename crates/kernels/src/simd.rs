//! Runs code that is generic over a vector type with the vectors of an instruction set.

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

/// Runs `op` with the vectors of `isa`, which a [`crate::Cpu`] has found on this machine.
#[inline]
pub(crate) fn run<O: WithSimd>(isa: Isa, op: O) -> O::Output {
    #[cfg(target_arch = "x86_64")]
    {
        use pulp::Simd;
        match isa {
            Isa::Avx512 => {
                if let Some(simd) = pulp::x86::V4::try_new() {
                    return Simd::vectorize(simd, op);
                }
            }
            Isa::Avx2 => {
                if let Some(simd) = pulp::x86::V3::try_new() {
                    return Simd::vectorize(simd, op);
                }
            }
            Isa::Portable => {}
        }
    }
    op.with_simd(pulp::Scalar::new())
}
