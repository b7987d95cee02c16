//! torchvision's architectures, with its names of parameters and its initial values, as definitions.
//!
//! Each function gives the [`Definition`] of a model for images of a number of channels in a number of classes, which maps
//! N x `channels` x H x W images to N x `classes` logits, or to N x `classes` x H x W logits if it gives each pixel a class. The
//! weights that torchvision publishes fit by [`load_weights`](crate::checkpoint::load_weights).
//!
//! Initial values have torchvision's distributions and the order of its layers, not its random numbers.

mod convnext;
mod densenet;
mod efficientnet;
mod mobilenet;
mod regnet;
mod resnet;
mod segmentation;
mod vgg;

pub use convnext::convnext_tiny;
pub use densenet::densenet121;
pub use efficientnet::{efficientnet_b0, efficientnet_b1, efficientnet_b2, efficientnet_b3};
pub use mobilenet::{mobilenet_v2, mobilenet_v3_large, mobilenet_v3_small};
pub use regnet::regnet_y_400mf;
pub use resnet::{resnet18, resnet34, resnet50, resnet101, resnext50_32x4d, wide_resnet50_2};
pub use segmentation::{deeplabv3_resnet50, fcn_resnet50};
pub use vgg::{vgg11_bn, vgg16_bn};

use convoke_autograd::Result;
use convoke_autograd::ops::Pointwise;

use super::{ModelSpec, of_definition};
use crate::graph::{BatchNormOp, Builder, ConvSpec, Definition, Value};

/// The smallest height and width that the models are meant for: the last layers of most have a 32nd of them.
const LEAST: usize = 32;

/// A function that gives a definition for a number of channels and of classes.
type Define = fn(usize, usize) -> Result<Definition>;

/// The models that are found by name.
pub(super) fn specs() -> Vec<ModelSpec> {
    // The height and width are those of the images that torchvision's weights are for.
    let of_images: [(&str, usize, Define); 17] = [
        ("resnet18", 224, resnet18),
        ("resnet34", 224, resnet34),
        ("resnet101", 224, resnet101),
        ("resnext50-32x4d", 224, resnext50_32x4d),
        ("wide-resnet50-2", 224, wide_resnet50_2),
        ("vgg11-bn", 224, vgg11_bn),
        ("vgg16-bn", 224, vgg16_bn),
        ("mobilenet-v2", 224, mobilenet_v2),
        ("mobilenet-v3-small", 224, mobilenet_v3_small),
        ("mobilenet-v3-large", 224, mobilenet_v3_large),
        ("densenet121", 224, densenet121),
        ("efficientnet-b0", 224, efficientnet_b0),
        ("efficientnet-b1", 240, efficientnet_b1),
        ("efficientnet-b2", 288, efficientnet_b2),
        ("efficientnet-b3", 300, efficientnet_b3),
        ("regnet-y-400mf", 224, regnet_y_400mf),
        ("convnext-tiny", 224, convnext_tiny),
    ];
    let of_pixels: [(&str, usize, Define); 2] =
        [("fcn-resnet50", 480, fcn_resnet50), ("deeplabv3-resnet50", 480, deeplabv3_resnet50)];
    let spec = |(name, size, define), classes| {
        of_definition((name, [3, size, size], classes), define)
            .takes(format!("images of {LEAST} x {LEAST} pixels or more"), |info| {
                info.height.min(info.width) >= LEAST
            })
    };
    let of_images = of_images.into_iter().map(|model| spec(model, 1000));
    of_images.chain(of_pixels.into_iter().map(|model| spec(model, 21).of_pixels())).collect()
}

/// torchvision's `_make_divisible`: the nearest multiple of 8, but no less than 8 and than nine tenths of the number.
fn divisible_by_8(number: f64) -> usize {
    let nearest = ((number + 4.0) as usize / 8 * 8).max(8);
    if (nearest as f64) < 0.9 * number { nearest + 8 } else { nearest }
}

/// What follows a batch norm.
#[derive(Debug, Clone, Copy)]
enum Activation {
    None,
    Relu,
    Of(Pointwise),
}

impl Activation {
    fn apply(self, builder: &mut Builder, x: &Value) -> Value {
        match self {
            Activation::None => x.clone(),
            Activation::Relu => builder.relu(x),
            Activation::Of(function) => builder.pointwise(x, function),
        }
    }
}

/// A convolution, batch norm, and an activation.
struct ConvNorm<'a> {
    /// The names of the convolution and of the batch norm.
    names: [&'a str; 2],
    conv: ConvSpec,
    norm: BatchNormOp,
    activation: Activation,
}

impl ConvNorm<'_> {
    fn apply(self, builder: &mut Builder, x: &Value) -> Value {
        let y = builder.conv(x, self.names[0], self.conv);
        let y = builder.batch_norm(&y, self.names[1], self.norm);
        self.activation.apply(builder, &y)
    }
}

/// torchvision's `Conv2dNormActivation`: the parts are `name.0` and `name.1`.
struct ConvNormActivation {
    conv: ConvSpec,
    norm: BatchNormOp,
    activation: Activation,
}

impl ConvNormActivation {
    fn apply(self, builder: &mut Builder, x: &Value, name: &str) -> Value {
        let names = [0, 1].map(|part| format!("{name}.{part}"));
        let names = [names[0].as_str(), names[1].as_str()];
        let ConvNormActivation { conv, norm, activation } = self;
        ConvNorm { names, conv, norm, activation }.apply(builder, x)
    }
}

/// Squeeze and excitation (J. Hu, L. Shen, G. Sun, "Squeeze-and-excitation networks", 2018): each channel is multiplied by what
/// two 1x1 convolutions, `fc1` and `fc2`, make of the means of all channels.
struct SqueezeExcitation {
    /// Channels between the convolutions.
    width: usize,
    /// After the first convolution.
    inner: Activation,
    /// After the second.
    gate: Pointwise,
}

impl SqueezeExcitation {
    fn apply(self, builder: &mut Builder, x: &Value, name: &str) -> Value {
        let conv = |channels| ConvSpec { bias: true, ..ConvSpec::new(channels, 1) };
        let y = builder.global_average(x);
        let y = builder.conv(&y, &format!("{name}.fc1"), conv(self.width));
        let y = self.inner.apply(builder, &y);
        let y = builder.conv(&y, &format!("{name}.fc2"), conv(x.channels()));
        let y = builder.pointwise(&y, self.gate);
        builder.mul(x, &y)
    }
}
