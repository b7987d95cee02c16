//! What kernels read and write: elements whose type is known at run time.

use std::ops::Range;

use crate::error::{check_dtype, check_len, invalid};
use crate::{DType, Result, Stored, dispatch_stored};

/// Elements that are read, of a type that is known at run time.
///
/// ```
/// use convoke_kernels::{DType, Slice};
///
/// let x = [1.0f32, 2.0];
/// let x = Slice::from(&x);
/// assert_eq!((x.dtype(), x.len()), (DType::F32, 2));
/// assert_eq!(x.of::<f32>()?, [1.0, 2.0]);
/// assert!(x.of::<f64>().is_err());
/// # Ok::<(), convoke_kernels::Error>(())
/// ```
#[derive(Clone, Copy)]
pub struct Slice<'a> {
    /// Whole elements, aligned as their type needs.
    bytes: &'a [u8],
    dtype: DType,
}

/// Elements that are written, of a type that is known at run time; otherwise as [`Slice`].
pub struct SliceMut<'a> {
    /// As in [`Slice`].
    bytes: &'a mut [u8],
    dtype: DType,
}

impl<'a> Slice<'a> {
    /// The elements in memory.
    ///
    /// # Errors
    /// If the bytes are not whole elements, or not aligned as these are.
    pub fn new(dtype: DType, bytes: &'a [u8]) -> Result<Slice<'a>> {
        check(dtype, bytes)?;
        Ok(Slice { bytes, dtype })
    }

    /// The elements in memory that is known to hold whole, aligned ones.
    pub(crate) fn whole(dtype: DType, bytes: &'a [u8]) -> Slice<'a> {
        Slice { bytes, dtype }
    }

    /// No elements.
    pub fn empty(dtype: DType) -> Slice<'a> {
        Slice { bytes: &[], dtype }
    }

    /// The type of the elements.
    pub fn dtype(self) -> DType {
        self.dtype
    }

    /// The number of elements.
    pub fn len(self) -> usize {
        self.bytes.len() / self.dtype.size()
    }

    /// Whether there are no elements.
    pub fn is_empty(self) -> bool {
        self.bytes.is_empty()
    }

    /// Where the elements begin in memory.
    pub fn address(self) -> usize {
        self.bytes.as_ptr().addr()
    }

    /// The element at this place; exact.
    ///
    /// # Panics
    /// If there are not so many elements.
    pub fn at(self, index: usize) -> f64 {
        dispatch_stored!(self.dtype, T => bytemuck::cast_slice::<u8, T>(self.bytes)[index].f64())
    }

    /// All elements; exact.
    pub fn to_f64(self) -> Vec<f64> {
        dispatch_stored!(self.dtype, T => {
            bytemuck::cast_slice::<u8, T>(self.bytes).iter().map(|element| element.f64()).collect()
        })
    }

    /// The elements at these places.
    ///
    /// # Panics
    /// If there are not so many elements.
    pub fn part(self, places: Range<usize>) -> Slice<'a> {
        let size = self.dtype.size();
        Slice { bytes: &self.bytes[places.start * size..places.end * size], ..self }
    }

    /// Runs of `len` elements, the last of which may be shorter; `len` is not 0.
    pub fn chunks(self, len: usize) -> impl Iterator<Item = Slice<'a>> {
        let (size, dtype) = (self.dtype.size(), self.dtype);
        self.bytes.chunks(len * size).map(move |bytes| Slice { bytes, dtype })
    }

    /// The elements as numbers of type T.
    ///
    /// # Errors
    /// If they are of another type.
    pub fn of<T: Stored>(self) -> Result<&'a [T]> {
        expect::<T>(self.dtype)?;
        // Where there are no bytes, they need not be aligned.
        Ok(if self.bytes.is_empty() { &[] } else { bytemuck::cast_slice(self.bytes) })
    }
}

impl<'a> SliceMut<'a> {
    /// The elements in memory.
    ///
    /// # Errors
    /// If the bytes are not whole elements, or not aligned as these are.
    pub fn new(dtype: DType, bytes: &'a mut [u8]) -> Result<SliceMut<'a>> {
        check(dtype, bytes)?;
        Ok(SliceMut { bytes, dtype })
    }

    /// As [`Slice::whole`].
    pub(crate) fn whole(dtype: DType, bytes: &'a mut [u8]) -> SliceMut<'a> {
        SliceMut { bytes, dtype }
    }

    /// The type of the elements.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The number of elements.
    pub fn len(&self) -> usize {
        self.bytes.len() / self.dtype.size()
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// The elements as numbers of type T.
    ///
    /// # Errors
    /// If they are of another type.
    pub fn of<T: Stored>(self) -> Result<&'a mut [T]> {
        expect::<T>(self.dtype)?;
        Ok(if self.bytes.is_empty() { &mut [] } else { bytemuck::cast_slice_mut(self.bytes) })
    }

    /// Makes every element this number, or the nearest one of their type.
    pub fn fill(self, value: f64) {
        dispatch_stored!(self.dtype, T => bytemuck::cast_slice_mut::<u8, T>(self.bytes).fill(T::of(value)));
    }

    /// Makes each element a function of its place and itself, or the nearest number of their type. For small operands, such as one
    /// number a channel.
    pub fn update(self, mut value: impl FnMut(usize, f64) -> f64) {
        self.update_by(&mut value);
    }

    /// [`SliceMut::update`] for all functions.
    fn update_by(self, value: &mut dyn FnMut(usize, f64) -> f64) {
        dispatch_stored!(self.dtype, T => {
            let elements = bytemuck::cast_slice_mut::<u8, T>(self.bytes).iter_mut().enumerate();
            elements.for_each(|(index, element)| *element = T::of(value(index, element.f64())));
        });
    }

    /// The elements at these places.
    ///
    /// # Panics
    /// If there are not so many elements.
    pub fn part(self, places: Range<usize>) -> SliceMut<'a> {
        let size = self.dtype.size();
        SliceMut { bytes: &mut self.bytes[places.start * size..places.end * size], dtype: self.dtype }
    }

    /// The first `len` elements, and the others.
    ///
    /// # Panics
    /// If there are fewer than `len` elements.
    pub fn split_at(self, len: usize) -> (SliceMut<'a>, SliceMut<'a>) {
        let (first, others) = self.bytes.split_at_mut(len * self.dtype.size());
        (SliceMut { bytes: first, dtype: self.dtype }, SliceMut { bytes: others, dtype: self.dtype })
    }

    /// Runs of `len` elements, the last of which may be shorter; `len` is not 0.
    pub fn chunks_mut(self, len: usize) -> impl Iterator<Item = SliceMut<'a>> {
        let (size, dtype) = (self.dtype.size(), self.dtype);
        self.bytes.chunks_mut(len * size).map(move |bytes| SliceMut { bytes, dtype })
    }

    /// The same elements, to be read.
    pub fn as_slice(&self) -> Slice<'_> {
        Slice { bytes: self.bytes, dtype: self.dtype }
    }

    /// The same elements, to be read from now on.
    pub fn into_slice(self) -> Slice<'a> {
        Slice { bytes: self.bytes, dtype: self.dtype }
    }

    /// Writes the elements of `from`, which are as many and of the same type.
    ///
    /// # Errors
    /// If they are not.
    pub fn copy_from(self, from: Slice<'_>) -> Result<()> {
        check_dtype("copy", self.dtype, from.dtype)?;
        check_len("copy", "the output", self.len(), from.len())?;
        self.bytes.copy_from_slice(from.bytes);
        Ok(())
    }

    /// The same elements for a shorter time.
    pub fn reborrow(&mut self) -> SliceMut<'_> {
        SliceMut { bytes: self.bytes, dtype: self.dtype }
    }
}

impl<'a, T: Stored> From<&'a [T]> for Slice<'a> {
    fn from(elements: &'a [T]) -> Slice<'a> {
        Slice { bytes: bytemuck::cast_slice(elements), dtype: T::DTYPE }
    }
}

impl<'a, T: Stored, const N: usize> From<&'a [T; N]> for Slice<'a> {
    fn from(elements: &'a [T; N]) -> Slice<'a> {
        elements.as_slice().into()
    }
}

impl<'a, T: Stored> From<&'a Vec<T>> for Slice<'a> {
    fn from(elements: &'a Vec<T>) -> Slice<'a> {
        elements.as_slice().into()
    }
}

impl<'a, T: Stored> From<&'a mut Vec<T>> for SliceMut<'a> {
    fn from(elements: &'a mut Vec<T>) -> SliceMut<'a> {
        elements.as_mut_slice().into()
    }
}

impl<'a, T: Stored, const N: usize> From<&'a mut [T; N]> for SliceMut<'a> {
    fn from(elements: &'a mut [T; N]) -> SliceMut<'a> {
        elements.as_mut_slice().into()
    }
}

impl<'a, T: Stored> From<&'a mut [T]> for SliceMut<'a> {
    fn from(elements: &'a mut [T]) -> SliceMut<'a> {
        SliceMut { bytes: bytemuck::cast_slice_mut(elements), dtype: T::DTYPE }
    }
}

impl std::fmt::Debug for Slice<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} elements of {}", self.len(), self.dtype)
    }
}

impl std::fmt::Debug for SliceMut<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.as_slice().fmt(f)
    }
}

/// Defines kernels that take operands. The body of each function is compiled for the types of its parameter: [`crate::Element`] is those
/// that kernels compute in, [`Stored`] is all. Who calls it passes [`Slice`] for `&[T]` and [`SliceMut`] for `&mut [T]`. Other arguments
/// come first, then what is read, then what is written, with a `;` between them.
macro_rules! kernels {
    ($(
        $(#[$attribute:meta])*
        $vis:vis fn $name:ident<$T:ident: $bound:ident>(
            $($argument:ident: $type:ty),*;
            $($input:ident: &[$read:ident]),*;
            $($output:ident: &mut [$write:ident]),* $(,)?
        ) -> $result:ty $body:block
    )*) => {$(
        $(#[$attribute])*
        $vis fn $name(
            $($argument: $type,)*
            $($input: $crate::Slice<'_>,)*
            $($output: $crate::SliceMut<'_>),*
        ) -> $result {
            fn typed<$T: $crate::$bound>(
                $($argument: $type,)*
                $($input: &[$read],)*
                $($output: &mut [$write]),*
            ) -> $result $body
            let dtype = kernels!(@first $($input)* $($output)*).dtype();
            kernels!(@run $bound stringify!($name), dtype, $T => {
                typed::<$T>($($argument,)* $($input.of()?,)* $($output.of()?),*)
            })
        }
    )*};
    (@first $first:ident $($rest:ident)*) => {
        $first
    };
    (@run Element $operation:expr, $dtype:expr, $T:ident => $body:expr) => {
        $crate::dispatch!($operation, $dtype, $T => $body)
    };
    (@run Stored $operation:expr, $dtype:expr, $T:ident => $body:expr) => {
        $crate::dispatch_stored!($dtype, $T => $body)
    };
}
pub(crate) use kernels;

fn expect<T: Stored>(dtype: DType) -> Result<()> {
    match dtype == T::DTYPE {
        true => Ok(()),
        false => Err(invalid("operand", format!("the elements are {dtype}, not {}", T::DTYPE))),
    }
}

fn check(dtype: DType, bytes: &[u8]) -> Result<()> {
    let size = dtype.size();
    match bytes.len().is_multiple_of(size) && (bytes.is_empty() || bytes.as_ptr().addr().is_multiple_of(size))
    {
        true => Ok(()),
        false => {
            let reason = format!("{} bytes at {:p} are no elements of {dtype}", bytes.len(), bytes.as_ptr());
            Err(invalid("operand", reason))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_are_of_their_type_only() {
        let mut numbers = [1.5f64, -2.0, 0.25];
        let slice = Slice::from(numbers.as_slice());
        assert_eq!((slice.dtype(), slice.len(), slice.is_empty()), (DType::F64, 3, false));
        assert_eq!(slice.of::<f64>().unwrap(), numbers);
        let error = slice.of::<f32>().unwrap_err().to_string();
        assert!(error.contains("are f64, not f32"), "{error}");
        let mut slice = SliceMut::from(numbers.as_mut_slice());
        slice.reborrow().of::<f64>().unwrap()[1] = 7.0;
        assert!(slice.reborrow().of::<half::bf16>().is_err());
        assert_eq!(slice.as_slice().of::<f64>().unwrap(), [1.5, 7.0, 0.25]);
        for nothing in [Slice::empty(DType::F64), Slice::new(DType::F64, &[0; 9][1..1]).unwrap()] {
            assert!(nothing.of::<f64>().unwrap().is_empty() && nothing.of::<f32>().is_err());
        }
        assert!(SliceMut::new(DType::F64, &mut [0; 9][1..1]).unwrap().of::<f64>().unwrap().is_empty());
    }

    #[test]
    fn bytes_are_whole_and_aligned() {
        let numbers = [0.0f64; 3];
        let bytes: &[u8] = bytemuck::cast_slice(&numbers);
        for dtype in DType::ALL {
            let size = dtype.size();
            assert_eq!(Slice::new(dtype, bytes).unwrap().len(), 24 / size);
            assert_eq!(Slice::new(dtype, &bytes[1..1]).unwrap().len(), 0);
            for range in [1..1 + size, 0..size + 1, size..2 * size - 1] {
                assert!(Slice::new(dtype, &bytes[range.clone()]).is_err(), "{dtype} {range:?}");
            }
        }
    }
}
