//! Cases of the losses.

use convoke_autograd::ops::{ClassOptions, Reduction, weighted_nll_loss};
use convoke_autograd::{Result, Tensor};

use super::{Draw, Size};

/// Shapes of N x C x (positions), for losses.
pub(super) fn class_shapes(size: Size) -> &'static [&'static [usize]] {
    match size {
        Size::Small => &[&[4, 5], &[2, 3, 2, 4], &[3, 4, 3], &[2, 1]],
        Size::Large => &[&[600, 30], &[3, 5, 40, 40]],
    }
}

pub(super) fn loss_cases(
    draw: &mut Draw,
    loss: fn(&Tensor, &[i64], Reduction, Option<i64>) -> Result<Tensor>,
) {
    for shape in class_shapes(draw.size) {
        for (reduction, ignore) in [
            (Reduction::Mean, None),
            (Reduction::Sum, None),
            (Reduction::Mean, Some(255)),
            (Reduction::Sum, Some(255)),
        ] {
            let x = draw.scaled(shape, 2.0);
            let targets = draw.targets(shape, ignore.is_some());
            draw.add(format!("{shape:?} {reduction:?} ignore {ignore:?}"), vec![x], move |inputs| {
                loss(&inputs[0], &targets, reduction, ignore)
            });
        }
    }
}

/// Every combination of an ignored class, weights, smoothing and reduction.
pub(super) fn weighted_loss_cases(draw: &mut Draw) {
    for shape in class_shapes(draw.size) {
        let weights: Vec<f64> = (0..shape[1]).map(|class| 0.5 + (class % 4) as f64).collect();
        for (reduction, ignore) in [Reduction::Mean, Reduction::Sum]
            .into_iter()
            .flat_map(|reduction| [None, Some(255)].map(|ignore| (reduction, ignore)))
        {
            for (weighted, label_smoothing) in
                [(true, 0.0), (false, 0.2), (true, 0.2), (true, 1.0), (false, 0.0)]
            {
                let weights = weighted.then(|| weights.clone().into());
                let options = ClassOptions { ignore, weights, label_smoothing };
                let x = draw.scaled(shape, 2.0);
                let targets = draw.targets(shape, ignore.is_some());
                draw.add(format!("{shape:?} {reduction:?} {options:?}"), vec![x], move |inputs| {
                    Ok(weighted_nll_loss(&inputs[0], &targets, reduction, &options)?.0)
                });
            }
        }
    }
}

pub(super) fn value_loss_cases(draw: &mut Draw, loss: fn(&Tensor, &Tensor, Reduction) -> Result<Tensor>) {
    for shape in class_shapes(draw.size) {
        for reduction in [Reduction::Mean, Reduction::Sum] {
            let inputs = vec![draw.scaled(shape, 2.0), draw.scaled(shape, 1.0)];
            draw.add(format!("{shape:?} {reduction:?}"), inputs, move |inputs| {
                loss(&inputs[0], &inputs[1], reduction)
            });
        }
    }
}
