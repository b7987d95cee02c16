//! Group normalization, forward and backward, in both memory formats; instance normalization has groups of one channel.
//!
//! ```text
//! forward   y  = (x - mean) inverse_std weight + bias       mean and variance over the channels of a group of one image
//! backward  dx = inverse_std (weight dy - mean(weight dy) - (x - mean) inverse_std^2 mean(weight dy (x - mean)))
//! ```
//! It is batch norm with other sets: the sums over each channel of each image are those of batch norm's kernels, in f64, and
//! are then added up by group. So every image is a batch of its own; contiguous images lie one after the other as channels
//! do, so there all of them are one batch with N x C channels.

use crate::batch_norm::{
    self, Activation, BackwardSums, EpsPlace, Moments, Normalization, backward_reduce, check_eps,
};
use crate::cpu::multiversion;
use crate::error::{check_len, invalid};
use crate::memory_format::{Extent, MemoryFormat};
use crate::{Cpu, Element, Result};

/// Weight and bias of a normalisation, where the layer has them, and its eps.
#[derive(Debug, Clone, Copy)]
pub struct Affine<'a, T> {
    /// 1 if absent.
    pub weight: Option<&'a [T]>,
    /// 0 if absent.
    pub bias: Option<&'a [T]>,
    /// Added to the variance.
    pub eps: f64,
}

impl<T: Element> Affine<'_, T> {
    pub(crate) fn check(&self, operation: &'static str, len: usize) -> Result<()> {
        check_eps(operation, self.eps)?;
        check_len(operation, "the weight", self.weight.map_or(len, <[T]>::len), len)?;
        check_len(operation, "the bias", self.bias.map_or(len, <[T]>::len), len)
    }
}

/// A valid group normalization of N x C x (spatial).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct GroupNorm {
    extent: Extent,
    groups: usize,
}

/// Mean and 1 / sqrt(variance + eps) of each group of each image, N x G.
#[derive(Debug, Clone, PartialEq)]
pub struct GroupStatistics {
    mean: Vec<f64>,
    inverse_std: Vec<f64>,
}

impl GroupNorm {
    /// Validates the normalization of `groups` groups of channels.
    ///
    /// # Errors
    /// If the groups do not divide the channels, or there are none of either.
    pub fn new(extent: Extent, groups: usize) -> Result<GroupNorm> {
        let channels = extent.channels;
        extent.len()?;
        if channels == 0 || !channels.is_multiple_of(groups) {
            return Err(invalid("group norm", format!("{groups} groups do not divide {channels} channels")));
        }
        Ok(GroupNorm { extent, groups })
    }

    /// The batches that batch norm's kernels see: one, or one an image. Each has [`GroupNorm::width`] channels.
    fn batches(&self) -> (usize, Extent) {
        let Extent { batch, channels, spatial, format } = self.extent;
        match format {
            MemoryFormat::Contiguous => (1, Extent { batch: 1, channels: batch * channels, spatial, format }),
            MemoryFormat::ChannelsLast => (batch, Extent { batch: 1, channels, spatial, format }),
        }
    }

    fn group_channels(&self) -> usize {
        self.extent.channels / self.groups
    }

    /// Values in a group.
    fn count(&self) -> f64 {
        (self.group_channels() * self.extent.spatial) as f64
    }

    fn check(&self, operation: &'static str, lens: &[(&'static str, usize)]) -> Result<()> {
        let expected = self.extent.len()?;
        lens.iter().try_for_each(|&(operand, len)| check_len(operation, operand, len, expected))
    }

    /// The numbers of each image's channels: those of its group, or those of its channel.
    fn by_group(&self, values: &[f64]) -> Vec<f64> {
        values.iter().flat_map(|&value| std::iter::repeat_n(value, self.group_channels())).collect()
    }

    fn repeated<T: Element>(&self, values: Option<&[T]>) -> Option<Vec<T>> {
        values.map(|values| values.repeat(self.extent.batch))
    }

    fn statistics<T: Element>(&self, cpu: &Cpu, x: &[T], eps: f64) -> Result<GroupStatistics> {
        let (mut mean, mut m2) = (Vec::new(), Vec::new());
        let (batches, part) = self.batches();
        for x in x.chunks(part.len()?).take(batches) {
            let Moments { mean: means, m2: deviations, .. } = batch_norm::stats(cpu, &part, x)?;
            mean.extend(means);
            m2.extend(deviations);
        }
        let spatial = self.extent.spatial;
        let channels = mean.chunks(self.group_channels()).zip(m2.chunks(self.group_channels()));
        let moments = channels.map(|(mean, m2)| {
            let of_channels = mean.iter().zip(m2).map(|(&mean, &m2)| Moments {
                mean: vec![mean],
                m2: vec![m2],
                count: spatial,
            });
            let of_channels: Vec<Moments> = of_channels.collect();
            Moments::gather_stats_with_counts(&of_channels)
        });
        let mut statistics = GroupStatistics { mean: Vec::new(), inverse_std: Vec::new() };
        for moments in moments {
            let moments = moments?;
            statistics.mean.extend(&moments.mean);
            statistics.inverse_std.extend(moments.inverse_std(eps, EpsPlace::InsideRoot));
        }
        Ok(statistics)
    }
}

/// y = x normalised, and the statistics, which backward needs.
///
/// # Errors
/// If a length is not the problem's, or eps is negative or NaN.
pub fn group_norm<T: Element>(
    cpu: &Cpu,
    problem: &GroupNorm,
    x: &[T],
    layer: &Affine<'_, T>,
    y: &mut [T],
) -> Result<GroupStatistics> {
    let operation = "group norm";
    problem.check(operation, &[("x", x.len()), ("y", y.len())])?;
    layer.check(operation, problem.extent.channels)?;
    if x.is_empty() {
        return Ok(GroupStatistics { mean: Vec::new(), inverse_std: Vec::new() });
    }
    let statistics = problem.statistics(cpu, x, layer.eps)?;
    let (mean, inverse_std) = (problem.by_group(&statistics.mean), problem.by_group(&statistics.inverse_std));
    let (weight, bias) = (problem.repeated(layer.weight), problem.repeated(layer.bias));
    let (_, part) = problem.batches();
    let (len, channels) = (part.len()?, part.channels);
    for (index, (x, y)) in x.chunks(len).zip(y.chunks_mut(len)).enumerate() {
        let place = index * channels..(index + 1) * channels;
        let by = Normalization {
            mean: &mean[place.clone()],
            inverse_std: &inverse_std[place.clone()],
            inverse_root: None,
            weight: weight.as_ref().map(|weight| &weight[place.clone()]),
            bias: bias.as_ref().map(|bias| &bias[place]),
            activation: Activation::Identity,
        };
        batch_norm::normalize(cpu, &part, x, &by, y)?;
    }
    Ok(statistics)
}

/// The sums over each channel of each image that the gradients of a group norm need.
#[derive(Debug, Clone)]
pub struct GroupSums {
    /// Sum of dy, N x C.
    g: Vec<f64>,
    /// Sum of dy (x - mean), N x C.
    g_centered: Vec<f64>,
}

impl GroupSums {
    /// Computes them.
    ///
    /// # Errors
    /// If a length is not the problem's.
    pub fn new<T: Element>(
        cpu: &Cpu,
        problem: &GroupNorm,
        (x, dy): (&[T], &[T]),
        statistics: &GroupStatistics,
    ) -> Result<GroupSums> {
        problem.check("group norm backward", &[("x", x.len()), ("dy", dy.len())])?;
        let mut sums = GroupSums { g: Vec::new(), g_centered: Vec::new() };
        if x.is_empty() {
            return Ok(sums);
        }
        let (mean, inverse_std) =
            (problem.by_group(&statistics.mean), problem.by_group(&statistics.inverse_std));
        let (_, part) = problem.batches();
        let (len, channels) = (part.len()?, part.channels);
        for (index, (x, dy)) in x.chunks(len).zip(dy.chunks(len)).enumerate() {
            let place = index * channels..(index + 1) * channels;
            let by = Normalization {
                mean: &mean[place.clone()],
                inverse_std: &inverse_std[place],
                inverse_root: None,
                weight: None,
                bias: None,
                activation: Activation::Identity,
            };
            let BackwardSums { g, g_centered } = backward_reduce(cpu, &part, x, dy, &by)?;
            sums.g.extend(g);
            sums.g_centered.extend(g_centered);
        }
        Ok(sums)
    }

    /// The gradient of the weight, C.
    pub fn gradient_of_weight<T: Element>(
        &self,
        problem: &GroupNorm,
        statistics: &GroupStatistics,
        gradient: &mut [T],
    ) {
        let inverse_std = problem.by_group(&statistics.inverse_std);
        let normalized = self.g_centered.iter().zip(inverse_std).map(|(sum, inverse_std)| sum * inverse_std);
        sum_over_images(&normalized.collect::<Vec<_>>(), gradient);
    }

    /// The gradient of the bias, C.
    pub fn gradient_of_bias<T: Element>(&self, gradient: &mut [T]) {
        sum_over_images(&self.g, gradient);
    }
}

fn sum_over_images<T: Element>(values: &[f64], sums: &mut [T]) {
    let channels = sums.len();
    for (channel, sum) in sums.iter_mut().enumerate() {
        *sum = T::of(values.iter().skip(channel).step_by(channels).sum());
    }
}

/// What makes dx of x and dy in one channel of one image: (x - mean) * slope + dy * scale + shift.
#[derive(Clone, Copy)]
struct Line<T> {
    mean: T,
    slope: T,
    scale: T,
    shift: T,
}

/// The gradient of x.
///
/// # Errors
/// If a length is not the problem's.
pub fn group_norm_backward<T: Element>(
    cpu: &Cpu,
    problem: &GroupNorm,
    (x, dy): (&[T], &[T]),
    weight: Option<&[T]>,
    (statistics, sums): (&GroupStatistics, &GroupSums),
    dx: &mut [T],
) -> Result<()> {
    let operation = "group norm backward";
    crate::profile::span!("group norm gradient", x, dy, dx);
    problem.check(operation, &[("x", x.len()), ("dy", dy.len()), ("dx", dx.len())])?;
    let Extent { channels, spatial, format, .. } = problem.extent;
    check_len(operation, "the weight", weight.map_or(channels, <[T]>::len), channels)?;
    if dx.is_empty() {
        return Ok(());
    }
    let per_group = problem.group_channels();
    let mut lines = Vec::with_capacity(sums.g.len());
    for (group, (&mean, &inverse_std)) in statistics.mean.iter().zip(&statistics.inverse_std).enumerate() {
        let places = group * per_group..(group + 1) * per_group;
        let weight = |place: usize| weight.map_or(1.0, |weight| weight[place % channels].f64());
        let total = |sums: &[f64]| places.clone().map(|place| weight(place) * sums[place]).sum::<f64>();
        let mean_g = total(&sums.g) / problem.count();
        let slope = -inverse_std.powi(3) * total(&sums.g_centered) / problem.count();
        let rounded = T::of(mean);
        let shift = -inverse_std * mean_g - (mean - rounded.f64()) * slope;
        lines.extend(places.clone().map(|place| Line {
            mean: rounded,
            slope: T::of(slope),
            scale: T::of(weight(place) * inverse_std),
            shift: T::of(shift),
        }));
    }
    let lines = &lines[..];
    match format {
        MemoryFormat::Contiguous => {
            let planes = TASK.div_ceil(spatial);
            cpu.for_each(dx.len(), dx.chunks_mut(planes * spatial).enumerate(), |(task, dx)| {
                for (plane, dx) in (task * planes..).zip(dx.chunks_mut(spatial)) {
                    let place = plane * spatial..(plane + 1) * spatial;
                    gradient_of_plane(cpu, lines[plane], &x[place.clone()], &dy[place], dx);
                }
            });
        }
        MemoryFormat::ChannelsLast => {
            let (image, part) = (spatial * channels, TASK.div_ceil(channels) * channels);
            let parts = dx.chunks_mut(image).enumerate().flat_map(|(index, image_dx)| {
                image_dx
                    .chunks_mut(part)
                    .enumerate()
                    .map(move |(at, dx)| (index, index * image + at * part, dx))
            });
            cpu.for_each(x.len(), parts, |(index, start, dx)| {
                let place = start..start + dx.len();
                let lines = &lines[index * channels..][..channels];
                gradient_of_pixels(cpu, lines, &x[place.clone()], &dy[place], dx);
            });
        }
    }
    Ok(())
}

/// The approximate number of elements in a task.
const TASK: usize = 1 << 14;

multiversion! {
    fn gradient_of_plane<T: Element>(line: Line<T>, x: &[T], dy: &[T], dx: &mut [T]) {
        for ((dx, &x), &dy) in dx.iter_mut().zip(x).zip(dy) {
            *dx = line.at(x, dy);
        }
    }

    fn gradient_of_pixels<T: Element>(lines: &[Line<T>], x: &[T], dy: &[T], dx: &mut [T]) {
        let pixels = x.chunks_exact(lines.len()).zip(dy.chunks_exact(lines.len()));
        for (dx, (x, dy)) in dx.chunks_exact_mut(lines.len()).zip(pixels) {
            for (((dx, &x), &dy), line) in dx.iter_mut().zip(x).zip(dy).zip(lines) {
                *dx = line.at(x, dy);
            }
        }
    }
}

impl<T: Element> Line<T> {
    #[inline(always)]
    fn at(&self, x: T, dy: T) -> T {
        (x - self.mean).mul_add(self.slope, dy.mul_add(self.scale, self.shift))
    }
}
