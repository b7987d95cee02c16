//! Builds messages.

use convoke_memory as memory;
use prost::bytes::Bytes;

use super::Result;
use super::proto::*;
use crate::graph::ops::writing::{OnnxNode, Value, number};
use crate::graph::{Array, Data, Dimension, Kind};

/// A node as the format holds it.
pub(super) fn node(node: OnnxNode<'_>) -> Result<NodeProto> {
    let OnnxNode { operator, name, inputs, outputs, attributes } = node;
    let attribute =
        attributes.into_iter().map(|(name, value)| attribute(name, value)).collect::<Result<_>>()?;
    let (op_type, name) = (Some(operator.to_owned()), Some(name));
    Ok(NodeProto { op_type, name, input: inputs, output: outputs, attribute, ..NodeProto::default() })
}

/// An attribute as the format holds it.
pub(super) fn attribute(name: &str, value: Value<'_>) -> Result<AttributeProto> {
    let (name, none) = (Some(name.to_owned()), AttributeProto::default());
    let (kind, valued) = match value {
        Value::Int(int) => (kind::INT, AttributeProto { i: Some(int), ..none }),
        Value::Float(float) => (kind::FLOAT, AttributeProto { f: Some(float), ..none }),
        Value::Ints(ints) => (kind::INTS, AttributeProto { ints, ..none }),
        Value::Text(text) => (kind::STRING, AttributeProto { s: Some(text.into()), ..none }),
        Value::Array(array) => {
            (kind::TENSOR, AttributeProto { t: Some(Box::new(tensor("", &array)?)), ..none })
        }
    };
    Ok(AttributeProto { name, r#type: Some(kind), ..valued })
}

/// How many bytes an array takes in a file.
pub(super) fn byte_len(array: &Array) -> u64 {
    let width = match array.kind() {
        Kind::F32 => 4,
        Kind::F64 | Kind::I64 => 8,
        Kind::Bool => 1,
    };
    array.len() as u64 * width
}

/// An array as the format holds it.
pub(super) fn tensor(name: &str, array: &Array) -> Result<TensorProto> {
    let mut bytes = memory::with_capacity(usize::try_from(byte_len(array)).unwrap_or(usize::MAX))?;
    match array.data() {
        Data::F32(data) => data.iter().for_each(|x| bytes.extend_from_slice(&x.to_le_bytes())),
        Data::F64(data) => data.iter().for_each(|x| bytes.extend_from_slice(&x.to_le_bytes())),
        Data::I64(data) => data.iter().for_each(|x| bytes.extend_from_slice(&x.to_le_bytes())),
        Data::Bool(data) => bytes.extend(data.iter().map(|&x| u8::from(x))),
    }
    Ok(TensorProto {
        dims: array.shape().iter().map(|&size| number(size)).collect(),
        data_type: Some(element::of(array.kind())),
        name: (!name.is_empty()).then(|| name.to_owned()),
        raw_data: Some(Bytes::from(bytes)),
        ..TensorProto::default()
    })
}

/// A value with its type, and its shape if it is known.
pub(super) fn value(name: &str, kind: Kind, shape: Option<&[Dimension]>) -> ValueProto {
    let dimension = |dimension: &Dimension| match dimension {
        Dimension::Fixed(size) => DimensionProto { dim_value: Some(number(*size)), dim_param: None },
        Dimension::Open(name) => {
            DimensionProto { dim_value: None, dim_param: (!name.is_empty()).then(|| name.clone()) }
        }
    };
    let shape = shape.map(|shape| ShapeProto { dim: shape.iter().map(dimension).collect() });
    let tensor_type = Some(TensorTypeProto { elem_type: Some(element::of(kind)), shape });
    ValueProto { name: Some(name.to_owned()), r#type: Some(TypeProto { tensor_type }) }
}
