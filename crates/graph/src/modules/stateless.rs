//! Layers without state: activations, pooling, upsampling, resizing, reshaping.

use convoke_autograd::ops::{self, Pool1dOptions, PoolOptions, ResizeOptions, ResizeTo};
use convoke_autograd::{Result, Tensor};

use crate::{Forward, Module};

/// max(0, x).
#[derive(Module, Debug, Clone, Copy, Default)]
pub struct Relu;

/// Joins all dimensions but the first.
#[derive(Module, Debug, Clone, Copy, Default)]
pub struct Flatten;

/// Log-softmax over the channels.
#[derive(Module, Debug, Clone, Copy, Default)]
pub struct LogSoftmax;

/// The largest value of each window.
#[derive(Module, Debug, Clone, Copy)]
pub struct MaxPool2d(#[module(skip)] pub PoolOptions);

/// The mean of each window.
#[derive(Module, Debug, Clone, Copy)]
pub struct AvgPool2d(#[module(skip)] pub PoolOptions);

/// The largest value of each window of N x C x L.
#[derive(Module, Debug, Clone, Copy)]
pub struct MaxPool1d(#[module(skip)] pub Pool1dOptions);

/// The mean of each window of N x C x L.
#[derive(Module, Debug, Clone, Copy)]
pub struct AvgPool1d(#[module(skip)] pub Pool1dOptions);

/// The mean of each of so many windows (height, width), which divide the input as evenly as they can, as PyTorch's
/// `AdaptiveAvgPool2d`.
#[derive(Module, Debug, Clone, Copy)]
pub struct AdaptiveAvgPool2d(#[module(skip)] pub [usize; 2]);

/// The largest value of each of so many windows (height, width), as PyTorch's `AdaptiveMaxPool2d`.
#[derive(Module, Debug, Clone, Copy)]
pub struct AdaptiveMaxPool2d(#[module(skip)] pub [usize; 2]);

/// Resizes images to any size, as PyTorch's `Upsample` and ONNX's `Resize`.
#[derive(Module, Debug, Clone, Copy)]
pub struct Resize(#[module(skip)] pub ResizeOptions);

impl Resize {
    /// Multiplies height and width by a factor, as PyTorch's `Upsample` with the mode `nearest`.
    pub fn nearest(factor: f64) -> Resize {
        Resize(ResizeOptions::nearest(ResizeTo::Scale([factor; 2])))
    }

    /// Multiplies height and width by a factor, as PyTorch's `Upsample` with the mode `bilinear`.
    pub fn bilinear(factor: f64) -> Resize {
        Resize(ResizeOptions::bilinear(ResizeTo::Scale([factor; 2]), false))
    }
}

/// The mean of each channel of each image: N x C x H x W to N x C x 1 x 1, as PyTorch's `AdaptiveAvgPool2d(1)`.
#[derive(Module, Debug, Clone, Copy, Default)]
pub struct GlobalAvgPool2d;

/// What the layers compute.
macro_rules! forward {
    ($($name:ident: |$layer:pat_param, $input:ident| $output:expr;)*) => {$(
        impl Forward for $name {
            fn forward(&self, $input: &Tensor) -> Result<Tensor> {
                let $layer = self;
                $output
            }
        }
    )*};
}

forward! {
    Relu: |_, input| input.relu();
    Flatten: |_, input| input.flatten();
    LogSoftmax: |_, input| ops::log_softmax(input);
    MaxPool2d: |MaxPool2d(options), input| ops::max_pool2d(input, options);
    AvgPool2d: |AvgPool2d(options), input| ops::avg_pool2d(input, options);
    MaxPool1d: |MaxPool1d(options), input| ops::max_pool1d(input, options);
    AvgPool1d: |AvgPool1d(options), input| ops::avg_pool1d(input, options);
    AdaptiveAvgPool2d: |AdaptiveAvgPool2d(size), input| ops::adaptive_avg_pool2d(input, *size);
    AdaptiveMaxPool2d: |AdaptiveMaxPool2d(size), input| ops::adaptive_max_pool2d(input, *size);
    Resize: |Resize(options), input| ops::resize2d(input, options);
    GlobalAvgPool2d: |_, input| {
        // By the kernel of average pooling, whose bits earlier results have. The operation refuses an input with another number of
        // dimensions.
        let window = if let &[_, _, height, width] = input.shape() { [height, width] } else { [1; 2] };
        ops::avg_pool2d(input, &PoolOptions { kernel: window, stride: window, ..PoolOptions::new(1) })
    };
}
