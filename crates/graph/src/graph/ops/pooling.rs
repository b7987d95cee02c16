//! Poolings: the largest value or the mean of windows.

use convoke_autograd::ops::{self, PadMode, Padding, PoolOptions};

use super::windows::{Images, MOST_AXES, Pads, axes, padding, read_pads, read_per_axis, write_pads};
use super::*;

/// Windows of a pooling.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Pool {
    /// Sizes of a window.
    pub kernel: Vec<usize>,
    /// Step between windows.
    pub strides: Vec<usize>,
    /// How the input is padded.
    pub pads: Pads,
    /// Step between window elements; 1 for averages.
    pub dilations: Vec<usize>,
    /// Whether a last window may extend beyond the end.
    pub ceil_mode: bool,
    /// Whether averages count padding.
    pub count_include_pad: bool,
}

pub(super) const MAX_POOL: Operator<Pool> = Operator {
    read: &[Reader("MaxPool", (1, 1), |node| {
        // The order of indices, which are no output here.
        node.attributes.ignore(&["storage_order"]);
        Ok(Op::MaxPool(Pool::read(node)?))
    })],
    write: |pool, to| Ok(pool.write(to).sizes("dilations", &pool.dilations)),
    known: Known::Never,
    run: Run::One(max_pool),
    uses: other,
    gives: |pool, from| from.ranked(Some(pool.kernel.len() + 2)),
};

pub(super) const AVERAGE_POOL: Operator<Pool> = Operator {
    read: &[Reader("AveragePool", (1, 1), |node| {
        let count_include_pad = node.attributes.flag("count_include_pad", false)?;
        let pool = Pool::read(node)?;
        if pool.dilations.iter().any(|dilation| *dilation != 1) {
            return Err("its windows are dilated, which is not supported for averages".into());
        }
        Ok(Op::AveragePool(Pool { count_include_pad, ..pool }))
    })],
    write: |pool, to| {
        if pool.dilations.iter().any(|dilation| *dilation != 1) {
            return Err("its windows are dilated".into());
        }
        Ok(pool.write(to).int("count_include_pad", pool.count_include_pad))
    },
    run: Run::One(average_pool),
    ..MAX_POOL
};

pub(super) const GLOBAL_AVERAGE_POOL: Operator<()> = Operator {
    read: &[Reader("GlobalAveragePool", (1, 1), |_| Ok(Op::GlobalAveragePool))],
    write: plain,
    known: Known::Never,
    run: Run::One(|(), inputs| global_average(&inputs.tensor(0)?)),
    uses: other,
    gives: like_first,
};

pub(super) const GLOBAL_MAX_POOL: Operator<()> = Operator {
    read: &[Reader("GlobalMaxPool", (1, 1), |_| Ok(Op::GlobalMaxPool))],
    run: Run::One(|(), inputs| global_max(&inputs.tensor(0)?)),
    ..GLOBAL_AVERAGE_POOL
};

pub(super) const ADAPTIVE_AVERAGE_POOL: Operator<[usize; 2]> = Operator {
    read: &[],
    write: |size, to| match size {
        [1, 1] => Ok(to.named("GlobalAveragePool")),
        _ => Err("ONNX has no such operator, but for one window".into()),
    },
    known: Known::Never,
    run: Run::One(|&size, inputs| {
        let x = inputs.tensor(0)?;
        if size == [1, 1] { global_average(&x) } else { Ok(ops::adaptive_avg_pool2d(&x, size)?) }
    }),
    uses: other,
    gives: |_, from| from.ranked(Some(4)),
};

impl Pool {
    fn read(node: &mut NodeReader<'_>) -> Answer<Pool> {
        let kernel = node.attributes.sizes("kernel_shape")?.ok_or("its kernel_shape is missing")?;
        let axes = kernel.len();
        if !(1..=MOST_AXES).contains(&axes) {
            return Err(format!("it has {axes} spatial axes"));
        }
        Ok(Pool {
            kernel,
            strides: read_per_axis(node, "strides", (axes, 1))?,
            pads: read_pads(node, axes)?,
            dilations: read_per_axis(node, "dilations", (axes, 1))?,
            ceil_mode: node.attributes.flag("ceil_mode", false)?,
            count_include_pad: false,
        })
    }

    fn write<'a>(&self, to: &NodeWriter<'_, 'a>) -> OnnxNode<'a> {
        let node = to.op().sizes("kernel_shape", &self.kernel).sizes("strides", &self.strides);
        write_pads(node, &self.pads).int("ceil_mode", self.ceil_mode)
    }

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

fn max_pool(pool: &Pool, inputs: &Inputs<'_>) -> Result<Tensor> {
    let (x, options) = pooling(inputs.tensor(0)?, pool)?;
    if pads_fit(&options) {
        return x.back(ops::max_pool2d(&x.tensor, &options)?);
    }
    let [height, width] = reach(&options, &x.tensor)?;
    let image = x.tensor.pad(&[[0, 0], [0, 0], height, width], PadMode::Constant(f64::NEG_INFINITY))?;
    x.back(ops::max_pool2d(&image, &padded(&options))?)
}

fn average_pool(pool: &Pool, inputs: &Inputs<'_>) -> Result<Tensor> {
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
fn global_max(x: &Tensor) -> Result<Tensor> {
    match x.shape().len() {
        3 | 4 => {
            let x = Images::new(x.clone())?;
            x.back(ops::adaptive_max_pool2d(&x.tensor, [1, 1])?)
        }
        _ => Ok(x.amax(&spatial_axes(x)?, true)?),
    }
}

/// All axes but those of images and channels.
fn spatial_axes(x: &Tensor) -> Result<Vec<isize>> {
    match x.shape().len() {
        rank if rank > 2 => Ok((2..rank as isize).collect()),
        _ => refuse(format!("its input {:?} has no spatial dimensions", x.shape())),
    }
}
