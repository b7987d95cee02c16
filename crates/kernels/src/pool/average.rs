//! Average pooling, with its backward pass.

use super::PoolProblem;
use super::runs::{span, strided};
use crate::conv::ConvAxis;
use crate::element::PieceOf;
use crate::error::invalid;
use crate::isa::multiversion;
use crate::operand::kernels;

use crate::{Cpu, Element, Result};

/// What the sum over a window is divided by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Divisor {
    /// The elements of the input in the window.
    Inside,
    /// The elements of the input and the padding in the window, but not what lies beyond the padding: `count_include_pad` of
    /// PyTorch and ONNX.
    Padded,
    /// A number, which is not 0.
    Fixed(usize),
}

impl PoolProblem {
    /// 1 / the divisor of the average, for each output pixel.
    fn shares<T: Element>(&self, divisor: Divisor) -> Vec<T> {
        let extent = |axis: &ConvAxis, padding_after: usize, o: usize| {
            let start = (o * axis.stride) as isize - axis.pad_before as isize;
            let end = start + axis.kernel as isize;
            let (low, high) = match divisor {
                Divisor::Inside => (start.max(0), end.min(axis.input as isize)),
                // Only the nominal padding counts, not what ceil_mode adds.
                Divisor::Padded => (start, end.min((axis.input + padding_after) as isize)),
                Divisor::Fixed(_) => (start, end),
            };
            (high - low) as f64
        };
        let mut shares = Vec::with_capacity(self.output_extent().spatial);
        for oh in 0..self.height.output() {
            for ow in 0..self.width.output() {
                let count = match divisor {
                    Divisor::Fixed(count) => count as f64,
                    _ => {
                        extent(&self.height, self.padding_after[0], oh)
                            * extent(&self.width, self.padding_after[1], ow)
                    }
                };
                shares.push(T::of(1.0 / count));
            }
        }
        shares
    }
}

kernels! {
    /// The mean of each window, as `divisor` takes it.
    ///
    /// # Errors
    /// If a length is not the problem's, the problem has dilation, or the divisor is 0.
    pub fn average_pool<S: Stored>(cpu: &Cpu, problem: &PoolProblem, divisor: Divisor; x: &[S]; y: &mut [S]) -> Result<()> {
        crate::profile::span!("average pooling", x, y);
        problem.input_extent().check("average pooling", &[("x", x.len())])?;
        problem.output_extent().check("average pooling", &[("y", y.len())])?;
        check(problem, divisor)?;
        let shares = problem.shares::<S::Compute>(divisor);
        let (input, output, lanes) = problem.task();
        let stride = problem.width.stride;
        cpu.for_each(x.len(), x.chunks(input).zip(y.chunks_mut(output)), |(x, y)| {
            S::Compute::map(cpu, x, y, |x, y| {
                y.fill(S::Compute::default());
                problem.each_run(|run| {
                    add_run(cpu, stride, lanes, &x[run.input * lanes..], &mut y[run.outputs(lanes)]);
                });
                for (y, &share) in y.chunks_mut(lanes).zip(&shares) {
                    y.iter_mut().for_each(|y| *y *= share);
                }
            });
        });
        Ok(())
    }

    /// dx of [`average_pool`]: each window's dy is spread evenly.
    ///
    /// # Errors
    /// As [`average_pool`].
    pub fn average_pool_backward<S: Stored>(
        cpu: &Cpu, problem: &PoolProblem, divisor: Divisor;
        dy: &[S];
        dx: &mut [S]
    ) -> Result<()> {
        crate::profile::span!("average pooling backward", dy, dx);
        problem.input_extent().check("average pooling backward", &[("dx", dx.len())])?;
        problem.output_extent().check("average pooling backward", &[("dy", dy.len())])?;
        check(problem, divisor)?;
        let shares = problem.shares::<S::Compute>(divisor);
        let (input, output, lanes) = problem.task();
        let stride = problem.width.stride;
        cpu.for_each(dx.len(), dx.chunks_mut(input).zip(dy.chunks(output)), |(dx, dy)| {
            S::Compute::map(cpu, dy, dx, |dy, dx| {
                dx.fill(S::Compute::default());
                problem.each_run(|run| {
                    let (dy, shares) = (&dy[run.outputs(lanes)], &shares[run.output..run.output + run.len]);
                    spread_run(cpu, stride, lanes, dy, shares, &mut dx[run.input * lanes..]);
                });
            });
        });
        Ok(())
    }
}

fn check(problem: &PoolProblem, divisor: Divisor) -> Result<()> {
    if divisor == Divisor::Fixed(0) {
        return Err(invalid("average pooling", "the divisor is 0"));
    }
    if problem.height.dilation != 1 || problem.width.dilation != 1 {
        return Err(invalid("average pooling", "dilation is not defined for averages"));
    }
    Ok(())
}

multiversion! {
    fn add_run<T: Element>(stride: usize, lanes: usize, x: &[T], y: &mut [T]) {
        let x = &x[..span(stride, lanes, y.len())];
        strided(stride, lanes, y.len(), |to, from| {
            // SAFETY: `strided` visits places below y's length, and below `span`, x's length.
            unsafe { *y.get_unchecked_mut(to) += *x.get_unchecked(from) };
        });
    }

    fn spread_run<T: Element>(stride: usize, lanes: usize, dy: &[T], shares: &[T], dx: &mut [T]) {
        let dx = &mut dx[..span(stride, lanes, dy.len())];
        let shares = &shares[..dy.len() / lanes];
        strided(stride, lanes, dy.len(), |to, from| {
            // SAFETY: `strided` visits places below dy's length, a multiple of `lanes`, and below `span`, dx's length. So
            // `to / lanes` is below the length that the shares have been cut to.
            unsafe { *dx.get_unchecked_mut(from) += *dy.get_unchecked(to) * *shares.get_unchecked(to / lanes) };
        });
    }
}
