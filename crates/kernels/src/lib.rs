//! The kernels of convolutional networks, on slices: convolution, batch norm, pooling and what else their layers need.
//!
//! This crate has no tensor type: a kernel takes slices and a description of the problem, and writes slices. Kernels
//! that are worth several threads take a [`Cpu`], which states how many threads and which instruction set they may use; nothing
//! is read from the environment. Kernels overwrite their whole output, whatever it held before, unless their documentation says
//! that they accumulate.
//!
//! ```
//! use convoke_kernels::conv::{self, ConvOperands, ConvProblem, Pass};
//! use convoke_kernels::Cpu;
//!
//! let problem: ConvProblem = "mb1ic1ih3oc1kh2".parse()?;
//! let cpu = Cpu::single();
//! let plan = conv::plan(&problem, Pass::Forward, &cpu);
//! let (x, weight) = ([1.0f32, 2., 3., 4., 5., 6., 7., 8., 9.], [1.0f32; 4]);
//! let mut y = [0.0f32; 4];
//! let mut workspace = vec![0.0f32; plan.workspace_len()];
//! plan.run(ConvOperands::forward(&x, &weight, &mut y), (&mut workspace).into())?;
//! assert_eq!(y, [12., 16., 24., 28.]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod channels;
mod cpu;
mod device;
mod element;
mod error;
mod isa;
mod operand;
mod random;
mod scratch;
mod separable;
mod shared;
mod simd;
mod stream;
mod team;
mod transpose;
mod vector_math;
mod widened;

pub mod activation;
pub mod backstop;
pub mod batch_norm;
pub mod block;
pub mod class_loss;
pub mod concat;
pub mod conv;
pub mod convert;
pub mod dropout;
pub mod elementwise;
pub mod gemm;
pub mod group_norm;
pub mod images;
pub mod layer_norm;
pub mod local_response_norm;
pub mod machine;
pub mod matmul;
pub mod memory;
pub mod memory_format;
pub mod optimizer;
pub mod pointwise;
pub mod pool;
pub mod prelu;
pub mod profile;
pub mod resize;
pub mod slices;
pub mod softmax;
pub mod strided;
pub mod tune;
pub mod value_loss;

pub use cpu::Cpu;
pub use device::{Device, DeviceOptions, Recomputed};
pub use element::{DType, Element, Stored};
pub use error::{Error, Result};
/// The 16-bit element types.
pub use half::{bf16, f16};
pub use isa::Isa;
pub use memory::Buffer;
pub use memory_format::MemoryFormat;
pub use operand::{Slice, SliceMut};
#[doc(hidden)]
pub use stream::fences;
