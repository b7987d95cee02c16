//! Tensors of a convolution viewed as matrices, for the algorithms built on matrix multiplication.
//!
//! Let `columns` be the J x P matrix of input values (J = C/groups * R * S rows, P output pixels). One group's passes are
//! then `y = W columns`, `dcolumns = Wᵀ dy` and `dW = dy columnsᵀ`, where W is (K/groups) x J.

use super::plan::Cost;
use super::problem::{ConvProblem, Pass};
use crate::gemm::{Matrix, MatrixMut};
use crate::{Cpu, Element, MemoryFormat};

/// Where a matrix lies in a slice.
#[derive(Clone, Copy)]
pub(super) struct View {
    offset: usize,
    shape: [usize; 2],
    strides: [usize; 2],
}

impl View {
    pub(super) fn of<'a, T>(&self, data: &'a [T]) -> Matrix<'a, T> {
        Matrix::new(&data[self.offset..], self.shape, self.strides)
    }

    pub(super) fn of_mut<'a, T>(&self, data: &'a mut [T]) -> MatrixMut<'a, T> {
        MatrixMut::new(&mut data[self.offset..], self.shape, self.strides)
    }

    /// A dense matrix at the start of its slice: row-major, or column-major for channels-last.
    pub(super) fn dense(format: MemoryFormat, [rows, columns]: [usize; 2]) -> View {
        let strides = match format {
            MemoryFormat::Contiguous => [columns, 1],
            MemoryFormat::ChannelsLast => [1, rows],
        };
        View { offset: 0, shape: [rows, columns], strides }
    }

    /// One group's weights, (K/groups) x J, in K-major order.
    pub(super) fn weight(problem: &ConvProblem, group: usize) -> View {
        let [rows, columns] = [problem.group_out_channels(), problem.weight_len() / problem.out_channels];
        View { offset: group * rows * columns, shape: [rows, columns], strides: [columns, 1] }
    }
}

/// A tensor with `channels` x `spatial` elements per image.
pub(super) struct Images {
    pub(super) format: MemoryFormat,
    pub(super) channels: usize,
    pub(super) spatial: usize,
}

impl Images {
    /// Channels [c0, c0 + c) by pixels [p0, p0 + p) of image `n`. In channels-last, pixels may continue into the next image.
    pub(super) fn view(&self, n: usize, [c0, c]: [usize; 2], [p0, p]: [usize; 2]) -> View {
        let (offset, strides) = match self.format {
            MemoryFormat::Contiguous => ((n * self.channels + c0) * self.spatial + p0, [self.spatial, 1]),
            MemoryFormat::ChannelsLast => ((n * self.spatial + p0) * self.channels + c0, [1, self.channels]),
        };
        View { offset, shape: [c, p], strides }
    }
}

/// How the images of a batch are split: whole images to each thread if there are enough, else all threads inside one image.
pub(super) struct Split {
    /// Workers that take whole images.
    pub(super) workers: usize,
    /// The most images that a worker takes.
    pub(super) images: usize,
    /// The threads that each worker may use inside an image.
    pub(super) inner: Cpu,
}

impl Split {
    pub(super) fn new(batch: usize, cpu: &Cpu) -> Split {
        if batch >= cpu.threads() && cpu.threads() > 1 {
            let images = batch.div_ceil(cpu.threads());
            Split { workers: batch.div_ceil(images), images, inner: cpu.one_thread() }
        } else {
            Split::whole(batch, cpu)
        }
    }

    /// One worker, whose multiplications all threads share.
    pub(super) fn whole(batch: usize, cpu: &Cpu) -> Split {
        Split { workers: 1, images: batch, inner: cpu.clone() }
    }
}

/// The fraction of its speed on large matrices that multiplication reaches with one group's K and C R S, for [`Cost`].
pub(super) fn gemm_efficiency(problem: &ConvProblem, pass: Pass) -> f64 {
    let depth = problem.weight_len() / problem.out_channels;
    let k = problem.group_out_channels();
    // `sum` is the length of each sum: short sums do not pay for loading and storing the output.
    let (sum, side) = match pass {
        Pass::Forward => (depth, k),
        Pass::BackwardData => (k, depth),
        Pass::BackwardWeights => (usize::MAX, k.min(depth)),
    };
    let part = |size: usize, half: f64| size as f64 / (size as f64 + half);
    part(sum, 16.0) * part(side, 8.0)
}

/// The cost of a product with columns: the multiplication at `efficiency`, and copying every element of the columns, in runs
/// along the channels or the width.
pub(super) fn columns_cost(problem: &ConvProblem, pass: Pass, cpu: &Cpu, efficiency: f64) -> Cost {
    let run = match problem.format {
        MemoryFormat::Contiguous => problem.width.output(),
        MemoryFormat::ChannelsLast => problem.group_in_channels(),
    };
    let elements = problem.flops() / (2 * problem.group_out_channels()) as f64;
    let cycles = elements * (0.3 + 4.0 / run as f64);
    let direct = Cost::direct(problem, efficiency * gemm_efficiency(problem, pass));
    Cost { flops: direct.flops + Cost::flops_of(cycles, cpu) * direct.efficiency, ..direct }
}

/// Adds up the workers' weight gradients, which lie one after the other, into the first, in their order.
pub(super) fn reduce_partials<T: Element>(partials: &mut [T], len: usize) {
    let (total, others) = partials.split_at_mut(len);
    for partial in others.chunks(len) {
        for (sum, &value) in total.iter_mut().zip(partial) {
            *sum += value;
        }
    }
}
