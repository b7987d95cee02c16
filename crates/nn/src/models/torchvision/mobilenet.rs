//! Networks for small devices.
//!
//! M. Sandler, A. Howard, M. Zhu, A. Zhmoginov, L.-C. Chen, "MobileNetV2: inverted residuals and linear bottlenecks", 2018.
//! A. Howard et al., "Searching for MobileNetV3", 2019.

use convoke_autograd::Result;
use convoke_autograd::ops::Pointwise;

use super::{Activation, ConvNormActivation, SqueezeExcitation};
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

/// MobileNetV3-Small: 11 inverted residual blocks, with ReLU or hard-swish, most with squeeze and excitation.
///
/// With three channels and 1000 classes it has 2,542,856 parameters.
///
/// # Errors
/// If `channels` or `classes` is 0.
pub fn mobilenet_v3_small(channels: usize, classes: usize) -> Result<Definition> {
    const RELU: Activation = Activation::Relu;
    const SWISH: Activation = Activation::Of(Pointwise::HardSwish);
    /// Kernel, width, output channels, squeeze and excitation, activation, stride.
    const BLOCKS: [(usize, usize, usize, bool, Activation, usize); 11] = [
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
    let mut builder = Builder::new("mobilenet-v3-small", SCHEME);
    let x = builder.input("images", channels);
    let first = ConvSpec { stride: 2, ..ConvSpec::same(16, 3) };
    let mut x = unit_v3(first, SWISH).apply(&mut builder, &x, "features.0");
    for (index, (kernel, width, outputs, squeezes, activation, stride)) in BLOCKS.into_iter().enumerate() {
        let block = InvertedResidual { kernel, width, outputs, squeezes, activation, stride };
        x = block.apply(&mut builder, &x, &format!("features.{}.block", index + 1));
    }
    let x = unit_v3(ConvSpec::new(576, 1), SWISH).apply(&mut builder, &x, "features.12");
    let x = builder.global_average(&x);
    let x = builder.flatten(&x);
    let x = builder.linear(&x, "classifier.0", 1024);
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
            let squeeze =
                SqueezeExcitation { width: divisible_by_8(width / 4), inner: Activation::Relu, gate };
            y = squeeze.apply(builder, &y, &next());
        }
        y = unit_v3(ConvSpec::new(outputs, 1), Activation::None).apply(builder, &y, &next());
        if stride == 1 && x.channels() == outputs { builder.add(&y, x) } else { y }
    }
}

/// torchvision's `_make_divisible`: the nearest multiple of 8, but no less than 8 and than nine tenths of the number.
fn divisible_by_8(number: usize) -> usize {
    let nearest = ((number + 4) / 8 * 8).max(8);
    if 10 * nearest < 9 * number { nearest + 8 } else { nearest }
}
