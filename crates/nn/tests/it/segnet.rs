//! The segmentation network: its tree, its skips, gradients in both modes, folding, sizes that do not fit, no images.

use std::time::Duration;

use crate::common::{self, assert_refused, backward, init, normal, parameter, spec, tensor, values};
use convoke_autograd::ops::{ResizeOptions, ResizeTo, concat, log_softmax, max_pool2d, resize2d};
use convoke_autograd::{Cpu, DType, Device, DeviceOptions, MemoryFormat, Tensor, inference_mode};
use convoke_distributed::{Options, run_threads};
use convoke_nn::data::{DatasetInfo, InMemory, Targets, TrainTest};
use convoke_nn::models::{Models, Segnet, segnet};
use convoke_nn::modules::{ConvBnMode, PoolOptions};
use convoke_nn::training::{Trainer, TrainingConfig, TrainingError};
use convoke_nn::{Forward, Init, Module, ModuleExt, Rule};
use convoke_testkit::{Tolerance, assert_close, check_relative_to_max};

const CLASSES: usize = 5;
const LEVELS: [&str; 7] = ["down1", "down2", "down3", "bottleneck", "up1", "up2", "up3"];

fn device() -> Device {
    common::device()
}

fn model(device: &Device, mode: ConvBnMode) -> Segnet {
    segnet(&init(device, DType::F64, 3), mode, 3, CLASSES).unwrap()
}

/// As training gives them to a model.
fn images(device: &Device, batch: usize) -> Tensor {
    normal(device, DType::F64, 1, &[batch, 3, 16, 24]).to_format(MemoryFormat::ChannelsLast).unwrap()
}

#[test]
fn the_tree_has_its_names_and_parameters() {
    let device = device();
    let paths: Vec<String> =
        model(&device, ConvBnMode::Fused).named_state().into_iter().map(|(path, _)| path).collect();
    let bn = ["weight", "bias", "running_mean", "running_var", "num_batches_tracked"];
    let mut expected = Vec::new();
    for block in LEVELS.iter().flat_map(|level| [1, 2].map(|block| format!("{level}.conv{block}"))) {
        expected.push(format!("{block}.conv.weight"));
        expected.extend(bn.map(|name| format!("{block}.bn.{name}")));
    }
    expected.extend(["classify.weight", "classify.bias"].map(String::from));
    assert_eq!(paths, expected);

    let block = |inputs: usize, outputs: usize| outputs * inputs * 3 * 3 + 2 * outputs;
    let level = |inputs: usize, outputs: usize| block(inputs, outputs) + block(outputs, outputs);
    let count = level(3, 16) + level(16, 32) + level(32, 64) + level(64, 128);
    let count = count + level(128 + 64, 64) + level(64 + 32, 32) + level(32 + 16, 16) + (16 + 1) * 11;
    assert_eq!(count, 488_171, "as the documentation says");
    let model = spec("segnet");
    let model = model.build(&Init::new(&device, 0), &model.options(ConvBnMode::Fused)).unwrap();
    assert_eq!(model.parameter_count(), count);
    assert_eq!(model.parameters().len(), 7 * 2 * 3 + 2);
    assert_eq!(spec("segnet").to_string(), "segnet");
}

/// The model gives what its layers give, put together by hand.
#[test]
fn levels_are_joined_with_what_skipped_them() {
    let device = device();
    let model = model(&device, ConvBnMode::Separate);
    model.eval();
    let x = images(&device, 2);
    let run = |name: &str, x: &Tensor| {
        let child = model.children().into_iter().find(|(child, _)| *child == name).unwrap().1;
        child.forward(x).unwrap()
    };
    let halved = |x: &Tensor| max_pool2d(x, &PoolOptions::new(2)).unwrap();
    let joined = |below: &Tensor, skipped: &Tensor| {
        let double = ResizeOptions::bilinear(ResizeTo::Scale([2.0; 2]), false);
        concat(&[&resize2d(below, &double).unwrap(), skipped]).unwrap()
    };
    let first = run("down1", &x);
    let second = run("down2", &halved(&first));
    let third = run("down3", &halved(&second));
    let below = run("bottleneck", &halved(&third));
    assert_eq!(below.shape(), [2, 128, 2, 3]);
    let up = run("up1", &joined(&below, &third));
    let up = run("up2", &joined(&up, &second));
    let up = run("up3", &joined(&up, &first));
    let expected = log_softmax(&run("classify", &up)).unwrap();
    let output = model.forward(&x).unwrap();
    assert_eq!((output.shape(), output.format()), (&[2, CLASSES, 16, 24][..], MemoryFormat::ChannelsLast));
    assert_eq!(common::bits(&output), common::bits(&expected));
    for pixel in output.data::<f64>().unwrap().chunks(CLASSES) {
        let sum: f64 = pixel.iter().map(|x| x.exp()).sum();
        assert!((sum - 1.0).abs() <= 1e-12, "probabilities sum to {sum}");
    }
}

#[test]
fn both_modes_give_the_same_and_reach_every_parameter() {
    let device = device();
    let x = images(&device, 2);
    let upstream = normal(&device, DType::F64, 2, &[2, CLASSES, 16, 24]);
    let run = |mode| {
        let model = model(&device, mode);
        let output = model.forward(&x).unwrap();
        let gradients = backward(&output, &upstream, false);
        let gradients = common::gradients_by_path(&model, &gradients);
        (values(&output), gradients, common::snapshot(&model))
    };
    let (fused, separate) = (run(ConvBnMode::Fused), run(ConvBnMode::Separate));
    check_relative_to_max(&fused.0, &separate.0, 1e-11).unwrap();
    for ((path, fused), (_, separate)) in fused.1.iter().zip(&separate.1) {
        // Fifteen layers of sums of up to a thousand products.
        check_relative_to_max(fused, separate, 1e-9).unwrap_or_else(|error| panic!("{path}: {error}"));
        assert!(fused.iter().any(|&gradient| gradient.abs() > 1e-6), "{path} has no gradient to speak of");
    }
    assert_eq!(fused.2.len(), separate.2.len());
    for ((path, fused), (_, separate)) in fused.2.iter().zip(&separate.2) {
        if path.ends_with("running_var") || path.ends_with("running_mean") {
            let [fused, separate] =
                [fused, separate].map(|bits| bits.iter().copied().map(f64::from_bits).collect::<Vec<_>>());
            check_relative_to_max(&fused, &separate, 1e-11).unwrap_or_else(|error| panic!("{path}: {error}"));
        }
    }
}

#[test]
fn folding_keeps_the_outputs() {
    let device = device();
    for mode in [ConvBnMode::Fused, ConvBnMode::Separate] {
        let mut model = model(&device, mode);
        let x = images(&device, 2);
        // Statistics that are not those of the start.
        drop(model.forward(&x).unwrap());
        model.eval();
        let before = values(&model.forward(&x).unwrap());
        assert_eq!(model.fold().unwrap(), 14);
        let after = values(&model.forward(&x).unwrap());
        assert_close("folded", &after, &before, Tolerance::new(1e-9, 1e-9));
        assert_eq!(model.parameters().len(), 15 * 2, "of every convolution the weight and the bias");
        assert_eq!(model.fold().unwrap(), 0);
    }
}

#[test]
fn images_that_do_not_fit_are_refused() {
    let device = device();
    let model = model(&device, ConvBnMode::Fused);
    let refused = |shape: &[usize], parts: &[&str]| {
        assert_refused(model.forward(&Tensor::zeros(&device, shape, DType::F64).unwrap()), parts);
    };
    refused(&[2, 3, 12, 16], &["segnet", "multiples of 8", "12 x 16"]);
    refused(&[2, 3, 16, 17], &["segnet", "multiples of 8", "16 x 17"]);
    refused(&[0, 3, 4, 16], &["segnet", "multiples of 8", "4 x 16"]);
    refused(&[2, 4, 16, 16], &["conv_bn2d", "[2, 4, 16, 16]"]);
    refused(&[3, 16, 16], &["conv_bn2d", "4D"]);
    refused(&[2, 3, 0, 16], &["conv_bn2d", "[2, 3, 0, 16]"]);
    let init = Init::new(&device, 1);
    assert_refused(segnet(&init, ConvBnMode::Fused, 0, 11), &["Conv2d", "0 to 16 channels"]);
    assert_refused(segnet(&init, ConvBnMode::Fused, 3, 0), &["Conv2d", "16 to 0 channels"]);
}

#[test]
fn data_that_a_model_does_not_take_is_refused() {
    let data = |channels: usize, height: usize, width: usize, classes: usize| DatasetInfo {
        name: "some".into(),
        channels,
        height,
        width,
        classes,
        targets: Targets::Image,
        mean: vec![0.5; channels],
        std: vec![0.5; channels],
    };
    let pixels = |channels: usize, height: usize, width: usize, classes: usize| DatasetInfo {
        targets: Targets::Pixels { ignore: Some(255) },
        ..data(channels, height, width, classes)
    };
    spec("mnist-cnn").check(&data(1, 28, 28, 10)).unwrap();
    let parts = ["mnist-cnn takes images of [1, 28, 28] in 10 classes; some has [1, 28, 28] in 11 classes"];
    assert_refused(spec("mnist-cnn").check(&data(1, 28, 28, 11)), &parts);
    let parts = ["segnet takes", "multiples of 8", "some has [3, 120, 161]"];
    assert_refused(spec("segnet").check(&pixels(3, 120, 161, 11)), &parts);
    assert_refused(spec("segnet").check(&pixels(1, 28, 36, 10)), &["multiples of 8", "[1, 28, 36]"]);
    assert_refused(spec("segnet").check(&data(3, 120, 160, 11)), &["segnet", "label for each pixel", "some"]);
    assert_refused(
        spec("mnist-cnn").check(&pixels(1, 28, 28, 10)),
        &["mnist-cnn", "label for each image", "some"],
    );
    spec("segnet").check(&pixels(1, 8, 32, 3)).unwrap();
    for model in Models::builtin().iter() {
        let [channels, height, width] = model.input();
        let device = device().dry();
        let network = model.build(&Init::new(&device, 1), &model.options(ConvBnMode::Fused)).unwrap();
        network.eval();
        let x = Tensor::zeros(&device, &[1, channels, height, width], DType::F32).unwrap();
        let y = inference_mode(|| network.forward(&x)).unwrap();
        assert_eq!(y.shape()[..2], [1, model.classes()], "{model} runs on what it is made for");
    }
}

/// The mean over no pixel is no number; the run has not diverged.
#[test]
fn a_batch_without_labels_is_named_as_such() {
    let info = DatasetInfo {
        name: "blank".into(),
        channels: 3,
        height: 16,
        width: 16,
        classes: CLASSES,
        targets: Targets::Pixels { ignore: Some(255) },
        mean: vec![0.5; 3],
        std: vec![0.5; 3],
    };
    // Of the second image alone some pixels have a class.
    let labels = [[255; 256].as_slice(), &[1; 256]].concat();
    let set = |range: std::ops::Range<usize>| {
        let labels = labels[256 * range.start..256 * range.end].to_vec();
        InMemory::new(info.clone(), vec![7; 3 * labels.len()], labels).unwrap()
    };
    for (images, learns) in [(0..1, false), (1..2, true)] {
        let data = TrainTest::new(set(images), set(1..2));
        let new = TrainingConfig::new(spec("segnet"));
        let config = TrainingConfig { rule: Rule::sgd(0.1), batch_size: 1, ..new };
        let mut trainer = Trainer::new(&device(), config, data).unwrap();
        match trainer.step() {
            Ok(report) => assert!(learns && report.loss.is_finite()),
            Err(error) => {
                assert!(
                    !learns && matches!(error, TrainingError::NoLabel { step: 1, epoch: 1, ignore: 255 })
                );
                let text = error.to_string();
                assert!(text.contains("no pixel has a label") && !text.contains("diverged"), "{text}");
            }
        }
    }
}

#[test]
fn no_images_are_no_error() {
    let device = device();
    let model = model(&device, ConvBnMode::Fused);
    model.eval();
    let x = images(&device, 0);
    assert_eq!(model.forward(&x).unwrap().shape(), [0, CLASSES, 16, 24]);
}

/// Two ranks in training, of which one has no images: together they do what one rank does.
#[test]
fn a_rank_without_images_takes_part() {
    const OPTIONS: Options = Options { timeout: Duration::from_secs(60) };
    let upstream = convoke_testkit::normal::<f64>(2, 2 * CLASSES * 16 * 24, 0.0, 1.0);
    let run = |batch: usize, ranks: Option<&convoke_distributed::Communicator>| {
        let device = Device::new(DeviceOptions { poison: true, ..DeviceOptions::new(Cpu::single()) });
        let model = model(&device, ConvBnMode::Fused);
        model.convert_sync_batchnorm(ranks);
        let output = model.forward(&images(&device, batch)).unwrap();
        let shape = [batch, CLASSES, 16, 24];
        let upstream = &upstream[..shape.iter().product()];
        let gradients = backward(&output, &tensor(&device, DType::F64, &shape, upstream), false);
        let weight = |path: &str| values(gradients.get(&parameter(&model, path).value()).unwrap());
        let gradients =
            ["down1.conv1.conv.weight", "bottleneck.conv2.bn.weight", "classify.bias"].map(weight);
        (values(&output), gradients)
    };
    let alone = run(2, None);
    let found = run_threads(2, &OPTIONS, |ranks| run(2 * (1 - ranks.rank()), Some(&ranks))).unwrap();
    check_relative_to_max(&found[0].0, &alone.0, 1e-10).unwrap();
    assert!(found[1].0.is_empty());
    for (index, expected) in alone.1.iter().enumerate() {
        let [first, second] = [0, 1].map(|rank| &found[rank].1[index]);
        let sum: Vec<f64> = first.iter().zip(second).map(|(a, b)| a + b).collect();
        check_relative_to_max(&sum, expected, 1e-9).unwrap();
    }
}
