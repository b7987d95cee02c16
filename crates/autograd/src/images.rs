//! Tensors as what kernels read a few images at a time.

use std::ops::Range;

use convoke_kernels::images::Images;
use convoke_kernels::{Error, Result, Slice, SliceMut};

use crate::{Buffer, Tensor};

impl Images for Tensor {
    fn read<'a>(&'a self, images: Range<usize>, scratch: &'a mut Option<Buffer>) -> Result<Slice<'a>> {
        self.images(images, scratch).map_err(Error::from)
    }

    fn prepare(&self) -> Result<bool> {
        self.prepare_images().map_err(Error::from)
    }

    fn in_memory(&self) -> bool {
        self.has_elements()
    }

    fn overwrite(&mut self) -> Option<SliceMut<'_>> {
        self.unshared()
    }

    fn change(&mut self) -> Result<SliceMut<'_>> {
        self.elements_mut().map_err(Error::from)
    }
}
