//! Tiles run by one thread each, several at a time.

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use super::TiledConv;
use crate::batch_norm::images_per_group;
use crate::conv::{ConvTypes, Pass};
use crate::images::Images;
use crate::{Buffer, DType, Error, Result, Slice, SliceMut};

/// Bytes of input and output of a lane's tile if the weight is small: they should stay in the second-level cache.
const LANE_BYTES: usize = 1 << 20;
/// With a large weight, a lane's tile has this many times the weight's bytes.
const LANE_WEIGHTS: usize = 14;
/// With fewer bytes of input and output a thread, the memory of the lanes would count beside them.
const LEAST_BYTES: usize = 4 << 20;
/// If a single image has more bytes than this, all threads share it.
const LARGEST_IMAGE: usize = 8 << 20;
/// With so many tiles a lane, it does not matter if some lanes run one more than others.
const MANY_TILES: usize = 4;

impl TiledConv {
    /// The same convolution in lanes: each thread runs tiles of its own, where there are enough tiles and the weight is small beside
    /// them. Otherwise all threads go on sharing the work of each tile.
    ///
    /// Its tiles are smaller, so the sums of its gradients are rounded in another way.
    pub fn in_lanes(self) -> TiledConv {
        let threads = self.device.compute().threads();
        match self.lane_tile(threads).filter(|_| threads > 1) {
            Some(tile) => TiledConv { tile, lanes: threads, ..self },
            None => self,
        }
    }

    /// Images per tile of a lane, if `threads` lanes are worth it.
    fn lane_tile(&self, threads: usize) -> Option<usize> {
        let problem = &self.problem;
        let ConvTypes { input, weight, output, .. } = problem.types;
        let image =
            (problem.input_len() * input.size() + problem.output_len() * output.size()) / problem.batch;
        let weight = problem.weight_len() * weight.size();
        let wanted = LANE_BYTES.max(LANE_WEIGHTS * weight);
        let group = images_per_group(&problem.output_extent());
        let tile = wanted.div_ceil(image.max(1)).next_multiple_of(group);
        // The lanes should end together.
        let tiles = self.images.div_ceil(tile).next_multiple_of(threads);
        let tile = self.images.div_ceil(tiles.max(1)).next_multiple_of(group);
        let tiles = self.images.div_ceil(tile.max(1));
        let even = tiles.is_multiple_of(threads) || tiles >= MANY_TILES * threads;
        let large_enough = tile.saturating_mul(image) >= wanted / 2
            && self.images.saturating_mul(image) >= threads * LEAST_BYTES;
        (tiles >= threads && even && large_enough && image <= LARGEST_IMAGE).then_some(tile)
    }

    /// Whether each tile is run by one thread.
    pub(crate) fn is_in_lanes(&self) -> bool {
        self.lanes > 1
    }

    /// A state for each lane.
    pub(crate) fn for_lanes<L>(&self, make: impl Fn() -> Result<L>) -> Result<Vec<L>> {
        (0..self.lanes).map(|_| make()).collect()
    }

    /// The memory in which a lane keeps what it computes of a tile, `image` elements an image. All of it is allocated before the
    /// lanes start, so that memory does not depend on which of them is faster. `None` if all threads share the tiles: then it is
    /// allocated where it is needed.
    pub(crate) fn scratch(&self, dtype: DType, image: usize) -> Result<Option<Buffer>> {
        (self.lanes > 1).then(|| self.device.buffer(dtype, self.tile * image)).transpose()
    }

    /// The workspace of a lane for these passes; `None` if all threads share the tiles. The algorithms of the passes are chosen here,
    /// since lanes cannot measure.
    pub(crate) fn workspace(&self, passes: &[Pass]) -> Result<Option<Buffer>> {
        if self.lanes == 1 {
            return Ok(None);
        }
        let mut len = 0;
        for images in self.tile_sizes() {
            for &pass in passes {
                let pass = match pass {
                    Pass::Forward if self.transposed => Pass::BackwardData,
                    Pass::BackwardData if self.transposed => Pass::Forward,
                    pass => pass,
                };
                len = len.max(self.plan(pass, images)?.workspace_len());
            }
        }
        Ok(Some(self.device.buffer(self.problem.types.accumulator, len)?))
    }

    /// The different numbers of images in a tile.
    pub(crate) fn tile_sizes(&self) -> impl Iterator<Item = usize> + use<> {
        let (whole, rest) = (self.images / self.tile > 0, self.images % self.tile);
        [whole.then_some(self.tile), (rest > 0).then_some(rest)].into_iter().flatten()
    }

    /// Cuts a tensor with `image` elements an image into tiles.
    pub(crate) fn cut<'a>(&self, all: SliceMut<'a>, image: usize) -> Vec<SliceMut<'a>> {
        let mut rest = Some(all);
        let tile = |images: Range<usize>| {
            let (tile, others) = rest.take()?.split_at(images.len() * image);
            rest = Some(others);
            Some(tile)
        };
        self.tiles().map_while(tile).collect()
    }

    /// Runs `task` on the images and the item of every tile, in order or, in lanes, several at a time.
    ///
    /// # Errors
    /// The first error of a task.
    pub(crate) fn for_each_tile<L: Send, I: Send>(
        &self,
        mut lanes: Vec<L>,
        items: Vec<I>,
        task: impl Fn(&mut L, Range<usize>, I) -> Result<()> + Sync + Send,
    ) -> Result<()> {
        let mut tiles = self.tiles().zip(items);
        // On a dry device, allocations must happen all the same.
        if lanes.len() == 1 || self.device.is_dry() {
            return tiles.try_for_each(|(images, item)| task(&mut lanes[0], images, item));
        }
        let count = self.lanes as u64;
        let failure = Mutex::new(None::<Error>);
        let failed = || failure.lock().unwrap_or_else(PoisonError::into_inner);
        self.device.compute().for_each_with(usize::MAX, lanes.into_iter(), tiles, |lane, (images, item)| {
            if failed().is_some() {
                return;
            }
            let _span = tracing::trace_span!(target: crate::profile::TARGET, "tile", lanes = count).entered();
            if let Err(error) = task(lane, images, item) {
                failed().get_or_insert(error);
            }
        });
        failure.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err)
    }
}

/// Images that the lanes of a convolution read.
pub(crate) struct Reader<'a> {
    images: &'a dyn Images,
    /// If a read takes memory of its own, lanes read one after the other, so that memory does not depend on their timing.
    turns: Option<Mutex<()>>,
}

impl<'a> Reader<'a> {
    /// # Errors
    /// If what all reads share cannot be computed.
    pub(crate) fn new(of: &TiledConv, images: &'a dyn Images) -> Result<Reader<'a>> {
        let in_turn = of.lanes > 1 && images.prepare()?;
        Ok(Reader { images, turns: in_turn.then(Mutex::default) })
    }

    /// The scratch memory of a lane for tiles of these images, which have `image` elements of this type each.
    pub(crate) fn scratch(&self, of: &TiledConv, (dtype, image): (DType, usize)) -> Result<Option<Buffer>> {
        if self.images.in_memory() { Ok(None) } else { of.scratch(dtype, image) }
    }

    /// The elements of some images.
    pub(crate) fn read<'b>(
        &'b self,
        images: Range<usize>,
        scratch: &'b mut Option<Buffer>,
    ) -> Result<Slice<'b>> {
        let _turn = self.turns.as_ref().map(|turns| turns.lock().unwrap_or_else(PoisonError::into_inner));
        self.images.read(images, scratch)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::error::invalid;
    use crate::{Cpu, Device, DeviceOptions};

    fn convolution(problem: &str, threads: usize) -> TiledConv {
        let problem: crate::conv::ConvProblem = problem.parse().unwrap();
        let device = Device::new(DeviceOptions::new(Cpu::new(threads).unwrap()));
        TiledConv::new(&device, problem, problem.batch).in_lanes()
    }

    #[test]
    fn lanes_have_even_tiles_of_the_whole_batch() {
        for (problem, threads) in [
            ("mb128ic16ih32oc16oh32kh3ph1", 2),
            ("mb61ic16ih40oc32oh40kh3ph1", 3),
            ("mb16ic192ih30oc64oh30kh3ph1", 2),
            ("mb16ic48ih120oc16oh120kh3ph1", 4),
            ("mb2048ic32ih26oc64oh24kh3", 2),
        ] {
            let of = convolution(problem, threads);
            assert_eq!(of.lanes, threads, "{problem}");
            let tiles: Vec<_> = of.tiles().collect();
            assert_eq!((tiles[0].start, tiles.last().unwrap().end), (0, of.images));
            assert!(tiles.windows(2).all(|pair| pair[0].end == pair[1].start));
            assert!(
                tiles.len().is_multiple_of(threads) || tiles.len() >= 4 * threads,
                "{problem}: {tiles:?}"
            );
            assert!(tiles[0].len().is_multiple_of(images_per_group(&of.problem.output_extent())));
        }
    }

    #[test]
    fn threads_share_tiles_where_lanes_do_not_pay() {
        for (problem, threads) in [
            // One thread; a small batch; a large weight; a large image; fewer images than threads.
            ("mb128ic16ih32oc16oh32kh3ph1", 1),
            ("mb32ic16ih32oc16oh32kh3ph1", 2),
            ("mb16ic512ih7oc512oh7kh3ph1", 2),
            ("mb8ic64ih224oc64oh224kh3ph1", 2),
            ("mb2ic16ih120oc16oh120kh3ph1", 4),
        ] {
            assert!(!convolution(problem, threads).is_in_lanes(), "{problem}");
        }
    }

    #[test]
    fn every_tile_is_visited_once_and_an_error_comes_out() {
        let of = convolution("mb61ic16ih40oc32oh40kh3ph1", 3);
        let tiles = of.tiles().count();
        let counts: Vec<AtomicUsize> = (0..tiles).map(|_| AtomicUsize::new(0)).collect();
        let visit = |fails: Option<usize>| {
            let lanes = of.for_lanes(|| Ok(())).unwrap();
            of.for_each_tile(lanes, (0..tiles).collect(), |(), images, tile| {
                assert_eq!(images.start, tile * of.tile);
                counts[tile].fetch_add(1, Ordering::Relaxed);
                if fails == Some(tile) { Err(invalid("lanes", format!("tile {tile}"))) } else { Ok(()) }
            })
        };
        visit(None).unwrap();
        assert!(counts.iter().all(|count| count.load(Ordering::Relaxed) == 1));
        assert!(visit(Some(1)).unwrap_err().to_string().contains("tile 1"));
    }
}
