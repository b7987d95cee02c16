//! Memory that crosses the border: a tensor of elements that somebody else owns, and elements that leave with an owner of their own.

use bytemuck::Pod;
use convoke_kernels::memory::{BorrowedBytes, Bytes};
use convoke_kernels::{DType, MemoryFormat, Stored};

use crate::error::invalid;
use crate::storage::Storage;
use crate::tensor::checked_len;
use crate::{Device, Error, Result, Tensor};

/// Elements that somebody else owns, of any type.
trait Owner: Send + Sync {
    fn bytes(&self) -> &[u8];
}

/// An owner of elements of type `T`.
struct Typed<O, T> {
    owner: O,
    element: std::marker::PhantomData<fn() -> T>,
}

impl<O: AsRef<[T]> + Send + Sync, T: Pod> Owner for Typed<O, T> {
    fn bytes(&self) -> &[u8] {
        bytemuck::cast_slice(self.owner.as_ref())
    }
}

/// What a storage borrows. The owner is dropped with it.
pub(crate) struct Foreign {
    owner: Box<dyn Owner>,
    len: usize,
    /// Counts the bytes as long as they are borrowed.
    _counted: BorrowedBytes,
}

impl Foreign {
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.owner.bytes()[..self.len]
    }
}

impl Tensor {
    /// A constant whose elements stay where they are, in memory that `owner` owns: nothing is copied. The owner is dropped with the
    /// last tensor that shares the elements.
    ///
    /// `strides` are those of PyTorch and NumPy, in elements, and must be those of one of the two memory formats: row-major, or
    /// channels-last for N x C x H x W; where a size is 1, its stride means nothing. The first element is the owner's first.
    ///
    /// The bytes are counted apart, as [`crate::MemoryStats::borrowed_bytes`]. Nothing writes to them: [`Tensor::update`] copies them first.
    /// The owner must give the same elements each time it is asked, as long as it lives.
    ///
    /// ```
    /// use convoke_autograd::{Device, MemoryFormat, Tensor};
    ///
    /// let device = Device::cpu()?;
    /// // 1 x 2 x 2 x 2, the channels of each pixel side by side.
    /// let pixels: Vec<f32> = (0..8u8).map(f32::from).collect();
    /// let x = Tensor::borrowed(&device, &[1, 2, 2, 2], &[8, 1, 4, 2], pixels)?;
    /// assert_eq!(x.format(), MemoryFormat::ChannelsLast);
    /// assert_eq!(x.to_vec::<f32>()?, [0.0, 2.0, 4.0, 6.0, 1.0, 3.0, 5.0, 7.0]);
    /// assert_eq!((device.memory().borrowed_bytes, device.memory().live_bytes), (32, 0));
    /// # Ok::<(), convoke_autograd::Error>(())
    /// ```
    ///
    /// # Errors
    /// If the strides are of no memory format, or the owner has fewer elements than the shape.
    pub fn borrowed<T: Stored>(
        device: &Device,
        shape: &[usize],
        strides: &[usize],
        owner: impl AsRef<[T]> + Send + Sync + 'static,
    ) -> Result<Tensor> {
        let len = checked_len("borrowed", shape)?;
        let format = format_of(shape, strides)?;
        let found = owner.as_ref().len();
        if found < len {
            return Err(invalid(
                "borrowed",
                format!("the shape {shape:?} needs {len} elements, found {found}"),
            ));
        }
        let bytes = len * size_of::<T>();
        let owner = Box::new(Typed { owner, element: std::marker::PhantomData });
        let storage = Storage::borrowed(
            T::DTYPE,
            len,
            Foreign { owner, len: bytes, _counted: device.count_borrowed(bytes) },
        );
        Tensor::of_storage(device, shape, format, storage)
    }

    /// Hands the elements out: whoever holds them may read and write them, and dropping them frees the memory. They are copied where
    /// another tensor, or a tape, shares them, or they are borrowed themselves.
    ///
    /// The bytes are then counted apart, as [`crate::MemoryStats::exported_bytes`].
    ///
    /// # Errors
    /// If there is no memory for a copy, or for elements that had to be recomputed.
    pub fn export(self) -> Result<Exported> {
        let (dtype, shape, format) = (self.dtype(), self.shape().to_vec(), self.format());
        self.elements()?;
        Ok(Exported {
            strides: format.strides(&shape),
            shape,
            dtype,
            bytes: self.into_own_bytes()?.exported(),
        })
    }
}

/// The elements of a tensor that was handed out by [`Tensor::export`]. The memory is freed when this is dropped.
pub struct Exported {
    dtype: DType,
    shape: Vec<usize>,
    strides: Vec<usize>,
    bytes: Bytes,
}

impl Exported {
    /// Type of the elements.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The size of each dimension.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// How many elements apart neighbours of each dimension lie.
    pub fn strides(&self) -> &[usize] {
        &self.strides
    }

    /// The elements, as the strides order them. They begin at a multiple of 64 bytes.
    ///
    /// # Errors
    /// If they are of another type.
    pub fn data<T: Stored>(&self) -> Result<&[T]> {
        self.check::<T>()?;
        Ok(self.bytes.elements())
    }

    /// As [`Exported::data`], to be changed.
    ///
    /// # Errors
    /// If they are of another type.
    pub fn data_mut<T: Stored>(&mut self) -> Result<&mut [T]> {
        self.check::<T>()?;
        Ok(self.bytes.elements_mut())
    }

    fn check<T: Stored>(&self) -> Result<()> {
        match self.dtype == T::DTYPE {
            true => Ok(()),
            false => Err(Error::DType { operation: "exported", expected: T::DTYPE, found: self.dtype }),
        }
    }
}

/// The memory format whose strides these are; row-major where they are those of both.
fn format_of(shape: &[usize], strides: &[usize]) -> Result<MemoryFormat> {
    if strides.len() != shape.len() {
        return Err(invalid("borrowed", format!("{} strides for the shape {shape:?}", strides.len())));
    }
    let mut formats = vec![MemoryFormat::Contiguous];
    if shape.len() >= 3 {
        formats.push(MemoryFormat::ChannelsLast);
    }
    // Where a size is 1, or there are no elements, nothing is a stride away.
    let empty = shape.contains(&0);
    let fits = |format: &MemoryFormat| {
        let expected = format.strides(shape);
        empty || (0..shape.len()).all(|axis| shape[axis] == 1 || strides[axis] == expected[axis])
    };
    formats.iter().find(|format| fits(format)).copied().ok_or_else(|| {
        let known: Vec<String> =
            formats.iter().map(|format| format!("{:?} ({format})", format.strides(shape))).collect();
        let reason = format!(
            "the strides {strides:?} of the shape {shape:?} are of no memory format, expected {}: copy the elements first, \
             as PyTorch's `contiguous()` does",
            known.join(" or ")
        );
        invalid("borrowed", reason)
    })
}
