//! The tensor: an immutable array with a shape, a memory format and, if recorded, the operation it came from.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use convoke_kernels::memory_format::{self, Extent};
use convoke_kernels::{DType, MemoryFormat, Slice, SliceMut, Stored, convert};
use smallvec::SmallVec;

use crate::error::invalid;
use crate::function::Node;
use crate::mode::{self, Mode};
use crate::storage::{Recipe, Storage};
use crate::{Buffer, Device, Error, Result};
use convoke_kernels::memory::Bytes;

/// An n-dimensional array of numbers on a [`Device`]. Cloning is cheap and shares the elements.
///
/// Operations compute in f32 and f64. Tensors of f16 and bf16 store numbers that they compute with in f32: each rounds its result to the
/// type once. Operands have one type, but for parameters, such as a convolution's weight, which are f32 beside them.
///
/// Elements never change while they are shared, so what an operation saved for backward stays as it was.
/// A tensor of 4 dimensions is N x C x H x W whatever its [`MemoryFormat`]; one of 3 is N x C x L, one of 5 N x C x D x H x W.
#[derive(Clone)]
pub struct Tensor {
    inner: Arc<Inner>,
}

/// The sizes of the dimensions. A tensor is made for each operation, so those of the usual number lie within it.
pub(crate) type Shape = SmallVec<[usize; 5]>;

struct Inner {
    storage: Arc<Storage>,
    shape: Shape,
    format: MemoryFormat,
    device: Device,
    history: History,
    inference: bool,
}

/// The origin of a tensor, as far as backward needs it.
#[derive(Clone)]
pub(crate) enum History {
    /// A constant.
    None,
    /// A value whose gradient `backward` gives.
    Leaf(u64),
    /// The output of a recorded operation.
    Node(Arc<Node>),
    /// A gradient computed by the backward of this operation: a derivative of it is an error.
    Gradient(&'static str),
}

impl History {
    fn new_leaf() -> History {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        History::Leaf(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

/// The number of elements of a shape.
pub(crate) fn checked_len(operation: &'static str, shape: &[usize]) -> Result<usize> {
    // No tensor of 2^48 elements fits a machine; the bound also keeps byte counts from overflowing.
    // Sizes of 0 count as 1, so that the product of any of the others is in bounds too.
    shape
        .iter()
        .try_fold(1usize, |len, &size| len.checked_mul(size.max(1)))
        .filter(|&len| len < 1 << 48)
        .map(|_| shape.iter().product())
        .ok_or_else(|| invalid(operation, format!("the shape {shape:?} is too large")))
}

impl Tensor {
    /// A tensor in contiguous order from its elements.
    ///
    /// # Errors
    /// If the number of elements does not fit the shape, or there is no memory.
    pub fn from_slice<T: Stored>(device: &Device, shape: &[usize], elements: &[T]) -> Result<Tensor> {
        let len = checked_len("from_slice", shape)?;
        if elements.len() != len {
            return Err(invalid(
                "from_slice",
                format!("the shape {shape:?} needs {len} elements, found {}", elements.len()),
            ));
        }
        Tensor::written(device, shape, MemoryFormat::Contiguous, |data: &mut [T]| {
            data.copy_from_slice(elements);
            Ok(())
        })
    }

    /// A tensor with every element `value`.
    ///
    /// # Errors
    /// If the shape is too large or there is no memory.
    pub fn full(device: &Device, shape: &[usize], dtype: DType, value: f64) -> Result<Tensor> {
        Tensor::full_in((device, dtype), shape, MemoryFormat::Contiguous, value)
    }

    /// As [`Tensor::full`], in a memory format.
    pub(crate) fn full_in(
        (device, dtype): (&Device, DType),
        shape: &[usize],
        format: MemoryFormat,
        value: f64,
    ) -> Result<Tensor> {
        Tensor::written_elements((device, dtype), shape, format, |data| {
            data.fill(value);
            Ok(())
        })
    }

    /// A tensor of zeros.
    ///
    /// # Errors
    /// If the shape is too large or there is no memory.
    pub fn zeros(device: &Device, shape: &[usize], dtype: DType) -> Result<Tensor> {
        Tensor::full(device, shape, dtype, 0.0)
    }

    /// A tensor whose elements `write` fills. They start with arbitrary content, and are in the order of `format`.
    ///
    /// Operations use this for their output. If `write` is a plain loop, prefer [`Tensor::written`].
    ///
    /// # Errors
    /// If the shape is too large or there is no memory, channels-last is asked for with fewer than 3 dimensions, or `write`
    /// fails.
    pub fn build<T: Stored>(
        device: &Device,
        shape: &[usize],
        format: MemoryFormat,
        write: impl FnOnce(&mut [T]) -> Result<()>,
    ) -> Result<Tensor> {
        Tensor::build_elements((device, T::DTYPE), shape, format, |data| write(data.of()?))
    }

    /// A tensor of the elements in `buffer`, in the order of `format`.
    pub(crate) fn of_buffer(
        device: &Device,
        shape: &[usize],
        format: MemoryFormat,
        buffer: Buffer,
    ) -> Result<Tensor> {
        let (dtype, len) = (buffer.dtype(), buffer.len());
        debug_assert_eq!(len, shape.iter().product::<usize>());
        Tensor::of_storage(device, shape, format, Storage::new(dtype, len, buffer.into_bytes()))
    }

    /// A constant with the elements of a storage.
    pub(crate) fn of_storage(
        device: &Device,
        shape: &[usize],
        format: MemoryFormat,
        storage: Storage,
    ) -> Result<Tensor> {
        Ok(Tensor {
            inner: Arc::new(Inner {
                storage: Arc::new(storage),
                shape: shape.into(),
                format: usable_format(shape, format)?,
                device: device.clone(),
                history: History::None,
                inference: mode::current() == Mode::Inference,
            }),
        })
    }

    /// As [`Tensor::build`], for a `write` that runs no kernel and allocates no buffer: on a [dry](Device::dry) device it is not
    /// called, and the elements are not touched.
    ///
    /// # Errors
    /// As [`Tensor::build`].
    pub fn written<T: Stored>(
        device: &Device,
        shape: &[usize],
        format: MemoryFormat,
        write: impl FnOnce(&mut [T]) -> Result<()>,
    ) -> Result<Tensor> {
        Tensor::build(device, shape, format, |data| if device.is_dry() { Ok(()) } else { write(data) })
    }

    /// As [`Tensor::build`], for elements of a type that is known at run time.
    ///
    /// # Errors
    /// As [`Tensor::build`].
    pub fn build_elements(
        (device, dtype): (&Device, DType),
        shape: &[usize],
        format: MemoryFormat,
        write: impl FnOnce(SliceMut<'_>) -> Result<()>,
    ) -> Result<Tensor> {
        let len = checked_len("tensor", shape)?;
        usable_format(shape, format)?;
        let mut buffer = device.buffer(dtype, len)?;
        write(buffer.elements_mut())?;
        Tensor::of_buffer(device, shape, format, buffer)
    }

    /// As [`Tensor::written`], for elements of a type that is known at run time.
    ///
    /// # Errors
    /// As [`Tensor::build`].
    pub fn written_elements(
        (device, dtype): (&Device, DType),
        shape: &[usize],
        format: MemoryFormat,
        write: impl FnOnce(SliceMut<'_>) -> Result<()>,
    ) -> Result<Tensor> {
        let write = |data: SliceMut<'_>| if device.is_dry() { Ok(()) } else { write(data) };
        Tensor::build_elements((device, dtype), shape, format, write)
    }

    /// [`Tensor::build_elements`] with this tensor's device, type, shape and format.
    pub(crate) fn elements_like(&self, write: impl FnOnce(SliceMut<'_>) -> Result<()>) -> Result<Tensor> {
        Tensor::build_elements((self.device(), self.dtype()), self.shape(), self.format(), write)
    }

    fn with_inner(&self, change: impl FnOnce(&mut Inner)) -> Tensor {
        let mut inner = Inner {
            storage: self.inner.storage.clone(),
            shape: self.inner.shape.clone(),
            format: self.inner.format,
            device: self.inner.device.clone(),
            history: self.inner.history.clone(),
            inference: self.inner.inference,
        };
        change(&mut inner);
        Tensor { inner: Arc::new(inner) }
    }

    pub(crate) fn with_history(&self, history: History) -> Tensor {
        self.with_inner(|inner| inner.history = history)
    }

    /// As [`Tensor::with_history`], without a new tensor if this one has no clone.
    pub(crate) fn into_history(mut self, history: History) -> Tensor {
        if let Some(inner) = Arc::get_mut(&mut self.inner) {
            inner.history = history;
            return self;
        }
        self.with_history(history)
    }

    /// The same elements in another shape of equal length, without history. Contiguous tensors only.
    pub(crate) fn reshaped(&self, shape: &[usize]) -> Tensor {
        self.relabeled(shape, MemoryFormat::Contiguous)
    }

    /// The same elements, in the same order in memory, as a tensor of another shape and format of equal length, without history.
    pub(crate) fn relabeled(&self, shape: &[usize], format: MemoryFormat) -> Tensor {
        debug_assert_eq!(self.len(), shape.iter().product::<usize>());
        self.with_inner(|inner| {
            inner.shape = shape.into();
            inner.format = format;
            inner.history = History::None;
        })
    }

    /// The same elements in another shape whose elements have the same order in memory, without history.
    pub(crate) fn viewed(&self, shape: &[usize]) -> Tensor {
        debug_assert_eq!(self.len(), shape.iter().product::<usize>());
        self.with_inner(|inner| {
            inner.shape = shape.into();
            inner.history = History::None;
        })
    }

    /// As [`Tensor::in_format`], but shares the elements also where both formats have them in the same order: those of a single
    /// channel, or of a single pixel.
    pub(crate) fn laid_out(&self, format: MemoryFormat) -> Result<Tensor> {
        let format = usable_format(self.shape(), format)?;
        match self.shape() {
            &[_, channels, ref spatial @ ..] if channels <= 1 || spatial.iter().all(|&size| size <= 1) => {
                Ok(self.relabeled(self.shape(), format))
            }
            _ => self.in_format(format),
        }
    }

    /// A leaf with these elements: `backward` will give its gradient.
    pub fn with_grad(&self) -> Tensor {
        self.with_history(History::new_leaf())
    }

    /// A constant with these elements: gradients stop here.
    pub fn detach(&self) -> Tensor {
        self.with_history(History::None)
    }

    /// As [`Tensor::detach`], but a clone of this tensor if it is a constant.
    pub(crate) fn constant(&self) -> Tensor {
        if self.requires_grad() { self.detach() } else { self.clone() }
    }

    /// Whether `backward` reaches this tensor.
    pub fn requires_grad(&self) -> bool {
        !matches!(self.inner.history, History::None)
    }

    /// Whether this is a leaf made by [`Tensor::with_grad`].
    pub fn is_leaf(&self) -> bool {
        matches!(self.inner.history, History::Leaf(_))
    }

    pub(crate) fn history(&self) -> &History {
        &self.inner.history
    }

    /// Whether this tensor was made in [`crate::inference_mode`].
    pub fn is_inference(&self) -> bool {
        self.inner.inference
    }

    /// The size of each dimension, N x C x H x W where there are four.
    pub fn shape(&self) -> &[usize] {
        &self.inner.shape
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.inner.shape.iter().product()
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Order of the elements in memory.
    pub fn format(&self) -> MemoryFormat {
        self.inner.format
    }

    /// Where this tensor lives.
    pub fn device(&self) -> &Device {
        &self.inner.device
    }

    /// Type of the elements.
    pub fn dtype(&self) -> DType {
        self.inner.storage.dtype
    }

    /// The elements in the order of [`Tensor::format`].
    ///
    /// # Errors
    /// If they are of another type, or they must be recomputed and that fails or there is no memory.
    pub fn data<T: Stored>(&self) -> Result<&[T]> {
        let (expected, found) = (T::DTYPE, self.dtype());
        if found != expected {
            return Err(Error::DType { operation: "data", expected, found });
        }
        Ok(self.elements()?.of()?)
    }

    /// The elements in the order of [`Tensor::format`], of whatever type: what kernels read.
    ///
    /// # Errors
    /// If they must be recomputed and that fails or there is no memory.
    pub fn elements(&self) -> Result<Slice<'_>> {
        self.inner.storage.elements(self.device())
    }

    /// The elements of some images (indices of the first dimension), as in [`Tensor::elements`]. If the elements are not in memory
    /// (see [`Tensor::keep`]), those of these images are recomputed in `scratch`, which may be reused for further calls.
    ///
    /// # Errors
    /// If there are no such images, or there is no memory.
    pub fn images<'a>(&'a self, images: Range<usize>, scratch: &'a mut Option<Buffer>) -> Result<Slice<'a>> {
        let total = self.shape().first().copied().unwrap_or(0);
        if images.start > images.end || images.end > total {
            return Err(invalid("images", format!("{images:?} of {total} images")));
        }
        self.inner.storage.images(self.device(), images, total, scratch)
    }

    /// Computes what all calls of [`Tensor::images`] share. Returns whether a call takes memory besides its scratch.
    pub(crate) fn prepare_images(&self) -> Result<bool> {
        self.inner.storage.prepare()
    }

    /// The tensor as a constant, for a [`crate::Function`] to save. If its elements can be recomputed from what other operations
    /// keep, the result does not hold them, and recomputes them when they are read.
    ///
    /// The recomputed elements are the same to the last bit. Once they have been read as a whole, they take memory until the
    /// result is dropped.
    pub fn keep(&self) -> Tensor {
        match self.inner.storage.without_elements() {
            Some(storage) => self.with_inner(|inner| {
                inner.history = History::None;
                inner.storage = Arc::new(storage);
            }),
            None => self.constant(),
        }
    }

    /// The tensor as a constant, without its elements if they are only numbers of another type converted: see [`Tensor::keep`].
    pub(crate) fn keep_unconverted(&self) -> Tensor {
        if self.inner.storage.is_converted() { self.keep() } else { self.constant() }
    }

    /// Whether both are one tensor: clones of each other.
    pub fn is(&self, other: &Tensor) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }

    /// Whether both share their elements, and have the same shape and format, so that their values are equal.
    pub fn is_same(&self, other: &Tensor) -> bool {
        Arc::ptr_eq(&self.inner.storage, &other.inner.storage)
            && self.shape() == other.shape()
            && self.format() == other.format()
    }

    /// Where the elements begin in memory; 0 if they must be recomputed. Two tensors that exist at the
    /// same time and are not empty have the same address only if they share their elements.
    pub fn address(&self) -> usize {
        self.inner.storage.address()
    }

    /// Whether the elements are in memory and need not be recomputed.
    pub(crate) fn has_elements(&self) -> bool {
        self.inner.storage.has_elements()
    }

    /// The same elements, which `recipe` can recompute. They must not be shared.
    pub(crate) fn with_recipe(self, recipe: Arc<dyn Recipe>) -> Tensor {
        let mut inner = Arc::into_inner(self.inner).expect("unshared");
        let storage = Arc::into_inner(inner.storage).expect("unshared");
        inner.storage = Arc::new(storage.with_recipe(recipe));
        Tensor { inner: Arc::new(inner) }
    }

    /// Mutable access to the elements, if they are in memory and not shared.
    pub(crate) fn unshared(&mut self) -> Option<SliceMut<'_>> {
        Arc::get_mut(&mut Arc::get_mut(&mut self.inner)?.storage)?.elements_mut()
    }

    /// The buffer with the elements, or with a copy of them where they are shared or borrowed. They must be there.
    pub(crate) fn into_own_bytes(self) -> Result<Bytes> {
        let (device, dtype, len) = (self.device().clone(), self.dtype(), self.len());
        let inner = match Arc::try_unwrap(self.inner) {
            Ok(inner) => {
                // The tape of a tensor that nobody holds may be the last to share its elements.
                drop(inner.history);
                match Arc::try_unwrap(inner.storage) {
                    Ok(storage) if !storage.is_borrowed() => {
                        return Ok(storage.into_bytes().expect("the elements are there"));
                    }
                    Ok(storage) => Arc::new(storage),
                    Err(storage) => storage,
                }
            }
            Err(inner) => inner.storage.clone(),
        };
        let mut copy = device.buffer(dtype, len)?;
        if !device.is_dry() {
            copy.elements_mut().copy_from(inner.elements(&device)?)?;
        }
        Ok(copy.into_bytes())
    }

    /// Changes the elements in place if they are not shared, else in a copy that becomes this tensor.
    ///
    /// The history is lost: the changed values are a constant, or a new leaf if this was a leaf. This is for optimizers.
    ///
    /// # Errors
    /// If the elements are of another type, there is no memory for a copy, or `change` fails (the tensor then holds what `change`
    /// left).
    pub fn update<T: Stored>(&mut self, change: impl FnOnce(&mut [T]) -> Result<()>) -> Result<()> {
        // An error first, so that the tensor stays as it is.
        self.data::<T>()?;
        self.update_elements(|data| change(data.of()?))
    }

    /// As [`Tensor::update`], for elements of a type that is known at run time.
    ///
    /// # Errors
    /// As [`Tensor::update`].
    pub fn update_elements(&mut self, change: impl FnOnce(SliceMut<'_>) -> Result<()>) -> Result<()> {
        let was_leaf = self.is_leaf();
        let result = change(self.elements_mut()?);
        if let Some(inner) = Arc::get_mut(&mut self.inner).filter(|_| was_leaf) {
            inner.history = History::new_leaf();
        }
        result
    }

    /// Mutable access to the elements. As in [`Tensor::update`], they are copied if they are shared or borrowed, and the history is
    /// lost.
    ///
    /// # Errors
    /// If there is no memory for a copy.
    pub fn elements_mut(&mut self) -> Result<SliceMut<'_>> {
        self.elements()?;
        let shared = match Arc::get_mut(&mut self.inner) {
            Some(inner) => Arc::get_mut(&mut inner.storage).is_none_or(|storage| storage.is_borrowed()),
            None => true,
        };
        if shared {
            let of = (self.device(), self.dtype());
            *self = Tensor::written_elements(of, self.shape(), self.format(), |data| {
                Ok(data.copy_from(self.elements()?)?)
            })?;
        }
        let inner = Arc::get_mut(&mut self.inner).expect("unshared");
        inner.history = History::None;
        let storage = Arc::get_mut(&mut inner.storage).expect("unshared");
        Ok(storage.elements_mut().expect("read above"))
    }

    /// The elements in contiguous (N, C, H, W) order.
    ///
    /// # Errors
    /// If they are of another type, or there is no memory for them.
    pub fn to_vec<T: Stored>(&self) -> Result<Vec<T>> {
        let contiguous = self.detach().in_format(MemoryFormat::Contiguous)?;
        Ok(convoke_memory::copied(contiguous.data::<T>()?)?)
    }

    /// The only element.
    ///
    /// # Errors
    /// If there are more or fewer.
    pub fn item(&self) -> Result<f64> {
        if self.len() != 1 {
            return Err(invalid(
                "item",
                format!("a tensor of shape {:?} is not a single number", self.shape()),
            ));
        }
        Ok(self.elements()?.at(0))
    }

    /// The shape of the tensor as N x C x (the rest), for kernels that work by channel.
    ///
    /// # Errors
    /// If it has fewer than two dimensions.
    pub fn extent(&self, operation: &'static str) -> Result<Extent> {
        match self.shape() {
            &[batch, channels, ref spatial @ ..] => {
                Ok(Extent { batch, channels, spatial: spatial.iter().product(), format: self.format() })
            }
            shape => {
                Err(invalid(operation, format!("expected at least 2 dimensions (N, C, ...), got {shape:?}")))
            }
        }
    }

    /// The same values in another memory format, without history; shares the elements if they already have that format.
    pub(crate) fn in_format(&self, format: MemoryFormat) -> Result<Tensor> {
        let format = usable_format(self.shape(), format)?;
        if format == self.format() {
            return Ok(self.constant());
        }
        let extent = self.extent("memory format")?;
        Tensor::build_elements((self.device(), self.dtype()), self.shape(), format, |out| {
            Ok(memory_format::convert(self.device().compute(), &extent, self.elements()?, out)?)
        })
    }

    /// The nearest values of another type, without history; shares the elements if they already have that type.
    pub(crate) fn in_dtype(&self, dtype: DType) -> Result<Tensor> {
        if dtype == self.dtype() {
            return Ok(self.constant());
        }
        Tensor::build_elements((self.device(), dtype), self.shape(), self.format(), |out| {
            Ok(convert::convert(self.device().compute(), self.elements()?, out)?)
        })
    }
}

/// Checks that the shape can have the format: channels-last needs channels, and at least one dimension after them.
fn usable_format(shape: &[usize], format: MemoryFormat) -> Result<MemoryFormat> {
    if format == MemoryFormat::ChannelsLast && shape.len() < 3 {
        return Err(invalid(
            "memory format",
            format!("channels-last needs 3 dimensions or more, got {shape:?}"),
        ));
    }
    Ok(format)
}

impl std::fmt::Debug for Tensor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Tensor({} {:?} {}", self.dtype(), self.shape(), self.format())?;
        match self.history() {
            History::None => {}
            History::Leaf(_) => write!(f, ", leaf")?,
            History::Node(node) => write!(f, ", from {}", node.name)?,
            History::Gradient(operation) => write!(f, ", gradient from {operation}")?,
        }
        const SHOWN: usize = 8;
        let first = match self.elements() {
            Ok(data) => data.part(0..data.len().min(SHOWN)).to_f64(),
            Err(_) => Vec::new(),
        };
        write!(f, ", {first:?}{})", if self.len() > SHOWN { "..." } else { "" })
    }
}
