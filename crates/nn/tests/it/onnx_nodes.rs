//! ONNX's own tests of single operators.
//!
//! `CONVOKE_ONNX_NODE_TESTS` names the folder `backend/test/data/node` of ONNX's package (up to version 1.22 it has one). Without
//! it this test does nothing.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;

use convoke_autograd::{DType, Device, Tensor};
use convoke_nn::graph::{Array, Definition, Dimension, Graph, Input, Kind, Stored};
use convoke_nn::modules::ConvBnMode;
use convoke_nn::{Init, ModuleExt, onnx};

/// Shape and elements.
type Output = (Vec<usize>, Vec<f64>);

/// Whether an input, by its number, is given as a tensor.
type IsTensor<'a> = dyn Fn(usize, &Array) -> bool + 'a;

/// What became of one test.
enum Outcome {
    Passed,
    /// The file was not read, or the node not run, for this reason.
    Refused(String),
    Wrong(String),
}

fn arrays(folder: &Path, what: &str) -> Result<Vec<Array>, String> {
    (0..)
        .map(|index| folder.join(format!("{what}_{index}.pb")))
        .take_while(|file| file.is_file())
        .map(|file| onnx::read_tensor(&file).map_err(|error| error.to_string()))
        .collect()
}

/// Runs the model with the inputs that `is_tensor` names as tensors, and the others stored.
fn run(definition: &Definition, inputs: &[Array], is_tensor: &IsTensor<'_>) -> Result<Vec<Output>, String> {
    let mut definition = definition.clone();
    let (device, mut tensors) = (Device::cpu().unwrap(), Vec::new());
    let mut left = Vec::new();
    for (index, (input, array)) in definition.inputs.drain(..).zip(inputs).enumerate() {
        if is_tensor(index, array) {
            tensors.push(array.to_tensor(&device, DType::F32).unwrap());
            left.push(input);
        } else {
            definition.stored.push(Stored { name: input.name, values: array.clone().into(), trained: None });
        }
    }
    if left.is_empty() {
        // Everything is known, but a model has an input.
        let shape = Some(vec![Dimension::Fixed(1)]);
        left.push(Input { name: "nothing".into(), kind: Kind::F32, shape });
        tensors.push(Tensor::zeros(&device, &[1], DType::F32).unwrap());
    }
    definition.inputs = left;
    let graph = Graph::new(&Arc::new(definition), &Init::new(&device, 0), ConvBnMode::Fused)
        .map_err(|error| error.to_string())?;
    graph.eval();
    let outputs = graph.run(&tensors).map_err(|error| error.to_string())?;
    let values = |tensor: Tensor| {
        let shape = tensor.shape().to_vec();
        (shape, tensor.detach().to_dtype(DType::F64).unwrap().to_vec().unwrap())
    };
    Ok(outputs.into_iter().map(values).collect())
}

/// The first difference, by the tolerance of ONNX's own runner.
fn difference(found: &[Output], expected: &[Array]) -> Option<String> {
    if found.len() != expected.len() {
        return Some(format!("{} outputs, expected {}", found.len(), expected.len()));
    }
    for ((shape, values), expected) in found.iter().zip(expected) {
        if shape != expected.shape() {
            return Some(format!("shape {shape:?}, expected {:?}", expected.shape()));
        }
        for (&found, expected) in values.iter().zip(expected.to_f64()) {
            let same = found == expected
                || (found.is_nan() && expected.is_nan())
                || (found - expected).abs() <= 1e-6 + 1e-3 * expected.abs();
            if !same {
                return Some(format!("{found}, expected {expected}"));
            }
        }
    }
    None
}

fn outcome(folder: &Path) -> Outcome {
    let model = match onnx::read(&folder.join("model.onnx")) {
        Ok(model) => model,
        Err(error) => return Outcome::Refused(error.to_string()),
    };
    let data = folder.join("test_data_set_0");
    let (inputs, expected) = match (arrays(&data, "input"), arrays(&data, "output")) {
        (Ok(inputs), Ok(expected)) => (inputs, expected),
        (Err(error), _) | (_, Err(error)) => return Outcome::Refused(error),
    };
    if inputs.len() != model.definition.inputs.len() {
        return Outcome::Refused("an input is not a tensor".into());
    }
    let float = |array: &Array| array.kind().is_float();
    let ways: [&IsTensor<'_>; 3] =
        [&|index, array| index == 0 && float(array), &|_, array| float(array), &|_, _| false];
    let mut refused = String::new();
    let mut wrong = None;
    for way in ways {
        match catch_unwind(AssertUnwindSafe(|| run(&model.definition, &inputs, way))) {
            Err(_) => return Outcome::Wrong("it panicked".into()),
            Ok(Err(reason)) if refused.is_empty() => refused = reason,
            Ok(Err(_)) => {}
            Ok(Ok(found)) => match difference(&found, &expected) {
                None => return Outcome::Passed,
                Some(difference) => {
                    wrong.get_or_insert(difference);
                }
            },
        }
    }
    match wrong {
        Some(difference) => Outcome::Wrong(difference),
        None => Outcome::Refused(refused),
    }
}

#[test]
fn every_node_that_is_read_computes_what_onnx_says() {
    let Ok(folder) = std::env::var("CONVOKE_ONNX_NODE_TESTS") else {
        println!("CONVOKE_ONNX_NODE_TESTS is not set: nothing is run");
        return;
    };
    let mut folders: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    folders.sort();
    // Random outputs, or those of a training mode that the model's own mode replaces here.
    let random = ["training_dropout", "training_mode", "bernoulli"];
    // ONNX takes sizes of 2.4 and 3.2 pixels for these tests; onnxruntime and PyTorch take whole ones, as we do.
    let fractions = ["linear", "cubic"].map(|mode| format!("resize_downsample_scales_{mode}_align_corners"));
    let others = [&random[..], &fractions.each_ref().map(String::as_str)].concat();
    let (mut passed, mut wrong) = (0, Vec::new());
    let mut refused: BTreeMap<String, usize> = BTreeMap::new();
    for folder in &folders {
        let name = folder.file_name().unwrap().to_string_lossy().into_owned();
        if others.iter().any(|other| name.contains(other)) {
            continue;
        }
        match outcome(folder) {
            Outcome::Passed => passed += 1,
            Outcome::Refused(reason) => {
                println!("refused {name}: {}", reason.chars().take(300).collect::<String>());
                let kind = match reason.split_once("has the operator ") {
                    Some((_, rest)) => rest.split(' ').next().unwrap().to_owned(),
                    None => "for another reason".into(),
                };
                *refused.entry(kind).or_default() += 1;
            }
            Outcome::Wrong(reason) => wrong.push(format!("{name}: {reason}")),
        }
    }
    println!("{passed} passed, {} wrong, refused by operator: {refused:#?}", wrong.len());
    assert!(wrong.is_empty(), "{wrong:#?}");
    assert!(passed > 100, "only {passed} tests ran");
}
