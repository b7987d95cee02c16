//! Networks for small devices.
//!
//! M. Sandler, A. Howard, M. Zhu, A. Zhmoginov, L.-C. Chen, "MobileNetV2: inverted residuals and linear bottlenecks", 2018.
//! A. Howard et al., "Searching for MobileNetV3", 2019.

use convoke_autograd::Result;
use convoke_autograd::ops::Pointwise;

use super::{Activation, ConvNormActivation, SqueezeExcitation, divisible_by_8};
use crate::graph::{BatchNormOp, Bias, Builder, ConvSpec, Definition, Scheme, Value, Weights};

const SCHEME: Scheme = Scheme {
    conv: Weights::KaimingNormalOut,
    linear: Weights::Normal(0.01),
    conv_bias: Bias::Zero,
    linear_bias: Bias::Zero,
};

/// MobileNetV2 of width 1: 17 inverted residual blocks, with ReLU6.
///
/// With three channels and 1000 classes it has 3,504,872 parameters.
///
/// # Errors
/// If `channels` or `classes` is 0.
pub fn mobilenet_v2(channels: usize, classes: usize) -> Result<Definition> {
    /// For each stage: how much blocks widen, output channels, blocks, and the stride of the first.
    const STAGES: [[usize; 4]; 7] = [
        [1, 16, 1, 1],
        [6, 24, 2, 2],
        [6, 32, 3, 2],
        [6, 64, 4, 2],
        [6, 96, 3, 1],
        [6, 160, 3, 2],
        [6, 320, 1, 1],
    ];
    let mut builder = Builder::new("mobilenet-v2", SCHEME);
    let x = builder.input("images", channels);
    let mut x =
        unit_v2(ConvSpec { stride: 2, ..ConvSpec::same(32, 3) }).apply(&mut builder, &x, "features.0");
    let mut number = 0;
    for [expansion, outputs, blocks, first_stride] in STAGES {
        for block in 0..blocks {
            number += 1;
            let stride = if block == 0 { first_stride } else { 1 };
            let prefix = format!("features.{number}.conv");
            x = inverted_residual(&mut builder, &x, &prefix, [expansion, outputs, stride]);
        }
    }
    let x = unit_v2(ConvSpec::new(1280, 1)).apply(&mut builder, &x, &format!("features.{}", number + 1));
    let x = builder.global_average(&x);
    let x = builder.flatten(&x);
    let x = builder.dropout(&x, "classifier.0", 0.2);
    let x = builder.linear(&x, "classifier.1", classes);
    builder.finish(&[&x])
}

fn unit_v2(conv: ConvSpec) -> ConvNormActivation {
    let activation = Activation::Of(Pointwise::RELU6);
    ConvNormActivation { conv, norm: BatchNormOp::default(), activation }
}

/// A 1x1 convolution that widens, a 3x3 convolution within channels, and a 1x1 convolution without activation.
fn inverted_residual(
    builder: &mut Builder,
    x: &Value,
    prefix: &str,
    [expansion, outputs, stride]: [usize; 3],
) -> Value {
    let width = x.channels() * expansion;
    let mut part = 0;
    let mut y = x.clone();
    if expansion != 1 {
        y = unit_v2(ConvSpec::new(width, 1)).apply(builder, &y, &format!("{prefix}.{part}"));
        part += 1;
    }
    let within = ConvSpec { stride, groups: width, ..ConvSpec::same(width, 3) };
    y = unit_v2(within).apply(builder, &y, &format!("{prefix}.{part}"));
    y = builder.conv(&y, &format!("{prefix}.{}", part + 1), ConvSpec::new(outputs, 1));
    y = builder.batch_norm(&y, &format!("{prefix}.{}", part + 2), BatchNormOp::default());
    if stride == 1 && x.channels() == outputs { builder.add(&y, x) } else { y }
}

const RELU: Activation = Activation::Relu;
const SWISH: Activation = Activation::Of(Pointwise::HardSwish);

/// An inverted residual block of MobileNetV3.
struct InvertedResidual {
    kernel: usize,
    /// Channels of the convolution within channels.
    width: usize,
    outputs: usize,
    /// Whether it has squeeze and excitation.
    squeezes: bool,
    activation: Activation,
    stride: usize,
}

/// Kernel, width, output channels, squeeze and excitation, activation, stride.
type BlockV3 = (usize, usize, usize, bool, Activation, usize);

/// MobileNetV3-Small: 11 inverted residual blocks, with ReLU or hard-swish, most with squeeze and excitation.
///
/// With three channels and 1000 classes it has 2,542,856 parameters.
///
/// # Errors
/// If `channels` or `classes` is 0.
pub fn mobilenet_v3_small(channels: usize, classes: usize) -> Result<Definition> {
    const BLOCKS: [BlockV3; 11] = [
        (3, 16, 16, true, RELU, 2),
        (3, 72, 24, false, RELU, 2),
        (3, 88, 24, false, RELU, 1),
        (5, 96, 40, true, SWISH, 2),
        (5, 240, 40, true, SWISH, 1),
        (5, 240, 40, true, SWISH, 1),
        (5, 120, 48, true, SWISH, 1),
        (5, 144, 48, true, SWISH, 1),
        (5, 288, 96, true, SWISH, 2),
        (5, 576, 96, true, SWISH, 1),
        (5, 576, 96, true, SWISH, 1),
    ];
    mobilenet_v3(("mobilenet-v3-small", &BLOCKS, 1024), channels, classes)
}

/// MobileNetV3-Large: 15 inverted residual blocks, with ReLU or hard-swish, some with squeeze and excitation.
///
/// With three channels and 1000 classes it has 5,483,032 parameters.
///
/// # Errors
/// If `channels` or `classes` is 0.
pub fn mobilenet_v3_large(channels: usize, classes: usize) -> Result<Definition> {
    const BLOCKS: [BlockV3; 15] = [
        (3, 16, 16, false, RELU, 1),
        (3, 64, 24, false, RELU, 2),
        (3, 72, 24, false, RELU, 1),
        (5, 72, 40, true, RELU, 2),
        (5, 120, 40, true, RELU, 1),
        (5, 120, 40, true, RELU, 1),
        (3, 240, 80, false, SWISH, 2),
        (3, 200, 80, false, SWISH, 1),
        (3, 184, 80, false, SWISH, 1),
        (3, 184, 80, false, SWISH, 1),
        (3, 480, 112, true, SWISH, 1),
        (3, 672, 112, true, SWISH, 1),
        (5, 672, 160, true, SWISH, 2),
        (5, 960, 160, true, SWISH, 1),
        (5, 960, 160, true, SWISH, 1),
    ];
    mobilenet_v3(("mobilenet-v3-large", &BLOCKS, 1280), channels, classes)
}

/// The name, the blocks, and the features before the last layer.
fn mobilenet_v3(
    (name, blocks, features): (&str, &[BlockV3], usize),
    channels: usize,
    classes: usize,
) -> Result<Definition> {
    let mut builder = Builder::new(name, SCHEME);
    let x = builder.input("images", channels);
    let first = ConvSpec { stride: 2, ..ConvSpec::same(16, 3) };
    let mut x = unit_v3(first, SWISH).apply(&mut builder, &x, "features.0");
    for (index, &(kernel, width, outputs, squeezes, activation, stride)) in blocks.iter().enumerate() {
        let block = InvertedResidual { kernel, width, outputs, squeezes, activation, stride };
        x = block.apply(&mut builder, &x, &format!("features.{}.block", index + 1));
    }
    let last = format!("features.{}", blocks.len() + 1);
    let x = unit_v3(ConvSpec::new(6 * x.channels(), 1), SWISH).apply(&mut builder, &x, &last);
    let x = builder.global_average(&x);
    let x = builder.flatten(&x);
    let x = builder.linear(&x, "classifier.0", features);
    let x = builder.pointwise(&x, Pointwise::HardSwish);
    let x = builder.dropout(&x, "classifier.2", 0.2);
    let x = builder.linear(&x, "classifier.3", classes);
    builder.finish(&[&x])
}

fn unit_v3(conv: ConvSpec, activation: Activation) -> ConvNormActivation {
    ConvNormActivation { conv, norm: BatchNormOp { eps: 1e-3, momentum: 0.99, frozen: false }, activation }
}

impl InvertedResidual {
    fn apply(self, builder: &mut Builder, x: &Value, prefix: &str) -> Value {
        let InvertedResidual { kernel, width, outputs, squeezes, activation, stride } = self;
        let mut part = 0;
        let mut next = || {
            part += 1;
            format!("{prefix}.{}", part - 1)
        };
        let mut y = x.clone();
        if width != x.channels() {
            y = unit_v3(ConvSpec::new(width, 1), activation).apply(builder, &y, &next());
        }
        let within = ConvSpec { stride, groups: width, ..ConvSpec::same(width, kernel) };
        y = unit_v3(within, activation).apply(builder, &y, &next());
        if squeezes {
            let gate = Pointwise::HARD_SIGMOID;
            let squeezed = divisible_by_8((width / 4) as f64);
            let squeeze = SqueezeExcitation { width: squeezed, inner: Activation::Relu, gate };
            y = squeeze.apply(builder, &y, &next());
        }
        y = unit_v3(ConvSpec::new(outputs, 1), Activation::None).apply(builder, &y, &next());
        if stride == 1 && x.channels() == outputs { builder.add(&y, x) } else { y }
    }
}
