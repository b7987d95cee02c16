//! Convolution plans in the race: their buffers, and the check against the oracle.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use convoke_memory::OutOfMemory;

use super::contest::{Contest, Subject};
use super::noise::{CHUNK, Generator, noise};
use super::race::{Checked, Refusal, Trial, seconds_of};
use super::waiting::Operation;
use crate::conv::{Accuracy, ConvOperands, ConvPlan, ConvProblem, Pass, reference_element};
use crate::memory::AlignedVec;
use crate::{Cpu, DType, Result, SliceMut, Stored, dispatch_stored};

/// One pass of one problem, and each entrant's plan for it.
pub(super) struct ConvSubject {
    pub(super) contest: Contest,
    pub(super) problem: ConvProblem,
    pub(super) pass: Pass,
    pub(super) plans: Vec<Option<ConvPlan>>,
}

impl ConvSubject {
    /// The plan of the algorithm with this name.
    pub(super) fn into_plan(self, name: &str) -> Option<ConvPlan> {
        let index = self.contest.entrants.iter().position(|entrant| entrant.name == name)?;
        self.plans.into_iter().nth(index)?
    }
}

impl Subject for ConvSubject {
    fn contest(&self) -> &Contest {
        &self.contest
    }

    fn operation(&self) -> Operation {
        Operation::Conv(self.problem, self.pass)
    }

    fn trial(&self, ready: &[usize]) -> Result<Box<dyn Trial + '_>> {
        let plan = |&index: &usize| {
            let plan = self.plans[index].as_ref().expect("an entrant that is ready has a plan");
            (plan, self.contest.entrants[index].accuracy)
        };
        let plans: Vec<_> = ready.iter().map(plan).collect();
        Ok(dispatch_stored!(self.problem.types.input, S => match self.pass {
            Pass::BackwardWeights => Box::new(ConvTrial::<S, S, <S as Stored>::Compute>::new(plans)?),
            _ => Box::new(ConvTrial::<S, <S as Stored>::Compute, S>::new(plans)?),
        }))
    }
}

/// Plans of one pass of one problem, over the same random inputs of the types A and B, with an output of type O.
struct ConvTrial<'a, A: Stored, B, O> {
    /// Each plan with its algorithm's class of accuracy.
    plans: Vec<(&'a ConvPlan, Accuracy)>,
    pass: Pass,
    inputs: (AlignedVec<A>, AlignedVec<B>),
    output: AlignedVec<O>,
    workspace: AlignedVec<A::Compute>,
    oracle: Oracle,
    start: Instant,
}

/// The expected values of a sample of the output.
struct Oracle {
    offsets: Vec<usize>,
    expected: Vec<f64>,
    /// The largest of the expected magnitudes.
    scale: f64,
    /// Errors up to this, relative to the largest value, are rounding.
    tolerance: f64,
}

/// The most multiply-adds that the oracle may do. It sums in f64, one element at a time.
const ORACLE_TERMS: usize = 8 << 20;

impl<'a, A: Stored, B: Stored, O: Stored> ConvTrial<'a, A, B, O> {
    /// Buffers are written once here, so that no timed run is the first to touch their memory.
    ///
    /// If a plan's workspace cannot be allocated, the other plans are timed all the same.
    fn new(plans: Vec<(&'a ConvPlan, Accuracy)>) -> Result<Self> {
        let (first, _) = plans[0];
        let (problem, pass, cpu) = (first.problem(), first.pass(), first.cpu());
        let (x, weight, y) = (problem.input_len(), problem.weight_len(), problem.output_len());
        let [a, b, output] = match pass {
            Pass::Forward => [x, weight, y],
            Pass::BackwardData => [y, weight, x],
            Pass::BackwardWeights => [x, y, weight],
        };
        let inputs = (noise(cpu, a, 1)?, noise(cpu, b, 2)?);
        let tolerance = |terms| tolerance::<A, O>(terms);
        let oracle = Oracle::new(first, (&inputs.0, &inputs.1), output, tolerance);
        let output = AlignedVec::try_filled(output, O::of(f64::NAN))?;
        let workspace = largest_workspace(&plans)?;
        Ok(ConvTrial { plans, pass, inputs, output, workspace, oracle, start: Instant::now() })
    }

    fn run_once(&mut self, index: usize) {
        let (a, b) = (&self.inputs.0[..], &self.inputs.1[..]);
        let output = &mut self.output[..];
        let operands = match self.pass {
            Pass::Forward => ConvOperands::forward(a, b, output),
            Pass::BackwardData => ConvOperands::backward_data(a, b, output),
            Pass::BackwardWeights => ConvOperands::backward_weights(a, b, output),
        };
        let workspace = SliceMut::from(&mut self.workspace[..]);
        self.plans[index].0.run(operands, workspace).expect("buffers of this problem");
    }
}

impl<A: Stored, B: Stored, O: Stored> Trial for ConvTrial<'_, A, B, O> {
    fn check(&mut self, index: usize) -> std::result::Result<Checked, Refusal> {
        let (plan, accuracy) = self.plans[index];
        if plan.workspace_len() > self.workspace.len() {
            return Err(Refusal::NoMemory(OutOfMemory::of::<A::Compute>(plan.workspace_len())));
        }
        poison(plan.cpu(), &mut self.output);
        poison(plan.cpu(), &mut self.workspace[..plan.workspace_len()]);
        let seconds = seconds_of(1, || self.run_once(index));
        let error = self.oracle.compare(plan.cpu(), &self.output, accuracy).map_err(Refusal::Wrong)?;
        Ok(Checked { error, seconds })
    }

    fn run(&mut self, index: usize, repeats: usize) -> f64 {
        seconds_of(repeats, || self.run_once(index))
    }

    fn elapsed(&self) -> f64 {
        self.start.elapsed().as_secs_f64()
    }
}

impl Oracle {
    /// `tolerance` tells it from the number of terms of each sum.
    fn new<A: Stored, B: Stored>(
        plan: &ConvPlan,
        inputs: (&[A], &[B]),
        len: usize,
        tolerance: impl Fn(usize) -> f64,
    ) -> Oracle {
        let (problem, pass, cpu) = (plan.problem(), plan.pass(), plan.cpu());
        let terms = (problem.flops() / 2.0 / len as f64).ceil() as usize;
        let count = (ORACLE_TERMS / terms.max(1)).clamp(16, 512).min(len);
        // One from each of `count` equal parts, and the corners, where padding and remainders go wrong.
        let mut random = Generator::new(3);
        let mut offsets: Vec<usize> =
            (0..count).map(|part| part * (len / count) + random.below(len / count)).collect();
        offsets.extend([0, len - 1]);
        let mut expected = vec![0.0; offsets.len()];
        cpu.for_each(count * terms, offsets.iter().zip(&mut expected), |(&offset, value)| {
            *value = reference_element(problem, pass, inputs, offset);
        });
        // Inputs have magnitudes up to 1, and a transform's rounding errors scale with them, even where a sample is all
        // zeros.
        let scale = expected.iter().fold(0.1, |scale: f64, value| scale.max(value.abs()));
        Oracle { offsets, expected, scale, tolerance: tolerance(terms.max(1)) }
    }

    /// The largest error of the sample relative to the largest value.
    fn compare<T: Stored>(
        &self,
        cpu: &Cpu,
        output: &[T],
        accuracy: Accuracy,
    ) -> std::result::Result<f64, String> {
        let bad = AtomicUsize::new(usize::MAX);
        cpu.for_each(output.len(), output.chunks(CHUNK).enumerate(), |(chunk, values)| {
            if let Some(offset) = values.iter().position(|value| !value.f64().is_finite()) {
                bad.fetch_min(chunk * CHUNK + offset, Ordering::Relaxed);
            }
        });
        if let Some(value) = output.get(bad.load(Ordering::Relaxed)) {
            let offset = bad.load(Ordering::Relaxed);
            return Err(format!("element {offset} is {value} where a number should be"));
        }
        let errors = self.offsets.iter().zip(&self.expected);
        let error = errors.map(|(&offset, expected)| (output[offset].f64() - expected).abs());
        let error = error.fold(0.0, f64::max) / self.scale;
        if error <= accuracy.tolerance(self.tolerance) {
            Ok(error)
        } else {
            Err(format!("wrong: the error relative to the largest value is {error:.1e}"))
        }
    }
}

/// The largest error, relative to the largest value, that rounding explains in a sum of `terms` products. The inputs have type A, to which a
/// weight may be rounded, too. The sum is stored in type O.
fn tolerance<A: Stored, O: Stored>(terms: usize) -> f64 {
    let epsilon = |dtype: DType| 2f64.powi(1 - dtype.digits());
    let sum = 16.0 * epsilon(A::Compute::DTYPE) * (terms as f64).sqrt();
    match A::DTYPE.computes() {
        true => sum,
        // The roundings of the weights and of the output, both less than half a unit: in a sum, those of the weights average out.
        false => sum + epsilon(A::DTYPE) + epsilon(O::DTYPE),
    }
}

/// A buffer for the largest workspace that there is memory for.
fn largest_workspace<T: Stored>(plans: &[(&ConvPlan, Accuracy)]) -> Result<AlignedVec<T>> {
    let mut lens: Vec<usize> = plans.iter().map(|(plan, _)| plan.workspace_len()).collect();
    lens.sort_unstable();
    loop {
        let len = lens.pop().unwrap_or(0);
        match AlignedVec::try_filled(len, T::of(f64::NAN)) {
            Ok(workspace) => return Ok(workspace),
            Err(error) if lens.is_empty() => return Err(error.into()),
            Err(_) => {}
        }
    }
}

/// Fills a buffer with NaN.
fn poison<T: Stored>(cpu: &Cpu, buffer: &mut [T]) {
    cpu.for_each(buffer.len(), buffer.chunks_mut(CHUNK), |chunk| chunk.fill(T::of(f64::NAN)));
}
