//! Batch norm over planes of one channel each: contiguous memory.

use std::ops::Range;

use super::coefficients::Coefficients;
use super::{Moments, PairSums};
use crate::channels::LANES;
use crate::cpu::multiversion;
use crate::memory_format::Extent;
use crate::shared::Shared;
use crate::{Cpu, Element, stream};

/// Parts that all channels together are cut into, at least, where there is enough in them: depends on nothing else, so
/// that sums do not change with the number of threads.
const PARTS: usize = 64;
/// Elements of an image's part of a tile, at least: neighbouring channels with small planes share a tile, so that
/// threads seldom write the same cache line.
const RUN: usize = 1024;
/// Elements that are computed in cache before they are streamed.
const STAGED: usize = 4096;
/// Bytes of a group of channels, on all threads together, that shared caches are trusted to keep from one pass over them
/// to the next.
const CACHED: usize = 8 << 20;

/// A tensor of planes.
pub(super) struct Planes {
    batch: usize,
    channels: usize,
    spatial: usize,
    /// Channels of a tile.
    group: usize,
    /// How many parts the images, and the planes, are cut into.
    parts: [usize; 2],
}

/// Some places of some channels in some images.
struct Tile {
    channels: Range<usize>,
    images: Range<usize>,
    places: Range<usize>,
}

impl Planes {
    pub(super) fn new(extent: &Extent) -> Planes {
        let Extent { batch, channels, spatial, .. } = *extent;
        let group = RUN.div_ceil(spatial.max(1)).min(channels).max(1);
        let wanted = PARTS.div_ceil(channels.div_ceil(group).max(1));
        let parts = match batch >= wanted {
            true => [wanted, 1],
            false => [batch.max(1), (spatial / RUN).clamp(1, wanted.div_ceil(batch.max(1)))],
        };
        Planes { batch, channels, spatial, group, parts }
    }

    fn len(&self) -> usize {
        self.batch * self.channels * self.spatial
    }

    fn groups(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        let (channels, group) = (self.channels, self.group);
        (0..channels).step_by(group).map(move |first| first..(first + group).min(channels))
    }

    /// The tiles of these channels.
    fn tiles(&self, channels: Range<usize>) -> impl Iterator<Item = Tile> + use<'_> {
        let [images, planes] = self.parts;
        let cut = |len: usize, parts: usize, part: usize| len * part / parts..len * (part + 1) / parts;
        (0..images * planes).map(move |part| Tile {
            channels: channels.clone(),
            images: cut(self.batch, images, part / planes),
            places: cut(self.spatial, planes, part % planes),
        })
    }

    /// Every tile, group by group.
    fn all_tiles(&self) -> impl Iterator<Item = Tile> + use<'_> {
        self.groups().flat_map(|channels| self.tiles(channels))
    }

    /// Whether the bytes of a group on each thread stay in a cache between two passes over `tensors` tensors.
    pub(super) fn stays_cached<T>(&self, cpu: &Cpu, tensors: usize) -> bool {
        let group = self.batch * self.spatial * self.group * size_of::<T>();
        // What goes group by group needs results, and a dry CPU gives none.
        if cpu.is_dry() {
            return false;
        }
        // Fewer groups than threads would leave threads idle.
        group * tensors * cpu.threads() <= CACHED && self.channels.div_ceil(self.group) >= 2 * cpu.threads()
    }

    /// Sums of x - pilot and of its square.
    pub(super) fn sums<T: Element>(&self, cpu: &Cpu, x: &[T], pilots: &[f64]) -> PairSums {
        self.reduce(cpu, |tile, lanes| sum_tile(cpu, self, tile, x, pilots, lanes))
    }

    /// Sums of g and of g (x - mean).
    pub(super) fn gradient_sums<T: Element>(
        &self,
        cpu: &Cpu,
        (x, dy): (&[T], &[T]),
        means: &[f64],
        c: Coefficients<T>,
    ) -> PairSums {
        self.reduce(cpu, |tile, lanes| sum_gradient_tile(cpu, self, tile, x, dy, means, &c, lanes))
    }

    fn reduce(&self, cpu: &Cpu, task: impl Fn(&Tile, &mut [Lanes]) + Send + Sync) -> PairSums {
        let tiles: Vec<Tile> = self.all_tiles().collect();
        let mut parts: Vec<PairSums> = tiles.iter().map(|_| PairSums::default()).collect();
        cpu.for_each(self.len(), tiles.iter().zip(&mut parts), |(tile, part)| {
            *part = tile_sums(tile, &task);
        });
        let mut total = PairSums::zeros(self.channels);
        for (tile, part) in tiles.iter().zip(&parts) {
            total.add_at(tile.channels.start, &part.a, &part.b);
        }
        total
    }

    pub(super) fn normalize<T: Element>(&self, cpu: &Cpu, x: Option<&[T]>, c: Coefficients<T>, y: &mut [T]) {
        let streams = x.is_some() && stream::pays_to_copy(y);
        let y = Shared::new(y);
        cpu.for_each(self.len(), self.all_tiles(), |tile| {
            self.normalize_tile(cpu, &tile, x, (&c, 0), y, streams);
        });
    }

    /// With the coefficients of all channels from one on.
    fn normalize_tile<T: Element>(
        &self,
        cpu: &Cpu,
        tile: &Tile,
        x: Option<&[T]>,
        (c, from): (&Coefficients<T>, usize),
        y: Shared<'_, T>,
        streams: bool,
    ) {
        self.write_tile(cpu, tile, y, streams, |first, start, y| {
            normalize_planes(cpu, self.spatial, x.map(|x| &x[start..][..y.len()]), y, c, first - from);
        });
    }

    pub(super) fn gradient<T: Element>(
        &self,
        cpu: &Cpu,
        (x, dy): (Option<&[T]>, &[T]),
        c: Coefficients<T>,
        dx: &mut [T],
    ) {
        let streams = x.is_some() && stream::pays_to_copy(dx);
        let dx = Shared::new(dx);
        cpu.for_each(self.len(), self.all_tiles(), |tile| {
            self.gradient_tile(cpu, &tile, (x, dy), (&c, 0), dx, streams);
        });
    }

    fn gradient_tile<T: Element>(
        &self,
        cpu: &Cpu,
        tile: &Tile,
        (x, dy): (Option<&[T]>, &[T]),
        (c, from): (&Coefficients<T>, usize),
        dx: Shared<'_, T>,
        streams: bool,
    ) {
        self.write_tile(cpu, tile, dx, streams, |first, start, dx| {
            let x = x.map(|x| &x[start..][..dx.len()]);
            gradient_planes(cpu, self.spatial, x, &dy[start..][..dx.len()], dx, c, first - from);
        });
    }

    /// Runs `task` on every run of neighbouring elements of a tile: its first channel, its start, its elements. A run is
    /// whole planes, or a part of one.
    fn write_tile<T: Element>(
        &self,
        cpu: &Cpu,
        tile: &Tile,
        out: Shared<'_, T>,
        streams: bool,
        task: impl Fn(usize, usize, &mut [T]),
    ) {
        let whole = tile.places.len() == self.spatial;
        let run = if whole { tile.channels.len() * self.spatial } else { tile.places.len() };
        let mut staged = vec![T::zero(); if streams { run.min(STAGED) } else { 0 }];
        let mut write = |channel: usize, start: usize, len: usize| {
            // SAFETY: tiles have no places in common, and this is the only reference to these of this one.
            let out = unsafe { out.part(start, len) };
            match streams {
                true => {
                    let staged = &mut staged[..len];
                    task(channel, start, staged);
                    stream::copy(cpu, staged, out);
                }
                false => task(channel, start, out),
            }
        };
        for image in tile.images.clone() {
            let place = |channel: usize| (image * self.channels + channel) * self.spatial + tile.places.start;
            if whole && (run <= STAGED || !streams) {
                write(tile.channels.start, place(tile.channels.start), run);
                continue;
            }
            for channel in tile.channels.clone() {
                for done in (0..tile.places.len()).step_by(STAGED) {
                    write(channel, place(channel) + done, STAGED.min(tile.places.len() - done));
                }
            }
        }
        if streams {
            stream::fence();
        }
    }

    /// Statistics and y: both passes over a group of channels while caches hold it, which [`Planes::stays_cached`] tells.
    /// The results are those of one pass after the other.
    ///
    /// `coefficients` of some channels follow from their moments.
    pub(super) fn forward<T: Element>(
        &self,
        cpu: &Cpu,
        x: &[T],
        pilots: &[f64],
        coefficients: impl Fn(Range<usize>, &Moments) -> Coefficients<T> + Send + Sync,
        y: &mut [T],
    ) -> Moments {
        let count = self.batch * self.spatial;
        let streams = stream::pays_to_copy(y);
        let y = Shared::new(y);
        let groups = self.by_group(cpu, |channels| {
            let sums = self.group_sums(&channels, |tile, lanes| sum_tile(cpu, self, tile, x, pilots, lanes));
            let moments = sums.moments(&pilots[channels.clone()], count);
            let c = coefficients(channels.clone(), &moments);
            for tile in self.tiles(channels.clone()) {
                self.normalize_tile(cpu, &tile, Some(x), (&c, channels.start), y, streams);
            }
            moments
        });
        let [mean, m2] = [|m: &Moments| m.mean.clone(), |m: &Moments| m.m2.clone()]
            .map(|part| groups.iter().flat_map(part).collect());
        Moments { mean, m2, count }
    }

    /// The sums and dx, likewise. `c` holds forward's coefficients of all channels; `with_sums` gives backward's of some.
    pub(super) fn backward<T: Element>(
        &self,
        cpu: &Cpu,
        (x, dy): (&[T], &[T]),
        means: &[f64],
        c: &Coefficients<T>,
        with_sums: impl Fn(Range<usize>, &PairSums) -> Coefficients<T> + Send + Sync,
        dx: &mut [T],
    ) -> PairSums {
        let streams = stream::pays_to_copy(dx);
        let dx = Shared::new(dx);
        let groups = self.by_group(cpu, |channels| {
            let sums = self.group_sums(&channels, |tile, lanes| {
                sum_gradient_tile(cpu, self, tile, x, dy, means, c, lanes);
            });
            let c = with_sums(channels.clone(), &sums);
            for tile in self.tiles(channels.clone()) {
                self.gradient_tile(cpu, &tile, (Some(x), dy), (&c, channels.start), dx, streams);
            }
            sums
        });
        let [a, b] = [|sums: &PairSums| sums.a.clone(), |sums: &PairSums| sums.b.clone()]
            .map(|part| groups.iter().flat_map(part).collect());
        PairSums { a, b }
    }

    /// What `task` gives for every group of channels, in order.
    fn by_group<R: Send>(&self, cpu: &Cpu, task: impl Fn(Range<usize>) -> R + Send + Sync) -> Vec<R> {
        let mut results: Vec<Option<R>> = self.groups().map(|_| None).collect();
        cpu.for_each(self.len(), self.groups().zip(&mut results), |(channels, result)| {
            *result = Some(task(channels));
        });
        results.into_iter().map(|result| result.expect("every task ran")).collect()
    }

    /// The sums of a group's tiles, added in order.
    fn group_sums(&self, channels: &Range<usize>, task: impl Fn(&Tile, &mut [Lanes])) -> PairSums {
        let mut total = PairSums::zeros(channels.len());
        for tile in self.tiles(channels.clone()) {
            let part = tile_sums(&tile, &task);
            total.add(&part.a, &part.b);
        }
        total
    }
}

/// Two sums of a channel, in interleaved parts so that adding vectorises.
type Lanes = [[f64; LANES]; 2];

fn tile_sums(tile: &Tile, task: &impl Fn(&Tile, &mut [Lanes])) -> PairSums {
    let mut lanes = vec![[[0.0; LANES]; 2]; tile.channels.len()];
    task(tile, &mut lanes);
    let sum = |index: usize| lanes.iter().map(|lanes| lanes[index].iter().sum()).collect();
    PairSums { a: sum(0), b: sum(1) }
}

multiversion! {
    fn sum_tile<T: Element>(planes: &Planes, tile: &Tile, x: &[T], pilots: &[f64], lanes: &mut [Lanes]) {
        for image in tile.images.clone() {
            for (lanes, channel) in lanes.iter_mut().zip(tile.channels.clone()) {
                let plane = &x[(image * planes.channels + channel) * planes.spatial..][tile.places.clone()];
                let pilot = pilots[channel];
                let [mut sums, mut squares] = *lanes;
                let mut chunks = plane.chunks_exact(LANES);
                for chunk in &mut chunks {
                    for lane in 0..LANES {
                        let d = chunk[lane].f64() - pilot;
                        sums[lane] += d;
                        squares[lane] += d * d;
                    }
                }
                for (lane, x) in chunks.remainder().iter().enumerate() {
                    let d = x.f64() - pilot;
                    sums[lane] += d;
                    squares[lane] += d * d;
                }
                *lanes = [sums, squares];
            }
        }
    }

    fn sum_gradient_tile<T: Element>(
        planes: &Planes, tile: &Tile, x: &[T], dy: &[T], means: &[f64], c: &Coefficients<T>, lanes: &mut [Lanes],
    ) {
        let relu = c.relu;
        for image in tile.images.clone() {
            for (lanes, channel) in lanes.iter_mut().zip(tile.channels.clone()) {
                let start = (image * planes.channels + channel) * planes.spatial;
                let (x, dy) = (&x[start..][tile.places.clone()], &dy[start..][tile.places.clone()]);
                let (c, mean) = (c.at(channel), means[channel]);
                let [mut sums, mut centered] = *lanes;
                let mut chunks = x.chunks_exact(LANES).zip(dy.chunks_exact(LANES));
                for (x, dy) in &mut chunks {
                    for lane in 0..LANES {
                        let g = c.behind_activation(x[lane], dy[lane], relu).f64();
                        sums[lane] += g;
                        centered[lane] += g * (x[lane].f64() - mean);
                    }
                }
                let done = x.len() / LANES * LANES;
                for (lane, (&x, &dy)) in x[done..].iter().zip(&dy[done..]).enumerate() {
                    let g = c.behind_activation(x, dy, relu).f64();
                    sums[lane] += g;
                    centered[lane] += g * (x.f64() - mean);
                }
                *lanes = [sums, centered];
            }
        }
    }

    fn normalize_planes<T: Element>(
        spatial: usize, x: Option<&[T]>, y: &mut [T], c: &Coefficients<T>, first: usize,
    ) {
        let relu = c.relu;
        for (index, y) in y.chunks_mut(spatial).enumerate() {
            let c = c.at(first + index);
            match x {
                Some(x) => {
                    let x = &x[index * spatial..][..y.len()];
                    y.iter_mut().zip(x).for_each(|(y, &x)| *y = c.forward(x, relu));
                }
                None => y.iter_mut().for_each(|y| *y = c.forward(*y, relu)),
            }
        }
    }

    fn gradient_planes<T: Element>(
        spatial: usize, x: Option<&[T]>, dy: &[T], dx: &mut [T], c: &Coefficients<T>, first: usize,
    ) {
        let (relu, constant) = (c.relu, c.constant);
        for (index, (dx, dy)) in dx.chunks_mut(spatial).zip(dy.chunks(spatial)).enumerate() {
            let c = c.at(first + index);
            match x {
                Some(x) => {
                    let x = &x[index * spatial..][..dx.len()];
                    for ((dx, &x), &dy) in dx.iter_mut().zip(x).zip(dy) {
                        *dx = c.backward(x, dy, relu, constant);
                    }
                }
                None => for (dx, &dy) in dx.iter_mut().zip(dy) {
                    *dx = c.backward(*dx, dy, relu, constant);
                },
            }
        }
    }
}
