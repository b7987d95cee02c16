//! Tensors as what kernels read a few images at a time.

use std::ops::Range;

use convoke_kernels::images::Images;
use convoke_kernels::{Error, Result};

use crate::{Buffer, Element, Tensor};

impl<T: Element> Images<T> for Tensor {
    fn read<'a>(&'a self, images: Range<usize>, scratch: &'a mut Option<Buffer<T>>) -> Result<&'a [T]> {
        self.images(images, scratch).map_err(Error::from)
    }

    fn in_memory(&self) -> bool {
        self.has_elements()
    }

    fn overwrite(&mut self) -> Option<&mut [T]> {
        self.unshared()?.of().ok()
    }

    fn change(&mut self) -> Result<&mut [T]> {
        self.make_unshared().map_err(Error::from)
    }
}
