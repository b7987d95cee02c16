//! Measures the machine's peak speeds, to which the times of kernels are compared.

use std::time::{Duration, Instant};

use pulp::{Simd, WithSimd};

use crate::conv::Unit;
use crate::{Cpu, DType, Result, simd};

/// Independent chains of multiply-adds: enough to hide a latency of 4 to 5 cycles on two units, and few enough that they
/// and the two constants fit the 16 registers of AVX2.
const CHAINS: usize = 12;
/// Multiply-adds of each chain between two readings of the clock, about 0.1 ms.
const ROUND: usize = 1 << 16;
/// Floats in each buffer of the copy, more than caches hold: 96 MiB.
const COPIED: usize = 24 << 20;
/// How long each speed is measured; at least [`FEWEST`] runs.
const TIME: Duration = Duration::from_millis(200);
const FEWEST: usize = 5;

/// The peak number of operations that `cpu` does in a second on numbers of this type, measured with vector multiply-adds in registers, and
/// with the units that multiply bf16. Kernels can only come near it.
pub fn peak_flops(cpu: &Cpu, dtype: DType) -> f64 {
    let peak = |work: usize, run: &(dyn Fn() + Sync)| {
        let seconds = shortest(|| cpu.for_each(usize::MAX, 0..cpu.threads(), |_| run()));
        (work * cpu.threads()) as f64 / seconds
    };
    let single = || peak(2 * CHAINS * ROUND * cpu.isa().lanes(), &|| simd::run(cpu.isa(), MultiplyAdds));
    match dtype {
        DType::F32 | DType::F16 => single(),
        DType::F64 => single() / 2.0,
        DType::BF16 => {
            let units = Unit::ALL.into_iter().filter(|unit| unit.is_in(cpu));
            units.map(|unit| peak(Unit::EXERCISE, &|| unit.exercise(cpu))).fold(single(), f64::max)
        }
    }
}

/// Bytes that `cpu` reads and writes in a second when it copies memory that no cache holds.
///
/// # Errors
/// If there is no memory for the two buffers, 192 MiB.
pub fn copy_bandwidth(cpu: &Cpu) -> Result<f64> {
    let from = convoke_memory::filled(COPIED, 1.0f32)?;
    let mut to = convoke_memory::filled(COPIED, 0.0f32)?;
    let part = COPIED.div_ceil(4 * cpu.threads());
    let bytes = (2 * COPIED * size_of::<f32>()) as f64;
    let seconds = shortest(|| {
        let parts = to.chunks_mut(part).zip(from.chunks(part));
        cpu.for_each(usize::MAX, parts, |(to, from)| to.copy_from_slice(from));
    });
    Ok(bytes / seconds)
}

/// The most bytes that `cpu` moves in a second when it goes through the same `bytes` of memory again and again: by copying
/// one half to the other, or by only reading, whichever is faster. Memory that fits in caches moves faster.
///
/// # Errors
/// If there is no memory for `bytes`.
pub fn bandwidth(cpu: &Cpu, bytes: usize) -> Result<f64> {
    let threads = cpu.threads();
    // A part for each thread, of at least a cache line on either side of a copy.
    let len = (bytes / size_of::<f32>() / (2 * threads)).max(16);
    let pair = |_| Ok([convoke_memory::filled(len, 1.0)?, convoke_memory::filled(len, 0.0)?]);
    let mut halves: Vec<[Vec<f32>; 2]> = (0..threads).map(pair).collect::<Result<_>>()?;
    // Repeat small sizes, so that a sample takes long enough that waking the threads does not count.
    let repeats = (SAMPLE / (2 * size_of::<f32>() * len * threads)).max(1);
    let moved = (2 * size_of::<f32>() * len * threads * repeats) as f64;
    let time = TIME / 10;
    let copying = shortest_within(time, || {
        cpu.for_each(usize::MAX, halves.iter_mut(), |[from, to]| {
            for _ in 0..repeats {
                to.copy_from_slice(std::hint::black_box(from));
                std::hint::black_box(&mut *to);
            }
        });
    });
    let reading = shortest_within(time, || {
        cpu.for_each(usize::MAX, halves.iter(), |halves| {
            for _ in 0..repeats {
                for half in halves {
                    simd::run(cpu.isa(), Read(std::hint::black_box(half)));
                }
            }
        });
    });
    Ok(moved / copying.min(reading))
}

/// Bytes that a sample of [`bandwidth`] moves, about.
const SAMPLE: usize = 4 << 20;

/// Seconds of the fastest run: other programs on the machine can only make a run slower.
fn shortest(run: impl FnMut()) -> f64 {
    shortest_within(TIME, run)
}

fn shortest_within(time: Duration, mut run: impl FnMut()) -> f64 {
    // Not timed: the first run wakes threads and touches memory for the first time.
    run();
    let begin = Instant::now();
    let mut best = f64::INFINITY;
    let mut runs = 0;
    while begin.elapsed() < time || runs < FEWEST {
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
        // Hidden from the compiler, which would else compute the result itself. The sums converge and never become subnormal.
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

/// Reads every number.
struct Read<'a>(&'a [f32]);

impl WithSimd for Read<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let (vectors, rest) = S::as_simd_f32s(self.0);
        // Independent sums, so that no addition waits for another.
        let mut sums = [simd.splat_f32s(0.0); 8];
        let groups = vectors.chunks_exact(sums.len());
        for &vector in groups.remainder() {
            sums[0] = simd.add_f32s(sums[0], vector);
        }
        for group in groups {
            for (sum, &vector) in sums.iter_mut().zip(group) {
                *sum = simd.add_f32s(*sum, vector);
            }
        }
        std::hint::black_box((sums, rest.iter().sum::<f32>()));
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
            let peak = peak_flops(&Cpu::single().with_isa(isa).unwrap(), DType::F32);
            // A machine whose 512-bit operations take two cycles gains nothing from them.
            assert!(peak > 0.8 * before && peak < 1e13, "{isa}: {peak:.3e}");
            before = peak;
        }
    }

    #[test]
    fn few_and_many_bytes_move_at_some_speed() {
        for cpu in [Cpu::single(), Cpu::new(3).unwrap()] {
            for bytes in [0, 1, 1000, 1 << 16, 1 << 20, 1 << 24] {
                let bandwidth = bandwidth(&cpu, bytes).unwrap();
                assert!((1e8..1e14).contains(&bandwidth), "{bytes} bytes: {bandwidth:.3e}");
            }
        }
    }

    #[test]
    fn memory_is_copied_at_some_speed() {
        let bandwidth = copy_bandwidth(&Cpu::single()).unwrap();
        assert!((1e8..1e13).contains(&bandwidth), "{bandwidth:.3e}");
    }
}
