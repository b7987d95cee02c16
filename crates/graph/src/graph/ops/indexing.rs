//! Lookups by index.

use convoke_autograd::ops;

use super::*;

/// How indices point.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GatherNd {
    /// The first axes, which x and the indices have in common: an index points into its own part of x.
    pub batch_axes: usize,
}

pub(super) const GATHER: Operator<Along> = Operator {
    read: &[Reader("Gather", (2, 2), |node| node.along(0, Op::Gather))],
    write: |along, to| Ok(to.op().axis("axis", along.axis)),
    known: Known::One(|along, inputs| gather_known(inputs.known(0)?, inputs.known(1)?, along.axis)),
    run: Run::One(|along, inputs| gather(along.axis, inputs)),
    uses: |_, input| first(input, Use::Moved),
    gives: |_, from| {
        let rank =
            from.rank(0).zip(from.rank(1)).and_then(|(x, indices)| x.checked_add(indices)?.checked_sub(1));
        let of_list = from.rank(0) == Some(1);
        About { len: from.len(1).filter(|_| of_list), ..from.ranked(rank) }
    },
};

pub(super) const GATHER_ND: Operator<GatherNd> = Operator {
    read: &[Reader("GatherND", (2, 2), |node| {
        Ok(Op::GatherNd(GatherNd { batch_axes: node.attributes.size("batch_dims")?.unwrap_or(0) }))
    })],
    write: |gather, to| {
        if gather.batch_axes == 0 {
            return Ok(to.op());
        }
        to.needs(12, "for axes in common")?;
        Ok(to.op().size("batch_dims", gather.batch_axes))
    },
    known: Known::One(|gather, inputs| {
        let x = inputs.known(0)?;
        let Gathered { axes, slices, shape } = gathered(x.shape(), inputs.known(1)?, gather.batch_axes)?;
        let inner = product(&x.shape()[axes..]);
        picked(x, &shape, slices.into_iter().flat_map(|slice| slice * inner..(slice + 1) * inner))
    }),
    run: Run::One(|gather, inputs| {
        let x = inputs.tensor(0)?;
        let Gathered { axes, slices, shape } = gathered(x.shape(), inputs.known(1)?, gather.batch_axes)?;
        let [outer, inner] = [&x.shape()[..axes], &x.shape()[axes..]].map(|sizes| sizes.iter().product());
        Ok(x.reshape(&[outer, inner])?.index_select(0, &signed(slices))?.reshape(&shape)?)
    }),
    uses: |_, input| first(input, Use::Moved),
    gives: like_first,
};

pub(super) const SCATTER_ND: Operator<()> = Operator {
    read: &[Reader("ScatterND", (3, 3), |node| {
        match node.attributes.text_or("reduction", "none")?.as_str() {
            "none" => Ok(Op::ScatterNd),
            other => Err(format!("its reduction {other} is not supported, only none")),
        }
    })],
    write: plain,
    known: Known::One(|(), inputs| scatter_nd_known(inputs)),
    run: Run::One(|(), inputs| scatter_nd(inputs)),
    uses: |(), input| if input == 1 { Use::Other } else { Use::Moved },
    gives: like_first,
};

fn numbers(indices: &Array) -> Answer<&[i64]> {
    match indices.data() {
        Data::I64(numbers) => Ok(numbers),
        _ => Err(format!("indices must be whole numbers, but are {}", described(indices))),
    }
}

fn signed(indices: Vec<usize>) -> Vec<isize> {
    indices.into_iter().map(|index| index as isize).collect()
}

fn gather(axis: isize, inputs: &Inputs<'_>) -> Result<Tensor> {
    let (x, indices) = (inputs.tensor(0)?, inputs.known(1)?);
    let axis = axis_in(&x, axis)?;
    let taken =
        x.index_select(axis as isize, &indices.to_i64().into_iter().map(to_isize).collect::<Vec<_>>())?;
    let shape = [&x.shape()[..axis], indices.shape(), &x.shape()[axis + 1..]].concat();
    Ok(if shape == taken.shape() { taken } else { taken.reshape(&shape)? })
}

/// The slices of data and updates, one after the other, and of these the ones that are left.
fn scatter_nd(inputs: &Inputs<'_>) -> Result<Tensor> {
    let (x, indices, updates) = (inputs.tensor(0)?, inputs.known(1)?, inputs.tensor(2)?);
    let from = scattered(x.shape(), indices, updates.shape())?;
    let axes = indices.shape().last().copied().unwrap_or(0);
    let inner = x.shape()[axes..].iter().product();
    let slices = [x.reshape(&[from.len(), inner])?, updates.reshape(&[indices.len() / axes.max(1), inner])?];
    Ok(ops::cat(&slices.each_ref(), 0)?.index_select(0, &signed(from))?.reshape(x.shape())?)
}

/// The slices of an array along an axis that the indices name.
fn gather_known(x: &Array, indices: &Array, axis: isize) -> Answer<Array> {
    let sizes = x.shape();
    let axis = axis_of(axis as i64, sizes.len())?;
    let numbers = numbers(indices)?;
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
struct Gathered {
    axes: usize,
    slices: Vec<usize>,
    shape: Vec<usize>,
}

/// What GatherND takes of an array of these sizes.
fn gathered(sizes: &[usize], indices: &Array, batch_axes: usize) -> Answer<Gathered> {
    let numbers = numbers(indices)?;
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

/// Which slice each slice of ScatterND's output is: one of the data by its number or, counted on from these, one of the updates.
fn scattered(sizes: &[usize], indices: &Array, updates: &[usize]) -> Answer<Vec<usize>> {
    let numbers = numbers(indices)?;
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
fn scatter_nd_known(inputs: &Inputs<'_>) -> Answer<Array> {
    let (x, indices, updates) = (inputs.known(0)?, inputs.known(1)?, inputs.known(2)?);
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
