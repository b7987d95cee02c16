//! The pointwise functions: a row and a formula each. A formula is a type of its own, so that loops are compiled for each of them.

use serde::{Deserialize, Serialize};

use super::Saves;
use crate::Element;

/// One function of numbers of type T, with its parameters.
///
/// Methods are `#[inline(always)]` and have no calls and no branches in f32, so that loops of them vectorise. A comparison is
/// written so that NaN takes the side which keeps it.
pub(crate) trait Formula<T>: Copy + Send + Sync {
    fn forward(self, x: T) -> T;

    /// The gradient of the input: dy times the derivative, which is computed from what [`super::Pointwise::saves`] says.
    fn backward(self, saved: T, dy: T) -> T;
}

// Name and parameters: the name in errors, what backward reads, the approximate cost of an element in multiplications, and
// the value of another formula's type if there is no formula of this name.
functions! { $
    /// max(0, x). Saves its output.
    Relu: "relu", Output, 1;
    /// x where it is positive, else slope * x: PyTorch's `leaky_relu`. Saves its output.
    LeakyRelu {
        /// Above 0 and finite, in the element type too.
        slope,
    }: "leaky_relu", Output, 1;
    /// 1 / (1 + e^-x). Saves its output.
    Sigmoid: "sigmoid", Output, 8;
    /// The hyperbolic tangent. Saves its output.
    Tanh: "tanh", Output, 8;
    /// x sigmoid(x), also called swish. Saves its input.
    Silu: "silu", Input, 8;
    /// x relu6(x + 3) / 6. Saves its input.
    HardSwish: "hardswish", Input, 1;
    /// alpha x + beta, at least 0 and at most 1, as ONNX defines it. Saves its output. PyTorch's is
    /// [`Pointwise::HARD_SIGMOID`].
    HardSigmoid {
        /// The slope, above 0.
        alpha,
        /// The value at 0.
        beta,
    }: "hardsigmoid", Output, 1;
    /// x, but at least `min` and at most `max`: PyTorch's `clamp` and `hardtanh`. The gradient is 0 at the bounds, as in PyTorch
    /// 2.15 (in earlier versions that of `clamp` passed there), and where x is NaN. Saves its output. ReLU6 is [`Pointwise::RELU6`].
    Clip {
        /// The least result; -infinity for none.
        min,
        /// The largest result, not below `min`; infinity for none.
        max,
    }: "clip", Output, 1;
    /// x times the distribution function of the normal distribution. Saves its input.
    Gelu: "gelu", Input, 8;
    /// x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2: PyTorch's `gelu` with `approximate="tanh"`. Saves its input.
    GeluTanh: "gelu (tanh)", Input, 8;
    /// x above 0, else alpha (e^x - 1). Saves its output, so the gradient's error is relative to alpha.
    Elu {
        /// 0 or more.
        alpha,
    }: "elu", Output, 8 => elu(1.0, alpha, 1.0);
    /// [`Pointwise::Elu`] with a fixed alpha (1.673...), times a fixed scale (1.050...). Saves its output.
    Selu: "selu", Output, 8 => elu(SELU_SCALE, SELU_SCALE * SELU_ALPHA, 1.0);
    /// x above 0, else alpha (e^(x / alpha) - 1). Saves its output.
    Celu {
        /// Above 0.
        alpha,
    }: "celu", Output, 8 => elu(1.0, alpha, 1.0 / alpha);
    /// x tanh(softplus(x)). Saves its input.
    Mish: "mish", Input, 8;
    /// log(1 + e^(beta x)) / beta, and x itself where beta x is above the threshold. Saves its input.
    Softplus {
        /// Above 0.
        beta,
        /// From here on the function is the identity; infinity for nowhere. No threshold is needed to avoid an overflow.
        threshold,
    }: "softplus", Input, 8;
    /// x / (1 + |x|). Saves its output.
    Softsign: "softsign", Output, 2;
    /// e^x. Saves its output.
    Exp: "exp", Output, 8;
    /// The natural logarithm. Saves its input.
    Log: "log", Input, 8;
    /// The square root. Saves its output.
    Sqrt: "sqrt", Output, 2;
    /// |x|. The gradient is dy times the sign of x, which is 0 at 0. Saves its input.
    Abs: "abs", Input, 1;
    /// -x. Saves nothing.
    Neg: "neg", Nothing, 1;
    /// 1 / x. Saves its output.
    Reciprocal: "reciprocal", Output, 2;
    /// The error function. Saves its input.
    Erf: "erf", Input, 8;
}

/// x itself: no activation.
#[derive(Clone, Copy)]
pub(crate) struct Identity;
/// `positive` * x above 0, else `negative` * (e^(`rate` * x) - 1): ELU, SELU and CELU.
#[derive(Clone, Copy)]
pub(crate) struct Elu<T> {
    positive: T,
    negative: T,
    rate: T,
}

pub(super) const SELU_ALPHA: f64 = 1.673_263_242_354_377_2;
pub(super) const SELU_SCALE: f64 = 1.050_700_987_355_480_5;

pub(super) fn elu<T: Element>(positive: f64, negative: f64, rate: f64) -> Elu<T> {
    Elu { positive: T::of(positive), negative: T::of(negative), rate: T::of(rate) }
}

/// x, but at least `min` and at most `max`; NaN stays NaN.
#[inline(always)]
fn clamped<T: Element>(x: T, min: T, max: T) -> T {
    let x = if x < min { min } else { x };
    if x > max { max } else { x }
}

/// sigmoid(x) and sigmoid(-x). Only e^-|x| is computed, so nothing overflows, and neither is 1 minus the other, which would
/// cancel.
#[inline(always)]
fn sigmoids<T: Element>(x: T) -> (T, T) {
    let one = T::one();
    let e = (-x.abs()).vector_exp_negative();
    let (large, small) = (one / (one + e), e / (one + e));
    if x < T::zero() { (small, large) } else { (large, small) }
}

impl<T: Element> Formula<T> for Identity {
    #[inline(always)]
    fn forward(self, x: T) -> T {
        x
    }

    #[inline(always)]
    fn backward(self, _: T, dy: T) -> T {
        dy
    }
}

impl<T: Element> Formula<T> for Relu {
    #[inline(always)]
    fn forward(self, x: T) -> T {
        // -0 stays -0, as in PyTorch.
        if x < T::zero() { T::zero() } else { x }
    }

    #[inline(always)]
    fn backward(self, y: T, dy: T) -> T {
        if y <= T::zero() { T::zero() } else { dy }
    }
}

impl<T: Element> Formula<T> for LeakyRelu<T> {
    #[inline(always)]
    fn forward(self, x: T) -> T {
        if x > T::zero() { x } else { x * self.slope }
    }

    #[inline(always)]
    fn backward(self, y: T, dy: T) -> T {
        if y > T::zero() { dy } else { dy * self.slope }
    }
}

impl<T: Element> Formula<T> for Sigmoid {
    #[inline(always)]
    fn forward(self, x: T) -> T {
        let e = (-x.abs()).vector_exp_negative();
        (if x < T::zero() { e } else { T::one() }) / (T::one() + e)
    }

    #[inline(always)]
    fn backward(self, y: T, dy: T) -> T {
        dy * (y * (T::one() - y))
    }
}

impl<T: Element> Formula<T> for Tanh {
    #[inline(always)]
    fn forward(self, x: T) -> T {
        // (1 - e^-2|x|) / (1 + e^-2|x|), accurate near 0 too.
        let m = (T::of(-2.0) * x.abs()).vector_exp_m1();
        (-m / (m + T::of(2.0))).copysign(x)
    }

    #[inline(always)]
    fn backward(self, y: T, dy: T) -> T {
        dy * (T::one() - y * y)
    }
}

impl<T: Element> Formula<T> for Silu {
    #[inline(always)]
    fn forward(self, x: T) -> T {
        let e = (-x.abs()).vector_exp_negative();
        x * (if x < T::zero() { e } else { T::one() }) / (T::one() + e)
    }

    #[inline(always)]
    fn backward(self, x: T, dy: T) -> T {
        let (one, e) = (T::one(), (-x.abs()).vector_exp_negative());
        let r = one / (one + e);
        let (s, c) = if x < T::zero() { (e * r, r) } else { (r, e * r) };
        dy * (s * (one + x * c))
    }
}

impl<T: Element> Formula<T> for HardSwish {
    #[inline(always)]
    fn forward(self, x: T) -> T {
        // The factor is at most 1, so no product overflows.
        x * (clamped(x + T::of(3.0), T::zero(), T::of(6.0)) * T::of(1.0 / 6.0))
    }

    #[inline(always)]
    fn backward(self, x: T, dy: T) -> T {
        let between = dy * (x * T::of(1.0 / 3.0) + T::of(0.5));
        let above = if x >= T::of(3.0) { dy } else { between };
        if x <= T::of(-3.0) { T::zero() } else { above }
    }
}

impl<T: Element> Formula<T> for HardSigmoid<T> {
    #[inline(always)]
    fn forward(self, x: T) -> T {
        clamped(self.alpha * x + self.beta, T::zero(), T::one())
    }

    #[inline(always)]
    fn backward(self, y: T, dy: T) -> T {
        if y > T::zero() && y < T::one() { dy * self.alpha } else { T::zero() }
    }
}

impl<T: Element> Formula<T> for Clip<T> {
    #[inline(always)]
    fn forward(self, x: T) -> T {
        clamped(x, self.min, self.max)
    }

    #[inline(always)]
    fn backward(self, y: T, dy: T) -> T {
        // Made finite, it lies within a bound at infinity, which is none; NaN does not.
        let y = clamped(y, T::min_value(), T::max_value());
        if y > self.min && y < self.max { dy } else { T::zero() }
    }
}

impl<T: Element> Formula<T> for Gelu {
    #[inline(always)]
    fn forward(self, x: T) -> T {
        x * x.vector_normal().0
    }

    #[inline(always)]
    fn backward(self, x: T, dy: T) -> T {
        let (distribution, density) = x.vector_normal();
        dy * (distribution + x * density)
    }
}

impl GeluTanh {
    /// 2 sqrt(2 / pi), because (1 + tanh(u)) / 2 = sigmoid(2 u).
    const TWICE: f64 = 1.595_769_121_605_731;
    const CUBIC: f64 = 0.044_715;

    /// x within bounds whose cube does not overflow; beyond them, the sigmoid is 0 or 1 in any case.
    #[inline(always)]
    fn bounded<T: Element>(x: T) -> T {
        clamped(x, T::of(-1e4), T::of(1e4))
    }

    #[inline(always)]
    fn argument<T: Element>(x: T) -> T {
        T::of(Self::TWICE) * x * (T::one() + T::of(Self::CUBIC) * x * x)
    }
}

impl<T: Element> Formula<T> for GeluTanh {
    #[inline(always)]
    fn forward(self, x: T) -> T {
        let argument = GeluTanh::argument(GeluTanh::bounded(x));
        let e = (-argument.abs()).vector_exp_negative();
        x * ((if x < T::zero() { e } else { T::one() }) / (T::one() + e))
    }

    #[inline(always)]
    fn backward(self, x: T, dy: T) -> T {
        let bounded = GeluTanh::bounded(x);
        let (s, c) = sigmoids(GeluTanh::argument(bounded));
        let rate = T::of(Self::TWICE) * (T::one() + T::of(3.0 * Self::CUBIC) * bounded * bounded);
        dy * (s + x * (s * c * rate))
    }
}

impl<T: Element> Formula<T> for Elu<T> {
    #[inline(always)]
    fn forward(self, x: T) -> T {
        let below = if x > T::zero() { T::zero() } else { x };
        // -0 stays -0.
        let below = (self.negative * (self.rate * below).vector_exp_m1()).copysign(x);
        if x > T::zero() { self.positive * x } else { below }
    }

    #[inline(always)]
    fn backward(self, y: T, dy: T) -> T {
        dy * if y > T::zero() { self.positive } else { (y + self.negative) * self.rate }
    }
}

/// With e = e^-|x|, tanh(softplus(x)) is n / d for n = e (e + 2), d = n + 2 below 0, and n = 1 + 2 e, d = n + 2 e^2 above.
#[inline(always)]
fn mish_ratio<T: Element>(x: T) -> (T, T, T) {
    let (one, two) = (T::one(), T::of(2.0));
    let e = (-x.abs()).vector_exp_negative();
    let negative = x < T::zero();
    let n = if negative { e * (e + two) } else { one + two * e };
    (e, n, n + two * if negative { one } else { e * e })
}

impl<T: Element> Formula<T> for Mish {
    #[inline(always)]
    fn forward(self, x: T) -> T {
        let (_, n, d) = mish_ratio(x);
        x * (n / d)
    }

    #[inline(always)]
    fn backward(self, x: T, dy: T) -> T {
        // (1 - tanh^2) sigmoid(x) is 4 e (1 + e) / d^2 below 0, 4 e^2 (1 + e) / d^2 above.
        let (e, n, d) = mish_ratio(x);
        let r = T::one() / d;
        let factor = if x < T::zero() { e } else { e * e };
        dy * (n * r + x * (T::of(4.0) * factor * (T::one() + e) * r * r))
    }
}

impl<T: Element> Formula<T> for Softplus<T> {
    #[inline(always)]
    fn forward(self, x: T) -> T {
        let z = self.beta * x;
        // Without beta, which could make a large x infinite.
        let above = if x < T::zero() { T::zero() } else { x };
        let y = above + (-z.abs()).vector_exp_negative().vector_ln_1p() / self.beta;
        if z > self.threshold { x } else { y }
    }

    #[inline(always)]
    fn backward(self, x: T, dy: T) -> T {
        let z = self.beta * x;
        let slope = Sigmoid.forward(z);
        if z > self.threshold { dy } else { dy * slope }
    }
}

impl<T: Element> Formula<T> for Softsign {
    #[inline(always)]
    fn forward(self, x: T) -> T {
        x / (T::one() + x.abs())
    }

    #[inline(always)]
    fn backward(self, y: T, dy: T) -> T {
        // 1 - |y| is 1 / (1 + |x|). As in PyTorch, where it is a quotient, an infinite dy gives NaN.
        let size = y.abs();
        let first = dy * (T::one() - size);
        first - first * size
    }
}

impl<T: Element> Formula<T> for Exp {
    #[inline(always)]
    fn forward(self, x: T) -> T {
        x.vector_exp()
    }

    #[inline(always)]
    fn backward(self, y: T, dy: T) -> T {
        dy * y
    }
}

impl<T: Element> Formula<T> for Log {
    #[inline(always)]
    fn forward(self, x: T) -> T {
        x.vector_ln()
    }

    #[inline(always)]
    fn backward(self, x: T, dy: T) -> T {
        dy / x
    }
}

impl<T: Element> Formula<T> for Sqrt {
    #[inline(always)]
    fn forward(self, x: T) -> T {
        x.sqrt()
    }

    #[inline(always)]
    fn backward(self, y: T, dy: T) -> T {
        dy / (y + y)
    }
}

impl<T: Element> Formula<T> for Abs {
    #[inline(always)]
    fn forward(self, x: T) -> T {
        x.abs()
    }

    #[inline(always)]
    fn backward(self, x: T, dy: T) -> T {
        // A product, as in PyTorch: an infinite dy gives NaN at 0.
        let sign = if x > T::zero() { T::one() } else { T::zero() };
        dy * if x < T::zero() { -T::one() } else { sign }
    }
}

impl<T: Element> Formula<T> for Neg {
    #[inline(always)]
    fn forward(self, x: T) -> T {
        -x
    }

    #[inline(always)]
    fn backward(self, _: T, dy: T) -> T {
        -dy
    }
}

impl<T: Element> Formula<T> for Reciprocal {
    #[inline(always)]
    fn forward(self, x: T) -> T {
        T::one() / x
    }

    #[inline(always)]
    fn backward(self, y: T, dy: T) -> T {
        // In this order, y^2 does not overflow where the result fits.
        -dy * y * y
    }
}

impl<T: Element> Formula<T> for Erf {
    #[inline(always)]
    fn forward(self, x: T) -> T {
        x.vector_erf()
    }

    #[inline(always)]
    fn backward(self, x: T, dy: T) -> T {
        dy * (T::of(std::f64::consts::FRAC_2_SQRT_PI) * (-(x * x)).vector_exp_negative())
    }
}
