//! The negative log-likelihood with class weights and label smoothing, with its backward pass.
//!
//! C. Szegedy, V. Vanhoucke, S. Ioffe, J. Shlens, Z. Wojna, "Rethinking the inception architecture for computer vision", 2016:
//! label smoothing. Sums and divisors are those of PyTorch's `cross_entropy`.

use crate::error::{check_len, invalid};
use crate::memory_format::Extent;
use crate::operand::kernels;
use crate::{Cpu, Error, Result};

/// The options of [`class_loss`]. With the default, each target counts as much.
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

/// Calls `visit` with the place of each value that counts, and the factor of -log_probability there; returns the sum of the weights
/// of the targets' classes. Without smoothing only the targets' own places count.
fn for_each_factor(
    extent: &Extent,
    targets: &[i64],
    options: &ClassLoss<'_>,
    mut visit: impl FnMut(usize, f64),
) -> Result<f64> {
    let ((_, inner), classes) = (extent.around_channels(), extent.channels);
    let mut weight = 0.0;
    for_each_target(extent, targets, options.ignore, |target, place| {
        weight += options.weight(target);
        if options.label_smoothing == 0.0 {
            return visit(place, options.weight(target));
        }
        for class in 0..classes {
            visit(place - target * inner + class * inner, options.factor(class, class == target, classes));
        }
    })?;
    Ok(weight)
}

/// Calls `visit` with the class and its place, for each target that counts.
fn for_each_target(
    extent: &Extent,
    targets: &[i64],
    ignore: Option<i64>,
    mut visit: impl FnMut(usize, usize),
) -> Result<()> {
    check_len("nll_loss", "the targets", targets.len(), extent.batch * extent.spatial)?;
    let target_error = |index: usize, target: i64| -> Error {
        let classes = extent.channels;
        invalid("nll_loss", format!("target {target} at index {index} is not a class of 0..{classes}"))
    };
    let (_, inner) = extent.around_channels();
    for (index, &target) in targets.iter().enumerate() {
        if Some(target) == ignore {
            continue;
        }
        let class = usize::try_from(target).ok().filter(|&class| class < extent.channels);
        let class = class.ok_or_else(|| target_error(index, target))?;
        visit(class, (index / inner * extent.channels + class) * inner + index % inner);
    }
    Ok(())
}

/// The approximate number of elements in a task.
const TASK: usize = 1 << 14;

kernels! {
    /// The sum of the losses at the targets, and the sum of the weights of their classes.
    ///
    /// The loss at a target of class y is w_y (1 - s) (-log p_y) + s/C times the sum over all classes c of w_c (-log p_c).
    ///
    /// # Errors
    /// If a length is not the extent's, a target is not a class, or smoothing is not 0 to 1.
    pub fn class_loss<T: Element>(
        extent: &Extent, targets: &[i64], options: &ClassLoss<'_>;
        log_probabilities: &[T];
    ) -> Result<(f64, f64)> {
        check_len("nll_loss", "the input", log_probabilities.len(), extent.len()?)?;
        options.check(extent)?;
        let mut total = 0.0;
        let weight = for_each_factor(extent, targets, options, |place, factor| {
            // A log-probability with a factor of 0 may be infinite.
            if factor != 0.0 {
                total -= factor * log_probabilities[place].f64();
            }
        })?;
        Ok((total, weight))
    }

    /// The gradient of [`class_loss`], times `factor`; 0 where the target does not count.
    ///
    /// # Errors
    /// As [`class_loss`].
    pub fn class_loss_backward<T: Element>(
        cpu: &Cpu, extent: &Extent, targets: &[i64], options: &ClassLoss<'_>, factor: f64;
        ;
        dx: &mut [T]
    ) -> Result<()> {
        check_len("nll_loss backward", "dx", dx.len(), extent.len()?)?;
        options.check(extent)?;
        // All targets are checked before anything is written.
        for_each_target(extent, targets, options.ignore, |_, _| ())?;
        if dx.is_empty() {
            return Ok(());
        }
        let image = extent.channels * extent.spatial;
        let batch = TASK.div_ceil(image);
        let parts = dx.chunks_mut(batch * image).zip(targets.chunks(batch * extent.spatial));
        cpu.for_each(extent.batch * image, parts, |(dx, targets)| {
            let extent = Extent { batch: targets.len() / extent.spatial, ..*extent };
            dx.fill(T::zero());
            let write = |place: usize, of_class| dx[place] = T::of(-factor * of_class);
            for_each_factor(&extent, targets, options, write).expect("all targets are checked");
        });
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MemoryFormat;

    #[test]
    fn positions_and_formats_agree() {
        let x: Vec<f64> = (0..24).map(|i| f64::from(i * 7 % 11) / 3.0).collect();
        let extent = Extent { batch: 2, channels: 3, spatial: 4, format: MemoryFormat::Contiguous };
        let last = Extent { format: MemoryFormat::ChannelsLast, ..extent };
        let mut x_last = vec![0.0; 24];
        crate::memory_format::convert(&Cpu::single(), &extent, (&x).into(), (&mut x_last).into()).unwrap();
        let targets = [0, 1, 2, 1, 255, 2, 0, 0];
        let ignoring = ClassLoss { ignore: Some(255), ..ClassLoss::default() };
        assert_eq!(
            class_loss(&extent, &targets, &ignoring, (&x).into()).unwrap(),
            class_loss(&last, &targets, &ignoring, (&x_last).into()).unwrap()
        );
        let error =
            class_loss(&extent, &targets, &ClassLoss::default(), (&x).into()).unwrap_err().to_string();
        assert!(error.contains("target 255 at index 4"), "{error}");
    }
}
