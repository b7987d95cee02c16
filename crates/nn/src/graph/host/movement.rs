//! Operations that only move elements.

use super::{
    Answer, Data, Inputs, Walk, assembled, axes_of, axis_of, bounded, broadcast, check_rank, common_kind,
    copied, picked, product, shape_of, steps_of,
};
use crate::graph::Array;

pub(super) fn concat(axis: isize, arrays: &[&Array]) -> Answer<Array> {
    let first = arrays.first().ok_or("there are no inputs")?;
    let kind = common_kind(arrays)?;
    let axis = axis_of(axis as i64, first.shape().len())?;
    let mut shape = first.shape().to_vec();
    shape[axis] = 0;
    for array in arrays {
        let sizes = array.shape();
        let fits = |(at, size)| at == axis || size == first.shape()[at];
        if sizes.len() != shape.len() || !sizes.iter().copied().enumerate().all(fits) {
            return Err(format!("{sizes:?} cannot be joined to {:?} along axis {axis}", first.shape()));
        }
        shape[axis] = shape[axis].checked_add(sizes[axis]).ok_or("the output is too large")?;
    }
    let places = (0..product(&shape[..axis])).flat_map(|row| {
        arrays.iter().flat_map(move |array| {
            let len = product(&array.shape()[axis..]);
            (row * len..(row + 1) * len).map(|at| (array.data(), at))
        })
    });
    assembled(kind, &shape, places)
}

/// The sizes of the parts of an axis, as listed or equal.
pub(super) fn parts(size: usize, sizes: Option<&[i64]>, count: usize) -> Answer<Vec<usize>> {
    if let Some(sizes) = sizes {
        if sizes.len() != count {
            return Err(format!("there are {} sizes for {count} outputs", sizes.len()));
        }
        let parts: Option<Vec<usize>> = sizes.iter().map(|&size| usize::try_from(size).ok()).collect();
        return parts
            .filter(|parts| parts.iter().try_fold(0usize, |sum, &part| sum.checked_add(part)) == Some(size))
            .ok_or_else(|| format!("an axis of size {size} cannot be split into {sizes:?}"));
    }
    let Some(others) = count.checked_sub(1) else { return Err("there are no outputs".into()) };
    let part = size.div_ceil(count);
    match part.checked_mul(others).and_then(|before| size.checked_sub(before)) {
        Some(last) => Ok((0..count).map(|at| if at < others { part } else { last }).collect()),
        None => Err(format!("an axis of size {size} cannot be split into {count} parts of size {part}")),
    }
}

/// Parts of these sizes, whose sum is that of the axis.
pub(super) fn split(x: &Array, axis: usize, sizes: &[usize]) -> Answer<Vec<Array>> {
    let steps = steps_of(x.shape());
    let mut shape = x.shape().to_vec();
    let mut start = 0;
    let part = |&size: &usize| {
        shape[axis] = size;
        let walk = Walk::new(&shape, &steps, (start as isize).wrapping_mul(steps[axis]));
        start += size;
        picked(x, &shape, walk)
    };
    sizes.iter().map(part).collect()
}

pub(super) fn slice(inputs: &Inputs) -> Answer<Array> {
    let (x, starts, ends) = (inputs.required(0)?, inputs.list(1)?, inputs.list(2)?);
    let rank = x.shape().len();
    let count = starts.len();
    if count > rank {
        return Err(format!("there are {count} starts for {:?}", x.shape()));
    }
    let axes = match inputs.optional_list(3)? {
        Some(axes) => axes_of(axes, rank)?,
        None => (0..count).collect(),
    };
    let strides = inputs.optional_list(4)?;
    let stride_count = strides.map_or(count, <[i64]>::len);
    if [ends.len(), axes.len(), stride_count] != [count; 3] {
        let (ends, axes) = (ends.len(), axes.len());
        return Err(format!("there are {count} starts, {ends} ends, {axes} axes and {stride_count} steps"));
    }
    let (mut shape, mut steps, mut at) = (x.shape().to_vec(), steps_of(x.shape()), 0isize);
    for (index, &axis) in axes.iter().enumerate() {
        let step = strides.map_or(1, |strides| strides[index]);
        let (start, len) = sliced(shape[axis], [starts[index], ends[index], step])?;
        at = at.wrapping_add((start as isize).wrapping_mul(steps[axis]));
        shape[axis] = len;
        steps[axis] = steps[axis].wrapping_mul(step as isize);
    }
    picked(x, &shape, Walk::new(&shape, &steps, at))
}

/// The first index and the number of indices of a slice of an axis, by ONNX's rules for bounds outside.
fn sliced(size: usize, [start, end, step]: [i64; 3]) -> Answer<(usize, usize)> {
    let (size, step) = (size as i128, i128::from(step));
    if step == 0 {
        return Err("a step of a slice is 0".into());
    }
    if size == 0 {
        return Ok((0, 0));
    }
    let from_end = |index: i64| i128::from(index) + if index < 0 { size } else { 0 };
    let (start, distance) = if step > 0 {
        let start = from_end(start).clamp(0, size);
        (start, from_end(end).clamp(0, size) - start)
    } else {
        let start = from_end(start).clamp(0, size - 1);
        (start, start - from_end(end).clamp(-1, size - 1))
    };
    let step = step.abs();
    Ok((start as usize, ((distance.max(0) + step - 1) / step) as usize))
}

/// Pads with a number. Negative pads remove elements.
pub(super) fn pad(inputs: &Inputs) -> Answer<Array> {
    let (x, pads, value) = (inputs.required(0)?, inputs.list(1)?, inputs.number(2)?);
    let rank = x.shape().len();
    let axes = match inputs.optional_list(3)? {
        Some(axes) => axes_of(axes, rank)?,
        None => (0..rank).collect(),
    };
    if pads.len() != 2 * axes.len() {
        return Err(format!("there are {} pads for {} axes of {:?}", pads.len(), axes.len(), x.shape()));
    }
    let mut shape = x.shape().to_vec();
    // The part of the input that is left, and where it starts in the input and in the output.
    let (mut part, mut from, mut to) = (x.shape().to_vec(), vec![0; rank], vec![0; rank]);
    for (index, &axis) in axes.iter().enumerate() {
        let (before, after) = (i128::from(pads[index]), i128::from(pads[index + axes.len()]));
        let size = shape[axis] as i128;
        let padded = size + before + after;
        shape[axis] = usize::try_from(padded)
            .map_err(|_| format!("an axis of size {size} cannot be padded by {before} and {after}"))?;
        let (first, last) = ((-before).clamp(0, size), (padded - before).clamp(0, size));
        part[axis] = (last - first).max(0) as usize;
        (from[axis], to[axis]) = (first as isize, before.clamp(0, padded) as isize);
    }
    let zero = Data::Bool(vec![false]);
    let fill = value.map_or(&zero, Array::data);
    let walk = |sizes: &[usize], start: &[isize]| {
        let steps = steps_of(sizes);
        let distance = |(start, step): (&isize, &isize)| start.wrapping_mul(*step);
        let at = start.iter().zip(&steps).map(distance).fold(0, isize::wrapping_add);
        Walk::new(&part, &steps, at)
    };
    let mut moves = walk(x.shape(), &from).zip(walk(&shape, &to)).take(product(&part)).peekable();
    // The part goes to places of the output in ascending order.
    let places = (0..).map(|at: usize| match moves.next_if(|&(_, to)| to == at) {
        Some((from, _)) => (x.data(), from),
        None => (fill, 0),
    });
    assembled(x.kind(), &shape, places)
}

pub(super) fn transpose(x: &Array, order: &[isize]) -> Answer<Array> {
    let rank = x.shape().len();
    let order = match order {
        [] => (0..rank).rev().collect(),
        _ if order.len() != rank => {
            return Err(format!("the order {order:?} is not one of the axes of {:?}", x.shape()));
        }
        _ => axes_of(&order.iter().map(|&axis| axis as i64).collect::<Vec<_>>(), rank)?,
    };
    let steps = steps_of(x.shape());
    let shape: Vec<usize> = order.iter().map(|&axis| x.shape()[axis]).collect();
    let steps: Vec<isize> = order.iter().map(|&axis| steps[axis]).collect();
    picked(x, &shape, Walk::new(&shape, &steps, 0))
}

pub(super) fn reshape(x: &Array, sizes: &[i64], allow_zero: bool) -> Answer<Array> {
    let fails = || format!("{:?} cannot be reshaped to {sizes:?}", x.shape());
    check_rank(sizes.len())?;
    let size = |(axis, &size): (usize, &i64)| match size {
        -1 => Ok(1),
        0 if !allow_zero => x.shape().get(axis).copied().ok_or_else(fails),
        size => usize::try_from(size).map_err(|_| fails()),
    };
    let mut shape = sizes.iter().enumerate().map(size).collect::<Answer<Vec<usize>>>()?;
    let mut open = (0..sizes.len()).filter(|&axis| sizes[axis] == -1);
    if let Some(axis) = open.next() {
        let others = shape.iter().try_fold(1usize, |len, &size| len.checked_mul(size));
        let others = others.filter(|&others| others > 0 && open.next().is_none()).ok_or_else(fails)?;
        shape[axis] = x.len() / others;
    }
    if shape.iter().try_fold(1usize, |len, &size| len.checked_mul(size)) != Some(x.len()) {
        return Err(fails());
    }
    copied(x, &shape)
}

pub(super) fn flatten(x: &Array, axis: isize) -> Answer<Array> {
    let sizes = x.shape();
    // The axis after the last one is allowed too.
    let axis = match usize::try_from(axis) {
        Ok(axis) if axis == sizes.len() => axis,
        _ => axis_of(axis as i64, sizes.len())?,
    };
    let matrix = [product(&sizes[..axis]), product(&sizes[axis..])];
    copied(x, &matrix)
}

pub(super) fn squeeze(x: &Array, axes: Option<&[i64]>) -> Answer<Array> {
    let sizes = x.shape();
    let axes = match axes {
        Some(axes) => axes_of(axes, sizes.len())?,
        None => (0..sizes.len()).filter(|&axis| sizes[axis] == 1).collect(),
    };
    if let Some(axis) = axes.iter().find(|&&axis| sizes[axis] != 1) {
        return Err(format!("axis {axis} of {sizes:?} is not of size 1"));
    }
    let shape: Vec<usize> =
        (0..sizes.len()).filter(|axis| !axes.contains(axis)).map(|axis| sizes[axis]).collect();
    copied(x, &shape)
}

pub(super) fn unsqueeze(x: &Array, axes: &[i64]) -> Answer<Array> {
    let rank = x.shape().len() + axes.len();
    // An output of too many axes is refused before there is a list of them.
    check_rank(rank)?;
    let axes = axes_of(axes, rank)?;
    let mut sizes = x.shape().iter().copied();
    let size = |axis| if axes.contains(&axis) { 1 } else { sizes.next().unwrap_or(1) };
    let shape: Vec<usize> = (0..rank).map(size).collect();
    copied(x, &shape)
}

pub(super) fn expand(x: &Array, sizes: &[i64]) -> Answer<Array> {
    let sizes = shape_of(sizes)?;
    let shape = broadcast(x.shape(), &sizes)
        .ok_or_else(|| format!("{:?} does not broadcast with {sizes:?}", x.shape()))?;
    picked(x, &shape, Walk::broadcast(x.shape(), &shape))
}

pub(super) fn tile(x: &Array, repeats: &[i64]) -> Answer<Array> {
    let sizes = x.shape();
    let counts = shape_of(repeats)?;
    if counts.len() != sizes.len() {
        return Err(format!("there are {} repeats for {sizes:?}", counts.len()));
    }
    let repeated = sizes.iter().zip(&counts).map(|(size, count)| size.checked_mul(*count));
    let shape = repeated.collect::<Option<Vec<usize>>>().ok_or("the output is too large")?;
    bounded(&shape)?;
    // Two axes for each: over the repeats, and inside of one.
    let split: Vec<usize> = counts.iter().zip(sizes).flat_map(|(&count, &size)| [count, size]).collect();
    let steps: Vec<isize> = steps_of(sizes).into_iter().flat_map(|step| [0, step]).collect();
    picked(x, &shape, Walk::new(&split, &steps, 0))
}
