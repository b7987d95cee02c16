//! Parts of a tensor: slices, splits, and elements by index.

use convoke_kernels::strided::{Places, Scatter, Take, TakeAxis, add_taken};

use super::{around, checked_axis};
use crate::error::invalid;
use crate::tensor::checked_len;
use crate::{DType, Function, MemoryFormat, Needs, Operation, Result, Tensor, apply};

/// A range of indices along an axis, as in ONNX's Slice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Slice {
    /// The axis, counted from the last if negative.
    pub axis: isize,
    /// The first index, counted from the end if negative; brought into the axis if outside.
    pub start: isize,
    /// The index to stop before, likewise. `isize::MIN` stops a negative step after index 0.
    pub end: isize,
    /// From one index to the next; negative to go backwards, not 0.
    pub step: isize,
}

impl Slice {
    /// The indices from `start` to `end` of an axis.
    pub fn new(axis: isize, start: isize, end: isize) -> Slice {
        Slice { axis, start, end, step: 1 }
    }

    /// The indices that it takes of an axis of this size.
    fn indices(&self, size: usize) -> Vec<Option<usize>> {
        let size = size as isize;
        // An axis has fewer than 2^48 indices, so that only the given numbers can overflow.
        let of_end = |index: isize| if index < 0 { index.saturating_add(size) } else { index };
        let (low, high) = if self.step > 0 { (0, size) } else { (-1, size - 1) };
        let (mut index, end) = (of_end(self.start).clamp(low, high), of_end(self.end).clamp(low, high));
        let mut indices = Vec::new();
        while (self.step > 0 && index < end) || (self.step < 0 && index > end) {
            indices.push(Some(index as usize));
            index = index.saturating_add(self.step);
        }
        indices
    }
}

impl Tensor {
    /// The indices of some axes, in one copy. Keeps the memory format.
    ///
    /// # Errors
    /// If there is no such axis, one is named twice, or a step is 0.
    pub fn slice(&self, slices: &[Slice]) -> Result<Tensor> {
        let mut axes = vec![None; self.shape().len()];
        for slice in slices {
            let axis = checked_axis("slice", slice.axis, self.shape())?;
            if slice.step == 0 || axes[axis].is_some() {
                let reason =
                    format!("{slice:?} of {:?} has step 0 or an axis of another slice", self.shape());
                return Err(invalid("slice", reason));
            }
            axes[axis] = Some(slice.indices(self.shape()[axis]));
        }
        pick("slice", self, axes, 0.0)
    }

    /// Runs of these sizes along an axis, one after the other. Keeps the memory format.
    ///
    /// # Errors
    /// If there is no such axis, or the sizes do not add up to its size.
    pub fn split(&self, sizes: &[usize], axis: isize) -> Result<Vec<Tensor>> {
        let at = checked_axis("split", axis, self.shape())?;
        let total = sizes.iter().try_fold(0usize, |total, &size| total.checked_add(size));
        if total != Some(self.shape()[at]) {
            let reason = format!("{sizes:?} do not add up to the size of axis {axis} of {:?}", self.shape());
            return Err(invalid("split", reason));
        }
        let mut first = 0;
        let part = |&size: &usize| {
            let mut axes = vec![None; self.shape().len()];
            axes[at] = Some((first..first + size).map(Some).collect());
            first += size;
            pick("split", self, axes, 0.0)
        };
        sizes.iter().map(part).collect()
    }

    /// The elements at `indices` along an axis, which may repeat, and count from the end if negative. PyTorch's `index_select`,
    /// ONNX's Gather of a list of indices. Keeps the memory format.
    ///
    /// # Errors
    /// If there is no such axis or index.
    pub fn index_select(&self, axis: isize, indices: &[isize]) -> Result<Tensor> {
        let at = checked_axis("index_select", axis, self.shape())?;
        let size = self.shape()[at];
        let index = |&index: &isize| {
            let own = if index < 0 { index.checked_add_unsigned(size) } else { Some(index) };
            own.and_then(|own| usize::try_from(own).ok()).filter(|&own| own < size).map(Some).ok_or_else(
                || {
                    let reason = format!("there is no index {index} on axis {axis} of {:?}", self.shape());
                    invalid("index_select", reason)
                },
            )
        };
        let mut axes = vec![None; self.shape().len()];
        axes[at] = Some(indices.iter().map(index).collect::<Result<_>>()?);
        pick("index_select", self, axes, 0.0)
    }
}

/// The elements at these indices of each axis, `None` for a whole axis. An index that is `None` gives `fill`.
pub(super) fn pick(
    name: &'static str,
    x: &Tensor,
    axes: Vec<Option<Vec<Option<usize>>>>,
    fill: f64,
) -> Result<Tensor> {
    let size = |(axis, &size): (usize, &usize)| axes[axis].as_ref().map_or(size, Vec::len);
    let shape: Vec<usize> = x.shape().iter().enumerate().map(size).collect();
    checked_len(name, &shape)?;
    apply(Pick { name, axes, fill, shape }, &[x])
}

struct Pick {
    name: &'static str,
    axes: Vec<Option<Vec<Option<usize>>>>,
    fill: f64,
    /// The output's shape.
    shape: Vec<usize>,
}

/// The first of the indices and the step between them, if it is always the same.
fn progression(indices: &[Option<usize>]) -> Option<(usize, isize)> {
    let first = (*indices.first()?)?;
    let step = match indices.get(1) {
        Some(second) => (*second)? as isize - first as isize,
        None => 1,
    };
    let is_next = |pair: &[Option<usize>]| match pair {
        [Some(one), Some(next)] => *next as isize - *one as isize == step,
        _ => false,
    };
    indices.windows(2).all(is_next).then_some((first, step))
}

impl Pick {
    /// Elements of `x` at `indices` of each axis, or `fill`.
    fn taken(
        &self,
        x: &Tensor,
        indices: &[Option<Vec<Option<usize>>>],
        shape: &[usize],
        fill: f64,
    ) -> Result<Tensor> {
        let (device, format) = (x.device(), x.format());
        let strides = format.strides(x.shape());
        // Places in memory, where they are not evenly spaced.
        let mut places: Vec<Option<Vec<Option<usize>>>> = Vec::with_capacity(shape.len());
        let (mut start, mut steps) = (0, vec![1; shape.len()]);
        for (axis, indices) in indices.iter().enumerate() {
            let even = indices.as_ref().map_or(Some((0, 1)), |indices| progression(indices));
            if let Some((first, step)) = even {
                start += first * strides[axis];
                steps[axis] = step;
            }
            let uneven = indices.as_ref().filter(|_| even.is_none());
            let place = |index: &Option<usize>| index.map(|index| index * strides[axis]);
            places.push(uneven.map(|indices| indices.iter().map(place).collect()));
        }
        let axis = |axis: usize| TakeAxis {
            size: shape[axis],
            places: match &places[axis] {
                Some(places) => Places::Each(places),
                None => Places::Stride(steps[axis] * strides[axis] as isize),
            },
        };
        let axes: Vec<TakeAxis<'_>> = format.axes(shape.len()).into_iter().map(axis).collect();
        let take = Take { operation: self.name, axes, start, fill };
        Tensor::build_elements((device, x.dtype()), shape, format, |y| {
            Ok(take.run(device.compute(), x.elements()?, y)?)
        })
    }

    /// The sums of the elements of `dy` that were taken from the same place along an axis of size `size`.
    fn summed(&self, dy: &Tensor, axis: usize, size: usize) -> Result<Tensor> {
        let indices = self.axes[axis].as_ref().expect("an axis with repeated indices");
        let [outer, inner] = around(dy, axis);
        let mut shape = dy.shape().to_vec();
        shape[axis] = size;
        let scatter = Scatter { outer, size, indices, inner };
        let (device, format) = (dy.device(), dy.format());
        Tensor::build_elements((device, dy.dtype()), &shape, format, |dx| {
            Ok(add_taken(device.compute(), &scatter, dy.elements()?, dx)?)
        })
    }
}

impl Function for Pick {
    /// The input's shape and format.
    type Saved = (Vec<usize>, MemoryFormat);

    fn name(&self) -> &'static str {
        self.name
    }

    fn describe(&self) -> Option<Operation> {
        Some(Operation::Pick { axes: self.axes.clone(), fill: self.fill })
    }

    fn takes(&self, _: usize, _: DType) -> bool {
        true
    }

    fn forward(&self, inputs: &[&Tensor], _: &Needs) -> Result<(Tensor, Self::Saved)> {
        let x = inputs[0];
        let y = match self.axes.iter().all(Option::is_none) {
            true => x.detach(),
            false => self.taken(x, &self.axes, &self.shape, self.fill)?,
        };
        Ok((y, (x.shape().to_vec(), x.format())))
    }

    fn backward(&self, (shape, _): Self::Saved, upstream: Tensor, _: &Needs) -> Result<Vec<Option<Tensor>>> {
        let dtype = upstream.dtype();
        let (mut dx, mut inverse) = (upstream, vec![None; shape.len()]);
        for (axis, indices) in self.axes.iter().enumerate() {
            let Some(indices) = indices else { continue };
            let mut from = vec![None; shape[axis]];
            let mut repeated = false;
            for (at, index) in indices.iter().enumerate() {
                if let Some(index) = *index {
                    repeated |= from[index].replace(at).is_some();
                }
            }
            match repeated {
                true => dx = self.summed(&dx.in_dtype(dtype.computed_in())?, axis, shape[axis])?,
                false => inverse[axis] = Some(from),
            }
        }
        if inverse.iter().any(Option::is_some) {
            dx = self.taken(&dx, &inverse, &shape, 0.0)?;
        }
        Ok(vec![Some(if dx.dtype() == dtype { dx } else { dx.in_dtype(dtype)? })])
    }
}
