//! What batch norm does to one element, with a channel's numbers in the element type.

use super::{Activation, Normalization};
use crate::Element;
use crate::buffer::Buffer;

/// Standard deviations up to which a mean is small.
const SMALL: f64 = 0.25;

/// Channels' coefficients, one slice each so that rows vectorise over channels.
pub(super) struct Coefficients<T> {
    pub(super) relu: bool,
    /// Statistics are constants: no terms from the sums.
    pub(super) constant: bool,
    /// The mean that is subtracted first; what rounding left off it, the rest, counts in `shift` and `offset`.
    pub(super) mean: Buffer<T>,
    /// gamma * inverse_std.
    pub(super) scale: Buffer<T>,
    /// beta less the mean's rest.
    pub(super) shift: Buffer<T>,
    /// mean(g).
    pub(super) mean_g: Buffer<T>,
    /// gamma * inverse_std^3 * mean(g (x - mean)).
    pub(super) slope: Buffer<T>,
    /// The slope times the mean's rest.
    pub(super) offset: Buffer<T>,
}

/// One channel's coefficients.
#[derive(Clone, Copy)]
pub(super) struct Channel<T> {
    pub(super) mean: T,
    pub(super) scale: T,
    pub(super) shift: T,
    pub(super) mean_g: T,
    pub(super) slope: T,
    pub(super) offset: T,
}

impl<T: Element> Channel<T> {
    #[inline(always)]
    fn normalized(&self, x: T) -> T {
        (x - self.mean).mul_add(self.scale, self.shift)
    }

    #[inline(always)]
    pub(super) fn forward(&self, x: T, relu: bool) -> T {
        let y = self.normalized(x);
        // Written so that NaN passes, as in PyTorch.
        if relu && y <= T::zero() { T::zero() } else { y }
    }

    /// The upstream gradient behind the activation, whose sign is recomputed as forward computed it.
    #[inline(always)]
    pub(super) fn behind_activation(&self, x: T, dy: T, relu: bool) -> T {
        if relu && self.normalized(x) <= T::zero() { T::zero() } else { dy }
    }

    #[inline(always)]
    pub(super) fn backward(&self, x: T, dy: T, relu: bool, constant: bool) -> T {
        let g = self.behind_activation(x, dy, relu);
        if constant {
            g * self.scale
        } else {
            (g - self.mean_g).mul_add(self.scale, (x - self.mean).mul_add(-self.slope, self.offset))
        }
    }
}

impl<T: Element> Coefficients<T> {
    /// For forward, and for the sums of backward; lengths have been checked.
    pub(super) fn forward(by: &Normalization<'_, T>) -> Self {
        Self::backward(by, None)
    }

    /// With the sums and the count of values if statistics were the batch's; lengths have been checked.
    pub(super) fn backward(by: &Normalization<'_, T>, sums: Option<([&[f64]; 2], usize)>) -> Self {
        let channels = by.mean.len();
        let zeros = || Buffer::filled(channels, T::zero());
        let mut c = Coefficients {
            relu: by.activation == Activation::Relu,
            constant: sums.is_none(),
            mean: zeros(),
            scale: zeros(),
            shift: zeros(),
            mean_g: zeros(),
            slope: zeros(),
            offset: zeros(),
        };
        for channel in 0..channels {
            c.mean[channel] = T::of(by.mean[channel]);
            let (scale, inverse_std) = (by.scale(channel), by.inverse_std[channel]);
            let mut rest = by.mean[channel] - c.mean[channel].f64();
            // Where the mean is small, subtracting it first costs more digits than it saves. Without a rest it stays: the
            // channel may be constant, and then x - mean is 0.
            if rest != 0.0 && (by.mean[channel] * inverse_std).abs() < SMALL {
                (c.mean[channel], rest) = (T::zero(), by.mean[channel]);
            }
            let beta = by.bias.map_or(0.0, |bias| bias[channel].f64());
            c.scale[channel] = T::of(scale);
            // Without a rest beta counts as it is, whatever the scale.
            c.shift[channel] = T::of(if rest == 0.0 { beta } else { beta - rest * scale });
            if let Some(([g, g_centered], count)) = sums {
                let count = count as f64;
                let slope = scale * inverse_std * inverse_std * g_centered[channel] / count;
                c.mean_g[channel] = T::of(g[channel] / count);
                c.slope[channel] = T::of(slope);
                c.offset[channel] = T::of(if rest == 0.0 { 0.0 } else { rest * slope });
            }
        }
        c
    }

    #[inline(always)]
    pub(super) fn at(&self, channel: usize) -> Channel<T> {
        Channel {
            mean: self.mean[channel],
            scale: self.scale[channel],
            shift: self.shift[channel],
            mean_g: self.mean_g[channel],
            slope: self.slope[channel],
            offset: self.offset[channel],
        }
    }

    /// Every channel's coefficients so many times over.
    pub(super) fn repeated(mut self, times: usize) -> Self {
        if times > 1 {
            let all = [&mut self.mean, &mut self.scale, &mut self.shift];
            for values in all.into_iter().chain([&mut self.mean_g, &mut self.slope, &mut self.offset]) {
                *values = Buffer::repeat(values, times);
            }
        }
        self
    }
}
