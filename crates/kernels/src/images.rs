//! Tensors that are read a few images at a time, because not all of their elements need to be in memory.

use std::ops::Range;
use std::sync::Arc;

use crate::error::invalid;
use crate::memory::at_least;
use crate::{Buffer, Device, Element, Result};

/// A tensor of images, the index of the first dimension. Its elements are in memory, or are computed where they are read.
pub trait Images<T: Element> {
    /// The elements of some images. Elements that are not in memory are computed in `scratch`, which keeps its memory for
    /// the next call. They must have the same bits each time.
    ///
    /// # Errors
    /// If there are no such images, or no memory.
    fn read<'a>(&'a self, images: Range<usize>, scratch: &'a mut Option<Buffer<T>>) -> Result<&'a [T]>;

    /// Whether all elements are in memory.
    fn in_memory(&self) -> bool;

    /// All elements, to be overwritten; `None` unless they are in memory and nobody else reads them.
    fn overwrite(&mut self) -> Option<&mut [T]>;

    /// All elements, to be changed. If somebody else reads them, this becomes a copy first.
    ///
    /// # Errors
    /// If there is no memory.
    fn change(&mut self) -> Result<&mut [T]>;
}

/// Images for callers without a tensor type of their own. Clones share the elements.
#[derive(Clone)]
pub struct PlainImages<'a, T: Element> {
    device: Device,
    images: usize,
    /// Elements of an image.
    image: usize,
    elements: Elements<'a, T>,
}

/// Writes the elements of some images.
type Write<'a, T> = dyn Fn(Range<usize>, &mut [T]) -> Result<()> + 'a;

#[derive(Clone)]
enum Elements<'a, T: Element> {
    /// Elements of the caller; never written to.
    Borrowed(&'a [T]),
    Owned(Arc<Buffer<T>>),
    Recomputed(Arc<Write<'a, T>>),
}

impl<'a, T: Element> PlainImages<'a, T> {
    /// `images` images, one after the other in the caller's memory, which is never written to.
    ///
    /// # Errors
    /// If the elements are no such number of images of one size.
    pub fn borrowed(device: &Device, elements: &'a [T], images: usize) -> Result<PlainImages<'a, T>> {
        let image = image_len(elements.len(), images)?;
        Ok(PlainImages { device: device.clone(), images, image, elements: Elements::Borrowed(elements) })
    }

    /// `images` images, one after the other in a buffer, which may be overwritten.
    ///
    /// # Errors
    /// If the elements are no such number of images of one size.
    pub fn owned(device: &Device, elements: Buffer<T>, images: usize) -> Result<PlainImages<'a, T>> {
        let image = image_len(elements.len(), images)?;
        let elements = Elements::Owned(Arc::new(elements));
        Ok(PlainImages { device: device.clone(), images, image, elements })
    }

    /// `images` images of `image` elements each, which `write` computes wherever they are read.
    pub fn recomputed(
        device: &Device,
        [images, image]: [usize; 2],
        write: impl Fn(Range<usize>, &mut [T]) -> Result<()> + 'a,
    ) -> PlainImages<'a, T> {
        let elements = Elements::Recomputed(Arc::new(write));
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

impl<T: Element> Images<T> for PlainImages<'_, T> {
    fn read<'a>(&'a self, images: Range<usize>, scratch: &'a mut Option<Buffer<T>>) -> Result<&'a [T]> {
        self.check(&images)?;
        let place = images.start * self.image..images.end * self.image;
        match &self.elements {
            Elements::Borrowed(elements) => Ok(&elements[place]),
            Elements::Owned(elements) => Ok(&elements[place]),
            Elements::Recomputed(write) => {
                let elements = at_least(scratch, &self.device, place.len())?;
                write(images, elements)?;
                Ok(elements)
            }
        }
    }

    fn in_memory(&self) -> bool {
        !matches!(self.elements, Elements::Recomputed(_))
    }

    fn overwrite(&mut self) -> Option<&mut [T]> {
        match &mut self.elements {
            Elements::Owned(elements) => Arc::get_mut(elements).map(|elements| &mut **elements),
            _ => None,
        }
    }

    fn change(&mut self) -> Result<&mut [T]> {
        if self.overwrite().is_none() {
            let mut copy = self.device.buffer::<T>(self.images * self.image)?;
            let mut scratch = None;
            copy.copy_from_slice(self.read(0..self.images, &mut scratch)?);
            self.elements = Elements::Owned(Arc::new(copy));
        }
        Ok(self.overwrite().expect("nobody else has the copy"))
    }
}
