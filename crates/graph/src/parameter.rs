//! The state of modules: trained parameters, buffers that are not trained, counters.

use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, RwLock};

use convoke_autograd::{Error, Result, Stored, Tensor};
use convoke_kernels::SliceMut;

/// A tensor that an optimizer changes. Clones share one parameter, so that weights can be tied.
#[derive(Clone)]
pub struct Parameter {
    value: Slot,
}

/// A tensor that is part of a module's state but not trained, such as running statistics. Clones share one buffer.
#[derive(Clone)]
pub struct Buffer {
    value: Slot,
}

type Slot = Arc<RwLock<Tensor>>;

fn read(slot: &Slot) -> Tensor {
    slot.read().unwrap_or_else(|poisoned| poisoned.into_inner()).clone()
}

fn replace(slot: &Slot, value: Tensor) -> Result<()> {
    let mut slot = slot.write().unwrap_or_else(|poisoned| poisoned.into_inner());
    if slot.shape() != value.shape() || slot.dtype() != value.dtype() {
        let reason = format!(
            "expected {} of shape {:?}, got {} of shape {:?}",
            slot.dtype(),
            slot.shape(),
            value.dtype(),
            value.shape()
        );
        return Err(Error::Invalid { operation: "set", reason });
    }
    *slot = value;
    Ok(())
}

impl Parameter {
    /// A parameter that starts with `value`.
    pub fn new(value: &Tensor) -> Parameter {
        Parameter { value: Arc::new(RwLock::new(value.with_grad())) }
    }

    /// The value: a leaf, unless the parameter is frozen. [`convoke_autograd::Gradients`] finds its gradient by this leaf.
    pub fn value(&self) -> Tensor {
        read(&self.value)
    }

    /// Whether both are the same parameter: whether they are tied.
    pub fn is(&self, other: &Parameter) -> bool {
        Arc::ptr_eq(&self.value, &other.value)
    }

    /// Takes another value of the same shape and type.
    ///
    /// # Errors
    /// If shape or type differ.
    pub fn set(&self, value: &Tensor) -> Result<()> {
        let trained = self.is_trained();
        replace(&self.value, if trained { value.with_grad() } else { value.detach() })
    }

    /// Changes the elements: in place, or in a copy if something else, such as a tape, still holds them.
    ///
    /// # Errors
    /// If the elements are not `T`, there is no memory for a copy, or `change` fails.
    pub fn update<T: Stored>(&self, change: impl FnOnce(&mut [T]) -> Result<()>) -> Result<()> {
        self.value.write().unwrap_or_else(|poisoned| poisoned.into_inner()).update(change)
    }

    /// As [`Parameter::update`], for elements of a type that is known at run time.
    ///
    /// # Errors
    /// As [`Parameter::update`].
    pub fn update_elements(&self, change: impl FnOnce(SliceMut<'_>) -> Result<()>) -> Result<()> {
        self.value.write().unwrap_or_else(|poisoned| poisoned.into_inner()).update_elements(change)
    }

    /// Whether gradients are computed for it.
    pub fn is_trained(&self) -> bool {
        self.value().requires_grad()
    }

    /// Makes the parameter trained, or freezes it.
    pub fn set_trained(&self, trained: bool) {
        let mut value = self.value.write().unwrap_or_else(|poisoned| poisoned.into_inner());
        *value = if trained { value.with_grad() } else { value.detach() };
    }
}

impl Buffer {
    /// A buffer that starts with `value`.
    pub fn new(value: &Tensor) -> Buffer {
        Buffer { value: Arc::new(RwLock::new(value.detach())) }
    }

    /// The value, a constant.
    pub fn value(&self) -> Tensor {
        read(&self.value)
    }

    /// Whether both are the same buffer.
    #[doc(hidden)]
    pub fn is(&self, other: &Buffer) -> bool {
        Arc::ptr_eq(&self.value, &other.value)
    }

    /// Takes another value of the same shape and type.
    ///
    /// # Errors
    /// If shape or type differ.
    pub fn set(&self, value: &Tensor) -> Result<()> {
        replace(&self.value, value.detach())
    }
}

/// A count that is part of a module's state. Clones share one counter.
#[derive(Clone, Default)]
pub struct Counter {
    value: Arc<AtomicI64>,
}

impl Counter {
    /// The count.
    pub fn value(&self) -> i64 {
        self.value.load(Ordering::Relaxed)
    }

    /// Takes another count.
    pub fn set(&self, value: i64) {
        self.value.store(value, Ordering::Relaxed);
    }
}
