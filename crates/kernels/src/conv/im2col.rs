//! im2col + GEMM: input patches are copied into the columns of a matrix, tile by tile, and multiplied.
//!
//! ```text
//! forward           columns = im2col(x);        y  = W columns
//! backward-data     dcolumns = Wᵀ dy;           dx = col2im(dcolumns)
//! backward-weights  columns = im2col(x);        dW = sum over images and tiles of dy columnsᵀ
//! ```
//! A tile is a run of output rows whose columns fit the L2 cache, so the workspace stays bounded at any image size.
//! Channels-last tensors use columns ordered (r, s, c) and weights reordered likewise.
//! Chellapilla, Puri, Simard: "High Performance Convolutional Neural Networks for Document Processing", 2006.

use super::gemm_views::{Images, Split, View, columns_cost, reduce_partials};
use super::plan::{ConvAlgorithm, ConvPlan, NotApplicable, TypedKernel, kernel_of};
use super::problem::{ConvProblem, Pass};
use crate::gemm::{Update, gemm};
use crate::memory_format::MOST_ELEMENTS;
use crate::transpose::transpose;
use crate::{Cpu, Element, MemoryFormat};

/// im2col + GEMM; applies to every problem that fits a machine.
pub(super) struct Im2col;

/// Elements of one tile's columns: 512 KiB of f32, half of a common L2 cache.
const TILE_ELEMENTS: usize = 128 * 1024;

impl ConvAlgorithm for Im2col {
    fn name(&self) -> &'static str {
        "im2col"
    }

    fn revision(&self) -> u32 {
        1
    }

    fn plan(&self, problem: &ConvProblem, pass: Pass, cpu: &Cpu) -> Result<ConvPlan, NotApplicable> {
        let [_, _, output_rows, output_columns] = problem.output_shape();
        let depth = problem.weight_len() / problem.out_channels;
        // A valid problem may have sizes that no memory can hold.
        let Some(row) = depth.checked_mul(output_columns).filter(|&row| row <= MOST_ELEMENTS) else {
            return Err(NotApplicable(format!(
                "the columns of one output row, {depth} x {output_columns}, are too large"
            )));
        };
        let tile_rows = (TILE_ELEMENTS / row).clamp(1, output_rows);
        let split = Split::new(problem.batch, cpu);
        let columns = row * tile_rows;
        let weights = match (pass, problem.format) {
            (Pass::BackwardWeights, _) => split.workers * problem.weight_len(),
            (_, MemoryFormat::ChannelsLast) => problem.weight_len(),
            (_, MemoryFormat::Contiguous) => 0,
        };
        let workspace = split.workers * columns + weights;
        let tiles = Tiles { problem: *problem, pass, tile_rows, columns };
        let cost = columns_cost(problem, pass, cpu, 0.7);
        Ok(ConvPlan::new(self, (problem, pass), cpu, workspace, kernel_of(problem, tiles)?).with_cost(cost))
    }
}

struct Tiles {
    problem: ConvProblem,
    pass: Pass,
    tile_rows: usize,
    /// Elements of one tile's columns.
    columns: usize,
}

impl<T: Element> TypedKernel<T> for Tiles {
    fn run(&self, cpu: &Cpu, [a, b]: [&[T]; 2], output: &mut [T], workspace: &mut [T]) {
        let p = &self.problem;
        let split = Split::new(p.batch, cpu);
        let (columns, weights) = workspace.split_at_mut(split.workers * self.columns);
        let workers = columns.chunks_mut(self.columns);
        let x_image = p.input_len() / p.batch * split.images;
        let y_image = p.output_len() / p.batch * split.images;
        let work = p.flops() as usize;
        let inner = &split.inner;
        match self.pass {
            Pass::Forward => {
                let weight = self.ordered(cpu, b, weights);
                let tasks = a.chunks(x_image).zip(output.chunks_mut(y_image)).zip(workers);
                cpu.for_each(work, tasks, |((x, y), columns)| self.forward(inner, x, weight, y, columns));
            }
            Pass::BackwardData => {
                let weight = self.ordered(cpu, b, weights);
                let tasks = a.chunks(y_image).zip(output.chunks_mut(x_image)).zip(workers);
                cpu.for_each(work, tasks, |((dy, dx), columns)| {
                    self.backward_data(inner, dy, weight, dx, columns);
                });
            }
            Pass::BackwardWeights => {
                let len = p.weight_len();
                let tasks =
                    a.chunks(x_image).zip(b.chunks(y_image)).zip(weights.chunks_mut(len)).zip(workers);
                cpu.for_each(work, tasks, |(((x, dy), dweight), columns)| {
                    self.backward_weights(inner, x, dy, dweight, columns);
                });
                reduce_partials(weights, len);
                self.reorder(cpu, (&weights[..len], output), Reorder::ToProblem);
            }
        }
    }
}

enum Reorder {
    ToColumns,
    ToProblem,
}

impl Tiles {
    fn depth(&self) -> usize {
        self.problem.weight_len() / self.problem.out_channels
    }

    fn outputs(&self) -> Images {
        let [_, channels, rows, columns] = self.problem.output_shape();
        Images { format: self.problem.format, channels, spatial: rows * columns }
    }

    /// The weight with each filter in the order of the columns' rows: (c, r, s), or (r, s, c) for channels-last.
    fn ordered<'a, T: Element>(&self, cpu: &Cpu, weight: &'a [T], buffer: &'a mut [T]) -> &'a [T] {
        match self.problem.format {
            MemoryFormat::Contiguous => weight,
            MemoryFormat::ChannelsLast => {
                self.reorder(cpu, (weight, buffer), Reorder::ToColumns);
                buffer
            }
        }
    }

    fn reorder<T: Element>(&self, cpu: &Cpu, (from, to): (&[T], &mut [T]), direction: Reorder) {
        if self.problem.format == MemoryFormat::Contiguous {
            return to.copy_from_slice(from);
        }
        let (channels, taps) =
            (self.problem.group_in_channels(), self.depth() / self.problem.group_in_channels());
        let (rows, columns) = match direction {
            Reorder::ToColumns => (channels, taps),
            Reorder::ToProblem => (taps, channels),
        };
        for (from, to) in from.chunks(self.depth()).zip(to.chunks_mut(self.depth())) {
            transpose(cpu, rows, columns, from, to);
        }
    }

    /// Calls `visit` with (image, group, output rows [first, end)) for every tile of the images.
    fn each_tile(&self, images: usize, mut visit: impl FnMut(usize, usize, [usize; 2])) {
        let rows = self.problem.height.output();
        for image in 0..images {
            for group in 0..self.problem.groups {
                for first in (0..rows).step_by(self.tile_rows) {
                    visit(image, group, [first, (first + self.tile_rows).min(rows)]);
                }
            }
        }
    }

    /// The views of a tile: its weights, its columns, and its part of the output tensor.
    fn views(&self, image: usize, group: usize, [first, end]: [usize; 2]) -> [View; 3] {
        let p = &self.problem;
        let width = p.width.output();
        let (channels, pixels) = (p.group_out_channels(), (end - first) * width);
        [
            View::weight(p, group),
            View::dense(p.format, [self.depth(), pixels]),
            self.outputs().view(image, [group * channels, channels], [first * width, pixels]),
        ]
    }

    fn forward<T: Element>(&self, cpu: &Cpu, x: &[T], weight: &[T], y: &mut [T], columns: &mut [T]) {
        let image_len = self.problem.input_len() / self.problem.batch;
        self.each_tile(x.len() / image_len, |image, group, rows| {
            let [w, c, out] = self.views(image, group, rows);
            self.im2col(cpu, &x[image * image_len..][..image_len], group, rows, columns);
            gemm(cpu, w.of(weight), c.of(columns), out.of_mut(y), Update::Overwrite);
        });
    }

    fn backward_data<T: Element>(&self, cpu: &Cpu, dy: &[T], weight: &[T], dx: &mut [T], columns: &mut [T]) {
        let image_len = self.problem.input_len() / self.problem.batch;
        dx.fill(T::zero());
        self.each_tile(dx.len() / image_len, |image, group, rows| {
            let [w, c, out] = self.views(image, group, rows);
            gemm(cpu, w.of(weight).t(), out.of(dy), c.of_mut(columns), Update::Overwrite);
            self.col2im(columns, group, rows, &mut dx[image * image_len..][..image_len]);
        });
    }

    fn backward_weights<T: Element>(
        &self,
        cpu: &Cpu,
        x: &[T],
        dy: &[T],
        dweight: &mut [T],
        columns: &mut [T],
    ) {
        let image_len = self.problem.input_len() / self.problem.batch;
        dweight.fill(T::zero());
        self.each_tile(x.len() / image_len, |image, group, rows| {
            let [w, c, out] = self.views(image, group, rows);
            self.im2col(cpu, &x[image * image_len..][..image_len], group, rows, columns);
            gemm(cpu, out.of(dy), c.of(columns).t(), w.of_mut(dweight), Update::Add);
        });
    }

    /// Fills the columns of output rows [first, end) of one image and group.
    fn im2col<T: Element>(
        &self,
        cpu: &Cpu,
        image: &[T],
        group: usize,
        [first, end]: [usize; 2],
        columns: &mut [T],
    ) {
        let p = &self.problem;
        let pixels = (end - first) * p.width.output();
        let columns = &mut columns[..self.depth() * pixels];
        match p.format {
            MemoryFormat::Contiguous => {
                let plane = p.height.input * p.width.input;
                let taps = p.height.kernel * p.width.kernel;
                let work = columns.len();
                cpu.for_each(work, columns.chunks_mut(pixels).enumerate(), |(row, line)| {
                    let channel = group * p.group_in_channels() + row / taps;
                    let (r, s) = (row % taps / p.width.kernel, row % p.width.kernel);
                    self.im2col_plane(&image[channel * plane..][..plane], [r, s], first, line);
                });
            }
            MemoryFormat::ChannelsLast => {
                let row_len = p.width.output() * self.depth();
                cpu.for_each(columns.len(), columns.chunks_mut(row_len).enumerate(), |(row, line)| {
                    for (ow, patch) in line.chunks_mut(self.depth()).enumerate() {
                        self.im2col_patch(image, group, [first + row, ow], patch);
                    }
                });
            }
        }
    }

    /// Fills one row of the columns: what kernel element (r, s) reads from one channel, for output rows from `first` on.
    fn im2col_plane<T: Element>(&self, plane: &[T], [r, s]: [usize; 2], first: usize, line: &mut [T]) {
        let (h, w) = (&self.problem.height, &self.problem.width);
        let (from, to) = w.outputs_inside(s);
        for (row, out) in line.chunks_mut(w.output()).enumerate() {
            let Some(ih) = h.input_index(first + row, r).filter(|_| from < to) else {
                out.fill(T::zero());
                continue;
            };
            let start = ih * w.input + from * w.stride + s * w.dilation - w.pad_before;
            out[..from].fill(T::zero());
            out[to..].fill(T::zero());
            if w.stride == 1 {
                out[from..to].copy_from_slice(&plane[start..start + to - from]);
            } else {
                for (value, &x) in out[from..to].iter_mut().zip(plane[start..].iter().step_by(w.stride)) {
                    *value = x;
                }
            }
        }
    }

    /// Fills one column in channels-last: the patch that output (oh, ow) reads, as (r, s, c).
    fn im2col_patch<T: Element>(&self, image: &[T], group: usize, [oh, ow]: [usize; 2], patch: &mut [T]) {
        let p = &self.problem;
        let channels = p.group_in_channels();
        for (tap, values) in patch.chunks_mut(channels).enumerate() {
            match self.pixel(oh, ow, tap) {
                Some(pixel) => {
                    values.copy_from_slice(&image[pixel * p.in_channels + group * channels..][..channels])
                }
                None => values.fill(T::zero()),
            }
        }
    }

    /// The input pixel, as an index into H x W, that kernel element `tap` of output (oh, ow) reads.
    fn pixel(&self, oh: usize, ow: usize, tap: usize) -> Option<usize> {
        let p = &self.problem;
        let ih = p.height.input_index(oh, tap / p.width.kernel)?;
        let iw = p.width.input_index(ow, tap % p.width.kernel)?;
        Some(ih * p.width.input + iw)
    }

    /// Adds the columns of output rows [first, end) back to where [`Tiles::im2col`] reads them.
    fn col2im<T: Element>(&self, columns: &[T], group: usize, [first, end]: [usize; 2], image: &mut [T]) {
        let p = &self.problem;
        let (width, taps) = (p.width.output(), p.height.kernel * p.width.kernel);
        let pixels = (end - first) * width;
        let columns = &columns[..self.depth() * pixels];
        match p.format {
            MemoryFormat::Contiguous => {
                let plane = p.height.input * p.width.input;
                for (row, line) in columns.chunks(pixels).enumerate() {
                    let channel = group * p.group_in_channels() + row / taps;
                    let (r, s) = (row % taps / p.width.kernel, row % p.width.kernel);
                    self.col2im_plane(line, [r, s], first, &mut image[channel * plane..][..plane]);
                }
            }
            MemoryFormat::ChannelsLast => {
                let channels = p.group_in_channels();
                for (pixel, patch) in columns.chunks(self.depth()).enumerate() {
                    for (tap, values) in patch.chunks(channels).enumerate() {
                        if let Some(target) = self.pixel(first + pixel / width, pixel % width, tap) {
                            let target = &mut image[target * p.in_channels + group * channels..][..channels];
                            for (sum, &value) in target.iter_mut().zip(values) {
                                *sum += value;
                            }
                        }
                    }
                }
            }
        }
    }

    fn col2im_plane<T: Element>(&self, line: &[T], [r, s]: [usize; 2], first: usize, plane: &mut [T]) {
        let (h, w) = (&self.problem.height, &self.problem.width);
        let (from, to) = w.outputs_inside(s);
        if from >= to {
            return;
        }
        for (row, values) in line.chunks(w.output()).enumerate() {
            let Some(ih) = h.input_index(first + row, r) else { continue };
            let start = ih * w.input + from * w.stride + s * w.dilation - w.pad_before;
            if w.stride == 1 {
                for (sum, &value) in plane[start..].iter_mut().zip(&values[from..to]) {
                    *sum += value;
                }
            } else {
                for (sum, &value) in plane[start..].iter_mut().step_by(w.stride).zip(&values[from..to]) {
                    *sum += value;
                }
            }
        }
    }
}
