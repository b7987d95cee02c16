//! The number types that tensors store, and those that kernels compute with.

use std::fmt::{Debug, Display};
use std::iter::Sum;
use std::ops::{AddAssign, DivAssign, MulAssign, SubAssign};

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use crate::vector_math::{VectorMath, exp_of_sum};
use crate::{Cpu, widened};

/// The type of a tensor's elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum DType {
    /// IEEE 754 single precision.
    F32,
    /// IEEE 754 double precision: for oracles and gradient checks.
    F64,
    /// IEEE 754 half precision: 11 binary digits, up to 65504. Kernels compute in f32.
    F16,
    /// The upper half of an f32: 8 binary digits, the range of f32. Kernels compute in f32.
    BF16,
}

impl DType {
    /// Every type.
    pub const ALL: [DType; 4] = [DType::F32, DType::F64, DType::F16, DType::BF16];

    /// Bytes of one element.
    pub fn size(self) -> usize {
        match self {
            DType::F32 => 4,
            DType::F64 => 8,
            DType::F16 | DType::BF16 => 2,
        }
    }

    /// Binary digits of a number, the leading one included.
    pub fn digits(self) -> i32 {
        match self {
            DType::F32 => 24,
            DType::F64 => 53,
            DType::F16 => 11,
            DType::BF16 => 8,
        }
    }

    /// The nearest value of this type, ties to even.
    pub fn nearest(self, value: f64) -> f64 {
        crate::dispatch_stored!(self, T => <T as Stored>::of(value).f64())
    }

    /// The type in which kernels compute with numbers that are stored in this type.
    pub fn computed_in(self) -> DType {
        crate::dispatch_stored!(self, T => <T as Stored>::Compute::DTYPE)
    }

    /// Whether kernels compute in this type, that is, whether it implements [`Element`]. The others are only stored and
    /// converted.
    pub fn computes(self) -> bool {
        self.computed_in() == self
    }
}

impl Display for DType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            DType::F32 => "f32",
            DType::F64 => "f64",
            DType::F16 => "f16",
            DType::BF16 => "bf16",
        })
    }
}

/// Runs code with `$T` as the number type of a [`DType`] that kernels compute in. For the others it returns an error from the
/// enclosing function, whose error type must be made of this crate's [`Error`](crate::Error); the name of an operation, as first
/// argument, goes into it.
///
/// ```
/// use convoke_kernels::{DType, Element, Error, dispatch};
///
/// /// 1 / 3 in numbers of this type.
/// fn third(dtype: DType) -> Result<f64, Error> {
///     fn of<T: Element>() -> f64 {
///         (T::one() / T::of(3.0)).f64()
///     }
///     Ok(dispatch!(dtype, T => of::<T>()))
/// }
/// assert_eq!(third(DType::F64), Ok(1.0 / 3.0));
/// assert_eq!(third(DType::F32), Ok(f64::from(1.0f32 / 3.0)));
/// assert!(third(DType::BF16).is_err());
/// ```
#[macro_export]
macro_rules! dispatch {
    ($dtype:expr, $T:ident => $body:expr) => {
        $crate::dispatch!("kernel", $dtype, $T => $body)
    };
    ($operation:expr, $dtype:expr, $T:ident => $body:expr) => {
        match $dtype {
            $crate::DType::F32 => {
                type $T = f32;
                $body
            }
            $crate::DType::F64 => {
                type $T = f64;
                $body
            }
            dtype @ ($crate::DType::F16 | $crate::DType::BF16) => {
                return Err($crate::Error::StorageOnly { operation: $operation, dtype }.into());
            }
        }
    };
}

/// Runs code with `$T` as the number type of any [`DType`].
#[macro_export]
macro_rules! dispatch_stored {
    ($dtype:expr, $T:ident => $body:expr) => {
        match $dtype {
            $crate::DType::F32 => {
                type $T = f32;
                $body
            }
            $crate::DType::F64 => {
                type $T = f64;
                $body
            }
            $crate::DType::F16 => {
                type $T = $crate::f16;
                $body
            }
            $crate::DType::BF16 => {
                type $T = $crate::bf16;
                $body
            }
        }
    };
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for f64 {}
    impl Sealed for half::f16 {}
    impl Sealed for half::bf16 {}
}

/// A floating-point type that tensors can store: `f32`, `f64`, [`half::f16`] or [`half::bf16`].
pub trait Stored: sealed::Sealed + bytemuck::Pod + Default + Debug + Display + Send + Sync + 'static {
    /// The type as a value.
    const DTYPE: DType;

    /// The type in which kernels compute with numbers of this type.
    type Compute: Element + PieceOf<Self>;

    /// The type of the numbers that hot loops read and write, with [`Stored::wide`] and [`Stored::nearest`]: this type, if loops that
    /// convert it are vectorised, or the one that kernels compute in.
    #[doc(hidden)]
    type Piece: Stored<Compute = Self::Compute> + PieceOf<Self>;

    /// Whether plain loops over this type are compiled for AVX-512, too. f64 serves oracles and gradient checks, for which AVX2
    /// is fast enough, and each copy of all loops takes time to build.
    #[doc(hidden)]
    const AVX512: bool = !matches!(Self::DTYPE, DType::F64);

    /// The nearest value of this type, ties to even.
    fn of(value: f64) -> Self;

    /// The value as an `f64`; exact.
    fn f64(self) -> f64;

    /// The value in the type that kernels compute in; exact.
    fn wide(self) -> Self::Compute;

    /// The nearest value of this type to one of the type that kernels compute in, ties to even: the inverse of [`Stored::wide`].
    fn nearest(value: Self::Compute) -> Self;

    /// Converts `from` to f32. Exact, except that f64 values are rounded. Lengths must be equal.
    #[doc(hidden)]
    fn widen(from: &[Self], to: &mut [f32]);

    /// Converts `from` to the nearest values of this type, ties to even. Lengths must be equal.
    #[doc(hidden)]
    fn narrow(from: &[f32], to: &mut [Self]);
}

macro_rules! stored {
    ($type:ty, $dtype:ident, $of:expr, $f64:expr, $widen:expr, $narrow:expr) => {
        impl Stored for $type {
            const DTYPE: DType = DType::$dtype;

            #[inline(always)]
            fn of(value: f64) -> $type {
                $of(value)
            }

            #[inline(always)]
            fn f64(self) -> f64 {
                $f64(self)
            }

            stored!(@computed $type, $dtype);

            #[inline(always)]
            fn widen(from: &[$type], to: &mut [f32]) {
                $widen(from, to);
            }

            #[inline(always)]
            fn narrow(from: &[f32], to: &mut [$type]) {
                $narrow(from, to);
            }
        }
    };
    (@computed $type:ty, F32) => { stored!(@itself $type); };
    (@computed $type:ty, F64) => { stored!(@itself $type); };
    (@computed $type:ty, BF16) => {
        type Compute = f32;
        type Piece = bf16;

        #[inline(always)]
        fn wide(self) -> f32 {
            f32::from_bits(u32::from(self.to_bits()) << 16)
        }

        #[inline(always)]
        fn nearest(value: f32) -> bf16 {
            nearest_bf16(value)
        }
    };
    (@computed $type:ty, F16) => {
        type Compute = f32;
        type Piece = f32;

        #[inline(always)]
        fn wide(self) -> f32 {
            self.to_f32()
        }

        #[inline(always)]
        fn nearest(value: f32) -> f16 {
            f16::from_f32(value)
        }
    };
    (@itself $type:ty) => {
        type Compute = $type;
        type Piece = $type;

        #[inline(always)]
        fn wide(self) -> $type {
            self
        }

        #[inline(always)]
        fn nearest(value: $type) -> $type {
            value
        }
    };
}

/// The type of the numbers that a loop gets of those stored as `S`: `S` itself, or f32 for numbers of 16 bits.
#[doc(hidden)]
pub trait PieceOf<S: Stored>: Stored {
    /// Runs `body` on the inputs and the output. Numbers that must be converted are given to it in pieces. `on.1` is the size of a unit,
    /// and a piece has whole units. `body` gets the place of the piece's first element, and writes all of the output's piece without reading
    /// it.
    fn write<const N: usize>(
        on: (&Cpu, usize),
        inputs: [&[S]; N],
        output: &mut [S],
        body: impl FnMut(usize, [&[Self]; N], &mut [Self]),
    );

    /// As [`PieceOf::write`], but `body` reads the output, too.
    fn update<const N: usize>(
        on: (&Cpu, usize),
        inputs: [&[S]; N],
        output: &mut [S],
        body: impl FnMut(usize, [&[Self]; N], &mut [Self]),
    );

    /// As [`PieceOf::write`], without an output.
    fn read<const N: usize>(on: (&Cpu, usize), inputs: [&[S]; N], body: impl FnMut(usize, [&[Self]; N]));

    /// Runs `body` on all numbers of an input and of an output of another length. It writes all of the output without reading it.
    fn map(cpu: &Cpu, input: &[S], output: &mut [S], mut body: impl FnMut(&[Self], &mut [Self])) {
        let (read, written) = (input.len().max(1), output.len().max(1));
        Self::read((cpu, read), [input], |_, [input]| {
            Self::write((cpu, written), [], output, |_, [], output| body(input, output));
        });
    }
}

impl<S: Stored> PieceOf<S> for S {
    #[inline(always)]
    fn write<const N: usize>(
        _: (&Cpu, usize),
        inputs: [&[S]; N],
        output: &mut [S],
        mut body: impl FnMut(usize, [&[S]; N], &mut [S]),
    ) {
        body(0, inputs, output);
    }

    #[inline(always)]
    fn update<const N: usize>(
        _: (&Cpu, usize),
        inputs: [&[S]; N],
        output: &mut [S],
        mut body: impl FnMut(usize, [&[S]; N], &mut [S]),
    ) {
        body(0, inputs, output);
    }

    #[inline(always)]
    fn read<const N: usize>(_: (&Cpu, usize), inputs: [&[S]; N], mut body: impl FnMut(usize, [&[S]; N])) {
        body(0, inputs);
    }
}

/// Numbers of 16 bits as f32, converted piece by piece.
macro_rules! in_pieces {
    ($($type:ty)*) => {$(
        impl PieceOf<$type> for f32 {
            fn write<const N: usize>(
                on: (&Cpu, usize),
                inputs: [&[$type]; N],
                output: &mut [$type],
                mut body: impl FnMut(usize, [&[f32]; N], &mut [f32]),
            ) {
                widened::each(on, inputs, output, false, &mut body);
            }

            fn update<const N: usize>(
                on: (&Cpu, usize),
                inputs: [&[$type]; N],
                output: &mut [$type],
                mut body: impl FnMut(usize, [&[f32]; N], &mut [f32]),
            ) {
                widened::each(on, inputs, output, true, &mut body);
            }

            fn read<const N: usize>(on: (&Cpu, usize), inputs: [&[$type]; N], mut body: impl FnMut(usize, [&[f32]; N])) {
                widened::read(on, inputs, &mut body);
            }
        }
    )*};
}

in_pieces!(f16 bf16);

/// `value` in f32, rounded to odd: rounding the result to 16 bits then gives the same as rounding `value` directly. (`half`
/// converts f64 through the nearest f32, which may round twice.)
#[inline(always)]
fn to_odd(value: f64) -> f32 {
    let nearest = value as f32;
    let exact = f64::from(nearest);
    if exact == value || nearest.is_nan() {
        return nearest;
    }
    let towards_zero = nearest.to_bits() - u32::from(exact.abs() > value.abs());
    f32::from_bits(towards_zero | 1)
}

/// As [`bf16::from_f32`], in fewer instructions of vectors: adding half a unit, or one bit less if the upper half is even, carries into the
/// upper half where that is to be rounded up.
#[inline(always)]
fn nearest_bf16(value: f32) -> bf16 {
    let bits = value.to_bits();
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1));
    bf16::from_bits((if value.is_nan() { bits | 0x40_0000 } else { rounded } >> 16) as u16)
}

/// Writes `convert` of each number of `from` to `to`.
#[inline(always)]
fn map<A: Copy, B>(from: &[A], to: &mut [B], convert: impl Fn(A) -> B) {
    for (to, &from) in to.iter_mut().zip(from) {
        *to = convert(from);
    }
}

stored!(
    f32,
    F32,
    |value| value as f32,
    f64::from,
    |from: &[f32], to: &mut [f32]| to.copy_from_slice(from),
    |from: &[f32], to: &mut [f32]| to.copy_from_slice(from)
);
stored!(
    f64,
    F64,
    |value| value,
    |value| value,
    |from: &[f64], to: &mut [f32]| map(from, to, |x| x as f32),
    |from: &[f32], to: &mut [f64]| map(from, to, f64::from)
);
stored!(
    f16,
    F16,
    |value| f16::from_f32(to_odd(value)),
    f16::to_f64,
    |from: &[f16], to: &mut [f32]| from.convert_to_f32_slice(to),
    |from: &[f32], to: &mut [f16]| to.convert_from_f32_slice(from)
);
stored!(
    bf16,
    BF16,
    |value| bf16::from_f32(to_odd(value)),
    bf16::to_f64,
    |from: &[bf16], to: &mut [f32]| map(from, to, Stored::wide),
    |from: &[f32], to: &mut [bf16]| map(from, to, nearest_bf16)
);

/// A floating-point type that kernels compute in: `f32` or `f64`.
pub trait Element:
    Stored<Compute = Self> + VectorMath + num_traits::Float + AddAssign + SubAssign + MulAssign + DivAssign + Sum
{
    /// The library's matrix multiplication for this type.
    #[doc(hidden)]
    fn gemm() -> crate::gemm::Gemm<Self>;

    /// e^x, in code that compilers vectorise. In f32 it is within 2 units in the last place.
    #[doc(hidden)]
    fn vector_exp(self) -> Self;
}

impl Element for f32 {
    fn gemm() -> crate::gemm::Gemm<f32> {
        gemm_f32::gemm::f32::get_gemm_fn()
    }

    /// e^x = 2^n e^r with |r| <= ln(2) / 2, and e^r by the polynomial of Cephes' `expf`.
    #[inline(always)]
    fn vector_exp(self) -> f32 {
        exp_of_sum(self, 0.0)
    }
}

impl Element for f64 {
    fn gemm() -> crate::gemm::Gemm<f64> {
        gemm_f64::gemm::f64::get_gemm_fn()
    }

    #[inline(always)]
    fn vector_exp(self) -> f64 {
        self.exp()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vector_exp_is_within_two_units_in_the_last_place() {
        // Every 64th f32 between the largest and the smallest result.
        let values = (0..=u32::MAX).step_by(64).map(f32::from_bits).filter(|x| x.abs() < 110.0);
        for x in values {
            let (found, exact) = (f64::from(x.vector_exp()), f64::from(x).exp());
            // The distance between neighbouring f32 at this size; below 2^-126, the distance at 2^-126.
            let unit = (exact.max(f64::from(f32::MIN_POSITIVE)).log2().floor() - 23.0).exp2();
            let infinite = exact > f64::from(f32::MAX) && found == f64::INFINITY;
            assert!(infinite || (found - exact).abs() <= 2.0 * unit, "e^{x:e}: {found:e}, {exact:e}");
        }
    }

    #[test]
    fn vector_exp_of_special_values() {
        assert_eq!(
            [0.0, -0.0, f32::NEG_INFINITY, f32::INFINITY].map(Element::vector_exp),
            [1.0, 1.0, 0.0, f32::INFINITY]
        );
        assert_eq!(
            [-200.0, 200.0, f32::MIN, f32::MAX].map(Element::vector_exp),
            [0.0, f32::INFINITY, 0.0, f32::INFINITY]
        );
        assert!(f32::NAN.vector_exp().is_nan());
    }
}
