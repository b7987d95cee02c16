//! Max pooling: the choice of algorithms and their common checks.

use super::{PoolProblem, WindowIndex, max_runs, max_windows};
use crate::error::{check_len, invalid};
use crate::profile::span;
use crate::{Cpu, Element, Result};

/// A way to compute max pooling. All algorithms can solve every problem and give the same bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum MaxPoolAlgorithm {
    /// Goes over rows of outputs once for every window element; the gradient is scattered in the same way.
    Runs,
    /// Computes the maximum and index of a window in registers; the gradient is gathered for each input.
    Windows,
}

/// A pass of max pooling.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum MaxPoolPass {
    /// y and the indices from x.
    Forward,
    /// dx from dy and the indices.
    Backward,
    /// y from x, without indices.
    Inference,
}

impl MaxPoolPass {
    /// Every pass.
    pub const ALL: [MaxPoolPass; 3] = [MaxPoolPass::Forward, MaxPoolPass::Backward, MaxPoolPass::Inference];
}

/// `max-pool-fwd`, `max-pool-bwd` or `max-pool-inference`.
impl std::fmt::Display for MaxPoolPass {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            MaxPoolPass::Forward => "max-pool-fwd",
            MaxPoolPass::Backward => "max-pool-bwd",
            MaxPoolPass::Inference => "max-pool-inference",
        })
    }
}

/// Every algorithm for max pooling.
pub fn max_pool_algorithms() -> &'static [MaxPoolAlgorithm] {
    &[MaxPoolAlgorithm::Runs, MaxPoolAlgorithm::Windows]
}

impl MaxPoolAlgorithm {
    /// The name in tuning results.
    pub fn name(self) -> &'static str {
        match self {
            MaxPoolAlgorithm::Runs => "runs",
            MaxPoolAlgorithm::Windows => "windows",
        }
    }

    /// Increase it when the algorithm gets faster or slower, so that old measurements do not count.
    pub fn revision(self) -> u32 {
        match self {
            MaxPoolAlgorithm::Runs => 2,
            MaxPoolAlgorithm::Windows => 1,
        }
    }

    /// Estimated seconds of a pass; only the ratio between algorithms matters.
    pub(crate) fn estimate(self, problem: &PoolProblem, pass: MaxPoolPass, cpu: &Cpu) -> f64 {
        let [batch, channels, height, width] = problem.output_shape();
        let reads = (batch * channels * height * width) as f64 * problem.window_len() as f64;
        // Measured with AVX-512: in forward, `Runs` takes twice as long or more; in the other passes the two are close.
        let nanoseconds = match (self, pass) {
            (MaxPoolAlgorithm::Runs, _) => 1.0,
            (MaxPoolAlgorithm::Windows, MaxPoolPass::Forward) => 0.5,
            (MaxPoolAlgorithm::Windows, MaxPoolPass::Backward | MaxPoolPass::Inference) => 1.2,
        };
        1e-6 + 1e-9 * nanoseconds * reads / cpu.threads() as f64
    }

    /// As [`max_pool`], by this algorithm.
    ///
    /// # Errors
    /// As [`max_pool`].
    #[inline(never)]
    pub fn forward<T: Element, I: WindowIndex>(
        self,
        cpu: &Cpu,
        problem: &PoolProblem,
        x: &[T],
        y: &mut [T],
        indices: Option<&mut [I]>,
    ) -> Result<()> {
        span!("max pooling", x, y);
        problem.input_extent().check("max pooling", &[("x", x.len())])?;
        problem.output_extent().check("max pooling", &[("y", y.len())])?;
        check_index::<I>("max pooling", problem)?;
        if let Some(indices) = &indices {
            check_len("max pooling", "the indices", indices.len(), y.len())?;
        }
        match self {
            MaxPoolAlgorithm::Runs => max_runs::forward(cpu, problem, x, y, indices),
            MaxPoolAlgorithm::Windows => max_windows::forward(cpu, problem, x, y, indices),
        }
        Ok(())
    }

    /// As [`max_pool_backward`], by this algorithm; the indices may come from any algorithm.
    ///
    /// # Errors
    /// As [`max_pool`].
    #[inline(never)]
    pub fn backward<T: Element, I: WindowIndex>(
        self,
        cpu: &Cpu,
        problem: &PoolProblem,
        dy: &[T],
        indices: &[I],
        dx: &mut [T],
    ) -> Result<()> {
        span!("max pooling backward", dy, indices, dx);
        problem.input_extent().check("max pooling backward", &[("dx", dx.len())])?;
        problem.output_extent().check("max pooling backward", &[("dy", dy.len())])?;
        check_len("max pooling backward", "the indices", indices.len(), dy.len())?;
        check_index::<I>("max pooling backward", problem)?;
        match self {
            MaxPoolAlgorithm::Runs => max_runs::backward(cpu, problem, dy, indices, dx),
            MaxPoolAlgorithm::Windows => max_windows::backward(cpu, problem, dy, indices, dx),
        }
        Ok(())
    }
}

/// The largest value of each window, and, where `indices` is given, which window element it was (row-major).
///
/// Of equal values the first wins. NaN wins over every number, and of several NaNs the last wins, as in PyTorch.
///
/// # Errors
/// If a length is not the problem's, or a window has more elements than the index type counts.
#[inline(never)]
pub fn max_pool<T: Element, I: WindowIndex>(
    cpu: &Cpu,
    problem: &PoolProblem,
    x: &[T],
    y: &mut [T],
    indices: Option<&mut [I]>,
) -> Result<()> {
    MaxPoolAlgorithm::Windows.forward(cpu, problem, x, y, indices)
}

/// dx: each window's dy goes to the element that was largest.
///
/// # Errors
/// As [`max_pool`].
#[inline(never)]
pub fn max_pool_backward<T: Element, I: WindowIndex>(
    cpu: &Cpu,
    problem: &PoolProblem,
    dy: &[T],
    indices: &[I],
    dx: &mut [T],
) -> Result<()> {
    MaxPoolAlgorithm::Runs.backward(cpu, problem, dy, indices, dx)
}

fn check_index<I: WindowIndex>(operation: &'static str, problem: &PoolProblem) -> Result<()> {
    if problem.window_len() > I::COUNT {
        let reason = format!("a window of {} elements needs a wider index type", problem.window_len());
        return Err(invalid(operation, reason));
    }
    Ok(())
}
