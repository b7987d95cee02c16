//! The largest elements along an axis, and their places.

use super::{Answer, Inputs, Number, axis_of, bounded, integers, picked, product, room, whole};
use crate::graph::{ArgMax, Array, Kind, ranking};

/// The lines of an array along an axis: they have `len` elements, which are `inner` apart.
struct Lines<'a> {
    x: &'a Array,
    axis: usize,
    len: usize,
    inner: usize,
}

impl Lines<'_> {
    fn of(x: &Array, axis: isize) -> Answer<Lines<'_>> {
        let axis = axis_of(axis as i64, x.shape().len())?;
        Ok(Lines { x, axis, len: x.shape()[axis], inner: product(&x.shape()[axis + 1..]) })
    }

    /// The shape with another length of the lines.
    fn shape(&self, len: usize) -> Vec<usize> {
        let mut shape = self.x.shape().to_vec();
        shape[self.axis] = len;
        shape
    }

    /// Where each line begins. There must be elements.
    fn starts(&self) -> impl Iterator<Item = usize> + '_ {
        let outer = product(&self.x.shape()[..self.axis]);
        (0..outer).flat_map(move |row| (0..self.inner).map(move |at| row * self.len * self.inner + at))
    }

    fn elements<N: Number>(&self, start: usize) -> impl Iterator<Item = N> + '_ {
        (0..self.len).map(move |place| N::read(self.x.data(), start + place * self.inner))
    }
}

pub(super) fn arg_max(x: &Array, options: ArgMax) -> Answer<Array> {
    let lines = Lines::of(x, options.axis)?;
    let mut shape = lines.shape(1);
    if bounded(&shape)? > 0 && lines.len == 0 {
        return Err(format!("there are no elements along axis {} of {:?}", lines.axis, x.shape()));
    }
    if !options.keep_dims {
        shape.remove(lines.axis);
    }
    let (smallest, last) = (options.smallest, options.last);
    let places = lines.starts().map(|start| {
        whole(match x.kind() {
            Kind::F32 | Kind::F64 => ranking::extreme(lines.elements::<f64>(start), smallest, last),
            Kind::I64 | Kind::Bool => ranking::extreme(lines.elements::<i64>(start), smallest, last),
        })
    });
    integers(&shape, places)
}

/// The elements and their places.
pub(super) fn top_k(inputs: &Inputs, axis: isize, largest: bool) -> Answer<Vec<Array>> {
    let (x, k) = (inputs.required(0)?, inputs.list(1)?);
    let lines = Lines::of(x, axis)?;
    let count = match *k {
        [k] => usize::try_from(k).ok().filter(|&k| k <= lines.len),
        _ => return Err(format!("there are {} numbers of elements instead of 1", k.len())),
    };
    let count = count
        .ok_or_else(|| format!("there are no {k:?} elements along axis {} of {:?}", lines.axis, x.shape()))?;
    let shape = lines.shape(count);
    let total = bounded(&shape)?;
    // Each line's places lie as its elements do.
    let mut places: Vec<usize> = room(total)?;
    places.resize(total, 0);
    let starts = if total == 0 { 0 } else { usize::MAX };
    for (line, start) in lines.starts().take(starts).enumerate() {
        let found = match x.kind() {
            Kind::F32 | Kind::F64 => {
                ranking::first(&lines.elements::<f64>(start).collect::<Vec<_>>(), count, largest)
            }
            Kind::I64 | Kind::Bool => {
                ranking::first(&lines.elements::<i64>(start).collect::<Vec<_>>(), count, largest)
            }
        };
        let begin = line / lines.inner * count * lines.inner + line % lines.inner;
        for (rank, place) in found.into_iter().enumerate() {
            places[begin + rank * lines.inner] = place;
        }
    }
    let sources = places.iter().enumerate().map(|(at, place)| {
        let (row, column) = (at / (count * lines.inner), at % lines.inner);
        (row * lines.len + place) * lines.inner + column
    });
    Ok(vec![picked(x, &shape, sources)?, integers(&shape, places.iter().map(|&place| whole(place)))?])
}
