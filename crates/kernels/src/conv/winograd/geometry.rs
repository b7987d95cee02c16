//! Where the tiles of a batch of images lie, and the transforms of one tile of an image.

use std::marker::PhantomData;
use std::ops::Range;

use pulp::Simd;

use super::memory::{Grid, LANES, Number, load, load_part};
use super::transforms::{Filter, Input, OutputGradient, POINTS, Transform, column_of};
use crate::conv::problem::ConvProblem;
use crate::shared::Shared;

/// Extra floats between the matrices of two points, so that they do not fall into the same cache sets.
pub(super) const SKEW: usize = 48;

/// N x H x W x C images, N x OH x OW x K images, and the tiles that cover the latter. C and K are those of one group.
#[derive(Clone, Copy)]
pub(super) struct Geometry<F, T> {
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
    /// The number of groups, and which of them this is.
    pub(super) groups: usize,
    pub(super) group: usize,
    pub(super) filter: PhantomData<F>,
    /// The type of both images' numbers.
    pub(super) numbers: PhantomData<T>,
}

/// A tile: its image and the output's row and column where it starts.
#[derive(Clone, Copy)]
pub(super) struct Tile {
    pub(super) image: usize,
    pub(super) row: usize,
    pub(super) column: usize,
}

impl<F: Filter, T: Number> Geometry<F, T> {
    /// The tiles of a 3x3 problem's forward pass.
    pub(super) fn of(problem: &ConvProblem) -> Geometry<F, T> {
        let (h, w) = (&problem.height, &problem.width);
        Geometry {
            batch: problem.batch,
            input: [h.input, w.input],
            output: [h.output(), w.output()],
            padding: [h.pad_before, w.pad_before],
            channels: problem.group_in_channels(),
            outputs: problem.group_out_channels(),
            groups: problem.groups,
            group: 0,
            filter: PhantomData,
            numbers: PhantomData,
        }
    }

    /// The geometry of backward-data: a forward pass of dy with the filters turned by 180 degrees.
    pub(super) fn turned(self) -> Geometry<F, T> {
        Geometry {
            input: self.output,
            output: self.input,
            padding: self.padding.map(|pad| 2 - pad),
            channels: self.outputs,
            outputs: self.channels,
            ..self
        }
    }

    /// Tiles of all images.
    pub(super) fn tiles(&self) -> usize {
        self.batch * self.output[0].div_ceil(F::OUTPUTS) * self.output[1].div_ceil(F::OUTPUTS)
    }

    /// Tiles of a row.
    #[inline(always)]
    pub(super) fn columns(&self) -> usize {
        self.output[1].div_ceil(F::OUTPUTS)
    }

    #[inline(always)]
    pub(super) fn tile(&self, index: usize) -> Tile {
        let columns = self.columns();
        let rows = self.output[0].div_ceil(F::OUTPUTS);
        let (line, column) = (index / columns, index % columns);
        Tile { image: line / rows, row: line % rows * F::OUTPUTS, column: column * F::OUTPUTS }
    }

    /// The numbers to fetch, of images of `len` numbers, before these tiles are used. Rows of tiles follow each other as the rows of pixels
    /// do, so the numbers are those one row of tiles further on. With several groups nothing is fetched: their pixels lie between
    /// each other, and each group would fetch those of all.
    pub(super) fn numbers_of(&self, len: usize, tiles: Range<usize>) -> Range<usize> {
        if self.groups > 1 {
            return 0..0;
        }
        let place = |tile: usize| (tile + self.columns()).min(self.tiles()) * len / self.tiles();
        place(tiles.start)..place(tiles.end)
    }

    /// Floats as long as the numbers of a square's row of pixels with `channels` channels in each group, in whole cache lines.
    pub(super) fn zeros_len(&self, channels: usize) -> usize {
        (F::INPUTS * self.groups * channels).next_multiple_of(LANES)
    }

    /// Products of a tile, for each pair of channels.
    pub(super) fn points(&self) -> usize {
        F::INPUTS * F::INPUTS
    }

    /// Transforms the input of a tile: vector v of point i goes to `to.0[i * to.1 + place(v)]`.
    ///
    /// `zeros` are at least [`Geometry::zeros_len`] of the channels.
    ///
    /// # Panics
    /// If one of these places is not inside.
    ///
    /// # Safety
    /// Nobody else uses whole vectors in these places meanwhile.
    #[inline(always)]
    pub(super) unsafe fn transform_input<S: Simd>(
        &self,
        simd: S,
        [x, zeros]: [&[T]; 2],
        tile: usize,
        to: (Shared<'_, f32>, usize),
        place: impl Fn(usize) -> usize,
    ) {
        let Tile { image, row, column } = self.tile(tile);
        let start = [row.wrapping_sub(self.padding[0]), column.wrapping_sub(self.padding[1])];
        let channels = [self.channels, self.group, self.groups];
        let image = Image { x, zeros, image, size: self.input, channels };
        // SAFETY: the caller promises that nobody else uses the places in `to`, and these are the same places.
        unsafe { image.transform::<S, Input<F>>(simd, start, to, place) }
    }

    /// Transforms the output's gradient dy of a tile, to places as [`Geometry::transform_input`] does.
    ///
    /// `zeros` are at least [`Geometry::zeros_len`] of the outputs.
    ///
    /// # Safety
    /// As [`Geometry::transform_input`].
    #[inline(always)]
    pub(super) unsafe fn transform_gradient<S: Simd>(
        &self,
        simd: S,
        [dy, zeros]: [&[T]; 2],
        tile: usize,
        to: (Shared<'_, f32>, usize),
        place: impl Fn(usize) -> usize,
    ) {
        let Tile { image, row, column } = self.tile(tile);
        let channels = [self.outputs, self.group, self.groups];
        let image = Image { x: dy, zeros, image, size: self.output, channels };
        // SAFETY: the caller promises that nobody else uses the places in `to`, and these are the same places.
        unsafe { image.transform::<S, OutputGradient<F>>(simd, [row, column], to, place) }
    }
}

/// One of N x H x W x C images.
struct Image<'a, T> {
    x: &'a [T],
    /// Zeros, which are read around the image.
    zeros: &'a [T],
    image: usize,
    size: [usize; 2],
    /// Channels of a group, the group's number, and the number of groups.
    channels: [usize; 3],
}

impl<T: Number> Image<'_, T> {
    /// Transforms the square of pixels from `start`, which may lie outside: above or left of the image it is a wrapped
    /// negative.
    ///
    /// # Safety
    /// As [`Geometry::transform_input`].
    #[inline(always)]
    unsafe fn transform<S: Simd, M: Transform>(
        &self,
        simd: S,
        start: [usize; 2],
        to: (Shared<'_, f32>, usize),
        place: impl Fn(usize) -> usize,
    ) {
        let ([height, width], [c, group, groups], lanes) = (self.size, self.channels, S::F32_LANES);
        let pixel = groups * c;
        let x = &self.x[self.image * height * width * pixel..][..height * width * pixel];
        let inside = |start: usize, size: usize| {
            let (start, side) = (start as isize, M::SIDES[0] as isize);
            let first = (-start).clamp(0, side);
            first as usize..(size as isize - start).clamp(first, side) as usize
        };
        let (rows, columns) = (inside(start[0], height), inside(start[1], width));
        // The channels of a row's pixels inside the image, from the first one's to the last one's.
        let extent = columns.len().saturating_sub(1) * pixel + c;
        let mut lines = [&self.zeros[..extent]; POINTS];
        if !columns.is_empty() {
            for i in rows {
                let first =
                    (start[0].wrapping_add(i) * width).wrapping_add(start[1]).wrapping_add(columns.start);
                lines[i] = &x[first * pixel + group * c..][..extent];
            }
        }
        let (to, stride) = to;
        let points = Grid::of_points(M::SIDES[1], stride);
        for vector in 0..c.div_ceil(lanes) {
            let (first, place) = (vector * lanes, place(vector));
            assert!(points.fits::<S>(M::SIDES[1], place, to.len()), "a tile's vectors beyond their block");
            // SAFETY: `fits` has checked that the last point's vector is inside, and no other point's vector lies behind it;
            // `square` stores only points within this side. The caller promises that nobody else uses them.
            let store = |i, j, value| unsafe { points.store::<S, f32>((to, place), [i, j], value) };
            let line = Line { columns: columns.clone(), pixel, first };
            if first + lanes <= c {
                // SAFETY: `column` asks for `at` = pixel * (a column inside, less the first) + `first`. A line has `extent`
                // numbers, up to the c channels of the last such pixel, and `first + lanes` is at most c.
                let load = |line: &[T], at| unsafe { load::<S, T>(line, at) };
                M::square(simd, |j| line.column(simd, &lines[..M::SIDES[0]], j, load), store);
            } else {
                let load = |line: &[T], at| load_part(simd, &line[at..][..c - first]);
                M::square(simd, |j| line.column(simd, &lines[..M::SIDES[0]], j, load), store);
            }
        }
    }
}

/// Where a square's pixels lie in its lines.
struct Line {
    /// Columns of the square that lie inside the image, where the lines begin.
    columns: Range<usize>,
    /// Numbers from one pixel to the next.
    pixel: usize,
    /// First channel of a vector.
    first: usize,
}

impl Line {
    /// The vectors of column `j`; zeros if it lies outside.
    #[inline(always)]
    fn column<S: Simd, T>(
        &self,
        simd: S,
        lines: &[&[T]],
        j: usize,
        load: impl Fn(&[T], usize) -> S::f32s,
    ) -> [S::f32s; POINTS] {
        if !self.columns.contains(&j) {
            return [simd.splat_f32s(0.0); POINTS];
        }
        let at = (j - self.columns.start) * self.pixel + self.first;
        column_of(simd, lines.len(), |i| load(lines[i], at))
    }
}
