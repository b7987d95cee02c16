//! Slices that indices name.

use super::*;
use crate::graph::GatherNd;

#[test]
fn slices_are_scattered_where_indices_point() {
    let op = || Op::ScatterNd;
    // The examples of ONNX: single elements, and whole slices.
    let x = list(&[1, 2, 3, 4, 5, 6, 7, 8]);
    let updates = list(&[9, 10, 11, 12]);
    let expected = list(&[1, 11, 3, 10, 9, 6, 7, 12]);
    check(op(), &[&x, &ints(&[4, 1], &[4, 3, 1, 7]), &updates], &expected);
    check(op(), &[&x, &ints(&[4, 1], &[-4, -5, -7, -1]), &updates], &expected);
    let x = counted(&[3, 2, 2]);
    let updates = ints(&[2, 2, 2], &[-1, -2, -3, -4, -5, -6, -7, -8]);
    let expected = ints(&[3, 2, 2], &[-5, -6, -7, -8, 4, 5, 6, 7, -1, -2, -3, -4]);
    check(op(), &[&x, &ints(&[2, 1], &[2, 0]), &updates], &expected);
    let pairs = ints(&[1, 2, 2], &[0, 1, 2, 0]);
    let expected = ints(&[3, 2, 2], &[0, 1, -1, -2, 4, 5, 6, 7, -3, -4, 10, 11]);
    check(op(), &[&x, &pairs, &ints(&[1, 2, 2], &[-1, -2, -3, -4])], &expected);
    // Of two updates of one place the last counts; no update changes nothing.
    check(op(), &[&list(&[1, 2]), &ints(&[2, 1], &[1, 1]), &list(&[8, 9])], &list(&[1, 9]));
    check(op(), &[&list(&[1, 2]), &ints(&[0, 1], &[]), &list(&[])], &list(&[1, 2]));
    check(op(), &[&ints(&[2, 0], &[]), &ints(&[1, 1], &[1]), &ints(&[1, 0], &[])], &ints(&[2, 0], &[]));

    for (indices, updates, reason) in [
        (ints(&[1, 1], &[2]), list(&[9]), "no index [2]"),
        (ints(&[1, 1], &[i64::MIN]), list(&[9]), "no index"),
        (ints(&[1, 2], &[0, 0]), list(&[9]), "do not point into [2]"),
        (ints(&[1, 0], &[]), list(&[9]), "do not point into [2]"),
        (ints(&[], &[0]), list(&[9]), "do not point into [2]"),
        (ints(&[1, 1], &[0]), list(&[9, 9]), "updates [2] do not fit"),
        (ints(&[1, 1], &[0]), ints(&[], &[9]), "updates [] do not fit"),
        (ints(&[1, 1], &[0]), singles(&[9.0]), "single precision"),
    ] {
        refused(op(), &[&list(&[1, 2]), &indices, &updates], reason);
    }
    refused(op(), &[&list(&[1]), &singles(&[0.0]), &list(&[1])], "whole numbers");
}

#[test]
fn slices_are_gathered_where_indices_point() {
    let op = |batch_axes| Op::GatherNd(GatherNd { batch_axes });
    // The examples of ONNX: elements, rows, rows of several axes, and parts of their own.
    let x = ints(&[2, 2], &[0, 1, 2, 3]);
    check(op(0), &[&x, &ints(&[2, 2], &[0, 0, 1, 1])], &list(&[0, 3]));
    check(op(0), &[&x, &ints(&[2, 1], &[1, 0])], &ints(&[2, 2], &[2, 3, 0, 1]));
    check(op(0), &[&x, &ints(&[2, 1], &[-1, -2])], &ints(&[2, 2], &[2, 3, 0, 1]));
    let x = ints(&[2, 2, 2], &[0, 1, 2, 3, 4, 5, 6, 7]);
    check(op(0), &[&x, &ints(&[2, 2], &[0, 1, 1, 0])], &ints(&[2, 2], &[2, 3, 4, 5]));
    check(op(0), &[&x, &ints(&[2, 1, 2], &[0, 1, 1, 0])], &ints(&[2, 1, 2], &[2, 3, 4, 5]));
    check(op(1), &[&x, &ints(&[2, 1], &[1, 0])], &ints(&[2, 2], &[2, 3, 4, 5]));
    check(op(1), &[&x, &ints(&[2, 2, 1], &[1, 0, 0, 0])], &ints(&[2, 2, 2], &[2, 3, 0, 1, 4, 5, 4, 5]));
    check(op(0), &[&x, &ints(&[0, 1], &[])], &ints(&[0, 2, 2], &[]));
    for (axes, indices, reason) in [
        (0, ints(&[1, 1], &[2]), "no index [2]"),
        (0, ints(&[1, 1], &[i64::MIN]), "no index"),
        (0, ints(&[1, 4], &[0; 4]), "do not point into [2, 2, 2]"),
        (0, ints(&[1, 0], &[]), "do not point into [2, 2, 2]"),
        (0, ints(&[], &[0]), "do not point into [2, 2, 2]"),
        (1, ints(&[3, 1], &[0; 3]), "not in common"),
        (3, ints(&[2, 2, 2, 1], &[0; 8]), "do not point into"),
        (usize::MAX, ints(&[1, 1], &[0]), "do not point into"),
    ] {
        refused(op(axes), &[&x, &indices], reason);
    }
    refused(op(0), &[&x, &singles(&[0.0])], "whole numbers");
}
