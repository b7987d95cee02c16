//! Residual networks: K. He, X. Zhang, S. Ren, J. Sun, "Deep residual learning for image recognition", 2015.

use convoke_autograd::Result;

use super::{Activation, ConvNorm};
use crate::graph::{BatchNormOp, Builder, ConvSpec, Definition, PoolSpec, Scheme, Value, Weights};

/// Channels of the stages' inner convolutions.
const WIDTHS: [usize; 4] = [64, 128, 256, 512];

/// What the blocks of all stages are.
#[derive(Debug, Clone, Copy, PartialEq)]
enum ResidualBlock {
    /// Two 3x3 convolutions.
    Basic,
    /// A 1x1, a 3x3 and a 1x1 convolution; the last outputs four times as many channels.
    Bottleneck,
}

/// ResNet-18: stages of 2, 2, 2 and 2 blocks of two 3x3 convolutions.
///
/// With three channels and 1000 classes it has 11,689,512 parameters.
///
/// # Errors
/// If `channels` or `classes` is 0.
pub fn resnet18(channels: usize, classes: usize) -> Result<Definition> {
    resnet(("resnet18", ResidualBlock::Basic, [2, 2, 2, 2]), channels, classes)
}

/// ResNet-34: stages of 3, 4, 6 and 3 blocks of two 3x3 convolutions.
///
/// With three channels and 1000 classes it has 21,797,672 parameters.
///
/// # Errors
/// If `channels` or `classes` is 0.
pub fn resnet34(channels: usize, classes: usize) -> Result<Definition> {
    resnet(("resnet34", ResidualBlock::Basic, [3, 4, 6, 3]), channels, classes)
}

/// ResNet-50: stages of 3, 4, 6 and 3 bottlenecks, whose 3x3 convolutions have the stride ("v1.5"; in the paper, the first
/// convolutions have it).
///
/// With three channels and 1000 classes it has 25,557,032 parameters. The registered model `resnet50` is
/// [`resnet50`](crate::models::resnet50): it has the same layers under other names, gives log-probabilities,
/// and takes weights by torchvision's names too.
///
/// # Errors
/// If `channels` or `classes` is 0.
pub fn resnet50(channels: usize, classes: usize) -> Result<Definition> {
    resnet(("resnet50", ResidualBlock::Bottleneck, [3, 4, 6, 3]), channels, classes)
}

/// ResNet-101: as [`resnet50`], with stages of 3, 4, 23 and 3 bottlenecks.
///
/// With three channels and 1000 classes it has 44,549,160 parameters.
///
/// # Errors
/// If `channels` or `classes` is 0.
pub fn resnet101(channels: usize, classes: usize) -> Result<Definition> {
    resnet(("resnet101", ResidualBlock::Bottleneck, [3, 4, 23, 3]), channels, classes)
}

fn resnet(
    (name, block, blocks): (&str, ResidualBlock, [usize; 4]),
    channels: usize,
    classes: usize,
) -> Result<Definition> {
    let mut builder = Builder::new(name, Scheme { conv: Weights::KaimingNormalOut, ..Scheme::default() });
    let x = builder.input("images", channels);
    let conv = ConvSpec { stride: 2, ..ConvSpec::same(WIDTHS[0], 7) };
    let mut x = conv_norm(&mut builder, &x, ["conv1", "bn1"], (conv, Activation::Relu));
    x = builder.max_pool(&x, PoolSpec { kernel: 3, stride: 2, padding: 1 });
    for (stage, (width, blocks)) in WIDTHS.into_iter().zip(blocks).enumerate() {
        for number in 0..blocks {
            let stride = if stage > 0 && number == 0 { 2 } else { 1 };
            let prefix = format!("layer{}.{number}", stage + 1);
            x = residual(&mut builder, &x, &prefix, (block, width, stride));
        }
    }
    let y = builder.global_average(&x);
    let y = builder.flatten(&y);
    let y = builder.linear(&y, "fc", classes);
    builder.finish(&[&y])
}

/// A block. Where the shape changes, the shortcut is a 1x1 convolution with batch norm, `downsample`.
fn residual(
    builder: &mut Builder,
    x: &Value,
    prefix: &str,
    (block, width, stride): (ResidualBlock, usize, usize),
) -> Value {
    let strided = |spec: ConvSpec| ConvSpec { stride, ..spec };
    let (convs, outputs) = match block {
        ResidualBlock::Basic => (vec![strided(ConvSpec::same(width, 3)), ConvSpec::same(width, 3)], width),
        ResidualBlock::Bottleneck => {
            let outputs = 4 * width;
            let middle = strided(ConvSpec::same(width, 3));
            (vec![ConvSpec::new(width, 1), middle, ConvSpec::new(outputs, 1)], outputs)
        }
    };
    let mut y = x.clone();
    for (index, conv) in convs.iter().enumerate() {
        let number = index + 1;
        let activation = if number < convs.len() { Activation::Relu } else { Activation::None };
        let names = ["conv", "bn"].map(|part| format!("{prefix}.{part}{number}"));
        y = conv_norm(builder, &y, [&names[0], &names[1]], (*conv, activation));
    }
    let past = if stride != 1 || x.channels() != outputs {
        let names = [0, 1].map(|part| format!("{prefix}.downsample.{part}"));
        let conv = strided(ConvSpec::new(outputs, 1));
        conv_norm(builder, x, [&names[0], &names[1]], (conv, Activation::None))
    } else {
        x.clone()
    };
    let y = builder.add(&y, &past);
    builder.relu(&y)
}

fn conv_norm(
    builder: &mut Builder,
    x: &Value,
    names: [&str; 2],
    (conv, activation): (ConvSpec, Activation),
) -> Value {
    ConvNorm { names, conv, norm: BatchNormOp::default(), activation }.apply(builder, x)
}
