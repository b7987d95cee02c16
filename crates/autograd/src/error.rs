//! The error of this crate: it names the operation, and the shapes or types that do not fit.

use convoke_kernels::{DType, Error as KernelError};
use convoke_memory::OutOfMemory;

/// Why an operation on tensors was refused.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A kernel refused its problem.
    #[error(transparent)]
    Kernel(convoke_kernels::Error),
    /// Shapes or options do not fit.
    #[error("{operation}: {reason}")]
    Invalid {
        /// The operation.
        operation: &'static str,
        /// What does not fit, with the shapes.
        reason: String,
    },
    /// An operand's element type is not the expected one.
    #[error("{operation}: expected {expected}, found {found}")]
    DType {
        /// The operation.
        operation: &'static str,
        /// The type asked for.
        expected: DType,
        /// The type of the tensor.
        found: DType,
    },
    /// What was called does not compute in this type, which is for storage.
    #[error("{operation}: {dtype} is a type for storage: convert to f32 with `Tensor::to_dtype` first")]
    StorageOnly {
        /// The operation.
        operation: &'static str,
        /// The type of the tensor.
        dtype: DType,
    },
    /// The inputs of an operation are on different devices.
    #[error("{operation}: its inputs are on different devices")]
    Device {
        /// The operation.
        operation: &'static str,
    },
    /// Communication between ranks failed.
    #[error("{operation}: {reason}")]
    Communication {
        /// The operation.
        operation: &'static str,
        /// What went wrong.
        reason: String,
    },
    /// The operating system refused the memory, or the size is larger than any machine has.
    #[error("out of memory: a buffer of {elements} elements of {element_size} bytes cannot be had")]
    Memory {
        /// Elements of the buffer.
        elements: usize,
        /// Bytes of each.
        element_size: usize,
    },
    /// `backward` on a tensor for which nothing was recorded.
    #[error("backward: the tensor does not require gradients (a constant, detached, or computed in no_grad)")]
    NoGraph,
    /// `backward` a second time through the same tape.
    #[error(
        "backward: the saved tensors of `{operation}` were freed by an earlier backward; \
         pass `retain_graph` to the first one to go through the same graph twice"
    )]
    GraphFreed {
        /// The first such operation.
        operation: &'static str,
    },
    /// A derivative of a gradient was asked for.
    #[error("backward: second derivative through `{operation}`: operations are once differentiable")]
    SecondDerivative {
        /// The operation whose backward made the gradient.
        operation: &'static str,
    },
    /// A tensor made in inference mode entered a recorded operation.
    #[error(
        "{operation}: a tensor made in inference mode cannot take part in autograd; make it in no_grad instead"
    )]
    InferenceTensor {
        /// The operation.
        operation: &'static str,
    },
    /// A custom function returned the wrong number of gradients (it must be one per input), or one that does not fit its input.
    #[error("backward of `{operation}`: {reason}")]
    BadGradient {
        /// The function.
        operation: &'static str,
        /// What is wrong.
        reason: String,
    },
}

impl From<KernelError> for Error {
    fn from(error: KernelError) -> Error {
        match error {
            KernelError::Buffer { elements, element_size } => Error::Memory { elements, element_size },
            KernelError::Communication { operation, reason } => Error::Communication { operation, reason },
            KernelError::StorageOnly { operation, dtype } => Error::StorageOnly { operation, dtype },
            error => Error::Kernel(error),
        }
    }
}

/// For what a kernel reads from a tensor.
impl From<Error> for KernelError {
    fn from(error: Error) -> KernelError {
        match error {
            Error::Kernel(error) => error,
            Error::Memory { elements, element_size } => KernelError::Buffer { elements, element_size },
            Error::Communication { operation, reason } => KernelError::Communication { operation, reason },
            Error::Invalid { operation, reason } => KernelError::Invalid { operation, reason },
            Error::DType { operation, expected, found } => KernelError::DType { operation, expected, found },
            Error::StorageOnly { operation, dtype } => KernelError::StorageOnly { operation, dtype },
            error => KernelError::Invalid { operation: "tensor", reason: error.to_string() },
        }
    }
}

impl From<OutOfMemory> for Error {
    fn from(OutOfMemory { bytes }: OutOfMemory) -> Error {
        Error::Memory { elements: bytes, element_size: 1 }
    }
}

/// A result with this crate's [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

/// The error of a problem that kernels refuse, under the operation's name; `explain` adds the shapes to the reason.
pub(crate) fn refused(
    operation: &'static str,
    explain: impl FnOnce(String) -> String,
) -> impl FnOnce(KernelError) -> Error {
    move |error| match error {
        KernelError::Invalid { reason, .. } => invalid(operation, explain(reason)),
        error => error.into(),
    }
}

pub(crate) fn invalid(operation: &'static str, reason: impl Into<String>) -> Error {
    Error::Invalid { operation, reason: reason.into() }
}
