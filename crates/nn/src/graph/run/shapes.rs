//! Operations that move elements: shapes, parts, repetitions.

use convoke_autograd::Tensor;
use convoke_autograd::ops::{self, Slice};

use super::{Inputs, Result, Value, axis_of, refuse};
use crate::graph::host::{self, Gathered};

/// The most elements of an output that repeats its input.
const MOST_ELEMENTS: usize = 1 << 40;

pub(super) fn split(inputs: &Inputs<'_>, axis: isize, outputs: usize) -> Result<Vec<Value>> {
    let x = inputs.tensor(0)?;
    let size = x.shape()[axis_of(&x, axis)?];
    let sizes: Vec<usize> = match inputs.optional_integers(1)? {
        Some(sizes) => sizes.into_iter().map(|size| usize::try_from(size).unwrap_or(usize::MAX)).collect(),
        None => {
            let part = size.div_ceil(outputs.max(1));
            (0..outputs).map(|index| part.min(size.saturating_sub(index * part))).collect()
        }
    };
    if sizes.len() < outputs {
        return refuse(format!("it has {outputs} outputs and {} sizes", sizes.len()));
    }
    Ok(x.split(&sizes, axis)?.into_iter().map(Value::Tensor).collect())
}

pub(super) fn slice(inputs: &Inputs<'_>) -> Result<Tensor> {
    let x = inputs.tensor(0)?;
    let (starts, ends) = (inputs.integers(1)?, inputs.integers(2)?);
    let axes = match inputs.optional_integers(3)? {
        Some(axes) => axes,
        None => (0..starts.len() as isize).collect(),
    };
    let steps = inputs.optional_integers(4)?.unwrap_or_else(|| vec![1; starts.len()]);
    let count = starts.len();
    if [ends.len(), axes.len(), steps.len()] != [count; 3] {
        return refuse("starts, ends, axes and steps are not equally many");
    }
    let slices = (0..count).map(|index| Slice {
        axis: axes[index],
        start: starts[index],
        end: ends[index],
        step: steps[index],
    });
    let shape = x.shape();
    let whole = |slice: &Slice| {
        let size = axis_of(&x, slice.axis).map(|axis| shape[axis] as isize);
        size.is_ok_and(|size| {
            slice.step == 1 && (slice.start == 0 || slice.start <= -size) && slice.end >= size
        })
    };
    let slices: Vec<Slice> = slices.filter(|slice| !whole(slice)).collect();
    Ok(if slices.is_empty() { x } else { x.slice(&slices)? })
}

pub(super) fn reshape(inputs: &Inputs<'_>, allow_zero: bool) -> Result<Tensor> {
    let x = inputs.tensor(0)?;
    let mut sizes = inputs.integers(1)?;
    if let (Some([written, actual]), Some(first)) = (inputs.place.batch, sizes.first_mut())
        && usize::try_from(*first) == Ok(written)
        && x.shape().first() == Some(&actual)
    {
        // The model was written for one size of batch.
        *first = isize::try_from(actual).unwrap_or(isize::MAX);
    }
    if allow_zero && sizes.contains(&0) {
        let shape: Option<Vec<usize>> = sizes.iter().map(|&size| usize::try_from(size).ok()).collect();
        return match shape {
            Some(shape) => Ok(x.reshape(&shape)?),
            None => refuse(format!("the sizes {sizes:?} do not fit a tensor of shape {:?}", x.shape())),
        };
    }
    Ok(x.reshape_onnx(&sizes)?)
}

pub(super) fn flatten(x: &Tensor, axis: isize) -> Result<Tensor> {
    let rank = x.shape().len();
    let axis = if axis == rank as isize { rank } else { axis_of(x, axis)? };
    let product = |sizes: &[usize]| sizes.iter().product::<usize>();
    Ok(x.reshape(&[product(&x.shape()[..axis]), product(&x.shape()[axis..])])?)
}

/// Broadcasting in both directions.
pub(super) fn expand(inputs: &Inputs<'_>) -> Result<Tensor> {
    let (x, sizes) = (inputs.tensor(0)?, inputs.integers(1)?);
    let rank = sizes.len().max(x.shape().len());
    let mut shape = vec![1; rank];
    for (to, &size) in shape[rank - sizes.len()..].iter_mut().zip(&sizes) {
        match usize::try_from(size) {
            Ok(size) => *to = size,
            Err(_) => return refuse(format!("{sizes:?} is not a shape")),
        }
    }
    for (to, &own) in shape[rank - x.shape().len()..].iter_mut().zip(x.shape()) {
        if *to == 1 {
            *to = own;
        }
    }
    // Where both sizes are above 1 and differ, the operation says so.
    Ok(if shape == x.shape() { x } else { x.expand(&shape)? })
}

pub(super) fn tile(inputs: &Inputs<'_>) -> Result<Tensor> {
    let (mut x, repeats) = (inputs.tensor(0)?, inputs.integers(1)?);
    if repeats.len() != x.shape().len() || repeats.iter().any(|&times| times < 1) {
        return refuse(format!("{repeats:?} are not repetitions of the axes of {:?}", x.shape()));
    }
    let total =
        repeats.iter().try_fold(x.len().max(1), |total, &times| total.checked_mul(times.unsigned_abs()));
    if total.is_none_or(|total| total > MOST_ELEMENTS) {
        return refuse(format!("{repeats:?} times {:?} is too large", x.shape()));
    }
    for (axis, &times) in repeats.iter().enumerate() {
        if times > 1 {
            let shape = x.shape().to_vec();
            let [before, after] = [&shape[..axis], &shape[axis..]];
            let times = times.unsigned_abs();
            let repeated =
                x.reshape(&[before, &[1], after].concat())?.expand(&[before, &[times], after].concat())?;
            x = repeated.reshape(&[before, &[times * shape[axis]], &shape[axis + 1..]].concat())?;
        }
    }
    Ok(x)
}

pub(super) fn gather(inputs: &Inputs<'_>, axis: isize) -> Result<Tensor> {
    let (x, indices) = (inputs.tensor(0)?, inputs.known(1)?);
    let axis = axis_of(&x, axis)?;
    let taken = x.index_select(axis as isize, &super::to_isize(indices))?;
    let shape = [&x.shape()[..axis], indices.shape(), &x.shape()[axis + 1..]].concat();
    Ok(if shape == taken.shape() { taken } else { taken.reshape(&shape)? })
}

pub(super) fn gather_nd(inputs: &Inputs<'_>, batch_axes: usize) -> Result<Tensor> {
    let (x, indices) = (inputs.tensor(0)?, inputs.known(1)?);
    let Gathered { axes, slices, shape } = match host::gathered(x.shape(), indices, batch_axes) {
        Ok(gathered) => gathered,
        Err(reason) => return refuse(reason),
    };
    let [outer, inner] = [&x.shape()[..axes], &x.shape()[axes..]].map(|sizes| sizes.iter().product());
    let slices: Vec<isize> = slices.into_iter().map(|slice| slice as isize).collect();
    Ok(x.reshape(&[outer, inner])?.index_select(0, &slices)?.reshape(&shape)?)
}

/// The slices of data and updates, one after the other, and of these the ones that are left.
pub(super) fn scatter_nd(inputs: &Inputs<'_>) -> Result<Tensor> {
    let (x, indices, updates) = (inputs.tensor(0)?, inputs.known(1)?, inputs.tensor(2)?);
    let from = match host::scattered(x.shape(), indices, updates.shape()) {
        Ok(from) => from,
        Err(reason) => return refuse(reason),
    };
    let axes = indices.shape().last().copied().unwrap_or(0);
    let inner = x.shape()[axes..].iter().product();
    let slices = [x.reshape(&[from.len(), inner])?, updates.reshape(&[indices.len() / axes.max(1), inner])?];
    let from: Vec<isize> = from.into_iter().map(|slice| slice as isize).collect();
    Ok(ops::cat(&slices.each_ref(), 0)?.index_select(0, &from)?.reshape(x.shape())?)
}
