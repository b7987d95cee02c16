//! Estimates how much memory a file takes when it is decoded, before it is.
//!
//! An empty node takes two bytes in a file and two hundred in memory. So the file is walked once as the decoder will walk it, and
//! every message, text and number of a list is counted with its size in memory.

use prost::bytes::Bytes;

use super::proto::{Field, Format, ModelProto, TensorProto};

/// What a file may take besides four times its length.
const LEAST_LIMIT: u64 = 32 << 20;

/// How many bytes what is made of a file of this length may take.
pub(super) fn limit(len: u64) -> u64 {
    len.saturating_mul(4).saturating_add(LEAST_LIMIT)
}

/// How many bytes decoding a model takes, without what stays in the file's bytes.
///
/// # Errors
/// Why it is no model.
pub(super) fn decoded_size(bytes: &[u8]) -> Result<u64, String> {
    message_size(bytes, ModelProto::FORMAT)
}

/// As [`decoded_size`], of a tensor.
pub(super) fn decoded_tensor_size(bytes: &[u8]) -> Result<u64, String> {
    message_size(bytes, TensorProto::FORMAT)
}

/// The depth is that of the format: no message contains itself.
fn message_size(mut bytes: &[u8], message: Format) -> Result<u64, String> {
    // A list that grows has up to twice the room that it needs.
    let doubled = |size: usize| 2 * size as u64;
    let mut size: u64 = 0;
    while !bytes.is_empty() {
        let key = varint(&mut bytes)?;
        let field = (message.field)(key >> 3);
        match key & 7 {
            kind @ (0 | 1 | 5) => {
                match kind {
                    0 => _ = varint(&mut bytes)?,
                    1 => bytes = bytes.get(8..).ok_or(CUT)?,
                    _ => bytes = bytes.get(4..).ok_or(CUT)?,
                }
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
                    Field::Message(message) => doubled(message.size) + message_size(inner, message)?,
                    // Names are copied into tables of all names, of those that are read, and of ranks.
                    Field::Text => 128 + 3 * len as u64,
                    Field::Bytes | Field::Packed => doubled(size_of::<Bytes>()),
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
