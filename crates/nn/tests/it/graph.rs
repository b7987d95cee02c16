//! Models as data: how they are fused, folded, planned, changed and refused.

use std::sync::{Arc, LazyLock};

use convoke_autograd::ops::{Coordinates, Pointwise, ResizeMode};
use convoke_autograd::{DType, Device, MemoryFormat, Tensor};
use convoke_nn::graph::{
    Along, Arithmetic, Array, Aspect, BatchNormOp, Conv, Definition, Dimension, Gemm, Graph, Input,
    Interpolation, Kind, Node, Op, Pads, Pool, Reduce, ReduceKind, Reshape, Resize, Shape, Stored, Transpose,
};
use convoke_nn::models::ModelSpec;
use convoke_nn::modules::{ConvBnMode, FusedBlock, Keep};
use convoke_nn::{Forward, Init, Module, ModuleExt, Part};
use convoke_testkit::formula_fill;

/// One device for all tensors.
pub(crate) fn device() -> Device {
    static DEVICE: LazyLock<Device> = LazyLock::new(|| Device::cpu().unwrap());
    DEVICE.clone()
}

pub(crate) fn values(tag: u32, len: usize) -> Vec<f64> {
    formula_fill(tag, len, 1.0).into_iter().map(f64::from).collect()
}

/// A definition that grows node by node.
pub(crate) struct Maker(pub(crate) Definition);

impl Maker {
    pub(crate) fn new(input: &[usize]) -> Maker {
        let sizes = input[1..].iter().map(|&size| Dimension::Fixed(size));
        let shape = [Dimension::Open("N".into())].into_iter().chain(sizes).collect();
        let inputs = vec![Input { name: "x".into(), kind: Kind::F32, shape: Some(shape) }];
        Maker(Definition { name: "made".into(), inputs, ..Definition::default() })
    }

    pub(crate) fn store(&mut self, name: &str, shape: &[usize]) -> String {
        let len: usize = shape.iter().product();
        let numbers = values((name.len() * 131 + len) as u32, len).into_iter().map(|x| x as f32);
        // Variances are above 0.
        let numbers = numbers.map(|x| if name.ends_with("var") { x.abs() + 0.5 } else { x });
        let values = Array::floats(numbers).reshaped(shape).unwrap().into();
        self.0.stored.push(Stored { name: name.into(), values, trained: None });
        name.into()
    }

    pub(crate) fn node(&mut self, op: Op, inputs: &[&str], output: &str) -> String {
        let inputs = inputs.iter().map(|&name| name.to_owned()).collect();
        self.0.nodes.push(Node { name: format!("make {output}"), op, inputs, outputs: vec![output.into()] });
        output.into()
    }

    pub(crate) fn conv_bn(&mut self, x: &str, name: &str, [from, to]: [usize; 2]) -> String {
        let weight = self.store(&format!("{name}.weight"), &[to, from, 3, 3]);
        let pads = Pads::Explicit(vec![1; 4]);
        let conv = Op::Conv(Conv { strides: vec![1, 1], pads, dilations: vec![1, 1], group: 1 });
        let convolved = self.node(conv, &[x, &weight], &format!("{name} convolved"));
        self.bn(&convolved, &format!("{name}_bn"), to)
    }

    fn bn(&mut self, x: &str, name: &str, channels: usize) -> String {
        let parts = ["weight", "bias", "running_mean", "running_var"]
            .map(|part| self.store(&format!("{name}.{part}"), &[channels]));
        let [weight, bias, mean, var] = &parts;
        let op = Op::BatchNorm(BatchNormOp::default());
        self.node(op, &[x, weight, bias, mean, var], name)
    }

    pub(crate) fn graph(mut self, output: &str, mode: ConvBnMode) -> Graph {
        self.0.outputs = vec![output.into()];
        let init = Init { dtype: DType::F64, ..Init::new(&device(), 0) };
        Graph::new(&Arc::new(self.0), &init, mode).unwrap()
    }
}

/// A residual network with everything that fuses: pool after a block, addition, activations, a batch norm that is alone.
pub(crate) fn residual(mode: ConvBnMode) -> Graph {
    let mut made = Maker::new(&[2, 3, 8, 8]);
    let stem = made.conv_bn("x", "stem", [3, 4]);
    let stem = made.node(Op::Relu, &[&stem], "stem relu");
    let pool = Pool {
        kernel: vec![2, 2],
        strides: vec![2, 2],
        pads: Pads::Valid,
        dilations: vec![],
        ceil_mode: false,
        count_include_pad: false,
    };
    let stem = made.node(Op::MaxPool(pool), &[&stem], "pooled");
    let a = made.conv_bn(&stem, "a", [4, 4]);
    let a = made.node(Op::Relu, &[&a], "a relu");
    let b = made.conv_bn(&a, "b", [4, 4]);
    let sum = made.node(Op::Arithmetic(Arithmetic::Add), &[&b, &stem], "sum");
    let sum = made.node(Op::Relu, &[&sum], "sum relu");
    // Two branches are added: the block of one takes the other as its residual.
    let c = made.conv_bn(&sum, "c", [4, 4]);
    let d = made.conv_bn(&sum, "d", [4, 4]);
    let both = made.node(Op::Arithmetic(Arithmetic::Add), &[&c, &d], "both");
    let more = made.node(Op::Arithmetic(Arithmetic::Add), &[&both, &sum], "more");
    let alone = made.bn(&more, "alone", 4);
    let alone = made.node(Op::Relu, &[&alone], "alone relu");
    let mean = made.node(Op::GlobalAveragePool, &[&alone], "mean");
    let flat = made.node(Op::Flatten(Along { axis: 1 }), &[&mean], "flat");
    let weight = made.store("fc.weight", &[5, 4]);
    let bias = made.store("fc.bias", &[5]);
    let gemm = Gemm { trans_b: true, ..Gemm::default() };
    let logits = made.node(Op::Gemm(gemm), &[&flat, &weight, &bias], "logits");
    made.graph(&logits, mode)
}

pub(crate) fn images(shape: &[usize]) -> Tensor {
    let elements = values(7, shape.iter().product());
    let tensor = Tensor::from_slice(&device(), shape, &elements).unwrap();
    tensor.to_format(MemoryFormat::ChannelsLast).unwrap()
}

/// Output, gradients by name, and running statistics of a training step.
pub(crate) fn step(graph: &Graph, x: &Tensor) -> (Vec<f64>, Vec<(String, Vec<f64>)>) {
    let leaf = x.with_grad();
    let output = graph.forward(&leaf).unwrap();
    let upstream = Tensor::from_slice(x.device(), output.shape(), &values(3, output.len())).unwrap();
    let gradients = output.mul(&upstream).unwrap().sum().unwrap().backward().unwrap();
    let mut found = vec![("x".to_owned(), gradients.get(&leaf).unwrap().to_vec().unwrap())];
    for (name, parameter) in graph.parameters() {
        found.push((name, gradients.get(&parameter.value()).unwrap().to_vec().unwrap()));
    }
    for (name, state) in graph.named_state() {
        if let convoke_nn::State::Buffer(buffer) = state {
            found.push((name, buffer.value().to_vec().unwrap()));
        }
    }
    (output.to_vec().unwrap(), found)
}

pub(crate) fn close(found: &[f64], expected: &[f64], what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (found, expected) in found.iter().zip(expected) {
        assert!(
            (found - expected).abs() <= 1e-9 * (1.0 + expected.abs()),
            "{what}: {found}, expected {expected}"
        );
    }
}

#[test]
fn fused_and_separate_layers_compute_the_same_with_every_keep() {
    let x = images(&[2, 3, 8, 8]);
    let (output, expected) = step(&residual(ConvBnMode::Separate), &x);
    assert!(output.iter().all(|value| value.is_finite()));
    for keep in [Keep::Store, Keep::Renormalize, Keep::RecomputeInTiles] {
        let graph = residual(ConvBnMode::Fused);
        let mut blocks = 0;
        graph.visit(&mut |_, part| {
            if let Part::Block(block) = part {
                block.set_keep(keep);
                blocks += 1;
            }
        });
        assert_eq!(blocks, 5);
        let (found, gradients) = step(&graph, &x);
        close(&found, &output, "output");
        assert_eq!(gradients.len(), expected.len());
        for ((name, found), (other, expected)) in gradients.iter().zip(&expected) {
            assert_eq!(name, other);
            close(found, expected, name);
        }
    }
}

#[test]
fn steps_are_joined_where_nobody_else_reads() {
    let description = residual(ConvBnMode::Fused).describe(&[vec![2, 3, 8, 8]]).unwrap();
    let steps: Vec<&str> = description.steps.iter().map(|step| step.operation.as_str()).collect();
    assert_eq!(
        steps,
        [
            "Conv+BatchNormalization+Relu+MaxPool",
            "Conv+BatchNormalization+Relu",
            "Conv+BatchNormalization+Add+Relu",
            "Conv+BatchNormalization",
            "Conv+BatchNormalization+Add",
            "Add",
            "BatchNormalization+Relu",
            "GlobalAveragePool",
            "Flatten",
            "Gemm"
        ]
    );
    assert!(description.alone.is_empty());
    assert_eq!(description.steps[0].flops, 2 * 2 * 4 * 64 * 27);
    assert_eq!(description.steps[0].parameters, 4 * 27 + 8);

    // A convolution whose output somebody else reads stays alone.
    let mut made = Maker::new(&[2, 3, 8, 8]);
    let y = made.conv_bn("x", "c", [3, 3]);
    let sum = made.node(Op::Arithmetic(Arithmetic::Add), &[&y, "c convolved"], "sum");
    let graph = made.graph(&sum, ConvBnMode::Fused);
    let description = graph.describe(&[vec![2, 3, 8, 8]]).unwrap();
    assert_eq!(description.alone, [("make c convolved".to_owned(), "its output has several readers")]);
}

#[test]
fn a_shared_batch_norm_changes_its_statistics_in_order() {
    // The activation behind the first use comes after the second use, so it is not joined to the first.
    for convolved in [false, true] {
        let mut made = Maker::new(&[2, 3, 8, 8]);
        let square = made.node(Op::Arithmetic(Arithmetic::Mul), &["x", "x"], "square");
        let first = if convolved { made.conv_bn("x", "a", [3, 3]) } else { made.bn("x", "a_bn", 3) };
        let parts = ["a_bn.weight", "a_bn.bias", "a_bn.running_mean", "a_bn.running_var"];
        let op = Op::BatchNorm(BatchNormOp::default());
        let second = made.node(op, &[&square, parts[0], parts[1], parts[2], parts[3]], "second");
        let first = made.node(Op::Relu, &[&first], "relu");
        let sum = made.node(Op::Arithmetic(Arithmetic::Add), &[&first, &second], "sum");
        let graph = made.graph(&sum, ConvBnMode::Fused);
        let description = graph.describe(&[vec![2, 3, 8, 8]]).unwrap();
        assert!(description.steps.iter().any(|step| step.operation == "Relu"));
        if convolved {
            continue;
        }
        let mean = |x: &Tensor| x.mean_dims(&[0, 2, 3], false).unwrap().to_vec().unwrap();
        let running = |graph: &Graph| {
            let state = graph.named_state();
            let (_, state) = state.into_iter().find(|(name, _)| name == parts[2]).unwrap();
            let convoke_nn::State::Buffer(buffer) = state else { panic!("a running mean is a buffer") };
            buffer.value().to_vec().unwrap()
        };
        let (x, before) = (images(&[2, 3, 8, 8]), running(&graph));
        graph.forward(&x).unwrap();
        let momentum = BatchNormOp::default().momentum;
        let blend = |old: &[f64], new: &[f64]| {
            old.iter().zip(new).map(|(old, new)| momentum * old + (1.0 - momentum) * new).collect::<Vec<_>>()
        };
        let expected = blend(&blend(&before, &mean(&x)), &mean(&x.mul(&x).unwrap()));
        close(&running(&graph), &expected, "running mean");
    }
}

/// Blocks that end in each activation, written as one operation or as several.
fn activations(mode: ConvBnMode) -> Graph {
    let mut made = Maker::new(&[2, 3, 8, 8]);
    for (name, number) in [("min", 0.0), ("max", 6.0), ("no max", f32::INFINITY)] {
        made.0.stored.push(Stored {
            name: name.into(),
            values: Array::floats([number]).reshaped(&[]).unwrap().into(),
            trained: None,
        });
    }
    let mul = Op::Arithmetic(Arithmetic::Mul);
    let sigmoid = Op::Pointwise(Pointwise::Sigmoid);
    let y = made.conv_bn("x", "a", [3, 4]);
    let a = made.node(Op::Clip, &[&y, "min", "max"], "clip");
    let y = made.conv_bn(&a, "b", [4, 4]);
    let b = made.node(Op::Clip, &[&y, "min", "no max"], "clip from below");
    let y = made.conv_bn(&b, "c", [4, 4]);
    let c = made.node(Op::Pointwise(Pointwise::HardSwish), &[&y], "hard-swish");
    let y = made.conv_bn(&c, "d", [4, 4]);
    let gate = made.node(sigmoid.clone(), &[&y], "gate");
    let d = made.node(mul.clone(), &[&y, &gate], "swish in two");
    let y = made.conv_bn(&d, "e", [4, 4]);
    let gate = made.node(Op::Pointwise(Pointwise::HARD_SIGMOID), &[&y], "hard gate");
    let e = made.node(mul.clone(), &[&gate, &y], "hard-swish in two");
    // SiLU's gradient needs its input, so the sum is where the block ends.
    let y = made.conv_bn(&e, "f", [4, 4]);
    let sum = made.node(Op::Arithmetic(Arithmetic::Add), &[&y, &e], "sum");
    let f = made.node(Op::Pointwise(Pointwise::Silu), &[&sum], "swish of the sum");
    // Somebody else reads the gate.
    let y = made.conv_bn(&f, "g", [4, 4]);
    let gate = made.node(sigmoid, &[&y], "gate of two");
    let g = made.node(mul, &[&y, &gate], "swish");
    let both = made.node(Op::Arithmetic(Arithmetic::Add), &[&g, &gate], "both");
    made.graph(&both, mode)
}

#[test]
fn blocks_end_in_activations() {
    let description = activations(ConvBnMode::Fused).describe(&[vec![2, 3, 8, 8]]).unwrap();
    let steps: Vec<&str> = description.steps.iter().map(|step| step.operation.as_str()).collect();
    let block = "Conv+BatchNormalization";
    let blocks =
        ["+Clip", "+Clip", "+HardSwish", "+Swish", "+HardSwish", "+Add"].map(|end| format!("{block}{end}"));
    let rest = ["Swish", block, "Sigmoid", "Mul", "Add"].map(str::to_owned);
    assert_eq!(steps, [&blocks[..], &rest[..]].concat());

    let x = images(&[2, 3, 8, 8]);
    let (output, expected) = step(&activations(ConvBnMode::Separate), &x);
    let (found, gradients) = step(&activations(ConvBnMode::Fused), &x);
    close(&found, &output, "output");
    for ((name, found), (_, expected)) in gradients.iter().zip(&expected) {
        close(found, expected, name);
    }
}

/// A reshape, a transpose and a reshape, after which somebody may also read what is between them.
fn split_and_turned(parts: [i64; 5], order: [isize; 5], joined: [i64; 4], read_between: bool) -> Graph {
    let mut made = Maker::new(&[2, 6, 3, 5]);
    let mut sizes = |name: &str, sizes: &[i64]| {
        let values = Array::integers(sizes.iter().copied()).into();
        made.0.stored.push(Stored { name: name.into(), values, trained: None });
    };
    sizes("parts", &parts);
    sizes("joined", &joined);
    let reshape = Op::Reshape(Reshape { allow_zero: false });
    let x = made.bn("x", "bn", 6);
    let split = made.node(reshape.clone(), &[&x, "parts"], "split");
    let turned = made.node(Op::Transpose(Transpose { order: order.to_vec() }), &[&split], "turned");
    let output = made.node(reshape.clone(), &[&turned, "joined"], "together");
    if !read_between {
        return made.graph(&output, ConvBnMode::Fused);
    }
    let again = made.node(reshape, &[&turned, "joined"], "again");
    let sum = made.node(Op::Arithmetic(Arithmetic::Add), &[&output, &again], "sum");
    made.graph(&sum, ConvBnMode::Fused)
}

#[test]
fn channels_are_shuffled_in_one_step() {
    let one = &["BatchNormalization", "ChannelShuffle"][..];
    let several = &["BatchNormalization", "Reshape", "Transpose", "Reshape"][..];
    let x = images(&[2, 6, 3, 5]).to_format(MemoryFormat::ChannelsLast).unwrap();
    for (parts, order, joined, expected) in [
        ([0, 2, 3, 3, 5], [0, 2, 1, 3, 4], [0, 6, 3, 5], one),
        ([0, 3, 2, 3, 5], [0, 2, 1, 3, 4], [-1, 6, 3, 5], one),
        // Other shapes, other orders, other axes.
        ([0, 2, 3, 3, 5], [0, 2, 1, 3, 4], [0, 6, 5, 3], several),
        ([0, 2, 3, 3, 5], [0, 2, 1, 4, 3], [0, 6, 3, 5], several),
        ([1, 4, 3, 3, 5], [0, 2, 1, 3, 4], [0, 12, 3, 5], several),
        ([0, 6, 3, 1, 5], [0, 2, 1, 3, 4], [0, 6, 3, 5], several),
    ] {
        let what = format!("{parts:?} {order:?} {joined:?}");
        let shuffled = split_and_turned(parts, order, joined, false);
        let description = shuffled.describe(&[vec![2, 6, 3, 5]]).unwrap();
        let steps: Vec<&str> = description.steps.iter().map(|step| step.operation.as_str()).collect();
        assert_eq!(steps, expected, "{what}");
        // Twice what is read twice, and then nothing is joined.
        let (output, gradients) = step(&shuffled, &x);
        let (twice, of_twice) = step(&split_and_turned(parts, order, joined, true), &x);
        let halves: Vec<f64> = twice.iter().map(|value| value / 2.0).collect();
        close(&output, &halves, &what);
        for ((name, gradient), (_, twice)) in gradients.iter().zip(&of_twice) {
            let factor = if name.contains("running") { 1.0 } else { 2.0 };
            let doubled: Vec<f64> = gradient.iter().map(|value| factor * value).collect();
            close(&doubled, twice, &format!("{what}: {name}"));
        }
        let kept = shuffled.forward(&x).unwrap();
        assert!(expected != one || kept.format() == MemoryFormat::ChannelsLast, "{what}");
    }
}

#[test]
fn folding_keeps_the_outputs_of_evaluation() {
    let x = images(&[2, 3, 8, 8]);
    let mut graph = residual(ConvBnMode::Fused);
    graph.eval();
    let expected: Vec<f64> = graph.forward(&x).unwrap().to_vec().unwrap();
    assert_eq!(graph.fold().unwrap(), 5);
    close(&graph.forward(&x).unwrap().to_vec::<f64>().unwrap(), &expected, "folded");
    let names: Vec<String> = graph.named_state().into_iter().map(|(name, _)| name).collect();
    assert!(names.contains(&"stem.bias".to_owned()), "{names:?}");
    assert!(!names.iter().any(|name| name.starts_with("stem_bn")), "{names:?}");
    // What it is now, as data, is the same model.
    let definition = Arc::new(graph.to_definition().unwrap());
    let init = Init { dtype: DType::F64, ..Init::new(x.device(), 0) };
    let again = Graph::new(&definition, &init, ConvBnMode::Fused).unwrap();
    again.eval();
    close(&again.forward(&x).unwrap().to_vec::<f64>().unwrap(), &expected, "as data");
}

#[test]
fn state_has_the_names_of_the_definition() {
    let graph = residual(ConvBnMode::Fused);
    let names: Vec<String> = graph.named_state().into_iter().map(|(name, _)| name).collect();
    for name in
        ["stem.weight", "stem_bn.weight", "stem_bn.running_mean", "stem_bn.num_batches_tracked", "fc.bias"]
    {
        assert!(names.contains(&name.to_owned()), "{name} is not in {names:?}");
    }
    let x = images(&[2, 3, 8, 8]);
    graph.forward(&x).unwrap();
    graph.freeze_batchnorm(true);
    graph.forward(&x).unwrap();
    let mut counted = Vec::new();
    graph.visit(&mut |_, part| {
        if let Part::Counter(counter) = part {
            counted.push(counter.value());
        }
    });
    assert_eq!(counted, [1; 6], "frozen batch norms do not count");
}

#[test]
fn other_sizes_run_and_mistakes_are_named() {
    let graph = residual(ConvBnMode::Fused);
    for shape in [[1, 3, 8, 8], [3, 3, 12, 6], [5, 3, 2, 2]] {
        assert_eq!(graph.forward(&images(&shape)).unwrap().shape(), [shape[0], 5]);
    }
    let error = graph.forward(&images(&[2, 4, 8, 8])).unwrap_err().to_string();
    assert!(error.contains("make stem convolved") && error.contains("Conv"), "{error}");
    let error = graph.forward(&images(&[2, 3, 1, 1])).unwrap_err().to_string();
    assert!(error.contains("MaxPool"), "{error}");

    let mut made = Maker::new(&[1, 3, 4, 4]);
    made.node(Op::Relu, &["y"], "z");
    made.node(Op::Relu, &["z"], "y");
    made.0.outputs = vec!["y".into()];
    let init = Init::new(&device(), 0);
    let refused = |definition: &Definition| {
        Graph::new(&Arc::new(definition.clone()), &init, ConvBnMode::Fused).err().unwrap().to_string()
    };
    assert!(refused(&made.0).contains("\"z\": it depends on itself"), "{}", refused(&made.0));
    made.0.nodes[0].inputs = vec!["nothing".into()];
    assert!(refused(&made.0).contains("nothing makes it"), "{}", refused(&made.0));
    made.0.nodes[0] = Node { outputs: vec!["x".into()], ..made.0.nodes[0].clone() };
    assert!(refused(&made.0).contains("\"x\": it is made twice"), "{}", refused(&made.0));
}

#[test]
fn shapes_are_computed_before_the_graph_runs() {
    // Reshape to [size of axis 0, -1] by Shape, Gather and Concat, as exporters write flatten.
    let mut made = Maker::new(&[2, 3, 4, 4]);
    let integers = |made: &mut Maker, name: &str, array: Array| {
        made.0.stored.push(Stored { name: name.into(), values: array.into(), trained: None });
    };
    integers(&mut made, "zero", Array::integers([0]));
    integers(&mut made, "rest", Array::integers([-1]));
    let shape = made.node(Op::Shape(Shape { start: 0, end: None }), &["x"], "shape");
    let batch = made.node(Op::Gather(Along { axis: 0 }), &[&shape, "zero"], "batch");
    let sizes = made.node(Op::Concat(Along { axis: 0 }), &[&batch, "rest"], "sizes");
    let flat = made.node(Op::Reshape(Reshape { allow_zero: false }), &["x", &sizes], "flat");
    let same = made.node(Op::Identity, &[&flat], "same");
    let graph = made.graph(&same, ConvBnMode::Fused);
    let description = graph.describe(&[vec![2, 3, 4, 4]]).unwrap();
    assert_eq!(description.steps.len(), 1, "{:?}", description.steps);
    assert_eq!(graph.forward(&images(&[7, 3, 4, 4])).unwrap().shape(), [7, 48]);
}

#[test]
fn a_model_gets_a_new_head_for_other_classes() {
    let definition = residual(ConvBnMode::Fused).definition().clone();
    let spec = ModelSpec::of_graph("made", definition).unwrap();
    assert_eq!((spec.input(), spec.classes(), spec.gives_logits()), ([3, 8, 8], 5, true));
    let init = Init::new(&device(), 0);
    let mut options = spec.options(ConvBnMode::Fused);
    options.classes = 9;
    let model = spec.build(&init, &options).unwrap();
    let x = images(&[2, 3, 8, 8]).to_dtype(DType::F32).unwrap();
    assert_eq!(model.forward(&x).unwrap().shape(), [2, 9]);
    let kept = |model: &dyn Module| {
        let all = model.parameters();
        let (_, stem) = all.iter().find(|(name, _)| name == "stem.weight").unwrap();
        stem.value().to_vec::<f32>().unwrap()
    };
    let own = spec.build(&init, &spec.options(ConvBnMode::Fused)).unwrap();
    assert_eq!(kept(model.as_ref()), kept(own.as_ref()));
}

/// As in torchvision's networks for segmentation: a layer at less than the image's size, or the sum of two, made larger.
#[test]
fn a_head_is_found_behind_resizes_and_sums() {
    let mut made = Maker::new(&[2, 3, 8, 8]);
    let (low, high) = (made.store("low.weight", &[5, 3, 1, 1]), made.store("high.weight", &[5, 3, 1, 1]));
    let (bias, sizes) = (made.store("high.bias", &[5]), "sizes");
    let point = || {
        let (strides, dilations) = (vec![1, 1], vec![1, 1]);
        Op::Conv(Conv { strides, pads: Pads::Valid, dilations, group: 1 })
    };
    let low = made.node(point(), &["x", &low], "low");
    let high = made.node(point(), &["x", &high, &bias], "high");
    let sum = made.node(Op::Arithmetic(Arithmetic::Add), &[&low, &high], "sum of both");
    made.0.stored.push(Stored { name: "2".into(), values: Array::integers([2]).into(), trained: None });
    made.node(Op::Cast(Kind::F32), &["2"], "two");
    let sum = made.node(Op::Arithmetic(Arithmetic::Div), &[&sum, "two"], "sum");
    let channels = made.node(Op::Shape(Shape { start: 0, end: Some(2) }), &[&sum], "channels");
    made.0.stored.push(Stored { name: "size".into(), values: Array::integers([8, 8]).into(), trained: None });
    made.node(Op::Concat(Along { axis: 0 }), &[&channels, "size"], sizes);
    let resize = Resize {
        mode: Interpolation::Of(ResizeMode::Bilinear),
        coordinates: Coordinates::HalfPixel,
        one_pixel_at_zero: false,
        aspect: Aspect::Stretch,
    };
    made.node(Op::Resize(resize), &[&sum, "", "", sizes], "y");
    made.0.outputs = vec!["y".into()];
    let build = |definition: &Definition| {
        let spec = ModelSpec::of_graph("made", definition.clone()).unwrap();
        let mut options = spec.options(ConvBnMode::Fused);
        options.classes = 9;
        spec.build(&Init::new(&device(), 0), &options)
    };
    let x = images(&[2, 3, 8, 8]).to_dtype(DType::F32).unwrap();
    assert_eq!(build(&made.0).unwrap().forward(&x).unwrap().shape(), [2, 9, 8, 8]);
    // What is read twice is no layer's output alone.
    let mut twice = made.0.clone();
    let (op, inputs, outputs) = (Op::Relu, vec!["low".into()], vec!["reader".into()]);
    twice.nodes.push(Node { name: "reader".into(), op, inputs, outputs });
    assert!(build(&twice).err().unwrap().to_string().contains("last layer"));
    let mut fixed = made.0;
    fixed.nodes.retain(|node| node.outputs != ["sizes"]);
    fixed.stored.push(Stored {
        name: "sizes".into(),
        values: Array::integers([1, 5, 8, 8]).into(),
        trained: None,
    });
    assert!(build(&fixed).err().unwrap().to_string().contains("last layer"));
}

/// PyTorch's newer exporter writes the number of classes into the sizes of the last reshape.
#[test]
fn a_reshape_behind_the_head_gets_the_new_number_of_classes() {
    for open in [true, false] {
        let mut made = Maker::new(&[2, 3, 8, 8]);
        let weight = made.store("head.weight", &[5, 3, 1, 1]);
        let (strides, dilations) = (vec![1, 1], vec![1, 1]);
        let conv = Op::Conv(Conv { strides, pads: Pads::Valid, dilations, group: 1 });
        let mapped = made.node(conv, &["x", &weight], "mapped");
        made.0.stored.push(Stored {
            name: "pixels".into(),
            values: Array::integers([2, 3]).into(),
            trained: None,
        });
        let mean = Reduce { kind: ReduceKind::Mean, keep_dims: true, no_axes_is_identity: false };
        let mean = made.node(Op::Reduce(mean), &[&mapped, "pixels"], "mean");
        let mut list = |name: &str, numbers: &[i64]| {
            let values = Array::integers(numbers.iter().copied()).into();
            made.0.stored.push(Stored { name: name.into(), values, trained: None });
        };
        if open {
            list("classes", &[5]);
            let batch = made.node(Op::Shape(Shape { start: 0, end: Some(1) }), &["x"], "batch");
            made.node(Op::Concat(Along { axis: 0 }), &[&batch, "classes"], "sizes");
        } else {
            list("sizes", &[-1, 5]);
        }
        made.node(Op::Reshape(Reshape { allow_zero: true }), &[&mean, "sizes"], "y");
        made.0.outputs = vec!["y".into()];
        let spec = ModelSpec::of_graph("made", made.0).unwrap();
        let mut options = spec.options(ConvBnMode::Fused);
        options.classes = 9;
        let model = spec.build(&Init::new(&device(), 0), &options).unwrap();
        let x = images(&[2, 3, 8, 8]).to_dtype(DType::F32).unwrap();
        assert_eq!(model.forward(&x).unwrap().shape(), [2, 9]);
    }
}

#[test]
fn a_transposed_weight_is_replaced_too() {
    let mut made = Maker::new(&[2, 3]);
    let weight = made.store("head.weight", &[5, 3]);
    let transposed = made.node(Op::Transpose(Transpose { order: vec![1, 0] }), &[&weight], "transposed");
    made.node(Op::MatMul, &["x", &transposed], "y");
    let mut definition = made.0;
    definition.outputs = vec!["y".into()];
    definition.inputs[0].shape = Some(
        [0, 3, 1, 1]
            .map(|size| match size {
                0 => Dimension::Open("N".into()),
                size => Dimension::Fixed(size),
            })
            .to_vec(),
    );
    definition.nodes.insert(
        0,
        Node {
            name: "flat".into(),
            op: Op::Flatten(Along { axis: 1 }),
            inputs: vec!["images".into()],
            outputs: vec!["x".into()],
        },
    );
    definition.inputs[0].name = "images".into();
    let spec = ModelSpec::of_graph("made", definition).unwrap();
    let mut options = spec.options(ConvBnMode::Fused);
    options.classes = 9;
    let model = spec.build(&Init::new(&device(), 0), &options).unwrap();
    let x = images(&[2, 3, 1, 1]).to_dtype(DType::F32).unwrap();
    assert_eq!(model.forward(&x).unwrap().shape(), [2, 9]);
}

#[test]
fn a_block_is_planned_like_any_other() {
    let graph = residual(ConvBnMode::Fused);
    let mut paths = Vec::new();
    graph.visit(&mut |path, part| {
        if let Part::Block(block) = part {
            paths.push(path.to_owned());
            assert_eq!(FusedBlock::mode(block), ConvBnMode::Fused);
        }
    });
    assert_eq!(paths, ["stem", "a", "b", "c", "d"]);
}
