//! Estimates how much memory a file takes when it is decoded, before it is.
//!
//! An empty node takes two bytes in a file and two hundred in memory. So the file is walked once as the decoder will walk it, and
//! every message, text and number of a list is counted with its size in memory.

use super::proto::*;
use crate::graph::Node;

/// What a file may take besides four times its length.
const LEAST_LIMIT: u64 = 32 << 20;

/// How many bytes what is made of a file of this length may take.
pub(super) fn limit(len: u64) -> u64 {
    len.saturating_mul(4).saturating_add(LEAST_LIMIT)
}

/// A message of the format.
#[derive(Clone, Copy)]
enum Message {
    Model,
    Graph,
    Function,
    Node,
    Attribute,
    Tensor,
    Sparse,
    Value,
    Type,
    TensorType,
    Shape,
    Dimension,
    Opset,
    Entry,
}

/// What a field holds, as far as it takes memory.
enum Field {
    Message(Message),
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

impl Message {
    fn field(self, tag: u64) -> Field {
        use Message as M;
        match (self, tag) {
            (M::Model, 7) => Field::Message(M::Graph),
            (M::Model, 8) | (M::Function, 9) => Field::Message(M::Opset),
            (M::Model, 14) | (M::Tensor, 13) => Field::Message(M::Entry),
            (M::Model, 25) => Field::Message(M::Function),
            (M::Graph, 1) | (M::Function, 7) => Field::Message(M::Node),
            (M::Graph, 5) | (M::Attribute, 5) | (M::Sparse, 1) => Field::Message(M::Tensor),
            (M::Graph, 11..=13) => Field::Message(M::Value),
            (M::Graph, 15) => Field::Message(M::Sparse),
            (M::Node, 5) | (M::Function, 11) => Field::Message(M::Attribute),
            (M::Value, 2) => Field::Message(M::Type),
            (M::Type, 1) => Field::Message(M::TensorType),
            (M::TensorType, 2) => Field::Message(M::Shape),
            (M::Shape, 1) => Field::Message(M::Dimension),
            (M::Model, 2 | 3)
            | (M::Graph, 2)
            | (M::Function, 1 | 4 | 5 | 6 | 10 | 13)
            | (M::Node, 1..=4 | 7 | 8)
            | (M::Attribute, 1 | 21)
            | (M::Tensor, 8)
            | (M::Value, 1)
            | (M::Dimension, 2)
            | (M::Opset, 1)
            | (M::Entry, 1 | 2) => Field::Text,
            (M::Attribute, 4 | 6 | 11) | (M::Tensor, 3 | 9) => Field::Bytes,
            (M::Tensor, 4 | 5 | 7 | 10 | 11) => Field::Packed,
            (M::Attribute, 7 | 8) | (M::Tensor, 1) => Field::Number,
            _ => Field::Other,
        }
    }

    /// The bytes of one message in memory.
    fn size(self) -> usize {
        match self {
            Message::Model => size_of::<ModelProto>(),
            Message::Graph => size_of::<GraphProto>(),
            Message::Function => size_of::<FunctionProto>(),
            // A node of a file becomes a node of a definition.
            Message::Node => size_of::<NodeProto>() + size_of::<Node>(),
            Message::Attribute => size_of::<AttributeProto>(),
            Message::Tensor => size_of::<TensorProto>(),
            Message::Sparse => size_of::<SparseProto>(),
            Message::Value => size_of::<ValueProto>(),
            Message::Type => size_of::<TypeProto>(),
            Message::TensorType => size_of::<TensorTypeProto>(),
            Message::Shape => size_of::<ShapeProto>(),
            Message::Dimension => size_of::<DimensionProto>(),
            Message::Opset => size_of::<OpsetProto>(),
            Message::Entry => size_of::<EntryProto>(),
        }
    }
}

/// How many bytes decoding a model takes, without what stays in the file's bytes.
///
/// # Errors
/// Why it is no model.
pub(super) fn decoded_size(bytes: &[u8]) -> Result<u64, String> {
    message_size(bytes, Message::Model)
}

/// As [`decoded_size`], of a tensor.
pub(super) fn decoded_tensor_size(bytes: &[u8]) -> Result<u64, String> {
    message_size(bytes, Message::Tensor)
}

/// The depth is that of the format: no message contains itself.
fn message_size(mut bytes: &[u8], message: Message) -> Result<u64, String> {
    // A list that grows has up to twice the room that it needs.
    let doubled = |size: usize| 2 * size as u64;
    let mut size: u64 = 0;
    while !bytes.is_empty() {
        let key = varint(&mut bytes)?;
        let field = message.field(key >> 3);
        match key & 7 {
            0 => {
                varint(&mut bytes)?;
                match field {
                    Field::Number => size += doubled(size_of::<i64>()),
                    Field::Packed => return Err(UNPACKED.to_owned()),
                    _ => {}
                }
            }
            1 | 5 => {
                let len = if key & 7 == 1 { 8 } else { 4 };
                bytes = bytes.get(len..).ok_or(CUT)?;
                match field {
                    Field::Number => size += doubled(size_of::<i64>()),
                    Field::Packed => return Err(UNPACKED.to_owned()),
                    _ => {}
                }
            }
            2 => {
                let len = usize::try_from(varint(&mut bytes)?).map_err(|_| CUT)?;
                let (inner, rest) = bytes.split_at_checked(len).ok_or(CUT)?;
                bytes = rest;
                size += match field {
                    Field::Message(message) => doubled(message.size()) + message_size(inner, message)?,
                    // Names are copied into tables of all names, of those that are read, and of ranks.
                    Field::Text => 128 + 3 * len as u64,
                    Field::Bytes | Field::Packed => doubled(size_of::<prost::bytes::Bytes>()),
                    // As many numbers as bytes at most.
                    Field::Number => doubled(size_of::<i64>()) * len as u64,
                    Field::Other => 0,
                };
            }
            kind => return Err(format!("a field of kind {kind}, which ONNX does not have")),
        }
    }
    Ok(size)
}

const CUT: &str = "it ends within a field";
const UNPACKED: &str = "its tensors hold numbers one by one instead of packed, which no current program writes: load it and save \
                        it again with onnx.save";

/// Reads a number of the wire format.
///
/// # Errors
/// If it does not end.
pub(super) fn varint(bytes: &mut &[u8]) -> Result<u64, String> {
    let mut number: u64 = 0;
    for place in 0..10 {
        let (&byte, rest) = bytes.split_first().ok_or(CUT)?;
        *bytes = rest;
        number |= u64::from(byte & 0x7f) << (7 * place);
        if byte < 0x80 {
            return Ok(number);
        }
    }
    Err("a number of more than ten bytes".to_owned())
}
