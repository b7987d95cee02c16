//! Convolution of f32 tensors by units that multiply bf16: each number is rounded to bf16, or is the sum of two of them.
//!
//! ```text
//! x = high + low    high is the bf16 nearest to x, and low the one nearest to what is left
//! x w ≈ x.high w.high + x.low w.high + x.high w.low
//! ```
//! The three products are one sum: forward and backward-data have three times as many channels to sum over (`high`, `low`, `high` of x times
//! `high`, `high`, `low` of the weight), backward-weights three times as many images. What is left out, and the roundings of `low`, are some
//! 2⁻¹⁷ of a product. After Henry, Tang, Heinecke: "Leveraging the bfloat16 Artificial Intelligence Datatype For Higher-Precision
//! Computations", 2019.

use std::sync::Arc;

use half::bf16;

use super::{Kernel, MOST_ELEMENTS, Unit, check, cost, kernel, too_large};
use crate::conv::plan::{self, Accuracy, ConvAlgorithm, ConvPlan, NotApplicable, TypedKernel};
use crate::conv::problem::{ConvProblem, ConvTypes, Pass};
use crate::conv::workspace::{LINE, aligned};
use crate::isa::multiversion;
use crate::{Cpu, DType, MemoryFormat, Stored};

/// How numbers of f32 are multiplied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::conv) enum Products {
    /// Three products of bf16 for each.
    Three,
    /// One of numbers that are rounded to bf16.
    One,
}

impl Products {
    /// The parts of the operand that is split, and those of the other one.
    fn parts(self) -> [&'static [Part]; 2] {
        match self {
            Products::Three => [&[Part::High, Part::Low, Part::High], &[Part::High, Part::High, Part::Low]],
            Products::One => [&[Part::High]; 2],
        }
    }

    fn count(self) -> usize {
        self.parts()[0].len()
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Part {
    High,
    Low,
}

/// Convolution of f32 tensors by one of the units.
pub(in crate::conv) struct Split {
    pub(in crate::conv) unit: Unit,
    pub(in crate::conv) products: Products,
}

impl ConvAlgorithm for Split {
    fn name(&self) -> &'static str {
        match (self.unit, self.products) {
            (Unit::Dot, Products::Three) => "bf16-dot-split",
            (Unit::Dot, Products::One) => "bf16-dot-rounded",
            (Unit::Tiles, Products::Three) => "bf16-amx-split",
            (Unit::Tiles, Products::One) => "bf16-amx-rounded",
        }
    }

    fn revision(&self) -> u32 {
        2
    }

    fn accuracy(&self, _: &ConvTypes) -> Accuracy {
        match self.products {
            Products::Three => Accuracy::Relaxed,
            Products::One => Accuracy::Rounded,
        }
    }

    fn formats(&self) -> &'static [MemoryFormat] {
        &[MemoryFormat::ChannelsLast]
    }

    fn plan(&self, problem: &ConvProblem, pass: Pass, cpu: &Cpu) -> Result<ConvPlan, NotApplicable> {
        check(problem, DType::F32, (self.unit, cpu))?;
        let count = self.products.count();
        let longer = problem.with(|spec| match pass {
            Pass::Forward => spec.in_channels *= count,
            Pass::BackwardData => spec.out_channels *= count,
            Pass::BackwardWeights => spec.batch *= count,
        });
        let longer = longer.map_err(|error| NotApplicable(error.to_string()))?;
        let (inner_len, inner) = kernel(&longer, pass, (self.unit, cpu)).ok_or_else(too_large)?;
        let parts =
            SplitKernel { problem: *problem, longer, pass, products: self.products, inner_len, inner };
        let len = parts.workspace_len().filter(|&len| len <= MOST_ELEMENTS).ok_or_else(too_large)?;
        let cost = cost(self.unit, problem, pass);
        let cost = plan::Cost { efficiency: cost.efficiency / count as f64, ..cost };
        let copies = parts.copies().iter().sum::<usize>() * size_of::<f32>();
        let plan = ConvPlan::new(self, (problem, pass), cpu, len, plan::kernel::<f32>(parts));
        Ok(plan.with_cost(cost.moving(2 * copies)))
    }
}

struct SplitKernel {
    problem: ConvProblem,
    /// The problem with more channels, or more images.
    longer: ConvProblem,
    pass: Pass,
    products: Products,
    inner_len: usize,
    inner: Kernel,
}

impl SplitKernel {
    /// Floats of the copies of both operands. A weight stays f32, as it is rounded where it is packed.
    fn copies(&self) -> [usize; 2] {
        let [x, weight, y] = [self.longer.input_len(), self.longer.weight_len(), self.longer.output_len()];
        let halves = |len: usize| len.div_ceil(2).next_multiple_of(LINE);
        let weight = if self.products == Products::One { 0 } else { weight.next_multiple_of(LINE) };
        match self.pass {
            Pass::Forward => [halves(x), weight],
            Pass::BackwardData => [halves(y), weight],
            Pass::BackwardWeights => [halves(x), halves(y)],
        }
    }

    fn workspace_len(&self) -> Option<usize> {
        let [first, second] = self.copies();
        LINE.checked_add(first)?.checked_add(second)?.checked_add(self.inner_len)
    }

    /// The weight with the parts of each of its channels, in the places where the copy of the other operand has them.
    fn split_weight(&self, cpu: &Cpu, weight: &[f32], to: &mut [f32]) {
        let parts = self.products.parts()[1];
        let [outputs, of_output] =
            [self.problem.group_out_channels(), weight.len() / self.problem.out_channels];
        // The runs of the weight whose copies follow one another.
        let run = if self.pass == Pass::Forward { of_output } else { outputs * of_output };
        let runs = weight.chunks_exact(run).zip(to.chunks_exact_mut(parts.len() * run));
        cpu.for_each(weight.len(), runs, |(from, to)| {
            for (part, to) in parts.iter().zip(to.chunks_exact_mut(run)) {
                match part {
                    Part::High => to.copy_from_slice(from),
                    Part::Low => write(cpu, from, Part::Low, to),
                }
            }
        });
    }
}

impl TypedKernel<f32> for SplitKernel {
    fn run(&self, cpu: &Cpu, [a, b]: [&[f32]; 2], output: &mut [f32], workspace: &mut [f32]) {
        let [first_len, second_len] = self.copies();
        let (first, rest) = aligned(workspace).split_at_mut(first_len);
        let (second, inner) = rest.split_at_mut(second_len);
        let [parts, other_parts] = self.products.parts();
        let first = &mut bytemuck::cast_slice_mut::<f32, bf16>(first)[..parts.len() * a.len()];
        if self.pass == Pass::BackwardWeights {
            let second = &mut bytemuck::cast_slice_mut::<f32, bf16>(second)[..parts.len() * b.len()];
            split(cpu, a, (parts, a.len()), first);
            split(cpu, b, (other_parts, b.len()), second);
            return self.inner.sum(cpu, [first, second], output, inner);
        }
        let channels = match self.pass {
            Pass::Forward => self.problem.group_in_channels(),
            _ => self.problem.group_out_channels(),
        };
        split(cpu, a, (parts, channels), first);
        let weight = match self.products {
            Products::One => b,
            Products::Three => {
                let weight = &mut second[..parts.len() * b.len()];
                self.split_weight(cpu, b, weight);
                weight
            }
        };
        self.inner.correlate(cpu, (first, weight), output, inner);
    }
}

/// Numbers of a task.
const TASK: usize = 1 << 14;

/// Writes the parts of each run of numbers, one after the other.
fn split(cpu: &Cpu, from: &[f32], (parts, run): (&[Part], usize), to: &mut [bf16]) {
    if run >= TASK {
        for (from, to) in from.chunks_exact(run).zip(to.chunks_exact_mut(parts.len() * run)) {
            for (&part, to) in parts.iter().zip(to.chunks_exact_mut(run)) {
                let pieces = from.chunks(TASK).zip(to.chunks_mut(TASK));
                cpu.for_each(run, pieces, |(from, to)| write(cpu, from, part, to));
            }
        }
        return;
    }
    let piece = TASK / run * run;
    let pieces = from.chunks(piece).zip(to.chunks_mut(parts.len() * piece));
    cpu.for_each(from.len(), pieces, |(from, to)| {
        for (from, to) in from.chunks_exact(run).zip(to.chunks_exact_mut(parts.len() * run)) {
            for (&part, to) in parts.iter().zip(to.chunks_exact_mut(run)) {
                write(cpu, from, part, to);
            }
        }
    });
}

/// The nearest bf16; the next one towards zero if the nearest is infinite and the number is not.
#[inline(always)]
fn high(x: f32) -> bf16 {
    let nearest = bf16::nearest(x);
    let truncated = bf16::from_bits((x.to_bits() >> 16) as u16);
    if nearest.wide().is_infinite() { truncated } else { nearest }
}

/// What is left of a number; nothing of one that is not finite.
#[inline(always)]
fn low(x: f32) -> f32 {
    let rest = x - high(x).wide();
    if rest.is_nan() { 0.0 } else { rest }
}

multiversion! {
    fn write<T: Stored<Compute = f32>>(from: &[f32], part: Part, to: &mut [T]) {
        match part {
            Part::High => from.iter().zip(to).for_each(|(&x, to)| *to = T::nearest(high(x).wide())),
            Part::Low => from.iter().zip(to).for_each(|(&x, to)| *to = T::nearest(low(x))),
        }
    }
}

/// The algorithms, slowest first.
pub(in crate::conv) fn algorithms() -> impl Iterator<Item = Arc<dyn ConvAlgorithm>> {
    let of = |unit| [Products::Three, Products::One].map(|products| Split { unit, products });
    Unit::ALL.into_iter().flat_map(of).map(|split| Arc::new(split) as Arc<dyn ConvAlgorithm>)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_add_up() {
        let values = (0..=u32::MAX).step_by(9973).map(f32::from_bits).chain([f32::MAX, f32::MIN]);
        for x in values.filter(|x| x.abs() > 1e-30) {
            let (high, low) = (high(x), bf16::nearest(low(x)));
            match x.is_finite() {
                true => {
                    let error = (x.f64() - high.f64() - low.f64()).abs();
                    assert!(error <= x.f64().abs() * 2f64.powi(-16), "{x:e}: {high:e} and {low:e}");
                }
                false => assert!(
                    high.f64().to_bits() << 1 == f64::from(x).to_bits() << 1 || x.is_nan() && high.is_nan()
                ),
            }
        }
    }
}
