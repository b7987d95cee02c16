//! The plain reference: the definition of each pass as loops, summed in f64. It always applies and is the oracle for tests.

use std::sync::Arc;

use super::plan::{ConvAlgorithm, ConvKernel, ConvPlan, Cost, NotApplicable};
use super::problem::{ConvProblem, ConvTypes, Pass};
use crate::{Cpu, MemoryFormat, Result, Slice, SliceMut, Stored, dispatch_stored};

/// Convolution by its definition.
///
/// ```text
/// y[n,k,oh,ow]   = sum over c,r,s   of x[n,c,ih,iw] * weight[k,c,r,s]     ih = oh*stride + r*dilation - pad
/// dx[n,c,ih,iw]  = sum over k,r,s   of dy[n,k,oh,ow] * weight[k,c,r,s]
/// dweight[k,c,r,s] = sum over n,oh,ow of x[n,c,ih,iw] * dy[n,k,oh,ow]
/// ```
pub(super) struct Reference;

impl ConvAlgorithm for Reference {
    fn name(&self) -> &'static str {
        "reference"
    }

    fn revision(&self) -> u32 {
        1
    }

    fn plan(
        &self,
        problem: &ConvProblem,
        pass: Pass,
        cpu: &Cpu,
    ) -> std::result::Result<ConvPlan, NotApplicable> {
        let kernel = Arc::new(Loops { problem: *problem, pass });
        let cost = Cost::direct(problem, 0.003);
        Ok(ConvPlan::new(self, (problem, pass), cpu, 0, kernel).with_cost(cost))
    }
}

struct Loops {
    problem: ConvProblem,
    pass: Pass,
}

/// Where the elements of an N x C x H x W tensor lie.
#[derive(Clone, Copy)]
struct Strides {
    batch: usize,
    channel: usize,
    row: usize,
    column: usize,
}

impl Strides {
    fn new(format: MemoryFormat, [_, channels, height, width]: [usize; 4]) -> Strides {
        let batch = channels * height * width;
        match format {
            MemoryFormat::Contiguous => Strides { batch, channel: height * width, row: width, column: 1 },
            MemoryFormat::ChannelsLast => {
                Strides { batch, channel: 1, row: width * channels, column: channels }
            }
        }
    }

    fn at(&self, n: usize, c: usize, h: usize, w: usize) -> usize {
        n * self.batch + c * self.channel + h * self.row + w * self.column
    }

    /// N, C, H, W of the element at `offset`.
    fn coordinates(&self, format: MemoryFormat, [_, c, h, w]: [usize; 4], offset: usize) -> [usize; 4] {
        match format {
            MemoryFormat::Contiguous => {
                [offset / (c * h * w), offset / (h * w) % c, offset / w % h, offset % w]
            }
            MemoryFormat::ChannelsLast => {
                [offset / (c * h * w), offset % c, offset / (w * c) % h, offset / c % w]
            }
        }
    }
}

/// One element of the output, summed in f64.
pub(crate) fn element<A: Stored, B: Stored>(
    problem: &ConvProblem,
    pass: Pass,
    (a, b): (&[A], &[B]),
    offset: usize,
) -> f64 {
    Loops { problem: *problem, pass }.element(offset, a, b)
}

impl ConvKernel for Loops {
    fn types(&self) -> ConvTypes {
        self.problem.types
    }

    fn run(
        &self,
        cpu: &Cpu,
        [a, b]: [Slice<'_>; 2],
        output: SliceMut<'_>,
        _workspace: SliceMut<'_>,
    ) -> Result<()> {
        dispatch_stored!(self.problem.types.input, S => match self.pass {
            Pass::BackwardWeights => {
                self.typed::<S, S, <S as Stored>::Compute>(cpu, (a.of()?, b.of()?), output.of()?);
            }
            _ => self.typed::<S, <S as Stored>::Compute, S>(cpu, (a.of()?, b.of()?), output.of()?),
        });
        Ok(())
    }
}

impl Loops {
    fn typed<A: Stored, B: Stored, O: Stored>(&self, cpu: &Cpu, (a, b): (&[A], &[B]), output: &mut [O]) {
        let work = self.problem.flops() as usize;
        let chunk = output.len().div_ceil(8 * cpu.threads()).max(1);
        cpu.for_each(work, output.chunks_mut(chunk).enumerate(), |(index, chunk_out)| {
            for (offset, value) in chunk_out.iter_mut().enumerate() {
                *value = O::of(self.element(index * chunk + offset, a, b));
            }
        });
    }

    fn element<A: Stored, B: Stored>(&self, offset: usize, a: &[A], b: &[B]) -> f64 {
        match self.pass {
            Pass::Forward => self.y(offset, a, b),
            Pass::BackwardData => self.dx(offset, a, b),
            Pass::BackwardWeights => self.dweight(offset, a, b),
        }
    }

    fn y<A: Stored, B: Stored>(&self, offset: usize, x: &[A], weight: &[B]) -> f64 {
        let p = &self.problem;
        let x_at = Strides::new(p.format, p.input_shape());
        let w_at = Strides::new(MemoryFormat::Contiguous, p.weight_shape());
        let y_at = Strides::new(p.format, p.output_shape());
        let [n, k, oh, ow] = y_at.coordinates(p.format, p.output_shape(), offset);
        let first = k / p.group_out_channels() * p.group_in_channels();
        let mut sum = 0.0;
        for c in 0..p.group_in_channels() {
            for r in 0..p.height.kernel {
                let Some(ih) = p.height.input_index(oh, r) else { continue };
                for s in 0..p.width.kernel {
                    let Some(iw) = p.width.input_index(ow, s) else { continue };
                    sum += x[x_at.at(n, first + c, ih, iw)].f64() * weight[w_at.at(k, c, r, s)].f64();
                }
            }
        }
        sum
    }

    fn dx<A: Stored, B: Stored>(&self, offset: usize, dy: &[A], weight: &[B]) -> f64 {
        let p = &self.problem;
        let x_at = Strides::new(p.format, p.input_shape());
        let w_at = Strides::new(MemoryFormat::Contiguous, p.weight_shape());
        let y_at = Strides::new(p.format, p.output_shape());
        let [n, c, ih, iw] = x_at.coordinates(p.format, p.input_shape(), offset);
        let group = c / p.group_in_channels();
        let mut sum = 0.0;
        for r in 0..p.height.kernel {
            let Some(oh) = output_index(&p.height, ih, r) else { continue };
            for s in 0..p.width.kernel {
                let Some(ow) = output_index(&p.width, iw, s) else { continue };
                for k in group * p.group_out_channels()..(group + 1) * p.group_out_channels() {
                    sum += dy[y_at.at(n, k, oh, ow)].f64()
                        * weight[w_at.at(k, c % p.group_in_channels(), r, s)].f64();
                }
            }
        }
        sum
    }

    fn dweight<A: Stored, B: Stored>(&self, offset: usize, x: &[A], dy: &[B]) -> f64 {
        let p = &self.problem;
        let x_at = Strides::new(p.format, p.input_shape());
        let w_at = Strides::new(MemoryFormat::Contiguous, p.weight_shape());
        let y_at = Strides::new(p.format, p.output_shape());
        let [k, c, r, s] = w_at.coordinates(MemoryFormat::Contiguous, p.weight_shape(), offset);
        let first = k / p.group_out_channels() * p.group_in_channels();
        let mut sum = 0.0;
        for n in 0..p.batch {
            for oh in 0..p.height.output() {
                let Some(ih) = p.height.input_index(oh, r) else { continue };
                for ow in 0..p.width.output() {
                    let Some(iw) = p.width.input_index(ow, s) else { continue };
                    sum += x[x_at.at(n, first + c, ih, iw)].f64() * dy[y_at.at(n, k, oh, ow)].f64();
                }
            }
        }
        sum
    }
}

/// The output that reads input `i` through kernel element `k`, if there is one.
fn output_index(axis: &super::problem::ConvAxis, i: usize, k: usize) -> Option<usize> {
    let position = (i + axis.pad_before).checked_sub(k * axis.dilation)?;
    let o = position / axis.stride;
    (position % axis.stride == 0 && o < axis.output()).then_some(o)
}
