//! Where the tiles of a batch of images lie, and the transforms of one tile of an image.

use std::marker::PhantomData;
use std::ops::Range;

use pulp::Simd;

use super::memory::{Grid, LANES, Number, load_part};
use super::transforms::{Filter, Input, OutputGradient, POINTS, Transform, column_of};
use crate::conv::problem::{ConvAxis, ConvProblem};
use crate::shared::Shared;

/// Extra floats between the matrices of two points, so that they do not fall into the same cache sets.
pub(super) const SKEW: usize = 48;

/// Images that are read, images that are written, and the tiles that cover the latter.
///
/// Forward and backward-weights read x and write y (backward-weights reads y's gradient). Backward-data reads the gradient of y and writes
/// that of x; its filters are turned by 180 degrees.
///
/// A stride of s divides the taps of each dimension among s phases: through tap `k = s j + p`, output o reads pixel
/// `s (o + j) + p - padding`. So a phase is a convolution without a stride, of every s-th pixel with every s-th tap. Forward sums over
/// the phases' channels; backward-data computes each phase's pixels from the same tile of y.
#[derive(Clone, Copy)]
pub(super) struct Geometry<F, T> {
    pub(super) batch: usize,
    /// Height and width of the images that are read.
    pub(super) input: [usize; 2],
    /// Height and width of the images that are written.
    pub(super) output: [usize; 2],
    /// Rows and columns of the kernel, and its stride.
    pub(super) kernel: [usize; 2],
    pub(super) stride: usize,
    /// Whether this is backward-data.
    pub(super) turned: bool,
    /// The first pixels that the first tile reads and writes, which may lie outside of the images.
    pub(super) origins: [[isize; 2]; 2],
    /// Rows and columns of tiles of an image.
    pub(super) across: [usize; 2],
    /// Channels of a group of the images that are read.
    pub(super) channels: usize,
    /// Channels of a group of the images that are written.
    pub(super) outputs: usize,
    /// The number of groups, and which of them this is.
    pub(super) groups: usize,
    pub(super) group: usize,
    pub(super) filter: PhantomData<F>,
    /// The type of both images' numbers.
    pub(super) numbers: PhantomData<T>,
}

/// The pixels and the taps of one phase, in both dimensions.
#[derive(Clone, Copy)]
pub(super) struct Phase {
    /// The first tap.
    pub(super) first: [usize; 2],
    /// The number of taps, which are a stride apart.
    pub(super) taps: [usize; 2],
    /// The products of a tile, in both dimensions: with a tap less than the filter's, those of the point at infinity are zero.
    pub(super) points: [usize; 2],
}

/// The first taps of the phases of a stride of 2, in an order in which those that have products of the same point are neighbours.
const PHASES: [[usize; 2]; 4] = [[1, 0], [0, 0], [0, 1], [1, 1]];

/// A tile: its image, and the first pixels that it reads and writes, which may lie outside of the images.
#[derive(Clone, Copy)]
pub(super) struct Tile {
    image: usize,
    from: [isize; 2],
    to: [isize; 2],
}

impl<F: Filter, T: Number> Geometry<F, T> {
    /// The tiles of a problem; `None` if the filter does not fit its kernel and stride.
    pub(super) fn of(problem: &ConvProblem, turned: bool) -> Option<Geometry<F, T>> {
        let axes = [&problem.height, &problem.width];
        let stride = problem.height.stride;
        let fits = |axis: &&ConvAxis| axis.dilation == 1 && axis.kernel.div_ceil(stride) == F::TAPS;
        if !matches!(stride, 1 | 2) || problem.width.stride != stride || !axes.iter().all(fits) {
            return None;
        }
        let (x, y) = (axes.map(|axis| axis.input), axes.map(|axis| axis.output()));
        let (c, k) = (problem.group_in_channels(), problem.group_out_channels());
        let paddings = axes.map(|axis| axis.pad_before);
        let origins = if turned {
            // A tile of x starts with a pixel of the last phase if that has a tap less than the others. Then the first pixel of y that
            // is read is the same for all phases.
            let starts = axes.map(|axis| axis.pad_before + axis.kernel % stride);
            let from = starts.map(|start| (start / stride) as isize - (F::TAPS as isize - 1));
            [from, starts.map(|start| -((start % stride) as isize))]
        } else {
            [paddings.map(|padding| -(padding as isize)), [0; 2]]
        };
        let (input, output) = if turned { (y, x) } else { (x, y) };
        let step = if turned { stride } else { 1 };
        let across =
            [0, 1].map(|d| output[d].saturating_add_signed(-origins[1][d]).div_ceil(step * F::OUTPUTS));
        Some(Geometry {
            batch: problem.batch,
            input,
            output,
            kernel: axes.map(|axis| axis.kernel),
            stride,
            turned,
            origins,
            across,
            channels: if turned { k } else { c },
            outputs: if turned { c } else { k },
            groups: problem.groups,
            group: 0,
            filter: PhantomData,
            numbers: PhantomData,
        })
    }

    /// The number of phases.
    #[inline(always)]
    pub(super) fn phases(&self) -> usize {
        self.stride * self.stride
    }

    #[inline(always)]
    pub(super) fn phase(&self, index: usize) -> Phase {
        let first = self.first_of(index);
        let taps = [0, 1].map(|d| (self.kernel[d] - first[d]).div_ceil(self.stride));
        let points = taps.map(|taps| F::INPUTS - (F::TAPS - taps));
        Phase { first, taps, points }
    }

    /// The first tap of a phase.
    #[inline(always)]
    fn first_of(&self, phase: usize) -> [usize; 2] {
        if self.stride == 1 { [0; 2] } else { PHASES[phase] }
    }

    /// Where a phase's taps lie: in a square of `F::TAPS` rows and columns, and in the kernel.
    pub(super) fn places(&self, phase: &Phase) -> Vec<[usize; 2]> {
        let tap = |d: usize, at: usize| {
            let at = if self.turned { phase.taps[d] - 1 - at } else { at };
            phase.first[d] + self.stride * at
        };
        let place = |r, s| [r * F::TAPS + s, tap(0, r) * self.kernel[1] + tap(1, s)];
        // Of a known length: it is made in tasks, and a vector that grows has threads wait for each other in the allocator.
        let mut places = Vec::with_capacity(phase.taps[0] * phase.taps[1]);
        places.extend((0..phase.taps[0]).flat_map(|r| (0..phase.taps[1]).map(move |s| place(r, s))));
        places
    }

    /// The phases that have products of a point.
    pub(super) fn phases_of(&self, point: usize) -> Range<usize> {
        if self.stride == 1 {
            return 0..1;
        }
        let point = [point / F::INPUTS, point % F::INPUTS];
        let has = |&phase: &usize| {
            let points = self.phase(phase).points;
            point[0] < points[0] && point[1] < points[1]
        };
        let mut phases = (0..self.phases()).filter(has);
        let first = phases.next().expect("the phase of the first tap has all points");
        first..first + 1 + phases.count()
    }

    /// Channels of each phase that is read, as they lie in memory: whole units, such as vectors, if there are several phases.
    pub(super) fn channels_of_phase(&self, unit: usize) -> usize {
        if self.sources() == 1 { self.channels } else { self.channels.next_multiple_of(unit) }
    }

    /// Multiplications of a group.
    pub(super) fn work(&self) -> usize {
        self.tiles() * self.products() * self.channels * self.outputs
    }

    /// The phases of the images that are read: one if this is backward-data.
    #[inline(always)]
    pub(super) fn sources(&self) -> usize {
        if self.turned { 1 } else { self.phases() }
    }

    /// The phases of the images that are written: one unless this is backward-data.
    #[inline(always)]
    pub(super) fn targets(&self) -> usize {
        if self.turned { self.phases() } else { 1 }
    }

    /// Pixels from one that a tile reads, or writes, to the next: 1 or 2.
    #[inline(always)]
    pub(super) fn steps(&self) -> [usize; 2] {
        if self.turned { [1, self.stride] } else { [self.stride, 1] }
    }

    /// Tiles of all images.
    pub(super) fn tiles(&self) -> usize {
        self.batch * self.across[0] * self.across[1]
    }

    /// These tiles, in order. Only the first one's place is computed by division: a division takes as long as a part of a tile's transform.
    #[inline(always)]
    pub(super) fn each_tile(&self, tiles: Range<usize>) -> impl Iterator<Item = Tile> {
        let ([rows, columns], steps, origins) = (self.across, self.steps(), self.origins);
        let (line, mut column) = (tiles.start / columns, tiles.start % columns);
        let (mut image, mut row) = (line / rows, line % rows);
        tiles.map(move |_| {
            let first = |side: usize, d: usize, tile: usize| {
                (steps[side] * F::OUTPUTS * tile) as isize + origins[side][d]
            };
            let start = |side: usize| [first(side, 0, row), first(side, 1, column)];
            let tile = Tile { image, from: start(0), to: start(1) };
            column += 1;
            if column == columns {
                (column, row) = (0, row + 1);
            }
            if row == rows {
                (row, image) = (0, image + 1);
            }
            tile
        })
    }

    /// The numbers to fetch, of images of `len` numbers, before these tiles are used. Rows of tiles follow each other as the rows of pixels
    /// do, so the numbers are those one row of tiles further on. With several groups nothing is fetched: their pixels lie between
    /// each other, and each group would fetch those of all.
    pub(super) fn numbers_of(&self, len: usize, tiles: Range<usize>) -> Range<usize> {
        if self.groups > 1 {
            return 0..0;
        }
        let place = |tile: usize| (tile + self.across[1]).min(self.tiles()) * len / self.tiles();
        place(tiles.start)..place(tiles.end)
    }

    /// Floats as long as the numbers from a square's first pixel of a row to the last one, with `channels` channels in each group, in
    /// whole cache lines.
    pub(super) fn zeros_len(&self, channels: usize) -> usize {
        (self.stride * F::INPUTS * self.groups * channels).next_multiple_of(LANES)
    }

    /// Products of a tile, for each pair of channels of one phase that has all.
    pub(super) fn points(&self) -> usize {
        F::INPUTS * F::INPUTS
    }

    /// Products of a tile, for each pair of channels of all phases.
    pub(super) fn products(&self) -> usize {
        (0..self.phases()).map(|phase| self.phase(phase).points.iter().product::<usize>()).sum()
    }

    /// Transforms what a tile reads in one of [`Geometry::sources`]: vector v of point i goes to `to.0[i * to.1 + place(v)]`.
    ///
    /// `zeros` are at least [`Geometry::zeros_len`] of the channels. STEP is the first one of [`Geometry::steps`].
    ///
    /// # Panics
    /// If one of these places is not inside.
    ///
    /// # Safety
    /// Nobody else uses whole vectors in these places meanwhile.
    #[inline(always)]
    pub(super) unsafe fn transform_input<S: Simd, const STEP: usize>(
        &self,
        simd: S,
        [x, zeros]: [&[T]; 2],
        (tile, source): (&Tile, usize),
        to: (Shared<'_, f32>, usize),
        place: impl Fn(usize) -> usize,
    ) {
        let &Tile { image, from, .. } = tile;
        let [mut row, mut column] = from;
        if STEP > 1 {
            let first = self.first_of(source);
            row += first[0] as isize;
            column += first[1] as isize;
        }
        let channels = [self.channels, self.group, self.groups];
        let image = Image { x, zeros, image, size: self.input, channels };
        // SAFETY: the caller promises that nobody else uses the places in `to`, and these are the same places.
        unsafe { image.transform::<S, Input<F>, STEP>(simd, [row, column], to, place) }
    }

    /// Transforms the gradient dy of a tile of y, to places as [`Geometry::transform_input`] does.
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
        tile: &Tile,
        to: (Shared<'_, f32>, usize),
        place: impl Fn(usize) -> usize,
    ) {
        let channels = [self.outputs, self.group, self.groups];
        let image = Image { x: dy, zeros, image: tile.image, size: self.output, channels };
        // SAFETY: the caller promises that nobody else uses the places in `to`, and these are the same places.
        unsafe { image.transform::<S, OutputGradient<F>, 1>(simd, tile.to, to, place) }
    }

    /// The image of a tile's outputs of one of [`Geometry::targets`], and their first pixel. STEP is the second one of
    /// [`Geometry::steps`].
    #[inline(always)]
    pub(super) fn first_output<const STEP: usize>(&self, tile: &Tile, target: usize) -> (usize, [isize; 2]) {
        // The tile starts with the last phase if that has a tap less than the others.
        let place = |d: usize| if STEP == 1 { 0 } else { (self.first_of(target)[d] + self.kernel[d]) % 2 };
        (tile.image, [0, 1].map(|d| tile.to[d] + place(d) as isize))
    }

    /// The rows and columns of a tile of outputs, STEP pixels apart from `first` on, that lie inside the image.
    #[inline(always)]
    pub(super) fn outputs_inside<const STEP: usize>(&self, first: [isize; 2]) -> [Range<usize>; 2] {
        [0, 1].map(|d| inside::<STEP>(first[d], F::OUTPUTS, self.output[d]))
    }
}

/// Which of `count` pixels, STEP apart from `start` on, lie among `size` pixels.
#[inline(always)]
fn inside<const STEP: usize>(start: isize, count: usize, size: usize) -> Range<usize> {
    let until = |pixel: isize| (pixel.max(0) as usize).div_ceil(STEP).min(count);
    let first = until(-start);
    first..until(size as isize - start).max(first)
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
    /// Transforms the square of pixels, STEP apart, from `start`, which may lie outside.
    ///
    /// # Safety
    /// As [`Geometry::transform_input`].
    #[inline(always)]
    unsafe fn transform<S: Simd, M: Transform, const STEP: usize>(
        &self,
        simd: S,
        start: [isize; 2],
        to: (Shared<'_, f32>, usize),
        place: impl Fn(usize) -> usize,
    ) {
        let ([height, width], [c, group, groups], lanes) = (self.size, self.channels, S::F32_LANES);
        let pixel = groups * c;
        let x = &self.x[self.image * height * width * pixel..][..height * width * pixel];
        let inside = |d: usize| inside::<STEP>(start[d], M::SIDES[0], self.size[d]);
        let (rows, columns) = (inside(0), inside(1));
        // From the first one of a row's pixels inside the image to the channels of the last one.
        let (next, row) = (STEP * pixel, STEP * width * pixel);
        let extent = columns.len().saturating_sub(1) * next + c;
        assert!(extent <= self.zeros.len(), "{extent} of {} zeros", self.zeros.len());
        let mut lines = [self.zeros.as_ptr(); POINTS];
        if !rows.is_empty() && !columns.is_empty() {
            let first =
                |d: usize, inside: &Range<usize>| (start[d] + (STEP * inside.start) as isize) as usize;
            let first = (first(0, &rows) * width + first(1, &columns)) * pixel + group * c;
            assert!(first + (rows.len() - 1) * row + extent <= x.len(), "a tile's pixels beyond the image");
            let line = x.as_ptr().wrapping_add(first).wrapping_sub(rows.start * row);
            for i in 0..M::SIDES[0] {
                if rows.contains(&i) {
                    lines[i] = line.wrapping_add(i * row);
                }
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
            let line = Line { columns: columns.clone(), next, first };
            if first + lanes <= c {
                // SAFETY: from each of `lines` on, `extent` numbers are readable: the zeros', or the image's, where the assertions
                // have checked the zeros and the last line. `column` asks for `at` = next * (a column inside, less the first) +
                // `first`. A line has `extent` numbers, up to the c channels of the last such pixel, and `first + lanes` is at
                // most c.
                let load = |line: *const T, at| unsafe { T::load_vector::<S>(line.add(at)) };
                M::square(simd, |j| line.column(simd, &lines[..M::SIDES[0]], j, load), store);
            } else {
                // SAFETY: as above; the numbers from `first` on to the last of the c channels are taken.
                let part =
                    |line: *const T, at| unsafe { std::slice::from_raw_parts(line.add(at), c - first) };
                let load = |line, at| load_part(simd, part(line, at));
                M::square(simd, |j| line.column(simd, &lines[..M::SIDES[0]], j, load), store);
            }
        }
    }
}

/// Where a square's pixels lie in its lines.
struct Line {
    /// Columns of the square that lie inside the image, where the lines begin.
    columns: Range<usize>,
    /// Numbers from one of these pixels to the next.
    next: usize,
    /// First channel of a vector.
    first: usize,
}

impl Line {
    /// The vectors of column `j`; zeros if it lies outside.
    #[inline(always)]
    fn column<S: Simd, T>(
        &self,
        simd: S,
        lines: &[*const T],
        j: usize,
        load: impl Fn(*const T, usize) -> S::f32s,
    ) -> [S::f32s; POINTS] {
        if !self.columns.contains(&j) {
            return [simd.splat_f32s(0.0); POINTS];
        }
        let at = (j - self.columns.start) * self.next + self.first;
        column_of(simd, lines.len(), |i| load(lines[i], at))
    }
}
