//! Other shapes, and other orders of elements.

use convoke_autograd::ops::{self, DepthOrder};

use super::*;

/// Another order of axes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Transpose {
    /// For each axis of the output, the axis of the input.
    pub order: Vec<isize>,
}

/// How sizes are meant.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Reshape {
    /// Whether a size of 0 is one, instead of that of the same axis of the input.
    pub allow_zero: bool,
}

/// Blocks of channels that become blocks of pixels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DepthToSpace {
    /// Height and width of a block.
    pub block: usize,
    /// Which channels form a block.
    pub order: DepthOrder,
}

/// Blocks of pixels that become blocks of channels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SpaceToDepth {
    /// Height and width of a block.
    pub block: usize,
}

/// The most elements of an output that repeats its input.
const MOST_ELEMENTS: usize = 1 << 40;

pub(super) const TRANSPOSE: Operator<Transpose> = Operator {
    read: &[Reader("Transpose", (1, 1), |node| {
        let order = node.attributes.ints("perm")?.unwrap_or_default();
        let order = order.into_iter().map(reading::axis_of).collect::<Answer<_>>()?;
        Ok(Op::Transpose(Transpose { order }))
    })],
    write: |Transpose { order }, to| match &order[..] {
        [] => Ok(to.op()),
        _ => Ok(to.op().ints("perm", order.iter().map(|&axis| axis as i64))),
    },
    known: Known::One(|transpose, inputs| transpose_known(inputs.known(0)?, &transpose.order)),
    run: Run::One(|Transpose { order }, inputs| {
        let x = inputs.tensor(0)?;
        let reversed: Vec<isize> = (0..x.shape().len() as isize).rev().collect();
        Ok(x.permute(if order.is_empty() { &reversed } else { order })?)
    }),
    uses: |_, _| Use::Moved,
    gives: |Transpose { order }, from| {
        from.ranked(if order.is_empty() { from.rank(0) } else { Some(order.len()) })
    },
};

pub(super) const RESHAPE: Operator<Reshape> = Operator {
    read: &[Reader("Reshape", (2, 2), |node| {
        let allow_zero = node.opset >= 14 && node.attributes.flag("allowzero", false)?;
        Ok(Op::Reshape(Reshape { allow_zero }))
    })],
    write: |reshape, to| {
        if !reshape.allow_zero {
            return Ok(to.op());
        }
        to.needs(14, "a size of 0")?;
        Ok(to.op().int("allowzero", 1))
    },
    known: Known::One(|options, inputs| {
        copied_in(inputs, |x| reshaped(x, inputs.list(1)?, options.allow_zero))
    }),
    run: Run::One(|options, inputs| {
        let (x, mut sizes) = (inputs.tensor(0)?, inputs.list(1)?.to_vec());
        if let (Some([written, actual]), Some(first)) = (inputs.place.batch, sizes.first_mut())
            && usize::try_from(*first) == Ok(written)
            && x.shape().first() == Some(&actual)
        {
            // The model was written for one size of batch.
            *first = whole(actual)?;
        }
        Ok(x.reshape(&reshaped(x.shape(), &sizes, options.allow_zero)?)?)
    }),
    uses: |_, input| first(input, Use::Same),
    gives: |_, from| About { len: from.len(0), ..from.ranked(from.len(1)) },
};

pub(super) const FLATTEN: Operator<Along> = Operator {
    read: &[Reader("Flatten", (1, 1), |node| node.along(1, Op::Flatten))],
    write: |along, to| Ok(to.op().axis("axis", along.axis)),
    known: Known::One(|along, inputs| copied_in(inputs, |x| matrix(x, along.axis))),
    run: Run::One(|along, inputs| reshaped_in(inputs, |x| matrix(x, along.axis))),
    uses: |_, _| Use::Same,
    gives: |_, from| from.ranked(Some(2)),
};

pub(super) const SQUEEZE: Operator<()> = Operator {
    read: &[Reader("Squeeze", (1, 2), |node| {
        if node.opset < 13 {
            node.ints_to_input("axes", 1)?;
        }
        Ok(Op::Squeeze)
    })],
    write: plain,
    known: Known::One(|(), inputs| copied_in(inputs, |x| squeezed(x, inputs.optional_list(1)?))),
    run: Run::One(|(), inputs| reshaped_in(inputs, |x| squeezed(x, inputs.optional_list(1)?))),
    uses: |(), input| first(input, Use::Same),
    gives: |(), from| {
        let rank = from.rank(0).zip(from.len(1)).and_then(|(rank, axes)| rank.checked_sub(axes));
        About { len: from.len(0), ..from.ranked(rank) }
    },
};

pub(super) const UNSQUEEZE: Operator<()> = Operator {
    read: &[Reader("Unsqueeze", (1, 2), |node| {
        if node.opset < 13 {
            node.ints_to_input("axes", 1)?;
        }
        match node.input(1).is_empty() {
            true => Err("its axes are missing".into()),
            false => Ok(Op::Unsqueeze),
        }
    })],
    write: plain,
    known: Known::One(|(), inputs| copied_in(inputs, |x| unsqueezed(x, inputs.list(1)?))),
    run: Run::One(|(), inputs| reshaped_in(inputs, |x| unsqueezed(x, inputs.list(1)?))),
    uses: |(), input| first(input, Use::Same),
    gives: |(), from| {
        let rank = from.rank(0).zip(from.len(1)).and_then(|(rank, axes)| rank.checked_add(axes));
        About { len: from.len(0), ..from.ranked(rank) }
    },
};

pub(super) const EXPAND: Operator<()> = Operator {
    read: &[Reader("Expand", (2, 2), |_| Ok(Op::Expand))],
    write: plain,
    known: Known::One(|(), inputs| {
        let x = inputs.known(0)?;
        let shape = expanded(x.shape(), inputs.list(1)?)?;
        picked(x, &shape, Walk::broadcast(x.shape(), &shape))
    }),
    run: Run::One(|(), inputs| {
        let x = inputs.tensor(0)?;
        let shape = expanded(x.shape(), inputs.list(1)?)?;
        Ok(if shape == x.shape() { x } else { x.expand(&shape)? })
    }),
    uses: |(), input| first(input, Use::Same),
    gives: |(), from| from.ranked(from.rank(0).zip(from.len(1)).map(|(rank, sizes)| rank.max(sizes))),
};

pub(super) const TILE: Operator<()> = Operator {
    read: &[Reader("Tile", (2, 2), |_| Ok(Op::Tile))],
    write: plain,
    known: Known::One(|(), inputs| tile_known(inputs.known(0)?, inputs.list(1)?)),
    run: Run::One(|(), inputs| tile(inputs.tensor(0)?, inputs.list(1)?)),
    uses: |(), input| first(input, Use::Moved),
    gives: like_first,
};

const ORDERS: &[(&str, DepthOrder)] = &[("DCR", DepthOrder::BlockFirst), ("CRD", DepthOrder::ChannelFirst)];

pub(super) const DEPTH_TO_SPACE: Operator<DepthToSpace> = Operator {
    read: &[Reader("DepthToSpace", (1, 1), |node| {
        let block = node.attributes.size("blocksize")?.ok_or("its blocksize is missing")?;
        let order = node.attributes.choice("mode", "DCR", ORDERS)?;
        Ok(Op::DepthToSpace(DepthToSpace { block, order }))
    })],
    write: |depth, to| to.op().size("blocksize", depth.block).choice("mode", depth.order, ORDERS),
    known: Known::Never,
    run: Run::One(|depth, inputs| Ok(ops::depth_to_space(&inputs.tensor(0)?, depth.block, depth.order)?)),
    uses: other,
    gives: |_, from| from.ranked(Some(4)),
};

pub(super) const SPACE_TO_DEPTH: Operator<SpaceToDepth> = Operator {
    read: &[Reader("SpaceToDepth", (1, 1), |node| {
        let block = node.attributes.size("blocksize")?.ok_or("its blocksize is missing")?;
        Ok(Op::SpaceToDepth(SpaceToDepth { block }))
    })],
    write: |space, to| Ok(to.op().size("blocksize", space.block)),
    known: Known::Never,
    run: Run::One(|space, inputs| {
        Ok(ops::space_to_depth(&inputs.tensor(0)?, space.block, DepthOrder::BlockFirst)?)
    }),
    uses: other,
    gives: |_, from| from.ranked(Some(4)),
};

/// The first input in another shape, by its own.
fn copied_in(inputs: &Inputs<'_>, shape: impl Fn(&[usize]) -> Answer<Vec<usize>>) -> Answer<Array> {
    let x = inputs.known(0)?;
    copied(x, &shape(x.shape())?)
}

/// As [`copied_in`], of a tensor.
fn reshaped_in(inputs: &Inputs<'_>, shape: impl Fn(&[usize]) -> Answer<Vec<usize>>) -> Result<Tensor> {
    let x = inputs.tensor(0)?;
    Ok(x.reshape(&shape(x.shape())?)?)
}

/// The sizes of a matrix whose rows are the axes before one; the axis after the last one is allowed too.
fn matrix(sizes: &[usize], axis: isize) -> Answer<Vec<usize>> {
    let axis = match usize::try_from(axis) {
        Ok(axis) if axis == sizes.len() => axis,
        _ => axis_of(axis as i64, sizes.len())?,
    };
    Ok(vec![product(&sizes[..axis]), product(&sizes[axis..])])
}

/// The sizes of a reshaped tensor. A size of 0 is that of the same axis, unless zeros are allowed; one of -1 is what remains.
fn reshaped(own: &[usize], sizes: &[i64], allow_zero: bool) -> Answer<Vec<usize>> {
    let fails = || format!("{own:?} cannot be reshaped to {sizes:?}");
    check_rank(sizes.len())?;
    let size = |(axis, &size): (usize, &i64)| match size {
        -1 => Ok(1),
        0 if !allow_zero => own.get(axis).copied().ok_or_else(fails),
        size => usize::try_from(size).map_err(|_| fails()),
    };
    let mut shape = sizes.iter().enumerate().map(size).collect::<Answer<Vec<usize>>>()?;
    let mut open = (0..sizes.len()).filter(|&axis| sizes[axis] == -1);
    if let Some(axis) = open.next() {
        let others = shape.iter().try_fold(1usize, |len, &size| len.checked_mul(size));
        let others = others.filter(|&others| others > 0 && open.next().is_none()).ok_or_else(fails)?;
        shape[axis] = product(own) / others;
    }
    match shape.iter().try_fold(1usize, |len, &size| len.checked_mul(size)) == Some(product(own)) {
        true => Ok(shape),
        false => Err(fails()),
    }
}

/// The sizes without axes of size 1: all of these if none are named.
fn squeezed(sizes: &[usize], axes: Option<&[i64]>) -> Answer<Vec<usize>> {
    let axes = match axes {
        Some(axes) => axes_of(axes, sizes.len())?,
        None => (0..sizes.len()).filter(|&axis| sizes[axis] == 1).collect(),
    };
    match axes.iter().find(|&&axis| sizes[axis] != 1) {
        Some(axis) => Err(format!("axis {axis} of {sizes:?} is not of size 1")),
        None => Ok((0..sizes.len()).filter(|axis| !axes.contains(axis)).map(|axis| sizes[axis]).collect()),
    }
}

/// The sizes with new axes of size 1.
fn unsqueezed(sizes: &[usize], axes: &[i64]) -> Answer<Vec<usize>> {
    let rank = sizes.len() + axes.len();
    // An output of too many axes is refused before there is a list of them.
    check_rank(rank)?;
    let axes = axes_of(axes, rank)?;
    let mut sizes = sizes.iter().copied();
    Ok((0..rank).map(|axis| if axes.contains(&axis) { 1 } else { sizes.next().unwrap_or(1) }).collect())
}

/// The sizes to which a tensor and a shape broadcast.
fn expanded(own: &[usize], sizes: &[i64]) -> Answer<Vec<usize>> {
    let sizes = shape_of(sizes)?;
    broadcast(own, &sizes).ok_or_else(|| format!("{own:?} does not broadcast with {sizes:?}"))
}

/// How often each axis is repeated.
fn repetitions(sizes: &[usize], repeats: &[i64]) -> Answer<Vec<usize>> {
    let counts = shape_of(repeats)?;
    match counts.len() == sizes.len() {
        true => Ok(counts),
        false => Err(format!("there are {} repeats for {sizes:?}", counts.len())),
    }
}

fn tile(mut x: Tensor, repeats: &[i64]) -> Result<Tensor> {
    let counts = repetitions(x.shape(), repeats)?;
    let total = counts.iter().try_fold(x.len().max(1), |total, &times| total.checked_mul(times));
    if total.is_none_or(|total| total > MOST_ELEMENTS || total == 0) {
        return refuse(format!("{repeats:?} times {:?} is nothing or too large", x.shape()));
    }
    for (axis, &times) in counts.iter().enumerate().filter(|(_, times)| **times > 1) {
        let shape = x.shape().to_vec();
        let [before, after] = [&shape[..axis], &shape[axis..]];
        let repeated =
            x.reshape(&[before, &[1], after].concat())?.expand(&[before, &[times], after].concat())?;
        x = repeated.reshape(&[before, &[times * shape[axis]], &shape[axis + 1..]].concat())?;
    }
    Ok(x)
}

fn transpose_known(x: &Array, order: &[isize]) -> Answer<Array> {
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

fn tile_known(x: &Array, repeats: &[i64]) -> Answer<Array> {
    let sizes = x.shape();
    let counts = repetitions(sizes, repeats)?;
    let repeated = sizes.iter().zip(&counts).map(|(size, count)| size.checked_mul(*count));
    let shape = repeated.collect::<Option<Vec<usize>>>().ok_or("the output is too large")?;
    bounded(&shape)?;
    // Two axes for each: over the repeats, and inside of one.
    let split: Vec<usize> = counts.iter().zip(sizes).flat_map(|(&count, &size)| [count, size]).collect();
    let steps: Vec<isize> = steps_of(sizes).into_iter().flat_map(|step| [0, step]).collect();
    picked(x, &shape, Walk::new(&split, &steps, 0))
}
