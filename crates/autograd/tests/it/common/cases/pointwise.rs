//! Cases of functions of each element, PReLU, and softmax along an axis.

use convoke_autograd::ops::{Pointwise, log_softmax, pointwise, prelu};
use convoke_autograd::{Result, Tensor};

use super::losses::class_shapes;
use super::{Draw, is_away_from_zero, laid_out, tensor};

/// A function, the numbers to check it on, and where its derivative jumps.
type Case = (Pointwise, [f64; 2], &'static [f64]);

const ANY: [f64; 2] = [-4.0, 4.0];

/// Every function; those with parameters with several.
const FUNCTIONS: [Case; 31] = [
    (Pointwise::Sigmoid, ANY, &[]),
    (Pointwise::Tanh, ANY, &[]),
    (Pointwise::Silu, ANY, &[]),
    (Pointwise::HardSwish, ANY, &[-3.0, 3.0]),
    (Pointwise::HARD_SIGMOID, ANY, &[-3.0, 3.0]),
    (Pointwise::HardSigmoid { alpha: 0.4, beta: 0.3 }, ANY, &[-0.75, 1.75]),
    (Pointwise::Clip { min: -1.5, max: 2.5 }, ANY, &[-1.5, 2.5]),
    (Pointwise::Clip { min: f64::NEG_INFINITY, max: 0.5 }, ANY, &[0.5]),
    (Pointwise::RELU6, [-2.0, 8.0], &[0.0, 6.0]),
    (Pointwise::Gelu, ANY, &[]),
    (Pointwise::GeluTanh, ANY, &[]),
    (Pointwise::Elu { alpha: 1.0 }, ANY, &[0.0]),
    (Pointwise::Elu { alpha: 0.3 }, ANY, &[0.0]),
    (Pointwise::Elu { alpha: 0.0 }, ANY, &[0.0]),
    (Pointwise::Selu, ANY, &[0.0]),
    (Pointwise::Celu { alpha: 1.0 }, ANY, &[0.0]),
    (Pointwise::Celu { alpha: 0.4 }, ANY, &[0.0]),
    (Pointwise::Mish, ANY, &[]),
    (Pointwise::SOFTPLUS, ANY, &[]),
    (Pointwise::Softplus { beta: 2.5, threshold: 2.0 }, ANY, &[0.8]),
    (Pointwise::Softplus { beta: 0.5, threshold: f64::INFINITY }, ANY, &[]),
    (Pointwise::Softsign, ANY, &[]),
    (Pointwise::Exp, [-3.0, 2.0], &[]),
    (Pointwise::Log, [0.5, 4.0], &[]),
    (Pointwise::Sqrt, [0.5, 4.0], &[]),
    (Pointwise::Abs, ANY, &[0.0]),
    (Pointwise::Neg, ANY, &[]),
    (Pointwise::Reciprocal, [0.5, 4.0], &[]),
    (Pointwise::Reciprocal, [-4.0, -0.5], &[]),
    (Pointwise::Erf, [-2.0, 2.0], &[]),
    (Pointwise::Clip { min: 0.0, max: f64::INFINITY }, ANY, &[0.0]),
];

/// Numbers of `range` that no step of a difference takes across one of `bends`.
fn apart(draw: &mut Draw, shape: &[usize], [low, high]: [f64; 2], bends: &[f64]) -> Tensor {
    const MARGIN: f64 = 1e-3;
    let mut elements = Vec::new();
    while elements.len() < shape.iter().product() {
        let drawn: Vec<f64> = draw.random.uniform(1, low, high);
        if bends.iter().all(|bend| (drawn[0] - bend).abs() > MARGIN) {
            elements.extend(drawn);
        }
    }
    laid_out(tensor(&draw.device, shape, &elements), draw.format)
}

pub(super) fn pointwise_cases(draw: &mut Draw) {
    let shapes: &[&[usize]] =
        if draw.is_large() { &[&[3, 8, 30, 30]] } else { &[&[2, 3, 4, 3], &[9], &[], &[2, 3, 2, 2, 2]] };
    for (function, range, bends) in FUNCTIONS {
        for shape in shapes {
            let x = apart(draw, shape, range, bends);
            draw.add(format!("{function:?} {shape:?}"), vec![x], move |inputs| {
                pointwise(&inputs[0], function)
            });
        }
    }
}

pub(super) fn prelu_cases(draw: &mut Draw) {
    let shapes: &[&[usize]] =
        if draw.is_large() { &[&[3, 8, 30, 30]] } else { &[&[2, 3, 4, 3], &[4, 5], &[9], &[], &[2, 3, 4]] };
    for shape in shapes {
        let channels = shape.get(1).copied().unwrap_or(1);
        for slopes in [1, channels] {
            let inputs = draw.until(
                |draw| vec![draw.normal(shape), draw.normal(&[slopes])],
                |inputs| is_away_from_zero(&inputs[0]),
            );
            let name = format!("{shape:?}, {slopes} slopes");
            draw.add(name, inputs, |inputs| prelu(&inputs[0], &inputs[1]));
        }
    }
}

pub(super) fn log_softmax_cases(draw: &mut Draw) {
    for shape in class_shapes(draw.size) {
        let x = draw.scaled(shape, 2.0);
        draw.add(format!("{shape:?}"), vec![x], |inputs| log_softmax(&inputs[0]));
    }
}

/// Every axis.
pub(super) fn softmax_cases(draw: &mut Draw, softmax: fn(&Tensor, usize) -> Result<Tensor>) {
    let shapes: &[&[usize]] =
        if draw.is_large() { &[&[3, 5, 40, 40]] } else { &[&[4, 5], &[2, 3, 2, 4], &[3, 4, 3], &[6]] };
    for shape in shapes {
        for axis in 0..shape.len() {
            let x = draw.scaled(shape, 2.0);
            draw.add(format!("{shape:?} along {axis}"), vec![x], move |inputs| softmax(&inputs[0], axis));
        }
    }
}
