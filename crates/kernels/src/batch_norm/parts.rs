//! Statistics and sums of a batch that comes part by part: to the last bit those of the whole batch at once.
//!
//! A batch is cut into groups of whole images, or into pieces of images where there are few; what they are depends on the
//! batch's extent only. The numbers of each are taken for itself, whatever comes with it, and put together in order.

use std::ops::Range;

use bytemuck::allocation::try_zeroed_vec;
use convoke_memory::attempt;

use super::{BackwardSums, Coefficients, Moments, Normalization, Walk, merge_moments};
use crate::cpu::multiversion;
use crate::error::{check_len, invalid};
use crate::memory_format::Extent;
use crate::profile::span;
use crate::{Cpu, Element, MemoryFormat, Result};

/// Groups, or pieces, that a large batch is cut into, about: at least, where groups of [`MANY`] values a channel remain.
const PARTS: usize = 64;
/// Values a channel of a group, beside which putting it together with others costs nothing: more of a huge batch would keep the
/// groups of a tile too few for threads to share.
const MANY: usize = 2048;
/// Elements of a part, at least, where the batch has them.
const SMALLEST: usize = 1 << 13;
/// Values a channel of a group, at least, while [`FEW`] groups remain: each costs as much as some values.
const VALUES: usize = 192;
/// See [`VALUES`].
const FEW: usize = 8;
/// Elements of a piece of a plane, at least.
const RUN: usize = 1024;
/// Pixels of a piece of a channels-last image, at least.
const PIXELS: usize = 32;

/// How many images the parts of a batch must be multiples of, to be given to [`StatsInParts`] or [`BackwardSumsInParts`].
/// Only the last may have fewer. At least 1; no more than the batch has.
pub fn images_per_group(extent: &Extent) -> usize {
    Cut::of(extent).images
}

/// How a batch is cut.
#[derive(Debug, Clone, Copy)]
struct Cut {
    /// Images of a group.
    images: usize,
    /// Pieces of a group, more than one only where it is one image.
    pieces: usize,
}

/// Places of images next to each other: all places, or some of one image. Their elements lie together in channels-last
/// memory.
#[derive(Debug)]
pub(super) struct Part {
    pub(super) images: Range<usize>,
    pub(super) places: Range<usize>,
    /// Values a channel in the parts of the batch before.
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
            // Threads have channels to share too.
            MemoryFormat::Contiguous => PARTS.div_ceil(batch.max(1)).min(spatial / RUN),
            MemoryFormat::ChannelsLast => {
                PARTS.div_ceil(batch.max(1)).min(spatial / PIXELS).min(image / SMALLEST)
            }
        };
        Cut { images, pieces: pieces.max(1) }
    }

    /// The parts of so many images, in order. They come behind `first` images, which are whole groups.
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
    /// Values a channel.
    pub(super) fn count(&self) -> usize {
        self.images.len() * self.places.len()
    }

    /// The elements in channels-last memory.
    pub(super) fn elements(&self, channels: usize, spatial: usize) -> Range<usize> {
        let start = (self.images.start * spatial + self.places.start) * channels;
        start..start + self.count() * channels
    }
}

/// What two numbers by channel are.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Pair {
    /// Mean and sum of squared deviations.
    Moments,
    /// Two sums.
    Sums,
}

/// Two numbers by channel, of all parts so far.
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

    /// The same, where nothing has told that there is memory for these channels: a batch without values takes any number.
    fn fallible(operation: &'static str, pair: Pair, channels: usize) -> Result<Totals> {
        let zeros = || {
            attempt(|| try_zeroed_vec(channels))
                .map_err(|()| invalid(operation, format!("no memory for the numbers of {channels} channels")))
        };
        Ok(Totals { pair, a: zeros()?, b: zeros()? })
    }

    /// Joins the next part's numbers, of the channels from `first` on.
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

/// A batch of which some images have come.
#[derive(Debug)]
struct Progress {
    operation: &'static str,
    whole: Extent,
    cut: Cut,
    /// Images that have come.
    images: usize,
}

impl Progress {
    fn new(operation: &'static str, whole: &Extent) -> Result<Progress> {
        whole.len()?;
        Ok(Progress { operation, whole: *whole, cut: Cut::of(whole), images: 0 })
    }

    /// The extent of the next images, of so many elements, and the parts they are cut into.
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

/// Statistics of a batch, taken part by part: to the last bit those of [`super::stats`] over the whole.
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
///     statistics.add(&cpu, images)?;
/// }
/// assert_eq!(statistics.finish()?, stats(&cpu, &extent, &x)?);
/// # Ok::<(), convoke_kernels::Error>(())
/// ```
#[derive(Debug)]
pub struct StatsInParts {
    progress: Progress,
    totals: Totals,
}

impl StatsInParts {
    /// For a batch of this extent, of which nothing has come yet.
    ///
    /// # Errors
    /// If the size of the batch overflows, or there is no memory for two numbers a channel.
    pub fn new(whole: &Extent) -> Result<StatsInParts> {
        let progress = Progress::new("batch norm statistics in parts", whole)?;
        let totals = Totals::fallible(progress.operation, Pair::Moments, whole.channels)?;
        Ok(StatsInParts { progress, totals })
    }

    /// The values of the next images, which lie as in a tensor of their own.
    ///
    /// # Errors
    /// If they are not whole images, too many, or no multiple of [`images_per_group`] and not the last. Nothing has been
    /// added then.
    pub fn add<T: Element>(&mut self, cpu: &Cpu, x: &[T]) -> Result<()> {
        span!("batch norm statistics", x);
        let (extent, parts) = self.progress.next(x.len())?;
        if parts.is_empty() {
            return Ok(());
        }
        match Walk::of(&extent) {
            Walk::Rows(rows) => rows.moments(cpu, &parts, x, &mut self.totals),
            Walk::Planes(planes) => planes.moments(cpu, &parts, x, &mut self.totals),
        }
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

/// The sums that backward needs, taken part by part: to the last bit those of [`super::backward_reduce`] over the whole.
#[derive(Debug)]
pub struct BackwardSumsInParts {
    progress: Progress,
    totals: Totals,
}

impl BackwardSumsInParts {
    /// For a batch of this extent, of which nothing has come yet.
    ///
    /// # Errors
    /// If the size of the batch overflows, or there is no memory for two numbers a channel.
    pub fn new(whole: &Extent) -> Result<BackwardSumsInParts> {
        let progress = Progress::new("batch norm backward in parts", whole)?;
        let totals = Totals::fallible(progress.operation, Pair::Sums, whole.channels)?;
        Ok(BackwardSumsInParts { progress, totals })
    }

    /// The values and upstream gradients of the next images; `by` is the same for all of a batch.
    ///
    /// # Errors
    /// As [`StatsInParts::add`], and if `dy` or what `by` holds do not fit.
    pub fn add<T: Element>(&mut self, cpu: &Cpu, x: &[T], dy: &[T], by: &Normalization<'_, T>) -> Result<()> {
        span!("batch norm gradient sums", x, dy);
        let operation = self.progress.operation;
        let (extent, parts) = self.progress.next(x.len())?;
        check_len(operation, "dy", dy.len(), x.len())?;
        by.check(operation, extent.channels)?;
        if parts.is_empty() {
            return Ok(());
        }
        let c = Coefficients::forward(by);
        match Walk::of(&extent) {
            Walk::Rows(rows) => rows.gradient_sums(cpu, &parts, (x, dy), by.mean, c, &mut self.totals),
            Walk::Planes(planes) => planes.gradient_sums(cpu, &parts, (x, dy), by.mean, c, &mut self.totals),
        }
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

/// Values whose mean is a [`pilot`].
const PILOTS: usize = 4;

/// Where a part of `len` values, at least one, has the values of its pilot: the first ones.
#[inline(always)]
pub(super) fn pilot_places(len: usize) -> [usize; PILOTS] {
    [0, 1, 2, 3].map(|index| index * len.min(PILOTS) / PILOTS)
}

/// A value near a channel's others: sums of differences from it keep their digits. Exact where all are the same.
#[inline(always)]
pub(super) fn pilot<T: Element>([a, b, c, d]: [T; PILOTS]) -> f64 {
    ((a.f64() + b.f64()) + (c.f64() + d.f64())) * (1.0 / PILOTS as f64)
}

/// Mean and squared deviations of `count` values, from the sums of x - pilot and of its square.
#[inline(always)]
pub(super) fn moments(pilot: f64, sum: f64, square: f64, count: f64) -> (f64, f64) {
    let mean = sum / count;
    let m2 = square - sum * mean;
    // Rounding may leave less than nothing; NaN stays.
    (pilot + mean, if m2 < 0.0 { 0.0 } else { m2 })
}
