//! The part of the block after the convolution, run on some images at a time.

use std::ops::Range;

use super::{Block, EpilogueOperands};
use crate::activation::add_activated_in_place;
use crate::batch_norm::{Normalization, Normalizer, normalize, normalize_added, normalize_in_place};
use crate::images::Images;
use crate::memory::at_least;
use crate::pool::{MaxPoolAlgorithm, MaxPoolPass, PoolProblem, WindowIndicesMut};
use crate::{Buffer, Cpu, Result, Slice, SliceMut};

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

    /// The pool of some images, and the algorithm on these threads; `taken` says whether it gives the indices.
    pub(super) fn pool(
        &self,
        cpu: &Cpu,
        images: usize,
        taken: bool,
    ) -> Option<(PoolProblem, MaxPoolAlgorithm)> {
        let pool = self.block.problem.pool.as_ref()?.with_batch(images);
        let pass = if taken { MaxPoolPass::Forward } else { MaxPoolPass::Inference };
        let dtype = self.block.convolution.output_type();
        Some((pool, self.block.device().tuner().max_pool(&pool, dtype, pass, cpu)))
    }

    /// Computes z of some images and, if `taken` is given, the index of each window's largest element. What is pooled is computed in
    /// `scratch`, which keeps its memory for the next call.
    pub(super) fn run(
        &self,
        cpu: &Cpu,
        images: Range<usize>,
        (y, z): (Slice<'_>, SliceMut<'_>),
        (taken, scratch): (Option<&mut [u8]>, &mut Option<Buffer>),
    ) -> Result<()> {
        let (device, problem) = (self.block.device(), &self.block.problem);
        let extent = self.block.convolution.output_extent(images.len());
        if let Some(residual) = self.residual {
            let mut scratch = None;
            let residual = residual.read(images, &mut scratch)?;
            let by = Normalization { activation: problem.activation, ..self.by };
            return normalize_added(cpu, &extent, (y, residual), &by, z);
        }
        let Some((pool, algorithm)) = self.pool(cpu, images.len(), taken.is_some()) else {
            return normalize(cpu, &extent, y, &self.by, z);
        };
        let mut normalized = at_least(scratch, device, y.dtype(), y.len())?;
        normalize(cpu, &extent, y, &self.by, normalized.reborrow())?;
        algorithm.forward(cpu, &pool, normalized.into_slice(), z, taken.map(WindowIndicesMut::Bytes))
    }

    /// [`Epilogue::run`] in the buffer of y. There must be no pool.
    pub(super) fn run_in_place(&self, images: Range<usize>, mut y: SliceMut<'_>) -> Result<()> {
        let cpu = self.block.device().compute();
        if self.residual.is_some() && !y.dtype().computes() {
            // In two steps, the normalised values would be rounded before the residual is added.
            let mut z = self.block.device().buffer(y.dtype(), y.len())?;
            self.run(cpu, images, (y.as_slice(), z.elements_mut()), (None, &mut None))?;
            return if cpu.is_dry() { Ok(()) } else { y.copy_from(z.elements()) };
        }
        normalize_in_place(cpu, &self.block.convolution.output_extent(images.len()), &self.by, y.reborrow())?;
        let Some(residual) = self.residual else { return Ok(()) };
        let mut scratch = None;
        let residual = residual.read(images, &mut scratch)?;
        add_activated_in_place(cpu, residual, self.block.problem.activation, y)
    }
}
