//! The part of the block after the convolution, run on some images at a time.

use std::ops::Range;

use super::{Block, EpilogueOperands};
use crate::activation::add_activated_in_place;
use crate::batch_norm::{Normalization, Normalizer, normalize, normalize_added, normalize_in_place};
use crate::images::Images;
use crate::pool::{MaxPoolPass, WindowIndicesMut};
use crate::{Result, Slice, SliceMut};

/// pool(activation(normalise(y) + residual)).
pub(super) struct Epilogue<'a> {
    block: &'a Block,
    /// The normalisation; it includes the activation unless there is a residual.
    by: Normalization<'a>,
    residual: Option<&'a dyn Images>,
}

impl<'a> Epilogue<'a> {
    pub(super) fn new(
        block: &'a Block,
        normalizer: &'a Normalizer,
        operands: &EpilogueOperands<'a>,
    ) -> Epilogue<'a> {
        let EpilogueOperands { gamma, beta, residual } = *operands;
        Epilogue { block, by: block.normalization(normalizer, [gamma, beta]), residual }
    }

    /// Whether each element is read and written only once. Caches then bring nothing, so whole tensors may be processed at
    /// once and bypass them.
    pub(super) fn is_one_pass(&self) -> bool {
        self.block.problem.pool.is_none() && self.residual.is_none_or(Images::in_memory)
    }

    /// Computes z of some images and, if `taken` is given, the index of each window's largest element.
    pub(super) fn run(
        &self,
        images: Range<usize>,
        y: Slice<'_>,
        z: SliceMut<'_>,
        taken: Option<&mut [u8]>,
    ) -> Result<()> {
        let (device, problem) = (self.block.device(), &self.block.problem);
        let (cpu, extent) = (device.compute(), self.block.convolution.output_extent(images.len()));
        if let Some(residual) = self.residual {
            let mut scratch = None;
            let residual = residual.read(images, &mut scratch)?;
            let by = Normalization { activation: problem.activation, ..self.by };
            return normalize_added(cpu, &extent, (y, residual), &by, z);
        }
        let Some(pool) = &problem.pool else {
            return normalize(cpu, &extent, y, &self.by, z);
        };
        let mut normalized = device.buffer(y.dtype(), y.len())?;
        normalize(cpu, &extent, y, &self.by, normalized.elements_mut())?;
        let pool = pool.with_batch(images.len());
        let pass = if taken.is_some() { MaxPoolPass::Forward } else { MaxPoolPass::Inference };
        let algorithm = device.max_pool_algorithm(&pool, y.dtype(), pass);
        algorithm.forward(cpu, &pool, normalized.elements(), z, taken.map(WindowIndicesMut::Bytes))
    }

    /// [`Epilogue::run`] in the buffer of y. There must be no pool.
    pub(super) fn run_in_place(&self, images: Range<usize>, mut y: SliceMut<'_>) -> Result<()> {
        let cpu = self.block.device().compute();
        if self.residual.is_some() && !y.dtype().computes() {
            // In two steps, the normalised values would be rounded before the residual is added.
            let mut z = self.block.device().buffer(y.dtype(), y.len())?;
            self.run(images, y.as_slice(), z.elements_mut(), None)?;
            return if cpu.is_dry() { Ok(()) } else { y.copy_from(z.elements()) };
        }
        normalize_in_place(cpu, &self.block.convolution.output_extent(images.len()), &self.by, y.reborrow())?;
        let Some(residual) = self.residual else { return Ok(()) };
        let mut scratch = None;
        let residual = residual.read(images, &mut scratch)?;
        add_activated_in_place(cpu, residual, self.block.problem.activation, y)
    }
}
