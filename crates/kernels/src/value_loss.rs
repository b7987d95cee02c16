//! Element-wise losses against target values: squared error, and binary cross-entropy of logits; each with its backward pass.

use crate::error::check_len;
use crate::operand::kernels;
use crate::profile::span;
use crate::{Cpu, Element, Result};

/// A loss of one number x against its target t.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ValueLoss {
    /// (x - t)^2.
    SquaredError,
    /// -t log(sigmoid(x)) - (1 - t) log(1 - sigmoid(x)), computed without overflow.
    BinaryCrossEntropyWithLogits,
}

impl ValueLoss {
    #[inline(always)]
    fn value(self, x: f64, t: f64) -> f64 {
        match self {
            ValueLoss::SquaredError => (x - t) * (x - t),
            // max(x, 0) - x t + log(1 + exp(-|x|)); NaN stays NaN in the last term.
            ValueLoss::BinaryCrossEntropyWithLogits => x.max(0.0) - x * t + (-x.abs()).exp().ln_1p(),
        }
    }

    /// The derivative with respect to x.
    #[inline(always)]
    fn slope(self, x: f64, t: f64) -> f64 {
        match self {
            ValueLoss::SquaredError => 2.0 * (x - t),
            ValueLoss::BinaryCrossEntropyWithLogits => {
                let small = (-x.abs()).exp();
                let sigmoid = if x < 0.0 { small / (1.0 + small) } else { 1.0 / (1.0 + small) };
                sigmoid - t
            }
        }
    }

    /// The derivative with respect to t.
    #[inline(always)]
    fn target_slope(self, x: f64, t: f64) -> f64 {
        match self {
            ValueLoss::SquaredError => 2.0 * (t - x),
            ValueLoss::BinaryCrossEntropyWithLogits => -x,
        }
    }
}

/// Elements in a task. The sums of tasks are added in order, so that the result does not depend on the number of threads.
const TASK: usize = 1 << 13;
/// The approximate cost of an element, in multiplications.
const COST: usize = 16;

kernels! {
    /// The sum of the losses of all elements, in an order that depends only on the length.
    ///
    /// # Errors
    /// If the lengths differ.
    pub fn value_loss<T: Element>(cpu: &Cpu, loss: ValueLoss; x: &[T], targets: &[T]; ) -> Result<f64> {
        span!("value_loss", x, targets);
        check_len("value_loss", "the targets", targets.len(), x.len())?;
        let mut parts = vec![0.0; x.len().div_ceil(TASK)];
        let items = x.chunks(TASK).zip(targets.chunks(TASK)).zip(&mut parts);
        cpu.for_each(COST * x.len(), items, |((x, targets), part)| {
            *part = x.iter().zip(targets).map(|(x, t)| loss.value(x.f64(), t.f64())).sum();
        });
        Ok(parts.iter().sum())
    }

    /// The gradient of [`value_loss`] with respect to `x`, times `factor`.
    ///
    /// # Errors
    /// If the lengths differ.
    pub fn value_loss_backward<T: Element>(
        cpu: &Cpu, loss: ValueLoss, factor: f64;
        x: &[T], targets: &[T];
        dx: &mut [T]
    ) -> Result<()> {
        slopes(cpu, [x, targets], dx, |x, t| factor * loss.slope(x, t))
    }

    /// The gradient of [`value_loss`] with respect to the targets, times `factor`.
    ///
    /// # Errors
    /// If the lengths differ.
    pub fn value_loss_backward_targets<T: Element>(
        cpu: &Cpu, loss: ValueLoss, factor: f64;
        x: &[T], targets: &[T];
        dt: &mut [T]
    ) -> Result<()> {
        slopes(cpu, [x, targets], dt, |x, t| factor * loss.target_slope(x, t))
    }
}

fn slopes<T: Element>(
    cpu: &Cpu,
    [x, targets]: [&[T]; 2],
    gradient: &mut [T],
    slope: impl Fn(f64, f64) -> f64 + Sync,
) -> Result<()> {
    span!("value_loss backward", x, targets, gradient);
    check_len("value_loss backward", "the targets", targets.len(), x.len())?;
    check_len("value_loss backward", "the gradient", gradient.len(), x.len())?;
    let items = x.chunks(TASK).zip(targets.chunks(TASK)).zip(gradient.chunks_mut(TASK));
    cpu.for_each(COST * x.len(), items, |((x, targets), gradient)| {
        for (gradient, (x, t)) in gradient.iter_mut().zip(x.iter().zip(targets)) {
            *gradient = T::of(slope(x.f64(), t.f64()));
        }
    });
    Ok(())
}
