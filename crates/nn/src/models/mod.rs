//! Ready models.

mod mnist_cnn;
mod resnet;
mod segnet;

use convoke_autograd::Result;
use serde::{Deserialize, Serialize};

use crate::data::{DatasetInfo, Targets};
use crate::modules::ConvBnMode;
use crate::{Init, Module};

/// The models that can be asked for by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Model {
    /// The small network of PyTorch's fused Conv+BN tutorial, for 1 x 28 x 28 images of ten classes.
    #[serde(rename = "mnist-cnn")]
    MnistCnn,
    /// A small U-Net, for a class at every pixel.
    #[serde(rename = "segnet")]
    Segnet,
    /// The residual network of 20 layers for small images.
    #[serde(rename = "resnet20")]
    Resnet20,
    /// The residual network of 50 layers, for large images.
    #[serde(rename = "resnet50")]
    Resnet50,
}

impl Model {
    /// All of them.
    pub const ALL: [Model; 4] = [Model::MnistCnn, Model::Segnet, Model::Resnet20, Model::Resnet50];

    /// The name on the command line and in files.
    pub fn name(self) -> &'static str {
        match self {
            Model::MnistCnn => "mnist-cnn",
            Model::Segnet => "segnet",
            Model::Resnet20 => "resnet20",
            Model::Resnet50 => "resnet50",
        }
    }

    /// Channels, height, width of the images it is made for. Some models take others too: see [`Model::check`].
    pub fn input(self) -> [usize; 3] {
        match self {
            Model::MnistCnn => [1, 28, 28],
            Model::Segnet => [3, 120, 160],
            Model::Resnet20 => [3, 32, 32],
            Model::Resnet50 => [3, 224, 224],
        }
    }

    /// Classes of the data it is made for.
    pub fn classes(self) -> usize {
        match self {
            Model::MnistCnn | Model::Resnet20 => 10,
            Model::Segnet => 11,
            Model::Resnet50 => 1000,
        }
    }

    /// What its labels speak of.
    pub fn targets(self) -> Targets {
        match self {
            Model::Segnet => Targets::Pixels { ignore: None },
            Model::MnistCnn | Model::Resnet20 | Model::Resnet50 => Targets::Image,
        }
    }

    /// Whether it can be trained on this data.
    ///
    /// # Errors
    /// What it takes and what the data has, if it cannot.
    pub fn check(self, info: &DatasetInfo) -> std::result::Result<(), String> {
        let &DatasetInfo { ref name, channels, height, width, classes, .. } = info;
        let shape = [channels, height, width];
        match (self.targets(), info.targets) {
            (Targets::Image, Targets::Pixels { .. }) => {
                return Err(format!("{self} takes a label for each image; {name} has one for each pixel"));
            }
            (Targets::Pixels { .. }, Targets::Image) => {
                return Err(format!("{self} takes a label for each pixel; {name} has one for each image"));
            }
            _ => {}
        }
        let least = |least| height.min(width) >= least;
        let images = |least| format!("images of {least} x {least} pixels or more");
        let (fits, takes) = match self {
            Model::MnistCnn => (
                shape == self.input() && classes == self.classes(),
                format!("images of {:?} in {} classes", self.input(), self.classes()),
            ),
            Model::Segnet => (
                [height, width].iter().all(|size| size % segnet::MULTIPLE == 0),
                format!("images whose height and width are multiples of {}", segnet::MULTIPLE),
            ),
            Model::Resnet20 => (least(resnet::RESNET20_LEAST), images(resnet::RESNET20_LEAST)),
            Model::Resnet50 => (least(resnet::RESNET50_LEAST), images(resnet::RESNET50_LEAST)),
        };
        if fits {
            return Ok(());
        }
        Err(format!("{self} takes {takes}; {name} has {shape:?} in {classes} classes"))
    }

    /// A new model with its starting values, for images of `channels` channels: N x C x H x W to log-probabilities, N x classes
    /// or, of a model that labels pixels, N x classes x H x W.
    ///
    /// mnist-cnn has one channel and ten classes, whatever is asked for; [`Model::check`] tells.
    ///
    /// # Errors
    /// If `channels` or `classes` is 0 or too large.
    pub fn build(
        self,
        init: &Init,
        mode: ConvBnMode,
        channels: usize,
        classes: usize,
    ) -> Result<Box<dyn Module>> {
        match self {
            Model::MnistCnn => Ok(Box::new(mnist_cnn::mnist_cnn(init, mode, 0.5)?)),
            Model::Segnet => Ok(Box::new(segnet::segnet(init, mode, channels, classes)?)),
            Model::Resnet20 => Ok(Box::new(resnet::resnet20(init, mode, channels, classes)?)),
            Model::Resnet50 => Ok(Box::new(resnet::resnet50(init, mode, channels, classes)?)),
        }
    }
}

impl std::fmt::Display for Model {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

pub use mnist_cnn::mnist_cnn;
pub use resnet::{BasicBlock, Bottleneck, resnet20, resnet50};
pub use segnet::{Segnet, segnet};
