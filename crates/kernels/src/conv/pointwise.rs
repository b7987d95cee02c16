//! 1 x 1 convolution as matrix multiplication on the tensors as they lie: nothing is copied.
//!
//! With stride 1 and no padding the columns of im2col are the input itself. In channels-last the whole batch is
//! one multiplication; in contiguous format each image is one.

use super::gemm_views::{Images, Split, View, gemm_efficiency, reduce_partials};
use super::plan::{ConvAlgorithm, ConvKernel, ConvPlan, Cost, Kernel, NotApplicable};
use super::problem::{ConvAxis, ConvProblem, Pass};
use crate::gemm::{Update, gemm};
use crate::{Cpu, Element, MemoryFormat};

/// Pointwise convolution as GEMM.
pub(super) struct Pointwise;

impl ConvAlgorithm for Pointwise {
    fn name(&self) -> &'static str {
        "pointwise"
    }

    fn revision(&self) -> u32 {
        1
    }

    fn plan(&self, problem: &ConvProblem, pass: Pass, cpu: &Cpu) -> Result<ConvPlan, NotApplicable> {
        let plain = |axis: &ConvAxis| {
            axis.kernel == 1 && axis.stride == 1 && axis.pad_before == 0 && axis.pad_after == 0
        };
        if !plain(&problem.height) || !plain(&problem.width) {
            return Err(NotApplicable("needs a 1x1 kernel, stride 1 and no padding".into()));
        }
        let spatial = problem.height.input * problem.width.input;
        // Channels-last pixels of all images follow one another: one long image.
        let (images, pixels) = match problem.format {
            MemoryFormat::Contiguous => (problem.batch, spatial),
            MemoryFormat::ChannelsLast => (1, problem.batch * spatial),
        };
        let workspace = match (pass, Split::new(images, cpu).workers) {
            (Pass::BackwardWeights, workers) if workers > 1 => workers * problem.weight_len(),
            _ => 0,
        };
        let kernel = Gemms { problem: *problem, pass, images, pixels };
        let cost = Cost::direct(problem, 0.75 * gemm_efficiency(problem, pass));
        Ok(ConvPlan::new(self, (problem, pass), cpu, workspace, Kernel::of(problem, kernel)).with_cost(cost))
    }
}

struct Gemms {
    problem: ConvProblem,
    pass: Pass,
    images: usize,
    pixels: usize,
}

impl Gemms {
    /// Calls `visit` with the views of weight, x and y for each image and group.
    fn each(&self, images: usize, mut visit: impl FnMut(View, View, View)) {
        let p = &self.problem;
        let tensor = |channels| Images { format: p.format, channels, spatial: self.pixels };
        let (x, y) = (tensor(p.in_channels), tensor(p.out_channels));
        let (c, k) = (p.group_in_channels(), p.group_out_channels());
        for image in 0..images {
            for group in 0..p.groups {
                visit(
                    View::weight(p, group),
                    x.view(image, [group * c, c], [0, self.pixels]),
                    y.view(image, [group * k, k], [0, self.pixels]),
                );
            }
        }
    }
}

impl<T: Element> ConvKernel<T> for Gemms {
    fn run(&self, cpu: &Cpu, [a, b]: [&[T]; 2], output: &mut [T], workspace: &mut [T]) {
        let p = &self.problem;
        let split = Split::new(self.images, cpu);
        let inner = &split.inner;
        let (x_image, y_image) = (p.in_channels * self.pixels, p.out_channels * self.pixels);
        let (x_chunk, y_chunk) = (x_image * split.images, y_image * split.images);
        let work = p.flops() as usize;
        match self.pass {
            Pass::Forward => {
                cpu.for_each(work, a.chunks(x_chunk).zip(output.chunks_mut(y_chunk)), |(x, y)| {
                    self.each(x.len() / x_image, |w, x_view, y_view| {
                        gemm(inner, w.of(b), x_view.of(x), y_view.of_mut(y), Update::Overwrite);
                    });
                });
            }
            Pass::BackwardData => {
                cpu.for_each(work, a.chunks(y_chunk).zip(output.chunks_mut(x_chunk)), |(dy, dx)| {
                    self.each(dx.len() / x_image, |w, x_view, y_view| {
                        gemm(inner, w.of(b).t(), y_view.of(dy), x_view.of_mut(dx), Update::Overwrite);
                    });
                });
            }
            Pass::BackwardWeights => {
                let len = p.weight_len();
                let task = |((x, dy), dweight): ((&[T], &[T]), &mut [T])| {
                    dweight.fill(T::zero());
                    self.each(x.len() / x_image, |w, x_view, y_view| {
                        gemm(inner, y_view.of(dy), x_view.of(x).t(), w.of_mut(dweight), Update::Add);
                    });
                };
                if split.workers == 1 {
                    return task(((a, b), output));
                }
                let tasks = a.chunks(x_chunk).zip(b.chunks(y_chunk)).zip(workspace.chunks_mut(len));
                cpu.for_each(work, tasks, task);
                reduce_partials(workspace, len);
                output.copy_from_slice(&workspace[..len]);
            }
        }
    }
}
