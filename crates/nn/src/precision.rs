//! The type of a model's activations.

use std::fmt;
use std::str::FromStr;

use convoke_autograd::{DType, Tensor};
use serde::{Deserialize, Serialize};

use crate::{Module, Result};

/// The type in which a model's activations, and their gradients, are stored.
///
/// Whatever it is, parameters, their gradients, running statistics, sums and losses are f32, and so are the model's files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    /// 24 binary digits.
    #[default]
    F32,
    /// 8 binary digits, and half of the memory. Processors with AVX512-BF16 or AMX multiply such numbers faster, too.
    Bf16,
}

impl Precision {
    /// Every precision.
    pub const ALL: [Precision; 2] = [Precision::F32, Precision::Bf16];

    /// The name in files.
    pub fn name(self) -> &'static str {
        match self {
            Precision::F32 => "f32",
            Precision::Bf16 => "bf16",
        }
    }

    /// Images in this type. In f32 they stay what they are.
    ///
    /// # Errors
    /// If there is no memory.
    pub fn of_images(self, images: Tensor) -> Result<Tensor> {
        match self {
            Precision::F32 => Ok(images),
            Precision::Bf16 if images.dtype() == DType::BF16 => Ok(images),
            Precision::Bf16 => images.to_dtype(DType::BF16),
        }
    }

    /// A model's output for images, in f32.
    ///
    /// # Errors
    /// If the model fails, or there is no memory.
    pub fn forward(self, model: &dyn Module, images: &Tensor) -> Result<Tensor> {
        let output = model.forward(&self.of_images(images.clone())?)?;
        match self {
            Precision::F32 => Ok(output),
            Precision::Bf16 => output.to_dtype(DType::F32),
        }
    }
}

impl fmt::Display for Precision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Precision {
    type Err = String;

    fn from_str(name: &str) -> std::result::Result<Precision, String> {
        Precision::ALL
            .into_iter()
            .find(|precision| precision.name() == name)
            .ok_or_else(|| format!("there is no precision {name:?}: f32 and bf16 are there"))
    }
}
