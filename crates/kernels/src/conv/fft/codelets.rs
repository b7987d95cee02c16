//! Fourier transforms of a few points on vectors: every lane is a transform of its own.

use pulp::Simd;

/// A complex number in every lane.
#[derive(Clone, Copy)]
pub(super) struct Complex<S: Simd> {
    pub(super) re: S::f32s,
    pub(super) im: S::f32s,
}

impl<S: Simd> Complex<S> {
    #[inline(always)]
    pub(super) fn zero(s: S) -> Self {
        Complex { re: s.splat_f32s(0.0), im: s.splat_f32s(0.0) }
    }

    #[inline(always)]
    pub(super) fn add(self, s: S, other: Self) -> Self {
        Complex { re: s.add_f32s(self.re, other.re), im: s.add_f32s(self.im, other.im) }
    }

    #[inline(always)]
    pub(super) fn sub(self, s: S, other: Self) -> Self {
        Complex { re: s.sub_f32s(self.re, other.re), im: s.sub_f32s(self.im, other.im) }
    }

    /// self + conj(other).
    #[inline(always)]
    pub(super) fn add_conjugate(self, s: S, other: Self) -> Self {
        Complex { re: s.add_f32s(self.re, other.re), im: s.sub_f32s(self.im, other.im) }
    }

    /// self - conj(other).
    #[inline(always)]
    pub(super) fn sub_conjugate(self, s: S, other: Self) -> Self {
        Complex { re: s.sub_f32s(self.re, other.re), im: s.add_f32s(self.im, other.im) }
    }

    /// self + i other.
    #[inline(always)]
    pub(super) fn add_rotated(self, s: S, other: Self) -> Self {
        Complex { re: s.sub_f32s(self.re, other.im), im: s.add_f32s(self.im, other.re) }
    }

    /// self - i other.
    #[inline(always)]
    pub(super) fn sub_rotated(self, s: S, other: Self) -> Self {
        Complex { re: s.add_f32s(self.re, other.im), im: s.sub_f32s(self.im, other.re) }
    }

    #[inline(always)]
    pub(super) fn conjugate(self, s: S) -> Self {
        Complex { re: self.re, im: s.neg_f32s(self.im) }
    }

    #[inline(always)]
    pub(super) fn scale(self, s: S, factor: f32) -> Self {
        let factor = s.splat_f32s(factor);
        Complex { re: s.mul_f32s(self.re, factor), im: s.mul_f32s(self.im, factor) }
    }

    /// i conj(self). A linear map between two swaps has its coefficients conjugated.
    #[inline(always)]
    fn swap(self) -> Self {
        Complex { re: self.im, im: self.re }
    }

    /// self * exp(-2 pi i k / n).
    #[inline(always)]
    fn times_root(self, s: S, k: usize, n: usize) -> Self {
        let [cos, sin] = ROOTS[k * (ROOTS.len() / n) % ROOTS.len()];
        match 8 * k % (8 * n) / n {
            _ if !(8 * k).is_multiple_of(n) => {
                let (cos, sin) = (s.splat_f32s(cos), s.splat_f32s(sin));
                Complex {
                    re: s.negate_mul_add_f32s(self.im, sin, s.mul_f32s(self.re, cos)),
                    im: s.mul_add_f32s(self.re, sin, s.mul_f32s(self.im, cos)),
                }
            }
            0 => self,
            2 => Complex { re: self.im, im: s.neg_f32s(self.re) },
            4 => Complex { re: s.neg_f32s(self.re), im: s.neg_f32s(self.im) },
            6 => Complex { re: s.neg_f32s(self.im), im: self.re },
            // An odd multiple of an eighth turn: cos = ± sin.
            eighth => {
                let cos = s.splat_f32s(cos);
                let (sum, difference) = (s.add_f32s(self.re, self.im), s.sub_f32s(self.im, self.re));
                match eighth {
                    1 | 5 => Complex { re: s.mul_f32s(cos, sum), im: s.mul_f32s(cos, difference) },
                    _ => Complex {
                        re: s.negate_mul_add_f32s(cos, difference, s.splat_f32s(0.0)),
                        im: s.mul_f32s(cos, sum),
                    },
                }
            }
        }
    }
}

/// exp(-2 pi i k / n) for k in 0..n, where n is the length of this table.
const ROOTS: [[f32; 2]; 64] = {
    let mut roots = [[0.0; 2]; 64];
    let mut k = 0;
    while k < roots.len() {
        // The exponential series; 60 terms reach f64's precision for arguments up to 2 pi.
        let angle = -std::f64::consts::TAU * k as f64 / roots.len() as f64;
        let (mut re, mut im, mut term, mut power) = (0.0, 0.0, 1.0, 0);
        while power < 60 {
            match power % 4 {
                0 => re += term,
                1 => im += term,
                2 => re -= term,
                _ => im -= term,
            }
            power += 1;
            term *= angle / power as f64;
        }
        roots[k] = [re as f32, im as f32];
        k += 1;
    }
    roots
};

/// Implements `Fft<N>` for the sizes N that have a transform.
pub(super) struct Codelet;

pub(super) trait Fft<const N: usize> {
    /// The unnormalised transform y[k] = sum of x[n] exp(-2 pi i k n / N); x is overwritten.
    fn fft<S: Simd>(s: S, x: &mut [Complex<S>; N], y: &mut [Complex<S>; N]);
}

impl Fft<1> for Codelet {
    #[inline(always)]
    fn fft<S: Simd>(_: S, x: &mut [Complex<S>; 1], y: &mut [Complex<S>; 1]) {
        *y = *x;
    }
}

impl Fft<2> for Codelet {
    #[inline(always)]
    fn fft<S: Simd>(s: S, x: &mut [Complex<S>; 2], y: &mut [Complex<S>; 2]) {
        *y = [x[0].add(s, x[1]), x[0].sub(s, x[1])];
    }
}

impl Fft<4> for Codelet {
    #[inline(always)]
    fn fft<S: Simd>(s: S, x: &mut [Complex<S>; 4], y: &mut [Complex<S>; 4]) {
        let [a, b, c, d] = *x;
        let (even, even_difference) = (a.add(s, c), a.sub(s, c));
        let (odd, odd_difference) = (b.add(s, d), b.sub(s, d));
        *y = [
            even.add(s, odd),
            even_difference.sub_rotated(s, odd_difference),
            even.sub(s, odd),
            even_difference.add_rotated(s, odd_difference),
        ];
    }
}

impl Fft<8> for Codelet {
    #[inline(always)]
    fn fft<S: Simd>(s: S, x: &mut [Complex<S>; 8], y: &mut [Complex<S>; 8]) {
        cooley_tukey::<S, 2, 4, 8>(s, x, y);
    }
}

impl Fft<16> for Codelet {
    #[inline(always)]
    fn fft<S: Simd>(s: S, x: &mut [Complex<S>; 16], y: &mut [Complex<S>; 16]) {
        cooley_tukey::<S, 4, 4, 16>(s, x, y);
    }
}

impl Fft<32> for Codelet {
    #[inline(always)]
    fn fft<S: Simd>(s: S, x: &mut [Complex<S>; 32], y: &mut [Complex<S>; 32]) {
        cooley_tukey::<S, 8, 4, 32>(s, x, y);
    }
}

/// Transforms N = A B points by B transforms of A points, products with roots of unity, and A transforms of B points.
#[inline(always)]
fn cooley_tukey<S: Simd, const A: usize, const B: usize, const N: usize>(
    s: S,
    x: &mut [Complex<S>; N],
    y: &mut [Complex<S>; N],
) where
    Codelet: Fft<A> + Fft<B>,
{
    let mut column = [Complex::zero(s); A];
    let mut transformed = column;
    for b in 0..B {
        for a in 0..A {
            column[a] = x[a * B + b];
        }
        Codelet::fft(s, &mut column, &mut transformed);
        for a in 0..A {
            x[a * B + b] = transformed[a].times_root(s, a * b, N);
        }
    }
    let mut row = [Complex::zero(s); B];
    let mut transformed = row;
    for a in 0..A {
        for b in 0..B {
            row[b] = x[a * B + b];
        }
        Codelet::fft(s, &mut row, &mut transformed);
        for b in 0..B {
            y[b * A + a] = transformed[b];
        }
    }
}

/// The unnormalised inverse of [`Fft::fft`].
#[inline(always)]
pub(super) fn inverse_fft<S: Simd, const N: usize>(s: S, x: &mut [Complex<S>; N], y: &mut [Complex<S>; N])
where
    Codelet: Fft<N>,
{
    for x in &mut *x {
        *x = x.swap();
    }
    Codelet::fft(s, x, y);
    for y in y {
        *y = y.swap();
    }
}

/// Twice the transform X of 2M real numbers, given as M pairs (even, odd), which are overwritten.
///
/// X[0] and X[M] are real and share the first place; X[1] to X[M - 1] follow; the rest are their conjugates.
#[inline(always)]
pub(super) fn real_fft<S: Simd, const M: usize>(s: S, pairs: &mut [Complex<S>; M], y: &mut [Complex<S>; M])
where
    Codelet: Fft<M>,
{
    Codelet::fft(s, pairs, y);
    let Complex { re, im } = y[0];
    y[0] = Complex { re: s.add_f32s(re, im), im: s.sub_f32s(re, im) }.scale(s, 2.0);
    for k in 1..M.div_ceil(2) {
        let even = y[k].add_conjugate(s, y[M - k]);
        let odd = y[k].sub_conjugate(s, y[M - k]).times_root(s, k + M / 2, 2 * M);
        y[k] = even.add(s, odd);
        y[M - k] = even.sub(s, odd).conjugate(s);
    }
    if M > 1 {
        y[M / 2] = y[M / 2].conjugate(s).scale(s, 2.0);
    }
}

/// 2M real numbers in pairs, times 2M, from the transform that [`real_fft`] describes (not doubled; overwritten).
#[inline(always)]
pub(super) fn inverse_real_fft<S: Simd, const M: usize>(
    s: S,
    x: &mut [Complex<S>; M],
    pairs: &mut [Complex<S>; M],
) where
    Codelet: Fft<M>,
{
    let Complex { re, im } = x[0];
    x[0] = Complex { re: s.add_f32s(re, im), im: s.sub_f32s(re, im) };
    for k in 1..M.div_ceil(2) {
        let even = x[k].add_conjugate(s, x[M - k]);
        let odd = x[k].sub_conjugate(s, x[M - k]).swap().times_root(s, k + M / 2, 2 * M).swap();
        x[k] = even.add(s, odd);
        x[M - k] = even.sub(s, odd).conjugate(s);
    }
    if M > 1 {
        x[M / 2] = x[M / 2].conjugate(s).scale(s, 2.0);
    }
    inverse_fft(s, x, pairs);
}
