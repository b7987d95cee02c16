//! The messages of `onnx.proto`, with the fields that are read or written.
//!
//! Numbers of tensors are not decoded: they stay parts of the file's bytes, and so are subgraphs, of which only the presence
//! counts. So no message contains itself, and decoding does not recurse deeper than this list.

use prost::Message;
use prost::bytes::Bytes;

pub(super) use crate::graph::ops::element;
pub(super) use crate::graph::ops::reading::kind;

/// A model.
#[derive(Clone, PartialEq, Message)]
pub(super) struct ModelProto {
    #[prost(int64, optional, tag = "1")]
    pub(super) ir_version: Option<i64>,
    #[prost(string, optional, tag = "2")]
    pub(super) producer_name: Option<String>,
    #[prost(string, optional, tag = "3")]
    pub(super) producer_version: Option<String>,
    #[prost(message, optional, tag = "7")]
    pub(super) graph: Option<GraphProto>,
    #[prost(message, repeated, tag = "8")]
    pub(super) opset_import: Vec<OpsetProto>,
    #[prost(message, repeated, tag = "14")]
    pub(super) metadata_props: Vec<EntryProto>,
    #[prost(message, repeated, tag = "25")]
    pub(super) functions: Vec<FunctionProto>,
}

/// The version of a domain's operators.
#[derive(Clone, PartialEq, Message)]
pub(super) struct OpsetProto {
    #[prost(string, optional, tag = "1")]
    pub(super) domain: Option<String>,
    #[prost(int64, optional, tag = "2")]
    pub(super) version: Option<i64>,
}

/// A key with a value.
#[derive(Clone, PartialEq, Message)]
pub(super) struct EntryProto {
    #[prost(string, optional, tag = "1")]
    pub(super) key: Option<String>,
    #[prost(string, optional, tag = "2")]
    pub(super) value: Option<String>,
}

/// A graph.
#[derive(Clone, PartialEq, Message)]
pub(super) struct GraphProto {
    #[prost(message, repeated, tag = "1")]
    pub(super) node: Vec<NodeProto>,
    #[prost(string, optional, tag = "2")]
    pub(super) name: Option<String>,
    #[prost(message, repeated, tag = "5")]
    pub(super) initializer: Vec<TensorProto>,
    #[prost(message, repeated, tag = "11")]
    pub(super) input: Vec<ValueProto>,
    #[prost(message, repeated, tag = "12")]
    pub(super) output: Vec<ValueProto>,
    #[prost(message, repeated, tag = "13")]
    pub(super) value_info: Vec<ValueProto>,
    #[prost(message, repeated, tag = "15")]
    pub(super) sparse_initializer: Vec<SparseProto>,
}

/// A sparse tensor, of which only the name is read.
#[derive(Clone, PartialEq, Message)]
pub(super) struct SparseProto {
    #[prost(message, optional, tag = "1")]
    pub(super) values: Option<TensorProto>,
}

/// A function: nodes under the name of an operator.
#[derive(Clone, PartialEq, Message)]
pub(super) struct FunctionProto {
    #[prost(string, optional, tag = "1")]
    pub(super) name: Option<String>,
    #[prost(string, repeated, tag = "4")]
    pub(super) input: Vec<String>,
    #[prost(string, repeated, tag = "5")]
    pub(super) output: Vec<String>,
    #[prost(string, repeated, tag = "6")]
    pub(super) attribute: Vec<String>,
    #[prost(message, repeated, tag = "7")]
    pub(super) node: Vec<NodeProto>,
    #[prost(message, repeated, tag = "9")]
    pub(super) opset_import: Vec<OpsetProto>,
    #[prost(string, optional, tag = "10")]
    pub(super) domain: Option<String>,
    #[prost(message, repeated, tag = "11")]
    pub(super) attribute_proto: Vec<AttributeProto>,
    #[prost(string, optional, tag = "13")]
    pub(super) overload: Option<String>,
}

/// A node.
#[derive(Clone, PartialEq, Message)]
pub(super) struct NodeProto {
    #[prost(string, repeated, tag = "1")]
    pub(super) input: Vec<String>,
    #[prost(string, repeated, tag = "2")]
    pub(super) output: Vec<String>,
    #[prost(string, optional, tag = "3")]
    pub(super) name: Option<String>,
    #[prost(string, optional, tag = "4")]
    pub(super) op_type: Option<String>,
    #[prost(message, repeated, tag = "5")]
    pub(super) attribute: Vec<AttributeProto>,
    #[prost(string, optional, tag = "7")]
    pub(super) domain: Option<String>,
    #[prost(string, optional, tag = "8")]
    pub(super) overload: Option<String>,
}

/// An attribute.
#[derive(Clone, PartialEq, Message)]
pub(super) struct AttributeProto {
    #[prost(string, optional, tag = "1")]
    pub(super) name: Option<String>,
    #[prost(float, optional, tag = "2")]
    pub(super) f: Option<f32>,
    #[prost(int64, optional, tag = "3")]
    pub(super) i: Option<i64>,
    #[prost(bytes = "bytes", optional, tag = "4")]
    pub(super) s: Option<Bytes>,
    #[prost(message, optional, boxed, tag = "5")]
    pub(super) t: Option<Box<TensorProto>>,
    /// A subgraph, undecoded.
    #[prost(bytes = "bytes", optional, tag = "6")]
    pub(super) g: Option<Bytes>,
    #[prost(float, repeated, packed = "false", tag = "7")]
    pub(super) floats: Vec<f32>,
    #[prost(int64, repeated, packed = "false", tag = "8")]
    pub(super) ints: Vec<i64>,
    /// Subgraphs, undecoded.
    #[prost(bytes = "bytes", repeated, tag = "11")]
    pub(super) graphs: Vec<Bytes>,
    /// One of [`kind`].
    #[prost(int32, optional, tag = "20")]
    pub(super) r#type: Option<i32>,
    #[prost(string, optional, tag = "21")]
    pub(super) ref_attr_name: Option<String>,
}

/// The types of attributes of which only the presence counts; the others are in [`kind`].
pub(super) const GRAPH: i32 = 5;
pub(super) const GRAPHS: i32 = 10;

/// A tensor with its numbers, which are in one of several fields by their type, or in `raw_data`.
#[derive(Clone, PartialEq, Message)]
pub(super) struct TensorProto {
    #[prost(int64, repeated, packed = "false", tag = "1")]
    pub(super) dims: Vec<i64>,
    /// One of [`element`].
    #[prost(int32, optional, tag = "2")]
    pub(super) data_type: Option<i32>,
    #[prost(bytes = "bytes", optional, tag = "3")]
    pub(super) segment: Option<Bytes>,
    /// Packed numbers, as the other fields of this kind.
    #[prost(bytes = "bytes", repeated, tag = "4")]
    pub(super) float_data: Vec<Bytes>,
    #[prost(bytes = "bytes", repeated, tag = "5")]
    pub(super) int32_data: Vec<Bytes>,
    #[prost(bytes = "bytes", repeated, tag = "7")]
    pub(super) int64_data: Vec<Bytes>,
    #[prost(string, optional, tag = "8")]
    pub(super) name: Option<String>,
    #[prost(bytes = "bytes", optional, tag = "9")]
    pub(super) raw_data: Option<Bytes>,
    #[prost(bytes = "bytes", repeated, tag = "10")]
    pub(super) double_data: Vec<Bytes>,
    #[prost(bytes = "bytes", repeated, tag = "11")]
    pub(super) uint64_data: Vec<Bytes>,
    #[prost(message, repeated, tag = "13")]
    pub(super) external_data: Vec<EntryProto>,
    /// 1: the numbers are in another file.
    #[prost(int32, optional, tag = "14")]
    pub(super) data_location: Option<i32>,
}

/// A value with its type.
#[derive(Clone, PartialEq, Message)]
pub(super) struct ValueProto {
    #[prost(string, optional, tag = "1")]
    pub(super) name: Option<String>,
    #[prost(message, optional, tag = "2")]
    pub(super) r#type: Option<TypeProto>,
}

/// A type, if it is that of a tensor.
#[derive(Clone, PartialEq, Message)]
pub(super) struct TypeProto {
    #[prost(message, optional, tag = "1")]
    pub(super) tensor_type: Option<TensorTypeProto>,
}

/// The type of a tensor.
#[derive(Clone, PartialEq, Message)]
pub(super) struct TensorTypeProto {
    /// One of [`element`].
    #[prost(int32, optional, tag = "1")]
    pub(super) elem_type: Option<i32>,
    #[prost(message, optional, tag = "2")]
    pub(super) shape: Option<ShapeProto>,
}

/// A shape.
#[derive(Clone, PartialEq, Message)]
pub(super) struct ShapeProto {
    #[prost(message, repeated, tag = "1")]
    pub(super) dim: Vec<DimensionProto>,
}

/// A size, or its name.
#[derive(Clone, PartialEq, Message)]
pub(super) struct DimensionProto {
    #[prost(int64, optional, tag = "1")]
    pub(super) dim_value: Option<i64>,
    #[prost(string, optional, tag = "2")]
    pub(super) dim_param: Option<String>,
}
