//! Real transforms of whole tiles: rows, then columns, one channel per lane.
//!
//! The transform of H x W real points has H W / 2 slots, numbered `column * H + row` with columns below W / 2. Each holds one
//! complex number, but slots 0 and H / 2 (see [`is_pair`]) hold two real ones. In column 0, the rows' first and middle
//! frequencies, which are both real, share a complex number. Its transform F = A + i B is split into the transforms of the
//! first frequency (A, slots 1 to H / 2 - 1) and of the middle frequency (B, slots H - 1 down to H / 2 + 1).

use pulp::{MemMask, Simd, WithSimd};

use super::codelets::{Codelet, Complex, Fft, inverse_fft, inverse_real_fft, real_fft};

/// The largest tile along an axis.
pub(super) const MAX_TILE: usize = 32;
/// Heights of tiles that there are codelets for.
pub(super) const HEIGHTS: [usize; 4] = [1, 8, 16, 32];
/// Widths of tiles that there are codelets for.
pub(super) const WIDTHS: [usize; 4] = [2, 8, 16, 32];

/// Slots of a tile's transform.
pub(super) fn slots([height, width]: [usize; 2]) -> usize {
    height * width / 2
}

/// Whether a slot holds two real numbers instead of a complex one.
pub(super) fn is_pair([height, _]: [usize; 2], slot: usize) -> bool {
    slot == 0 || slot == height / 2
}

/// The factor to multiply inverse(forward(a) * forward(b)) by: each forward transform gives twice the true values.
pub(super) fn normalisation([height, width]: [usize; 2]) -> f32 {
    0.25 / (height * width) as f32
}

/// Floats of scratch for the transform of a tile: columns of complex vectors, one more than the height, so that columns
/// do not fall into the same cache sets.
pub(super) fn scratch_len([height, width]: [usize; 2], lanes: usize) -> usize {
    width / 2 * column_len(height, lanes)
}

fn column_len(height: usize, lanes: usize) -> usize {
    (height + 1) * 2 * lanes
}

/// Where each position of a tile along one axis lies in memory; positions without a place are zero.
pub(super) type Places = [Option<usize>; MAX_TILE];

/// The points of a tile: vectors of `take` channels at `rows[i] + columns[j]`.
pub(super) struct Points<'a> {
    pub(super) data: &'a [f32],
    pub(super) rows: &'a Places,
    pub(super) columns: &'a Places,
    pub(super) take: usize,
}

/// Where the slots of a tile lie: real parts at `slot * stride + place`, imaginary parts `im` further.
#[derive(Clone, Copy)]
pub(super) struct Slots {
    pub(super) stride: usize,
    pub(super) place: usize,
    pub(super) im: usize,
}

/// The first lanes of a vector, as many as there are channels.
///
/// This does what pulp's partial loads do, without their call through a table, which costs more than a codelet's arithmetic.
#[derive(Clone, Copy)]
struct Lanes<S: Simd> {
    count: usize,
    mask: MemMask<S::m32s>,
}

impl<S: Simd> Lanes<S> {
    #[inline(always)]
    fn first(simd: S, count: usize) -> Self {
        assert!(count <= S::F32_LANES);
        Lanes { count, mask: MemMask::new(simd.mask_between_m32s(0, count as u32).mask()) }
    }

    #[inline(always)]
    fn load(self, simd: S, data: &[f32], place: usize) -> S::f32s {
        let data = &data[place..place + self.count];
        // SAFETY: the mask has `count` lanes, and they lie in `data`.
        unsafe { simd.mask_load_ptr_f32s(self.mask, data.as_ptr()) }
    }

    #[inline(always)]
    fn store(self, simd: S, data: &mut [f32], place: usize, value: S::f32s) {
        // AVX2's masked stores are slow.
        if self.count == S::F32_LANES {
            return store::<S>(data, place, value);
        }
        let data = &mut data[place..place + self.count];
        // SAFETY: the mask has `count` lanes, and they lie in `data`.
        unsafe { simd.mask_store_ptr_f32s(self.mask, data.as_mut_ptr(), value) }
    }
}

#[inline(always)]
fn load<S: Simd>(data: &[f32], place: usize) -> S::f32s {
    S::as_simd_f32s(&data[place..place + S::F32_LANES]).0[0]
}

#[inline(always)]
fn store<S: Simd>(data: &mut [f32], place: usize, value: S::f32s) {
    S::as_mut_simd_f32s(&mut data[place..place + S::F32_LANES]).0[0] = value;
}

#[inline(always)]
fn load_complex<S: Simd>(data: &[f32], place: usize, im: usize) -> Complex<S> {
    Complex { re: load::<S>(data, place), im: load::<S>(data, place + im) }
}

#[inline(always)]
fn store_complex<S: Simd>(data: &mut [f32], place: usize, im: usize, value: Complex<S>) {
    store::<S>(data, place, value.re);
    store::<S>(data, place + im, value.im);
}

/// Transforms a tile of `size` points into `output`.
#[inline(always)]
pub(super) fn forward<S: Simd>(
    simd: S,
    size: [usize; 2],
    points: &Points<'_>,
    (output, slots): (&mut [f32], Slots),
    scratch: &mut [f32],
) {
    let height = size[0];
    let scratch = &mut scratch[..scratch_len(size, S::F32_LANES)];
    match size[1] {
        2 => simd.vectorize(Rows::<1> { points, height, scratch }),
        8 => simd.vectorize(Rows::<4> { points, height, scratch }),
        16 => simd.vectorize(Rows::<8> { points, height, scratch }),
        32 => simd.vectorize(Rows::<16> { points, height, scratch }),
        width => unreachable!("no codelet for tiles {width} wide"),
    }
    match height {
        1 => simd.vectorize(Columns::<1> { scratch, output, slots }),
        8 => simd.vectorize(Columns::<8> { scratch, output, slots }),
        16 => simd.vectorize(Columns::<16> { scratch, output, slots }),
        32 => simd.vectorize(Columns::<32> { scratch, output, slots }),
        height => unreachable!("no codelet for tiles {height} high"),
    }
}

/// Transforms back and writes `take` channels of each of `rows` (a position in the tile, and its memory) at the places of
/// `columns`.
#[inline(always)]
pub(super) fn inverse<'a, S: Simd>(
    simd: S,
    size: [usize; 2],
    (input, slots): (&[f32], Slots),
    rows: impl Iterator<Item = (usize, &'a mut [f32])>,
    (columns, take): (&Places, usize),
    scratch: &mut [f32],
) {
    let [height, width] = size;
    let scratch = &mut scratch[..scratch_len(size, S::F32_LANES)];
    match height {
        1 => simd.vectorize(InverseColumns::<1> { input, slots, scratch }),
        8 => simd.vectorize(InverseColumns::<8> { input, slots, scratch }),
        16 => simd.vectorize(InverseColumns::<16> { input, slots, scratch }),
        32 => simd.vectorize(InverseColumns::<32> { input, slots, scratch }),
        height => unreachable!("no codelet for tiles {height} high"),
    }
    match width {
        2 => simd.vectorize(InverseRows::<1, _> { height, scratch, rows, columns, take }),
        8 => simd.vectorize(InverseRows::<4, _> { height, scratch, rows, columns, take }),
        16 => simd.vectorize(InverseRows::<8, _> { height, scratch, rows, columns, take }),
        32 => simd.vectorize(InverseRows::<16, _> { height, scratch, rows, columns, take }),
        width => unreachable!("no codelet for tiles {width} wide"),
    }
}

/// Real transforms of rows of 2M points into columns of scratch.
struct Rows<'a, const M: usize> {
    points: &'a Points<'a>,
    height: usize,
    scratch: &'a mut [f32],
}

impl<const M: usize> WithSimd for Rows<'_, M>
where
    Codelet: Fft<M>,
{
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Points { data, rows, columns, take } = *self.points;
        let take = Lanes::<S>::first(simd, take);
        let lanes = S::F32_LANES;
        let zero = simd.splat_f32s(0.0);
        let mut pairs = [Complex::zero(simd); M];
        let mut row = pairs;
        for i in 0..self.height {
            if let Some(start) = rows[i] {
                let point =
                    |j: usize| columns[j].map_or(zero, |column| take.load(simd, data, start + column));
                for m in 0..M {
                    pairs[m] = Complex { re: point(2 * m), im: point(2 * m + 1) };
                }
                real_fft(simd, &mut pairs, &mut row);
            } else {
                row = [Complex::zero(simd); M];
            }
            for m in 0..M {
                let place = m * column_len(self.height, lanes) + i * 2 * lanes;
                store_complex(self.scratch, place, lanes, row[m]);
            }
        }
    }
}

/// Complex transforms of the columns of H points in scratch.
struct Columns<'a, const H: usize> {
    scratch: &'a [f32],
    output: &'a mut [f32],
    slots: Slots,
}

impl<const H: usize> WithSimd for Columns<'_, H>
where
    Codelet: Fft<H>,
{
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Columns { scratch, output, slots: Slots { stride, place, im } } = self;
        let lanes = S::F32_LANES;
        let mut points = [Complex::zero(simd); H];
        let mut f = points;
        for (m, column) in scratch.chunks_exact(column_len(H, lanes)).enumerate() {
            for i in 0..H {
                points[i] = load_complex(column, i * 2 * lanes, lanes);
            }
            Codelet::fft(simd, &mut points, &mut f);
            if m == 0 {
                for k in 1..H.div_ceil(2) {
                    let (a, b) = (f[k].add_conjugate(simd, f[H - k]), f[k].sub_conjugate(simd, f[H - k]));
                    f[k] = a.scale(simd, 0.5);
                    f[H - k] = Complex::zero(simd).sub_rotated(simd, b.scale(simd, 0.5));
                }
            }
            for k in 0..H {
                store_complex(output, (m * H + k) * stride + place, im, f[k]);
            }
        }
    }
}

/// The inverse of [`Columns`].
struct InverseColumns<'a, const H: usize> {
    input: &'a [f32],
    slots: Slots,
    scratch: &'a mut [f32],
}

impl<const H: usize> WithSimd for InverseColumns<'_, H>
where
    Codelet: Fft<H>,
{
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let InverseColumns { input, slots: Slots { stride, place, im }, scratch } = self;
        let lanes = S::F32_LANES;
        let mut f = [Complex::zero(simd); H];
        let mut points = f;
        for (m, column) in scratch.chunks_exact_mut(column_len(H, lanes)).enumerate() {
            for k in 0..H {
                f[k] = load_complex(input, (m * H + k) * stride + place, im);
            }
            if m == 0 {
                for k in 1..H.div_ceil(2) {
                    let (a, b) = (f[k], f[H - k]);
                    f[k] = a.add_rotated(simd, b);
                    f[H - k] = a.sub_rotated(simd, b).conjugate(simd);
                }
            }
            inverse_fft(simd, &mut f, &mut points);
            for i in 0..H {
                store_complex(column, i * 2 * lanes, lanes, points[i]);
            }
        }
    }
}

/// The inverse of [`Rows`].
struct InverseRows<'a, const M: usize, R> {
    height: usize,
    scratch: &'a [f32],
    rows: R,
    columns: &'a Places,
    take: usize,
}

impl<'r, const M: usize, R: Iterator<Item = (usize, &'r mut [f32])>> WithSimd for InverseRows<'_, M, R>
where
    Codelet: Fft<M>,
{
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let lanes = S::F32_LANES;
        let take = Lanes::<S>::first(simd, self.take);
        let column_len = column_len(self.height, lanes);
        let mut f = [Complex::zero(simd); M];
        let mut pairs = f;
        for (i, row) in self.rows {
            for m in 0..M {
                f[m] = load_complex(self.scratch, m * column_len + i * 2 * lanes, lanes);
            }
            inverse_real_fft(simd, &mut f, &mut pairs);
            for m in 0..M {
                for (j, point) in [(2 * m, pairs[m].re), (2 * m + 1, pairs[m].im)] {
                    if let Some(column) = self.columns[j] {
                        take.store(simd, row, column, point);
                    }
                }
            }
        }
    }
}
