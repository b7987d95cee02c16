//! Panels: the operands of the matrix kernel, packed directly from the tensors.
//!
//! A panel holds a block of a matrix in the order in which it is summed: `[depth][rows]` or `[depth][columns]`.

use crate::simd::registers;
use pulp::Simd;

use crate::conv::problem::{ConvAxis, ConvProblem};

/// The longest part of a sum that is packed at once: a panel of columns then takes half of the L1 cache.
pub(super) const DEPTH: usize = 192;
/// Columns that are packed at once: with [`DEPTH`], a fraction of the L2 cache.
pub(super) const COLUMNS: usize = 256;

/// Rows of a panel: with two vectors of columns they give as many sums as registers hold.
pub(super) const fn rows(registers: usize) -> usize {
    match registers {
        32.. => 12,
        16.. => 6,
        _ => 4,
    }
}

/// The matrix of columns of one image: row `j` is what one kernel element reads from one channel.
pub(super) struct Columns<'a> {
    pub(super) problem: &'a ConvProblem,
    /// One image's channels of one group, C/groups x H x W.
    pub(super) image: &'a [f32],
}

impl Columns<'_> {
    /// Calls `copy` with (pixel, run of x, its step) for the pixels `[first, end)` of row `j` that read the image, not
    /// its padding, run by run; the step is the distance between neighbours in the run.
    #[inline(always)]
    pub(super) fn runs(
        &self,
        j: usize,
        [first, end]: [usize; 2],
        mut copy: impl FnMut(usize, &[f32], usize, usize),
    ) {
        let (h, w): (&ConvAxis, &ConvAxis) = (&self.problem.height, &self.problem.width);
        let taps = h.kernel * w.kernel;
        let (r, s) = (j % taps / w.kernel, j % w.kernel);
        let plane = &self.image[j / taps * h.input * w.input..][..h.input * w.input];
        let width = w.output();
        let (inside, outside) = w.outputs_inside(s);
        for oh in first / width..end.div_ceil(width) {
            let Some(ih) = h.input_index(oh, r) else { continue };
            let from = inside.max(first.saturating_sub(oh * width));
            let to = outside.min(end - oh * width);
            if from < to {
                let start = ih * w.input + from * w.stride + s * w.dilation - w.pad_before;
                copy(oh * width + from, &plane[start..], w.stride, to - from);
            }
        }
    }

    /// Packs rows `[j, j + depth)` of the columns of pixels `[first, end)`: `[panel][row][width]`, zeros in the padding
    /// and after the last pixel.
    #[inline(always)]
    pub(super) fn pack(
        &self,
        [j, depth]: [usize; 2],
        [first, end]: [usize; 2],
        width: usize,
        to: &mut [f32],
    ) {
        let panel = depth * width;
        to[..(end - first).div_ceil(width) * panel].fill(0.0);
        for row in 0..depth {
            self.runs(j + row, [first, end], |pixel, x, step, count| {
                let mut done = 0;
                while done < count {
                    let place = pixel - first + done;
                    let take = (count - done).min(width - place % width);
                    let to = &mut to[place / width * panel + row * width + place % width..][..take];
                    if step == 1 {
                        to.copy_from_slice(&x[done..done + take]);
                    } else {
                        let values = x[done * step..].iter().step_by(step);
                        to.iter_mut().zip(values).for_each(|(to, &value)| *to = value);
                    }
                    done += take;
                }
            });
        }
    }

    /// Packs the transpose: rows `[j, j + count)` as columns, `width` of them per panel: `[panel][pixel][width]`.
    #[inline(always)]
    pub(super) fn pack_transposed(
        &self,
        [j, count]: [usize; 2],
        [first, end]: [usize; 2],
        width: usize,
        to: &mut [f32],
    ) {
        let panel = (end - first) * width;
        to[..count.div_ceil(width) * panel].fill(0.0);
        for row in 0..count {
            let to = &mut to[row / width * panel + row % width..];
            self.runs(j + row, [first, end], |pixel, x, step, count| {
                let values = x.iter().step_by(step).take(count);
                let to = to[(pixel - first) * width..].iter_mut().step_by(width);
                to.zip(values).for_each(|(to, &value)| *to = value);
            });
        }
    }
}

/// Packs rows `[0, count)` and columns `[first, end)` of a row-major matrix: `[panel][column][height]`, with zeros for
/// missing rows.
#[inline(always)]
pub(super) fn pack_rows(
    matrix: &[f32],
    [count, stride]: [usize; 2],
    [first, end]: [usize; 2],
    height: usize,
    to: &mut [f32],
) {
    let panel = (end - first) * height;
    for (index, to) in to[..count.div_ceil(height) * panel].chunks_exact_mut(panel).enumerate() {
        for row in 0..height {
            let place = index * height + row;
            let to = to[row..].iter_mut().step_by(height);
            if place < count {
                let values = &matrix[place * stride + first..place * stride + end];
                to.zip(values).for_each(|(to, &value)| *to = value);
            } else {
                to.for_each(|to| *to = 0.0);
            }
        }
    }
}

/// A part of the output: `rows` x `columns` at most, rows `stride` apart.
pub(super) struct Target<'a> {
    pub(super) data: &'a mut [f32],
    pub(super) stride: usize,
    pub(super) rows: usize,
    pub(super) columns: usize,
    /// Whether the product is added to what is there.
    pub(super) add: bool,
}

/// The product of a panel of rows `[depth][rows]` and a panel of columns `[depth][2 lanes]`.
#[inline(always)]
pub(super) fn product<S: Simd>(simd: S, a: &[f32], b: &[f32], target: Target<'_>) {
    match rows(registers::<S>()) {
        12 => product_of::<S, 12>(simd, a, b, target),
        6 => product_of::<S, 6>(simd, a, b, target),
        _ => product_of::<S, 4>(simd, a, b, target),
    }
}

#[inline(always)]
fn product_of<S: Simd, const ROWS: usize>(simd: S, a: &[f32], b: &[f32], target: Target<'_>) {
    let lanes = S::F32_LANES;
    let (b, _) = S::as_simd_f32s(b);
    let zero = simd.splat_f32s(0.0);
    let mut sums = [[zero; 2]; ROWS];
    let (a, _) = a.as_chunks::<ROWS>();
    let (b, _) = b.as_chunks::<2>();
    for (a, b) in a.iter().zip(b) {
        for row in 0..ROWS {
            let value = simd.splat_f32s(a[row]);
            sums[row][0] = simd.mul_add_f32s(value, b[0], sums[row][0]);
            sums[row][1] = simd.mul_add_f32s(value, b[1], sums[row][1]);
        }
    }
    for (row, sums) in sums.into_iter().enumerate().take(target.rows) {
        let line = &mut target.data[row * target.stride..][..target.columns];
        for (half, sum) in sums.into_iter().enumerate() {
            let Some(to) = line.get_mut(half * lanes..target.columns.min((half + 1) * lanes)) else {
                continue;
            };
            let sum = if target.add { simd.add_f32s(sum, simd.partial_load_f32s(to)) } else { sum };
            simd.partial_store_f32s(to, sum);
        }
    }
}
