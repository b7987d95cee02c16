//! Shapes whose sizes may be those of the batch.

use convoke_autograd::Result;

use super::super::{Along, Arithmetic, Op, Reshape, Shape};
use super::translation::{Step, Translation};
use super::{BATCHES, refused};

/// A size, from what it is in both runs.
enum Size {
    Fixed(usize),
    /// So many times the batch.
    OfBatch(usize),
}

fn size([first, second]: [usize; 2]) -> Option<Size> {
    let [of_first, of_second] = BATCHES;
    match (first, second) {
        _ if first == second => Some(Size::Fixed(first)),
        _ if first % of_first == 0 && second % of_second == 0 && first / of_first == second / of_second => {
            Some(Size::OfBatch(first / of_first))
        }
        _ => None,
    }
}

impl Translation<'_> {
    /// A list of sizes, as a value.
    pub(super) fn sizes(&mut self, [first, second]: [&[usize]; 2]) -> Result<String> {
        let all: Option<Vec<Size>> = first.iter().zip(second).map(|(&a, &b)| size([a, b])).collect();
        let Some(all) = all else {
            return refused(format!(
                "for batches of {BATCHES:?} a shape is {first:?} and {second:?}: its sizes are neither constant nor multiples of the \
                 batch"
            ));
        };
        let fixed: Option<Vec<i64>> = all
            .iter()
            .map(|size| if let Size::Fixed(size) = size { Some(*size as i64) } else { None })
            .collect();
        if let Some(fixed) = fixed {
            return Ok(self.integers(fixed));
        }
        let parts = all
            .into_iter()
            .map(|size| match size {
                Size::Fixed(size) => self.integers([size as i64]),
                Size::OfBatch(times) => {
                    let batch = self.batch_size();
                    let times = self.integers([times as i64]);
                    self.named("batch_times", Op::Arithmetic(Arithmetic::Mul), vec![batch, times])
                }
            })
            .collect();
        Ok(self.named("sizes", Op::Concat(Along { axis: 0 }), parts))
    }

    /// The size of the batch, as a list of one.
    fn batch_size(&mut self) -> String {
        if let Some(name) = &self.batch {
            return name.clone();
        }
        let input = self.input();
        let name = self.named("batch_size", Op::Shape(Shape { start: 0, end: Some(1) }), vec![input]);
        self.batch = Some(name.clone());
        name
    }

    /// The elements in another shape; the shapes are given for both runs.
    pub(super) fn reshaped(
        &mut self,
        step: &Step<'_>,
        x: String,
        [from, to]: [[Vec<usize>; 2]; 2],
    ) -> Result<String> {
        if from == to {
            return Ok(x);
        }
        let kept = |axis: usize| from.iter().zip(&to).all(|(from, to)| from.get(axis) == to.get(axis));
        if to[0].len() == 2 && from[0].len() >= 2 && kept(0) {
            return Ok(self.node(step, Op::Flatten(Along { axis: 1 }), vec![x]));
        }
        let fixed = |axis: usize| to[0][axis] == to[1][axis];
        let rank = to[0].len();
        let open = (0..rank).filter(|&axis| !fixed(axis) && !kept(axis)).count();
        let sizes = if open <= 1 && !to.iter().flatten().any(|&size| size == 0) {
            let number = |axis: usize| match axis {
                _ if fixed(axis) => to[0][axis] as i64,
                _ if kept(axis) => 0,
                _ => -1,
            };
            self.integers((0..rank).map(number))
        } else {
            self.sizes([&to[0], &to[1]])?
        };
        let allow_zero = to.iter().flatten().any(|&size| size == 0);
        Ok(self.node(step, Op::Reshape(Reshape { allow_zero }), vec![x, sizes]))
    }

    /// The elements repeated to the shape of the call's output.
    pub(super) fn expanded(&mut self, step: &Step<'_>, x: String, from: [&[usize]; 2]) -> Result<String> {
        // A size of 1 keeps the size of x.
        let to = [0, 1].map(|run| {
            let missing = step.to[run].len() - from[run].len();
            let own = |axis: usize| axis >= missing && from[run][axis - missing] == step.to[run][axis];
            (0..step.to[run].len())
                .map(|axis| if own(axis) { 1 } else { step.to[run][axis] })
                .collect::<Vec<usize>>()
        });
        let sizes = self.sizes([&to[0], &to[1]])?;
        Ok(self.node(step, Op::Expand, vec![x, sizes]))
    }
}
