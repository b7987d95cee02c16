//! The negative log-likelihood with class weights and label smoothing, with its backward pass.
//!
//! C. Szegedy, V. Vanhoucke, S. Ioffe, J. Shlens, Z. Wojna, "Rethinking the inception architecture for computer vision", 2016:
//! label smoothing. Sums and divisors are those of PyTorch's `cross_entropy`.

use crate::error::{check_len, invalid};
use crate::loss::for_each_target;
use crate::memory_format::Extent;
use crate::{Element, Result};

/// The options of [`class_loss`]. With the default it equals [`crate::loss::nll`].
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct ClassLoss<'a> {
    /// The target value that does not count.
    pub ignore: Option<i64>,
    /// The weight of each of the C classes; 1 if absent.
    pub weights: Option<&'a [f64]>,
    /// The share of each target that is spread over all classes, 0 to 1.
    pub label_smoothing: f64,
}

impl ClassLoss<'_> {
    fn check(&self, extent: &Extent) -> Result<()> {
        if let Some(weights) = self.weights {
            check_len("nll_loss", "the weights of the classes", weights.len(), extent.channels)?;
        }
        if !(0.0..=1.0).contains(&self.label_smoothing) {
            let reason = format!("label smoothing is {}, it must be 0 to 1", self.label_smoothing);
            return Err(invalid("nll_loss", reason));
        }
        Ok(())
    }

    fn weight(&self, class: usize) -> f64 {
        self.weights.map_or(1.0, |weights| weights[class])
    }

    /// The factor of -log_probability of `class`; `is_target` tells whether it is the target's class.
    fn factor(&self, class: usize, is_target: bool, classes: usize) -> f64 {
        let spread = self.label_smoothing / classes as f64;
        let own = if is_target { 1.0 - self.label_smoothing } else { 0.0 };
        self.weight(class) * (own + spread)
    }
}

/// Calls `each` for every target that counts, with its class and the places of the values of all classes.
fn visit(
    extent: &Extent,
    targets: &[i64],
    ignore: Option<i64>,
    mut each: impl FnMut(usize, std::iter::StepBy<std::ops::RangeFrom<usize>>),
) -> Result<()> {
    let (_, inner) = extent.around_channels();
    for_each_target(extent, targets, ignore, |place| {
        let class = place / inner % extent.channels;
        each(class, (place - class * inner..).step_by(inner));
    })
}

/// The sum of the losses at the targets, and the sum of the weights of their classes.
///
/// The loss at a target of class y is w_y (1 - s) (-log p_y) + s/C times the sum over all classes c of w_c (-log p_c).
///
/// # Errors
/// If a length is not the extent's, a target is not a class, or smoothing is not 0 to 1.
pub fn class_loss<T: Element>(
    extent: &Extent,
    log_probabilities: &[T],
    targets: &[i64],
    options: &ClassLoss<'_>,
) -> Result<(f64, f64)> {
    check_len("nll_loss", "the input", log_probabilities.len(), extent.len()?)?;
    options.check(extent)?;
    let (mut total, mut weight) = (0.0, 0.0);
    visit(extent, targets, options.ignore, |target, places| {
        weight += options.weight(target);
        for (class, place) in places.take(extent.channels).enumerate() {
            let factor = options.factor(class, class == target, extent.channels);
            // A log-probability with a factor of 0 may be infinite.
            if factor != 0.0 {
                total -= factor * log_probabilities[place].f64();
            }
        }
    })?;
    Ok((total, weight))
}

/// The gradient of [`class_loss`], times `factor`; 0 where the target does not count.
///
/// # Errors
/// As [`class_loss`].
pub fn class_loss_backward<T: Element>(
    extent: &Extent,
    targets: &[i64],
    options: &ClassLoss<'_>,
    factor: f64,
    dx: &mut [T],
) -> Result<()> {
    check_len("nll_loss backward", "dx", dx.len(), extent.len()?)?;
    options.check(extent)?;
    // All targets are checked before anything is written.
    for_each_target(extent, targets, options.ignore, |_| ())?;
    dx.fill(T::zero());
    visit(extent, targets, options.ignore, |target, places| {
        for (class, place) in places.take(extent.channels).enumerate() {
            dx[place] = T::of(-factor * options.factor(class, class == target, extent.channels));
        }
    })
}
