//! Functions that are applied to every element: activations and plain mathematics, each with its backward pass.
//!
//! A function is one variant of [`Pointwise`] and one formula in `formulas.rs`. Where PyTorch has the function, values and
//! gradients are PyTorch's, at infinities too; what is NaN stays NaN. Formulas are chosen so that no large finite x gives NaN.

pub(crate) mod formulas;

use serde::{Deserialize, Serialize};

use formulas::Formula;

use crate::elementwise::{chunks, chunks_mut};
use crate::error::{check_len, invalid};
use crate::isa::multiversion;
use crate::operand::kernels;
use crate::profile::span;
use crate::{Cpu, DType, Element, Result};

/// A function of one number. Names, parameters and defaults are PyTorch's, except where noted.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub enum Pointwise {
    /// max(0, x). Saves its output.
    Relu,
    /// x where it is positive, else slope * x: PyTorch's `leaky_relu`. Saves its output.
    LeakyRelu {
        /// Above 0 and finite, in the element type too.
        slope: f64,
    },
    /// 1 / (1 + e^-x). Saves its output.
    Sigmoid,
    /// The hyperbolic tangent. Saves its output.
    Tanh,
    /// x sigmoid(x), also called swish. Saves its input.
    Silu,
    /// x relu6(x + 3) / 6. Saves its input.
    HardSwish,
    /// alpha x + beta, at least 0 and at most 1, as ONNX defines it. Saves its output. PyTorch's is
    /// [`Pointwise::HARD_SIGMOID`].
    HardSigmoid {
        /// The slope, above 0.
        alpha: f64,
        /// The value at 0.
        beta: f64,
    },
    /// x, but at least `min` and at most `max`: PyTorch's `clamp` and `hardtanh`. The gradient is 0 at the bounds, as in PyTorch
    /// 2.15 (in earlier versions that of `clamp` passed there), and where x is NaN. Saves its output. ReLU6 is [`Pointwise::RELU6`].
    Clip {
        /// The least result; -infinity for none.
        min: f64,
        /// The largest result, not below `min`; infinity for none.
        max: f64,
    },
    /// x times the distribution function of the normal distribution. Saves its input.
    Gelu,
    /// x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2: PyTorch's `gelu` with `approximate="tanh"`. Saves its input.
    GeluTanh,
    /// x above 0, else alpha (e^x - 1). Saves its output, so the gradient's error is relative to alpha.
    Elu {
        /// 0 or more.
        alpha: f64,
    },
    /// [`Pointwise::Elu`] with a fixed alpha (1.673...), times a fixed scale (1.050...). Saves its output.
    Selu,
    /// x above 0, else alpha (e^(x / alpha) - 1). Saves its output.
    Celu {
        /// Above 0.
        alpha: f64,
    },
    /// x tanh(softplus(x)). Saves its input.
    Mish,
    /// log(1 + e^(beta x)) / beta, and x itself where beta x is above the threshold. Saves its input.
    Softplus {
        /// Above 0.
        beta: f64,
        /// From here on the function is the identity; infinity for nowhere. No threshold is needed to avoid an overflow.
        threshold: f64,
    },
    /// x / (1 + |x|). Saves its output.
    Softsign,
    /// e^x. Saves its output.
    Exp,
    /// The natural logarithm. Saves its input.
    Log,
    /// The square root. Saves its output.
    Sqrt,
    /// |x|. The gradient is dy times the sign of x, which is 0 at 0. Saves its input.
    Abs,
    /// -x. Saves nothing.
    Neg,
    /// 1 / x. Saves its output.
    Reciprocal,
    /// The error function. Saves its input.
    Erf,
}

/// What the backward pass of a function reads besides the upstream gradient. Where input and output both would do, it is the
/// output: the next operation usually keeps it anyway.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Saves {
    /// The input.
    Input,
    /// The output.
    Output,
    /// Neither the input nor the output.
    Nothing,
}

impl Pointwise {
    /// PyTorch's `hardsigmoid`: relu6(x + 3) / 6.
    pub const HARD_SIGMOID: Pointwise = Pointwise::HardSigmoid { alpha: 1.0 / 6.0, beta: 0.5 };
    /// PyTorch's `relu6`.
    pub const RELU6: Pointwise = Pointwise::Clip { min: 0.0, max: 6.0 };
    /// PyTorch's `softplus` with its default parameters.
    pub const SOFTPLUS: Pointwise = Pointwise::Softplus { beta: 1.0, threshold: 20.0 };

    const SELU_ALPHA: f64 = 1.673_263_242_354_377_2;
    const SELU_SCALE: f64 = 1.050_700_987_355_480_5;

    /// The function's name, in lower case.
    pub fn name(self) -> &'static str {
        use Pointwise as P;
        match self {
            P::Relu => "relu",
            P::LeakyRelu { .. } => "leaky_relu",
            P::Sigmoid => "sigmoid",
            P::Tanh => "tanh",
            P::Silu => "silu",
            P::HardSwish => "hardswish",
            P::HardSigmoid { .. } => "hardsigmoid",
            P::Clip { .. } => "clip",
            P::Gelu => "gelu",
            P::GeluTanh => "gelu (tanh)",
            P::Elu { .. } => "elu",
            P::Selu => "selu",
            P::Celu { .. } => "celu",
            P::Mish => "mish",
            P::Softplus { .. } => "softplus",
            P::Softsign => "softsign",
            P::Exp => "exp",
            P::Log => "log",
            P::Sqrt => "sqrt",
            P::Abs => "abs",
            P::Neg => "neg",
            P::Reciprocal => "reciprocal",
            P::Erf => "erf",
        }
    }

    /// What backward reads.
    pub fn saves(self) -> Saves {
        use Pointwise as P;
        match self {
            P::Relu | P::LeakyRelu { .. } => Saves::Output,
            P::Sigmoid | P::Tanh | P::HardSigmoid { .. } | P::Clip { .. } | P::Softsign => Saves::Output,
            P::Elu { .. } | P::Selu | P::Celu { .. } | P::Exp | P::Sqrt | P::Reciprocal => Saves::Output,
            P::Silu | P::HardSwish | P::Gelu | P::GeluTanh | P::Mish => Saves::Input,
            P::Softplus { .. } | P::Log | P::Abs | P::Erf => Saves::Input,
            P::Neg => Saves::Nothing,
        }
    }

    /// Checks that the parameters make sense as numbers of this type.
    ///
    /// # Errors
    /// If a parameter is out of the range that the variant states.
    pub fn check(self, dtype: DType) -> Result<()> {
        let finite = |value: f64| dtype.nearest(value).is_finite();
        let positive = |value: f64| finite(value) && dtype.nearest(value) > 0.0;
        let reason = match self {
            Pointwise::LeakyRelu { slope } if !positive(slope) => {
                format!("the slope must be above 0 and finite in {dtype}, not {slope}")
            }
            Pointwise::HardSigmoid { alpha, .. } if !positive(alpha) => {
                format!("alpha must be above 0 and finite in {dtype}, not {alpha}")
            }
            Pointwise::HardSigmoid { beta, .. } if !finite(beta) => {
                format!("beta must be finite in {dtype}, not {beta}")
            }
            Pointwise::Clip { min, max } if min.is_nan() || max.is_nan() => {
                format!("the bounds must be numbers, not {min} and {max}")
            }
            Pointwise::Clip { min, max } if min > max => {
                format!("the lower bound {min} is above the upper bound {max}")
            }
            Pointwise::Elu { alpha } if !(alpha >= 0.0 && finite(alpha)) => {
                format!("alpha must be 0 or more and finite in {dtype}, not {alpha}")
            }
            Pointwise::Celu { alpha } if !(positive(alpha) && finite(1.0 / alpha)) => {
                format!("alpha and 1 / alpha must be above 0 and finite in {dtype}; alpha is {alpha}")
            }
            Pointwise::Softplus { beta, .. } if !positive(beta) => {
                format!("beta must be above 0 and finite in {dtype}, not {beta}")
            }
            Pointwise::Softplus { threshold, .. } if threshold.is_nan() => {
                "the threshold must be a number, not NaN".into()
            }
            _ => return Ok(()),
        };
        Err(invalid(self.name(), reason))
    }

    /// The approximate cost of an element, in multiplications.
    fn cost(self) -> usize {
        match self {
            Pointwise::Relu | Pointwise::LeakyRelu { .. } => 1,
            Pointwise::HardSwish | Pointwise::HardSigmoid { .. } | Pointwise::Clip { .. } => 1,
            Pointwise::Abs | Pointwise::Neg => 1,
            Pointwise::Softsign | Pointwise::Sqrt | Pointwise::Reciprocal => 2,
            _ => 8,
        }
    }
}

/// Evaluates `$body` with `$formula` bound to the [`Formula`] of a [`Pointwise`], which has been checked.
macro_rules! with_formula {
    ($function:expr, $T:ident, $formula:ident => $body:expr) => {
        with_formula!(@ $function, $formula, $body;
            Relu => formulas::Relu;
            LeakyRelu { slope } => formulas::LeakyRelu { slope: $T::of(slope) };
            Sigmoid => formulas::Sigmoid;
            Tanh => formulas::Tanh;
            Silu => formulas::Silu;
            HardSwish => formulas::HardSwish;
            HardSigmoid { alpha, beta } => formulas::HardSigmoid { alpha: $T::of(alpha), beta: $T::of(beta) };
            Clip { min, max } => formulas::Clip { min: $T::of(min), max: $T::of(max) };
            Gelu => formulas::Gelu;
            GeluTanh => formulas::GeluTanh;
            Elu { alpha } => elu::<$T>(1.0, alpha, 1.0);
            Selu => elu::<$T>(Pointwise::SELU_SCALE, Pointwise::SELU_SCALE * Pointwise::SELU_ALPHA, 1.0);
            Celu { alpha } => elu::<$T>(1.0, alpha, 1.0 / alpha);
            Mish => formulas::Mish;
            Softplus { beta, threshold } => {
                formulas::Softplus { beta: $T::of(beta), threshold: $T::of(threshold) }
            };
            Softsign => formulas::Softsign;
            Exp => formulas::Exp;
            Log => formulas::Log;
            Sqrt => formulas::Sqrt;
            Abs => formulas::Abs;
            Neg => formulas::Neg;
            Reciprocal => formulas::Reciprocal;
            Erf => formulas::Erf;
        )
    };
    (@ $function:expr, $formula:ident, $body:expr; $($name:ident $({ $($field:ident),+ })? => $value:expr;)+) => {
        match $function {
            $(Pointwise::$name $({ $($field),+ })? => {
                let $formula = $value;
                $body
            })+
        }
    };
}

fn elu<T: Element>(positive: f64, negative: f64, rate: f64) -> formulas::Elu<T> {
    formulas::Elu { positive: T::of(positive), negative: T::of(negative), rate: T::of(rate) }
}

multiversion! {
    fn forward_chunk<T: Element, F: Formula<T>>(formula: F, x: &[T], y: &mut [T]) {
        for (y, &x) in y.iter_mut().zip(x) {
            *y = formula.forward(x);
        }
    }

    fn backward_chunk<T: Element, F: Formula<T>>(formula: F, saved: &[T], dy: &[T], dx: &mut [T]) {
        for ((dx, &saved), &dy) in dx.iter_mut().zip(saved).zip(dy) {
            *dx = formula.backward(saved, dy);
        }
    }

    fn backward_in_place_chunk<T: Element, F: Formula<T>>(formula: F, saved: &[T], g: &mut [T]) {
        for (g, &saved) in g.iter_mut().zip(saved) {
            *g = formula.backward(saved, *g);
        }
    }
}

kernels! {
    /// y = f(x) for every element.
    ///
    /// # Errors
    /// If the lengths differ, or a parameter makes no sense ([`Pointwise::check`]).
    pub fn pointwise<T>(cpu: &Cpu, function: Pointwise; x: &[T]; y: &mut [T]) -> Result<()> {
        span!("pointwise", x, y);
        check_len(function.name(), "y", y.len(), x.len())?;
        function.check(T::DTYPE)?;
        let (work, items) = (function.cost().saturating_mul(x.len()), chunks(x).zip(chunks_mut(y)));
        cpu.for_each(work, items, |(x, y)| {
            with_formula!(function, T, formula => forward_chunk(cpu, formula, x, y));
        });
        Ok(())
    }

    /// dx = dy f'(x) for every element. `saved` is what [`Pointwise::saves`] says; it is empty for [`Saves::Nothing`].
    ///
    /// # Errors
    /// As [`pointwise`].
    pub fn pointwise_backward<T>(cpu: &Cpu, function: Pointwise; saved: &[T], dy: &[T]; dx: &mut [T]) -> Result<()> {
        span!("pointwise backward", saved, dy, dx);
        let (operation, nothing) = (function.name(), function.saves() == Saves::Nothing);
        check_len(operation, "dx", dx.len(), dy.len())?;
        check_len(operation, "what forward saved", saved.len(), if nothing { 0 } else { dy.len() })?;
        function.check(T::DTYPE)?;
        let saved = if nothing { dy } else { saved };
        let work = function.cost().saturating_mul(dy.len());
        let items = chunks(saved).zip(chunks(dy)).zip(chunks_mut(dx));
        cpu.for_each(work, items, |((saved, dy), dx)| {
            with_formula!(function, T, formula => backward_chunk(cpu, formula, saved, dy, dx));
        });
        Ok(())
    }

    /// As [`pointwise_backward`] of a function that saves something, in place: `g` holds dy before and dx after.
    ///
    /// # Errors
    /// As [`pointwise`].
    pub fn pointwise_backward_in_place<T>(cpu: &Cpu, function: Pointwise; saved: &[T]; g: &mut [T]) -> Result<()> {
        span!("pointwise backward", saved, g, g);
        check_len(function.name(), "what forward saved", saved.len(), g.len())?;
        function.check(T::DTYPE)?;
        let (work, items) = (function.cost().saturating_mul(g.len()), chunks(saved).zip(chunks_mut(g)));
        cpu.for_each(work, items, |(saved, g)| {
            with_formula!(function, T, formula => backward_in_place_chunk(cpu, formula, saved, g));
        });
        Ok(())
    }
}
