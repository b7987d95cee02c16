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
use crate::{Buffer, Element, Recomputed, Result};

/// A convolution's input and parameters.
pub type ConvInput<'a, T> = (&'a dyn Images<T>, Filter<'a, T>);

/// y as a whole, from the first request until the block's backward takes it.
pub(super) struct Whole<T: Element>(Mutex<Option<Arc<Buffer<T>>>>);

impl<T: Element> Default for Whole<T> {
    fn default() -> Whole<T> {
        Whole(Mutex::default())
    }
}

impl<T: Element> Whole<T> {
    fn held(&self) -> MutexGuard<'_, Option<Arc<Buffer<T>>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// y; also held for the block's own backward.
    fn get(&self, block: &Block, input: ConvInput<'_, T>) -> Result<Arc<Buffer<T>>> {
        let mut held = self.held();
        if let Some(y) = &*held {
            return Ok(y.clone());
        }
        let y = Arc::new(compute(block, input)?);
        *held = Some(y.clone());
        Ok(y)
    }

    /// y; it is no longer held here.
    pub(super) fn take(&self, block: &Block, input: ConvInput<'_, T>) -> Result<Arc<Buffer<T>>> {
        let held = self.held().take();
        held.map_or_else(|| Ok(Arc::new(compute(block, input)?)), Ok)
    }
}

fn compute<T: Element>(block: &Block, (x, filter): ConvInput<'_, T>) -> Result<Buffer<T>> {
    let mut y = block.device().buffer(block.convolution.output_shape().iter().product())?;
    block.convolution.forward(x, filter, &mut y)?;
    count::<T>(&block.convolution, block.convolution.output_shape()[0]);
    Ok(y)
}

/// Counts that the convolution of some images ran again.
fn count<T>(convolution: &TiledConv, images: usize) {
    let flops = convolution.problem().flops() / convolution.output_shape()[0].max(1) as f64;
    let bytes = images * (convolution.input_image() + convolution.output_image()) * size_of::<T>();
    let work = Recomputed { flops: (flops * images as f64) as u64, bytes: bytes as u64 };
    convolution.device().count_recomputed(work);
}

/// How backward gets y.
#[derive(Clone)]
pub(super) enum Kept<T: Element> {
    /// y was kept.
    Stored(Arc<Buffer<T>>),
    /// y is recomputed as a whole.
    Whole(Arc<Whole<T>>),
    /// y is recomputed tile by tile.
    Tiles,
}

/// y, tile by tile.
pub(super) struct OutputTiles<'a, T: Element> {
    pub(super) kept: Kept<T>,
    pub(super) convolution: &'a TiledConv,
    pub(super) parameters: Parameters<'a, T>,
    pub(super) scratch: Option<Buffer<T>>,
}

impl<T: Element> OutputTiles<'_, T> {
    /// Mutable access to all of y, if it was kept and has no other owner.
    pub(super) fn unshared(&mut self) -> Option<&mut [T]> {
        match &mut self.kept {
            Kept::Stored(y) => Arc::get_mut(y).map(|y| &mut **y),
            _ => None,
        }
    }

    /// y of some images; `x` gives their input if it is needed.
    pub(super) fn get<'a>(
        &'a mut self,
        images: Range<usize>,
        x: impl FnOnce() -> Result<&'a [T]>,
    ) -> Result<&'a [T]> {
        let OutputTiles { convolution, scratch, kept, parameters } = self;
        let (device, extent) = (convolution.device(), convolution.output_extent(images.len()));
        let (len, image) = (extent.len()?, convolution.output_image());
        let place = images.start * image..images.end * image;
        match &*kept {
            Kept::Stored(y) => Ok(&y[place]),
            Kept::Whole(_) | Kept::Tiles => {
                let out = at_least(scratch, device, len)?;
                convolution.forward_tile(images.len(), x()?, parameters.filter(), out)?;
                count::<T>(convolution, images.len());
                Ok(out)
            }
        }
    }
}

/// Where y comes from when z is recomputed.
#[derive(Clone)]
pub(super) enum RecipeSource<T: Element> {
    Stored(Arc<Buffer<T>>),
    Whole(Arc<Whole<T>>),
}

/// Recomputes the output of a block from what it keeps.
#[derive(Clone)]
pub struct Recipe<T: Element> {
    pub(super) block: Block,
    pub(super) source: RecipeSource<T>,
    pub(super) normalizer: Normalizer,
}

impl<T: Element> Recipe<T> {
    /// How many images z has.
    pub fn images(&self) -> usize {
        self.block.output_shape()[0]
    }

    /// Whether the convolution runs again, and so needs its input.
    pub fn convolves(&self) -> bool {
        matches!(self.source, RecipeSource::Whole(_))
    }

    /// Writes z of some images. All operands are those of forward; `input` may be `None` unless [`Recipe::convolves`].
    ///
    /// # Errors
    /// If the input is missing, a length does not fit, or there is no memory.
    #[inline(never)]
    pub fn write(
        &self,
        input: Option<ConvInput<'_, T>>,
        operands: &EpilogueOperands<'_, T>,
        images: Range<usize>,
        z: &mut [T],
    ) -> Result<()> {
        let Recipe { block, source, normalizer } = self;
        let y = match (source, input) {
            (RecipeSource::Stored(y), _) => y.clone(),
            (RecipeSource::Whole(whole), Some(input)) => whole.get(block, input)?,
            (RecipeSource::Whole(_), None) => {
                return Err(invalid(NAME, "recomputing needs the block's input"));
            }
        };
        let epilogue = Epilogue::new(block, normalizer, operands);
        let passes = block.convolution.output_image() * (1 + usize::from(operands.residual.is_some()));
        let bytes = images.len() * (passes + block.output_image()) * size_of::<T>();
        block.device().count_recomputed(Recomputed { flops: 0, bytes: bytes as u64 });
        let (image, output_image) = (block.convolution.output_image(), block.output_image());
        check_len(NAME, "z", z.len(), images.len() * output_image)?;
        // A whole tensor is written tile by tile too: the result is the same, and the tiles stay in the caches.
        for tile in block.convolution.tiles_of(images.clone()) {
            let place = (tile.start - images.start) * output_image..(tile.end - images.start) * output_image;
            let Some(y) = y.get(tile.start * image..tile.end * image) else {
                let total = block.output_shape()[0];
                return Err(invalid(NAME, format!("there are no images {images:?} of {total} images")));
            };
            epilogue.run(tile, y, &mut z[place], None)?;
        }
        Ok(())
    }
}
