//! A convolution that runs over its batch in tiles: runs of whole images that fit the caches.
//!
//! Either all threads share the work of each tile, one tile after the other, or each thread runs tiles of its own, in a lane
//! ([`TiledConv::in_lanes`]). In lanes no thread waits for another between two kernels, what one kernel wrote is in the second-level
//! cache of the thread that reads it, and one thread computes while another waits for memory. But each tile prepares the weight anew.

mod gradients;
mod lanes;

use std::ops::Range;

pub use gradients::{BiasGradient, Gradient};
pub(crate) use gradients::{InputGradient, PartsOfTiles, Place, WeightGradient};
pub(crate) use lanes::Reader;

use super::{ConvOperands, ConvPlan, ConvProblem, ConvTypes, Pass};
use crate::batch_norm::images_per_group;
use crate::elementwise;
use crate::error::check_len;
use crate::images::Images;
use crate::memory_format::Extent;
use crate::{Buffer, Cpu, DType, Device, Result, Slice, SliceMut};

/// A convolution on a device, which runs tile by tile.
///
/// The tiles depend on the shapes and the number of threads only, so sums are added in the same order however the convolution
/// runs, whole or tile by tile. The device's tuner chooses the algorithm of each pass for the batch of a tile.
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
    /// Threads that run tiles of their own; 1 if all share the work of each tile.
    lanes: usize,
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
        TiledConv { device: device.clone(), problem, images, tile, lanes: 1, transposed: false }
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

    /// The element type of what it reads.
    pub(crate) fn input_type(&self) -> DType {
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

    /// The threads that run a tile.
    pub(crate) fn cpu(&self) -> Cpu {
        if self.lanes > 1 { self.device.compute().one_thread() } else { self.device.compute().clone() }
    }

    fn plan(&self, pass: Pass, images: usize) -> Result<ConvPlan> {
        let part = self.problem.with(|spec| spec.batch = images)?;
        Ok(self.device.tuner().plan(&part, pass, &self.cpu()))
    }

    /// The algorithms of these passes for each size of a tile, with their revisions as far as the
    /// tuner's cache has them: what the times of this convolution depend on.
    ///
    /// # Errors
    /// If no algorithm is left.
    pub fn algorithms(&self, passes: &[Pass]) -> Result<Vec<(String, u32)>> {
        let mut algorithms = Vec::new();
        for images in self.tile_sizes() {
            for &pass in passes {
                let plan = self.plan(pass, images)?;
                let cached = self.device.tuner().cached(plan.problem(), pass, plan.cpu());
                let candidates = cached.map_or_else(Vec::new, |tuning| tuning.candidates);
                let revision = candidates.iter().find(|candidate| candidate.algorithm == plan.algorithm());
                algorithms.push((plan.algorithm().to_owned(), revision.map_or(0, |found| found.revision)));
            }
        }
        Ok(algorithms)
    }

    /// Runs in a lane's workspace, or else in a buffer for this run.
    fn run(&self, plan: &ConvPlan, operands: ConvOperands<'_>, workspace: &mut Option<Buffer>) -> Result<()> {
        if let Some(workspace) = workspace {
            return plan.run(operands, workspace.elements_mut());
        }
        let mut workspace = self.device.buffer(self.problem.types.accumulator, plan.workspace_len())?;
        plan.run(operands, workspace.elements_mut())
    }

    /// y = conv(x, weight) + bias, for all images.
    ///
    /// # Errors
    /// If a length does not fit, or there is no memory.
    #[inline(never)]
    pub fn forward(&self, x: &dyn Images, filter: Filter<'_>, y: SliceMut<'_>) -> Result<()> {
        self.forward_with(x, filter, y, |_, _| Ok(()))
    }

    /// As [`TiledConv::forward`]; each tile of y is then given to `read` with its images, while the caches still hold it.
    ///
    /// # Errors
    /// If a length does not fit, there is no memory, or `read` fails.
    pub(crate) fn forward_with(
        &self,
        x: &dyn Images,
        filter: Filter<'_>,
        y: SliceMut<'_>,
        read: impl Fn(Range<usize>, Slice<'_>) -> Result<()> + Sync + Send,
    ) -> Result<()> {
        let image = self.output_image();
        check_len("convolution", "the output", y.len(), self.images * image)?;
        let x = Reader::new(self, x)?;
        let lanes = self.for_lanes(|| {
            let scratch = x.scratch(self, (self.input_type(), self.input_image()))?;
            Ok((scratch, self.workspace(&[Pass::Forward])?))
        })?;
        self.for_each_tile(lanes, self.cut(y, image), |(scratch, workspace), images, mut y| {
            let x = x.read(images.clone(), scratch)?;
            self.forward_in(workspace, (images.len(), x), filter, y.reborrow())?;
            read(images, y.into_slice())
        })
    }

    /// y = conv(x, weight) + bias, for `images` images, on all threads.
    ///
    /// # Errors
    /// If a length does not fit, or there is no memory.
    #[inline(never)]
    pub fn forward_tile(
        &self,
        images: usize,
        x: Slice<'_>,
        filter: Filter<'_>,
        y: SliceMut<'_>,
    ) -> Result<()> {
        self.forward_in(&mut None, (images, x), filter, y)
    }

    /// As [`TiledConv::forward_tile`], in a lane's workspace.
    pub(crate) fn forward_in(
        &self,
        workspace: &mut Option<Buffer>,
        (images, x): (usize, Slice<'_>),
        filter: Filter<'_>,
        mut y: SliceMut<'_>,
    ) -> Result<()> {
        match self.transposed {
            false => self.problem_forward(workspace, (images, x), filter.weight, y.reborrow())?,
            true => self.problem_backward_data(workspace, (images, x), filter.weight, y.reborrow())?,
        }
        if let Some(bias) = filter.bias {
            elementwise::add_bias(&self.cpu(), &self.output_extent(images), bias, y)?;
        }
        Ok(())
    }

    /// The gradient of some images of x, computed by all threads.
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
        self.input_gradient_in(&mut None, (images, dy), weight, dx)
    }

    /// As [`TiledConv::input_gradient_tile`], in a lane's workspace.
    pub(crate) fn input_gradient_in(
        &self,
        workspace: &mut Option<Buffer>,
        dy: (usize, Slice<'_>),
        weight: Slice<'_>,
        dx: SliceMut<'_>,
    ) -> Result<()> {
        match self.transposed {
            false => self.problem_backward_data(workspace, dy, weight, dx),
            true => self.problem_forward(workspace, dy, weight, dx),
        }
    }

    fn problem_forward(
        &self,
        workspace: &mut Option<Buffer>,
        (images, x): (usize, Slice<'_>),
        weight: Slice<'_>,
        y: SliceMut<'_>,
    ) -> Result<()> {
        let plan = self.plan(Pass::Forward, images)?;
        self.run(&plan, ConvOperands::forward(x, weight, y), workspace)
    }

    fn problem_backward_data(
        &self,
        workspace: &mut Option<Buffer>,
        (images, dy): (usize, Slice<'_>),
        weight: Slice<'_>,
        dx: SliceMut<'_>,
    ) -> Result<()> {
        let plan = self.plan(Pass::BackwardData, images)?;
        self.run(&plan, ConvOperands::backward_data(dy, weight, dx), workspace)
    }

    /// What some images give to the gradient of the weight, computed by all threads.
    ///
    /// # Errors
    /// If a length does not fit, or there is no memory.
    pub fn weight_gradient_tile(
        &self,
        images: usize,
        (x, dy): (Slice<'_>, Slice<'_>),
        dweight: SliceMut<'_>,
    ) -> Result<()> {
        self.weight_gradient_in(&mut None, images, (x, dy), dweight)
    }

    /// As [`TiledConv::weight_gradient_tile`], in a lane's workspace.
    pub(crate) fn weight_gradient_in(
        &self,
        workspace: &mut Option<Buffer>,
        images: usize,
        (x, dy): (Slice<'_>, Slice<'_>),
        dweight: SliceMut<'_>,
    ) -> Result<()> {
        let plan = self.plan(Pass::BackwardWeights, images)?;
        let (x, dy) = if self.transposed { (dy, x) } else { (x, dy) };
        self.run(&plan, ConvOperands::backward_weights(x, dy, dweight), workspace)
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
