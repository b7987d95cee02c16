//! Sums, means, products, largest and smallest elements over some of the axes.

use convoke_kernels::strided::{Fold, Map, Reduction};

use super::broadcast::Over;
use super::{checked_axes, contiguous_as};
use crate::error::invalid;
use crate::{DType, Function, MemoryFormat, Needs, Operation, ReduceKind, Result, Tensor, apply};

impl Tensor {
    /// The sum over axes, which count from the last if negative; over all of them if `axes` is empty. `keep` leaves them in the
    /// shape, with size 1. PyTorch's `sum` with `dim`.
    ///
    /// The result keeps the memory format as long as it has the first two axes and another one.
    ///
    /// # Errors
    /// If there is no such axis, or one is named twice.
    pub fn sum_dims(&self, axes: &[isize], keep: bool) -> Result<Tensor> {
        reduce((Fold::Sum, false), self, axes, keep)
    }

    /// The mean over axes, otherwise as [`Tensor::sum_dims`]; NaN of no elements.
    ///
    /// # Errors
    /// As [`Tensor::sum_dims`].
    pub fn mean_dims(&self, axes: &[isize], keep: bool) -> Result<Tensor> {
        reduce((Fold::Sum, true), self, axes, keep)
    }

    /// The product over axes, otherwise as [`Tensor::sum_dims`].
    ///
    /// # Errors
    /// As [`Tensor::sum_dims`].
    pub fn prod(&self, axes: &[isize], keep: bool) -> Result<Tensor> {
        reduce((Fold::Product, false), self, axes, keep)
    }

    /// The largest element over axes, NaN if there is one, otherwise as [`Tensor::sum_dims`]. Equal largest elements share the
    /// gradient evenly.
    ///
    /// # Errors
    /// As [`Tensor::sum_dims`]; if there are no elements to choose from.
    pub fn amax(&self, axes: &[isize], keep: bool) -> Result<Tensor> {
        reduce((Fold::Max, false), self, axes, keep)
    }

    /// The smallest element over axes, otherwise as [`Tensor::amax`].
    ///
    /// # Errors
    /// As [`Tensor::amax`].
    pub fn amin(&self, axes: &[isize], keep: bool) -> Result<Tensor> {
        reduce((Fold::Min, false), self, axes, keep)
    }
}

fn reduce((fold, mean): (Fold, bool), x: &Tensor, axes: &[isize], keep: bool) -> Result<Tensor> {
    let name = match fold {
        Fold::Sum if mean => "mean_dims",
        Fold::Sum => "sum_dims",
        Fold::Product => "prod",
        Fold::Max => "amax",
        Fold::Min => "amin",
    };
    let axes = checked_axes(name, axes, x.shape())?;
    let kept: Vec<bool> =
        (0..x.shape().len()).map(|axis| !axes.is_empty() && !axes.contains(&axis)).collect();
    let count: usize =
        x.shape().iter().zip(&kept).filter(|(_, kept)| !**kept).map(|(&size, _)| size).product();
    if count == 0 && matches!(fold, Fold::Max | Fold::Min) {
        let reason = format!("the axes of {:?} that are taken together hold no elements", x.shape());
        return Err(invalid(name, reason));
    }
    let divisor = if mean { count as f64 } else { 1.0 };
    apply(Reduce { name, reduction: Reduction { fold, divisor }, mean, kept, keep }, &[x])
}

struct Reduce {
    name: &'static str,
    reduction: Reduction,
    /// Whether a sum is divided by the number of its elements.
    mean: bool,
    /// Which axes stay.
    kept: Vec<bool>,
    /// Whether the others stay with size 1.
    keep: bool,
}

#[derive(Clone)]
struct SavedReduce {
    /// The input, unless its shape suffices.
    x: Option<Tensor>,
    /// The largest or smallest elements, in the input's format, with sizes of 1.
    extreme: Option<Tensor>,
    shape: Vec<usize>,
    format: MemoryFormat,
}

impl Reduce {
    /// The shape with sizes of 1, and without.
    fn shapes(&self, x: &[usize]) -> [Vec<usize>; 2] {
        let ones = x.iter().zip(&self.kept).map(|(&size, &kept)| if kept { size } else { 1 });
        let kept = x.iter().zip(&self.kept).filter(|(_, kept)| **kept).map(|(&size, _)| size);
        [ones.collect(), kept.collect()]
    }

    /// `y`, whose shape has sizes of 1, without these, if they do not stay.
    fn dropped(&self, y: &Tensor, shape: &[usize]) -> Result<Tensor> {
        // Batch and channels stay where they are in memory if only spatial axes go.
        let spatial = self.kept.iter().take(2).all(|&kept| kept) && shape.len() > 2;
        match (self.keep, spatial) {
            (true, _) => Ok(y.constant()),
            (false, true) => Ok(y.relabeled(shape, y.format())),
            (false, false) => contiguous_as(y, shape),
        }
    }
}

impl Function for Reduce {
    type Saved = SavedReduce;

    fn name(&self) -> &'static str {
        self.name
    }

    fn describe(&self) -> Option<Operation> {
        let axes = (0..self.kept.len()).filter(|&axis| !self.kept[axis]).collect();
        let kind = match self.reduction.fold {
            Fold::Sum if self.mean => ReduceKind::Mean,
            Fold::Sum => ReduceKind::Sum,
            Fold::Product => ReduceKind::Prod,
            Fold::Max => ReduceKind::Max,
            Fold::Min => ReduceKind::Min,
        };
        Some(Operation::Reduce { kind, axes, keep: self.keep })
    }

    /// The other folds have more than one step to the gradient: rounded between them, it would not be that of the elements.
    fn takes(&self, _: usize, dtype: DType) -> bool {
        dtype.computes() || self.reduction.fold == Fold::Sum
    }

    fn forward(&self, inputs: &[&Tensor], needs: &Needs) -> Result<(Tensor, SavedReduce)> {
        let x = inputs[0];
        let over = Over { operation: self.name(), shape: x.shape(), format: x.format() };
        let y = over.fold(&self.kept, self.reduction, (Map::Value, [x]))?;
        let output = self.dropped(&y, &self.shapes(x.shape())[1])?;
        let is_extreme = matches!(self.reduction.fold, Fold::Max | Fold::Min);
        let reads_x = is_extreme || self.reduction.fold == Fold::Product;
        let saved = SavedReduce {
            x: (reads_x && needs.any()).then(|| x.constant()),
            extreme: (is_extreme && needs.any()).then_some(y),
            shape: x.shape().to_vec(),
            format: x.format(),
        };
        Ok((output, saved))
    }

    fn backward(&self, saved: SavedReduce, upstream: Tensor, _: &Needs) -> Result<Vec<Option<Tensor>>> {
        let SavedReduce { x, extreme, shape, format } = saved;
        let [ones, _] = self.shapes(&shape);
        let dy = match self.keep {
            true => upstream,
            false => contiguous_as(&upstream, &ones)?,
        };
        let over = Over { operation: self.name(), shape: &shape, format };
        let small = Over { shape: &ones, ..over };
        let x = || x.as_ref().expect("saved for this gradient");
        let sum = Reduction { fold: Fold::Sum, divisor: 1.0 };
        let dx = match self.reduction.fold {
            Fold::Sum if self.mean => over.map(Map::Scale(1.0 / self.reduction.divisor), [&dy]),
            Fold::Sum => over.map(Map::Value, [&dy]),
            Fold::Max | Fold::Min => {
                let y = extreme.expect("saved for this gradient");
                let equal = over.fold(&self.kept, sum, (Map::Equal, [x(), &y]))?;
                let share = small.map(Map::Divide, [&dy, &equal])?;
                over.map(Map::OfEqual, [x(), &y, &share])
            }
            Fold::Product => {
                let product = Reduction { fold: Fold::Product, divisor: 1.0 };
                // The product of the factors that are not 0, and how many are.
                let product = over.fold(&self.kept, product, (Map::NonZero, [x()]))?;
                let zeros = over.fold(&self.kept, sum, (Map::Zero, [x()]))?;
                let without = small.map(Map::WhereZero, [&dy, &product, &zeros])?;
                let one = small.map(Map::WhereOne, [&dy, &product, &zeros])?;
                over.map(Map::OfProduct, [x(), &without, &one])
            }
        };
        Ok(vec![Some(dx?)])
    }
}
