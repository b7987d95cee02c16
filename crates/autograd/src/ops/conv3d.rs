//! Convolution of volumes N x C x D x H x W, and the transposed one, which run as those of images: see [`Slices`].
//!
//! Windows of slices, which a convolution reads and a transposed one writes, exist for one tile at a time.

use std::ops::Range;
use std::sync::Arc;

use convoke_kernels::conv::{ConvAxis, Filter, TiledConv};
use convoke_kernels::memory::at_least;
use convoke_kernels::slices::Slices;
use convoke_kernels::{SliceMut, elementwise};

use super::conv_transpose2d::{Axis, with_places_beyond, within_reach};
use super::conv2d::{gradient_of_input, output, weight_gradient};
use super::{ConvOptions, ConvTransposeOptions, Padding, check_vector, four_dimensions};
use crate::error::{invalid, refused};
use crate::storage::{Recipe, Storage};
use crate::tensor::checked_len;
use crate::{Error, Function, MemoryFormat, Needs, Operation, Result, Tensor, apply};

/// How a convolution steps over volumes, depth before height before width, as PyTorch's `conv3d` takes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Conv3dOptions {
    /// Step between outputs.
    pub stride: [usize; 3],
    /// Zeros before and after each axis.
    pub padding: [[usize; 2]; 3],
    /// Step between kernel elements.
    pub dilation: [usize; 3],
    /// Groups of channels that do not mix.
    pub groups: usize,
}

impl Default for Conv3dOptions {
    fn default() -> Conv3dOptions {
        Conv3dOptions { stride: [1; 3], padding: [[0; 2]; 3], dilation: [1; 3], groups: 1 }
    }
}

/// How a transposed convolution steps over its output, depth before height before width, as PyTorch's
/// `conv_transpose3d` takes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConvTranspose3dOptions {
    /// Step, padding, dilation and groups of the convolution that it transposes. The padding is cut off the output.
    pub conv: Conv3dOptions,
    /// What is added at the end of each axis: see [`ConvTransposeOptions::output_padding`].
    pub output_padding: [usize; 3],
}

impl Conv3dOptions {
    /// The part that concerns height and width.
    fn plane(&self) -> ConvOptions {
        let &Conv3dOptions { stride, padding: [_, [top, bottom], [left, right]], dilation, groups } = self;
        let padding = Padding { top, bottom, left, right };
        ConvOptions { stride: [stride[1], stride[2]], padding, dilation: [dilation[1], dilation[2]], groups }
    }
}

/// Convolves `x` (N x C x D x H x W) with `weight` (K x C/groups x T x R x S), plus `bias` (K), as PyTorch's `conv3d`.
///
/// The output has the memory format of `x`; where that is channels-last, nothing is converted.
///
/// # Errors
/// If the shapes do not fit: the error names both.
pub fn conv3d(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>, options: &Conv3dOptions) -> Result<Tensor> {
    let inputs = [Some(x), Some(weight), bias];
    let function = Conv3d { options: *options, output_padding: None };
    apply(function, &inputs.into_iter().flatten().collect::<Vec<_>>())
}

/// Adds each element of `x` (N x C x D x H x W), times `weight` (C x K/groups x T x R x S), to a window of the output,
/// and adds `bias` (K), as PyTorch's `conv_transpose3d`. Otherwise as [`conv3d`].
///
/// # Errors
/// If the shapes do not fit: the error names both.
pub fn conv_transpose3d(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    options: &ConvTranspose3dOptions,
) -> Result<Tensor> {
    let &ConvTranspose3dOptions { conv, mut output_padding } = options;
    let mut beyond = [0; 3];
    for axis in 0..3 {
        let (stride, after, dilation) = (conv.stride[axis], conv.padding[axis][1], conv.dilation[axis]);
        [output_padding[axis], beyond[axis]] = within_reach(output_padding[axis], stride, after, dilation);
    }
    let function = Conv3d { options: conv, output_padding: Some(output_padding) };
    if beyond != [0; 3] {
        return with_places_beyond(&apply(function, &[x, weight])?, bias, &beyond);
    }
    let inputs = [Some(x), Some(weight), bias];
    apply(function, &inputs.into_iter().flatten().collect::<Vec<_>>())
}

/// A convolution of volumes, or a transposed one.
struct Conv3d {
    options: Conv3dOptions,
    /// What a transposed convolution adds to its output.
    output_padding: Option<[usize; 3]>,
}

/// A convolution of volumes as one of images.
struct OfImages {
    /// The slices of the side that has windows: the input, or the output of a transposed convolution.
    slices: Slices,
    convolution: TiledConv,
    /// What the convolution reads: windows, or slices if it is transposed.
    x: Tensor,
    weight: Tensor,
}

impl Conv3d {
    fn of_images(&self, x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<OfImages> {
        let name = self.name();
        let [batch, channels, depth, height, width] = five_dimensions(name, "input", x)?;
        let [first, second, kernel, rows, columns] = five_dimensions(name, "weight", weight)?;
        let shapes = [x.shape().to_vec(), weight.shape().to_vec()];
        let explain = |reason| format!("{reason} (volumes {:?}, weight {:?})", shapes[0], shapes[1]);
        let in_volumes = |error| match error {
            Error::Invalid { reason, .. } => invalid(name, explain(reason)),
            error => error,
        };
        let images = images(x)?;
        let shape = [first, second.saturating_mul(kernel), rows, columns];
        checked_len(name, &shape)?;
        let weight = weight.in_format(MemoryFormat::Contiguous)?.reshaped(&shape);
        let Conv3dOptions { stride: [stride, ..], padding: [padding, ..], dilation: [dilation, ..], .. } =
            self.options;
        let Some(output_padding) = self.output_padding else {
            let [pad_before, pad_after] = padding;
            let axis = ConvAxis { input: depth, kernel, stride, pad_before, pad_after, dilation };
            let slices =
                Slices::new(batch, axis, channels * height * width).map_err(refused(name, explain))?;
            let x = windows(&slices, &images)?;
            let convolution = self.options.plane().tiled(name, &x, &weight, bias).map_err(in_volumes)?;
            return Ok(OfImages { slices, convolution, x, weight });
        };
        let axis = Axis {
            name: "depth",
            input: depth,
            kernel,
            stride,
            padding,
            output_padding: output_padding[0],
            dilation,
        };
        let axis = axis.transposed().map_err(|reason| invalid(name, explain(reason)))?;
        let ConvOptions { stride, padding, dilation, groups } = self.options.plane();
        let output_padding = [output_padding[1], output_padding[2]];
        let plane = ConvTransposeOptions { stride, padding, output_padding, dilation, groups };
        let convolution = plane.tiled(name, &images, &weight, None).map_err(in_volumes)?;
        let [_, windows, height, width] = convolution.output_shape();
        let channels = windows / kernel;
        check_vector(name, "the bias", bias, channels)?;
        let slices = Slices::new(batch, axis, channels * height * width).map_err(refused(name, explain))?;
        Ok(OfImages { slices, convolution, x: images, weight })
    }

    /// The gradients of x, the weight and the bias that are needed, where x has this format and the weight this shape.
    fn gradients(
        &self,
        of_images: OfImages,
        (format, weight_shape): (MemoryFormat, &[usize]),
        upstream: Tensor,
        (needs, sum): (&Needs, Option<Tensor>),
    ) -> Result<Vec<Option<Tensor>>> {
        let OfImages { slices, convolution, x, weight } = of_images;
        let dy = images(&upstream)?;
        let mut bias = None;
        if needs.len() == 3 && needs.input(2) {
            let extent = upstream.extent(self.name())?;
            let of = (x.device(), x.dtype());
            bias = Some(Tensor::build_elements(of, &[extent.channels], MemoryFormat::Contiguous, |sums| {
                Ok(elementwise::sum_by_channel(x.device().compute(), &extent, upstream.elements()?, sums)?)
            })?);
        }
        drop(upstream);
        let transposed = self.output_padding.is_some();
        let dy = if transposed { windows(&slices, &dy)? } else { dy };
        let of_weight = match needs.input(1) {
            true => Some(weight_gradient(&convolution, &x, &dy, weight_shape)?),
            false => None,
        };
        drop(x);
        let mut of_x = None;
        if needs.input(0) {
            let gradient = if transposed || slices.is_plain() {
                gradient_of_input(&convolution, &weight, &dy, sum)?
            } else {
                let weight = weight.elements()?;
                let mut scratch = None;
                add_up((&slices, &convolution), sum, |windows, to| {
                    let dy = dy.images(windows.clone(), &mut scratch)?;
                    Ok(convolution.input_gradient_tile(windows.len(), dy, weight, to)?)
                })?
            };
            let depth = if transposed { slices.windows_deep() } else { slices.depth() };
            of_x = Some(volumes(&gradient, depth, format)?);
        }
        let gradients = [Some(of_x), Some(of_weight), (needs.len() == 3).then_some(bias)];
        Ok(gradients.into_iter().flatten().collect())
    }
}

impl Function for Conv3d {
    type Saved = (Tensor, Tensor);

    fn name(&self) -> &'static str {
        if self.output_padding.is_some() { "conv_transpose3d" } else { "conv3d" }
    }

    fn describe(&self) -> Option<Operation> {
        let &Conv3d { options: conv, output_padding } = self;
        Some(match output_padding {
            None => Operation::Conv3d(conv),
            Some(output_padding) => {
                Operation::ConvTranspose3d(ConvTranspose3dOptions { conv, output_padding })
            }
        })
    }

    fn forward(&self, inputs: &[&Tensor], _: &Needs) -> Result<(Tensor, Self::Saved)> {
        let bias = inputs.get(2).copied();
        let OfImages { slices, convolution, x, weight } = self.of_images(inputs[0], inputs[1], bias)?;
        let saved = (inputs[0].keep(), inputs[1].constant());
        let (format, transposed) = (inputs[0].format(), self.output_padding.is_some());
        if !transposed || slices.is_plain() {
            let y = output(&convolution, &x, &weight, bias)?;
            return Ok((volumes(&y, slices.windows_deep(), format)?, saved));
        }
        let filter = Filter { weight: weight.elements()?, bias: None };
        let mut scratch = None;
        let mut y = add_up((&slices, &convolution), None, |windows, to| {
            let x = x.images(windows.clone(), &mut scratch)?;
            Ok(convolution.forward_tile(windows.len(), x, filter, to)?)
        })?;
        if let Some(bias) = bias {
            let (cpu, extent) = (x.device().compute(), y.extent(self.name())?);
            elementwise::add_bias(cpu, &extent, bias.elements()?, y.elements_mut()?)?;
        }
        Ok((volumes(&y, slices.depth(), format)?, saved))
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
        let of_images = self.of_images(&x, &weight, None)?;
        let like = (x.format(), weight.shape());
        // In another format the gradient is not computed where the sum lies.
        let sum = match sums.first_mut() {
            Some(sum) if x.format() == MemoryFormat::ChannelsLast => sum.take(),
            _ => None,
        };
        let sum = sum.map(|sum| images(&sum)).transpose()?;
        self.gradients(of_images, like, upstream, (needs, sum))
    }
}

fn five_dimensions(operation: &'static str, operand: &str, tensor: &Tensor) -> Result<[usize; 5]> {
    tensor.shape().try_into().map_err(|_| {
        let shape = tensor.shape();
        invalid(operation, format!("expected a 5D {operand} (got {}D: {shape:?})", shape.len()))
    })
}

/// The slices of volumes as images in channels-last.
fn images(volumes: &Tensor) -> Result<Tensor> {
    let [batch, channels, depth, height, width] = five_dimensions("images", "tensor", volumes)?;
    let format = MemoryFormat::ChannelsLast;
    Ok(volumes.laid_out(format)?.relabeled(&[batch * depth, channels, height, width], format))
}

/// Images that are the slices of volumes of this depth, as volumes in this format.
fn volumes(images: &Tensor, depth: usize, format: MemoryFormat) -> Result<Tensor> {
    let [slices, channels, height, width] = four_dimensions("volumes", "tensor", images)?;
    let shape = [slices / depth, channels, depth, height, width];
    images.relabeled(&shape, MemoryFormat::ChannelsLast).laid_out(format)
}

/// The windows of slices, as images that are computed where they are read.
fn windows(slices: &Slices, images: &Tensor) -> Result<Tensor> {
    if slices.is_plain() {
        return Ok(images.clone());
    }
    let [_, channels, height, width] = four_dimensions("windows", "tensor", images)?;
    let shape = [slices.windows(), channels.saturating_mul(slices.places()), height, width];
    let recipe = Arc::new(Windows { slices: *slices, images: images.constant() });
    let storage = Storage::deferred(images.dtype(), checked_len("windows", &shape)?, recipe);
    Tensor::of_storage(images.device(), &shape, MemoryFormat::ChannelsLast, storage)
}

struct Windows {
    slices: Slices,
    images: Tensor,
}

impl Recipe for Windows {
    fn images(&self) -> usize {
        self.slices.windows()
    }

    fn write(&self, windows: Range<usize>, out: SliceMut<'_>) -> Result<()> {
        let mut scratch = None;
        let images = self.images.images(self.slices.read_by(&windows), &mut scratch)?;
        Ok(self.slices.gather(self.images.device().compute(), windows, images, out)?)
    }

    fn prepare(&self) -> Result<bool> {
        Ok(!self.images.has_elements())
    }
}

/// The slices that windows add up to, as images, on top of `sum`, if there is one. `write` gives some of the windows.
fn add_up(
    (slices, convolution): (&Slices, &TiledConv),
    sum: Option<Tensor>,
    mut write: impl FnMut(Range<usize>, SliceMut<'_>) -> Result<()>,
) -> Result<Tensor> {
    let [_, windows, height, width] = convolution.problem().input_shape();
    let shape = [slices.count(), windows / slices.places(), height, width];
    let (device, len) = (convolution.device(), shape[1..].iter().product::<usize>());
    let dtype = convolution.problem().types.input;
    let clear = |part: SliceMut<'_>| {
        device.compute().for_each(part.len(), part.chunks_mut(1 << 14), |part| part.fill(0.0));
    };
    let mut add = |mut images: SliceMut<'_>, mut begun: usize| {
        let mut scratch = None;
        for windows in convolution.tiles() {
            let read = slices.read_by(&windows);
            // The slices from `begun` on hold nothing yet.
            if read.end > begun {
                clear(images.reborrow().part(begun * len..read.end * len));
                begun = read.end;
            }
            let mut part = at_least(&mut scratch, device, dtype, windows.len() * slices.places() * len)?;
            write(windows.clone(), part.reborrow())?;
            let images = images.reborrow().part(read.start * len..read.end * len);
            slices.add(device.compute(), windows, part.into_slice(), images)?;
        }
        let all = images.len();
        clear(images.part(begun * len..all));
        Ok(())
    };
    match sum {
        Some(mut sum) => {
            add(sum.elements_mut()?, slices.count())?;
            Ok(sum)
        }
        None => {
            let format = MemoryFormat::ChannelsLast;
            Tensor::build_elements((device, dtype), &shape, format, |images| add(images, 0))
        }
    }
}
