//! The number types that kernels compute in.

use std::fmt::{Debug, Display};
use std::iter::Sum;
use std::ops::{AddAssign, DivAssign, MulAssign, SubAssign};

/// The type of a tensor's elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum DType {
    /// IEEE 754 single precision.
    F32,
    /// IEEE 754 double precision: for oracles and gradient checks.
    F64,
}

impl DType {
    /// Bytes of one element.
    pub fn size(self) -> usize {
        match self {
            DType::F32 => 4,
            DType::F64 => 8,
        }
    }
}

impl Display for DType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            DType::F32 => "f32",
            DType::F64 => "f64",
        })
    }
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for f64 {}
}

/// A floating-point type that kernels compute in: `f32` or `f64`.
pub trait Element:
    sealed::Sealed
    + num_traits::Float
    + AddAssign
    + SubAssign
    + MulAssign
    + DivAssign
    + Sum
    + bytemuck::Pod
    + Default
    + Debug
    + Display
    + Send
    + Sync
    + 'static
{
    /// This type as a value.
    const DTYPE: DType;

    /// The nearest value of this type.
    fn of(value: f64) -> Self;

    /// This value as an `f64`; exact.
    fn f64(self) -> f64;

    /// The variant of a plan's kernel for this type, if that is what the plan was made for.
    #[doc(hidden)]
    fn conv_kernel(kernels: &crate::conv::Kernel) -> Option<&dyn crate::conv::ConvKernel<Self>>;
}

impl Element for f32 {
    const DTYPE: DType = DType::F32;

    #[inline(always)]
    fn of(value: f64) -> f32 {
        value as f32
    }

    #[inline(always)]
    fn f64(self) -> f64 {
        f64::from(self)
    }

    fn conv_kernel(kernels: &crate::conv::Kernel) -> Option<&dyn crate::conv::ConvKernel<f32>> {
        match kernels {
            crate::conv::Kernel::F32(kernel) => Some(kernel.as_ref()),
            crate::conv::Kernel::F64(_) => None,
        }
    }
}

impl Element for f64 {
    const DTYPE: DType = DType::F64;

    #[inline(always)]
    fn of(value: f64) -> f64 {
        value
    }

    #[inline(always)]
    fn f64(self) -> f64 {
        self
    }

    fn conv_kernel(kernels: &crate::conv::Kernel) -> Option<&dyn crate::conv::ConvKernel<f64>> {
        match kernels {
            crate::conv::Kernel::F32(_) => None,
            crate::conv::Kernel::F64(kernel) => Some(kernel.as_ref()),
        }
    }
}
