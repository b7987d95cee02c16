//! Loops of pooling over runs: parts of rows of outputs, for one window element at a time.

use super::PoolProblem;

impl PoolProblem {
    /// Visits every window element that is inside the input, as runs along output rows; the elements (taps) of a window in
    /// row-major order.
    #[inline(always)]
    pub(super) fn each_run(&self, mut visit: impl FnMut(Run)) {
        let (h, w) = (&self.height, &self.width);
        for oh in 0..h.output() {
            for r in 0..h.kernel {
                let Some(ih) = h.input_index(oh, r) else { continue };
                for s in 0..w.kernel {
                    let (first, end) = w.outputs_inside(s);
                    if first < end {
                        visit(Run {
                            tap: r * w.kernel + s,
                            output: oh * w.output() + first,
                            input: ih * w.input + first * w.stride + s * w.dilation - w.pad_before,
                            len: end - first,
                        });
                    }
                }
            }
        }
    }
}

/// Output pixels `output..output + len`, which through window element `tap` read the input pixels from `input` on, one
/// stride apart.
pub(super) struct Run {
    pub(super) tap: usize,
    pub(super) output: usize,
    pub(super) input: usize,
    pub(super) len: usize,
}

impl Run {
    pub(super) fn outputs(&self, lanes: usize) -> std::ops::Range<usize> {
        self.output * lanes..(self.output + self.len) * lanes
    }
}

/// Calls `visit(place in the outputs, place in the inputs)` for `len` output elements in pixels of `lanes` elements, which
/// read input pixels `stride` apart. The usual strides are constants, so that the loops vectorise.
///
/// The first place is below `len`, the second one below [`span`].
#[inline(always)]
pub(super) fn strided(stride: usize, lanes: usize, len: usize, mut visit: impl FnMut(usize, usize)) {
    // `for` loops, because the body of `for_each` may, if large, stay a separate function that is compiled for the portable
    // set only.
    match (lanes, stride) {
        (1, 1) => {
            for place in 0..len {
                visit(place, place);
            }
        }
        (1, 2) => {
            for place in 0..len {
                visit(place, 2 * place);
            }
        }
        (1, _) => {
            for place in 0..len {
                visit(place, stride * place);
            }
        }
        _ => {
            for pixel in 0..len / lanes {
                for lane in 0..lanes {
                    visit(pixel * lanes + lane, pixel * stride * lanes + lane);
                }
            }
        }
    }
}

/// The number of input elements from the first to the last that `len` output elements read. `len` is at least one pixel.
#[inline(always)]
pub(super) fn span(stride: usize, lanes: usize, len: usize) -> usize {
    (len / lanes - 1) * stride * lanes + lanes
}
