//! ONNX files as the program writes and reads them.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use convoke::Device;
use convoke::nn::graph::{
    Along, Array, Definition, Dimension, Gemm, Graph, Input, Kind, Node, Op, Transpose,
};
use convoke::nn::modules::ConvBnMode;
use convoke::nn::{Init, onnx};
use tempfile::tempdir;

use crate::program::convoke;

/// A file with the input `x` of these sizes, those of 0 open; its nodes are operations with their inputs, and the output of each
/// is read by its name `y0`, `y1` and so on.
pub(crate) fn file(path: &Path, sizes: &[usize], nodes: &[(Op, &[&str])]) {
    let dimension = |&size: &usize| match size {
        0 => Dimension::Open("any".into()),
        size => Dimension::Fixed(size),
    };
    let shape = Some(sizes.iter().map(dimension).collect());
    let nodes: Vec<Node> = nodes
        .iter()
        .enumerate()
        .map(|(place, (op, inputs))| Node {
            name: format!("node {place}"),
            op: op.clone(),
            inputs: inputs.iter().map(|&input| input.to_owned()).collect(),
            outputs: vec![format!("y{place}")],
        })
        .collect();
    let definition = Definition {
        name: "made".into(),
        inputs: vec![Input { name: "x".into(), kind: Kind::F32, shape }],
        outputs: vec![format!("y{}", nodes.len() - 1)],
        nodes,
        stored: Vec::new(),
    };
    onnx::save(path, &definition, &BTreeMap::new(), &onnx::WriteOptions::default()).unwrap();
}

/// The sizes of the first input of a file, those that are open as 0, and the shape of its output for one image.
fn sizes(path: &Path) -> (Vec<usize>, Vec<usize>) {
    let definition = Arc::new(onnx::read(path).unwrap().definition);
    let input = definition.inputs[0].clone();
    let init = Init::new(&Device::cpu().unwrap().dry(), 0);
    let graph = Graph::new(&definition, &init, ConvBnMode::Fused).unwrap();
    let outputs = graph.output_shapes(&[input.shape_of_batch(1).unwrap()]).unwrap();
    let sizes = input.shape.unwrap().iter().map(|size| size.size().unwrap_or(0)).collect();
    (sizes, outputs[0].clone())
}

#[test]
fn export_sets_the_height_and_width_of_images() {
    let folder = tempdir().unwrap();
    let [from, to] = ["from.onnx", "to.onnx"].map(|name| folder.path().join(name));
    let [from_text, to_text] = [&from, &to].map(|path| path.to_str().unwrap());
    let export = |args: &[&str]| {
        convoke(&[&["export", from_text, "--to", to_text], args].concat()).exits(0);
        sizes(&to)
    };
    // Keras' images have their channels last.
    let last = Op::Transpose(Transpose { order: vec![0, 3, 1, 2] });
    let nodes: [(Op, &[&str]); 2] = [(last, &["x"]), (Op::Relu, &["y0"])];
    for sizes in [[0, 0, 0, 3], [0, 8, 8, 3]] {
        file(&from, &sizes, &nodes);
        assert_eq!(export(&["--image-size", "12x10"]), (vec![0, 12, 10, 3], vec![1, 3, 12, 10]), "{sizes:?}");
    }
    assert_eq!(export(&[]), (vec![0, 8, 8, 3], vec![1, 3, 8, 8]), "a file's own size stays");
    file(&from, &[2, 3, 8, 8], &[(Op::Relu, &["x"])]);
    assert_eq!(export(&["--image-size", "12x10"]), (vec![2, 3, 12, 10], vec![2, 3, 12, 10]));
    // What has other dimensions has no height and width.
    file(&from, &[0, 7], &[(Op::Relu, &["x"])]);
    assert_eq!(export(&["--image-size", "12x10"]), (vec![0, 7], vec![1, 7]));
}

#[test]
fn export_refuses_a_size_that_does_not_fit() {
    let folder = tempdir().unwrap();
    let [from, to] = ["from.onnx", "to.onnx"].map(|name| folder.path().join(name));
    let weight = Array::floats([0.5; 2 * 48]).reshaped(&[48, 2]).unwrap();
    let nodes: [(Op, &[&str]); 3] = [
        (Op::Constant(weight), &[]),
        (Op::Flatten(Along { axis: 1 }), &["x"]),
        (Op::Gemm(Gemm::default()), &["y1", "y0"]),
    ];
    file(&from, &[0, 3, 4, 4], &nodes);
    let export = |size: &str| {
        let [from, to] = [&from, &to].map(|path| path.to_str().unwrap());
        convoke(&["export", from, "--to", to, "--image-size", size])
    };
    export("4x4").exits(0);
    let refused = export("6x6").exits(1);
    refused.check(1, &["node 2", "Gemm", "108"]).unwrap();
}
