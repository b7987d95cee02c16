//! Max pooling in the race: its buffers, and the check against the first algorithm.

use std::time::Instant;

use convoke_memory::{collected, filled};

use super::contest::{Contest, Entrant, State, Subject};
use super::noise::noise;
use super::race::{Checked, Refusal, Trial, seconds_of};
use super::waiting::Operation;
use crate::conv::Accuracy;
use crate::pool::{
    MaxPoolAlgorithm, MaxPoolPass, PoolProblem, WindowIndex, WindowIndices, WindowIndicesMut,
    max_pool_algorithms,
};
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

impl Subject for PoolSubject {
    fn contest(&self) -> &Contest {
        &self.contest
    }

    fn operation(&self) -> Operation {
        Operation::MaxPool(self.problem, self.dtype, self.pass)
    }

    fn trial(&self, ready: &[usize]) -> Result<Box<dyn Trial + '_>> {
        let algorithms = ready.iter().map(|&index| max_pool_algorithms()[index]).collect();
        Ok(dispatch!("max pooling", self.dtype, T => Box::new(PoolTrial::<T>::new(self, algorithms)?)))
    }
}

/// Indices of the type that training uses.
#[derive(Clone, PartialEq)]
enum Indices {
    Bytes(Vec<u8>),
    Shorts(Vec<u16>),
}

impl Indices {
    /// Indices of `len` windows of this problem.
    fn new(problem: &PoolProblem, len: usize) -> Result<Indices> {
        Ok(match problem.window_len() <= u8::COUNT {
            true => Indices::Bytes(filled(len, 0)?),
            false => Indices::Shorts(filled(len, 0)?),
        })
    }

    /// Overwrites them.
    fn poison(&mut self) {
        match self {
            Indices::Bytes(indices) => indices.fill(u8::MAX),
            Indices::Shorts(indices) => indices.fill(u16::MAX),
        }
    }

    fn read(&self) -> WindowIndices<'_> {
        match self {
            Indices::Bytes(indices) => WindowIndices::Bytes(indices),
            Indices::Shorts(indices) => WindowIndices::Shorts(indices),
        }
    }

    fn write(&mut self) -> WindowIndicesMut<'_> {
        match self {
            Indices::Bytes(indices) => WindowIndicesMut::Bytes(indices),
            Indices::Shorts(indices) => WindowIndicesMut::Shorts(indices),
        }
    }
}

struct PoolTrial<'a, T> {
    subject: &'a PoolSubject,
    algorithms: Vec<MaxPoolAlgorithm>,
    /// x or dy.
    input: Vec<T>,
    /// y or dx.
    output: Vec<T>,
    /// Written forward, read backward.
    indices: Indices,
    expected: Vec<T>,
    expected_indices: Indices,
    start: Instant,
}

impl<'a, T: Element> PoolTrial<'a, T> {
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
        let (mut y, mut indices) = (filled(y_len, T::nan())?, Indices::new(problem, y_len)?);
        let (oracle, fits) = (max_pool_algorithms()[0], "buffers of this problem");
        oracle.forward(cpu, problem, (&x).into(), (&mut y).into(), Some(indices.write())).expect(fits);
        let (input, expected) = match pass {
            MaxPoolPass::Forward | MaxPoolPass::Inference => (x, y),
            MaxPoolPass::Backward => {
                let (dy, mut dx) = (values(y_len, 2)?, x);
                oracle.backward(cpu, problem, (&dy).into(), indices.read(), (&mut dx).into()).expect(fits);
                (dy, dx)
            }
        };
        let output = filled(expected.len(), T::nan())?;
        let mut expected_indices = Indices::new(problem, y_len)?;
        expected_indices.clone_from(&indices);
        Ok(PoolTrial { subject, algorithms, input, output, indices, expected, expected_indices, start })
    }

    fn run_once(&mut self, index: usize) {
        let PoolSubject { contest: Contest { cpu, .. }, problem, pass, .. } = self.subject;
        let algorithm = self.algorithms[index];
        let (input, output) = ((&self.input).into(), (&mut self.output).into());
        match pass {
            MaxPoolPass::Forward => {
                algorithm.forward(cpu, problem, input, output, Some(self.indices.write()))
            }
            MaxPoolPass::Inference => algorithm.forward(cpu, problem, input, output, None),
            MaxPoolPass::Backward => algorithm.backward(cpu, problem, input, self.indices.read(), output),
        }
        .expect("buffers of this problem");
    }
}

impl<T: Element> Trial for PoolTrial<'_, T> {
    fn check(&mut self, index: usize) -> std::result::Result<Checked, Refusal> {
        self.output.fill(T::nan());
        if self.subject.pass == MaxPoolPass::Forward {
            self.indices.poison();
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
