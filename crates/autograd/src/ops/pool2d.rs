//! Max and average pooling.

use std::sync::Arc;

use convoke_kernels::memory::Bytes;
use convoke_kernels::pool::{
    self, Divisor, MaxPoolPass, PoolAxis, PoolEnd, PoolProblem, WindowIndices, WindowIndicesMut,
};

use super::{empty, four_dimensions};
use crate::error::{invalid, refused};
use crate::planes::{OfPlanes, PlaneMap};
use crate::{Cpu, DType, Function, MemoryFormat, Needs, Operation, Result, Tensor, apply};
use convoke_kernels::{Slice, SliceMut};

/// The windows of a pooling, height before width, as PyTorch's `max_pool2d` and `avg_pool2d` take them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PoolOptions {
    /// Window size.
    pub kernel: [usize; 2],
    /// Step between windows.
    pub stride: [usize; 2],
    /// Padding on both sides, at most half the window.
    pub padding: [usize; 2],
    /// Padding at the bottom and at the right, if it differs from that at the top and at the left, as in ONNX.
    pub padding_after: Option<[usize; 2]>,
    /// Step between window elements; 1 for averages.
    pub dilation: [usize; 2],
    /// Whether a last window that extends beyond the end counts. It does only if it starts in the input or in the padding
    /// before it, as in PyTorch and in ONNX from its opset 19 on.
    pub ceil_mode: bool,
    /// Whether averages count padding in their divisor. What lies beyond it, where `ceil_mode` lets a window extend, does not count.
    pub count_include_pad: bool,
    /// What averages divide the sum over a window by, instead of the number of its elements.
    pub divisor_override: Option<usize>,
}

impl PoolOptions {
    /// Square windows that do not overlap.
    pub fn new(kernel: usize) -> PoolOptions {
        PoolOptions {
            kernel: [kernel; 2],
            stride: [kernel; 2],
            padding: [0; 2],
            padding_after: None,
            dilation: [1; 2],
            ceil_mode: false,
            count_include_pad: true,
            divisor_override: None,
        }
    }

    fn divisor(&self) -> Divisor {
        match (self.divisor_override, self.count_include_pad) {
            (Some(divisor), _) => Divisor::Fixed(divisor),
            (None, true) => Divisor::Padded,
            (None, false) => Divisor::Inside,
        }
    }

    /// The problem of pooling a tensor of this shape. If it has no images, it is that of one image, and nothing runs.
    pub(super) fn problem(
        &self,
        operation: &'static str,
        shape: [usize; 4],
        format: MemoryFormat,
    ) -> Result<PoolProblem> {
        let [batch, channels, height, width] = shape;
        let axis = |index: usize, input: usize| PoolAxis {
            input,
            kernel: self.kernel[index],
            stride: self.stride[index],
            padding: self.padding[index],
            dilation: self.dilation[index],
        };
        let axes = [axis(0, height), axis(1, width)];
        let padding = self.padding_after.unwrap_or(self.padding);
        let end = PoolEnd { padding, ceil_mode: self.ceil_mode };
        let explain = |reason: String| format!("{reason}; the input is {shape:?}");
        PoolProblem::ending([batch.max(1), channels], axes, end, format).map_err(refused(operation, explain))
    }
}

/// The largest value of each window of an N x C x H x W tensor. Saves one byte per output (two for windows of more than 256
/// elements).
///
/// # Errors
/// If the windows do not fit the input.
pub fn max_pool2d(x: &Tensor, options: &PoolOptions) -> Result<Tensor> {
    apply(MaxPool::new("max_pool2d", options, x)?, &[x])
}

/// The mean of each window of an N x C x H x W tensor. Saves nothing.
///
/// # Errors
/// If the windows do not fit the input, or have dilation.
pub fn avg_pool2d(x: &Tensor, options: &PoolOptions) -> Result<Tensor> {
    apply(AveragePool::new("avg_pool2d", options, x)?, &[x])
}

/// A max pooling, under the name of the operation that runs it.
pub(super) struct MaxPool {
    name: &'static str,
    options: PoolOptions,
    problem: PoolProblem,
    input_shape: Vec<usize>,
}

impl MaxPool {
    /// The pooling of `x`, checked.
    pub(super) fn new(name: &'static str, options: &PoolOptions, x: &Tensor) -> Result<MaxPool> {
        let problem = options.problem(name, four_dimensions(name, "input", x)?, x.format())?;
        Ok(MaxPool { name, options: *options, problem, input_shape: x.shape().to_vec() })
    }
}

/// For every output, the index of its element in the window.
#[derive(Clone)]
pub(super) enum Indices {
    None,
    Bytes(Arc<Bytes>),
    Shorts(Arc<Bytes>),
}

impl Function for MaxPool {
    type Saved = Indices;

    fn name(&self) -> &'static str {
        self.name
    }

    fn describe(&self) -> Option<Operation> {
        Some(Operation::MaxPool(self.options))
    }

    fn takes(&self, _: usize, _: DType) -> bool {
        true
    }

    fn forward(&self, inputs: &[&Tensor], needs: &Needs) -> Result<(Tensor, Indices)> {
        let x = inputs[0];
        if x.is_empty() {
            return Ok((empty(&self.problem.output_shape(), x)?, Indices::None));
        }
        let (device, shape) = (x.device(), self.problem.output_shape());
        let cpu = device.compute();
        let len = shape.iter().product();
        let pass = if needs.any() { MaxPoolPass::Forward } else { MaxPoolPass::Inference };
        let algorithm = device.max_pool_algorithm(&self.problem, x.dtype(), pass);
        let mut indices = Indices::None;
        let y = Tensor::build_elements((device, x.dtype()), &shape, x.format(), |y| {
            let x = x.elements()?;
            let run = |taken| algorithm.forward(cpu, &self.problem, x, y, taken);
            if !needs.any() {
                run(None)?;
            } else if self.problem.window_len() <= 256 {
                let mut taken = device.bytes::<u8>(len)?;
                run(Some(WindowIndicesMut::Bytes(taken.elements_mut())))?;
                indices = Indices::Bytes(Arc::new(taken));
            } else {
                let mut taken = device.bytes::<u16>(len)?;
                run(Some(WindowIndicesMut::Shorts(taken.elements_mut())))?;
                indices = Indices::Shorts(Arc::new(taken));
            }
            Ok(())
        })?;
        Ok((y, indices))
    }

    fn backward(&self, indices: Indices, upstream: Tensor, _: &Needs) -> Result<Vec<Option<Tensor>>> {
        if upstream.is_empty() {
            return Ok(vec![Some(empty(&self.input_shape, &upstream)?)]);
        }
        let (device, format) = (upstream.device(), upstream.format());
        let cpu = device.compute();
        let algorithm = device.max_pool_algorithm(&self.problem, upstream.dtype(), MaxPoolPass::Backward);
        let of = (device, upstream.dtype());
        let dx = Tensor::build_elements(of, &self.input_shape, format, |dx| {
            let indices = match &indices {
                Indices::Bytes(taken) => WindowIndices::Bytes(taken.elements()),
                Indices::Shorts(taken) => WindowIndices::Shorts(taken.elements()),
                Indices::None => unreachable!("backward runs only where forward was told that it would"),
            };
            Ok(algorithm.backward(cpu, &self.problem, upstream.elements()?, indices, dx)?)
        })?;
        Ok(vec![Some(dx)])
    }
}

/// An average pooling, under the name of the operation that runs it.
pub(super) struct AveragePool {
    name: &'static str,
    options: PoolOptions,
    problem: PoolProblem,
    divisor: Divisor,
}

impl AveragePool {
    /// The pooling of `x`, checked.
    pub(super) fn new(
        name: &'static str,
        options: &PoolOptions,
        x: &Tensor,
    ) -> Result<OfPlanes<AveragePool>> {
        let problem = options.problem(name, four_dimensions(name, "input", x)?, x.format())?;
        let divisor = options.divisor();
        if divisor == Divisor::Fixed(0) {
            return Err(invalid(name, format!("divisor_override is 0; the input is {:?}", x.shape())));
        }
        Ok(OfPlanes::new(AveragePool { name, options: *options, problem, divisor }, x))
    }
}

impl PlaneMap for AveragePool {
    fn name(&self) -> &'static str {
        self.name
    }

    fn describe(&self) -> Operation {
        Operation::AveragePool(self.options)
    }

    fn takes(&self, _: DType) -> bool {
        true
    }

    fn output_shape(&self) -> [usize; 4] {
        self.problem.output_shape()
    }

    fn forward(&self, cpu: &Cpu, x: Slice<'_>, y: SliceMut<'_>) -> convoke_kernels::Result<()> {
        pool::average_pool(cpu, &self.problem, self.divisor, x, y)
    }

    fn backward(&self, cpu: &Cpu, dy: Slice<'_>, dx: SliceMut<'_>) -> convoke_kernels::Result<()> {
        pool::average_pool_backward(cpu, &self.problem, self.divisor, dy, dx)
    }
}
