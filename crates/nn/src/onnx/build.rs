//! Builds messages.

use convoke_memory as memory;
use prost::bytes::Bytes;

use super::Result;
use super::proto::*;
use crate::graph::{Array, Data, Dimension, Kind};

impl NodeProto {
    /// A node of an operator.
    pub(super) fn new(op_type: &str) -> NodeProto {
        NodeProto { op_type: Some(op_type.to_owned()), ..NodeProto::default() }
    }

    pub(super) fn with(mut self, name: &str, attribute: AttributeProto) -> NodeProto {
        self.attribute.push(AttributeProto { name: Some(name.to_owned()), ..attribute });
        self
    }

    pub(super) fn int(self, name: &str, i: i64) -> NodeProto {
        self.with(name, AttributeProto { i: Some(i), r#type: Some(kind::INT), ..AttributeProto::default() })
    }

    pub(super) fn float(self, name: &str, f: f64) -> NodeProto {
        let f = Some(f as f32);
        self.with(name, AttributeProto { f, r#type: Some(kind::FLOAT), ..AttributeProto::default() })
    }

    pub(super) fn ints(self, name: &str, ints: impl IntoIterator<Item = i64>) -> NodeProto {
        let ints = ints.into_iter().collect();
        self.with(name, AttributeProto { ints, r#type: Some(kind::INTS), ..AttributeProto::default() })
    }

    /// An attribute with a number for each axis. Without numbers it is left out, as ONNX has the same defaults.
    pub(super) fn sizes(self, name: &str, sizes: &[usize]) -> NodeProto {
        match sizes {
            [] => self,
            _ => self.ints(name, sizes.iter().map(|&size| number(size))),
        }
    }

    pub(super) fn text(self, name: &str, s: &str) -> NodeProto {
        let s = Some(s.to_owned().into());
        self.with(name, AttributeProto { s, r#type: Some(kind::STRING), ..AttributeProto::default() })
    }

    pub(super) fn tensor(self, name: &str, t: TensorProto) -> NodeProto {
        let t = Some(Box::new(t));
        self.with(name, AttributeProto { t, r#type: Some(kind::TENSOR), ..AttributeProto::default() })
    }
}

/// A size as the format holds it.
pub(super) fn number(size: usize) -> i64 {
    i64::try_from(size).unwrap_or(i64::MAX)
}

/// The type of elements of a kind.
pub(super) fn element_of(kind: Kind) -> i32 {
    match kind {
        Kind::F32 => element::FLOAT,
        Kind::F64 => element::DOUBLE,
        Kind::I64 => element::INT64,
        Kind::Bool => element::BOOL,
    }
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
        data_type: Some(element_of(array.kind())),
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
    let tensor_type = Some(TensorTypeProto { elem_type: Some(element_of(kind)), shape });
    ValueProto { name: Some(name.to_owned()), r#type: Some(TypeProto { tensor_type }) }
}
