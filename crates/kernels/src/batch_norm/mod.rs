//! Batch normalization: statistics, normalisation and both passes of backward, for either memory format.
//!
//! ```text
//! forward   mean, var = stats(x)                 y  = act((x - mean) * gamma / sqrt(var + eps) + beta)
//! backward  g = dy where act passed, else 0      dbeta = sum g       dgamma = sum g (x - mean) * inverse_std
//!           training   dx = gamma inverse_std (g - mean(g) - (x - mean) inverse_std inverse_root mean(g (x - mean)))
//!           evaluation dx = gamma inverse_std g
//! ```
//! `inverse_root` equals `inverse_std`, except where eps is added outside the root: there it is 1 / sqrt(var).
//!
//! Statistics are sums in f64 of differences from a value near the mean. The order of summation depends only on the shape,
//! so results do not change with the number of threads, nor with the tiles in which a batch arrives ([`StatsInParts`]).
//!
//! First x - mean is computed, in the element type, and the rounding error of the mean goes into the shift; so data of mean
//! 1e4 and standard deviation 0.1 keeps its digits. docs/batch-norm.md has the reasons.

mod cells;
mod coefficients;
mod convention;
pub mod cudnn;
mod fold;
mod normalizer;
mod parts;
mod planes;
mod rows;

pub use crate::activation::Activation;
pub use convention::{Convention, EpsPlace, Momentum, RunningVariance};
pub use fold::{FilterOrder, fold};
pub use normalizer::{BatchNormOptions, Normalizer, Statistics, Synchronize};
pub use parts::{BackwardSumsInParts, StatsInParts, images_per_group};

use std::ops::Range;

use coefficients::{Coefficients, Map, Normalize, NormalizeAdded};
use parts::all_parts;
use planes::{GradientSumsOf, Planes};
use rows::Rows;

use crate::error::{check_len, invalid};
use crate::memory_format::Extent;
use crate::profile::span;
use crate::{Cpu, DType, Result, Slice, SliceMut, Stored, dispatch_stored};

/// The names of the passes in errors.
const FORWARD: &str = "batch norm";
const BACKWARD: &str = "batch norm backward";

/// Mean and sum of squared deviations of each channel, and the number of values that they were computed from.
#[derive(Debug, Clone, PartialEq)]
pub struct Moments {
    /// Mean by channel.
    pub mean: Vec<f64>,
    /// Sum of (x - mean)^2 by channel.
    pub m2: Vec<f64>,
    /// Values per channel.
    pub count: usize,
}

impl Moments {
    /// Variance with divisor n, which normalisation uses. NaN for no values.
    pub fn biased_variance(&self) -> Vec<f64> {
        self.m2.iter().map(|m2| m2 / self.count as f64).collect()
    }

    /// 1 / sqrt(biased variance + eps), or with eps outside the root. 0 where both are 0, as in PyTorch's training: the
    /// output of a constant channel is then its bias. For no values the variance counts as 0, which keeps NaN out of the
    /// gradients of the parameters.
    pub fn inverse_std(&self, eps: f64, place: EpsPlace) -> Vec<f64> {
        let variance = if self.count == 0 { self.m2.clone() } else { self.biased_variance() };
        let mut inverse = inverse_std(&variance, eps, place);
        for (inverse, variance) in inverse.iter_mut().zip(variance) {
            if variance == 0.0 && eps == 0.0 {
                *inverse = 0.0;
            }
        }
        inverse
    }

    /// 1 / sqrt(biased variance), for [`Normalization::inverse_root`]; `None` where eps is inside the root.
    ///
    /// 0 for a variance of 0: the root has no derivative there, but x - mean is 0 for all values, so the term vanishes to
    /// first order.
    pub fn inverse_root(&self, place: EpsPlace) -> Option<Vec<f64>> {
        match place {
            EpsPlace::InsideRoot => None,
            EpsPlace::OutsideRoot => Some(self.inverse_std(0.0, place)),
        }
    }

    /// The moments of several parts taken together, such as the ranks' shares of a batch: PyTorch's
    /// `batch_norm_gather_stats_with_counts`. The parts are merged in the given order, so that the same parts give the same
    /// bits.
    ///
    /// Parts may hold different numbers of values, even none.
    ///
    /// # Errors
    /// If there is no part, or parts differ in their number of channels.
    pub fn gather_stats_with_counts<'a>(parts: impl IntoIterator<Item = &'a Moments>) -> Result<Moments> {
        let operation = "batch norm gather_stats_with_counts";
        let mut parts = parts.into_iter();
        let mut total = parts.next().ok_or_else(|| invalid(operation, "no statistics to gather"))?.clone();
        check_len(operation, "the squared deviations", total.m2.len(), total.mean.len())?;
        for part in parts {
            check_len(operation, "a part's mean", part.mean.len(), total.mean.len())?;
            check_len(operation, "a part's squared deviations", part.m2.len(), total.mean.len())?;
            for (channel, (mean, m2)) in total.mean.iter_mut().zip(&mut total.m2).enumerate() {
                let known = (total.count as f64, *mean, *m2);
                let new = (part.count as f64, part.mean[channel], part.m2[channel]);
                (_, *mean, *m2) = merge_moments(known, new);
            }
            total.count = total.count.checked_add(part.count).ok_or_else(|| {
                invalid(operation, format!("{} and {} values are too many to count", total.count, part.count))
            })?;
        }
        Ok(total)
    }

    /// Variance with divisor n - 1, which PyTorch's running statistics use. Not finite for one value.
    pub fn unbiased_variance(&self) -> Vec<f64> {
        self.m2.iter().map(|m2| m2 / (self.count as f64 - 1.0)).collect()
    }
}

/// The parameters of a normalisation: statistics and, where the layer has them, gamma (`weight`) and beta (`bias`).
#[derive(Debug, Clone, Copy)]
pub struct Normalization<'a> {
    /// Mean by channel.
    pub mean: &'a [f64],
    /// 1 / sqrt(variance + eps) by channel.
    pub inverse_std: &'a [f64],
    /// 1 / sqrt(variance) by channel, if the statistics are a batch's and eps is added outside the root: see
    /// [`Moments::inverse_root`]. Only the gradient of x needs it. If absent, `inverse_std` is used instead.
    pub inverse_root: Option<&'a [f64]>,
    /// Gamma by channel; 1 if absent.
    pub weight: Option<Slice<'a>>,
    /// Beta by channel; 0 if absent.
    pub bias: Option<Slice<'a>>,
    /// Applied last.
    pub activation: Activation,
}

impl Normalization<'_> {
    /// Checks what normalises tensors of this type.
    fn check(&self, operation: &'static str, dtype: DType, channels: usize) -> Result<()> {
        check_len(operation, "the mean", self.mean.len(), channels)?;
        check_len(operation, "the inverse standard deviation", self.inverse_std.len(), channels)?;
        check_len(operation, "the inverse root", self.inverse_root.map_or(channels, <[f64]>::len), channels)?;
        check_len(operation, "the weight", self.weight.map_or(channels, Slice::len), channels)?;
        check_len(operation, "the bias", self.bias.map_or(channels, Slice::len), channels)?;
        self.activation.check(dtype.computed_in())
    }

    /// gamma * inverse_std.
    fn scale(&self, channel: usize) -> f64 {
        self.weight.map_or(1.0, |weight| weight.at(channel)) * self.inverse_std[channel]
    }
}

/// A layer's parameters and options, for normalisation with a batch's own statistics.
#[derive(Debug, Clone, Copy)]
pub struct Affine<'a> {
    /// Gamma by channel; 1 if absent.
    pub weight: Option<Slice<'a>>,
    /// Beta by channel; 0 if absent.
    pub bias: Option<Slice<'a>>,
    /// Keeps the divisor from 0.
    pub eps: f64,
    /// Where eps is added.
    pub eps_place: EpsPlace,
    /// Applied last.
    pub activation: Activation,
}

/// The sums over a channel that backward needs.
#[derive(Debug, Clone, PartialEq)]
pub struct BackwardSums {
    /// Sum of g by channel: the gradient of beta.
    pub g: Vec<f64>,
    /// Sum of g (x - mean) by channel; times inverse_std it is the gradient of gamma.
    pub g_centered: Vec<f64>,
}

/// 1 / sqrt(variance + eps) by channel, or with eps outside the root, for given statistics.
///
/// NaN where both are 0, because no constant scales such data to a variance of 1. PyTorch's evaluation divides by 0 there
/// and gives NaN too, or for some signs of x and the mean an infinity. The result is never the bias, as it is in training
/// ([`Moments::inverse_std`]), where x - mean is known to be 0.
pub fn inverse_std(variance: &[f64], eps: f64, place: EpsPlace) -> Vec<f64> {
    let of = |variance: f64| match place {
        _ if variance == 0.0 && eps == 0.0 => f64::NAN,
        EpsPlace::InsideRoot => 1.0 / (variance + eps).sqrt(),
        EpsPlace::OutsideRoot => 1.0 / (variance.sqrt() + eps),
    };
    variance.iter().map(|&variance| of(variance)).collect()
}

/// Mean and squared deviations of each channel of `x`: PyTorch's `batch_norm_stats`.
///
/// # Errors
/// If the length of `x` is not the extent's.
#[inline(never)]
pub fn stats(cpu: &Cpu, extent: &Extent, x: Slice<'_>) -> Result<Moments> {
    extent.check("batch norm statistics", &[("x", x.len())])?;
    let mut parts = StatsInParts::new(extent)?;
    parts.add(cpu, x)?;
    parts.finish()
}

/// y = act((x - mean) * gamma * inverse_std + beta): PyTorch's `batch_norm_elemt`.
///
/// # Errors
/// If a length is not the extent's, or the activation's parameters make no sense.
#[inline(never)]
pub fn normalize(
    cpu: &Cpu,
    extent: &Extent,
    x: Slice<'_>,
    by: &Normalization<'_>,
    y: SliceMut<'_>,
) -> Result<()> {
    span!("normalize", x, y);
    extent.check(FORWARD, &[("x", x.len()), ("y", y.len())])?;
    dispatch_stored!(y.dtype(), S => normalize_from::<S>(cpu, extent, Some(x.of()?), by, y.of()?))
}

/// y = act((x - mean) * gamma * inverse_std + beta + residual) in one pass over memory. The result is bit-identical to
/// [`normalize`] without the activation followed by [`add_activated_in_place`](crate::activation::add_activated_in_place).
///
/// # Errors
/// If a length is not the extent's, or the activation's parameters make no sense.
#[inline(never)]
pub fn normalize_added(
    cpu: &Cpu,
    extent: &Extent,
    (x, residual): (Slice<'_>, Slice<'_>),
    by: &Normalization<'_>,
    y: SliceMut<'_>,
) -> Result<()> {
    span!("normalize and add", x, residual, y);
    let tensors = [("x", x.len()), ("the residual", residual.len()), ("y", y.len())];
    extent.check(FORWARD, &tensors)?;
    by.check(FORWARD, y.dtype(), extent.channels)?;
    dispatch_stored!(y.dtype(), S => {
        let operands = Some([x.of()?, residual.of()?]);
        map_from::<S>(cpu, extent, NormalizeAdded, Coefficients::forward(by), operands, y.of()?);
    });
    Ok(())
}

/// As [`normalize`], in place: `data` holds x before and y after.
///
/// # Errors
/// If a length is not the extent's, or the activation's parameters make no sense.
#[inline(never)]
pub fn normalize_in_place(
    cpu: &Cpu,
    extent: &Extent,
    by: &Normalization<'_>,
    data: SliceMut<'_>,
) -> Result<()> {
    span!("normalize", data, data);
    extent.check(FORWARD, &[("x", data.len())])?;
    dispatch_stored!(data.dtype(), S => normalize_from::<S>(cpu, extent, None, by, data.of()?))
}

fn normalize_from<S: Stored>(
    cpu: &Cpu,
    extent: &Extent,
    x: Option<&[S]>,
    by: &Normalization<'_>,
    y: &mut [S],
) -> Result<()> {
    by.check(FORWARD, S::DTYPE, extent.channels)?;
    map_from(cpu, extent, Normalize, Coefficients::forward(by), x.map(|x| [x, x]), y);
    Ok(())
}

fn map_from<S: Stored>(
    cpu: &Cpu,
    extent: &Extent,
    map: impl Map<S::Compute>,
    c: Coefficients<S::Compute>,
    x: Option<[&[S]; 2]>,
    y: &mut [S],
) {
    // In an empty tensor, one size may be so large that cutting it into tiles would overflow.
    if y.is_empty() {
        return;
    }
    match Walk::of(extent) {
        Walk::Rows(rows) => rows.map(cpu, map, x, c, y),
        Walk::Planes(planes) => planes.map(cpu, map, x, c, y),
    }
}

/// [`stats`], and [`normalize`] with them, in one call: contiguous tensors are read from memory only once where caches allow.
///
/// The results are bit-identical to those of the two calls. An empty batch gives the mean 0 and an empty output.
///
/// # Errors
/// If a length is not the extent's, the activation's parameters make no sense, or eps is negative or NaN.
#[inline(never)]
pub fn forward_training(
    cpu: &Cpu,
    extent: &Extent,
    x: Slice<'_>,
    layer: &Affine<'_>,
    y: SliceMut<'_>,
) -> Result<(Moments, Vec<f64>)> {
    span!("batch norm", x, x, y);
    extent.check(FORWARD, &[("x", x.len()), ("y", y.len())])?;
    check_eps(FORWARD, layer.eps)?;
    let inverse_std_of = |moments: &Moments| moments.inverse_std(layer.eps, layer.eps_place);
    let Affine { weight, bias, activation, .. } = *layer;
    activation.check(x.dtype().computed_in())?;
    for (name, values) in [("the weight", weight), ("the bias", bias)] {
        check_len(FORWARD, name, values.map_or(extent.channels, Slice::len), extent.channels)?;
    }
    if !x.is_empty()
        && let Walk::Planes(planes) = Walk::of(extent)
        && planes.stays_cached(cpu, 1, x.dtype())
    {
        dispatch_stored!(x.dtype(), S => {
            let coefficients = |channels: Range<usize>, moments: &Moments| {
                let inverse_std = inverse_std_of(moments);
                Coefficients::<<S as Stored>::Compute>::forward(&Normalization {
                    mean: &moments.mean,
                    inverse_std: &inverse_std,
                    inverse_root: None,
                    weight: weight.map(|weight| weight.part(channels.clone())),
                    bias: bias.map(|bias| bias.part(channels)),
                    activation,
                })
            };
            let moments = planes.forward(cpu, &all_parts(extent), x.of::<S>()?, coefficients, y.of()?);
            let inverse_std = inverse_std_of(&moments);
            return Ok((moments, inverse_std));
        })
    }
    let moments = stats(cpu, extent, x)?;
    let inverse_std = inverse_std_of(&moments);
    let mean = &moments.mean;
    let by = Normalization { mean, inverse_std: &inverse_std, inverse_root: None, weight, bias, activation };
    normalize(cpu, extent, x, &by, y)?;
    Ok((moments, inverse_std))
}

/// The sums over each channel that the gradients of x, gamma and beta need: PyTorch's `batch_norm_backward_reduce`.
///
/// # Errors
/// If a length is not the extent's, or the activation's parameters make no sense.
#[inline(never)]
pub fn backward_reduce(
    cpu: &Cpu,
    extent: &Extent,
    x: Slice<'_>,
    dy: Slice<'_>,
    by: &Normalization<'_>,
) -> Result<BackwardSums> {
    extent.check(BACKWARD, &[("x", x.len()), ("dy", dy.len())])?;
    by.check(BACKWARD, x.dtype(), extent.channels)?;
    let mut parts = BackwardSumsInParts::new(extent)?;
    parts.add(cpu, x, dy, by)?;
    parts.finish()
}

/// The gradient of x, in place: `data` holds x before and dx after.
///
/// If the statistics were this batch's, `sums` are those of [`backward_reduce`], with the count of values per channel (over
/// all ranks if the statistics were synchronized). `None` if the statistics were constants.
///
/// # Errors
/// If a length is not the extent's, the activation's parameters make no sense, or `sums` are over no values.
#[inline(never)]
pub fn backward_elemt_in_place(
    cpu: &Cpu,
    extent: &Extent,
    dy: Slice<'_>,
    by: &Normalization<'_>,
    sums: Option<(&BackwardSums, usize)>,
    data: SliceMut<'_>,
) -> Result<()> {
    span!("batch norm gradient", data, dy, data);
    extent.check(BACKWARD, &[("x", data.len()), ("dy", dy.len())])?;
    dispatch_stored!(dy.dtype(), S => gradient_from::<S>(cpu, extent, (None, dy.of()?), by, sums, data.of()?))
}

/// The gradient of x: PyTorch's `batch_norm_backward_elemt`. See [`backward_elemt_in_place`].
///
/// # Errors
/// If a length is not the extent's, the activation's parameters make no sense, or `sums` are over no values.
#[inline(never)]
pub fn backward_elemt(
    cpu: &Cpu,
    extent: &Extent,
    (x, dy): (Slice<'_>, Slice<'_>),
    by: &Normalization<'_>,
    sums: Option<(&BackwardSums, usize)>,
    dx: SliceMut<'_>,
) -> Result<()> {
    span!("batch norm gradient", x, dy, dx);
    let tensors = [("x", x.len()), ("dy", dy.len()), ("dx", dx.len())];
    extent.check(BACKWARD, &tensors)?;
    dispatch_stored!(dy.dtype(), S => {
        gradient_from::<S>(cpu, extent, (Some(x.of()?), dy.of()?), by, sums, dx.of()?)
    })
}

fn gradient_from<S: Stored>(
    cpu: &Cpu,
    extent: &Extent,
    tensors: (Option<&[S]>, &[S]),
    by: &Normalization<'_>,
    sums: Option<(&BackwardSums, usize)>,
    dx: &mut [S],
) -> Result<()> {
    by.check(BACKWARD, S::DTYPE, extent.channels)?;
    if let Some((sums, count)) = sums {
        check_len(BACKWARD, "the sums", sums.g.len(), extent.channels)?;
        check_len(BACKWARD, "the sums", sums.g_centered.len(), extent.channels)?;
        if count == 0 && !dx.is_empty() {
            return Err(invalid(BACKWARD, "statistics over no values"));
        }
    }
    if dx.is_empty() {
        return Ok(());
    }
    let c = Coefficients::backward(by, sums);
    match Walk::of(extent) {
        Walk::Rows(rows) => rows.gradient(cpu, tensors, c, dx),
        Walk::Planes(planes) => planes.gradient(cpu, tensors, c, dx),
    }
    Ok(())
}

/// [`backward_reduce`], and [`backward_elemt`] with its sums, in one call, for statistics that were this batch's:
/// contiguous tensors are read from memory only once where caches allow. The results are bit-identical to those of the two
/// calls.
///
/// # Errors
/// If a length is not the extent's, or the activation's parameters make no sense.
#[inline(never)]
pub fn backward_training(
    cpu: &Cpu,
    extent: &Extent,
    (x, dy): (Slice<'_>, Slice<'_>),
    by: &Normalization<'_>,
    dx: SliceMut<'_>,
) -> Result<BackwardSums> {
    span!("batch norm backward", x, dy, x, dy, dx);
    extent.check(BACKWARD, &[("x", x.len()), ("dy", dy.len()), ("dx", dx.len())])?;
    by.check(BACKWARD, x.dtype(), extent.channels)?;
    let count = extent.batch * extent.spatial;
    if !x.is_empty()
        && let Walk::Planes(planes) = Walk::of(extent)
        && planes.stays_cached(cpu, 2, x.dtype())
    {
        dispatch_stored!(x.dtype(), S => {
            let with_sums = |channels: Range<usize>, sums: &BackwardSums| {
                let some = Normalization {
                    mean: &by.mean[channels.clone()],
                    inverse_std: &by.inverse_std[channels.clone()],
                    inverse_root: by.inverse_root.map(|inverse_root| &inverse_root[channels.clone()]),
                    weight: by.weight.map(|weight| weight.part(channels.clone())),
                    bias: by.bias.map(|bias| bias.part(channels)),
                    activation: by.activation,
                };
                Coefficients::<<S as Stored>::Compute>::backward(&some, Some((sums, count)))
            };
            let of =
                GradientSumsOf { x: x.of::<S>()?, dy: dy.of()?, means: by.mean, c: &Coefficients::forward(by) };
            return Ok(planes.backward(cpu, &all_parts(extent), &of, with_sums, dx.of()?));
        })
    }
    let sums = backward_reduce(cpu, extent, x, dy, by)?;
    backward_elemt(cpu, extent, (x, dy), by, Some((&sums, count)), dx)?;
    Ok(sums)
}

/// Checks that eps is 0 or more.
///
/// # Errors
/// If it is negative or not a number.
pub fn check_eps(operation: &'static str, eps: f64) -> Result<()> {
    match eps >= 0.0 {
        true => Ok(()),
        false => Err(invalid(operation, format!("eps is {eps}, it must be 0 or more"))),
    }
}

/// How to loop over a tensor, by its memory layout.
enum Walk {
    /// Every row holds each channel once.
    Rows(Rows),
    /// Every plane holds one channel.
    Planes(Planes),
}

impl Walk {
    fn of(extent: &Extent) -> Walk {
        match extent.around_channels() {
            // A single channel could be walked either way.
            (_, 1) if extent.channels > 1 => Walk::Rows(Rows::new(extent)),
            _ => Walk::Planes(Planes::new(extent)),
        }
    }
}

/// (count, mean, M2) of two samples together, by the formula of Chan, Golub and LeVeque.
#[inline(always)]
fn merge_moments(a: (f64, f64, f64), b: (f64, f64, f64)) -> (f64, f64, f64) {
    if b.0 == 0.0 {
        return a;
    }
    if a.0 == 0.0 {
        return b;
    }
    let count = a.0 + b.0;
    let delta = b.1 - a.1;
    (count, a.1 + delta * (b.0 / count), a.2 + b.2 + delta * delta * (a.0 * b.0 / count))
}
