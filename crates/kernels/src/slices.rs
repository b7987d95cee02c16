//! Slices of volumes, arranged so that a convolution of volumes is one of images.
//!
//! In channels-last, the slices of a volume along its depth lie in memory one after the other, as images do. An output
//! slice of a convolution reads a window of them. As an image, a window has at each pixel the first channel of all its
//! slices, then the second channel of all, and so on: C T channels, if there are T slices of C channels. In this order
//! a weight K x C x T x R x S is K x (C T) x R x S as it lies in memory.

use std::ops::Range;

use crate::conv::ConvAxis;
use crate::error::{check_len, invalid};
use crate::isa::multiversion;
use crate::memory_format::check_shape;
use crate::profile::span;
use crate::{Cpu, Element, Result, Slice, SliceMut, dispatch};

/// Elements of a slice in one task.
const CHUNK: usize = 1 << 12;

const OPERATION: &str = "slices of volumes";

/// The slices of some volumes, and the windows of them that a convolution reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Slices {
    volumes: usize,
    depth: ConvAxis,
    len: usize,
}

impl Slices {
    /// The slices of `volumes` volumes, each of `len` elements. `depth` is the axis along which they are convolved.
    ///
    /// # Errors
    /// If the axis cannot be convolved, or there are too many elements.
    pub fn new(volumes: usize, depth: ConvAxis, len: usize) -> Result<Slices> {
        let depth = depth.checked("depth")?;
        if len == 0 {
            return Err(invalid(OPERATION, "a slice has no elements"));
        }
        check_shape(OPERATION, "tensor", &[volumes.max(1), depth.input, len])?;
        check_shape(OPERATION, "tensor of windows", &[volumes.max(1), depth.output(), depth.kernel, len])?;
        Ok(Slices { volumes, depth, len })
    }

    /// The slices of one volume.
    pub fn depth(&self) -> usize {
        self.depth.input
    }

    /// The windows in one volume.
    pub fn windows_deep(&self) -> usize {
        self.depth.output()
    }

    /// The slices of all volumes.
    pub fn count(&self) -> usize {
        self.volumes * self.depth.input
    }

    /// The windows in all volumes.
    pub fn windows(&self) -> usize {
        self.volumes * self.depth.output()
    }

    /// The slices of a window.
    pub fn places(&self) -> usize {
        self.depth.kernel
    }

    /// Whether the windows are the slices themselves.
    pub fn is_plain(&self) -> bool {
        self.depth == ConvAxis::new(self.depth.input, 1)
    }

    /// The slice at a place of a window, if it is not padding.
    fn slice(&self, window: usize, place: usize) -> Option<usize> {
        let (volume, output) = (window / self.depth.output(), window % self.depth.output());
        Some(volume * self.depth.input + self.depth.input_index(output, place)?)
    }

    /// The slices from the first to the last that these windows read. Later windows read later slices.
    pub fn read_by(&self, windows: &Range<usize>) -> Range<usize> {
        let read = |window| (0..self.depth.kernel).filter_map(move |place| self.slice(window, place));
        let first = windows.clone().flat_map(read).min().unwrap_or(0);
        first..windows.clone().flat_map(read).max().map_or(first, |last| last + 1)
    }

    fn check(&self, windows: &Range<usize>, slices: usize, images: usize) -> Result<Range<usize>> {
        if windows.start > windows.end || windows.end > self.windows() {
            return Err(invalid(OPERATION, format!("{windows:?} of {} windows", self.windows())));
        }
        check_len(OPERATION, "the windows", images, windows.len() * self.depth.kernel * self.len)?;
        let read = self.read_by(windows);
        check_len(OPERATION, "the slices", slices, read.len() * self.len)?;
        Ok(read)
    }

    /// Writes some windows as images. `slices` are those that [`Slices::read_by`] names.
    ///
    /// # Errors
    /// If there are no such windows, or a length does not fit.
    pub fn gather(
        &self,
        cpu: &Cpu,
        windows: Range<usize>,
        slices: Slice<'_>,
        images: SliceMut<'_>,
    ) -> Result<()> {
        dispatch!("slices", slices.dtype(), T => self.typed_gather::<T>(cpu, windows, slices.of()?, images.of()?))
    }

    fn typed_gather<T: Element>(
        &self,
        cpu: &Cpu,
        windows: Range<usize>,
        slices: &[T],
        images: &mut [T],
    ) -> Result<()> {
        span!("slices beside each other", images, images);
        let read = self.check(&windows, slices.len(), images.len())?;
        let (len, places) = (self.len, self.depth.kernel);
        let padding = vec![T::zero(); CHUNK.min(len)];
        let work = images.len();
        let tasks = windows.zip(images.chunks_mut(places * len)).flat_map(|(window, image)| {
            let parts = image.chunks_mut(places * CHUNK).enumerate();
            parts.map(move |(part, image)| (window, part * CHUNK, image))
        });
        cpu.for_each(work, tasks, |(window, first, image)| {
            let count = image.len() / places;
            let from = (0..places).map(|place| match self.slice(window, place) {
                Some(slice) => &slices[(slice - read.start) * len + first..][..count],
                None => &padding[..count],
            });
            interleave(cpu, &from.collect::<Vec<_>>(), image);
        });
        Ok(())
    }

    /// Adds each slice of some windows, given as images, to the slice that it is. `slices` are those that
    /// [`Slices::read_by`] names.
    ///
    /// # Errors
    /// As [`Slices::gather`].
    pub fn add(
        &self,
        cpu: &Cpu,
        windows: Range<usize>,
        images: Slice<'_>,
        slices: SliceMut<'_>,
    ) -> Result<()> {
        dispatch!("slices", images.dtype(), T => self.typed_add::<T>(cpu, windows, images.of()?, slices.of()?))
    }

    fn typed_add<T: Element>(
        &self,
        cpu: &Cpu,
        windows: Range<usize>,
        images: &[T],
        slices: &mut [T],
    ) -> Result<()> {
        span!("windows of slices added up", images, slices);
        let read = self.check(&windows, slices.len(), images.len())?;
        let (len, places) = (self.len, self.depth.kernel);
        if images.is_empty() || slices.is_empty() {
            return Ok(());
        }
        // A task has one part of every slice.
        let mut tasks: Vec<Vec<&mut [T]>> = Vec::new();
        tasks.resize_with(len.div_ceil(CHUNK), || Vec::with_capacity(read.len()));
        for slice in slices.chunks_mut(len) {
            tasks.iter_mut().zip(slice.chunks_mut(CHUNK)).for_each(|(task, part)| task.push(part));
        }
        cpu.for_each(images.len(), tasks.into_iter().enumerate(), |(part, mut parts)| {
            let (first, count) = (part * CHUNK, parts[0].len());
            let mut padding = vec![T::zero(); places * count];
            for (window, image) in windows.clone().zip(images.chunks(places * len)) {
                let (mut inside, mut outside) = (parts.iter_mut(), padding.chunks_mut(count));
                let mut next = read.start;
                // The places of a window are those of later and later slices.
                let to = (0..places).map(|place| match self.slice(window, place) {
                    Some(slice) => {
                        let skipped = slice - std::mem::replace(&mut next, slice + 1);
                        &mut **inside.nth(skipped).expect("a slice that is read")
                    }
                    None => outside.next().expect("a part for each place"),
                });
                add_apart(cpu, &image[places * first..][..places * count], &mut to.collect::<Vec<_>>());
            }
        });
        Ok(())
    }
}

multiversion! {
    /// The first elements of all of `from`, then the second ones, and so on.
    fn interleave<T: Element>(from: &[&[T]], to: &mut [T]) {
        match *from {
            [a] => to.copy_from_slice(a),
            [a, b] => {
                for ((to, &a), &b) in to.chunks_exact_mut(2).zip(a).zip(b) {
                    to[0] = a;
                    to[1] = b;
                }
            }
            [a, b, c] => {
                for (((to, &a), &b), &c) in to.chunks_exact_mut(3).zip(a).zip(b).zip(c) {
                    to[0] = a;
                    to[1] = b;
                    to[2] = c;
                }
            }
            _ => {
                let places = from.len();
                for (place, from) in from.iter().enumerate() {
                    for (to, &from) in to.chunks_exact_mut(places).zip(*from) {
                        to[place] = from;
                    }
                }
            }
        }
    }

    /// Adds what [`interleave`] would put together.
    fn add_apart<T: Element>(from: &[T], to: &mut [&mut [T]]) {
        match to {
            [a] => {
                for (a, &from) in a.iter_mut().zip(from) {
                    *a += from;
                }
            }
            [a, b] => {
                for ((from, a), b) in from.chunks_exact(2).zip(a.iter_mut()).zip(b.iter_mut()) {
                    *a += from[0];
                    *b += from[1];
                }
            }
            [a, b, c] => {
                for (((from, a), b), c) in from.chunks_exact(3).zip(a.iter_mut()).zip(b.iter_mut()).zip(c.iter_mut()) {
                    *a += from[0];
                    *b += from[1];
                    *c += from[2];
                }
            }
            _ => {
                let places = to.len();
                for (place, to) in to.iter_mut().enumerate() {
                    for (to, from) in to.iter_mut().zip(from.chunks_exact(places)) {
                        *to += from[place];
                    }
                }
            }
        }
    }
}
