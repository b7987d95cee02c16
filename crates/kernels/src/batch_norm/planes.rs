//! Batch norm in contiguous memory, where each plane holds one channel.

use std::ops::Range;

use super::cells::{Cell, moments_of_cells, sums_of_cells};
use super::coefficients::{Coefficients, Map, Normalize};
use super::parts::{Pair, Part, Totals, pilot, pilot_places};
use super::{BackwardSums, Moments};
use crate::activation::with_activation;
use crate::channels::LANES;
use crate::element::PieceOf;
use crate::isa::multiversion;
use crate::memory_format::Extent;
use crate::pointwise::formulas::Formula;
use crate::shared::Shared;
use crate::stream::{self, Streaming};
use crate::{Cpu, DType, Element, Stored, scratch};

/// All channels together are cut into at least this many tasks, if they have enough elements.
const TASKS: usize = 64;
/// The minimum of elements that a tile has in each image: neighbouring channels with small planes share a tile, so that
/// threads seldom write the same cache line.
const RUN: usize = 1024;
/// Elements that are computed into a buffer in cache before they are streamed.
const STAGED: usize = 4096;
/// The groups of channels that all threads work on may have this many bytes together: shared caches are assumed to keep
/// that from one pass to the next.
const CACHED: usize = 8 << 20;

/// A tensor in contiguous memory, and how it is cut into tiles.
pub(super) struct Planes {
    batch: usize,
    channels: usize,
    spatial: usize,
    /// Channels in a tile.
    group: usize,
    /// How many tiles the batch, and each plane, is cut into.
    cuts: [usize; 2],
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
        let wanted = TASKS.div_ceil(channels.div_ceil(group).max(1));
        let cuts = match batch >= wanted {
            true => [wanted, 1],
            false => [batch.max(1), (spatial / RUN).clamp(1, wanted.div_ceil(batch.max(1)))],
        };
        Planes { batch, channels, spatial, group, cuts }
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
        let [images, planes] = self.cuts;
        let cut = |len: usize, cuts: usize, cut: usize| len * cut / cuts..len * (cut + 1) / cuts;
        (0..images * planes).map(move |tile| Tile {
            channels: channels.clone(),
            images: cut(self.batch, images, tile / planes),
            places: cut(self.spatial, planes, tile % planes),
        })
    }

    /// Every tile, group by group.
    fn all_tiles(&self) -> impl Iterator<Item = Tile> + use<'_> {
        self.groups().flat_map(|channels| self.tiles(channels))
    }

    /// Whether the bytes of a group on each thread stay in a cache between two passes over `tensors` tensors.
    pub(super) fn stays_cached(&self, cpu: &Cpu, tensors: usize, dtype: DType) -> bool {
        let group = self.batch * self.spatial * self.group * dtype.size();
        // Working group by group needs the results of tasks, and a dry CPU computes none.
        if cpu.is_dry() {
            return false;
        }
        // Too few groups would leave threads idle.
        group * tensors * cpu.threads() <= CACHED && self.channels.div_ceil(self.group) >= 2 * cpu.threads()
    }

    /// Merges the moments of each part of `x` into `totals`.
    pub(super) fn moments<S: Stored>(&self, cpu: &Cpu, parts: &[Part], x: &[S], totals: &mut Totals) {
        self.reduce(cpu, parts, totals, MomentsOf { x });
    }

    /// Merges the sums of g and of g (x - mean) over each part into `totals`.
    pub(super) fn gradient_sums<S: Stored>(
        &self,
        cpu: &Cpu,
        parts: &[Part],
        (x, dy): (&[S], &[S]),
        means: &[f64],
        c: Coefficients<S::Compute>,
        totals: &mut Totals,
    ) {
        self.reduce(cpu, parts, totals, GradientSumsOf { x, dy, means, c: &c });
    }

    /// Runs `task` on each part and group of channels, and merges its two numbers per channel in order.
    fn reduce(&self, cpu: &Cpu, parts: &[Part], totals: &mut Totals, task: impl PartTask) {
        // Each task takes a run of parts; runs are short enough that there are enough tasks.
        let runs = TASKS.div_ceil(self.channels.div_ceil(self.group).max(1));
        let run = parts.len().div_ceil(runs).max(1);
        let of_group = 2 * self.group * parts.len();
        scratch::with(2 * self.channels * parts.len(), |results| {
            let groups = self.groups().zip(results.chunks_mut(of_group.max(1)));
            let items = groups.flat_map(|(channels, results)| {
                let results = results.chunks_mut(2 * channels.len() * run);
                parts.chunks(run).zip(results).map(move |(parts, results)| (channels.clone(), parts, results))
            });
            cpu.for_each(self.len(), items, |(channels, parts, results)| {
                let mut cells = vec![Cell::default(); channels.len()];
                for (part, result) in parts.iter().zip(results.chunks_mut(2 * channels.len())) {
                    let share = Share { planes: self, part, first: channels.start };
                    task.run(cpu, &share, &mut cells, result.split_at_mut(channels.len()).into());
                }
            });
            for (channels, results) in self.groups().zip(results.chunks(of_group.max(1))) {
                for (part, result) in parts.iter().zip(results.chunks(2 * channels.len())) {
                    totals.join(cpu, channels.start, part, result.split_at(channels.len()));
                }
            }
        });
    }

    /// The numbers of a group of channels over all parts, merged in order.
    fn group_totals(
        &self,
        cpu: &Cpu,
        parts: &[Part],
        channels: &Range<usize>,
        task: &impl PartTask,
    ) -> Totals {
        let mut totals = Totals::new(task.pair(), channels.len());
        let mut cells = vec![Cell::default(); channels.len()];
        let (mut a, mut b) = (vec![0.0; channels.len()], vec![0.0; channels.len()]);
        for part in parts {
            let share = Share { planes: self, part, first: channels.start };
            task.run(cpu, &share, &mut cells, [&mut a, &mut b]);
            totals.join(cpu, 0, part, (&a, &b));
        }
        totals
    }

    /// y = map(x, residual); without `x`, y is mapped in place.
    pub(super) fn map<S: Stored>(
        &self,
        cpu: &Cpu,
        map: impl Map<S::Compute>,
        x: Option<[&[S]; 2]>,
        c: Coefficients<S::Compute>,
        y: &mut [S],
    ) {
        let target = Target::new(cpu, y, x.is_some());
        let mapping = Mapping { map, x, c: &c, first: 0 };
        cpu.for_each(self.len(), self.all_tiles(), |tile| self.map_tile(&tile, &mapping, &target));
    }

    /// The unit of the pieces in which a run is converted: whole planes, or any part of a plane that is a run by itself.
    fn unit(&self, run: usize) -> usize {
        if run > self.spatial { self.spatial } else { 1 }
    }

    fn map_tile<S: Stored, M: Map<S::Compute>>(
        &self,
        tile: &Tile,
        all: &Mapping<'_, S, M>,
        y: &Target<'_, S>,
    ) {
        self.write_tile(tile, y, |channel, start, run| {
            let &Mapping { map, x, c, first } = all;
            let (on, spatial) = ((y.cpu, self.unit(run.len())), self.spatial);
            let at = |done: usize| channel - first + done / spatial;
            with_activation!(c.activation, act => match x {
                Some(both) => {
                    let both = both.map(|x| &x[start..][..run.len()]);
                    S::Compute::write(on, both, run, |done, both, run| {
                        map_planes(y.cpu, &Run { first: at(done), spatial, act }, map, c, Some(both), run);
                    });
                }
                None => S::Compute::update(on, [], run, |done, [], run| {
                    map_planes(y.cpu, &Run { first: at(done), spatial, act }, map, c, None, run);
                }),
            });
        });
    }

    pub(super) fn gradient<S: Stored>(
        &self,
        cpu: &Cpu,
        (x, dy): (Option<&[S]>, &[S]),
        c: Coefficients<S::Compute>,
        dx: &mut [S],
    ) {
        let target = Target::new(cpu, dx, x.is_some());
        let gradient = Gradient { x, dy, c: &c, first: 0 };
        cpu.for_each(self.len(), self.all_tiles(), |tile| self.gradient_tile(&tile, &gradient, &target));
    }

    fn gradient_tile<S: Stored>(&self, tile: &Tile, all: &Gradient<'_, S>, dx: &Target<'_, S>) {
        self.write_tile(tile, dx, |channel, start, run| {
            let &Gradient { x, dy, c, first } = all;
            let (on, spatial) = ((dx.cpu, self.unit(run.len())), self.spatial);
            let at = |done: usize| channel - first + done / spatial;
            let dy = &dy[start..][..run.len()];
            with_activation!(c.activation, act => match x {
                Some(x) => {
                    let both = [&x[start..][..run.len()], dy];
                    S::Compute::write(on, both, run, |done, [x, dy], run| {
                        gradient_planes(dx.cpu, &Run { first: at(done), spatial, act }, c, Some(x), dy, run);
                    });
                }
                None => S::Compute::update(on, [dy], run, |done, [dy], run| {
                    gradient_planes(dx.cpu, &Run { first: at(done), spatial, act }, c, None, dy, run);
                }),
            });
        });
    }

    /// Calls `task(first channel, start, elements)` on every contiguous run of a tile. A run is one or more whole planes,
    /// or a part of one.
    fn write_tile<S: Stored>(
        &self,
        tile: &Tile,
        target: &Target<'_, S>,
        task: impl Fn(usize, usize, &mut [S]),
    ) {
        let &Target { cpu, elements, streams } = target;
        let whole = tile.places.len() == self.spatial;
        let run = if whole { tile.channels.len() * self.spatial } else { tile.places.len() };
        let mut staged = vec![S::default(); if streams { run.min(STAGED) } else { 0 }];
        let streaming = streams.then(Streaming::begin);
        let mut write = |channel: usize, start: usize, len: usize| {
            // SAFETY: tiles of one `Planes` differ in their channels, images or places, so that they have no elements in common.
            // Each tile is written by one task, and this reference, the only one to these elements, ends with this call.
            let out = unsafe { elements.part(start, len) };
            match &streaming {
                Some(streaming) => {
                    let staged = &mut staged[..len];
                    task(channel, start, staged);
                    stream::copy(cpu, streaming, staged, out);
                }
                None => task(channel, start, out),
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
    }

    /// Statistics and y. Both passes go over one group of channels while caches hold it; use it if
    /// [`Planes::stays_cached`]. The results are the same as with one pass over everything after the other.
    ///
    /// `coefficients` computes the coefficients of some channels from their moments.
    pub(super) fn forward<S: Stored>(
        &self,
        cpu: &Cpu,
        parts: &[Part],
        x: &[S],
        coefficients: impl Fn(Range<usize>, &Moments) -> Coefficients<S::Compute> + Send + Sync,
        y: &mut [S],
    ) -> Moments {
        let count = self.batch * self.spatial;
        let target = Target::new(cpu, y, true);
        let groups = self.by_group(cpu, |channels| {
            let Totals { a: mean, b: m2, .. } = self.group_totals(cpu, parts, &channels, &MomentsOf { x });
            let moments = Moments { mean, m2, count };
            let c = coefficients(channels.clone(), &moments);
            let mapping = Mapping { map: Normalize, x: Some([x, x]), c: &c, first: channels.start };
            for tile in self.tiles(channels.clone()) {
                self.map_tile(&tile, &mapping, &target);
            }
            moments
        });
        let [mean, m2] = [|m: &Moments| m.mean.clone(), |m: &Moments| m.m2.clone()]
            .map(|part| groups.iter().flat_map(part).collect());
        Moments { mean, m2, count }
    }

    /// The sums and dx, in the same way. `with_sums` computes the coefficients of backward for some channels from their sums.
    pub(super) fn backward<S: Stored>(
        &self,
        cpu: &Cpu,
        parts: &[Part],
        of: &GradientSumsOf<'_, S>,
        with_sums: impl Fn(Range<usize>, &BackwardSums) -> Coefficients<S::Compute> + Send + Sync,
        dx: &mut [S],
    ) -> BackwardSums {
        let target = Target::new(cpu, dx, true);
        let groups = self.by_group(cpu, |channels| {
            let Totals { a, b, .. } = self.group_totals(cpu, parts, &channels, of);
            let sums = BackwardSums { g: a, g_centered: b };
            let c = with_sums(channels.clone(), &sums);
            let gradient = Gradient { x: Some(of.x), dy: of.dy, c: &c, first: channels.start };
            for tile in self.tiles(channels.clone()) {
                self.gradient_tile(&tile, &gradient, &target);
            }
            sums
        });
        let [g, g_centered] =
            [|sums: &BackwardSums| sums.g.clone(), |sums: &BackwardSums| sums.g_centered.clone()]
                .map(|part| groups.iter().flat_map(part).collect());
        BackwardSums { g, g_centered }
    }

    /// The results of `task` for every group of channels, in order.
    fn by_group<R: Send>(&self, cpu: &Cpu, task: impl Fn(Range<usize>) -> R + Send + Sync) -> Vec<R> {
        let mut results: Vec<Option<R>> = self.groups().map(|_| None).collect();
        cpu.for_each(self.len(), self.groups().zip(&mut results), |(channels, result)| {
            *result = Some(task(channels));
        });
        results.into_iter().map(|result| result.expect("every task ran")).collect()
    }
}

/// A tensor whose tiles are written.
struct Target<'a, T> {
    cpu: &'a Cpu,
    elements: Shared<'a, T>,
    /// Whether it is written by streaming stores.
    streams: bool,
}

impl<'a, T: Stored> Target<'a, T> {
    /// `overwrites` says that the elements are not read before; then large tensors are streamed.
    fn new(cpu: &'a Cpu, elements: &'a mut [T], overwrites: bool) -> Self {
        let streams = overwrites && stream::pays_to_copy(elements);
        Target { cpu, elements: Shared::new(elements), streams }
    }
}

/// How a tensor is mapped; without `x`, y is mapped in place.
struct Mapping<'a, S: Stored, M> {
    map: M,
    /// x and the residual.
    x: Option<[&'a [S]; 2]>,
    c: &'a Coefficients<S::Compute>,
    /// The channel that `c` starts with.
    first: usize,
}

/// What dx is computed from; without `x`, it holds x before.
struct Gradient<'a, S: Stored> {
    x: Option<&'a [S]>,
    dy: &'a [S],
    c: &'a Coefficients<S::Compute>,
    /// The channel that `c` starts with.
    first: usize,
}

/// A run of planes, or of elements of one plane, and the activation.
struct Run<A> {
    /// The place of the run's first channel in the coefficients.
    first: usize,
    /// Elements of a plane.
    spatial: usize,
    act: A,
}

/// What a part has of a group of channels.
struct Share<'a> {
    planes: &'a Planes,
    part: &'a Part,
    /// The group's first channel.
    first: usize,
}

/// Two numbers for each channel of a share.
trait PartTask: Send + Sync {
    /// What the numbers mean.
    fn pair(&self) -> Pair;

    /// Computes the numbers, with a cell for each channel to work in.
    fn run(&self, cpu: &Cpu, share: &Share<'_>, cells: &mut [Cell], numbers: [&mut [f64]; 2]);
}

/// The moments of `x`.
struct MomentsOf<'a, T> {
    x: &'a [T],
}

impl<S: Stored> PartTask for MomentsOf<'_, S> {
    fn pair(&self) -> Pair {
        Pair::Moments
    }

    fn run(&self, cpu: &Cpu, share: &Share<'_>, cells: &mut [Cell], [means, m2]: [&mut [f64]; 2]) {
        sum_part(cpu, share, self.x, cells);
        moments_of_cells(share.part, cells, means, m2);
    }
}

/// The sums of g and of g (x - mean); means and coefficients of forward are those of all channels.
pub(super) struct GradientSumsOf<'a, S: Stored> {
    pub(super) x: &'a [S],
    pub(super) dy: &'a [S],
    pub(super) means: &'a [f64],
    pub(super) c: &'a Coefficients<S::Compute>,
}

impl<S: Stored> PartTask for GradientSumsOf<'_, S> {
    fn pair(&self) -> Pair {
        Pair::Sums
    }

    fn run(&self, cpu: &Cpu, share: &Share<'_>, cells: &mut [Cell], [g, g_centered]: [&mut [f64]; 2]) {
        let &GradientSumsOf { x, dy, means, c } = self;
        for (cell, &mean) in cells.iter_mut().zip(&means[share.first..]) {
            *cell = Cell::new(mean);
        }
        with_activation!(c.activation, act => sum_gradient_part(cpu, &GradientShare { share, act }, c, x, dy, cells));
        sums_of_cells(cells, g, g_centered);
    }
}

/// A share whose gradients are summed, behind this activation.
struct GradientShare<'a, A> {
    share: &'a Share<'a>,
    act: A,
}

// Coefficients and tensors are arguments of their own: so the compiler knows that they do not overlap. In a struct, they cost
// planes of few elements up to a fifth of the time.
multiversion! {
    /// Sums of x - pilot and of (x - pilot)^2; the pilot is the centre of the cell.
    fn sum_part<S: Stored>(share: &Share<'_>, x: &[S], cells: &mut [Cell]) {
        let &Share { planes: &Planes { channels, spatial, .. }, part, first } = share;
        let (images, places) = (part.images.clone(), part.places.clone());
        let start = images.start * channels + first;
        for (index, cell) in cells.iter_mut().enumerate() {
            let plane = &x[(start + index) * spatial..][places.clone()];
            *cell = Cell::new(pilot(pilot_places(plane.len()).map(|place| plane[place])));
        }
        for image in images {
            for (index, cell) in cells.iter_mut().enumerate() {
                let plane = &x[(image * channels + first + index) * spatial..][places.clone()];
                let Some(last) = plane.last_chunk::<LANES>() else {
                    for ((sum, square), x) in cell.a.iter_mut().zip(&mut cell.b).zip(plane) {
                        let d = x.f64() - cell.centre;
                        *sum += d;
                        *square += d * d;
                    }
                    continue;
                };
                let Cell { centre, a: mut sums, b: mut squares } = *cell;
                let mut chunks = plane.chunks_exact(LANES);
                for chunk in &mut chunks {
                    for lane in 0..LANES {
                        let d = chunk[lane].f64() - centre;
                        sums[lane] += d;
                        squares[lane] += d * d;
                    }
                }
                // The last LANES values overlap values that have been counted; those add 0.
                let counted = LANES - plane.len() % LANES;
                for lane in 0..LANES {
                    let d = last[lane].f64() - centre;
                    let d = if lane < counted { 0.0 } else { d };
                    sums[lane] += d;
                    squares[lane] += d * d;
                }
                (cell.a, cell.b) = (sums, squares);
            }
        }
    }

    /// Sums of g and of g (x - mean); the mean is the centre of the cell, which is empty before.
    fn sum_gradient_part<S: Stored, A: Formula<S::Compute>>(
        of: &GradientShare<'_, A>, c: &Coefficients<S::Compute>, x: &[S], dy: &[S], cells: &mut [Cell],
    ) {
        let &GradientShare { share: &Share { planes: &Planes { channels, spatial, .. }, part, first }, act } = of;
        let (images, places) = (part.images.clone(), part.places.clone());
        for image in images {
            for (index, cell) in cells.iter_mut().enumerate() {
                let start = (image * channels + first + index) * spatial;
                let (x, dy) = (&x[start..][places.clone()], &dy[start..][places.clone()]);
                let c = c.at(first + index);
                let (Some(last_x), Some(last_dy)) = (x.last_chunk::<LANES>(), dy.last_chunk::<LANES>()) else {
                    for ((sum, centered), (&x, &dy)) in cell.a.iter_mut().zip(&mut cell.b).zip(x.iter().zip(dy)) {
                        let g = c.behind_activation(x.wide(), dy.wide(), act).f64();
                        *sum += g;
                        *centered += g * (x.f64() - cell.centre);
                    }
                    continue;
                };
                let Cell { centre, a: mut sums, b: mut centered } = *cell;
                let mut chunks = x.chunks_exact(LANES).zip(dy.chunks_exact(LANES));
                for (x, dy) in &mut chunks {
                    for lane in 0..LANES {
                        let g = c.behind_activation(x[lane].wide(), dy[lane].wide(), act).f64();
                        sums[lane] += g;
                        centered[lane] += g * (x[lane].f64() - centre);
                    }
                }
                let counted = LANES - x.len() % LANES;
                for lane in 0..LANES {
                    let g = c.behind_activation(last_x[lane].wide(), last_dy[lane].wide(), act).f64();
                    let d = g * (last_x[lane].f64() - centre);
                    sums[lane] += if lane < counted { 0.0 } else { g };
                    centered[lane] += if lane < counted { 0.0 } else { d };
                }
                (cell.a, cell.b) = (sums, centered);
            }
        }
    }

    /// Maps a run of planes, or a part of one.
    fn map_planes<T: Element, M: Map<T>, A: Formula<T>>(
        with: &Run<A>, map: M, c: &Coefficients<T>, x: Option<[&[T]; 2]>, y: &mut [T],
    ) {
        let &Run { first, spatial, act } = with;
        for (index, y) in y.chunks_mut(spatial).enumerate() {
            let c = c.at(first + index);
            match x {
                Some([x, residual]) => {
                    let start = index * spatial;
                    let (x, residual) = (&x[start..][..y.len()], &residual[start..][..y.len()]);
                    for ((y, &x), &residual) in y.iter_mut().zip(x).zip(residual) {
                        *y = map.map(c, x, residual, act);
                    }
                }
                None => y.iter_mut().for_each(|y| *y = map.map(c, *y, T::zero(), act)),
            }
        }
    }

    /// Computes dx of a run of planes, or of a part of one.
    fn gradient_planes<T: Element, A: Formula<T>>(
        with: &Run<A>, c: &Coefficients<T>, x: Option<&[T]>, dy: &[T], dx: &mut [T],
    ) {
        let &Run { first, spatial, act } = with;
        let constant = c.constant;
        for (index, (dx, dy)) in dx.chunks_mut(spatial).zip(dy.chunks(spatial)).enumerate() {
            let c = c.at(first + index);
            match x {
                Some(x) => {
                    let x = &x[index * spatial..][..dx.len()];
                    for ((dx, &x), &dy) in dx.iter_mut().zip(x).zip(dy) {
                        *dx = c.backward(x, dy, act, constant);
                    }
                }
                None => for (dx, &dy) in dx.iter_mut().zip(dy) {
                    *dx = c.backward(*dx, dy, act, constant);
                },
            }
        }
    }
}
