//! Local response normalization: each value is divided by what the squares of its neighbours among the channels add up to.
//!
//! ```text
//! forward   y_c  = x_c d_c^-beta       d_c = k + alpha / size * sum of x_j^2 over the channels j of c's window
//! backward  dx_c = dy_c d_c^-beta - 2 alpha beta / size * x_c * sum of dy_j x_j d_j^(-beta - 1) over the j whose window has c
//! ```
//! The window of channel c is c - size / 2 ..= c + (size - 1) / 2, as in PyTorch; beyond the channels there are zeros.

use crate::error::invalid;
use crate::memory_format::Extent;
use crate::operand::kernels;
use crate::profile::span;
use crate::{Cpu, Element, Result};

/// The options of a local response norm. The default is PyTorch's, with a window of 5 channels.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LocalResponse {
    /// Channels in a window.
    pub size: usize,
    /// The factor of the mean square.
    pub alpha: f64,
    /// The exponent.
    pub beta: f64,
    /// What is added to the mean square times alpha.
    pub k: f64,
}

impl Default for LocalResponse {
    fn default() -> LocalResponse {
        LocalResponse { size: 5, alpha: 1e-4, beta: 0.75, k: 1.0 }
    }
}

impl LocalResponse {
    fn check(&self, operation: &'static str) -> Result<()> {
        match self.size {
            0 => Err(invalid(operation, "the window has 0 channels")),
            _ => Ok(()),
        }
    }

    /// The channels of the window of `channel`; `reversed`, those in whose windows it is.
    fn window(&self, channel: usize, channels: usize, reversed: bool) -> std::ops::Range<usize> {
        let (before, after) = (self.size / 2, (self.size - 1) / 2);
        let (before, after) = if reversed { (after, before) } else { (before, after) };
        channel.saturating_sub(before)..channel.saturating_add(after).saturating_add(1).min(channels)
    }
}

/// Pixels that are handled together: a task in channels-last, a part of one where contiguous.
const PIXELS: usize = 256;

/// Places of one task: some pixels, each with all channels. Element `c` of pixel `p` is at `start + p * pixel + c * channel`.
#[derive(Clone, Copy)]
struct Places {
    start: usize,
    pixels: usize,
    pixel: usize,
    channels: usize,
    channel: usize,
}

/// Calls `task` with where an image, or a run of pixels of one, begins in x, the places of its pixels from there on, and its
/// output. Channels-last tensors are cut into tasks of [`PIXELS`] pixels, contiguous ones into images.
fn each_task<T: Element>(
    cpu: &Cpu,
    extent: &Extent,
    out: &mut [T],
    task: impl Fn(usize, Places, &mut [T]) + Send + Sync,
) {
    let &Extent { channels, spatial, format, .. } = extent;
    let image = channels * spatial;
    if out.is_empty() {
        return;
    }
    match format {
        crate::MemoryFormat::ChannelsLast => {
            let part = PIXELS * channels;
            cpu.for_each(out.len() * WORK, out.chunks_mut(part).enumerate(), |(index, out)| {
                let pixels = out.len() / channels;
                let places = Places { start: 0, pixels, pixel: channels, channels, channel: 1 };
                task(index * part, places, out);
            });
        }
        crate::MemoryFormat::Contiguous => {
            cpu.for_each(out.len() * WORK, out.chunks_mut(image).enumerate(), |(index, out)| {
                for start in (0..spatial).step_by(PIXELS) {
                    let pixels = PIXELS.min(spatial - start);
                    let places = Places { start, pixels, pixel: 1, channels, channel: spatial };
                    task(index * image, places, out);
                }
            });
        }
    }
}

/// A power takes as long as touching about so many elements.
const WORK: usize = 16;

impl Places {
    fn at(&self, pixel: usize, channel: usize) -> usize {
        self.start + pixel * self.pixel + channel * self.channel
    }

    /// d of all channels of a pixel.
    fn divisors<T: Element>(&self, options: &LocalResponse, x: &[T], pixel: usize, d: &mut [f64]) {
        let factor = options.alpha / options.size as f64;
        for (channel, d) in d.iter_mut().enumerate() {
            let window = options.window(channel, self.channels, false);
            let squares = window.map(|channel| {
                let x = x[self.at(pixel, channel)].f64();
                x * x
            });
            *d = options.k + factor * squares.sum::<f64>();
        }
    }
}

kernels! {
    /// y = x normalised.
    ///
    /// # Errors
    /// If a length is not the extent's, or the window has no channels.
    pub fn local_response_norm<T: Element>(
        cpu: &Cpu, extent: &Extent, options: &LocalResponse;
        x: &[T];
        y: &mut [T]
    ) -> Result<()> {
        let operation = "local response norm";
        span!("local response norm", x, y);
        options.check(operation)?;
        extent.check(operation, &[("x", x.len()), ("y", y.len())])?;
        each_task(cpu, extent, y, |offset, places, y| {
            let x = &x[offset..offset + y.len()];
            let mut d = vec![0.0; places.channels];
            for pixel in 0..places.pixels {
                places.divisors(options, x, pixel, &mut d);
                for (channel, d) in d.iter().enumerate() {
                    let at = places.at(pixel, channel);
                    y[at] = T::of(x[at].f64() * d.powf(-options.beta));
                }
            }
        });
        Ok(())
    }

    /// The gradient of x.
    ///
    /// # Errors
    /// As [`local_response_norm`].
    pub fn local_response_norm_backward<T: Element>(
        cpu: &Cpu, extent: &Extent, options: &LocalResponse;
        x: &[T], dy: &[T];
        dx: &mut [T]
    ) -> Result<()> {
        let operation = "local response norm backward";
        span!("local response norm backward", x, dy, dx);
        options.check(operation)?;
        extent.check(operation, &[("x", x.len()), ("dy", dy.len()), ("dx", dx.len())])?;
        let factor = 2.0 * options.alpha * options.beta / options.size as f64;
        each_task(cpu, extent, dx, |offset, places, dx| {
            let (x, dy) = (&x[offset..offset + dx.len()], &dy[offset..offset + dx.len()]);
            let (mut d, mut through) = (vec![0.0; places.channels], vec![0.0; places.channels]);
            for pixel in 0..places.pixels {
                places.divisors(options, x, pixel, &mut d);
                for (channel, (d, through)) in d.iter_mut().zip(&mut through).enumerate() {
                    let at = places.at(pixel, channel);
                    let power = d.powf(-options.beta);
                    *through = dy[at].f64() * x[at].f64() * power / *d;
                    *d = power;
                }
                for (channel, power) in d.iter().enumerate() {
                    let at = places.at(pixel, channel);
                    let sum: f64 = through[options.window(channel, places.channels, true)].iter().sum();
                    dx[at] = T::of(dy[at].f64() * power - factor * x[at].f64() * sum);
                }
            }
        });
        Ok(())
    }
}
