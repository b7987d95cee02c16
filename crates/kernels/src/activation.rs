//! Activations, the sum with an activation, and dropout, each with its backward pass.

use crate::elementwise::{chunks, chunks_mut};
use crate::error::{check_len, invalid};
use crate::isa::multiversion;
use crate::pointwise::formulas::Formula;
use crate::pointwise::{Pointwise, Saves};
use crate::profile::span;
use crate::random::{GAMMA, random_bits};
use crate::{Cpu, DType, Element, Result, Slice, SliceMut, dispatch};

/// A function that is applied after a normalisation or a sum, in the same pass over memory.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub enum Activation {
    /// No activation.
    #[default]
    Identity,
    /// max(0, y).
    Relu,
    /// y where it is positive, else slope * y: PyTorch's `leaky_relu`.
    LeakyRelu {
        /// The factor of values that are not positive. Above 0 and finite, in the element type too.
        slope: f64,
    },
    /// y, but at least `min` and at most `max`: [`Pointwise::Clip`]. ReLU6 is [`Activation::RELU6`].
    Clip {
        /// The least result; -infinity for none.
        min: f64,
        /// The largest result, not below `min`; infinity for none.
        max: f64,
    },
    /// [`Pointwise::HardSwish`]. Backward needs the input.
    HardSwish,
    /// [`Pointwise::Silu`]. Backward needs the input.
    Silu,
}

impl Activation {
    /// PyTorch's `relu6`.
    pub const RELU6: Activation = Activation::Clip { min: 0.0, max: 6.0 };

    /// The same function among those that are applied alone; `None` for the identity and the two ReLUs.
    pub fn pointwise(self) -> Option<Pointwise> {
        match self {
            Activation::Identity | Activation::Relu | Activation::LeakyRelu { .. } => None,
            Activation::Clip { min, max } => Some(Pointwise::Clip { min, max }),
            Activation::HardSwish => Some(Pointwise::HardSwish),
            Activation::Silu => Some(Pointwise::Silu),
        }
    }

    /// The activation that is this function, if there is one: the inverse of [`Activation::pointwise`].
    pub fn of(function: Pointwise) -> Option<Activation> {
        match function {
            Pointwise::Clip { min, max } => Some(Activation::Clip { min, max }),
            Pointwise::HardSwish => Some(Activation::HardSwish),
            Pointwise::Silu => Some(Activation::Silu),
            _ => None,
        }
    }

    /// Whether backward needs the input; for the others the output does as well.
    pub fn needs_input(self) -> bool {
        self.pointwise().is_some_and(|function| function.saves() == Saves::Input)
    }

    /// Checks that it can be applied to numbers of this type.
    ///
    /// # Errors
    /// If the slope of a leaky ReLU is not above 0 and finite in this type, or a bound makes no sense.
    pub fn check(self, operation: &'static str, dtype: DType) -> Result<()> {
        match self {
            Activation::LeakyRelu { slope }
                if !(dtype.nearest(slope) > 0.0 && dtype.nearest(slope).is_finite()) =>
            {
                Err(invalid(
                    operation,
                    format!("the slope must be above 0 and finite in {dtype}, not {slope}"),
                ))
            }
            _ => self.pointwise().map_or(Ok(()), |function| function.check(dtype)),
        }
    }
}

/// An [`Activation`] of numbers of type T. Each activation is a type of its own, so that loops are compiled for each of them.
///
/// NaN stays NaN, as in PyTorch. `y` of backward is the input; it may also be the output unless [`Activation::needs_input`].
pub(crate) trait Activate<T>: Copy + Send + Sync {
    fn forward(self, y: T) -> T;
    fn backward(self, y: T, dy: T) -> T;
}

#[derive(Clone, Copy)]
pub(crate) struct Identity;
#[derive(Clone, Copy)]
pub(crate) struct Relu;
/// Holds the slope.
#[derive(Clone, Copy)]
pub(crate) struct LeakyRelu<T>(pub(crate) T);

impl<T: Element> Activate<T> for Identity {
    #[inline(always)]
    fn forward(self, y: T) -> T {
        y
    }

    #[inline(always)]
    fn backward(self, _: T, dy: T) -> T {
        dy
    }
}

impl<T: Element> Activate<T> for Relu {
    #[inline(always)]
    fn forward(self, y: T) -> T {
        // -0 stays -0, as in PyTorch.
        if y < T::zero() { T::zero() } else { y }
    }

    #[inline(always)]
    fn backward(self, y: T, dy: T) -> T {
        if y <= T::zero() { T::zero() } else { dy }
    }
}

impl<T: Element> Activate<T> for LeakyRelu<T> {
    #[inline(always)]
    fn forward(self, y: T) -> T {
        if y > T::zero() { y } else { y * self.0 }
    }

    #[inline(always)]
    fn backward(self, y: T, dy: T) -> T {
        if y > T::zero() { dy } else { dy * self.0 }
    }
}

/// A pointwise function whose backward takes the input.
#[derive(Clone, Copy)]
pub(crate) struct Applied<F>(pub(crate) F);

impl<T: Element, F: Formula<T>> Activate<T> for Applied<F> {
    #[inline(always)]
    fn forward(self, y: T) -> T {
        self.0.forward(y)
    }

    #[inline(always)]
    fn backward(self, y: T, dy: T) -> T {
        self.0.backward(y, dy)
    }
}

/// Evaluates `$body` with `$act` bound to the [`Activate`] type of an [`Activation`], which has been checked.
macro_rules! with_act {
    ($activation:expr, $act:ident => $body:expr) => {
        match $activation {
            $crate::activation::Activation::Identity => {
                let $act = $crate::activation::Identity;
                $body
            }
            $crate::activation::Activation::Relu => {
                let $act = $crate::activation::Relu;
                $body
            }
            $crate::activation::Activation::LeakyRelu { slope } => {
                let $act = $crate::activation::LeakyRelu($crate::Stored::of(slope));
                $body
            }
            $crate::activation::Activation::Clip { min, max } => {
                let $act = $crate::activation::Applied($crate::pointwise::formulas::Clip {
                    min: $crate::Stored::of(min),
                    max: $crate::Stored::of(max),
                });
                $body
            }
            $crate::activation::Activation::HardSwish => {
                let $act = $crate::activation::Applied($crate::pointwise::formulas::HardSwish);
                $body
            }
            $crate::activation::Activation::Silu => {
                let $act = $crate::activation::Applied($crate::pointwise::formulas::Silu);
                $body
            }
        }
    };
}
pub(crate) use with_act;

multiversion! {
    fn activate_chunk<T: Element, A: Activate<T>>(act: A, x: &[T], y: &mut [T]) {
        for (y, &x) in y.iter_mut().zip(x) {
            *y = act.forward(x);
        }
    }

    fn add_activated_chunk<T: Element, A: Activate<T>>(residual: &[T], act: A, z: &mut [T]) {
        for (z, &residual) in z.iter_mut().zip(residual) {
            *z = act.forward(*z + residual);
        }
    }

    fn activation_backward_chunk<T: Element, A: Activate<T>>(act: A, z: &[T], dz: &[T], g: &mut [T]) {
        for ((g, &z), &dz) in g.iter_mut().zip(z).zip(dz) {
            *g = act.backward(z, dz);
        }
    }

    fn activation_backward_in_place_chunk<T: Element, A: Activate<T>>(act: A, z: &[T], g: &mut [T]) {
        for (g, &z) in g.iter_mut().zip(z) {
            *g = act.backward(z, *g);
        }
    }

    fn dropout_chunk<T: Element>(first: usize, key: u64, p: f64, x: &[T], y: &mut [T]) {
        // The probability as a threshold for 32 random bits; a p of 1 drops every element.
        let threshold = (p * 4294967296.0) as u64;
        let scale = if p < 1.0 { T::of(1.0 / (1.0 - p)) } else { T::zero() };
        for (index, (y, &x)) in y.iter_mut().zip(x).enumerate() {
            let keep = random_bits(key, (first + index) as u64) >> 32 >= threshold;
            *y = if keep { x * scale } else { T::zero() };
        }
    }
}

/// y = act(x); NaN stays NaN.
///
/// # Errors
/// If the lengths differ, or a parameter makes no sense ([`Activation::check`]).
pub fn activate(cpu: &Cpu, activation: Activation, x: Slice<'_>, y: SliceMut<'_>) -> Result<()> {
    dispatch!("activate", x.dtype(), T => typed::activate::<T>(cpu, activation, x.of()?, y.of()?))
}

/// z = act(z + residual): the end of a residual block.
///
/// # Errors
/// If the lengths differ, or a parameter makes no sense ([`Activation::check`]).
pub fn add_activated_in_place(
    cpu: &Cpu,
    residual: Slice<'_>,
    activation: Activation,
    z: SliceMut<'_>,
) -> Result<()> {
    dispatch!("add activated in place", residual.dtype(), T => typed::add_activated_in_place::<T>(cpu, residual.of()?, activation, z.of()?))
}

/// g = the gradient of the activation's input, computed from the output `z`, or from the input where
/// [`Activation::needs_input`] says so.
///
/// # Errors
/// If the lengths differ, or a parameter makes no sense ([`Activation::check`]).
pub fn activation_backward(
    cpu: &Cpu,
    activation: Activation,
    z: Slice<'_>,
    dz: Slice<'_>,
    g: SliceMut<'_>,
) -> Result<()> {
    dispatch!("activation backward", z.dtype(), T => typed::activation_backward::<T>(cpu, activation, z.of()?, dz.of()?, g.of()?))
}

/// As [`activation_backward`], in place: `g` holds dz before.
///
/// # Errors
/// As [`activation_backward`].
pub fn activation_backward_in_place(
    cpu: &Cpu,
    activation: Activation,
    z: Slice<'_>,
    g: SliceMut<'_>,
) -> Result<()> {
    dispatch!("activation backward in place", z.dtype(), T => typed::activation_backward_in_place::<T>(cpu, activation, z.of()?, g.of()?))
}

/// Inverted dropout: each element is dropped with probability `p`, the others are divided by 1 - p.
///
/// Which elements are dropped depends only on `key` and the element's index. So backward is the same function applied to
/// dy, and no mask is stored.
///
/// # Errors
/// If the lengths differ or `p` is not in [0, 1].
pub fn dropout(cpu: &Cpu, x: Slice<'_>, p: f64, key: u64, y: SliceMut<'_>) -> Result<()> {
    dispatch!("dropout", x.dtype(), T => typed::dropout::<T>(cpu, x.of()?, p, key, y.of()?))
}

/// The key whose element 0 is element `elements` of `key`. With it, dropout of a part of a tensor drops the same elements
/// as dropout of the whole.
pub fn dropout_skip(key: u64, elements: u64) -> u64 {
    key.wrapping_add(elements.wrapping_mul(GAMMA))
}

/// The functions of the outer module, for an element type that is known at compile time.
pub(crate) mod typed {
    use super::*;

    pub(crate) fn activate<T: Element>(
        cpu: &Cpu,
        activation: Activation,
        x: &[T],
        y: &mut [T],
    ) -> Result<()> {
        span!("activation", x, y);
        let operation = "activation";
        check_len(operation, "y", y.len(), x.len())?;
        activation.check(operation, T::DTYPE)?;
        let items = chunks(x).zip(chunks_mut(y));
        cpu.for_each(x.len(), items, |(x, y)| with_act!(activation, act => activate_chunk(cpu, act, x, y)));
        Ok(())
    }

    pub(crate) fn add_activated_in_place<T: Element>(
        cpu: &Cpu,
        residual: &[T],
        activation: Activation,
        z: &mut [T],
    ) -> Result<()> {
        span!("add with activation", residual, z, z);
        let operation = "add with activation";
        check_len(operation, "z", z.len(), residual.len())?;
        activation.check(operation, T::DTYPE)?;
        let items = chunks(residual).zip(chunks_mut(z));
        cpu.for_each(residual.len(), items, |(residual, z)| {
            with_act!(activation, act => add_activated_chunk(cpu, residual, act, z));
        });
        Ok(())
    }

    pub(crate) fn activation_backward<T: Element>(
        cpu: &Cpu,
        activation: Activation,
        z: &[T],
        dz: &[T],
        g: &mut [T],
    ) -> Result<()> {
        let operation = "activation backward";
        check_len(operation, "dz", dz.len(), z.len())?;
        check_len(operation, "g", g.len(), z.len())?;
        activation.check(operation, T::DTYPE)?;
        span!("activation backward", z, dz, g);
        let items = chunks(z).zip(chunks(dz)).zip(chunks_mut(g));
        cpu.for_each(z.len(), items, |((z, dz), g)| {
            with_act!(activation, act => activation_backward_chunk(cpu, act, z, dz, g));
        });
        Ok(())
    }

    pub(crate) fn activation_backward_in_place<T: Element>(
        cpu: &Cpu,
        activation: Activation,
        z: &[T],
        g: &mut [T],
    ) -> Result<()> {
        span!("activation backward", z, g, g);
        let operation = "activation backward";
        check_len(operation, "g", g.len(), z.len())?;
        activation.check(operation, T::DTYPE)?;
        cpu.for_each(z.len(), chunks(z).zip(chunks_mut(g)), |(z, g)| {
            with_act!(activation, act => activation_backward_in_place_chunk(cpu, act, z, g));
        });
        Ok(())
    }

    pub(crate) fn dropout<T: Element>(cpu: &Cpu, x: &[T], p: f64, key: u64, y: &mut [T]) -> Result<()> {
        span!("dropout", x, y);
        check_len("dropout", "y", y.len(), x.len())?;
        if !(0.0..=1.0).contains(&p) {
            return Err(invalid("dropout", format!("the probability must lie in [0, 1], not {p}")));
        }
        let first = chunks(x).scan(0, |first, chunk| {
            let this = *first;
            *first += chunk.len();
            Some(this)
        });
        let items = first.zip(chunks(x)).zip(chunks_mut(y));
        cpu.for_each(x.len(), items, |((first, x), y)| dropout_chunk(cpu, first, key, p, x, y));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::typed::{
        activate, activation_backward, activation_backward_in_place, add_activated_in_place, dropout,
    };
    use super::*;

    #[test]
    fn relu_passes_nan_and_zeroes_negatives() {
        let x = [-1.0f32, 0.0, 2.0, f32::NAN, -0.0];
        let mut y = [9.0; 5];
        let relu = |y: &mut [f32]| activate(&Cpu::single(), Activation::Relu, &x, y);
        relu(&mut y).unwrap();
        assert_eq!(&y[..3], &[0.0, 0.0, 2.0]);
        assert!(y[3].is_nan());
        assert_eq!(y[4], 0.0);
        let mut dx = [f32::NAN; 5];
        activation_backward(&Cpu::single(), Activation::Relu, &y, &[5.0; 5], &mut dx).unwrap();
        assert_eq!(dx, [0.0, 0.0, 5.0, 5.0, 0.0]);
        assert!(relu(&mut [0.0; 4]).is_err());
    }

    /// Inputs of either sign, zeros, infinities and NaN, in more than one chunk.
    fn values<T: Element>() -> Vec<T> {
        let some = [-2.5, -0.0, 0.0, 1.5, f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 1e-300, -1e-40, 7.0];
        some.iter().cycle().take(40_003).map(|&value| T::of(value)).collect()
    }

    /// The definitions, as PyTorch writes them.
    fn defined<T: Element>(activation: Activation, y: T, dy: T) -> (T, T) {
        let zero = T::zero();
        match activation {
            Activation::Identity => (y, dy),
            Activation::Relu => (if y < zero { zero } else { y }, if y <= zero { zero } else { dy }),
            Activation::LeakyRelu { slope } => {
                let slope = T::of(slope);
                (if y > zero { y } else { slope * y }, if y > zero { dy } else { slope * dy })
            }
            Activation::Clip { min, max } => {
                let (min, max) = (T::of(min), T::of(max));
                let clipped = if y < min {
                    min
                } else if y > max {
                    max
                } else {
                    y
                };
                (clipped, if y > min && y < max { dy } else { zero })
            }
            Activation::HardSwish | Activation::Silu => unreachable!("backward needs their input"),
        }
    }

    fn same<T: Element>(found: &[T], expected: impl Iterator<Item = T>) -> bool {
        // The sign of NaN does not matter.
        let bits = |value: T| if value.is_nan() { f64::NAN.to_bits() } else { value.f64().to_bits() };
        let expected: Vec<T> = expected.collect();
        found.len() == expected.len() && found.iter().zip(&expected).all(|(&a, &b)| bits(a) == bits(b))
    }

    fn follow_their_definitions<T: Element>() {
        let nan = T::of(f64::NAN);
        let (x, dz): (Vec<T>, Vec<T>) = (values(), values::<T>().into_iter().rev().collect());
        let isas = crate::Isa::available();
        let cpus =
            isas.into_iter().flat_map(|isa| [1, 3].map(|n| Cpu::new(n).unwrap().with_isa(isa).unwrap()));
        for cpu in cpus {
            for activation in [
                Activation::Identity,
                Activation::Relu,
                Activation::LeakyRelu { slope: 0.01 },
                Activation::RELU6,
            ] {
                let mut z = vec![nan; x.len()];
                activate(&cpu, activation, &x, &mut z).unwrap();
                assert!(same(&z, x.iter().map(|&x| defined(activation, x, x).0)), "{activation:?}");
                let mut g = vec![nan; x.len()];
                activation_backward(&cpu, activation, &z, &dz, &mut g).unwrap();
                // Also from the input, which has the sign of the output.
                let expected = x.iter().zip(&dz).map(|(&x, &dz)| defined(activation, x, dz).1);
                assert!(same(&g, expected), "{activation:?} backward");
                let mut in_place = dz.clone();
                activation_backward_in_place(&cpu, activation, &z, &mut in_place).unwrap();
                assert!(same(&in_place, g.iter().copied()), "{activation:?} backward in place");
                let mut sum = x.clone();
                add_activated_in_place(&cpu, &dz, activation, &mut sum).unwrap();
                let expected = x.iter().zip(&dz).map(|(&x, &dz)| defined(activation, x + dz, x).0);
                assert!(same(&sum, expected), "{activation:?} of a sum");
            }
        }
    }

    #[test]
    fn activations_follow_their_definitions() {
        follow_their_definitions::<f32>();
        follow_their_definitions::<f64>();
    }

    #[test]
    fn lengths_and_slopes_are_checked() {
        let cpu = Cpu::single();
        let (x, mut y) = ([1.0f32; 3], [7.0f32; 3]);
        for slope in [0.0, -0.1, f64::NAN, f64::INFINITY, 1e-60, 1e60] {
            let leaky = Activation::LeakyRelu { slope };
            let errors = [
                activate(&cpu, leaky, &x, &mut y),
                add_activated_in_place(&cpu, &x, leaky, &mut y),
                activation_backward(&cpu, leaky, &x, &x, &mut y),
            ];
            for error in errors {
                let error = error.unwrap_err().to_string();
                assert!(error.contains("above 0 and finite in f32"), "{error}");
            }
        }
        assert!(activate(&cpu, Activation::LeakyRelu { slope: 1e-60 }, &[1.0f64], &mut [0.0]).is_ok());
        assert!(activate(&cpu, Activation::Identity, &x[1..], &mut y).is_err());
        assert!(add_activated_in_place(&cpu, &x[1..], Activation::Relu, &mut y).is_err());
        assert!(activation_backward(&cpu, Activation::Relu, &x, &x[1..], &mut y).is_err());
        assert!(activation_backward(&cpu, Activation::Relu, &x[1..], &x[1..], &mut y).is_err());
        assert_eq!(y, [7.0; 3]);
    }

    #[test]
    fn dropout_keeps_the_mean_and_repeats_itself() {
        let x = vec![1.0f32; 100_003];
        let (mut y, mut again) = (vec![f32::NAN; x.len()], vec![f32::NAN; x.len()]);
        for p in [0.0, 0.1, 0.5, 0.9] {
            dropout(&Cpu::single(), &x, p, 7, &mut y).unwrap();
            dropout(&Cpu::new(3).unwrap().with_isa(crate::Isa::PORTABLE).unwrap(), &x, p, 7, &mut again)
                .unwrap();
            assert_eq!(y, again);
            let kept = y.iter().filter(|&&y| y != 0.0).count() as f64 / x.len() as f64;
            // Five standard deviations of a binomial share.
            let bound = 5.0 * (p * (1.0 - p) / x.len() as f64).sqrt();
            assert!((kept - (1.0 - p)).abs() <= bound, "p {p}: kept {kept}");
            assert!(y.iter().all(|&y| y == 0.0 || y == (1.0 / (1.0 - p)) as f32));
        }
        let cut = 70_001;
        dropout(&Cpu::single(), &x, 0.5, 7, &mut y).unwrap();
        let rest = &mut again[cut..];
        dropout(&Cpu::single(), &x[cut..], 0.5, dropout_skip(7, cut as u64), rest).unwrap();
        assert_eq!(y[cut..], *rest, "a part is dropped as in the whole");
        dropout(&Cpu::single(), &x, 1.0, 7, &mut y).unwrap();
        assert!(y.iter().all(|&y| y == 0.0));
        assert!(dropout(&Cpu::single(), &x, f64::NAN, 7, &mut y).is_err());
    }
}
