//! Backward of the block: dy exists only one tile at a time.

use std::ops::Range;
use std::sync::Arc;

use super::recompute::{Kept, OutputTiles};
use super::{Block, BlockProblem, NAME, Parameters, Saved, lanes};
use crate::batch_norm::{
    BackwardSums, BackwardSumsInParts, Normalizer, backward_elemt, backward_elemt_in_place,
};
use crate::conv::{BiasGradient, Gradient, InputGradient, TiledConv, WeightGradient};
use crate::error::{check_len, invalid};
use crate::images::Images;
use crate::memory::{Bytes, at_least};
use crate::pointwise::{Pointwise, pointwise_backward_in_place};
use crate::pool::{MaxPoolAlgorithm, MaxPoolPass, PoolProblem, WindowIndices};
use crate::{Buffer, Result, Slice, SliceMut};

/// What backward reads. It owns what it can free, or overwrite, on the way.
pub struct Backward<'a, H> {
    /// What forward kept.
    pub saved: Saved,
    /// The input of forward. If it can be overwritten, its gradient takes its place.
    pub x: H,
    /// The parameters of forward.
    pub parameters: Parameters<'a>,
    /// The gradient of z.
    pub dz: H,
    /// z, where [`Saved::needs_output`] says so.
    pub z: Option<H>,
    /// A gradient of x so far, to which this block's is added.
    pub sum: Option<H>,
}

/// Which gradients backward computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Wanted {
    /// The gradient of the input.
    pub x: bool,
    /// The gradient of the convolution's weight.
    pub weight: bool,
    /// The gradient of the convolution's bias.
    pub bias: bool,
    /// The gradient of batch norm's weight.
    pub gamma: bool,
    /// The gradient of batch norm's bias.
    pub beta: bool,
    /// The gradient of the residual.
    pub residual: bool,
}

impl Wanted {
    /// Whether gradients go through batch norm to the convolution.
    fn through_norm(&self) -> bool {
        self.x || self.weight || self.bias
    }
}

/// A block whose backward ran: see [`crate::Device::start_block_runs`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BlockRun {
    /// What it computes.
    pub problem: BlockProblem,
    /// The gradients that were computed.
    pub wanted: Wanted,
    /// The address of its weight, which tells whose block it is.
    pub weight: usize,
}

/// The gradients that were wanted.
#[derive(Debug)]
pub struct Gradients<H> {
    /// The gradient of the input.
    pub x: Option<Gradient<H>>,
    /// The gradient of the convolution's weight.
    pub weight: Option<Buffer>,
    /// The gradient of the convolution's bias.
    pub bias: Option<Buffer>,
    /// The gradient of batch norm's weight.
    pub gamma: Option<Buffer>,
    /// The gradient of batch norm's bias.
    pub beta: Option<Buffer>,
    /// The gradient of the residual.
    pub residual: Option<H>,
}

impl Block {
    /// The gradients of a [`Block::forward`] that saved.
    ///
    /// # Errors
    /// If a length does not fit, z is missing, there is no memory, or ranks cannot communicate.
    pub fn backward<H: Images + Clone>(
        &self,
        inputs: Backward<'_, H>,
        wanted: &Wanted,
    ) -> Result<Gradients<H>> {
        let Backward { saved, mut x, parameters, mut dz, z, mut sum } = inputs;
        let z = z.map(|z| -> Box<dyn Images + '_> { Box::new(z) });
        let begun = self.begin_backward((saved, parameters), (&mut x, &mut dz, z), wanted)?;
        let residual = wanted.residual.then(|| dz.clone());
        let of_x = sum.as_mut().map(|sum| -> &mut dyn Images { sum });
        let gradients = self.finish_backward(begun, (&mut x, Box::new(dz), of_x), wanted)?;
        Ok(Gradients {
            x: gradients.x.map(|gradient| gradient.given(|| sum.unwrap_or(x))),
            weight: gradients.weight,
            bias: gradients.bias,
            gamma: gradients.gamma,
            beta: gradients.beta,
            residual,
        })
    }

    /// Takes dz through the activation, and adds up the sums of batch norm.
    fn begin_backward<'a>(
        &'a self,
        (saved, parameters): (Saved, Parameters<'a>),
        (x, dz, z): (&mut dyn Images, &mut dyn Images, Option<Box<dyn Images + '_>>),
        wanted: &Wanted,
    ) -> Result<Begun<'a>> {
        self.check(&parameters, None)?;
        let weight = parameters.weight.address();
        self.device().record_block(BlockRun { problem: self.problem, wanted: *wanted, weight });
        if saved.needs_output() && z.is_none() {
            return Err(invalid(NAME, "backward needs the block's output"));
        }
        let Saved { kept, normalizer, masked, taken, .. } = saved;
        let of_parameters = [wanted.gamma, wanted.beta];
        let needs_sums = normalizer.needs_sums(wanted.through_norm(), of_parameters);
        let behind = z.filter(|_| masked).zip(self.problem.activation.pointwise());
        let pooled = Pooled { block: self, taken };
        let mut upstream = Upstream { block: self, dz, behind };
        // Take dz through the activation now, so that z is freed before y is recomputed.
        if !(needs_sums && matches!(kept, Kept::Stored(_))) {
            self.convolution.tiles().try_for_each(|images| upstream.pass(images))?;
            upstream.behind = None;
        }

        let kept = match kept {
            Kept::Whole(whole) => Kept::Stored(whole.take(self, (x, parameters.filter()))?),
            kept => kept,
        };
        let y = OutputTiles { kept, convolution: &self.convolution, parameters };
        let sums = match needs_sums {
            true if self.convolution.is_in_lanes() => {
                Some(lanes::sums(&normalizer, x, &y, (upstream, &pooled))?)
            }
            true => Some(sums(&normalizer, x, &y, (upstream, &pooled))?),
            false => None,
        };
        Ok(Begun { y, normalizer, sums, pooled })
    }

    /// Computes the gradients.
    fn finish_backward(
        &self,
        begun: Begun<'_>,
        (x, dz, sum): (&mut dyn Images, Box<dyn Images + '_>, Option<&mut dyn Images>),
        wanted: &Wanted,
    ) -> Result<Gradients<()>> {
        let Begun { y, normalizer, sums, pooled } = begun;
        let x = Input::new(&self.convolution, x)?;
        let of_channels = |wanted: bool, fill: &dyn Fn(&BackwardSums, SliceMut<'_>)| -> Result<_> {
            let Some(sums) = sums.as_ref().filter(|_| wanted) else { return Ok(None) };
            let convolution = &self.problem.convolution;
            let mut gradient = self.device().buffer(convolution.types.weight, convolution.out_channels)?;
            fill(sums, gradient.elements_mut());
            Ok(Some(gradient))
        };
        let gamma = of_channels(wanted.gamma, &|sums, out| normalizer.gradient_of_weight(sums, out))?;
        let beta = of_channels(wanted.beta, &|sums, out| normalizer.gradient_of_bias(sums, out))?;
        let mut gradients = Gradients { x: None, weight: None, bias: None, gamma, beta, residual: None };
        if wanted.through_norm() {
            let through = normalizer.through(sums.as_ref())?;
            let of_norm = OfNorm { normalizer: &normalizer, through };
            let to = (wanted, &mut gradients);
            match self.convolution.is_in_lanes() {
                true => self.gradients_in_lanes(&of_norm, (x, sum), (&y, &*dz, &pooled), to)?,
                false => self.gradients_of_convolution(&of_norm, (x, sum), (y, dz, pooled), to)?,
            }
        }
        Ok(gradients)
    }

    /// Computes dy tile by tile, and adds each tile's part to the convolution's gradients.
    fn gradients_of_convolution(
        &self,
        of_norm: &OfNorm<'_>,
        (mut x, sum): (Input<'_>, Option<&mut dyn Images>),
        (mut y, dz, pooled): (OutputTiles<'_>, Box<dyn Images + '_>, Pooled<'_>),
        (wanted, gradients): (&Wanted, &mut Gradients<()>),
    ) -> Result<()> {
        let (convolution, parameters) = (&self.convolution, y.parameters);
        let device = convolution.device();
        let through = of_norm.through.as_ref().map(|(sums, count)| (sums, *count));
        let by = self.normalization(of_norm.normalizer, [parameters.gamma, parameters.beta]);
        let mut of_weight = wanted.weight.then(|| WeightGradient::new(convolution)).transpose()?;
        let mut of_bias = wanted.bias.then(|| BiasGradient::new(convolution)).transpose()?;
        let elsewhere = sum.is_some() || !x.can_be_overwritten();
        let mut of_x = (wanted.x && elsewhere).then(|| InputGradient::new(sum));
        let image = convolution.input_image();
        let all = 0..convolution.output_shape()[0];
        let (mut scratch, mut x_scratch, mut y_scratch) = (None, None, None);
        let mut upstream = Some((dz, pooled));
        for images in convolution.tiles() {
            let (count, extent) = (images.len(), convolution.output_extent(images.len()));
            let (of_z, pooled) = upstream.take().expect("it goes with the last tile");
            let (mut dz_scratch, mut pooled_scratch) = (None, None);
            let dz = of_z.read(images.clone(), &mut dz_scratch)?;
            let dz = pooled.backward(&images, dz, &mut pooled_scratch)?;
            // If the batch is a single tile, dy can overwrite the kept y.
            let in_place = images == all && y.unshared().is_some();
            let dy = if in_place && let Some(mut y) = y.unshared() {
                let cpu = device.compute();
                backward_elemt_in_place(cpu, &extent, dz, &by, through, y.reborrow())?;
                y
            } else {
                let mut dy = at_least(&mut scratch, device, dz.dtype(), extent.len()?)?;
                let memory = [&mut y_scratch, &mut None];
                let value = y.get(images.clone(), || x.x.read(images.clone(), &mut x_scratch), memory)?;
                backward_elemt(device.compute(), &extent, (value, dz), &by, through, dy.reborrow())?;
                dy
            };
            let dy = dy.into_slice();
            // Free what dy was computed from before the convolutions allocate their workspaces.
            drop((dz_scratch, pooled_scratch));
            upstream = Some((of_z, pooled)).filter(|_| images.end < all.end);
            if let Some(sum) = &mut of_bias {
                sum.add(convolution, count, dy)?;
            }
            if let Some(sum) = &mut of_weight {
                sum.add(convolution, count, x.x.read(images.clone(), &mut x_scratch)?, dy)?;
            }
            x_scratch = None;
            match &mut of_x {
                Some(gradient) => gradient.add(convolution, images, dy, parameters.weight)?,
                None if wanted.x => {
                    let place = images.start * image..images.end * image;
                    convolution.input_gradient_tile(count, dy, parameters.weight, x.all().part(place))?;
                }
                None => {}
            }
        }
        gradients.x = match of_x {
            Some(gradient) => Some(gradient.finish(convolution)?),
            None => wanted.x.then_some(Gradient::Given(())),
        };
        gradients.weight = of_weight.map(WeightGradient::finish);
        gradients.bias = of_bias.map(BiasGradient::finish);
        Ok(())
    }
}

/// The normalisation that dz goes through, with the sums if gradients flow through the statistics.
pub(super) struct OfNorm<'a> {
    pub(super) normalizer: &'a Normalizer,
    pub(super) through: Option<(BackwardSums, usize)>,
}

/// What the first half of backward hands to the second.
struct Begun<'a> {
    y: OutputTiles<'a>,
    normalizer: Normalizer,
    /// The sums of batch norm, if its gradients need them.
    sums: Option<BackwardSums>,
    pooled: Pooled<'a>,
}

/// The sums over the batch that batch norm's gradients need.
fn sums(
    normalizer: &Normalizer,
    x: &dyn Images,
    y: &OutputTiles<'_>,
    (mut upstream, pooled): (Upstream<'_>, &Pooled<'_>),
) -> Result<BackwardSums> {
    let (convolution, parameters) = (y.convolution, y.parameters);
    let [images, ..] = convolution.output_shape();
    let mut sums = BackwardSumsInParts::new(&convolution.output_extent(images))?;
    let by = upstream.block.normalization(normalizer, [parameters.gamma, parameters.beta]);
    let (mut x_scratch, mut y_scratch, mut pooled_scratch) = (None, None, None);
    for images in convolution.tiles() {
        let memory = [&mut y_scratch, &mut None];
        let y = y.get(images.clone(), || x.read(images.clone(), &mut x_scratch), memory)?;
        upstream.pass(images.clone())?;
        let mut dz_scratch = None;
        let dz = upstream.dz.read(images.clone(), &mut dz_scratch)?;
        let dz = pooled.backward(&images, dz, &mut pooled_scratch)?;
        sums.add(convolution.device().compute(), y, dz, &by)?;
    }
    sums.finish()
}

/// x. If it has no other owner, dx overwrites it, tile by tile.
pub(super) struct Input<'a> {
    pub(super) x: &'a mut dyn Images,
    mine: bool,
}

impl<'a> Input<'a> {
    fn new(of: &TiledConv, x: &'a mut dyn Images) -> Result<Input<'a>> {
        let mine = match x.overwrite() {
            Some(x) => {
                check_len(NAME, "x", x.len(), of.input_shape().iter().product())?;
                true
            }
            None => false,
        };
        Ok(Input { x, mine })
    }

    pub(super) fn can_be_overwritten(&self) -> bool {
        self.mine
    }

    /// All of it, to be overwritten.
    pub(super) fn all(&mut self) -> SliceMut<'_> {
        self.x.overwrite().expect("it was, and nobody could begin to share it")
    }
}

/// dz, and what it goes through on its way to the gradient of the activation's output.
pub(super) struct Upstream<'a> {
    pub(super) block: &'a Block,
    pub(super) dz: &'a mut dyn Images,
    /// z and the activation that dz must still go through; z tells where the activation passed its input. `None` once
    /// that is done, or if the normalisation includes the activation.
    pub(super) behind: Option<(Box<dyn Images + 'a>, Pointwise)>,
}

impl Upstream<'_> {
    /// Takes some images of dz through that activation, in the buffer of dz if it has no other owner.
    fn pass(&mut self, images: Range<usize>) -> Result<()> {
        let Some((z, activation)) = &self.behind else { return Ok(()) };
        let block = self.block;
        let (cpu, place) = (block.device().compute(), block.output_place(&images));
        let mut scratch = None;
        let z = z.read(images, &mut scratch)?;
        let dz = self.dz.change()?;
        check_len(NAME, "dz", dz.len(), block.output_shape().iter().product())?;
        pointwise_backward_in_place(cpu, *activation, z, dz.part(place))
    }
}

/// The pool of a block, if it has one.
pub(super) struct Pooled<'a> {
    pub(super) block: &'a Block,
    /// The index of each window's largest element.
    pub(super) taken: Option<Arc<Bytes>>,
}

impl Pooled<'_> {
    /// The pool of some images, and the algorithm for its backward.
    pub(super) fn algorithm(&self, images: usize) -> Option<(PoolProblem, MaxPoolAlgorithm)> {
        let pool = self.block.problem.pool.as_ref()?.with_batch(images);
        let convolution = &self.block.convolution;
        let (tuner, dtype) = (convolution.device().tuner(), convolution.output_type());
        Some((pool, tuner.max_pool(&pool, dtype, MaxPoolPass::Backward, &convolution.cpu())))
    }

    /// Chooses the algorithm for these numbers of images, as a lane cannot measure. Returns whether there is a pool.
    pub(super) fn prepare(&self, images: impl Iterator<Item = usize>) -> bool {
        images.filter_map(|images| self.algorithm(images)).count() > 0
    }

    /// The gradient of some images of what is pooled, from that of z; `scratch` keeps its memory for the next call.
    pub(super) fn backward<'a>(
        &self,
        images: &Range<usize>,
        dz: Slice<'a>,
        scratch: &'a mut Option<Buffer>,
    ) -> Result<Slice<'a>> {
        let Some((taken, (pool, algorithm))) = self.taken.as_ref().zip(self.algorithm(images.len())) else {
            return Ok(dz);
        };
        let mut out = at_least(scratch, self.block.device(), dz.dtype(), pool.input_extent().len()?)?;
        let taken = WindowIndices::Bytes(&taken.elements()[self.block.output_place(images)]);
        algorithm.backward(&self.block.convolution.cpu(), &pool, dz, taken, out.reborrow())?;
        Ok(out.into_slice())
    }
}
