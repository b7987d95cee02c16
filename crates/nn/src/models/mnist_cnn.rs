//! The network of PyTorch's fused Conv+BN tutorial.

use convoke_autograd::Result;

use super::ModelSpec;
use crate::Init;
use crate::modules::{
    Activation, BatchNorm2d, BatchNormConfig, Conv2d, ConvBn2d, ConvBnMode, ConvOptions, Dropout, Flatten,
    Linear, LogSoftmax, PoolOptions, Relu, Sequential,
};

pub(super) fn spec() -> ModelSpec {
    ModelSpec::new("mnist-cnn", [1, 28, 28], 10, |init, options| mnist_cnn(init, options.conv_bn, 0.5))
}

/// conv 1->32 3x3, BN, ReLU, conv 32->64 3x3, BN, ReLU, max-pool 2, flatten, linear 9216->128, dropout, ReLU,
/// linear 128->10, log-softmax; for N x 1 x 28 x 28 images. The tutorial drops out with probability 0.5.
///
/// # Errors
/// If `dropout` is not in [0, 1].
pub fn mnist_cnn(init: &Init, mode: ConvBnMode, dropout: f64) -> Result<Sequential> {
    let block = |channels: [usize; 2]| -> Result<ConvBn2d> {
        let conv = Conv2d::new(init, channels, [3, 3], ConvOptions::default(), false)?;
        let bn = BatchNorm2d::new(init, channels[1], BatchNormConfig::default())?;
        Ok(ConvBn2d::new(conv, bn, Activation::Relu, mode))
    };
    Ok(Sequential::new()
        .then("block1", block([1, 32])?)
        .then("block2", block([32, 64])?.with_pool(PoolOptions::new(2)))
        .then("flatten", Flatten)
        .then("linear1", Linear::new(init, [64 * 12 * 12, 128], true)?)
        .then("dropout", Dropout::new(init, dropout)?)
        .then("relu", Relu)
        .then("linear2", Linear::new(init, [128, 10], true)?)
        .then("log_softmax", LogSoftmax))
}
