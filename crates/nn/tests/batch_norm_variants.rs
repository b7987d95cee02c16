//! Batch norm as layers of other conventions and ranks, with fixed statistics, and folded into a convolution.

mod common;

use common::{assert_refused, backward, buffer, check_same_state, device, init, normal, snapshot, values};
use convoke_autograd::{DType, Tensor};
use convoke_nn::modules::{
    Activation, BatchNorm1d, BatchNorm2d, BatchNorm3d, BatchNormConfig, Conv2d, ConvBn2d, ConvBnMode,
    ConvOptions, Convention,
};
use convoke_nn::{Module, ModuleExt};
use convoke_testkit::{Tolerance, check_close};

/// One channel of 1, 2, 3, 4 under each framework's convention: what training and evaluation give, and what is kept.
#[test]
fn a_layer_follows_its_convention() {
    let device = device();
    let unbiased = 5.0 / 3.0;
    for (convention, new_weight, eps, kept) in [
        (Convention::pytorch(), 0.1, 1e-5, unbiased),
        (Convention::keras(), 0.01, 1e-3, 1.25),
        (Convention::tensorflow_fused(), 0.01, 1e-3, unbiased),
        (Convention::cudnn(), 0.1, 1e-5, unbiased),
        (Convention::onnx(), 0.1, 1e-5, 1.25),
    ] {
        let init = init(&device, DType::F64, 1);
        let bn = BatchNorm2d::new(&init, 1, BatchNormConfig::of(convention)).unwrap();
        let x = Tensor::from_slice(&device, &[4, 1, 1, 1], &[1.0f64, 2.0, 3.0, 4.0]).unwrap();
        let output = |mean: f64, variance: f64| -> Vec<f64> {
            [1.0, 2.0, 3.0, 4.0].iter().map(|x| (x - mean) / (variance + eps).sqrt()).collect()
        };
        let close = |found: &Tensor, expected: &[f64]| {
            check_close(&values(found), expected, Tolerance::new(0.0, 1e-12))
                .unwrap_or_else(|mismatch| panic!("{convention:?}: {mismatch}"));
        };
        close(&bn.forward(&x).unwrap(), &output(2.5, 1.25));
        let (mean, variance) = (new_weight * 2.5, (1.0 - new_weight) + new_weight * kept);
        close(&bn.running_mean().unwrap(), &[mean]);
        close(&bn.running_var().unwrap(), &[variance]);
        bn.eval();
        close(&bn.forward(&x).unwrap(), &output(mean, variance));
    }
}

/// A rank is only how the values of a channel are arranged: every layer gives the same numbers for the same values.
#[test]
fn ranks_differ_in_shape_only() {
    let device = device();
    let init = init(&device, DType::F32, 1);
    let config = BatchNormConfig::default();
    let (one, three) =
        (BatchNorm1d::new(&init, 3, config).unwrap(), BatchNorm3d::new(&init, 3, config).unwrap());
    let two = BatchNorm2d::new(&init, 3, config).unwrap();
    let run = |layer: &dyn Module, shape: &[usize]| {
        let x = normal(&device, DType::F32, 4, shape).with_grad();
        let upstream = normal(&device, DType::F32, 5, shape);
        let y = layer.forward(&x).unwrap();
        let gradients = backward(&y, &upstream, false);
        let state: Vec<Vec<f64>> =
            ["running_mean", "running_var"].map(|name| values(&buffer(layer, name).value())).to_vec();
        (values(&y), values(gradients.get(&x).unwrap()), state)
    };
    let expected = run(&two, &[2, 3, 4, 6]);
    assert_eq!(run(&one, &[2, 3, 24]), expected);
    assert_eq!(run(&three, &[2, 3, 2, 3, 4]), expected);

    // 2D input of BatchNorm1d is 4D input of one pixel an image.
    for (layer, shape) in [
        (Box::new(BatchNorm1d::new(&init, 3, config).unwrap()) as Box<dyn Module>, vec![8, 3]),
        (Box::new(BatchNorm2d::new(&init, 3, config).unwrap()), vec![8, 3, 1, 1]),
    ] {
        let (y, ..) = run(&*layer, &shape);
        let x = values(&normal(&device, DType::F32, 4, &shape));
        for channel in 0..3 {
            let of = |all: &[f64]| -> Vec<f64> { all.iter().skip(channel).step_by(3).copied().collect() };
            let (x, y) = (of(&x), of(&y));
            let mean = x.iter().sum::<f64>() / 8.0;
            let variance = x.iter().map(|x| (x - mean) * (x - mean)).sum::<f64>() / 8.0;
            let expected: Vec<f64> = x.iter().map(|x| (x - mean) / (variance + 1e-5).sqrt()).collect();
            check_close(&y, &expected, Tolerance::new(1e-5, 1e-5)).unwrap();
        }
    }

    let refused = |layer: &dyn Module, name: &str, expected: &str, shapes: &[&[usize]]| {
        for shape in shapes {
            let expected = format!("expected {expected} input (got {}D input)", shape.len());
            assert_refused(layer.forward(&normal(&device, DType::F32, 1, shape)), &[name, &expected]);
        }
    };
    refused(&one, "BatchNorm1d", "2D or 3D", &[&[3], &[2, 3, 4, 4]]);
    refused(&three, "BatchNorm3d", "5D", &[&[2, 3], &[2, 3, 4], &[2, 3, 4, 4]]);
}

/// Training a frozen layer, alone or in a block, is what evaluating it is; freed, it trains again.
#[test]
fn a_frozen_layer_evaluates_while_the_model_trains() {
    let device = device();
    let shape = [4, 2, 5, 5];
    let x = normal(&device, DType::F32, 7, &shape);
    for mode in [ConvBnMode::Fused, ConvBnMode::Separate] {
        let init = init(&device, DType::F32, 1);
        let conv = Conv2d::new(&init, [2, 2], [1, 1], ConvOptions::default(), false).unwrap();
        let bn = BatchNorm2d::new(&init, 2, BatchNormConfig::default()).unwrap();
        let block = ConvBn2d::new(conv, bn, Activation::Relu, mode);
        block.forward(&x).unwrap();
        let before = snapshot(&block);
        block.eval();
        let evaluated = values(&block.forward(&x).unwrap());

        block.bn.set_frozen(true);
        block.train();
        assert!(block.bn.is_frozen());
        let y = block.forward(&x).unwrap();
        assert_eq!(values(&y), evaluated);
        check_same_state(&snapshot(&block), &before).unwrap();
        let gradients = backward(&y, &normal(&device, DType::F32, 8, &shape), false);
        assert!(gradients.get(&block.bn.weight.as_ref().unwrap().value()).is_some(), "gamma still trains");

        block.bn.set_frozen(false);
        block.forward(&x).unwrap();
        assert_eq!(block.bn.num_batches_tracked(), Some(2));
    }
}

/// The folded convolution computes what the block does in evaluation, whatever parts both have.
#[test]
fn a_folded_block_computes_the_same() {
    let device = device();
    for (dtype, tolerance) in [(DType::F32, 2e-5), (DType::F64, 1e-12)] {
        for (groups, bias, affine) in [(1, false, true), (2, true, true), (4, true, false), (1, false, false)]
        {
            let init = init(&device, dtype, 3);
            let options = ConvOptions { groups, stride: [2, 1], ..ConvOptions::default() };
            let conv = Conv2d::new(&init, [4, 8], [3, 2], options, bias).unwrap();
            let config = BatchNormConfig { affine, ..BatchNormConfig::of(Convention::keras()) };
            let bn = BatchNorm2d::new(&init, 8, config).unwrap();
            if let (Some(weight), Some(bias)) = (&bn.weight, &bn.bias) {
                weight.set(&normal(&device, dtype, 10, &[8])).unwrap();
                bias.set(&normal(&device, dtype, 11, &[8])).unwrap();
            }
            let block = ConvBn2d::new(conv, bn, Activation::Relu, ConvBnMode::Fused);
            let x = normal(&device, dtype, 12, &[3, 4, 9, 8]);
            (0..3).for_each(|_| drop(block.forward(&x).unwrap()));
            let folded = block.fold().unwrap();
            block.eval();
            let expected = values(&block.forward(&x).unwrap());
            let found = values(&folded.forward(&x).unwrap().relu().unwrap());
            check_close(&found, &expected, Tolerance::new(tolerance, tolerance)).unwrap();
        }
    }

    let init = init(&device, DType::F32, 3);
    let conv = Conv2d::new(&init, [2, 2], [1, 1], ConvOptions::default(), false).unwrap();
    let config = BatchNormConfig { track_running_stats: false, ..BatchNormConfig::default() };
    let bn = BatchNorm2d::new(&init, 2, config).unwrap();
    let block = ConvBn2d::new(conv, bn, Activation::Identity, ConvBnMode::Fused);
    assert_refused(block.fold(), &["BatchNorm2d", "no running statistics"]);

    let conv = Conv2d::new(&init, [2, 8], [1, 1], ConvOptions::default(), false).unwrap();
    let bn = BatchNorm2d::new(&init, 4, BatchNormConfig::default()).unwrap();
    let block = ConvBn2d::new(conv, bn, Activation::Identity, ConvBnMode::Fused);
    assert_refused(block.fold(), &["fold_conv_bn2d", "4 channels", "gives 8"]);
}
