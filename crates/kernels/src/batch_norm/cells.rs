//! Sums of a channel in interleaved lanes.

use super::parts::{Part, moments};
use crate::channels::{LANES, halved};

/// Two sums of a channel, over differences from a centre, in interleaved lanes so that the additions vectorise.
#[derive(Clone, Default)]
pub(super) struct Cell {
    pub(super) centre: f64,
    pub(super) a: [f64; LANES],
    pub(super) b: [f64; LANES],
}

impl Cell {
    #[inline(always)]
    pub(super) fn new(centre: f64) -> Cell {
        Cell { centre, a: [0.0; LANES], b: [0.0; LANES] }
    }
}

// The next two functions are compiled for the portable set only: for others, compilers gather the lanes of several cells,
// which takes longer.

/// The moments of a part, from the sums of differences from the pilots and of their squares.
#[inline(never)]
pub(super) fn moments_of_cells(part: &Part, cells: &[Cell], means: &mut [f64], m2: &mut [f64]) {
    let count = part.count() as f64;
    for ((cell, mean), m2) in cells.iter().zip(means).zip(m2) {
        (*mean, *m2) = moments(cell.centre, halved(cell.a), halved(cell.b), count);
    }
}

#[inline(never)]
pub(super) fn sums_of_cells(cells: &[Cell], a: &mut [f64], b: &mut [f64]) {
    for ((cell, a), b) in cells.iter().zip(a).zip(b) {
        (*a, *b) = (halved(cell.a), halved(cell.b));
    }
}
