//! Log-softmax over channels and the negative log-likelihood, each with its backward.

use crate::error::{check_len, invalid};
use crate::memory_format::Extent;
use crate::profile::span;
use crate::{Cpu, Element, Error, Result};

/// y = x - log(sum over channels of exp(x)), for each position; stable for large values.
///
/// # Errors
/// If a length is not the extent's.
pub fn log_softmax<T: Element>(cpu: &Cpu, extent: &Extent, x: &[T], y: &mut [T]) -> Result<()> {
    span!("log_softmax", x, y);
    let len = extent.len()?;
    check_len("log_softmax", "x", x.len(), len)?;
    check_len("log_softmax", "y", y.len(), len)?;
    let (_, inner) = extent.around_channels();
    let slab = (extent.channels * inner).max(1);
    cpu.for_each(4 * len, x.chunks(slab).zip(y.chunks_mut(slab)), |(x, y)| {
        let mut largest = vec![T::neg_infinity(); inner];
        for row in x.chunks(inner) {
            for (largest, &x) in largest.iter_mut().zip(row) {
                // NaN is kept: a comparison alone would drop it.
                *largest = if x > *largest || x.is_nan() { x } else { *largest };
            }
        }
        let mut sums = vec![0.0f64; inner];
        for row in x.chunks(inner) {
            for ((sum, &largest), &x) in sums.iter_mut().zip(&largest).zip(row) {
                *sum += (x - largest).exp().f64();
            }
        }
        for (row, out) in x.chunks(inner).zip(y.chunks_mut(inner)) {
            for (((y, &x), &largest), sum) in out.iter_mut().zip(row).zip(&largest).zip(&sums) {
                *y = (x - largest) - T::of(sum.ln());
            }
        }
    });
    Ok(())
}

/// dx = dy - exp(y) * (sum over channels of dy), with `y` the output of [`log_softmax`].
///
/// # Errors
/// If a length is not the extent's.
pub fn log_softmax_backward<T: Element>(
    cpu: &Cpu,
    extent: &Extent,
    y: &[T],
    dy: &[T],
    dx: &mut [T],
) -> Result<()> {
    span!("log_softmax backward", y, dy, dx);
    let len = extent.len()?;
    check_len("log_softmax backward", "y", y.len(), len)?;
    check_len("log_softmax backward", "dy", dy.len(), len)?;
    check_len("log_softmax backward", "dx", dx.len(), len)?;
    let (_, inner) = extent.around_channels();
    let slab = (extent.channels * inner).max(1);
    let items = y.chunks(slab).zip(dy.chunks(slab)).zip(dx.chunks_mut(slab));
    cpu.for_each(4 * len, items, |((y, dy), dx)| {
        let mut sums = vec![0.0f64; inner];
        for row in dy.chunks(inner) {
            for (sum, dy) in sums.iter_mut().zip(row) {
                *sum += dy.f64();
            }
        }
        for ((dx, y), dy) in dx.chunks_mut(inner).zip(y.chunks(inner)).zip(dy.chunks(inner)) {
            for (((dx, &y), &dy), &sum) in dx.iter_mut().zip(y).zip(dy).zip(&sums) {
                *dx = dy - y.exp() * T::of(sum);
            }
        }
    });
    Ok(())
}

/// The sum of -log_probabilities at the targets, and how many targets counted.
///
/// `targets` holds one class a position, N x (spatial) in that order; those equal to `ignore` do not count.
///
/// # Errors
/// If a length is not the extent's, or a target is not a class.
pub fn nll<T: Element>(
    extent: &Extent,
    log_probabilities: &[T],
    targets: &[i64],
    ignore: Option<i64>,
) -> Result<(f64, usize)> {
    check_len("nll_loss", "the input", log_probabilities.len(), extent.len()?)?;
    let mut total = 0.0;
    let mut count = 0;
    for_each_target(extent, targets, ignore, |place| {
        total -= log_probabilities[place].f64();
        count += 1;
    })?;
    Ok((total, count))
}

/// dx = -factor at each target's place, 0 elsewhere.
///
/// # Errors
/// As [`nll`].
pub fn nll_backward<T: Element>(
    extent: &Extent,
    targets: &[i64],
    ignore: Option<i64>,
    factor: f64,
    dx: &mut [T],
) -> Result<()> {
    check_len("nll_loss backward", "dx", dx.len(), extent.len()?)?;
    // All targets are looked at before anything is written.
    for_each_target(extent, targets, ignore, |_| ())?;
    dx.fill(T::zero());
    for_each_target(extent, targets, ignore, |place| dx[place] = T::of(-factor))
}

fn for_each_target(
    extent: &Extent,
    targets: &[i64],
    ignore: Option<i64>,
    mut visit: impl FnMut(usize),
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
        visit((index / inner * extent.channels + class) * inner + index % inner);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MemoryFormat;

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
