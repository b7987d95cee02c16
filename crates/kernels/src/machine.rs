//! What the machine can do at most, measured: the yardsticks that times of kernels are read against.

use std::time::{Duration, Instant};

use pulp::{Simd, WithSimd};

use crate::{Cpu, simd};

/// Independent chains of multiply-adds: enough to hide a latency of 4 to 5 cycles on two units, few enough for the 16
/// registers of AVX2 with the two factors.
const CHAINS: usize = 12;
/// Multiply-adds of each chain between two looks at the clock, about 0.1 ms.
const ROUND: usize = 1 << 16;
/// Floats of one buffer that is copied, more than caches hold: 96 MiB.
const COPIED: usize = 24 << 20;
/// How long each is measured, and how often at least.
const TIME: Duration = Duration::from_millis(200);
const FEWEST: usize = 5;

/// Floating-point operations of f32 that `cpu` does in a second when nothing else is in the way: vector multiply-adds in
/// registers. Kernels can only come near. For f64 vectors it is half of this.
pub fn peak_flops(cpu: &Cpu) -> f64 {
    let work = (2 * CHAINS * ROUND * simd::lanes(cpu.isa()) * cpu.threads()) as f64;
    work / shortest(|| cpu.for_each(usize::MAX, 0..cpu.threads(), |_| simd::run(cpu.isa(), MultiplyAdds)))
}

/// Bytes that `cpu` reads and writes in a second when it copies what no cache holds.
pub fn copy_bandwidth(cpu: &Cpu) -> f64 {
    let from = vec![1.0f32; COPIED];
    let mut to = vec![0.0f32; COPIED];
    let part = COPIED.div_ceil(4 * cpu.threads());
    let bytes = (2 * COPIED * size_of::<f32>()) as f64;
    bytes
        / shortest(|| {
            let parts = to.chunks_mut(part).zip(from.chunks(part));
            cpu.for_each(usize::MAX, parts, |(to, from)| to.copy_from_slice(from));
        })
}

/// Seconds of the fastest run: whatever else runs on the machine only ever adds.
fn shortest(mut run: impl FnMut()) -> f64 {
    // The first run meets threads and memory for the first time.
    run();
    let begin = Instant::now();
    let mut best = f64::INFINITY;
    let mut runs = 0;
    while begin.elapsed() < TIME || runs < FEWEST {
        let start = Instant::now();
        run();
        best = best.min(start.elapsed().as_secs_f64());
        runs += 1;
    }
    best
}

/// [`ROUND`] multiply-adds on each of [`CHAINS`] registers.
struct MultiplyAdds;

impl WithSimd for MultiplyAdds {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        // Not known to the compiler, which would compute the result itself; they converge, and never reach subnormals.
        let factor = simd.splat_f32s(std::hint::black_box(0.5));
        let term = simd.splat_f32s(std::hint::black_box(1.0));
        let mut sums = [term; CHAINS];
        for _ in 0..ROUND {
            for sum in &mut sums {
                // Where there is no fused multiply-add, this is a multiplication and an addition.
                *sum = simd.mul_add_e_f32s(*sum, factor, term);
            }
        }
        std::hint::black_box(sums);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Isa;

    #[test]
    fn wider_vectors_do_more() {
        let mut before = 1e8;
        for isa in Isa::available() {
            let peak = peak_flops(&Cpu::single().with_isa(isa).unwrap());
            // A machine whose 512-bit operations take two cycles gains nothing from them.
            assert!(peak > 0.8 * before && peak < 1e13, "{isa}: {peak:.3e}");
            before = peak;
        }
    }

    #[test]
    fn memory_is_copied_at_some_speed() {
        let bandwidth = copy_bandwidth(&Cpu::single());
        assert!((1e8..1e13).contains(&bandwidth), "{bandwidth:.3e}");
    }
}
