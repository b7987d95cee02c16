//! Softmax, and its logarithm.

use convoke_autograd::ops;

use super::*;

pub(super) const SOFTMAX: Operator<Along> = Operator {
    read: &[Reader("Softmax", (1, 1), |node| read(node, Op::Softmax))],
    write: |along, to| Ok(to.op().axis("axis", along.axis)),
    known: Known::Never,
    run: Run::One(|along, inputs| {
        let x = inputs.tensor(0)?;
        Ok(ops::softmax(&x, axis_in(&x, along.axis)?)?)
    }),
    uses: other,
    gives: like_first,
};

pub(super) const LOG_SOFTMAX: Operator<Along> = Operator {
    read: &[Reader("LogSoftmax", (1, 1), |node| read(node, Op::LogSoftmax))],
    run: Run::One(|along, inputs| {
        let x = inputs.tensor(0)?;
        Ok(ops::log_softmax_along(&x, axis_in(&x, along.axis)?)?)
    }),
    ..SOFTMAX
};

/// Before version 13 the axes from one on were one.
fn read(node: &mut NodeReader<'_>, op: fn(Along) -> Op) -> Answer<Op> {
    if node.opset >= 13 {
        return node.along(-1, op);
    }
    let axis = node.attributes.axis("axis", 1)?;
    let x = node.input(0).to_owned();
    let last = node.rank(0).is_some_and(|rank| axis >= 0 && axis.unsigned_abs() + 1 == rank);
    if axis == -1 || last {
        return Ok(op(Along { axis }));
    }
    let shape = node.before(Op::Shape(Shape { start: 0, end: None }), vec![x.clone()], "shape");
    let flat = node.before(Op::Flatten(Along { axis }), vec![x], "flat");
    let result = node.before(op(Along { axis: -1 }), vec![flat], "softmax");
    node.inputs = vec![result, shape];
    Ok(Op::Reshape(Reshape { allow_zero: true }))
}
