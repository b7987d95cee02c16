//! Densely connected networks: G. Huang, Z. Liu, L. van der Maaten, K. Weinberger, "Densely connected convolutional networks",
//! 2017.

use convoke_autograd::Result;

use super::{Activation, ConvNorm};
use crate::graph::{BatchNormOp, Bias, Builder, ConvSpec, Definition, PoolSpec, Scheme, Value, Weights};

/// The layers of each dense block.
const LAYERS: [usize; 4] = [6, 12, 24, 16];
/// Channels of the first convolution.
const FIRST: usize = 64;
/// Channels that a layer adds.
const GROWTH: usize = 32;
/// Channels between a layer's convolutions, for each that it adds.
const BOTTLENECK: usize = 4;

/// DenseNet-121: dense blocks of 6, 12, 24 and 16 layers, each of which adds 32 channels. Layers are batch norm, ReLU, a 1x1
/// convolution, batch norm, ReLU and a 3x3 convolution; each reads what all before it in its block have added.
///
/// With three channels and 1000 classes it has 7,978,856 parameters.
///
/// # Errors
/// If `channels` or `classes` is 0.
pub fn densenet121(channels: usize, classes: usize) -> Result<Definition> {
    let scheme = Scheme { conv: Weights::KaimingNormal, linear_bias: Bias::Zero, ..Scheme::default() };
    let mut builder = Builder::new("densenet121", scheme);
    let x = builder.input("images", channels);
    let first = ConvNorm {
        names: ["features.conv0", "features.norm0"],
        conv: ConvSpec { stride: 2, ..ConvSpec::same(FIRST, 7) },
        norm: BatchNormOp::default(),
        activation: Activation::Relu,
    };
    let x = first.apply(&mut builder, &x);
    let mut x = builder.max_pool(&x, PoolSpec { kernel: 3, stride: 2, padding: 1 });
    for (index, layers) in LAYERS.into_iter().enumerate() {
        let number = index + 1;
        for layer in 1..=layers {
            let prefix = format!("features.denseblock{number}.denselayer{layer}");
            let added = dense_layer(&mut builder, &x, &prefix);
            x = builder.concat(&[&x, &added]);
        }
        if number < LAYERS.len() {
            x = transition(&mut builder, &x, &format!("features.transition{number}"));
        }
    }
    let x = norm_relu(&mut builder, &x, "features.norm5");
    let x = builder.global_average(&x);
    let x = builder.flatten(&x);
    let x = builder.linear(&x, "classifier", classes);
    builder.finish(&[&x])
}

/// The channels that a layer adds.
fn dense_layer(builder: &mut Builder, x: &Value, prefix: &str) -> Value {
    let y = norm_relu(builder, x, &format!("{prefix}.norm1"));
    let names = ["conv1", "norm2"].map(|part| format!("{prefix}.{part}"));
    let inner = ConvNorm {
        names: [&names[0], &names[1]],
        conv: ConvSpec::new(BOTTLENECK * GROWTH, 1),
        norm: BatchNormOp::default(),
        activation: Activation::Relu,
    };
    let y = inner.apply(builder, &y);
    builder.conv(&y, &format!("{prefix}.conv2"), ConvSpec::same(GROWTH, 3))
}

/// Halves channels, height and width.
fn transition(builder: &mut Builder, x: &Value, prefix: &str) -> Value {
    let y = norm_relu(builder, x, &format!("{prefix}.norm"));
    let y = builder.conv(&y, &format!("{prefix}.conv"), ConvSpec::new(x.channels() / 2, 1));
    builder.average_pool(&y, PoolSpec::new(2))
}

fn norm_relu(builder: &mut Builder, x: &Value, name: &str) -> Value {
    let y = builder.batch_norm(x, name, BatchNormOp::default());
    builder.relu(&y)
}
