//! Inverts a normalisation: computes x from the output, where no information was lost.

use super::coefficients::{Coefficients, Invert};
use super::{Activation, Normalization, map_from};
use crate::memory_format::Extent;
use crate::profile::span;
use crate::{Cpu, Element, Result};

/// The largest |beta / gamma| and |mean| * inverse_std with which a normalisation counts as invertible.
const FAR: f64 = 64.0;
/// The largest |gamma|, and the reciprocal of the smallest, also after multiplying by a slope. So the terms of outputs stay
/// far from the ends of f32's range.
const SIZE: f64 = (1u64 << 40) as f64;

impl<T: Element> Normalization<'_, T> {
    /// Whether [`invert`] recovers x with enough digits for backward.
    ///
    /// It does if the activation is none or a leaky ReLU, and every channel has 2^-40 <= |gamma| <= 2^40 (also after multiplying by
    /// the slope of a leaky ReLU), |beta / gamma| <= 64 and |mean| inverse_std <= 64, with an inverse_std above 0 and gamma *
    /// inverse_std neither too large nor too small for T. NaN is never invertible, nor are slices of different lengths.
    ///
    /// Then, with n = (x - mean) inverse_std, the normalised value, and m = |mean| inverse_std,
    ///
    /// ```text
    /// |n of the x that comes back - n of the x that was| <= 4 epsilon (|n| + |beta / gamma| + m + 1)
    /// ```
    /// with T's machine epsilon: below 1e-4 in f32 and 2e-13 in f64 for |n| <= 64. The inverse uses the same rounded
    /// coefficients of a channel as [`super::normalize`], so only these roundings count: that of y, which is epsilon / 2 of
    /// it and thus of |n| + |beta / gamma| in n, that of each step back, and that of x itself.
    #[inline(never)]
    pub fn is_invertible(&self) -> bool {
        let channels = self.mean.len();
        let slope = match self.activation {
            Activation::Identity => 1.0,
            Activation::LeakyRelu { slope } => slope,
            _ => return false,
        };
        let near = |value: f64| value.abs() <= FAR;
        let sized = |value: f64| (1.0 / SIZE..=SIZE).contains(&value.abs());
        let safe = |channel: usize| {
            let gamma = self.weight.map_or(1.0, |weight| weight[channel].f64());
            let beta = self.bias.map_or(0.0, |bias| bias[channel].f64());
            let scale = T::of(self.scale(channel));
            sized(gamma)
                && sized(gamma * slope)
                && near(beta / gamma)
                && near(self.mean[channel] * self.inverse_std[channel])
                && self.inverse_std[channel] > 0.0
                && scale.is_normal()
                && scale.recip().is_normal()
        };
        self.check("batch norm inversion", channels).is_ok() && (0..channels).all(safe)
    }
}

/// x = mean + (act^-1(z) - beta) / (gamma * inverse_std): the input from which [`super::normalize`] computed `z`, up to
/// rounding. [`Normalization::is_invertible`] bounds the error.
///
/// If x is used in backward, compute the activation's gradient from z ([`crate::activation::activation_backward`]), not
/// from this x: near 0 its sign may be wrong.
///
/// # Errors
/// If a length is not the extent's, the activation is another than a leaky ReLU, or gamma * inverse_std or a slope has no finite
/// inverse.
#[inline(never)]
pub fn invert<T: Element>(
    cpu: &Cpu,
    extent: &Extent,
    z: &[T],
    by: &Normalization<'_, T>,
    x: &mut [T],
) -> Result<()> {
    span!("invert batch norm", z, x);
    extent.check("batch norm inversion", &[("z", z.len()), ("x", x.len())])?;
    invert_from(cpu, extent, Some(z), by, x)
}

/// As [`invert`], in place: `data` holds z before and x after.
///
/// # Errors
/// As [`invert`].
#[inline(never)]
pub fn invert_in_place<T: Element>(
    cpu: &Cpu,
    extent: &Extent,
    by: &Normalization<'_, T>,
    data: &mut [T],
) -> Result<()> {
    span!("invert batch norm", data, data);
    extent.check("batch norm inversion", &[("z", data.len())])?;
    invert_from(cpu, extent, None, by, data)
}

fn invert_from<T: Element>(
    cpu: &Cpu,
    extent: &Extent,
    z: Option<&[T]>,
    by: &Normalization<'_, T>,
    x: &mut [T],
) -> Result<()> {
    by.check("batch norm inversion", extent.channels)?;
    map_from(cpu, extent, Invert, Coefficients::inverse("batch norm inversion", by)?, z.map(|z| [z, z]), x);
    Ok(())
}
