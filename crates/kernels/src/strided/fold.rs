//! Sums, products, largest and smallest values over some of a walk's axes.

use super::{BLOCK, Cut, Gathered, Level, Map, OPERANDS, Part, TASK, Walk, WalkBlock, gathered};
use crate::channels::LANES;
use crate::element::PieceOf;
use crate::isa::multiversion;
use crate::profile::span;
use crate::{Cpu, Element, Result, SliceMut, Stored, dispatch_stored};

/// How elements are put together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fold {
    /// The sum of the elements; 0 of none.
    Sum,
    /// The product of the elements; 1 of none.
    Product,
    /// The largest, or NaN if any is; minus infinity of none.
    Max,
    /// The smallest, or NaN if any is; infinity of none.
    Min,
}

/// A fold, and what its result is divided by.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Reduction {
    /// How elements are put together, in f64.
    pub fold: Fold,
    /// The result is divided by this: the number of elements for a mean.
    pub divisor: f64,
}

/// A [`Fold`] as a type, so that each has loops of its own.
trait Step: Copy + Send + Sync {
    const NEUTRAL: f64;

    fn step(sum: f64, x: f64) -> f64;
}

macro_rules! steps {
    ($($name:ident: $neutral:expr, |$sum:ident, $x:ident| $body:expr;)*) => {
        $(
            #[derive(Clone, Copy)]
            struct $name;

            impl Step for $name {
                const NEUTRAL: f64 = $neutral;

                #[inline(always)]
                fn step($sum: f64, $x: f64) -> f64 {
                    $body
                }
            }
        )*

        impl Fold {
            /// What a fold begins with.
            fn neutral(self) -> f64 {
                match self {
                    $(Fold::$name => $name::NEUTRAL,)*
                }
            }

            fn step(self, sum: f64, x: f64) -> f64 {
                match self {
                    $(Fold::$name => $name::step(sum, x),)*
                }
            }

            /// Folds each row of `columns` elements into the sum at its place.
            fn rows<T: Element>(self, cpu: &Cpu, columns: usize, x: &[T], sums: &mut [f64]) {
                match self {
                    $(Fold::$name => fold_rows(cpu, $name, columns, x, sums),)*
                }
            }

            /// Folds each row into the row of sums.
            fn columns<T: Element>(self, cpu: &Cpu, x: &[T], sums: &mut [f64]) {
                match self {
                    $(Fold::$name => fold_columns(cpu, $name, x, sums),)*
                }
            }
        }
    };
}

steps! {
    Sum: 0.0, |sum, x| sum + x;
    Product: 1.0, |sum, x| sum * x;
    Max: f64::NEG_INFINITY, |sum, x| if x > sum || x.is_nan() { x } else { sum };
    Min: f64::INFINITY, |sum, x| if x < sum || x.is_nan() { x } else { sum };
}

multiversion! {
    fn fold_rows<T: Element, S: Step>(_step: S, columns: usize, x: &[T], sums: &mut [f64]) {
        for (row, sum) in x.chunks_exact(columns).zip(sums) {
            // The number of lanes is fixed, so that every instruction set adds in the same order.
            let mut lanes = [S::NEUTRAL; LANES];
            let mut chunks = row.chunks_exact(LANES);
            for chunk in &mut chunks {
                for (lane, &x) in lanes.iter_mut().zip(chunk) {
                    *lane = S::step(*lane, x.f64());
                }
            }
            for (lane, &x) in lanes.iter_mut().zip(chunks.remainder()) {
                *lane = S::step(*lane, x.f64());
            }
            let used = &lanes[..columns.min(LANES)];
            *sum = S::step(*sum, used.iter().fold(S::NEUTRAL, |sum, &lane| S::step(sum, lane)));
        }
    }

    fn fold_columns<T: Element, S: Step>(_step: S, x: &[T], sums: &mut [f64]) {
        let mut x = x;
        if sums.len() < LANES {
            // Several short rows at a time, so that the additions vectorise.
            let mut lanes = [S::NEUTRAL; 4 * LANES];
            let lanes = &mut lanes[..4 * LANES / sums.len() * sums.len()];
            let mut chunks = x.chunks_exact(lanes.len());
            for chunk in &mut chunks {
                for (lane, &x) in lanes.iter_mut().zip(chunk) {
                    *lane = S::step(*lane, x.f64());
                }
            }
            for row in lanes.chunks_exact(sums.len()) {
                sums.iter_mut().zip(row).for_each(|(sum, &lane)| *sum = S::step(*sum, lane));
            }
            x = chunks.remainder();
        }
        for row in x.chunks_exact(sums.len()) {
            for (sum, &x) in sums.iter_mut().zip(row) {
                *sum = S::step(*sum, x.f64());
            }
        }
    }
}

/// Outputs of a walk that is split between tasks by its elements, each with sums of its own for all outputs.
const FEW: usize = 1 << 12;

/// The most tasks that such a walk is split into: their number must not depend on the threads.
const SHARES: usize = 64;

impl Walk<'_> {
    /// y = the fold over the axes that are not kept, of the function of the operands.
    ///
    /// It is taken in f64, in an order that depends only on the sizes and strides.
    ///
    /// # Errors
    /// If y's length is not that of the kept axes, or its type not that of the operands.
    pub fn fold(&self, cpu: &Cpu, function: Map, reduction: Reduction, y: SliceMut<'_>) -> Result<()> {
        span!("fold", *self, y);
        self.check(function, &y)?;
        dispatch_stored!(y.dtype(), S => self.typed_fold::<S>(cpu, function, reduction, y.of()?))
    }

    fn typed_fold<S: Stored>(
        &self,
        cpu: &Cpu,
        function: Map,
        reduction: Reduction,
        y: &mut [S],
    ) -> Result<()> {
        let operands = self.typed_operands::<S>()?;
        let Reduction { fold, divisor } = reduction;
        let by = (function, fold);
        let write = |y: &mut [S], sums: &[f64]| {
            y.iter_mut().zip(sums).for_each(|(y, sum)| *y = S::of(sum / divisor));
        };
        if self.len == 0 {
            cpu.for_each(0, std::iter::once(y), |y| y.fill(S::of(fold.neutral() / divisor)));
            return Ok(());
        }
        let levels = outputs_first(&self.levels);
        let kept: Vec<usize> = (0..levels.len()).filter(|&level| levels[level].out > 0).collect();
        let in_order = levels == self.levels;
        let cut = Cut::new(&levels, &kept, TASK, BLOCK);
        if self.outputs <= FEW && self.len / 16 >= self.outputs && !(in_order && cut.parts() >= 16) {
            let all: Vec<usize> = (0..self.levels.len()).collect();
            let cut = Cut::new(&self.levels, &all, TASK.max(self.len / SHARES), 1);
            let mut sums: Vec<Vec<f64>> = vec![Vec::new(); cut.parts()];
            cpu.for_each(self.len, sums.iter_mut().enumerate(), |(index, sums)| {
                *sums = vec![fold.neutral(); self.outputs];
                fold_part(cpu, &operands, by, &cut.part(index), sums);
            });
            cpu.for_each(0, std::iter::once(y), |y| {
                let mut totals = vec![fold.neutral(); self.outputs];
                for sums in &sums {
                    totals.iter_mut().zip(sums).for_each(|(total, sum)| *total = fold.step(*total, *sum));
                }
                write(y, &totals);
            });
            return Ok(());
        }
        cpu.for_each(self.len, cut.outputs(y).enumerate(), |(index, y)| {
            let mut sums = vec![fold.neutral(); y.len()];
            let part = Part { out: 0, ..cut.part(index) };
            fold_part(cpu, &operands, by, &part, &mut sums);
            write(y, &sums);
        });
        Ok(())
    }
}

fn fold_part<S: Stored>(
    cpu: &Cpu,
    operands: &[&[S]; OPERANDS],
    (function, fold): (Map, Fold),
    part: &Part,
    sums: &mut [f64],
) {
    let mut buffers = [const { Gathered::new() }; OPERANDS];
    let mut values = [S::Compute::default(); BLOCK];
    part.blocks(|block| {
        let values = &mut values[..block.rows * block.columns];
        let operands = gathered(function.operands(), operands, &mut buffers, block);
        S::Compute::read((cpu, 1), operands, |start, operands| {
            function.write(cpu, operands, &mut values[start..][..operands[0].len()]);
        });
        let &WalkBlock { rows, columns, out, out_strides, .. } = block;
        match out_strides {
            // One sum of all.
            [0, 0] => fold.rows(cpu, rows * columns, values, &mut sums[out..=out]),
            [1, 0] => fold.rows(cpu, columns, values, &mut sums[out..out + rows]),
            [stride, 0] => {
                for (row, values) in values.chunks_exact(columns).enumerate() {
                    let at = out + row * stride;
                    fold.rows(cpu, columns, values, &mut sums[at..=at]);
                }
            }
            [0, _] => fold.columns(cpu, values, &mut sums[out..out + columns]),
            [stride, _] => {
                for (row, values) in values.chunks_exact(columns).enumerate() {
                    fold.columns(cpu, values, &mut sums[out + row * stride..][..columns]);
                }
            }
        }
    });
}

/// The levels in an order in which all elements of an output, or of a row of outputs, follow one another: kept ones, summed
/// ones, and the innermost one last if it is kept.
fn outputs_first(levels: &[Level]) -> Vec<Level> {
    let is_kept = |level: &&Level| level.out > 0;
    let (outer, inner) = match levels.split_last() {
        Some((inner, outer)) if inner.out > 0 => (outer, Some(inner)),
        _ => (levels, None),
    };
    let summed = outer.iter().filter(|level| !is_kept(level));
    outer.iter().filter(is_kept).chain(summed).chain(inner).copied().collect()
}
