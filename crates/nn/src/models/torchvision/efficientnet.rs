//! Networks that are scaled evenly: M. Tan, Q. Le, "EfficientNet: rethinking model scaling for convolutional neural networks",
//! 2019.

use convoke_autograd::Result;
use convoke_autograd::ops::Pointwise;

use super::{Activation, ConvNormActivation, SqueezeExcitation, divisible_by_8};
use crate::graph::{BatchNormOp, Bias, Builder, ConvSpec, Definition, Scheme, Value, Weights};

const SILU: Activation = Activation::Of(Pointwise::Silu);

/// For each stage of B0: how much blocks widen, the kernel, the stride of the first block, output channels, and blocks.
const STAGES: [[usize; 5]; 7] = [
    [1, 3, 1, 16, 1],
    [6, 3, 2, 24, 2],
    [6, 5, 2, 40, 2],
    [6, 3, 2, 80, 3],
    [6, 5, 1, 112, 3],
    [6, 5, 2, 192, 4],
    [6, 3, 1, 320, 1],
];

/// How often a block behind the last one would be left out.
const MOST_LEFT_OUT: f64 = 0.2;

/// EfficientNet-B0: 16 inverted residual blocks with SiLU, and with squeeze and excitation.
///
/// Where it trains, blocks with a shortcut are left out at random, for each image (stochastic depth). The probability grows from block
/// to block, to nearly 0.2.
///
/// With three channels and 1000 classes it has 5,288,548 parameters.
///
/// # Errors
/// If `channels` or `classes` is 0.
pub fn efficientnet_b0(channels: usize, classes: usize) -> Result<Definition> {
    efficientnet(("efficientnet-b0", [1.0, 1.0], 0.2), channels, classes)
}

/// EfficientNet-B1: as [`efficientnet_b0`], with 23 blocks: 1.1 times as many in each stage, rounded up.
///
/// With three channels and 1000 classes it has 7,794,184 parameters.
///
/// # Errors
/// If `channels` or `classes` is 0.
pub fn efficientnet_b1(channels: usize, classes: usize) -> Result<Definition> {
    efficientnet(("efficientnet-b1", [1.0, 1.1], 0.2), channels, classes)
}

/// EfficientNet-B2: as [`efficientnet_b0`], with 1.1 times as many channels and 23 blocks.
///
/// With three channels and 1000 classes it has 9,109,994 parameters.
///
/// # Errors
/// If `channels` or `classes` is 0.
pub fn efficientnet_b2(channels: usize, classes: usize) -> Result<Definition> {
    efficientnet(("efficientnet-b2", [1.1, 1.2], 0.3), channels, classes)
}

/// EfficientNet-B3: as [`efficientnet_b0`], with 1.2 times as many channels and 26 blocks.
///
/// With three channels and 1000 classes it has 12,233,232 parameters.
///
/// # Errors
/// If `channels` or `classes` is 0.
pub fn efficientnet_b3(channels: usize, classes: usize) -> Result<Definition> {
    efficientnet(("efficientnet-b3", [1.2, 1.4], 0.3), channels, classes)
}

/// The name, the factors of channels and of blocks, and the share of features that are dropped before the last layer.
fn efficientnet(
    (name, [width, depth], dropout): (&str, [f64; 2], f32),
    channels: usize,
    classes: usize,
) -> Result<Definition> {
    let wide = |channels: usize| divisible_by_8(channels as f64 * width);
    let stages = STAGES.map(|[expansion, kernel, stride, outputs, blocks]| {
        [expansion, kernel, stride, wide(outputs), (blocks as f64 * depth).ceil() as usize]
    });
    let scheme = Scheme {
        conv: Weights::KaimingNormalOut,
        linear: Weights::UniformOut,
        conv_bias: Bias::Zero,
        linear_bias: Bias::Zero,
    };
    let mut builder = Builder::new(name, scheme);
    let x = builder.input("images", channels);
    let first = ConvSpec { stride: 2, ..ConvSpec::same(wide(32), 3) };
    let mut x = unit(first, SILU).apply(&mut builder, &x, "features.0");
    let total: usize = stages.iter().map(|[.., blocks]| blocks).sum();
    let mut before = 0;
    for (index, [expansion, kernel, first_stride, outputs, blocks]) in stages.into_iter().enumerate() {
        for block in 0..blocks {
            let stride = if block == 0 { first_stride } else { 1 };
            let prefix = format!("features.{}.{block}", index + 1);
            let y = inverted_residual(&mut builder, &x, &prefix, [expansion, kernel, stride, outputs]);
            x = if stride == 1 && x.channels() == outputs {
                let share = MOST_LEFT_OUT * before as f64 / total as f64;
                let y = builder.stochastic_depth(&y, &format!("{prefix}.stochastic_depth"), share);
                builder.add(&y, &x)
            } else {
                y
            };
            before += 1;
        }
    }
    let x = unit(ConvSpec::new(4 * x.channels(), 1), SILU).apply(&mut builder, &x, "features.8");
    let x = builder.global_average(&x);
    let x = builder.flatten(&x);
    let x = builder.dropout(&x, "classifier.0", dropout);
    let x = builder.linear(&x, "classifier.1", classes);
    builder.finish(&[&x])
}

fn unit(conv: ConvSpec, activation: Activation) -> ConvNormActivation {
    ConvNormActivation { conv, norm: BatchNormOp::default(), activation }
}

/// A 1x1 convolution that widens, a convolution within channels, squeeze and excitation, and a 1x1 convolution without
/// activation.
fn inverted_residual(
    builder: &mut Builder,
    x: &Value,
    prefix: &str,
    [expansion, kernel, stride, outputs]: [usize; 4],
) -> Value {
    let width = x.channels() * expansion;
    let mut part = 0;
    let mut next = || {
        part += 1;
        format!("{prefix}.block.{}", part - 1)
    };
    let mut y = x.clone();
    if expansion != 1 {
        y = unit(ConvSpec::new(width, 1), SILU).apply(builder, &y, &next());
    }
    let within = ConvSpec { stride, groups: width, ..ConvSpec::same(width, kernel) };
    y = unit(within, SILU).apply(builder, &y, &next());
    let squeezed = (x.channels() / 4).max(1);
    let squeeze = SqueezeExcitation { width: squeezed, inner: SILU, gate: Pointwise::Sigmoid };
    y = squeeze.apply(builder, &y, &next());
    unit(ConvSpec::new(outputs, 1), Activation::None).apply(builder, &y, &next())
}
