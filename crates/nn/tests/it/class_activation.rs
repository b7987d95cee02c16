//! Class activation maps: against the formula, against gradients of a graph that begins with the maps, and what has none.

use std::collections::HashMap;
use std::sync::Arc;

use convoke_autograd::ops::{ResizeOptions, ResizeTo, resize2d};
use convoke_autograd::{BackwardOptions, DType, MemoryFormat, Tensor, inference_mode, no_grad};
use convoke_nn::graph::{
    Along, Arithmetic, Array, Conv, Gemm, Graph, Op, Pads, Pool, Reduce, ReduceKind, Stored, Transpose,
    record,
};
use convoke_nn::models::Models;
use convoke_nn::modules::ConvBnMode;
use convoke_nn::{Forward, Init, Module, ModuleExt, Part, State};

use crate::graph::{Maker, close, device, images, residual};

const IMAGES: [usize; 4] = [3, 3, 12, 16];
const CLASSES: [usize; 3] = [4, 0, 2];

fn conv(made: &mut Maker, x: &str, name: &str, [from, to]: [usize; 2]) -> String {
    let weight = made.store(&format!("{name}.weight"), &[to, from, 3, 3]);
    let bias = made.store(&format!("{name}.bias"), &[to]);
    let pads = Pads::Explicit(vec![1; 4]);
    let conv = Op::Conv(Conv { strides: vec![2, 2], pads, dilations: vec![1, 1], group: 1 });
    let convolved = made.node(conv, &[x, &weight, &bias], &format!("{name} convolved"));
    made.node(Op::Relu, &[&convolved], name)
}

fn linear(made: &mut Maker, x: &str, name: &str, [from, to]: [usize; 2]) -> String {
    let weight = made.store(&format!("{name}.weight"), &[to, from]);
    let bias = made.store(&format!("{name}.bias"), &[to]);
    made.node(Op::Gemm(Gemm { trans_b: true, ..Gemm::default() }), &[x, &weight, &bias], name)
}

fn flatten(made: &mut Maker, x: &str) -> String {
    made.node(Op::Flatten(Along { axis: 1 }), &[x], &format!("{x} flat"))
}

fn max_pool(made: &mut Maker, x: &str, size: usize) -> String {
    let (kernel, strides) = (vec![size; 2], vec![size; 2]);
    let (pads, dilations) = (Pads::Valid, vec![]);
    let pool = Pool { kernel, strides, pads, dilations, ceil_mode: false, count_include_pad: false };
    made.node(Op::MaxPool(pool), &[x], &format!("{x} pooled"))
}

/// A graph with another output.
fn with_output(graph: &Graph, output: &str) -> Graph {
    let mut definition = graph.definition().clone();
    definition.outputs = vec![output.into()];
    let init = Init { dtype: DType::F64, ..Init::new(&device(), 0) };
    let graph = Graph::new(&Arc::new(definition), &init, ConvBnMode::Fused).unwrap();
    graph.eval();
    graph
}

fn list(tensor: &Tensor) -> Vec<f64> {
    tensor.detach().to_format(MemoryFormat::Contiguous).unwrap().to_vec().unwrap()
}

/// Images' sums over the channels of weights times maps, less what is negative, in the size of the images. `weights` are N x K.
fn evidence(maps: &Tensor, weights: &[f64], [height, width]: [usize; 2]) -> Vec<f64> {
    let [batch, channels, rows, columns] = *maps.shape() else { panic!("{maps:?} are no maps") };
    let (places, values) = (rows * columns, list(maps));
    let mut sums = vec![0.0; batch * places];
    for (index, sum) in sums.iter_mut().enumerate() {
        let (image, place) = (index / places, index % places);
        let of = |channel: usize| {
            weights[image * channels + channel] * values[(image * channels + channel) * places + place]
        };
        *sum = (0..channels).map(of).sum::<f64>().max(0.0);
    }
    let sums = Tensor::from_slice(&device(), &[batch, 1, rows, columns], &sums).unwrap();
    let size = ResizeOptions::bilinear(ResizeTo::Size([height, width]), false);
    list(&resize2d(&sums, &size).unwrap())
}

fn check(graph: &Graph, x: &Tensor, classes: &[usize], expected: &[f64]) {
    let found = graph.class_activation(x, classes).unwrap();
    assert_eq!(found.shape(), [x.shape()[0], x.shape()[2], x.shape()[3]]);
    assert!(!found.requires_grad());
    assert!(expected.iter().any(|evidence| *evidence > 0.0), "the case tells nothing");
    close(&list(&found), expected, "maps");
}

#[test]
fn of_a_mean_and_a_linear_layer_they_are_the_weighted_sum_of_the_maps() {
    let mut made = Maker::new(&IMAGES);
    let maps = conv(&mut made, "x", "maps", [3, 6]);
    let mean = made.node(Op::GlobalAveragePool, &[&maps], "mean");
    let flat = flatten(&mut made, &mean);
    let logits = linear(&mut made, &flat, "fc", [6, 5]);
    let graph = made.graph(&logits, ConvBnMode::Fused);
    assert_eq!(graph.class_activation_size([3, 12, 16]).unwrap(), [6, 8]);
    let x = images(&IMAGES);
    let maps = no_grad(|| with_output(&graph, "maps").forward(&x)).unwrap();
    let parameters: HashMap<_, _> = graph.parameters().into_iter().collect();
    let weight = list(&parameters["fc.weight"].value());
    let of_classes = CLASSES.iter().flat_map(|class| &weight[6 * class..6 * (class + 1)]);
    let weights: Vec<f64> = of_classes.map(|weight| weight / 48.0).collect();
    check(&graph, &x, &CLASSES, &evidence(&maps, &weights, [12, 16]));
}

/// The maps by the gradients of a graph of its own, from the maps to the logits.
fn check_against(graph: &Graph, tail: &Graph, maps: &str) {
    let x = images(&IMAGES);
    let maps = no_grad(|| with_output(graph, maps).forward(&x)).unwrap().with_grad();
    let logits = tail.forward(&maps).unwrap();
    let mut upstream = vec![0.0; logits.len()];
    CLASSES.iter().enumerate().for_each(|(image, class)| upstream[5 * image + class] = 1.0);
    let upstream = Some(Tensor::from_slice(&device(), logits.shape(), &upstream).unwrap());
    let options = BackwardOptions { upstream, ..BackwardOptions::default() };
    let gradient = logits.backward_with(options).unwrap().take(&maps).unwrap();
    let weights = list(&gradient.detach().mean_dims(&[2, 3], false).unwrap());
    let size = [x.shape()[2], x.shape()[3]];
    check(graph, &x, &CLASSES, &evidence(&maps.detach(), &weights, size));
}

#[test]
fn of_several_layers_behind_the_maps_their_gradients_count() {
    let tail = |made: &mut Maker, maps: &str| {
        let flat = flatten(made, maps);
        let hidden = linear(made, &flat, "fc1", [6 * 3 * 4, 7]);
        let hidden = made.node(Op::Relu, &[&hidden], "hidden");
        linear(made, &hidden, "fc2", [7, 5])
    };
    let mut made = Maker::new(&IMAGES);
    let maps = conv(&mut made, "x", "maps", [3, 6]);
    let pooled = max_pool(&mut made, &maps, 2);
    let logits = tail(&mut made, &pooled);
    let graph = made.graph(&logits, ConvBnMode::Fused);
    let mut made = Maker::new(&[3, 6, 3, 4]);
    let logits = tail(&mut made, "x");
    check_against(&graph, &made.graph(&logits, ConvBnMode::Fused), &pooled);
}

#[test]
fn convolutions_of_one_place_are_behind_the_maps() {
    let tail = |made: &mut Maker, maps: &str| {
        let mean = made.node(Op::GlobalAveragePool, &[maps], "mean");
        let head = made.conv_bn(&mean, "head", [6, 7]);
        let head = made.node(Op::Relu, &[&head], "head relu");
        let flat = flatten(made, &head);
        linear(made, &flat, "fc", [7, 5])
    };
    let mut made = Maker::new(&IMAGES);
    let maps = conv(&mut made, "x", "maps", [3, 6]);
    let logits = tail(&mut made, &maps);
    let graph = made.graph(&logits, ConvBnMode::Fused);
    let mut made = Maker::new(&[3, 6, 6, 8]);
    let logits = tail(&mut made, "x");
    let tail = made.graph(&logits, ConvBnMode::Separate);
    tail.eval();
    check_against(&graph, &tail, "maps");
}

#[test]
fn blocks_that_run_as_one_end_with_the_maps() {
    // The block would run its pool, which leaves one place.
    let mut made = Maker::new(&[3, 3, 8, 8]);
    let maps = made.conv_bn("x", "maps", [3, 6]);
    let maps = made.node(Op::Relu, &[&maps], "maps relu");
    let pooled = max_pool(&mut made, &maps, 8);
    let flat = flatten(&mut made, &pooled);
    let logits = linear(&mut made, &flat, "fc", [6, 5]);
    let graph = made.graph(&logits, ConvBnMode::Fused);
    let x = images(&[3, 3, 8, 8]);
    let maps = no_grad(|| with_output(&graph, "maps relu").forward(&x)).unwrap();
    let parameters: HashMap<_, _> = graph.parameters().into_iter().collect();
    let weight = list(&parameters["fc.weight"].value());
    let of_classes = CLASSES.iter().flat_map(|class| &weight[6 * class..6 * (class + 1)]);
    let weights: Vec<f64> = of_classes.map(|weight| weight / 64.0).collect();
    check(&graph, &x, &CLASSES, &evidence(&maps, &weights, [8, 8]));
}

#[test]
fn a_model_is_as_before() {
    let (graph, x) = (residual(ConvBnMode::Fused), images(&[2, 3, 8, 8]));
    let loss = graph.forward(&x).unwrap().sum().unwrap();
    let gradients = loss.backward().unwrap();
    let state = |graph: &Graph| -> Vec<(String, Vec<f64>)> {
        let tensor = |(name, state)| match state {
            State::Parameter(parameter) => (name, list(&parameter.value())),
            State::Buffer(buffer) => (name, list(&buffer.value())),
            State::Counter(counter) => (name, vec![counter.value() as f64]),
        };
        graph.named_state().into_iter().map(tensor).collect()
    };
    let before = state(&graph);
    let maps = no_grad(|| with_output(&graph, "alone relu").forward(&x)).unwrap();
    let found: Vec<Vec<f64>> =
        (0..5).map(|class| list(&graph.class_activation(&x, &[class; 2]).unwrap())).collect();
    assert_eq!(state(&graph), before);
    graph.visit(&mut |path, part| {
        if let Part::Training(mode) = part {
            assert!(mode.is_training(), "{path}");
        }
    });
    // Gradients from before still find their parameters.
    assert!(
        graph.parameters().iter().all(|(_, parameter)| gradients.get(&parameter.value()).is_some()),
        "leaves changed"
    );
    // Of a graph that has trained, statistics differ from the initial ones: a new graph has these.
    let parameters: HashMap<_, _> = graph.parameters().into_iter().collect();
    let weight = list(&parameters["fc.weight"].value());
    let places = (maps.shape()[2] * maps.shape()[3]) as f64;
    let new = residual(ConvBnMode::Separate);
    let mut told = 0;
    for (class, found) in found.iter().enumerate() {
        let weights = weight[4 * class..4 * (class + 1)].iter().map(|weight| weight / places);
        let expected = evidence(&maps, &weights.clone().chain(weights).collect::<Vec<_>>(), [8, 8]);
        if expected.iter().any(|evidence| *evidence > 0.0) {
            told += 1;
            check(&new, &x, &[class; 2], &expected);
            assert_ne!(found, &expected);
        }
    }
    assert!(told > 0, "the case tells nothing");
}

#[test]
fn a_softmax_at_the_end_does_not_count() {
    let made = |end: Option<Op>| {
        let mut made = Maker::new(&IMAGES);
        let maps = conv(&mut made, "x", "maps", [3, 6]);
        let mean = made.node(Op::GlobalAveragePool, &[&maps], "mean");
        let flat = flatten(&mut made, &mean);
        let logits = linear(&mut made, &flat, "fc", [6, 5]);
        let output = end.map(|op| made.node(op, &[&logits], "end"));
        made.graph(output.as_deref().unwrap_or(&logits), ConvBnMode::Fused)
    };
    let x = images(&IMAGES);
    let expected = list(&made(None).class_activation(&x, &CLASSES).unwrap());
    for end in [Op::Softmax(Along { axis: 1 }), Op::LogSoftmax(Along { axis: -1 })] {
        check(&made(Some(end)), &x, &CLASSES, &expected);
    }
}

#[test]
fn other_tensors_of_four_dimensions_are_no_maps() {
    // Channels come last before the mean.
    let mut made = Maker::new(&IMAGES);
    let maps = conv(&mut made, "x", "maps", [3, 6]);
    let turned = made.node(Op::Transpose(Transpose { order: vec![0, 2, 3, 1] }), &[&maps], "turned");
    let turned = made.node(Op::Arithmetic(Arithmetic::Add), &[&turned, &turned], "twice");
    let axes = Array::integers([1, 2]).into();
    made.0.stored.push(Stored { name: "axes".into(), values: axes, trained: None });
    let mean = Reduce { kind: ReduceKind::Mean, keep_dims: false, no_axes_is_identity: false };
    let mean = made.node(Op::Reduce(mean), &[&turned, "axes"], "mean");
    let logits = linear(&mut made, &mean, "fc", [6, 5]);
    let graph = made.graph(&logits, ConvBnMode::Fused);
    assert_eq!(graph.class_activation_size([3, 12, 16]).unwrap(), [6, 8]);
    let tail = {
        let mut made = Maker::new(&[3, 6, 6, 8]);
        let mean = made.node(Op::GlobalAveragePool, &["x"], "mean");
        let mean = made.node(Op::Arithmetic(Arithmetic::Add), &[&mean, &mean], "twice");
        let flat = flatten(&mut made, &mean);
        let logits = linear(&mut made, &flat, "fc", [6, 5]);
        made.graph(&logits, ConvBnMode::Fused)
    };
    check_against(&graph, &tail, "maps");
}

#[test]
fn the_built_in_classifiers_have_maps() {
    let models = Models::builtin();
    for (name, image, size) in [
        ("mnist-cnn", [1, 28, 28], [12, 12]),
        ("resnet20", [3, 32, 32], [8, 8]),
        ("resnet18", [3, 96, 64], [3, 2]),
        ("mobilenet-v2", [3, 96, 64], [3, 2]),
        ("mobilenet-v3-small", [3, 96, 64], [3, 2]),
        ("densenet121", [3, 96, 64], [3, 2]),
        ("efficientnet-b0", [3, 96, 64], [3, 2]),
        // What its last block gives has one place.
        ("resnet18", [3, 32, 32], [2, 2]),
    ] {
        let spec = models.get(name).unwrap();
        let init = Init::new(&device(), 1);
        let mut options = spec.options(ConvBnMode::Fused);
        (options.image, options.classes) = (image, 4);
        let mut model = spec.build(&init, &options).unwrap();
        model.eval();
        let graph = |model: &dyn Module| {
            let definition = record(model, &image).unwrap();
            Graph::new(&Arc::new(definition), &init, ConvBnMode::Fused).unwrap()
        };
        let [channels, height, width] = image;
        let x = init.normal(&[2, channels, height, width], 1.0).unwrap().value().detach();
        let whole = graph(model.as_ref());
        assert_eq!(whole.class_activation_size(image).unwrap(), size, "{name}");
        let found = list_f32(&whole.class_activation(&x, &[3, 1]).unwrap());
        // With batch norms joined to convolutions they are the same.
        model.fold().unwrap();
        let folded = list_f32(&graph(model.as_ref()).class_activation(&x, &[3, 1]).unwrap());
        let most = found.iter().fold(0.0_f32, |most, evidence| most.max(*evidence));
        for (found, folded) in found.iter().zip(&folded) {
            assert!((found - folded).abs() <= 1e-3 * most, "{name}: {found} {folded} of {most}");
        }
    }
}

fn list_f32(tensor: &Tensor) -> Vec<f32> {
    tensor.to_vec().unwrap()
}

#[test]
fn what_has_no_maps_is_refused() {
    let refused = |graph: &Graph, x: &Tensor, classes: &[usize], needle: &str| {
        let error = graph.class_activation(x, classes).unwrap_err().to_string();
        assert!(error.contains("class_activation") && error.contains(needle), "{error}");
    };
    let x = images(&IMAGES);
    // Only functions of each element and a linear layer.
    let mut made = Maker::new(&IMAGES);
    let squares = made.node(Op::Relu, &["x"], "positive");
    let flat = flatten(&mut made, &squares);
    let logits = linear(&mut made, &flat, "fc", [3 * 12 * 16, 5]);
    let graph = made.graph(&logits, ConvBnMode::Fused);
    refused(&graph, &x, &CLASSES, "no maps");
    assert!(graph.class_activation_size([3, 12, 16]).unwrap_err().to_string().contains("no maps"));
    // A class for each place.
    let mut made = Maker::new(&IMAGES);
    let maps = conv(&mut made, "x", "maps", [3, 5]);
    let graph = made.graph(&maps, ConvBnMode::Fused);
    refused(&graph, &x, &CLASSES, "is not one score for each class");
    // A score that has no gradient.
    let mut made = Maker::new(&IMAGES);
    let maps = conv(&mut made, "x", "maps", [3, 5]);
    let pooled = made.node(Op::GlobalAveragePool, &[&maps], "mean");
    let signs = made.node(Op::Not, &[&pooled], "signs");
    let flat = flatten(&mut made, &signs);
    let graph = made.graph(&flat, ConvBnMode::Fused);
    refused(&graph, &x, &CLASSES, "no gradient");
    // Classes that do not fit, images that do not, and no gradients at all.
    let mut made = Maker::new(&IMAGES);
    let maps = conv(&mut made, "x", "maps", [3, 5]);
    let pooled = made.node(Op::GlobalAveragePool, &[&maps], "mean");
    let graph = made.graph(&pooled, ConvBnMode::Fused);
    refused(&graph, &x, &[0, 1], "2 classes are given for 3 images");
    refused(&graph, &x, &[0, 1, 5], "there is no class 5: the model has 5");
    refused(&graph, &x.reshape(&[3, 3, 192]).unwrap(), &CLASSES, "N x C x H x W");
    inference_mode(|| refused(&graph, &x, &CLASSES, "inference_mode"));
    assert_eq!(graph.class_activation(&x, &CLASSES).unwrap().shape(), [3, 12, 16]);
}
