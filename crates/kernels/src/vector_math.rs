//! Elementary functions in code that compilers vectorise: f32 by polynomials, f64 by the standard library and `libm`.

/// Functions that pointwise kernels are written with. In f32 each is within a few units in the last place, and has neither
/// branches nor calls; the order of operations is fixed, so every instruction set gives the same bits. NaN stays NaN.
#[doc(hidden)]
pub trait VectorMath: Sized {
    /// e^x of an x that is at most 0, with fused multiply-adds. In f32, a result that would be subnormal is 0.
    fn vector_exp_negative(self) -> Self;

    /// e^x - 1 of an x that is at most 0, without cancellation near 0.
    fn vector_exp_m1(self) -> Self;

    /// The natural logarithm; NaN below 0.
    fn vector_ln(self) -> Self;

    /// ln(1 + x) of an x in [0, 1], accurate for small x.
    fn vector_ln_1p(self) -> Self;

    /// The error function.
    fn vector_erf(self) -> Self;

    /// The distribution function of the normal distribution, and its density. Both are accurate in the tails, where
    /// (1 + erf(x / sqrt(2))) / 2 cancels.
    fn vector_normal(self) -> (Self, Self);
}

const LN_2_HIGH: f32 = 0.693_359_4;
const LN_2_LOW: f32 = -2.121_944_4e-4;
/// ln(2) rounded to f32, minus ln(2).
const LN_2_REST: f32 = 1.904_654_2e-9;
/// Adding it rounds to a whole number, which is then in the low bits of the sum.
const ROUND: f32 = 12_582_912.0;
/// 1 / sqrt(2 pi).
const DENSITY_AT_0: f64 = 0.398_942_280_401_432_7;

/// x = n ln(2) + r with |r| <= ln(2) / 2: n as a sum with [`ROUND`], n itself, and e^r - 1 by the polynomial of Cephes' `expf`.
/// `low` is added to x after the reduction.
#[inline(always)]
fn reduced(x: f32, low: f32) -> (f32, f32, f32) {
    let sum = x * std::f32::consts::LOG2_E + ROUND;
    let n = sum - ROUND;
    let r = (x - n * LN_2_HIGH) - (n * LN_2_LOW - low);
    let mut p = 1.987_569_1e-4;
    for coefficient in [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 0.166_666_66, 0.5] {
        p = p * r + coefficient;
    }
    (sum, n, p * r * r + r)
}

/// 2^n, for n in the exponent range of f32; n is given as the sum with [`ROUND`].
#[inline(always)]
fn exponent(sum: f32) -> i32 {
    (sum.to_bits() as i32).wrapping_sub(ROUND.to_bits() as i32)
}

#[inline(always)]
fn power_of_2(n: i32) -> f32 {
    f32::from_bits((n.wrapping_add(127) as u32) << 23)
}

/// e^(x + low), where `low` is small beside x: the rest of an x that is not a f32.
#[inline(always)]
pub(crate) fn exp_of_sum(x: f32, low: f32) -> f32 {
    // Beyond these, e^x is infinite or 0 in any case. NaN passes.
    let x = if x > 90.0 { 90.0 } else { x };
    let x = if x < -110.0 { -110.0 } else { x };
    let (sum, _, p) = reduced(x, low);
    // 2^n as two factors, because n may be outside the exponent range of one.
    let n = exponent(sum);
    (p + 1.0) * power_of_2(n >> 1) * power_of_2(n.wrapping_sub(n >> 1))
}

/// e^(x + low) for x <= 0, where `low` is small beside x; 0 where that would be subnormal. It takes two thirds of the time of
/// [`exp_of_sum`].
#[inline(always)]
fn exp_of_negative_sum(x: f32, low: f32) -> f32 {
    // 2^n is 0 for this x and those below it. NaN passes.
    let x = if x < -88.0 { -88.0 } else { x };
    let sum = x.mul_add(std::f32::consts::LOG2_E, ROUND);
    let n = sum - ROUND;
    let r = n.mul_add(-std::f32::consts::LN_2, x) + n.mul_add(LN_2_REST, low);
    let mut p: f32 = 1.987_569_1e-4;
    for coefficient in [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 0.166_666_66, 0.5] {
        p = p.mul_add(r, coefficient);
    }
    p.mul_add(r * r, r + 1.0) * power_of_2(exponent(sum))
}

/// ln(1 + z) - z for 1 + z in [sqrt(1/2), sqrt(2)], by the polynomial of Cephes' `logf`.
#[inline(always)]
fn ln_1p_rest(z: f32) -> f32 {
    let mut p = 7.037_683_6e-2;
    for coefficient in [
        -0.115_146_1,
        0.116_769_984,
        -0.124_201_41,
        0.142_493_23,
        -0.166_680_57,
        0.200_007_14,
        -0.249_999_94,
        0.333_333_3,
    ] {
        p = p * z + coefficient;
    }
    let square = z * z;
    p * z * square - 0.5 * square
}

impl VectorMath for f32 {
    #[inline(always)]
    fn vector_exp_negative(self) -> f32 {
        exp_of_negative_sum(self, 0.0)
    }

    #[inline(always)]
    fn vector_exp_m1(self) -> f32 {
        // Below this, the result is -1.
        let x = if self < -40.0 { -40.0 } else { self };
        let (sum, _, p) = reduced(x, 0.0);
        let power = power_of_2(exponent(sum));
        power * p + (power - 1.0)
    }

    #[inline(always)]
    fn vector_ln(self) -> f32 {
        const SQRT_HALF: u32 = 0x3f35_04f3;
        // A subnormal number is made normal first.
        let small = self < f32::MIN_POSITIVE;
        let bits = (if small { self * 33_554_432.0 } else { self }).to_bits().wrapping_sub(SQRT_HALF);
        // x = 2^n (1 + z).
        let n = ((bits as i32) >> 23) as f32 - if small { 25.0 } else { 0.0 };
        let z = f32::from_bits((bits & 0x007f_ffff).wrapping_add(SQRT_HALF)) - 1.0;
        let y = (ln_1p_rest(z) + n * LN_2_LOW) + z + n * LN_2_HIGH;
        // Infinity and NaN are returned as they are.
        let y = if self < f32::INFINITY { y } else { self };
        let y = if self == 0.0 { f32::NEG_INFINITY } else { y };
        if self < 0.0 { f32::NAN } else { y }
    }

    #[inline(always)]
    fn vector_ln_1p(self) -> f32 {
        // Above sqrt(2) - 1: 1 + x = 2 (1 + z).
        let large = self > 0.414_213_57;
        let z = if large { 0.5 * (self - 1.0) } else { self };
        let n = if large { 1.0 } else { 0.0 };
        (ln_1p_rest(z) + n * LN_2_LOW) + z + n * LN_2_HIGH
    }

    /// Polynomials by N. Juffa: x + x p(x^2) up to about 0.93, and 1 - e^p(|x|) beyond it.
    #[inline(always)]
    fn vector_erf(self) -> f32 {
        let (a, square) = (self.abs(), self * self);
        let mut near: f32 = -5.967_617e-4;
        for coefficient in [4.991_194_2e-3, -2.676_813_5e-2, 0.112_819_925, -0.376_125_34, 0.128_379_17] {
            near = near.mul_add(square, coefficient);
        }
        let near = near.mul_add(self, self);
        // From here on the result is 1.
        let a = if a > 4.5 { 4.5 } else { a };
        let square = a * a;
        let far = a.mul_add(-1.728_534_7e-5, 3.831_972e-4);
        let mut far = far.mul_add(square, a.mul_add(-3.883_964_4e-3, 2.425_462_2e-2));
        for coefficient in [-0.106_777_88, -0.634_846_7, -0.128_717_51] {
            far = far.mul_add(a, coefficient);
        }
        let far = (1.0 - exp_of_negative_sum(far.mul_add(a, -a), 0.0)).copysign(self);
        // NaN takes the first, which keeps it.
        if a > 0.927_734_4 { far } else { near }
    }

    /// The tail beyond |x| is e^(-x^2 / 2) q p(q) with q = 1 / (1 + 0.35 |x|); p is a minimax polynomial, its relative error 3e-8.
    #[inline(always)]
    fn vector_normal(self) -> (f32, f32) {
        // Beyond this, the tail and the density are 0. NaN passes.
        let a = self.abs();
        let a = if a > 15.0 { 15.0 } else { a };
        // The square as an exact number and a rest: in the tails the rounding error of x^2 would be a large one of e^(-x^2 / 2).
        let high = f32::from_bits(a.to_bits() & 0xffff_f000);
        let e = exp_of_negative_sum(-0.5 * high * high, -0.5 * (a - high) * (a + high));
        let q = 1.0 / a.mul_add(0.35, 1.0);
        let mut p: f32 = -2.915_787_7e-2;
        for coefficient in [
            0.144_030_88,
            -0.255_838_93,
            0.159_319_61,
            -2.321_229_3e-2,
            0.105_552_48,
            0.119_821_295,
            0.139_863_52,
            0.139_621_3,
        ] {
            p = p.mul_add(q, coefficient);
        }
        let tail = e * (q * p);
        (if self > 0.0 { 1.0 - tail } else { tail }, e * DENSITY_AT_0 as f32)
    }
}

impl VectorMath for f64 {
    #[inline(always)]
    fn vector_exp_negative(self) -> f64 {
        self.exp()
    }

    #[inline(always)]
    fn vector_exp_m1(self) -> f64 {
        self.exp_m1()
    }

    #[inline(always)]
    fn vector_ln(self) -> f64 {
        self.ln()
    }

    #[inline(always)]
    fn vector_ln_1p(self) -> f64 {
        self.ln_1p()
    }

    #[inline(always)]
    fn vector_erf(self) -> f64 {
        libm::erf(self)
    }

    #[inline(always)]
    fn vector_normal(self) -> (f64, f64) {
        let distribution = 0.5 * libm::erfc(-self * std::f64::consts::FRAC_1_SQRT_2);
        (distribution, DENSITY_AT_0 * (-0.5 * self * self).exp())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every 509th f32 in the range, and its ends.
    fn values(from: f32, to: f32) -> impl Iterator<Item = f32> {
        let all = (0..=u32::MAX).step_by(509).map(f32::from_bits);
        all.chain([from, to]).filter(move |x| (from..=to).contains(x))
    }

    /// Checks that f32 and f64 differ by at most this many units in the last place of the result.
    fn check(name: &str, [from, to]: [f32; 2], units: f64, found: fn(f32) -> f32, exact: fn(f64) -> f64) {
        let mut worst = (0.0, 0.0);
        for x in values(from, to) {
            let (found, exact) = (f64::from(found(x)), exact(f64::from(x)));
            // The distance between neighbouring f32 at this size; below 2^-126, the distance at 2^-126.
            let unit = (exact.abs().max(f64::from(f32::MIN_POSITIVE)).log2().floor() - 23.0).exp2();
            let error = (found - exact).abs() / unit;
            assert!(!error.is_nan(), "{name}({x:e}): {found:e}, {exact:e}");
            if error > worst.0 {
                worst = (error, x);
            }
        }
        assert!(worst.0 <= units, "{name}: {} units at {:e}", worst.0, worst.1);
    }

    #[test]
    fn single_precision_is_within_a_few_units_in_the_last_place() {
        check("exp_m1", [-1e30, 0.0], 3.0, VectorMath::vector_exp_m1, f64::exp_m1);
        check("ln", [1e-45, f32::MAX], 2.0, VectorMath::vector_ln, f64::ln);
        check("ln_1p", [0.0, 1.0], 2.0, VectorMath::vector_ln_1p, f64::ln_1p);
        check("erf", [-1e30, 1e30], 2.0, VectorMath::vector_erf, libm::erf);
        let distribution = |x: f64| 0.5 * libm::erfc(-x / 2f64.sqrt());
        check("normal", [-13.0, 1e30], 10.0, |x| x.vector_normal().0, distribution);
        let density = |x: f64| DENSITY_AT_0 * (-0.5 * x * x).exp();
        check("density", [-13.0, 13.0], 4.0, |x| x.vector_normal().1, density);
    }

    #[test]
    fn special_values() {
        let infinity = f32::INFINITY;
        assert_eq!([0.0, -infinity].map(f32::vector_exp_m1), [0.0, -1.0]);
        assert_eq!(
            [0.0, -0.0, infinity, 1.0].map(f32::vector_ln),
            [f32::NEG_INFINITY, f32::NEG_INFINITY, infinity, 0.0]
        );
        assert!([-1.0, -1e-40, -infinity, f32::NAN].iter().all(|x| x.vector_ln().is_nan()));
        assert_eq!([0.0, 1e-30].map(f32::vector_ln_1p), [0.0, 1e-30]);
        assert_eq!([infinity, -infinity, 0.0].map(f32::vector_erf), [1.0, -1.0, 0.0]);
        assert!(f32::vector_erf(-0.0).is_sign_negative());
        for (x, expected) in [(infinity, 1.0), (-infinity, 0.0), (f32::MIN, 0.0)] {
            assert_eq!(x.vector_normal(), (expected, 0.0));
        }
        let nan = f32::NAN;
        let both = nan.vector_normal();
        assert!(
            [nan.vector_exp_m1(), nan.vector_ln_1p(), nan.vector_erf(), both.0, both.1]
                .iter()
                .all(|y| y.is_nan())
        );
    }
}
