//! Functions of each element.

use convoke_autograd::ops::{self, Activation};

use super::*;

/// The slope of a leaky ReLU.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LeakyRelu {
    /// The slope below 0.
    pub alpha: f64,
}

/// Functions of single known values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub enum Elementwise {
    Floor,
    Ceil,
    /// To the nearest even number in the middle.
    Round,
    Sign,
    Sin,
    Cos,
}

/// Its name in ONNX.
pub(super) fn name(function: Pointwise) -> &'static str {
    match function {
        Pointwise::Relu => "Relu",
        Pointwise::LeakyRelu { .. } => "LeakyRelu",
        Pointwise::Sigmoid => "Sigmoid",
        Pointwise::Tanh => "Tanh",
        Pointwise::Silu => "Swish",
        Pointwise::HardSwish => "HardSwish",
        Pointwise::HardSigmoid { .. } => "HardSigmoid",
        Pointwise::Clip { .. } => "Clip",
        Pointwise::Gelu | Pointwise::GeluTanh => "Gelu",
        Pointwise::Elu { .. } => "Elu",
        Pointwise::Selu => "Selu",
        Pointwise::Celu { .. } => "Celu",
        Pointwise::Mish => "Mish",
        Pointwise::Softplus { .. } => "Softplus",
        Pointwise::Softsign => "Softsign",
        Pointwise::Exp => "Exp",
        Pointwise::Log => "Log",
        Pointwise::Sqrt => "Sqrt",
        Pointwise::Abs => "Abs",
        Pointwise::Neg => "Neg",
        Pointwise::Reciprocal => "Reciprocal",
        Pointwise::Erf => "Erf",
        other => other.name(),
    }
}

pub(super) const POINTWISE: Operator<Pointwise> = Operator {
    read: &[
        Reader("Abs", (1, 1), |_| Ok(Op::Pointwise(Pointwise::Abs))),
        Reader("Celu", (1, 1), |node| {
            Ok(Op::Pointwise(Pointwise::Celu { alpha: node.attributes.float_or("alpha", 1.0)? }))
        }),
        Reader("Elu", (1, 1), |node| {
            Ok(Op::Pointwise(Pointwise::Elu { alpha: node.attributes.float_or("alpha", 1.0)? }))
        }),
        Reader("Erf", (1, 1), |_| Ok(Op::Pointwise(Pointwise::Erf))),
        Reader("Exp", (1, 1), |_| Ok(Op::Pointwise(Pointwise::Exp))),
        Reader("Gelu", (1, 1), |node| match node.attributes.text_or("approximate", "none")?.as_str() {
            "none" => Ok(Op::Pointwise(Pointwise::Gelu)),
            "tanh" => Ok(Op::Pointwise(Pointwise::GeluTanh)),
            other => Err(format!("its approximation {other} is not known")),
        }),
        Reader("HardSigmoid", (1, 1), |node| {
            let alpha = node.attributes.float_or("alpha", 0.2)?;
            let beta = node.attributes.float_or("beta", 0.5)?;
            // Files hold single precision; PyTorch's slope is 1/6 in every precision.
            let alpha = if alpha as f32 == 1.0 / 6.0 { 1.0 / 6.0 } else { alpha };
            Ok(Op::Pointwise(Pointwise::HardSigmoid { alpha, beta }))
        }),
        Reader("HardSwish", (1, 1), |_| Ok(Op::Pointwise(Pointwise::HardSwish))),
        Reader("Log", (1, 1), |_| Ok(Op::Pointwise(Pointwise::Log))),
        Reader("Mish", (1, 1), |_| Ok(Op::Pointwise(Pointwise::Mish))),
        Reader("Neg", (1, 1), |_| Ok(Op::Pointwise(Pointwise::Neg))),
        Reader("Reciprocal", (1, 1), |_| Ok(Op::Pointwise(Pointwise::Reciprocal))),
        Reader("Selu", (1, 1), read_selu),
        Reader("Sigmoid", (1, 1), |_| Ok(Op::Pointwise(Pointwise::Sigmoid))),
        Reader("Softplus", (1, 1), |_| {
            Ok(Op::Pointwise(Pointwise::Softplus { beta: 1.0, threshold: f64::INFINITY }))
        }),
        Reader("Softsign", (1, 1), |_| Ok(Op::Pointwise(Pointwise::Softsign))),
        Reader("Sqrt", (1, 1), |_| Ok(Op::Pointwise(Pointwise::Sqrt))),
        Reader("Swish", (1, 1), read_swish),
        Reader("Tanh", (1, 1), |_| Ok(Op::Pointwise(Pointwise::Tanh))),
    ],
    write: |function, to| write_function(*function, to),
    known: Known::Perhaps(|&function, inputs| match inputs.known(0) {
        Ok(x) => of_known(function, x),
        Err(reason) => Some(Err(reason)),
    }),
    run: Run::One(|&function, inputs| Ok(ops::pointwise(&inputs.tensor(0)?, function)?)),
    uses: |_, _| Use::Mapped,
    gives: like_list,
};

pub(super) const RELU: Operator<()> = Operator {
    read: &[Reader("Relu", (1, 1), |_| Ok(Op::Relu))],
    write: plain,
    known: Known::One(|(), inputs| map(inputs.known(0)?, |x| within(x, Some(0.0), None), |x| Ok(x.max(0)))),
    run: Run::One(|(), inputs| Ok(inputs.tensor(0)?.relu()?)),
    uses: other,
    gives: like_first,
};

pub(super) const LEAKY_RELU: Operator<LeakyRelu> = Operator {
    read: &[Reader("LeakyRelu", (1, 1), |node| {
        Ok(Op::LeakyRelu(LeakyRelu { alpha: node.attributes.float_or("alpha", 0.01)? }))
    })],
    write: |relu, to| Ok(to.op().float("alpha", relu.alpha)),
    known: Known::Never,
    run: Run::One(|relu, inputs| {
        let x = inputs.tensor(0)?;
        Ok(match relu.alpha {
            slope if slope > 0.0 && slope.is_finite() => ops::activate(&x, Activation::LeakyRelu { slope })?,
            slope => ops::prelu(&x, &Tensor::full(x.device(), &[1], x.dtype(), slope)?)?,
        })
    }),
    uses: other,
    gives: like_first,
};

pub(super) const P_RELU: Operator<()> = Operator {
    read: &[Reader("PRelu", (2, 2), |_| Ok(Op::PRelu))],
    write: plain,
    known: Known::Never,
    run: Run::One(|(), inputs| prelu(&inputs.tensor(0)?, &inputs.tensor(1)?)),
    uses: weights,
    gives: like_first,
};

pub(super) const CLIP: Operator<()> = Operator {
    read: &[Reader("Clip", (1, 3), |node| {
        if node.opset < 11 {
            for (place, name) in [(1, "min"), (2, "max")] {
                if let Some(bound) = node.attributes.float(name)? {
                    node.set_array(place, name, Array::number(bound as f32));
                }
            }
        }
        Ok(Op::Clip)
    })],
    write: plain,
    known: Known::One(|(), inputs| {
        clip_known(inputs.known(0)?, [inputs.optional_number(1)?, inputs.optional_number(2)?])
    }),
    run: Run::One(|(), inputs| clip(inputs)),
    uses: other,
    gives: like_first,
};

kinds! { elementwise_name, READ: Elementwise;
    "Floor" (1, 1) Floor,
    "Ceil" (1, 1) Ceil,
    "Round" (1, 1) Round,
    "Sign" (1, 1) Sign,
    "Sin" (1, 1) Sin,
    "Cos" (1, 1) Cos,
    => |_, kind| Ok(Op::Elementwise(kind))
}

pub(super) const ELEMENTWISE: Operator<Elementwise> = Operator {
    read: READ,
    write: plain,
    known: Known::One(|kind, inputs| {
        let of_float: fn(f64) -> f64 = match kind {
            Elementwise::Floor => f64::floor,
            Elementwise::Ceil => f64::ceil,
            Elementwise::Round => f64::round_ties_even,
            Elementwise::Sign => |x| if x == 0.0 { 0.0 } else { x.signum() },
            Elementwise::Sin => f64::sin,
            Elementwise::Cos => f64::cos,
        };
        let of_integer = |x: i64| Ok(if *kind == Elementwise::Sign { x.signum() } else { x });
        map(inputs.known(0)?, of_float, of_integer)
    }),
    run: Run::Never,
    uses: other,
    gives: like_list,
};

fn read_selu(node: &mut NodeReader<'_>) -> Answer<Op> {
    const ALPHA: f64 = 1.673_263_2;
    const GAMMA: f64 = 1.050_701;
    let alpha = node.attributes.float_or("alpha", ALPHA)?;
    let gamma = node.attributes.float_or("gamma", GAMMA)?;
    if (alpha - ALPHA).abs() > 1e-5 || (gamma - GAMMA).abs() > 1e-5 {
        return Err(format!("its alpha {alpha} and gamma {gamma} are not the usual ones"));
    }
    Ok(Op::Pointwise(Pointwise::Selu))
}

/// x sigmoid(alpha x).
fn read_swish(node: &mut NodeReader<'_>) -> Answer<Op> {
    let alpha = node.attributes.float_or("alpha", 1.0)?;
    if alpha == 1.0 {
        return Ok(Op::Pointwise(Pointwise::Silu));
    }
    let x = node.input(0).to_owned();
    let alpha = node.constant("alpha", Array::number(alpha as f32));
    let scaled = node.before(Op::Arithmetic(Arithmetic::Mul), vec![x.clone(), alpha], "scaled");
    let gate = node.before(Op::Pointwise(Pointwise::Sigmoid), vec![scaled], "gate");
    node.inputs = vec![x, gate];
    Ok(Op::Arithmetic(Arithmetic::Mul))
}

/// From here on softplus is its argument, up to rounding in single precision: e^-20 is 2e-9.
const NO_THRESHOLD: f64 = 20.0;

/// Some functions are several nodes, in all versions or in older ones.
fn write_function<'a>(function: Pointwise, to: &mut NodeWriter<'_, 'a>) -> Answer<OnnxNode<'a>> {
    let (x, opset) = (to.input(0), to.file.opset);
    let product = |to: &NodeWriter<'_, 'a>, factors: [&str; 2]| {
        to.named("Mul").reads(factors.map(str::to_owned).to_vec())
    };
    Ok(match function {
        Pointwise::Silu if opset < 24 => {
            let gate = to.before("gate", OnnxNode::new("Sigmoid"), &[x]);
            product(to, [x, &gate])
        }
        Pointwise::HardSwish if opset < 14 => {
            let gate = OnnxNode::new("HardSigmoid").float("alpha", 1.0 / 6.0).float("beta", 0.5);
            let gate = to.before("gate", gate, &[x]);
            product(to, [x, &gate])
        }
        Pointwise::Mish if opset < 18 => {
            let soft = to.before("softplus", OnnxNode::new("Softplus"), &[x]);
            let gate = to.before("gate", OnnxNode::new("Tanh"), &[&soft]);
            product(to, [x, &gate])
        }
        Pointwise::Gelu | Pointwise::GeluTanh if opset < 20 => {
            let share = gelu_share(function, to)?;
            product(to, [x, &share])
        }
        Pointwise::GeluTanh => to.op().text("approximate", "tanh"),
        Pointwise::LeakyRelu { slope } => to.op().float("alpha", slope),
        Pointwise::HardSigmoid { alpha, beta } => to.op().float("alpha", alpha).float("beta", beta),
        Pointwise::Elu { alpha } | Pointwise::Celu { alpha } => to.op().float("alpha", alpha),
        Pointwise::Clip { min, max } => {
            let mut inputs = vec![x.to_owned()];
            for (what, bound) in [("min", min), ("max", max)] {
                inputs.push(if bound.is_finite() { to.number(what, bound)? } else { String::new() });
            }
            to.op().reads(inputs)
        }
        Pointwise::Softplus { beta, threshold } if beta != 1.0 || threshold < NO_THRESHOLD => {
            write_softplus([beta, threshold], to)?
        }
        Pointwise::Relu | Pointwise::Sigmoid | Pointwise::Tanh | Pointwise::Silu | Pointwise::HardSwish => {
            to.op()
        }
        Pointwise::Gelu | Pointwise::Selu | Pointwise::Mish | Pointwise::Softplus { .. } => to.op(),
        Pointwise::Softsign | Pointwise::Exp | Pointwise::Log | Pointwise::Sqrt | Pointwise::Abs => to.op(),
        Pointwise::Neg | Pointwise::Reciprocal | Pointwise::Erf => to.op(),
        other => return Err(format!("ONNX has no {}", other.name())),
    })
}

/// softplus(beta x) / beta, and x where beta x is above the threshold, which ONNX does not have.
fn write_softplus<'a>([beta, threshold]: [f64; 2], to: &mut NodeWriter<'_, 'a>) -> Answer<OnnxNode<'a>> {
    let x = to.input(0);
    let beta = to.number("beta", beta)?;
    let scaled = to.before("scaled", OnnxNode::new("Mul"), &[x, &beta]);
    let soft = to.before("softplus", OnnxNode::new("Softplus"), &[&scaled]);
    if threshold >= NO_THRESHOLD {
        return Ok(to.named("Div").reads(vec![soft, beta]));
    }
    let soft = to.before("unscaled", OnnxNode::new("Div"), &[&soft, &beta]);
    let threshold = to.number("threshold", threshold)?;
    let above = to.before("above", OnnxNode::new("Greater"), &[&scaled, &threshold]);
    Ok(to.named("Where").reads(vec![above, x.to_owned(), soft]))
}

/// What x is multiplied by: (1 + erf(x / sqrt(2))) / 2, or (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2.
fn gelu_share(function: Pointwise, to: &mut NodeWriter<'_, '_>) -> Answer<String> {
    use std::f64::consts::{FRAC_1_SQRT_2, FRAC_2_SQRT_PI};
    let x = to.input(0);
    let step =
        |to: &mut NodeWriter<'_, '_>, name, inputs: &[&str]| to.before(name, OnnxNode::new(name), inputs);
    let signed = if function == Pointwise::Gelu {
        let factor = to.number("factor", FRAC_1_SQRT_2)?;
        let scaled = step(to, "Mul", &[x, &factor]);
        step(to, "Erf", &[&scaled])
    } else {
        let three = to.number("three", 3.0)?;
        let cube = step(to, "Pow", &[x, &three]);
        let factor = to.number("factor", 0.044715)?;
        let term = step(to, "Mul", &[&cube, &factor]);
        let sum = step(to, "Add", &[x, &term]);
        let outer = to.number("outer", FRAC_2_SQRT_PI * FRAC_1_SQRT_2)?;
        let scaled = step(to, "Mul", &[&sum, &outer]);
        step(to, "Tanh", &[&scaled])
    };
    let one = to.number("one", 1.0)?;
    let positive = step(to, "Add", &[&signed, &one]);
    let half = to.number("half", 0.5)?;
    Ok(step(to, "Mul", &[&positive, &half]))
}

/// `None` if it is not computed of known values.
fn of_known(function: Pointwise, x: &Array) -> Option<Answer<Array>> {
    let of_float: fn(f64) -> f64 = match function {
        Pointwise::Abs => return Some(map(x, f64::abs, |x| x.checked_abs().ok_or(TOO_LARGE.into()))),
        Pointwise::Neg => return Some(map(x, |x| -x, |x| x.checked_neg().ok_or(TOO_LARGE.into()))),
        Pointwise::Clip { min, max } => {
            // A whole number is within the bounds if it is within the nearest whole numbers inside of them.
            let (least, most) = (min.ceil() as i64, max.floor() as i64);
            return Some(map(
                x,
                |x| within(x, Some(min), Some(max)),
                |x| Ok(within(x, Some(least), Some(most))),
            ));
        }
        Pointwise::Sqrt => f64::sqrt,
        Pointwise::Exp => f64::exp,
        Pointwise::Log => f64::ln,
        Pointwise::Reciprocal => f64::recip,
        Pointwise::Sigmoid => |x| 1.0 / (1.0 + (-x).exp()),
        Pointwise::Tanh => f64::tanh,
        _ => return None,
    };
    Some(map(x, of_float, |_| Err(format!("the function is not one of {}", described(x)))))
}

fn prelu(x: &Tensor, slope: &Tensor) -> Result<Tensor> {
    if slope.len() == 1 {
        return Ok(ops::prelu(x, &slope.reshape(&[1])?)?);
    }
    // The axes of the slope are the last ones of x.
    let rank = x.shape().len();
    let missing = rank.saturating_sub(slope.shape().len());
    let of_channels = slope.shape().iter().enumerate().all(|(axis, &size)| size == 1 || axis + missing == 1);
    if of_channels && rank >= 2 && x.shape()[1] == slope.len() {
        return Ok(ops::prelu(x, &slope.reshape(&[slope.len()])?)?);
    }
    let negative = ops::pointwise(x, Pointwise::Clip { min: f64::NEG_INFINITY, max: 0.0 })?;
    Ok(x.relu()?.add(&negative.mul(slope)?)?)
}

/// What a clip with these bounds is. Where they cross, the upper one wins.
pub(in crate::graph) fn clipped(min: f64, max: f64) -> Activation {
    Activation::Clip { min: min.min(max), max }
}

fn clip(inputs: &Inputs<'_>) -> Result<Tensor> {
    let x = inputs.tensor(0)?;
    let bound = |index: usize, none: f64| -> Result<Option<f64>> {
        Ok(match inputs.get(index) {
            None => Some(none),
            Some(Value::Known(_)) => inputs.number(index)?.only(),
            Some(Value::Tensor(_)) => None,
        })
    };
    match (bound(1, f64::NEG_INFINITY)?, bound(2, f64::INFINITY)?) {
        (Some(min), Some(max)) => Ok(ops::activate(&x, clipped(min, max))?),
        _ => {
            let raised = inputs.optional_tensor(1)?.map_or(Ok(x.clone()), |min| x.maximum(&min))?;
            Ok(inputs.optional_tensor(2)?.map_or(Ok(raised.clone()), |max| raised.minimum(&max))?)
        }
    }
}

/// Limits elements to bounds of one number each, which take the kind of the elements.
fn clip_known(x: &Array, [min, max]: [Option<&Array>; 2]) -> Answer<Array> {
    if min.is_none() && max.is_none() && x.kind() != Kind::Bool {
        return copied(x, x.shape());
    }
    fn bound<N: Number>(bound: Option<&Array>) -> Option<N> {
        bound.map(|bound| N::read(bound.data(), 0))
    }
    let (least, most) = (bound(min), bound(max));
    map(x, |x| within(x, bound(min), bound(max)), |x| Ok(within(x, least, most)))
}

/// A number not below the first bound, and then not above the second. NaN stays; a bound of NaN is none.
fn within<N: PartialOrd>(x: N, min: Option<N>, max: Option<N>) -> N {
    let x = match min {
        Some(min) if x < min => min,
        _ => x,
    };
    match max {
        Some(max) if x > max => max,
        _ => x,
    }
}
