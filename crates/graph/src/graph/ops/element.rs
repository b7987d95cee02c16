//! ONNX's numbers for the types of a tensor's elements.

use super::super::Kind;

pub(crate) const FLOAT: i32 = 1;
pub(crate) const UINT8: i32 = 2;
pub(crate) const INT8: i32 = 3;
pub(crate) const UINT16: i32 = 4;
pub(crate) const INT16: i32 = 5;
pub(crate) const INT32: i32 = 6;
pub(crate) const INT64: i32 = 7;
pub(crate) const BOOL: i32 = 9;
pub(crate) const FLOAT16: i32 = 10;
pub(crate) const DOUBLE: i32 = 11;
pub(crate) const UINT32: i32 = 12;
pub(crate) const UINT64: i32 = 13;
pub(crate) const BFLOAT16: i32 = 16;

/// The kind of array for elements of this type, if there is one.
pub(crate) fn kind_of(element: i32) -> Option<Kind> {
    match element {
        FLOAT | FLOAT16 | BFLOAT16 => Some(Kind::F32),
        DOUBLE => Some(Kind::F64),
        BOOL => Some(Kind::Bool),
        INT8 | INT16 | INT32 | INT64 | UINT8 | UINT16 | UINT32 | UINT64 => Some(Kind::I64),
        _ => None,
    }
}

/// The type of the elements of a kind.
pub(crate) fn of(kind: Kind) -> i32 {
    match kind {
        Kind::F32 => FLOAT,
        Kind::F64 => DOUBLE,
        Kind::I64 => INT64,
        Kind::Bool => BOOL,
    }
}

/// The name of a type.
pub(crate) fn name(element: i32) -> String {
    const NAMES: &str = "UNDEFINED FLOAT UINT8 INT8 UINT16 INT16 INT32 INT64 STRING BOOL FLOAT16 DOUBLE UINT32 UINT64 COMPLEX64 \
                         COMPLEX128 BFLOAT16 FLOAT8E4M3FN FLOAT8E4M3FNUZ FLOAT8E5M2 FLOAT8E5M2FNUZ UINT4 INT4 FLOAT4E2M1 \
                         FLOAT8E8M0 UINT2 INT2 FLOAT6E2M3 FLOAT6E3M2";
    let known = usize::try_from(element).ok().and_then(|place| NAMES.split(' ').nth(place));
    known.map_or_else(|| format!("number {element}"), str::to_owned)
}
