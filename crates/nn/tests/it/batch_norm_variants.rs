//! Batch norm as layers of other conventions and ranks, with fixed statistics, and folded into a convolution.

use crate::common::{
    assert_refused, backward, buffer, check_same_state, device, init, normal, snapshot, values,
};
use convoke_autograd::{DType, Tensor};
use convoke_nn::modules::{
    Activation, BatchNorm1d, BatchNorm2d, BatchNorm3d, BatchNormConfig, Conv2d, ConvBn2d, ConvBnMode,
    ConvOptions, Convention, LazyBatchNorm1d, LazyBatchNorm2d, LazyBatchNorm3d, Relu, Sequential,
};
use convoke_nn::{Forward, Module, ModuleExt};
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

        block.bn.as_ref().unwrap().set_frozen(true);
        block.train();
        assert!(block.bn.as_ref().unwrap().is_frozen());
        let y = block.forward(&x).unwrap();
        assert_eq!(values(&y), evaluated);
        check_same_state(&snapshot(&block), &before).unwrap();
        let gradients = backward(&y, &normal(&device, DType::F32, 8, &shape), false);
        assert!(
            gradients.get(&block.bn.as_ref().unwrap().weight.as_ref().unwrap().value()).is_some(),
            "gamma still trains"
        );

        block.bn.as_ref().unwrap().set_frozen(false);
        block.forward(&x).unwrap();
        assert_eq!(block.bn.as_ref().unwrap().num_batches_tracked(), Some(2));
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
            let mut block = ConvBn2d::new(conv, bn, Activation::Relu, ConvBnMode::Fused);
            let x = normal(&device, dtype, 12, &[3, 4, 9, 8]);
            (0..3).for_each(|_| drop(block.forward(&x).unwrap()));
            block.eval();
            let expected = values(&block.forward(&x).unwrap());
            assert_eq!(block.fold().unwrap(), 1);
            assert_eq!(paths(&block), ["conv.weight", "conv.bias"]);
            let found = values(&block.forward(&x).unwrap());
            check_close(&found, &expected, Tolerance::new(tolerance, tolerance)).unwrap();
            assert_eq!(block.fold().unwrap(), 0, "once folded there is nothing to fold");
        }
    }
}

fn paths(model: &dyn Module) -> Vec<String> {
    model.named_state().into_iter().map(|(path, _)| path).collect()
}

/// In a tree: blocks, plain layers in a row, also deeper; what cannot be folded stays and goes on computing.
#[test]
fn a_tree_folds_where_it_can() {
    let device = device();
    let init = init(&device, DType::F64, 3);
    let conv =
        |channels: [usize; 2]| Conv2d::new(&init, channels, [3, 3], ConvOptions::default(), false).unwrap();
    let untracked = BatchNormConfig { track_running_stats: false, ..BatchNormConfig::default() };
    let bn = |config: BatchNormConfig| BatchNorm2d::new(&init, 4, config).unwrap();
    let block =
        ConvBn2d::new(conv([4, 4]), bn(BatchNormConfig::default()), Activation::Relu, ConvBnMode::Separate);
    let deeper = Sequential::new()
        .then("conv", conv([4, 4]))
        .then("bn", LazyBatchNorm2d::new(&init, BatchNormConfig::default()))
        .then("relu", Relu);
    let mut model = Sequential::new()
        .then("first", conv([2, 4]))
        .then("norm", bn(BatchNormConfig::default()))
        .then("block", block)
        .then("deeper", deeper)
        .then("alone", bn(BatchNormConfig::default()))
        .then("conv", conv([4, 4]))
        .then("untracked", bn(untracked));
    let x = normal(&device, DType::F64, 12, &[3, 2, 12, 11]);
    (0..3).for_each(|_| drop(model.forward(&x).unwrap()));
    model.eval();
    let expected = values(&model.forward(&x).unwrap());
    assert_eq!(model.fold().unwrap(), 3);
    let names: Vec<String> = model.children().into_iter().map(|(name, _)| name.to_owned()).collect();
    assert_eq!(names, ["first", "block", "deeper", "alone", "conv", "untracked"]);
    assert!(paths(&model).iter().all(|path| !path.starts_with("deeper.bn") && path != "norm.weight"));
    let found = values(&model.forward(&x).unwrap());
    check_close(&found, &expected, Tolerance::new(1e-11, 1e-11)).unwrap();

    let wrong = BatchNorm2d::new(&init, 3, BatchNormConfig::default()).unwrap();
    let mut model = Sequential::new().then("conv", conv([2, 4])).then("bn", wrong);
    assert_refused(model.fold(), &["fold_conv_bn2d", "3 channels", "gives 4"]);
}

/// PyTorch passes its buffers in evaluation even where the attribute is off, and none in training.
#[test]
fn tracking_can_be_switched_as_in_pytorch() {
    let device = device();
    let init = init(&device, DType::F64, 1);
    let bn = BatchNorm2d::new(&init, 2, BatchNormConfig::default()).unwrap();
    let x = normal(&device, DType::F64, 2, &[3, 2, 4, 5]);
    let batch = values(&bn.forward(&x).unwrap());
    let before = snapshot(&bn);
    bn.set_track_running_stats(false);
    assert!(!bn.track_running_stats());
    assert_eq!(values(&bn.forward(&x).unwrap()), batch);
    check_same_state(&snapshot(&bn), &before).unwrap();
    bn.eval();
    let with_running = values(&bn.forward(&x).unwrap());
    assert_ne!(with_running, batch);
    bn.train();
    bn.set_track_running_stats(true);
    drop(bn.forward(&x).unwrap());
    assert_eq!(bn.num_batches_tracked(), Some(2));

    let config = BatchNormConfig { track_running_stats: false, ..BatchNormConfig::default() };
    let without = BatchNorm2d::new(&init, 2, config).unwrap();
    assert!(!without.track_running_stats());
    without.set_track_running_stats(true);
    without.eval();
    assert_eq!(values(&without.forward(&x).unwrap()), batch);
    assert_eq!(without.num_batches_tracked(), None);
}

#[test]
fn a_layer_can_start_anew() {
    let device = device();
    let init = init(&device, DType::F32, 1);
    let bn = BatchNorm1d::new(&init, 3, BatchNormConfig::default()).unwrap();
    let new = snapshot(&bn);
    let x = normal(&device, DType::F32, 2, &[6, 3]);
    bn.weight.as_ref().unwrap().set(&normal(&device, DType::F32, 4, &[3])).unwrap();
    drop(bn.forward(&x).unwrap());
    let weight = values(&bn.weight.as_ref().unwrap().value());
    bn.reset_running_stats().unwrap();
    assert_eq!(values(&bn.running_mean().unwrap()), [0.0; 3]);
    assert_eq!(values(&bn.running_var().unwrap()), [1.0; 3]);
    assert_eq!(bn.num_batches_tracked(), Some(0));
    assert_eq!(values(&bn.weight.as_ref().unwrap().value()), weight);
    drop(bn.forward(&x).unwrap());
    bn.reset_parameters().unwrap();
    check_same_state(&snapshot(&bn), &new).unwrap();
    assert_eq!((bn.num_features(), bn.config().eps), (3, 1e-5));
}

#[test]
fn numbers_that_make_no_sense_are_refused() {
    let init = init(&device(), DType::F32, 1);
    for (eps, text) in [(-1e-5, "eps is -0.00001"), (f64::NAN, "eps is NaN")] {
        let config = BatchNormConfig { eps, ..BatchNormConfig::default() };
        assert_refused(BatchNorm3d::new(&init, 3, config).map(drop), &["BatchNorm3d", text]);
    }
    let config = BatchNormConfig { momentum: Some(f64::NAN), ..BatchNormConfig::default() };
    assert_refused(BatchNorm3d::new(&init, 3, config).map(drop), &["BatchNorm3d", "momentum"]);
    let config = BatchNormConfig { eps: 0.0, ..BatchNormConfig::default() };
    assert!(BatchNorm3d::new(&init, 3, config).is_ok());
}

/// Only a weight or only a bias, as PyTorch's layers after `bn.bias = None`, and Keras' `center=False`.
#[test]
fn a_layer_may_have_only_one_of_weight_and_bias() {
    let device = device();
    let init = init(&device, DType::F64, 1);
    let x = normal(&device, DType::F64, 2, &[4, 3, 2, 2]).with_grad();
    let upstream = normal(&device, DType::F64, 3, &[4, 3, 2, 2]);
    let whole = BatchNorm2d::new(&init, 3, BatchNormConfig::default()).unwrap();
    let gradients = backward(&whole.forward(&x).unwrap(), &upstream, false);
    let dx = values(gradients.get(&x).unwrap());
    for keeps_weight in [true, false] {
        let mut bn = BatchNorm2d::new(&init, 3, BatchNormConfig::default()).unwrap();
        if keeps_weight {
            bn.bias = None
        } else {
            bn.weight = None
        }
        assert_eq!(bn.parameters().len(), 1);
        assert_eq!(bn.keras_weights().unwrap().len(), 3);
        let one = bn.parameters().remove(0).1;
        let gradients = backward(&bn.forward(&x).unwrap(), &upstream, false);
        assert_eq!(values(gradients.get(&x).unwrap()), dx, "weight 1 and bias 0 change nothing");
        let both = backward(&whole.forward(&x).unwrap(), &upstream, false);
        let same = if keeps_weight { &whole.weight } else { &whole.bias };
        let expected = both.get(&same.as_ref().unwrap().value()).unwrap();
        assert_eq!(values(gradients.get(&one.value()).unwrap()), values(expected));
    }
}

/// Gradients are computed for what asks for them only; the others are the same without them.
#[test]
fn gradients_come_only_if_asked_for() {
    let device = device();
    let init = init(&device, DType::F64, 1);
    let input = normal(&device, DType::F64, 2, &[4, 3, 5, 5]);
    for mode in [None, Some(ConvBnMode::Fused), Some(ConvBnMode::Separate)] {
        for training in [true, false] {
            let bn = BatchNorm2d::new(&init, 3, BatchNormConfig::default()).unwrap();
            let model: Box<dyn Module> = match mode {
                None => Box::new(bn),
                Some(mode) => {
                    let conv = Conv2d::new(&init, [3, 3], [3, 3], ConvOptions::default(), true).unwrap();
                    Box::new(ConvBn2d::new(conv, bn, Activation::Relu, mode))
                }
            };
            if !training {
                model.eval();
            }
            let parameters = model.parameters();
            let gradients = |x: &Tensor| {
                let y = model.forward(x).unwrap();
                let gradients = backward(&y, &normal(&device, DType::F64, 3, y.shape()), false);
                let of = |tensor: &Tensor| gradients.get(tensor).map(values);
                parameters.iter().map(|(_, p)| of(&p.value())).chain([of(x)]).collect::<Vec<_>>()
            };
            let all = gradients(&input.with_grad());
            for asked in 1..1_usize << all.len() {
                let wanted = |index: usize| asked >> index & 1 == 1;
                parameters.iter().enumerate().for_each(|(index, (_, p))| p.set_trained(wanted(index)));
                let x = if wanted(parameters.len()) { input.with_grad() } else { input.clone() };
                for (index, (found, expected)) in gradients(&x).iter().zip(&all).enumerate() {
                    let expected = expected.as_ref().filter(|_| wanted(index));
                    assert_eq!(found.as_ref(), expected, "{mode:?} {training} {asked:b} {index}");
                }
            }
        }
    }
}

#[test]
fn a_lazy_layer_takes_its_channels_from_its_first_input() {
    let device = device();
    let init = init(&device, DType::F64, 1);
    let config = BatchNormConfig { momentum: Some(0.3), ..BatchNormConfig::default() };
    let x = normal(&device, DType::F64, 2, &[3, 5, 4, 4]);
    let lazy = Sequential::new().then("norm", LazyBatchNorm2d::new(&init, config));
    assert!(lazy.named_state().is_empty());
    let words = ["LazyBatchNorm", "norm: ", "run one forward first"];
    assert_refused(convoke_nn::Optimizer::new(convoke_nn::Rule::sgd(0.1), &lazy).map(drop), &words);
    let file = std::path::Path::new("never.safetensors");
    assert_refused(convoke_nn::checkpoint::save_model(&lazy, file), &words);
    assert_refused(convoke_nn::checkpoint::load_model(&lazy, file), &words);
    assert_refused(
        lazy.forward(&normal(&device, DType::F64, 2, &[3, 5])),
        &["expected 4D input (got 2D input)"],
    );
    assert!(lazy.named_state().is_empty());
    let plain = Sequential::new().then("norm", BatchNorm2d::new(&init, 5, config).unwrap());
    for _ in 0..2 {
        assert_eq!(values(&lazy.forward(&x).unwrap()), values(&plain.forward(&x).unwrap()));
    }
    check_same_state(&snapshot(&lazy), &snapshot(&plain)).unwrap();
    assert!(convoke_nn::Optimizer::new(convoke_nn::Rule::sgd(0.1), &lazy).is_ok());
    assert_refused(lazy.forward(&normal(&device, DType::F64, 2, &[3, 4, 2, 2])), &["5 channels", "input 4"]);

    // What is said to it before counts.
    let lazy = LazyBatchNorm1d::new(&init, config);
    lazy.eval();
    assert_eq!(lazy.initialize(2).unwrap().num_features(), 2);
    let before = snapshot(&lazy);
    drop(lazy.forward(&normal(&device, DType::F64, 2, &[1, 2])).unwrap());
    check_same_state(&snapshot(&lazy), &before).unwrap();
    let lazy = LazyBatchNorm3d::new(&init, config);
    lazy.set_frozen(true);
    drop(lazy.forward(&normal(&device, DType::F64, 2, &[2, 2, 2, 2, 2])).unwrap());
    assert_eq!(lazy.layer().unwrap().num_batches_tracked(), Some(0));
}

#[test]
fn keras_arrays_come_and_go_in_keras_order() {
    let device = device();
    let init = init(&device, DType::F32, 1);
    let config = BatchNormConfig::of(Convention::keras());
    let bn = BatchNorm2d::new(&init, 2, config).unwrap();
    let arrays: [&[f64]; 4] = [&[1.5, 2.0], &[-0.5, 0.25], &[3.0, 4.0], &[0.5, 8.0]];
    bn.set_keras_weights(&arrays).unwrap();
    assert_eq!(bn.keras_weights().unwrap(), arrays);
    assert_eq!(values(&bn.running_var().unwrap()), [0.5, 8.0]);
    let before = snapshot(&bn);
    assert_refused(bn.set_keras_weights(&arrays[..3]), &["3 arrays", "expected 4", "moving_variance"]);
    let wrong: [&[f64]; 4] = [&[1.0, 2.0], &[0.0, 0.0], &[0.0], &[1.0, 1.0]];
    assert_refused(bn.set_keras_weights(&wrong), &["moving_mean has 1 values", "2 channels"]);
    check_same_state(&snapshot(&bn), &before).unwrap();
    bn.eval();
    let x = Tensor::from_slice(&device, &[1, 2, 1, 1], &[3.5f32, 2.0]).unwrap();
    let y = |x: f64, [g, b, m, v]: [f64; 4]| (x - m) / (v + 1e-3).sqrt() * g + b;
    let expected = [y(3.5, [1.5, -0.5, 3.0, 0.5]), y(2.0, [2.0, 0.25, 4.0, 8.0])];
    check_close(&values(&bn.forward(&x).unwrap()), &expected, Tolerance::new(0.0, 1e-6)).unwrap();
}
