//! PReLU: a leaky ReLU whose slope is learned, one for all elements or one for each channel.
//!
//! K. He, X. Zhang, S. Ren, J. Sun, "Delving deep into rectifiers", 2015.

use crate::channels::{LANES, Layout, Units};
use crate::error::{check_len, invalid};
use crate::isa::multiversion;
use crate::memory_format::Extent;
use crate::profile::span;
use crate::{Cpu, Element, MemoryFormat, Result, Slice, SliceMut, dispatch};

/// x above 0, else slope * x; PyTorch's `prelu`.
#[derive(Debug, Clone, Copy)]
pub struct Prelu<'a> {
    extent: Extent,
    slopes: Slice<'a>,
}

const OPERATION: &str = "prelu";

impl<'a> Prelu<'a> {
    /// The PReLU of tensors of this extent. There is one slope, or one for each channel.
    ///
    /// # Errors
    /// If there is another number of slopes, or the extent's size overflows.
    pub fn new(extent: &Extent, slopes: Slice<'a>) -> Result<Prelu<'a>> {
        let len = extent.len()?;
        let extent = match slopes.len() {
            count if count == extent.channels => *extent,
            // One slope: the tensor is one channel.
            1 => Extent { batch: 1, channels: 1, spatial: len, format: MemoryFormat::Contiguous },
            count => {
                let channels = extent.channels;
                let reason = format!("{count} slopes for {channels} channels: expected 1 or {channels}");
                return Err(invalid(OPERATION, reason));
            }
        };
        Ok(Prelu { extent, slopes })
    }

    /// y = x above 0, else slope * x; NaN stays NaN.
    ///
    /// # Errors
    /// If a length is not the extent's, or types differ.
    pub fn forward(&self, cpu: &Cpu, x: Slice<'_>, y: SliceMut<'_>) -> Result<()> {
        dispatch!(OPERATION, self.slopes.dtype(), T => self.typed::<T>()?.forward(cpu, x.of()?, y.of()?))
    }

    /// dx = dy where x is above 0, else slope * dy.
    ///
    /// # Errors
    /// If a length is not the extent's, or types differ.
    pub fn backward(&self, cpu: &Cpu, x: Slice<'_>, dy: Slice<'_>, dx: SliceMut<'_>) -> Result<()> {
        dispatch!(OPERATION, self.slopes.dtype(), T => {
            self.typed::<T>()?.backward(cpu, x.of()?, dy.of()?, dx.of()?)
        })
    }

    /// The gradient of each slope: the sum of x * dy over the elements that it multiplied. It is summed in f64, in an order that
    /// depends only on the extent.
    ///
    /// # Errors
    /// If a length is not the extent's, there are not as many gradients as slopes, or types differ.
    pub fn backward_slopes(
        &self,
        cpu: &Cpu,
        x: Slice<'_>,
        dy: Slice<'_>,
        gradients: SliceMut<'_>,
    ) -> Result<()> {
        dispatch!(OPERATION, self.slopes.dtype(), T => {
            self.typed::<T>()?.backward_slopes(cpu, x.of()?, dy.of()?, gradients.of()?)
        })
    }

    fn typed<T: Element>(&self) -> Result<Typed<'a, T>> {
        Ok(Typed { extent: self.extent, slopes: self.slopes.of()? })
    }
}

/// A PReLU of elements of a type that is known at compile time.
struct Typed<'a, T> {
    extent: Extent,
    slopes: &'a [T],
}

impl<T: Element> Typed<'_, T> {
    fn forward(&self, cpu: &Cpu, x: &[T], y: &mut [T]) -> Result<()> {
        span!("prelu", x, y);
        let units = Units::new(OPERATION, &self.extent, &[("x", x.len()), ("y", y.len())])?;
        units.each(cpu, y, |block, y| {
            let x = &x[block.elements.clone()];
            match units.layout {
                Layout::Planes { inner } => {
                    let planes = y.chunks_mut(inner).zip(x.chunks(inner)).enumerate();
                    for (index, (y, x)) in planes {
                        forward_plane(cpu, self.slope(block.first_channel + index), x, y);
                    }
                }
                Layout::Rows => forward_rows(cpu, self.slopes, x, y),
            }
        });
        Ok(())
    }

    fn backward(&self, cpu: &Cpu, x: &[T], dy: &[T], dx: &mut [T]) -> Result<()> {
        span!("prelu backward", x, dy, dx);
        let lens = [("x", x.len()), ("dy", dy.len()), ("dx", dx.len())];
        let units = Units::new(OPERATION, &self.extent, &lens)?;
        units.each(cpu, dx, |block, dx| {
            let (x, dy) = (&x[block.elements.clone()], &dy[block.elements.clone()]);
            match units.layout {
                Layout::Planes { inner } => {
                    let planes = dx.chunks_mut(inner).zip(x.chunks(inner).zip(dy.chunks(inner)));
                    for (index, (dx, (x, dy))) in planes.enumerate() {
                        backward_plane(cpu, self.slope(block.first_channel + index), x, dy, dx);
                    }
                }
                Layout::Rows => backward_rows(cpu, self.slopes, x, dy, dx),
            }
        });
        Ok(())
    }

    fn backward_slopes(&self, cpu: &Cpu, x: &[T], dy: &[T], gradients: &mut [T]) -> Result<()> {
        span!("prelu backward", x, dy);
        check_len(OPERATION, "the gradient of the slopes", gradients.len(), self.slopes.len())?;
        let units = Units::new(OPERATION, &self.extent, &[("x", x.len()), ("dy", dy.len())])?;
        let totals = units.reduce(cpu, |block| {
            let (x, dy) = (&x[block.elements.clone()], &dy[block.elements.clone()]);
            match units.layout {
                Layout::Planes { inner } => {
                    let mut sums = vec![0.0; block.channels];
                    for (index, (x, dy)) in x.chunks(inner).zip(dy.chunks(inner)).enumerate() {
                        sums[index % block.channels] += plane_sum(cpu, x, dy);
                    }
                    sums
                }
                Layout::Rows => row_sums(cpu, self.extent.channels, x, dy),
            }
        });
        for (gradient, total) in gradients.iter_mut().zip(totals) {
            *gradient = T::of(total);
        }
        Ok(())
    }

    fn slope(&self, channel: usize) -> T {
        self.slopes[channel % self.slopes.len()]
    }
}

#[inline(always)]
fn value<T: Element>(slope: T, x: T) -> T {
    if x > T::zero() { x } else { slope * x }
}

#[inline(always)]
fn gradient<T: Element>(slope: T, x: T, dy: T) -> T {
    if x > T::zero() { dy } else { slope * dy }
}

/// What the element adds to the gradient of its slope.
#[inline(always)]
fn share<T: Element>(x: T, dy: T) -> f64 {
    if x > T::zero() { 0.0 } else { x.f64() * dy.f64() }
}

multiversion! {
    fn forward_plane<T: Element>(slope: T, x: &[T], y: &mut [T]) {
        for (y, &x) in y.iter_mut().zip(x) {
            *y = value(slope, x);
        }
    }

    fn forward_rows<T: Element>(slopes: &[T], x: &[T], y: &mut [T]) {
        for (y, x) in y.chunks_mut(slopes.len()).zip(x.chunks(slopes.len())) {
            for ((y, &x), &slope) in y.iter_mut().zip(x).zip(slopes) {
                *y = value(slope, x);
            }
        }
    }

    fn backward_plane<T: Element>(slope: T, x: &[T], dy: &[T], dx: &mut [T]) {
        for ((dx, &x), &dy) in dx.iter_mut().zip(x).zip(dy) {
            *dx = gradient(slope, x, dy);
        }
    }

    fn backward_rows<T: Element>(slopes: &[T], x: &[T], dy: &[T], dx: &mut [T]) {
        let count = slopes.len();
        for ((dx, x), dy) in dx.chunks_mut(count).zip(x.chunks(count)).zip(dy.chunks(count)) {
            for (((dx, &x), &dy), &slope) in dx.iter_mut().zip(x).zip(dy).zip(slopes) {
                *dx = gradient(slope, x, dy);
            }
        }
    }

    fn plane_sum<T: Element>(x: &[T], dy: &[T]) -> f64 {
        let mut lanes = [0.0f64; LANES];
        let (mut x, mut dy) = (x.chunks_exact(LANES), dy.chunks_exact(LANES));
        for (x, dy) in (&mut x).zip(&mut dy) {
            for ((lane, &x), &dy) in lanes.iter_mut().zip(x).zip(dy) {
                *lane += share(x, dy);
            }
        }
        for ((lane, &x), &dy) in lanes.iter_mut().zip(x.remainder()).zip(dy.remainder()) {
            *lane += share(x, dy);
        }
        lanes.iter().sum()
    }

    fn row_sums<T: Element>(channels: usize, x: &[T], dy: &[T]) -> Vec<f64> {
        let mut sums = vec![0.0; channels];
        for (x, dy) in x.chunks(channels).zip(dy.chunks(channels)) {
            for ((sum, &x), &dy) in sums.iter_mut().zip(x).zip(dy) {
                *sum += share(x, dy);
            }
        }
        sums
    }
}
