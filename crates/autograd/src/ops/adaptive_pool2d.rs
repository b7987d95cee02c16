//! Max and average pooling to a chosen output size.

use std::sync::Arc;

use convoke_kernels::memory::Bytes;
use convoke_kernels::pool::{self, AdaptivePool};

use super::pool2d::{MaxPool, PoolOptions};
use super::{empty, four_dimensions};
use crate::error::refused;
use crate::planes::{OfPlanes, PlaneMap};
use crate::{Cpu, DType, Function, Needs, Operation, Result, Tensor, apply};
use convoke_kernels::{Slice, SliceMut};

/// The mean of each of `size` (height, width) windows of an N x C x H x W tensor, as PyTorch's `adaptive_avg_pool2d`: window i
/// of an axis is `floor(i input / output)..ceil((i + 1) input / output)`. Saves nothing.
///
/// The size `[1, 1]` gives the mean of each channel, summed in f64.
///
/// # Errors
/// If the tensor does not have four dimensions, or a size other than N is 0.
pub fn adaptive_avg_pool2d(x: &Tensor, size: [usize; 2]) -> Result<Tensor> {
    let name = "adaptive_avg_pool2d";
    let average = AdaptiveAverage { name, problem: problem(name, x, size)? };
    apply(OfPlanes::new(average, x), &[x])
}

/// The largest value of each of `size` (height, width) windows, which are those of [`adaptive_avg_pool2d`]. Saves four bytes per
/// output; less where several windows divide the input evenly, which is an ordinary max pooling.
///
/// # Errors
/// As [`adaptive_avg_pool2d`]; planes of more than 2^32 places.
pub fn adaptive_max_pool2d(x: &Tensor, size: [usize; 2]) -> Result<Tensor> {
    let name = "adaptive_max_pool2d";
    let problem = problem(name, x, size)?;
    // Kernels of ordinary pooling are for small windows.
    let even = if size == [1, 1] { None } else { problem.even_window() };
    let ordinary = even.filter(|window| window[0].saturating_mul(window[1]) <= 1 << 16);
    if let Some(window) = ordinary {
        let options = PoolOptions { kernel: window, stride: window, ..PoolOptions::new(1) };
        return apply(MaxPool::new(name, &options, x)?, &[x]);
    }
    apply(AdaptiveMax { name, problem, input_shape: x.shape().to_vec() }, &[x])
}

/// If there are no images, the problem is that of one image, and nothing runs.
fn problem(name: &'static str, x: &Tensor, size: [usize; 2]) -> Result<AdaptivePool> {
    let [batch, channels, height, width] = four_dimensions(name, "input", x)?;
    let explain = |reason: String| format!("{reason}; the input is {:?}, the size {size:?}", x.shape());
    AdaptivePool::new([batch.max(1), channels], [height, width], size, x.format())
        .map_err(refused(name, explain))
}

struct AdaptiveAverage {
    name: &'static str,
    problem: AdaptivePool,
}

impl PlaneMap for AdaptiveAverage {
    fn name(&self) -> &'static str {
        self.name
    }

    fn describe(&self) -> Operation {
        Operation::AdaptivePool { max: false }
    }

    fn takes(&self, _: DType) -> bool {
        true
    }

    fn output_shape(&self) -> [usize; 4] {
        self.problem.output_shape()
    }

    fn forward(&self, cpu: &Cpu, x: Slice<'_>, y: SliceMut<'_>) -> convoke_kernels::Result<()> {
        pool::adaptive_average_pool(cpu, &self.problem, x, y)
    }

    fn backward(&self, cpu: &Cpu, dy: Slice<'_>, dx: SliceMut<'_>) -> convoke_kernels::Result<()> {
        pool::adaptive_average_pool_backward(cpu, &self.problem, dy, dx)
    }
}

struct AdaptiveMax {
    name: &'static str,
    problem: AdaptivePool,
    input_shape: Vec<usize>,
}

impl Function for AdaptiveMax {
    /// The place of each maximum in its plane.
    type Saved = Option<Arc<Bytes>>;

    fn name(&self) -> &'static str {
        self.name
    }

    fn describe(&self) -> Option<Operation> {
        Some(Operation::AdaptivePool { max: true })
    }

    fn takes(&self, _: usize, _: DType) -> bool {
        true
    }

    fn forward(&self, inputs: &[&Tensor], _: &Needs) -> Result<(Tensor, Self::Saved)> {
        let (x, shape) = (inputs[0], self.problem.output_shape());
        if x.is_empty() {
            return Ok((empty(&shape, x)?, None));
        }
        let mut places = x.device().bytes::<u32>(shape.iter().product())?;
        let y = Tensor::build_elements((x.device(), x.dtype()), &shape, x.format(), |y| {
            let cpu = x.device().compute();
            Ok(pool::adaptive_max_pool(cpu, &self.problem, places.elements_mut(), x.elements()?, y)?)
        })?;
        Ok((y, Some(Arc::new(places))))
    }

    fn backward(&self, places: Self::Saved, upstream: Tensor, _: &Needs) -> Result<Vec<Option<Tensor>>> {
        let Some(places) = places else {
            return Ok(vec![Some(empty(&self.input_shape, &upstream)?)]);
        };
        let (device, format) = (upstream.device(), upstream.format());
        let dx = Tensor::build_elements((device, upstream.dtype()), &self.input_shape, format, |dx| {
            let (cpu, dy) = (device.compute(), upstream.elements()?);
            Ok(pool::adaptive_max_pool_backward(cpu, &self.problem, places.elements(), dy, dx)?)
        })?;
        Ok(vec![Some(dx)])
    }
}
