//! Functions of elements at the same place, with broadcasting.

use convoke_autograd::ops::Pointwise;

use super::{
    Answer, Number, TOO_LARGE, Walk, assembled, bounded, broadcast, built, common_kind, copied, described,
    floats, integers,
};
use crate::graph::{Arithmetic, Array, Compare, Data, Elementwise, Kind};

/// Operands that are broadcast to one shape.
struct Operands<'a> {
    shape: Vec<usize>,
    operands: Vec<Operand<'a>>,
}

struct Operand<'a> {
    data: &'a Data,
    walk: Walk,
}

impl Operand<'_> {
    fn step<N: Number>(&mut self) -> N {
        N::read(self.data, self.walk.step())
    }
}

impl<'a> Operands<'a> {
    fn new(arrays: &[&'a Array]) -> Answer<Operands<'a>> {
        let mut shape = Vec::new();
        for array in arrays {
            shape = broadcast(&shape, array.shape())
                .ok_or_else(|| format!("shape {:?} does not broadcast with {shape:?}", array.shape()))?;
        }
        bounded(&shape)?;
        let operand =
            |array: &&'a Array| Operand { data: array.data(), walk: Walk::broadcast(array.shape(), &shape) };
        let operands = arrays.iter().map(operand).collect();
        Ok(Operands { shape, operands })
    }

    /// All operands combined from the first to the last, at one place after the other.
    fn combined<N: Number>(
        operands: &mut [Operand],
        combine: impl Fn(N, N) -> Answer<N>,
    ) -> impl Iterator<Item = Answer<N>> {
        std::iter::repeat_with(move || {
            let (first, others) = operands.split_first_mut().ok_or("there are no inputs")?;
            others.iter_mut().try_fold(first.step(), |result, other| combine(result, other.step()))
        })
    }
}

pub(super) fn arithmetic(kind: Arithmetic, arrays: &[&Array]) -> Answer<Array> {
    let any_number = matches!(kind, Arithmetic::Add | Arithmetic::Max | Arithmetic::Min);
    if !any_number && arrays.len() != 2 {
        return Err(format!("there are {} inputs instead of 2", arrays.len()));
    }
    if let (Arithmetic::Pow, [base, exponent]) = (kind, arrays) {
        return power(base, exponent);
    }
    combined(arrays, 1, |a, b| integer_arithmetic(kind, a, b), |a, b| float_arithmetic(kind, a, b))
}

pub(super) fn mean(arrays: &[&Array]) -> Answer<Array> {
    let add = |a: i64, b: i64| a.checked_add(b).ok_or_else(|| TOO_LARGE.into());
    combined(arrays, arrays.len(), add, |a, b| a + b)
}

pub(super) fn remainder(arrays: &[&Array], fmod: bool) -> Answer<Array> {
    let [_, _] = arrays else { return Err(format!("there are {} inputs instead of 2", arrays.len())) };
    let of_integers = |a: i64, b: i64| {
        if b == 0 {
            return Err(format!("{a} is divided by zero"));
        }
        let rest = a.wrapping_rem(b);
        Ok(if rest != 0 && (rest < 0) != (b < 0) && !fmod { rest + b } else { rest })
    };
    combined(arrays, 1, of_integers, |a, b| {
        let rest = a % b;
        if rest != 0.0 && (rest < 0.0) != (b < 0.0) && !fmod { rest + b } else { rest }
    })
}

/// All arrays combined from the first to the last, as whole or as floating-point numbers, and then divided.
fn combined(
    arrays: &[&Array],
    divisor: usize,
    of_integers: impl Fn(i64, i64) -> Answer<i64>,
    of_floats: impl Fn(f64, f64) -> f64,
) -> Answer<Array> {
    let kind = common_kind(arrays)?;
    let Operands { shape, mut operands } = Operands::new(arrays)?;
    match kind {
        Kind::Bool => Err(not_numbers(arrays[0])),
        Kind::I64 => {
            let elements = Operands::combined(&mut operands, of_integers);
            integers(&shape, elements.map(|x| Ok(x? / divisor as i64)))
        }
        Kind::F32 | Kind::F64 => {
            let elements = Operands::combined(&mut operands, |a, b| Ok(of_floats(a, b)));
            floats(kind, &shape, elements.map_while(Result::ok).map(|x| x / divisor as f64))
        }
    }
}

fn integer_arithmetic(kind: Arithmetic, a: i64, b: i64) -> Answer<i64> {
    if b == 0 && kind == Arithmetic::Div {
        return Err(format!("{a} is divided by zero"));
    }
    let result = match kind {
        Arithmetic::Add => a.checked_add(b),
        Arithmetic::Sub => a.checked_sub(b),
        Arithmetic::Mul => a.checked_mul(b),
        Arithmetic::Div => a.checked_div(b),
        Arithmetic::Pow => return integer_power(a, b),
        Arithmetic::Max => Some(a.max(b)),
        Arithmetic::Min => Some(a.min(b)),
    };
    result.ok_or_else(|| TOO_LARGE.into())
}

fn float_arithmetic(kind: Arithmetic, a: f64, b: f64) -> f64 {
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

/// The larger number; NaN if either is.
pub(super) fn larger(a: f64, b: f64) -> f64 {
    if a.is_nan() || a > b { a } else { b }
}

/// The result has the kind of the base.
fn power(base: &Array, exponent: &Array) -> Answer<Array> {
    if let Some(array) = [base, exponent].into_iter().find(|array| array.kind() == Kind::Bool) {
        return Err(not_numbers(array));
    }
    let Operands { shape, mut operands } = Operands::new(&[base, exponent])?;
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

/// A whole number without its fraction.
pub(super) fn truncated(x: f64) -> Answer<i64> {
    if x.abs() < -(i64::MIN as f64) { Ok(x as i64) } else { Err(TOO_LARGE.into()) }
}

pub(super) fn compare(kind: Compare, arrays: &[&Array]) -> Answer<Array> {
    fn compared<N: Number + PartialOrd>(kind: Compare, operands: Operands) -> Answer<Array> {
        let Operands { shape, mut operands } = operands;
        let [a, b] = &mut operands[..] else { return Err("there are not 2 inputs".into()) };
        let element = || {
            let (a, b): (N, N) = (a.step(), b.step());
            Ok(match kind {
                Compare::Equal => a == b,
                Compare::Less => a < b,
                Compare::LessOrEqual => a <= b,
                Compare::Greater => a > b,
                Compare::GreaterOrEqual | Compare::And | Compare::Or | Compare::Xor => a >= b,
            })
        };
        built(&shape, std::iter::repeat_with(element))
    }
    let [a, b] = arrays else { return Err(format!("there are {} inputs instead of 2", arrays.len())) };
    let logical = matches!(kind, Compare::And | Compare::Or | Compare::Xor);
    let operands = Operands::new(arrays)?;
    match common_kind(arrays)? {
        Kind::Bool if logical => logic(kind, operands),
        Kind::Bool if kind != Compare::Equal => Err(not_numbers(a)),
        _ if logical => {
            Err(format!("inputs must be truth values, but are {} and {}", described(a), described(b)))
        }
        Kind::Bool => compared::<bool>(kind, operands),
        Kind::I64 => compared::<i64>(kind, operands),
        Kind::F32 | Kind::F64 => compared::<f64>(kind, operands),
    }
}

fn logic(kind: Compare, operands: Operands) -> Answer<Array> {
    let Operands { shape, mut operands } = operands;
    let combine = |a: bool, b: bool| {
        Ok(match kind {
            Compare::And => a & b,
            Compare::Or => a | b,
            _ => a ^ b,
        })
    };
    built(&shape, Operands::combined(&mut operands, combine))
}

pub(super) fn not(x: &Array) -> Answer<Array> {
    match x.data() {
        Data::Bool(data) => built(x.shape(), data.iter().map(|x| Ok(!x))),
        _ => Err(format!("the input must be truth values, but is {}", described(x))),
    }
}

/// Elements of the second array where the first one's hold, else of the third.
pub(super) fn choose(arrays: &[&Array]) -> Answer<Array> {
    let [condition, a, b] = arrays else {
        return Err(format!("there are {} inputs instead of 3", arrays.len()));
    };
    if condition.kind() != Kind::Bool {
        return Err(format!("the condition must be truth values, but is {}", described(condition)));
    }
    let kind = common_kind(&[a, b])?;
    let Operands { shape, mut operands } = Operands::new(arrays)?;
    let [condition, a, b] = &mut operands[..] else { return Err("there are not 3 inputs".into()) };
    let place = || {
        let (of_a, of_b) = (a.walk.step(), b.walk.step());
        if condition.step() { (a.data, of_a) } else { (b.data, of_b) }
    };
    assembled(kind, &shape, std::iter::repeat_with(place))
}

/// A function of each element; `None` if it is not computed here.
pub(super) fn pointwise(function: Pointwise, x: &Array) -> Option<Answer<Array>> {
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

/// Different functions of floating-point and of whole numbers.
fn map(x: &Array, of_float: impl Fn(f64) -> f64, of_integer: impl Fn(i64) -> Answer<i64>) -> Answer<Array> {
    match x.data() {
        Data::F32(data) => floats(Kind::F32, x.shape(), data.iter().map(|&x| of_float(x.into()))),
        Data::F64(data) => floats(Kind::F64, x.shape(), data.iter().map(|&x| of_float(x))),
        Data::I64(data) => integers(x.shape(), data.iter().map(|&x| of_integer(x))),
        Data::Bool(_) => Err(not_numbers(x)),
    }
}

pub(super) fn relu(x: &Array) -> Answer<Array> {
    map(x, |x| within(x, Some(0.0), None), |x| Ok(x.max(0)))
}

pub(super) fn round(kind: Elementwise, x: &Array) -> Answer<Array> {
    let of_float: fn(f64) -> f64 = match kind {
        Elementwise::Floor => f64::floor,
        Elementwise::Ceil => f64::ceil,
        Elementwise::Round => f64::round_ties_even,
        Elementwise::Sign => |x| if x == 0.0 { 0.0 } else { x.signum() },
        Elementwise::Sin => f64::sin,
        Elementwise::Cos => f64::cos,
    };
    map(x, of_float, |x| Ok(if kind == Elementwise::Sign { x.signum() } else { x }))
}

/// Limits elements to bounds of one number each, which take the kind of the elements.
pub(super) fn clip(x: &Array, min: Option<&Array>, max: Option<&Array>) -> Answer<Array> {
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

pub(super) fn not_numbers(array: &Array) -> String {
    format!("the input must be numbers, but is {}", described(array))
}
