//! U-Net: O. Ronneberger, P. Fischer, T. Brox, "U-Net: convolutional networks for biomedical image segmentation", 2015.

use convoke_autograd::Result;

use super::{ModelSpec, of_definition};
use crate::graph::{BatchNormOp, Builder, ConvSpec, Definition, PoolSpec, Scheme, Value};

/// Channels of the levels, from full size down.
const WIDTHS: [usize; 5] = [64, 128, 256, 512, 1024];
/// The smallest height and width: the lowest level has a 16th of them.
const LEAST: usize = 16;

pub(super) fn spec() -> ModelSpec {
    of_definition(("unet", [3, 360, 480], 11), unet)
        .of_pixels()
        .takes(format!("images of {LEAST} x {LEAST} pixels or more"), |info| {
            info.height.min(info.width) >= LEAST
        })
}

/// The U-Net: N x `channels` x H x W images, of 16 x 16 pixels or more, to N x `classes` x H x W logits.
///
/// Five levels of 64 to 1024 channels, each of two 3x3 convolutions with batch norm and ReLU. Max-pooling halves the size between
/// them (`down1` to `down4`). On the way up (`up1` to `up4`), a transposed 2x2 convolution of stride 2 doubles the size and halves
/// the channels, and its output is concatenated to what the encoder had at this size. A 1x1 convolution, `outc`, comes last.
///
/// Unlike in the paper, convolutions keep the size and have batch norms, as is usual today; where a size was odd before it was
/// halved, zeros make up for the row or column that is lost. Names are those of the widespread implementation for PyTorch by
/// A. Milesi (`inc.double_conv.0.weight`, `up1.up.weight`), initial values PyTorch's.
///
/// With three channels and two classes it has 31,037,698 parameters.
///
/// # Errors
/// If `channels` or `classes` is 0.
pub fn unet(channels: usize, classes: usize) -> Result<Definition> {
    let mut builder = Builder::new("unet", Scheme::default());
    let x = builder.input("images", channels);
    let mut x = double_conv(&mut builder, &x, "inc", WIDTHS[0]);
    let mut levels = Vec::new();
    for (index, &width) in WIDTHS.iter().enumerate().skip(1) {
        let pooled = builder.max_pool(&x, PoolSpec::new(2));
        levels.push(x);
        x = double_conv(&mut builder, &pooled, &format!("down{index}.maxpool_conv.1"), width);
    }
    for (index, level) in levels.iter().rev().enumerate() {
        let prefix = format!("up{}", index + 1);
        let width = level.channels();
        let doubled = ConvSpec { stride: 2, bias: true, ..ConvSpec::new(width, 2) };
        x = builder.conv_transpose(&x, &format!("{prefix}.up"), doubled);
        x = builder.padded_to(&x, level);
        x = builder.concat(&[level, &x]);
        x = double_conv(&mut builder, &x, &format!("{prefix}.conv"), width);
    }
    let y = builder.conv(&x, "outc.conv", ConvSpec { bias: true, ..ConvSpec::new(classes, 1) });
    builder.finish(&[&y])
}

/// Two 3x3 convolutions, each with batch norm and ReLU.
fn double_conv(builder: &mut Builder, x: &Value, prefix: &str, width: usize) -> Value {
    let mut y = x.clone();
    for (conv, norm) in [(0, 1), (3, 4)] {
        y = builder.conv(&y, &format!("{prefix}.double_conv.{conv}"), ConvSpec::same(width, 3));
        y = builder.batch_norm(&y, &format!("{prefix}.double_conv.{norm}"), BatchNormOp::default());
        y = builder.relu(&y);
    }
    y
}
