//! Transposition of matrices in memory.

use std::ops::Range;

use crate::isa::multiversion;
use crate::{Cpu, Stored};

/// Writes the `rows` x `columns` matrix `from` transposed into `to`.
pub(crate) fn transpose<T: Stored>(cpu: &Cpu, rows: usize, columns: usize, from: &[T], to: &mut [T]) {
    let [whole_rows, whole_columns] = in_registers(cpu, [rows, columns], from, to);
    let rest = [(0..whole_rows, whole_columns..columns), (whole_rows..rows, 0..columns)];
    for (part_rows, part_columns) in rest {
        transpose_part(cpu, [rows, columns], part_rows, part_columns, from, to);
    }
}

multiversion! {
    fn transpose_part<T: Stored>(
        size: [usize; 2], part_rows: Range<usize>, part_columns: Range<usize>, from: &[T], to: &mut [T],
    ) {
        // Square tiles keep both sides' cache lines in L1.
        const TILE: usize = 16;
        let [rows, columns] = size;
        for row in part_rows.clone().step_by(TILE) {
            for column in part_columns.clone().step_by(TILE) {
                for c in column..(column + TILE).min(part_columns.end) {
                    let line = &mut to[c * rows + row..c * rows + (row + TILE).min(part_rows.end)];
                    for (r, value) in line.iter_mut().enumerate() {
                        *value = from[(row + r) * columns + c];
                    }
                }
            }
        }
    }
}

/// Transposes squares of 8 x 8 elements of four bytes, where the machine can, and returns how many rows and columns they cover.
///
/// From memory to memory, this is twice as fast as one element at a time, which the compiler turns into gathers.
fn in_registers<T: Stored>(cpu: &Cpu, [rows, columns]: [usize; 2], from: &[T], to: &mut [T]) -> [usize; 2] {
    #[cfg(target_arch = "x86_64")]
    if size_of::<T>() == 4
        && cpu.isa() != crate::Isa::PORTABLE
        && let Some(simd) = pulp::x86::V3::try_new()
    {
        let (from, to) = (bytemuck::cast_slice(from), bytemuck::cast_slice_mut(to));
        return simd.vectorize(avx2::Squares { simd, size: [rows, columns], from, to });
    }
    let _ = (cpu, rows, columns, from, to);
    [0, 0]
}

#[cfg(target_arch = "x86_64")]
mod avx2 {
    use std::arch::x86_64::__m256;

    use pulp::NullaryFnOnce;
    use pulp::x86::V3;

    /// The rows, and the columns, of a square.
    const SIDE: usize = 8;
    /// Rows that are handled together: their cache lines stay in L1 while the loop goes over the columns, two squares at a
    /// time.
    const ROWS: usize = 64;

    pub(super) struct Squares<'a> {
        pub(super) simd: V3,
        pub(super) size: [usize; 2],
        pub(super) from: &'a [f32],
        pub(super) to: &'a mut [f32],
    }

    impl NullaryFnOnce for Squares<'_> {
        type Output = [usize; 2];

        #[inline(always)]
        fn call(mut self) -> [usize; 2] {
            let whole = self.size.map(|len| len / SIDE * SIDE);
            for rows in (0..whole[0]).step_by(ROWS) {
                for columns in (0..whole[1]).step_by(2 * SIDE) {
                    for row in (rows..(rows + ROWS).min(whole[0])).step_by(SIDE) {
                        for column in (columns..(columns + 2 * SIDE).min(whole[1])).step_by(SIDE) {
                            self.square(row, column);
                        }
                    }
                }
            }
            whole
        }
    }

    impl Squares<'_> {
        #[inline(always)]
        fn square(&mut self, row: usize, column: usize) {
            let ([rows, columns], avx) = (self.size, self.simd.avx);
            let from = &self.from[row * columns + column..][..(SIDE - 1) * columns + SIDE];
            let to = &mut self.to[column * rows + row..][..(SIDE - 1) * rows + SIDE];
            // SAFETY: `from` has been cut to (SIDE - 1) * columns + SIDE elements, so that eight follow the start of each row i
            // below SIDE, i * columns. These are as many bytes as a vector, and any bits are floats.
            let lines: [__m256; SIDE] = std::array::from_fn(|i| unsafe {
                from.as_ptr().add(i * columns).cast::<__m256>().read_unaligned()
            });
            // Combine pairs of rows, then groups of four, then both halves.
            let pairs: [[__m256; 2]; 4] = std::array::from_fn(|i| {
                let (a, b) = (lines[2 * i], lines[2 * i + 1]);
                [avx._mm256_unpacklo_ps(a, b), avx._mm256_unpackhi_ps(a, b)]
            });
            let fours: [[__m256; 4]; 2] = std::array::from_fn(|i| {
                let ([a, b], [c, d]) = (pairs[2 * i], pairs[2 * i + 1]);
                [
                    avx._mm256_shuffle_ps::<0x44>(a, c),
                    avx._mm256_shuffle_ps::<0xee>(a, c),
                    avx._mm256_shuffle_ps::<0x44>(b, d),
                    avx._mm256_shuffle_ps::<0xee>(b, d),
                ]
            });
            for (i, (a, b)) in fours[0].into_iter().zip(fours[1]).enumerate() {
                let columns =
                    [avx._mm256_permute2f128_ps::<0x20>(a, b), avx._mm256_permute2f128_ps::<0x31>(a, b)];
                for (half, column) in columns.into_iter().enumerate() {
                    let place = (i + half * SIDE / 2) * rows;
                    // SAFETY: `to` has been cut to (SIDE - 1) * rows + SIDE elements, so that eight follow the start of each
                    // column below SIDE, of which `place` is one: i is below SIDE / 2 and half below 2.
                    unsafe { to.as_mut_ptr().add(place).cast::<__m256>().write_unaligned(column) };
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Isa;

    fn agrees<T: Stored>(value: impl Fn(usize) -> T) {
        for isa in Isa::available() {
            let cpu = Cpu::single().with_isa(isa).unwrap();
            for rows in [1, 7, 8, 9, 64, 65, 80, 144] {
                for columns in [1, 3, 8, 15, 16, 17, 24, 64, 100] {
                    let from: Vec<T> = (0..rows * columns).map(&value).collect();
                    let mut to = vec![T::of(f64::NAN); from.len()];
                    transpose(&cpu, rows, columns, &from, &mut to);
                    let expected: Vec<T> =
                        (0..from.len()).map(|i| from[i % rows * columns + i / rows]).collect();
                    assert!(
                        to.iter().zip(&expected).all(|(a, b)| a.f64() == b.f64()),
                        "{rows}x{columns}, {isa}"
                    );
                }
            }
        }
    }

    #[test]
    fn every_size_on_every_machine() {
        agrees(|i| i as f32);
        agrees(|i| i as f64);
    }
}
