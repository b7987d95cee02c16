//! The part of the block after the convolution, run on some images at a time.

use std::ops::Range;

use convoke_kernels::Element;
use convoke_kernels::activation::add_activated_in_place;
use convoke_kernels::batch_norm::{
    Activation, Normalization, normalize, normalize_added, normalize_in_place,
};
use convoke_kernels::pool::{MaxPoolPass, PoolProblem};

use super::super::batch_norm::Normalizer;
use super::super::conv2d::Convolution;
use super::super::pool2d::PoolOptions;
use super::NAME;
use crate::{Buffer, Result, Tensor};

/// pool(activation(normalise(y) + residual)) of a convolution's output y.
#[derive(Clone)]
pub(super) struct Epilogue {
    /// The convolution that gives y.
    pub(super) convolution: Convolution,
    /// The normalisation; it includes the activation unless there is a residual.
    pub(super) normalizer: Normalizer,
    /// The residual, and the activation after the addition.
    pub(super) residual: Option<(Tensor, Activation)>,
    pub(super) pool: Option<PoolOptions>,
}

impl Epilogue {
    /// Pooling of `images` images, at least one.
    pub(super) fn pool_problem(&self, images: usize) -> Result<Option<PoolProblem>> {
        let [_, channels, height, width] = self.convolution.output_shape();
        let (shape, format) = ([images.max(1), channels, height, width], self.convolution.problem().format);
        let problem = |pool: &PoolOptions| pool.problem(NAME, shape, format);
        self.pool.as_ref().map(problem).transpose()
    }

    /// The shape of the output.
    pub(super) fn output_shape(&self) -> Result<[usize; 4]> {
        let whole = self.convolution.output_shape();
        let pooled = self.pool_problem(1)?.map(|problem| problem.output_shape());
        let ([images, ..], [_, channels, height, width]) = (whole, pooled.unwrap_or(whole));
        Ok([images, channels, height, width])
    }

    /// Elements of an image of the output.
    pub(super) fn output_image(&self) -> Result<usize> {
        Ok(self.output_shape()?[1..].iter().product())
    }

    /// Whether each element is read and written only once. Caches then bring nothing, so whole tensors may be processed at once
    /// and bypass them.
    pub(super) fn is_one_pass(&self) -> bool {
        self.pool.is_none() && self.residual.as_ref().is_none_or(|(residual, _)| residual.has_elements())
    }

    /// Computes the output of some images and, if `taken` is given, the index of each window's largest element.
    pub(super) fn run<T: Element>(
        &self,
        images: Range<usize>,
        y: &[T],
        out: &mut [T],
        taken: Option<&mut [u8]>,
    ) -> Result<()> {
        let device = self.convolution.device();
        let (cpu, extent) = (device.compute(), self.convolution.output_extent(images.len()));
        let by = self.normalizer.by::<T>()?;
        if let Some((residual, activation)) = &self.residual {
            let mut scratch = None;
            let residual = residual.images::<T>(images, &mut scratch)?;
            let by = Normalization { activation: *activation, ..by };
            return Ok(normalize_added(cpu, &extent, (y, residual), &by, out)?);
        }
        let Some(problem) = self.pool_problem(images.len())? else {
            return Ok(normalize(cpu, &extent, y, &by, out)?);
        };
        let mut normalized: Buffer<T> = device.buffer(y.len())?;
        normalize(cpu, &extent, y, &by, &mut normalized)?;
        let pass = if taken.is_some() { MaxPoolPass::Forward } else { MaxPoolPass::Inference };
        let algorithm = device.max_pool_algorithm(&problem, T::DTYPE, pass);
        Ok(algorithm.forward(cpu, &problem, &normalized, out, taken)?)
    }

    /// [`Epilogue::run`] in the buffer of y. There must be no pool.
    pub(super) fn run_in_place<T: Element>(&self, images: Range<usize>, y: &mut [T]) -> Result<()> {
        let by = self.normalizer.by::<T>()?;
        let cpu = self.convolution.device().compute();
        normalize_in_place(cpu, &self.convolution.output_extent(images.len()), &by, y)?;
        let Some((residual, activation)) = &self.residual else { return Ok(()) };
        let mut scratch = None;
        let residual = residual.images::<T>(images, &mut scratch)?;
        Ok(add_activated_in_place(cpu, residual, *activation, y)?)
    }
}
