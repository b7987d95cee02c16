//! Batch normalization, with batch statistics or with constant ones, and an optional activation in the same pass.

use std::ops::Range;
use std::sync::Arc;

use convoke_kernels::activation::Activation;
use convoke_kernels::batch_norm::{self as kernel, BackwardSums, Moments, Normalization, Normalizer};
use convoke_kernels::memory_format::Extent;
use convoke_kernels::{DType, Recomputed, SliceMut};

use super::{check_parameters, check_vector, elements};
use crate::storage::Recipe;
use crate::{Function, Needs, Operation, Result, Tensor, apply_with_saved};

pub use convoke_kernels::batch_norm::{BatchNormOptions, Statistics, Synchronize};

/// The options of a [`batch_norm_block`].
#[derive(Debug, Clone, Default)]
pub struct BatchNormBlock {
    /// The batch norm.
    pub norm: BatchNormOptions,
    /// Applied to the result in the same pass over memory.
    pub activation: Activation,
    /// Whether an operation that saves the output does not hold its elements: they are computed again from x where they are
    /// read.
    pub recomputed: bool,
}

/// (x - mean) / sqrt(variance + eps) * weight + bias for each channel of an N x C x ... tensor.
///
/// Also returns the batch's moments if they were computed, for the caller's running statistics. Saves x and two
/// numbers per channel.
///
/// If x is f16 or bf16, the output has the same type. Weight, bias, their gradients and the arithmetic are then f32, and the
/// statistics are those of the stored values.
///
/// # Errors
/// If weight, bias or statistics do not have one number per channel; if training gets only one value per channel; if eps is
/// negative or not a number.
pub fn batch_norm(
    x: &Tensor,
    weight: Option<&Tensor>,
    bias: Option<&Tensor>,
    options: &BatchNormOptions,
) -> Result<(Tensor, Option<Moments>)> {
    let block = BatchNormBlock { norm: options.clone(), ..BatchNormBlock::default() };
    batch_norm_block(x, weight, bias, &block)
}

/// As [`batch_norm`], with an activation behind it: what its gradient needs is recomputed from x.
///
/// # Errors
/// As [`batch_norm`]; an activation whose parameters make no sense.
pub fn batch_norm_block(
    x: &Tensor,
    weight: Option<&Tensor>,
    bias: Option<&Tensor>,
    block: &BatchNormBlock,
) -> Result<(Tensor, Option<Moments>)> {
    let has = [weight, bias].map(|operand| operand.is_some());
    let function = BatchNorm { block: block.clone(), weight: has[0], bias: has[1] };
    let inputs: Vec<&Tensor> = [Some(x), weight, bias].into_iter().flatten().collect();
    apply_with_saved(function, &inputs, |saved| saved.layer.normalizer.moments().cloned())
}

const NAME: &str = "batch_norm";

struct BatchNorm {
    block: BatchNormBlock,
    weight: bool,
    bias: bool,
}

#[derive(Clone)]
struct SavedBatchNorm {
    x: Tensor,
    layer: Layer,
}

impl Function for BatchNorm {
    type Saved = SavedBatchNorm;

    fn name(&self) -> &'static str {
        NAME
    }

    fn describe(&self) -> Option<Operation> {
        let BatchNormBlock { norm, activation, .. } = self.block.clone();
        Some(Operation::BatchNorm { norm, activation, has: [self.weight, self.bias] })
    }

    fn takes(&self, input: usize, dtype: DType) -> bool {
        input == 0 || dtype.computes()
    }

    fn forward(&self, inputs: &[&Tensor], needs: &Needs) -> Result<(Tensor, SavedBatchNorm)> {
        let x = inputs[0];
        let weight = self.weight.then(|| inputs[1]);
        let bias = self.bias.then(|| inputs[1 + usize::from(self.weight)]);
        let (y, layer) = Layer::forward(&self.block, x, weight, bias)?;
        let y = match self.block.recomputed && needs.any() {
            true => y.with_recipe(Arc::new(OutputRecipe { x: x.constant(), layer: layer.clone() })),
            false => y,
        };
        Ok((y, SavedBatchNorm { x: x.constant(), layer }))
    }

    fn backward(
        &self,
        SavedBatchNorm { x, layer }: SavedBatchNorm,
        upstream: Tensor,
        needs: &Needs,
    ) -> Result<Vec<Option<Tensor>>> {
        let wanted = [self.weight && needs.input(1), self.bias && needs.input(1 + usize::from(self.weight))];
        let (dx, sums) = layer.gradients(&x, &upstream, needs.input(0), wanted)?;
        let [weight, bias] = layer.parameter_gradients(sums.as_ref(), wanted)?;
        let mut gradients = vec![dx];
        gradients.extend(self.weight.then_some(weight));
        gradients.extend(self.bias.then_some(bias));
        Ok(gradients)
    }
}

/// Computes the output again from x.
struct OutputRecipe {
    x: Tensor,
    layer: Layer,
}

impl Recipe for OutputRecipe {
    fn images(&self) -> usize {
        self.x.shape()[0]
    }

    fn write(&self, images: Range<usize>, out: SliceMut<'_>) -> Result<()> {
        let (device, extent) = (self.x.device(), self.x.extent(NAME)?);
        let extent = Extent { batch: images.len(), ..extent };
        let bytes = 2 * (out.len() * out.dtype().size()) as u64;
        device.count_recomputed(Recomputed { flops: 0, bytes });
        let mut scratch = None;
        let x = self.x.images(images, &mut scratch)?;
        Ok(kernel::normalize(device.compute(), &extent, x, &self.layer.by()?, out)?)
    }

    fn prepare(&self) -> Result<bool> {
        Ok(!self.x.has_elements())
    }
}

/// The statistics and parameters of one normalisation, and the activation behind it.
#[derive(Clone)]
struct Layer {
    normalizer: Normalizer,
    activation: Activation,
    weight: Option<Tensor>,
    bias: Option<Tensor>,
}

impl Layer {
    fn of(
        (normalizer, activation): (Normalizer, Activation),
        weight: Option<&Tensor>,
        bias: Option<&Tensor>,
    ) -> Layer {
        Layer { normalizer, activation, weight: weight.map(Tensor::detach), bias: bias.map(Tensor::detach) }
    }

    /// Computes the statistics of `x`, or uses the given ones.
    fn new(
        BatchNormBlock { norm: options, activation, .. }: &BatchNormBlock,
        x: &Tensor,
        weight: Option<&Tensor>,
        bias: Option<&Tensor>,
    ) -> Result<Layer> {
        let extent = check(options, x, weight, bias)?;
        let moments = match &options.statistics {
            Statistics::Constant { .. } => None,
            _ => Some(kernel::stats(x.device().compute(), &extent, x.elements()?)?),
        };
        let normalizer = Normalizer::new(NAME, options, x.shape(), moments)?;
        Ok(Layer::of((normalizer, *activation), weight, bias))
    }

    /// [`Layer::new`], and the output.
    fn forward(
        block: &BatchNormBlock,
        x: &Tensor,
        weight: Option<&Tensor>,
        bias: Option<&Tensor>,
    ) -> Result<(Tensor, Layer)> {
        let BatchNormBlock { norm: options, activation, .. } = block;
        let cpu = x.device().compute();
        if !matches!(options.statistics, Statistics::Batch) {
            let layer = Layer::new(block, x, weight, bias)?;
            let extent = x.extent(NAME)?;
            let y =
                x.elements_like(|y| Ok(kernel::normalize(cpu, &extent, x.elements()?, &layer.by()?, y)?))?;
            return Ok((y, layer));
        }
        let extent = check(options, x, weight, bias)?;
        let mut statistics = None;
        let affine = kernel::Affine {
            weight: elements(weight)?,
            bias: elements(bias)?,
            eps: options.eps,
            eps_place: options.eps_place,
            activation: *activation,
        };
        let y = x.elements_like(|y| {
            statistics = Some(kernel::forward_training(cpu, &extent, x.elements()?, &affine, y)?);
            Ok(())
        })?;
        let (moments, inverse_std) = statistics.expect("set by what built y");
        let normalizer = Normalizer::of_batch(options, moments, inverse_std);
        Ok((y, Layer::of((normalizer, *activation), weight, bias)))
    }

    /// The normalisation in the form that kernels take.
    fn by(&self) -> Result<Normalization<'_>> {
        let by = self.normalizer.with(elements(self.weight.as_ref())?, elements(self.bias.as_ref())?);
        Ok(Normalization { activation: self.activation, ..by })
    }

    /// The gradient of x, if `for_x`, and the sums for the gradients of weight and bias that are `wanted`.
    fn gradients(
        &self,
        x: &Tensor,
        dy: &Tensor,
        for_x: bool,
        wanted: [bool; 2],
    ) -> Result<(Option<Tensor>, Option<BackwardSums>)> {
        let extent = x.extent("batch_norm backward")?;
        let cpu = x.device().compute();
        let (pair, by) = ((x.elements()?, dy.elements()?), self.by()?);
        if for_x && self.normalizer.moments().is_some() && !self.normalizer.is_synchronized() {
            let mut sums = None;
            let dx = x.elements_like(|dx| {
                sums = Some(kernel::backward_training(cpu, &extent, pair, &by, dx)?);
                Ok(())
            })?;
            return Ok((Some(dx), sums));
        }
        let sums = self.backward_sums(x, dy, for_x, wanted)?;
        let through = self.normalizer.through(sums.as_ref().filter(|_| for_x))?;
        let through = through.as_ref().map(|(sums, count)| (sums, *count));
        let gradient = |dx: SliceMut<'_>| Ok(kernel::backward_elemt(cpu, &extent, pair, &by, through, dx)?);
        Ok((for_x.then(|| x.elements_like(gradient)).transpose()?, sums))
    }

    /// The sums that the gradient of x (if `for_x`) and the `wanted` gradients of weight and bias need, if they need any.
    fn backward_sums(
        &self,
        x: &Tensor,
        dy: &Tensor,
        for_x: bool,
        wanted: [bool; 2],
    ) -> Result<Option<BackwardSums>> {
        if !self.normalizer.needs_sums(for_x, wanted) {
            return Ok(None);
        }
        let extent = x.extent("batch_norm backward")?;
        let cpu = x.device().compute();
        Ok(Some(kernel::backward_reduce(cpu, &extent, x.elements()?, dy.elements()?, &self.by()?)?))
    }

    /// The gradients of weight and bias that are `wanted`.
    fn parameter_gradients(
        &self,
        sums: Option<&BackwardSums>,
        [for_weight, for_bias]: [bool; 2],
    ) -> Result<[Option<Tensor>; 2]> {
        let Some(sums) = sums else { return Ok([None, None]) };
        let of = |parameter: &Tensor, weight: bool| {
            parameter.elements_like(|gradient| {
                match weight {
                    true => self.normalizer.gradient_of_weight(sums, gradient),
                    false => self.normalizer.gradient_of_bias(sums, gradient),
                }
                Ok(())
            })
        };
        Ok([
            self.weight.as_ref().filter(|_| for_weight).map(|weight| of(weight, true)).transpose()?,
            self.bias.as_ref().filter(|_| for_bias).map(|bias| of(bias, false)).transpose()?,
        ])
    }
}

/// Checks that everything fits `x`, and returns its extent.
fn check(
    options: &BatchNormOptions,
    x: &Tensor,
    weight: Option<&Tensor>,
    bias: Option<&Tensor>,
) -> Result<Extent> {
    let extent = x.extent(NAME)?;
    kernel::check_eps(NAME, options.eps)?;
    check_parameters(NAME, x, &[weight, bias])?;
    check_vector(NAME, "the weight", weight, extent.channels)?;
    check_vector(NAME, "the bias", bias, extent.channels)?;
    options.check(NAME, x.shape())?;
    Ok(extent)
}
