//! The mean of each channel of each image, with its backward pass, in one pass over memory in both formats.

use crate::channels::{LANES, halved};
use crate::element::PieceOf;
use crate::error::{check_len, invalid};
use crate::isa::multiversion;
use crate::memory_format::{Extent, MemoryFormat};
use crate::operand::kernels;
use crate::{Cpu, Element, Result, Stored};

/// The approximate number of elements in a task.
const TASK: usize = 1 << 15;
/// Tasks that fewer images than this are cut into together.
const TASKS: usize = 32;

kernels! {
    /// y (N x C) = the mean of each plane of x. Sums are taken in f64, in an order that depends on the shape only.
    ///
    /// # Errors
    /// If a length does not fit the extent.
    pub fn global_average_pool<S: Stored>(cpu: &Cpu, extent: &Extent; x: &[S]; y: &mut [S]) -> Result<()> {
        crate::profile::span!("global average pooling", x, y);
        check("global average pooling", extent, [("x", x.len()), ("y", y.len())])?;
        if x.is_empty() {
            return Ok(());
        }
        let &Extent { channels, spatial, format, .. } = extent;
        let share = 1.0 / spatial as f64;
        if format == MemoryFormat::Contiguous {
            let planes = TASK.div_ceil(spatial);
            cpu.for_each(x.len(), x.chunks(planes * spatial).zip(y.chunks_mut(planes)), |(x, y)| {
                for (x, y) in x.chunks(spatial).zip(y) {
                    let mut sum = 0.0;
                    S::Compute::read((cpu, 1), [x], |_, [x]| sum += sum_plane(cpu, x));
                    *y = S::of(sum * share);
                }
            });
            return Ok(());
        }
        let image = spatial * channels;
        // Few images are cut into parts, so that every thread has some.
        let parts = TASKS.div_ceil(extent.batch).min(image.div_ceil(TASK));
        let part = spatial.div_ceil(parts) * channels;
        let parts = image.div_ceil(part);
        let sum_pixels = |x: &[S], sums: &mut [f64]| {
            S::Compute::read((cpu, channels), [x], |_, [x]| sum_pixels(cpu, x, sums));
        };
        if parts == 1 {
            cpu.for_each(x.len(), x.chunks(image).zip(y.chunks_mut(channels)), |(x, y)| {
                let mut sums = vec![0.0; channels];
                sum_pixels(x, &mut sums);
                y.iter_mut().zip(sums).for_each(|(y, sum)| *y = S::of(sum * share));
            });
            return Ok(());
        }
        let mut sums = vec![0.0; extent.batch * parts * channels];
        let pieces = x.chunks(image).flat_map(|image| image.chunks(part));
        cpu.for_each(x.len(), pieces.zip(sums.chunks_mut(channels)), |(x, sums)| sum_pixels(x, sums));
        cpu.for_each(y.len(), y.chunks_mut(channels).zip(sums.chunks(parts * channels)), |(y, sums)| {
            for (channel, y) in y.iter_mut().enumerate() {
                let sum: f64 = sums[channel..].iter().step_by(channels).sum();
                *y = S::of(sum * share);
            }
        });
        Ok(())
    }

    /// dx of [`global_average_pool`]: dy is spread evenly.
    ///
    /// # Errors
    /// As [`global_average_pool`].
    pub fn global_average_pool_backward<S: Stored>(cpu: &Cpu, extent: &Extent; dy: &[S]; dx: &mut [S]) -> Result<()> {
        crate::profile::span!("global average pooling backward", dy, dx);
        check("global average pooling backward", extent, [("dx", dx.len()), ("dy", dy.len())])?;
        if dx.is_empty() {
            return Ok(());
        }
        let &Extent { channels, spatial, format, .. } = extent;
        let share = S::Compute::of(1.0 / spatial as f64);
        if format == MemoryFormat::Contiguous {
            let planes = TASK.div_ceil(spatial);
            cpu.for_each(dx.len(), dx.chunks_mut(planes * spatial).zip(dy.chunks(planes)), |(dx, dy)| {
                dx.chunks_mut(spatial).zip(dy).for_each(|(dx, &dy)| dx.fill(S::of((dy.wide() * share).f64())));
            });
            return Ok(());
        }
        let image = spatial * channels;
        let part = TASK.div_ceil(channels) * channels;
        let pieces = dx.chunks_mut(image).zip(dy.chunks(channels));
        let pieces = pieces.flat_map(|(image, dy)| image.chunks_mut(part).map(move |piece| (piece, dy)));
        cpu.for_each(dy.len() * spatial, pieces, |(dx, dy)| {
            S::Compute::read((cpu, channels), [dy], |_, [dy]| {
                S::Compute::write((cpu, channels), [], dx, |_, [], dx| spread_pixels(cpu, share, dy, dx));
            });
        });
        Ok(())
    }
}

fn check(operation: &'static str, extent: &Extent, lens: [(&'static str, usize); 2]) -> Result<()> {
    if extent.spatial == 0 {
        return Err(invalid(operation, "a mean of no values is not defined"));
    }
    check_len(operation, lens[0].0, lens[0].1, extent.len()?)?;
    check_len(operation, lens[1].0, lens[1].1, extent.batch * extent.channels)
}

multiversion! {
    /// The sum of a plane. Planes may be as small as 7 x 7, so the rest of the last 16 numbers has a sum of its own (an index
    /// into the lanes would move these from registers into memory), and lanes are added as a tree.
    fn sum_plane<T: Element>(x: &[T]) -> f64 {
        let (chunks, rest) = x.as_chunks::<LANES>();
        let mut lanes = [0.0f64; LANES];
        for chunk in chunks {
            for (lane, x) in lanes.iter_mut().zip(chunk) {
                *lane += x.f64();
            }
        }
        let mut last = 0.0;
        for x in rest {
            last += x.f64();
        }
        halved(lanes) + last
    }

    /// `sums`, which hold 0, plus the pixels of x. It adds four at a time, because every addition reads and writes `sums` in
    /// memory.
    fn sum_pixels<T: Element>(x: &[T], sums: &mut [f64]) {
        let channels = sums.len();
        let mut fours = x.chunks_exact(4 * channels);
        for four in &mut fours {
            let (a, b) = four.split_at(2 * channels);
            let ((a, b), (c, d)) = (a.split_at(channels), b.split_at(channels));
            for ((((sum, a), b), c), d) in sums.iter_mut().zip(a).zip(b).zip(c).zip(d) {
                *sum += (a.f64() + b.f64()) + (c.f64() + d.f64());
            }
        }
        for pixel in fours.remainder().chunks_exact(channels) {
            for (sum, x) in sums.iter_mut().zip(pixel) {
                *sum += x.f64();
            }
        }
    }

    fn spread_pixels<T: Element>(share: T, dy: &[T], dx: &mut [T]) {
        for dx in dx.chunks_exact_mut(dy.len()) {
            for (dx, &dy) in dx.iter_mut().zip(dy) {
                *dx = dy * share;
            }
        }
    }
}
