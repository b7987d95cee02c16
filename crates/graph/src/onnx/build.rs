//! Builds messages.

use convoke_memory as memory;
use prost::bytes::Bytes;

use super::Result;
use super::proto::*;
use super::tensor::width;
use crate::graph::ops::writing::{OnnxNode, Value, number};
use crate::graph::{Array, Data, Dimension, Kind};

/// A node as the format holds it.
pub(super) fn node(node: OnnxNode<'_>) -> Result<NodeProto> {
    let OnnxNode { operator, name, inputs, outputs, attributes } = node;
    let (op_type, name) = (Some(operator.to_owned()), Some(name));
    let proto = NodeProto { op_type, name, input: inputs, output: outputs, ..NodeProto::default() };
    attributes.into_iter().try_fold(proto, |proto, (name, value)| {
        Ok(match value {
            Value::Int(int) => proto.int(name, int),
            Value::Float(float) => proto.float(name, float),
            Value::Ints(ints) => proto.ints(name, ints),
            Value::Text(text) => proto.text(name, text),
            Value::Array(array) => proto.tensor(name, tensor("", &array)?),
        })
    })
}

impl NodeProto {
    pub(super) fn with(mut self, name: &str, attribute: AttributeProto) -> NodeProto {
        self.attribute.push(AttributeProto { name: Some(name.to_owned()), ..attribute });
        self
    }

    pub(super) fn int(self, name: &str, i: i64) -> NodeProto {
        self.with(name, AttributeProto { i: Some(i), r#type: Some(kind::INT), ..Default::default() })
    }

    pub(super) fn float(self, name: &str, f: f32) -> NodeProto {
        self.with(name, AttributeProto { f: Some(f), r#type: Some(kind::FLOAT), ..Default::default() })
    }

    pub(super) fn ints(self, name: &str, ints: impl Into<Vec<i64>>) -> NodeProto {
        let ints = ints.into();
        self.with(name, AttributeProto { ints, r#type: Some(kind::INTS), ..Default::default() })
    }

    pub(super) fn text(self, name: &str, text: &str) -> NodeProto {
        let s = Some(text.to_owned().into());
        self.with(name, AttributeProto { s, r#type: Some(kind::STRING), ..Default::default() })
    }

    pub(super) fn tensor(self, name: &str, tensor: TensorProto) -> NodeProto {
        let t = Some(Box::new(tensor));
        self.with(name, AttributeProto { t, r#type: Some(kind::TENSOR), ..Default::default() })
    }
}

/// How many bytes an array takes in a file.
pub(super) fn byte_len(array: &Array) -> u64 {
    array.len() as u64 * width(element::of(array.kind())) as u64
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
