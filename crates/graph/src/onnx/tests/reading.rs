//! What files mean.

use convoke_autograd::ops::{Coordinates, Pointwise, ResizeMode, Rounding};

use super::*;
use crate::graph::*;

/// The definition of nodes, with the weights `w` (4 x 3 x 3 x 3) and `v` (4).
fn defined(opset: i64, nodes: Vec<NodeProto>) -> Definition {
    let stored = vec![ones("w", &[4, 3, 3, 3]), ones("v", &[4])];
    read(&model(opset, stored, nodes)).unwrap().definition
}

/// The last node of a definition, with the arrays among its inputs.
fn last(definition: &Definition) -> (Op, Vec<String>, Vec<Array>) {
    let node = definition.nodes.last().unwrap().clone();
    let constant = |name: &String| {
        let found = definition.nodes.iter().find(|node| node.outputs.contains(name))?;
        if let Op::Constant(array) = &found.op { Some(array.clone()) } else { None }
    };
    let arrays = node.inputs.iter().filter_map(constant).collect();
    (node.op, node.inputs, arrays)
}

#[test]
fn a_model_is_read_whole() {
    let mut file = model(
        17,
        vec![ones("w", &[4, 3, 3, 3]), ones("v", &[4]), ones("unread", &[2])],
        vec![
            node("Conv", "x w", "a").ints("pads", [1, 1, 0, 2]).ints("strides", [2, 2]),
            node("BatchNormalization", "a v v v v", "b c d").float("momentum", 0.8).int("training_mode", 1),
            node("Relu", "b", "y"),
        ],
    );
    file.metadata_props = vec![EntryProto { key: Some("key".into()), value: Some("text".into()) }];
    let graph = file.graph.as_mut().unwrap();
    // Before IR version 4, weights were inputs too.
    graph.input.push(value("w", element::FLOAT, &[4, 3, 3, 3]));
    graph.input.push(value("ids", element::INT64, &[]));
    let read = read(&file).unwrap();
    assert_eq!((read.opset, read.ir_version, read.producer.as_str()), (17, 8, "pytorch"));
    assert_eq!(read.metadata["key"], "text");
    assert_eq!(read.note(), None);
    let definition = read.definition;
    let size = [Dimension::Open("N".into()), Dimension::Fixed(3), Dimension::Fixed(8), Dimension::Fixed(8)];
    assert_eq!(
        definition.inputs,
        [
            Input { name: "x".into(), kind: Kind::F32, shape: Some(size.to_vec()) },
            Input { name: "ids".into(), kind: Kind::I64, shape: Some(vec![]) }
        ]
    );
    assert_eq!((definition.name.as_str(), definition.outputs), ("test", vec!["y".to_owned()]));
    let stored: Vec<&str> = definition.stored.iter().map(|stored| stored.name.as_str()).collect();
    assert_eq!(stored, ["w", "v"]);
    assert_eq!(**definition.stored[1].values.array().unwrap(), Array::floats([1.0; 4]));
    let [conv, norm, relu] = &definition.nodes[..] else { panic!("{:?}", definition.nodes) };
    let pads = Pads::Explicit(vec![1, 1, 0, 2]);
    assert_eq!(conv.op, Op::Conv(Conv { strides: vec![2, 2], pads, dilations: vec![1, 1], group: 1 }));
    assert_eq!((&conv.name, &conv.inputs), (&"a".to_owned(), &vec!["x".to_owned(), "w".to_owned()]));
    assert_eq!(norm.op, Op::BatchNorm(BatchNormOp { momentum: 0.8, ..BatchNormOp::default() }));
    assert_eq!(norm.outputs, ["b"]);
    assert_eq!((&relu.op, &relu.inputs[..]), (&Op::Relu, &["b".to_owned()][..]));
}

#[test]
fn folded_batch_norms_are_noted() {
    let file = model(17, vec![ones("w", &[4, 3, 3, 3])], vec![node("Conv", "x w", "y")]);
    assert!(read(&file).unwrap().note().unwrap().contains("TrainingMode.PRESERVE"));
    let other = ModelProto { producer_name: Some("tf2onnx".into()), ..file };
    assert_eq!(read(&other).unwrap().note(), None);
}

#[test]
fn old_attributes_are_inputs() {
    for (opset, node, op, arrays) in [
        (7, node("Clip", "x", "y").float("max", 6.0), Op::Clip, vec![Array::number(6.0)]),
        (
            9,
            node("Slice", "x", "y").ints("starts", [1]).ints("ends", [3]).ints("axes", [2]),
            Op::Slice,
            vec![Array::integers([1]), Array::integers([3]), Array::integers([2])],
        ),
        (
            10,
            node("Pad", "x", "y").ints("pads", [0, 0, 1, 1, 0, 0, 1, 1]).text("mode", "reflect"),
            Op::Pad(PadKind::Reflect),
            vec![Array::integers([0, 0, 1, 1, 0, 0, 1, 1])],
        ),
        (12, node("Squeeze", "x", "y").ints("axes", [0]), Op::Squeeze, vec![Array::integers([0])]),
        (12, node("Unsqueeze", "x", "y").ints("axes", [0]), Op::Unsqueeze, vec![Array::integers([0])]),
        (
            17,
            node("ReduceMean", "x", "y").ints("axes", [2, 3]).int("keepdims", 0),
            Op::Reduce(Reduce { kind: ReduceKind::Mean, keep_dims: false, no_axes_is_identity: false }),
            vec![Array::integers([2, 3])],
        ),
        (
            12,
            node("Split", "x", "y z").ints("split", [1, 2]).int("axis", 1),
            Op::Split(Along { axis: 1 }),
            vec![Array::integers([1, 2])],
        ),
        (10, node("Dropout", "x", "y").float("ratio", 0.25), Op::Dropout, vec![Array::number(0.25)]),
    ] {
        let shown = format!("{node:?}");
        let (found, _, constants) = last(&defined(opset, vec![node]));
        assert_eq!((found, constants), (op, arrays), "{shown}");
    }
}

#[test]
fn resizes_of_every_version_are_one() {
    let scales = || Array::floats([1.0, 1.0, 2.0, 2.0]);
    let asymmetric = Resize {
        mode: Interpolation::Of(ResizeMode::Nearest(Rounding::FloorOrCeil)),
        coordinates: Coordinates::Asymmetric,
        one_pixel_at_zero: false,
        aspect: Aspect::Stretch,
    };
    let floats = AttributeProto {
        floats: vec![1.0, 1.0, 2.0, 2.0],
        r#type: Some(kind::FLOATS),
        ..AttributeProto::default()
    };
    let constant = node("Constant", "", "s").with("value_floats", floats.clone());
    let old = defined(7, vec![node("Upsample", "x", "y").with("scales", floats)]);
    assert_eq!(
        last(&old),
        (Op::Resize(asymmetric), vec!["x".into(), "".into(), "y/scales".into()], vec![scales()])
    );
    for (opset, name) in [(9, "Upsample"), (10, "Resize")] {
        let (op, inputs, arrays) = last(&defined(opset, vec![constant.clone(), node(name, "x s", "y")]));
        assert_eq!((op, inputs.join(" "), arrays), (Op::Resize(asymmetric), "x  s".into(), vec![scales()]));
    }
    let new = node("Resize", "x v s", "y")
        .text("mode", "linear")
        .text("coordinate_transformation_mode", "pytorch_half_pixel");
    let (op, inputs, _) = last(&defined(13, vec![constant, new]));
    let resize = Resize {
        mode: Interpolation::Of(ResizeMode::Bilinear),
        coordinates: Coordinates::HalfPixel,
        one_pixel_at_zero: true,
        aspect: Aspect::Stretch,
    };
    assert_eq!((op, inputs.join(" ")), (Op::Resize(resize), "x  s".into()));
    let two = node("Constant", "", "s").ints("value_ints", [4, 4]);
    let axes = node("Resize", "x - - s", "y").ints("axes", [-2, -1]);
    let definition = defined(18, vec![two, axes]);
    let names: Vec<_> = definition.nodes.iter().map(|node| node.op.name()).collect();
    assert_eq!(names, ["Constant", "Shape", "Concat", "Resize"]);
}

#[test]
fn softmax_flattens_before_version_13() {
    let names = |opset, axis: i64| -> Vec<&'static str> {
        let definition = defined(opset, vec![node("Softmax", "x", "y").int("axis", axis)]);
        definition.nodes.iter().map(|node| node.op.name()).collect()
    };
    assert_eq!(names(11, 1), ["Shape", "Flatten", "Softmax", "Reshape"]);
    assert_eq!(names(11, 3), ["Softmax"]);
    assert_eq!(names(13, 1), ["Softmax"]);
}

#[test]
fn numbers_of_every_type_are_read() {
    let with = |data_type, set: fn(&mut TensorProto)| {
        let mut tensor = empty("", &[2], data_type);
        set(&mut tensor);
        let definition = defined(13, vec![node("Constant", "", "y").tensor("value", tensor)]);
        match last(&definition).0 {
            Op::Constant(array) => array.data().clone(),
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(
        with(element::FLOAT16, |t| t.raw_data = Some(vec![0, 0x3c, 0, 0xc0].into())),
        Data::F32(vec![1.0, -2.0])
    );
    assert_eq!(
        with(element::BFLOAT16, |t| t.raw_data = Some(vec![0x80, 0x3f, 0, 0xc0].into())),
        Data::F32(vec![1.0, -2.0])
    );
    assert_eq!(
        with(element::FLOAT16, |t| t.int32_data = vec![vec![0x80, 0x78, 0x80, 0x80, 3].into()]),
        Data::F32(vec![1.0, -2.0])
    );
    assert_eq!(with(element::INT8, |t| t.raw_data = Some(vec![255, 1].into())), Data::I64(vec![-1, 1]));
    assert_eq!(with(element::UINT8, |t| t.raw_data = Some(vec![255, 1].into())), Data::I64(vec![255, 1]));
    assert_eq!(
        with(element::INT64, |t| t.int64_data = vec![vec![3].into(), vec![0x96, 1].into()]),
        Data::I64(vec![3, 150])
    );
    assert_eq!(
        with(element::BOOL, |t| t.int32_data = vec![vec![1, 0].into()]),
        Data::Bool(vec![true, false])
    );
    assert_eq!(
        with(element::FLOAT, |t| t.float_data =
            vec![[1.0f32, 0.5].iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<_>>().into()]),
        Data::F32(vec![1.0, 0.5])
    );
    assert_eq!(
        with(element::DOUBLE, |t| t.double_data =
            vec![[1.0f64, 0.5].iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<_>>().into()]),
        Data::F64(vec![1.0, 0.5])
    );
}

#[test]
fn functions_are_inlined() {
    let gate = FunctionProto {
        name: Some("Gate".into()),
        domain: Some("own".into()),
        input: vec!["a".into()],
        output: vec!["b".into()],
        attribute: vec!["slope".into()],
        node: vec![
            node("LeakyRelu", "a", "t").with(
                "alpha",
                AttributeProto {
                    ref_attr_name: Some("slope".into()),
                    r#type: Some(kind::FLOAT),
                    ..Default::default()
                },
            ),
            node("Mul", "a t", "b"),
        ],
        opset_import: vec![OpsetProto { domain: None, version: Some(16) }],
        ..FunctionProto::default()
    };
    let call = |inputs, outputs| NodeProto { domain: Some("own".into()), ..node("Gate", inputs, outputs) };
    let mut file =
        model(17, vec![], vec![call("x", "u").float("slope", 0.5), call("u", "y").float("slope", 0.25)]);
    file.functions = vec![gate.clone()];
    let nodes = read(&file).unwrap().definition.nodes;
    let shown: Vec<_> =
        nodes.iter().map(|node| (node.op.clone(), node.inputs.join(" "), node.outputs.join(" "))).collect();
    let mul = Op::Arithmetic(Arithmetic::Mul);
    assert_eq!(
        shown,
        [
            (Op::LeakyRelu(LeakyRelu { alpha: 0.5 }), "x".into(), "u/t".into()),
            (mul.clone(), "x u/t".into(), "u".into()),
            (Op::LeakyRelu(LeakyRelu { alpha: 0.25 }), "u".into(), "y/t".into()),
            (mul, "u y/t".into(), "y".into()),
        ]
    );
    let endless = FunctionProto { node: vec![call("a", "b")], ..gate };
    file.functions = vec![endless];
    assert!(refused(&file).contains("16 deep"));
}

#[test]
fn operators_are_one_table() {
    let names = super::super::operators();
    assert!(names.is_sorted() && names.contains(&"Conv") && names.len() > 90);
    let definition = defined(20, vec![node("Gelu", "x", "y").text("approximate", "tanh")]);
    assert_eq!(last(&definition).0, Op::Pointwise(Pointwise::GeluTanh));
}

#[test]
fn parts_of_sequences_are_slices() {
    let stored = |name: &str, dims: &[i64], numbers: &[i64]| TensorProto {
        raw_data: Some(numbers.iter().flat_map(|number| number.to_le_bytes()).collect::<Vec<u8>>().into()),
        ..empty(name, dims, element::INT64)
    };
    let nodes = |sizes: &str| {
        vec![
            node("SplitToSequence", &format!("x {sizes}"), "parts").int("axis", 1),
            node("SequenceAt", "parts second", "part"),
        ]
    };
    let numbers =
        || vec![stored("second", &[], &[1]), stored("list", &[2], &[1, 2]), stored("every", &[], &[2])];
    let taken = |sizes: &str| {
        let definition = read(&model(17, numbers(), nodes(sizes))).unwrap().definition;
        assert!(definition.nodes.iter().all(|node| matches!(node.op, Op::Slice | Op::Constant(_))));
        let (op, inputs, arrays) = last(&definition);
        assert_eq!((op, inputs[0].as_str()), (Op::Slice, "x"));
        arrays
    };
    assert_eq!(taken("list"), [1, 3, 1].map(|number| Array::integers([number])));
    assert_eq!(taken("every"), [2, 4, 1].map(|number| Array::integers([number])));
    // Where the sizes or the place are not stored, there is a sequence, which is refused.
    let mut unknown = nodes("list");
    unknown[1].input[1] = "x".into();
    let text = refused(&model(17, numbers(), unknown));
    assert!(text.contains("SplitToSequence"), "{text}");
    let mut beyond = numbers();
    beyond[0] = stored("second", &[], &[7]);
    let text = refused(&model(17, beyond, nodes("list")));
    assert!(text.contains("SplitToSequence"), "{text}");
}

#[test]
fn biases_of_a_repeated_zero_are_left_out() {
    let number = |name: &str, number: f32| TensorProto {
        raw_data: Some(number.to_le_bytes().to_vec().into()),
        ..empty(name, &[], element::FLOAT)
    };
    let sizes = TensorProto {
        raw_data: Some(4i64.to_le_bytes().to_vec().into()),
        ..empty("sizes", &[1], element::INT64)
    };
    for (value, inputs) in [(0.0, vec!["x", "w"]), (0.5, vec!["x", "w", "bias"])] {
        let nodes = vec![
            node("CastLike", "number x", "like"),
            node("Expand", "like sizes", "bias"),
            node("Conv", "x w bias", "y"),
        ];
        let stored = vec![ones("w", &[4, 3, 3, 3]), number("number", value), sizes.clone()];
        let definition = read(&model(17, stored, nodes)).unwrap().definition;
        assert_eq!(definition.nodes[2].inputs, inputs);
    }
}
