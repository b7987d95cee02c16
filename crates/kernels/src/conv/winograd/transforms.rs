//! The one-dimensional transforms of F(2,3), F(4,3), F(6,3) and F(4,2), on vectors of channels.

use std::marker::PhantomData;
use std::mem::MaybeUninit;

use pulp::Simd;

use crate::conv::plan::Accuracy;

/// Most outputs of a tile in one dimension.
pub(super) const OUTPUTS: usize = 6;
/// Most points of a transform.
pub(super) const POINTS: usize = OUTPUTS + 2;

/// The minimal filtering algorithm F(m, r): m outputs of a filter of r taps from m + r - 1 products. Each product belongs to a point:
/// 0, which a filter may lack, ±a₁, ..., ±aₙ, and infinity, in this order.
pub(super) trait Filter: Copy + Send + Sync + 'static {
    /// Name of the algorithm.
    const NAME: &'static str;
    /// The revision of the algorithm.
    const REVISION: u32;
    /// The algorithm's class of accuracy.
    const ACCURACY: Accuracy = Accuracy::Standard;
    /// r.
    const TAPS: usize = 3;
    /// Whether 0 is a point.
    const ZERO: bool = true;
    /// n.
    const PAIRS: usize;
    /// a₁, ..., aₙ.
    const PAIR: [f64; 3];
    /// The place of a₁ among the points.
    const FIRST: usize = Self::ZERO as usize;
    /// Products in one dimension.
    const INPUTS: usize = Self::FIRST + 2 * Self::PAIRS + 1;
    /// m: outputs in one dimension.
    const OUTPUTS: usize = Self::INPUTS + 1 - Self::TAPS;
    /// The factors that the transforms use.
    const TABLE: Table = Table::new(Self::PAIR, Self::PAIRS, Self::ZERO);
}

/// F(2,3).
#[derive(Clone, Copy)]
pub(in crate::conv) struct F2;
/// F(4,3). ±1/√2 and ±√2 lose less to rounding than the usual ±1 and ±2.
#[derive(Clone, Copy)]
pub(in crate::conv) struct F4;
/// F(6,3).
#[derive(Clone, Copy)]
pub(in crate::conv) struct F6;
/// F(4,2). It loses half as much to rounding as F(4,3).
#[derive(Clone, Copy)]
pub(in crate::conv) struct F4Of2;

impl Filter for F2 {
    const NAME: &'static str = "winograd-2x2";
    const REVISION: u32 = 7;
    const PAIRS: usize = 1;
    const PAIR: [f64; 3] = [1.0, 0.0, 0.0];
}

impl Filter for F4 {
    const NAME: &'static str = "winograd-4x4";
    const REVISION: u32 = 7;
    const PAIRS: usize = 2;
    const PAIR: [f64; 3] = [std::f64::consts::FRAC_1_SQRT_2, std::f64::consts::SQRT_2, 0.0];
}

impl Filter for F6 {
    const NAME: &'static str = "winograd-6x6";
    const REVISION: u32 = 6;
    const ACCURACY: Accuracy = Accuracy::Relaxed;
    const PAIRS: usize = 3;
    const PAIR: [f64; 3] = [0.5, 1.0, 2.0];
}

impl Filter for F4Of2 {
    const NAME: &'static str = "winograd-4x4-2x2";
    const REVISION: u32 = 1;
    const TAPS: usize = 2;
    const ZERO: bool = false;
    const PAIRS: usize = 2;
    const PAIR: [f64; 3] = [0.5, 1.25, 0.0];
}

/// A linear map of short columns, applied to every lane. Arrays are as long as the largest needs; the rest is ignored.
///
/// Every polynomial is split into its even and odd part, which the points a and -a share. With N(x) = (x² - a₁²) ..., times x if 0 is a
/// point, the rows of Bᵀ are the coefficients of N(x) / (x - point), those of G the powers of the point over N'(point), and
/// those of A the powers of the point.
pub(super) trait Transform {
    /// Length of the column and of its image.
    const SIDES: [usize; 2];

    fn apply<S: Simd>(s: S, column: [S::f32s; POINTS]) -> [S::f32s; POINTS];

    /// Applies the map to the columns of a square, which `column` gives by number, and then to the rows.
    #[inline(always)]
    fn square<S: Simd>(
        s: S,
        column: impl Fn(usize) -> [S::f32s; POINTS],
        mut store: impl FnMut(usize, usize, S::f32s),
    ) {
        let zero = s.splat_f32s(0.0);
        // Not filled with zeros, which would take as long as the map.
        let mut half = [[MaybeUninit::uninit(); POINTS]; POINTS];
        for j in 0..Self::SIDES[0] {
            let column = Self::apply(s, column(j));
            for i in 0..Self::SIDES[1] {
                half[i][j].write(column[i]);
            }
        }
        for i in 0..Self::SIDES[1] {
            let mut row = [zero; POINTS];
            for j in 0..Self::SIDES[0] {
                // SAFETY: the loop above has written `half[i][j]` for all i below SIDES[1] and j below SIDES[0], as these are.
                row[j] = unsafe { half[i][j].assume_init() };
            }
            let row = Self::apply(s, row);
            for j in 0..Self::SIDES[1] {
                store(i, j, row[j]);
            }
        }
    }
}

/// A column of `len` vectors.
#[inline(always)]
pub(super) fn column_of<S: Simd>(s: S, len: usize, load: impl Fn(usize) -> S::f32s) -> [S::f32s; POINTS] {
    let mut column = [s.splat_f32s(0.0); POINTS];
    for i in 0..len {
        column[i] = load(i);
    }
    column
}

/// Bᵀ: from the input of a tile to its factors.
pub(super) struct Input<F>(PhantomData<F>);
/// G: from the filter to its factors.
pub(super) struct Taps<F>(PhantomData<F>);
/// Aᵀ: from the products to the outputs.
pub(super) struct Output<F>(PhantomData<F>);
/// A: from the gradient of the outputs to that of the products.
pub(super) struct OutputGradient<F>(PhantomData<F>);
/// Gᵀ: from the gradient of the filter's factors to that of the filter.
pub(super) struct TapsGradient<F>(PhantomData<F>);

impl<F: Filter> Transform for Input<F> {
    const SIDES: [usize; 2] = [F::INPUTS; 2];

    #[inline(always)]
    fn apply<S: Simd>(s: S, d: [S::f32s; POINTS]) -> [S::f32s; POINTS] {
        let (n, first) = (F::PAIRS, F::FIRST);
        let mut t = [s.splat_f32s(0.0); POINTS];
        if F::ZERO {
            t[0] = polynomial(s, &F::TABLE.zero, n + 1, |k| d[2 * k]);
        }
        for i in 0..n {
            let even = polynomial(s, &F::TABLE.others[i], n, |k| d[2 * k + first + 1]);
            let odd = polynomial(s, &F::TABLE.others[i], n, |k| d[2 * k + first]);
            [t[2 * i + first], t[2 * i + first + 1]] = plus_and_minus(s, F::PAIR[i] as f32, odd, even);
        }
        t[F::INPUTS - 1] = polynomial(s, &F::TABLE.infinity, n + 1, |k| d[2 * k + first]);
        t
    }
}

impl<F: Filter> Transform for Taps<F> {
    const SIDES: [usize; 2] = [F::TAPS, F::INPUTS];

    #[inline(always)]
    fn apply<S: Simd>(s: S, g: [S::f32s; POINTS]) -> [S::f32s; POINTS] {
        let mut t = [s.splat_f32s(0.0); POINTS];
        if F::ZERO {
            t[0] = g[0];
        }
        for i in 0..F::PAIRS {
            let [g0, g1, g2] = F::TABLE.taps[i];
            let even = s.mul_add_f32s(s.splat_f32s(g2), g[2], s.mul_f32s(s.splat_f32s(g0), g[0]));
            let pair = match F::ZERO {
                true => plus_and_minus(s, g1, g[1], even),
                // N' is odd: the factors of -a have the other sign.
                false => plus_and_minus(s, 1.0, even, s.mul_f32s(s.splat_f32s(g1), g[1])),
            };
            [t[2 * i + F::FIRST], t[2 * i + F::FIRST + 1]] = pair;
        }
        t[F::INPUTS - 1] = g[F::TAPS - 1];
        t
    }
}

impl<F: Filter> Transform for Output<F> {
    const SIDES: [usize; 2] = [F::INPUTS, F::OUTPUTS];

    #[inline(always)]
    fn apply<S: Simd>(s: S, m: [S::f32s; POINTS]) -> [S::f32s; POINTS] {
        let mut y = [s.splat_f32s(0.0); POINTS];
        for i in 0..F::PAIRS {
            let sum = s.add_f32s(m[2 * i + F::FIRST], m[2 * i + F::FIRST + 1]);
            let difference = s.sub_f32s(m[2 * i + F::FIRST], m[2 * i + F::FIRST + 1]);
            for j in 0..F::OUTPUTS {
                let term = if j % 2 == 0 { sum } else { difference };
                y[j] = s.mul_add_f32s(s.splat_f32s(F::TABLE.powers[i][j]), term, y[j]);
            }
        }
        if F::ZERO {
            y[0] = s.add_f32s(y[0], m[0]);
        }
        y[F::OUTPUTS - 1] = s.add_f32s(y[F::OUTPUTS - 1], m[F::INPUTS - 1]);
        y
    }
}

impl<F: Filter> Transform for OutputGradient<F> {
    const SIDES: [usize; 2] = [F::OUTPUTS, F::INPUTS];

    #[inline(always)]
    fn apply<S: Simd>(s: S, y: [S::f32s; POINTS]) -> [S::f32s; POINTS] {
        let n = F::OUTPUTS / 2;
        let mut t = [s.splat_f32s(0.0); POINTS];
        if F::ZERO {
            t[0] = y[0];
        }
        for i in 0..F::PAIRS {
            let even = polynomial(s, &F::TABLE.squares[i], n, |k| y[2 * k]);
            let odd = polynomial(s, &F::TABLE.squares[i], n, |k| y[2 * k + 1]);
            [t[2 * i + F::FIRST], t[2 * i + F::FIRST + 1]] = plus_and_minus(s, F::PAIR[i] as f32, odd, even);
        }
        t[F::INPUTS - 1] = y[F::OUTPUTS - 1];
        t
    }
}

impl<F: Filter> Transform for TapsGradient<F> {
    const SIDES: [usize; 2] = [F::INPUTS, F::TAPS];

    #[inline(always)]
    fn apply<S: Simd>(s: S, m: [S::f32s; POINTS]) -> [S::f32s; POINTS] {
        let mut g = [s.splat_f32s(0.0); POINTS];
        if F::ZERO {
            g[0] = m[0];
        }
        g[F::TAPS - 1] = m[F::INPUTS - 1];
        for i in 0..F::PAIRS {
            let sum = s.add_f32s(m[2 * i + F::FIRST], m[2 * i + F::FIRST + 1]);
            let difference = s.sub_f32s(m[2 * i + F::FIRST], m[2 * i + F::FIRST + 1]);
            // As in `Taps`, the factors of -a have the other sign if 0 is no point.
            let [even, odd] = if F::ZERO { [sum, difference] } else { [difference, sum] };
            for k in 0..F::TAPS {
                let term = if k % 2 == 0 { even } else { odd };
                g[k] = s.mul_add_f32s(s.splat_f32s(F::TABLE.taps[i][k]), term, g[k]);
            }
        }
        g
    }
}

/// `even + a odd` and `even - a odd`.
#[inline(always)]
fn plus_and_minus<S: Simd>(s: S, a: f32, odd: S::f32s, even: S::f32s) -> [S::f32s; 2] {
    [s.mul_add_f32s(s.splat_f32s(a), odd, even), s.mul_add_f32s(s.splat_f32s(-a), odd, even)]
}

/// The sum of `factors[k] * terms(k)` for k below `n`.
#[inline(always)]
fn polynomial<S: Simd>(s: S, factors: &[f32; 4], n: usize, terms: impl Fn(usize) -> S::f32s) -> S::f32s {
    let mut sum = s.mul_f32s(s.splat_f32s(factors[n - 1]), terms(n - 1));
    for k in 0..n - 1 {
        sum = s.mul_add_f32s(s.splat_f32s(factors[k]), terms(k), sum);
    }
    sum
}

/// Coefficients of the transforms in f32, computed in f64.
pub(super) struct Table {
    /// Coefficients of the product of all (t - a²) in t = x², over its value at 0.
    zero: [f32; 4],
    /// Coefficients of the product of all (t - a²).
    infinity: [f32; 4],
    /// Coefficients of the product of (t - a²) of the other pairs.
    others: [[f32; 4]; 3],
    /// 1, a, a² over N'(a).
    taps: [[f32; 3]; 3],
    /// aʲ.
    powers: [[f32; OUTPUTS]; 3],
    /// a²ᵏ.
    squares: [[f32; 4]; 3],
}

impl Table {
    const fn new(pair: [f64; 3], pairs: usize, with_zero: bool) -> Table {
        let mut table = Table {
            zero: [0.0; 4],
            infinity: [0.0; 4],
            others: [[0.0; 4]; 3],
            taps: [[0.0; 3]; 3],
            powers: [[0.0; OUTPUTS]; 3],
            squares: [[0.0; 4]; 3],
        };
        let all = product(pair, pairs, pairs);
        let mut i = 0;
        while i < 4 {
            table.zero[i] = (all[i] / all[0]) as f32;
            table.infinity[i] = all[i] as f32;
            i += 1;
        }
        i = 0;
        while i < pairs {
            let a = pair[i];
            let others = product(pair, pairs, i);
            let (mut power, mut value, mut k) = (1.0, 0.0, 0);
            while k < 4 {
                table.others[i][k] = others[k] as f32;
                table.squares[i][k] = power as f32;
                value += others[k] * power;
                power *= a * a;
                k += 1;
            }
            // N'(a) = 2 a (product of a² - b² of the other pairs), times a if 0 is a point.
            let scale = 1.0 / (2.0 * a * if with_zero { a } else { 1.0 } * value);
            table.taps[i] = [scale as f32, (scale * a) as f32, (scale * a * a) as f32];
            (power, k) = (1.0, 0);
            while k < OUTPUTS {
                table.powers[i][k] = power as f32;
                power *= a;
                k += 1;
            }
            i += 1;
        }
        table
    }
}

/// Coefficients of the product of (t - a²) over the pairs other than `but`, lowest first.
const fn product(pair: [f64; 3], pairs: usize, but: usize) -> [f64; 4] {
    let mut product = [1.0, 0.0, 0.0, 0.0];
    let mut i = 0;
    while i < pairs {
        if i != but {
            let square = pair[i] * pair[i];
            let mut k = 3;
            while k > 0 {
                product[k] = product[k - 1] - square * product[k];
                k -= 1;
            }
            product[0] *= -square;
        }
        i += 1;
    }
    product
}
