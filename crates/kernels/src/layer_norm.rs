//! Layer normalization of rows: each row has a mean and a variance of its own, each column a weight and a bias.
//!
//! ```text
//! forward   y  = (x - mean) inverse_std weight + bias
//! backward  dx = inverse_std (g - mean(g) - x^ mean(g x^))     x^ = (x - mean) inverse_std, g = weight dy
//! ```
//! Sums are taken in f64, in an order that depends on the shape only. Backward computes the statistics again: the row is in
//! the cache anyway, so saving them would cost memory and no time.

use crate::channels::lane_sum;
use crate::cpu::multiversion;
use crate::error::{check_len, invalid};
use crate::group_norm::Affine;
use crate::profile::span;
use crate::{Cpu, Element, Result};

/// The approximate number of elements in a task.
const TASK: usize = 1 << 14;
/// The gradients of weight and bias are summed over this many blocks of rows, and the blocks' sums added in order.
const BLOCKS: usize = 64;
/// Rows longer than this have their columns shared between tasks instead, so that there are not that many long sums.
const LONG: usize = 1 << 12;

/// y = each row of `width` elements of x normalised.
///
/// # Errors
/// If a length does not fit, or eps is negative or NaN.
pub fn layer_norm<T: Element>(
    cpu: &Cpu,
    width: usize,
    x: &[T],
    layer: &Affine<'_, T>,
    y: &mut [T],
) -> Result<()> {
    let operation = "layer norm";
    span!("layer norm", x, y);
    check_len(operation, "y", y.len(), x.len())?;
    layer.check(operation, width)?;
    check_rows(operation, width, x.len())?;
    if x.is_empty() {
        return Ok(());
    }
    let part = TASK.div_ceil(width) * width;
    cpu.for_each(x.len(), x.chunks(part).zip(y.chunks_mut(part)), |(x, y)| {
        for (x, y) in x.chunks_exact(width).zip(y.chunks_exact_mut(width)) {
            normalize_row(cpu, x, layer, y);
        }
    });
    Ok(())
}

fn check_rows(operation: &'static str, width: usize, len: usize) -> Result<()> {
    match len.checked_rem(width).unwrap_or(len) {
        0 => Ok(()),
        _ => Err(invalid(operation, format!("{len} elements are not whole rows of {width}"))),
    }
}

/// The gradients that are asked for.
#[derive(Debug)]
pub struct LayerGradients<'a, T> {
    /// Of x.
    pub x: Option<&'a mut [T]>,
    /// Of the weight, one number per column.
    pub weight: Option<&'a mut [T]>,
    /// Of the bias, one number per column.
    pub bias: Option<&'a mut [T]>,
}

/// The gradients of [`layer_norm`].
///
/// # Errors
/// As [`layer_norm`].
pub fn layer_norm_backward<T: Element>(
    cpu: &Cpu,
    width: usize,
    (x, dy): (&[T], &[T]),
    layer: &Affine<'_, T>,
    gradients: LayerGradients<'_, T>,
) -> Result<()> {
    let operation = "layer norm backward";
    let LayerGradients { x: dx, weight, bias } = gradients;
    span!("layer norm backward", x, dy, x);
    check_len(operation, "dy", dy.len(), x.len())?;
    check_len(operation, "dx", dx.as_ref().map_or(x.len(), |dx| dx.len()), x.len())?;
    for (name, gradient) in [("dweight", &weight), ("dbias", &bias)] {
        check_len(operation, name, gradient.as_ref().map_or(width, |gradient| gradient.len()), width)?;
    }
    layer.check(operation, width)?;
    check_rows(operation, width, x.len())?;
    if weight.is_some() || bias.is_some() {
        let sums = column_sums(cpu, width, (x, dy), layer.eps);
        let to = [(bias, &sums[..width]), (weight, &sums[width..])];
        for (gradient, sums) in to.into_iter().filter_map(|(to, sums)| Some((to?, sums))) {
            let chunks = gradient.chunks_mut(TASK).zip(sums.chunks(TASK));
            cpu.for_each(width, chunks, |(to, sums)| {
                to.iter_mut().zip(sums).for_each(|(to, &sum)| *to = T::of(sum));
            });
        }
    }
    if let Some(dx) = dx
        && !x.is_empty()
    {
        let part = TASK.div_ceil(width) * width;
        let pairs = x.chunks(part).zip(dy.chunks(part));
        cpu.for_each(x.len(), dx.chunks_mut(part).zip(pairs), |(dx, (x, dy))| {
            let pairs = x.chunks_exact(width).zip(dy.chunks_exact(width));
            for (dx, (x, dy)) in dx.chunks_exact_mut(width).zip(pairs) {
                gradient_of_row(cpu, (x, dy), layer, dx);
            }
        });
    }
    Ok(())
}

/// By column, the sums of dy, and then those of dy x^.
fn column_sums<T: Element>(cpu: &Cpu, width: usize, (x, dy): (&[T], &[T]), eps: f64) -> Vec<f64> {
    let rows = x.len() / width.max(1);
    let mut sums = vec![0.0; 2 * width];
    if rows == 0 {
        return sums;
    }
    if width <= LONG {
        let block = rows.div_ceil(BLOCKS) * width;
        let mut parts = vec![0.0; rows.div_ceil(block / width) * 2 * width];
        let items = parts.chunks_mut(2 * width).zip(x.chunks(block).zip(dy.chunks(block)));
        cpu.for_each(x.len(), items, |(part, (x, dy))| {
            let (g, g_normalized) = part.split_at_mut(width);
            for (x, dy) in x.chunks_exact(width).zip(dy.chunks_exact(width)) {
                add_row(cpu, Standard::of(cpu, x, eps), [x, dy], g, g_normalized);
            }
        });
        for part in parts.chunks(2 * width) {
            sums.iter_mut().zip(part).for_each(|(sum, part)| *sum += part);
        }
        return sums;
    }
    let mut standards = vec![Standard { mean: T::zero(), scale: T::zero(), shift: T::zero() }; rows];
    cpu.for_each(x.len(), standards.iter_mut().zip(x.chunks_exact(width)), |(standard, x)| {
        *standard = Standard::of(cpu, x, eps);
    });
    let (g, g_normalized) = sums.split_at_mut(width);
    let columns = g.chunks_mut(LONG).zip(g_normalized.chunks_mut(LONG)).enumerate();
    cpu.for_each(x.len(), columns, |(index, (g, g_normalized))| {
        for (row, &standard) in standards.iter().enumerate() {
            let start = row * width + index * LONG;
            let place = start..start + g.len();
            add_row(cpu, standard, [&x[place.clone()], &dy[place]], g, g_normalized);
        }
    });
    sums
}

/// The normalisation of a row: x^ = (x - mean) * scale + shift. The shift makes up for the rounding of the mean.
#[derive(Clone, Copy)]
struct Standard<T> {
    mean: T,
    scale: T,
    shift: T,
}

impl<T: Element> Standard<T> {
    fn of(cpu: &Cpu, x: &[T], eps: f64) -> Standard<T> {
        let [mean, inverse_std] = statistics(cpu, x, eps);
        let rounded = T::of(mean);
        let rest = mean - rounded.f64();
        // Without a rest, x^ of a constant row is 0, also where its scale is infinite.
        let shift = if rest == 0.0 { 0.0 } else { -rest * inverse_std };
        Standard { mean: rounded, scale: T::of(inverse_std), shift: T::of(shift) }
    }

    #[inline(always)]
    fn at(&self, x: T) -> T {
        (x - self.mean).mul_add(self.scale, self.shift)
    }
}

fn normalize_row<T: Element>(cpu: &Cpu, x: &[T], layer: &Affine<'_, T>, y: &mut [T]) {
    write_row(cpu, Standard::of(cpu, x, layer.eps), x, [layer.weight, layer.bias], y);
}

fn gradient_of_row<T: Element>(cpu: &Cpu, (x, dy): (&[T], &[T]), layer: &Affine<'_, T>, dx: &mut [T]) {
    let standard = Standard::of(cpu, x, layer.eps);
    let count = x.len() as f64;
    let [g, g_normalized] = row_sums(cpu, standard, [x, dy], layer.weight);
    write_gradient(cpu, standard, [x, dy], layer.weight, [g / count, g_normalized / count].map(T::of), dx);
}

multiversion! {
    /// Mean and 1 / sqrt(variance + eps).
    fn statistics<T: Element>(x: &[T], eps: f64) -> [f64; 2] {
        let count = x.len() as f64;
        let mean = lane_sum(x, |x| x.f64()) / count;
        let variance = lane_sum(x, |x| (x.f64() - mean) * (x.f64() - mean)) / count;
        // A constant row without eps is 0 times this, and 0.
        [mean, if variance == 0.0 && eps == 0.0 { 0.0 } else { 1.0 / (variance + eps).sqrt() }]
    }

    fn write_row<T: Element>(
        standard: Standard<T>, x: &[T], affine: [Option<&[T]>; 2], y: &mut [T],
    ) {
        match affine.into() {
            (Some(weight), Some(bias)) => {
                for (((y, &x), &weight), &bias) in y.iter_mut().zip(x).zip(weight).zip(bias) {
                    *y = standard.at(x).mul_add(weight, bias);
                }
            }
            (Some(weight), None) => {
                for ((y, &x), &weight) in y.iter_mut().zip(x).zip(weight) {
                    *y = standard.at(x) * weight;
                }
            }
            (None, Some(bias)) => {
                for ((y, &x), &bias) in y.iter_mut().zip(x).zip(bias) {
                    *y = standard.at(x) + bias;
                }
            }
            (None, None) => {
                for (y, &x) in y.iter_mut().zip(x) {
                    *y = standard.at(x);
                }
            }
        }
    }

    /// The sums of g and of g x^ over a row.
    fn row_sums<T: Element>(standard: Standard<T>, x_dy: [&[T]; 2], weight: Option<&[T]>) -> [f64; 2] {
        let [x, dy] = x_dy;
        const LANES: usize = crate::channels::LANES;
        let (mut g, mut g_normalized) = ([0.0f64; LANES], [0.0f64; LANES]);
        for start in (0..x.len()).step_by(LANES) {
            let place = start..(start + LANES).min(x.len());
            let (x, dy) = (&x[place.clone()], &dy[place.clone()]);
            let weight = weight.map(|weight| &weight[place]);
            for lane in 0..x.len() {
                let one = dy[lane].f64() * weight.map_or(1.0, |weight| weight[lane].f64());
                g[lane] += one;
                g_normalized[lane] += one * standard.at(x[lane]).f64();
            }
        }
        [g.iter().sum(), g_normalized.iter().sum()]
    }

    fn write_gradient<T: Element>(
        standard: Standard<T>, x_dy: [&[T]; 2], weight: Option<&[T]>, means: [T; 2], dx: &mut [T],
    ) {
        let [x, dy] = x_dy;
        let [mean_g, mean_g_normalized] = means;
        let gradient = |x: T, g: T| (g - mean_g - standard.at(x) * mean_g_normalized) * standard.scale;
        match weight {
            Some(weight) => {
                for (((dx, &x), &dy), &weight) in dx.iter_mut().zip(x).zip(dy).zip(weight) {
                    *dx = gradient(x, dy * weight);
                }
            }
            None => {
                for ((dx, &x), &dy) in dx.iter_mut().zip(x).zip(dy) {
                    *dx = gradient(x, dy);
                }
            }
        }
    }

    /// Adds dy and dy x^ of a row, or of a part of one, to sums by column.
    fn add_row<T: Element>(
        standard: Standard<T>, x_dy: [&[T]; 2], g: &mut [f64], g_normalized: &mut [f64],
    ) {
        let [x, dy] = x_dy;
        for (((&x, &dy), g), g_normalized) in x.iter().zip(dy).zip(g).zip(g_normalized) {
            *g += dy.f64();
            *g_normalized += dy.f64() * standard.at(x).f64();
        }
    }
}
