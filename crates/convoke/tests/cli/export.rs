//! `convoke export` of models that are written in Rust.

use convoke::nn::graph::{Dimension, Op};
use convoke::nn::onnx;

use super::program::{convoke, run, text};

fn operators(file: &std::path::Path) -> Vec<Op> {
    onnx::read(file).unwrap().definition.nodes.into_iter().map(|node| node.op).collect()
}

#[test]
fn models_in_rust_become_onnx_and_train_on() {
    let folder = tempfile::tempdir().unwrap();
    let [checkpoint, kept, folded, small] =
        ["run", "kept.onnx", "folded.onnx", "small.onnx"].map(|name| folder.path().join(name));
    run("train", &["--steps", "2", "--checkpoint", text(&checkpoint)]).exits(0);
    convoke(&["export", text(&checkpoint), "--to", text(&kept)]).exits(0);
    let definition = onnx::read(&kept).unwrap().definition;
    assert_eq!(definition.inputs[0].name, "input");
    let shape = definition.inputs[0].shape.clone().unwrap();
    assert!(matches!(
        shape[..],
        [Dimension::Open(_), Dimension::Fixed(1), Dimension::Fixed(28), Dimension::Fixed(28)]
    ));
    let names: Vec<&str> = definition.stored.iter().map(|stored| stored.name.as_str()).collect();
    for name in ["block1.conv.weight", "block2.bn.running_var", "linear2.bias"] {
        assert!(names.contains(&name), "no {name} in {names:?}");
    }
    assert_eq!(operators(&kept).iter().filter(|op| matches!(op, Op::BatchNorm(_))).count(), 2);
    run("train", &["--model", text(&kept), "--steps", "1"]).exits(0);

    let outcome =
        convoke(&["export", text(&checkpoint), "--to", text(&folded), "--fold", "--opset", "13"]).exits(0);
    assert!(outcome.stderr.contains("2 batch norms"), "{}", outcome.stderr);
    assert!(!operators(&folded).iter().any(|op| matches!(op, Op::BatchNorm(_))));

    convoke(&["export", "resnet20", "--to", text(&small), "--image-size", "16"]).exits(0);
    let shape = onnx::read(&small).unwrap().definition.inputs[0].shape.clone().unwrap();
    assert_eq!(shape[2..], [Dimension::Fixed(16), Dimension::Fixed(16)]);
}
