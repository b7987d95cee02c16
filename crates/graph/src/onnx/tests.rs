//! Tests of reading and writing, with files that are made here.

mod einsum;
mod hostile;
mod reading;
mod writing;

use prost::Message;

use super::proto::*;
use super::{Model, OnnxError, read_bytes};

/// A node with these inputs and outputs, parted by spaces; `-` is one that is left out.
fn node(op_type: &str, inputs: &str, outputs: &str) -> NodeProto {
    let names = |text: &str| text.split_whitespace().map(|name| name.replace('-', "")).collect();
    NodeProto {
        op_type: Some(op_type.to_owned()),
        input: names(inputs),
        output: names(outputs),
        ..NodeProto::default()
    }
}

/// A stored tensor of ones.
fn ones(name: &str, dims: &[i64]) -> TensorProto {
    let len = dims.iter().product::<i64>() as usize;
    let raw = 1.0f32.to_le_bytes().repeat(len);
    TensorProto { raw_data: Some(raw.into()), ..empty(name, dims, element::FLOAT) }
}

/// A tensor without numbers.
fn empty(name: &str, dims: &[i64], data_type: i32) -> TensorProto {
    TensorProto {
        name: Some(name.to_owned()),
        dims: dims.to_vec(),
        data_type: Some(data_type),
        ..TensorProto::default()
    }
}

/// A value of a graph; a size of 0 is open.
fn value(name: &str, elem_type: i32, dims: &[i64]) -> ValueProto {
    let open = |size: &i64| DimensionProto {
        dim_value: (*size != 0).then_some(*size),
        dim_param: (*size == 0).then(|| "N".to_owned()),
    };
    let shape = Some(ShapeProto { dim: dims.iter().map(open).collect() });
    let tensor_type = Some(TensorTypeProto { elem_type: Some(elem_type), shape });
    ValueProto { name: Some(name.to_owned()), r#type: Some(TypeProto { tensor_type }) }
}

/// A model of nodes over the input `x`, which has four dimensions; its output is that of the last node.
fn model(opset: i64, stored: Vec<TensorProto>, nodes: Vec<NodeProto>) -> ModelProto {
    let output = nodes.last().and_then(|node| node.output.first()).cloned();
    ModelProto {
        ir_version: Some(8),
        producer_name: Some("pytorch".to_owned()),
        opset_import: vec![OpsetProto { domain: None, version: Some(opset) }],
        graph: Some(GraphProto {
            name: Some("test".to_owned()),
            node: nodes,
            initializer: stored,
            input: vec![value("x", element::FLOAT, &[0, 3, 8, 8])],
            output: vec![ValueProto { name: output, r#type: None }],
            ..GraphProto::default()
        }),
        ..ModelProto::default()
    }
}

fn read(model: &ModelProto) -> Result<Model, OnnxError> {
    read_bytes(&model.encode_to_vec(), None)
}

/// The text of the error of a model that must not be read.
fn refused(model: &ModelProto) -> String {
    match read(model) {
        Ok(model) => panic!("it was read: {model:?}"),
        Err(error) => error.to_string(),
    }
}

/// Reads the models of ONNX's own tests of operators, of which the folder is named by `CONVOKE_ONNX_NODE_TESTS`, and prints which
/// are refused. Nothing may panic.
#[test]
fn onnx_node_tests_are_read_or_refused() {
    let Some(folder) = std::env::var_os("CONVOKE_ONNX_NODE_TESTS") else { return };
    let (mut read, mut refused) = (0, std::collections::BTreeMap::<String, Vec<String>>::new());
    for entry in std::fs::read_dir(folder).unwrap() {
        let entry = entry.unwrap();
        let file = entry.path().join("model.onnx");
        if !file.is_file() {
            continue;
        }
        match super::read(&file) {
            Ok(model) => {
                read += 1;
                rewrite(&entry.file_name().to_string_lossy(), &model);
            }
            Err(OnnxError::File { error, .. }) => {
                let reason = match *error {
                    OnnxError::UnknownOperator { operator, domain, .. } => {
                        format!("unknown {domain} {operator}")
                    }
                    OnnxError::Node { operator, reason, .. } => format!("known {operator}: {reason}"),
                    OnnxError::Quantized { .. } => "quantized".to_owned(),
                    OnnxError::Subgraph { .. } => "subgraph".to_owned(),
                    other => other.to_string(),
                };
                refused.entry(reason).or_default().push(entry.file_name().to_string_lossy().into_owned());
            }
            Err(error) => panic!("{error}"),
        }
    }
    for (reason, files) in &refused {
        println!("{:4} {reason}: {}", files.len(), files[..files.len().min(3)].join(", "));
    }
    println!("{read} read, {} refused", refused.values().map(Vec::len).sum::<usize>());
    assert!(read > 0);
}

/// Writes a model that was read, and reads it again; into the folder `CONVOKE_ONNX_WRITTEN`, if there is one.
fn rewrite(name: &str, model: &Model) {
    for (opset, training) in [(13, false), (17, false), (17, true), (21, false), (24, false)] {
        let options = super::WriteOptions { opset: Some(opset), training, ..super::WriteOptions::default() };
        match super::write(&model.definition, &Default::default(), &options) {
            Ok(bytes) => {
                if let Some(folder) = std::env::var_os("CONVOKE_ONNX_WRITTEN") {
                    let mode = if training { ".training" } else { "" };
                    let file = std::path::Path::new(&folder).join(format!("{name}{mode}.{opset}.onnx"));
                    std::fs::write(file, &bytes).unwrap();
                }
                read_bytes(&bytes, None).unwrap_or_else(|error| panic!("{name} {opset}: {error}"));
            }
            Err(OnnxError::Unwritable { operator, reason, .. }) => {
                println!("{name} {opset} {operator}: {reason}")
            }
            Err(error) => panic!("{name}: {error}"),
        }
    }
}
