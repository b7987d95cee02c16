//! Ready models.

mod mnist_cnn;

use convoke_autograd::Result;
use serde::{Deserialize, Serialize};

use crate::modules::ConvBnMode;
use crate::{Init, Module};

/// The models that can be asked for by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Model {
    /// The small network of PyTorch's fused Conv+BN tutorial, for 1 x 28 x 28 images of ten classes.
    #[serde(rename = "mnist-cnn")]
    MnistCnn,
}

impl Model {
    /// All of them.
    pub const ALL: [Model; 1] = [Model::MnistCnn];

    /// The name on the command line and in files.
    pub fn name(self) -> &'static str {
        match self {
            Model::MnistCnn => "mnist-cnn",
        }
    }

    /// Channels, height, width of the images it takes.
    pub fn input(self) -> [usize; 3] {
        match self {
            Model::MnistCnn => [1, 28, 28],
        }
    }

    /// Classes it tells apart.
    pub fn classes(self) -> usize {
        match self {
            Model::MnistCnn => 10,
        }
    }

    /// A new model with its starting values. It maps N x C x H x W images to N x classes log-probabilities.
    ///
    /// # Errors
    /// If memory for its parameters cannot be described; not in practice.
    pub fn build(self, init: &Init, mode: ConvBnMode) -> Result<Box<dyn Module>> {
        match self {
            Model::MnistCnn => Ok(Box::new(mnist_cnn::mnist_cnn(init, mode, 0.5)?)),
        }
    }
}

impl std::fmt::Display for Model {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

pub use mnist_cnn::mnist_cnn;
