//! The elements of a tensor: in memory, or recomputed when they are read.

use std::ops::Range;
use std::sync::{Arc, OnceLock};

use convoke_kernels::memory::{Bytes, at_least};
use convoke_kernels::{DType, Slice, SliceMut};

use crate::foreign::Foreign;
use crate::{Buffer, Device, Result};

/// Recomputes elements from what an operation keeps anyway, such as the output of a normalisation from its input.
///
/// It must give the same bits every time.
pub(crate) trait Recipe: Send + Sync {
    /// The number of images of the tensor (the size of the first dimension).
    fn images(&self) -> usize;

    /// Writes the elements of these images, in the type of the tensor.
    fn write(&self, images: Range<usize>, out: SliceMut<'_>) -> Result<()>;

    /// Computes what all calls of [`Recipe::write`] share. Returns whether a call takes memory.
    fn prepare(&self) -> Result<bool>;

    /// Whether it only converts numbers of another type.
    fn converts(&self) -> bool {
        false
    }
}

/// Where elements lie.
enum Memory {
    /// In a buffer of the device.
    Own(Bytes),
    /// In memory that somebody else owns.
    Foreign(Foreign),
}

impl Memory {
    fn bytes(&self) -> &[u8] {
        match self {
            Memory::Own(bytes) => bytes.elements(),
            Memory::Foreign(foreign) => foreign.bytes(),
        }
    }
}

pub(crate) struct Storage {
    pub(crate) dtype: DType,
    len: usize,
    /// If `recipe` computes the elements, absent until they are first read as a whole.
    bytes: OnceLock<Memory>,
    recipe: Option<Arc<dyn Recipe>>,
}

impl Storage {
    pub(crate) fn new(dtype: DType, len: usize, bytes: Bytes) -> Storage {
        Storage { dtype, len, bytes: OnceLock::from(Memory::Own(bytes)), recipe: None }
    }

    /// Elements that somebody else owns.
    pub(crate) fn borrowed(dtype: DType, len: usize, foreign: Foreign) -> Storage {
        Storage { dtype, len, bytes: OnceLock::from(Memory::Foreign(foreign)), recipe: None }
    }

    /// Elements that are not computed yet.
    pub(crate) fn deferred(dtype: DType, len: usize, recipe: Arc<dyn Recipe>) -> Storage {
        Storage { dtype, len, bytes: OnceLock::new(), recipe: Some(recipe) }
    }

    /// The elements, to be recomputed when they are read; `None` if there is no recipe.
    pub(crate) fn without_elements(&self) -> Option<Storage> {
        Some(Storage::deferred(self.dtype, self.len, self.recipe.clone()?))
    }

    /// The elements, which `recipe` can recompute.
    pub(crate) fn with_recipe(self, recipe: Arc<dyn Recipe>) -> Storage {
        Storage { recipe: Some(recipe), ..self }
    }

    /// Whether the elements can be converted again from numbers of another type.
    pub(crate) fn is_converted(&self) -> bool {
        self.recipe.as_ref().is_some_and(|recipe| recipe.converts())
    }

    /// Where the elements begin; 0 if they are not in memory.
    pub(crate) fn address(&self) -> usize {
        self.bytes.get().map_or(0, |memory| memory.bytes().as_ptr().addr())
    }

    /// Whether the elements are in memory.
    pub(crate) fn has_elements(&self) -> bool {
        self.bytes.get().is_some()
    }

    /// Computes what all reads of some images share. Returns whether a read takes memory besides its scratch.
    pub(crate) fn prepare(&self) -> Result<bool> {
        match &self.recipe {
            Some(recipe) if self.bytes.get().is_none() => recipe.prepare(),
            _ => Ok(false),
        }
    }

    pub(crate) fn elements(&self, device: &Device) -> Result<Slice<'_>> {
        if self.bytes.get().is_none()
            && let Some(recipe) = &self.recipe
        {
            let mut buffer = device.buffer(self.dtype, self.len)?;
            recipe.write(0..recipe.images(), buffer.elements_mut())?;
            // If another thread was first, its elements are the same.
            let _ = self.bytes.set(Memory::Own(buffer.into_bytes()));
        }
        let bytes = self.bytes.get().expect("made above, or there from the start").bytes();
        Ok(Slice::new(self.dtype, bytes)?)
    }

    /// Mutable access to the elements, if they are in memory of the device. The recipe is dropped, as it would not give the changed
    /// elements.
    pub(crate) fn elements_mut(&mut self) -> Option<SliceMut<'_>> {
        let Some(Memory::Own(bytes)) = self.bytes.get_mut() else { return None };
        self.recipe = None;
        Some(SliceMut::new(self.dtype, bytes.elements_mut()).expect("the bytes of a buffer"))
    }

    /// Whether somebody else owns the elements.
    pub(crate) fn is_borrowed(&self) -> bool {
        matches!(self.bytes.get(), Some(Memory::Foreign(_)))
    }

    /// The buffer with the elements, if they are there and nobody else owns them.
    pub(crate) fn into_bytes(self) -> Option<Bytes> {
        match self.bytes.into_inner() {
            Some(Memory::Own(bytes)) => Some(bytes),
            _ => None,
        }
    }

    /// The elements of some of `total` images: a part of the elements in memory, or recomputed in `scratch`, which keeps its
    /// memory for the next call.
    pub(crate) fn images<'a>(
        &'a self,
        device: &Device,
        images: Range<usize>,
        total: usize,
        scratch: &'a mut Option<Buffer>,
    ) -> Result<Slice<'a>> {
        let image = self.len / total.max(1);
        match &self.recipe {
            Some(recipe) if self.bytes.get().is_none() && recipe.images() == total => {
                let len = images.len() * image;
                let mut buffer = at_least(scratch, device, self.dtype, len)?;
                recipe.write(images, buffer.reborrow())?;
                Ok(buffer.into_slice())
            }
            _ => Ok(self.elements(device)?.part(images.start * image..images.end * image)),
        }
    }
}
