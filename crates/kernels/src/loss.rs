//! The negative log-likelihood with its backward pass, and log-softmax over channels, which it follows.

use crate::class_loss::{ClassLoss, class_loss, class_loss_backward};
use crate::memory_format::Extent;
use crate::{Element, Result};

pub use crate::softmax::{log_softmax, log_softmax_backward};

/// The sum of -log_probabilities at the targets, and the number of targets that count.
///
/// `targets` holds one class per position, N x (spatial) in that order; targets equal to `ignore` do not count.
///
/// # Errors
/// If a length is not the extent's, or a target is not a class.
#[inline(never)]
pub fn nll<T: Element>(
    extent: &Extent,
    log_probabilities: &[T],
    targets: &[i64],
    ignore: Option<i64>,
) -> Result<(f64, usize)> {
    let options = ClassLoss { ignore, ..ClassLoss::default() };
    let (total, weight) = class_loss(extent, log_probabilities, targets, &options)?;
    // Each weighs 1, and there are far fewer than 2^53.
    Ok((total, weight as usize))
}

/// dx = -factor at the place of each target that counts, 0 elsewhere.
///
/// # Errors
/// As [`nll`].
#[inline(never)]
pub fn nll_backward<T: Element>(
    extent: &Extent,
    targets: &[i64],
    ignore: Option<i64>,
    factor: f64,
    dx: &mut [T],
) -> Result<()> {
    class_loss_backward(extent, targets, &ClassLoss { ignore, ..ClassLoss::default() }, factor, dx)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Cpu, MemoryFormat};

    #[test]
    fn large_values_do_not_overflow() {
        let extent = Extent { batch: 2, channels: 3, spatial: 1, format: MemoryFormat::Contiguous };
        let x = [1e4f32, 1e4, 1e4, -1e4, 0.0, 1e4];
        let mut y = [f32::NAN; 6];
        log_softmax(&Cpu::single(), &extent, &x, &mut y).unwrap();
        assert!((y[0] + 3f32.ln()).abs() <= 1e-6);
        assert_eq!(&y[3..], &[-2e4, -1e4, 0.0]);
    }

    #[test]
    fn positions_and_formats_agree() {
        let x: Vec<f64> = (0..24).map(|i| f64::from(i * 7 % 11) / 3.0).collect();
        let extent = Extent { batch: 2, channels: 3, spatial: 4, format: MemoryFormat::Contiguous };
        let last = Extent { format: MemoryFormat::ChannelsLast, ..extent };
        let cpu = Cpu::single();
        let (mut x_last, mut y, mut y_last) = (vec![0.0; 24], vec![f64::NAN; 24], vec![f64::NAN; 24]);
        crate::memory_format::convert(&cpu, &extent, &x, &mut x_last).unwrap();
        log_softmax(&cpu, &extent, &x, &mut y).unwrap();
        log_softmax(&cpu, &last, &x_last, &mut y_last).unwrap();
        let targets = [0, 1, 2, 1, 255, 2, 0, 0];
        assert_eq!(
            nll(&extent, &y, &targets, Some(255)).unwrap(),
            nll(&last, &y_last, &targets, Some(255)).unwrap()
        );
        let error = nll(&extent, &y, &targets, None).unwrap_err().to_string();
        assert!(error.contains("target 255 at index 4"), "{error}");
    }
}
