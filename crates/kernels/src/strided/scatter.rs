//! Sums of the elements that were copied from the same place: the gradient of copying by indices.

use super::TASK;
use crate::error::{check_len, invalid};
use crate::operand::kernels;
use crate::profile::span;
use crate::{Cpu, Result};

/// y of `outer` x `size` x `inner` elements was copied to x of `outer` x `indices` x `inner`: x at j is y at `indices[j]`.
#[derive(Debug, Clone, Copy)]
pub struct Scatter<'a> {
    /// The sizes before the axis, multiplied.
    pub outer: usize,
    /// The size of y's axis.
    pub size: usize,
    /// The place along y's axis of each element along x's axis; `None` where x holds something else.
    pub indices: &'a [Option<usize>],
    /// The sizes after the axis, multiplied.
    pub inner: usize,
}

kernels! {
    /// y at i = the sum of x at all j with `indices[j]` = i, in the order of j.
    ///
    /// # Errors
    /// If a length does not fit, or an index is outside of y's axis.
    pub fn add_taken<T: Element>(cpu: &Cpu, scatter: &Scatter<'_>; x: &[T]; y: &mut [T]) -> Result<()> {
        span!("add taken", x, y);
        let operation = "adding up what was taken";
        let &Scatter { outer, size, indices, inner } = scatter;
        let len = |size: usize| outer.checked_mul(size).and_then(|len| len.checked_mul(inner));
        let (Some(x_len), Some(y_len)) = (len(indices.len()), len(size)) else {
            return Err(invalid(operation, format!("{outer} x {size} x {inner} elements overflow")));
        };
        check_len(operation, "x", x.len(), x_len)?;
        check_len(operation, "y", y.len(), y_len)?;
        if let Some(index) = indices.iter().flatten().find(|&&index| index >= size) {
            return Err(invalid(operation, format!("the index {index} is outside of an axis of {size}")));
        }
        if y.is_empty() {
            return Ok(());
        }
        // The elements of x by their place in y: those of place i are `sources[firsts[i]..firsts[i + 1]]`.
        let mut firsts = vec![0usize; size + 1];
        indices.iter().flatten().for_each(|&index| firsts[index + 1] += 1);
        (0..size).for_each(|index| firsts[index + 1] += firsts[index]);
        let (mut next, mut sources) = (firsts.clone(), vec![0; firsts[size]]);
        for (source, &index) in
            indices.iter().enumerate().filter_map(|(at, index)| Some((at, index.as_ref()?)))
        {
            sources[next[index]] = source;
            next[index] += 1;
        }
        let at_once = TASK.div_ceil(inner);
        cpu.for_each(x.len().max(y.len()), y.chunks_mut(at_once * inner).enumerate(), |(task, y)| {
            for (row, y) in (task * at_once..).zip(y.chunks_mut(inner)) {
                let (outer, place) = (row / size, row % size);
                y.fill(T::zero());
                for &source in &sources[firsts[place]..firsts[place + 1]] {
                    let x = &x[(outer * indices.len() + source) * inner..][..inner];
                    y.iter_mut().zip(x).for_each(|(y, &x)| *y += x);
                }
            }
        });
        Ok(())
    }
}
