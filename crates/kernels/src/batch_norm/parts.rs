//! Statistics and sums of a batch that arrives part by part: bit-identical to those of the whole batch at once.
//!
//! A batch is cut into groups of whole images, or, if it has few images, into pieces of images. The cut depends only on the
//! batch's extent. Each group or piece is summed by itself, whatever else arrives with it, and the results are merged in
//! order.

use std::ops::Range;

use bytemuck::allocation::try_zeroed_vec;
use convoke_memory::{OutOfMemory, attempt};

use super::{BackwardSums, Coefficients, Moments, Normalization, Walk, merge_moments};
use crate::error::{check_len, invalid};
use crate::isa::multiversion;
use crate::memory_format::Extent;
use crate::profile::span;
use crate::{Cpu, MemoryFormat, Result, Slice, Stored, dispatch_stored};

/// A large batch is cut into about this many groups or pieces, or into more if groups would exceed [`MANY`] values per channel.
const PARTS: usize = 64;
/// With this many values per channel, the cost of merging a group is negligible. Larger groups would leave a tile of a huge
/// batch with too few groups for threads to share.
const MANY: usize = 2048;
/// The minimum of elements in a part, if the batch has as many.
const SMALLEST: usize = 1 << 13;
/// The minimum of values per channel in a group, as long as [`FEW`] groups remain: merging a group costs as much as summing
/// some values.
const VALUES: usize = 192;
/// See [`VALUES`].
const FEW: usize = 8;
/// The minimum of elements in a piece of a plane.
const RUN: usize = 1024;
/// The minimum of pixels in a piece of a channels-last image.
const PIXELS: usize = 32;

/// The parts of a batch that [`StatsInParts`] or [`BackwardSumsInParts`] take must be a multiple of this many images; only
/// the last part may be any other number. It is at least 1, and at most the batch unless that is empty.
pub fn images_per_group(extent: &Extent) -> usize {
    Cut::of(extent).images
}

/// How a batch is cut.
#[derive(Debug, Clone, Copy)]
struct Cut {
    /// Images in a group.
    images: usize,
    /// Pieces in a group; more than one only if the group is a single image.
    pieces: usize,
}

/// Consecutive places in consecutive images: all places of one or more images, or some of one image. In channels-last
/// memory, their elements are contiguous.
#[derive(Debug)]
pub(super) struct Part {
    pub(super) images: Range<usize>,
    pub(super) places: Range<usize>,
    /// Values per channel in all earlier parts of the batch.
    before: usize,
}

impl Cut {
    fn of(extent: &Extent) -> Cut {
        let Extent { batch, channels, spatial, format } = *extent;
        let image = channels.saturating_mul(spatial).max(1);
        let images = batch
            .div_ceil(PARTS)
            .min(MANY.div_ceil(spatial.max(1)))
            .max(SMALLEST.div_ceil(image))
            .max(VALUES.div_ceil(spatial.max(1)).min(batch.div_ceil(FEW)))
            .clamp(1, batch.max(1));
        let pieces = match format {
            _ if images > 1 => 1,
            // In this format, threads can share the channels too.
            MemoryFormat::Contiguous => PARTS.div_ceil(batch.max(1)).min(spatial / RUN),
            MemoryFormat::ChannelsLast => {
                PARTS.div_ceil(batch.max(1)).min(spatial / PIXELS).min(image / SMALLEST)
            }
        };
        Cut { images, pieces: pieces.max(1) }
    }

    /// The parts of `images` images, in order. They follow the first `first` images of the batch, which are whole groups.
    fn parts(&self, first: usize, images: usize, spatial: usize) -> Vec<Part> {
        let place = |piece: usize| (spatial as u128 * piece as u128 / self.pieces as u128) as usize;
        let groups = (0..images).step_by(self.images);
        let pieces = groups.flat_map(|image| (0..self.pieces).map(move |piece| (image, piece)));
        let part = |(image, piece): (usize, usize)| Part {
            images: image..(image + self.images).min(images),
            places: place(piece)..place(piece + 1),
            before: (first + image) * spatial + place(piece),
        };
        pieces.map(part).collect()
    }
}

impl Part {
    /// Values per channel.
    pub(super) fn count(&self) -> usize {
        self.images.len() * self.places.len()
    }

    /// The range of its elements in channels-last memory.
    pub(super) fn elements(&self, channels: usize, spatial: usize) -> Range<usize> {
        let start = (self.images.start * spatial + self.places.start) * channels;
        start..start + self.count() * channels
    }
}

/// The meaning of two numbers per channel.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Pair {
    /// Mean and sum of squared deviations.
    Moments,
    /// Two sums.
    Sums,
}

/// Two numbers per channel, over all parts so far.
#[derive(Debug)]
pub(super) struct Totals {
    pair: Pair,
    pub(super) a: Vec<f64>,
    pub(super) b: Vec<f64>,
}

impl Totals {
    pub(super) fn new(pair: Pair, channels: usize) -> Totals {
        Totals { pair, a: vec![0.0; channels], b: vec![0.0; channels] }
    }

    /// As [`Totals::new`], but returns an error if there is no memory: a batch without values can claim any number of channels.
    /// Zeroed memory takes none before it is written.
    fn fallible(pair: Pair, channels: usize) -> Result<Totals> {
        let zeros = || attempt(|| try_zeroed_vec(channels)).map_err(|()| OutOfMemory::of::<f64>(channels));
        Ok(Totals { pair, a: zeros()?, b: zeros()? })
    }

    /// Merges the next part's numbers, which are of the channels from `first` on.
    pub(super) fn join(&mut self, cpu: &Cpu, first: usize, part: &Part, (a, b): (&[f64], &[f64])) {
        let (to_a, to_b) = (&mut self.a[first..][..a.len()], &mut self.b[first..][..b.len()]);
        match self.pair {
            Pair::Moments => join_moments(cpu, part.before as f64, part.count() as f64, [a, b], to_a, to_b),
            Pair::Sums => join_sums(cpu, [a, b], to_a, to_b),
        }
    }
}

multiversion! {
    fn join_moments<>(before: f64, count: f64, part: [&[f64]; 2], mean: &mut [f64], m2: &mut [f64]) {
        for ((mean, m2), (&part_mean, &part_m2)) in mean.iter_mut().zip(m2).zip(part[0].iter().zip(part[1])) {
            (_, *mean, *m2) = merge_moments((before, *mean, *m2), (count, part_mean, part_m2));
        }
    }

    fn join_sums<>(part: [&[f64]; 2], to_a: &mut [f64], to_b: &mut [f64]) {
        for ((to_a, to_b), (&a, &b)) in to_a.iter_mut().zip(to_b).zip(part[0].iter().zip(part[1])) {
            *to_a += a;
            *to_b += b;
        }
    }
}

/// A batch of which some images have arrived.
#[derive(Debug)]
struct Progress {
    operation: &'static str,
    whole: Extent,
    cut: Cut,
    /// Images that have arrived.
    images: usize,
}

impl Progress {
    fn new(operation: &'static str, whole: &Extent) -> Result<Progress> {
        whole.len()?;
        Ok(Progress { operation, whole: *whole, cut: Cut::of(whole), images: 0 })
    }

    /// The extent of the next images, which have `len` elements, and the parts that they are cut into.
    fn next(&self, len: usize) -> Result<(Extent, Vec<Part>)> {
        let Extent { batch, channels, spatial, .. } = self.whole;
        let image = channels * spatial;
        if image == 0 || len == 0 {
            check_len(self.operation, "x", len, 0)?;
            return Ok((Extent { batch: 0, ..self.whole }, Vec::new()));
        }
        let (images, done, group) = (len / image, self.images, self.cut.images);
        let refused = |reason: String| Err(invalid(self.operation, reason));
        if !len.is_multiple_of(image) {
            return refused(format!("x has {len} elements, which are not whole images of {image}"));
        }
        if images > batch - done {
            return refused(format!("{images} images after {done} of a batch of {batch}"));
        }
        if done + images < batch && !images.is_multiple_of(group) {
            let reason = format!(
                "{images} images after {done} of a batch of {batch}: \
                 a part that is not its end must be a multiple of {group} images"
            );
            return refused(reason);
        }
        Ok((Extent { batch: images, ..self.whole }, self.cut.parts(done, images, spatial)))
    }

    fn finish(&self) -> Result<()> {
        let Extent { batch, channels, spatial, .. } = self.whole;
        if self.images < batch && channels * spatial > 0 {
            let reason = format!("only {} of a batch of {batch} images have come", self.images);
            return Err(invalid(self.operation, reason));
        }
        Ok(())
    }
}

/// Statistics of a batch, computed part by part: bit-identical to those of [`super::stats`] over the whole batch.
///
/// ```
/// use convoke_kernels::batch_norm::{StatsInParts, images_per_group, stats};
/// use convoke_kernels::memory_format::{Extent, MemoryFormat};
/// use convoke_kernels::Cpu;
///
/// let (cpu, extent) = (Cpu::single(), Extent { batch: 9, channels: 2, spatial: 4096, format: MemoryFormat::Contiguous });
/// let x: Vec<f32> = (0..extent.len()?).map(|i| (i % 7) as f32).collect();
/// let mut statistics = StatsInParts::new(&extent)?;
/// for images in x.chunks(2 * images_per_group(&extent) * 2 * 4096) {
///     statistics.add(&cpu, images.into())?;
/// }
/// assert_eq!(statistics.finish()?, stats(&cpu, &extent, (&x).into())?);
/// # Ok::<(), convoke_kernels::Error>(())
/// ```
#[derive(Debug)]
pub struct StatsInParts {
    progress: Progress,
    totals: Totals,
}

impl StatsInParts {
    /// For a batch of this extent, of which no images have arrived yet.
    ///
    /// # Errors
    /// If the size of the batch overflows, or there is no memory for two numbers per channel.
    pub fn new(whole: &Extent) -> Result<StatsInParts> {
        let progress = Progress::new("batch norm statistics in parts", whole)?;
        let totals = Totals::fallible(Pair::Moments, whole.channels)?;
        Ok(StatsInParts { progress, totals })
    }

    /// Adds the values of the next images, laid out as a tensor of their own.
    ///
    /// # Errors
    /// If they are not whole images, too many, or not a multiple of [`images_per_group`] and not the last. Nothing is added
    /// then.
    #[inline(never)]
    pub fn add(&mut self, cpu: &Cpu, x: Slice<'_>) -> Result<()> {
        span!("batch norm statistics", x);
        let (extent, parts) = self.progress.next(x.len())?;
        if parts.is_empty() {
            return Ok(());
        }
        dispatch_stored!(x.dtype(), S => match Walk::of(&extent) {
            Walk::Rows(rows) => rows.moments::<S>(cpu, &parts, x.of()?, &mut self.totals),
            Walk::Planes(planes) => planes.moments::<S>(cpu, &parts, x.of()?, &mut self.totals),
        });
        self.progress.images += extent.batch;
        Ok(())
    }

    /// The statistics of the whole batch.
    ///
    /// # Errors
    /// If images are missing.
    pub fn finish(self) -> Result<Moments> {
        self.progress.finish()?;
        let count = self.progress.whole.batch * self.progress.whole.spatial;
        Ok(Moments { mean: self.totals.a, m2: self.totals.b, count })
    }
}

/// The sums that backward needs, computed part by part: bit-identical to those of [`super::backward_reduce`] over the whole
/// batch.
#[derive(Debug)]
pub struct BackwardSumsInParts {
    progress: Progress,
    totals: Totals,
}

impl BackwardSumsInParts {
    /// For a batch of this extent, of which no images have arrived yet.
    ///
    /// # Errors
    /// If the size of the batch overflows, or there is no memory for two numbers per channel.
    pub fn new(whole: &Extent) -> Result<BackwardSumsInParts> {
        let progress = Progress::new("batch norm backward in parts", whole)?;
        let totals = Totals::fallible(Pair::Sums, whole.channels)?;
        Ok(BackwardSumsInParts { progress, totals })
    }

    /// Adds the values and upstream gradients of the next images; `by` must be the same for the whole batch.
    ///
    /// # Errors
    /// As [`StatsInParts::add`], and if the length of `dy` or of a slice in `by` does not fit.
    #[inline(never)]
    pub fn add(&mut self, cpu: &Cpu, x: Slice<'_>, dy: Slice<'_>, by: &Normalization<'_>) -> Result<()> {
        span!("batch norm gradient sums", x, dy);
        let operation = self.progress.operation;
        let (extent, parts) = self.progress.next(x.len())?;
        check_len(operation, "dy", dy.len(), x.len())?;
        by.check(operation, x.dtype(), extent.channels)?;
        if parts.is_empty() {
            return Ok(());
        }
        dispatch_stored!(x.dtype(), S => {
            let (c, pair) = (Coefficients::forward(by), (x.of::<S>()?, dy.of()?));
            match Walk::of(&extent) {
                Walk::Rows(rows) => rows.gradient_sums(cpu, &parts, pair, by.mean, c, &mut self.totals),
                Walk::Planes(planes) => planes.gradient_sums(cpu, &parts, pair, by.mean, c, &mut self.totals),
            }
        });
        self.progress.images += extent.batch;
        Ok(())
    }

    /// The sums over the whole batch.
    ///
    /// # Errors
    /// If images are missing.
    pub fn finish(self) -> Result<BackwardSums> {
        self.progress.finish()?;
        Ok(BackwardSums { g: self.totals.a, g_centered: self.totals.b })
    }
}

/// The parts of a whole batch, whose size does not overflow.
pub(super) fn all_parts(extent: &Extent) -> Vec<Part> {
    match extent.channels * extent.spatial {
        0 => Vec::new(),
        _ => Cut::of(extent).parts(0, extent.batch, extent.spatial),
    }
}

/// How many values a [`pilot`] is the mean of.
const PILOTS: usize = 4;

/// The indices of the values for the pilot of a part of `len` values: the first ones, repeated if there are too few. `len`
/// is at least 1.
#[inline(always)]
pub(super) fn pilot_places(len: usize) -> [usize; PILOTS] {
    [0, 1, 2, 3].map(|index| index * len.min(PILOTS) / PILOTS)
}

/// A value near the other values of its channel, so that sums of differences from it keep their digits. Exact if all values
/// are the same.
#[inline(always)]
pub(super) fn pilot<S: Stored>([a, b, c, d]: [S; PILOTS]) -> f64 {
    ((a.f64() + b.f64()) + (c.f64() + d.f64())) * (1.0 / PILOTS as f64)
}

/// Mean and squared deviations of `count` values, from the sums of x - pilot and of (x - pilot)^2.
#[inline(always)]
pub(super) fn moments(pilot: f64, sum: f64, square: f64, count: f64) -> (f64, f64) {
    let mean = sum / count;
    let m2 = square - sum * mean;
    // Rounding may make it negative; NaN stays NaN.
    (pilot + mean, if m2 < 0.0 { 0.0 } else { m2 })
}
