//! Backward of the block: the gradient of the convolution's output exists only one tile at a time.

use std::ops::Range;
use std::sync::Arc;

use convoke_kernels::Element;
use convoke_kernels::activation::activation_backward_in_place;
use convoke_kernels::batch_norm::{
    Activation, BackwardSums, BackwardSumsInParts, backward_elemt, backward_elemt_in_place,
};
use convoke_kernels::pool::MaxPoolPass;

use super::super::batch_norm::Normalizer;
use super::super::conv2d::{BiasGradient, InputGradient, WeightGradient};
use super::again::{Convolved, Kept, Tiles};
use super::epilogue::Epilogue;
use super::{ConvBn, Saved};
use crate::pool::at_least;
use crate::{Buffer, Needs, Result, Tensor};

impl ConvBn {
    pub(super) fn run_backward<T: Element>(
        &self,
        saved: Saved,
        upstream: Tensor,
        needs: &Needs,
        sum: Option<Tensor>,
    ) -> Result<Vec<Option<Tensor>>> {
        let Saved { convolved, kept, epilogue, output, taken } = saved;
        let wants = |place: Option<usize>| place.is_some_and(|place| needs.input(place));
        let [for_bias, for_gamma, for_beta, for_residual] = self.places().map(wants);
        let (for_x, for_weight) = (needs.input(0), needs.input(1));
        let through_norm = for_x || for_weight || for_bias;

        let normalizer = &epilogue.normalizer;
        let wanted = [for_gamma, for_beta];
        let needs_sums = normalizer.needs_sums(through_norm, wanted);
        let behind = output.map(|output| (self.norm.activation, output));
        let mut dz = Upstream { upstream, epilogue: &epilogue, behind, taken, scratch: None };
        // Take the upstream gradient through the activation now, so that the block's output is freed before the convolution's is
        // recomputed.
        if !(needs_sums && matches!(kept, Kept::Stored(_))) {
            convolved.convolution.tiles().try_for_each(|images| dz.pass(images))?;
            dz.behind = None;
        }

        let kept = match kept {
            Kept::Whole => Kept::Stored(convolved.take_output()?),
            kept => kept,
        };
        let (convolution, x, weight, bias) = Convolved::into_parts(convolved);
        let mut y =
            Tiles { kept, convolution: &convolution, weight: &weight, bias: bias.as_ref(), scratch: None };
        let mut x = Input::<T>::new(x);
        let sums = needs_sums.then(|| sums(normalizer, &mut x, &mut y, &mut dz)).transpose()?;
        let residual_gradient = for_residual.then(|| dz.upstream.clone());
        let [gamma, beta] = normalizer.parameter_gradients(sums.as_ref(), wanted)?;
        let mut gradients = Gradients { x: None, weight: None, bias: None };
        if through_norm {
            let through = normalizer.through(sums.as_ref())?;
            let wanted = [for_x, for_weight, for_bias];
            gradients = gradients_of_convolution(normalizer, through, wanted, (x, sum), y, dz)?;
        }
        let optional = [gradients.bias, gamma, beta, residual_gradient];
        let optional =
            optional.into_iter().zip(self.has).filter(|(_, has)| *has).map(|(gradient, _)| gradient);
        Ok([gradients.x, gradients.weight].into_iter().chain(optional).collect())
    }
}

/// The sums over the batch that batch norm's gradients need.
fn sums<T: Element>(
    normalizer: &Normalizer,
    x: &mut Input<T>,
    y: &mut Tiles<'_, T>,
    dz: &mut Upstream<'_, T>,
) -> Result<BackwardSums> {
    let convolution = y.convolution;
    let [images, ..] = convolution.output_shape();
    let mut sums = BackwardSumsInParts::new(&convolution.output_extent(images))?;
    let by = normalizer.by::<T>()?;
    for images in convolution.tiles() {
        let y = y.get(images.clone(), || x.images(images.clone()))?;
        dz.pass(images.clone())?;
        sums.add(convolution.device().compute(), y, dz.get(images)?, &by)?;
    }
    dz.behind = None;
    Ok(sums.finish()?)
}

struct Gradients {
    x: Option<Tensor>,
    weight: Option<Tensor>,
    bias: Option<Tensor>,
}

/// Computes the gradient of the convolution's output tile by tile, and adds each tile's part to the convolution's gradients.
fn gradients_of_convolution<T: Element>(
    normalizer: &Normalizer,
    through: Option<(BackwardSums, usize)>,
    [for_x, for_weight, for_bias]: [bool; 3],
    (mut x, sum): (Input<T>, Option<Tensor>),
    mut y: Tiles<'_, T>,
    dz: Upstream<'_, T>,
) -> Result<Gradients> {
    let (convolution, weight) = (y.convolution, y.weight);
    let device = convolution.device();
    let through = through.as_ref().map(|(sums, count)| (sums, *count));
    let by = normalizer.by::<T>()?;
    let mut of_weight = for_weight.then(|| WeightGradient::<T>::new(convolution)).transpose()?;
    let mut of_bias = for_bias.then(|| BiasGradient::<T>::new(convolution)).transpose()?;
    let dx_elsewhere = sum.is_some() || !x.can_be_overwritten();
    let mut of_x = (for_x && dx_elsewhere).then(|| InputGradient::<T>::new(sum));
    let image = convolution.input_image();
    let all = 0..convolution.output_shape()[0];
    let (mut scratch, mut dz) = (None, Some(dz));
    for images in convolution.tiles() {
        let (count, extent) = (images.len(), convolution.output_extent(images.len()));
        let mut of_tile = dz.take().expect("it goes with the last tile");
        let upstream = of_tile.get(images.clone())?;
        // If the batch is a single tile, its gradient can overwrite the kept output.
        let in_place = images == all && y.unshared().is_some();
        let dy = if in_place && let Some(y) = y.unshared() {
            backward_elemt_in_place(device.compute(), &extent, upstream, &by, through, y)?;
            y
        } else {
            let dy = at_least(&mut scratch, device, extent.len()?)?;
            let value = y.get(images.clone(), || x.images(images.clone()))?;
            backward_elemt(device.compute(), &extent, (value, upstream), &by, through, dy)?;
            dy
        };
        // Free what dy was computed from before the convolutions allocate their workspaces.
        of_tile.scratch = None;
        dz = Some(of_tile).filter(|_| images.end < all.end);
        if let Some(sum) = &mut of_bias {
            sum.add(convolution, count, dy)?;
        }
        if let Some(sum) = &mut of_weight {
            sum.add(convolution, count, x.images(images.clone())?, dy)?;
        }
        x.scratch = None;
        match &mut of_x {
            Some(gradient) => gradient.add(convolution, images, dy, weight)?,
            None if for_x => {
                let place = images.start * image..images.end * image;
                convolution.input_gradient_tile(count, dy, weight, x.overwrite(place))?;
            }
            None => {}
        }
    }
    let x_gradient = match of_x {
        Some(gradient) => Some(gradient.finish(convolution)?),
        None => for_x.then_some(x.tensor),
    };
    Ok(Gradients {
        x: x_gradient,
        weight: of_weight.map(|sum| sum.finish(convolution)).transpose()?,
        bias: of_bias.map(|sum| sum.finish(convolution)).transpose()?,
    })
}

/// The convolution's input. If it has no other owner, its gradient overwrites it, tile by tile.
struct Input<T: Element> {
    tensor: Tensor,
    mine: bool,
    scratch: Option<Buffer<T>>,
}

impl<T: Element> Input<T> {
    fn new(mut tensor: Tensor) -> Input<T> {
        let mine = tensor.unshared::<T>().is_some();
        Input { tensor, mine, scratch: None }
    }

    fn images(&mut self, images: Range<usize>) -> Result<&[T]> {
        self.tensor.images(images, &mut self.scratch)
    }

    fn can_be_overwritten(&self) -> bool {
        self.mine
    }

    fn overwrite(&mut self, place: Range<usize>) -> &mut [T] {
        &mut self.tensor.unshared().expect("it was, and nobody could begin to share it")[place]
    }
}

/// The gradient of the activation's output: the upstream gradient, taken backwards through the pool if there is one.
struct Upstream<'a, T: Element> {
    upstream: Tensor,
    epilogue: &'a Epilogue,
    /// The activation that the upstream gradient must still go through, and the block's output, which tells where the activation
    /// passed its input. `None` once that is done, or if the normalisation includes the activation.
    behind: Option<(Activation, Tensor)>,
    taken: Option<Arc<Buffer<u8>>>,
    scratch: Option<Buffer<T>>,
}

impl<T: Element> Upstream<'_, T> {
    /// Takes some images of the upstream gradient through that activation, in the gradient's buffer if it has no other owner.
    fn pass(&mut self, images: Range<usize>) -> Result<()> {
        let Some((activation, output)) = &self.behind else { return Ok(()) };
        let image = self.epilogue.output_image()?;
        let place = images.start * image..images.end * image;
        let cpu = self.epilogue.convolution.device().compute();
        let mut scratch = None;
        let z = output.images::<T>(images, &mut scratch)?;
        self.upstream
            .update(|g: &mut [T]| Ok(activation_backward_in_place(cpu, *activation, z, &mut g[place])?))
    }

    fn get(&mut self, images: Range<usize>) -> Result<&[T]> {
        let image = self.epilogue.output_image()?;
        let place = images.start * image..images.end * image;
        let dy = &self.upstream.data::<T>()?[place.clone()];
        let Some((problem, taken)) = self.epilogue.pool_problem(images.len())?.zip(self.taken.as_ref())
        else {
            return Ok(dy);
        };
        let device = self.epilogue.convolution.device();
        let out = at_least(&mut self.scratch, device, problem.input_extent().len()?)?;
        let algorithm = device.max_pool_algorithm(&problem, T::DTYPE, MaxPoolPass::Backward);
        algorithm.backward(device.compute(), &problem, dy, &taken[place], out)?;
        Ok(out)
    }
}
