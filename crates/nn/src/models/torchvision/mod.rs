//! torchvision's architectures, with its names of parameters and its initial values, as definitions.
//!
//! Each function gives the [`Definition`] of a model for images of a number of channels in a number of classes, which maps
//! N x `channels` x H x W images to N x `classes` logits. The weights that torchvision publishes fit by
//! [`load_weights`](crate::checkpoint::load_weights).
//!
//! Initial values have torchvision's distributions and the order of its layers, not its random numbers.

mod densenet;
mod efficientnet;
mod mobilenet;
mod resnet;
mod vgg;

pub use densenet::densenet121;
pub use efficientnet::efficientnet_b0;
pub use mobilenet::{mobilenet_v2, mobilenet_v3_small};
pub use resnet::{resnet18, resnet34, resnet50, resnet101};
pub use vgg::{vgg11_bn, vgg16_bn};

use convoke_autograd::Result;
use convoke_autograd::ops::Pointwise;

use super::{ModelSpec, of_definition};
use crate::graph::{BatchNormOp, Builder, ConvSpec, Definition, Value};

/// The smallest height and width that the models are meant for: their last layers have a 32nd of them.
const LEAST: usize = 32;

/// A function that gives a definition for a number of channels and of classes.
type Define = fn(usize, usize) -> Result<Definition>;

/// The models that are found by name.
pub(super) fn specs() -> Vec<ModelSpec> {
    let models: [(&str, Define); 9] = [
        ("resnet18", resnet18),
        ("resnet34", resnet34),
        ("resnet101", resnet101),
        ("vgg11-bn", vgg11_bn),
        ("vgg16-bn", vgg16_bn),
        ("mobilenet-v2", mobilenet_v2),
        ("mobilenet-v3-small", mobilenet_v3_small),
        ("densenet121", densenet121),
        ("efficientnet-b0", efficientnet_b0),
    ];
    let spec = |(name, define)| {
        of_definition((name, [3, 224, 224], 1000), define)
            .takes(format!("images of {LEAST} x {LEAST} pixels or more"), |info| {
                info.height.min(info.width) >= LEAST
            })
    };
    models.into_iter().map(spec).collect()
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
