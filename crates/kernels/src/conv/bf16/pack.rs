//! Pairs of numbers: the order of the second factor of a product, and transposed rows for the first.

use half::bf16;

use super::unit::{GROUP, ROWS, SIDE};

/// Where the weights of a panel lie: `at + depth * depth_step + column * column_step` in a tensor of f32, for some depths and columns.
#[derive(Clone, Copy)]
pub(super) struct Weights<'a> {
    pub(super) all: &'a [f32],
    pub(super) at: usize,
    pub(super) depth_step: usize,
    pub(super) column_step: usize,
}

impl Weights<'_> {
    fn value(&self, depth: usize, column: usize) -> bf16 {
        bf16::from_f32(self.all[self.at + depth * self.depth_step + column * self.column_step])
    }

    /// The place after the last of these depths and columns.
    fn end(&self, depths: usize, columns: usize) -> usize {
        self.at + (depths - 1) * self.depth_step + (columns - 1) * self.column_step + 1
    }
}

/// Writes the weights of some depths, from `first` on, into a panel: [depth / 2][[`SIDE`] columns][depth % 2]. Its other columns become
/// zero; depths that are neither written here nor by another call keep what they are.
pub(super) fn pack_weights(
    weights: &Weights<'_>,
    first: usize,
    [depths, columns]: [usize; 2],
    panel: &mut [bf16],
) {
    assert!(columns > 0 && columns <= SIDE);
    if depths == 0 {
        return;
    }
    assert!(
        weights.end(depths, columns) <= weights.all.len()
            && (first + depths).div_ceil(2) * 2 * SIDE <= panel.len()
    );
    let mut done = 0;
    #[cfg(target_arch = "x86_64")]
    if first.is_multiple_of(2) && super::unit::x86::has_dot() {
        let part = &mut panel[first * SIDE..];
        // The direction in which the weights lie closer is read in vectors.
        done = match weights.depth_step < weights.column_step {
            true => depths - depths % SIDE,
            false => depths - depths % 2,
        };
        // SAFETY: the machine has AVX512-BF16; the weights of all depths and columns lie in the tensor, and the panel has room for the
        // depths, by the assertion above.
        unsafe {
            match weights.depth_step < weights.column_step {
                true => x86::pack_rows(weights, [done, columns], part),
                false => x86::pack_columns(weights, [done, columns], part),
            }
        }
    }
    for depth in done..depths {
        let at = (first + depth) / 2 * 2 * SIDE + (first + depth) % 2;
        for column in 0..SIDE {
            panel[at + 2 * column] = if column < columns { weights.value(depth, column) } else { bf16::ZERO };
        }
    }
}

/// Writes a row of pairs, [element][2], of two rows of elements.
pub(super) fn pair_rows(rows: [&[bf16]; 2], pairs: &mut [bf16]) {
    let len = rows[0].len();
    assert!(rows[1].len() == len && pairs.len() >= 2 * len);
    #[cfg(target_arch = "x86_64")]
    if super::unit::x86::has_dot() {
        // SAFETY: the machine has AVX512-BF16, and the lengths are as asserted.
        unsafe { x86::pair_rows(rows.map(<[bf16]>::as_ptr), len, pairs.as_mut_ptr()) };
        return;
    }
    for (pair, (&a, &b)) in pairs.chunks_exact_mut(2).zip(rows[0].iter().zip(rows[1])) {
        pair.copy_from_slice(&[a, b]);
    }
}

/// Writes [`GROUP`] rows of `columns` elements, transposed; an absent row is zeros.
pub(super) fn transpose_rows(rows: &[Option<&[bf16]>; GROUP], columns: usize, to: &mut [bf16]) {
    assert!(columns * GROUP <= to.len());
    assert!(rows.iter().flatten().all(|row| row.len() >= columns));
    #[cfg(target_arch = "x86_64")]
    if super::unit::x86::has_dot() {
        // SAFETY: the machine has AVX512-BF16, and the lengths are as asserted.
        return unsafe { x86::transpose_rows(rows, columns, to.as_mut_ptr()) };
    }
    for (column, to) in to.chunks_exact_mut(GROUP).enumerate().take(columns) {
        for (to, row) in to.iter_mut().zip(rows) {
            *to = row.map_or(bf16::ZERO, |row| row[column]);
        }
    }
}

/// Stores the elements of `from` at `places`, or adds them. One by one: instructions that gather are slow on many processors.
pub(super) fn gather(from: &[f32], places: &[i32], to: &mut [f32], stores: bool) {
    let pairs = to.iter_mut().zip(places.iter().map(|&place| from[place as usize]));
    match stores {
        true => pairs.for_each(|(to, value)| *to = value),
        false => pairs.for_each(|(to, value)| *to += value),
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use half::bf16;

    use super::{GROUP, ROWS, SIDE, Weights};

    /// The order that makes pairs of two halves: 0, 16, 1, 17, ...
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    fn interleaved() -> __m512i {
        let low = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
        let high = _mm512_add_epi32(low, _mm512_set1_epi32(16));
        _mm512_or_si512(low, _mm512_slli_epi32::<16>(high))
    }

    /// The bits of the first `count` of 16.
    #[inline(always)]
    fn mask(count: usize) -> u16 {
        u16::MAX.checked_shr(16 - count.min(16) as u32).unwrap_or(0)
    }

    /// Exchanges rows and columns of 16 x 16 elements of 32 bits.
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn transposed(rows: [__m512i; 16]) -> [__m512i; 16] {
        let mut pairs = rows;
        for i in (0..16).step_by(2) {
            pairs[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
            pairs[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
        }
        let mut fours = pairs;
        for i in (0..16).step_by(4) {
            fours[i] = _mm512_unpacklo_epi64(pairs[i], pairs[i + 2]);
            fours[i + 1] = _mm512_unpackhi_epi64(pairs[i], pairs[i + 2]);
            fours[i + 2] = _mm512_unpacklo_epi64(pairs[i + 1], pairs[i + 3]);
            fours[i + 3] = _mm512_unpackhi_epi64(pairs[i + 1], pairs[i + 3]);
        }
        let mut eights = fours;
        for i in 0..4 {
            for half in [0, 8] {
                let (a, b) = (fours[half + i], fours[half + i + 4]);
                eights[half + i] = _mm512_shuffle_i32x4::<0x88>(a, b);
                eights[half + i + 4] = _mm512_shuffle_i32x4::<0xdd>(a, b);
            }
        }
        let mut columns = eights;
        for i in 0..8 {
            columns[i] = _mm512_shuffle_i32x4::<0x88>(eights[i], eights[i + 8]);
            columns[i + 8] = _mm512_shuffle_i32x4::<0xdd>(eights[i], eights[i + 8]);
        }
        columns
    }

    /// 16 numbers, `step` apart.
    ///
    /// # Safety
    /// The numbers that `mask` selects can be read; it selects the first ones.
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn spread(from: *const f32, step: usize, mask: u16) -> __m512 {
        // SAFETY: as the caller promises.
        unsafe {
            match step {
                1 => _mm512_maskz_loadu_ps(mask, from),
                // One by one, and volatile so that the compiler does not join them: instructions that gather are slow on many processors.
                _ => {
                    let mut values = [0.0; ROWS];
                    for (index, value) in values.iter_mut().enumerate().take(mask.count_ones() as usize) {
                        *value = from.add(index * step).read_volatile();
                    }
                    _mm512_loadu_ps(values.as_ptr())
                }
            }
        }
    }

    /// Weights whose depths lie closer than their columns; depths are a multiple of 32.
    ///
    /// # Safety
    /// The machine has AVX512-BF16, the weights and the panel have all depths and columns.
    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    pub(super) unsafe fn pack_rows(weights: &Weights<'_>, [depths, columns]: [usize; 2], panel: &mut [bf16]) {
        let from = weights.all.as_ptr();
        for depth in (0..depths).step_by(SIDE) {
            for half in [0, ROWS] {
                let mut rows = [_mm512_setzero_si512(); ROWS];
                for (lane, row) in rows.iter_mut().enumerate().take(columns.saturating_sub(half)) {
                    let at = weights.at + depth * weights.depth_step + (half + lane) * weights.column_step;
                    // SAFETY: depths `depth..depth + 32` of a column below `columns`, which the caller promises.
                    unsafe {
                        let [low, high] = [0, ROWS].map(|d| {
                            spread(from.add(at + d * weights.depth_step), weights.depth_step, u16::MAX)
                        });
                        *row = std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(high, low));
                    }
                }
                for (pair, row) in transposed(rows).into_iter().enumerate() {
                    let to = &mut panel[depth * SIDE + pair * 2 * SIDE + 2 * half..][..2 * ROWS];
                    // SAFETY: `to` has 32 elements.
                    unsafe { _mm512_storeu_si512(to.as_mut_ptr().cast(), row) };
                }
            }
        }
    }

    /// Weights whose columns lie closer than their depths; depths are a multiple of 2.
    ///
    /// # Safety
    /// As [`pack_rows`].
    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    pub(super) unsafe fn pack_columns(
        weights: &Weights<'_>,
        [depths, columns]: [usize; 2],
        panel: &mut [bf16],
    ) {
        let from = weights.all.as_ptr();
        let order = interleaved();
        for depth in (0..depths).step_by(2) {
            for half in [0, ROWS] {
                let mask = mask(columns.saturating_sub(half));
                let at = weights.at + depth * weights.depth_step + half * weights.column_step;
                let to = &mut panel[depth * SIDE + 2 * half..][..2 * ROWS];
                // SAFETY: the mask leaves columns below `columns` of two depths, which the caller promises; where it leaves none, nothing
                // is read. `to` has 32 elements.
                unsafe {
                    let [even, odd] = [0, 1].map(|d| {
                        spread(from.wrapping_add(at + d * weights.depth_step), weights.column_step, mask)
                    });
                    let both = std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(odd, even));
                    _mm512_storeu_si512(to.as_mut_ptr().cast(), _mm512_permutexvar_epi16(order, both));
                }
            }
        }
    }

    /// 16 elements of two rows as pairs.
    ///
    /// # Safety
    /// The elements of `mask` can be read.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn pairs([a, b]: [*const bf16; 2], mask: u16, order: __m512i) -> __m512i {
        // SAFETY: as the caller promises.
        let [a, b] = [a, b].map(|row| unsafe { _mm256_maskz_loadu_epi16(mask, row.cast()) });
        _mm512_permutexvar_epi16(order, _mm512_inserti64x4::<1>(_mm512_castsi256_si512(a), b))
    }

    /// # Safety
    /// The machine has AVX512-BF16, both rows have `len` elements, `to` has room for twice as many.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    pub(super) unsafe fn pair_rows(rows: [*const bf16; 2], len: usize, to: *mut bf16) {
        let order = interleaved();
        for first in (0..len).step_by(ROWS) {
            let mask = mask(len - first);
            // SAFETY: the mask leaves elements below `len`, and as many pairs.
            unsafe {
                let both = pairs(rows.map(|row| row.add(first)), mask, order);
                _mm512_mask_storeu_epi32(to.add(2 * first).cast(), mask, both);
            }
        }
    }

    /// # Safety
    /// The machine has AVX512-BF16, rows have `columns` elements, and `to` has room for all of these.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    pub(super) unsafe fn transpose_rows(rows: &[Option<&[bf16]>; GROUP], columns: usize, to: *mut bf16) {
        let order = interleaved();
        for first in (0..columns).step_by(ROWS) {
            let mask = mask(columns - first);
            let mut lines = [_mm512_setzero_si512(); ROWS];
            for (line, rows) in lines.iter_mut().zip(rows.as_chunks::<2>().0) {
                let [a, b] = rows.map(|row| match row {
                    // SAFETY: the mask leaves elements below `columns`, which the row has.
                    Some(row) => unsafe { _mm256_maskz_loadu_epi16(mask, row.as_ptr().add(first).cast()) },
                    None => _mm256_setzero_si256(),
                });
                *line =
                    _mm512_permutexvar_epi16(order, _mm512_inserti64x4::<1>(_mm512_castsi256_si512(a), b));
            }
            for (column, line) in (first..columns).zip(transposed(lines)) {
                // SAFETY: the caller promises these places.
                unsafe { _mm512_storeu_si512(to.add(column * GROUP).cast(), line) };
            }
        }
    }
}
