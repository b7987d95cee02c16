//! Reductions over axes, and running sums.

use super::elementwise::{larger, not_numbers, truncated};
use super::{
    Answer, Number, TOO_LARGE, Walk, axes_of, axis_of, bounded, described, floats, integers, product, room,
    whole,
};
use crate::graph::{Array, CumSum, Kind, Reduce, ReduceKind};

/// An array whose elements are reduced to those of a shape with the same number of axes.
struct Groups<'a> {
    x: &'a Array,
    /// The output's shape with the reduced axes.
    kept: Vec<usize>,
    /// The number of elements of the output.
    len: usize,
    /// The number of elements in each group.
    count: usize,
}

impl Groups<'_> {
    /// Adds every element to the result of its group, whose place is also given.
    fn accumulated<N: Number>(&self, start: N, add: impl Fn(usize, N, N) -> Answer<N>) -> Answer<Vec<N>> {
        let mut results = room(self.len)?;
        results.resize(self.len, start);
        let mut places = Walk::broadcast(&self.kept, self.x.shape());
        for at in 0..self.x.len() {
            let place = places.step();
            results[place] = add(place, results[place], N::read(self.x.data(), at))?;
        }
        Ok(results)
    }

    fn floats(&self, kind: ReduceKind) -> Answer<Vec<f64>> {
        let plain =
            |start: f64, add: fn(f64, f64) -> f64| self.accumulated(start, |_, sum, x| Ok(add(sum, x)));
        let mut results = match kind {
            ReduceKind::Sum | ReduceKind::Mean | ReduceKind::LogSum => plain(0.0, |sum, x| sum + x),
            ReduceKind::Prod => plain(1.0, |product, x| product * x),
            ReduceKind::Max => plain(f64::NEG_INFINITY, larger),
            ReduceKind::Min => plain(f64::INFINITY, |least, x| -larger(-least, -x)),
            ReduceKind::L1 => plain(0.0, |sum, x| sum + x.abs()),
            ReduceKind::L2 | ReduceKind::SumSquare => plain(0.0, |sum, x| sum + x * x),
            ReduceKind::LogSumExp => {
                let mut largest = plain(f64::NEG_INFINITY, larger)?;
                largest.iter_mut().filter(|x| x.is_infinite()).for_each(|x| *x = 0.0);
                let mut sums = self.accumulated(0.0, |at, sum, x: f64| Ok(sum + (x - largest[at]).exp()))?;
                sums.iter_mut().zip(&largest).for_each(|(sum, largest)| *sum = sum.ln() + largest);
                Ok(sums)
            }
        }?;
        let count = self.count as f64;
        for x in &mut results {
            *x = match kind {
                ReduceKind::Mean => *x / count,
                ReduceKind::L2 => x.sqrt(),
                ReduceKind::LogSum => x.ln(),
                _ => *x,
            };
        }
        Ok(results)
    }

    fn integers(&self, kind: ReduceKind) -> Answer<Vec<i64>> {
        let checked = |start: i64, add: fn(i64, i64) -> Option<i64>| {
            self.accumulated(start, |_, sum, x| add(sum, x).ok_or_else(|| TOO_LARGE.into()))
        };
        match kind {
            ReduceKind::Sum => checked(0, i64::checked_add),
            ReduceKind::Mean => {
                let (sums, count) = (checked(0, i64::checked_add)?, whole(self.count)?);
                let mean = |sum: i64| sum.checked_div(count).ok_or("there is no mean of no numbers");
                sums.into_iter().map(|sum| mean(sum).map_err(String::from)).collect()
            }
            ReduceKind::Prod => checked(1, i64::checked_mul),
            ReduceKind::Max => checked(i64::MIN, |a, b| Some(a.max(b))),
            ReduceKind::Min => checked(i64::MAX, |a, b| Some(a.min(b))),
            ReduceKind::L1 => checked(0, |sum, x| sum.checked_add(x.checked_abs()?)),
            ReduceKind::SumSquare => checked(0, |sum, x| sum.checked_add(x.checked_mul(x)?)),
            ReduceKind::L2 | ReduceKind::LogSum | ReduceKind::LogSumExp => {
                self.floats(kind)?.into_iter().map(truncated).collect()
            }
        }
    }
}

/// Reduces over the axes. Without axes over all, or over none, where each element is a group.
pub(super) fn reduce(reduce: Reduce, x: &Array, axes: &[i64]) -> Answer<Array> {
    let (kind, rank) = (reduce.kind, x.shape().len());
    let reduced = |axis: usize, axes: &[usize]| axes.contains(&axis);
    let axes = match (axes, reduce.no_axes_is_identity) {
        ([], false) => (0..rank).collect(),
        _ => axes_of(axes, rank)?,
    };
    let kept: Vec<usize> =
        (0..rank).map(|axis| if reduced(axis, &axes) { 1 } else { x.shape()[axis] }).collect();
    let output: Vec<usize> =
        (0..rank).filter(|&axis| reduce.keep_dims || !reduced(axis, &axes)).map(|axis| kept[axis]).collect();
    let count = product(&axes.iter().map(|&axis| x.shape()[axis]).collect::<Vec<_>>());
    let groups = Groups { x, len: bounded(&output)?, kept, count };
    match (x.kind(), kind) {
        (Kind::F32 | Kind::F64, _) => floats(x.kind(), &output, groups.floats(kind)?.into_iter()),
        (Kind::I64, _) => integers(&output, groups.integers(kind)?.into_iter().map(Ok)),
        (Kind::Bool, ReduceKind::Max) => {
            super::built(&output, groups.accumulated(false, |_, any, x| Ok(any | x))?.into_iter().map(Ok))
        }
        (Kind::Bool, ReduceKind::Min) => {
            super::built(&output, groups.accumulated(true, |_, all, x| Ok(all & x))?.into_iter().map(Ok))
        }
        (Kind::Bool, _) => Err(not_numbers(x)),
    }
}

/// Sums along an axis, the first one if it is left out, of the elements up to each.
pub(super) fn running_sum(x: &Array, axis: Option<&[i64]>, options: CumSum) -> Answer<Array> {
    let axis = match axis {
        None => axis_of(0, x.shape().len())?,
        Some(&[axis]) => axis_of(axis, x.shape().len())?,
        Some(axes) => return Err(format!("there are {} axes instead of 1", axes.len())),
    };
    match x.kind() {
        Kind::F32 | Kind::F64 => {
            let sums = running(x, axis, options, |sum: f64, x| Ok(sum + x))?;
            floats(x.kind(), x.shape(), sums.into_iter())
        }
        Kind::I64 => {
            let add = |sum: i64, x| sum.checked_add(x).ok_or_else(|| TOO_LARGE.into());
            integers(x.shape(), running(x, axis, options, add)?.into_iter().map(Ok))
        }
        Kind::Bool => Err(format!("there are no sums of {}", described(x))),
    }
}

fn running<N: Number + Default>(
    x: &Array,
    axis: usize,
    options: CumSum,
    add: impl Fn(N, N) -> Answer<N>,
) -> Answer<Vec<N>> {
    let len = bounded(x.shape())?;
    let mut sums: Vec<N> = room(len)?;
    sums.resize(len, N::default());
    let (size, inner) = (x.shape()[axis], product(&x.shape()[axis + 1..]));
    for step in 0..len {
        let at = if options.reverse { len - 1 - step } else { step };
        let place = at / inner % size;
        let is_first = place == if options.reverse { size - 1 } else { 0 };
        let before = if options.reverse { at + inner } else { at.wrapping_sub(inner) };
        sums[at] = match (is_first, options.exclusive) {
            (true, true) => N::default(),
            (true, false) => N::read(x.data(), at),
            (false, true) => add(sums[before], N::read(x.data(), before))?,
            (false, false) => add(sums[before], N::read(x.data(), at))?,
        };
    }
    Ok(sums)
}
