//! A program with a model of its own, which has every command of `convoke`:
//!
//! ```text
//! cargo run --release --example own_model -- train --model residual
//! cargo run --release --example own_model -- train --model residual --ranks 2 --sync-bn --checkpoint runs/residual
//! cargo run --release --example own_model -- plan --model residual --memory-budget 60MB
//! ```

use std::process::ExitCode;

use convoke::cli::Registry;
use convoke::nn::models::{ModelOptions, ModelSpec};
use convoke::nn::modules::{
    Activation, BatchNorm2d, BatchNormConfig, Conv2d, ConvBn2d, ConvOptions, GlobalAvgPool2d, Linear,
    LogSoftmax, Padding,
};
use convoke::nn::{Forward, Init, Module};
use convoke::{Result, Tensor};

/// A block that halves the size, one with a way around it, and a classifier of the mean of each channel.
#[derive(Module)]
struct Residual {
    first: ConvBn2d,
    around: ConvBn2d,
    classify: Linear,
}

impl Residual {
    fn new(init: &Init, options: &ModelOptions) -> Result<Residual> {
        let block = |channels: [usize; 2], stride: usize| -> Result<ConvBn2d> {
            let padding = Padding::symmetric([1, 1]);
            let convolution = ConvOptions { stride: [stride; 2], padding, ..ConvOptions::default() };
            let conv = Conv2d::new(init, channels, [3, 3], convolution, false)?;
            let bn = BatchNorm2d::new(init, channels[1], BatchNormConfig::default())?;
            Ok(ConvBn2d::new(conv, bn, Activation::Relu, options.conv_bn))
        };
        let [channels, _, _] = options.image;
        Ok(Residual {
            first: block([channels, 32], 2)?,
            around: block([32, 32], 1)?,
            classify: Linear::new(init, [32, options.classes], true)?,
        })
    }
}

impl Forward for Residual {
    fn forward(&self, images: &Tensor) -> Result<Tensor> {
        let x = self.first.forward(images)?;
        let x = GlobalAvgPool2d.forward(&self.around.forward_added(&x, &x)?)?;
        let x = x.reshape(&[x.shape()[0], 32])?;
        LogSoftmax.forward(&self.classify.forward(&x)?)
    }
}

fn main() -> ExitCode {
    let residual = ModelSpec::new("residual", [1, 28, 28], 10, Residual::new)
        .takes("images of 2 x 2 pixels or more", |info| info.height.min(info.width) >= 2);
    convoke::cli::main(Registry::builtin().with_model(residual).expect("the name is free"))
}
