//! Recomputes what was not kept.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use convoke_kernels::batch_norm::invert;
use convoke_kernels::{Element, convert};

use super::super::batch_norm::Normalizer;
use super::super::conv2d::Convolution;
use super::epilogue::Epilogue;
use crate::pool::at_least;
use crate::storage::Recipe;
use crate::tensor::dispatch;
use crate::{Buffer, Result, Tensor, bf16};

/// A convolution that can be run again.
pub(super) struct Convolved {
    pub(super) convolution: Convolution,
    pub(super) x: Tensor,
    pub(super) weight: Tensor,
    pub(super) bias: Option<Tensor>,
    /// Its recomputed output, from the first request until the block's backward takes it.
    again: Mutex<Option<Tensor>>,
}

impl Convolved {
    pub(super) fn new(
        convolution: Convolution,
        x: Tensor,
        weight: Tensor,
        bias: Option<Tensor>,
    ) -> Arc<Convolved> {
        Arc::new(Convolved { convolution, x, weight, bias, again: Mutex::default() })
    }

    fn again(&self) -> MutexGuard<'_, Option<Tensor>> {
        self.again.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self) -> Result<Tensor> {
        self.convolution.forward(&self.x, &self.weight, self.bias.as_ref())
    }

    /// The whole output; also held for the block's own backward.
    fn output(&self) -> Result<Tensor> {
        let mut again = self.again();
        if again.is_none() {
            *again = Some(self.run()?);
        }
        Ok(again.clone().expect("made above"))
    }

    /// The whole output; it is no longer held here.
    pub(super) fn take_output(&self) -> Result<Tensor> {
        let held = self.again().take();
        held.map_or_else(|| self.run(), Ok)
    }

    /// Its fields, moved out if it has no other owner, else cloned.
    pub(super) fn into_parts(this: Arc<Convolved>) -> (Convolution, Tensor, Tensor, Option<Tensor>) {
        match Arc::try_unwrap(this) {
            Ok(Convolved { convolution, x, weight, bias, .. }) => (convolution, x, weight, bias),
            Err(this) => (this.convolution.clone(), this.x.clone(), this.weight.clone(), this.bias.clone()),
        }
    }
}

/// How backward gets the convolution's output.
#[derive(Clone)]
pub(super) enum Kept {
    /// It was kept, rounded to bf16 if the tensor has that type.
    Stored(Tensor),
    /// It is recomputed as a whole.
    Whole,
    /// It is recomputed tile by tile.
    Tiles,
    /// It is computed from the block's output by inverting this normalisation.
    Inverted(Tensor, Normalizer),
}

/// The convolution's output, tile by tile.
pub(super) struct Tiles<'a, T: Element> {
    pub(super) kept: Kept,
    pub(super) convolution: &'a Convolution,
    pub(super) weight: &'a Tensor,
    pub(super) bias: Option<&'a Tensor>,
    pub(super) scratch: Option<Buffer<T>>,
}

impl<T: Element> Tiles<'_, T> {
    /// Mutable access to the whole output, if it was kept and has no other owner.
    pub(super) fn unshared(&mut self) -> Option<&mut [T]> {
        match &mut self.kept {
            Kept::Stored(y) => y.unshared(),
            _ => None,
        }
    }

    /// The output for some images; `x` gives their input if it is needed.
    pub(super) fn get<'a>(
        &'a mut self,
        images: Range<usize>,
        x: impl FnOnce() -> Result<&'a [T]>,
    ) -> Result<&'a [T]> {
        let Tiles { convolution, scratch, kept, .. } = self;
        let (device, extent) = (convolution.device(), convolution.output_extent(images.len()));
        let len = extent.len()?;
        match &*kept {
            Kept::Stored(y) if y.dtype() == T::DTYPE => y.images(images, scratch),
            Kept::Stored(y) => {
                let mut unused = None;
                let out = at_least(scratch, device, len)?;
                convert::convert(device.compute(), y.images::<bf16>(images, &mut unused)?, out)?;
                Ok(out)
            }
            Kept::Whole | Kept::Tiles => {
                let out = at_least(scratch, device, len)?;
                convolution.forward_tile(images.len(), x()?, self.weight, self.bias, out)?;
                Ok(out)
            }
            Kept::Inverted(z, normalizer) => {
                let mut unused = None;
                let out = at_least(scratch, device, len)?;
                let z = z.images(images, &mut unused)?;
                // On a dry device, `invert` might reject the meaningless values.
                if !device.is_dry() {
                    invert(device.compute(), &extent, z, &normalizer.by::<T>()?, out)?;
                }
                Ok(out)
            }
        }
    }
}

/// The recipe of a block's output: recomputes it from the convolution's.
pub(super) struct Again {
    pub(super) source: Source,
    pub(super) epilogue: Epilogue,
}

/// Where the convolution's output comes from.
pub(super) enum Source {
    Stored(Tensor),
    Convolved(Arc<Convolved>),
}

impl Recipe for Again {
    fn images(&self) -> usize {
        self.epilogue.convolution.output_shape()[0]
    }

    fn write(&self, images: Range<usize>, out: &mut [u8]) -> Result<()> {
        let y = match &self.source {
            Source::Stored(y) => y.clone(),
            Source::Convolved(convolved) => convolved.output()?,
        };
        dispatch!(y.dtype(), T => {
            let mut scratch = None;
            let image = self.epilogue.output_image()?;
            let out = bytemuck::cast_slice_mut::<u8, T>(out);
            // A whole tensor is written tile by tile too: the result is the same, and the tiles stay in the caches.
            for tile in self.epilogue.convolution.tiles_of(images.clone()) {
                let place = (tile.start - images.start) * image..(tile.end - images.start) * image;
                let y = y.images::<T>(tile.clone(), &mut scratch)?;
                self.epilogue.run(tile, y, &mut out[place], None)?;
            }
        });
        Ok(())
    }
}
