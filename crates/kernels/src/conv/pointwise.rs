//! 1 x 1 convolution as matrix multiplication directly on the tensors: without a stride, nothing is copied.
//!
//! With stride 1 and no padding the columns of im2col are the input itself. In channels-last a thread's pixels are one
//! multiplication; in contiguous format each image is one. With a stride (channels-last only) the pixels that are read are
//! first copied next to each other.

use super::gemm_views::{Images, Split, View, gemm_efficiency, reduce_partials};
use super::plan::{ConvAlgorithm, ConvPlan, Cost, NotApplicable, TypedKernel, kernel_of};
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
        2
    }

    fn plan(&self, problem: &ConvProblem, pass: Pass, cpu: &Cpu) -> Result<ConvPlan, NotApplicable> {
        let plain = |axis: &ConvAxis| axis.kernel == 1 && axis.pad_before == 0 && axis.pad_after == 0;
        if !plain(&problem.height) || !plain(&problem.width) {
            return Err(NotApplicable("needs a 1x1 kernel and no padding".into()));
        }
        let strided = [problem.height.stride, problem.width.stride] != [1, 1];
        if strided && problem.format == MemoryFormat::Contiguous {
            return Err(NotApplicable("needs stride 1, or channels-last".into()));
        }
        let spatial = problem.height.output() * problem.width.output();
        let pixels = problem.batch * spatial;
        // In channels-last the pixels of all images form one sequence, so the threads may split it at any pixel.
        let (images, spatial) = match problem.format {
            MemoryFormat::Contiguous => (problem.batch, spatial),
            MemoryFormat::ChannelsLast => (pixels, 1),
        };
        let weights = pass == Pass::BackwardWeights;
        // Threads that split the pixels need one sum each. Adding these must cost only a fraction of reading x and dy.
        let sums = cpu.threads() * problem.weight_len();
        let few = problem.format == MemoryFormat::ChannelsLast && pixels < 96 * cpu.threads();
        let light = !weights || sums <= pixels * (problem.in_channels + problem.out_channels) / 8;
        let split_pixels = light && !few;
        let taken = if strided { pixels * problem.in_channels } else { 0 };
        let kernel = Gemms { problem: *problem, pass, images, pixels: spatial, split_pixels, taken };
        let workers = kernel.split(cpu).workers;
        let sums = if weights && workers > 1 { workers * problem.weight_len() } else { 0 };
        let workspace = sums + taken;
        let cost = Cost::direct(problem, 0.75 * gemm_efficiency(problem, pass));
        let cost = cost.moving(2 * taken * problem.types.input.size());
        Ok(ConvPlan::new(self, (problem, pass), cpu, workspace, kernel_of(problem, kernel)?).with_cost(cost))
    }
}

struct Gemms {
    problem: ConvProblem,
    pass: Pass,
    images: usize,
    /// Pixels of an image.
    pixels: usize,
    /// Whether each thread takes its own pixels; otherwise all threads share each multiplication.
    split_pixels: bool,
    /// Elements of x that a strided kernel reads, copied next to each other; 0 without a stride.
    taken: usize,
}

impl Gemms {
    fn split(&self, cpu: &Cpu) -> Split {
        if self.split_pixels { Split::new(self.images, cpu) } else { Split::whole(self.images, cpu) }
    }

    /// Copies the pixels that a strided kernel reads next to each other.
    fn take<T: Element>(&self, cpu: &Cpu, x: &[T], taken: &mut [T]) {
        let p = &self.problem;
        let (c, h, w) = (p.in_channels, &p.height, &p.width);
        cpu.for_each(self.taken, taken.chunks_mut(w.output() * c).enumerate(), |(row, taken)| {
            let (n, oh) = (row / h.output(), row % h.output());
            let pixels = x[(n * h.input + oh * h.stride) * w.input * c..].chunks(c).step_by(w.stride);
            taken.chunks_mut(c).zip(pixels).for_each(|(to, from)| to.copy_from_slice(from));
        });
    }

    /// Writes the pixels back to where [`Gemms::take`] reads them, with zeros between.
    fn put<T: Element>(&self, cpu: &Cpu, taken: &[T], x: &mut [T]) {
        let p = &self.problem;
        let (c, h, w) = (p.in_channels, &p.height, &p.width);
        cpu.for_each(x.len(), x.chunks_mut(w.input * c).enumerate(), |(row, x)| {
            let (n, ih) = (row / h.input, row % h.input);
            let oh = ih / h.stride;
            if ih % h.stride != 0 || oh >= h.output() {
                return x.fill(T::zero());
            }
            let taken = &taken[(n * h.output() + oh) * w.output() * c..][..w.output() * c];
            for (iw, to) in x.chunks_mut(c).enumerate() {
                match taken.chunks(c).nth(iw / w.stride).filter(|_| iw % w.stride == 0) {
                    Some(from) => to.copy_from_slice(from),
                    None => to.fill(T::zero()),
                }
            }
        });
    }

    /// Calls `visit` with the views of weight, x and y for each image and group; in channels-last all images count as one.
    fn each(&self, images: usize, mut visit: impl FnMut(View, View, View)) {
        let p = &self.problem;
        let (images, pixels) = match p.format {
            MemoryFormat::Contiguous => (images, self.pixels),
            MemoryFormat::ChannelsLast => (1, images * self.pixels),
        };
        let tensor = |channels| Images { format: p.format, channels, spatial: pixels };
        let (x, y) = (tensor(p.in_channels), tensor(p.out_channels));
        let (c, k) = (p.group_in_channels(), p.group_out_channels());
        for image in 0..images {
            for group in 0..p.groups {
                visit(
                    View::weight(p, group),
                    x.view(image, [group * c, c], [0, pixels]),
                    y.view(image, [group * k, k], [0, pixels]),
                );
            }
        }
    }
}

impl<T: Element> TypedKernel<T> for Gemms {
    fn run(&self, cpu: &Cpu, [a, b]: [&[T]; 2], output: &mut [T], workspace: &mut [T]) {
        let (taken, workspace) = workspace.split_at_mut(self.taken);
        if taken.is_empty() {
            return self.multiply(cpu, [a, b], output, workspace);
        }
        if self.pass == Pass::BackwardData {
            self.multiply(cpu, [a, b], taken, workspace);
            return self.put(cpu, taken, output);
        }
        self.take(cpu, a, taken);
        self.multiply(cpu, [taken, b], output, workspace);
    }
}

impl Gemms {
    /// Runs the pass on tensors whose pixels lie next to each other.
    fn multiply<T: Element>(&self, cpu: &Cpu, [a, b]: [&[T]; 2], output: &mut [T], workspace: &mut [T]) {
        let p = &self.problem;
        let split = self.split(cpu);
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
