//! An image cut into bands of rows, each of which is a convolution of its own: for batches of fewer images than threads.

use std::ops::Range;

use crate::conv::problem::{ConvAxis, Pass};

/// One band: an axis of fewer rows, with the rows of x and of y that it stands for.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Band {
    pub(super) axis: ConvAxis,
    pub(super) x: Range<usize>,
    pub(super) y: Range<usize>,
}

impl Band {
    /// The whole axis.
    pub(super) fn whole(axis: &ConvAxis) -> Band {
        Band { axis: *axis, x: 0..axis.input, y: 0..axis.output() }
    }

    /// Cuts the axis into `count` bands, in order. The rows that a pass writes, or that it sums over, belong to one band each:
    /// those of x for backward-data, else those of y. `None` if there are too few rows, or a band would have only padding.
    pub(super) fn cut(axis: &ConvAxis, pass: Pass, count: usize) -> Option<Vec<Band>> {
        if count == 1 {
            return Some(vec![Band::whole(axis)]);
        }
        let cut = |rows: usize, band: usize| rows * band / count;
        let band = |band: usize| match pass {
            Pass::Forward | Pass::BackwardWeights => {
                Band::of_outputs(axis, cut(axis.output(), band)..cut(axis.output(), band + 1))
            }
            Pass::BackwardData => {
                let first = |band| match band {
                    0 => 0,
                    band if band == count => axis.input,
                    // A row that an output's first tap reads: then no row of a band lies before all that its outputs read.
                    band => {
                        let row = (cut(axis.input, band) + axis.pad_before) / axis.stride * axis.stride;
                        row.saturating_sub(axis.pad_before)
                    }
                };
                Band::of_inputs(axis, first(band)..first(band + 1))
            }
        };
        (0..count).map(band).collect()
    }

    /// Some rows of y, with all rows of x that they read.
    fn of_outputs(axis: &ConvAxis, y: Range<usize>) -> Option<Band> {
        let read = read_by(axis, &y)?;
        let inside = |row: usize| row.saturating_sub(axis.pad_before).min(axis.input);
        Band::of(axis, inside(read.start)..inside(read.end), y)
    }

    /// Some rows of x, with all rows of y that read them.
    fn of_inputs(axis: &ConvAxis, x: Range<usize>) -> Option<Band> {
        let last = x.end.checked_sub(1)? + axis.pad_before;
        let first = (x.start + axis.pad_before + 1).saturating_sub(axis.kernel_span()).div_ceil(axis.stride);
        Band::of(axis, x, first..(last / axis.stride + 1).min(axis.output()))
    }

    /// Rows of x and of y. What these read beyond those counts as padding.
    fn of(axis: &ConvAxis, x: Range<usize>, y: Range<usize>) -> Option<Band> {
        let read = read_by(axis, &y)?;
        let padded = [x.start, x.end].map(|row| row + axis.pad_before);
        let (input, pad_before) = (x.len(), padded[0].checked_sub(read.start)?);
        let part = ConvAxis { input, pad_before, pad_after: read.end.saturating_sub(padded[1]), ..*axis };
        (!x.is_empty() && part.output() == y.len()).then_some(Band { axis: part, x, y })
    }
}

/// What some outputs read, counted from the first row of padding on; `None` for none.
fn read_by(axis: &ConvAxis, y: &Range<usize>) -> Option<Range<usize>> {
    Some(y.start * axis.stride..y.end.checked_sub(1)? * axis.stride + axis.kernel_span())
        .filter(|_| !y.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The pairs of a row of x and a row of y, with the tap between them.
    fn pairs(band: &Band) -> Vec<[usize; 3]> {
        let axis = &band.axis;
        let pair = |o, k| Some([axis.input_index(o, k)? + band.x.start, o + band.y.start, k]);
        let taps = |o| (0..axis.kernel).filter_map(move |k| pair(o, k));
        (0..axis.output()).flat_map(taps).collect()
    }

    #[test]
    fn bands_have_each_pair_of_rows_once() {
        let mut cut_axes = 0;
        for input in 1..14 {
            for kernel in 1..5 {
                for (stride, dilation) in [(1, 1), (2, 1), (3, 1), (1, 2), (2, 3)] {
                    for (pad_before, pad_after) in [(0, 0), (1, 1), (2, 0), (0, 3), (4, 4)] {
                        let axis = ConvAxis { input, kernel, stride, pad_before, pad_after, dilation };
                        let Ok(axis) = axis.checked("row") else { continue };
                        for pass in Pass::ALL {
                            for count in 1..4 {
                                let Some(bands) = Band::cut(&axis, pass, count) else { continue };
                                cut_axes += 1;
                                check(&axis, pass, &bands);
                            }
                        }
                    }
                }
            }
        }
        assert!(cut_axes > 5000, "only {cut_axes} were cut");
    }

    fn check(axis: &ConvAxis, pass: Pass, bands: &[Band]) {
        let written = |band: &Band| if pass == Pass::BackwardData { band.x.clone() } else { band.y.clone() };
        let mut sum: Vec<_> = bands.iter().flat_map(pairs).collect();
        let mut whole = pairs(&Band::whole(axis));
        sum.sort();
        whole.sort();
        assert_eq!(sum, whole, "{axis:?}, {pass:?}: {bands:?}");
        let rows: Vec<_> = bands.iter().flat_map(written).collect();
        let all = written(&Band::whole(axis));
        assert_eq!(rows, all.collect::<Vec<_>>(), "{axis:?}, {pass:?}: {bands:?}");
    }

    #[test]
    fn usual_axes_are_cut() {
        for axis in [
            ConvAxis::new(8, 3).padded(1),
            ConvAxis::new(16, 3).padded(1).strided(2),
            ConvAxis::new(7, 1).strided(2),
            ConvAxis::new(7, 7).padded(3),
        ] {
            for pass in Pass::ALL {
                assert!(Band::cut(&axis, pass, 2).is_some(), "{axis:?}, {pass:?}");
            }
        }
    }
}
