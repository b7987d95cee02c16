//! Transposition of matrices in memory.

use crate::isa::multiversion;
use crate::{Cpu, Stored};

/// Writes the `rows` x `columns` matrix `from` transposed into `to`.
pub(crate) fn transpose<T: Stored>(cpu: &Cpu, rows: usize, columns: usize, from: &[T], to: &mut [T]) {
    if !in_registers(cpu, [rows, columns], from, to) {
        in_tiles(cpu, [rows, columns], from, to);
    }
}

multiversion! {
    fn in_tiles<T: Stored>(size: [usize; 2], from: &[T], to: &mut [T]) {
        // Square tiles keep both sides' cache lines in L1.
        const TILE: usize = 16;
        let [rows, columns] = size;
        for row in (0..rows).step_by(TILE) {
            for column in (0..columns).step_by(TILE) {
                for c in column..(column + TILE).min(columns) {
                    let line = &mut to[c * rows + row..c * rows + (row + TILE).min(rows)];
                    for (r, value) in line.iter_mut().enumerate() {
                        *value = from[(row + r) * columns + c];
                    }
                }
            }
        }
    }
}

/// Transposes squares of 8 x 8 elements of two or four bytes, the last of which overlap others, or says that it cannot: the machine has no
/// such vectors, the elements have another size, or there are fewer than 8 rows or columns.
///
/// From memory to memory, this is twice as fast as one element at a time, which the compiler turns into gathers.
fn in_registers<T: Stored>(cpu: &Cpu, [rows, columns]: [usize; 2], from: &[T], to: &mut [T]) -> bool {
    #[cfg(target_arch = "x86_64")]
    if cpu.isa() != crate::Isa::PORTABLE
        && let Some(simd) = pulp::x86::V3::try_new()
    {
        let size = [rows, columns];
        match size_of::<T>() {
            2 => {
                let (from, to) = (bytemuck::cast_slice(from), bytemuck::cast_slice_mut(to));
                return simd.vectorize(avx2::Squares::<u16> { simd, size, from, to });
            }
            4 => {
                let (from, to) = (bytemuck::cast_slice(from), bytemuck::cast_slice_mut(to));
                return simd.vectorize(avx2::Squares::<f32> { simd, size, from, to });
            }
            _ => {}
        }
    }
    let _ = (cpu, rows, columns, from, to);
    false
}

#[cfg(target_arch = "x86_64")]
mod avx2 {
    use std::arch::x86_64::{__m128i, __m256};

    use pulp::NullaryFnOnce;
    use pulp::x86::V3;

    /// The rows, and the columns, of a square.
    const SIDE: usize = 8;
    /// Rows that are handled together: their cache lines stay in L1 while the loop goes over the columns, two squares at a
    /// time.
    const ROWS: usize = 64;

    pub(super) struct Squares<'a, T> {
        pub(super) simd: V3,
        pub(super) size: [usize; 2],
        pub(super) from: &'a [T],
        pub(super) to: &'a mut [T],
    }

    impl<T: Square> NullaryFnOnce for Squares<'_, T> {
        type Output = bool;

        #[inline(always)]
        fn call(self) -> bool {
            let [all_rows, all_columns] = self.size;
            if all_rows < SIDE || all_columns < SIDE {
                return false;
            }
            for rows in (0..all_rows).step_by(ROWS) {
                for columns in (0..all_columns).step_by(2 * SIDE) {
                    for row in (rows..(rows + ROWS).min(all_rows)).step_by(SIDE) {
                        for column in (columns..(columns + 2 * SIDE).min(all_columns)).step_by(SIDE) {
                            let (row, column) = (row.min(all_rows - SIDE), column.min(all_columns - SIDE));
                            let from = &self.from[row * all_columns + column..];
                            let to = &mut self.to[column * all_rows + row..];
                            T::square(self.simd, (from, all_columns), (to, all_rows));
                        }
                    }
                }
            }
            true
        }
    }

    /// An element of which squares are transposed.
    pub(super) trait Square: Copy {
        /// [`SIDE`] elements.
        type Vector: Copy;

        /// Columns of the square with these rows.
        fn transposed(simd: V3, rows: [Self::Vector; SIDE]) -> [Self::Vector; SIDE];

        /// Transposes the square at the start of `from` into that at the start of `to`. Each slice comes with the distance of its rows.
        #[inline(always)]
        fn square(simd: V3, (from, columns): (&[Self], usize), (to, rows): (&mut [Self], usize)) {
            const { assert!(size_of::<Self::Vector>() == SIDE * size_of::<Self>()) };
            let (from, to) = (&from[..(SIDE - 1) * columns + SIDE], &mut to[..(SIDE - 1) * rows + SIDE]);
            // SAFETY: `from` has been cut to (SIDE - 1) * columns + SIDE elements, so that eight follow the start of each row i
            // below SIDE, i * columns. These are as many bytes as a vector, of which any bits are numbers.
            let lines: [Self::Vector; SIDE] = std::array::from_fn(|i| unsafe {
                from.as_ptr().add(i * columns).cast::<Self::Vector>().read_unaligned()
            });
            for (i, column) in Self::transposed(simd, lines).into_iter().enumerate() {
                // SAFETY: `to` has been cut to (SIDE - 1) * rows + SIDE elements, so that eight follow the start of each column i
                // below SIDE, i * rows.
                unsafe { to.as_mut_ptr().add(i * rows).cast::<Self::Vector>().write_unaligned(column) };
            }
        }
    }

    impl Square for f32 {
        type Vector = __m256;

        #[inline(always)]
        fn transposed(simd: V3, lines: [__m256; SIDE]) -> [__m256; SIDE] {
            let avx = simd.avx;
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
            std::array::from_fn(|i| {
                let (a, b) = (fours[0][i % 4], fours[1][i % 4]);
                match i < 4 {
                    true => avx._mm256_permute2f128_ps::<0x20>(a, b),
                    false => avx._mm256_permute2f128_ps::<0x31>(a, b),
                }
            })
        }
    }

    impl Square for u16 {
        type Vector = __m128i;

        #[inline(always)]
        fn transposed(simd: V3, lines: [__m128i; SIDE]) -> [__m128i; SIDE] {
            let sse = simd.sse2;
            // Combine pairs of rows, then groups of four, then both halves.
            let pairs: [[__m128i; 2]; 4] = std::array::from_fn(|i| {
                let (a, b) = (lines[2 * i], lines[2 * i + 1]);
                [sse._mm_unpacklo_epi16(a, b), sse._mm_unpackhi_epi16(a, b)]
            });
            let fours: [[__m128i; 4]; 2] = std::array::from_fn(|i| {
                let ([a, b], [c, d]) = (pairs[2 * i], pairs[2 * i + 1]);
                [
                    sse._mm_unpacklo_epi32(a, c),
                    sse._mm_unpackhi_epi32(a, c),
                    sse._mm_unpacklo_epi32(b, d),
                    sse._mm_unpackhi_epi32(b, d),
                ]
            });
            std::array::from_fn(|i| {
                let (a, b) = (fours[0][i / 2], fours[1][i / 2]);
                match i % 2 {
                    0 => sse._mm_unpacklo_epi64(a, b),
                    _ => sse._mm_unpackhi_epi64(a, b),
                }
            })
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
                        to.iter().zip(&expected).all(|(a, b)| bytemuck::bytes_of(a) == bytemuck::bytes_of(b)),
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
        agrees(|i| half::bf16::from_bits(i as u16));
    }
}
