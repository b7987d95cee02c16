//! Convolution and pooling of N x C x L, which run as those of N x C x 1 x L: the elements have the same order in memory.

use super::conv2d::Conv2d;
use super::pool2d::{AveragePool, MaxPool};
use super::{ConvOptions, Padding, PoolOptions};
use crate::error::invalid;
use crate::{DType, Function, Needs, Operation, Result, Tensor, apply};

/// How a 1-D convolution steps over its input, as PyTorch's `conv1d` takes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Conv1dOptions {
    /// Step between outputs.
    pub stride: usize,
    /// Zeros before and after the input.
    pub padding: [usize; 2],
    /// Step between kernel elements.
    pub dilation: usize,
    /// Groups of channels that do not mix.
    pub groups: usize,
}

impl Default for Conv1dOptions {
    fn default() -> Conv1dOptions {
        Conv1dOptions { stride: 1, padding: [0, 0], dilation: 1, groups: 1 }
    }
}

/// The windows of a 1-D pooling, as PyTorch's `max_pool1d` and `avg_pool1d` take them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pool1dOptions {
    /// Window size.
    pub kernel: usize,
    /// Step between windows.
    pub stride: usize,
    /// Padding on both sides, at most half the window.
    pub padding: usize,
    /// Step between window elements; 1 for averages.
    pub dilation: usize,
    /// Whether a last window that extends beyond the end counts.
    pub ceil_mode: bool,
    /// Whether averages count padding in their divisor.
    pub count_include_pad: bool,
}

impl Pool1dOptions {
    /// Windows that do not overlap.
    pub fn new(kernel: usize) -> Pool1dOptions {
        Pool1dOptions {
            kernel,
            stride: kernel,
            padding: 0,
            dilation: 1,
            ceil_mode: false,
            count_include_pad: true,
        }
    }

    /// The windows along the width of images of height 1.
    fn along_width(&self) -> PoolOptions {
        PoolOptions {
            kernel: [1, self.kernel],
            stride: [1, self.stride],
            padding: [0, self.padding],
            dilation: [1, self.dilation],
            ceil_mode: self.ceil_mode,
            count_include_pad: self.count_include_pad,
            ..PoolOptions::new(1)
        }
    }
}

/// Convolves `x` (N x C x L) with `weight` (K x C/groups x S), plus `bias` (K), as PyTorch's `conv1d`.
///
/// The output has the memory format of `x`.
///
/// # Errors
/// If the shapes do not fit: the error names both, as images of height 1.
pub fn conv1d(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>, options: &Conv1dOptions) -> Result<Tensor> {
    let name = "conv1d";
    three_dimensions(name, "input", x)?;
    three_dimensions(name, "weight", weight)?;
    let &Conv1dOptions { stride, padding: [left, right], dilation, groups } = options;
    let padding = Padding { left, right, ..Padding::default() };
    let options = ConvOptions { stride: [1, stride], padding, dilation: [1, dilation], groups };
    let inputs = [Some(x), Some(weight), bias];
    let inputs: Vec<&Tensor> = inputs.into_iter().flatten().collect();
    apply(AlongWidth(Conv2d { name, options }), &inputs)
}

/// The largest value of each window of an N x C x L tensor. Saves one byte per output (two for windows of more than 256
/// elements).
///
/// # Errors
/// If the windows do not fit the input.
pub fn max_pool1d(x: &Tensor, options: &Pool1dOptions) -> Result<Tensor> {
    let name = "max_pool1d";
    three_dimensions(name, "input", x)?;
    apply(AlongWidth(MaxPool::new(name, &options.along_width(), &image(x))?), &[x])
}

/// The mean of each window of an N x C x L tensor. Saves nothing.
///
/// # Errors
/// If the windows do not fit the input, or have dilation.
pub fn avg_pool1d(x: &Tensor, options: &Pool1dOptions) -> Result<Tensor> {
    let name = "avg_pool1d";
    three_dimensions(name, "input", x)?;
    apply(AlongWidth(AveragePool::new(name, &options.along_width(), &image(x))?), &[x])
}

fn three_dimensions(operation: &'static str, operand: &str, tensor: &Tensor) -> Result<()> {
    match tensor.shape() {
        [_, _, _] => Ok(()),
        shape => {
            let dimensions = shape.len();
            Err(invalid(operation, format!("expected a 3D {operand} (got {dimensions}D: {shape:?})")))
        }
    }
}

/// A function of images, run on N x C x L tensors, which it gets as images of height 1. Inputs with another number of
/// dimensions stay what they are.
struct AlongWidth<F>(F);

/// N x C x 1 x L of N x C x L.
fn image(tensor: &Tensor) -> Tensor {
    match tensor.shape() {
        &[batch, channels, length] => tensor.viewed(&[batch, channels, 1, length]),
        _ => tensor.clone(),
    }
}

/// N x C x L of N x C x 1 x L.
fn line(tensor: Tensor) -> Tensor {
    match tensor.shape() {
        &[batch, channels, 1, length] => tensor.viewed(&[batch, channels, length]),
        _ => tensor,
    }
}

impl<F: Function> Function for AlongWidth<F> {
    type Saved = F::Saved;

    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn describe(&self) -> Option<Operation> {
        self.0.describe()
    }

    fn takes(&self, input: usize, dtype: DType) -> bool {
        self.0.takes(input, dtype)
    }

    fn forward(&self, inputs: &[&Tensor], needs: &Needs) -> Result<(Tensor, F::Saved)> {
        let images: Vec<Tensor> = inputs.iter().map(|input| image(input)).collect();
        let (y, saved) = self.0.forward(&images.iter().collect::<Vec<_>>(), needs)?;
        Ok((line(y), saved))
    }

    fn backward(&self, saved: F::Saved, upstream: Tensor, needs: &Needs) -> Result<Vec<Option<Tensor>>> {
        self.backward_onto(saved, upstream, needs, &mut [])
    }

    fn backward_onto(
        &self,
        saved: F::Saved,
        upstream: Tensor,
        needs: &Needs,
        sums: &mut [Option<Tensor>],
    ) -> Result<Vec<Option<Tensor>>> {
        let dy = image(&upstream);
        // Nobody else may hold what is written to.
        drop(upstream);
        for sum in sums.iter_mut() {
            *sum = sum.take().map(|sum| image(&sum));
        }
        let gradients = self.0.backward_onto(saved, dy, needs, sums)?;
        for sum in sums.iter_mut() {
            *sum = sum.take().map(line);
        }
        Ok(gradients.into_iter().map(|gradient| gradient.map(line)).collect())
    }
}
