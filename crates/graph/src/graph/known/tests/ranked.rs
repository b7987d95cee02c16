//! Running sums, largest elements and their places.

use super::*;
use crate::graph::{ArgMax, CumSum, TopK};

#[test]
fn running_sums() {
    let sum = |exclusive, reverse| Op::CumSum(CumSum { exclusive, reverse });
    let (op, x) = (|| sum(false, false), counted(&[2, 3]));
    check(op(), &[&x, &list(&[1])], &ints(&[2, 3], &[0, 1, 3, 3, 7, 12]));
    check(op(), &[&x, &ints(&[], &[-2])], &ints(&[2, 3], &[0, 1, 2, 3, 5, 7]));
    check(op(), &[&singles(&[1e8, 1.0, -1e8])], &singles(&[1e8, 1e8, 1.0]));
    check(sum(true, false), &[&x, &list(&[1])], &ints(&[2, 3], &[0, 0, 1, 0, 3, 7]));
    check(sum(false, true), &[&x, &list(&[1])], &ints(&[2, 3], &[3, 3, 2, 12, 9, 5]));
    check(sum(true, true), &[&x, &list(&[1])], &ints(&[2, 3], &[3, 2, 0, 9, 5, 0]));
    check(sum(true, true), &[&x, &list(&[0])], &ints(&[2, 3], &[3, 4, 5, 0, 0, 0]));
    refused(op(), &[&list(&[i64::MAX, 1])], TOO_LARGE);
    refused(op(), &[&ints(&[], &[1])], "no axis 0");
    refused(op(), &[&x, &list(&[0, 1])], "2 axes instead of 1");
}

#[test]
fn places_of_extremes() {
    let op = |axis, keep_dims, last, smallest| Op::ArgMax(ArgMax { axis, keep_dims, last, smallest });
    let x = ints(&[2, 3], &[4, 1, 4, 0, 7, 0]);
    check(op(1, true, false, false), &[&x], &ints(&[2, 1], &[0, 1]));
    check(op(-1, false, true, false), &[&x], &list(&[2, 1]));
    check(op(1, false, false, true), &[&x], &list(&[1, 0]));
    check(op(1, false, true, true), &[&x], &list(&[1, 2]));
    check(op(0, false, false, false), &[&x], &list(&[0, 1, 0]));
    let nan = singles(&[1.0, f32::NAN, 2.0]);
    check(op(0, true, false, false), &[&nan], &list(&[1]));
    check(op(0, true, false, true), &[&nan], &list(&[1]));
    check(op(0, false, false, false), &[&ints(&[2, 0], &[])], &list(&[]));
    refused(op(1, false, false, false), &[&ints(&[2, 0], &[])], "no elements along axis 1");
    refused(op(2, false, false, false), &[&x], "no axis 2");
}

#[test]
fn largest_elements_and_their_places() {
    let op = |axis, largest| Op::TopK(TopK { axis, largest });
    let x = ints(&[2, 3], &[4, 1, 4, 0, 7, 0]);
    let two = ints(&[2, 2], &[4, 4, 7, 0]);
    assert_eq!(outputs(&op(1, true), &[&x, &list(&[2])], 2), Ok(vec![two, ints(&[2, 2], &[0, 2, 1, 0])]));
    let one = [ints(&[1, 3], &[0, 1, 0]), ints(&[1, 3], &[1, 0, 1])];
    assert_eq!(outputs(&op(0, false), &[&x, &list(&[1])], 2), Ok(one.to_vec()));
    let numbers = singles(&[1.0, f32::NAN, 2.0, -1.0]);
    assert_eq!(outputs(&op(0, true), &[&numbers, &list(&[4])], 2).unwrap()[1], list(&[1, 2, 0, 3]));
    assert_eq!(outputs(&op(0, false), &[&numbers, &list(&[4])], 2).unwrap()[1], list(&[3, 0, 2, 1]));
    let none = [ints(&[2, 0], &[]), ints(&[2, 0], &[])];
    assert_eq!(outputs(&op(1, true), &[&x, &list(&[0])], 2), Ok(none.to_vec()));
    refused(op(1, true), &[&x, &list(&[4])], "no [4] elements along axis 1");
    refused(op(1, true), &[&x, &list(&[-1])], "no [-1] elements");
    refused(op(1, true), &[&x, &list(&[1, 1])], "2 numbers of elements");
    refused(op(1, true), &[&x], "input 1 is missing");
}
