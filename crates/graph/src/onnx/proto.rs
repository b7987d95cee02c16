//! The messages of `onnx.proto`, with the fields that are read or written.
//!
//! Numbers of tensors are not decoded: they stay parts of the file's bytes, and so are subgraphs, of which only the presence
//! counts. So no message contains itself, and decoding does not recurse deeper than this list.

use prost::Message;
use prost::bytes::Bytes;

use crate::graph::Node;
pub(super) use crate::graph::ops::element;
pub(super) use crate::graph::ops::reading::kind;

/// What a field holds, as far as it takes memory.
pub(super) enum Field {
    Message(Format),
    /// A text, which is copied.
    Text,
    /// Bytes, which are not copied. Numbers of tensors must be of this kind.
    Bytes,
    /// Bytes that older writers put in single numbers, which are refused.
    Packed,
    /// A number of a list.
    Number,
    /// Nothing, or a number with a fixed place.
    Other,
}

/// What a message takes.
#[derive(Clone, Copy)]
pub(super) struct Format {
    /// The bytes of one message in memory.
    pub(super) size: usize,
    /// The field with a tag.
    pub(super) field: fn(u64) -> Field,
}

/// The type of a field.
trait Held {
    const FIELD: Field;
}

macro_rules! held {
    ($($type:ty: $field:expr;)*) => {
        $(impl Held for $type {
            const FIELD: Field = $field;
        })*
    };
}

held! {
    Option<String>: Field::Text;
    Vec<String>: Field::Text;
    Option<Bytes>: Field::Bytes;
    Vec<Bytes>: Field::Packed;
    Vec<i64>: Field::Number;
    Vec<f32>: Field::Number;
    Option<i32>: Field::Other;
    Option<i64>: Field::Other;
    Option<f32>: Field::Other;
    Option<Box<TensorProto>>: Field::Message(TensorProto::FORMAT);
}

/// Messages, with the tag, name, kind and type of each field. A message that becomes something else takes the memory of both.
macro_rules! messages {
    ($($(#[$doc:meta])* $message:ident $(+ $becomes:ty)? {
        $($tag:tt $name:ident [$($kind:tt)*] $type:ty,)*
    })*) => {
        $(
            $(#[$doc])*
            #[derive(Clone, PartialEq, Message)]
            pub(super) struct $message {
                $(
                    #[prost($($kind)*, tag = $tag)]
                    pub(super) $name: $type,
                )*
            }

            impl $message {
                pub(super) const FORMAT: Format = Format {
                    size: size_of::<$message>() $(+ size_of::<$becomes>())?,
                    field: |tag| match tag {
                        $($tag => <$type>::FIELD,)*
                        _ => Field::Other,
                    },
                };
            }

            held! {
                Option<$message>: Field::Message($message::FORMAT);
                Vec<$message>: Field::Message($message::FORMAT);
            }
        )*
    };
}

messages! {
    /// A model.
    ModelProto {
        1 ir_version [int64, optional] Option<i64>,
        2 producer_name [string, optional] Option<String>,
        3 producer_version [string, optional] Option<String>,
        7 graph [message, optional] Option<GraphProto>,
        8 opset_import [message, repeated] Vec<OpsetProto>,
        14 metadata_props [message, repeated] Vec<EntryProto>,
        25 functions [message, repeated] Vec<FunctionProto>,
    }

    /// The version of a domain's operators.
    OpsetProto {
        1 domain [string, optional] Option<String>,
        2 version [int64, optional] Option<i64>,
    }

    /// A key with a value.
    EntryProto {
        1 key [string, optional] Option<String>,
        2 value [string, optional] Option<String>,
    }

    /// A graph.
    GraphProto {
        1 node [message, repeated] Vec<NodeProto>,
        2 name [string, optional] Option<String>,
        5 initializer [message, repeated] Vec<TensorProto>,
        11 input [message, repeated] Vec<ValueProto>,
        12 output [message, repeated] Vec<ValueProto>,
        13 value_info [message, repeated] Vec<ValueProto>,
        15 sparse_initializer [message, repeated] Vec<SparseProto>,
    }

    /// A sparse tensor, of which only the name is read.
    SparseProto { 1 values [message, optional] Option<TensorProto>, }

    /// A function: nodes under the name of an operator.
    FunctionProto {
        1 name [string, optional] Option<String>,
        4 input [string, repeated] Vec<String>,
        5 output [string, repeated] Vec<String>,
        6 attribute [string, repeated] Vec<String>,
        7 node [message, repeated] Vec<NodeProto>,
        9 opset_import [message, repeated] Vec<OpsetProto>,
        10 domain [string, optional] Option<String>,
        11 attribute_proto [message, repeated] Vec<AttributeProto>,
        13 overload [string, optional] Option<String>,
    }

    /// A node, which becomes one of a definition.
    NodeProto + Node {
        1 input [string, repeated] Vec<String>,
        2 output [string, repeated] Vec<String>,
        3 name [string, optional] Option<String>,
        4 op_type [string, optional] Option<String>,
        5 attribute [message, repeated] Vec<AttributeProto>,
        7 domain [string, optional] Option<String>,
        8 overload [string, optional] Option<String>,
    }

    /// An attribute.
    AttributeProto {
        1 name [string, optional] Option<String>,
        2 f [float, optional] Option<f32>,
        3 i [int64, optional] Option<i64>,
        4 s [bytes = "bytes", optional] Option<Bytes>,
        5 t [message, optional, boxed] Option<Box<TensorProto>>,
        // A subgraph, undecoded.
        6 g [bytes = "bytes", optional] Option<Bytes>,
        7 floats [float, repeated, packed = "false"] Vec<f32>,
        8 ints [int64, repeated, packed = "false"] Vec<i64>,
        // Subgraphs, undecoded.
        11 graphs [bytes = "bytes", repeated] Vec<Bytes>,
        // One of [`kind`].
        20 r#type [int32, optional] Option<i32>,
        21 ref_attr_name [string, optional] Option<String>,
    }

    /// A tensor with its numbers, which are in one of several fields by their type, or in `raw_data`.
    TensorProto {
        1 dims [int64, repeated, packed = "false"] Vec<i64>,
        // One of [`element`].
        2 data_type [int32, optional] Option<i32>,
        3 segment [bytes = "bytes", optional] Option<Bytes>,
        // Packed numbers, as the other fields of this kind.
        4 float_data [bytes = "bytes", repeated] Vec<Bytes>,
        5 int32_data [bytes = "bytes", repeated] Vec<Bytes>,
        7 int64_data [bytes = "bytes", repeated] Vec<Bytes>,
        8 name [string, optional] Option<String>,
        9 raw_data [bytes = "bytes", optional] Option<Bytes>,
        10 double_data [bytes = "bytes", repeated] Vec<Bytes>,
        11 uint64_data [bytes = "bytes", repeated] Vec<Bytes>,
        13 external_data [message, repeated] Vec<EntryProto>,
        // 1: the numbers are in another file.
        14 data_location [int32, optional] Option<i32>,
    }

    /// A value with its type.
    ValueProto {
        1 name [string, optional] Option<String>,
        2 r#type [message, optional] Option<TypeProto>,
    }

    /// A type, if it is that of a tensor.
    TypeProto { 1 tensor_type [message, optional] Option<TensorTypeProto>, }

    /// The type of a tensor.
    TensorTypeProto {
        // One of [`element`].
        1 elem_type [int32, optional] Option<i32>,
        2 shape [message, optional] Option<ShapeProto>,
    }

    /// A shape.
    ShapeProto { 1 dim [message, repeated] Vec<DimensionProto>, }

    /// A size, or its name.
    DimensionProto {
        1 dim_value [int64, optional] Option<i64>,
        2 dim_param [string, optional] Option<String>,
    }
}

/// The types of attributes of which only the presence counts; the others are in [`kind`].
pub(super) const GRAPH: i32 = 5;
pub(super) const GRAPHS: i32 = 10;
