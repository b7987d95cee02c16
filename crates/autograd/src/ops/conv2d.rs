//! 2-D convolution.

use std::ops::Range;

use convoke_kernels::batch_norm::images_per_group;
use convoke_kernels::conv::{ConvAxis, ConvOperands, ConvPlan, ConvProblem, ConvSpec, Pass};
use convoke_kernels::elementwise;
use convoke_kernels::memory_format::Extent;

use super::{check_vector, four_dimensions, same_dtype};
use crate::error::invalid;
use crate::pool::at_least;
use crate::tensor::dispatch;
use crate::{Buffer, Device, Element, Function, MemoryFormat, Needs, Result, Tensor, apply};

/// Zeros around the input, with a width for each side.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Padding {
    /// Rows above.
    pub top: usize,
    /// Rows below.
    pub bottom: usize,
    /// Columns to the left.
    pub left: usize,
    /// Columns to the right.
    pub right: usize,
}

impl Padding {
    /// The same on all four sides.
    pub fn all(padding: usize) -> Padding {
        Padding::symmetric([padding, padding])
    }

    /// `[height, width]`: above and below, left and right.
    pub fn symmetric([height, width]: [usize; 2]) -> Padding {
        Padding { top: height, bottom: height, left: width, right: width }
    }
}

/// How a convolution steps over its input, height before width, as PyTorch's `conv2d` takes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConvOptions {
    /// Step between outputs.
    pub stride: [usize; 2],
    /// Zeros around the input.
    pub padding: Padding,
    /// Step between kernel elements.
    pub dilation: [usize; 2],
    /// Groups of channels that do not mix.
    pub groups: usize,
}

impl Default for ConvOptions {
    fn default() -> ConvOptions {
        ConvOptions { stride: [1, 1], padding: Padding::default(), dilation: [1, 1], groups: 1 }
    }
}

impl ConvOptions {
    /// The problem of convolving `x` with `weight`. If `x` has no images, it is that of one image, and nothing runs.
    pub(super) fn problem(
        &self,
        operation: &'static str,
        x: &Tensor,
        weight: &Tensor,
    ) -> Result<ConvProblem> {
        let [batch, in_channels, height, width] = four_dimensions(operation, "input", x)?;
        let [out_channels, group_channels, kernel_height, kernel_width] =
            four_dimensions(operation, "weight", weight)?;
        let context = || format!("input {:?}, weight {:?}", x.shape(), weight.shape());
        if group_channels.checked_mul(self.groups) != Some(in_channels) {
            let reason = format!(
                "the weight takes {group_channels} x {} groups = {} channels, the input has {in_channels} ({})",
                self.groups,
                group_channels.saturating_mul(self.groups),
                context()
            );
            return Err(invalid(operation, reason));
        }
        let spec = ConvSpec {
            batch: batch.max(1),
            in_channels,
            out_channels,
            groups: self.groups,
            height: ConvAxis {
                input: height,
                kernel: kernel_height,
                stride: self.stride[0],
                pad_before: self.padding.top,
                pad_after: self.padding.bottom,
                dilation: self.dilation[0],
            },
            width: ConvAxis {
                input: width,
                kernel: kernel_width,
                stride: self.stride[1],
                pad_before: self.padding.left,
                pad_after: self.padding.right,
                dilation: self.dilation[1],
            },
            dtype: x.dtype(),
            format: x.format(),
        };
        ConvProblem::new(spec).map_err(|error| match error {
            convoke_kernels::Error::Invalid { reason, .. } => {
                invalid(operation, format!("{reason} ({})", context()))
            }
            error => error.into(),
        })
    }
}

/// Convolves `x` (N x C x H x W) with `weight` (K x C/groups x R x S), plus `bias` (K), as PyTorch's `conv2d`.
///
/// The output has the memory format of `x`.
///
/// # Errors
/// If the shapes do not fit: the error names both.
pub fn conv2d(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>, options: &ConvOptions) -> Result<Tensor> {
    let inputs = [Some(x), Some(weight), bias];
    apply(Conv2d { options: *options }, &inputs.into_iter().flatten().collect::<Vec<_>>())
}

struct Conv2d {
    options: ConvOptions,
}

impl Function for Conv2d {
    type Saved = (Tensor, Tensor);

    fn name(&self) -> &'static str {
        "conv2d"
    }

    fn forward(&self, inputs: &[&Tensor], _: &Needs) -> Result<(Tensor, Self::Saved)> {
        let (x, weight, bias) = (inputs[0], inputs[1].in_format(MemoryFormat::Contiguous)?, inputs.get(2));
        let convolution = Convolution::new("conv2d", &self.options, x, &weight, bias.copied())?;
        let y = convolution.forward(x, &weight, bias.copied())?;
        Ok((y, (x.keep(), weight)))
    }

    fn backward(&self, saved: Self::Saved, upstream: Tensor, needs: &Needs) -> Result<Vec<Option<Tensor>>> {
        self.backward_onto(saved, upstream, needs, &mut [])
    }

    fn backward_onto(
        &self,
        (x, weight): Self::Saved,
        upstream: Tensor,
        needs: &Needs,
        sums: &mut [Option<Tensor>],
    ) -> Result<Vec<Option<Tensor>>> {
        let convolution = Convolution::new("conv2d", &self.options, &x, &weight, None)?;
        let bias = (needs.len() == 3)
            .then(|| needs.input(2).then(|| convolution.gradient_of_bias(&upstream)).transpose());
        let weight_gradient =
            needs.input(1).then(|| convolution.gradient_of_weight(&x, &upstream)).transpose()?;
        drop(x);
        let sum = sums.first_mut().and_then(Option::take);
        let gradient =
            needs.input(0).then(|| convolution.gradient_of_input(upstream, &weight, sum)).transpose()?;
        Ok([gradient, weight_gradient].into_iter().chain(bias.transpose()?).collect())
    }
}

/// A convolution that runs over its batch in tiles: runs of whole images that fit the caches.
///
/// The tiles depend on the shapes only, so sums are added in the same order however the convolution runs, whole or tile by tile.
#[derive(Clone)]
pub(super) struct Convolution {
    device: Device,
    problem: ConvProblem,
    /// Images per tile; the last one may have fewer.
    tile: usize,
    /// Whether there are no images: then nothing runs.
    empty: bool,
}

/// Bytes of input and output of a tile if the weight is small: they should stay in the caches of the threads.
const TILE_BYTES: usize = 4 << 20;
/// With a large weight, a tile has this many times the weight's bytes, because each tile packs the weight and adds to its
/// gradient. `LARGE_TILE_BYTES` bounds a tile, so that it does not cost much memory.
const TILE_WEIGHTS: usize = 56;
const LARGE_TILE_BYTES: usize = 32 << 20;
/// However large the weight is, a tile has at least this many times its bytes.
const LEAST_TILE_WEIGHTS: usize = 4;

impl Convolution {
    /// The convolution of `x` with a contiguous `weight`.
    pub(super) fn new(
        operation: &'static str,
        options: &ConvOptions,
        x: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
    ) -> Result<Convolution> {
        let operands: Vec<&Tensor> = [x, weight].into_iter().chain(bias).collect();
        same_dtype(operation, &operands)?;
        let problem = options.problem(operation, x, weight)?;
        check_vector(operation, "the bias", bias, problem.out_channels)?;
        Ok(Convolution {
            device: x.device().clone(),
            problem,
            tile: tile_images(&problem),
            empty: x.is_empty(),
        })
    }

    pub(super) fn device(&self) -> &Device {
        &self.device
    }

    pub(super) fn problem(&self) -> &ConvProblem {
        &self.problem
    }

    /// The tiles of the batch, in order; none if there are no images.
    pub(super) fn tiles(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        self.tiles_of(0..if self.empty { 0 } else { self.problem.batch })
    }

    /// Cuts some images into tiles.
    pub(super) fn tiles_of(&self, images: Range<usize>) -> impl Iterator<Item = Range<usize>> + use<> {
        let (end, tile) = (images.end, self.tile);
        images.step_by(tile).map(move |start| start..(start + tile).min(end))
    }

    /// N x K x OH x OW, where N may be 0.
    pub(super) fn output_shape(&self) -> [usize; 4] {
        let [batch, rest @ ..] = self.problem.output_shape();
        let batch = if self.empty { 0 } else { batch };
        [batch, rest[0], rest[1], rest[2]]
    }

    /// Elements of an image of the input.
    pub(super) fn input_image(&self) -> usize {
        self.problem.input_len() / self.problem.batch
    }

    /// Elements of an image of the output.
    pub(super) fn output_image(&self) -> usize {
        self.problem.output_len() / self.problem.batch
    }

    /// The extent of some images of the output: N x K x (OH OW).
    pub(super) fn output_extent(&self, images: usize) -> Extent {
        Extent { batch: images, ..self.problem.output_extent() }
    }

    fn plan(&self, pass: Pass, images: usize) -> Result<ConvPlan> {
        let part = self.problem.with(|spec| spec.batch = images)?;
        Ok(self.device.conv_plan(&part, pass))
    }

    fn run<T: Element>(&self, plan: &ConvPlan, operands: ConvOperands<'_, T>) -> Result<()> {
        let mut workspace = self.device.buffer::<T>(plan.workspace_len())?;
        Ok(plan.run(operands, &mut workspace)?)
    }

    /// y = conv(x, weight) + bias.
    pub(super) fn forward(&self, x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        let shape = self.output_shape();
        dispatch!(x.dtype(), T => Tensor::build(&self.device, &shape, x.format(), |y: &mut [T]| {
            let mut scratch = None;
            let image = self.output_image();
            for images in self.tiles() {
                let y = &mut y[images.start * image..images.end * image];
                self.forward_tile(images.len(), x.images(images, &mut scratch)?, weight, bias, y)?;
            }
            Ok(())
        }))
    }

    /// The same for some images.
    pub(super) fn forward_tile<T: Element>(
        &self,
        images: usize,
        x: &[T],
        weight: &Tensor,
        bias: Option<&Tensor>,
        y: &mut [T],
    ) -> Result<()> {
        let plan = self.plan(Pass::Forward, images)?;
        self.run(&plan, ConvOperands::forward(x, weight.data::<T>()?, y))?;
        if let Some(bias) = bias {
            elementwise::add_bias(self.device.compute(), &self.output_extent(images), bias.data::<T>()?, y)?;
        }
        Ok(())
    }

    pub(super) fn gradient_of_weight(&self, x: &Tensor, dy: &Tensor) -> Result<Tensor> {
        dispatch!(x.dtype(), T => {
            let mut sum = WeightGradient::<T>::new(self)?;
            let (mut x_scratch, mut dy_scratch) = (None, None);
            for images in self.tiles() {
                let dy = dy.images(images.clone(), &mut dy_scratch)?;
                sum.add(self, images.len(), x.images(images, &mut x_scratch)?, dy)?;
            }
            sum.finish(self)
        })
    }

    /// The gradient of x, added to `sum` if given; `dy` is freed on return.
    fn gradient_of_input(&self, dy: Tensor, weight: &Tensor, sum: Option<Tensor>) -> Result<Tensor> {
        dispatch!(dy.dtype(), T => {
            let (mut gradient, mut scratch) = (InputGradient::<T>::new(sum), None);
            for images in self.tiles() {
                let dy = dy.images(images.clone(), &mut scratch)?;
                gradient.add(self, images, dy, weight)?;
            }
            gradient.finish(self)
        })
    }

    /// N x C x H x W, where N may be 0.
    pub(super) fn input_shape(&self) -> [usize; 4] {
        let [batch, rest @ ..] = self.problem.input_shape();
        let batch = if self.empty { 0 } else { batch };
        [batch, rest[0], rest[1], rest[2]]
    }

    /// The gradient of some images of x.
    pub(super) fn input_gradient_tile<T: Element>(
        &self,
        images: usize,
        dy: &[T],
        weight: &Tensor,
        dx: &mut [T],
    ) -> Result<()> {
        let plan = self.plan(Pass::BackwardData, images)?;
        self.run(&plan, ConvOperands::backward_data(dy, weight.data::<T>()?, dx))
    }

    /// The sum of each channel of `dy`.
    pub(super) fn gradient_of_bias(&self, dy: &Tensor) -> Result<Tensor> {
        dispatch!(dy.dtype(), T => {
            let mut sum = BiasGradient::<T>::new(self)?;
            let mut scratch = None;
            for images in self.tiles() {
                sum.add(self, images.len(), dy.images(images, &mut scratch)?)?;
            }
            sum.finish(self)
        })
    }
}

/// The gradient of a convolution's input, computed tile by tile and, if there is an earlier sum, added to it.
pub(super) struct InputGradient<T: Element> {
    sum: Option<Tensor>,
    /// Allocated when it is first written, so that earlier work can use the memory.
    alone: Option<Buffer<T>>,
    scratch: Option<Buffer<T>>,
}

impl<T: Element> InputGradient<T> {
    /// Adds to `sum`, if given, which should have no other owner.
    pub(super) fn new(sum: Option<Tensor>) -> InputGradient<T> {
        InputGradient { sum, alone: None, scratch: None }
    }

    /// Computes or adds the part of these images.
    pub(super) fn add(
        &mut self,
        of: &Convolution,
        images: Range<usize>,
        dy: &[T],
        weight: &Tensor,
    ) -> Result<()> {
        let (count, image) = (images.len(), of.input_image());
        let place = images.start * image..images.end * image;
        let Some(sum) = &mut self.sum else {
            let all = at_least(&mut self.alone, &of.device, of.input_shape().iter().product())?;
            return of.input_gradient_tile(count, dy, weight, &mut all[place]);
        };
        let part = at_least(&mut self.scratch, &of.device, place.len())?;
        of.input_gradient_tile(count, dy, weight, part)?;
        let cpu = of.device.compute();
        sum.update(|sum: &mut [T]| Ok(elementwise::add_assign(cpu, part, &mut sum[place])?))
    }

    pub(super) fn finish(mut self, of: &Convolution) -> Result<Tensor> {
        if let Some(sum) = self.sum {
            return Ok(sum);
        }
        let shape = of.input_shape();
        // Without images it has not been allocated yet.
        at_least(&mut self.alone, &of.device, shape.iter().product())?;
        Tensor::of_buffer(&of.device, &shape, of.problem.format, self.alone.expect("taken above"))
    }
}

/// The gradient of a convolution's weight, added up tile by tile.
pub(super) struct WeightGradient<T: Element> {
    sum: Buffer<T>,
    /// Whether `sum` holds anything yet.
    begun: bool,
}

impl<T: Element> WeightGradient<T> {
    pub(super) fn new(of: &Convolution) -> Result<WeightGradient<T>> {
        Ok(WeightGradient { sum: of.device.buffer(of.problem.weight_len())?, begun: false })
    }

    /// Adds what `images` images give.
    pub(super) fn add(&mut self, of: &Convolution, images: usize, x: &[T], dy: &[T]) -> Result<()> {
        let plan = of.plan(Pass::BackwardWeights, images)?;
        if !std::mem::replace(&mut self.begun, true) {
            return of.run(&plan, ConvOperands::backward_weights(x, dy, &mut self.sum));
        }
        let mut part = of.device.buffer::<T>(self.sum.len())?;
        of.run(&plan, ConvOperands::backward_weights(x, dy, &mut part))?;
        Ok(elementwise::add_assign(of.device.compute(), &part, &mut self.sum)?)
    }

    pub(super) fn finish(mut self, of: &Convolution) -> Result<Tensor> {
        if !self.begun {
            self.sum.fill(T::zero());
        }
        Tensor::of_buffer(&of.device, &of.problem.weight_shape(), MemoryFormat::Contiguous, self.sum)
    }
}

/// The gradient of a convolution's bias, added up tile by tile.
pub(super) struct BiasGradient<T: Element> {
    sum: Buffer<T>,
}

impl<T: Element> BiasGradient<T> {
    pub(super) fn new(of: &Convolution) -> Result<BiasGradient<T>> {
        let mut sum = of.device.buffer(of.problem.out_channels)?;
        sum.fill(T::zero());
        Ok(BiasGradient { sum })
    }

    /// Adds what `images` images give.
    pub(super) fn add(&mut self, of: &Convolution, images: usize, dy: &[T]) -> Result<()> {
        let mut part = of.device.buffer::<T>(self.sum.len())?;
        elementwise::sum_by_channel(of.device.compute(), &of.output_extent(images), dy, &mut part)?;
        Ok(elementwise::add_assign(of.device.compute(), &part, &mut self.sum)?)
    }

    pub(super) fn finish(self, of: &Convolution) -> Result<Tensor> {
        Tensor::of_buffer(&of.device, &[of.problem.out_channels], MemoryFormat::Contiguous, self.sum)
    }
}

/// Images per tile: few enough that their input and output stay in the caches, and enough that the work on the weight, which each
/// tile repeats, costs little.
fn tile_images(problem: &ConvProblem) -> usize {
    let size = problem.dtype.size();
    let image = (problem.input_len() + problem.output_len()) / problem.batch * size;
    let weight = problem.weight_len() * size;
    let wanted = (TILE_WEIGHTS * weight).clamp(TILE_BYTES, LARGE_TILE_BYTES).max(LEAST_TILE_WEIGHTS * weight);
    let group = images_per_group(&problem.output_extent());
    let tile = wanted.div_ceil(image.max(1)).next_multiple_of(group);
    // Make all tiles about the same size.
    let tiles = problem.batch.div_ceil(tile);
    problem.batch.div_ceil(tiles).next_multiple_of(group)
}
