//! Batch norm of one element, with a channel's coefficients in the element type.

use super::{BackwardSums, Normalization};
use crate::activation::Activation;
use crate::memory::AlignedVec;
use crate::pointwise::formulas::Formula;
use crate::{Element, Slice};

/// A mean counts as small if it is less than this many standard deviations from 0.
const SMALL: f64 = 0.25;

/// The coefficients of all channels, one slice for each kind, so that loops over rows vectorise over channels.
pub(super) struct Coefficients<T> {
    pub(super) activation: Activation,
    /// Whether the statistics are constants, so that dx has no terms from the sums.
    pub(super) constant: bool,
    /// The rounded mean, which is subtracted first. The rest, exact mean minus rounded mean, goes into `shift` and `mean_g`.
    pub(super) mean: AlignedVec<T>,
    /// gamma * inverse_std.
    pub(super) scale: AlignedVec<T>,
    /// beta - rest * scale.
    pub(super) shift: AlignedVec<T>,
    /// mean(g) - rest * slope.
    pub(super) mean_g: AlignedVec<T>,
    /// inverse_std * inverse_root * mean(g (x - mean)). It does not contain the scale, so it has about the size of g / x
    /// and fits the element type wherever dx does.
    pub(super) slope: AlignedVec<T>,
}

/// One channel's coefficients.
#[derive(Clone, Copy)]
pub(super) struct Channel<T> {
    pub(super) mean: T,
    pub(super) scale: T,
    pub(super) shift: T,
    pub(super) mean_g: T,
    pub(super) slope: T,
}

impl<T: Element> Channel<T> {
    #[inline(always)]
    fn normalized(&self, x: T) -> T {
        (x - self.mean).mul_add(self.scale, self.shift)
    }

    /// The gradient of the activation's input. The input is recomputed in the same way as in forward.
    #[inline(always)]
    pub(super) fn behind_activation(&self, x: T, dy: T, act: impl Formula<T>) -> T {
        act.backward(self.normalized(x), dy)
    }

    #[inline(always)]
    pub(super) fn backward(&self, x: T, dy: T, act: impl Formula<T>, constant: bool) -> T {
        let g = self.behind_activation(x, dy, act);
        if constant {
            g * self.scale
        } else {
            (x - self.mean).mul_add(-self.slope, g - self.mean_g) * self.scale
        }
    }
}

/// A function of every element of one tensor and, if it takes one, the matching element of a residual.
pub(super) trait Map<T>: Copy + Send + Sync {
    fn map(self, c: Channel<T>, x: T, residual: T, act: impl Formula<T>) -> T;
}

/// The normalisation, with the coefficients of [`Coefficients::forward`].
#[derive(Clone, Copy)]
pub(super) struct Normalize;

/// [`Normalize`] with a residual added before the activation.
#[derive(Clone, Copy)]
pub(super) struct NormalizeAdded;

impl<T: Element> Map<T> for Normalize {
    #[inline(always)]
    fn map(self, c: Channel<T>, x: T, _: T, act: impl Formula<T>) -> T {
        act.forward(c.normalized(x))
    }
}

impl<T: Element> Map<T> for NormalizeAdded {
    #[inline(always)]
    fn map(self, c: Channel<T>, x: T, residual: T, act: impl Formula<T>) -> T {
        act.forward(c.normalized(x) + residual)
    }
}

impl<T: Element> Coefficients<T> {
    /// For forward, and for the sums of backward; lengths have been checked.
    pub(super) fn forward(by: &Normalization<'_>) -> Self {
        Self::backward(by, None)
    }

    /// For dx. `sums` are the sums and the count of values if the statistics were the batch's; lengths have been checked.
    pub(super) fn backward(by: &Normalization<'_>, sums: Option<(&BackwardSums, usize)>) -> Self {
        let channels = by.mean.len();
        let (gamma, beta) = (by.weight.map(Slice::to_f64), by.bias.map(Slice::to_f64));
        let zeros = || AlignedVec::filled(channels, T::zero());
        let mut c = Coefficients {
            activation: by.activation,
            constant: sums.is_none(),
            mean: zeros(),
            scale: zeros(),
            shift: zeros(),
            mean_g: zeros(),
            slope: zeros(),
        };
        for channel in 0..channels {
            c.mean[channel] = T::of(by.mean[channel]);
            let inverse_std = by.inverse_std[channel];
            let scale = gamma.as_ref().map_or(1.0, |gamma| gamma[channel]) * inverse_std;
            let inverse_root = by.inverse_root.map_or(inverse_std, |inverse_root| inverse_root[channel]);
            let mut rest = by.mean[channel] - c.mean[channel].f64();
            // If the mean is small, subtracting it first costs more digits than it saves, so all of it becomes the rest.
            // But a mean without a rest stays: the channel may be constant, and then x - mean must be 0.
            if rest != 0.0 && (by.mean[channel] * inverse_std).abs() < SMALL {
                (c.mean[channel], rest) = (T::zero(), by.mean[channel]);
            }
            let beta = beta.as_ref().map_or(0.0, |beta| beta[channel]);
            c.scale[channel] = T::of(scale);
            // Without a rest, beta is taken as it is, even where the scale is infinite or NaN.
            c.shift[channel] = T::of(if rest == 0.0 { beta } else { beta - rest * scale });
            if let Some((BackwardSums { g, g_centered }, count)) = sums {
                let count = count as f64;
                let (mean_g, slope) =
                    (g[channel] / count, g_centered[channel] / count * inverse_std * inverse_root);
                c.mean_g[channel] = T::of(if rest == 0.0 { mean_g } else { mean_g - rest * slope });
                c.slope[channel] = T::of(slope);
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
        }
    }

    /// The coefficients of all channels, `times` times in a row.
    pub(super) fn repeated(mut self, times: usize) -> Self {
        if times > 1 {
            let all = [&mut self.mean, &mut self.scale, &mut self.shift];
            for values in all.into_iter().chain([&mut self.mean_g, &mut self.slope]) {
                *values = AlignedVec::repeat(values, times);
            }
        }
        self
    }
}
