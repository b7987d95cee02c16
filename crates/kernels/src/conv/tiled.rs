//! A convolution that runs over its batch in tiles: runs of whole images that fit the caches.

use std::ops::Range;

use super::{ConvOperands, ConvPlan, ConvProblem, ConvTypes, Pass};
use crate::batch_norm::images_per_group;
use crate::elementwise;
use crate::error::check_len;
use crate::images::Images;
use crate::memory::at_least;
use crate::memory_format::Extent;
use crate::{Buffer, DType, Device, Result, Slice, SliceMut};

/// A convolution on a device, which runs tile by tile.
///
/// The tiles depend on the shapes only, so sums are added in the same order however the convolution runs, whole or tile by
/// tile. The device's tuner chooses the algorithm of each pass for the batch of a tile.
///
/// It may be transposed. Then its input is the problem's output and its output the problem's input, so forward and the
/// gradient of the input exchange their passes, and the gradient of the weight its operands.
#[derive(Clone)]
pub struct TiledConv {
    device: Device,
    problem: ConvProblem,
    images: usize,
    /// Images per tile; the last one may have fewer.
    tile: usize,
    transposed: bool,
}

/// A convolution's parameters: the weight in the problem's shape, and one number per channel of the output.
#[derive(Debug, Clone, Copy)]
pub struct Filter<'a> {
    /// The weight.
    pub weight: Slice<'a>,
    /// The bias, which is added to each output.
    pub bias: Option<Slice<'a>>,
}

/// Bytes of input and output of a tile if the weight is small: they should stay in the caches of the threads.
const TILE_BYTES: usize = 4 << 20;
/// With a large weight, a tile has this many times the weight's bytes, because each tile packs the weight and adds to its
/// gradient. `LARGE_TILE_BYTES` bounds a tile, so that it does not cost much memory.
const TILE_WEIGHTS: usize = 56;
const LARGE_TILE_BYTES: usize = 32 << 20;
/// However large the weight is, a tile has at least this many times its bytes.
const LEAST_TILE_WEIGHTS: usize = 4;

impl TiledConv {
    /// The convolution of `images` images. The problem has that batch; without images it has any, and nothing runs.
    pub fn new(device: &Device, problem: ConvProblem, images: usize) -> TiledConv {
        let tile = tile_images(&problem);
        TiledConv { device: device.clone(), problem, images, tile, transposed: false }
    }

    /// The transposed convolution: it maps what `problem` calls its output to what it calls its input.
    pub fn transposed(device: &Device, problem: ConvProblem, images: usize) -> TiledConv {
        TiledConv { transposed: true, ..TiledConv::new(device, problem, images) }
    }

    /// Where it runs.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The convolution of the whole batch; if this is a transposed one, the convolution whose backward-data pass it is.
    pub fn problem(&self) -> &ConvProblem {
        &self.problem
    }

    /// The tiles of the batch, in order; none if there are no images.
    pub fn tiles(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        self.tiles_of(0..self.images)
    }

    /// Cuts some images into tiles.
    pub fn tiles_of(&self, images: Range<usize>) -> impl Iterator<Item = Range<usize>> + use<> {
        let (end, tile) = (images.end, self.tile);
        images.step_by(tile).map(move |start| start..(start + tile).min(end))
    }

    /// The shape of what it reads, N x C x H x W, where N may be 0.
    pub fn input_shape(&self) -> [usize; 4] {
        self.shapes()[0]
    }

    /// The shape of what it writes, N x K x OH x OW, where N may be 0.
    pub fn output_shape(&self) -> [usize; 4] {
        self.shapes()[1]
    }

    fn shapes(&self) -> [[usize; 4]; 2] {
        let shapes = [self.problem.input_shape(), self.problem.output_shape()];
        let [input, output] =
            shapes.map(|[_, channels, height, width]| [self.images, channels, height, width]);
        if self.transposed { [output, input] } else { [input, output] }
    }

    /// The element types of what it reads and of what it writes.
    pub(crate) fn dtypes(&self) -> [DType; 2] {
        let ConvTypes { input, output, .. } = self.problem.types;
        if self.transposed { [output, input] } else { [input, output] }
    }

    fn input_type(&self) -> DType {
        self.dtypes()[0]
    }

    /// The element type of what it writes.
    pub fn output_type(&self) -> DType {
        self.dtypes()[1]
    }

    /// Elements of an image of the input.
    pub fn input_image(&self) -> usize {
        self.input_shape()[1..].iter().product()
    }

    /// Elements of an image of the output.
    pub fn output_image(&self) -> usize {
        self.output_shape()[1..].iter().product()
    }

    /// The extent of some images of the output: N x K x (OH OW).
    pub fn output_extent(&self, images: usize) -> Extent {
        let [_, channels, height, width] = self.output_shape();
        Extent { batch: images, channels, spatial: height * width, format: self.problem.format }
    }

    fn plan(&self, pass: Pass, images: usize) -> Result<ConvPlan> {
        let part = self.problem.with(|spec| spec.batch = images)?;
        Ok(self.device.conv_plan(&part, pass))
    }

    fn run(&self, plan: &ConvPlan, operands: ConvOperands<'_>) -> Result<()> {
        let types = &self.problem.types;
        let mut workspace = self.device.buffer(types.accumulator, plan.workspace_len())?;
        plan.run(operands, workspace.elements_mut())
    }

    /// y = conv(x, weight) + bias, for all images.
    ///
    /// # Errors
    /// If a length does not fit, or there is no memory.
    #[inline(never)]
    pub fn forward(&self, x: &dyn Images, filter: Filter<'_>, y: SliceMut<'_>) -> Result<()> {
        self.forward_with(x, filter, y, |_| Ok(()))
    }

    /// As [`TiledConv::forward`]; each tile of y is then given to `read`, while the caches still hold it.
    ///
    /// # Errors
    /// If a length does not fit, there is no memory, or `read` fails.
    pub fn forward_with(
        &self,
        x: &dyn Images,
        filter: Filter<'_>,
        mut y: SliceMut<'_>,
        mut read: impl FnMut(Slice<'_>) -> Result<()>,
    ) -> Result<()> {
        let (image, mut scratch) = (self.output_image(), None);
        check_len("convolution", "the output", y.len(), self.images * image)?;
        for images in self.tiles() {
            let mut y = y.reborrow().part(images.start * image..images.end * image);
            self.forward_tile(images.len(), x.read(images, &mut scratch)?, filter, y.reborrow())?;
            read(y.into_slice())?;
        }
        Ok(())
    }

    /// y = conv(x, weight) + bias, for `images` images.
    ///
    /// # Errors
    /// If a length does not fit, or there is no memory.
    #[inline(never)]
    pub fn forward_tile(
        &self,
        images: usize,
        x: Slice<'_>,
        filter: Filter<'_>,
        mut y: SliceMut<'_>,
    ) -> Result<()> {
        match self.transposed {
            false => self.problem_forward(images, x, filter.weight, y.reborrow())?,
            true => self.problem_backward_data(images, x, filter.weight, y.reborrow())?,
        }
        if let Some(bias) = filter.bias {
            elementwise::add_bias(self.device.compute(), &self.output_extent(images), bias, y)?;
        }
        Ok(())
    }

    /// The gradient of some images of x.
    ///
    /// # Errors
    /// If a length does not fit, or there is no memory.
    #[inline(never)]
    pub fn input_gradient_tile(
        &self,
        images: usize,
        dy: Slice<'_>,
        weight: Slice<'_>,
        dx: SliceMut<'_>,
    ) -> Result<()> {
        match self.transposed {
            false => self.problem_backward_data(images, dy, weight, dx),
            true => self.problem_forward(images, dy, weight, dx),
        }
    }

    fn problem_forward(&self, images: usize, x: Slice<'_>, weight: Slice<'_>, y: SliceMut<'_>) -> Result<()> {
        let plan = self.plan(Pass::Forward, images)?;
        self.run(&plan, ConvOperands::forward(x, weight, y))
    }

    fn problem_backward_data(
        &self,
        images: usize,
        dy: Slice<'_>,
        weight: Slice<'_>,
        dx: SliceMut<'_>,
    ) -> Result<()> {
        let plan = self.plan(Pass::BackwardData, images)?;
        self.run(&plan, ConvOperands::backward_data(dy, weight, dx))
    }
}

/// A gradient: in a tensor that was given, or in a new buffer.
#[derive(Debug)]
pub enum Gradient<H> {
    /// The tensor that held an earlier sum, or that was overwritten.
    Given(H),
    /// A new buffer.
    New(Buffer),
}

/// The gradient of a convolution's input, computed tile by tile and, if there is an earlier sum, added to it.
pub struct InputGradient<H> {
    sum: Option<H>,
    /// Allocated when it is first written, so that earlier work can use the memory.
    alone: Option<Buffer>,
    scratch: Option<Buffer>,
}

impl<H: Images> InputGradient<H> {
    /// Adds to `sum`, if given, which nobody else should read.
    pub fn new(sum: Option<H>) -> InputGradient<H> {
        InputGradient { sum, alone: None, scratch: None }
    }

    /// Computes or adds the part of these images.
    ///
    /// # Errors
    /// If a length does not fit, or there is no memory.
    pub fn add(
        &mut self,
        of: &TiledConv,
        images: Range<usize>,
        dy: Slice<'_>,
        weight: Slice<'_>,
    ) -> Result<()> {
        let (count, image) = (images.len(), of.input_image());
        let place = images.start * image..images.end * image;
        let Some(sum) = &mut self.sum else {
            return of.input_gradient_tile(count, dy, weight, self.all(of)?.part(place));
        };
        let mut part = at_least(&mut self.scratch, &of.device, of.input_type(), place.len())?;
        of.input_gradient_tile(count, dy, weight, part.reborrow())?;
        let sum = sum.change()?;
        check_len("convolution backward-data", "the sum", sum.len(), of.images * image)?;
        elementwise::add_assign(of.device.compute(), part.as_slice(), sum.part(place))
    }

    /// The whole gradient, where there is no earlier sum.
    fn all(&mut self, of: &TiledConv) -> Result<SliceMut<'_>> {
        at_least(&mut self.alone, &of.device, of.input_type(), of.images * of.input_image())
    }

    /// The whole gradient.
    ///
    /// # Errors
    /// If there is no memory.
    pub fn finish(mut self, of: &TiledConv) -> Result<Gradient<H>> {
        if let Some(sum) = self.sum {
            return Ok(Gradient::Given(sum));
        }
        // Without images it has not been allocated yet.
        self.all(of)?;
        Ok(Gradient::New(self.alone.expect("taken above")))
    }
}

/// The gradient of a convolution's weight, added up tile by tile.
pub struct WeightGradient {
    sum: Buffer,
    /// Whether `sum` holds anything yet.
    begun: bool,
}

impl WeightGradient {
    /// The gradient of no images yet, in the shape of the problem's weight.
    ///
    /// # Errors
    /// If there is no memory.
    pub fn new(of: &TiledConv) -> Result<WeightGradient> {
        let sum = of.device.buffer(of.problem.types.weight, of.problem.weight_len())?;
        Ok(WeightGradient { sum, begun: false })
    }

    /// Adds what `images` images give.
    ///
    /// # Errors
    /// If a length does not fit, or there is no memory.
    #[inline(never)]
    pub fn add(&mut self, of: &TiledConv, images: usize, x: Slice<'_>, dy: Slice<'_>) -> Result<()> {
        let plan = of.plan(Pass::BackwardWeights, images)?;
        let (x, dy) = if of.transposed { (dy, x) } else { (x, dy) };
        if !std::mem::replace(&mut self.begun, true) {
            return of.run(&plan, ConvOperands::backward_weights(x, dy, self.sum.elements_mut()));
        }
        let mut part = of.device.buffer(self.sum.dtype(), self.sum.len())?;
        of.run(&plan, ConvOperands::backward_weights(x, dy, part.elements_mut()))?;
        elementwise::add_assign(of.device.compute(), part.elements(), self.sum.elements_mut())
    }

    /// The whole gradient, in the shape of the problem's weight.
    pub fn finish(mut self) -> Buffer {
        if !self.begun {
            self.sum.elements_mut().fill(0.0);
        }
        self.sum
    }
}

/// The gradient of a convolution's bias, added up tile by tile.
pub struct BiasGradient {
    sum: Buffer,
}

impl BiasGradient {
    /// The gradient of no images yet: zeros, one for each channel of the output.
    ///
    /// # Errors
    /// If there is no memory.
    pub fn new(of: &TiledConv) -> Result<BiasGradient> {
        let mut sum = of.device.buffer(of.problem.types.weight, of.output_shape()[1])?;
        sum.elements_mut().fill(0.0);
        Ok(BiasGradient { sum })
    }

    /// Adds what `images` images give.
    ///
    /// # Errors
    /// If a length does not fit, or there is no memory.
    #[inline(never)]
    pub fn add(&mut self, of: &TiledConv, images: usize, dy: Slice<'_>) -> Result<()> {
        let cpu = of.device.compute();
        let mut part = of.device.buffer(self.sum.dtype(), self.sum.len())?;
        elementwise::sum_by_channel(cpu, &of.output_extent(images), dy, part.elements_mut())?;
        elementwise::add_assign(cpu, part.elements(), self.sum.elements_mut())
    }

    /// The whole gradient, one number per channel.
    pub fn finish(self) -> Buffer {
        self.sum
    }
}

/// Images per tile: few enough that their input and output stay in the caches, and enough that the work on the weight, which
/// each tile repeats, costs little.
fn tile_images(problem: &ConvProblem) -> usize {
    let ConvTypes { input, weight, output, .. } = problem.types;
    let image = (problem.input_len() * input.size() + problem.output_len() * output.size()) / problem.batch;
    let weight = problem.weight_len() * weight.size();
    let wanted = (TILE_WEIGHTS * weight).clamp(TILE_BYTES, LARGE_TILE_BYTES).max(LEAST_TILE_WEIGHTS * weight);
    let group = images_per_group(&problem.output_extent());
    let tile = wanted.div_ceil(image.max(1)).next_multiple_of(group);
    // Make all tiles about the same size.
    let tiles = problem.batch.div_ceil(tile);
    problem.batch.div_ceil(tiles).next_multiple_of(group)
}
