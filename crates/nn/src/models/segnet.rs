//! A small U-Net that classifies every pixel.

use convoke_autograd::ops::concat;
use convoke_autograd::{Error, Result, Tensor};

use super::ModelSpec;
use crate::modules::{
    Conv2d, ConvBn2d, ConvBnMode, ConvOptions, LogSoftmax, MaxPool2d, PoolOptions, Resize, Sequential,
};
use crate::{Forward, Init, Module};

/// Channels of the three levels of the encoder, from full size down, and of the bottleneck under them.
const WIDTHS: [usize; 4] = [16, 32, 64, 128];

/// Heights and widths must be a multiple of this: each level halves them.
const MULTIPLE: usize = 1 << (WIDTHS.len() - 1);

pub(super) fn spec() -> ModelSpec {
    ModelSpec::new("segnet", [3, 120, 160], 11, |init, options| {
        segnet(init, options.conv_bn, options.image[0], options.classes)
    })
    .of_pixels()
    .takes(format!("images whose height and width are multiples of {MULTIPLE}"), |info| {
        [info.height, info.width].iter().all(|size| size % MULTIPLE == 0)
    })
}

/// The network that [`segnet`] builds.
#[derive(Module)]
pub struct Segnet {
    /// The encoder's levels, from full size down.
    down1: Sequential,
    down2: Sequential,
    down3: Sequential,
    bottleneck: Sequential,
    /// The decoder's levels, from an eighth of the size up.
    up1: Sequential,
    up2: Sequential,
    up3: Sequential,
    /// Maps to one number per class at each pixel.
    classify: Conv2d,
}

/// A U-Net (Ronneberger, Fischer, Brox: "U-Net: convolutional networks for biomedical image segmentation", 2015) of three
/// levels: N x `channels` x H x W images, H and W multiples of 8, to N x `classes` x H x W log-probabilities.
///
/// Each level is two blocks of a 3x3 convolution with padding 1, batch norm and ReLU. The encoder (`down1` to `down3`, of 16, 32
/// and 64 channels) halves the size after each level by max-pooling. A `bottleneck` of 128 channels follows. The decoder (`up1`
/// to `up3`, of 64, 32 and 16 channels) doubles the size before each level (bilinear), and concatenates the result with the
/// output of the encoder's level of this size. A 1x1 convolution, `classify`, and log-softmax come last. Unlike in the paper,
/// convolutions keep the size, and no convolution comes between an upsampling and its concatenation.
///
/// With three channels and eleven classes it has 488,171 parameters.
///
/// # Errors
/// If `channels` or `classes` is 0 or too large.
pub fn segnet(init: &Init, mode: ConvBnMode, channels: usize, classes: usize) -> Result<Segnet> {
    let block = |channels| ConvBn2d::same3x3(init, channels, mode);
    let level = |channels: usize, width: usize| -> Result<Sequential> {
        Ok(Sequential::new().then("conv1", block([channels, width])?).then("conv2", block([width, width])?))
    };
    let [first, second, third, deepest] = WIDTHS;
    Ok(Segnet {
        down1: level(channels, first)?,
        down2: level(first, second)?,
        down3: level(second, third)?,
        bottleneck: level(third, deepest)?,
        up1: level(deepest + third, third)?,
        up2: level(third + second, second)?,
        up3: level(second + first, first)?,
        classify: Conv2d::new(init, [first, classes], [1, 1], ConvOptions::default(), true)?,
    })
}

impl Forward for Segnet {
    fn forward(&self, input: &Tensor) -> Result<Tensor> {
        if let &[_, _, height, width] = input.shape()
            && (height % MULTIPLE != 0 || width % MULTIPLE != 0)
        {
            let reason = format!(
                "height and width must be multiples of {MULTIPLE}; the input is {height} x {width}: {:?}",
                input.shape()
            );
            return Err(Error::Invalid { operation: "segnet", reason });
        }
        let (halve, double) = (MaxPool2d(PoolOptions::new(2)), Resize::bilinear(2.0));
        let mut x = input.clone();
        let mut skipped = Vec::new();
        for level in [&self.down1, &self.down2, &self.down3] {
            let whole = level.forward(&x)?;
            x = halve.forward(&whole)?;
            skipped.push(whole);
        }
        x = self.bottleneck.forward(&x)?;
        for level in [&self.up1, &self.up2, &self.up3] {
            let whole = skipped.pop().expect("one for each level");
            x = level.forward(&concat(&[&double.forward(&x)?, &whole])?)?;
        }
        LogSoftmax.forward(&self.classify.forward(&x)?)
    }
}
