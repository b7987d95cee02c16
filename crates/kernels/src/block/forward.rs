//! Forward of the block.

use std::sync::Arc;

use super::epilogue::Epilogue;
use super::recompute::{Kept, Recipe, RecipeSource};
use super::{Block, BlockProblem, Keep, NAME, Operands};
use crate::activation::Activation;
use crate::batch_norm::{BatchNormOptions, Moments, Normalizer, Statistics, StatsInParts};
use crate::memory::Bytes;
use crate::{Buffer, Result, Slice, SliceMut};

/// What forward gives.
pub struct Forward {
    /// z, in the memory format of x; `None` if it is not computed before it is read: see [`Saved::recipe`].
    pub output: Option<Buffer>,
    /// What backward needs besides the operands.
    pub saved: Saved,
}

/// What a block keeps for its backward, besides its operands. Clones share it.
#[derive(Clone)]
pub struct Saved {
    pub(super) kept: Kept,
    /// The normalisation of forward.
    pub(super) normalizer: Normalizer,
    /// Whether z is recomputed from what is kept where it is read.
    renormalizes: bool,
    /// Whether backward reads from z where the activation passed its input.
    pub(super) masked: bool,
    /// The index of each window's largest element.
    pub(super) taken: Option<Arc<Bytes>>,
}

impl Saved {
    /// The batch's moments, over all ranks where they are synchronized; `None` for constant statistics.
    pub fn moments(&self) -> Option<&Moments> {
        self.normalizer.moments()
    }

    /// Whether backward needs z.
    pub fn needs_output(&self) -> bool {
        self.masked
    }

    /// Recomputes z, if what is kept allows it.
    pub fn recipe(&self, block: &Block) -> Option<Recipe> {
        let source = match &self.kept {
            _ if !self.renormalizes => return None,
            Kept::Stored(y) => RecipeSource::Stored(y.clone()),
            Kept::Whole(whole) => RecipeSource::Whole(whole.clone()),
            Kept::Tiles => return None,
        };
        Some(Recipe { block: block.clone(), source, normalizer: self.normalizer.clone() })
    }
}

impl Block {
    /// Runs the convolution, computes the statistics if the batch gives them, and computes z unless the next reader will.
    /// `save` says whether a backward follows; without one nothing is kept and z is always computed.
    ///
    /// # Errors
    /// If a length does not fit, there is no memory, ranks cannot communicate, or a batch has one value per channel.
    #[inline(never)]
    pub fn forward(&self, operands: &Operands<'_>, statistics: &Statistics, save: bool) -> Result<Forward> {
        self.check(&operands.parameters, Some(operands.residual.is_some()))?;
        let BlockProblem { eps, eps_place, .. } = self.problem;
        let options = BatchNormOptions { statistics: statistics.clone(), eps, eps_place };
        let shape = self.convolution.output_shape();
        options.check(NAME, &shape)?;
        let (mut y, moments) = self.convolve(operands, statistics)?;
        let normalizer = Normalizer::new(NAME, &options, &shape, moments)?;
        let epilogue = Epilogue::new(self, &normalizer, &operands.of_epilogue());
        let keep = save.then_some(self.keep);
        let renormalizes = matches!(keep, Some(Keep::Renormalize | Keep::RecomputeBoth));
        let mut taken = match self.problem.pool {
            Some(_) if save => Some(self.device().bytes::<u8>(self.output_shape().iter().product())?),
            _ => None,
        };
        // What is left of y is kept.
        let keeps_y = matches!(keep, Some(Keep::Store | Keep::Renormalize));
        let later = keep == Some(Keep::Renormalize) && self.problem.pool.is_none() && !self.problem.residual;
        let (output, y) = if later {
            (None, Some(y))
        } else if keeps_y || self.problem.pool.is_some() {
            (Some(self.finish(y.elements(), &epilogue, taken.as_mut())?), keeps_y.then_some(y))
        } else {
            self.finish_in_place(y.elements_mut(), &epilogue)?;
            (Some(y), None)
        };
        let kept = match (y, keep) {
            (Some(y), _) => Kept::Stored(Arc::new(y)),
            (None, Some(Keep::Recompute | Keep::RecomputeBoth)) => Kept::Whole(Arc::default()),
            _ => Kept::Tiles,
        };
        // With a residual, y alone does not determine where the activation passed its input: backward reads this from z.
        let masked = save && self.problem.residual && self.problem.activation != Activation::Identity;
        let saved = Saved { kept, normalizer, renormalizes, masked, taken: taken.map(Arc::new) };
        Ok(Forward { output, saved })
    }

    /// y, and its moments unless statistics are given. Each tile's moments are computed while the caches still hold the
    /// tile.
    fn convolve(
        &self,
        operands: &Operands<'_>,
        statistics: &Statistics,
    ) -> Result<(Buffer, Option<Moments>)> {
        let (device, shape) = (self.device(), self.convolution.output_shape());
        let extent = self.convolution.output_extent(shape[0]);
        let wanted = !matches!(statistics, Statistics::Constant { .. });
        let stats = wanted.then(|| StatsInParts::new(&extent)).transpose()?;
        let mut y = device.buffer(self.convolution.output_type(), extent.len()?)?;
        let cpu = self.convolution.cpu();
        self.convolution.forward_with(
            operands.x,
            operands.parameters.filter(),
            y.elements_mut(),
            |images, tile| stats.as_ref().map_or(Ok(()), |stats| stats.add_after(&cpu, images.start, tile)),
        )?;
        Ok((y, stats.map(StatsInParts::finish).transpose()?))
    }

    /// z in a buffer of its own.
    fn finish(&self, y: Slice<'_>, epilogue: &Epilogue<'_>, mut taken: Option<&mut Bytes>) -> Result<Buffer> {
        let (image, output_image) = (self.convolution.output_image(), self.output_image());
        let shape = self.output_shape();
        let mut z = self.device().buffer(y.dtype(), shape.iter().product())?;
        let (cpu, mut scratch) = (self.device().compute(), None);
        if epilogue.is_one_pass() {
            epilogue.run(cpu, 0..shape[0], (y, z.elements_mut()), (None, &mut scratch))?;
            return Ok(z);
        }
        if self.problem.pool.is_some() && self.convolution.is_in_lanes() {
            self.pool_in_lanes(epilogue, (y, z.elements_mut()), taken.map(Bytes::elements_mut))?;
            return Ok(z);
        }
        for images in self.convolution.tiles() {
            let place = images.start * output_image..images.end * output_image;
            let taken = taken.as_mut().map(|taken| &mut taken.elements_mut()[place.clone()]);
            let y = y.part(images.start * image..images.end * image);
            epilogue.run(cpu, images, (y, z.elements_mut().part(place)), (taken, &mut scratch))?;
        }
        Ok(z)
    }

    /// z in the buffer of y. There must be no pool.
    fn finish_in_place(&self, mut y: SliceMut<'_>, epilogue: &Epilogue<'_>) -> Result<()> {
        let image = self.convolution.output_image();
        for images in self.convolution.tiles() {
            let y = y.reborrow().part(images.start * image..images.end * image);
            epilogue.run_in_place(images, y)?;
        }
        Ok(())
    }
}
