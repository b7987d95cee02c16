//! Batch norm as a layer, alone and after a convolution: PyTorch's results, running statistics by hand, errors.

use crate::common::{
    self, DTYPES, assert_refused, backward, bits, buffer, check_same_state, counter, device, init, normal,
    snapshot, tensor, values,
};
use convoke_autograd::{DType, Device, Tensor, inference_mode, no_grad};
use convoke_nn::modules::{
    Activation, BatchNorm2d, BatchNormConfig, Conv2d, ConvBn2d, ConvBnMode, ConvOptions, Padding, Relu,
    Sequential,
};
use convoke_nn::{Forward, Init, Module, ModuleExt, Parameter};
use convoke_testkit::{Case, Failures, Golden, Tolerance, assert_close, check_close, check_relative_to_max};

const MODES: [ConvBnMode; 2] = [ConvBnMode::Fused, ConvBnMode::Separate];

// ---- goldens -------------------------------------------------------------------------------------------------------

/// The layer of a golden case with its starting state, and the paths of its convolution and its batch norm.
fn layer(case: &Case, init: &Init, mode: ConvBnMode) -> Sequential {
    let config = BatchNormConfig {
        eps: case.number("eps"),
        momentum: case.attribute("momentum").map(|momentum| momentum.as_f64().unwrap()),
        affine: case.flag("affine"),
        track_running_stats: case.flag("track_running_stats"),
        ..BatchNormConfig::default()
    };
    let relu = case.flag("relu");
    let x = case.shape("x").unwrap();
    let model = match case.shape("conv_weight") {
        Some(weight) => {
            let sizes = |key: &str| case.sizes(&format!("conv/{key}"));
            let pair = |key: &str| [sizes(key)[0], sizes(key)[1]];
            let padding = sizes("padding");
            let options = ConvOptions {
                stride: pair("stride"),
                padding: Padding { top: padding[0], bottom: padding[1], left: padding[2], right: padding[3] },
                dilation: pair("dilation"),
                groups: case.number("conv/groups") as usize,
            };
            let (channels, kernel) = ([x[1], weight[0]], [weight[2], weight[3]]);
            let conv =
                Conv2d::new(init, channels, kernel, options, case.shape("conv_bias").is_some()).unwrap();
            let bn = BatchNorm2d::new(init, weight[0], config).unwrap();
            let activation = if relu { Activation::Relu } else { Activation::Identity };
            Sequential::new().then("block", ConvBn2d::new(conv, bn, activation, mode))
        }
        None => {
            let inner = Sequential::new().then("bn", BatchNorm2d::new(init, x[1], config).unwrap());
            Sequential::new().then("block", if relu { inner.then("relu", Relu) } else { inner })
        }
    };
    let set = |path: &str, name: &str, set: &dyn Fn(&Tensor)| {
        let (shape, values) = case.tensor_f64_opt(name).unwrap_or_else(|| panic!("{path} has no {name}"));
        set(&tensor(&init.device, init.dtype, &shape, &values));
    };
    for (path, parameter) in model.parameters() {
        set(&path, golden_name(&path), &|value| parameter.set(value).unwrap());
    }
    if config.track_running_stats {
        for name in ["running_mean", "running_var"] {
            let buffer = buffer(&model, &format!("block.bn.{name}"));
            set(name, name, &|value| buffer.set(value).unwrap());
        }
        let batches = case.number("num_batches_tracked") as i64;
        counter(&model, "block.bn.num_batches_tracked").set(batches);
    }
    model
}

/// What the golden file calls the parameter at this path.
fn golden_name(path: &str) -> &'static str {
    match path {
        "block.conv.weight" => "conv_weight",
        "block.conv.bias" => "conv_bias",
        "block.bn.weight" => "weight",
        "block.bn.bias" => "bias",
        other => panic!("unexpected parameter {other}"),
    }
}

/// Tolerances of outputs and statistics, and of gradients; relative to the largest of a tensor.
fn golden_tolerances(dtype: DType, case: &Case) -> [f64; 2] {
    match dtype {
        // Values around 1e4 that deviate by 0.1 are stored with an error of 5e-4 in f32 by PyTorch and by us alike;
        // exact inputs, so only the normalisation's subtraction matters.
        DType::F32 if case.name == "train_large_mean" => [1e-4, 1e-3],
        DType::F32 => [1e-5, 1e-4],
        // Outputs and gradients of x are stored in f32.
        _ => [1e-7, 1e-7],
    }
}

fn check_golden(failures: &mut Failures, case: &Case, dtype: DType, mode: ConvBnMode) {
    let device = device();
    let model = layer(case, &init(&device, dtype, 1), mode);
    let of = |name: &str| {
        let (shape, values) = case.tensor_f64(name);
        tensor(&device, dtype, &shape, &values)
    };
    let [forward, gradient] = golden_tolerances(dtype, case);
    let mut check = |name: &str, actual: &Tensor, rtol: f64| {
        let expected = case.tensor_f64(name);
        assert_eq!(actual.shape(), expected.0, "{name}");
        let result = check_relative_to_max(&values(actual), &expected.1, rtol);
        failures.check(format!("{} {mode} {dtype}: {name}", case.name), result);
    };
    match case.text("mode") {
        "train" => model.train(),
        "eval" => model.eval(),
        other => panic!("mode {other}"),
    }
    let x = of("x").with_grad();
    let output = model.forward(&x).unwrap();
    check("output", &output, forward);
    let tracked = case.flag("track_running_stats");
    let statistics = ["running_mean", "running_var"];
    if tracked {
        for name in statistics {
            let actual = buffer(&model, &format!("block.bn.{name}")).value();
            check(&format!("{name}_after"), &actual, forward);
        }
    } else {
        assert!(model.named_state().iter().all(|(path, _)| !path.contains("running")));
    }
    if case.number("forwards") == 2.0 {
        check("second_output", &model.forward(&of("second_x")).unwrap(), forward);
        for name in statistics {
            let actual = buffer(&model, &format!("block.bn.{name}")).value();
            check(&format!("{name}_after_second"), &actual, forward);
        }
    }
    if tracked {
        let batches = counter(&model, "block.bn.num_batches_tracked").value();
        assert_eq!(batches, case.number("num_batches_tracked_after") as i64, "{}", case.name);
    }
    let gradients = backward(&output, &of("grad_output"), false);
    check("grad_x", gradients.get(&x).unwrap(), gradient);
    for (path, parameter) in model.parameters() {
        let name = format!("grad_{}", golden_name(&path));
        let actual = gradients.get(&parameter.value()).unwrap();
        if name == "grad_conv_bias" && case.text("mode") == "train" {
            // The batch's mean takes any bias away again: the true gradient is 0, both sides hold rounding errors
            // of sums over batch and positions of terms as large as the upstream gradient.
            let largest = |name: &str| case.tensor_f64(name).1.iter().fold(0.0, |m: f64, g| m.max(g.abs()));
            let terms = case.shape("grad_output").unwrap().iter().product::<usize>();
            let allowed = forward * terms as f64 * largest("grad_output");
            assert!(values(actual).iter().all(|g| g.abs() <= allowed), "{name}: {actual:?}");
        } else {
            check(&name, actual, gradient);
        }
    }
}

#[test]
fn layers_agree_with_pytorch() {
    let mut failures = Failures::new("batch norm layers against PyTorch");
    for case in Golden::load("batch_norm").cases() {
        for dtype in DTYPES {
            for mode in MODES {
                check_golden(&mut failures, case, dtype, mode);
            }
        }
    }
    failures.finish();
}

// ---- fused and separate --------------------------------------------------------------------------------------------

/// A block of convolution (`channels` in and out, 3x3) and batch norm.
struct Block {
    channels: [usize; 2],
    options: ConvOptions,
    conv_bias: bool,
    norm: BatchNormConfig,
    activation: Activation,
}

impl Block {
    fn build(&self, device: &Device, dtype: DType, mode: ConvBnMode) -> ConvBn2d {
        let init = init(device, dtype, 31);
        let conv = Conv2d::new(&init, self.channels, [3, 3], self.options, self.conv_bias).unwrap();
        let bn = BatchNorm2d::new(&init, self.channels[1], self.norm).unwrap();
        // Gamma 1 and beta 0 would hide what they are multiplied with and added to.
        for (seed, parameter) in [&bn.weight, &bn.bias].into_iter().flatten().enumerate() {
            parameter.set(&normal(device, dtype, 70 + seed as u64, &[self.channels[1]])).unwrap();
        }
        ConvBn2d::new(conv, bn, self.activation, mode)
    }
}

fn blocks() -> Vec<Block> {
    let plain = ConvOptions::default();
    let strided = ConvOptions { stride: [2, 1], padding: Padding::all(1), ..plain };
    let grouped = ConvOptions { groups: 2, ..strided };
    let lopsided =
        ConvOptions { dilation: [1, 2], padding: Padding { top: 1, bottom: 0, left: 2, right: 1 }, ..plain };
    let mut blocks = Vec::new();
    for (options, channels) in [(plain, [3, 5]), (strided, [3, 5]), (grouped, [4, 6]), (lopsided, [2, 33])] {
        for conv_bias in [false, true] {
            for affine in [true, false] {
                for (activation, momentum) in [(Activation::Relu, Some(0.1)), (Activation::Identity, None)] {
                    let norm = BatchNormConfig { affine, momentum, ..BatchNormConfig::default() };
                    blocks.push(Block { channels, options, conv_bias, norm, activation });
                }
            }
        }
    }
    blocks
}

fn describe(block: &Block) -> String {
    let Block { channels, options, conv_bias, norm, activation } = block;
    format!("{channels:?} {options:?}, conv bias {conv_bias}, {norm:?}, {activation:?}")
}

/// Three training steps, then evaluation: everything must be the same to the last bit.
fn check_modes(block: &Block, dtype: DType) -> Result<(), String> {
    let device = device();
    let [fused, separate] = MODES.map(|mode| block.build(&device, dtype, mode));
    let same = |what: &str, a: &Tensor, b: &Tensor| {
        let (a, b) = (bits(a), bits(b));
        match a.iter().zip(&b).position(|(a, b)| a != b) {
            None if a.len() == b.len() => Ok(()),
            None => Err(format!("{what}: {} and {} values", a.len(), b.len())),
            Some(index) => {
                let [a, b] = [a[index], b[index]].map(f64::from_bits);
                Err(format!("{what}: {a:e} fused and {b:e} separate at {index}"))
            }
        }
    };
    let mut optimizers = [&fused, &separate]
        .map(|model| convoke_nn::Optimizer::new(convoke_nn::Rule::sgd(0.1), model).unwrap());
    for step in 0..4 {
        if step == 3 {
            fused.eval();
            separate.eval();
        }
        let x = normal(&device, dtype, 40 + step, &[3, block.channels[0], 7, 6]).with_grad();
        let outputs = [&fused, &separate].map(|model| model.forward(&x).unwrap());
        same(&format!("output {step}"), &outputs[0], &outputs[1])?;
        let upstream = normal(&device, dtype, 50 + step, outputs[0].shape());
        let gradients = outputs.map(|output| backward(&output, &upstream, false));
        same(&format!("x gradient {step}"), gradients[0].get(&x).unwrap(), gradients[1].get(&x).unwrap())?;
        for ((path, a), (_, b)) in fused.parameters().into_iter().zip(separate.parameters()) {
            let [a, b] = [(a, &gradients[0]), (b, &gradients[1])].map(|(p, g)| g.get(&p.value()).unwrap());
            same(&format!("{path} gradient {step}"), a, b)?;
        }
        for (optimizer, gradients) in optimizers.iter_mut().zip(gradients) {
            optimizer.step(gradients).unwrap();
        }
        check_same_state(&snapshot(&fused), &snapshot(&separate))
            .map_err(|what| format!("step {step}: {what}"))?;
    }
    Ok(())
}

#[test]
fn fused_and_separate_are_the_same_to_the_last_bit() {
    let mut failures = Failures::new("fused and separate");
    for dtype in DTYPES {
        for block in blocks() {
            failures.run(format!("{dtype} {}", describe(&block)), || check_modes(&block, dtype));
        }
    }
    failures.finish();
}

// ---- running statistics by hand ------------------------------------------------------------------------------------

/// Mean and unbiased variance of each channel, by the two-pass formula.
fn moments(x: &Tensor) -> Vec<(f64, f64)> {
    let &[batch, channels, height, width] = x.shape() else { panic!("4D") };
    let (plane, all) = (height * width, values(x));
    let moments = |channel: usize| {
        let of_image = |image: usize| &all[(image * channels + channel) * plane..][..plane];
        let values: Vec<f64> = (0..batch).flat_map(|image| of_image(image).to_vec()).collect();
        let mean = values.iter().sum::<f64>() / values.len() as f64;
        let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
        (mean, squares / (values.len() - 1) as f64)
    };
    (0..channels).map(moments).collect()
}

/// A batch norm, or a block with a convolution that passes its channels on unchanged.
fn identity_layer(device: &Device, config: BatchNormConfig, mode: Option<ConvBnMode>) -> Box<dyn Module> {
    let init = init(device, DType::F64, 1);
    let bn = BatchNorm2d::new(&init, 2, config).unwrap();
    let Some(mode) = mode else { return Box::new(Sequential::new().then("bn", bn)) };
    let conv = Conv2d::new(&init, [2, 2], [1, 1], ConvOptions::default(), false).unwrap();
    conv.weight.set(&tensor(device, DType::F64, &[2, 2, 1, 1], &[1.0, 0.0, 0.0, 1.0])).unwrap();
    Box::new(ConvBn2d::new(conv, bn, Activation::Relu, mode))
}

fn running(model: &dyn Module) -> [Vec<f64>; 2] {
    ["bn.running_mean", "bn.running_var"].map(|path| values(&buffer(model, path).value()))
}

#[test]
fn running_statistics_follow_their_recurrence_once_a_forward() {
    let device = device();
    let exact = Tolerance::new(1e-13, 1e-13);
    for mode in [None, Some(ConvBnMode::Fused), Some(ConvBnMode::Separate)] {
        for momentum in [Some(0.1), Some(0.7), None] {
            let config = BatchNormConfig { momentum, ..BatchNormConfig::default() };
            let model = identity_layer(&device, config, mode);
            let mut expected = [vec![0.0; 2], vec![1.0; 2]];
            for forward in 1..=10_u64 {
                // Batches of other sizes: the unbiased variance depends on the count.
                let shape = [1 + forward as usize % 3, 2, 3, 2 + forward as usize % 2];
                let x = normal(&device, DType::F64, forward, &shape).scale(forward as f64).unwrap();
                let share = momentum.unwrap_or(1.0 / forward as f64);
                for (channel, (mean, variance)) in moments(&x).into_iter().enumerate() {
                    expected[0][channel] = (1.0 - share) * expected[0][channel] + share * mean;
                    expected[1][channel] = (1.0 - share) * expected[1][channel] + share * variance;
                }
                let leaf = x.with_grad();
                let what = format!("{mode:?}, momentum {momentum:?}, forward {forward}");
                let compare = |when: &str| {
                    let actual = running(model.as_ref());
                    assert_close(&format!("{what} {when}: mean"), &actual[0], &expected[0], exact);
                    assert_close(&format!("{what} {when}: variance"), &actual[1], &expected[1], exact);
                    let batches = counter(model.as_ref(), "bn.num_batches_tracked").value();
                    assert_eq!(batches, forward as i64, "{what} {when}");
                };
                // Without recording, never backward, once, or twice through the same graph.
                match forward % 4 {
                    0 => drop(no_grad(|| model.forward(&leaf)).unwrap()),
                    1 => drop(model.forward(&leaf).unwrap()),
                    runs => {
                        let output = model.forward(&leaf).unwrap();
                        compare("before backward");
                        let upstream = normal(&device, DType::F64, 99, &shape);
                        let first = backward(&output, &upstream, runs == 3);
                        if runs == 3 {
                            let second = backward(&output, &upstream, false);
                            let [first, second] = [first, second].map(|g| bits(g.get(&leaf).unwrap()));
                            assert_eq!(first, second, "{what}: the same gradient twice");
                        }
                    }
                }
                compare("afterwards");
            }
        }
    }
}

#[test]
fn evaluation_leaves_running_statistics_alone_and_uses_them() {
    let device = device();
    for mode in [None, Some(ConvBnMode::Fused), Some(ConvBnMode::Separate)] {
        let config = BatchNormConfig { eps: 0.01, ..BatchNormConfig::default() };
        let model = identity_layer(&device, config, mode);
        let statistics = [("bn.running_mean", [0.5, -1.0]), ("bn.running_var", [4.0, 0.25])];
        for (path, values) in statistics {
            buffer(model.as_ref(), path).set(&tensor(&device, DType::F64, &[2], &values)).unwrap();
        }
        let affine = [("bn.weight", [2.0, -3.0]), ("bn.bias", [0.25, 1.0])];
        for (path, values) in affine {
            common::parameter(model.as_ref(), path).set(&tensor(&device, DType::F64, &[2], &values)).unwrap();
        }
        model.eval();
        let before = snapshot(model.as_ref());
        // One value a channel is enough in evaluation.
        for shape in [[3, 2, 4, 5], [1, 2, 1, 1]] {
            let x = normal(&device, DType::F64, 8, &shape);
            let outputs = [
                model.forward(&x).unwrap(),
                model.forward(&x.with_grad()).unwrap(),
                inference_mode(|| model.forward(&x)).unwrap(),
                no_grad(|| model.forward(&x)).unwrap(),
            ];
            let plane = shape[2] * shape[3];
            let formula = |(index, x): (usize, f64)| {
                let channel = index / plane % 2;
                let y = (x - statistics[0].1[channel]) / (statistics[1].1[channel] + 0.01).sqrt();
                let y = y * affine[0].1[channel] + affine[1].1[channel];
                if mode.is_some() { y.max(0.0) } else { y }
            };
            let expected: Vec<f64> = values(&x).into_iter().enumerate().map(formula).collect();
            for output in outputs {
                assert_close("evaluation", &values(&output), &expected, Tolerance::new(1e-13, 1e-13));
                if output.requires_grad() {
                    let _ = backward(&output, &normal(&device, DType::F64, 9, &shape), false);
                }
            }
        }
        check_same_state(&snapshot(model.as_ref()), &before).unwrap();
    }
}

#[test]
fn without_running_statistics_evaluation_uses_the_batch() {
    let device = device();
    for mode in [None, Some(ConvBnMode::Fused), Some(ConvBnMode::Separate)] {
        let config = BatchNormConfig { track_running_stats: false, ..BatchNormConfig::default() };
        let model = identity_layer(&device, config, mode);
        assert!(
            model
                .named_state()
                .iter()
                .all(|(path, _)| !path.contains("running") && !path.contains("batches"))
        );
        let x = normal(&device, DType::F64, 8, &[3, 2, 4, 5]);
        let trained = bits(&model.forward(&x).unwrap());
        model.eval();
        assert_eq!(bits(&model.forward(&x).unwrap()), trained);
        let single = normal(&device, DType::F64, 8, &[1, 2, 1, 1]);
        assert_refused(model.forward(&single), &["Expected more than 1 value per channel when training"]);
    }
    let config = BatchNormConfig { track_running_stats: false, ..BatchNormConfig::default() };
    let bn = BatchNorm2d::new(&init(&device, DType::F32, 1), 2, config).unwrap();
    assert!(bn.running_mean().is_none() && bn.running_var().is_none() && bn.num_batches_tracked().is_none());
}

#[test]
fn a_batch_of_no_images_moves_nothing() {
    let device = device();
    for mode in [None, Some(ConvBnMode::Fused), Some(ConvBnMode::Separate)] {
        let model = identity_layer(&device, BatchNormConfig::default(), mode);
        let before = snapshot(model.as_ref());
        // Running statistics of nothing would be NaN.
        let output = model.forward(&tensor(&device, DType::F64, &[0, 2, 3, 3], &[])).unwrap();
        assert_eq!(output.shape(), [0, 2, 3, 3]);
        check_same_state(&snapshot(model.as_ref()), &before).unwrap();
    }
}

#[test]
fn what_a_caller_holds_of_the_statistics_does_not_change() {
    let device = device();
    let bn = BatchNorm2d::new(&init(&device, DType::F32, 1), 2, BatchNormConfig::default()).unwrap();
    let (mean, var) = (bn.running_mean().unwrap(), bn.running_var().unwrap());
    bn.forward(&normal(&device, DType::F32, 1, &[2, 2, 3, 3])).unwrap();
    assert_eq!((values(&mean), values(&var)), (vec![0.0; 2], vec![1.0; 2]));
    assert_ne!(bits(&bn.running_mean().unwrap()), bits(&mean));
}

// ---- errors --------------------------------------------------------------------------------------------------------

#[test]
fn errors_are_pytorchs_and_change_nothing() {
    let device = device();
    let init = init(&device, DType::F32, 1);
    let bn = BatchNorm2d::new(&init, 2, BatchNormConfig::default()).unwrap();
    for shape in [vec![2], vec![4, 2], vec![4, 2, 3], vec![1, 2, 3, 4, 5]] {
        let expected = format!("expected 4D input (got {}D input)", shape.len());
        assert_refused(bn.forward(&normal(&device, DType::F32, 1, &shape)), &["BatchNorm2d", &expected]);
    }
    let single = normal(&device, DType::F32, 1, &[1, 2, 1, 1]);
    let expected = "Expected more than 1 value per channel when training, got input size [1, 2, 1, 1]";
    assert_refused(bn.forward(&single), &["batch_norm", expected]);
    let double = normal(&device, DType::F64, 1, &[2, 2, 3, 3]);
    assert_refused(bn.forward(&double), &["f32", "f64"]);
    assert_eq!(bn.num_batches_tracked(), Some(0));

    for mode in MODES {
        let conv = Conv2d::new(&init, [2, 2], [3, 3], ConvOptions::default(), false).unwrap();
        let bn = BatchNorm2d::new(&init, 2, BatchNormConfig::default()).unwrap();
        let block = ConvBn2d::new(conv, bn, Activation::Relu, mode);
        let before = snapshot(&block);
        // The convolution leaves one value.
        let x = normal(&device, DType::F32, 1, &[1, 2, 3, 3]);
        assert_refused(
            block.forward(&x),
            &["Expected more than 1 value per channel when training", "[1, 2, 1, 1]"],
        );
        let flat = normal(&device, DType::F32, 1, &[2, 2, 9]);
        assert_refused(block.forward(&flat), &["4D input (got 3D"]);
        check_same_state(&snapshot(&block), &before).unwrap();
    }
}

#[test]
fn another_number_of_channels_is_refused_in_every_configuration() {
    let device = device();
    let init = init(&device, DType::F32, 1);
    let mut failures = Failures::new("a batch norm of 3 channels in front of 2");
    for affine in [true, false] {
        for track_running_stats in [true, false] {
            let config = BatchNormConfig { affine, track_running_stats, ..BatchNormConfig::default() };
            for mode in [None, Some(ConvBnMode::Fused), Some(ConvBnMode::Separate)] {
                for training in [true, false] {
                    let bn = BatchNorm2d::new(&init, 3, config).unwrap();
                    let model: Box<dyn Module> = match mode {
                        None => Box::new(bn),
                        Some(mode) => {
                            let conv =
                                Conv2d::new(&init, [2, 2], [1, 1], ConvOptions::default(), false).unwrap();
                            Box::new(ConvBn2d::new(conv, bn, Activation::Identity, mode))
                        }
                    };
                    if !training {
                        model.eval();
                    }
                    let before = snapshot(model.as_ref());
                    let what = format!(
                        "affine {affine}, tracked {track_running_stats}, {mode:?}, training {training}"
                    );
                    failures.run(what, || {
                        let x = normal(&device, DType::F32, 1, &[2, 2, 3, 3]);
                        common::check_refused(model.forward(&x), &["3", "2"])?;
                        check_same_state(&snapshot(model.as_ref()), &before)
                    });
                }
            }
        }
    }
    failures.finish();
}

#[test]
fn gradients_of_constant_statistics_do_not_flow_through_them() {
    let device = device();
    let bn = BatchNorm2d::new(&init(&device, DType::F64, 1), 2, BatchNormConfig::default()).unwrap();
    bn.eval();
    let x = normal(&device, DType::F64, 1, &[2, 2, 3, 3]).with_grad();
    let upstream = normal(&device, DType::F64, 2, &[2, 2, 3, 3]);
    let gradients = backward(&bn.forward(&x).unwrap(), &upstream, false);
    let scale = 1.0 / (1.0_f64 + 1e-5).sqrt();
    let expected: Vec<f64> = values(&upstream).iter().map(|g| g * scale).collect();
    check_close(&values(gradients.get(&x).unwrap()), &expected, Tolerance::new(0.0, 1e-14)).unwrap();
    let weight = bn.weight.as_ref().map(Parameter::value).unwrap();
    assert!(gradients.get(&weight).is_some());
}
