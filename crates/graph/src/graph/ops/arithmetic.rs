//! Arithmetic of several tensors, with broadcasting.

use super::*;

/// A remainder.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Mod {
    /// Whether it has the sign of the dividend, as C's `fmod`, not of the divisor.
    pub fmod: bool,
}

kinds! { name, READ: Arithmetic;
    "Add" (2, 2) Add,
    "Sub" (2, 2) Sub,
    "Mul" (2, 2) Mul,
    "Div" (2, 2) Div,
    "Pow" (2, 2) Pow,
    "Max" (1, ANY) Max,
    "Min" (1, ANY) Min,
    => |_, kind| Ok(Op::Arithmetic(kind)); Reader("Sum", (1, ANY), |_| Ok(Op::Arithmetic(Arithmetic::Add)))
}

pub(super) const ARITHMETIC: Operator<Arithmetic> = Operator {
    read: READ,
    write: |&kind, to| {
        let several = kind == Arithmetic::Add && to.node.inputs.len() != 2;
        Ok(if several { to.named("Sum") } else { to.op() })
    },
    known: Known::One(|&kind, inputs| {
        let arrays = inputs.all_known()?;
        if arrays.len() != 2 && !takes_any(kind) {
            return Err(format!("there are {} inputs instead of 2", arrays.len()));
        }
        match (kind, &arrays[..]) {
            (Arithmetic::Pow, [base, exponent]) => power(base, exponent),
            _ => combined(&arrays, 1, |a, b| of_integers(kind, a, b), |a, b| of_floats(kind, a, b)),
        }
    }),
    run: Run::One(|&kind, inputs| match inputs.len() {
        2 => of_two(kind, inputs),
        1.. if takes_any(kind) => combined_tensors(inputs, |a, b| of_tensors(kind, a, b)),
        count => refuse(format!("it has {count} inputs")),
    }),
    uses: |kind, _| match kind {
        // What is subtracted or divided by is a property of the data, such as its mean, and no weight.
        Arithmetic::Add | Arithmetic::Mul => Use::Affine,
        Arithmetic::Sub | Arithmetic::Max | Arithmetic::Min => Use::Number,
        Arithmetic::Div | Arithmetic::Pow => Use::Other,
    },
    gives: |_, from| from.broadcast(),
};

pub(super) const MEAN: Operator<()> = Operator {
    read: &[Reader("Mean", (1, ANY), |_| Ok(Op::Mean))],
    write: plain,
    known: Known::One(|(), inputs| {
        let arrays = inputs.all_known()?;
        let add = |a: i64, b: i64| a.checked_add(b).ok_or_else(|| TOO_LARGE.into());
        combined(&arrays, arrays.len(), add, |a, b| a + b)
    }),
    run: Run::One(|(), inputs| Ok(combined_tensors(inputs, Tensor::add)?.scale(1.0 / inputs.len() as f64)?)),
    uses: other,
    gives: |(), from| from.broadcast(),
};

pub(super) const MOD: Operator<Mod> = Operator {
    read: &[Reader("Mod", (2, 2), |node| Ok(Op::Mod(Mod { fmod: node.attributes.flag("fmod", false)? })))],
    write: |&Mod { fmod }, to| Ok(to.op().int("fmod", fmod)),
    known: Known::One(|&Mod { fmod }, inputs| {
        let [a, b] = [inputs.known(0)?, inputs.known(1)?];
        let of_integers = |a: i64, b: i64| {
            if b == 0 {
                return Err(format!("{a} is divided by zero"));
            }
            let rest = a.wrapping_rem(b);
            Ok(if rest != 0 && (rest < 0) != (b < 0) && !fmod { rest + b } else { rest })
        };
        combined(&[a, b], 1, of_integers, |a, b| {
            let rest = a % b;
            if rest != 0.0 && (rest < 0.0) != (b < 0.0) && !fmod { rest + b } else { rest }
        })
    }),
    run: Run::Never,
    uses: other,
    gives: |_, from| from.broadcast(),
};

/// Whether it takes any number of inputs.
fn takes_any(kind: Arithmetic) -> bool {
    matches!(kind, Arithmetic::Add | Arithmetic::Max | Arithmetic::Min)
}

/// All inputs combined, from the first to the last.
fn combined_tensors(
    inputs: &Inputs<'_>,
    combine: impl Fn(&Tensor, &Tensor) -> convoke_autograd::Result<Tensor>,
) -> Result<Tensor> {
    let first = inputs.tensor(0)?;
    (1..inputs.len()).try_fold(first, |result, index| Ok(combine(&result, &inputs.tensor(index)?)?))
}

fn of_tensors(kind: Arithmetic, a: &Tensor, b: &Tensor) -> convoke_autograd::Result<Tensor> {
    match kind {
        Arithmetic::Add => a.add(b),
        Arithmetic::Sub => a.sub(b),
        Arithmetic::Mul => a.mul(b),
        Arithmetic::Div => a.div(b),
        Arithmetic::Pow => a.pow(b),
        Arithmetic::Max => a.maximum(b),
        Arithmetic::Min => a.minimum(b),
    }
}

/// Numbers need no tensor.
fn of_two(kind: Arithmetic, inputs: &Inputs<'_>) -> Result<Tensor> {
    let [a, b] = [inputs.shape(0)?.len(), inputs.shape(1)?.len()];
    if let Some(number) = inputs.scalar(1, a) {
        let x = inputs.tensor(0)?;
        match kind {
            Arithmetic::Add => return Ok(x.add_scalar(number)?),
            Arithmetic::Sub => return Ok(x.add_scalar(-number)?),
            Arithmetic::Mul => return Ok(x.scale(number)?),
            Arithmetic::Pow => return Ok(x.pow_scalar(number)?),
            Arithmetic::Max => return Ok(x.maximum_scalar(number)?),
            Arithmetic::Min => return Ok(x.minimum_scalar(number)?),
            Arithmetic::Div => {}
        }
    }
    if let Some(number) = inputs.scalar(0, b) {
        let x = inputs.tensor(1)?;
        match kind {
            Arithmetic::Add => return Ok(x.add_scalar(number)?),
            Arithmetic::Sub => return Ok(x.neg()?.add_scalar(number)?),
            Arithmetic::Mul => return Ok(x.scale(number)?),
            Arithmetic::Max => return Ok(x.maximum_scalar(number)?),
            Arithmetic::Min => return Ok(x.minimum_scalar(number)?),
            Arithmetic::Div | Arithmetic::Pow => {}
        }
    }
    Ok(of_tensors(kind, &inputs.tensor(0)?, &inputs.tensor(1)?)?)
}

/// All arrays combined from the first to the last, as whole or as floating-point numbers, and then divided.
fn combined(
    arrays: &[&Array],
    divisor: usize,
    of_integers: impl Fn(i64, i64) -> Answer<i64>,
    of_floats: impl Fn(f64, f64) -> f64,
) -> Answer<Array> {
    let kind = common_kind(arrays)?;
    let mut operands = Broadcast::new(arrays)?;
    let shape = operands.shape.clone();
    match kind {
        Kind::Bool => Err(not_numbers(arrays[0])),
        Kind::I64 => integers(&shape, operands.combined(of_integers).map(|x| Ok(x? / divisor as i64))),
        Kind::F32 | Kind::F64 => {
            let elements = operands.combined(|a, b| Ok(of_floats(a, b)));
            floats(kind, &shape, elements.map_while(std::result::Result::ok).map(|x| x / divisor as f64))
        }
    }
}

fn of_integers(kind: Arithmetic, a: i64, b: i64) -> Answer<i64> {
    let result = match kind {
        Arithmetic::Add => a.checked_add(b),
        Arithmetic::Sub => a.checked_sub(b),
        Arithmetic::Mul => a.checked_mul(b),
        Arithmetic::Div if b == 0 => return Err(format!("{a} is divided by zero")),
        Arithmetic::Div => a.checked_div(b),
        Arithmetic::Pow => return integer_power(a, b),
        Arithmetic::Max => Some(a.max(b)),
        Arithmetic::Min => Some(a.min(b)),
    };
    result.ok_or_else(|| TOO_LARGE.into())
}

fn of_floats(kind: Arithmetic, a: f64, b: f64) -> f64 {
    match kind {
        Arithmetic::Add => a + b,
        Arithmetic::Sub => a - b,
        Arithmetic::Mul => a * b,
        Arithmetic::Div => a / b,
        Arithmetic::Pow => a.powf(b),
        Arithmetic::Max => larger(a, b),
        Arithmetic::Min => -larger(-a, -b),
    }
}

/// The result has the kind of the base.
fn power(base: &Array, exponent: &Array) -> Answer<Array> {
    if let Some(array) = [base, exponent].into_iter().find(|array| array.kind() == Kind::Bool) {
        return Err(not_numbers(array));
    }
    let Broadcast { shape, mut operands } = Broadcast::new(&[base, exponent])?;
    let [a, b] = &mut operands[..] else { return Err("there are not 2 inputs".into()) };
    match (base.kind(), exponent.kind()) {
        (Kind::I64, Kind::I64) => {
            integers(&shape, std::iter::repeat_with(|| integer_power(a.step(), b.step())))
        }
        (Kind::I64, _) => {
            let element = || truncated(a.step::<f64>().powf(b.step()));
            integers(&shape, std::iter::repeat_with(element))
        }
        (kind, _) => floats(kind, &shape, std::iter::repeat_with(|| a.step::<f64>().powf(b.step()))),
    }
}

/// A power whose fraction is cut off.
fn integer_power(base: i64, exponent: i64) -> Answer<i64> {
    match (base, exponent) {
        (0, ..0) => Err(format!("0 to the power of {exponent} is infinite")),
        (1, _) | (_, 0) => Ok(1),
        (-1, _) => Ok(if exponent % 2 == 0 { 1 } else { -1 }),
        (0, _) | (_, ..0) => Ok(0),
        _ => u32::try_from(exponent)
            .ok()
            .and_then(|exponent| base.checked_pow(exponent))
            .ok_or_else(|| TOO_LARGE.into()),
    }
}
