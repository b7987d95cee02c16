//! Residual networks: K. He, X. Zhang, S. Ren, J. Sun, "Deep residual learning for image recognition", 2015.
//!
//! S. Xie, R. Girshick, P. Dollar, Z. Tu, K. He, "Aggregated residual transformations for deep neural networks", 2016.
//! S. Zagoruyko, N. Komodakis, "Wide residual networks", 2016.

use convoke_autograd::Result;

use super::{Activation, ConvNorm};
use crate::graph::{BatchNormOp, Bias, Builder, ConvSpec, Definition, PoolSpec, Scheme, Value, Weights};

/// Channels of the stages' inner convolutions.
const WIDTHS: [usize; 4] = [64, 128, 256, 512];
/// How the convolutions of all of them start.
pub(super) const SCHEME: Scheme = Scheme {
    conv: Weights::KaimingNormalOut,
    linear: Weights::Uniform,
    conv_bias: Bias::Uniform,
    linear_bias: Bias::Uniform,
};

/// What the blocks of all stages are.
#[derive(Debug, Clone, Copy, PartialEq)]
enum ResidualBlock {
    /// Two 3x3 convolutions.
    Basic,
    /// A 1x1, a 3x3 and a 1x1 convolution; the last outputs four times as many channels as the stage is wide.
    Bottleneck {
        /// Groups of the 3x3 convolution.
        groups: usize,
        /// Channels of the 3x3 convolution, for each that the stage is wide.
        widening: usize,
    },
}

/// The bottleneck of the paper.
const BOTTLENECK: ResidualBlock = ResidualBlock::Bottleneck { groups: 1, widening: 1 };

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
    resnet(("resnet50", BOTTLENECK, [3, 4, 6, 3]), channels, classes)
}

/// ResNet-101: as [`resnet50`], with stages of 3, 4, 23 and 3 bottlenecks.
///
/// With three channels and 1000 classes it has 44,549,160 parameters.
///
/// # Errors
/// If `channels` or `classes` is 0.
pub fn resnet101(channels: usize, classes: usize) -> Result<Definition> {
    resnet(("resnet101", BOTTLENECK, [3, 4, 23, 3]), channels, classes)
}

/// ResNeXt-50 32x4d: as [`resnet50`], with 3x3 convolutions of twice as many channels in 32 groups.
///
/// With three channels and 1000 classes it has 25,028,904 parameters.
///
/// # Errors
/// If `channels` or `classes` is 0.
pub fn resnext50_32x4d(channels: usize, classes: usize) -> Result<Definition> {
    let block = ResidualBlock::Bottleneck { groups: 32, widening: 2 };
    resnet(("resnext50-32x4d", block, [3, 4, 6, 3]), channels, classes)
}

/// Wide ResNet-50-2: as [`resnet50`], with 3x3 convolutions of twice as many channels.
///
/// With three channels and 1000 classes it has 68,883,240 parameters.
///
/// # Errors
/// If `channels` or `classes` is 0.
pub fn wide_resnet50_2(channels: usize, classes: usize) -> Result<Definition> {
    let block = ResidualBlock::Bottleneck { groups: 1, widening: 2 };
    resnet(("wide-resnet50-2", block, [3, 4, 6, 3]), channels, classes)
}

fn resnet(
    (name, block, blocks): (&str, ResidualBlock, [usize; 4]),
    channels: usize,
    classes: usize,
) -> Result<Definition> {
    let mut builder = Builder::new(name, SCHEME);
    let x = builder.input("images", channels);
    let x = stages(&mut builder, &x, "", (block, blocks, 4));
    let y = builder.global_average(&x);
    let y = builder.flatten(&y);
    let y = builder.linear(&y, "fc", classes);
    builder.finish(&[&y])
}

/// The stages of a ResNet-50 with an 8th of the image's height and width: instead of a stride of 2, the last two stages have dilated
/// convolutions. Names begin with `prefix`.
pub(super) fn dilated_resnet50(builder: &mut Builder, x: &Value, prefix: &str) -> Value {
    stages(builder, x, prefix, (BOTTLENECK, [3, 4, 6, 3], 2))
}

/// All but the last layer. The stages from `dilated` on, counted from 0, have dilated convolutions instead of a stride.
fn stages(
    builder: &mut Builder,
    x: &Value,
    prefix: &str,
    (block, blocks, dilated): (ResidualBlock, [usize; 4], usize),
) -> Value {
    let conv = ConvSpec { stride: 2, ..ConvSpec::same(WIDTHS[0], 7) };
    let names = ["conv1", "bn1"].map(|part| format!("{prefix}{part}"));
    let mut x = conv_norm(builder, x, [&names[0], &names[1]], (conv, Activation::Relu));
    x = builder.max_pool(&x, PoolSpec { kernel: 3, stride: 2, padding: 1 });
    let mut dilation = 1;
    for (stage, (width, blocks)) in WIDTHS.into_iter().zip(blocks).enumerate() {
        for number in 0..blocks {
            let stride = if stage > 0 && stage < dilated && number == 0 { 2 } else { 1 };
            let name = format!("{prefix}layer{}.{number}", stage + 1);
            x = residual(builder, &x, &name, Residual { block, width, stride, dilation });
            // The first block still reads pixels that are as far apart as before.
            if stage >= dilated && number == 0 {
                dilation *= 2;
            }
        }
    }
    x
}

struct Residual {
    block: ResidualBlock,
    /// How wide the stage is.
    width: usize,
    stride: usize,
    /// Of a bottleneck's 3x3 convolution.
    dilation: usize,
}

/// A block. Where the shape changes, the shortcut is a 1x1 convolution with batch norm, `downsample`.
fn residual(builder: &mut Builder, x: &Value, prefix: &str, residual: Residual) -> Value {
    let Residual { block, width, stride, dilation } = residual;
    let strided = |spec: ConvSpec| ConvSpec { stride, ..spec };
    let (convs, outputs) = match block {
        ResidualBlock::Basic => (vec![strided(ConvSpec::same(width, 3)), ConvSpec::same(width, 3)], width),
        ResidualBlock::Bottleneck { groups, widening } => {
            let (inner, outputs) = (widening * width, 4 * width);
            let middle = ConvSpec { padding: dilation, dilation, groups, ..ConvSpec::same(inner, 3) };
            (vec![ConvSpec::new(inner, 1), strided(middle), ConvSpec::new(outputs, 1)], outputs)
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
