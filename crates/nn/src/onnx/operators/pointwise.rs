//! Reads functions of single elements, and softmax.

use convoke_autograd::ops::Pointwise;

use super::{Op, Read};
use crate::graph::{Arithmetic, Array, Compare};
use crate::onnx::read::Step;

/// Functions without attributes.
macro_rules! plain {
    ($($name:ident $function:ident),*) => {
        $(pub(super) fn $name(_: &mut Step<'_>) -> Read {
            Ok(Op::Pointwise(Pointwise::$function))
        })*
    };
}

plain!(
    abs Abs, erf Erf, exp Exp, hard_swish HardSwish, log Log, mish Mish, neg Neg, reciprocal Reciprocal, sigmoid Sigmoid,
    softsign Softsign, sqrt Sqrt, tanh Tanh
);

pub(super) fn softplus(_: &mut Step<'_>) -> Read {
    Ok(Op::Pointwise(Pointwise::Softplus { beta: 1.0, threshold: f64::INFINITY }))
}

pub(super) fn hard_sigmoid(step: &mut Step<'_>) -> Read {
    let alpha = step.attributes.float_or("alpha", 0.2)?;
    let beta = step.attributes.float_or("beta", 0.5)?;
    // Files hold single precision; PyTorch's slope is 1/6 in every precision.
    let alpha = if alpha as f32 == 1.0 / 6.0 { 1.0 / 6.0 } else { alpha };
    Ok(Op::Pointwise(Pointwise::HardSigmoid { alpha, beta }))
}

pub(super) fn elu(step: &mut Step<'_>) -> Read {
    let alpha = step.attributes.float_or("alpha", 1.0)?;
    Ok(Op::Pointwise(Pointwise::Elu { alpha }))
}

pub(super) fn celu(step: &mut Step<'_>) -> Read {
    let alpha = step.attributes.float_or("alpha", 1.0)?;
    Ok(Op::Pointwise(Pointwise::Celu { alpha }))
}

pub(super) fn selu(step: &mut Step<'_>) -> Read {
    const ALPHA: f64 = 1.673_263_2;
    const GAMMA: f64 = 1.050_701;
    let alpha = step.attributes.float_or("alpha", ALPHA)?;
    let gamma = step.attributes.float_or("gamma", GAMMA)?;
    if (alpha - ALPHA).abs() > 1e-5 || (gamma - GAMMA).abs() > 1e-5 {
        return Err(format!("its alpha {alpha} and gamma {gamma} are not the usual ones").into());
    }
    Ok(Op::Pointwise(Pointwise::Selu))
}

pub(super) fn gelu(step: &mut Step<'_>) -> Read {
    match step.attributes.text_or("approximate", "none")?.as_str() {
        "none" => Ok(Op::Pointwise(Pointwise::Gelu)),
        "tanh" => Ok(Op::Pointwise(Pointwise::GeluTanh)),
        other => Err(format!("its approximation {other} is not known").into()),
    }
}

/// x sigmoid(alpha x).
pub(super) fn swish(step: &mut Step<'_>) -> Read {
    let alpha = step.attributes.float_or("alpha", 1.0)?;
    if alpha == 1.0 {
        return Ok(Op::Pointwise(Pointwise::Silu));
    }
    let x = step.input(0).to_owned();
    let alpha = step.before(Op::Constant(Array::number(alpha as f32)), Vec::new(), "alpha");
    let scaled = step.before(Op::Arithmetic(Arithmetic::Mul), vec![x.clone(), alpha], "scaled");
    let gate = step.before(Op::Pointwise(Pointwise::Sigmoid), vec![scaled], "gate");
    step.inputs = vec![x, gate];
    Ok(Op::Arithmetic(Arithmetic::Mul))
}

pub(super) fn leaky_relu(step: &mut Step<'_>) -> Read {
    Ok(Op::LeakyRelu { alpha: step.attributes.float_or("alpha", 0.01)? })
}

/// x where it is above alpha, else 0.
pub(super) fn thresholded_relu(step: &mut Step<'_>) -> Read {
    let alpha = step.attributes.float_or("alpha", 1.0)?;
    let x = step.input(0).to_owned();
    let mut number = |number: f64, what: &str| {
        let constant = step.before(Op::Constant(Array::number(number as f32)), Vec::new(), what);
        // The file may compute in double precision.
        step.before(Op::CastLike, vec![constant, x.clone()], &format!("{what}_like"))
    };
    let (alpha, zero) = (number(alpha, "alpha"), number(0.0, "zero"));
    let above = step.before(Op::Compare(Compare::Greater), vec![x.clone(), alpha], "above");
    step.inputs = vec![above, x, zero];
    Ok(Op::Where)
}

pub(super) fn clip(step: &mut Step<'_>) -> Read {
    if step.opset < 11 {
        for (place, name) in [(1, "min"), (2, "max")] {
            if let Some(bound) = step.attributes.float(name)? {
                step.set_array(place, name, Array::number(bound as f32));
            }
        }
    }
    Ok(Op::Clip)
}

pub(super) fn softmax(step: &mut Step<'_>) -> Read {
    along(step, |axis| Op::Softmax { axis })
}

pub(super) fn log_softmax(step: &mut Step<'_>) -> Read {
    along(step, |axis| Op::LogSoftmax { axis })
}

/// Before version 13 the axes from one on were one.
fn along(step: &mut Step<'_>, op: impl Fn(isize) -> Op) -> Read {
    if step.opset >= 13 {
        return Ok(op(step.attributes.axis("axis", -1)?));
    }
    let axis = step.attributes.axis("axis", 1)?;
    let x = step.input(0).to_owned();
    let last = step.rank(&x).is_some_and(|rank| axis >= 0 && axis.unsigned_abs() + 1 == rank);
    if axis == -1 || last {
        return Ok(op(axis));
    }
    let shape = step.before(Op::Shape { start: 0, end: None }, vec![x.clone()], "shape");
    let flat = step.before(Op::Flatten { axis }, vec![x], "flat");
    let result = step.before(op(-1), vec![flat], "softmax");
    step.inputs = vec![result, shape];
    Ok(Op::Reshape { allow_zero: true })
}
