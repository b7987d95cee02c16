//! What kernels read and write: elements whose type is known at run time.

use crate::error::invalid;
use crate::{DType, Result, Stored};

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

    /// The same elements, to be read.
    pub fn as_slice(&self) -> Slice<'_> {
        Slice { bytes: self.bytes, dtype: self.dtype }
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
        for dtype in [DType::F32, DType::F64, DType::F16, DType::BF16] {
            let size = dtype.size();
            assert_eq!(Slice::new(dtype, bytes).unwrap().len(), 24 / size);
            assert_eq!(Slice::new(dtype, &bytes[1..1]).unwrap().len(), 0);
            for range in [1..1 + size, 0..size + 1, size..2 * size - 1] {
                assert!(Slice::new(dtype, &bytes[range.clone()]).is_err(), "{dtype} {range:?}");
            }
        }
    }
}
