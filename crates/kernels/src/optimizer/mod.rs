//! Optimizer steps. Each is one pass over the parameter, its gradient and its state. The formulas are PyTorch 2's.

mod adadelta;
mod adam;
mod sgd;

use std::fmt::Debug;

use serde::{Deserialize, Serialize};

use crate::elementwise::{chunks, chunks_mut};
use crate::error::{check_len, invalid};
use crate::isa::multiversion;
use crate::profile::span;
use crate::{Cpu, Element, Result, Slice, SliceMut, Stored, dispatch};

pub use adadelta::Adadelta;
pub use adam::Adam;
pub use sgd::Sgd;

/// How a gradient changes its parameter: the formula of an optimizer with its numbers, except learning rate and weight decay, which may
/// differ from parameter to parameter and from step to step.
///
/// Users write their own; it then trains, is saved and resumed as those of this crate:
///
/// ```
/// use convoke_kernels::optimizer::{Step, UpdateRule};
/// use convoke_kernels::{Cpu, Element, Result, dispatch};
///
/// /// p -= learning rate * sign(g)
/// #[derive(Debug)]
/// struct SignSgd;
///
/// impl UpdateRule for SignSgd {
///     fn name(&self) -> &'static str {
///         "sign-sgd"
///     }
///
///     fn step(&self, cpu: &Cpu, step: Step<'_>) -> Result<()> {
///         fn typed<T: Element>(step: Step<'_>) -> Result<()> {
///             let rate = T::of(step.learning_rate);
///             let (parameter, gradient, []) = step.of::<T, 0>("sign-sgd")?;
///             for (p, &g) in parameter.iter_mut().zip(gradient) {
///                 let sign = if g > T::zero() { rate } else if g < T::zero() { T::zero() - rate } else { g * T::zero() };
///                 *p -= sign;
///             }
///             Ok(())
///         }
///         dispatch!("sign-sgd", step.parameter.dtype(), T => typed::<T>(step))
///     }
/// }
///
/// let mut parameter = [1.0f32, 2.0];
/// let (gradient, slots) = ([0.3f32, -7.0], Vec::new());
/// let step = Step {
///     learning_rate: 0.5,
///     weight_decay: 0.0,
///     time: 1,
///     parameter: parameter.as_mut_slice().into(),
///     gradient: (&gradient).into(),
///     slots,
/// };
/// SignSgd.step(&Cpu::single(), step)?;
/// assert_eq!(parameter, [0.5, 2.5]);
/// # Ok::<(), convoke_kernels::Error>(())
/// ```
pub trait UpdateRule: Debug + Send + Sync {
    /// The name on the command line and in files.
    fn name(&self) -> &'static str;

    /// Names of the tensors that are kept for each parameter, in the order of [`Step::slots`]. Their elements start at 0.
    fn slots(&self) -> &'static [&'static str] {
        &[]
    }

    /// All its numbers by name. A run resumes only with those that it was saved with.
    fn settings(&self) -> Vec<(&'static str, Setting)> {
        Vec::new()
    }

    /// Checks its numbers.
    ///
    /// # Errors
    /// If one is out of range.
    fn check(&self) -> Result<()> {
        Ok(())
    }

    /// Changes a parameter and its slots.
    ///
    /// # Errors
    /// If lengths or types differ.
    fn step(&self, cpu: &Cpu, step: Step<'_>) -> Result<()>;
}

/// A number of an [`UpdateRule`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Setting {
    /// A switch.
    Flag(bool),
    /// One number.
    Number(f64),
    /// Several numbers.
    Numbers(Vec<f64>),
}

/// What a step reads and changes. All slices have the same length and type.
#[derive(Debug)]
pub struct Step<'a> {
    /// The step size.
    pub learning_rate: f64,
    /// The weight decay.
    pub weight_decay: f64,
    /// Counts the steps of this parameter from 1.
    pub time: i32,
    /// The parameter.
    pub parameter: SliceMut<'a>,
    /// The gradient.
    pub gradient: Slice<'a>,
    /// What [`UpdateRule::slots`] names.
    pub slots: Vec<SliceMut<'a>>,
}

/// The parameter, the gradient and the N slots of a step.
pub type Elements<'a, T, const N: usize> = (&'a mut [T], &'a [T], [&'a mut [T]; N]);

impl<'a> Step<'a> {
    /// Parameter, gradient and slots as numbers of type T.
    ///
    /// # Errors
    /// If the slots are not N, lengths differ, or there are elements of another type.
    pub fn of<T: Stored, const N: usize>(self, operation: &'static str) -> Result<Elements<'a, T, N>> {
        let len = self.parameter.len();
        check_len(operation, "the gradient", self.gradient.len(), len)?;
        for slot in &self.slots {
            check_len(operation, "the state", slot.len(), len)?;
        }
        let slots = self.slots.into_iter().map(SliceMut::of).collect::<Result<Vec<_>>>()?;
        let slots = <[_; N]>::try_from(slots)
            .map_err(|slots| invalid(operation, format!("{N} slots are needed, not {}", slots.len())))?;
        Ok((self.parameter.of()?, self.gradient.of()?, slots))
    }
}

/// Checks numbers of a rule, each given with its name and its largest value.
///
/// # Errors
/// If one is below 0, above its largest value, or NaN.
pub fn check_ranges(operation: &'static str, ranges: &[(&str, f64, f64)]) -> Result<()> {
    match ranges.iter().find(|(_, value, most)| !(0.0..=*most).contains(value)) {
        Some((name, value, _)) => Err(invalid(operation, format!("{name} {value} is out of range"))),
        None => Ok(()),
    }
}

multiversion! {
    fn average_chunk<T: Element>(decay: f64, average: &mut [T], value: &[T]) {
        // In this form, the average of values that do not change stays what it is, to the last bit.
        let take = T::of(1.0 - decay);
        for (a, &v) in average.iter_mut().zip(value) {
            *a += take * (v - *a);
        }
    }
}

/// average = decay * average + (1 - decay) * value: an exponential moving average of weights.
///
/// # Errors
/// If lengths or types differ.
pub fn moving_average(cpu: &Cpu, decay: f64, average: SliceMut<'_>, value: Slice<'_>) -> Result<()> {
    fn typed<T: Element>(cpu: &Cpu, decay: f64, average: &mut [T], value: &[T]) {
        span!("moving average", average, average, value);
        let len = average.len();
        cpu.for_each(len, chunks_mut(average).zip(chunks(value)), |(a, v)| average_chunk(cpu, decay, a, v));
    }
    check_len("moving average", "the value", value.len(), average.len())?;
    dispatch!("moving average", average.dtype(), T => typed::<T>(cpu, decay, average.of()?, value.of()?));
    Ok(())
}
