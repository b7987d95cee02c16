//! Networks that give each pixel a class.
//!
//! J. Long, E. Shelhamer, T. Darrell, "Fully convolutional networks for semantic segmentation", 2014.
//! L.-C. Chen, G. Papandreou, F. Schroff, H. Adam, "Rethinking atrous convolution for semantic image segmentation", 2017.

use convoke_autograd::Result;

use super::resnet::{SCHEME, dilated_resnet50};
use super::{Activation, ConvNorm};
use crate::graph::{BatchNormOp, Builder, ConvSpec, Definition, Scheme, Value};

/// Channels of the head of DeepLabV3.
const WIDTH: usize = 256;
/// Steps between what the head's 3x3 convolutions read.
const DILATIONS: [usize; 3] = [12, 24, 36];

/// FCN with a ResNet-50: N x `channels` x H x W images to N x `classes` x H x W logits.
///
/// The last two stages of the ResNet have dilated convolutions instead of a stride, so that it gives an 8th of the height and width. A
/// 3x3 convolution to 512 channels and a 1x1 convolution make logits of that, which are resized bilinearly. torchvision's auxiliary
/// head, which only helps in training, is left out.
///
/// With three channels and 21 classes it has 32,957,013 parameters.
///
/// # Errors
/// If `channels` or `classes` is 0.
pub fn fcn_resnet50(channels: usize, classes: usize) -> Result<Definition> {
    segmentation(("fcn-resnet50", fcn_head), channels, classes)
}

/// DeepLabV3 with a ResNet-50: N x `channels` x H x W images to N x `classes` x H x W logits.
///
/// The ResNet is that of [`fcn_resnet50`]. The head concatenates a 1x1 convolution of what the ResNet gives, 3x3 convolutions that are
/// dilated by 12, 24 and 36, and the mean of all pixels behind a 1x1 convolution. A 1x1 and a 3x3 convolution to 256 channels and a last
/// 1x1 convolution follow. torchvision's auxiliary head is left out.
///
/// The batch norm behind the mean has one value for each image: a batch to train on needs two images or more, as in PyTorch.
///
/// With three channels and 21 classes it has 39,638,869 parameters.
///
/// # Errors
/// If `channels` or `classes` is 0.
pub fn deeplabv3_resnet50(channels: usize, classes: usize) -> Result<Definition> {
    segmentation(("deeplabv3-resnet50", deeplab_head), channels, classes)
}

/// Makes logits of what the ResNet gives.
type Head = fn(&mut Builder, &Value, usize) -> Value;

fn segmentation((name, head): (&str, Head), channels: usize, classes: usize) -> Result<Definition> {
    let mut builder = Builder::new(name, SCHEME);
    let images = builder.input("images", channels);
    let x = dilated_resnet50(&mut builder, &images, "backbone.");
    builder.set_scheme(Scheme::default());
    let x = head(&mut builder, &x, classes);
    let y = builder.resized_to(&x, &images);
    builder.finish(&[&y])
}

fn fcn_head(builder: &mut Builder, x: &Value, classes: usize) -> Value {
    let inner = ConvSpec::same(x.channels() / 4, 3);
    let y = conv_norm_relu(builder, x, ["classifier.0", "classifier.1"], inner);
    let y = builder.dropout(&y, "classifier.3", 0.1);
    builder.conv(&y, "classifier.4", last(classes))
}

fn deeplab_head(builder: &mut Builder, x: &Value, classes: usize) -> Value {
    let pointwise = ConvSpec::new(WIDTH, 1);
    let dilated =
        DILATIONS.map(|dilation| ConvSpec { padding: dilation, dilation, ..ConvSpec::new(WIDTH, 3) });
    let mut parts = Vec::new();
    for (index, conv) in [pointwise].into_iter().chain(dilated).enumerate() {
        let names = [0, 1].map(|part| format!("classifier.0.convs.{index}.{part}"));
        parts.push(conv_norm_relu(builder, x, [&names[0], &names[1]], conv));
    }
    let mean = builder.global_average(x);
    let names = ["classifier.0.convs.4.1", "classifier.0.convs.4.2"];
    let mean = conv_norm_relu(builder, &mean, names, pointwise);
    parts.push(builder.resized_to(&mean, x));
    let y = builder.concat(&parts.iter().collect::<Vec<_>>());
    let y = conv_norm_relu(builder, &y, ["classifier.0.project.0", "classifier.0.project.1"], pointwise);
    let y = builder.dropout(&y, "classifier.0.project.3", 0.5);
    let y = conv_norm_relu(builder, &y, ["classifier.1", "classifier.2"], ConvSpec::same(WIDTH, 3));
    builder.conv(&y, "classifier.4", last(classes))
}

fn conv_norm_relu(builder: &mut Builder, x: &Value, names: [&str; 2], conv: ConvSpec) -> Value {
    ConvNorm { names, conv, norm: BatchNormOp::default(), activation: Activation::Relu }.apply(builder, x)
}

/// The layer that gives logits.
fn last(classes: usize) -> ConvSpec {
    ConvSpec { bias: true, ..ConvSpec::new(classes, 1) }
}
