//! Plain deep networks: K. Simonyan, A. Zisserman, "Very deep convolutional networks for large-scale image recognition", 2015.

use convoke_autograd::Result;

use super::{Activation, ConvNorm};
use crate::graph::{BatchNormOp, Bias, Builder, ConvSpec, Definition, PoolSpec, Scheme, Weights};

/// Channels of the five stages' convolutions.
const WIDTHS: [usize; 5] = [64, 128, 256, 512, 512];
/// Features between the linear layers.
const FEATURES: usize = 4096;

/// VGG-11 with batch norm: stages of 1, 1, 2, 2 and 2 3x3 convolutions.
///
/// With three channels and 1000 classes it has 132,868,840 parameters.
///
/// # Errors
/// If `channels` or `classes` is 0.
pub fn vgg11_bn(channels: usize, classes: usize) -> Result<Definition> {
    vgg(("vgg11-bn", [1, 1, 2, 2, 2]), channels, classes)
}

/// VGG-16 with batch norm: stages of 2, 2, 3, 3 and 3 3x3 convolutions.
///
/// With three channels and 1000 classes it has 138,365,992 parameters.
///
/// # Errors
/// If `channels` or `classes` is 0.
pub fn vgg16_bn(channels: usize, classes: usize) -> Result<Definition> {
    vgg(("vgg16-bn", [2, 2, 3, 3, 3]), channels, classes)
}

/// Stages that end with 2x2 max-pooling, the mean of 7x7 windows, and three linear layers.
fn vgg((name, stages): (&str, [usize; 5]), channels: usize, classes: usize) -> Result<Definition> {
    let scheme = Scheme {
        conv: Weights::KaimingNormalOut,
        linear: Weights::Normal(0.01),
        conv_bias: Bias::Zero,
        linear_bias: Bias::Zero,
    };
    let mut builder = Builder::new(name, scheme);
    let mut x = builder.input("images", channels);
    // Layers are numbered with their batch norms, activations and poolings.
    let mut number = 0;
    for (width, convs) in WIDTHS.into_iter().zip(stages) {
        for _ in 0..convs {
            let names = [number, number + 1].map(|number| format!("features.{number}"));
            let unit = ConvNorm {
                names: [&names[0], &names[1]],
                conv: ConvSpec { bias: true, ..ConvSpec::same(width, 3) },
                norm: BatchNormOp::default(),
                activation: Activation::Relu,
            };
            x = unit.apply(&mut builder, &x);
            number += 3;
        }
        x = builder.max_pool(&x, PoolSpec::new(2));
        number += 1;
    }
    x = builder.adaptive_average_pool(&x, [7, 7]);
    x = builder.flatten(&x);
    for [linear, dropout] in [["classifier.0", "classifier.2"], ["classifier.3", "classifier.5"]] {
        x = builder.linear(&x, linear, FEATURES);
        x = builder.relu(&x);
        x = builder.dropout(&x, dropout, 0.5);
    }
    x = builder.linear(&x, "classifier.6", classes);
    builder.finish(&[&x])
}
