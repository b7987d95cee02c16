//! The residual networks: their trees, their blocks put together by hand, both modes, folding, sizes, a run that is resumed.

use crate::common::{self, assert_refused, backward, bits, init, normal, parameter, spec, values};
use convoke_autograd::{DType, Device, MemoryFormat, Tensor, inference_mode};
use convoke_nn::data::{DatasetInfo, Targets};
use convoke_nn::models::{BasicBlock, Bottleneck, ModelSpec, resnet20, resnet50};
use convoke_nn::modules::{
    Activation, BatchNorm2d, BatchNormConfig, Conv2d, ConvBn2d, ConvBnMode, ConvOptions, GlobalAvgPool2d,
    Padding, Sequential,
};
use convoke_nn::{Forward, Init, Module, ModuleExt};
use convoke_testkit::{Tolerance, assert_close, check_relative_to_max};

const MODES: [ConvBnMode; 2] = [ConvBnMode::Fused, ConvBnMode::Separate];

fn device() -> Device {
    common::device()
}

fn images(device: &Device, shape: [usize; 4]) -> Tensor {
    normal(device, DType::F64, 1, &shape).to_format(MemoryFormat::ChannelsLast).unwrap()
}

fn small(device: &Device, mode: ConvBnMode) -> Sequential {
    resnet20(&init(device, DType::F64, 3), mode, 2, 7).unwrap()
}

fn child<'a>(module: &'a (impl Module + ?Sized), name: &str) -> &'a dyn Module {
    let found = module.children().into_iter().find(|(child, _)| *child == name);
    found.unwrap_or_else(|| panic!("there is no {name}")).1
}

#[test]
fn parameters_are_as_many_as_published() {
    let device = device();
    let count = |model: ModelSpec, channels, classes| {
        let mut options = model.options(ConvBnMode::Fused);
        (options.image, options.classes) = ([channels, 32, 32], classes);
        let model = model.build(&Init::new(&device, 0), &options).unwrap();
        model.parameter_count()
    };
    // The paper's 269,722 and its three 1x1 convolutions, for option B.
    let shortcuts = (16 * 32 + 2 * 32) + (32 * 64 + 2 * 64);
    assert_eq!(count(spec("resnet20"), 3, 10), 269_722 + shortcuts);
    assert_eq!(count(spec("resnet20"), 3, 10), 272_474, "as the documentation says");
    assert_eq!(count(spec("resnet20"), 1, 7), 272_474 - 2 * 16 * 9 - 3 * 65);
    // torchvision's.
    assert_eq!(count(spec("resnet50"), 3, 1000), 25_557_032);
    assert_eq!(count(spec("resnet50"), 3, 10), 25_557_032 - 990 * 2049);
}

#[test]
fn trees_have_their_names() {
    let device = device();
    let convolutions = |model: &Sequential| -> Vec<String> {
        let paths = model.named_state().into_iter().map(|(path, _)| path);
        paths.filter_map(|path| path.strip_suffix(".conv.weight").map(String::from)).collect()
    };
    let model = resnet20(&init(&device, DType::F32, 1), ConvBnMode::Fused, 3, 10).unwrap();
    let mut expected = vec!["conv1".to_owned()];
    for (stage, block) in (1..=3).flat_map(|stage| (0..3).map(move |block| (stage, block))) {
        expected.extend(["conv1", "conv2"].map(|name| format!("layer{stage}.{block}.{name}")));
        if stage > 1 && block == 0 {
            expected.push(format!("layer{stage}.{block}.downsample"));
        }
    }
    assert_eq!(convolutions(&model), expected);
    assert_eq!(model.parameters().len(), 21 * 3 + 2);
    let names: Vec<String> = model.children().into_iter().map(|(name, _)| name).collect();
    let ends = ["average", "flatten", "fc", "log_softmax"];
    assert_eq!(names, [&["conv1", "layer1", "layer2", "layer3"][..], &ends].concat());

    let model = resnet50(&init(&device, DType::F32, 1), ConvBnMode::Fused, 3, 2).unwrap();
    let mut expected = vec!["conv1".to_owned()];
    for (stage, blocks) in [(1, 3), (2, 4), (3, 6), (4, 3)] {
        for block in 0..blocks {
            expected.extend(["conv1", "conv2", "conv3"].map(|name| format!("layer{stage}.{block}.{name}")));
            if block == 0 {
                expected.push(format!("layer{stage}.{block}.downsample"));
            }
        }
    }
    assert_eq!(convolutions(&model), expected);
    assert_eq!(expected.len(), 53);
    assert_eq!((spec("resnet20").to_string(), spec("resnet50").name()), ("resnet20".into(), "resnet50"));
}

/// As torchvision's: normal with variance 2 / (K R S), ones, zeros.
#[test]
fn values_start_as_torchvisions() {
    let device = device();
    let model = resnet20(&init(&device, DType::F64, 1), ConvBnMode::Fused, 3, 10).unwrap();
    for (path, fan_out) in
        [("layer1.0.conv1", 16 * 9), ("layer3.1.conv2", 64 * 9), ("layer3.0.downsample", 64)]
    {
        let weight = values(&parameter(&model, &format!("{path}.conv.weight")).value());
        let count = weight.len() as f64;
        let variance = weight.iter().map(|x| x * x).sum::<f64>() / count;
        let expected = 2.0 / fan_out as f64;
        // Five standard errors of a normal distribution's variance.
        assert!((variance / expected - 1.0).abs() <= 5.0 * (2.0 / count).sqrt(), "{path}: {variance}");
        let largest = weight.iter().fold(0.0_f64, |most, x| most.max(x.abs()));
        assert!(largest > 2.5 * expected.sqrt(), "{path} is not normal: {largest}");
        assert!(values(&parameter(&model, &format!("{path}.bn.weight")).value()).iter().all(|&x| x == 1.0));
        assert!(values(&parameter(&model, &format!("{path}.bn.bias")).value()).iter().all(|&x| x == 0.0));
    }
}

#[test]
fn a_sum_ends_in_the_activation() {
    let device = device();
    let shape = [3, 4, 5, 6];
    let (x, residual) = (images(&device, [3, 2, 5, 6]), normal(&device, DType::F64, 2, &shape));
    for mode in MODES {
        for activation in [Activation::Identity, Activation::Relu] {
            let options = ConvOptions { padding: Padding::symmetric([1, 1]), ..ConvOptions::default() };
            let block = |activation| {
                let init = init(&device, DType::F64, 5);
                let conv = Conv2d::new(&init, [2, 4], [3, 3], options, false).unwrap();
                let bn = BatchNorm2d::new(&init, 4, BatchNormConfig::default()).unwrap();
                ConvBn2d::new(conv, bn, activation, mode)
            };
            let (mut one, parts) = (block(activation), block(Activation::Identity));
            for training in [true, false] {
                if !training {
                    one.eval();
                    parts.eval();
                }
                let (leaf, other) = (residual.with_grad(), residual.with_grad());
                let found = one.forward_added(&x, &leaf).unwrap();
                let expected = parts.forward(&x).unwrap().add(&other).unwrap();
                let expected =
                    if activation == Activation::Relu { expected.relu().unwrap() } else { expected };
                check_relative_to_max(&values(&found), &values(&expected), 1e-13).unwrap();
                let upstream = normal(&device, DType::F64, 3, &shape);
                let weights = [&one, &parts].map(|block| block.conv.weight.value());
                let gradients = [backward(&found, &upstream, false), backward(&expected, &upstream, false)];
                for (mine, theirs) in [(&leaf, &other), (&weights[0], &weights[1])] {
                    let [mine, theirs] = [gradients[0].get(mine), gradients[1].get(theirs)]
                        .map(|found| values(found.unwrap()));
                    check_relative_to_max(&mine, &theirs, 1e-12).unwrap();
                }
            }
            assert_refused(one.forward_added(&x, &x), &["[3, 4, 5, 6]", "[3, 2, 5, 6]"]);
            let before = values(&one.forward_added(&x, &residual).unwrap());
            assert_eq!(one.fold().unwrap(), 1);
            let after = values(&one.forward_added(&x, &residual).unwrap());
            assert_close("folded", &after, &before, Tolerance::new(1e-12, 1e-12));
        }
    }
}

/// The blocks give what their layers give, put together by hand.
#[test]
fn blocks_lead_past_their_convolutions() {
    let device = device();
    let init = init(&device, DType::F64, 3);
    let x = images(&device, [2, 8, 6, 5]);
    let relu = |x: Tensor| x.relu().unwrap();
    for stride in [1, 2] {
        for outputs in [8, 12] {
            let mode = ConvBnMode::Separate;
            let basic = BasicBlock::new(&init, mode, [8, outputs], stride).unwrap();
            let deep = Bottleneck::new(&init, mode, [8, outputs / 4], stride).unwrap();
            let changes = stride == 2 || outputs == 12;
            for (block, last) in [(&basic as &dyn Module, "conv2"), (&deep, "conv3")] {
                block.eval();
                let run = |name: &str, x: &Tensor| child(block, name).forward(x).unwrap();
                let inner = if last == "conv2" { run("conv1", &x) } else { run("conv2", &run("conv1", &x)) };
                // The last block ends in a ReLU of its own, which comes after the addition here: its two layers.
                let (conv, bn) = (child(child(block, last), "conv"), child(child(block, last), "bn"));
                let inner = bn.forward(&conv.forward(&inner).unwrap()).unwrap();
                let past = if changes { run("downsample", &x) } else { x.clone() };
                assert_eq!(block.children().iter().any(|(name, _)| *name == "downsample"), changes);
                let found = block.forward(&x).unwrap();
                assert_eq!(found.shape(), [2, outputs, 6 / stride, 5_usize.div_ceil(stride)]);
                assert_eq!(bits(&found), bits(&relu(inner.add(&past).unwrap())));
            }
        }
    }
    // Where the stride is.
    let deep = Bottleneck::new(&init, ConvBnMode::Fused, [8, 4], 2).unwrap();
    assert_eq!(child(&deep, "conv1").forward(&x).unwrap().shape(), [2, 4, 6, 5]);
}

#[test]
fn both_modes_give_the_same_and_reach_every_parameter() {
    let device = device();
    let x = images(&device, [3, 2, 12, 9]);
    let upstream = normal(&device, DType::F64, 2, &[3, 7]);
    let run = |mode| {
        let model = small(&device, mode);
        let output = model.forward(&x).unwrap();
        let gradients = backward(&output, &upstream, false);
        let gradients = common::gradients_by_path(&model, &gradients);
        (values(&output), gradients)
    };
    let (fused, separate) = (run(ConvBnMode::Fused), run(ConvBnMode::Separate));
    check_relative_to_max(&fused.0, &separate.0, 1e-10).unwrap();
    for ((path, fused), (_, separate)) in fused.1.iter().zip(&separate.1) {
        check_relative_to_max(fused, separate, 1e-8).unwrap_or_else(|error| panic!("{path}: {error}"));
        assert!(fused.iter().any(|&gradient| gradient.abs() > 1e-6), "{path} has no gradient to speak of");
    }
}

#[test]
fn folding_keeps_the_outputs() {
    let device = device();
    for mode in MODES {
        let mut small = small(&device, mode);
        let mut deep = resnet50(&init(&device, DType::F64, 3), mode, 2, 7).unwrap();
        for (model, x, count) in [
            (&mut small, images(&device, [2, 2, 16, 8]), 21),
            (&mut deep, images(&device, [2, 2, 33, 40]), 53),
        ] {
            // Statistics that are not those of the start.
            drop(model.forward(&x).unwrap());
            model.eval();
            let before = values(&model.forward(&x).unwrap());
            assert_eq!(model.fold().unwrap(), count);
            let after = values(&model.forward(&x).unwrap());
            assert_close("folded", &after, &before, Tolerance::new(1e-8, 1e-8));
            assert_eq!(model.parameters().len(), 2 * count + 2, "of every layer the weight and the bias");
            assert_eq!(model.fold().unwrap(), 0);
        }
    }
}

#[test]
fn images_of_many_sizes_are_taken() {
    let device = device();
    let model = small(&device, ConvBnMode::Fused);
    model.eval();
    let deep = resnet50(&init(&device, DType::F32, 3), ConvBnMode::Fused, 1, 3).unwrap();
    deep.eval();
    inference_mode(|| {
        for [batch, height, width] in [[1, 8, 8], [2, 9, 17], [0, 8, 8], [1, 32, 32]] {
            let output = model.forward(&images(&device, [batch, 2, height, width])).unwrap();
            assert_eq!(output.shape(), [batch, 7]);
            for image in values(&output).chunks(7) {
                let sum: f64 = image.iter().map(|x| x.exp()).sum();
                assert!((sum - 1.0).abs() <= 1e-12, "probabilities sum to {sum}");
            }
        }
        for [height, width] in [[32, 32], [35, 64]] {
            let x = normal(&device, DType::F32, 1, &[1, 1, height, width]);
            assert_eq!(deep.forward(&x).unwrap().shape(), [1, 3]);
        }
    });
    let refused = |shape: &[usize], parts: &[&str]| {
        assert_refused(model.forward(&Tensor::zeros(&device, shape, DType::F64).unwrap()), parts);
    };
    refused(&[2, 3, 8, 8], &["conv_bn2d", "[2, 3, 8, 8]"]);
    refused(&[2, 8, 8], &["conv_bn2d", "4D"]);
    let init = Init::new(&device, 1);
    assert_refused(resnet20(&init, ConvBnMode::Fused, 0, 10), &["Conv2d", "0 to 16 channels"]);
    assert_refused(resnet50(&init, ConvBnMode::Fused, 3, 0), &["Linear", "0 outputs"]);
    assert_refused(BasicBlock::new(&init, ConvBnMode::Fused, [3, 0], 1).map(|_| ()), &["Conv2d", "3 to 0"]);
}

#[test]
fn the_mean_of_each_channel() {
    let device = device();
    let x = images(&device, [2, 3, 4, 5]);
    let found = GlobalAvgPool2d.forward(&x).unwrap();
    assert_eq!(found.shape(), [2, 3, 1, 1]);
    let expected: Vec<f64> = values(&x).chunks(20).map(|plane| plane.iter().sum::<f64>() / 20.0).collect();
    assert_close("means", &values(&found), &expected, Tolerance::new(1e-14, 1e-14));
    let none = Tensor::zeros(&device, &[0, 3, 4, 5], DType::F64).unwrap();
    assert_eq!(GlobalAvgPool2d.forward(&none).unwrap().shape(), [0, 3, 1, 1]);
    assert_refused(
        GlobalAvgPool2d.forward(&normal(&device, DType::F64, 1, &[2, 3])),
        &["avg_pool2d", "[2, 3]"],
    );
    let empty = Tensor::zeros(&device, &[2, 3, 0, 5], DType::F64).unwrap();
    assert_refused(GlobalAvgPool2d.forward(&empty), &["avg_pool2d", "[2, 3, 0, 5]"]);
}

#[test]
fn data_that_a_model_does_not_take_is_refused() {
    let data = |[channels, height, width]: [usize; 3], classes: usize, targets: Targets| {
        DatasetInfo::of_noise("some", [channels, height, width], classes, targets)
    };
    for (model, least) in [(spec("resnet20"), 8), (spec("resnet50"), 32)] {
        for classes in [1, 10, 1000] {
            model.check(&data([5, least, least + 1], classes, Targets::Image)).unwrap();
        }
        for shape in [[3, least - 1, 100], [3, 100, least - 1]] {
            let parts = [model.name(), "pixels or more", &format!("some has {shape:?} in 10 classes")];
            assert_refused(model.check(&data(shape, 10, Targets::Image)), &parts);
        }
        let pixels = data(model.input(), 10, Targets::Pixels { ignore: Some(3) });
        assert_refused(model.check(&pixels), &[model.name(), "label for each image", "some"]);
        model.check(&data(model.input(), model.classes(), model.targets())).unwrap();
    }
}
