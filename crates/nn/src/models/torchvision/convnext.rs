//! Plain convolutional networks with a transformer's parts: Z. Liu, H. Mao, C.-Y. Wu, C. Feichtenhofer, T. Darrell, S. Xie, "A
//! ConvNet for the 2020s", 2022.

use convoke_autograd::Result;
use convoke_autograd::ops::Pointwise;

use crate::graph::{Bias, Builder, ConvSpec, Definition, Scheme, Value, Weights};

/// Channels and blocks of each stage.
const STAGES: [[usize; 2]; 4] = [[96, 3], [192, 3], [384, 9], [768, 3]];
/// The probability with which the last block is left out.
const MOST_LEFT_OUT: f64 = 0.1;
/// What a block is multiplied by at first.
const SCALE: f64 = 1e-6;
/// Added to the variances of layer norms.
const EPS: f64 = 1e-6;

/// ConvNeXt-Tiny: stages of 3, 3, 9 and 3 blocks, each of a 7x7 convolution within channels, layer norm of each pixel, and two linear
/// layers of each pixel with GELU between them. A factor for each channel, which starts at 1e-6, multiplies what a block adds.
///
/// Where it trains, blocks are left out at random, for each image (stochastic depth). The probability grows from block to block, to
/// 0.1.
///
/// With three channels and 1000 classes it has 28,589,128 parameters.
///
/// # Errors
/// If `channels` or `classes` is 0.
pub fn convnext_tiny(channels: usize, classes: usize) -> Result<Definition> {
    // torchvision cuts its normal distribution off at 100 standard deviations.
    let scheme = Scheme {
        conv: Weights::Normal(0.02),
        linear: Weights::Normal(0.02),
        conv_bias: Bias::Zero,
        linear_bias: Bias::Zero,
    };
    let mut builder = Builder::new("convnext-tiny", scheme);
    let x = builder.input("images", channels);
    let x = builder.conv(&x, "features.0.0", patches(STAGES[0][0], 4));
    let mut x = builder.layer_norm(&x, "features.0.1", EPS);
    let total: usize = STAGES.iter().map(|[_, blocks]| blocks).sum();
    let mut before = 0;
    for (index, [width, blocks]) in STAGES.into_iter().enumerate() {
        if index > 0 {
            let prefix = format!("features.{}", 2 * index);
            x = builder.layer_norm(&x, &format!("{prefix}.0"), EPS);
            x = builder.conv(&x, &format!("{prefix}.1"), patches(width, 2));
        }
        for number in 0..blocks {
            let share = MOST_LEFT_OUT * f64::from(before) / (total as f64 - 1.0);
            x = block(&mut builder, &x, &format!("features.{}.{number}", 2 * index + 1), share);
            before += 1;
        }
    }
    let x = builder.global_average(&x);
    let x = builder.layer_norm(&x, "classifier.0", EPS);
    let x = builder.flatten(&x);
    let x = builder.linear(&x, "classifier.2", classes);
    builder.finish(&[&x])
}

/// A convolution of squares that lie side by side.
fn patches(channels: usize, side: usize) -> ConvSpec {
    ConvSpec { stride: side, bias: true, ..ConvSpec::new(channels, side) }
}

/// A block, which is left out with this probability.
fn block(builder: &mut Builder, x: &Value, prefix: &str, share: f64) -> Value {
    let width = x.channels();
    let within = ConvSpec { groups: width, bias: true, ..ConvSpec::same(width, 7) };
    let y = builder.conv(x, &format!("{prefix}.block.0"), within);
    let y = builder.layer_norm(&y, &format!("{prefix}.block.2"), EPS);
    let y = builder.linear_of_pixels(&y, &format!("{prefix}.block.3"), 4 * width);
    let y = builder.pointwise(&y, Pointwise::Gelu);
    let y = builder.linear_of_pixels(&y, &format!("{prefix}.block.5"), width);
    let y = builder.scale(&y, &format!("{prefix}.layer_scale"), SCALE);
    let y = builder.stochastic_depth(&y, &format!("{prefix}.stochastic_depth"), share);
    builder.add(&y, x)
}
