//! What the pickle of a PyTorch file may hold and name.

use safetensors::tensor::Dtype;

/// A value on the stack, in the memo or in a container.
#[derive(Debug, Clone, Copy)]
pub(in crate::checkpoint) enum Value<'a> {
    None,
    Bool,
    Int(i64),
    Text(&'a str),
    /// A dictionary, by its place among [`Unpickled::dicts`].
    Dict(usize),
    /// A tensor, by its place among [`Unpickled::tensors`].
    Tensor(usize),
    Tuple(usize),
    Storage(usize),
    Global(Global),
    /// A list or a set; what it holds is dropped.
    List,
    /// Anything else that is not needed: numbers, bytes, devices.
    Other,
}

impl<'a> Value<'a> {
    pub(in crate::checkpoint) fn text(&self) -> Option<&'a str> {
        match self {
            Value::Text(text) => Some(text),
            _ => None,
        }
    }
}

/// What a pickle may name.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(in crate::checkpoint) enum Global {
    Dict,
    Set,
    Size,
    Device,
    RebuildTensor,
    /// Returns its first argument, a tensor.
    RebuildParameter,
    RebuildFromType,
    TensorType,
    Storage(Dtype),
    /// An element type, such as `torch.float32`, which is not called.
    ElementType,
}

/// The list of what may be named.
pub(in crate::checkpoint) fn global(module: &str, name: &str) -> Option<Global> {
    Some(match (module, name) {
        ("collections", "OrderedDict" | "Counter") => Global::Dict,
        ("builtins" | "__builtin__", "set") => Global::Set,
        ("torch", "Size") => Global::Size,
        ("torch", "device") => Global::Device,
        ("torch._utils", "_rebuild_tensor_v2") => Global::RebuildTensor,
        ("torch._utils", "_rebuild_parameter" | "_rebuild_parameter_with_state") => Global::RebuildParameter,
        ("torch._tensor", "_rebuild_from_type_v2") => Global::RebuildFromType,
        ("torch", "Tensor") | ("torch.nn.parameter", "Parameter" | "Buffer") => Global::TensorType,
        ("torch", "FloatStorage") => Global::Storage(Dtype::F32),
        ("torch", "DoubleStorage") => Global::Storage(Dtype::F64),
        ("torch", "HalfStorage") => Global::Storage(Dtype::F16),
        ("torch", "BFloat16Storage") => Global::Storage(Dtype::BF16),
        ("torch", "LongStorage") => Global::Storage(Dtype::I64),
        ("torch", "IntStorage") => Global::Storage(Dtype::I32),
        ("torch", "ShortStorage") => Global::Storage(Dtype::I16),
        ("torch", "CharStorage") => Global::Storage(Dtype::I8),
        ("torch", "ByteStorage") | ("torch.storage", "UntypedStorage") => Global::Storage(Dtype::U8),
        ("torch", "BoolStorage") => Global::Storage(Dtype::BOOL),
        (
            "torch",
            "float32" | "float64" | "float16" | "bfloat16" | "int64" | "int32" | "int16" | "int8" | "uint8"
            | "bool",
        ) => Global::ElementType,
        _ => return None,
    })
}

/// The bytes of a type that a storage may have.
pub(in crate::checkpoint) fn element_size(dtype: Dtype) -> usize {
    dtype.bitsize() / 8
}

/// Where a tensor's elements come from: an entry of the archive.
#[derive(Debug, Clone, Copy)]
pub(in crate::checkpoint) struct Storage<'a> {
    pub(in crate::checkpoint) key: &'a str,
    pub(in crate::checkpoint) dtype: Dtype,
    /// How many elements it has.
    pub(in crate::checkpoint) len: usize,
}

/// A tensor's description: a view of a storage, within its bounds.
#[derive(Debug)]
pub(in crate::checkpoint) struct Tensor<'a> {
    pub(in crate::checkpoint) storage: Storage<'a>,
    /// The place of its first element, in elements.
    pub(in crate::checkpoint) offset: usize,
    pub(in crate::checkpoint) shape: Vec<usize>,
    /// The distance between neighbours along each dimension, in elements; 0 along those of length 0 or 1.
    pub(in crate::checkpoint) strides: Vec<usize>,
}

impl Tensor<'_> {
    /// Whether its elements lie in C order without gaps.
    pub(in crate::checkpoint) fn is_contiguous(&self) -> bool {
        let mut expected = 1;
        self.shape.iter().zip(&self.strides).rev().all(|(size, stride)| {
            let fits = *size <= 1 || *stride == expected;
            // Where a size is 0 there are no elements, so an overflow of the others does not matter.
            expected = expected.wrapping_mul(*size);
            fits
        })
    }
}

/// What a pickle holds, as far as it is needed.
#[derive(Debug)]
pub(in crate::checkpoint) struct Unpickled<'a> {
    pub(in crate::checkpoint) root: Value<'a>,
    /// The entries with text as keys, in the order in which they were set; a later one replaces an earlier one of its name.
    pub(in crate::checkpoint) dicts: Vec<Vec<(&'a str, Value<'a>)>>,
    pub(in crate::checkpoint) tensors: Vec<Tensor<'a>>,
    /// All texts, in the order in which they were first mentioned; PyTorch's pickles number them.
    pub(in crate::checkpoint) texts: Vec<&'a str>,
}
