//! A small autograd for convolutional networks: tensors, a dynamic tape, custom functions, gradcheck.
//!
//! * A [`Tensor`] is an immutable value on a [`Device`]; its buffer comes from the device, which counts bytes.
//! * A [`Function`] is an operation with its backward. Built-in operations ([`ops`]) and yours are implemented in the same way.
//! * [`Tensor::backward`] returns the [`Gradients`] of the leaves.
//! * [`gradcheck`] compares a function's gradients with central differences in f64.
//! * [`trace()`] gives the operations that a computation consists of, as data.
//!
//! ```
//! use convoke_autograd::{Device, Tensor};
//!
//! let device = Device::cpu()?;
//! let x = Tensor::from_slice(&device, &[3], &[1.0f32, -2.0, 3.0])?.with_grad();
//! let loss = x.relu()?.mul(&x)?.sum()?;
//! let gradients = loss.backward()?;
//! assert_eq!(gradients.get(&x).unwrap().data::<f32>()?, [2.0, 0.0, 6.0]);
//! # Ok::<(), convoke_autograd::Error>(())
//! ```

mod backward;
mod error;
mod fold;
mod foreign;
mod function;
mod gradcheck;
mod images;
mod mode;
mod operation;
pub mod ops;
mod planes;
mod storage;
mod tensor;
mod trace;
mod widened;

pub use backward::{BackwardOptions, Gradients, Root, backward_from};
pub use convoke_kernels::memory::{Buffer, MemoryStats, TimelinePoint};
pub use convoke_kernels::{
    Cpu, DType, Device, DeviceOptions, Element, Isa, MemoryFormat, Stored, bf16, dispatch, dispatch_stored,
    f16,
};
pub use error::{Error, Result};
pub use fold::fold_conv_bn2d;
pub use foreign::Exported;
pub use function::{Function, Needs, apply, apply_with_saved};
pub use gradcheck::{GradCheck, GradCheckFailure, GradCheckReport, gradcheck};
pub use mode::{enable_grad, inference_mode, is_grad_enabled, no_grad};
pub use operation::{Arithmetic, Compare, Operation, ReduceKind};
pub use tensor::Tensor;
pub use trace::{Call, Source, Trace, note_dropout, trace};
