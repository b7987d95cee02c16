//! What is written means the same when it is read.

use std::collections::BTreeMap;

use convoke_autograd::ops::{Coordinates, DepthOrder, Pointwise, ResizeMode, Rounding};

use super::*;
use crate::graph::*;
use crate::onnx::{WriteOptions, save, write};

fn names(text: &str) -> Vec<String> {
    text.split_whitespace().map(|name| name.replace('-', "")).collect()
}

fn step(op: Op, inputs: &str, output: &str) -> Node {
    Node { name: format!("the {output}"), op, inputs: names(inputs), outputs: names(output) }
}

fn constant(name: &str, array: Array) -> Node {
    step(Op::Constant(array), "", name)
}

fn stored(name: &str, shape: &[usize]) -> Stored {
    let data = (0..shape.iter().product::<usize>()).map(|x| x as f32 / 8.0).collect();
    Stored {
        name: name.to_owned(),
        values: Array::new(shape, Data::F32(data)).unwrap().into(),
        trained: None,
    }
}

/// Nodes over `x`, with weights that all of them may read.
fn definition(nodes: Vec<Node>) -> Definition {
    let shape =
        vec![Dimension::Open("batch".into()), Dimension::Fixed(4), Dimension::Fixed(8), Dimension::Fixed(8)];
    let used: Vec<&String> = nodes.iter().flat_map(|node| &node.inputs).collect();
    let weights = [stored("w", &[4, 4, 3, 3]), stored("v", &[4]), stored("m", &[4, 4])];
    Definition {
        name: "test".into(),
        inputs: vec![Input { name: "x".into(), kind: Kind::F32, shape: Some(shape) }],
        outputs: vec![nodes.last().unwrap().outputs[0].clone()],
        stored: weights.into_iter().filter(|stored| used.contains(&&stored.name)).collect(),
        nodes,
    }
}

fn options(opset: i64) -> WriteOptions {
    WriteOptions { opset: Some(opset), ..WriteOptions::default() }
}

fn written(definition: &Definition, options: &WriteOptions) -> Model {
    read_bytes(&write(definition, &BTreeMap::new(), options).unwrap(), None).unwrap()
}

/// The names of the operators that an operation is written as.
fn operators(op: Op, inputs: &str, opset: i64) -> Vec<String> {
    let bytes = write(&definition(vec![step(op, inputs, "y")]), &BTreeMap::new(), &options(opset)).unwrap();
    let nodes = ModelProto::decode(&bytes[..]).unwrap().graph.unwrap().node;
    nodes.into_iter().filter_map(|node| node.op_type).filter(|name| name != "Constant").collect()
}

fn conv() -> Conv {
    Conv { strides: vec![2, 1], pads: Pads::Explicit(vec![1, 0, 2, 1]), dilations: vec![1, 2], group: 1 }
}

fn pool(count_include_pad: bool) -> Pool {
    Pool {
        kernel: vec![3, 2],
        strides: vec![2, 2],
        pads: Pads::SameLower,
        dilations: vec![1, 1],
        ceil_mode: false,
        count_include_pad,
    }
}

fn resize() -> Resize {
    Resize {
        mode: Interpolation::Of(ResizeMode::Nearest(Rounding::Ceil)),
        coordinates: Coordinates::HalfPixel,
        one_pixel_at_zero: true,
        aspect: Aspect::Stretch,
    }
}

#[test]
fn what_is_written_is_read() {
    let transposed = ConvTranspose { conv: conv(), output_padding: vec![1, 0], output_shape: None };
    let shaped = ConvTranspose { output_shape: Some(vec![9, 9]), ..transposed.clone() };
    let reduce = Reduce { kind: ReduceKind::L2, keep_dims: false, no_axes_is_identity: true };
    let gemm = Gemm { alpha: 0.5, beta: 2.0, trans_a: false, trans_b: true };
    let hard = Pointwise::HardSigmoid { alpha: 0.25, beta: 0.5 };
    let soft = Pointwise::Softplus { beta: 1.0, threshold: f64::INFINITY };
    let (block, order) = (2, DepthOrder::ChannelFirst);
    let cases: Vec<(Op, &str)> = vec![
        (Op::Conv(conv()), "x w v"),
        (Op::ConvTranspose(transposed), "x w"),
        (Op::ConvTranspose(shaped), "x w"),
        (Op::BatchNorm(BatchNormOp { eps: 1e-3, momentum: 0.99, frozen: false }), "x v v v v"),
        (Op::MaxPool(Pool { dilations: vec![1, 2], ceil_mode: true, ..pool(false) }), "x"),
        (Op::AveragePool(pool(true)), "x"),
        (Op::AveragePool(Pool { ceil_mode: true, ..pool(true) }), "x"),
        (Op::GlobalAveragePool, "x"),
        (Op::GlobalMaxPool, "x"),
        (Op::Relu, "x"),
        (Op::LeakyRelu(LeakyRelu { alpha: 0.2 }), "x"),
        (Op::PRelu, "x v"),
        (Op::Clip, "x - hi"),
        (Op::Softmax(Along { axis: 1 }), "x"),
        (Op::LogSoftmax(Along { axis: -2 }), "x"),
        (Op::Arithmetic(Arithmetic::Add), "x v x"),
        (Op::Mean, "x v x"),
        (Op::Mod(Mod { fmod: true }), "x v"),
        (Op::Compare(Compare::GreaterOrEqual), "x v"),
        (Op::Reduce(reduce), "x axes"),
        (Op::Reduce(reduce), "x"),
        (Op::MatMul, "x m"),
        (Op::Gemm(gemm), "m m v"),
        (Op::Concat(Along { axis: -1 }), "x x x"),
        (Op::Slice, "x axes axes axes"),
        (Op::Pad(PadKind::Wrap), "x pads - axes"),
        (Op::Transpose(Transpose { order: vec![0, 2, 3, 1] }), "x"),
        (Op::Transpose(Transpose { order: vec![] }), "x"),
        (Op::Reshape(Reshape { allow_zero: true }), "x pads"),
        (Op::Flatten(Along { axis: 2 }), "x"),
        (Op::Squeeze, "x axes"),
        (Op::Unsqueeze, "x axes"),
        (Op::Expand, "x pads"),
        (Op::Tile, "x pads"),
        (Op::Gather(Along { axis: 1 }), "x axes"),
        (Op::ScatterNd, "x axes m"),
        (Op::DepthToSpace(DepthToSpace { block, order }), "x"),
        (Op::SpaceToDepth(SpaceToDepth { block }), "x"),
        (Op::Resize(resize()), "x - - pads"),
        (
            Op::Resize(Resize {
                mode: Interpolation::Of(ResizeMode::Bilinear),
                aspect: Aspect::NotLarger,
                ..resize()
            }),
            "x - - pads",
        ),
        (Op::Resize(Resize { mode: Interpolation::Cubic { a: -0.5 }, ..resize() }), "x - - pads"),
        (Op::GroupNorm(GroupNorm { groups: 2, eps: 1e-4 }), "x v v"),
        (Op::LayerNorm(LayerNorm { axis: -2, eps: 1e-6 }), "x w"),
        (Op::InstanceNorm(InstanceNorm { eps: 1e-6 }), "x v v"),
        (Op::LpNorm(LpNorm { axis: 1, p: 1 }), "x"),
        (Op::Lrn(Lrn { size: 3, alpha: 0.1, beta: 0.5, bias: 2.0 }), "x"),
        (Op::Dropout, "x hi"),
        (Op::Identity, "x"),
        (Op::Cast(Kind::I64), "x"),
        (Op::CastLike, "x v"),
        (Op::Shape(Shape { start: 1, end: Some(-1) }), "x"),
        (Op::Size, "x"),
        (Op::ConstantOfShape(Array::integers([7])), "axes"),
        (Op::NonZero, "x"),
        (Op::Trilu(Trilu { upper: false }), "x"),
        (Op::CumSum(CumSum::default()), "x axes"),
        (Op::CumSum(CumSum { exclusive: true, reverse: true }), "x axes"),
        (Op::ArgMax(ArgMax { axis: 1, keep_dims: false, last: true, smallest: true }), "x"),
        (Op::TopK(TopK { axis: -1, largest: false }), "x axes"),
        (Op::Elementwise(crate::graph::Elementwise::Sign), "x"),
        (Op::Where, "yes x v"),
        (Op::Not, "yes"),
        (Op::Pointwise(hard), "x"),
        (Op::Pointwise(soft), "x"),
        (Op::Pointwise(Pointwise::Celu { alpha: 2.0 }), "x"),
        (Op::Pointwise(Pointwise::GeluTanh), "x"),
        (Op::Pointwise(Pointwise::Gelu), "x"),
        (Op::Pointwise(Pointwise::Silu), "x"),
        (Op::Pointwise(Pointwise::Mish), "x"),
        (Op::Pointwise(Pointwise::HardSwish), "x"),
        (Op::Pointwise(Pointwise::Selu), "x"),
    ];
    for (op, inputs) in cases {
        let constants = [
            constant("hi", Array::number(6.0)),
            constant("axes", Array::integers([2, 3])),
            constant("pads", Array::integers([1, 1, 2, 2])),
            constant("yes", Array::list(Data::Bool(vec![true, false, true, true, true, true, true, true]))),
        ];
        let used = names(inputs);
        let mut nodes: Vec<Node> =
            constants.into_iter().filter(|node| used.contains(&node.outputs[0])).collect();
        nodes.push(step(op, inputs, "y"));
        let definition = definition(nodes);
        assert_eq!(written(&definition, &options(24)).definition, definition);
    }
    let split = Node { outputs: names("y z"), ..step(Op::Split(Along { axis: 1 }), "x", "y") };
    let definition = definition(vec![split]);
    assert_eq!(written(&definition, &options(18)).definition, definition);
}

#[test]
fn values_replace_what_is_stored() {
    let definition = definition(vec![step(Op::PRelu, "x v", "y")]);
    let new = Array::list(Data::F64(vec![1.0, 2.0, 3.0, 1e-300]));
    let values = BTreeMap::from([("v".to_owned(), new.clone())]);
    let metadata = BTreeMap::from([("key".to_owned(), "text".to_owned())]);
    let options = WriteOptions { metadata: metadata.clone(), ..options(17) };
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("model.onnx");
    save(&file, &definition, &values, &options).unwrap();
    let model = super::super::read(&file).unwrap();
    assert_eq!(**model.definition.stored[0].values.array().unwrap(), new);
    assert_eq!((model.metadata, model.opset, model.ir_version), (metadata, 17, 8));
    assert_eq!(model.producer, "convoke");
}

#[test]
fn older_versions_are_expressed_by_their_operators() {
    let gelu = || Op::Pointwise(Pointwise::Gelu);
    assert_eq!(operators(gelu(), "x", 20), ["Gelu"]);
    assert_eq!(operators(gelu(), "x", 19), ["Mul", "Erf", "Add", "Mul", "Mul"]);
    assert_eq!(operators(Op::Pointwise(Pointwise::Silu), "x", 23), ["Sigmoid", "Mul"]);
    assert_eq!(operators(Op::Pointwise(Pointwise::HardSwish), "x", 13), ["HardSigmoid", "Mul"]);
    assert_eq!(operators(Op::Pointwise(Pointwise::Mish), "x", 17), ["Softplus", "Tanh", "Mul"]);
    assert_eq!(operators(Op::Pointwise(Pointwise::RELU6), "x", 13), ["Clip"]);
    assert_eq!(operators(Op::AdaptiveAveragePool([1, 1]), "x", 13), ["GlobalAveragePool"]);
    assert_eq!(operators(Op::Shape(Shape { start: 2, end: None }), "x", 14), ["Shape", "Slice"]);
    let norm = Op::GroupNorm(GroupNorm { groups: 2, eps: 1e-5 });
    let names = operators(norm, "x v v", 17);
    assert!(names.contains(&"InstanceNormalization".to_owned()) && names.len() == 9, "{names:?}");
    // Axes are an attribute again, and the constant that they were is gone.
    let reduce = Op::Reduce(Reduce { kind: ReduceKind::Mean, keep_dims: true, no_axes_is_identity: false });
    let definition =
        definition(vec![constant("axes", Array::integers([2, 3])), step(reduce.clone(), "x axes", "y")]);
    let bytes = write(&definition, &BTreeMap::new(), &options(17)).unwrap();
    let nodes = ModelProto::decode(&bytes[..]).unwrap().graph.unwrap().node;
    assert_eq!((nodes.len(), &nodes[0].attribute[1].ints[..]), (1, &[2, 3][..]));
    let again = written(&definition, &options(17)).definition;
    assert_eq!((&again.nodes[1].op, again.nodes.len()), (&reduce, 2));
}

/// PyTorch's exporter writes axes that the file computes, which version 17 takes as attributes only.
#[test]
fn without_a_version_the_lowest_is_taken_that_holds_the_model() {
    let reduce = Op::Reduce(Reduce { kind: ReduceKind::Mean, keep_dims: true, no_axes_is_identity: false });
    let axes =
        || [step(Op::Shape(Shape { start: 2, end: None }), "x", "size"), step(Op::Size, "size", "axes")];
    let version = |nodes: Vec<Node>| {
        write(&definition(nodes), &BTreeMap::new(), &WriteOptions::default())
            .map(|bytes| ModelProto::decode(&bytes[..]).unwrap().opset_import[0].version.unwrap())
    };
    assert_eq!(version(vec![step(Op::Relu, "x", "y")]).unwrap(), 17);
    let computed = axes().into_iter().chain([step(reduce, "x axes", "y")]).collect();
    assert_eq!(version(computed).unwrap(), 18);
    assert_eq!(version(vec![step(Op::Pad(PadKind::Wrap), "x v", "y")]).unwrap(), 19);
    let error = version(vec![step(Op::AdaptiveAveragePool([2, 2]), "x", "y")]).unwrap_err().to_string();
    assert!(error.contains("version 24") && error.contains("no such operator"), "{error}");
}

#[test]
fn training_has_other_nodes() {
    let norm = step(Op::BatchNorm(BatchNormOp::default()), "x v v v v", "a");
    let definition = definition(vec![norm, step(Op::Dropout, "a", "y")]);
    let training = WriteOptions { training: true, ..options(17) };
    let bytes = write(&definition, &BTreeMap::new(), &training).unwrap();
    let nodes = ModelProto::decode(&bytes[..]).unwrap().graph.unwrap().node;
    assert_eq!((nodes[0].output.len(), nodes[2].input.len()), (3, 3));
    assert_eq!(written(&definition, &options(17)).definition, definition);
    assert_eq!(written(&definition, &training).definition.nodes[0], definition.nodes[0]);
}

#[test]
fn what_cannot_be_written_is_named() {
    for (op, inputs, opset, word) in [
        (Op::LayerNorm(LayerNorm { axis: -1, eps: 1e-5 }), "x v", 16, "at least version 17"),
        (Op::AdaptiveAveragePool([2, 2]), "x", 24, "no such operator"),
        (Op::Pad(PadKind::Wrap), "x v", 18, "at least version 19"),
        (Op::Relu, "x", 12, "13 to 24"),
        (Op::Relu, "q", 17, "value q"),
        (Op::Relu, "y", 17, "depends on itself"),
    ] {
        let definition = definition(vec![step(op, inputs, "y")]);
        let error = write(&definition, &BTreeMap::new(), &options(opset)).unwrap_err().to_string();
        assert!(error.contains(word), "{error}");
    }
}

#[test]
fn nodes_are_written_in_order() {
    let mut shuffled =
        definition(vec![step(Op::Relu, "b", "c"), step(Op::Relu, "x", "a"), step(Op::Relu, "a", "b")]);
    shuffled.outputs = names("c");
    let order: Vec<String> = written(&shuffled, &options(17))
        .definition
        .nodes
        .iter()
        .map(|node| node.outputs[0].clone())
        .collect();
    assert_eq!(order, ["a", "b", "c"]);
}
