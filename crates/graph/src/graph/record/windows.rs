//! Operations with windows: convolution, pooling, resizing.

use convoke_autograd::Result;
use convoke_autograd::ops::{
    Conv3dOptions, ConvOptions, ConvTranspose3dOptions, ConvTransposeOptions, PoolOptions, ResizeOptions,
    ResizeTo,
};

use super::super::{
    Along, Arithmetic, Array, Conv, ConvTranspose, Data, Op, PadKind, Pads, Pool, ReduceKind, Resize,
};
use super::translation::{Step, Translation};

/// The numbers of the last `rank` of height and width.
fn last(numbers: [usize; 2], rank: usize) -> Vec<usize> {
    numbers[2 - rank.min(2)..].to_vec()
}

fn pads(before: [usize; 2], after: [usize; 2], rank: usize) -> Pads {
    Pads::Explicit([last(before, rank), last(after, rank)].concat())
}

/// A convolution in `rank` spatial dimensions.
pub(super) fn conv(options: &ConvOptions, rank: usize) -> Conv {
    let padding = options.padding;
    Conv {
        strides: last(options.stride, rank),
        pads: pads([padding.top, padding.left], [padding.bottom, padding.right], rank),
        dilations: last(options.dilation, rank),
        group: options.groups,
    }
}

pub(super) fn conv_transpose(options: &ConvTransposeOptions) -> ConvTranspose {
    let &ConvTransposeOptions { stride, padding, output_padding, dilation, groups } = options;
    let same = ConvOptions { stride, padding, dilation, groups };
    ConvTranspose { conv: conv(&same, 2), output_padding: output_padding.to_vec(), output_shape: None }
}

pub(super) fn conv3d(options: &Conv3dOptions) -> Conv {
    let &Conv3dOptions { stride, padding, dilation, groups } = options;
    let pads = [0, 1].iter().flat_map(|&end| padding.map(|pad| pad[end])).collect();
    Conv { strides: stride.to_vec(), pads: Pads::Explicit(pads), dilations: dilation.to_vec(), group: groups }
}

pub(super) fn conv_transpose3d(options: &ConvTranspose3dOptions) -> ConvTranspose {
    let output_padding = options.output_padding.to_vec();
    ConvTranspose { conv: conv3d(&options.conv), output_padding, output_shape: None }
}

fn pool(options: &PoolOptions, rank: usize) -> Pool {
    Pool {
        kernel: last(options.kernel, rank),
        strides: last(options.stride, rank),
        pads: pads(options.padding, options.padding_after.unwrap_or(options.padding), rank),
        dilations: last(options.dilation, rank),
        ceil_mode: options.ceil_mode,
        count_include_pad: options.count_include_pad,
    }
}

impl Translation<'_> {
    pub(super) fn max_pool(&mut self, step: &Step<'_>, x: String, options: &PoolOptions) -> String {
        self.node(step, Op::MaxPool(pool(options, step.to[0].len() - 2)), vec![x])
    }

    pub(super) fn average_pool(&mut self, step: &Step<'_>, options: &PoolOptions) -> String {
        let x = vec![step.inputs[0].clone()];
        let rank = step.rank() - 2;
        let pool = pool(options, rank);
        let (input, output) = (&step.from[0][0][2..], &step.to[0][2..]);
        if options.divisor_override.is_some() {
            return self.average_of_whole_windows(step, options);
        }
        let whole = pool.kernel == input && output.iter().all(|&size| size == 1);
        let padded = pool.pads != pads([0; 2], [0; 2], rank);
        self.node(step, if whole && !padded { Op::GlobalAveragePool } else { Op::AveragePool(pool) }, x)
    }

    /// All elements of a window count, also beyond the padding: the input is padded as far as windows reach. Runtimes do not agree on
    /// what lies beyond it.
    fn average_of_whole_windows(&mut self, step: &Step<'_>, options: &PoolOptions) -> String {
        let rank = step.rank() - 2;
        let (input, output) = (&step.from[0][0][2..], &step.to[0][2..]);
        let whole = PoolOptions { padding: [0; 2], padding_after: None, ceil_mode: false, ..*options };
        let pool = pool(&whole, rank);
        let before = last(options.padding, rank);
        let after = (0..rank).map(|axis| {
            let reached = (output[axis] - 1) * pool.strides[axis] + pool.kernel[axis];
            reached.saturating_sub(input[axis] + before[axis])
        });
        let pads = [vec![0; 2], before.clone(), vec![0; 2], after.collect()].concat();
        let mut x = step.inputs[0].clone();
        if pads.iter().any(|&pad| pad > 0) {
            let (pads, zero) = (self.integers(pads.iter().map(|&pad| pad as i64)), self.number(step, 0.0));
            x = self.node(step, Op::Pad(PadKind::Constant), vec![x, pads, zero]);
        }
        let elements = pool.kernel.iter().product::<usize>() as f64;
        let mean = self.node(step, Op::AveragePool(pool), vec![x]);
        let Some(divisor) = options.divisor_override else { return mean };
        // The sum over a window is its mean times its elements.
        let factor = self.number(step, elements / divisor as f64);
        self.node(step, Op::Arithmetic(Arithmetic::Mul), vec![mean, factor])
    }

    /// Windows of equal size are an ordinary pooling. Others are taken one after the other, first along the height.
    pub(super) fn adaptive_pool(&mut self, step: &Step<'_>, max: bool) -> String {
        let (input, output) = (&step.from[0][0][2..], &step.to[0][2..]);
        let mut x = step.inputs[0].clone();
        if input == output {
            return x;
        }
        if output == [1, 1] {
            return self.node(step, if max { Op::GlobalMaxPool } else { Op::GlobalAveragePool }, vec![x]);
        }
        if input.iter().zip(output).all(|(input, output)| input % output == 0) {
            let kernel = [input[0] / output[0], input[1] / output[1]];
            let pool = pool(&PoolOptions { kernel, stride: kernel, ..PoolOptions::new(1) }, 2);
            return self.node(step, if max { Op::MaxPool(pool) } else { Op::AveragePool(pool) }, vec![x]);
        }
        let kind = if max { ReduceKind::Max } else { ReduceKind::Mean };
        for axis in 0..2 {
            let (from, to) = (input[axis], output[axis]);
            let windows = (0..to).map(|index| {
                let (start, end) = (index * from / to, ((index + 1) * from).div_ceil(to));
                let numbers = [start, end, axis + 2].map(|number| number as i64);
                let bounds = numbers.map(|number| self.integers([number]));
                let window = self.node(step, Op::Slice, [vec![x.clone()], bounds.to_vec()].concat());
                self.reduce(step, (kind, true), window, &[axis + 2])
            });
            let windows = windows.collect();
            x = self.node(step, Op::Concat(Along { axis: axis as isize + 2 }), windows);
        }
        x
    }

    pub(super) fn resize(&mut self, step: &Step<'_>, options: &ResizeOptions) -> Result<String> {
        let resize = Resize::of(options.mode, options.coordinates);
        let x = step.inputs[0].clone();
        Ok(match options.to {
            ResizeTo::Size(_) => {
                let sizes = self.sizes(step.to)?;
                self.node(step, Op::Resize(resize), vec![x, String::new(), String::new(), sizes])
            }
            // What this computes is compared with the module's outputs, its size too.
            ResizeTo::Scale(scale) | ResizeTo::SizeByScale { scale, .. } => self.scaled(step, resize, scale),
        })
    }

    fn scaled(&mut self, step: &Step<'_>, resize: Resize, [height, width]: [f64; 2]) -> String {
        let scales = [1.0, 1.0, height, width];
        // ONNX has scales of single precision. Others can be computed with, but are rounded in a file.
        let exact = scales.iter().all(|&scale| f64::from(scale as f32) == scale);
        let scales = self.constant(Array::list(match exact {
            true => Data::F32(scales.iter().map(|&scale| scale as f32).collect()),
            false => Data::F64(scales.to_vec()),
        }));
        self.node(step, Op::Resize(resize), vec![step.inputs[0].clone(), String::new(), scales])
    }
}
