//! Parts of tensors: joined, split, cut out, padded.

use convoke_autograd::ops::{self, PadMode, Slice};

use super::*;

/// What a pad puts around a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum PadKind {
    /// The value; 0 if it is left out.
    Constant,
    /// The elements mirrored at the border.
    Reflect,
    /// The element at the border.
    Edge,
    /// The elements of the other side.
    Wrap,
}

pub(super) const CONCAT: Operator<Along> = Operator {
    read: &[Reader("Concat", (1, ANY), |node| {
        let axis = node.attributes.int("axis")?.ok_or("its axis is missing")?;
        Ok(Op::Concat(Along { axis: reading::axis_of(axis)? }))
    })],
    write: |along, to| Ok(to.op().axis("axis", along.axis)),
    known: Known::One(|along, inputs| concat_known(along.axis, &inputs.all_known()?)),
    run: Run::One(|along, inputs| {
        let tensors = (0..inputs.len()).map(|index| inputs.tensor(index)).collect::<Result<Vec<_>>>()?;
        Ok(ops::cat(&tensors.iter().collect::<Vec<_>>(), along.axis)?)
    }),
    uses: |_, _| Use::Moved,
    gives: |_, from| {
        let sum = |sum: usize, place| sum.checked_add(from.len(place)?);
        let rank = (0..from.inputs.len()).find_map(|place| from.rank(place));
        About { len: (0..from.inputs.len()).try_fold(0, sum), ..from.ranked(rank) }
    },
};

pub(super) const SPLIT: Operator<Along> = Operator {
    read: &[Reader("Split", (1, 2), read_split)],
    write: |along, to| {
        let node = to.op().axis("axis", along.axis);
        let counts = to.file.opset >= 18 && to.input(1).is_empty();
        Ok(if counts { node.size("num_outputs", to.node.outputs.len()) } else { node })
    },
    known: Known::Several(|along, inputs| {
        let x = inputs.known(0)?;
        let axis = axis_of(along.axis as i64, x.shape().len())?;
        let sizes = parts(x.shape()[axis], inputs.optional_list(1)?, inputs.outputs)?;
        split_known(x, axis, &sizes)
    }),
    run: Run::Several(usize::MAX, |along, inputs| split(along.axis, inputs)),
    uses: |_, input| first(input, Use::Moved),
    gives: like_first,
};

pub(super) const SLICE: Operator<()> = Operator {
    read: &[Reader("Slice", (1, 5), read_slice)],
    write: plain,
    known: Known::One(|(), inputs| slice_known(inputs)),
    run: Run::One(|(), inputs| slice(inputs)),
    uses: |(), input| first(input, Use::Moved),
    gives: |(), from| About { len: sliced_len(from), ..from.ranked(from.rank(0)) },
};

const KINDS: &[(&str, PadKind)] = &[
    ("constant", PadKind::Constant),
    ("reflect", PadKind::Reflect),
    ("edge", PadKind::Edge),
    ("wrap", PadKind::Wrap),
];

pub(super) const PAD: Operator<PadKind> = Operator {
    read: &[Reader("Pad", (1, 4), read_pad)],
    write: |&kind, to| {
        if !to.input(3).is_empty() {
            to.needs(18, "to pad some axes")?;
        }
        if kind == PadKind::Wrap {
            to.needs(19, "to pad with the elements of the other side")?;
        }
        to.op().choice("mode", kind, KINDS)
    },
    known: Known::Perhaps(|kind, inputs| (*kind == PadKind::Constant).then(|| pad_known(inputs))),
    run: Run::One(|&kind, inputs| pad(kind, inputs)),
    uses: |_, input| first(input, Use::Moved),
    gives: like_first,
};

fn read_split(node: &mut NodeReader<'_>) -> Answer<Op> {
    let axis = node.attributes.axis("axis", 0)?;
    if node.outputs.is_empty() {
        return Err("it has no output".into());
    }
    if node.opset < 13 {
        node.ints_to_input("split", 1)?;
    }
    let count = node.outputs.len();
    let parts = if node.opset >= 18 { node.attributes.size("num_outputs")? } else { None };
    if parts.is_some_and(|parts| parts != count) {
        return Err(format!("its num_outputs is not {count}, the number of its outputs"));
    }
    Ok(Op::Split(Along { axis }))
}

fn read_slice(node: &mut NodeReader<'_>) -> Answer<Op> {
    if node.opset < 10 {
        for (place, name) in [(1, "starts"), (2, "ends")] {
            if !node.ints_to_input(name, place)? {
                return Err(format!("its {name} are missing"));
            }
        }
        node.ints_to_input("axes", 3)?;
    }
    match node.input(1).is_empty() || node.input(2).is_empty() {
        true => Err("its starts or ends are missing".into()),
        false => Ok(Op::Slice),
    }
}

fn read_pad(node: &mut NodeReader<'_>) -> Answer<Op> {
    let kind = node.attributes.choice("mode", "constant", KINDS)?;
    if node.opset < 11 {
        node.ints_to_input("pads", 1)?;
        if let Some(value) = node.attributes.float("value")? {
            node.set_array(2, "value", Array::number(value as f32));
        }
    }
    match node.input(1).is_empty() {
        true => Err("its pads are missing".into()),
        false => Ok(Op::Pad(kind)),
    }
}

/// The length of a part of a list.
fn sliced_len(from: &Operands<'_, '_>) -> Option<usize> {
    let (starts, ends) = (from.at(1).array?, from.at(2).array?);
    let ([start], [end]) = (&starts.to_i64()[..], &ends.to_i64()[..]) else { return None };
    if from.given(4) || from.rank(0) != Some(1) {
        return None;
    }
    let all = i64::try_from(from.len(0)?).ok()?;
    let place = |axis: i64| if axis < 0 { axis.saturating_add(all) } else { axis }.clamp(0, all);
    usize::try_from((place(*end) - place(*start)).max(0)).ok()
}

fn split(axis: isize, inputs: &Inputs<'_>) -> Result<Vec<Value>> {
    let (x, outputs) = (inputs.tensor(0)?, inputs.outputs);
    let size = x.shape()[axis_in(&x, axis)?];
    let sizes: Vec<usize> = match inputs.optional_list(1)? {
        Some(sizes) => sizes.iter().map(|&size| usize::try_from(size).unwrap_or(usize::MAX)).collect(),
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

/// The axis, the start, the end and the step of each slice.
fn bounds(inputs: &Inputs<'_>, rank: usize) -> Answer<Vec<(usize, [i64; 3])>> {
    let (starts, ends) = (inputs.list(1)?, inputs.list(2)?);
    let count = starts.len();
    let axes = match inputs.optional_list(3)? {
        Some(axes) => axes_of(axes, rank)?,
        None => (0..count).collect(),
    };
    let ones = vec![1; count];
    let steps = inputs.optional_list(4)?.unwrap_or(&ones);
    if [ends.len(), axes.len(), steps.len()] != [count; 3] || count > rank {
        let [ends, axes, steps] = [ends.len(), axes.len(), steps.len()];
        return Err(format!(
            "there are {count} starts, {ends} ends, {axes} axes and {steps} steps for {rank} axes"
        ));
    }
    Ok((0..count).map(|index| (axes[index], [starts[index], ends[index], steps[index]])).collect())
}

fn slice(inputs: &Inputs<'_>) -> Result<Tensor> {
    let x = inputs.tensor(0)?;
    let mut slices = Vec::new();
    for (axis, bounds) in bounds(inputs, x.shape().len())? {
        let size = x.shape()[axis] as isize;
        let [start, end, step] = bounds.map(to_isize);
        if step != 1 || (start != 0 && start > -size) || end < size {
            slices.push(Slice { axis: axis as isize, start, end, step });
        }
    }
    Ok(if slices.is_empty() { x } else { x.slice(&slices)? })
}

/// What a pad adds before and after each axis; less than 0 removes elements.
fn pads(inputs: &Inputs<'_>, sizes: &[usize]) -> Answer<Vec<[i64; 2]>> {
    let numbers = inputs.list(1)?;
    let axes = match inputs.optional_list(3)? {
        Some(axes) => axes_of(axes, sizes.len())?,
        None => (0..sizes.len()).collect(),
    };
    if numbers.len() != 2 * axes.len() {
        return Err(format!("there are {} pads for {} axes of {sizes:?}", numbers.len(), axes.len()));
    }
    let mut pads = vec![[0, 0]; sizes.len()];
    for (index, &axis) in axes.iter().enumerate() {
        pads[axis] = [numbers[index], numbers[index + axes.len()]];
    }
    Ok(pads)
}

fn pad(kind: PadKind, inputs: &Inputs<'_>) -> Result<Tensor> {
    let x = inputs.tensor(0)?;
    let pads: Vec<[isize; 2]> = pads(inputs, x.shape())?.into_iter().map(|pads| pads.map(to_isize)).collect();
    if pads.iter().all(|pads| *pads == [0, 0]) {
        return Ok(x);
    }
    let mode = match kind {
        PadKind::Constant => {
            PadMode::Constant(inputs.optional_number(2)?.and_then(Array::only).unwrap_or(0.0))
        }
        PadKind::Reflect => PadMode::Reflect,
        PadKind::Edge => PadMode::Edge,
        PadKind::Wrap => PadMode::Wrap,
    };
    Ok(x.pad(&pads, mode)?)
}

fn concat_known(axis: isize, arrays: &[&Array]) -> Answer<Array> {
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
fn parts(size: usize, sizes: Option<&[i64]>, count: usize) -> Answer<Vec<usize>> {
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
fn split_known(x: &Array, axis: usize, sizes: &[usize]) -> Answer<Vec<Array>> {
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

fn slice_known(inputs: &Inputs<'_>) -> Answer<Array> {
    let x = inputs.known(0)?;
    let (mut shape, mut steps, mut at) = (x.shape().to_vec(), steps_of(x.shape()), 0isize);
    for (axis, bounds) in bounds(inputs, shape.len())? {
        let (start, len) = sliced(shape[axis], bounds)?;
        at = at.wrapping_add((start as isize).wrapping_mul(steps[axis]));
        shape[axis] = len;
        steps[axis] = steps[axis].wrapping_mul(bounds[2] as isize);
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
fn pad_known(inputs: &Inputs<'_>) -> Answer<Array> {
    let (x, value) = (inputs.known(0)?, inputs.optional_number(2)?);
    let (pads, sizes, steps) = (pads(inputs, x.shape())?, x.shape(), steps_of(x.shape()));
    let padded = |(&size, &[before, after]): (&usize, &[i64; 2])| {
        let padded = size as i128 + i128::from(before) + i128::from(after);
        usize::try_from(padded)
            .map_err(|_| format!("an axis of size {size} cannot be padded by {before} and {after}"))
    };
    let shape = sizes.iter().zip(&pads).map(padded).collect::<Answer<Vec<usize>>>()?;
    let zero = Data::Bool(vec![false]);
    let fill = value.map_or(&zero, Array::data);
    let source = |mut at: usize| {
        let mut source = 0;
        for axis in (0..shape.len()).rev() {
            let index = (at % shape[axis]) as i128 - i128::from(pads[axis][0]);
            let index = usize::try_from(index).ok().filter(|&index| index < sizes[axis])?;
            source += index * steps[axis].unsigned_abs();
            at /= shape[axis];
        }
        Some(source)
    };
    // No places are read of an output without elements.
    let places = (0..).map(|at: usize| source(at).map_or((fill, 0), |source| (x.data(), source)));
    assembled(x.kind(), &shape, places)
}
