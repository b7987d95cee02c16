//! Comparisons, and the choice between tensors by them. A truth value is 1 or 0 in a tensor of the model's type.

pub use convoke_autograd::Compare;
use convoke_autograd::{Error, ops};

use super::*;

kinds! { name, READ: Compare;
    "Equal" (2, 2) Equal,
    "Less" (2, 2) Less,
    "LessOrEqual" (2, 2) LessOrEqual,
    "Greater" (2, 2) Greater,
    "GreaterOrEqual" (2, 2) GreaterOrEqual,
    "And" (2, 2) And,
    "Or" (2, 2) Or,
    "Xor" (2, 2) Xor,
    => |_, kind| Ok(Op::Compare(kind))
}

pub(super) const COMPARE: Operator<Compare> = Operator {
    read: READ,
    write: plain,
    known: Known::One(|&kind, inputs| compare_known(kind, &inputs.all_known()?)),
    run: Run::One(|&kind, inputs| Ok(inputs.tensor(0)?.compare(kind, &inputs.tensor(1)?)?)),
    uses: |_, _| Use::Number,
    gives: |_, from| About { kind: Kind::Bool, len: None, ..from.broadcast() },
};

pub(super) const NOT: Operator<()> = Operator {
    read: &[Reader("Not", (1, 1), |_| Ok(Op::Not))],
    write: plain,
    known: Known::One(|(), inputs| {
        let x = inputs.known(0)?;
        match x.data() {
            Data::Bool(data) => built(x.shape(), data.iter().map(|x| Ok(!x))),
            Data::F32(_) | Data::F64(_) | Data::I64(_) => {
                Err(format!("the input must be truth values, but is {}", described(x)))
            }
        }
    }),
    // 1 - x, as x is 1 or 0.
    run: Run::One(|(), inputs| Ok(inputs.tensor(0)?.detach().neg()?.add_scalar(1.0)?)),
    uses: other,
    gives: |(), from| About { kind: Kind::Bool, ..from.ranked(from.rank(0)) },
};

pub(super) const WHERE: Operator<()> = Operator {
    read: &[Reader("Where", (3, 3), |_| Ok(Op::Where)), Reader("ThresholdedRelu", (1, 1), thresholded_relu)],
    write: plain,
    known: Known::One(|(), inputs| choose(&inputs.all_known()?)),
    run: Run::One(|(), inputs| select(inputs)),
    uses: |(), _| Use::Number,
    gives: |(), from| About { kind: from.at(1).kind, len: None, ..from.broadcast() },
};

/// x where it is above alpha, else 0.
fn thresholded_relu(node: &mut NodeReader<'_>) -> Answer<Op> {
    let alpha = node.attributes.float_or("alpha", 1.0)?;
    let x = node.input(0).to_owned();
    let mut number = |number: f64, what: &str| {
        let constant = node.constant(what, Array::number(number as f32));
        // The file may compute in double precision.
        node.before(Op::CastLike, vec![constant, x.clone()], &format!("{what}_like"))
    };
    let (alpha, zero) = (number(alpha, "alpha"), number(0.0, "zero"));
    let above = node.before(Op::Compare(Compare::Greater), vec![x.clone(), alpha], "above");
    node.inputs = vec![above, x, zero];
    Ok(Op::Where)
}

/// Whether a comparison holds.
fn holds<N: PartialOrd + Default>(kind: Compare, a: N, b: N) -> bool {
    let is_true = |x: &N| *x != N::default();
    match kind {
        Compare::Equal => a == b,
        Compare::Less => a < b,
        Compare::LessOrEqual => a <= b,
        Compare::Greater => a > b,
        Compare::GreaterOrEqual => a >= b,
        Compare::And => is_true(&a) && is_true(&b),
        Compare::Or => is_true(&a) || is_true(&b),
        Compare::Xor => is_true(&a) != is_true(&b),
    }
}

/// Elements of one operand where a condition holds, of the other elsewhere.
fn select(inputs: &Inputs<'_>) -> Result<Tensor> {
    let shapes = [inputs.shape(0)?, inputs.shape(1)?, inputs.shape(2)?];
    match ops::choose(&inputs.tensor(0)?, &inputs.tensor(1)?, &inputs.tensor(2)?) {
        Err(Error::DType { .. }) => refuse(format!("its operands {shapes:?} differ in type")),
        result => Ok(result?),
    }
}

fn compare_known(kind: Compare, arrays: &[&Array]) -> Answer<Array> {
    fn compared<N: Number + PartialOrd + Default>(kind: Compare, arrays: Broadcast) -> Answer<Array> {
        let Broadcast { shape, mut operands } = arrays;
        let [a, b] = &mut operands[..] else { return Err("there are not 2 inputs".into()) };
        built(&shape, std::iter::repeat_with(|| Ok(holds::<N>(kind, a.step(), b.step()))))
    }
    let [a, b] = arrays else { return Err(format!("there are {} inputs instead of 2", arrays.len())) };
    let logical = kind.is_logical();
    let operands = Broadcast::new(arrays)?;
    match common_kind(arrays)? {
        Kind::Bool if !logical && kind != Compare::Equal => Err(not_numbers(a)),
        Kind::I64 | Kind::F32 | Kind::F64 if logical => {
            Err(format!("inputs must be truth values, but are {} and {}", described(a), described(b)))
        }
        Kind::Bool => compared::<bool>(kind, operands),
        Kind::I64 => compared::<i64>(kind, operands),
        Kind::F32 | Kind::F64 => compared::<f64>(kind, operands),
    }
}

/// Elements of the second array where the first one's hold, else of the third.
fn choose(arrays: &[&Array]) -> Answer<Array> {
    let [condition, a, b] = arrays else {
        return Err(format!("there are {} inputs instead of 3", arrays.len()));
    };
    if condition.kind() != Kind::Bool {
        return Err(format!("the condition must be truth values, but is {}", described(condition)));
    }
    let kind = common_kind(&[a, b])?;
    let Broadcast { shape, mut operands } = Broadcast::new(arrays)?;
    let [condition, a, b] = &mut operands[..] else { return Err("there are not 3 inputs".into()) };
    let place = || {
        let (of_a, of_b) = (a.place(), b.place());
        if condition.step() { (a.data, of_a) } else { (b.data, of_b) }
    };
    assembled(kind, &shape, std::iter::repeat_with(place))
}
