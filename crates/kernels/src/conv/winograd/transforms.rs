//! The one-dimensional transforms of F(2,3) and F(4,3), on vectors of channels.

use pulp::Simd;

/// Most points of a transform.
pub(super) const POINTS: usize = 6;

/// A minimal filtering algorithm F(m, 3): m outputs of a 3-tap filter from m + 2 products.
///
/// Arrays are as long as the largest algorithm needs; the rest is ignored. Two-dimensional transforms apply these to
/// the columns and then to the rows.
pub(super) trait Filter {
    /// m: outputs in one dimension.
    const OUTPUTS: usize;
    /// m + 2: products in one dimension.
    const INPUTS: usize = Self::OUTPUTS + 2;

    /// Bᵀ d: the input of a tile.
    fn input<S: Simd>(simd: S, d: [S::f32s; POINTS]) -> [S::f32s; POINTS];
    /// G g: the filter.
    fn filter<S: Simd>(simd: S, g: [S::f32s; 3]) -> [S::f32s; POINTS];
    /// Aᵀ m: the products back to outputs.
    fn output<S: Simd>(simd: S, m: [S::f32s; POINTS]) -> [S::f32s; 4];
    /// A y: the gradient of the outputs, to that of the products.
    fn output_gradient<S: Simd>(simd: S, y: [S::f32s; 4]) -> [S::f32s; POINTS];
    /// Gᵀ m: the gradient of the transformed filter, to that of the filter.
    fn filter_gradient<S: Simd>(simd: S, m: [S::f32s; POINTS]) -> [S::f32s; 3];
}

/// F(2,3) with the points 0, 1, -1, infinity.
pub(super) struct F2;

impl Filter for F2 {
    const OUTPUTS: usize = 2;

    #[inline(always)]
    fn input<S: Simd>(s: S, d: [S::f32s; POINTS]) -> [S::f32s; POINTS] {
        let zero = s.splat_f32s(0.0);
        let sub = |a, b| s.sub_f32s(a, b);
        [sub(d[0], d[2]), s.add_f32s(d[1], d[2]), sub(d[2], d[1]), sub(d[3], d[1]), zero, zero]
    }

    #[inline(always)]
    fn filter<S: Simd>(s: S, g: [S::f32s; 3]) -> [S::f32s; POINTS] {
        let (zero, half) = (s.splat_f32s(0.0), s.splat_f32s(0.5));
        let even = s.mul_f32s(half, s.add_f32s(g[0], g[2]));
        let odd = s.mul_f32s(half, g[1]);
        [g[0], s.add_f32s(even, odd), s.sub_f32s(even, odd), g[2], zero, zero]
    }

    #[inline(always)]
    fn output<S: Simd>(s: S, m: [S::f32s; POINTS]) -> [S::f32s; 4] {
        let zero = s.splat_f32s(0.0);
        let (sum, difference) = (s.add_f32s(m[1], m[2]), s.sub_f32s(m[1], m[2]));
        [s.add_f32s(m[0], sum), s.add_f32s(difference, m[3]), zero, zero]
    }

    #[inline(always)]
    fn output_gradient<S: Simd>(s: S, y: [S::f32s; 4]) -> [S::f32s; POINTS] {
        let zero = s.splat_f32s(0.0);
        [y[0], s.add_f32s(y[0], y[1]), s.sub_f32s(y[0], y[1]), y[1], zero, zero]
    }

    #[inline(always)]
    fn filter_gradient<S: Simd>(s: S, m: [S::f32s; POINTS]) -> [S::f32s; 3] {
        let half = s.splat_f32s(0.5);
        let sum = s.mul_f32s(half, s.add_f32s(m[1], m[2]));
        [s.add_f32s(m[0], sum), s.mul_f32s(half, s.sub_f32s(m[1], m[2])), s.add_f32s(sum, m[3])]
    }
}

/// F(4,3) with the points 0, ±1/√2, ±√2, infinity, which cost what the usual 0, ±1, ±2, infinity cost and lose
/// three to seven times less to rounding.
pub(super) struct F4;

const P: f32 = std::f32::consts::FRAC_1_SQRT_2;
const Q: f32 = std::f32::consts::SQRT_2;
/// 1 / (2 p² (p² - q²)) and 1 / (2 q² (q² - p²)), with p² = 1/2 and q² = 2.
const NP: f32 = -1.0 / 1.5;
const NQ: f32 = 1.0 / 6.0;

impl Filter for F4 {
    const OUTPUTS: usize = 4;

    #[inline(always)]
    fn input<S: Simd>(s: S, d: [S::f32s; POINTS]) -> [S::f32s; POINTS] {
        let (p, q) = (s.splat_f32s(P), s.splat_f32s(Q));
        let (half, two, sum) = (s.splat_f32s(-0.5), s.splat_f32s(-2.0), s.splat_f32s(-2.5));
        let fma = |a, b, c| s.mul_add_f32s(a, b, c);
        let minus = |a, b, c| s.sub_f32s(c, s.mul_f32s(a, b));
        let (even_p, odd_p) = (fma(two, d[2], d[4]), fma(two, d[1], d[3]));
        let (even_q, odd_q) = (fma(half, d[2], d[4]), fma(half, d[1], d[3]));
        [
            fma(sum, d[2], s.add_f32s(d[0], d[4])),
            fma(p, odd_p, even_p),
            minus(p, odd_p, even_p),
            fma(q, odd_q, even_q),
            minus(q, odd_q, even_q),
            fma(sum, d[3], s.add_f32s(d[1], d[5])),
        ]
    }

    #[inline(always)]
    fn filter<S: Simd>(s: S, g: [S::f32s; 3]) -> [S::f32s; POINTS] {
        let mul = |factor: f32, x| s.mul_f32s(s.splat_f32s(factor), x);
        let even_p = s.mul_add_f32s(s.splat_f32s(NP * 0.5), g[2], mul(NP, g[0]));
        let even_q = s.mul_add_f32s(s.splat_f32s(NQ * 2.0), g[2], mul(NQ, g[0]));
        let (odd_p, odd_q) = (mul(NP * P, g[1]), mul(NQ * Q, g[1]));
        [
            g[0],
            s.add_f32s(even_p, odd_p),
            s.sub_f32s(even_p, odd_p),
            s.add_f32s(even_q, odd_q),
            s.sub_f32s(even_q, odd_q),
            g[2],
        ]
    }

    #[inline(always)]
    fn output<S: Simd>(s: S, m: [S::f32s; POINTS]) -> [S::f32s; 4] {
        let (p, q) = (s.splat_f32s(P), s.splat_f32s(Q));
        let (half, two) = (s.splat_f32s(0.5), s.splat_f32s(2.0));
        let (p3, q3) = (s.splat_f32s(P * 0.5), s.splat_f32s(Q * 2.0));
        let (sum_p, difference_p) = (s.add_f32s(m[1], m[2]), s.sub_f32s(m[1], m[2]));
        let (sum_q, difference_q) = (s.add_f32s(m[3], m[4]), s.sub_f32s(m[3], m[4]));
        [
            s.add_f32s(s.add_f32s(m[0], sum_p), sum_q),
            s.mul_add_f32s(p, difference_p, s.mul_f32s(q, difference_q)),
            s.mul_add_f32s(half, sum_p, s.mul_f32s(two, sum_q)),
            s.mul_add_f32s(p3, difference_p, s.mul_add_f32s(q3, difference_q, m[5])),
        ]
    }

    #[inline(always)]
    fn output_gradient<S: Simd>(s: S, y: [S::f32s; 4]) -> [S::f32s; POINTS] {
        let (half, two) = (s.splat_f32s(0.5), s.splat_f32s(2.0));
        let (p, q) = (s.splat_f32s(P), s.splat_f32s(Q));
        let (even_p, odd_p) =
            (s.mul_add_f32s(half, y[2], y[0]), s.mul_f32s(p, s.mul_add_f32s(half, y[3], y[1])));
        let (even_q, odd_q) =
            (s.mul_add_f32s(two, y[2], y[0]), s.mul_f32s(q, s.mul_add_f32s(two, y[3], y[1])));
        [
            y[0],
            s.add_f32s(even_p, odd_p),
            s.sub_f32s(even_p, odd_p),
            s.add_f32s(even_q, odd_q),
            s.sub_f32s(even_q, odd_q),
            y[3],
        ]
    }

    #[inline(always)]
    fn filter_gradient<S: Simd>(s: S, m: [S::f32s; POINTS]) -> [S::f32s; 3] {
        let mul = |factor: f32, x| s.mul_f32s(s.splat_f32s(factor), x);
        let fma = |factor: f32, x, y| s.mul_add_f32s(s.splat_f32s(factor), x, y);
        let (sum_p, difference_p) = (s.add_f32s(m[1], m[2]), s.sub_f32s(m[1], m[2]));
        let (sum_q, difference_q) = (s.add_f32s(m[3], m[4]), s.sub_f32s(m[3], m[4]));
        [
            s.add_f32s(m[0], fma(NP, sum_p, mul(NQ, sum_q))),
            fma(NP * P, difference_p, mul(NQ * Q, difference_q)),
            fma(NP * 0.5, sum_p, fma(NQ * 2.0, sum_q, m[5])),
        ]
    }
}
