//! Functions that are applied to every element: activations and plain mathematics, each with its backward pass.
//!
//! A function is a row and a formula in `formulas.rs`. Where PyTorch has the function, values and gradients are PyTorch's, at
//! infinities too; what is NaN stays NaN. Formulas are chosen so that no large finite x gives NaN.

/// Defines [`Pointwise`], the types of its formulas, and what tells its variants apart, of rows in `formulas.rs`.
macro_rules! functions {
    ($d:tt $(
        $(#[$doc:meta])*
        $name:ident $({ $($(#[$field_doc:meta])* $field:ident),+ $(,)? })?:
        $word:literal, $saves:ident, $cost:literal $(=> $formula:expr)?;
    )+) => {
        /// A function of one number. Names, parameters and defaults are PyTorch's, except where noted.
        #[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
        #[serde(deny_unknown_fields)]
        #[non_exhaustive]
        pub enum Pointwise {
            $($(#[$doc])* $name $({ $($(#[$field_doc])* $field: f64),+ })?,)+
        }

        impl Pointwise {
            /// The function's name, in lower case.
            pub fn name(self) -> &'static str {
                match self {
                    $(Pointwise::$name { .. } => $word,)+
                }
            }

            /// What backward reads.
            pub fn saves(self) -> Saves {
                match self {
                    $(Pointwise::$name { .. } => Saves::$saves,)+
                }
            }

            /// The approximate cost of an element, in multiplications.
            pub(super) fn cost(self) -> usize {
                match self {
                    $(Pointwise::$name { .. } => $cost,)+
                }
            }
        }

        $(functions!(@type $name $({ $($field),+ })? $(=> $formula)?);)+

        /// Evaluates `$body` with `$formula` bound to the [`Formula`] of a [`Pointwise`], which has been checked.
        macro_rules! with_formula {
            ($d function:expr, $d value:ident => $d body:expr) => {
                match $d function {
                    $(Pointwise::$name $({ $($field),+ })? => {
                        let $d value = functions!(@value $name $({ $($field),+ })? $(=> $formula)?);
                        $d body
                    })+
                }
            };
        }
        pub(super) use with_formula;
    };
    (@type $name:ident) => {
        #[derive(Clone, Copy)]
        pub(crate) struct $name;
    };
    (@type $name:ident { $($field:ident),+ }) => {
        #[derive(Clone, Copy)]
        pub(crate) struct $name<T> {
            $(pub(crate) $field: T),+
        }
    };
    (@type $name:ident $({ $($field:ident),+ })? => $formula:expr) => {};
    (@value $name:ident) => { formulas::$name };
    (@value $name:ident { $($field:ident),+ }) => { formulas::$name { $($field: $crate::Stored::of($field)),+ } };
    (@value $name:ident $({ $($field:ident),+ })? => $formula:expr) => { $formula };
}

pub(crate) mod formulas;

pub use formulas::Pointwise;
use formulas::{Formula, SELU_ALPHA, SELU_SCALE, elu, with_formula};

use crate::element::PieceOf;
use crate::elementwise::{chunks, chunks_mut};
use crate::error::{check_len, invalid};
use crate::isa::multiversion;
use crate::operand::kernels;
use crate::profile::span;
use crate::{Cpu, DType, Result, Stored};

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
}

multiversion! {
    fn forward_chunk<S: Stored, F: Formula<S::Compute>>(formula: F, x: &[S], y: &mut [S]) {
        for (y, &x) in y.iter_mut().zip(x) {
            *y = S::nearest(formula.forward(x.wide()));
        }
    }

    fn backward_chunk<S: Stored, F: Formula<S::Compute>>(formula: F, saved: &[S], dy: &[S], dx: &mut [S]) {
        for ((dx, &saved), &dy) in dx.iter_mut().zip(saved).zip(dy) {
            *dx = S::nearest(formula.backward(saved.wide(), dy.wide()));
        }
    }

    fn backward_in_place_chunk<S: Stored, F: Formula<S::Compute>>(formula: F, saved: &[S], g: &mut [S]) {
        for (g, &saved) in g.iter_mut().zip(saved) {
            *g = S::nearest(formula.backward(saved.wide(), g.wide()));
        }
    }
}

kernels! {
    /// y = f(x) for every element.
    ///
    /// # Errors
    /// If the lengths differ, or a parameter makes no sense ([`Pointwise::check`]).
    pub fn pointwise<S: Stored>(cpu: &Cpu, function: Pointwise; x: &[S]; y: &mut [S]) -> Result<()> {
        span!("pointwise", x, y);
        check_len(function.name(), "y", y.len(), x.len())?;
        function.check(S::Compute::DTYPE)?;
        let (work, items) = (function.cost().saturating_mul(x.len()), chunks(x).zip(chunks_mut(y)));
        cpu.for_each(work, items, |(x, y)| {
            with_formula!(function, formula => {
                S::Piece::write((cpu, 1), [x], y, |_, [x], y| forward_chunk(cpu, formula, x, y));
            });
        });
        Ok(())
    }

    /// dx = dy f'(x) for every element. `saved` is what [`Pointwise::saves`] says; it is empty for [`Saves::Nothing`].
    ///
    /// # Errors
    /// As [`pointwise`].
    pub fn pointwise_backward<S: Stored>(cpu: &Cpu, function: Pointwise; saved: &[S], dy: &[S]; dx: &mut [S]) -> Result<()> {
        span!("pointwise backward", saved, dy, dx);
        let (operation, nothing) = (function.name(), function.saves() == Saves::Nothing);
        check_len(operation, "dx", dx.len(), dy.len())?;
        check_len(operation, "what forward saved", saved.len(), if nothing { 0 } else { dy.len() })?;
        function.check(S::Compute::DTYPE)?;
        let saved = if nothing { dy } else { saved };
        let work = function.cost().saturating_mul(dy.len());
        let items = chunks(saved).zip(chunks(dy)).zip(chunks_mut(dx));
        cpu.for_each(work, items, |((saved, dy), dx)| {
            with_formula!(function, formula => {
                S::Piece::write((cpu, 1), [saved, dy], dx, |_, [saved, dy], dx| backward_chunk(cpu, formula, saved, dy, dx));
            });
        });
        Ok(())
    }

    /// As [`pointwise_backward`] of a function that saves something, in place: `g` holds dy before and dx after.
    ///
    /// # Errors
    /// As [`pointwise`].
    pub fn pointwise_backward_in_place<S: Stored>(cpu: &Cpu, function: Pointwise; saved: &[S]; g: &mut [S]) -> Result<()> {
        span!("pointwise backward", saved, g, g);
        check_len(function.name(), "what forward saved", saved.len(), g.len())?;
        function.check(S::Compute::DTYPE)?;
        let (work, items) = (function.cost().saturating_mul(g.len()), chunks(saved).zip(chunks_mut(g)));
        cpu.for_each(work, items, |(saved, g)| {
            with_formula!(function, formula => {
                S::Piece::update((cpu, 1), [saved], g, |_, [saved], g| backward_in_place_chunk(cpu, formula, saved, g));
            });
        });
        Ok(())
    }
}
