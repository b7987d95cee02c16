//! Forward of the block.

use std::sync::Arc;

use convoke_kernels::batch_norm::{Activation, StatsInParts, normalize};
use convoke_kernels::{DType, Element, convert};

use super::super::batch_norm::{BatchNormOptions, Normalizer, Statistics};
use super::super::conv2d::Convolution;
use super::again::{Again, Convolved, Kept, Source};
use super::epilogue::Epilogue;
use super::{ConvBn, ConvBnBlock, Keep, NAME, Saved};
use crate::error::invalid;
use crate::pool::at_least;
use crate::{Buffer, MemoryFormat, Needs, Result, Tensor, bf16};

impl ConvBn {
    pub(super) fn run_forward<T: Element>(
        &self,
        inputs: &[&Tensor],
        needs: &Needs,
    ) -> Result<(Tensor, Saved)> {
        let x = inputs[0];
        let weight = inputs[1].in_format(MemoryFormat::Contiguous)?;
        let [bias, gamma, beta, residual] = self.places().map(|place| place.map(|place| inputs[place]));
        let convolution = Convolution::new(NAME, &self.convolution, x, &weight, bias)?;
        let residual = residual.map(|residual| self.check_residual(&convolution, residual)).transpose()?;
        self.check_pool(residual.is_some())?;
        let (y, moments) = self.convolve::<T>(&convolution, x, &weight, bias)?;

        let alone = BatchNormOptions { activation: Activation::Identity, ..self.norm.clone() };
        let norm = if residual.is_some() { &alone } else { &self.norm };
        let normalizer = Normalizer::of_moments(NAME, norm, &y, gamma, beta, moments)?;
        let mut epilogue = Epilogue {
            convolution: convolution.clone(),
            normalizer,
            residual: residual.map(|residual| (residual, self.norm.activation)),
            pool: self.pool,
        };
        let convolved = Convolved::new(convolution, x.keep(), weight, bias.map(Tensor::detach));
        if !needs.any() {
            let output = self.finish::<T>(y, &epilogue, None)?;
            return Ok((output, Saved { convolved, kept: Kept::Whole, epilogue, output: None, taken: None }));
        }

        let mut taken = match self.pool {
            Some(_) => Some(x.device().buffer::<u8>(epilogue.output_shape()?.iter().product())?),
            None => None,
        };
        let keep = self.possible_keep::<T>(&epilogue.normalizer, x.device().is_dry())?;
        let stored = matches!(keep, Keep::Store | Keep::Renormalize).then(|| y.clone());
        let compact = (keep == Keep::Compact).then(|| compact(&y, &epilogue)).transpose()?;
        let later = keep == Keep::Renormalize && self.pool.is_none() && !self.has[3];
        let output = if later { y } else { self.finish::<T>(y, &epilogue, taken.as_mut())? };
        // The recipe below must not hold the residual's elements if those can be recomputed.
        epilogue.residual = epilogue.residual.map(|(residual, activation)| (residual.keep(), activation));
        let source = match (keep, &stored) {
            (Keep::Renormalize, Some(y)) => Some(Source::Stored(y.clone())),
            (Keep::RecomputeBoth, _) => Some(Source::Convolved(convolved.clone())),
            _ => None,
        };
        let recipe = source.map(|source| Arc::new(Again { source, epilogue: epilogue.clone() }));
        let output = match recipe {
            Some(recipe) if later => Tensor::deferred(&output, recipe),
            Some(recipe) => output.with_recipe(recipe),
            None => output,
        };
        // With a residual, the convolution's output alone does not determine where the activation passed its input; nor does a
        // rounded output for certain. Backward then reads this from the block's output.
        let told = !self.has[3] && keep.is_exact();
        let masked = !told && self.norm.activation != Activation::Identity;
        let kept = match keep {
            Keep::Store | Keep::Renormalize | Keep::Compact => {
                Kept::Stored(stored.or(compact).expect("one of them was asked for"))
            }
            Keep::Recompute | Keep::RecomputeBoth => Kept::Whole,
            Keep::RecomputeInTiles => Kept::Tiles,
            Keep::Auto => unreachable!("resolved when the function was made"),
            Keep::Invert => Kept::Inverted(output.keep(), epilogue.normalizer.clone()),
        };
        epilogue.residual = None;
        match keep {
            Keep::Compact => epilogue.normalizer = epilogue.normalizer.of_centered(),
            Keep::Invert => epilogue.normalizer = epilogue.normalizer.without_activation(),
            _ => {}
        }
        let own = masked.then(|| output.keep());
        Ok((output, Saved { convolved, kept, epilogue, output: own, taken: taken.map(Arc::new) }))
    }

    /// The convolution's output, and its moments unless statistics are given. Each tile's moments are computed while the caches
    /// still hold the tile.
    fn convolve<T: Element>(
        &self,
        convolution: &Convolution,
        x: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
    ) -> Result<(Tensor, Option<convoke_kernels::batch_norm::Moments>)> {
        let (device, shape) = (x.device(), convolution.output_shape());
        let extent = convolution.output_extent(shape[0]);
        let wanted = !matches!(self.norm.statistics, Statistics::Constant { .. });
        let mut stats = wanted.then(|| StatsInParts::new(&extent)).transpose()?;
        let y = Tensor::build(device, &shape, x.format(), |y: &mut [T]| {
            let (image, mut scratch) = (convolution.output_image(), None);
            for images in convolution.tiles() {
                let y = &mut y[images.start * image..images.end * image];
                let x = x.images(images.clone(), &mut scratch)?;
                convolution.forward_tile(images.len(), x, weight, bias, y)?;
                if let Some(stats) = &mut stats {
                    stats.add(device.compute(), y)?;
                }
            }
            Ok(())
        })?;
        Ok((y, stats.map(StatsInParts::finish).transpose()?))
    }

    /// The block's output from the convolution's, in the same buffer if possible.
    fn finish<T: Element>(
        &self,
        mut y: Tensor,
        epilogue: &Epilogue,
        mut taken: Option<&mut Buffer<u8>>,
    ) -> Result<Tensor> {
        let all = epilogue.convolution.tiles();
        let image = epilogue.convolution.output_image();
        if epilogue.pool.is_none()
            && let Some(y) = y.unshared::<T>()
        {
            for images in all {
                epilogue.run_in_place(images.clone(), &mut y[images.start * image..images.end * image])?;
            }
        } else {
            let (shape, out_image) = (epilogue.output_shape()?, epilogue.output_image()?);
            let values = y.data::<T>()?;
            let output = Tensor::build(y.device(), &shape, y.format(), |out: &mut [T]| {
                if epilogue.is_one_pass() {
                    return epilogue.run(0..y.shape()[0], values, out, None);
                }
                for images in all {
                    let place = images.start * out_image..images.end * out_image;
                    let taken = taken.as_mut().map(|taken| &mut taken[place.clone()]);
                    let y = &values[images.start * image..images.end * image];
                    epilogue.run(images, y, &mut out[place], taken)?;
                }
                Ok(())
            })?;
            return Ok(output);
        }
        Ok(y)
    }

    /// The requested [`Keep`], or the nearest one that is possible here. On a dry device values are meaningless, so they are not
    /// checked.
    fn possible_keep<T: Element>(&self, normalizer: &Normalizer, dry: bool) -> Result<Keep> {
        Ok(match self.keep {
            Keep::Invert
                if self.pool.is_some()
                    || self.has[3]
                    || self.norm.activation == Activation::Relu
                    || !(dry || normalizer.by::<T>()?.is_invertible()) =>
            {
                Keep::RecomputeInTiles
            }
            Keep::Compact if T::DTYPE != DType::F32 => Keep::Store,
            keep => keep,
        })
    }

    fn check_residual(&self, convolution: &Convolution, residual: &Tensor) -> Result<Tensor> {
        let shape = convolution.output_shape();
        if residual.shape() != shape {
            let found = residual.shape();
            let reason = format!("the residual has shape {found:?}, the convolution gives {shape:?}");
            return Err(invalid(NAME, reason));
        }
        residual.in_format(convolution.problem().format)
    }

    fn check_pool(&self, residual: bool) -> Result<()> {
        let Some(pool) = &self.pool else { return Ok(()) };
        if residual {
            return Err(invalid(NAME, "a block has a residual or a pool, not both"));
        }
        match ConvBnBlock::can_pool(pool) {
            true => Ok(()),
            false => {
                Err(invalid(NAME, format!("a pool of {:?}: at most 256 elements a window", pool.kernel)))
            }
        }
    }
}

/// y - mean, rounded to bf16. Thanks to the subtraction, rounding errors do not grow with the mean.
fn compact(y: &Tensor, epilogue: &Epilogue) -> Result<Tensor> {
    let (convolution, device) = (&epilogue.convolution, epilogue.convolution.device());
    let centering = epilogue.normalizer.centering();
    let (y, by) = (y.data::<f32>()?, centering.by::<f32>()?);
    let (image, shape) = (convolution.output_image(), convolution.output_shape());
    Tensor::build(device, &shape, convolution.problem().format, |out: &mut [bf16]| {
        let mut scratch = None;
        for images in convolution.tiles() {
            let place = images.start * image..images.end * image;
            let centered = at_least(&mut scratch, device, place.len())?;
            let extent = convolution.output_extent(images.len());
            normalize(device.compute(), &extent, &y[place.clone()], &by, centered)?;
            convert::convert(device.compute(), centered, &mut out[place])?;
        }
        Ok(())
    })
}
