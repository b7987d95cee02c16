//! Which source pixels a target pixel reads: the taps of both directions, and the indirection table of a block.
//!
//! Forward's target is y and its source x; backward-data's target is dx and its source dy.

use std::ops::Range;

use super::slab::Places;
use crate::conv::even::even_parts;
use crate::conv::problem::ConvAxis;
use crate::stream::prefetch_to_l2;

/// A kernel element along one axis, as the targets of one phase use it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::conv) struct Tap {
    pub(in crate::conv) kernel: usize,
    /// Target number i of the phase reads source `i * source_step + offset`.
    pub(in crate::conv) offset: isize,
}

/// The targets `first, first + step, ...` along one axis, which all use the same taps.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::conv) struct Phase {
    pub(in crate::conv) first: usize,
    pub(in crate::conv) step: usize,
    pub(in crate::conv) source_step: usize,
    /// Size of the source.
    pub(in crate::conv) source: usize,
    /// By falling or rising offset, so that the taps that lie inside the source for a target are contiguous.
    pub(in crate::conv) taps: Vec<Tap>,
}

impl Phase {
    /// Forward: all outputs are one phase.
    pub(in crate::conv) fn forward(axis: &ConvAxis) -> Vec<Phase> {
        let offset = |kernel| (kernel * axis.dilation) as isize - axis.pad_before as isize;
        let taps = (0..axis.kernel).map(|kernel| Tap { kernel, offset: offset(kernel) }).collect();
        vec![Phase { first: 0, step: 1, source_step: axis.stride, source: axis.input, taps }]
    }

    /// Backward-data: a phase for each residue modulo the stride that any tap reaches.
    ///
    /// Input `i` receives from output `(i + pad - k * dilation) / stride` through kernel element `k`.
    pub(in crate::conv) fn backward_data(axis: &ConvAxis) -> Vec<Phase> {
        let stride = axis.stride as isize;
        let mut phases: Vec<Phase> = Vec::new();
        for kernel in 0..axis.kernel {
            let shift = axis.pad_before as isize - (kernel * axis.dilation) as isize;
            let first = (-shift).rem_euclid(stride);
            if first as usize >= axis.input {
                continue;
            }
            let tap = Tap { kernel, offset: (first + shift) / stride };
            match phases.iter_mut().find(|phase| phase.first == first as usize) {
                Some(phase) => phase.taps.push(tap),
                None => phases.push(Phase {
                    first: first as usize,
                    step: axis.stride,
                    source_step: 1,
                    source: axis.output(),
                    taps: vec![tap],
                }),
            }
        }
        phases
    }

    pub(super) fn taps(&self) -> usize {
        self.taps.len()
    }

    /// The numbers of the targets that lie in `positions`.
    fn numbers(&self, positions: Range<usize>) -> Range<usize> {
        let number = |position: usize| position.saturating_sub(self.first).div_ceil(self.step);
        number(positions.start)..number(positions.end)
    }

    /// The taps, first and end, whose source lies inside for target `number`.
    #[inline]
    fn inside(&self, number: usize) -> [u16; 2] {
        let position = (number * self.source_step) as isize;
        let is_inside = |tap: &Tap| ((position + tap.offset) as usize) < self.source;
        if [self.taps.first(), self.taps.last()].into_iter().flatten().all(is_inside) {
            return [0, self.taps.len() as u16];
        }
        let first = self.taps.iter().position(is_inside).unwrap_or(0);
        let count = self.taps[first..].iter().take_while(|tap| is_inside(tap)).count();
        [first, first + count].map(|tap| tap as u16)
    }
}

/// A target pixel and what it reads.
pub(super) struct Pixel {
    /// Counted from the run's first.
    target: usize,
    /// The source pixel that a tap without offset would read, counted over all images.
    source: isize,
    /// First and end of the rows' and of the columns' taps that lie inside.
    inside: [[u16; 2]; 2],
}

impl Pixel {
    #[inline]
    fn meets(&self, [r, s]: [usize; 2]) -> bool {
        let [[r0, r1], [s0, s1]] = self.inside.map(|inside| inside.map(usize::from));
        (r0..r1).contains(&r) && (s0..s1).contains(&s)
    }
}

/// A phase of rows and a phase of columns, with the sizes of the tensors: finds the pixels of a run of targets.
pub(super) struct Lattice<'a> {
    pub(super) rows: &'a Phase,
    pub(super) columns: &'a Phase,
    /// Target's rows and columns.
    pub(super) target: [usize; 2],
    /// Columns of the whole kernel.
    pub(super) kernel_columns: usize,
}

/// The register blocks of a run of targets.
#[derive(Default)]
pub(super) struct PixelBlocks {
    blocks: Vec<[Range<usize>; 3]>,
    targets: Vec<usize>,
    taps: Vec<usize>,
    sources: Vec<*const f32>,
}

/// A register block's pixels and what they read.
pub(super) struct PixelBlock<'a> {
    /// The target pixels, counted from the run's first.
    pub(super) targets: &'a [usize],
    /// The kernel elements that the pixels use.
    pub(super) taps: &'a [usize],
    /// For each tap in turn, where each pixel's source lies.
    pub(super) sources: &'a [*const f32],
}

impl PixelBlocks {
    pub(super) fn get(&self, index: usize) -> Option<PixelBlock<'_>> {
        let [targets, taps, sources] = self.blocks.get(index)?.clone();
        Some(PixelBlock {
            targets: &self.targets[targets],
            taps: &self.taps[taps],
            sources: &self.sources[sources],
        })
    }

    pub(super) fn len(&self) -> usize {
        self.blocks.len()
    }

    /// The blocks in `part`.
    pub(super) fn of(&self, part: Range<usize>) -> impl Iterator<Item = PixelBlock<'_>> {
        part.map_while(|index| self.get(index))
    }
}

impl PixelBlock<'_> {
    /// Prefetches these channels of its sources.
    #[inline(always)]
    pub(super) fn prefetch(&self, channel: usize, channels: usize) {
        self.sources.iter().for_each(|source| prefetch_to_l2(source.wrapping_add(channel), channels));
    }
}

impl Lattice<'_> {
    /// The pixels of the lattice among the targets `run`, counted over all images.
    pub(super) fn pixels(&self, run: Range<usize>) -> Vec<Pixel> {
        let [height, width] = self.target;
        let mut pixels = Vec::new();
        for row in run.start / width..run.end.div_ceil(width) {
            let (image, row_in_image) = (row / height, row % height);
            let numbers = self.rows.numbers(row_in_image..row_in_image + 1);
            if numbers.is_empty() {
                continue;
            }
            let rows_inside = self.rows.inside(numbers.start);
            let source_row = image * self.rows.source + numbers.start * self.rows.source_step;
            let start = run.start.saturating_sub(row * width);
            let end = (run.end - row * width).min(width);
            for column in self.columns.numbers(start..end) {
                let source = source_row * self.columns.source + column * self.columns.source_step;
                pixels.push(Pixel {
                    target: row * width + self.columns.first + column * self.columns.step - run.start,
                    source: source as isize,
                    inside: [rows_inside, self.columns.inside(column)],
                });
            }
        }
        pixels
    }

    /// Extends `reach` by the source pixels that these pixels read.
    pub(super) fn reach(&self, pixels: &[Pixel], reach: Option<Range<usize>>) -> Option<Range<usize>> {
        let ends = |[first, end]: [u16; 2]| [first, end.max(1) - 1].map(usize::from);
        pixels.iter().fold(reach, |reach, pixel| {
            // Offsets rise or fall with the taps.
            let [r, s] = pixel.inside.map(ends);
            let corners = r.map(|r| s.map(|s| self.source(pixel, [r, s])));
            corners.into_iter().flatten().flatten().fold(reach, |reach, source| {
                let reach = reach.unwrap_or(source..source);
                Some(reach.start.min(source)..reach.end.max(source + 1))
            })
        })
    }

    /// Adds blocks of at most `most` of these pixels.
    ///
    /// Border pixels that miss the same taps are put into the same blocks, which then leave these taps out.
    pub(super) fn add_blocks(
        &self,
        mut pixels: Vec<Pixel>,
        most: usize,
        places: &Places<'_>,
        blocks: &mut PixelBlocks,
    ) {
        pixels.sort_by_key(|pixel| pixel.inside);
        for part in even_parts(pixels.len(), most) {
            self.add_block(&pixels[part], places, blocks);
        }
    }

    /// The source pixel that the target reads through a tap; `None` if that is padding.
    #[inline]
    fn source(&self, pixel: &Pixel, [r, s]: [usize; 2]) -> Option<usize> {
        pixel.meets([r, s]).then(|| self.met(pixel, [r, s]))
    }

    /// The source pixel that the target reads through a tap that is known not to meet padding.
    #[inline]
    fn met(&self, pixel: &Pixel, [r, s]: [usize; 2]) -> usize {
        let offset = self.rows.taps[r].offset * self.columns.source as isize + self.columns.taps[s].offset;
        (pixel.source + offset) as usize
    }

    fn add_block(&self, pixels: &[Pixel], places: &Places<'_>, blocks: &mut PixelBlocks) {
        let starts = [blocks.targets.len(), blocks.taps.len(), blocks.sources.len()];
        blocks.targets.extend(pixels.iter().map(|pixel| pixel.target));
        let first = pixels[0].inside;
        let same = pixels.iter().all(|pixel| pixel.inside == first);
        let joined = pixels.iter().fold(first, |[rows, columns], pixel| {
            let join = |[first, end]: [u16; 2], with: [u16; 2]| [first.min(with[0]), end.max(with[1])];
            [join(rows, pixel.inside[0]), join(columns, pixel.inside[1])]
        });
        let [rows, columns] = joined.map(|[first, end]| usize::from(first)..usize::from(end));
        for r in rows {
            for s in columns.clone() {
                let (row_tap, column_tap) = (self.rows.taps[r], self.columns.taps[s]);
                blocks.taps.push(row_tap.kernel * self.kernel_columns + column_tap.kernel);
                let sources = pixels.iter().map(|pixel| match same {
                    true => Some(self.met(pixel, [r, s])),
                    false => self.source(pixel, [r, s]),
                });
                blocks.sources.extend(sources.map(|source| places.of(source)));
            }
        }
        let ends = [blocks.targets.len(), blocks.taps.len(), blocks.sources.len()];
        blocks.blocks.push(std::array::from_fn(|part| starts[part]..ends[part]));
    }
}

/// A target pixel of a run and the source pixel that it reads through some tap.
pub(super) struct Pair {
    /// Counted from the run's first.
    pub(super) target: usize,
    /// Where it lies.
    pub(super) source: *const f32,
}

impl Lattice<'_> {
    /// For each tap in turn, the pairs of these targets whose sources are not padding.
    pub(super) fn pairs(&self, pixels: &[Pixel], places: &Places<'_>) -> Vec<Vec<Pair>> {
        let taps = |phase: &Phase| 0..phase.taps();
        taps(self.rows)
            .flat_map(|r| taps(self.columns).map(move |s| [r, s]))
            .map(|tap| {
                let pair = |pixel: &Pixel| {
                    let source = self.source(pixel, tap)?;
                    Some(Pair { target: pixel.target, source: places.of(Some(source)) })
                };
                pixels.iter().filter_map(pair).collect()
            })
            .collect()
    }
}
