//! Copies between tensors of different shapes: slices, transpositions, padding, and gathering by indices.

use super::TASK;
use crate::error::{check_len, invalid};
use crate::profile::span;
use crate::{Cpu, Result, Slice, SliceMut, Stored, dispatch_stored};

/// Where the elements along an axis come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Places<'a> {
    /// Neighbours lie this far apart in x.
    Stride(isize),
    /// The distance of each from the start; `None` for the fill.
    Each(&'a [Option<usize>]),
}

/// An axis of the output of a [`Take`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TakeAxis<'a> {
    /// Indices along the axis.
    pub size: usize,
    /// Where they come from.
    pub places: Places<'a>,
}

/// An output whose elements are elements of x, or the fill.
#[derive(Debug, Clone)]
pub struct Take<'a> {
    /// The operation, for errors.
    pub operation: &'static str,
    /// The axes of the output, from the outermost to the innermost.
    pub axes: Vec<TakeAxis<'a>>,
    /// The place in x of the first element.
    pub start: usize,
    /// What stands where an axis has no place.
    pub fill: f64,
}

impl Take<'_> {
    /// y = the elements of x at the sum of the places along each axis.
    ///
    /// # Errors
    /// If y's length is not the product of the sizes, or a place is outside of x.
    pub fn run(&self, cpu: &Cpu, x: Slice<'_>, y: SliceMut<'_>) -> Result<()> {
        span!("take", y, y);
        check_len(self.operation, "the output", y.len(), self.checked_len(x.len())?)?;
        dispatch_stored!(y.dtype(), T => self.copy::<T>(cpu, x.of()?, y.of()?));
        Ok(())
    }

    fn copy<T: Stored>(&self, cpu: &Cpu, x: &[T], y: &mut [T]) {
        if y.is_empty() {
            return;
        }
        let fill = T::of(self.fill);
        let (levels, len) = (self.levels(), y.len());
        // The first levels are taken at one index at a time, that at `last` in pieces.
        let mut unit = y.len();
        let last = levels.iter().position(|level| {
            unit /= level.size;
            unit <= TASK
        });
        let last = last.expect("the innermost unit is one element");
        let (leading, rest) = levels.split_at(last);
        let piece = (TASK / unit).max(1);
        let row = rest[0].size * unit;
        let tasks = y.chunks_mut(row).enumerate().flat_map(|(lead, row)| {
            row.chunks_mut(piece * unit).enumerate().map(move |(index, y)| (lead, index * piece, y))
        });
        let copy = Copy { x, fill, levels: rest };
        cpu.for_each(len, tasks, |(mut lead, first, y)| {
            let mut base = Some(self.start as isize);
            for level in leading.iter().rev() {
                base = base.and_then(|base| Some(base + level.place(lead % level.size)?));
                lead /= level.size;
            }
            match base {
                Some(base) => copy.write(0, first, base, y),
                None => y.fill(fill),
            }
        });
    }

    /// The length of the output, if all places are inside of x.
    fn checked_len(&self, x_len: usize) -> Result<usize> {
        let overflows = || invalid(self.operation, format!("the sizes of {:?} overflow", self.axes));
        // Sizes of 0 count as 1, so that products of some of the sizes cannot overflow either.
        let bound = self.axes.iter().map(|axis| axis.size.max(1)).try_fold(1usize, usize::checked_mul);
        bound.ok_or_else(overflows)?;
        let (mut first, mut last) = (Some(self.start), Some(self.start));
        let mut reads = true;
        for axis in &self.axes {
            match axis.places {
                Places::Stride(_) if axis.size == 0 => reads = false,
                Places::Stride(stride) => {
                    let distance = stride.unsigned_abs().checked_mul(axis.size - 1);
                    let end = if stride < 0 { &mut first } else { &mut last };
                    *end = distance.zip(*end).and_then(|(distance, end)| match stride < 0 {
                        true => end.checked_sub(distance),
                        false => end.checked_add(distance),
                    });
                }
                Places::Each(places) => {
                    check_len(self.operation, "the list of places", places.len(), axis.size)?;
                    match places.iter().flatten().max() {
                        Some(&largest) => last = last.and_then(|last| last.checked_add(largest)),
                        None => reads = false,
                    }
                }
            }
        }
        if reads && (first.is_none() || last.is_none_or(|last| last >= x_len)) {
            let reason = format!("{:?} from {} on lead out of {x_len} elements", self.axes, self.start);
            return Err(invalid(self.operation, reason));
        }
        Ok(self.axes.iter().map(|axis| axis.size).product())
    }

    /// The axes, merged where they go on where the next one ends; at least one.
    fn levels(&self) -> Vec<Level<'_>> {
        let mut levels: Vec<Level<'_>> = Vec::with_capacity(self.axes.len());
        for axis in self.axes.iter().rev() {
            if let Places::Stride(own) = axis.places {
                if axis.size == 1 {
                    continue;
                }
                if let Some(Level { size, places: Places::Stride(stride), .. }) = levels.last_mut()
                    && stride.checked_mul(*size as isize) == Some(own)
                {
                    *size *= axis.size;
                    continue;
                }
            }
            let unit = levels.last().map_or(1, |inner| inner.size * inner.unit);
            let runs = match axis.places {
                Places::Each(places) if levels.is_empty() => runs(places),
                _ => Vec::new(),
            };
            levels.push(Level { size: axis.size, places: axis.places, unit, runs });
        }
        if levels.is_empty() {
            levels.push(Level { size: 1, places: Places::Stride(1), unit: 1, runs: Vec::new() });
        }
        levels.reverse();
        levels
    }
}

/// A merged axis.
struct Level<'a> {
    size: usize,
    places: Places<'a>,
    /// Elements of the output between neighbours.
    unit: usize,
    /// The runs of the list of places, if this is the innermost level and has one; else none.
    runs: Vec<Run>,
}

impl Level<'_> {
    fn place(&self, index: usize) -> Option<isize> {
        match self.places {
            Places::Stride(stride) => Some(index as isize * stride),
            Places::Each(places) => places[index].map(|place| place as isize),
        }
    }
}

/// Neighbours that come from neighbours, or are all the fill.
struct Run {
    len: usize,
    from: Option<usize>,
}

fn runs(places: &[Option<usize>]) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    for &place in places {
        match runs.last_mut() {
            Some(run) if run.from.map(|from| from + run.len) == place => run.len += 1,
            _ => runs.push(Run { len: 1, from: place }),
        }
    }
    runs
}

/// A copy of the inner levels.
struct Copy<'a, T> {
    x: &'a [T],
    fill: T,
    levels: &'a [Level<'a>],
}

impl<T: Stored> Copy<'_, T> {
    /// Writes y from index `first` of the level at `depth` on.
    fn write(&self, depth: usize, first: usize, base: isize, y: &mut [T]) {
        match &self.levels[depth..] {
            [] => unreachable!("there is a level at each depth"),
            [inner] => self.write_row(inner, first, base, y),
            [
                Level { places: Places::Stride(step), .. },
                Level { size, places: Places::Stride(stride), .. },
            ] => {
                self.write_rows([*step, *stride], *size, base + first as isize * step, y);
            }
            [level, ..] => {
                for (index, y) in (first..).zip(y.chunks_mut(level.unit)) {
                    match level.place(index) {
                        Some(place) => self.write(depth + 1, 0, base + place, y),
                        None => y.fill(self.fill),
                    }
                }
            }
        }
    }

    fn write_row(&self, level: &Level<'_>, first: usize, base: isize, y: &mut [T]) {
        let x = self.x;
        match level.places {
            Places::Stride(stride) => {
                self.write_rows([0, stride], y.len(), base + first as isize * stride, y);
            }
            // Short runs are not worth a call each.
            Places::Each(_) if y.len() == level.size && level.runs.len() * 4 <= level.size => {
                let mut rest = y;
                for run in &level.runs {
                    let (to, later) = rest.split_at_mut(run.len);
                    match run.from {
                        Some(from) => to.copy_from_slice(&x[base as usize + from..][..run.len]),
                        None => to.fill(self.fill),
                    }
                    rest = later;
                }
            }
            Places::Each(places) => {
                for (y, place) in y.iter_mut().zip(&places[first..]) {
                    *y = place.map_or(self.fill, |place| x[base as usize + place]);
                }
            }
        }
    }

    /// Rows of `columns` elements, `step` apart, each with its elements `stride` apart.
    fn write_rows(&self, [step, stride]: [isize; 2], columns: usize, base: isize, y: &mut [T]) {
        let x = self.x;
        let rows = || (0..).map(move |row: isize| base + row * step);
        match stride {
            1 => {
                for (base, y) in rows().zip(y.chunks_mut(columns)) {
                    y.copy_from_slice(&x[base as usize..][..y.len()]);
                }
            }
            0 => rows().zip(y.chunks_mut(columns)).for_each(|(base, y)| y.fill(x[base as usize])),
            // Neighbouring rows come from neighbours: squares of them keep both sides' cache lines.
            _ if step == 1 && columns >= 4 => {
                const TILE: usize = 16;
                for (band, y) in y.chunks_mut(TILE * columns).enumerate() {
                    for column in (0..columns).step_by(TILE) {
                        let width = TILE.min(columns - column);
                        for (row, y) in y.chunks_mut(columns).enumerate() {
                            let first = base + (band * TILE + row) as isize + column as isize * stride;
                            for (index, y) in y[column..column + width].iter_mut().enumerate() {
                                *y = x[(first + index as isize * stride) as usize];
                            }
                        }
                    }
                }
            }
            _ => {
                for (base, y) in rows().zip(y.chunks_mut(columns)) {
                    let mut place = base;
                    for y in y {
                        *y = x[place as usize];
                        place += stride;
                    }
                }
            }
        }
    }
}
