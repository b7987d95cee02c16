//! Activations: the functions that may follow a normalisation or a sum in the same pass over memory.

use crate::element::PieceOf;
use crate::elementwise::{chunks, chunks_mut};
use crate::error::check_len;
use crate::isa::multiversion;
use crate::pointwise::formulas::Formula;
use crate::pointwise::{Pointwise, Saves};
use crate::profile::span;
use crate::{Cpu, DType, Result, Slice, SliceMut, Stored, dispatch_stored};

/// Defines [`Activation`] and what tells its variants apart. Each is a variant of [`Pointwise`] and a type in
/// `pointwise/formulas.rs`, of the same name and with the same fields, whose backward takes the input of the function as well as what
/// [`Pointwise::saves`] says.
macro_rules! activations {
    ($d:tt $($(#[$doc:meta])* $name:ident $({ $($(#[$field_doc:meta])* $field:ident),+ $(,)? })?;)*) => {
        /// A function that is applied after a normalisation or a sum, in the same pass over memory.
        #[derive(Debug, Clone, Copy, PartialEq, Default)]
        pub enum Activation {
            /// No activation.
            #[default]
            Identity,
            $($(#[$doc])* $name $({ $($(#[$field_doc])* $field: f64),+ })?,)*
        }

        impl Activation {
            /// The same function among those that are applied alone; `None` for the identity.
            pub fn pointwise(self) -> Option<Pointwise> {
                match self {
                    Activation::Identity => None,
                    $(Activation::$name $({ $($field),+ })? => Some(Pointwise::$name $({ $($field),+ })?),)*
                }
            }

            /// The activation that is this function, if there is one: the inverse of [`Activation::pointwise`].
            pub fn of(function: Pointwise) -> Option<Activation> {
                match function {
                    $(Pointwise::$name $({ $($field),+ })? => Some(Activation::$name $({ $($field),+ })?),)*
                    _ => None,
                }
            }
        }

        /// Evaluates `$body` with `$formula` bound to the [`Formula`] of an [`Activation`], which has been checked.
        macro_rules! with_activation {
            ($d activation:expr, $d formula:ident => $d body:expr) => {
                match $d activation {
                    $crate::activation::Activation::Identity => {
                        let $d formula = $crate::pointwise::formulas::Identity;
                        $d body
                    }
                    $($crate::activation::Activation::$name $({ $($field),+ })? => {
                        let $d formula = $crate::pointwise::formulas::$name $({
                            $($field: $crate::Stored::of($field)),+
                        })?;
                        $d body
                    })*
                }
            };
        }
        pub(crate) use with_activation;
    };
}

activations! { $
    /// [`Pointwise::Relu`].
    Relu;
    /// [`Pointwise::LeakyRelu`].
    LeakyRelu {
        /// The factor of values that are not positive.
        slope,
    };
    /// [`Pointwise::Clip`]. ReLU6 is [`Activation::RELU6`].
    Clip {
        /// The least result; -infinity for none.
        min,
        /// The largest result, not below `min`; infinity for none.
        max,
    };
    /// [`Pointwise::HardSwish`].
    HardSwish;
    /// [`Pointwise::Silu`].
    Silu;
}

impl Activation {
    /// PyTorch's `relu6`.
    pub const RELU6: Activation = Activation::Clip { min: 0.0, max: 6.0 };

    /// Whether backward needs the input; for the others the output does as well.
    pub fn needs_input(self) -> bool {
        self.pointwise().is_some_and(|function| function.saves() == Saves::Input)
    }

    /// Checks that it can be applied to numbers of this type.
    ///
    /// # Errors
    /// As [`Pointwise::check`].
    pub fn check(self, dtype: DType) -> Result<()> {
        self.pointwise().map_or(Ok(()), |function| function.check(dtype))
    }
}

multiversion! {
    fn add_activated_chunk<S: Stored, F: Formula<S::Compute>>(residual: &[S], formula: F, z: &mut [S]) {
        for (z, &residual) in z.iter_mut().zip(residual) {
            *z = S::nearest(formula.forward(z.wide() + residual.wide()));
        }
    }
}

/// z = act(z + residual): the end of a residual block.
///
/// # Errors
/// If the lengths or the types differ, or a parameter makes no sense ([`Activation::check`]).
pub fn add_activated_in_place(
    cpu: &Cpu,
    residual: Slice<'_>,
    activation: Activation,
    z: SliceMut<'_>,
) -> Result<()> {
    span!("add with activation", residual, z, z);
    let operation = "add with activation";
    check_len(operation, "z", z.len(), residual.len())?;
    activation.check(z.dtype().computed_in())?;
    dispatch_stored!(z.dtype(), S => {
        let items = chunks(residual.of::<S>()?).zip(chunks_mut(z.of::<S>()?));
        cpu.for_each(residual.len(), items, |(residual, z)| {
            with_activation!(activation, formula => {
                <S as Stored>::Piece::update((cpu, 1), [residual], z, |_, [residual], z| {
                    add_activated_chunk(cpu, residual, formula, z);
                });
            });
        });
    });
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pointwise::pointwise;

    #[test]
    fn an_activation_of_a_sum_is_the_function_of_the_sum() {
        let some = [-2.5f32, -0.0, 0.0, 1.5, f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1e-30, 7.0];
        let x: Vec<f32> = some.iter().copied().cycle().take(40_003).collect();
        let residual: Vec<f32> = x.iter().rev().copied().collect();
        let leaky = Activation::LeakyRelu { slope: 0.01 };
        let all = [Activation::Relu, leaky, Activation::RELU6, Activation::HardSwish, Activation::Silu];
        for isa in crate::Isa::available() {
            let cpu = Cpu::new(3).unwrap().with_isa(isa).unwrap();
            let add = |activation, z: &mut [f32]| {
                add_activated_in_place(&cpu, (&residual).into(), activation, z.into())
            };
            let mut sum = x.clone();
            add(Activation::Identity, &mut sum).unwrap();
            assert!(
                sum.iter().zip(x.iter().zip(&residual)).all(|(s, (a, b))| s.to_bits() == (a + b).to_bits())
            );
            for activation in all {
                let (mut found, mut expected) = (x.clone(), vec![f32::NAN; x.len()]);
                add(activation, &mut found).unwrap();
                let function = activation.pointwise().unwrap();
                assert_eq!(Activation::of(function), Some(activation));
                pointwise(&cpu, function, (&sum).into(), (&mut expected).into()).unwrap();
                let same = |a: f32, b: f32| a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan();
                assert!(found.iter().zip(&expected).all(|(&a, &b)| same(a, b)), "{activation:?} {isa:?}");
            }
            assert!(add(leaky, &mut [0.0; 3]).is_err(), "lengths differ");
            assert!(add(Activation::LeakyRelu { slope: -1.0 }, &mut sum).is_err());
        }
        assert!(Activation::of(Pointwise::Exp).is_none());
    }
}
