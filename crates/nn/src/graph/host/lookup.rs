//! Lookups by index, and arrays that are made from sizes and indices.

use super::{
    Answer, Inputs, Number, assembled, axis_of, bounded, common_kind, described, floats, integers, picked,
    place_of, product, room, shape_of, whole,
};
use crate::graph::{Array, Data, Kind};

/// The slices of an array along an axis that the indices name.
pub(super) fn gather(x: &Array, indices: &Array, axis: isize) -> Answer<Array> {
    let sizes = x.shape();
    let axis = axis_of(axis as i64, sizes.len())?;
    let Data::I64(numbers) = indices.data() else {
        return Err(format!("indices must be whole numbers, but are {}", described(indices)));
    };
    let shape = [&sizes[..axis], indices.shape(), &sizes[axis + 1..]].concat();
    bounded(&shape)?;
    let mut chosen = room(numbers.len())?;
    for &number in numbers {
        chosen.push(
            place_of(number, sizes[axis])
                .ok_or_else(|| format!("there is no index {number} along axis {axis} of {sizes:?}"))?,
        );
    }
    let inner = product(&sizes[axis + 1..]);
    let places = (0..product(&sizes[..axis])).flat_map(|row| {
        chosen.iter().flat_map(move |index| {
            let start = (row * sizes[axis] + index) * inner;
            start..start + inner
        })
    });
    picked(x, &shape, places)
}

/// The slices that GatherND takes: how many axes say which slice, the slices by number, and the sizes of the output.
pub(in crate::graph) struct Gathered {
    pub(in crate::graph) axes: usize,
    pub(in crate::graph) slices: Vec<usize>,
    pub(in crate::graph) shape: Vec<usize>,
}

/// What GatherND takes of an array of these sizes.
pub(in crate::graph) fn gathered(sizes: &[usize], indices: &Array, batch_axes: usize) -> Answer<Gathered> {
    let Data::I64(numbers) = indices.data() else {
        return Err(format!("indices must be whole numbers, but are {}", described(indices)));
    };
    let misfit = || format!("indices of shape {:?} do not point into {sizes:?}", indices.shape());
    let (&depth, outer) = indices.shape().split_last().ok_or_else(misfit)?;
    let axes = batch_axes.checked_add(depth).filter(|&axes| depth > 0 && axes <= sizes.len());
    let axes = axes.ok_or_else(misfit)?;
    if outer.get(..batch_axes).is_none_or(|batch| *batch != sizes[..batch_axes]) {
        return Err(format!("{} and its first {batch_axes} axes are not in common", misfit()));
    }
    let shape = [outer, &sizes[axes..]].concat();
    bounded(&shape)?;
    let (own, each) = (&sizes[batch_axes..axes], product(&outer[batch_axes..]));
    let mut slices = room(numbers.len() / depth)?;
    for (row, index) in numbers.chunks_exact(depth).enumerate() {
        let slice = index.iter().zip(own).try_fold(row / each, |slice, (&number, &size)| {
            slice.checked_mul(size)?.checked_add(place_of(number, size)?)
        });
        slices.push(slice.ok_or_else(|| format!("there is no index {index:?} in {own:?}"))?);
    }
    Ok(Gathered { axes, slices, shape })
}

/// The slices of an array where indices point.
pub(super) fn gather_nd(x: &Array, indices: &Array, batch_axes: usize) -> Answer<Array> {
    let Gathered { axes, slices, shape } = gathered(x.shape(), indices, batch_axes)?;
    let inner = product(&x.shape()[axes..]);
    picked(x, &shape, slices.into_iter().flat_map(|slice| slice * inner..(slice + 1) * inner))
}

/// Which slice each slice of ScatterND's output is: one of the data by its number or, counted on from these, one of the updates.
pub(in crate::graph) fn scattered(sizes: &[usize], indices: &Array, updates: &[usize]) -> Answer<Vec<usize>> {
    let Data::I64(numbers) = indices.data() else {
        return Err(format!("indices must be whole numbers, but are {}", described(indices)));
    };
    let (axes, of_updates) = match indices.shape().split_last() {
        Some((&axes, of_updates)) if (1..=sizes.len()).contains(&axes) => (axes, of_updates),
        _ => return Err(format!("indices of shape {:?} do not point into {sizes:?}", indices.shape())),
    };
    if updates != [of_updates, &sizes[axes..]].concat() {
        return Err(format!("updates {updates:?} do not fit {sizes:?} and indices {:?}", indices.shape()));
    }
    let slices = product(&sizes[..axes]);
    let mut from = room(slices)?;
    from.extend(0..slices);
    for (update, index) in numbers.chunks_exact(axes).enumerate() {
        let mut slice = 0;
        for (&number, &size) in index.iter().zip(sizes) {
            let place = place_of(number, size);
            slice =
                slice * size + place.ok_or_else(|| format!("there is no index {index:?} in {sizes:?}"))?;
        }
        from[slice] = slices + update;
    }
    Ok(from)
}

/// An array with other slices where indices point.
pub(super) fn scatter_nd(inputs: &Inputs) -> Answer<Array> {
    let (x, indices, updates) = (inputs.required(0)?, inputs.required(1)?, inputs.required(2)?);
    let kind = common_kind(&[x, updates])?;
    let from = scattered(x.shape(), indices, updates.shape())?;
    let (slices, axes) = (from.len(), indices.shape().last().copied().unwrap_or(0));
    let inner = product(&x.shape()[axes..]);
    let places = from.into_iter().flat_map(|slice| {
        let (data, slice) = if slice < slices { (x.data(), slice) } else { (updates.data(), slice - slices) };
        (slice * inner..(slice + 1) * inner).map(move |at| (data, at))
    });
    assembled(kind, x.shape(), places)
}

/// The sizes of the axes from `start` to before `end`; both are limited to the axes that there are.
pub(super) fn shape(x: &Array, start: isize, end: Option<isize>) -> Answer<Array> {
    let rank = x.shape().len() as isize;
    let limited =
        |axis: isize| if axis < 0 { axis.saturating_add(rank).max(0) } else { axis.min(rank) } as usize;
    let (start, end) = (limited(start), limited(end.unwrap_or(rank)));
    let sizes = x.shape().get(start..end).unwrap_or_default();
    integers(&[sizes.len()], sizes.iter().map(|&size| whole(size)))
}

pub(super) fn size(x: &Array) -> Answer<Array> {
    integers(&[], std::iter::once(whole(x.len())))
}

pub(super) fn range(inputs: &Inputs) -> Answer<Array> {
    let arrays = [inputs.required_number(0)?, inputs.required_number(1)?, inputs.required_number(2)?];
    fn read<N: Number>(arrays: [&Array; 3]) -> [N; 3] {
        arrays.map(|array| N::read(array.data(), 0))
    }
    match common_kind(&arrays)? {
        Kind::I64 => {
            let [start, limit, step] = read::<i64>(arrays).map(i128::from);
            if step == 0 {
                return Err("the step of a range is 0".into());
            }
            let distance = if step > 0 { limit - start } else { start - limit }.max(0);
            let count = (distance + step.abs() - 1) / step.abs();
            let count = usize::try_from(count).map_err(|_| "the range is too long")?;
            // All are between start and limit.
            integers(&[count], (0..).map(|at: i128| Ok((start + at * step) as i64)))
        }
        kind @ (Kind::F32 | Kind::F64) => {
            let [start, limit, step] = read::<f64>(arrays);
            let count = ((limit - start) / step).ceil();
            if !count.is_finite() {
                return Err(format!("there is no range from {start} to {limit} in steps of {step}"));
            }
            // A number beyond all sizes becomes the largest one, which is refused; one below 0 becomes 0.
            floats(kind, &[count as usize], (0..).map(|at: u32| start + f64::from(at) * step))
        }
        Kind::Bool => Err(format!("there is no range of {}", described(arrays[0]))),
    }
}

/// An array of these sizes that is filled with the only element of another.
pub(super) fn filled_with(value: &Array, sizes: &[i64]) -> Answer<Array> {
    if value.len() != 1 {
        return Err(format!("the value must be a single number, but it has {}", described(value)));
    }
    picked(value, &shape_of(sizes)?, std::iter::repeat(0))
}

/// The indices of all elements that are not 0, a row for each axis.
pub(super) fn non_zero(x: &Array) -> Answer<Array> {
    let places = || (0..x.len()).filter(|&at| bool::read(x.data(), at));
    let shape = [x.shape().len(), places().count()];
    let rows = (0..x.shape().len()).flat_map(|axis| {
        let inner = product(&x.shape()[axis + 1..]);
        places().map(move |at| whole(at / inner % x.shape()[axis]))
    });
    integers(&shape, rows)
}

/// A new axis, with one value where an index points and another one elsewhere. Indices outside point nowhere.
pub(super) fn one_hot(inputs: &Inputs, axis: isize) -> Answer<Array> {
    let (indices, depth, values) = (inputs.required(0)?, inputs.required_number(1)?, inputs.required(2)?);
    if values.len() != 2 {
        return Err(format!("there must be 2 values, but there are {}", described(values)));
    }
    let axis = axis_of(axis as i64, indices.shape().len() + 1)?;
    let number = f64::read(depth.data(), 0);
    let depth = usize::try_from(i64::read(depth.data(), 0))
        .ok()
        .filter(|_| !number.is_nan())
        .ok_or_else(|| format!("the depth is {number}"))?;
    let mut shape = indices.shape().to_vec();
    shape.insert(axis, depth);
    let inner = product(&indices.shape()[axis..]);
    let places = (0..).map(|at: usize| {
        let (row, index) = (at / inner / depth, at / inner % depth);
        let wanted = i64::read(indices.data(), row * inner + at % inner);
        (values.data(), usize::from(place_of(wanted, depth) == Some(index)))
    });
    assembled(values.kind(), &shape, places)
}

/// The part of each matrix above or below the k-th diagonal above the main one, and the diagonal; 0 elsewhere.
pub(super) fn triangle(x: &Array, k: Option<&[i64]>, upper: bool) -> Answer<Array> {
    let &[.., rows, columns] = x.shape() else {
        return Err(format!("there are no matrices in {}", described(x)));
    };
    let k = match k {
        None => 0,
        Some(&[k]) => i128::from(k),
        Some(numbers) => return Err(format!("there are {} diagonals instead of 1", numbers.len())),
    };
    let zero = Data::Bool(vec![false]);
    let places = (0..x.len()).map(|at| {
        let (row, column) = ((at / columns % rows) as i128, (at % columns) as i128);
        let kept = if upper { column >= row + k } else { column <= row + k };
        if kept { (x.data(), at) } else { (&zero, 0) }
    });
    assembled(x.kind(), x.shape(), places)
}
