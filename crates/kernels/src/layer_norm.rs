//! Layer normalization of rows: each row has a mean and a variance of its own, each column a weight and a bias.
//!
//! ```text
//! forward   y  = (x - mean) inverse_std weight + bias
//! backward  dx = inverse_std (g - mean(g) - x^ mean(g x^))     x^ = (x - mean) inverse_std, g = weight dy
//! ```
//! A few values at a time are summed in their own type, around an estimate of their mean, and these sums are added in f64: both
//! in an order that depends on the shape only. Backward computes the statistics again: the row is in the cache anyway, so saving
//! them would cost memory and no time.

use std::borrow::Cow;
use std::ops::Range;

use crate::channels::{LANES, halved};
use crate::error::{check_len, invalid};
use crate::group_norm::{Affine, AffineGradients};
use crate::isa::multiversion;
use crate::profile::span;
use crate::{Cpu, Element, Result, Slice, SliceMut, dispatch};

/// The names of the passes in errors.
const FORWARD: &str = "layer norm";
const BACKWARD: &str = "layer norm backward";

/// The approximate number of elements in a task.
const TASK: usize = 1 << 14;
/// The gradients of weight and bias are summed over this many blocks of rows, and the blocks' sums added in order.
const BLOCKS: usize = 64;
/// Values of a row that are summed in their own type, in [`LANES`] sums.
const RUN: usize = 16 * LANES;
/// Rows that are taken together: each step is a loop over all of them, so that rows do not wait for one another's sums.
const GROUP: usize = 16;
/// Rows longer than this have their columns shared between tasks instead, so that there are not that many long sums.
const LONG: usize = 1 << 12;

/// y = each row of `width` elements of x normalised.
///
/// # Errors
/// If a length does not fit, or eps is negative or NaN.
#[inline(never)]
pub fn layer_norm(cpu: &Cpu, width: usize, x: Slice<'_>, layer: &Affine<'_>, y: SliceMut<'_>) -> Result<()> {
    span!("layer norm", x, y);
    check_len(FORWARD, "y", y.len(), x.len())?;
    layer.check(FORWARD, width)?;
    check_rows(FORWARD, width, x.len())?;
    if x.is_empty() {
        return Ok(());
    }
    dispatch!(FORWARD, x.dtype(), T => {
        let weight = column(layer.weight, 1.0, width)?;
        let bias = column(layer.bias, 0.0, width)?;
        let (affine, part) = ([&*weight, &*bias], TASK.div_ceil(width) * width);
        let parts = x.of::<T>()?.chunks(part).zip(y.of()?.chunks_mut(part));
        cpu.for_each(x.len(), parts, |(x, y)| {
            let mut group = Group::new();
            for (x, y) in x.chunks(GROUP * width).zip(y.chunks_mut(GROUP * width)) {
                write_rows(cpu, group.standards(cpu, x, width, layer.eps), x, affine, y);
            }
        });
    });
    Ok(())
}

fn check_rows(operation: &'static str, width: usize, len: usize) -> Result<()> {
    match len.checked_rem(width).unwrap_or(len) {
        0 => Ok(()),
        _ => Err(invalid(operation, format!("{len} elements are not whole rows of {width}"))),
    }
}

/// A parameter, or what stands for one that the layer has not.
fn column<T: Element>(values: Option<Slice<'_>>, otherwise: f64, width: usize) -> Result<Cow<'_, [T]>> {
    match values {
        Some(values) => Ok(Cow::Borrowed(values.of()?)),
        None => Ok(Cow::Owned(vec![T::of(otherwise); width])),
    }
}

/// The gradients of [`layer_norm`].
///
/// # Errors
/// As [`layer_norm`].
#[inline(never)]
pub fn layer_norm_backward(
    cpu: &Cpu,
    width: usize,
    (x, dy): (Slice<'_>, Slice<'_>),
    layer: &Affine<'_>,
    gradients: AffineGradients<'_>,
) -> Result<()> {
    span!("layer norm backward", x, dy, x);
    check_len(BACKWARD, "dy", dy.len(), x.len())?;
    gradients.check(BACKWARD, [x.len(), width])?;
    let AffineGradients { x: dx, weight, bias } = gradients;
    layer.check(BACKWARD, width)?;
    check_rows(BACKWARD, width, x.len())?;
    // Without elements the width may be any number.
    let wanted = weight.is_some() || bias.is_some();
    let mut sums = ColumnSums::new(if wanted { width } else { 0 });
    if !x.is_empty() {
        dispatch!(BACKWARD, x.dtype(), T => {
            let weight = column(layer.weight, 1.0, width)?;
            let of = Backward::<T> { width, x: x.of()?, dy: dy.of()?, eps: layer.eps, weight };
            let dx = dx.map(SliceMut::of).transpose()?;
            if width <= LONG {
                sums = of.short(cpu, dx);
            } else {
                if let Some(dx) = dx {
                    of.gradient_of_long(cpu, dx);
                }
                if wanted {
                    sums = of.sums_of_long(cpu);
                }
            }
        });
    }
    for (gradient, sums) in [(bias, &sums.g), (weight, &sums.g_normalized)] {
        let chunks =
            gradient.into_iter().flat_map(|gradient| gradient.chunks_mut(TASK).zip(sums.chunks(TASK)));
        cpu.for_each(width, chunks, |(to, sums)| to.update(|index, _| sums[index]));
    }
    Ok(())
}

/// By column, sums over rows; there may be more places than columns.
#[derive(Clone)]
struct ColumnSums {
    /// The sums of dy.
    g: Vec<f64>,
    /// The sums of dy x^.
    g_normalized: Vec<f64>,
}

impl ColumnSums {
    fn new(columns: usize) -> ColumnSums {
        ColumnSums { g: vec![0.0; columns], g_normalized: vec![0.0; columns] }
    }

    fn add(&mut self, other: &ColumnSums) {
        self.g.iter_mut().zip(&other.g).for_each(|(sum, part)| *sum += part);
        self.g_normalized.iter_mut().zip(&other.g_normalized).for_each(|(sum, part)| *sum += part);
    }
}

/// The operands of a backward pass that has elements.
struct Backward<'a, T: Element> {
    width: usize,
    x: &'a [T],
    dy: &'a [T],
    /// Added to the variance.
    eps: f64,
    weight: Cow<'a, [T]>,
}

impl<T: Element> Backward<'_, T> {
    /// Everything in one walk over x and dy.
    fn short(&self, cpu: &Cpu, dx: Option<&mut [T]>) -> ColumnSums {
        let &Backward { width, x, dy, eps, .. } = self;
        // Whole vectors, so that the last one of a row needs no loop of its own.
        let columns = width.next_multiple_of(LANES);
        let weight = &*self.weight;
        let padded = [weight, &vec![T::zero(); columns - width]].concat();
        let row = RowsOf { width, eps, weight, padded: &padded };
        let block = (x.len() / width).div_ceil(BLOCKS) * width;
        let mut parts = vec![ColumnSums::new(columns); x.len().div_ceil(block)];
        let of_x = parts_of(dx, block, parts.len());
        let items = parts.iter_mut().zip(of_x).zip(x.chunks(block).zip(dy.chunks(block)));
        cpu.for_each(x.len(), items, |((sums, dx), (x, dy))| short_rows(cpu, &row, [x, dy], sums, dx));
        let mut sums = ColumnSums::new(columns);
        parts.iter().for_each(|part| sums.add(part));
        sums
    }

    fn gradient_of_long(&self, cpu: &Cpu, dx: &mut [T]) {
        let &Backward { width, x, dy, eps, .. } = self;
        let weight = &*self.weight;
        let rows = x.chunks_exact(width).zip(dy.chunks_exact(width)).zip(dx.chunks_exact_mut(width));
        cpu.for_each(x.len(), rows, |((x, dy), dx)| {
            let mut group = Group::new();
            let standard = group.standards(cpu, x, width, eps)[0];
            // The place of the gradient holds g, and then g x^, until it is known what to subtract.
            let mut mean = |values: &[T]| {
                let [[rest, _], ..] = group.sums(cpu, values, width);
                T::of(values[0].f64() + rest / width as f64)
            };
            weigh(cpu, dy, weight, dx);
            let mean_g = mean(dx);
            multiply_by_normalized(cpu, standard, x, dx);
            let mean_normalized = mean(dx);
            group.means[0] = [mean_g, mean_normalized];
            write_gradients(cpu, &group, [x, dy], weight, dx);
        });
    }

    /// Columns are shared between tasks.
    fn sums_of_long(&self, cpu: &Cpu) -> ColumnSums {
        let &Backward { width, x, dy, eps, .. } = self;
        let mut sums = ColumnSums::new(width);
        let mut standards = vec![Standard::none(); x.len() / width];
        cpu.for_each(x.len(), standards.iter_mut().zip(x.chunks_exact(width)), |(standard, x)| {
            *standard = Group::new().standards(cpu, x, width, eps)[0];
        });
        let columns = sums.g.chunks_mut(LONG).zip(sums.g_normalized.chunks_mut(LONG)).enumerate();
        cpu.for_each(x.len(), columns, |(index, (g, g_normalized))| {
            for (row, &standard) in standards.iter().enumerate() {
                let start = row * width + index * LONG;
                let place = start..start + g.len();
                add_part(cpu, standard, [&x[place.clone()], &dy[place]], g, g_normalized);
            }
        });
        sums
    }
}

/// `count` parts of `len` elements, if there is an output.
fn parts_of<T>(output: Option<&mut [T]>, len: usize, count: usize) -> Vec<Option<&mut [T]>> {
    match output {
        Some(output) => output.chunks_mut(len).map(Some).collect(),
        None => (0..count).map(|_| None).collect(),
    }
}

/// What all rows of a backward pass share.
struct RowsOf<'a, T> {
    width: usize,
    eps: f64,
    weight: &'a [T],
    /// The weight, and zeros up to whole vectors.
    padded: &'a [T],
}

/// The normalisation of a row: x^ = (x - mean) * scale + shift. The shift makes up for the rounding of the mean.
#[derive(Clone, Copy)]
struct Standard<T> {
    mean: T,
    scale: T,
    shift: T,
}

impl<T: Element> Standard<T> {
    /// The place of a normalisation that is not known yet.
    fn none() -> Standard<T> {
        Standard { mean: T::zero(), scale: T::zero(), shift: T::zero() }
    }

    /// The normalisation of a row for which [`standardize`] is not fine: with all sums in f64, around the mean.
    #[cold]
    #[inline(never)]
    fn wide(x: &[T], eps: f64) -> Standard<T> {
        let count = x.len() as f64;
        let mean = x.iter().map(|x| x.f64()).sum::<f64>() / count;
        let variance = x.iter().map(|x| (x.f64() - mean) * (x.f64() - mean)).sum::<f64>() / count;
        Standard::new(mean, variance, eps)
    }

    #[inline(always)]
    fn new(mean: f64, variance: f64, eps: f64) -> Standard<T> {
        // A constant row without eps is 0 times this, and 0.
        let inverse_std = if variance == 0.0 && eps == 0.0 { 0.0 } else { 1.0 / (variance + eps).sqrt() };
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

/// [`LANES`] numbers that stay in registers. Arrays that loops change stay in memory.
#[derive(Clone, Copy)]
struct Lanes<T>([T; LANES]);

impl<T: Element> Lanes<T> {
    #[inline(always)]
    fn zero() -> Lanes<T> {
        Lanes([T::zero(); LANES])
    }

    #[inline(always)]
    fn map(mut self, f: impl Fn(T) -> T) -> Lanes<T> {
        for lane in 0..LANES {
            self.0[lane] = f(self.0[lane]);
        }
        self
    }

    #[inline(always)]
    fn add(mut self, other: Lanes<T>) -> Lanes<T> {
        for lane in 0..LANES {
            self.0[lane] += other.0[lane];
        }
        self
    }

    #[inline(always)]
    fn mul(mut self, by: Lanes<T>) -> Lanes<T> {
        for lane in 0..LANES {
            self.0[lane] *= by.0[lane];
        }
        self
    }

    /// self * by + other
    #[inline(always)]
    fn mul_add(self, by: Lanes<T>, mut other: Lanes<T>) -> Lanes<T> {
        for lane in 0..LANES {
            other.0[lane] = self.0[lane].mul_add(by.0[lane], other.0[lane]);
        }
        other
    }

    /// The first `len` lanes, and zeros.
    #[inline(always)]
    fn first(mut self, len: usize) -> Lanes<T> {
        for lane in 0..LANES {
            self.0[lane] = if lane < len { self.0[lane] } else { T::zero() };
        }
        self
    }
}

/// Two sums over a row, as sums of every [`LANES`]th value.
type Sums<T> = [[T; LANES]; 2];

/// Adds up the lanes. This is not inlined: next to the loops that fill the lanes, compilers keep these in single registers.
#[inline(never)]
fn totals<T: Element>(sums: &Sums<T>) -> [f64; 2] {
    let mut wide = [[0.0; LANES]; 2];
    for (wide, lanes) in wide.iter_mut().zip(sums) {
        for lane in 0..LANES {
            wide[lane] = lanes[lane].f64();
        }
    }
    [halved(wide[0]), halved(wide[1])]
}

/// What is known of the rows that are taken together.
struct Group<T> {
    sums: [Sums<T>; GROUP],
    standards: [Standard<T>; GROUP],
    /// The means of g and of g x^.
    means: [[T; 2]; GROUP],
}

impl<T: Element> Group<T> {
    fn new() -> Group<T> {
        let sums = [[[T::zero(); LANES]; 2]; GROUP];
        Group { sums, standards: [Standard::none(); GROUP], means: [[T::zero(); 2]; GROUP] }
    }

    /// The sums over each of up to [`GROUP`] rows of x - pilot and of its square, where the pilot is the row's first value.
    fn sums(&mut self, cpu: &Cpu, x: &[T], width: usize) -> [[f64; 2]; GROUP] {
        let rows = x.len() / width;
        let mut all = [[0.0; 2]; GROUP];
        for start in (0..width).step_by(RUN) {
            sum_rows(cpu, x, width, start..width.min(start + RUN), &mut self.sums[..rows]);
            for ([rest, square], sums) in all.iter_mut().zip(&self.sums[..rows]) {
                let [more_rest, more_square] = totals(sums);
                *rest += more_rest;
                *square += more_square;
            }
        }
        all
    }

    /// The normalisations of up to [`GROUP`] rows.
    fn standards(&mut self, cpu: &Cpu, x: &[T], width: usize, eps: f64) -> &[Standard<T>] {
        let sums = self.sums(cpu, x, width);
        let mut pilots = [0.0; GROUP];
        pilots.iter_mut().zip(x.chunks_exact(width)).for_each(|(pilot, x)| *pilot = x[0].f64());
        let fine = standardize(cpu, &sums, &pilots, (width as f64, eps), &mut self.standards);
        let rows = self.standards.iter_mut().zip(x.chunks_exact(width)).zip(fine);
        rows.filter(|(_, fine)| !fine).for_each(|((standard, x), _)| *standard = Standard::wide(x, eps));
        &self.standards[..x.len() / width]
    }
}

/// The end of a row as a vector, with zeros.
#[inline(always)]
fn padded<T: Element>(rest: &[T]) -> Lanes<T> {
    let mut vector = [T::zero(); LANES];
    vector[..rest.len()].copy_from_slice(rest);
    Lanes(vector)
}

/// What a task of a backward pass has for each column.
struct Columns<'a, T> {
    width: usize,
    /// The weight, and zeros up to whole vectors.
    weight: &'a [T],
    /// The sums of dy over some rows.
    g: Vec<T>,
    /// The sums of dy x^ over some rows.
    g_normalized: Vec<T>,
}

/// Backward of rows of at most [`LONG`] columns.
fn short_rows<T: Element>(
    cpu: &Cpu,
    of: &RowsOf<'_, T>,
    [x, dy]: [&[T]; 2],
    sums: &mut ColumnSums,
    mut dx: Option<&mut [T]>,
) {
    let &RowsOf { width, eps, weight, padded } = of;
    let zeros = || vec![T::zero(); padded.len()];
    let mut columns = Columns { width, weight: padded, g: zeros(), g_normalized: zeros() };
    let mut group = Group::new();
    for (index, (x, dy)) in x.chunks(GROUP * width).zip(dy.chunks(GROUP * width)).enumerate() {
        group.standards(cpu, x, width, eps);
        add_rows(cpu, &mut group, [x, dy], &mut columns);
        if let Some(dx) = &mut dx {
            let rows = group.means.iter_mut().zip(&group.sums).take(x.len() / width);
            rows.for_each(|(means, sums)| *means = totals(sums).map(|sum| T::of(sum / width as f64)));
            let start = index * GROUP * width;
            write_gradients(cpu, &group, [x, dy], weight, &mut dx[start..start + x.len()]);
        }
        move_columns(cpu, &mut columns, sums);
    }
}

multiversion! {
    /// The sums of x - pilot and of its square over some columns of each row; the pilot is the row's first value.
    fn sum_rows<T: Element>(x: &[T], width: usize, columns: Range<usize>, sums: &mut [Sums<T>]) {
        for (x, sums) in x.chunks_exact(width).zip(sums) {
            let pilot = x[0];
            let (vectors, last) = x[columns.clone()].as_chunks();
            let (mut rest, mut square) = (Lanes::zero(), Lanes::zero());
            for &vector in vectors {
                let d = Lanes(vector).map(|x| x - pilot);
                rest = rest.add(d);
                square = square.add(d.mul(d));
            }
            if !last.is_empty() {
                let d = padded(last).map(|x| x - pilot).first(last.len());
                rest = rest.add(d);
                square = square.add(d.mul(d));
            }
            *sums = [rest.0, square.0];
        }
    }

    /// The normalisations that follow from sums of x - pilot and of its square, and whether each has enough digits.
    fn standardize<T: Element>(
        sums: &[[f64; 2]; GROUP], pilots: &[f64; GROUP], count_eps: (f64, f64), standards: &mut [Standard<T>; GROUP],
    ) -> [bool; GROUP] {
        let (count, eps) = count_eps;
        let mut fine = [false; GROUP];
        for row in 0..GROUP {
            let (rest, square) = (sums[row][0] / count, sums[row][1] / count);
            let variance = square - rest * rest;
            // Digits cancel where the pilot is far off. Squares of very small and large values may not be numbers of type T.
            fine[row] = (rest * rest < 8.0 * variance) & (variance > 1e-30) & (variance < 1e30);
            standards[row] = Standard::new(pilots[row] + rest, variance, eps);
        }
        fine
    }

    fn write_rows<T: Element>(standards: &[Standard<T>], x: &[T], affine: [&[T]; 2], y: &mut [T]) {
        let [weight, bias] = affine;
        let rows = x.chunks_exact(weight.len()).zip(y.chunks_exact_mut(weight.len()));
        for (standard, (x, y)) in standards.iter().zip(rows) {
            for (((y, &x), &weight), &bias) in y.iter_mut().zip(x).zip(weight).zip(bias) {
                *y = standard.at(x).mul_add(weight, bias);
            }
        }
    }

    /// Adds dy and dy x^ to sums by column, and gives the sums of both times the weight over each row.
    fn add_rows<T: Element>(group: &mut Group<T>, x_dy: [&[T]; 2], columns: &mut Columns<'_, T>) {
        let [x, dy] = x_dy;
        let width = columns.width;
        let weights = columns.weight.as_chunks::<LANES>().0;
        let rows = x.chunks_exact(width).zip(dy.chunks_exact(width));
        for ((&standard, sums), (x, dy)) in group.standards.iter().zip(&mut group.sums).zip(rows) {
            let ((x, x_last), (dy, dy_last)) = (x.as_chunks::<LANES>(), dy.as_chunks::<LANES>());
            let (g, g_normalized) =
                (columns.g.as_chunks_mut::<LANES>().0, columns.g_normalized.as_chunks_mut::<LANES>().0);
            let (mut row_g, mut row_normalized) = (Lanes::zero(), Lanes::zero());
            let columns = g.iter_mut().zip(g_normalized.iter_mut()).zip(weights);
            for ((&x, &dy), ((g, g_normalized), &weight)) in x.iter().zip(dy).zip(columns) {
                let (dy, weight) = (Lanes(dy), Lanes(weight));
                let normalized = Lanes(x).map(|x| standard.at(x)).mul(dy);
                *g = Lanes(*g).add(dy).0;
                *g_normalized = Lanes(*g_normalized).add(normalized).0;
                row_g = dy.mul_add(weight, row_g);
                row_normalized = normalized.mul_add(weight, row_normalized);
            }
            if !x_last.is_empty() {
                let (dy, place) = (padded(dy_last), x.len());
                let normalized = padded(x_last).map(|x| standard.at(x)).mul(dy);
                g[place] = Lanes(g[place]).add(dy).0;
                g_normalized[place] = Lanes(g_normalized[place]).add(normalized).0;
                row_g = dy.mul_add(Lanes(weights[place]), row_g);
                row_normalized = normalized.mul_add(Lanes(weights[place]), row_normalized);
            }
            *sums = [row_g.0, row_normalized.0];
        }
    }

    /// Adds sums by column to others, and makes them 0.
    fn move_columns<T: Element>(columns: &mut Columns<'_, T>, sums: &mut ColumnSums) {
        let pairs = [(&mut sums.g, &mut columns.g), (&mut sums.g_normalized, &mut columns.g_normalized)];
        for (sums, columns) in pairs {
            for (sum, column) in sums.iter_mut().zip(columns) {
                *sum += column.f64();
                *column = T::zero();
            }
        }
    }

    /// The gradients of rows whose means of g and g x^ are known.
    fn write_gradients<T: Element>(group: &Group<T>, x_dy: [&[T]; 2], weight: &[T], dx: &mut [T]) {
        let ([x, dy], width) = (x_dy, weight.len());
        let rows = x.chunks_exact(width).zip(dy.chunks_exact(width)).zip(dx.chunks_exact_mut(width));
        let known = group.standards.iter().zip(&group.means);
        for ((standard, &[mean_g, mean_normalized]), ((x, dy), dx)) in known.zip(rows) {
            for (((dx, &x), &dy), &weight) in dx.iter_mut().zip(x).zip(dy).zip(weight) {
                *dx = (dy * weight - mean_g - standard.at(x) * mean_normalized) * standard.scale;
            }
        }
    }

    /// g = dy weight, and then g x^.
    fn weigh<T: Element>(dy: &[T], weight: &[T], g: &mut [T]) {
        for ((g, &dy), &weight) in g.iter_mut().zip(dy).zip(weight) {
            *g = dy * weight;
        }
    }

    fn multiply_by_normalized<T: Element>(standard: Standard<T>, x: &[T], g: &mut [T]) {
        for (g, &x) in g.iter_mut().zip(x) {
            *g *= standard.at(x);
        }
    }

    /// Adds dy and dy x^ of a part of a row to sums by column.
    fn add_part<T: Element>(
        standard: Standard<T>, x_dy: [&[T]; 2], g: &mut [f64], g_normalized: &mut [f64],
    ) {
        let [x, dy] = x_dy;
        for (((&x, &dy), g), g_normalized) in x.iter().zip(dy).zip(g).zip(g_normalized) {
            *g += dy.f64();
            *g_normalized += dy.f64() * standard.at(x).f64();
        }
    }
}
