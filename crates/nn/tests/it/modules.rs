//! Layers by hand computation, the tree of modules and its names, starting values, freezing and tying parameters.

use crate::common::{
    self, DTYPES, assert_refused, backward, bits, check_same_state, device, init, normal, parameter,
    snapshot, spec, tensor, values,
};
use convoke_autograd::{DType, GradCheck, MemoryFormat, Result, Tensor, gradcheck, ops};
use convoke_nn::models::mnist_cnn;
use convoke_nn::modules::{
    Activation, AvgPool2d, BatchNorm2d, BatchNormConfig, Conv2d, ConvBn2d, ConvBnMode, ConvOptions, Dropout,
    Flatten, Linear, LogSoftmax, MaxPool2d, Padding, PoolOptions, Relu, Resize, ResizeOptions, ResizeTo,
    Sequential, StochasticDepth,
};
use convoke_nn::{Forward, Init, Module, ModuleExt, Optimizer, Parameter, Rule, TrainingMode};
use convoke_testkit::{Failures, Tolerance, assert_close};

fn paths(model: &(impl Module + ?Sized)) -> Vec<String> {
    model.named_state().into_iter().map(|(path, _)| path).collect()
}

#[test]
fn convolution_by_hand() {
    let device = device();
    for dtype in DTYPES {
        let options =
            ConvOptions { stride: [2, 1], padding: Padding::symmetric([0, 1]), ..ConvOptions::default() };
        let conv = Conv2d::new(&init(&device, dtype, 1), [1, 2], [2, 2], options, true).unwrap();
        assert_eq!(conv.options(), &options);
        // The second filter picks the lower right of each window.
        let weight = [1.0, 2.0, 3.0, 4.0, 0.0, 0.0, 0.0, 1.0];
        conv.weight.set(&tensor(&device, dtype, &[2, 1, 2, 2], &weight)).unwrap();
        conv.bias.as_ref().unwrap().set(&tensor(&device, dtype, &[2], &[10.0, -1.0])).unwrap();
        let x = tensor(&device, dtype, &[1, 1, 3, 2], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
        let y = conv.forward(&x).unwrap();
        assert_eq!(y.shape(), [1, 2, 1, 3]);
        // Windows [0 1; 0 3], [1 2; 3 4], [2 0; 4 0].
        assert_eq!(values(&y), [24.0, 40.0, 24.0, 2.0, 3.0, -1.0]);
    }
}

#[test]
fn grouped_convolution_keeps_groups_apart() {
    let device = device();
    let options = ConvOptions { groups: 2, ..ConvOptions::default() };
    let conv = Conv2d::new(&init(&device, DType::F64, 1), [4, 2], [1, 1], options, false).unwrap();
    assert_eq!(conv.weight.value().shape(), [2, 2, 1, 1]);
    conv.weight.set(&tensor(&device, DType::F64, &[2, 2, 1, 1], &[1.0, 10.0, 100.0, 1000.0])).unwrap();
    let x = tensor(&device, DType::F64, &[1, 4, 1, 1], &[1.0, 2.0, 3.0, 4.0]);
    assert_eq!(values(&conv.forward(&x).unwrap()), [21.0, 4300.0]);
}

#[test]
fn linear_by_hand() {
    let device = device();
    for dtype in DTYPES {
        let linear = Linear::new(&init(&device, dtype, 1), [3, 2], true).unwrap();
        linear.weight.set(&tensor(&device, dtype, &[2, 3], &[1.0, 2.0, 3.0, -1.0, 0.0, 1.0])).unwrap();
        linear.bias.as_ref().unwrap().set(&tensor(&device, dtype, &[2], &[0.5, -0.5])).unwrap();
        let x = tensor(&device, dtype, &[2, 3], &[1.0, 1.0, 1.0, 2.0, 0.0, -2.0]);
        assert_eq!(values(&linear.forward(&x).unwrap()), [6.5, -0.5, -3.5, -4.5]);
    }
    let unbiased = Linear::new(&init(&device, DType::F32, 1), [3, 2], false).unwrap();
    assert_eq!(paths(&unbiased), ["weight"]);
}

#[test]
fn layers_without_parameters_by_hand() {
    let device = device();
    let x = tensor(&device, DType::F64, &[1, 1, 2, 4], &[1.0, -2.0, 3.0, 4.0, -5.0, 6.0, 7.0, -8.0]);
    let run = |module: &dyn Module| {
        assert!(module.named_state().is_empty() && module.children().is_empty());
        let y = module.forward(&x).unwrap();
        (y.shape().to_vec(), values(&y))
    };
    assert_eq!(run(&MaxPool2d(PoolOptions::new(2))), (vec![1, 1, 1, 2], vec![6.0, 7.0]));
    assert_eq!(run(&AvgPool2d(PoolOptions::new(2))), (vec![1, 1, 1, 2], vec![0.0, 1.5]));
    let overlapping = PoolOptions { stride: [1, 1], ..PoolOptions::new(2) };
    assert_eq!(run(&MaxPool2d(overlapping)), (vec![1, 1, 1, 3], vec![6.0, 7.0, 7.0]));
    assert_eq!(run(&Relu), (vec![1, 1, 2, 4], vec![1.0, 0.0, 3.0, 4.0, 0.0, 6.0, 7.0, 0.0]));
    assert_eq!(run(&Flatten), (vec![1, 8], values(&x)));
    let wide = [1.0, 1.0, -2.0, -2.0, 3.0, 3.0, 4.0, 4.0, -5.0, -5.0, 6.0, 6.0, 7.0, 7.0, -8.0, -8.0];
    let nearest = Resize(ResizeOptions::nearest(ResizeTo::Scale([1.0, 2.0])));
    assert_eq!(run(&nearest), (vec![1, 1, 2, 8], wide.to_vec()));
    let (shape, bilinear) = run(&Resize::bilinear(2.0));
    assert_eq!((shape, bilinear[0], bilinear[31]), (vec![1, 1, 4, 8], 1.0, -8.0));
    // The second row is 3/4 of the first one's 1, 1/4, -5/4 and 1/4 of the second one's -5, -9/4, 13/4.
    assert_eq!(bilinear[8..11], [-0.5, -0.375, -0.125]);

    let rows = tensor(&device, DType::F64, &[2, 2], &[0.0, 3f64.ln(), 1000.0, 1000.0]);
    let expected = [0.25, 0.75, 0.5, 0.5].map(f64::ln);
    let actual = values(&LogSoftmax.forward(&rows).unwrap());
    assert_close("log-softmax", &actual, &expected, Tolerance::new(0.0, 1e-14));
}

#[test]
fn dropout_in_training_and_evaluation() {
    let device = device();
    for dtype in DTYPES {
        let init = init(&device, dtype, 5);
        let (dropout, p) = (Dropout::new(&init, 0.25).unwrap(), 0.25);
        let x = tensor(&device, dtype, &[100, 100], &[1.0; 10_000]);
        let state = init.random.state();
        let first = values(&dropout.forward(&x).unwrap());
        let second = values(&dropout.forward(&x).unwrap());
        assert_ne!(first, second, "every forward draws its own mask");
        let kept = 1.0 / (1.0 - p);
        let near = |value: f64| (value - kept).abs() <= 1e-6;
        assert!(first.iter().all(|&value| value == 0.0 || near(value)));
        let dropped = first.iter().filter(|&&value| value == 0.0).count() as f64;
        // Within five standard deviations of a binomial distribution.
        assert!((dropped - 1e4 * p).abs() <= 5.0 * (1e4 * p * (1.0 - p)).sqrt(), "{dropped} dropped");

        init.random.restore(&state);
        let again = [&dropout, &dropout].map(|dropout| values(&dropout.forward(&x).unwrap()));
        assert_eq!(again, [first, second], "the generator's state decides");

        let before = init.random.state();
        dropout.eval();
        let evaluated = dropout.forward(&x).unwrap();
        assert_eq!(bits(&evaluated), bits(&x));
        assert_eq!(init.random.state(), before, "evaluation draws nothing");
        dropout.train();
        assert!(values(&dropout.forward(&x).unwrap()).contains(&0.0));
    }
}

#[test]
fn dropout_goes_backward_through_its_own_mask() {
    let device = device();
    let dropout = Dropout::new(&init(&device, DType::F64, 5), 0.5).unwrap();
    let x = tensor(&device, DType::F64, &[1000], &[1.0; 1000]).with_grad();
    let outputs: Vec<Tensor> = (0..3).map(|_| dropout.forward(&x).unwrap()).collect();
    for output in outputs {
        let gradient = output.sum().unwrap().backward().unwrap().take(&x).unwrap();
        assert_eq!(values(&gradient), values(&output), "of a one, output and gradient are the same");
    }
}

#[test]
fn stochastic_depth_drops_whole_samples() {
    let device = device();
    for dtype in DTYPES {
        let init = init(&device, dtype, 5);
        let (layer, p, samples) = (StochasticDepth::new(&init, 0.25).unwrap(), 0.25, 4000);
        let x = normal(&device, dtype, 1, &[samples, 3, 1, 2]);
        let x = x.to_format(MemoryFormat::ChannelsLast).unwrap();
        let state = init.random.state();
        let y = layer.forward(&x).unwrap();
        assert_eq!((y.shape(), y.format()), (x.shape(), x.format()));
        let (input, first) = (values(&x), values(&y));
        let mut dropped = 0;
        for (input, output) in input.chunks(6).zip(first.chunks(6)) {
            let kept = input.iter().map(|value| value / (1.0 - p));
            let near = kept.zip(output).all(|(kept, output)| (kept - output).abs() <= 1e-5);
            dropped += usize::from(!near);
            assert!(near || output.iter().all(|&value| value == 0.0), "a part of a sample is dropped");
        }
        // Within five standard deviations of a binomial distribution, so the mean is preserved.
        let (dropped, samples) = (dropped as f64, samples as f64);
        assert!((dropped - samples * p).abs() <= 5.0 * (samples * p * (1.0 - p)).sqrt(), "{dropped} dropped");
        assert_ne!(first, values(&layer.forward(&x).unwrap()), "every forward draws its own samples");

        // A rank with the samples from 1000 on drops the same ones.
        init.random.restore(&state);
        init.random.set_first_sample(1000);
        let rest = x.slice(&[ops::Slice::new(0, 1000, isize::MAX)]).unwrap();
        assert_eq!(values(&layer.forward(&rest).unwrap()), first[6000..]);

        let before = init.random.state();
        layer.eval();
        assert_eq!(bits(&layer.forward(&x).unwrap()), bits(&x));
        assert_eq!(init.random.state(), before, "evaluation draws nothing");
    }
    let init = init(&device, DType::F64, 5);
    let all = StochasticDepth::new(&init, 1.0).unwrap();
    let none = StochasticDepth::new(&init, 0.0).unwrap();
    let x = normal(&device, DType::F64, 1, &[5, 2]);
    assert_eq!(bits(&none.forward(&x).unwrap()), bits(&x));
    assert_eq!(values(&all.forward(&x).unwrap()), [0.0; 10]);
    for p in [-0.1, 1.5, f64::NAN] {
        assert_refused(StochasticDepth::new(&init, p), &["StochasticDepth", "[0, 1]", &p.to_string()]);
    }

    let layer = StochasticDepth::new(&init, 0.5).unwrap();
    let state = init.random.state();
    let forward = |inputs: &[Tensor]| {
        init.random.restore(&state);
        layer.forward(&inputs[0])
    };
    let x = normal(&device, DType::F64, 2, &[6, 2, 2, 3]);
    gradcheck(forward, &[x], &GradCheck::default()).unwrap();
}

#[test]
fn dropout_at_its_ends() {
    let device = device();
    let init = init(&device, DType::F32, 5);
    let x = normal(&device, DType::F32, 1, &[50]);
    assert_eq!(bits(&Dropout::new(&init, 0.0).unwrap().forward(&x).unwrap()), bits(&x));
    let all = Dropout::new(&init, 1.0).unwrap();
    let (leaf, upstream) = (x.with_grad(), normal(&device, DType::F32, 2, &[50]));
    let output = all.forward(&leaf).unwrap();
    assert!(values(&output).iter().all(|&value| value == 0.0));
    let gradient = backward(&output, &upstream, false).take(&leaf).unwrap();
    assert!(values(&gradient).iter().all(|&value| value == 0.0));
    for p in [-0.1, 1.5, f64::NAN] {
        assert_refused(Dropout::new(&init, p), &["Dropout", "[0, 1]", &p.to_string()]);
    }
}

#[test]
fn a_sequential_names_its_tree_as_pytorch_does() {
    let device = device();
    let init = init(&device, DType::F32, 1);
    let model = mnist_cnn(&init, ConvBnMode::Fused, 0.5).unwrap();
    let bn = ["weight", "bias", "running_mean", "running_var", "num_batches_tracked"];
    let mut expected = Vec::new();
    for block in ["block1", "block2"] {
        expected.push(format!("{block}.conv.weight"));
        expected.extend(bn.map(|name| format!("{block}.bn.{name}")));
    }
    for layer in ["linear1", "linear2"] {
        expected.extend(["weight", "bias"].map(|name| format!("{layer}.{name}")));
    }
    assert_eq!(paths(&model), expected);

    let inner = Sequential::new().then("0", Linear::new(&init, [2, 3], true).unwrap()).then("1", Relu);
    let outer = Sequential::new().then("0", inner).then("1", Linear::new(&init, [3, 1], false).unwrap());
    assert_eq!(paths(&outer), ["0.0.weight", "0.0.bias", "1.weight"]);
    let x = normal(&device, DType::F32, 1, &[4, 2]);
    assert_eq!(outer.forward(&x).unwrap().shape(), [4, 1]);
    assert_eq!(bits(&Sequential::new().forward(&x).unwrap()), bits(&x), "no modules are the identity");
}

#[test]
fn parameters_of_mnist_cnn_are_counted() {
    let device = device();
    let conv = |inputs: usize, outputs: usize| outputs * inputs * 3 * 3;
    let linear = |inputs: usize, outputs: usize| outputs * inputs + outputs;
    let bn = |channels: usize| 2 * channels;
    let expected = conv(1, 32) + bn(32) + conv(32, 64) + bn(64) + linear(64 * 12 * 12, 128) + linear(128, 10);
    assert_eq!(expected, 1_199_978);
    let model = spec("mnist-cnn");
    assert_eq!(model.to_string(), "mnist-cnn");
    let model = model.build(&Init::new(&device, 0), &model.options(ConvBnMode::Separate)).unwrap();
    assert_eq!(model.parameter_count(), expected);
    assert_eq!(model.parameters().len(), 10);
}

/// Notes what it was told.
#[derive(Module)]
struct Probe(TrainingMode);

impl Forward for Probe {
    fn forward(&self, input: &Tensor) -> Result<Tensor> {
        Ok(input.clone())
    }
}

#[test]
fn train_and_eval_reach_the_whole_tree() {
    let device = device();
    let init = init(&device, DType::F64, 1);
    let told: Vec<TrainingMode> = (0..3).map(|_| TrainingMode::default()).collect();
    let probe = |index: usize| Probe(told[index].clone());
    let block = |mode| {
        let conv = Conv2d::new(&init, [2, 2], [1, 1], ConvOptions::default(), false).unwrap();
        let bn = BatchNorm2d::new(&init, 2, BatchNormConfig::default()).unwrap();
        ConvBn2d::new(conv, bn, Activation::Relu, mode)
    };
    let deep = Sequential::new().then("probe", probe(0)).then("fused", block(ConvBnMode::Fused));
    let deeper = Sequential::new().then("deep", deep).then("probe", probe(1));
    let model = Sequential::new()
        .then("deeper", deeper)
        .then("separate", block(ConvBnMode::Separate))
        .then("probe", probe(2))
        .then("dropout", Dropout::new(&init, 0.5).unwrap());
    let x = normal(&device, DType::F64, 1, &[8, 2, 4, 4]);
    let batches = || {
        ["deeper.deep.fused.bn", "separate.bn"]
            .map(|layer| common::counter(&model, &format!("{layer}.num_batches_tracked")).value())
    };
    for (round, training) in [true, false, true].into_iter().enumerate() {
        if training {
            model.train();
        } else {
            model.eval();
        }
        assert!(told.iter().all(|told| told.is_training() == training));
        let before = batches();
        let [first, second] = [0, 1].map(|_| bits(&model.forward(&x).unwrap()));
        assert_eq!(first != second, training, "round {round}: dropout and batch statistics");
        assert_eq!(batches(), before.map(|count| count + if training { 2 } else { 0 }));
    }
}

/// All parameters of every kind of layer, with the bound that PyTorch gives each.
fn bounded(init: &Init) -> Vec<(&'static str, Parameter, usize)> {
    let grouped = ConvOptions { groups: 4, ..ConvOptions::default() };
    let conv = Conv2d::new(init, [16, 48], [3, 5], ConvOptions::default(), true).unwrap();
    let group = Conv2d::new(init, [16, 128], [3, 3], grouped, true).unwrap();
    let linear = Linear::new(init, [200, 300], true).unwrap();
    vec![
        ("conv weight", conv.weight, 16 * 3 * 5),
        ("conv bias", conv.bias.unwrap(), 16 * 3 * 5),
        ("grouped weight", group.weight, 4 * 3 * 3),
        ("grouped bias", group.bias.unwrap(), 4 * 3 * 3),
        ("linear weight", linear.weight, 200),
        ("linear bias", linear.bias.unwrap(), 200),
    ]
}

#[test]
fn parameters_start_kaiming_uniform() {
    let device = device();
    for dtype in DTYPES {
        for (name, parameter, fan_in) in bounded(&init(&device, dtype, 11)) {
            let values = values(&parameter.value());
            let (len, bound) = (values.len() as f64, 1.0 / (fan_in as f64).sqrt());
            // Rounding to f32 may reach past the bound by half an epsilon.
            assert!(
                values.iter().all(|value| value.abs() <= bound * (1.0 + 1e-7)),
                "{name} leaves its bound"
            );
            let mean = values.iter().sum::<f64>() / len;
            let variance = values.iter().map(|value| value * value).sum::<f64>() / len;
            let expected = bound * bound / 3.0;
            // Five standard deviations of the mean of x and of x^2 for uniform x: their variances are b^2/3, 4 b^4/45.
            assert!(mean.abs() <= 5.0 * (expected / len).sqrt(), "{name}: mean {mean}");
            let spread = bound * bound * (4.0 / 45.0 / len).sqrt();
            assert!(
                (variance - expected).abs() <= 5.0 * spread,
                "{name}: variance {variance}, not {expected}"
            );
        }
    }
}

#[test]
fn seeds_decide_where_a_model_starts() {
    let device = device();
    let start = |mode, dtype, seed| snapshot(&mnist_cnn(&init(&device, dtype, seed), mode, 0.5).unwrap());
    let first = start(ConvBnMode::Fused, DType::F32, 1);
    check_same_state(&start(ConvBnMode::Fused, DType::F32, 1), &first).unwrap();
    check_same_state(&start(ConvBnMode::Separate, DType::F32, 1), &first).unwrap();
    let other = start(ConvBnMode::Fused, DType::F32, 2);
    for ((path, one), (_, two)) in first.iter().zip(&other) {
        assert_eq!(one != two, !path.contains(".bn."), "{path}");
    }
    // The f32 model starts at the f64 model's values, rounded.
    for ((path, single), (_, double)) in first.iter().zip(&start(ConvBnMode::Fused, DType::F64, 1)) {
        if !path.ends_with("num_batches_tracked") {
            let rounded = double.iter().map(|&x| f64::from(f64::from_bits(x) as f32).to_bits());
            assert!(rounded.eq(single.iter().copied()), "{path}");
        }
    }
}

#[test]
fn batch_norm_starts_as_the_identity() {
    let device = device();
    let bn = BatchNorm2d::new(&init(&device, DType::F64, 1), 3, BatchNormConfig::default()).unwrap();
    assert_eq!(values(&bn.weight.as_ref().unwrap().value()), [1.0; 3]);
    assert_eq!(values(&bn.bias.as_ref().unwrap().value()), [0.0; 3]);
    assert_eq!(values(&bn.running_mean().unwrap()), [0.0; 3]);
    assert_eq!(values(&bn.running_var().unwrap()), [1.0; 3]);
    assert_eq!(bn.num_batches_tracked(), Some(0));
}

#[test]
fn impossible_layers_are_refused() {
    let device = device();
    let init = init(&device, DType::F32, 1);
    let conv = |channels, kernel, groups| {
        Conv2d::new(&init, channels, kernel, ConvOptions { groups, ..ConvOptions::default() }, true)
    };
    let mut failures = Failures::new("impossible layers");
    for (channels, kernel, groups) in [
        ([0, 2], [3, 3], 1),
        ([2, 0], [3, 3], 1),
        ([2, 2], [0, 3], 1),
        ([2, 2], [3, 0], 1),
        ([2, 2], [3, 3], 0),
    ] {
        let what = format!("{channels:?} {kernel:?} in {groups}");
        failures.run(what, || {
            common::check_refused(conv(channels, kernel, groups), &["Conv2d", "must not be 0"])
        });
    }
    failures.run("groups", || {
        common::check_refused(conv([6, 4], [3, 3], 4), &["Conv2d", "6 to 4 channels", "4 groups"])
    });
    for sizes in [[0, 3], [3, 0]] {
        failures.run(format!("{sizes:?}"), || {
            common::check_refused(Linear::new(&init, sizes, true), &["Linear"])
        });
    }
    failures.run("no channels", || {
        common::check_refused(BatchNorm2d::new(&init, 0, BatchNormConfig::default()), &["BatchNorm2d"])
    });
    let large = usize::MAX / 2;
    for sizes in [[large, large], [1 << 40, 1 << 30], [1 << 30, 1 << 26], [1, large]] {
        failures
            .run(format!("linear {sizes:?}"), || common::check_refused(Linear::new(&init, sizes, true), &[]));
        failures.run(format!("conv {sizes:?}"), || common::check_refused(conv(sizes, [large, 3], 1), &[]));
        failures.run(format!("conv kernel {sizes:?}"), || common::check_refused(conv([3, 3], sizes, 1), &[]));
    }
    failures.run("huge batch norm", || {
        common::check_refused(BatchNorm2d::new(&init, large, BatchNormConfig::default()), &["too large"])
    });
    failures.finish();
}

#[test]
fn inputs_that_do_not_fit_are_refused_with_both_shapes() {
    let device = device();
    let init = init(&device, DType::F32, 1);
    let x = normal(&device, DType::F32, 1, &[2, 3, 4, 4]);
    let linear = Linear::new(&init, [5, 2], true).unwrap();
    assert_refused(linear.forward(&normal(&device, DType::F32, 1, &[2, 3])), &["linear", "[2, 3]", "[2, 5]"]);
    let conv = Conv2d::new(&init, [2, 4], [3, 3], ConvOptions::default(), false).unwrap();
    assert_refused(conv.forward(&x), &["conv2d", "[2, 3, 4, 4]", "[4, 2, 3, 3]"]);
    let wide = Conv2d::new(&init, [3, 4], [5, 5], ConvOptions::default(), false).unwrap();
    assert_refused(wide.forward(&x), &["conv2d", "[2, 3, 4, 4]", "[4, 3, 5, 5]"]);
    let double = normal(&device, DType::F64, 1, &[2, 5]);
    assert_refused(linear.forward(&double), &["linear", "f32", "f64"]);
    let model = mnist_cnn(&init, ConvBnMode::Fused, 0.5).unwrap();
    assert_refused(model.forward(&x), &["conv_bn2d", "[2, 3, 4, 4]", "[32, 1, 3, 3]"]);
    assert_refused(
        model.forward(&normal(&device, DType::F32, 1, &[2, 1, 20, 20])),
        &["linear", "4096", "9216"],
    );
}

#[test]
fn frozen_parameters_get_no_gradient_and_stay() {
    let device = device();
    let model = mnist_cnn(&init(&device, DType::F32, 4), ConvBnMode::Fused, 0.0).unwrap();
    let frozen = ["block1.conv.weight", "block1.bn.bias", "block2.bn.weight", "linear1.weight"];
    for path in frozen {
        parameter(&model, path).set_trained(false);
    }
    // The optimizer is made after freezing here, thawing comes later: it must know all parameters.
    let rule = Rule::adamw(0.01).with_weight_decay(0.1);
    let mut optimizer = Optimizer::new(rule, &model).unwrap();
    let x = normal(&device, DType::F32, 9, &[4, 1, 28, 28]);
    for round in 0..2 {
        let thawed = round == 1;
        let parameters = model.parameters();
        let before: Vec<_> = parameters.iter().map(|(_, parameter)| bits(&parameter.value())).collect();
        let loss = model.forward(&x).unwrap().mul(&normal(&device, DType::F32, 8, &[4, 10])).unwrap();
        let gradients = loss.sum().unwrap().backward().unwrap();
        for (path, parameter) in &parameters {
            let is_frozen = frozen.contains(&path.as_str()) && !thawed;
            assert_eq!(parameter.is_trained(), !is_frozen, "{path}");
            assert_eq!(gradients.get(&parameter.value()).is_none(), is_frozen, "{path}");
        }
        optimizer.step(gradients).unwrap();
        for ((path, parameter), before) in parameters.iter().zip(before) {
            let is_frozen = frozen.contains(&path.as_str()) && !thawed;
            assert_eq!(bits(&parameter.value()) == before, is_frozen, "{path}");
        }
        for path in frozen {
            parameter(&model, path).set_trained(true);
        }
    }
}

#[test]
fn values_are_set_only_in_shape_and_type() {
    let device = device();
    let weight = Parameter::new(&normal(&device, DType::F32, 1, &[2, 3]));
    let before = bits(&weight.value());
    assert_refused(weight.set(&normal(&device, DType::F32, 1, &[3, 2])), &["[2, 3]", "[3, 2]"]);
    assert_refused(weight.set(&normal(&device, DType::F64, 1, &[2, 3])), &["f32", "f64"]);
    assert_eq!(bits(&weight.value()), before);
    let other = normal(&device, DType::F32, 2, &[2, 3]);
    weight.set(&other).unwrap();
    assert!(weight.is_trained());
    weight
        .update(|data: &mut [f32]| {
            data.fill(7.0);
            Ok(())
        })
        .unwrap();
    assert_ne!(bits(&other), bits(&weight.value()), "a value that was given is not written to");
    weight.set_trained(false);
    weight.set(&other).unwrap();
    assert!(!weight.is_trained(), "a frozen parameter stays frozen");
}

/// Two layers that share one weight.
#[derive(Module)]
struct Tied {
    first: Linear,
    second: Linear,
}

impl Forward for Tied {
    fn forward(&self, input: &Tensor) -> Result<Tensor> {
        self.second.forward(&self.first.forward(input)?)
    }
}

#[test]
fn tied_weights_are_one_parameter() {
    let device = device();
    let init = init(&device, DType::F64, 1);
    let first = Linear::new(&init, [3, 3], true).unwrap();
    let second = Linear { weight: first.weight.clone(), bias: None };
    let model = Tied { first, second };
    assert_eq!(
        paths(&model),
        ["first.weight", "first.bias", "second.weight"],
        "a file has it under both names"
    );
    let names: Vec<String> = model.parameters().into_iter().map(|(path, _)| path).collect();
    assert_eq!(names, ["first.weight", "first.bias"], "as PyTorch: once, under the first name");
    assert_eq!(model.parameter_count(), 12);

    let x = normal(&device, DType::F64, 2, &[4, 3]);
    let upstream = normal(&device, DType::F64, 3, &[4, 3]);
    let gradients = backward(&model.forward(&x).unwrap(), &upstream, false);
    let actual = values(gradients.get(&model.first.weight.value()).unwrap());

    // Two weights of equal value give a gradient each: the tied gradient is the sum of both.
    let copy = |linear: &Linear| Linear {
        weight: Parameter::new(&linear.weight.value()),
        bias: linear.bias.clone(),
    };
    let untied = Tied { first: copy(&model.first), second: copy(&model.second) };
    let parts = backward(&untied.forward(&x).unwrap(), &upstream, false);
    let part = |linear: &Linear| values(parts.get(&linear.weight.value()).unwrap());
    let expected: Vec<f64> =
        part(&untied.first).iter().zip(part(&untied.second)).map(|(a, b)| a + b).collect();
    assert_close("gradient", &actual, &expected, Tolerance::new(1e-14, 1e-14));

    let before = values(&model.first.weight.value());
    Optimizer::new(Rule::sgd(0.5), &model).unwrap().step(gradients).unwrap();
    let after = values(&model.second.weight.value());
    assert_eq!(bits(&model.first.weight.value()), bits(&model.second.weight.value()));
    let expected: Vec<f64> = before.iter().zip(actual).map(|(p, g)| p - 0.5 * g).collect();
    assert_close("updated once", &after, &expected, Tolerance::new(1e-15, 1e-15));
}
