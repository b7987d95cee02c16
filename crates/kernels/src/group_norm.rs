//! Group normalization, forward and backward, in both memory formats; instance normalization has groups of one channel.
//!
//! ```text
//! forward   y  = (x - mean) inverse_std weight + bias       mean and variance over the channels of a group of one image
//! backward  dx = inverse_std (weight dy - mean(weight dy) - (x - mean) inverse_std^2 mean(weight dy (x - mean)))
//! ```
//! It is batch norm with other sets: the sums over each channel of each image are those of batch norm's kernels, in f64, and
//! are then added up by group. So every image is a batch of its own, and all that is done with it is done while it is in the
//! cache.

use crate::batch_norm::{
    self, Activation, BackwardSums, EpsPlace, Normalization, backward_reduce, check_eps,
};
use crate::error::{check_len, invalid};
use crate::isa::multiversion;
use crate::memory_format::{Extent, MemoryFormat};
use crate::{Cpu, Element, Result, Slice, SliceMut, dispatch};

/// Weight and bias of a normalisation, where the layer has them, and its eps.
#[derive(Debug, Clone, Copy)]
pub struct Affine<'a> {
    /// 1 if absent.
    pub weight: Option<Slice<'a>>,
    /// 0 if absent.
    pub bias: Option<Slice<'a>>,
    /// Added to the variance.
    pub eps: f64,
}

impl Affine<'_> {
    pub(crate) fn check(&self, operation: &'static str, len: usize) -> Result<()> {
        check_eps(operation, self.eps)?;
        check_len(operation, "the weight", self.weight.map_or(len, Slice::len), len)?;
        check_len(operation, "the bias", self.bias.map_or(len, Slice::len), len)
    }
}

/// Where the gradients of a normalisation go that are asked for.
#[derive(Debug)]
pub struct AffineGradients<'a> {
    /// The gradient of x.
    pub x: Option<SliceMut<'a>>,
    /// The gradient of the weight.
    pub weight: Option<SliceMut<'a>>,
    /// The gradient of the bias.
    pub bias: Option<SliceMut<'a>>,
}

impl AffineGradients<'_> {
    /// Checks that there are as many places as elements of x and of the parameters.
    pub(crate) fn check(&self, operation: &'static str, [x, parameters]: [usize; 2]) -> Result<()> {
        let len =
            |gradient: &Option<SliceMut<'_>>, otherwise| gradient.as_ref().map_or(otherwise, SliceMut::len);
        check_len(operation, "dx", len(&self.x, x), x)?;
        check_len(operation, "dweight", len(&self.weight, parameters), parameters)?;
        check_len(operation, "dbias", len(&self.bias, parameters), parameters)
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

    /// An image, as batch norm's kernels see it.
    fn image(&self) -> Extent {
        Extent { batch: 1, ..self.extent }
    }

    fn group_channels(&self) -> usize {
        self.extent.channels / self.groups
    }

    /// Values in a group.
    fn count(&self) -> f64 {
        (self.group_channels() * self.extent.spatial) as f64
    }

    /// The numbers of each of an image's channels: those of its group.
    fn by_channel(&self, of_groups: &[f64]) -> Vec<f64> {
        of_groups.iter().flat_map(|&value| std::iter::repeat_n(value, self.group_channels())).collect()
    }

    /// Runs `task` on every image. Many images are shared between threads, each of which has its own in the cache. The threads
    /// share each image where there are few.
    fn for_each_image<I: Send>(
        &self,
        cpu: &Cpu,
        images: impl Iterator<Item = I> + Send,
        task: impl Fn(I) -> Result<()> + Send + Sync,
    ) -> Result<()> {
        let Extent { batch, .. } = self.extent;
        if batch < 4 * cpu.threads() {
            return match cpu.is_dry() {
                true => Ok(()),
                false => { images }.try_for_each(task),
            };
        }
        let mut results: Vec<Result<()>> = (0..batch).map(|_| Ok(())).collect();
        cpu.for_each(self.extent.len()?, images.zip(&mut results), |(image, result)| *result = task(image));
        results.into_iter().collect()
    }

    /// Writes mean and 1 / sqrt(variance + eps) of each group of an image.
    fn statistics(
        &self,
        cpu: &Cpu,
        (x, eps): (Slice<'_>, f64),
        mean: &mut [f64],
        inverse_std: &mut [f64],
    ) -> Result<()> {
        let moments = batch_norm::stats(cpu, &self.image(), x)?;
        let channels =
            moments.mean.chunks(self.group_channels()).zip(moments.m2.chunks(self.group_channels()));
        for ((means, m2), (mean, inverse_std)) in channels.zip(mean.iter_mut().zip(inverse_std)) {
            // All channels have as many values.
            *mean = means.iter().sum::<f64>() / means.len() as f64;
            let between: f64 =
                means.iter().map(|of_channel| (of_channel - *mean) * (of_channel - *mean)).sum();
            let variance = (m2.iter().sum::<f64>() + between * self.extent.spatial as f64) / self.count();
            *inverse_std = batch_norm::inverse_std(&[variance], eps, EpsPlace::InsideRoot)[0];
        }
        Ok(())
    }
}

/// y = x normalised, and the statistics, which backward needs.
///
/// # Errors
/// If a length is not the problem's, or eps is negative or NaN.
#[inline(never)]
pub fn group_norm(
    cpu: &Cpu,
    problem: &GroupNorm,
    x: Slice<'_>,
    layer: &Affine<'_>,
    y: SliceMut<'_>,
) -> Result<GroupStatistics> {
    let operation = "group norm";
    problem.extent.check(operation, &[("x", x.len()), ("y", y.len())])?;
    layer.check(operation, problem.extent.channels)?;
    // Without elements the batch may be any number.
    let images = if x.is_empty() { 0 } else { problem.extent.batch };
    let numbers = || vec![0.0; images * problem.groups];
    let mut statistics = GroupStatistics { mean: numbers(), inverse_std: numbers() };
    if x.is_empty() {
        return Ok(statistics);
    }
    let (image, groups, len) = (problem.image(), problem.groups, problem.image().len()?);
    let of_groups = statistics.mean.chunks_mut(groups).zip(statistics.inverse_std.chunks_mut(groups));
    let images = x.chunks(len).zip(y.chunks_mut(len)).zip(of_groups);
    problem.for_each_image(cpu, images, |((x, y), (mean, inverse_std))| {
        problem.statistics(cpu, (x, layer.eps), mean, inverse_std)?;
        let by = Normalization {
            mean: &problem.by_channel(mean),
            inverse_std: &problem.by_channel(inverse_std),
            inverse_root: None,
            weight: layer.weight,
            bias: layer.bias,
            activation: Activation::Identity,
        };
        batch_norm::normalize(cpu, &image, x, &by, y)
    })?;
    Ok(statistics)
}

/// The operands of the gradients of [`group_norm`].
#[derive(Debug, Clone, Copy)]
pub struct GroupNormBackward<'a> {
    /// What was normalised.
    pub x: Slice<'a>,
    /// The upstream gradient.
    pub dy: Slice<'a>,
    /// 1 if absent.
    pub weight: Option<Slice<'a>>,
    /// The statistics of forward.
    pub statistics: &'a GroupStatistics,
}

/// The gradients of [`group_norm`].
///
/// # Errors
/// If a length is not the problem's.
#[inline(never)]
pub fn group_norm_backward(
    cpu: &Cpu,
    problem: &GroupNorm,
    of: &GroupNormBackward<'_>,
    gradients: AffineGradients<'_>,
) -> Result<()> {
    let operation = "group norm backward";
    let &GroupNormBackward { x, dy, weight, statistics } = of;
    problem.extent.check(operation, &[("x", x.len()), ("dy", dy.len())])?;
    let channels = problem.extent.channels;
    check_len(operation, "the weight", weight.map_or(channels, Slice::len), channels)?;
    let images = if x.is_empty() { 0 } else { problem.extent.batch };
    check_len(operation, "the statistics", statistics.mean.len(), images * problem.groups)?;
    gradients.check(operation, [x.len(), channels])?;
    let AffineGradients { x: dx, weight: of_weight, bias: of_bias } = gradients;
    // The sums over each channel of each image, N x C: of dy, and of dy x^.
    let numbers = || vec![0.0; images * channels];
    let (mut g, mut g_normalized) = (numbers(), numbers());
    if !x.is_empty() {
        let len = problem.image().len()?;
        let of_x: Vec<_> = match dx {
            Some(dx) => dx.chunks_mut(len).map(Some).collect(),
            None => (0..problem.extent.batch).map(|_| None).collect(),
        };
        let sums = g.chunks_mut(channels).zip(g_normalized.chunks_mut(channels));
        let of_groups =
            statistics.mean.chunks(problem.groups).zip(statistics.inverse_std.chunks(problem.groups));
        let images = x.chunks(len).zip(dy.chunks(len)).zip(of_x).zip(of_groups).zip(sums);
        problem.for_each_image(cpu, images, |((((x, dy), dx), (mean, inverse_std)), sums)| {
            let image = Image { x, dy, weight, mean, inverse_std };
            image.backward(cpu, problem, sums, dx)
        })?;
    }
    for (sums, gradient) in [(&g, of_bias), (&g_normalized, of_weight)] {
        if let Some(gradient) = gradient {
            gradient.update(|channel, _| sums.iter().skip(channel).step_by(channels).sum());
        }
    }
    Ok(())
}

/// An image's part of the operands of the backward pass.
struct Image<'a> {
    x: Slice<'a>,
    dy: Slice<'a>,
    weight: Option<Slice<'a>>,
    /// The mean of each group.
    mean: &'a [f64],
    /// The inverse standard deviation of each group.
    inverse_std: &'a [f64],
}

impl Image<'_> {
    /// Writes the sums of dy and of dy x^ of each channel, and the gradient of x.
    fn backward(
        &self,
        cpu: &Cpu,
        problem: &GroupNorm,
        (g, g_normalized): (&mut [f64], &mut [f64]),
        dx: Option<SliceMut<'_>>,
    ) -> Result<()> {
        let (image, inverse_std) = (problem.image(), problem.by_channel(self.inverse_std));
        let by = Normalization {
            mean: &problem.by_channel(self.mean),
            inverse_std: &inverse_std,
            inverse_root: None,
            weight: None,
            bias: None,
            activation: Activation::Identity,
        };
        let sums = backward_reduce(cpu, &image, self.x, self.dy, &by)?;
        g.copy_from_slice(&sums.g);
        let normalized = sums.g_centered.iter().zip(&inverse_std).map(|(sum, inverse_std)| sum * inverse_std);
        g_normalized.iter_mut().zip(normalized).for_each(|(to, sum)| *to = sum);
        if let Some(dx) = dx {
            dispatch!("group norm backward", dx.dtype(), T => {
                let lines = self.lines::<T>(problem, &sums);
                gradient(cpu, &image, &lines, [self.x.of()?, self.dy.of()?], dx.of()?);
            });
        }
        Ok(())
    }

    /// What makes the gradient of x in each channel.
    fn lines<T: Element>(&self, problem: &GroupNorm, sums: &BackwardSums) -> Vec<Line<T>> {
        let weight = self.weight.map(Slice::to_f64);
        let weight = |channel: usize| weight.as_ref().map_or(1.0, |weight| weight[channel]);
        let per_group = problem.group_channels();
        let mut lines = Vec::with_capacity(problem.extent.channels);
        for (group, (&mean, &inverse_std)) in self.mean.iter().zip(self.inverse_std).enumerate() {
            let channels = group * per_group..(group + 1) * per_group;
            let total =
                |sums: &[f64]| channels.clone().map(|channel| weight(channel) * sums[channel]).sum::<f64>();
            let mean_g = total(&sums.g) / problem.count();
            let slope = -inverse_std.powi(3) * total(&sums.g_centered) / problem.count();
            let rounded = T::of(mean);
            let shift = -inverse_std * mean_g - (mean - rounded.f64()) * slope;
            lines.extend(channels.clone().map(|channel| Line {
                mean: rounded,
                slope: T::of(slope),
                scale: T::of(weight(channel) * inverse_std),
                shift: T::of(shift),
            }));
        }
        lines
    }
}

fn gradient<T: Element>(cpu: &Cpu, image: &Extent, lines: &[Line<T>], [x, dy]: [&[T]; 2], dx: &mut [T]) {
    crate::profile::span!("group norm gradient", x, dy, dx);
    let unit = match image.format {
        MemoryFormat::Contiguous => image.spatial,
        MemoryFormat::ChannelsLast => image.channels,
    };
    let units = TASK.div_ceil(unit);
    cpu.for_each(dx.len(), dx.chunks_mut(units * unit).enumerate(), |(task, dx)| {
        let start = task * units * unit;
        let (x, dy) = (&x[start..start + dx.len()], &dy[start..start + dx.len()]);
        match image.format {
            MemoryFormat::Contiguous => gradient_of_planes(cpu, &lines[task * units..], [x, dy], unit, dx),
            MemoryFormat::ChannelsLast => gradient_of_pixels(cpu, lines, x, dy, dx),
        }
    });
}

/// What makes dx of x and dy in one channel of one image: (x - mean) * slope + dy * scale + shift.
#[derive(Clone, Copy)]
struct Line<T> {
    mean: T,
    slope: T,
    scale: T,
    shift: T,
}

/// The approximate number of elements in a task.
const TASK: usize = 1 << 14;

multiversion! {
    fn gradient_of_planes<T: Element>(lines: &[Line<T>], x_dy: [&[T]; 2], spatial: usize, dx: &mut [T]) {
        let [x, dy] = x_dy.map(|data| data.chunks_exact(spatial));
        for ((dx, line), (x, dy)) in dx.chunks_exact_mut(spatial).zip(lines).zip(x.zip(dy)) {
            for ((dx, &x), &dy) in dx.iter_mut().zip(x).zip(dy) {
                *dx = line.at(x, dy);
            }
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
