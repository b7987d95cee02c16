//! Networks of a design space: I. Radosavovic, R. P. Kosaraju, R. Girshick, K. He, P. Dollar, "Designing network design spaces",
//! 2020.

use convoke_autograd::Result;
use convoke_autograd::ops::Pointwise;

use super::{Activation, ConvNormActivation, SqueezeExcitation};
use crate::graph::{BatchNormOp, Bias, Builder, ConvSpec, Definition, Scheme, Value, Weights};

/// Channels of the first convolution.
const FIRST: usize = 32;
/// Channels of each group of the 3x3 convolutions.
const GROUP: usize = 8;
/// Output channels and blocks of each stage.
const STAGES: [[usize; 2]; 4] = [[48, 1], [104, 3], [208, 6], [440, 6]];

/// RegNetY-400MF: stages of 1, 3, 6 and 6 bottlenecks of one width, whose 3x3 convolutions have groups of 8 channels, with squeeze and
/// excitation.
///
/// With three channels and 1000 classes it has 4,344,144 parameters.
///
/// # Errors
/// If `channels` or `classes` is 0.
pub fn regnet_y_400mf(channels: usize, classes: usize) -> Result<Definition> {
    let scheme = Scheme {
        conv: Weights::KaimingNormalOut,
        linear: Weights::Normal(0.01),
        // The convolutions of squeeze and excitation have biases.
        conv_bias: Bias::Uniform,
        linear_bias: Bias::Zero,
    };
    let mut builder = Builder::new("regnet-y-400mf", scheme);
    let x = builder.input("images", channels);
    let first = ConvSpec { stride: 2, ..ConvSpec::same(FIRST, 3) };
    let mut x = unit(first, Activation::Relu).apply(&mut builder, &x, "stem");
    for (index, [width, blocks]) in STAGES.into_iter().enumerate() {
        let stage = format!("block{}", index + 1);
        for number in 0..blocks {
            let stride = if number == 0 { 2 } else { 1 };
            let prefix = format!("trunk_output.{stage}.{stage}-{number}");
            x = bottleneck(&mut builder, &x, &prefix, [width, stride]);
        }
    }
    let x = builder.global_average(&x);
    let x = builder.flatten(&x);
    let x = builder.linear(&x, "fc", classes);
    builder.finish(&[&x])
}

fn unit(conv: ConvSpec, activation: Activation) -> ConvNormActivation {
    ConvNormActivation { conv, norm: BatchNormOp::default(), activation }
}

/// A block. Where the shape changes, the shortcut is a 1x1 convolution with batch norm, `proj`.
fn bottleneck(builder: &mut Builder, x: &Value, prefix: &str, [width, stride]: [usize; 2]) -> Value {
    let past = if stride != 1 || x.channels() != width {
        let conv = ConvSpec { stride, ..ConvSpec::new(width, 1) };
        unit(conv, Activation::None).apply(builder, x, &format!("{prefix}.proj"))
    } else {
        x.clone()
    };
    let y = unit(ConvSpec::new(width, 1), Activation::Relu).apply(builder, x, &format!("{prefix}.f.a"));
    let middle = ConvSpec { stride, groups: width / GROUP, ..ConvSpec::same(width, 3) };
    let y = unit(middle, Activation::Relu).apply(builder, &y, &format!("{prefix}.f.b"));
    let squeeze =
        SqueezeExcitation { width: x.channels() / 4, inner: Activation::Relu, gate: Pointwise::Sigmoid };
    let y = squeeze.apply(builder, &y, &format!("{prefix}.f.se"));
    let y = unit(ConvSpec::new(width, 1), Activation::None).apply(builder, &y, &format!("{prefix}.f.c"));
    let y = builder.add(&y, &past);
    builder.relu(&y)
}
