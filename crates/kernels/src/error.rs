//! The error of this crate: which operation, which operand, what was expected and what was found.

/// Why a kernel refused to run. A single kernel has written nothing then; what runs several of them (a block, a convolution in
/// tiles) may have written a part of its output.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A slice does not have the length that the problem asks for.
    #[error("{operation}: {operand} has {found} elements, expected {expected}")]
    Length {
        /// The kernel.
        operation: &'static str,
        /// The slice.
        operand: &'static str,
        /// Elements the problem asks for.
        expected: usize,
        /// Elements given.
        found: usize,
    },
    /// A value of the problem's description cannot be used.
    #[error("{operation}: {reason}")]
    Invalid {
        /// The kernel.
        operation: &'static str,
        /// What is wrong, with the values.
        reason: String,
    },
    /// A problem's text could not be read.
    #[error("cannot read the convolution problem {text:?}: {reason}")]
    Notation {
        /// The text.
        text: String,
        /// What is wrong in it, and where.
        reason: String,
    },
    /// A plan was made for another element type than the one it is run with.
    #[error("{operation}: planned for {expected}, run with {found}")]
    DType {
        /// The kernel.
        operation: &'static str,
        /// Type of the plan.
        expected: crate::DType,
        /// Type of the slices.
        found: crate::DType,
    },
    /// Numbers of this type are stored and converted, not computed with.
    #[error("{operation}: {dtype} is a type for storage: convert to f32 first")]
    StorageOnly {
        /// The kernel.
        operation: &'static str,
        /// The type.
        dtype: crate::DType,
    },
    /// There is no memory for what a kernel or the tuner needs besides its operands.
    #[error(transparent)]
    Memory(#[from] convoke_memory::OutOfMemory),
    /// There is no memory for a buffer of a [`crate::Device`], or no machine has as much.
    #[error("out of memory: a buffer of {elements} elements of {element_size} bytes cannot be had")]
    Buffer {
        /// Elements of the buffer.
        elements: usize,
        /// Bytes of each.
        element_size: usize,
    },
    /// Communication between ranks failed.
    #[error("{operation}: {reason}")]
    Communication {
        /// The operation.
        operation: &'static str,
        /// What went wrong.
        reason: String,
    },
    /// The CPU lacks the requested instruction set, or the threads cannot be started.
    #[error("{0}")]
    Cpu(String),
}

/// A result with this crate's [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

pub(crate) fn check_len(
    operation: &'static str,
    operand: &'static str,
    found: usize,
    expected: usize,
) -> Result<()> {
    if found == expected { Ok(()) } else { Err(Error::Length { operation, operand, expected, found }) }
}

pub(crate) fn check_dtype(
    operation: &'static str,
    expected: crate::DType,
    found: crate::DType,
) -> Result<()> {
    if found == expected { Ok(()) } else { Err(Error::DType { operation, expected, found }) }
}

pub(crate) fn invalid(operation: &'static str, reason: impl Into<String>) -> Error {
    Error::Invalid { operation, reason: reason.into() }
}
