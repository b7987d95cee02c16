//! Max pooling in the race: its buffers, and the check against the first algorithm.

use std::time::Instant;

use convoke_memory::{collected, copied, filled};

use super::contest::{Contest, Entrant, State, Subject};
use super::noise::noise;
use super::race::{Checked, Refusal, Trial, seconds_of};
use super::waiting::Operation;
use crate::conv::Accuracy;
use crate::pool::{MaxPoolAlgorithm, MaxPoolPass, PoolProblem, WindowIndex, max_pool_algorithms};
use crate::{Cpu, DType, Element, Result, dispatch};

/// One pass of one problem; the entrants are [`max_pool_algorithms`].
pub(super) struct PoolSubject {
    pub(super) contest: Contest,
    pub(super) problem: PoolProblem,
    pub(super) dtype: DType,
    pub(super) pass: MaxPoolPass,
}

/// [`max_pool_algorithms`], which all can run every problem.
pub(super) fn entrants(problem: &PoolProblem, pass: MaxPoolPass, cpu: &Cpu) -> Vec<Entrant> {
    let entrant = |algorithm: &MaxPoolAlgorithm| Entrant {
        name: algorithm.name().into(),
        revision: algorithm.revision(),
        accuracy: Accuracy::Strict,
        state: State::Ready { estimate: algorithm.estimate(problem, pass, cpu), workspace_bytes: 0 },
    };
    max_pool_algorithms().iter().map(entrant).collect()
}

impl PoolSubject {
    /// A trial with the index type that training uses.
    fn trial_of<T: Element>(&self, ready: &[usize]) -> Result<Box<dyn Trial + '_>> {
        let algorithms = ready.iter().map(|&index| max_pool_algorithms()[index]).collect();
        Ok(match self.problem.window_len() <= u8::COUNT {
            true => Box::new(PoolTrial::<T, u8>::new(self, algorithms)?),
            false => Box::new(PoolTrial::<T, u16>::new(self, algorithms)?),
        })
    }
}

impl Subject for PoolSubject {
    fn contest(&self) -> &Contest {
        &self.contest
    }

    fn operation(&self) -> Operation {
        Operation::MaxPool(self.problem, self.dtype, self.pass)
    }

    fn trial(&self, ready: &[usize]) -> Result<Box<dyn Trial + '_>> {
        dispatch!("max pooling", self.dtype, T => self.trial_of::<T>(ready))
    }
}

struct PoolTrial<'a, T, I> {
    subject: &'a PoolSubject,
    algorithms: Vec<MaxPoolAlgorithm>,
    /// x or dy.
    input: Vec<T>,
    /// y or dx.
    output: Vec<T>,
    /// Written forward, read backward.
    indices: Vec<I>,
    expected: Vec<T>,
    expected_indices: Vec<I>,
    start: Instant,
}

impl<'a, T: Element, I: WindowIndex> PoolTrial<'a, T, I> {
    fn new(subject: &'a PoolSubject, algorithms: Vec<MaxPoolAlgorithm>) -> Result<Self> {
        let start = Instant::now();
        let PoolSubject { contest: Contest { cpu, .. }, problem, pass, .. } = subject;
        let [x_len, y_len] = [problem.input_extent(), problem.output_extent()]
            .map(|extent| extent.len().expect("a problem's tensors have a size"));
        // Few different values, so that there are ties.
        let values = |len: usize, seed: u64| -> Result<Vec<T>> {
            let noise = noise::<T>(cpu, len, seed)?;
            Ok(collected(noise.iter().map(|&value| (value * T::of(8.0)).round()))?)
        };
        let x = values(x_len, 1)?;
        let (mut y, mut indices) = (filled(y_len, T::nan())?, filled(y_len, I::store(0))?);
        let oracle = max_pool_algorithms()[0];
        oracle.forward(cpu, problem, &x, &mut y, Some(&mut indices)).expect("buffers of this problem");
        let (input, expected) = match pass {
            MaxPoolPass::Forward | MaxPoolPass::Inference => (x, y),
            MaxPoolPass::Backward => {
                let (dy, mut dx) = (values(y_len, 2)?, x);
                oracle.backward(cpu, problem, &dy, &indices, &mut dx).expect("buffers of this problem");
                (dy, dx)
            }
        };
        let output = filled(expected.len(), T::nan())?;
        let expected_indices = copied(&indices)?;
        Ok(PoolTrial { subject, algorithms, input, output, indices, expected, expected_indices, start })
    }

    fn run_once(&mut self, index: usize) {
        let PoolSubject { contest: Contest { cpu, .. }, problem, pass, .. } = self.subject;
        let (algorithm, input, output) = (self.algorithms[index], &self.input, &mut self.output);
        match pass {
            MaxPoolPass::Forward => algorithm.forward(cpu, problem, input, output, Some(&mut self.indices)),
            MaxPoolPass::Inference => algorithm.forward::<T, I>(cpu, problem, input, output, None),
            MaxPoolPass::Backward => algorithm.backward(cpu, problem, input, &self.indices, output),
        }
        .expect("buffers of this problem");
    }
}

impl<T: Element, I: WindowIndex> Trial for PoolTrial<'_, T, I> {
    fn check(&mut self, index: usize) -> std::result::Result<Checked, Refusal> {
        self.output.fill(T::nan());
        if self.subject.pass == MaxPoolPass::Forward {
            self.indices.fill(I::store(I::COUNT - 1));
        }
        let seconds = seconds_of(1, || self.run_once(index));
        let [output, expected] =
            [&self.output, &self.expected].map(|values| bytemuck::cast_slice::<T, u8>(values));
        if output != expected {
            return Err(Refusal::Wrong("wrong: not the same bits".into()));
        }
        if self.indices != self.expected_indices {
            return Err(Refusal::Wrong("wrong: other indices".into()));
        }
        Ok(Checked { error: 0.0, seconds })
    }

    fn run(&mut self, index: usize, repeats: usize) -> f64 {
        seconds_of(repeats, || self.run_once(index))
    }

    fn elapsed(&self) -> f64 {
        self.start.elapsed().as_secs_f64()
    }
}
