//! Exchanges tensors with Python without copying them, in the form of DLPack (version 0.8), which PyTorch, NumPy and others know.
//!
//! A capsule named `dltensor` holds a [`ManagedTensor`]; whoever takes it out renames the capsule and calls the deleter when it needs
//! the elements no more. The structures are those of
//! <https://github.com/dmlc/dlpack/blob/v0.8/include/dlpack/dlpack.h>.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_void};
use std::ptr::NonNull;

use convoke_autograd::{DType, Device, Exported, Stored, Tensor, dispatch_stored};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;

const UNUSED: &CStr = c"dltensor";
const USED: &CStr = c"used_dltensor";
/// `kDLCPU`.
const CPU: i32 = 1;
/// `kDLFloat`.
const FLOAT: u8 = 2;
/// `kDLBfloat`.
const BFLOAT: u8 = 4;

#[repr(C)]
struct DeviceId {
    kind: i32,
    number: i32,
}

#[repr(C)]
#[derive(Clone, Copy, PartialEq)]
struct ElementType {
    code: u8,
    bits: u8,
    lanes: u16,
}

#[repr(C)]
struct RawTensor {
    data: *mut c_void,
    device: DeviceId,
    dimensions: i32,
    element: ElementType,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

#[repr(C)]
struct ManagedTensor {
    tensor: RawTensor,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut ManagedTensor)>,
}

/// Elements that Python owns. Dropping it tells Python that they are not needed any more.
struct Lent<T> {
    managed: NonNull<ManagedTensor>,
    first: NonNull<T>,
    len: usize,
}

// SAFETY: the elements are plain numbers. The deleter may run on any thread: PyTorch's and NumPy's take the interpreter's lock where
// they need it.
unsafe impl<T: Stored> Send for Lent<T> {}
// SAFETY: as above; a shared `Lent` only reads.
unsafe impl<T: Stored> Sync for Lent<T> {}

impl<T: Stored> AsRef<[T]> for Lent<T> {
    fn as_ref(&self) -> &[T] {
        // SAFETY: `borrow` checked that `len` aligned elements are reachable from `first`, and the producer keeps them until the
        // deleter is called, when this is dropped. They are not written to while kernels read them: the package holds the tensors
        // as autograd does, whose users may not write to a tensor that another thread computes with.
        unsafe { std::slice::from_raw_parts(self.first.as_ptr(), self.len) }
    }
}

impl<T> Drop for Lent<T> {
    fn drop(&mut self) {
        // SAFETY: the structure was taken out of its capsule, so this is its only owner, and the deleter is called once.
        unsafe {
            if let Some(deleter) = self.managed.as_ref().deleter {
                deleter(self.managed.as_ptr());
            }
        }
    }
}

fn element_of(dtype: DType) -> ElementType {
    let (code, bits) = match dtype {
        DType::F32 => (FLOAT, 32),
        DType::F64 => (FLOAT, 64),
        DType::F16 => (FLOAT, 16),
        DType::BF16 => (BFLOAT, 16),
    };
    ElementType { code, bits, lanes: 1 }
}

/// Takes the tensor out of a capsule, and borrows its elements.
///
/// # Errors
/// If it is no DLPack capsule, the tensor is not on the CPU, or its type or strides are not supported.
pub(crate) fn borrow(device: &Device, capsule: &Bound<'_, PyAny>) -> PyResult<Tensor> {
    let object = capsule.as_ptr();
    // SAFETY: `object` is alive; the check accepts any object.
    if unsafe { ffi::PyCapsule_IsValid(object, UNUSED.as_ptr()) } == 0 {
        return Err(PyTypeError::new_err("expected a DLPack capsule that nobody has used"));
    }
    // SAFETY: the capsule is valid under this name, and a producer of DLPack puts this structure into it.
    let pointer = unsafe { ffi::PyCapsule_GetPointer(object, UNUSED.as_ptr()) }.cast::<ManagedTensor>();
    let managed = NonNull::new(pointer).ok_or_else(|| PyTypeError::new_err("the capsule is empty"))?;
    // SAFETY: with this name the capsule's destructor leaves the structure alone, so it has one owner from here on.
    if unsafe { ffi::PyCapsule_SetName(object, USED.as_ptr()) } != 0 {
        return Err(PyErr::fetch(capsule.py()));
    }
    // Owns the structure until the elements' type is known, so that each error below frees it.
    let owner = Lent::<u8> { managed, first: NonNull::dangling(), len: 0 };
    // SAFETY: the producer made the structure, and keeps it until its deleter is called.
    let raw = unsafe { &managed.as_ref().tensor };
    if raw.device.kind != CPU {
        return Err(PyValueError::new_err("the tensor is not on the CPU"));
    }
    let dimensions = usize::try_from(raw.dimensions)
        .ok()
        .filter(|&dimensions| dimensions <= 64)
        .ok_or_else(|| PyValueError::new_err(format!("{} dimensions", raw.dimensions)))?;
    let sizes = |values: *mut i64| -> PyResult<Vec<usize>> {
        if dimensions == 0 {
            return Ok(Vec::new());
        }
        // SAFETY: shape and strides have a number for each dimension, as long as the structure lives.
        let values = unsafe { std::slice::from_raw_parts(values, dimensions) };
        let size = |&value: &i64| {
            usize::try_from(value).map_err(|_| PyValueError::new_err(format!("a size or stride of {value}")))
        };
        values.iter().map(size).collect()
    };
    let shape = sizes(raw.shape)?;
    // Without strides the order is row-major.
    let strides = match raw.strides.is_null() {
        true => row_major(&shape),
        false => sizes(raw.strides)?,
    };
    let of = |dtype: &DType| element_of(*dtype) == raw.element;
    let dtype = DType::ALL.into_iter().find(of);
    let dtype = dtype.ok_or_else(|| {
        let ElementType { code, bits, lanes } = raw.element;
        PyTypeError::new_err(format!(
            "elements of type code {code} with {bits} bits and {lanes} lanes are not supported, expected floating-point numbers"
        ))
    })?;
    let len = if shape.contains(&0) {
        Some(0)
    } else {
        // The place of the last element, and one more: strides of other orders are refused below.
        let last = shape
            .iter()
            .zip(&strides)
            .try_fold(0usize, |last, (&size, &stride)| last.checked_add(stride.checked_mul(size - 1)?));
        last.and_then(|last| last.checked_add(1))
    };
    let bytes =
        len.and_then(|len| len.checked_mul(dtype.size())).filter(|&bytes| bytes <= isize::MAX as usize);
    let (Some(len), Some(_), Ok(offset)) = (len, bytes, usize::try_from(raw.byte_offset)) else {
        return Err(PyValueError::new_err(format!("the shape {shape:?} is too large")));
    };
    let address = raw.data as usize;
    let tensor = dispatch_stored!(dtype, T => {
        let first = match NonNull::new(raw.data.cast::<u8>().wrapping_add(offset).cast::<T>()) {
            Some(first) if address != 0 && len > 0 => first,
            _ if len == 0 => NonNull::dangling(),
            _ => return Err(PyValueError::new_err("the tensor has no memory")),
        };
        if !first.as_ptr().is_aligned() {
            return Err(PyValueError::new_err("the tensor's elements are not aligned: copy it first"));
        }
        std::mem::forget(owner);
        Tensor::borrowed(device, &shape, &strides, Lent::<T> { managed, first, len })
    });
    tensor.map_err(|error| PyValueError::new_err(error.to_string()))
}

fn row_major(shape: &[usize]) -> Vec<usize> {
    let mut strides = vec![1usize; shape.len()];
    for axis in (1..shape.len()).rev() {
        strides[axis - 1] = strides[axis].saturating_mul(shape[axis]);
    }
    strides
}

/// What a capsule of ours owns.
struct Given {
    managed: ManagedTensor,
    shape: Vec<i64>,
    strides: Vec<i64>,
    _elements: Exported,
}

/// A capsule with these elements. Whoever takes them out may write to them.
pub(crate) fn give<'py>(py: Python<'py>, mut exported: Exported) -> PyResult<Bound<'py, PyAny>> {
    let dtype = exported.dtype();
    let element = element_of(dtype);
    let data = dispatch_stored!(dtype, T => {
        let elements = exported.data_mut::<T>().map_err(|error| PyTypeError::new_err(error.to_string()))?;
        elements.as_mut_ptr().cast::<c_void>()
    });
    let signed = |sizes: &[usize]| sizes.iter().map(|&size| size as i64).collect::<Vec<i64>>();
    let (shape, strides) = (signed(exported.shape()), signed(exported.strides()));
    let tensor = RawTensor {
        data,
        device: DeviceId { kind: CPU, number: 0 },
        dimensions: shape.len() as i32,
        element,
        shape: std::ptr::null_mut(),
        strides: std::ptr::null_mut(),
        byte_offset: 0,
    };
    let managed = ManagedTensor { tensor, context: std::ptr::null_mut(), deleter: Some(delete) };
    let given = Box::into_raw(Box::new(Given { managed, shape, strides, _elements: exported }));
    // SAFETY: the box is alive, and nobody else knows it yet. Its lists stay where they are, as nothing changes them. The deleter finds
    // the box in `context`.
    let pointer = unsafe {
        (*given).managed.tensor.shape = (*given).shape.as_mut_ptr();
        (*given).managed.tensor.strides = (*given).strides.as_mut_ptr();
        (*given).managed.context = given.cast();
        &raw mut (*given).managed
    };
    // SAFETY: the interpreter's lock is held; name and destructor live as long as the library.
    let capsule = unsafe { ffi::PyCapsule_New(pointer.cast(), UNUSED.as_ptr(), Some(destroy)) };
    if capsule.is_null() {
        // SAFETY: no capsule was made, so the structure still has this one owner.
        unsafe { delete(pointer) };
        return Err(PyErr::fetch(py));
    }
    // SAFETY: a new object, owned by nobody else.
    Ok(unsafe { Bound::from_owned_ptr(py, capsule) })
}

/// Frees what [`give`] made.
///
/// # Safety
/// `managed` is from [`give`], and is not used afterwards.
unsafe extern "C" fn delete(managed: *mut ManagedTensor) {
    // SAFETY: `give` put the address of the box into `context`, and the caller frees it once.
    drop(unsafe { Box::from_raw((*managed).context.cast::<Given>()) });
}

/// Frees the tensor of a capsule that nobody has taken it out of.
///
/// # Safety
/// Called by the interpreter for a capsule that [`give`] made.
unsafe extern "C" fn destroy(capsule: *mut ffi::PyObject) {
    // SAFETY: the interpreter passes a capsule that is alive; under the name for unused ones it still owns its tensor.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, UNUSED.as_ptr()) != 0 {
            delete(ffi::PyCapsule_GetPointer(capsule, UNUSED.as_ptr()).cast());
        }
    }
}
