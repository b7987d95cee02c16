//! The largest elements along an axis, and their places.

use super::{Answer, Inputs, Number, axis_of, bounded, integers, picked, room, whole};
use crate::graph::ranking::{self, Lines};
use crate::graph::{ArgMax, Array, Kind};

fn lines_of(x: &Array, axis: isize) -> Answer<Lines> {
    Ok(Lines::of(x.shape(), axis_of(axis as i64, x.shape().len())?))
}

/// The elements of the line that begins at `start`.
fn line<N: Number>(x: &Array, lines: Lines, start: usize) -> impl Iterator<Item = N> + '_ {
    (0..lines.len).map(move |place| N::read(x.data(), start + place * lines.inner))
}

pub(super) fn arg_max(x: &Array, options: ArgMax) -> Answer<Array> {
    let lines = lines_of(x, options.axis)?;
    let mut shape = lines.with_len(1).shape(x.shape());
    if bounded(&shape)? > 0 && lines.len == 0 {
        return Err(format!("there are no elements along axis {} of {:?}", lines.axis, x.shape()));
    }
    if !options.keep_dims {
        shape.remove(lines.axis);
    }
    let (smallest, last) = (options.smallest, options.last);
    let places = lines.starts(x.len()).map(|start| {
        whole(match x.kind() {
            Kind::F32 | Kind::F64 => ranking::extreme(line::<f64>(x, lines, start), smallest, last),
            Kind::I64 | Kind::Bool => ranking::extreme(line::<i64>(x, lines, start), smallest, last),
        })
    });
    integers(&shape, places)
}

/// The elements and their places.
pub(super) fn top_k(inputs: &Inputs, axis: isize, largest: bool) -> Answer<Vec<Array>> {
    let (x, k) = (inputs.required(0)?, inputs.list(1)?);
    let lines = lines_of(x, axis)?;
    let count = match *k {
        [k] => usize::try_from(k).ok().filter(|&k| k <= lines.len),
        _ => return Err(format!("there are {} numbers of elements instead of 1", k.len())),
    };
    let count = count
        .ok_or_else(|| format!("there are no {k:?} elements along axis {} of {:?}", lines.axis, x.shape()))?;
    let taken = lines.with_len(count);
    let shape = taken.shape(x.shape());
    let total = bounded(&shape)?;
    // Each line's places lie as its elements do.
    let mut places: Vec<usize> = room(total)?;
    places.resize(total, 0);
    for (start, begin) in lines.starts(x.len()).zip(taken.starts(total)) {
        let found = match x.kind() {
            Kind::F32 | Kind::F64 => {
                ranking::first(&line::<f64>(x, lines, start).collect::<Vec<_>>(), count, largest)
            }
            Kind::I64 | Kind::Bool => {
                ranking::first(&line::<i64>(x, lines, start).collect::<Vec<_>>(), count, largest)
            }
        };
        for (rank, place) in found.into_iter().enumerate() {
            places[begin + rank * lines.inner] = place;
        }
    }
    let sources = places.iter().enumerate().map(|(at, &place)| lines.element(at, count, place));
    Ok(vec![picked(x, &shape, sources)?, integers(&shape, places.iter().map(|&place| whole(place)))?])
}
