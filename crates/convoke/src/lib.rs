//! Train convolutional networks on CPUs: convolution algorithms chosen by measurement, batch norm done exactly right, and fused
//! Conv+BN training in a fraction of the memory.
//!
//! This crate re-exports the crates of the workspace: tensors and autograd at its root, built-in operations in [`ops`], layers,
//! optimizers, data and training runs in [`nn`], convolution algorithms in [`conv`], the tuner that chooses them in [`tune`], the
//! bare kernels in [`kernels`]. The program `convoke` is built with the feature `cli`, which is on by default.
//!
//! ```
//! use convoke::nn::modules::{Activation, BatchNorm2d, BatchNormConfig, Conv2d, ConvBn2d, ConvBnMode, ConvOptions};
//! use convoke::nn::{Forward, Init, ModuleExt, Optimizer, Rule};
//! use convoke::{DType, Device, Tensor};
//!
//! let device = Device::cpu()?;
//! let init = Init::new(&device, 0);
//! let conv = Conv2d::new(&init, [3, 8], [3, 3], ConvOptions::default(), false)?;
//! let bn = BatchNorm2d::new(&init, 8, BatchNormConfig::default())?;
//! let block = ConvBn2d::new(conv, bn, Activation::Relu, ConvBnMode::Fused);
//! let mut optimizer = Optimizer::new(Rule::sgd(0.1), &block)?;
//!
//! let images = Tensor::full(&device, &[4, 3, 8, 8], DType::F32, 0.5)?;
//! let loss = block.forward(&images)?.mean()?;
//! optimizer.step(loss.backward()?)?;
//! assert_eq!(block.parameters().len(), 3);
//! # Ok::<(), convoke::Error>(())
//! ```

#[cfg(feature = "cli")]
pub mod cli;

pub use convoke_autograd::*;

#[doc(inline)]
pub use convoke_distributed as distributed;
#[doc(inline)]
pub use convoke_kernels as kernels;
pub use convoke_kernels::{conv, tune};

/// Modules, initialisers, optimizers, data sets, models, training runs and checkpoints.
pub mod nn {
    // The derived code uses paths of this crate (`convoke::nn`), which are the ones that its users have.
    pub use convoke_derive::FacadeModule as Module;
    #[doc(inline)]
    pub use convoke_nn::*;
}
