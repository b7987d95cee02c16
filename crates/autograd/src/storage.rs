//! The elements of a tensor: there, or to be made again when somebody reads them.

use std::ops::Range;
use std::sync::{Arc, OnceLock};

use bytemuck::Pod;
use convoke_kernels::DType;

use crate::pool::Bytes;
use crate::{Device, Result};

/// How elements are made again from what an operation keeps anyway, such as a normalisation from its input.
///
/// It gives the same bits every time.
pub(crate) trait Recipe: Send + Sync {
    /// The images (or rows: the first dimension) of the tensor.
    fn images(&self) -> usize;

    /// Writes the elements of these images, of the type of the tensor.
    fn write(&self, images: Range<usize>, out: &mut [u8]) -> Result<()>;
}

pub(crate) struct Storage {
    pub(crate) dtype: DType,
    len: usize,
    /// Absent until somebody reads elements that `recipe` makes.
    bytes: OnceLock<Bytes>,
    recipe: Option<Arc<dyn Recipe>>,
}

impl Storage {
    pub(crate) fn new(dtype: DType, len: usize, bytes: Bytes) -> Storage {
        Storage { dtype, len, bytes: OnceLock::from(bytes), recipe: None }
    }

    /// Elements that are not there yet.
    pub(crate) fn deferred(dtype: DType, len: usize, recipe: Arc<dyn Recipe>) -> Storage {
        Storage { dtype, len, bytes: OnceLock::new(), recipe: Some(recipe) }
    }

    /// The same elements, to be made again when they are read; `None` if nothing says how.
    pub(crate) fn without_elements(&self) -> Option<Storage> {
        Some(Storage::deferred(self.dtype, self.len, self.recipe.clone()?))
    }

    /// The elements, which can be made again by `recipe`.
    pub(crate) fn with_recipe(self, recipe: Arc<dyn Recipe>) -> Storage {
        Storage { recipe: Some(recipe), ..self }
    }

    /// Whether they are there.
    pub(crate) fn has_elements(&self) -> bool {
        self.bytes.get().is_some()
    }

    pub(crate) fn elements<T: Pod>(&self, device: &Device) -> Result<&[T]> {
        if self.bytes.get().is_none()
            && let Some(recipe) = &self.recipe
        {
            let mut buffer = device.buffer::<T>(self.len)?;
            recipe.write(0..recipe.images(), bytemuck::cast_slice_mut(&mut buffer))?;
            // Another thread may have been first: its elements are the same.
            let _ = self.bytes.set(buffer.into_bytes());
        }
        Ok(self.bytes.get().expect("made above, or there from the start").elements())
    }

    /// The elements to be changed, if they are there; they cannot be made again then.
    pub(crate) fn elements_mut<T: Pod>(&mut self) -> Option<&mut [T]> {
        let bytes = self.bytes.get_mut()?;
        self.recipe = None;
        Some(bytes.elements_mut())
    }

    /// The elements of some of `total` images: where they lie, or made in `scratch`, which keeps its memory for the next call.
    pub(crate) fn images<'a, T: Pod>(
        &'a self,
        device: &Device,
        images: Range<usize>,
        total: usize,
        scratch: &'a mut Option<crate::Buffer<T>>,
    ) -> Result<&'a [T]> {
        let image = self.len / total.max(1);
        match &self.recipe {
            Some(recipe) if self.bytes.get().is_none() && recipe.images() == total => {
                let len = images.len() * image;
                let buffer = crate::pool::at_least(scratch, device, len)?;
                recipe.write(images, bytemuck::cast_slice_mut(buffer))?;
                Ok(buffer)
            }
            _ => Ok(&self.elements(device)?[images.start * image..images.end * image]),
        }
    }
}
