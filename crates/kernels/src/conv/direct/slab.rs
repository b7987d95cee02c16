//! Where a task reads the source's pixels: in place or, with groups, from a copy.
//!
//! A group's channels are a short piece of each pixel, and the pieces lie a whole pixel apart: often a power of two, so that
//! they fall into a few sets of the L1 cache, and each on its own page. If a few groups at a time are copied, the pieces of a
//! group are dense, and the copy reads whole runs of a pixel's cache lines at once.

use std::ops::Range;

use pulp::Simd;

use crate::Cpu;
use crate::conv::even::even_parts;
use crate::conv::problem::ConvProblem;
use crate::conv::workspace::LINE;
use crate::stream::prefetch_to_l2;

/// Floats of a slab: a quarter of a common L2 cache.
const SLAB: usize = 64 * 1024;
/// The approximate number of source pixels that a task copies, and of floats of one group; whichever gives more pixels
/// counts.
const PIXELS: usize = 448;
const GROUP: usize = 8 * 1024;
/// Floats of half a common L2 cache.
const HALF: usize = 128 * 1024;
/// Groups of at least this many channels are worth copying in any case.
const LEAST_DEPTH: usize = 8;
/// How many pixels ahead the copy prefetches.
const AHEAD: usize = 12;

/// How tasks read the source of a problem.
#[derive(Clone, Copy)]
pub(super) struct Reading {
    /// Channels of a pixel, and of one group of it.
    channels: usize,
    depth: usize,
    /// Pixels of all images.
    pixels: usize,
    copies: bool,
    /// The most target pixels of a task.
    most: usize,
}

impl Reading {
    /// `source` and `target` each give the number of pixels and of a pixel's channels.
    pub(super) fn new(problem: &ConvProblem, source: [usize; 2], target: [usize; 2]) -> Reading {
        let ([pixels, channels], depth) = (source, source[1] / problem.groups);
        // A stride larger than the kernel skips pixels, which would be copied in vain.
        let dense = [&problem.height, &problem.width].iter().all(|axis| axis.kernel >= axis.stride);
        // Short pieces are read in place just as fast, unless each serves several targets: backward-data with a stride.
        let pays = depth >= LEAST_DEPTH || target[0] > pixels;
        let copies = problem.groups > 1 && dense && pays;
        // Groups share cache lines of the target, which should stay in L2 until the next group writes them; but weights that
        // do not fit there should serve many pixels.
        let most = if problem.weight_len() <= HALF { HALF / target[1] } else { usize::MAX };
        Reading { channels, depth, pixels, copies, most }
    }

    /// How many pixels of batch x rows x columns a task should write, if it copies.
    ///
    /// Whole images or rows if possible, since neighbouring targets use the same copied pixels.
    pub(super) fn targets(&self, target: [usize; 3], cpu: &Cpu) -> Option<usize> {
        let [batch, rows, columns] = target;
        let image = rows * columns;
        let fitting = PIXELS.max(GROUP / self.depth).min(SLAB / 2 / self.depth);
        let wanted = (fitting * batch * image / self.pixels).min(self.most);
        let even = |len: usize, most: usize| len.div_ceil(len.div_ceil(most));
        let pixels = if wanted >= image {
            let parts = batch.div_ceil(wanted / image).next_multiple_of(cpu.threads());
            batch.div_ceil(parts) * image
        } else if wanted >= columns {
            even(rows, wanted / columns) * columns
        } else {
            wanted.max(16)
        };
        self.copies.then_some(pixels)
    }

    /// Floats of a task's slab; not 0 even if nothing is copied.
    pub(super) fn slab_len(&self) -> usize {
        let all = (self.pixels + 1).saturating_mul(self.channels);
        if self.copies { SLAB.min(all).next_multiple_of(LINE) } else { LINE }
    }

    /// Where a task that reads these pixels finds them: in the slab if they are copied and fit there.
    ///
    /// `zeros` has as many floats as a pixel has channels, or none if no padding will be read.
    pub(super) fn places<'a>(
        self,
        pixels: impl FnOnce() -> Option<Range<usize>>,
        source: &'a [f32],
        zeros: &'a [f32],
        slab: &'a mut [f32],
    ) -> Places<'a> {
        let pixels = if self.copies { pixels().unwrap_or(0..0) } else { 0..self.pixels };
        let step = (pixels.len() + 1) * self.depth;
        let fitting = slab.len() / step;
        if self.copies && fitting > 0 {
            let start = slab.as_mut_ptr();
            let pixel = start.wrapping_add(self.depth);
            let steps = [self.depth, step];
            Places { reading: self, source, pixels, pixel, zeros: start, steps, slab: Some((start, fitting)) }
        } else {
            assert!(zeros.is_empty() || zeros.len() >= self.channels);
            assert!(source.len() >= self.pixels * self.channels);
            let (pixel, zeros) = (source.as_ptr(), zeros.as_ptr());
            let steps = [self.channels, self.depth];
            Places { reading: self, source, pixels: 0..self.pixels, pixel, zeros, steps, slab: None }
        }
    }
}

/// Where a task's source pixels are. A group's channels are readable at each pixel, and as many zeros at `zeros`.
pub(super) struct Places<'a> {
    reading: Reading,
    source: &'a [f32],
    pixels: Range<usize>,
    /// The first pixel.
    pixel: *const f32,
    zeros: *const f32,
    /// Floats from a pixel to the next, and from a group to the next.
    steps: [usize; 2],
    /// The copy as [group][zeros, then each pixel][channel], and how many groups it holds.
    slab: Option<(*mut f32, usize)>,
}

impl Places<'_> {
    /// Where a source pixel of the first group lies; for `None`, the zeros that are read as padding.
    #[inline(always)]
    pub(super) fn of(&self, pixel: Option<usize>) -> *const f32 {
        match pixel {
            Some(pixel) => {
                assert!(self.pixels.contains(&pixel));
                self.pixel.wrapping_add((pixel - self.pixels.start) * self.steps[0])
            }
            None => self.zeros,
        }
    }

    /// Floats to add to a pixel of the first group to reach the same pixel of this group.
    pub(super) fn group(&self, group: usize) -> usize {
        group * self.steps[1]
    }

    /// Whether this many groups can be processed together.
    pub(super) fn hold(&self, groups: usize) -> bool {
        self.slab.is_none_or(|(_, most)| groups <= most)
    }

    /// The groups that are processed together, a multiple of `unit` each time. Each range must first be loaded.
    ///
    /// If possible, groups whose channels share cache lines stay together, so that each line is read once.
    pub(super) fn groups(&self, groups: Range<usize>, unit: usize) -> impl Iterator<Item = Range<usize>> {
        let most = self.slab.map_or(groups.len(), |(_, most)| most);
        let sharing = (LINE / self.reading.depth).max(1);
        let possible = LINE.is_multiple_of(self.reading.depth)
            && sharing.is_multiple_of(unit)
            && groups.len().is_multiple_of(sharing);
        let unit = if possible && sharing <= most { sharing } else { unit };
        even_parts(groups.len() / unit, (most / unit).max(1))
            .map(move |part| groups.start + part.start * unit..groups.start + part.end * unit)
    }

    /// Copies `groups` into the slab if there is one. Returns the number of the group that is now the first of these places.
    #[inline(always)]
    pub(super) fn load<S: Simd>(&self, simd: S, groups: Range<usize>) -> usize {
        let Some((slab, most)) = self.slab else { return 0 };
        assert!(groups.len() <= most);
        let Reading { channels, depth, .. } = self.reading;
        let pixels =
            self.source[self.pixels.start * channels..self.pixels.end * channels].chunks_exact(channels);
        for group in 0..groups.len() {
            // SAFETY: `places` found room for `most` groups, each of `steps[1]` floats, and `group` is below that. A group has
            // `depth` floats for each of its pixels and one pixel more, the zeros, with which it starts.
            unsafe { slab.add(self.group(group)).write_bytes(0, depth) };
        }
        for (slot, pixel) in pixels.enumerate() {
            let pixel = &pixel[groups.start * depth..groups.end * depth];
            prefetch(pixel, channels);
            let mut to = slab.wrapping_add((slot + 1) * depth);
            if depth == S::F32_LANES {
                // One vector each.
                for piece in S::as_simd_f32s(pixel).0 {
                    // SAFETY: a vector is the `depth` floats of one pixel. The slab has these, at `slot + 1` pixels from the
                    // start of each group, for each of `pixels` and each of at most `most` groups; there are as many pieces
                    // as groups.
                    unsafe { to.cast::<S::f32s>().write_unaligned(*piece) };
                    to = to.wrapping_add(self.steps[1]);
                }
                continue;
            }
            for piece in pixel.chunks_exact(depth) {
                // SAFETY: a piece is `depth` floats. The slab has room for these, at `slot + 1` pixels from the start of each
                // group, for each of `pixels` and each of at most `most` groups; there are as many pieces as groups.
                unsafe { copy(simd, piece.as_ptr(), to, depth) };
                to = to.wrapping_add(self.steps[1]);
            }
        }
        groups.start
    }
}

/// Prefetches the same piece of a pixel further on, where each pixel has `channels` channels.
#[inline(always)]
pub(super) fn prefetch(piece: &[f32], channels: usize) {
    prefetch_to_l2(piece.as_ptr().wrapping_add(AHEAD * channels), piece.len());
}

/// Copies a short piece inline: calling the system's copy function costs more.
///
/// # Safety
/// `from` must be readable, and `to` writable, for `len` floats.
#[inline(always)]
unsafe fn copy<S: Simd>(_simd: S, from: *const f32, to: *mut f32, len: usize) {
    let mut done = 0;
    // SAFETY: `done`, with what is then copied, is at most `len`: as many floats as the caller promises at both places.
    unsafe {
        while done + S::F32_LANES <= len {
            let vector = from.add(done).cast::<S::f32s>().read_unaligned();
            to.add(done).cast::<S::f32s>().write_unaligned(vector);
            done += S::F32_LANES;
        }
        while done < len {
            to.add(done).write(from.add(done).read());
            done += 1;
        }
    }
}
