//! Recomputes what was not kept.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::epilogue::Epilogue;
use super::{Block, EpilogueOperands, NAME, Parameters};
use crate::batch_norm::Normalizer;
use crate::conv::{Filter, TiledConv};
use crate::error::{check_len, invalid};
use crate::images::Images;
use crate::memory::at_least;
use crate::{Buffer, Recomputed, Result, Slice, SliceMut};

/// A convolution's input and parameters.
pub type ConvInput<'a> = (&'a dyn Images, Filter<'a>);

/// y as a whole, from the first request until the block's backward takes it.
#[derive(Default)]
pub(super) struct Whole(Mutex<Option<Arc<Buffer>>>);

impl Whole {
    fn held(&self) -> MutexGuard<'_, Option<Arc<Buffer>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// y; also held for the block's own backward.
    fn get(&self, block: &Block, input: ConvInput<'_>) -> Result<Arc<Buffer>> {
        let mut held = self.held();
        if let Some(y) = &*held {
            return Ok(y.clone());
        }
        let y = Arc::new(compute(block, input)?);
        *held = Some(y.clone());
        Ok(y)
    }

    /// y; it is no longer held here.
    pub(super) fn take(&self, block: &Block, input: ConvInput<'_>) -> Result<Arc<Buffer>> {
        let held = self.held().take();
        held.map_or_else(|| Ok(Arc::new(compute(block, input)?)), Ok)
    }
}

fn compute(block: &Block, (x, filter): ConvInput<'_>) -> Result<Buffer> {
    let convolution = &block.convolution;
    let len = convolution.output_shape().iter().product();
    let mut y = block.device().buffer(convolution.output_type(), len)?;
    convolution.forward(x, filter, y.elements_mut())?;
    count(&block.convolution, block.convolution.output_shape()[0]);
    Ok(y)
}

/// Counts that the convolution of some images ran again.
fn count(convolution: &TiledConv, images: usize) {
    let flops = convolution.problem().flops() / convolution.output_shape()[0].max(1) as f64;
    let [input, output] = convolution.dtypes();
    let bytes =
        images * (convolution.input_image() * input.size() + convolution.output_image() * output.size());
    let work = Recomputed { flops: (flops * images as f64) as u64, bytes: bytes as u64 };
    convolution.device().count_recomputed(work);
}

/// How backward gets y.
#[derive(Clone)]
pub(super) enum Kept {
    /// y was kept.
    Stored(Arc<Buffer>),
    /// y is recomputed as a whole.
    Whole(Arc<Whole>),
    /// y is recomputed tile by tile.
    Tiles,
}

/// y, tile by tile.
pub(super) struct OutputTiles<'a> {
    pub(super) kept: Kept,
    pub(super) convolution: &'a TiledConv,
    pub(super) parameters: Parameters<'a>,
}

impl OutputTiles<'_> {
    /// Mutable access to all of y, if it was kept and has no other owner.
    pub(super) fn unshared(&mut self) -> Option<SliceMut<'_>> {
        match &mut self.kept {
            Kept::Stored(y) => Arc::get_mut(y).map(Buffer::elements_mut),
            _ => None,
        }
    }

    /// Whether tiles are recomputed.
    pub(super) fn recomputes(&self) -> bool {
        !matches!(self.kept, Kept::Stored(_))
    }

    /// y of some images; `x` gives their input if it is needed. A tile is recomputed in the scratch memory, which is kept for the
    /// next tile.
    pub(super) fn get<'a>(
        &'a self,
        images: Range<usize>,
        x: impl FnOnce() -> Result<Slice<'a>>,
        [scratch, workspace]: [&'a mut Option<Buffer>; 2],
    ) -> Result<Slice<'a>> {
        let OutputTiles { convolution, kept, parameters } = self;
        let image = convolution.output_image();
        match kept {
            Kept::Stored(y) => Ok(y.elements().part(images.start * image..images.end * image)),
            Kept::Whole(_) | Kept::Tiles => {
                let len = convolution.output_extent(images.len()).len()?;
                let mut out = at_least(scratch, convolution.device(), convolution.output_type(), len)?;
                let filter = parameters.filter();
                convolution.forward_in(workspace, (images.len(), x()?), filter, out.reborrow())?;
                count(convolution, images.len());
                Ok(out.into_slice())
            }
        }
    }
}

/// Where y comes from when z is recomputed.
#[derive(Clone)]
pub(super) enum RecipeSource {
    Stored(Arc<Buffer>),
    Whole(Arc<Whole>),
}

/// Recomputes the output of a block from what it keeps.
#[derive(Clone)]
pub struct Recipe {
    pub(super) block: Block,
    pub(super) source: RecipeSource,
    pub(super) normalizer: Normalizer,
}

impl Recipe {
    /// How many images z has.
    pub fn images(&self) -> usize {
        self.block.output_shape()[0]
    }

    /// Whether the convolution runs again, and so needs its input.
    pub fn convolves(&self) -> bool {
        matches!(self.source, RecipeSource::Whole(_))
    }

    /// Computes what all calls of [`Recipe::write`] share: y, if it is recomputed as a whole.
    ///
    /// # Errors
    /// If the input is missing, or there is no memory.
    pub fn prepare(&self, input: Option<ConvInput<'_>>) -> Result<()> {
        self.output(input).map(drop)
    }

    /// y, as a whole.
    fn output(&self, input: Option<ConvInput<'_>>) -> Result<Arc<Buffer>> {
        match (&self.source, input) {
            (RecipeSource::Stored(y), _) => Ok(y.clone()),
            (RecipeSource::Whole(whole), Some(input)) => whole.get(&self.block, input),
            (RecipeSource::Whole(_), None) => Err(invalid(NAME, "recomputing needs the block's input")),
        }
    }

    /// Whether [`Recipe::write`] takes memory if the residual is in memory.
    pub fn takes_memory(&self) -> bool {
        self.block.problem.pool.is_some()
    }

    /// Writes z of some images. All operands are those of forward; `input` may be `None` unless [`Recipe::convolves`].
    ///
    /// # Errors
    /// If the input is missing, a length does not fit, or there is no memory.
    #[inline(never)]
    pub fn write(
        &self,
        input: Option<ConvInput<'_>>,
        operands: &EpilogueOperands<'_>,
        images: Range<usize>,
        mut z: SliceMut<'_>,
    ) -> Result<()> {
        let Recipe { block, normalizer, .. } = self;
        let y = self.output(input)?;
        let epilogue = Epilogue::new(block, normalizer, operands);
        let passes = block.convolution.output_image() * (1 + usize::from(operands.residual.is_some()));
        let bytes = images.len() * (passes + block.output_image()) * z.dtype().size();
        block.device().count_recomputed(Recomputed { flops: 0, bytes: bytes as u64 });
        let (image, output_image) = (block.convolution.output_image(), block.output_image());
        check_len(NAME, "z", z.len(), images.len() * output_image)?;
        let total = self.images();
        if images.end > total {
            return Err(invalid(NAME, format!("there are no images {images:?} of {total} images")));
        }
        let (cpu, mut scratch) = (block.device().compute(), None);
        // A whole tensor is written tile by tile too: the result is the same, and the tiles stay in the caches.
        for tile in block.convolution.tiles_of(images.clone()) {
            let place = (tile.start - images.start) * output_image..(tile.end - images.start) * output_image;
            let y = y.elements().part(tile.start * image..tile.end * image);
            epilogue.run(cpu, tile, (y, z.reborrow().part(place)), (None, &mut scratch))?;
        }
        Ok(())
    }
}
