//! Max pooling: the choice of algorithms and their common checks.

use super::{PoolProblem, WindowIndex, max_runs, max_windows};
use crate::error::{check_len, invalid};
use crate::profile::span;
use crate::{Cpu, Result, Slice, SliceMut, Stored, dispatch_stored};

/// The names of the passes in errors.
const FORWARD: &str = "max pooling";
const BACKWARD: &str = "max pooling backward";

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
    pub fn forward(
        self,
        cpu: &Cpu,
        problem: &PoolProblem,
        x: Slice<'_>,
        y: SliceMut<'_>,
        indices: Option<WindowIndicesMut<'_>>,
    ) -> Result<()> {
        span!("max pooling", x, y);
        problem.input_extent().check(FORWARD, &[("x", x.len())])?;
        problem.output_extent().check(FORWARD, &[("y", y.len())])?;
        dispatch_stored!(x.dtype(), S => {
            let (x, y) = (x.of::<S>()?, y.of::<S>()?);
            match indices {
                None => self.typed_forward::<S, u16>(cpu, problem, x, y, None),
                Some(WindowIndicesMut::Bytes(indices)) => self.typed_forward(cpu, problem, x, y, Some(indices)),
                Some(WindowIndicesMut::Shorts(indices)) => self.typed_forward(cpu, problem, x, y, Some(indices)),
            }
        })
    }

    fn typed_forward<S: Stored, I: WindowIndex>(
        self,
        cpu: &Cpu,
        problem: &PoolProblem,
        x: &[S],
        y: &mut [S],
        indices: Option<&mut [I]>,
    ) -> Result<()> {
        check_index::<I>(FORWARD, problem)?;
        if let Some(indices) = &indices {
            check_len(FORWARD, "the indices", indices.len(), y.len())?;
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
    pub fn backward(
        self,
        cpu: &Cpu,
        problem: &PoolProblem,
        dy: Slice<'_>,
        indices: WindowIndices<'_>,
        dx: SliceMut<'_>,
    ) -> Result<()> {
        span!("max pooling backward", dy, dx);
        problem.input_extent().check(BACKWARD, &[("dx", dx.len())])?;
        problem.output_extent().check(BACKWARD, &[("dy", dy.len())])?;
        dispatch_stored!(dy.dtype(), S => {
            let (dy, dx) = (dy.of::<S>()?, dx.of::<S>()?);
            match indices {
                WindowIndices::Bytes(indices) => self.typed_backward(cpu, problem, dy, indices, dx),
                WindowIndices::Shorts(indices) => self.typed_backward(cpu, problem, dy, indices, dx),
            }
        })
    }

    fn typed_backward<S: Stored, I: WindowIndex>(
        self,
        cpu: &Cpu,
        problem: &PoolProblem,
        dy: &[S],
        indices: &[I],
        dx: &mut [S],
    ) -> Result<()> {
        check_len(BACKWARD, "the indices", indices.len(), dy.len())?;
        check_index::<I>(BACKWARD, problem)?;
        match self {
            MaxPoolAlgorithm::Runs => max_runs::backward(cpu, problem, dy, indices, dx),
            MaxPoolAlgorithm::Windows => max_windows::backward(cpu, problem, dy, indices, dx),
        }
        Ok(())
    }
}

/// For each window, which of its elements was the largest (row-major).
#[derive(Debug, Clone, Copy)]
pub enum WindowIndices<'a> {
    /// Of windows of at most 256 elements.
    Bytes(&'a [u8]),
    /// Of larger windows.
    Shorts(&'a [u16]),
}

/// [`WindowIndices`] that are written.
#[derive(Debug)]
pub enum WindowIndicesMut<'a> {
    /// Of windows of at most 256 elements.
    Bytes(&'a mut [u8]),
    /// Of larger windows.
    Shorts(&'a mut [u16]),
}

/// The largest value of each window, and, where `indices` is given, which window element it was.
///
/// Of equal values the first wins. NaN wins over every number, and of several NaNs the last wins, as in PyTorch.
///
/// # Errors
/// If a length is not the problem's, or a window has more elements than the index type counts.
pub fn max_pool(
    cpu: &Cpu,
    problem: &PoolProblem,
    x: Slice<'_>,
    y: SliceMut<'_>,
    indices: Option<WindowIndicesMut<'_>>,
) -> Result<()> {
    MaxPoolAlgorithm::Windows.forward(cpu, problem, x, y, indices)
}

/// dx: each window's dy goes to the element that was largest.
///
/// # Errors
/// As [`max_pool`].
pub fn max_pool_backward(
    cpu: &Cpu,
    problem: &PoolProblem,
    dy: Slice<'_>,
    indices: WindowIndices<'_>,
    dx: SliceMut<'_>,
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

impl<'a> From<&'a [u8]> for WindowIndices<'a> {
    fn from(indices: &'a [u8]) -> WindowIndices<'a> {
        WindowIndices::Bytes(indices)
    }
}

impl<'a> From<&'a [u16]> for WindowIndices<'a> {
    fn from(indices: &'a [u16]) -> WindowIndices<'a> {
        WindowIndices::Shorts(indices)
    }
}

impl<'a> From<&'a mut [u8]> for WindowIndicesMut<'a> {
    fn from(indices: &'a mut [u8]) -> WindowIndicesMut<'a> {
        WindowIndicesMut::Bytes(indices)
    }
}

impl<'a> From<&'a mut [u16]> for WindowIndicesMut<'a> {
    fn from(indices: &'a mut [u16]) -> WindowIndicesMut<'a> {
        WindowIndicesMut::Shorts(indices)
    }
}
