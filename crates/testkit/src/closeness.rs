//! Comparing computed with expected numbers, stated as the condition to pass, so that NaN fails.

use std::fmt;

/// A number that converts to `f64` without loss: lets `f32` results be compared with `f64` expectations.
pub trait ToF64: Copy {
    /// The same number in double precision.
    fn to_f64(self) -> f64;
}

impl ToF64 for f32 {
    fn to_f64(self) -> f64 {
        f64::from(self)
    }
}

impl ToF64 for f64 {
    fn to_f64(self) -> f64 {
        self
    }
}

/// How far `actual` may lie from `expected`: `|actual - expected| <= atol + rtol * |expected|`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Tolerance {
    /// Absolute part; what counts where the expected value is near zero.
    pub atol: f64,
    /// Part relative to the expected value.
    pub rtol: f64,
}

/// Factor of [`Tolerance::for_sum`]; over twenty standard deviations of the rounding errors it assumes.
const SUM_SAFETY: f64 = 8.0;

impl Tolerance {
    /// Equal numbers only (`0.0` equals `-0.0`).
    pub const EXACT: Self = Self { atol: 0.0, rtol: 0.0 };

    /// Absolute and relative tolerance, in this order.
    pub const fn new(atol: f64, rtol: f64) -> Self {
        Self { atol, rtol }
    }

    /// What a sum of `terms` products of magnitude around one may be off by, where each operation rounds with machine
    /// epsilon `epsilon` (`f32::EPSILON` or `f64::EPSILON`, of the type the sum is accumulated in).
    ///
    /// Each addition rounds by at most half an epsilon of the partial sum, with a sign as good as random, so the errors
    /// add up like a random walk: the `k`-th partial sum has size `sqrt(k)` (random signs), hence the total error is
    /// about `epsilon / 2 * sqrt(1 + 2 + ... + terms)`, that is `0.35 * epsilon * terms`, for a result of size
    /// `sqrt(terms)`. Relative to that size it is `0.35 * epsilon * sqrt(terms)`; for terms of one sign the walk gives
    /// `0.29 * epsilon * sqrt(terms)`. Both parts are taken eightfold, since the worst of many outputs is compared
    /// and other summation orders (blocked, fused multiply-add) may only be better:
    /// `rtol = 8 * epsilon * sqrt(terms)` and, for outputs that cancelled, `atol = 8 * epsilon * terms`.
    ///
    /// For terms of another magnitude compare with [`check_relative_to_max`] and this tolerance's `rtol`.
    pub fn for_sum(epsilon: f64, terms: usize) -> Self {
        let terms = terms.max(1) as f64;
        Self { atol: SUM_SAFETY * epsilon * terms, rtol: SUM_SAFETY * epsilon * terms.sqrt() }
    }

    fn allowed(self, expected: f64) -> f64 {
        self.atol + self.rtol * expected.abs()
    }
}

/// Why two slices are not close.
#[derive(Clone, Debug, PartialEq)]
pub enum Mismatch {
    /// The slices cannot be compared.
    Length {
        /// Number of computed values.
        actual: usize,
        /// Number of expected values.
        expected: usize,
    },
    /// Some values are too far apart.
    Values {
        /// How many values are too far from the expected ones.
        failures: usize,
        /// How many were compared.
        total: usize,
        /// Where the error exceeds what is allowed by the largest factor; NaN exceeds everything.
        worst_index: usize,
        /// The computed value there.
        actual: f64,
        /// The expected value there.
        expected: f64,
        /// How far apart the two may have been.
        allowed: f64,
    },
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Length { actual, expected } => write!(f, "{actual} values where {expected} were expected"),
            Self::Values { failures, total, worst_index, actual, expected, allowed } => write!(
                f,
                "{failures} of {total} values differ, the worst at index {worst_index}: {actual:e} where {expected:e} \
                 was expected (error {:.3e}, allowed {allowed:.3e})",
                (actual - expected).abs(),
            ),
        }
    }
}

impl std::error::Error for Mismatch {}

/// Passes when every `|actual - expected| <= atol + rtol * |expected|`.
///
/// NaN on either side fails; infinities pass only where both sides are the same infinity.
///
/// # Errors
/// A [`Mismatch`] that counts the failing values and shows the worst.
pub fn check_close<A: ToF64, E: ToF64>(
    actual: &[A],
    expected: &[E],
    tolerance: Tolerance,
) -> Result<(), Mismatch> {
    check(actual, expected, |a, e| within(a, e, tolerance.allowed(e)), |e| tolerance.allowed(e))
}

/// [`check_close`], except that NaN passes where NaN is expected: for operations documented to propagate it.
///
/// # Errors
/// A [`Mismatch`] that counts the failing values and shows the worst.
pub fn check_close_or_both_nan<A: ToF64, E: ToF64>(
    actual: &[A],
    expected: &[E],
    tolerance: Tolerance,
) -> Result<(), Mismatch> {
    let close = |a: f64, e: f64| (a.is_nan() && e.is_nan()) || within(a, e, tolerance.allowed(e));
    check(actual, expected, close, |e| tolerance.allowed(e))
}

/// Passes when every `|actual - expected| <= rtol * max |expected|`, the maximum over the whole slice.
///
/// Right for outputs of convolutions and other long sums: an output that happens to cancel carries the rounding error
/// of its large terms, so an error relative to itself says nothing. Expected infinities and NaN do not count towards
/// the maximum; where everything expected is zero, only zeros pass.
///
/// # Errors
/// A [`Mismatch`] that counts the failing values and shows the worst.
pub fn check_relative_to_max<A: ToF64, E: ToF64>(
    actual: &[A],
    expected: &[E],
    rtol: f64,
) -> Result<(), Mismatch> {
    let largest = expected.iter().map(|e| e.to_f64().abs()).filter(|e| e.is_finite()).fold(0.0, f64::max);
    let allowed = rtol * largest;
    check(actual, expected, |a, e| within(a, e, allowed), |_| allowed)
}

/// Panics with `name` and the [`Mismatch`] unless [`check_close`] passes.
///
/// # Panics
/// When the slices are not close.
#[track_caller]
pub fn assert_close<A: ToF64, E: ToF64>(name: &str, actual: &[A], expected: &[E], tolerance: Tolerance) {
    if let Err(mismatch) = check_close(actual, expected, tolerance) {
        panic!("{name}: {mismatch}");
    }
}

/// Panics with `name` and the [`Mismatch`] unless [`check_relative_to_max`] passes.
///
/// # Panics
/// When the slices are not close.
#[track_caller]
pub fn assert_relative_to_max<A: ToF64, E: ToF64>(name: &str, actual: &[A], expected: &[E], rtol: f64) {
    if let Err(mismatch) = check_relative_to_max(actual, expected, rtol) {
        panic!("{name}: {mismatch}");
    }
}

fn within(actual: f64, expected: f64, allowed: f64) -> bool {
    // An infinite expectation would allow an infinite error, hence any finite value.
    actual == expected || (expected.is_finite() && (actual - expected).abs() <= allowed)
}

fn check<A: ToF64, E: ToF64>(
    actual: &[A],
    expected: &[E],
    close: impl Fn(f64, f64) -> bool,
    allowed: impl Fn(f64) -> f64,
) -> Result<(), Mismatch> {
    if actual.len() != expected.len() {
        return Err(Mismatch::Length { actual: actual.len(), expected: expected.len() });
    }
    let (mut failures, mut worst_index, mut worst_excess) = (0, 0, f64::NEG_INFINITY);
    for (index, (a, e)) in actual.iter().zip(expected).enumerate() {
        let (a, e) = (a.to_f64(), e.to_f64());
        if close(a, e) {
            continue;
        }
        failures += 1;
        let excess = (a - e).abs() / allowed(e).max(f64::MIN_POSITIVE);
        let excess = if excess.is_nan() { f64::INFINITY } else { excess };
        if excess > worst_excess {
            (worst_index, worst_excess) = (index, excess);
        }
    }
    if failures == 0 {
        return Ok(());
    }
    let (a, e) = (actual[worst_index].to_f64(), expected[worst_index].to_f64());
    let total = actual.len();
    Err(Mismatch::Values { failures, total, worst_index, actual: a, expected: e, allowed: allowed(e) })
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOOSE: Tolerance = Tolerance::new(1e30, 0.5);

    #[test]
    fn passes_within_and_at_the_limit() {
        let tolerance = Tolerance::new(0.25, 0.5);
        check_close(&[1.75f32, -1.75, 0.25], &[1.0, -1.0, 0.0], tolerance).unwrap();
        check_close(&[1.7501f32], &[1.0], tolerance).unwrap_err();
        check_close::<f64, f64>(&[], &[], Tolerance::EXACT).unwrap();
        check_close(&[-0.0f32], &[0.0f64], Tolerance::EXACT).unwrap();
    }

    #[test]
    fn nan_never_passes() {
        for (a, e) in [(f64::NAN, 0.0), (0.0, f64::NAN), (f64::NAN, f64::NAN), (f64::NAN, f64::INFINITY)] {
            check_close(&[a], &[e], LOOSE).unwrap_err();
            check_relative_to_max(&[a, 1.0], &[e, 1.0], 1e30).unwrap_err();
        }
        check_close(&[f32::NAN], &[0.0], Tolerance::new(f64::NAN, 0.0)).unwrap_err();
        check_close(&[1.0f32], &[0.0], Tolerance::new(f64::NAN, 0.0)).unwrap_err();
    }

    #[test]
    fn both_nan_passes_only_where_asked() {
        check_close_or_both_nan(&[f32::NAN, 1.0], &[f64::NAN, 1.0], Tolerance::EXACT).unwrap();
        check_close_or_both_nan(&[f32::NAN], &[1.0], LOOSE).unwrap_err();
        check_close_or_both_nan(&[1.0], &[f32::NAN], LOOSE).unwrap_err();
    }

    #[test]
    fn infinities_pass_only_when_equal() {
        let infinity = f64::INFINITY;
        check_close(&[f32::INFINITY, f32::NEG_INFINITY], &[infinity, -infinity], Tolerance::EXACT).unwrap();
        for (a, e) in [(1.0, infinity), (infinity, 1.0), (infinity, -infinity)] {
            check_close(&[a], &[e], LOOSE).unwrap_err();
            check_relative_to_max(&[a, 1.0], &[e, 1.0], 1e30).unwrap_err();
        }
    }

    #[test]
    fn reports_count_worst_index_and_both_values() {
        let actual = [1.0f32, 2.5, 100.5, 4.0, 0.25];
        let expected = [1.0, 2.0, 100.0, 4.0, 0.0];
        let mismatch = check_close(&actual, &expected, Tolerance::new(1e-3, 1e-3)).unwrap_err();
        assert_eq!(
            mismatch.to_string(),
            "3 of 5 values differ, the worst at index 4: 2.5e-1 where 0e0 was expected (error 2.500e-1, allowed \
             1.000e-3)"
        );
        let with_nan = check_close(&[9.0, f64::NAN], &[0.0, 0.0], Tolerance::new(1e-3, 0.0)).unwrap_err();
        assert!(matches!(with_nan, Mismatch::Values { failures: 2, worst_index: 1, .. }), "{with_nan}");
    }

    #[test]
    fn reports_both_lengths() {
        let text = check_close(&[1.0f32], &[1.0f32, 2.0], LOOSE).unwrap_err().to_string();
        assert_eq!(text, "1 values where 2 were expected");
    }

    #[test]
    fn relative_to_max_forgives_cancelled_outputs_only_up_to_the_scale() {
        check_relative_to_max(&[1e-5f32, 100.0], &[0.0, 100.0], 1e-6).unwrap();
        check_relative_to_max(&[1e-3f32, 100.0], &[0.0, 100.0], 1e-6).unwrap_err();
        check_relative_to_max(&[0.0f32], &[0.0], 0.1).unwrap();
        check_relative_to_max(&[1e-30f32], &[0.0], 0.1).unwrap_err();
    }

    #[test]
    fn sum_tolerance_covers_real_sums_without_being_generous() {
        let terms = 10_000;
        let tolerance = Tolerance::for_sum(f64::from(f32::EPSILON), terms);
        let mut largest: f64 = 0.0;
        for seed in 0..50 {
            let x: Vec<f32> = crate::normal(seed, terms, 0.0, 1.0);
            let expected: f64 = x.iter().map(|&v| f64::from(v)).sum();
            let actual: f32 = x.iter().sum();
            check_close(&[actual], &[expected], tolerance).unwrap();
            largest = largest.max((f64::from(actual) - expected).abs());
        }
        assert!(tolerance.atol < 100.0 * largest, "allowed {}, seen {largest}", tolerance.atol);
    }

    #[test]
    #[should_panic(expected = "output: 1 of 1 values differ")]
    fn assert_names_what_was_compared() {
        assert_close("output", &[1.0f32], &[2.0f64], Tolerance::EXACT);
    }
}
