//! Models that are definitions: names and shapes of torchvision's state dicts, initial values, gradients, and logits against
//! PyTorch's.
//!
//! `tools/make_ready_models.py` writes a folder of weights and logits; `CONVOKE_READY_MODELS` names it. Without it the test of
//! them does nothing.

use std::path::Path;
use std::sync::Arc;

use convoke_autograd::ops::{
    self, ConvOptions, Coordinates, LayerNormOptions, Padding, ResizeMode, ResizeOptions, ResizeTo,
};
use convoke_autograd::{DType, Device, Result, Tensor, inference_mode};
use convoke_nn::checkpoint::{WeightOptions, load_weights};
use convoke_nn::graph::{
    BatchNormOp, Bias, Builder, ConvSpec, Definition, Graph, Initial, PoolSpec, Scheme, Value, Weights,
};
use convoke_nn::models::{Models, torchvision, unet};
use convoke_nn::modules::ConvBnMode;
use convoke_nn::{Forward, Init, Module, ModuleExt, State};
use convoke_testkit::Failures;
use safetensors::SafeTensors;
use sha2::{Digest, Sha256};

use crate::common::{self, assert_refused, device, init, values};

struct Ready {
    /// The name in PyTorch.
    name: &'static str,
    define: fn(usize, usize) -> Result<Definition>,
    /// With three channels and 1000 classes.
    parameters: usize,
    /// Entries of the state dict.
    entries: usize,
    /// The first 64 bits of the SHA-256 of the sorted lines `NAME 64x3x7x7` of the state dict.
    hash: &'static str,
}

macro_rules! ready {
    ($($name:literal $define:expr, $parameters:literal, $entries:literal, $hash:literal;)*) => {
        [$(Ready {
            name: $name, define: $define, parameters: $parameters, entries: $entries, hash: $hash
        }),*]
    };
}

/// torchvision 0.29; and A. Milesi's U-Net.
const READY: [Ready; 21] = ready! {
    "resnet18" torchvision::resnet18, 11_689_512, 122, "f0e35161599236f3";
    "resnet34" torchvision::resnet34, 21_797_672, 218, "c1372162bc2e8e86";
    "resnet50" torchvision::resnet50, 25_557_032, 320, "fe1d335c3c7786ff";
    "resnet101" torchvision::resnet101, 44_549_160, 626, "b6755676a9dbfb7d";
    "vgg11_bn" torchvision::vgg11_bn, 132_868_840, 62, "92b35921413c8911";
    "vgg16_bn" torchvision::vgg16_bn, 138_365_992, 97, "ac9d6e9725a44cb1";
    "mobilenet_v2" torchvision::mobilenet_v2, 3_504_872, 314, "2a196dc04125b8ce";
    "mobilenet_v3_small" torchvision::mobilenet_v3_small, 2_542_856, 244, "6353e9f51ee2108d";
    "densenet121" torchvision::densenet121, 7_978_856, 727, "1fe00a8008e9a530";
    "efficientnet_b0" torchvision::efficientnet_b0, 5_288_548, 360, "20940b31d23df4a1";
    "mobilenet_v3_large" torchvision::mobilenet_v3_large, 5_483_032, 312, "00e3a56a0bdeba96";
    "efficientnet_b1" torchvision::efficientnet_b1, 7_794_184, 508, "f993bbb712c5cc92";
    "efficientnet_b2" torchvision::efficientnet_b2, 9_109_994, 508, "f9bf930a0dbba0f3";
    "efficientnet_b3" torchvision::efficientnet_b3, 12_233_232, 574, "a481c8973917d669";
    "regnet_y_400mf" torchvision::regnet_y_400mf, 4_344_144, 384, "fc765d9c4b299bfd";
    "convnext_tiny" torchvision::convnext_tiny, 28_589_128, 182, "39d0e94f41cc6e25";
    "resnext50_32x4d" torchvision::resnext50_32x4d, 25_028_904, 320, "d3bdea550dd92a89";
    "wide_resnet50_2" torchvision::wide_resnet50_2, 68_883_240, 320, "6c9f24d9d9dd1e56";
    "fcn_resnet50" torchvision::fcn_resnet50, 33_459_240, 326, "07804490de24d03a";
    "deeplabv3_resnet50" torchvision::deeplabv3_resnet50, 39_890_472, 362, "29cfc315f05deff5";
    "unet" unet, 31_102_568, 118, "05cab28ff0ad1cc1";
};

fn graph(ready: &Ready, init: &Init, classes: usize) -> Graph {
    let definition = Arc::new((ready.define)(3, classes).unwrap());
    Graph::new(&definition, init, ConvBnMode::Fused).unwrap()
}

#[test]
fn names_and_shapes_are_those_of_pytorch() {
    let mut failures = Failures::new("state dicts");
    for ready in &READY {
        let model = graph(ready, &Init::new(&device().dry(), 0), 1000);
        let shape = |shape: &[usize]| shape.iter().map(usize::to_string).collect::<Vec<_>>().join("x");
        let line = |(name, state): (String, State)| match state {
            State::Parameter(parameter) => format!("{name} {}", shape(parameter.value().shape())),
            State::Buffer(buffer) => format!("{name} {}", shape(buffer.value().shape())),
            State::Counter(_) => format!("{name} "),
        };
        let mut lines: Vec<String> = model.named_state().into_iter().map(line).collect();
        lines.sort();
        let parameters: usize = model.parameters().iter().map(|(_, one)| one.value().len()).sum();
        let hash: String =
            Sha256::digest(lines.join("\n")).iter().take(8).map(|byte| format!("{byte:02x}")).collect();
        let found = (parameters, lines.len(), hash.as_str());
        let expected = (ready.parameters, ready.entries, ready.hash);
        let same = if found == expected { Ok(()) } else { Err(format!("{found:?}, not {expected:?}")) };
        failures.check(ready.name.to_owned(), same);
    }
    failures.finish();
}

/// All models are found by name, but for torchvision's `resnet50`, and every parameter of theirs learns.
#[test]
fn every_parameter_has_a_gradient() {
    let dry = device().dry();
    for ready in READY.iter().filter(|ready| ready.name != "resnet50") {
        let spec = common::spec(&ready.name.replace('_', "-"));
        assert!(spec.gives_logits(), "{spec}");
        let mut options = spec.options(ConvBnMode::Fused);
        (options.image, options.classes) = ([2, 35, 32], 7);
        let model = spec.build(&Init::new(&dry, 1), &options).unwrap();
        let x = Tensor::zeros(&dry, &[2, 2, 35, 32], DType::F32).unwrap();
        let y = model.forward(&x).unwrap();
        let shape: &[usize] = if spec.targets().are_of_pixels() { &[2, 7, 35, 32] } else { &[2, 7] };
        assert_eq!(y.shape(), shape, "{spec}");
        let gradients = y.mean().unwrap().backward().unwrap();
        for (name, parameter) in model.parameters() {
            assert!(gradients.get(&parameter.value()).is_some(), "{spec}: {name}");
        }
    }
    let names = Models::builtin();
    assert_eq!(names.names().filter(|name| name.starts_with("resnet")).count(), 5);
}

/// The standard deviations that torchvision 0.29 gives; 0 is exact.
#[test]
fn initial_values_are_spread_as_in_pytorch() {
    const STDS: [(&str, &str, f64); 40] = [
        ("resnet18", "conv1.weight", 0.02561),
        ("resnet18", "layer4.1.conv2.weight", 0.02084),
        ("resnet18", "fc.weight", 0.02555),
        ("resnet18", "fc.bias", 0.02495),
        ("mobilenet_v2", "features.2.conv.1.0.weight", 0.05056),
        ("mobilenet_v2", "features.18.0.weight", 0.03966),
        ("mobilenet_v2", "classifier.1.weight", 0.009998),
        ("densenet121", "features.denseblock1.denselayer1.conv2.weight", 0.04146),
        ("densenet121", "features.conv0.weight", 0.1168),
        ("densenet121", "classifier.weight", 0.01804),
        ("densenet121", "classifier.bias", 0.0),
        ("mobilenet_v3_small", "features.4.block.2.fc1.weight", 0.2833),
        ("mobilenet_v3_small", "features.4.block.2.fc1.bias", 0.0),
        ("mobilenet_v3_small", "features.12.0.weight", 0.0589),
        ("mobilenet_v3_small", "classifier.0.weight", 0.009998),
        ("efficientnet_b0", "features.8.0.weight", 0.03952),
        ("efficientnet_b0", "features.5.1.block.2.fc2.weight", 0.05422),
        ("efficientnet_b0", "classifier.1.weight", 0.01828),
        ("efficientnet_b0", "classifier.1.bias", 0.0),
        ("mobilenet_v3_large", "features.7.block.1.0.weight", 0.03037),
        ("mobilenet_v3_large", "features.16.0.weight", 0.04582),
        ("mobilenet_v3_large", "classifier.0.weight", 0.01),
        ("efficientnet_b3", "features.8.0.weight", 0.03612),
        ("efficientnet_b3", "classifier.1.weight", 0.01825),
        ("regnet_y_400mf", "trunk_output.block3.block3-1.f.b.0.weight", 0.03262),
        ("regnet_y_400mf", "trunk_output.block4.block4-1.f.se.fc1.bias", 0.02825),
        ("regnet_y_400mf", "fc.weight", 0.01001),
        ("regnet_y_400mf", "fc.bias", 0.0),
        ("convnext_tiny", "features.5.0.block.0.weight", 0.02012),
        ("convnext_tiny", "features.5.0.block.3.weight", 0.01998),
        ("convnext_tiny", "features.5.0.block.3.bias", 0.0),
        ("convnext_tiny", "features.5.0.layer_scale", 1e-6),
        ("convnext_tiny", "classifier.2.weight", 0.01997),
        ("resnext50_32x4d", "layer2.1.conv2.weight", 0.02948),
        ("wide_resnet50_2", "layer1.1.conv2.weight", 0.04165),
        ("fcn_resnet50", "backbone.layer3.1.conv2.weight", 0.02947),
        ("fcn_resnet50", "classifier.0.weight", 0.004252),
        ("fcn_resnet50", "classifier.4.bias", 0.02555),
        ("deeplabv3_resnet50", "classifier.0.convs.2.0.weight", 0.004251),
        ("deeplabv3_resnet50", "classifier.4.weight", 0.03606),
    ];
    let device = device();
    let spread = |initial: &Initial| {
        let values = values(&initial.to_tensor(&init(&device, DType::F32, 5)).unwrap());
        (values.iter().map(|x| x * x).sum::<f64>() / values.len() as f64).sqrt()
    };
    let check = |definition: Definition, name: &str, expected: f64| {
        let stored = definition.stored.iter().find(|stored| stored.name == name).unwrap();
        let (found, len) = (spread(&stored.values), stored.values.len() as f64);
        // The deviations are estimates from few or many elements.
        let tolerance = expected * (0.01 + 4.0 / len.sqrt());
        assert!((found - expected).abs() <= tolerance, "{name}: {found} is not {expected}");
    };
    for (model, name, expected) in STDS {
        let ready = READY.iter().find(|ready| ready.name == model).unwrap();
        check((ready.define)(3, 1000).unwrap(), name, expected);
    }
    // VGG's and the U-Net's are large, so that only their first and last ones are drawn.
    let few = [("features.0.weight", 0.06018), ("features.0.bias", 0.0), ("classifier.6.weight", 0.01)];
    few.into_iter().for_each(|(name, std)| check(torchvision::vgg11_bn(3, 10).unwrap(), name, std));
    let few = [("inc.double_conv.3.weight", 0.02409), ("up1.up.weight", 0.01276), ("up1.up.bias", 0.01302)];
    few.into_iter().for_each(|(name, std)| check(unet(3, 10).unwrap(), name, std));
}

/// The same seed gives the same values and another one others, in either type; a dry device takes none of them.
#[test]
fn initial_values_come_from_the_seed() {
    let (device, ready) = (device(), &READY[7]);
    let state = |init: &Init| {
        let state = graph(ready, init, 3).parameters();
        state.iter().map(|(_, parameter)| values(&parameter.value())).collect::<Vec<_>>()
    };
    let first = state(&init(&device, DType::F64, 1));
    assert_eq!(first, state(&init(&device, DType::F64, 1)));
    assert_ne!(first, state(&init(&device, DType::F64, 2)));
    let single = state(&init(&device, DType::F32, 1));
    let near = |(a, b): (&f64, &f64)| (a - b).abs() <= 1e-6 * a.abs();
    assert!(first.iter().flatten().zip(single.iter().flatten()).all(near));
    let dry = init(&device.dry(), DType::F32, 1);
    let before = dry.random.state();
    graph(ready, &dry, 3);
    assert_eq!(dry.random.state(), before);
}

/// A definition holds no elements of what is drawn.
#[test]
fn definitions_hold_no_weights() {
    for ready in &READY {
        let definition = (ready.define)(3, 1000).unwrap();
        let elements =
            |stored: &convoke_nn::graph::Stored| stored.values.array().map_or(0, |array| array.len());
        assert!(definition.stored.iter().map(elements).sum::<usize>() <= 2, "{}", ready.name);
    }
}

#[test]
fn builders_say_what_is_wrong_first() {
    let finish = |make: fn(&mut Builder, &Value) -> Value| {
        let scheme = Scheme { conv: Weights::Normal(0.1), conv_bias: Bias::Zero, ..Scheme::default() };
        let mut builder = Builder::new("odd", scheme);
        let x = builder.input("x", 6);
        let y = make(&mut builder, &x);
        builder.finish(&[&y])
    };
    let conv = |channels| ConvSpec::new(channels, 3);
    assert!(finish(|builder, x| builder.max_pool(x, PoolSpec::new(2))).is_ok());
    assert_refused(
        finish(|builder, x| {
            let y = builder.conv(x, "none", ConvSpec::new(0, 3));
            builder.linear(&y, "later", 0)
        }),
        &["odd", "none", "0 output channels"],
    );
    assert_refused(
        finish(|builder, x| builder.conv(x, "c", ConvSpec { groups: 4, ..ConvSpec::new(8, 3) })),
        &["\"c\"", "4 groups of 6 to 8 channels"],
    );
    assert_refused(
        finish(|builder, x| builder.conv(x, "c", ConvSpec { dilation: 0, ..ConvSpec::new(8, 3) })),
        &["\"c\"", "dilation of 0"],
    );
    assert_refused(finish(|builder, x| builder.flatten(x)), &["\"x\"", "not known"]);
    assert_refused(finish(|builder, x| builder.linear(x, "fc", 0)), &["\"fc\"", "0 outputs"]);
    assert_refused(
        finish(|builder, x| {
            let y = builder.conv(x, "c", ConvSpec::same(5, 3));
            builder.add(&y, x)
        }),
        &["5 and 6 channels"],
    );
    assert_refused(
        finish(|builder, x| {
            let y = builder.batch_norm(x, "bn", BatchNormOp::default());
            builder.batch_norm(&y, "bn", BatchNormOp::default())
        }),
        &["two \"bn.weight\""],
    );
    assert_eq!(conv(4), ConvSpec { padding: 0, ..ConvSpec::same(4, 3) });
    for ready in &READY {
        assert_refused((ready.define)(0, 10), &["0 channels"]);
        assert_refused((ready.define)(3, 0), &["has 0 output"]);
    }
}

#[test]
fn layers_of_pixels_are_those_of_operations() {
    let mut builder = Builder::new("pixels", Scheme::default());
    let x = builder.input("x", 6);
    let y = builder.layer_norm(&x, "norm", 1e-6);
    let y = builder.linear_of_pixels(&y, "fc", 4);
    let y = builder.scale(&y, "factors", 0.5);
    let dilated = ConvSpec { dilation: 2, padding: 2, ..ConvSpec::new(5, 3) };
    let convolved = builder.conv(&y, "conv", ConvSpec { stride: 2, ..dilated });
    let resized = builder.resized_to(&convolved, &x);
    let definition = Arc::new(builder.finish(&[&y, &resized]).unwrap());
    let device = device();
    let model = Graph::new(&definition, &init(&device, DType::F64, 1), ConvBnMode::Fused).unwrap();
    let parameters: Vec<(String, Tensor)> =
        model.parameters().into_iter().map(|(name, parameter)| (name, parameter.value())).collect();
    let parameter = |name: &str| &parameters.iter().find(|(own, _)| own == name).unwrap().1;
    assert_eq!(parameters.len(), 6);
    assert_eq!(parameter("factors").shape(), [4, 1, 1]);

    for shape in [[2, 6, 5, 7], [1, 6, 1, 1]] {
        let x = common::normal(&device, DType::F64, 3, &shape);
        let [found, found_resized]: [Tensor; 2] =
            model.run(std::slice::from_ref(&x)).unwrap().try_into().unwrap();
        let norm = ops::layer_norm(&x, None, None, &LayerNormOptions::channels()).unwrap();
        let weight = parameter("fc.weight").reshape(&[4, 6, 1, 1]).unwrap();
        let linear = ops::conv2d(&norm, &weight, Some(parameter("fc.bias")), &ConvOptions::default());
        let expected = linear.unwrap().scale(0.5).unwrap();
        let options = ConvOptions {
            stride: [2; 2],
            padding: Padding::all(2),
            dilation: [2; 2],
            ..ConvOptions::default()
        };
        let convolved = ops::conv2d(&expected, parameter("conv.weight"), None, &options).unwrap();
        let resize = ResizeOptions {
            to: ResizeTo::Size([shape[2], shape[3]]),
            mode: ResizeMode::Bilinear,
            coordinates: Coordinates::HalfPixel,
        };
        let resized = ops::resize2d(&convolved, &resize).unwrap();
        for (found, expected) in [(found, expected), (found_resized, resized)] {
            assert_eq!(found.shape(), expected.shape());
            let distance = difference(&values(&found), &values(&expected));
            assert!(distance < 1e-12, "{shape:?}: {distance:e}");
        }
    }
}

/// The largest difference of two tensors, over the largest element.
fn difference(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    let largest = |values: &mut dyn Iterator<Item = f64>| values.fold(0.0, |most: f64, x| most.max(x.abs()));
    largest(&mut a.iter().zip(b).map(|(a, b)| a - b)) / largest(&mut b.iter().copied())
}

/// A model whose batch norms have seen a batch, and noise of odd sizes.
fn seen(name: &str, dtype: DType) -> (Graph, Tensor) {
    let (device, ready) = (device(), READY.iter().find(|ready| ready.name == name).unwrap());
    let init = init(&device, dtype, 3);
    let model = graph(ready, &init, 4);
    let noise = |shape: &[usize]| {
        common::tensor(&device, dtype, shape, &init.random.normal(shape.iter().product(), 1.0))
    };
    inference_mode(|| model.forward(&noise(&[3, 3, 39, 50]))).unwrap();
    model.eval();
    (model, noise(&[2, 3, 39, 50]))
}

#[test]
fn folding_keeps_the_logits() {
    for name in
        ["resnet18", "mobilenet_v2", "densenet121", "efficientnet_b0", "regnet_y_400mf", "fcn_resnet50"]
    {
        let (mut model, x) = seen(name, DType::F64);
        let forward = |model: &Graph| values(&inference_mode(|| model.forward(&x)).unwrap());
        let before = forward(&model);
        assert!(model.fold().unwrap() > 10, "{name}");
        let distance = difference(&forward(&model), &before);
        assert!(distance < 1e-10, "{name}: {distance:e}");
    }
}

#[cfg(feature = "onnx")]
#[test]
fn files_of_onnx_hold_them() {
    use convoke_nn::onnx;
    for name in ["mobilenet_v3_small", "convnext_tiny", "deeplabv3_resnet50", "unet"] {
        let (model, x) = seen(name, DType::F32);
        let refused = onnx::write(model.definition(), &Default::default(), &Default::default());
        assert_refused(refused, &["weight", "drawn"]);
        let bytes =
            onnx::write(&model.to_definition().unwrap(), &Default::default(), &Default::default()).unwrap();
        let definition = Arc::new(onnx::read_bytes(&bytes, None).unwrap().definition);
        let again = Graph::new(&definition, &Init::new(x.device(), 9), ConvBnMode::Fused).unwrap();
        again.eval();
        let [y, z] = [&model, &again].map(|model| values(&inference_mode(|| model.forward(&x)).unwrap()));
        let distance = difference(&z, &y);
        assert!(distance < 1e-5, "{name}: {distance:e}");
    }
}

/// A trained model's file gives its weights to the same model, and to one for other classes; one without batch norms does not.
#[cfg(feature = "onnx")]
#[test]
fn weights_of_onnx_files_load() {
    use convoke_nn::onnx;
    let folder = tempfile::tempdir().unwrap();
    let ready = READY.iter().find(|ready| ready.name == "mobilenet_v3_small").unwrap();
    let (mut model, x) = seen(ready.name, DType::F32);
    let file = folder.path().join("model.onnx");
    let save = |model: &Graph| {
        let definition = model.to_definition().unwrap();
        onnx::save(&file, &definition, &Default::default(), &Default::default()).unwrap();
    };
    save(&model);
    let new_head = WeightOptions { new_head: true, ..WeightOptions::default() };
    let fresh = |classes: usize| graph(ready, &init(x.device(), DType::F32, 77), classes);
    let counters = fresh(4).named_state();
    let counters = counters.iter().filter(|(_, state)| matches!(state, State::Counter(_))).count();

    let same = fresh(4);
    let loaded = load_weights(&same, &file, &new_head).unwrap();
    assert_eq!(loaded.loaded, ready.entries - counters, "{loaded}");
    assert!(loaded.missing.is_empty() && loaded.unexpected.is_empty(), "{loaded}");
    same.eval();
    let logits = |model: &Graph| values(&inference_mode(|| model.forward(&x)).unwrap());
    assert_eq!(logits(&same), logits(&model));

    let other = fresh(6);
    let loaded = load_weights(&other, &file, &new_head).unwrap();
    let kept: Vec<&str> = loaded.other_shape.iter().map(|other| other.name.as_str()).collect();
    assert_eq!(kept, ["classifier.3.weight", "classifier.3.bias"], "{loaded}");
    let parameters = |model: &Graph| {
        model.parameters().into_iter().map(|(name, one)| (name, values(&one.value()))).collect::<Vec<_>>()
    };
    for (((name, found), (_, before)), (_, trained)) in
        parameters(&other).iter().zip(&parameters(&fresh(6))).zip(&parameters(&model))
    {
        assert!(found == if kept.contains(&name.as_str()) { before } else { trained }, "{name}");
    }
    let refused = load_weights(&fresh(6), &file, &WeightOptions::default());
    assert_refused(refused, &["2 in another shape", "classifier.3.weight", "`new_head`"]);

    model.fold().unwrap();
    save(&model);
    let target = fresh(4);
    let before = parameters(&target);
    let words = ["model.onnx", "not those of the model", "missing", "do_constant_folding=False"];
    assert_refused(load_weights(&target, &file, &new_head), &words);
    assert!(parameters(&target) == before, "nothing was loaded");
    std::fs::write(&file, "no model").unwrap();
    assert_refused(load_weights(&target, &file, &new_head), &["model.onnx", "not a whole ONNX file"]);
}

/// The largest difference from PyTorch's logits, over the largest of those.
fn distance(ready: &Ready, file: &Path, dtype: DType) -> std::result::Result<f64, String> {
    let device = Device::cpu().unwrap();
    let bytes = std::fs::read(file.with_file_name(format!("{}.reference.safetensors", ready.name)))
        .map_err(|error| error.to_string())?;
    let reference = SafeTensors::deserialize(&bytes).unwrap();
    let read = |name: &str| {
        let view = reference.tensor(name).unwrap();
        let numbers = view.data().chunks_exact(8).map(|bytes| f64::from_le_bytes(bytes.try_into().unwrap()));
        (view.shape().to_vec(), numbers.collect::<Vec<f64>>())
    };
    let ((shape, input), (_, logits)) = (read("input"), read("logits"));
    let model = graph(ready, &Init { dtype, ..Init::new(&device, 0) }, 10);
    let loaded = load_weights(&model, file, &WeightOptions::default()).map_err(|error| error.to_string())?;
    if loaded.loaded != ready.entries {
        return Err(format!("{} entries loaded, not {}", loaded.loaded, ready.entries));
    }
    model.eval();
    let x = common::tensor(&device, dtype, &shape, &input);
    let y = inference_mode(|| model.forward(&x)).map_err(|error| error.to_string())?;
    Ok(difference(&values(&y), &logits))
}

#[test]
fn logits_are_those_of_pytorch() {
    let Some(folder) = std::env::var_os("CONVOKE_READY_MODELS") else {
        println!("CONVOKE_READY_MODELS names no folder of tools/make_ready_models.py");
        return;
    };
    let mut failures = Failures::new("logits");
    for ready in &READY {
        for (extension, dtype, most) in
            [("safetensors", DType::F32, 1e-4), ("safetensors", DType::F64, 1e-10), ("pth", DType::F32, 1e-4)]
        {
            let file = Path::new(&folder).join(format!("{}.{extension}", ready.name));
            if extension == "pth" && !file.exists() {
                continue;
            }
            let outcome = distance(ready, &file, dtype).and_then(|distance| {
                println!("{} {extension} {dtype:?}: {distance:.1e}", ready.name);
                if distance <= most { Ok(()) } else { Err(format!("{distance:e}")) }
            });
            failures.check(format!("{} {extension} {dtype:?}", ready.name), outcome);
        }
    }
    failures.finish();
}

/// Writes the ready models for `tools/check_onnx.py` into the folder that `CONVOKE_ONNX_WRITE` names, as they are and folded, with
/// inputs and outputs of one image and of seven. The largest are left out, unless `CONVOKE_ONNX_WRITE_ALL` is set.
#[test]
#[cfg(feature = "onnx")]
fn models_are_written_for_another_runtime() {
    let Ok(folder) = std::env::var("CONVOKE_ONNX_WRITE") else {
        println!("CONVOKE_ONNX_WRITE is not set: nothing is written");
        return;
    };
    let device = device();
    let all = std::env::var_os("CONVOKE_ONNX_WRITE_ALL").is_some();
    for ready in READY.iter().filter(|ready| all || ready.parameters < 12_000_000) {
        let mut model = graph(ready, &init(&device, DType::F32, 1), 10);
        model.eval();
        for kind in ["kept", "folded"] {
            if kind == "folded" {
                model.fold().unwrap();
            }
            let size = if ready.name.starts_with("vgg") { 224 } else { 64 };
            let (definition, _) = model.to_definition_at(&[vec![1, 3, size, size]]).unwrap();
            let to = Path::new(&folder).join(format!("{}-{kind}.onnx", ready.name));
            common::write_for_another_runtime(&to, &definition, (&model, &[3, size, size]));
        }
    }
}
