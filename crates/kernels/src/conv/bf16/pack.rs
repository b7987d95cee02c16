//! Pairs of numbers: the order of the second factor of a product, and transposed rows for the first.

use std::ops::Range;

use half::bf16;

use super::unit::{GROUP, NOWHERE, ROWS, SIDE};

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

/// Positions of a line, of which those `inside` are pixels, and the others zeros.
#[derive(Clone)]
pub(super) struct Line<'a> {
    /// The pixels, from the first one inside on, each `step` elements after the one before it.
    pub(super) pixels: &'a [bf16],
    pub(super) step: usize,
    pub(super) inside: Range<usize>,
    /// Elements of a pixel that are meant.
    pub(super) count: usize,
}

impl Line<'_> {
    /// Where a position's elements begin in the pixels.
    #[inline]
    fn place(&self, position: usize) -> Option<usize> {
        self.inside.contains(&position).then(|| (position - self.inside.start) * self.step)
    }
}

/// Writes the positions of a line from `first` on in pairs: [pair][element][position], with `columns` elements, of which those from the
/// line's `count` on are not told.
pub(super) fn pair_positions(line: &Line<'_>, first: usize, columns: usize, to: &mut [bf16]) {
    let last = line.inside.len().saturating_sub(1) * line.step;
    assert!(line.count <= columns && (line.inside.is_empty() || last + line.count <= line.pixels.len()));
    #[cfg(target_arch = "x86_64")]
    if super::unit::x86::has_dot() {
        // SAFETY: the machine has AVX512-BF16, and the lengths are as asserted.
        return unsafe { x86::pair_positions(line, first, columns, to) };
    }
    for (pair, to) in to.chunks_exact_mut(2 * columns).enumerate() {
        for (element, to) in to.chunks_exact_mut(2).enumerate().take(line.count) {
            for (position, to) in (first + 2 * pair..).zip(to) {
                *to = line.place(position).map_or(bf16::ZERO, |place| line.pixels[place + element]);
            }
        }
    }
}

/// Writes `count` elements from each of [`GROUP`] places on, transposed: [element][place]. What is [`NOWHERE`] is zeros.
pub(super) fn transpose_places(from: &[bf16], places: &[usize; GROUP], count: usize, to: &mut [bf16]) {
    assert!(count * GROUP <= to.len() && count <= from.len());
    assert!(places.iter().all(|&place| place <= from.len() - count || place == NOWHERE));
    #[cfg(target_arch = "x86_64")]
    if super::unit::x86::has_dot() {
        // SAFETY: the machine has AVX512-BF16, and the lengths are as asserted.
        return unsafe { x86::transpose_places(from.as_ptr(), places, count, to.as_mut_ptr()) };
    }
    for (element, to) in to.chunks_exact_mut(GROUP).enumerate().take(count) {
        for (to, &place) in to.iter_mut().zip(places) {
            *to = if place == NOWHERE { bf16::ZERO } else { from[place + element] };
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

    use super::{GROUP, Line, NOWHERE, ROWS, SIDE, Weights};

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

    /// Writes `count` elements of a pair of pixels; an absent one is zeros.
    ///
    /// # Safety
    /// The machine has AVX512-BF16, pixels have `count` elements, and `to` has room for as many pairs.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn pair([even, odd]: [Option<*const bf16>; 2], count: usize, order: __m512i, to: *mut bf16) {
        for first in (0..count).step_by(ROWS) {
            let mask = mask(count - first);
            let [mut low, mut high] = [_mm256_setzero_si256(); 2];
            // SAFETY: the mask leaves elements below `count`, and as many pairs of `to`, as the caller promises.
            unsafe {
                if let Some(pixel) = even {
                    low = _mm256_maskz_loadu_epi16(mask, pixel.add(first).cast());
                }
                if let Some(pixel) = odd {
                    high = _mm256_maskz_loadu_epi16(mask, pixel.add(first).cast());
                }
                let both = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), high);
                _mm512_mask_storeu_epi32(
                    to.add(2 * first).cast(),
                    mask,
                    _mm512_permutexvar_epi16(order, both),
                );
            }
        }
    }

    /// # Safety
    /// The machine has AVX512-BF16, the pixels of the line inside have `count` elements, and `columns` are no fewer.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    pub(super) unsafe fn pair_positions(line: &Line<'_>, first: usize, columns: usize, to: &mut [bf16]) {
        let (order, from) = (interleaved(), line.pixels.as_ptr());
        let pairs = to.len() / (2 * columns);
        // Pairs whose positions are both inside.
        let end = (line.inside.end.saturating_sub(first) / 2).min(pairs);
        let begin = line.inside.start.saturating_sub(first).div_ceil(2).min(end);
        for index in (0..begin).chain(end..pairs) {
            let position = first + 2 * index;
            let (even, odd) = (line.place(position), line.place(position + 1));
            let to = &mut to[index * 2 * columns..][..2 * columns];
            // SAFETY: pixels of the line inside, and `to` has `columns` pairs.
            unsafe {
                let pixels = [even, odd].map(|place| place.map(|place| from.wrapping_add(place)));
                pair(pixels, line.count, order, to.as_mut_ptr());
            }
        }
        if begin == end {
            return;
        }
        let mut even = from.wrapping_add((first + 2 * begin - line.inside.start) * line.step);
        for to in to[begin * 2 * columns..end * 2 * columns].chunks_exact_mut(2 * columns) {
            let odd = even.wrapping_add(line.step);
            let whole = line.count / ROWS * ROWS;
            // SAFETY: both pixels are inside, and `to` has `columns` pairs.
            unsafe {
                for element in (0..whole).step_by(ROWS) {
                    let low = _mm256_loadu_si256(even.add(element).cast());
                    let high = _mm256_loadu_si256(odd.add(element).cast());
                    let both = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), high);
                    let to = to.as_mut_ptr().add(2 * element).cast();
                    _mm512_storeu_si512(to, _mm512_permutexvar_epi16(order, both));
                }
                if whole < line.count {
                    let pixels = [Some(even.add(whole)), Some(odd.add(whole))];
                    pair(pixels, line.count - whole, order, to.as_mut_ptr().add(2 * whole));
                }
            }
            even = even.wrapping_add(2 * line.step);
        }
    }

    /// # Safety
    /// The machine has AVX512-BF16, `count` elements can be read from each place on that is not nowhere, and `to` has room for all.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    pub(super) unsafe fn transpose_places(
        from: *const bf16,
        places: &[usize; GROUP],
        count: usize,
        to: *mut bf16,
    ) {
        let order = interleaved();
        for first in (0..count).step_by(ROWS) {
            let mask = mask(count - first);
            let mut lines = [_mm512_setzero_si512(); ROWS];
            for (line, places) in lines.iter_mut().zip(places.as_chunks::<2>().0) {
                let [mut low, mut high] = [_mm256_setzero_si256(); 2];
                // SAFETY: the mask leaves elements below `count`, which can be read from these places on.
                unsafe {
                    if places[0] != NOWHERE {
                        low = _mm256_maskz_loadu_epi16(mask, from.add(places[0] + first).cast());
                    }
                    if places[1] != NOWHERE {
                        high = _mm256_maskz_loadu_epi16(mask, from.add(places[1] + first).cast());
                    }
                }
                let both = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), high);
                *line = _mm512_permutexvar_epi16(order, both);
            }
            for (element, line) in (first..count).zip(transposed(lines)) {
                // SAFETY: the caller promises room for `count` groups.
                unsafe { _mm512_storeu_si512(to.add(element * GROUP).cast(), line) };
            }
        }
    }
}
