//! Statistics and sums of a batch that arrives part by part: bit-identical to those of the whole batch at once.
//!
//! A batch is cut into groups of whole images, or, if it has few images, into pieces of images. The cut depends only on the
//! batch's extent. Each group or piece is summed by itself, whatever else arrives with it, and the results are merged in
//! order.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

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
    /// If there is a list, parts are listed to be merged later.
    listed: Option<Vec<Listed>>,
}

/// A part's numbers, of the channels from `first` on.
#[derive(Debug)]
struct Listed {
    first: usize,
    /// Values per channel in all earlier parts of the batch, and in this one.
    counts: [f64; 2],
    a: Vec<f64>,
    b: Vec<f64>,
}

impl Totals {
    pub(super) fn new(pair: Pair, channels: usize) -> Totals {
        Totals { pair, a: vec![0.0; channels], b: vec![0.0; channels], listed: None }
    }

    /// A list of parts, to be merged by [`Totals::join_all`].
    fn list(pair: Pair) -> Totals {
        Totals { pair, a: Vec::new(), b: Vec::new(), listed: Some(Vec::new()) }
    }

    /// As [`Totals::new`], but returns an error if there is no memory: a batch without values can claim any number of channels.
    /// Zeroed memory takes none before it is written.
    fn fallible(pair: Pair, channels: usize) -> Result<Totals> {
        let zeros = || attempt(|| try_zeroed_vec(channels)).map_err(|()| OutOfMemory::of::<f64>(channels));
        Ok(Totals { pair, a: zeros()?, b: zeros()?, listed: None })
    }

    /// Merges the next part's numbers, which are of the channels from `first` on.
    pub(super) fn join(&mut self, cpu: &Cpu, first: usize, part: &Part, (a, b): (&[f64], &[f64])) {
        let counts = [part.before as f64, part.count() as f64];
        match &mut self.listed {
            Some(listed) => listed.push(Listed { first, counts, a: a.to_vec(), b: b.to_vec() }),
            None => self.merge(cpu, first, counts, [a, b]),
        }
    }

    /// Merges the parts of a list, in its order.
    fn join_all(&mut self, cpu: &Cpu, list: Totals) {
        for Listed { first, counts, a, b } in list.listed.into_iter().flatten() {
            self.merge(cpu, first, counts, [&a, &b]);
        }
    }

    fn merge(&mut self, cpu: &Cpu, first: usize, [before, count]: [f64; 2], [a, b]: [&[f64]; 2]) {
        let (to_a, to_b) = (&mut self.a[first..][..a.len()], &mut self.b[first..][..b.len()]);
        match self.pair {
            Pair::Moments => join_moments(cpu, before, count, [a, b], to_a, to_b),
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
struct InParts {
    operation: &'static str,
    whole: Extent,
    cut: Cut,
    arrived: Mutex<Arrived>,
}

/// What has arrived of a batch.
#[derive(Debug)]
struct Arrived {
    /// The number of images from the first on that are in the totals.
    images: usize,
    totals: Totals,
    /// The number of images, and their parts, of what arrived before its turn, by its first image.
    early: BTreeMap<usize, (usize, Totals)>,
}

impl InParts {
    fn new(operation: &'static str, whole: &Extent, pair: Pair) -> Result<InParts> {
        whole.len()?;
        let totals = Totals::fallible(pair, whole.channels)?;
        let arrived = Mutex::new(Arrived { images: 0, totals, early: BTreeMap::new() });
        Ok(InParts { operation, whole: *whole, cut: Cut::of(whole), arrived })
    }

    fn arrived(&mut self) -> &mut Arrived {
        self.arrived.get_mut().unwrap_or_else(PoisonError::into_inner)
    }

    /// The extent of the images that follow the first `done`, which have `len` elements, and the parts that they are cut into.
    fn cut(&self, done: usize, len: usize) -> Result<(Extent, Vec<Part>)> {
        let Extent { batch, channels, spatial, .. } = self.whole;
        let image = channels * spatial;
        if image == 0 || len == 0 {
            check_len(self.operation, "x", len, 0)?;
            return Ok((Extent { batch: 0, ..self.whole }, Vec::new()));
        }
        let (images, group) = (len / image, self.cut.images);
        let refused = |reason: String| Err(invalid(self.operation, reason));
        if !len.is_multiple_of(image) {
            return refused(format!("x has {len} elements, which are not whole images of {image}"));
        }
        if done > batch || images > batch - done {
            return refused(format!("{images} images after {done} of a batch of {batch}"));
        }
        if !done.is_multiple_of(group) || (done + images < batch && !images.is_multiple_of(group)) {
            let reason = format!(
                "{images} images after {done} of a batch of {batch}: \
                 a part that is not its end must be a multiple of {group} images"
            );
            return refused(reason);
        }
        Ok((Extent { batch: images, ..self.whole }, self.cut.parts(done, images, spatial)))
    }

    /// Merges what `sum` gives for the next images, of `len` elements.
    fn add(&mut self, len: usize, sum: impl FnOnce(&Extent, &[Part], &mut Totals)) -> Result<()> {
        let done = self.arrived().images;
        let (extent, parts) = self.cut(done, len)?;
        if !parts.is_empty() {
            let arrived = self.arrived();
            sum(&extent, &parts, &mut arrived.totals);
            arrived.images += extent.batch;
        }
        Ok(())
    }

    /// Merges what `sum` gives for the images that follow the first `done`, of `len` elements, as soon as it is their turn.
    fn add_after(
        &self,
        cpu: &Cpu,
        (done, len): (usize, usize),
        sum: impl FnOnce(&Extent, &[Part], &mut Totals),
    ) -> Result<()> {
        let (extent, parts) = self.cut(done, len)?;
        if parts.is_empty() {
            return Ok(());
        }
        let pair = self.arrived.lock().unwrap_or_else(PoisonError::into_inner).totals.pair;
        let mut list = Totals::list(pair);
        sum(&extent, &parts, &mut list);
        let mut arrived = self.arrived.lock().unwrap_or_else(PoisonError::into_inner);
        if done < arrived.images || arrived.early.contains_key(&done) {
            return Err(invalid(self.operation, format!("the images after {done} have come before")));
        }
        arrived.early.insert(done, (extent.batch, list));
        let Arrived { images, totals, early } = &mut *arrived;
        while let Some((count, list)) = early.remove(images) {
            totals.join_all(cpu, list);
            *images += count;
        }
        Ok(())
    }

    fn finish(self) -> Result<Totals> {
        let Extent { batch, channels, spatial, .. } = self.whole;
        let Arrived { images, totals, .. } =
            self.arrived.into_inner().unwrap_or_else(PoisonError::into_inner);
        if images < batch && channels * spatial > 0 {
            let reason = format!("only {images} of a batch of {batch} images have come");
            return Err(invalid(self.operation, reason));
        }
        Ok(totals)
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
    parts: InParts,
}

impl StatsInParts {
    /// For a batch of this extent, of which no images have arrived yet.
    ///
    /// # Errors
    /// If the size of the batch overflows, or there is no memory for two numbers per channel.
    pub fn new(whole: &Extent) -> Result<StatsInParts> {
        Ok(StatsInParts { parts: InParts::new("batch norm statistics in parts", whole, Pair::Moments)? })
    }

    /// Adds the values of the next images, laid out as a tensor of their own.
    ///
    /// # Errors
    /// If they are not whole images, too many, or not a multiple of [`images_per_group`] and not the last. Nothing is added
    /// then.
    #[inline(never)]
    pub fn add(&mut self, cpu: &Cpu, x: Slice<'_>) -> Result<()> {
        span!("batch norm statistics", x);
        dispatch_stored!(x.dtype(), S => {
            let typed = x.of::<S>()?;
            self.parts.add(x.len(), |extent, parts, totals| moments_of::<S>(cpu, (extent, parts), typed, totals))
        })
    }

    /// As [`StatsInParts::add`], for the images that follow the first `done` of the batch. Several threads may add images at the
    /// same time, in any order.
    ///
    /// # Errors
    /// As [`StatsInParts::add`], and if they have come before.
    #[inline(never)]
    pub fn add_after(&self, cpu: &Cpu, done: usize, x: Slice<'_>) -> Result<()> {
        span!("batch norm statistics", x);
        dispatch_stored!(x.dtype(), S => {
            let typed = x.of::<S>()?;
            self.parts.add_after(cpu, (done, x.len()), |extent, parts, totals| {
                moments_of::<S>(cpu, (extent, parts), typed, totals);
            })
        })
    }

    /// The statistics of the whole batch.
    ///
    /// # Errors
    /// If images are missing.
    pub fn finish(self) -> Result<Moments> {
        let count = self.parts.whole.batch * self.parts.whole.spatial;
        let totals = self.parts.finish()?;
        Ok(Moments { mean: totals.a, m2: totals.b, count })
    }
}

fn moments_of<S: Stored>(cpu: &Cpu, (extent, parts): (&Extent, &[Part]), x: &[S], totals: &mut Totals) {
    match Walk::of(extent) {
        Walk::Rows(rows) => rows.moments::<S>(cpu, parts, x, totals),
        Walk::Planes(planes) => planes.moments::<S>(cpu, parts, x, totals),
    }
}

/// The sums that backward needs, computed part by part: bit-identical to those of [`super::backward_reduce`] over the whole
/// batch.
#[derive(Debug)]
pub struct BackwardSumsInParts {
    parts: InParts,
}

impl BackwardSumsInParts {
    /// For a batch of this extent, of which no images have arrived yet.
    ///
    /// # Errors
    /// If the size of the batch overflows, or there is no memory for two numbers per channel.
    pub fn new(whole: &Extent) -> Result<BackwardSumsInParts> {
        Ok(BackwardSumsInParts { parts: InParts::new("batch norm backward in parts", whole, Pair::Sums)? })
    }

    /// Adds the values and upstream gradients of the next images; `by` must be the same for the whole batch.
    ///
    /// # Errors
    /// As [`StatsInParts::add`], and if the length of `dy` or of a slice in `by` does not fit.
    #[inline(never)]
    pub fn add(&mut self, cpu: &Cpu, x: Slice<'_>, dy: Slice<'_>, by: &Normalization<'_>) -> Result<()> {
        span!("batch norm gradient sums", x, dy);
        self.check(x, dy, by)?;
        dispatch_stored!(x.dtype(), S => {
            let pair = (x.of::<S>()?, dy.of::<S>()?);
            self.parts.add(x.len(), |extent, parts, totals| {
                gradient_sums_of(cpu, (extent, parts), (pair, by), totals);
            })
        })
    }

    /// As [`BackwardSumsInParts::add`], for the images that follow the first `done` of the batch. Several threads may add images at
    /// the same time, in any order.
    ///
    /// # Errors
    /// As [`BackwardSumsInParts::add`], and if they have come before.
    #[inline(never)]
    pub fn add_after(
        &self,
        cpu: &Cpu,
        done: usize,
        (x, dy): (Slice<'_>, Slice<'_>),
        by: &Normalization<'_>,
    ) -> Result<()> {
        span!("batch norm gradient sums", x, dy);
        self.check(x, dy, by)?;
        dispatch_stored!(x.dtype(), S => {
            let pair = (x.of::<S>()?, dy.of::<S>()?);
            self.parts.add_after(cpu, (done, x.len()), |extent, parts, totals| {
                gradient_sums_of(cpu, (extent, parts), (pair, by), totals);
            })
        })
    }

    fn check(&self, x: Slice<'_>, dy: Slice<'_>, by: &Normalization<'_>) -> Result<()> {
        let InParts { operation, whole, .. } = &self.parts;
        check_len(operation, "dy", dy.len(), x.len())?;
        by.check(operation, x.dtype(), whole.channels)
    }

    /// The sums over the whole batch.
    ///
    /// # Errors
    /// If images are missing.
    pub fn finish(self) -> Result<BackwardSums> {
        let totals = self.parts.finish()?;
        Ok(BackwardSums { g: totals.a, g_centered: totals.b })
    }
}

fn gradient_sums_of<S: Stored>(
    cpu: &Cpu,
    (extent, parts): (&Extent, &[Part]),
    (pair, by): ((&[S], &[S]), &Normalization<'_>),
    totals: &mut Totals,
) {
    let c = Coefficients::forward(by);
    match Walk::of(extent) {
        Walk::Rows(rows) => rows.gradient_sums(cpu, parts, pair, by.mean, c, totals),
        Walk::Planes(planes) => planes.gradient_sums(cpu, parts, pair, by.mean, c, totals),
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
