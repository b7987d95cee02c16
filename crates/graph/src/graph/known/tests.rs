//! Values computed by hand or with NumPy, and inputs that no operation takes.

mod hostile;
mod ranked;
mod slices;

use std::sync::{Arc, LazyLock};

use convoke_autograd::ops::Pointwise;
use convoke_autograd::{DType, Device};

use super::*;
use crate::graph::run::{Place, Value};
use crate::graph::{
    Along, Arithmetic, Compare, Elementwise, Mod, PadKind, Reduce, ReduceKind, Reshape, Shape, Transpose,
    Trilu,
};

fn ints(shape: &[usize], data: &[i64]) -> Array {
    Array::new(shape, Data::I64(data.to_vec())).unwrap()
}

fn list(data: &[i64]) -> Array {
    ints(&[data.len()], data)
}

fn singles(data: &[f32]) -> Array {
    Array::list(Data::F32(data.to_vec()))
}

fn doubles(data: &[f64]) -> Array {
    Array::list(Data::F64(data.to_vec()))
}

fn bools(data: &[bool]) -> Array {
    Array::list(Data::Bool(data.to_vec()))
}

/// The numbers from 0 on.
fn counted(shape: &[usize]) -> Array {
    ints(shape, &(0..shape.iter().product::<usize>() as i64).collect::<Vec<_>>())
}

/// Nothing runs here.
static PLACE: LazyLock<Place> =
    LazyLock::new(|| Place { device: Device::cpu().unwrap(), dtype: DType::F32, batch: None });

/// As [`super::evaluate`] of these inputs.
fn within(
    budget: &mut Budget,
    op: &Op,
    inputs: &[Option<&Array>],
    outputs: usize,
) -> Option<Answer<Vec<Array>>> {
    let value = |array: &Option<&Array>| array.map(|array| Value::Known(Arc::new(array.clone())));
    let values: Vec<Option<Value>> = inputs.iter().map(value).collect();
    super::evaluate(op, &Inputs::new(op, &values, &PLACE, outputs), budget)
}

/// What a model computes that stores nothing.
fn evaluate(op: &Op, inputs: &[Option<&Array>], outputs: usize) -> Option<Answer<Vec<Array>>> {
    within(&mut Budget::of(0), op, inputs, outputs)
}

fn outputs(op: &Op, inputs: &[&Array], count: usize) -> Answer<Vec<Array>> {
    let inputs: Vec<_> = inputs.iter().map(|&array| Some(array)).collect();
    evaluate(op, &inputs, count).expect("an operation for known values")
}

/// The only output.
fn run(op: Op, inputs: &[&Array]) -> Answer<Array> {
    let mut arrays = outputs(&op, inputs, 1)?;
    assert_eq!(arrays.len(), 1);
    Ok(arrays.remove(0))
}

#[track_caller]
fn check(op: Op, inputs: &[&Array], expected: &Array) {
    assert_eq!(run(op, inputs).as_ref(), Ok(expected));
}

/// The reason why there is no output.
#[track_caller]
fn refused(op: Op, inputs: &[&Array], reason: &str) {
    let answer = run(op, inputs);
    assert!(answer.as_ref().is_err_and(|text| text.contains(reason)), "{answer:?}");
}

#[test]
fn shapes_broadcast_from_their_ends() {
    assert_eq!(broadcast(&[2, 1], &[3]), Some(vec![2, 3]));
    assert_eq!(broadcast(&[], &[4, 0]), Some(vec![4, 0]));
    assert_eq!(broadcast(&[0], &[1]), Some(vec![0]));
    assert_eq!(broadcast(&[2], &[3]), None);
    assert_eq!(broadcast(&[0], &[2]), None);
}

/// Each operation alone may be small: together they have one limit, which grows with what the model stores.
#[test]
fn everything_known_is_charged_to_one_budget() {
    let fill = |len: usize, budget: &mut Budget| {
        let op = Op::ConstantOfShape(list(&[1]));
        within(budget, &op, &[Some(&list(&[len as i64]))], 1).unwrap()
    };
    let mut budget = Budget { left: 100 };
    // 90 are left after the shape and 9 elements, 80 after the next ones, ...
    for _ in 0..9 {
        fill(9, &mut budget).unwrap();
    }
    assert_eq!(budget.left, 10);
    let error = fill(10, &mut budget).unwrap_err();
    assert!(error.contains("[10]") && error.contains("9 elements"), "{error}");
    // What only reads is charged too.
    let mut budget = Budget { left: 1_000 };
    let sum = Op::Reduce(Reduce { kind: ReduceKind::Sum, keep_dims: false, no_axes_is_identity: false });
    let x = counted(&[100]);
    for _ in 0..9 {
        within(&mut budget, &sum, &[Some(&x)], 1).unwrap().unwrap();
    }
    assert_eq!(budget.left, 1_000 - 9 * 101);
    assert!(Budget::of(usize::MAX).left == usize::MAX && Budget::of(10).left == ELEMENTS + 80);
}

#[test]
fn whole_numbers_are_divided_towards_zero_and_never_wrap() {
    let (op, modulo) = (Op::Arithmetic, |fmod: bool| Op::Mod(Mod { fmod }));
    check(op(Arithmetic::Div), &[&list(&[7, -7, 7, -7]), &list(&[2, 2, -2, -2])], &list(&[3, -3, -3, 3]));
    let pairs = [&list(&[7, -7, 7, -6]), &list(&[3, 3, -3, 3])];
    check(modulo(false), &pairs, &list(&[1, 2, -2, 0]));
    check(modulo(true), &pairs, &list(&[1, -1, 1, 0]));
    check(modulo(false), &[&list(&[i64::MIN]), &list(&[-1])], &list(&[0]));
    check(
        op(Arithmetic::Pow),
        &[&list(&[2, -3, -1, 2, 0]), &list(&[10, 3, i64::MIN, -1, 0])],
        &list(&[1024, -27, 1, 0, 1]),
    );
    check(op(Arithmetic::Pow), &[&list(&[9, 2]), &singles(&[0.5, 1.5])], &list(&[3, 2]));
    let column = ints(&[2, 1], &[10, 20]);
    check(op(Arithmetic::Add), &[&column, &list(&[1, 2, 3])], &ints(&[2, 3], &[11, 12, 13, 21, 22, 23]));
    check(op(Arithmetic::Sub), &[&list(&[1, 2]), &column], &ints(&[2, 2], &[-9, -8, -19, -18]));
    check(op(Arithmetic::Max), &[&list(&[1, 5]), &list(&[3]), &list(&[2, 2])], &list(&[3, 5]));
    check(op(Arithmetic::Min), &[&list(&[1, 5])], &list(&[1, 5]));
    check(Op::Mean, &[&list(&[1]), &list(&[2]), &list(&[6])], &list(&[3]));
    for kind in [Arithmetic::Add, Arithmetic::Mul, Arithmetic::Pow] {
        refused(op(kind), &[&list(&[i64::MAX]), &list(&[2])], TOO_LARGE);
    }
    refused(op(Arithmetic::Sub), &[&list(&[i64::MIN]), &list(&[1])], TOO_LARGE);
    refused(op(Arithmetic::Div), &[&list(&[i64::MIN]), &list(&[-1])], TOO_LARGE);
    refused(op(Arithmetic::Div), &[&list(&[3]), &list(&[0])], "3 is divided by zero");
    refused(modulo(true), &[&list(&[3]), &list(&[0])], "divided by zero");
    refused(op(Arithmetic::Pow), &[&list(&[0]), &list(&[-1])], "infinite");
    refused(op(Arithmetic::Add), &[&list(&[1, 2]), &list(&[1, 2, 3])], "[3] does not broadcast with [2]");
    refused(op(Arithmetic::Add), &[&list(&[1]), &singles(&[1.0])], "whole numbers of shape [1]");
    refused(op(Arithmetic::Add), &[&bools(&[true]), &bools(&[true])], "must be numbers");
    refused(op(Arithmetic::Sub), &[&list(&[1])], "1 inputs instead of 2");
    refused(op(Arithmetic::Add), &[], "no inputs");
}

#[test]
fn floating_point_numbers_are_rounded_once() {
    let (op, modulo) = (Op::Arithmetic, |fmod: bool| Op::Mod(Mod { fmod }));
    check(op(Arithmetic::Add), &[&singles(&[1.0]), &doubles(&[1e-12])], &doubles(&[1.0 + 1e-12]));
    check(op(Arithmetic::Add), &[&singles(&[1e8]), &singles(&[1.0]), &singles(&[-1e8])], &singles(&[1.0]));
    check(
        op(Arithmetic::Div),
        &[&singles(&[1.0, -1.0]), &singles(&[0.0])],
        &singles(&[f32::INFINITY, f32::NEG_INFINITY]),
    );
    check(Op::Mean, &[&singles(&[1.0]), &singles(&[2.0])], &singles(&[1.5]));
    check(op(Arithmetic::Pow), &[&singles(&[2.0, -2.0]), &list(&[-1, 3])], &singles(&[0.5, -8.0]));
    check(modulo(true), &[&singles(&[-5.5]), &singles(&[2.0])], &singles(&[-1.5]));
    check(modulo(false), &[&singles(&[-5.5]), &singles(&[2.0])], &singles(&[0.5]));
    for kind in [Arithmetic::Max, Arithmetic::Min] {
        let nan = run(op(kind), &[&singles(&[f32::NAN, 1.0]), &singles(&[1.0, f32::NAN])]).unwrap();
        assert!(nan.to_f64().iter().all(|x| x.is_nan()), "{nan:?}");
    }
    check(op(Arithmetic::Min), &[&singles(&[1.0, -3.0]), &singles(&[2.0, 4.0])], &singles(&[1.0, -3.0]));
}

#[test]
fn functions_of_single_elements() {
    let p = Op::Pointwise;
    check(p(Pointwise::Sqrt), &[&singles(&[4.0, 2.0])], &singles(&[2.0, std::f32::consts::SQRT_2]));
    check(p(Pointwise::Exp), &[&doubles(&[0.0, 1.0])], &doubles(&[1.0, std::f64::consts::E]));
    check(p(Pointwise::Log), &[&doubles(&[1.0, 0.0])], &doubles(&[0.0, f64::NEG_INFINITY]));
    check(p(Pointwise::Abs), &[&list(&[-3, 4])], &list(&[3, 4]));
    check(p(Pointwise::Neg), &[&list(&[-3, 4])], &list(&[3, -4]));
    check(p(Pointwise::Neg), &[&singles(&[1.5])], &singles(&[-1.5]));
    check(p(Pointwise::Reciprocal), &[&singles(&[4.0])], &singles(&[0.25]));
    check(p(Pointwise::Sigmoid), &[&singles(&[0.0, -1e9, 1e9])], &singles(&[0.5, 0.0, 1.0]));
    check(p(Pointwise::Tanh), &[&singles(&[0.0, 1e9])], &singles(&[0.0, 1.0]));
    check(p(Pointwise::RELU6), &[&list(&[-1, 3, 9])], &list(&[0, 3, 6]));
    refused(p(Pointwise::Abs), &[&list(&[i64::MIN])], TOO_LARGE);
    refused(p(Pointwise::Sqrt), &[&list(&[4])], "not one of whole numbers of shape [1]");
    refused(p(Pointwise::Abs), &[&bools(&[true])], "must be numbers");
    assert!(evaluate(&p(Pointwise::Erf), &[Some(&singles(&[1.0]))], 1).is_none());

    check(Op::Relu, &[&singles(&[-1.0, 2.0])], &singles(&[0.0, 2.0]));
    let numbers = doubles(&[-1.5, -0.2, 0.0, 0.5, 1.5, 2.7]);
    check(Op::Elementwise(Elementwise::Floor), &[&numbers], &doubles(&[-2.0, -1.0, 0.0, 0.0, 1.0, 2.0]));
    check(Op::Elementwise(Elementwise::Ceil), &[&numbers], &doubles(&[-1.0, 0.0, 0.0, 1.0, 2.0, 3.0]));
    check(Op::Elementwise(Elementwise::Round), &[&numbers], &doubles(&[-2.0, 0.0, 0.0, 0.0, 2.0, 3.0]));
    check(Op::Elementwise(Elementwise::Sign), &[&numbers], &doubles(&[-1.0, -1.0, 0.0, 1.0, 1.0, 1.0]));
    check(Op::Elementwise(Elementwise::Sign), &[&list(&[-9, 0, 4])], &list(&[-1, 0, 1]));

    check(Op::Clip, &[&list(&[-5, 2, 9]), &list(&[0]), &singles(&[3.0])], &list(&[0, 2, 3]));
    check(Op::Clip, &[&singles(&[-5.0, 9.0]), &Array::number(-1.0)], &singles(&[-1.0, 9.0]));
    check(Op::Clip, &[&list(&[2]), &list(&[5]), &list(&[3])], &list(&[3]));
    let x = singles(&[-5.0, 9.0]);
    let upper = evaluate(&Op::Clip, &[Some(&x), None, Some(&Array::number(1.0))], 1);
    assert_eq!(upper, Some(Ok(vec![singles(&[-5.0, 1.0])])));
    refused(Op::Clip, &[&x, &x], "input 1 must be a single number");
}

#[test]
fn truth_values() {
    let (a, b) = (bools(&[true, true, false, false]), bools(&[true, false, true, false]));
    for (kind, expected) in [
        (Compare::And, [true, false, false, false]),
        (Compare::Or, [true, true, true, false]),
        (Compare::Xor, [false, true, true, false]),
        (Compare::Equal, [true, false, false, true]),
    ] {
        check(Op::Compare(kind), &[&a, &b], &bools(&expected));
    }
    for (kind, expected) in [
        (Compare::Equal, [false, true, false]),
        (Compare::Less, [true, false, false]),
        (Compare::LessOrEqual, [true, true, false]),
        (Compare::Greater, [false, false, true]),
        (Compare::GreaterOrEqual, [false, true, true]),
    ] {
        // As floating-point numbers these whole numbers would be equal.
        let large = 1 << 60;
        check(
            Op::Compare(kind),
            &[&list(&[large - 1, large, large + 1]), &list(&[large])],
            &bools(&expected),
        );
        check(Op::Compare(kind), &[&singles(&[-1.0, 0.0, 1.0]), &doubles(&[0.0])], &bools(&expected));
    }
    check(Op::Compare(Compare::GreaterOrEqual), &[&singles(&[f32::NAN]), &singles(&[0.0])], &bools(&[false]));
    check(Op::Not, &[&bools(&[true, false])], &bools(&[false, true]));
    refused(Op::Not, &[&list(&[1])], "must be truth values");
    refused(Op::Compare(Compare::And), &[&list(&[1]), &list(&[1])], "must be truth values");
    refused(Op::Compare(Compare::Less), &[&a, &b], "must be numbers");

    let condition = Array::new(&[2, 1], Data::Bool(vec![true, false])).unwrap();
    check(Op::Where, &[&condition, &list(&[1, 2]), &ints(&[], &[9])], &ints(&[2, 2], &[1, 2, 9, 9]));
    check(Op::Where, &[&bools(&[false]), &singles(&[1.0]), &doubles(&[0.1])], &doubles(&[0.1]));
    check(Op::Where, &[&bools(&[true]), &a, &b], &a);
    refused(Op::Where, &[&list(&[1]), &a, &b], "the condition must be truth values");
    refused(Op::Where, &[&a, &b], "2 inputs instead of 3");
}

#[test]
fn kinds_and_copies() {
    let x = doubles(&[-1.9, 0.0, 0.5, f64::NAN]);
    check(Op::Cast(Kind::I64), &[&x], &list(&[-1, 0, 0, 0]));
    check(Op::Cast(Kind::Bool), &[&x], &bools(&[true, false, true, true]));
    check(
        Op::Cast(Kind::F32),
        &[&list(&[16_777_217, (1 << 54) + (1 << 30) + 1])],
        &singles(&[
            16_777_216.0,
            // A detour over double precision would round it down.
            18_014_400_656_965_632.0,
        ]),
    );
    check(Op::Cast(Kind::I64), &[&bools(&[true, false])], &list(&[1, 0]));
    check(Op::Cast(Kind::I64), &[&singles(&[f32::INFINITY])], &list(&[i64::MAX]));
    check(Op::CastLike, &[&list(&[3]), &singles(&[])], &singles(&[3.0]));
    check(Op::Identity, &[&counted(&[2, 3])], &counted(&[2, 3]));
    check(Op::Constant(list(&[4])), &[], &list(&[4]));
    refused(Op::Identity, &[], "input 0 is missing");
}

fn reduce(kind: ReduceKind) -> Op {
    Op::Reduce(Reduce { kind, keep_dims: false, no_axes_is_identity: false })
}

#[test]
fn reductions() {
    let x = ints(&[2, 3], &[1, -2, 3, 4, 5, -6]);
    for (kind, rows, columns) in [
        (ReduceKind::Sum, [2, 3], [5, 3, -3]),
        (ReduceKind::Mean, [0, 1], [2, 1, -1]),
        (ReduceKind::Prod, [-6, -120], [4, -10, -18]),
        (ReduceKind::Max, [3, 5], [4, 5, 3]),
        (ReduceKind::Min, [-2, -6], [1, -2, -6]),
        (ReduceKind::L1, [6, 15], [5, 7, 9]),
        (ReduceKind::L2, [3, 8], [4, 5, 6]),
        (ReduceKind::SumSquare, [14, 77], [17, 29, 45]),
    ] {
        check(reduce(kind), &[&x, &list(&[-1])], &list(&rows));
        check(reduce(kind), &[&x, &list(&[0])], &list(&columns));
    }
    let kept = |no_axes_is_identity| {
        Op::Reduce(Reduce { kind: ReduceKind::L1, keep_dims: true, no_axes_is_identity })
    };
    check(kept(false), &[&x], &ints(&[1, 1], &[21]));
    check(kept(false), &[&x, &list(&[])], &ints(&[1, 1], &[21]));
    check(kept(true), &[&x, &list(&[])], &ints(&[2, 3], &[1, 2, 3, 4, 5, 6]));
    check(kept(true), &[&x, &list(&[1])], &ints(&[2, 1], &[6, 15]));
    let three = counted(&[2, 2, 2]);
    check(reduce(ReduceKind::Sum), &[&three, &list(&[2, 0])], &list(&[10, 18]));

    let numbers = singles(&[3.0, 4.0]);
    let scalar = |x: f64| Array::number(x as f32);
    check(reduce(ReduceKind::Mean), &[&numbers], &scalar(3.5));
    check(reduce(ReduceKind::L2), &[&numbers], &scalar(5.0));
    check(reduce(ReduceKind::LogSum), &[&numbers], &scalar(7f64.ln()));
    check(reduce(ReduceKind::LogSumExp), &[&numbers], &scalar((3f64.exp() + 4f64.exp()).ln()));
    check(reduce(ReduceKind::LogSumExp), &[&singles(&[1000.0, 1000.0])], &scalar(1000.0 + 2f64.ln()));
    check(reduce(ReduceKind::LogSumExp), &[&singles(&[])], &Array::number(f32::NEG_INFINITY));
    check(reduce(ReduceKind::Min), &[&singles(&[2.0, -1.0])], &scalar(-1.0));
    let nan = run(reduce(ReduceKind::Max), &[&singles(&[1.0, f32::NAN, 2.0])]).unwrap();
    assert!(nan.to_f64()[0].is_nan());

    check(reduce(ReduceKind::Prod), &[&ints(&[0, 2], &[]), &list(&[0])], &list(&[1, 1]));
    check(
        reduce(ReduceKind::Max),
        &[&bools(&[false, true])],
        &Array::new(&[], Data::Bool(vec![true])).unwrap(),
    );
    check(
        reduce(ReduceKind::Min),
        &[&bools(&[false, true])],
        &Array::new(&[], Data::Bool(vec![false])).unwrap(),
    );
    refused(reduce(ReduceKind::Sum), &[&bools(&[true])], "must be numbers");
    refused(reduce(ReduceKind::Mean), &[&list(&[])], "no mean");
    refused(reduce(ReduceKind::Sum), &[&list(&[i64::MAX, 1])], TOO_LARGE);
    refused(reduce(ReduceKind::Sum), &[&x, &list(&[2])], "there is no axis 2 in 2 dimensions");
    refused(reduce(ReduceKind::Sum), &[&x, &list(&[1, -1])], "axis 1 is listed twice");
    refused(reduce(ReduceKind::Sum), &[&x, &singles(&[1.0])], "a list of whole numbers");
}

#[test]
fn joining_and_splitting() {
    let (a, b) = (counted(&[2, 2]), ints(&[2, 1], &[7, 8]));
    check(Op::Concat(Along { axis: -1 }), &[&a, &b, &a], &ints(&[2, 5], &[0, 1, 7, 0, 1, 2, 3, 8, 2, 3]));
    check(Op::Concat(Along { axis: 0 }), &[&list(&[1]), &list(&[]), &list(&[2, 3])], &list(&[1, 2, 3]));
    check(Op::Concat(Along { axis: 0 }), &[&singles(&[1.0]), &doubles(&[2.0])], &doubles(&[1.0, 2.0]));
    refused(Op::Concat(Along { axis: 0 }), &[&a, &b], "[2, 1] cannot be joined to [2, 2] along axis 0");
    refused(Op::Concat(Along { axis: 0 }), &[&ints(&[], &[1])], "no axis 0");
    refused(Op::Concat(Along { axis: 0 }), &[&list(&[1]), &bools(&[true])], "truth values");

    let x = counted(&[2, 5]);
    let split = Op::Split(Along { axis: 1 });
    let halves = [ints(&[2, 3], &[0, 1, 2, 5, 6, 7]), ints(&[2, 2], &[3, 4, 8, 9])];
    assert_eq!(outputs(&split, &[&x], 2), Ok(halves.to_vec()));
    assert_eq!(outputs(&split, &[&x, &list(&[3, 2])], 2), Ok(halves.to_vec()));
    let parts = outputs(&split, &[&x, &list(&[1, 0, 4])], 3).unwrap();
    assert_eq!(parts[0], ints(&[2, 1], &[0, 5]));
    assert_eq!(parts[1], ints(&[2, 0], &[]));
    assert_eq!(parts[2], ints(&[2, 4], &[1, 2, 3, 4, 6, 7, 8, 9]));
    for sizes in [[3, 3], [-1, 6], [i64::MAX, i64::MAX]] {
        let reason = format!("an axis of size 5 cannot be split into {sizes:?}");
        assert_eq!(outputs(&split, &[&x, &list(&sizes)], 2), Err(reason));
    }
    assert!(outputs(&split, &[&x], 4).is_err(), "2, 2, 2 leave less than nothing");
    assert!(outputs(&split, &[&x], 0).is_err());
    assert!(outputs(&split, &[&x, &list(&[5])], 2).is_err());
}

#[test]
fn slices() {
    let x = counted(&[6]);
    let (min, max) = (i64::MIN, i64::MAX);
    for (start, end, step, expected) in [
        (1, 4, 1, &[1, 2, 3][..]),
        (-2, max, 1, &[4, 5]),
        (0, -1, 2, &[0, 2, 4]),
        (0, max, max, &[0]),
        (min, max, 4, &[0, 4]),
        (4, 2, 1, &[]),
        (9, 12, 1, &[]),
        (max, min, -1, &[5, 4, 3, 2, 1, 0]),
        (-1, -4, -2, &[5, 3]),
        (3, 0, -1, &[3, 2, 1]),
        (-9, min, -1, &[0]),
        (max, min, min, &[5]),
    ] {
        let [start, end, step] = [start, end, step].map(|number| list(&[number]));
        check(Op::Slice, &[&x, &start, &end, &list(&[0]), &step], &list(expected));
    }
    let x = counted(&[2, 3, 2]);
    let corner = ints(&[1, 2, 2], &[10, 11, 8, 9]);
    check(Op::Slice, &[&x, &list(&[-1, 1]), &list(&[min, 9]), &list(&[1, 0]), &list(&[-1, 1])], &{
        // All three rows, reversed.
        ints(&[1, 3, 2], &[10, 11, 8, 9, 6, 7])
    });
    check(Op::Slice, &[&x, &list(&[-1, 1]), &list(&[0, 9]), &list(&[1, 0]), &list(&[-1, 1])], &corner);
    check(Op::Slice, &[&x, &list(&[1, 0]), &list(&[2, 1])], &ints(&[1, 1, 2], &[6, 7]));
    check(Op::Slice, &[&ints(&[0], &[]), &list(&[-1]), &list(&[min]), &list(&[0]), &list(&[-1])], &list(&[]));
    refused(Op::Slice, &[&x, &list(&[0]), &list(&[1]), &list(&[0]), &list(&[0])], "step of a slice is 0");
    refused(Op::Slice, &[&x, &list(&[0]), &list(&[1]), &list(&[3])], "no axis 3");
    refused(Op::Slice, &[&x, &list(&[0]), &list(&[1, 2])], "1 starts, 2 ends, 1 axes and 1 steps");
    refused(Op::Slice, &[&x, &list(&[0; 4]), &list(&[1; 4])], "4 starts");
    refused(Op::Slice, &[&x, &list(&[0])], "input 2 is missing");
}

#[test]
fn padding() {
    let pad = || Op::Pad(PadKind::Constant);
    let x = ints(&[2, 2], &[1, 2, 3, 4]);
    check(pad(), &[&x, &list(&[1, 0, 0, 1])], &ints(&[3, 3], &[0, 0, 0, 1, 2, 0, 3, 4, 0]));
    let seven = ints(&[], &[7]);
    check(pad(), &[&x, &list(&[1, 1]), &seven, &list(&[-1])], &ints(&[2, 4], &[7, 1, 2, 7, 7, 3, 4, 7]));
    check(pad(), &[&x, &list(&[-1, 1, 0, -1])], &ints(&[1, 2], &[0, 3]));
    check(pad(), &[&list(&[1, 2]), &list(&[-5, 6])], &list(&[0, 0, 0]));
    check(pad(), &[&list(&[1, 2]), &list(&[6, -5])], &list(&[0, 0, 0]));
    check(pad(), &[&bools(&[true]), &list(&[0, 1])], &bools(&[true, false]));
    check(pad(), &[&list(&[]), &list(&[1, 1]), &seven], &list(&[7, 7]));
    check(pad(), &[&seven, &list(&[])], &seven);
    refused(pad(), &[&x, &list(&[-1, 0, -2, 0])], "size 2 cannot be padded by -1 and -2");
    refused(pad(), &[&x, &list(&[1, 1])], "2 pads for 2 axes of [2, 2]");
    refused(pad(), &[&x, &list(&[i64::MAX, i64::MAX, 1, 1])], "more than");
    assert!(evaluate(&Op::Pad(PadKind::Edge), &[Some(&x), Some(&list(&[1; 4]))], 1).is_none());
}

#[test]
fn shapes_change() {
    let x = counted(&[2, 3]);
    let transpose = |order: &[isize]| Op::Transpose(Transpose { order: order.to_vec() });
    check(transpose(&[]), &[&x], &ints(&[3, 2], &[0, 3, 1, 4, 2, 5]));
    check(transpose(&[1, 2, -3]), &[&counted(&[2, 1, 2])], &ints(&[1, 2, 2], &[0, 2, 1, 3]));
    refused(transpose(&[0]), &[&x], "[0] is not one of the axes of [2, 3]");
    refused(transpose(&[1, 1]), &[&x], "listed twice");

    let reshape = |allow_zero| Op::Reshape(Reshape { allow_zero });
    check(reshape(false), &[&x, &list(&[-1, 2])], &counted(&[3, 2]));
    check(reshape(false), &[&x, &list(&[0, 1, -1])], &counted(&[2, 1, 3]));
    check(reshape(false), &[&list(&[5]), &list(&[])], &ints(&[], &[5]));
    check(reshape(true), &[&ints(&[0, 3], &[]), &list(&[3, 0])], &ints(&[3, 0], &[]));
    for sizes in [&[4, -1][..], &[-1, -1], &[7], &[-2, 3], &[2, 3, 0], &[i64::MAX, i64::MAX]] {
        refused(reshape(false), &[&x, &list(sizes)], "[2, 3] cannot be reshaped to");
    }
    refused(reshape(true), &[&ints(&[0], &[]), &list(&[0, -1])], "cannot be reshaped");
    refused(reshape(false), &[&ints(&[], &[1]), &list(&[1; 65])], "65 dimensions");
    refused(reshape(false), &[&x, &singles(&[f32::NAN])], "must be a list of whole numbers");

    check(Op::Flatten(Along { axis: 0 }), &[&x], &counted(&[1, 6]));
    check(Op::Flatten(Along { axis: -1 }), &[&counted(&[2, 3, 2])], &counted(&[6, 2]));
    check(Op::Flatten(Along { axis: 2 }), &[&x], &counted(&[6, 1]));
    check(Op::Flatten(Along { axis: 0 }), &[&ints(&[], &[1])], &ints(&[1, 1], &[1]));
    refused(Op::Flatten(Along { axis: 3 }), &[&x], "no axis 3");

    let ones = counted(&[1, 2, 1]);
    check(Op::Squeeze, &[&ones], &counted(&[2]));
    check(Op::Squeeze, &[&ones, &list(&[-1])], &counted(&[1, 2]));
    refused(Op::Squeeze, &[&ones, &list(&[1])], "axis 1 of [1, 2, 1] is not of size 1");
    check(Op::Unsqueeze, &[&x, &list(&[-1, 0])], &counted(&[1, 2, 3, 1]));
    refused(Op::Unsqueeze, &[&x, &list(&[3])], "no axis 3 in 3 dimensions");
    refused(Op::Unsqueeze, &[&x, &list(&[0, -4])], "listed twice");
    refused(Op::Unsqueeze, &[&x], "input 1 is missing");

    check(
        Op::Expand,
        &[&ints(&[2, 1], &[1, 2]), &list(&[2, 1, 2])],
        &ints(&[2, 2, 2], &[1, 1, 2, 2, 1, 1, 2, 2]),
    );
    check(Op::Expand, &[&x, &list(&[1])], &x);
    check(Op::Expand, &[&list(&[1]), &list(&[0])], &list(&[]));
    refused(Op::Expand, &[&x, &list(&[2])], "[2, 3] does not broadcast with [2]");
    refused(Op::Expand, &[&x, &list(&[-1, 3])], "-1 is not a size");
    refused(Op::Expand, &[&list(&[1]), &list(&[1 << 29])], "more than");
    check(Op::Tile, &[&ints(&[2, 1], &[1, 2]), &list(&[2, 2])], &ints(&[4, 2], &[1, 1, 2, 2, 1, 1, 2, 2]));
    check(Op::Tile, &[&list(&[1, 2]), &list(&[2])], &list(&[1, 2, 1, 2]));
    check(Op::Tile, &[&list(&[1, 2]), &list(&[0])], &list(&[]));
    refused(Op::Tile, &[&x, &list(&[2])], "1 repeats for [2, 3]");
    refused(Op::Tile, &[&x, &list(&[i64::MAX, 2])], "more than");
    refused(Op::Tile, &[&x, &list(&[i64::MAX, i64::MAX])], "too large");
}

#[test]
fn lookups() {
    let x = counted(&[2, 3]);
    check(Op::Gather(Along { axis: 0 }), &[&list(&[8, 9]), &ints(&[], &[-1])], &ints(&[], &[9]));
    check(Op::Gather(Along { axis: 1 }), &[&x, &ints(&[2, 1], &[2, -3])], &ints(&[2, 2, 1], &[2, 0, 5, 3]));
    check(Op::Gather(Along { axis: -2 }), &[&x, &list(&[1, 1])], &ints(&[2, 3], &[3, 4, 5, 3, 4, 5]));
    check(Op::Gather(Along { axis: 0 }), &[&x, &list(&[])], &ints(&[0, 3], &[]));
    refused(Op::Gather(Along { axis: 0 }), &[&x, &list(&[2])], "no index 2 along axis 0 of [2, 3]");
    refused(Op::Gather(Along { axis: 0 }), &[&x, &list(&[i64::MIN])], "no index");
    refused(Op::Gather(Along { axis: 0 }), &[&x, &singles(&[0.0])], "must be whole numbers");

    let shape = |start, end| Op::Shape(Shape { start, end });
    let y = counted(&[2, 3, 4]);
    check(shape(0, None), &[&y], &list(&[2, 3, 4]));
    check(shape(-2, Some(-1)), &[&y], &list(&[3]));
    check(shape(isize::MIN, Some(isize::MAX)), &[&y], &list(&[2, 3, 4]));
    check(shape(2, Some(1)), &[&y], &list(&[]));
    check(Op::Size, &[&y], &ints(&[], &[24]));

    check(Op::NonZero, &[&ints(&[2, 2], &[0, 5, -1, 2])], &ints(&[2, 3], &[0, 1, 1, 1, 0, 1]));
    check(Op::NonZero, &[&ints(&[], &[5])], &ints(&[0, 1], &[]));
    let values = list(&[8, 9]);
    let hot = ints(&[2, 3], &[9, 8, 8, 8, 8, 9]);
    check(Op::OneHot(Along { axis: -1 }), &[&list(&[0, -1]), &ints(&[], &[3]), &values], &hot);
    check(
        Op::OneHot(Along { axis: 0 }),
        &[&singles(&[1.0, 5.0]), &list(&[2]), &values],
        &ints(&[2, 2], &[8, 8, 9, 8]),
    );
    check(Op::OneHot(Along { axis: 1 }), &[&ints(&[1, 2], &[0, 1]), &list(&[2]), &values], &{
        ints(&[1, 2, 2], &[9, 8, 8, 9])
    });
    refused(Op::OneHot(Along { axis: 0 }), &[&list(&[0]), &list(&[-1]), &values], "the depth is -1");
    refused(
        Op::OneHot(Along { axis: 0 }),
        &[&list(&[0]), &singles(&[f32::NAN]), &values],
        "the depth is NaN",
    );
    refused(Op::OneHot(Along { axis: 0 }), &[&list(&[0]), &list(&[1 << 40]), &values], "more than");
    refused(Op::OneHot(Along { axis: 0 }), &[&list(&[0]), &list(&[2]), &list(&[1])], "2 values");

    let trilu = |upper| Op::Trilu(Trilu { upper });
    let square = ints(&[2, 3], &[1, 2, 3, 4, 5, 6]);
    check(trilu(true), &[&square], &ints(&[2, 3], &[1, 2, 3, 0, 5, 6]));
    check(trilu(false), &[&square, &ints(&[], &[1])], &ints(&[2, 3], &[1, 2, 0, 4, 5, 6]));
    check(trilu(true), &[&square, &list(&[i64::MIN])], &square);
    refused(trilu(true), &[&list(&[1])], "no matrices");
}

#[test]
fn ranges_and_filled_arrays() {
    let range = |numbers: [i64; 3]| run(Op::Range, &numbers.map(|x| ints(&[], &[x])).each_ref());
    assert_eq!(range([3, 9, 3]), Ok(list(&[3, 6])));
    assert_eq!(range([10, 4, -2]), Ok(list(&[10, 8, 6])));
    assert_eq!(range([4, 4, 1]), Ok(list(&[])));
    assert_eq!(range([4, 9, -1]), Ok(list(&[])));
    assert_eq!(range([i64::MIN, i64::MAX, i64::MAX]), Ok(list(&[i64::MIN, -1, i64::MAX - 1])));
    assert!(range([0, 1, 0]).is_err());
    assert!(range([i64::MIN, i64::MAX, 1]).is_err());
    let range = |numbers: [f32; 3]| run(Op::Range, &numbers.map(Array::number).each_ref());
    assert_eq!(range([1.0, 2.0, 0.25]), Ok(singles(&[1.0, 1.25, 1.5, 1.75])));
    assert_eq!(range([1.0, 0.0, -0.4]).map(|array| array.len()), Ok(3));
    assert_eq!(range([1.0, 0.0, 1.0]), Ok(singles(&[])));
    for numbers in [[0.0, 1.0, 0.0], [0.0, f32::NAN, 1.0], [0.0, f32::INFINITY, 1.0], [0.0, 1.0, 1e-30]] {
        assert!(range(numbers).is_err(), "{numbers:?}");
    }
    refused(Op::Range, &[&list(&[1]), &list(&[2]), &singles(&[1.0])], "numbers of single precision");

    check(Op::ConstantOfShape(singles(&[2.5])), &[&list(&[1, 2])], &{
        Array::new(&[1, 2], Data::F32(vec![2.5; 2])).unwrap()
    });
    check(Op::ConstantOfShape(list(&[3])), &[&list(&[])], &ints(&[], &[3]));
    check(Op::ConstantOfShape(bools(&[true])), &[&list(&[0, 2])], &{
        Array::new(&[0, 2], Data::Bool(Vec::new())).unwrap()
    });
    refused(Op::ConstantOfShape(list(&[3])), &[&list(&[-1])], "-1 is not a size");
    refused(Op::ConstantOfShape(list(&[3])), &[&list(&[1 << 20, 1 << 20])], "more than");
    refused(Op::ConstantOfShape(list(&[3, 4])), &[&list(&[1])], "a single number");
}

#[test]
fn other_operations_run_on_tensors() {
    let x = singles(&[1.0]);
    for op in [Op::MatMul, Op::Softmax(Along { axis: 0 }), Op::GlobalMaxPool, Op::Dropout] {
        assert!(evaluate(&op, &[Some(&x), Some(&x)], 1).is_none(), "{}", op.name());
    }
}
