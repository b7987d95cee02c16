//! Operations with windows over images: convolution, pooling, resizing. Signals of one dimension run as images of height 1.

use std::borrow::Cow;

use convoke_autograd::Tensor;
use convoke_autograd::ops::{
    self, Conv3dOptions, ConvOptions, ConvTranspose3dOptions, ConvTransposeOptions, Coordinates, PadMode,
    Padding, PoolOptions, ResizeMode, ResizeOptions, ResizeTo, Rounding, Slice, UpsampleMode,
};

use super::{Inputs, Result, cubic, refuse, spatial_axes};
use crate::graph::{Aspect, Conv, ConvTranspose, Interpolation, Kind, Pads, Pool, Resize};

/// A tensor of images; signals N x C x L become N x C x 1 x L.
struct Images {
    tensor: Tensor,
    signals: bool,
}

impl Images {
    fn new(x: Tensor) -> Result<Images> {
        match *x.shape() {
            [_, _, _, _] => Ok(Images { tensor: x, signals: false }),
            [batch, channels, len] => {
                Ok(Images { tensor: x.reshape(&[batch, channels, 1, len])?, signals: true })
            }
            _ => refuse(format!("its input {:?} has neither one nor two spatial dimensions", x.shape())),
        }
    }

    fn spatial(&self) -> &[usize] {
        &self.tensor.shape()[if self.signals { 3 } else { 2 }..]
    }

    /// The output in the dimensions of the input.
    fn back(&self, y: Tensor) -> Result<Tensor> {
        match *y.shape() {
            [batch, channels, 1, len] if self.signals => Ok(y.reshape(&[batch, channels, len])?),
            _ => Ok(y),
        }
    }

    fn axes(&self, numbers: &[usize], first: usize) -> Result<[usize; 2]> {
        axes(self.spatial().len(), numbers, first)
    }
}

/// One number for each of `rank` spatial axes, height before width; signals have one axis, and `first` for the height.
fn axes(rank: usize, numbers: &[usize], first: usize) -> Result<[usize; 2]> {
    match (rank, numbers) {
        (_, []) => Ok([1, 1]),
        (1, &[own]) => Ok([first, own]),
        (2, &[height, width]) => Ok([height, width]),
        _ => refuse(format!("{numbers:?} are not one number for each spatial axis of its input")),
    }
}

impl Pads {
    /// The pixels before and after each spatial axis.
    fn resolve(
        &self,
        input: &[usize],
        [kernel, strides, dilations]: [&[usize]; 3],
    ) -> Result<Vec<[usize; 2]>> {
        let rank = input.len();
        match self {
            Pads::Valid => Ok(vec![[0, 0]; rank]),
            Pads::Explicit(pads) if pads.is_empty() => Ok(vec![[0, 0]; rank]),
            Pads::Explicit(pads) if pads.len() == 2 * rank => {
                Ok((0..rank).map(|axis| [pads[axis], pads[axis + rank]]).collect())
            }
            Pads::Explicit(pads) => {
                refuse(format!("{pads:?} are not two numbers for each of {rank} spatial axes"))
            }
            Pads::SameUpper | Pads::SameLower => {
                let ends = self.same(input, [kernel, strides, dilations], 0);
                let size = |end: isize| usize::try_from(end).ok();
                let sizes = ends.iter().map(|&[before, after]| Some([size(before)?, size(after)?])).collect();
                match sizes {
                    Some(sizes) => Ok(sizes),
                    None => refuse("its windows leave out pixels at the borders"),
                }
            }
        }
    }

    /// What makes outputs of input / stride pixels, rounded up: pixels at the borders are left out (less than 0) where steps are longer
    /// than windows, `spared` fewer than that.
    fn same(
        &self,
        input: &[usize],
        [kernel, strides, dilations]: [&[usize]; 3],
        spared: isize,
    ) -> Vec<[isize; 2]> {
        let of = |numbers: &[usize], axis: usize| numbers.get(axis).copied().unwrap_or(1).max(1);
        let signed = |size: usize| isize::try_from(size).unwrap_or(isize::MAX);
        let ends = |axis: usize| {
            let (stride, size) = (of(strides, axis), input[axis]);
            let last = (size.div_ceil(stride).max(1) - 1).saturating_mul(stride);
            let span = (of(kernel, axis) - 1).saturating_mul(of(dilations, axis)).saturating_add(1);
            let total = signed(last.saturating_add(span)).saturating_sub(signed(size));
            let total = if total < 0 { total + spared } else { total };
            let before = if *self == Pads::SameUpper { total / 2 } else { total.saturating_add(1) / 2 };
            [before, total - before]
        };
        (0..input.len()).map(ends).collect()
    }

    /// The input without the pixels that no window reads at its borders, and the padding of what is left, where this is to be computed.
    fn crop(&self, x: Tensor, windows: [&[usize]; 3], spared: isize) -> Result<(Tensor, Pads)> {
        let rank = windows[0].len();
        let dimensions = x.shape().len();
        if !matches!(self, Pads::SameUpper | Pads::SameLower) || dimensions < rank {
            return Ok((x, self.clone()));
        }
        let ends = self.same(&x.shape()[dimensions - rank..], windows, spared);
        let pads: Vec<_> = ends.iter().map(|ends| ends.map(|end| end.max(0).unsigned_abs())).collect();
        if ends.iter().flatten().all(|&end| end >= 0) {
            return Ok((x, explicit(&pads)));
        }
        let mut crops = vec![[0, 0]; dimensions - rank];
        crops.extend(ends.iter().map(|ends| ends.map(|end| end.min(0))));
        Ok((x.pad(&crops, PadMode::Constant(0.0))?, explicit(&pads)))
    }
}

/// Padding of height and width.
fn padding(pads: &[[usize; 2]]) -> Padding {
    match *pads {
        [[top, bottom], [left, right]] => Padding { top, bottom, left, right },
        [[left, right]] => Padding { left, right, ..Padding::default() },
        _ => Padding::default(),
    }
}

impl Conv {
    /// The options of a convolution of images or signals of this size.
    pub(in crate::graph) fn options(&self, spatial: &[usize], kernel: &[usize]) -> Result<ConvOptions> {
        let pads = self.pads.resolve(spatial, [kernel, &self.strides, &self.dilations])?;
        Ok(ConvOptions {
            stride: axes(spatial.len(), &self.strides, 1)?,
            padding: padding(&pads),
            dilation: axes(spatial.len(), &self.dilations, 1)?,
            groups: self.group,
        })
    }
}

/// The input and the weight of a convolution.
fn operands(inputs: &Inputs<'_>) -> Result<[Images; 2]> {
    let (x, weight) = (Images::new(inputs.tensor(0)?)?, Images::new(inputs.tensor(1)?)?);
    if x.signals != weight.signals {
        let [weight, x] = [&weight, &x].map(|images| images.tensor.shape());
        return refuse(format!("the weight {weight:?} is not for its input {x:?}"));
    }
    Ok([x, weight])
}

pub(super) fn conv(inputs: &Inputs<'_>, conv: &Conv) -> Result<Tensor> {
    if let Some([x, weight]) = volumes(inputs)? {
        let (x, conv) = conv.crop(x, &weight.shape()[2..])?;
        let options = conv.in_volumes(&x, &weight)?;
        return Ok(ops::conv3d(&x, &weight, inputs.optional_tensor(2)?.as_ref(), &options)?);
    }
    let [mut x, weight] = operands(inputs)?;
    let (cropped, conv) = conv.crop(x.tensor, weight.spatial())?;
    x.tensor = cropped;
    let options = conv.options(x.spatial(), weight.spatial())?;
    x.back(ops::conv2d(&x.tensor, &weight.tensor, inputs.optional_tensor(2)?.as_ref(), &options)?)
}

pub(super) fn conv_transpose(inputs: &Inputs<'_>, transposed: &ConvTranspose) -> Result<Tensor> {
    let conv = &transposed.conv;
    if let Some([x, weight]) = volumes(inputs)? {
        let (pads, output_padding) = transposed.ends(&x.shape()[2..], &weight.shape()[2..])?;
        let conv = Conv { pads: explicit(&pads), ..conv.clone() }.in_volumes(&x, &weight)?;
        let options = ConvTranspose3dOptions { conv, output_padding: three(&output_padding)? };
        return Ok(ops::conv_transpose3d(&x, &weight, inputs.optional_tensor(2)?.as_ref(), &options)?);
    }
    let [x, weight] = operands(inputs)?;
    let (pads, output_padding) = transposed.ends(x.spatial(), weight.spatial())?;
    let options = ConvTransposeOptions {
        stride: x.axes(&conv.strides, 1)?,
        padding: padding(&pads),
        output_padding: x.axes(&output_padding, 0)?,
        dilation: x.axes(&conv.dilations, 1)?,
        groups: conv.group,
    };
    x.back(ops::conv_transpose2d(&x.tensor, &weight.tensor, inputs.optional_tensor(2)?.as_ref(), &options)?)
}

/// The input and the weight of a convolution, if both are of volumes.
fn volumes(inputs: &Inputs<'_>) -> Result<Option<[Tensor; 2]>> {
    let operands = [inputs.tensor(0)?, inputs.tensor(1)?];
    Ok(operands.iter().all(|operand| operand.shape().len() == 5).then_some(operands))
}

/// One number for each axis of volumes.
fn three(numbers: &[usize]) -> Result<[usize; 3]> {
    match *numbers {
        [] => Ok([1; 3]),
        [depth, height, width] => Ok([depth, height, width]),
        _ => refuse(format!("{numbers:?} are not one number for each axis of volumes")),
    }
}

fn explicit(pads: &[[usize; 2]]) -> Pads {
    Pads::Explicit([0, 1].iter().flat_map(|&end| pads.iter().map(move |pad| pad[end])).collect())
}

impl Conv {
    /// As [`Pads::crop`].
    fn crop(&self, x: Tensor, kernel: &[usize]) -> Result<(Tensor, Cow<'_, Conv>)> {
        // Of what a convolution leaves out, ONNX Runtime spares one pixel.
        let (x, pads) = self.pads.crop(x, [kernel, &self.strides, &self.dilations], 1)?;
        let conv =
            if pads == self.pads { Cow::Borrowed(self) } else { Cow::Owned(Conv { pads, ..self.clone() }) };
        Ok((x, conv))
    }

    fn in_volumes(&self, x: &Tensor, weight: &Tensor) -> Result<Conv3dOptions> {
        let kernel = &weight.shape()[2..];
        let pads = self.pads.resolve(&x.shape()[2..], [kernel, &self.strides, &self.dilations])?;
        Ok(Conv3dOptions {
            stride: three(&self.strides)?,
            padding: [0, 1, 2].map(|axis| pads[axis]),
            dilation: three(&self.dilations)?,
            groups: self.group,
        })
    }
}

impl ConvTranspose {
    /// What is cut off the output before and after each axis, and what is added after it.
    fn ends(&self, input: &[usize], kernel: &[usize]) -> Result<(Vec<[usize; 2]>, Vec<usize>)> {
        let conv = &self.conv;
        let rank = input.len();
        let of = |numbers: &[usize], axis: usize, none: usize| numbers.get(axis).copied().unwrap_or(none);
        let mut output_padding: Vec<usize> =
            (0..rank).map(|axis| of(&self.output_padding, axis, 0)).collect();
        let same = matches!(conv.pads, Pads::SameUpper | Pads::SameLower);
        let wanted = match &self.output_shape {
            Some(shape) if shape.len() == rank => Some(shape.clone()),
            Some(shape) => {
                return refuse(format!("the output shape {shape:?} does not have {rank} spatial sizes"));
            }
            None if same => Some(
                input.iter().enumerate().map(|(axis, &size)| size * of(&conv.strides, axis, 1)).collect(),
            ),
            None => None,
        };
        let pads = match wanted {
            None => conv.pads.resolve(input, [kernel, &conv.strides, &conv.dilations])?,
            Some(wanted) => (0..rank)
                .map(|axis| {
                    let span =
                        of(kernel, axis, 1).saturating_sub(1).saturating_mul(of(&conv.dilations, axis, 1));
                    let full = input[axis].saturating_sub(1).saturating_mul(of(&conv.strides, axis, 1));
                    let full =
                        full.saturating_add(span).saturating_add(1).saturating_add(output_padding[axis]);
                    // What is missing is added at the end.
                    output_padding[axis] =
                        output_padding[axis].saturating_add(wanted[axis].saturating_sub(full));
                    let total = full.saturating_sub(wanted[axis]);
                    let (less, more) = (total / 2, total - total / 2);
                    if conv.pads == Pads::SameUpper { [less, more] } else { [more, less] }
                })
                .collect(),
        };
        Ok((pads, output_padding))
    }
}

impl Pool {
    /// The options of pooling images or signals of this size.
    pub(in crate::graph) fn options(&self, spatial: &[usize]) -> Result<PoolOptions> {
        let pads = self.pads.resolve(spatial, [&self.kernel, &self.strides, &self.dilations])?;
        let Padding { top, bottom, left, right } = padding(&pads);
        let own = |numbers: &[usize]| axes(spatial.len(), numbers, 1);
        Ok(PoolOptions {
            kernel: own(&self.kernel)?,
            stride: own(&self.strides)?,
            padding: [top, left],
            padding_after: Some([bottom, right]),
            dilation: own(&self.dilations)?,
            ceil_mode: self.ceil_mode,
            count_include_pad: self.count_include_pad,
            divisor_override: None,
        })
    }
}

/// Whether the kernels take this padding: they pad by at most half a window.
pub(in crate::graph) fn pads_fit(pool: &PoolOptions) -> bool {
    let after = pool.padding_after.unwrap_or(pool.padding);
    (0..2).all(|axis| pool.padding[axis].max(after[axis]) <= pool.kernel[axis] / 2)
}

/// The input of a pooling and its options.
fn pooling(x: Tensor, pool: &Pool) -> Result<(Images, PoolOptions)> {
    let mut x = Images::new(x)?;
    let windows = [&pool.kernel[..], &pool.strides, &pool.dilations];
    let (cropped, pads) = pool.pads.crop(x.tensor, windows, 0)?;
    x.tensor = cropped;
    let options = match pads == pool.pads {
        true => pool.options(x.spatial())?,
        false => Pool { pads, ..pool.clone() }.options(x.spatial())?,
    };
    Ok((x, options))
}

/// How far windows reach before and after height and width, where the kernels do not take the padding; less than 0 where they leave out
/// pixels. `ceil_mode` is as in [`PoolOptions`].
fn reach(options: &PoolOptions, x: &Tensor) -> Result<[[isize; 2]; 2]> {
    let after = options.padding_after.unwrap_or(options.padding);
    let axis = |axis: usize| {
        let (input, before, stride) = (x.shape()[axis + 2], options.padding[axis], options.stride[axis]);
        let span =
            (options.kernel[axis].checked_sub(1)?).checked_mul(options.dilation[axis])?.checked_add(1)?;
        let padded = input.checked_add(before)?.checked_add(after[axis])?;
        let last = match options.ceil_mode {
            false => padded.checked_sub(span)?.checked_div(stride)?,
            true => {
                let last =
                    padded.checked_add(stride)?.checked_sub(span)?.checked_sub(1)?.checked_div(stride)?;
                // A window begins in the input, or in the padding before it.
                last.min((input.checked_add(before)?.checked_sub(1)?).checked_div(stride)?)
            }
        };
        let end = isize::try_from(last.checked_mul(stride)?.checked_add(span)?).ok()?;
        let before = isize::try_from(before).ok()?;
        Some([before, end.checked_sub(before)?.checked_sub(isize::try_from(input).ok()?)?])
    };
    match (axis(0), axis(1)) {
        (Some(height), Some(width)) => Ok([height, width]),
        _ => refuse(format!("its windows do not fit its input {:?}", x.shape())),
    }
}

/// A pooling whose padding is part of its input.
fn padded(options: &PoolOptions) -> PoolOptions {
    PoolOptions { padding: [0, 0], padding_after: None, ceil_mode: false, ..*options }
}

pub(super) fn max_pool(inputs: &Inputs<'_>, pool: &Pool) -> Result<Tensor> {
    let (x, options) = pooling(inputs.tensor(0)?, pool)?;
    if pads_fit(&options) {
        return x.back(ops::max_pool2d(&x.tensor, &options)?);
    }
    let [height, width] = reach(&options, &x.tensor)?;
    let image = x.tensor.pad(&[[0, 0], [0, 0], height, width], PadMode::Constant(f64::NEG_INFINITY))?;
    x.back(ops::max_pool2d(&image, &padded(&options))?)
}

pub(super) fn average_pool(inputs: &Inputs<'_>, pool: &Pool) -> Result<Tensor> {
    if pool.dilations.iter().any(|&dilation| dilation != 1) {
        return refuse("an average pooling with dilation is not supported");
    }
    let (x, options) = pooling(inputs.tensor(0)?, pool)?;
    if pads_fit(&options) {
        return x.back(ops::avg_pool2d(&x.tensor, &options)?);
    }
    let [height, width] = reach(&options, &x.tensor)?;
    let whole = |image: &Tensor, [height, width]: [[isize; 2]; 2]| -> Result<Tensor> {
        let image = image.pad(&[[0, 0], [0, 0], height, width], PadMode::Constant(0.0))?;
        Ok(ops::avg_pool2d(&image, &padded(&options))?)
    };
    let mean = whole(&x.tensor, [height, width])?;
    // The share of each window that counts.
    let shape = [&[1, 1], &x.tensor.shape()[2..]].concat();
    let mut counted = Tensor::full(x.tensor.device(), &shape, x.tensor.dtype(), 1.0)?;
    let mut beyond = [height, width];
    if pool.count_include_pad {
        let after = options.padding_after.unwrap_or(options.padding);
        let pads = [0, 1].map(|axis| [options.padding[axis] as isize, after[axis] as isize]);
        counted = counted.pad(&[[0, 0], [0, 0], pads[0], pads[1]], PadMode::Constant(1.0))?;
        beyond = [0, 1].map(|axis| [0, beyond[axis][1] - pads[axis][1]]);
    }
    x.back(mean.div(&whole(&counted, beyond)?)?)
}

/// The mean of each channel. Of images by the kernel of average pooling, as [`crate::modules::GlobalAvgPool2d`].
pub(super) fn global_average(x: &Tensor) -> Result<Tensor> {
    match *x.shape() {
        [_, _, height, width] => {
            let window = [height, width];
            Ok(ops::avg_pool2d(x, &PoolOptions { kernel: window, stride: window, ..PoolOptions::new(1) })?)
        }
        _ => Ok(x.mean_dims(&spatial_axes(x)?, true)?),
    }
}

/// The largest element of each channel. Of images and signals by the kernel of max pooling, whose gradient goes to one element.
pub(super) fn global_max(x: &Tensor) -> Result<Tensor> {
    match x.shape().len() {
        3 | 4 => {
            let x = Images::new(x.clone())?;
            x.back(ops::adaptive_max_pool2d(&x.tensor, [1, 1])?)
        }
        _ => Ok(x.amax(&spatial_axes(x)?, true)?),
    }
}

pub(super) fn resize(inputs: &Inputs<'_>, resize: &Resize) -> Result<Tensor> {
    let x = Images::new(inputs.tensor(0)?)?;
    let rank = x.spatial().len();
    let scales = inputs.optional_known(2)?.filter(|scales| !scales.is_empty());
    let sizes = inputs.optional_integers(3)?.filter(|sizes| !sizes.is_empty());
    // Images and channels are not resized; a file may leave them out.
    let shape = [&x.tensor.shape()[..2], x.spatial()].concat();
    let spatial = |len: usize| len.checked_sub(rank).filter(|&rest| rest == 0 || rest == 2);
    let to = match (scales, sizes) {
        (Some(array), None) => {
            let scales = array.to_f64();
            let Some(rest) = spatial(scales.len()) else {
                return refuse(format!("{scales:?} are not scales of the axes of {shape:?}"));
            };
            if scales[..rest].iter().any(|&scale| scale != 1.0) {
                return refuse(format!("{scales:?} resizes images or channels of {shape:?}"));
            }
            let own = &scales[rest..];
            let scale = if x.signals { [1.0, own[0]] } else { [own[0], own[1]] };
            let spatial = [x.tensor.shape()[2], x.tensor.shape()[3]];
            ResizeTo::SizeByScale { size: scaled_size(spatial, scale, array.kind()), scale }
        }
        (None, Some(sizes)) => {
            let own: Option<Vec<usize>> = sizes.iter().map(|&size| usize::try_from(size).ok()).collect();
            let (Some(rest), Some(own)) = (spatial(sizes.len()), own) else {
                return refuse(format!("{sizes:?} are not sizes of the axes of {shape:?}"));
            };
            let batch = inputs.place.batch;
            let kept = (0..rest).all(|axis| {
                own[axis] == shape[axis] || (axis == 0 && batch == Some([own[axis], shape[axis]]))
            });
            if !kept {
                return refuse(format!("{sizes:?} resizes images or channels of {shape:?}"));
            }
            sizes_to(&x, &own[rest..], resize.aspect)
        }
        _ => return refuse("it has neither scales nor sizes, or both"),
    };
    let [_, _, height, width] = *x.tensor.shape() else { return refuse("its input is not of images") };
    // As PyTorch and ONNX Runtime do, also where a scale is not 1.
    if size_of(to, &x.tensor) == [height, width] {
        return x.back(x.tensor.clone());
    }
    let mode = match resize.mode {
        Interpolation::Of(mode) => mode,
        Interpolation::Cubic { a } => return x.back(cubic::resize(&x.tensor, to, (resize, a))?),
    };
    if let (ResizeTo::SizeByScale { scale, .. }, Some(mode)) = (to, exact(mode, resize.coordinates))
        && scale.iter().all(|&factor| factor.fract() == 0.0 && (1.0..=4096.0).contains(&factor))
    {
        return x.back(ops::upsample2d(&x.tensor, scale.map(|factor| factor as usize), mode)?);
    }
    if let (ResizeTo::Size(size), Some(mode)) = (to, exact(mode, resize.coordinates))
        && height > 0
        && width > 0
        && size[0].is_multiple_of(height)
        && size[1].is_multiple_of(width)
        && size[0] > 0
        && size[1] > 0
    {
        return x.back(ops::upsample2d(&x.tensor, [size[0] / height, size[1] / width], mode)?);
    }
    let (mut image, mut to) = (x.tensor.clone(), to);
    if resize.one_pixel_at_zero {
        for (axis, size) in size_of(to, &x.tensor).into_iter().enumerate() {
            if size == 1 {
                image = image.slice(&[Slice::new(axis as isize + 2, 0, 1)])?;
                if let ResizeTo::SizeByScale { scale, .. } = &mut to {
                    scale[axis] = 1.0;
                }
            }
        }
    }
    x.back(ops::resize2d(&image, &ResizeOptions { to, mode, coordinates: resize.coordinates })?)
}

/// The height and width of a resized image.
pub(super) fn size_of(to: ResizeTo, x: &Tensor) -> [usize; 2] {
    match to {
        ResizeTo::Size(size) | ResizeTo::SizeByScale { size, .. } => size,
        ResizeTo::Scale(scale) => scaled_size([x.shape()[2], x.shape()[3]], scale, Kind::F64),
    }
}

/// Sizes times scales, rounded down. Scales of a file are of single precision, and so are the products: 10 pixels times 1.3, which is
/// 1.29999995 then, are 13.
pub(in crate::graph) fn scaled_size(sizes: [usize; 2], scale: [f64; 2], kind: Kind) -> [usize; 2] {
    // The conversion saturates, and makes 0 of NaN.
    [0, 1].map(|axis| match kind {
        Kind::F32 => (sizes[axis] as f32 * scale[axis] as f32) as usize,
        _ => (sizes[axis] as f64 * scale[axis]) as usize,
    })
}

/// The kernel for whole factors that computes the same.
fn exact(mode: ResizeMode, coordinates: Coordinates) -> Option<UpsampleMode> {
    match (mode, coordinates) {
        (ResizeMode::Nearest(Rounding::Floor | Rounding::FloorOrCeil), Coordinates::Asymmetric) => {
            Some(UpsampleMode::Nearest)
        }
        (
            ResizeMode::Nearest(Rounding::RoundPreferFloor | Rounding::RoundPreferCeil),
            Coordinates::HalfPixel,
        ) => Some(UpsampleMode::Nearest),
        (ResizeMode::Bilinear, Coordinates::HalfPixel) => Some(UpsampleMode::Bilinear),
        _ => None,
    }
}

fn sizes_to(x: &Images, sizes: &[usize], aspect: Aspect) -> ResizeTo {
    let [_, _, height, width] = *x.tensor.shape() else { return ResizeTo::Size([0, 0]) };
    let wanted = if x.signals { [1, sizes[0]] } else { [sizes[0], sizes[1]] };
    if aspect == Aspect::Stretch || x.signals {
        return ResizeTo::Size(wanted);
    }
    let ratios = [wanted[0] as f64 / height as f64, wanted[1] as f64 / width as f64];
    let ratio = match aspect {
        Aspect::NotLarger => ratios[0].min(ratios[1]),
        _ => ratios[0].max(ratios[1]),
    };
    ResizeTo::Size([(height as f64 * ratio).round() as usize, (width as f64 * ratio).round() as usize])
}
