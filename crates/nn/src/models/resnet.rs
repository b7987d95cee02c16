//! Residual networks for classification of CIFAR-sized and ImageNet-sized images.
//!
//! K. He, X. Zhang, S. Ren, J. Sun, "Deep residual learning for image recognition", 2015.

use convoke_autograd::{Result, Tensor};

use super::{ModelSpec, torchvision};
use crate::modules::{
    Activation, BatchNorm2d, BatchNormConfig, Conv2d, ConvBn2d, ConvBnMode, ConvOptions, Flatten,
    GlobalAvgPool2d, Linear, LogSoftmax, Padding, PoolOptions, Sequential,
};
use crate::{Forward, Init, Module};

/// The smallest height and width that [`resnet20`] is meant for: its last stage has a quarter of them.
const RESNET20_LEAST: usize = 8;
/// The smallest height and width that [`resnet50`] is meant for: its last stage has a 32nd of them.
const RESNET50_LEAST: usize = 32;

pub(super) fn resnet20_spec() -> ModelSpec {
    let spec = ModelSpec::new("resnet20", [3, 32, 32], 10, |init, options| {
        resnet20(init, options.conv_bn, options.image[0], options.classes)
    });
    of_size(spec, RESNET20_LEAST)
}

pub(super) fn resnet50_spec() -> ModelSpec {
    let spec = ModelSpec::new("resnet50", [3, 224, 224], 1000, |init, options| {
        resnet50(init, options.conv_bn, options.image[0], options.classes)
    });
    let spec = spec.with_definition(|options| torchvision::resnet50(options.image[0], options.classes));
    of_size(spec, RESNET50_LEAST)
}

/// The same spec for images of at least this height and width.
fn of_size(spec: ModelSpec, least: usize) -> ModelSpec {
    spec.takes(format!("images of {least} x {least} pixels or more"), move |info| {
        info.height.min(info.width) >= least
    })
}

/// A square convolution of this stride that keeps the size at stride 1, its batch norm, and an activation. The convolution has
/// no bias; its initial weights are Kaiming normal by fan_out, as torchvision's.
fn block(
    (init, mode): (&Init, ConvBnMode),
    channels: [usize; 2],
    kernel: usize,
    stride: usize,
    activation: Activation,
) -> Result<ConvBn2d> {
    let padding = Padding::symmetric([kernel / 2; 2]);
    let options = ConvOptions { stride: [stride; 2], padding, ..ConvOptions::default() };
    let mut conv = Conv2d::new(init, channels, [kernel; 2], options, false)?;
    let shape = [channels[1], channels[0], kernel, kernel];
    conv.weight = init.kaiming_normal(&shape, channels[1] * kernel * kernel)?;
    let bn = BatchNorm2d::new(init, channels[1], BatchNormConfig::default())?;
    Ok(ConvBn2d::new(conv, bn, activation, mode))
}

/// The shortcut past a block: a 1x1 convolution with batch norm where the shape changes (the paper's option B), else nothing.
fn shortcut(how: (&Init, ConvBnMode), channels: [usize; 2], stride: usize) -> Result<Option<ConvBn2d>> {
    let changes = stride != 1 || channels[0] != channels[1];
    changes.then(|| block(how, channels, 1, stride, Activation::Identity)).transpose()
}

/// The output of a block's shortcut.
fn past(downsample: Option<&ConvBn2d>, input: &Tensor) -> Result<Tensor> {
    downsample.map_or_else(|| Ok(input.clone()), |downsample| downsample.forward(input))
}

/// A residual block of two 3x3 convolutions, each with batch norm and ReLU; the second ReLU follows the addition.
///
/// Children are `conv1`, `conv2` and, where the shape changes, `downsample`: a 1x1 convolution with batch norm as the shortcut.
#[derive(Module)]
pub struct BasicBlock {
    conv1: ConvBn2d,
    conv2: ConvBn2d,
    downsample: Option<ConvBn2d>,
}

impl BasicBlock {
    /// A block with these numbers of input and output channels; the first convolution and `downsample` have the stride.
    ///
    /// # Errors
    /// If a number of channels is 0 or too large.
    pub fn new(init: &Init, mode: ConvBnMode, channels: [usize; 2], stride: usize) -> Result<BasicBlock> {
        let (how, [inputs, outputs]) = ((init, mode), channels);
        Ok(BasicBlock {
            conv1: block(how, [inputs, outputs], 3, stride, Activation::Relu)?,
            conv2: block(how, [outputs, outputs], 3, 1, Activation::Relu)?,
            downsample: shortcut(how, channels, stride)?,
        })
    }
}

impl Forward for BasicBlock {
    fn forward(&self, input: &Tensor) -> Result<Tensor> {
        let inner = self.conv1.forward(input)?;
        self.conv2.forward_added(&inner, &past(self.downsample.as_ref(), input)?)
    }
}

/// A residual block of a 1x1, a 3x3 and a 1x1 convolution, each with batch norm and ReLU. The last one outputs four times as
/// many channels, and its ReLU follows the addition.
///
/// Children are `conv1`, `conv2`, `conv3` and, where the shape changes, `downsample`. The 3x3 convolution has the stride, as in
/// torchvision's "v1.5"; in the paper, the first convolution has it.
#[derive(Module)]
pub struct Bottleneck {
    conv1: ConvBn2d,
    conv2: ConvBn2d,
    conv3: ConvBn2d,
    downsample: Option<ConvBn2d>,
}

impl Bottleneck {
    /// Output channels of a block for each channel of its inner convolutions.
    pub const EXPANSION: usize = 4;

    /// A block from `inputs` channels to four times `width`.
    ///
    /// # Errors
    /// If a number of channels is 0 or too large.
    pub fn new(
        init: &Init,
        mode: ConvBnMode,
        [inputs, width]: [usize; 2],
        stride: usize,
    ) -> Result<Bottleneck> {
        let (how, outputs) = ((init, mode), width.saturating_mul(Bottleneck::EXPANSION));
        Ok(Bottleneck {
            conv1: block(how, [inputs, width], 1, 1, Activation::Relu)?,
            conv2: block(how, [width, width], 3, stride, Activation::Relu)?,
            conv3: block(how, [width, outputs], 1, 1, Activation::Relu)?,
            downsample: shortcut(how, [inputs, outputs], stride)?,
        })
    }
}

impl Forward for Bottleneck {
    fn forward(&self, input: &Tensor) -> Result<Tensor> {
        let inner = self.conv2.forward(&self.conv1.forward(input)?)?;
        self.conv3.forward_added(&inner, &past(self.downsample.as_ref(), input)?)
    }
}

/// The network of 20 layers for CIFAR: N x `channels` x H x W images, of 8 x 8 pixels or more, to N x `classes`
/// log-probabilities.
///
/// It has a 3x3 convolution to 16 channels (`conv1`), three stages (`layer1` to `layer3`) of three [`BasicBlock`]s of 16, 32 and
/// 64 channels, the mean of each channel, a linear layer (`fc`), and log-softmax. The second and the third stage halve the size.
/// Where the shape changes, the shortcut is a 1x1 convolution (option B); the paper's CIFAR networks pad with zeros there (option
/// A).
///
/// With three channels and ten classes it has 272,474 parameters (option A: 269,722).
///
/// # Errors
/// If `channels` or `classes` is 0 or too large.
pub fn resnet20(init: &Init, mode: ConvBnMode, channels: usize, classes: usize) -> Result<Sequential> {
    const WIDTHS: [usize; 3] = [16, 32, 64];
    let first = WIDTHS[0];
    let mut network =
        Sequential::new().then("conv1", block((init, mode), [channels, first], 3, 1, Activation::Relu)?);
    let mut inputs = first;
    for (index, width) in WIDTHS.into_iter().enumerate() {
        let mut stage = Sequential::new();
        for number in 0..3 {
            let stride = if index > 0 && number == 0 { 2 } else { 1 };
            stage = stage.then(&number.to_string(), BasicBlock::new(init, mode, [inputs, width], stride)?);
            inputs = width;
        }
        network = network.then(&format!("layer{}", index + 1), stage);
    }
    head(init, network, [inputs, classes])
}

/// The network of 50 layers for ImageNet, "v1.5": N x `channels` x H x W images, of 32 x 32 pixels or more, to N x `classes`
/// log-probabilities.
///
/// It has a 7x7 convolution of stride 2 to 64 channels (`conv1`), 3x3 max-pooling of stride 2, four stages (`layer1` to `layer4`)
/// of 3, 4, 6 and 3 [`Bottleneck`]s of width 64, 128, 256 and 512, the mean of each channel, a linear layer (`fc`), and
/// log-softmax. All stages but the first halve the size.
///
/// With three channels and 1000 classes it has torchvision's 25,557,032 parameters.
///
/// # Errors
/// If `channels` or `classes` is 0 or too large.
pub fn resnet50(init: &Init, mode: ConvBnMode, channels: usize, classes: usize) -> Result<Sequential> {
    const STAGES: [(usize, usize); 4] = [(64, 3), (128, 4), (256, 6), (512, 3)];
    let first = STAGES[0].0;
    let pool = PoolOptions { stride: [2; 2], padding: [1; 2], ..PoolOptions::new(3) };
    let mut network = Sequential::new()
        .then("conv1", block((init, mode), [channels, first], 7, 2, Activation::Relu)?.with_pool(pool));
    let mut inputs = first;
    for (index, (width, blocks)) in STAGES.into_iter().enumerate() {
        let mut stage = Sequential::new();
        for number in 0..blocks {
            let stride = if index > 0 && number == 0 { 2 } else { 1 };
            stage = stage.then(&number.to_string(), Bottleneck::new(init, mode, [inputs, width], stride)?);
            inputs = width * Bottleneck::EXPANSION;
        }
        network = network.then(&format!("layer{}", index + 1), stage);
    }
    head(init, network, [inputs, classes])
}

/// Adds the mean of each channel and the classifier.
fn head(init: &Init, network: Sequential, features: [usize; 2]) -> Result<Sequential> {
    Ok(network
        .then("average", GlobalAvgPool2d)
        .then("flatten", Flatten)
        .then("fc", Linear::new(init, features, true)?)
        .then("log_softmax", LogSoftmax))
}
