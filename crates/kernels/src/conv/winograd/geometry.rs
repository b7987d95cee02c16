//! Where the tiles of a batch of images lie, and the transform of one input tile.

use std::marker::PhantomData;

use pulp::Simd;

use super::transforms::{Filter, POINTS};
use crate::conv::problem::ConvProblem;

/// Floats between the matrices of two points beyond their own size, so that they do not fall into the same cache sets.
pub(super) const SKEW: usize = 48;

/// N x H x W x C images, N x OH x OW x K images, and the tiles that cover the latter.
#[derive(Clone, Copy)]
pub(super) struct Geometry<F> {
    pub(super) batch: usize,
    /// Height and width of the input.
    pub(super) input: [usize; 2],
    /// Height and width of the output.
    pub(super) output: [usize; 2],
    /// Padding above and to the left.
    pub(super) padding: [usize; 2],
    /// C.
    pub(super) channels: usize,
    /// K.
    pub(super) outputs: usize,
    pub(super) filter: PhantomData<F>,
}

impl<F: Filter> Geometry<F> {
    /// The tiles of a 3x3 problem's forward pass.
    pub(super) fn of(problem: &ConvProblem) -> Geometry<F> {
        let (h, w) = (&problem.height, &problem.width);
        Geometry {
            batch: problem.batch,
            input: [h.input, w.input],
            output: [h.output(), w.output()],
            padding: [h.pad_before, w.pad_before],
            channels: problem.in_channels,
            outputs: problem.out_channels,
            filter: PhantomData,
        }
    }

    pub(super) fn tile_rows(&self) -> usize {
        self.output[0].div_ceil(F::OUTPUTS)
    }

    pub(super) fn tile_columns(&self) -> usize {
        self.output[1].div_ceil(F::OUTPUTS)
    }

    /// Rows of tiles in all images.
    pub(super) fn units(&self) -> usize {
        self.batch * self.tile_rows()
    }

    /// Products of a tile, for each pair of channels.
    pub(super) fn points(&self) -> usize {
        F::INPUTS * F::INPUTS
    }

    /// Transforms the input of tile `column` in row `unit`: vector v of point i goes to `to[i * stride + place(v)]`.
    #[inline(always)]
    pub(super) fn transform_input<S: Simd>(
        &self,
        simd: S,
        x: &[f32],
        [unit, column]: [usize; 2],
        to: &mut [f32],
        stride: usize,
        place: impl Fn(usize) -> usize,
    ) {
        let lanes = S::F32_LANES;
        let (image, row) = (unit / self.tile_rows(), unit % self.tile_rows());
        let [height, width] = self.input;
        let c = self.channels;
        let top = (row * F::OUTPUTS) as isize - self.padding[0] as isize;
        let left = (column * F::OUTPUTS) as isize - self.padding[1] as isize;
        let x = &x[image * height * width * c..][..height * width * c];
        // Where each pixel of the tile starts; none in the padding.
        let mut pixels = [[None::<usize>; POINTS]; POINTS];
        for i in 0..F::INPUTS {
            let h = top + i as isize;
            for j in 0..F::INPUTS {
                let w = left + j as isize;
                if h >= 0 && w >= 0 && (h as usize) < height && (w as usize) < width {
                    pixels[i][j] = Some((h as usize * width + w as usize) * c);
                }
            }
        }
        let zero = simd.splat_f32s(0.0);
        for vector in 0..c.div_ceil(lanes) {
            let offset = vector * lanes;
            let take = lanes.min(c - offset);
            let mut half = [[zero; POINTS]; POINTS];
            for j in 0..F::INPUTS {
                let mut d = [zero; POINTS];
                for i in 0..F::INPUTS {
                    if let Some(pixel) = pixels[i][j] {
                        d[i] = simd.partial_load_f32s(&x[pixel + offset..][..take]);
                    }
                }
                let t = F::input(simd, d);
                for i in 0..F::INPUTS {
                    half[i][j] = t[i];
                }
            }
            let place = place(vector);
            for i in 0..F::INPUTS {
                let t = F::input(simd, half[i]);
                for j in 0..F::INPUTS {
                    simd.partial_store_f32s(&mut to[(i * F::INPUTS + j) * stride + place..][..lanes], t[j]);
                }
            }
        }
    }
}
