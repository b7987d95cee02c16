//! Tensors that are read a few images at a time, because not all of their elements need to be in memory.

use std::ops::Range;
use std::sync::Arc;

use crate::error::invalid;
use crate::memory::at_least;
use crate::{Buffer, DType, Device, Result, Slice, SliceMut};

/// A tensor of images, the index of the first dimension. Its elements are in memory, or are computed where they are read.
pub trait Images: Send + Sync {
    /// The elements of some images. Elements that are not in memory are computed in `scratch`, which keeps its memory for
    /// the next call. They must have the same bits each time.
    ///
    /// # Errors
    /// If there are no such images, or no memory.
    fn read<'a>(&'a self, images: Range<usize>, scratch: &'a mut Option<Buffer>) -> Result<Slice<'a>>;

    /// Computes what all reads share, so that several threads can read images at the same time. Returns whether a read takes memory
    /// besides its scratch; by default it may.
    ///
    /// # Errors
    /// If there is no memory.
    fn prepare(&self) -> Result<bool> {
        Ok(!self.in_memory())
    }

    /// Whether all elements are in memory.
    fn in_memory(&self) -> bool;

    /// All elements, to be overwritten; `None` unless they are in memory and nobody else reads them.
    fn overwrite(&mut self) -> Option<SliceMut<'_>>;

    /// All elements, to be changed. If somebody else reads them, this becomes a copy first.
    ///
    /// # Errors
    /// If there is no memory.
    fn change(&mut self) -> Result<SliceMut<'_>>;
}

/// Images for callers without a tensor type of their own. Clones share the elements.
#[derive(Clone)]
pub struct PlainImages<'a> {
    device: Device,
    images: usize,
    /// Elements of an image.
    image: usize,
    elements: Elements<'a>,
}

/// Writes the elements of some images.
type Write<'a> = dyn Fn(Range<usize>, SliceMut<'_>) -> Result<()> + Send + Sync + 'a;

#[derive(Clone)]
enum Elements<'a> {
    /// Elements of the caller; never written to.
    Borrowed(Slice<'a>),
    Owned(Arc<Buffer>),
    Recomputed(DType, Arc<Write<'a>>),
}

impl<'a> PlainImages<'a> {
    /// `images` images, one after the other in the caller's memory, which is never written to.
    ///
    /// # Errors
    /// If the elements are no such number of images of one size.
    pub fn borrowed(
        device: &Device,
        elements: impl Into<Slice<'a>>,
        images: usize,
    ) -> Result<PlainImages<'a>> {
        let elements = elements.into();
        let image = image_len(elements.len(), images)?;
        Ok(PlainImages { device: device.clone(), images, image, elements: Elements::Borrowed(elements) })
    }

    /// `images` images, one after the other in a buffer, which may be overwritten.
    ///
    /// # Errors
    /// If the elements are no such number of images of one size.
    pub fn owned(device: &Device, elements: Buffer, images: usize) -> Result<PlainImages<'a>> {
        let image = image_len(elements.len(), images)?;
        let elements = Elements::Owned(Arc::new(elements));
        Ok(PlainImages { device: device.clone(), images, image, elements })
    }

    /// `images` images of `image` elements each, which `write` computes wherever they are read.
    pub fn recomputed(
        (device, dtype): (&Device, DType),
        [images, image]: [usize; 2],
        write: impl Fn(Range<usize>, SliceMut<'_>) -> Result<()> + Send + Sync + 'a,
    ) -> PlainImages<'a> {
        let elements = Elements::Recomputed(dtype, Arc::new(write));
        PlainImages { device: device.clone(), images, image, elements }
    }

    /// Whether the images exist.
    fn check(&self, images: &Range<usize>) -> Result<()> {
        match images.start <= images.end && images.end <= self.images {
            true => Ok(()),
            false => Err(invalid("images", format!("{images:?} of {} images", self.images))),
        }
    }
}

fn image_len(elements: usize, images: usize) -> Result<usize> {
    match elements.checked_rem(images) {
        Some(0) => Ok(elements / images),
        None if elements == 0 => Ok(0),
        _ => Err(invalid("images", format!("{elements} elements are no {images} images of one size"))),
    }
}

impl Images for PlainImages<'_> {
    fn read<'a>(&'a self, images: Range<usize>, scratch: &'a mut Option<Buffer>) -> Result<Slice<'a>> {
        self.check(&images)?;
        let place = images.start * self.image..images.end * self.image;
        match &self.elements {
            Elements::Borrowed(elements) => Ok(elements.part(place)),
            Elements::Owned(elements) => Ok(elements.elements().part(place)),
            Elements::Recomputed(dtype, write) => {
                let mut elements = at_least(scratch, &self.device, *dtype, place.len())?;
                write(images, elements.reborrow())?;
                Ok(elements.into_slice())
            }
        }
    }

    fn in_memory(&self) -> bool {
        !matches!(self.elements, Elements::Recomputed(..))
    }

    fn overwrite(&mut self) -> Option<SliceMut<'_>> {
        match &mut self.elements {
            Elements::Owned(elements) => Arc::get_mut(elements).map(Buffer::elements_mut),
            _ => None,
        }
    }

    fn change(&mut self) -> Result<SliceMut<'_>> {
        if self.overwrite().is_none() {
            let mut scratch = None;
            let elements = self.read(0..self.images, &mut scratch)?;
            let mut copy = self.device.buffer(elements.dtype(), elements.len())?;
            copy.elements_mut().copy_from(elements)?;
            self.elements = Elements::Owned(Arc::new(copy));
        }
        Ok(self.overwrite().expect("nobody else has the copy"))
    }
}
