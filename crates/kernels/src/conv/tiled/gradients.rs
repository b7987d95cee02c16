//! The gradients of a tiled convolution.

use std::ops::Range;

use super::{Reader, TiledConv};
use crate::conv::Pass;
use crate::elementwise;
use crate::error::check_len;
use crate::images::Images;
use crate::memory::at_least;
use crate::{Buffer, Result, Slice, SliceMut};

impl TiledConv {
    /// The gradient of the weight, in its shape.
    ///
    /// # Errors
    /// If a length does not fit, or there is no memory.
    pub fn weight_gradient(&self, x: &dyn Images, dy: &dyn Images) -> Result<Buffer> {
        let [input, output] = self.dtypes();
        if self.lanes == 1 {
            let mut gradient = WeightGradient::new(self)?;
            let (mut x_scratch, mut dy_scratch) = (None, None);
            for images in self.tiles() {
                let dy = dy.read(images.clone(), &mut dy_scratch)?;
                gradient.add(self, images.len(), x.read(images, &mut x_scratch)?, dy)?;
            }
            return Ok(gradient.finish());
        }
        let (x, dy) = (Reader::new(self, x)?, Reader::new(self, dy)?);
        let lanes = self.for_lanes(|| {
            let scratch = [
                x.scratch(self, (input, self.input_image()))?,
                dy.scratch(self, (output, self.output_image()))?,
            ];
            Ok((scratch, self.workspace(&[Pass::BackwardWeights])?))
        })?;
        let mut parts = PartsOfTiles::of_weight(self)?;
        let places = parts.places();
        self.for_each_tile(lanes, places, |([x_scratch, dy_scratch], workspace), images, place| {
            let dy = dy.read(images.clone(), dy_scratch)?;
            let count = images.len();
            self.weight_gradient_in(workspace, count, (x.read(images, x_scratch)?, dy), place)
        })?;
        parts.finish(self)
    }

    /// The gradient of the input, added to `sum`, if given, which nobody else should read.
    ///
    /// # Errors
    /// If a length does not fit, or there is no memory.
    pub fn input_gradient<H: Images>(
        &self,
        dy: &dyn Images,
        weight: Slice<'_>,
        mut sum: Option<H>,
    ) -> Result<Gradient<H>> {
        let gradient = InputGradient::new(sum.as_mut().map(|sum| -> &mut dyn Images { sum }));
        let gradient = self.input_gradient_of(dy, weight, gradient)?;
        Ok(gradient.given(|| sum.expect("it was added to")))
    }

    fn input_gradient_of(
        &self,
        dy: &dyn Images,
        weight: Slice<'_>,
        mut gradient: InputGradient<'_>,
    ) -> Result<Gradient<()>> {
        if self.lanes == 1 {
            let mut scratch = None;
            for images in self.tiles() {
                let dy = dy.read(images.clone(), &mut scratch)?;
                gradient.add(self, images, dy, weight)?;
            }
            return gradient.finish(self);
        }
        let dy = Reader::new(self, dy)?;
        let lanes = self.for_lanes(|| {
            let scratch = dy.scratch(self, (self.output_type(), self.output_image()))?;
            Ok((scratch, gradient.scratch(self)?, self.workspace(&[Pass::BackwardData])?))
        })?;
        let places = gradient.places(self)?;
        self.for_each_tile(lanes, places, |(scratch, part, workspace), images, place| {
            let dy = dy.read(images.clone(), scratch)?;
            self.input_gradient_to((part, workspace), (images.len(), dy), weight, place)
        })?;
        gradient.finish(self)
    }

    /// Writes the gradient of some images of x to its place, or adds it, by way of `part`.
    pub(crate) fn input_gradient_to(
        &self,
        (part, workspace): (&mut Option<Buffer>, &mut Option<Buffer>),
        (images, dy): (usize, Slice<'_>),
        weight: Slice<'_>,
        place: Place<'_>,
    ) -> Result<()> {
        match place {
            Place::Written(dx) => self.input_gradient_in(workspace, (images, dy), weight, dx),
            Place::Added(sum) => {
                let mut dx = at_least(part, &self.device, sum.dtype(), sum.len())?;
                self.input_gradient_in(workspace, (images, dy), weight, dx.reborrow())?;
                elementwise::add_assign(&self.cpu(), dx.as_slice(), sum)
            }
        }
    }
}

/// Where the gradient of a tile's input goes.
pub(crate) enum Place<'a> {
    /// It is written there.
    Written(SliceMut<'a>),
    /// It is added to an earlier sum.
    Added(SliceMut<'a>),
}

/// What each tile gives to the gradient of a parameter. Lanes write the parts, which are added up in the order of the tiles.
pub(crate) struct PartsOfTiles {
    /// The part of the first tile, and then the sum.
    sum: Buffer,
    /// The parts of the other tiles.
    others: Buffer,
}

impl PartsOfTiles {
    /// For the gradient of the weight.
    pub(crate) fn of_weight(of: &TiledConv) -> Result<PartsOfTiles> {
        PartsOfTiles::new(of, of.problem.weight_len())
    }

    /// For the gradient of the bias.
    pub(crate) fn of_bias(of: &TiledConv) -> Result<PartsOfTiles> {
        PartsOfTiles::new(of, of.output_shape()[1])
    }

    fn new(of: &TiledConv, len: usize) -> Result<PartsOfTiles> {
        let dtype = of.problem.types.weight;
        let others = of.tiles().count().saturating_sub(1);
        Ok(PartsOfTiles {
            sum: of.device.buffer(dtype, len)?,
            others: of.device.buffer(dtype, others * len)?,
        })
    }

    /// A place for the part of each tile.
    pub(crate) fn places(&mut self) -> Vec<SliceMut<'_>> {
        let len = self.sum.len().max(1);
        std::iter::once(self.sum.elements_mut()).chain(self.others.elements_mut().chunks_mut(len)).collect()
    }

    /// The sum.
    pub(crate) fn finish(mut self, of: &TiledConv) -> Result<Buffer> {
        let cpu = of.device.compute();
        let len = self.sum.len().max(1);
        for part in self.others.elements().chunks(len) {
            elementwise::add_assign(cpu, part, self.sum.elements_mut())?;
        }
        Ok(self.sum)
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

impl Gradient<()> {
    /// The same gradient, with the tensor that was given.
    pub(crate) fn given<H>(self, tensor: impl FnOnce() -> H) -> Gradient<H> {
        match self {
            Gradient::Given(()) => Gradient::Given(tensor()),
            Gradient::New(buffer) => Gradient::New(buffer),
        }
    }
}

/// The gradient of a convolution's input, computed tile by tile and, if there is an earlier sum, added to it.
pub(crate) struct InputGradient<'a> {
    sum: Option<&'a mut dyn Images>,
    /// Allocated when it is first written, so that earlier work can use the memory.
    alone: Option<Buffer>,
    scratch: Option<Buffer>,
}

impl<'a> InputGradient<'a> {
    /// Adds to `sum`, if given, which nobody else should read.
    pub(crate) fn new(sum: Option<&'a mut dyn Images>) -> InputGradient<'a> {
        InputGradient { sum, alone: None, scratch: None }
    }

    /// Computes or adds the part of these images.
    ///
    /// # Errors
    /// If a length does not fit, or there is no memory.
    pub(crate) fn add(
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

    /// The memory that a lane needs to add to a sum.
    pub(crate) fn scratch(&self, of: &TiledConv) -> Result<Option<Buffer>> {
        let image = of.input_image();
        self.sum.as_ref().map_or(Ok(None), |_| of.scratch(of.input_type(), image))
    }

    /// The place of each tile's gradient.
    pub(crate) fn places(&mut self, of: &TiledConv) -> Result<Vec<Place<'_>>> {
        let image = of.input_image();
        if self.sum.is_none() {
            return Ok(of.cut(self.all(of)?, image).into_iter().map(Place::Written).collect());
        }
        let sum = self.sum.as_mut().expect("there is one").change()?;
        check_len("convolution backward-data", "the sum", sum.len(), of.images * image)?;
        Ok(of.cut(sum, image).into_iter().map(Place::Added).collect())
    }

    /// The whole gradient, where there is no earlier sum.
    fn all(&mut self, of: &TiledConv) -> Result<SliceMut<'_>> {
        at_least(&mut self.alone, &of.device, of.input_type(), of.images * of.input_image())
    }

    /// The whole gradient: the sum that was given, or a new buffer.
    ///
    /// # Errors
    /// If there is no memory.
    pub(crate) fn finish(mut self, of: &TiledConv) -> Result<Gradient<()>> {
        if self.sum.is_some() {
            return Ok(Gradient::Given(()));
        }
        // Without images it has not been allocated yet.
        self.all(of)?;
        Ok(Gradient::New(self.alone.expect("taken above")))
    }
}

/// The gradient of a convolution's weight, added up tile by tile.
pub(crate) struct WeightGradient {
    sum: Buffer,
    /// Whether `sum` holds anything yet.
    begun: bool,
}

impl WeightGradient {
    /// The gradient of no images yet, in the shape of the problem's weight.
    ///
    /// # Errors
    /// If there is no memory.
    pub(crate) fn new(of: &TiledConv) -> Result<WeightGradient> {
        let sum = of.device.buffer(of.problem.types.weight, of.problem.weight_len())?;
        Ok(WeightGradient { sum, begun: false })
    }

    /// Adds what `images` images give.
    ///
    /// # Errors
    /// If a length does not fit, or there is no memory.
    #[inline(never)]
    pub(crate) fn add(&mut self, of: &TiledConv, images: usize, x: Slice<'_>, dy: Slice<'_>) -> Result<()> {
        if !std::mem::replace(&mut self.begun, true) {
            return of.weight_gradient_in(&mut None, images, (x, dy), self.sum.elements_mut());
        }
        let mut part = of.device.buffer(self.sum.dtype(), self.sum.len())?;
        of.weight_gradient_in(&mut None, images, (x, dy), part.elements_mut())?;
        elementwise::add_assign(of.device.compute(), part.elements(), self.sum.elements_mut())
    }

    /// The whole gradient, in the shape of the problem's weight.
    pub(crate) fn finish(mut self) -> Buffer {
        if !self.begun {
            self.sum.elements_mut().fill(0.0);
        }
        self.sum
    }
}

/// The gradient of a convolution's bias, added up tile by tile.
pub struct BiasGradient {
    sum: Buffer,
    /// Whether `sum` holds anything yet.
    begun: bool,
}

impl BiasGradient {
    /// The gradient of no images yet: one number for each channel of the output.
    ///
    /// # Errors
    /// If there is no memory.
    pub fn new(of: &TiledConv) -> Result<BiasGradient> {
        let sum = of.device.buffer(of.problem.types.weight, of.output_shape()[1])?;
        Ok(BiasGradient { sum, begun: false })
    }

    /// Adds what `images` images give.
    ///
    /// # Errors
    /// If a length does not fit, or there is no memory.
    #[inline(never)]
    pub fn add(&mut self, of: &TiledConv, images: usize, dy: Slice<'_>) -> Result<()> {
        let (cpu, extent) = (of.device.compute(), of.output_extent(images));
        if !std::mem::replace(&mut self.begun, true) {
            return elementwise::sum_by_channel(cpu, &extent, dy, self.sum.elements_mut());
        }
        let mut part = of.device.buffer(self.sum.dtype(), self.sum.len())?;
        elementwise::sum_by_channel(cpu, &extent, dy, part.elements_mut())?;
        elementwise::add_assign(cpu, part.elements(), self.sum.elements_mut())
    }

    /// The whole gradient, one number per channel.
    pub fn finish(mut self) -> Buffer {
        if !self.begun {
            self.sum.elements_mut().fill(0.0);
        }
        self.sum
    }
}
