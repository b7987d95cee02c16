//! Times a kind of block with each way to keep.

use std::time::Instant;

use convoke_autograd::ops::{BatchNormOptions, ConvBnBlock, ConvBnParameters, Keep, conv_bn_block2d};
use convoke_autograd::{
    BackwardOptions, DType, Device, Element, Function, MemoryFormat, Needs, Result, Tensor, apply,
};
use convoke_kernels::elementwise;

use super::blocks::BlockKind;

/// A block on random data, which can be run many times.
pub(super) struct Trial {
    kind: BlockKind,
    x: Tensor,
    weight: Tensor,
    bias: Option<Tensor>,
    gamma: Option<Tensor>,
    beta: Option<Tensor>,
    residual: Option<Tensor>,
}

impl Trial {
    pub(super) fn new(device: &Device, kind: &BlockKind) -> Result<Trial> {
        let leaf = |shape: &[usize]| noise(device, shape, kind.dtype).map(|noise| noise.with_grad());
        let channels = [kind.weight[0]];
        let x = noise(device, &kind.input, kind.dtype)?.to_format(kind.format)?;
        let mut trial = Trial {
            kind: kind.clone(),
            x: if kind.for_input { x.with_grad() } else { x },
            weight: leaf(&kind.weight)?,
            bias: kind.bias.then(|| leaf(&channels)).transpose()?,
            gamma: kind.affine.then(|| leaf(&channels)).transpose()?,
            beta: kind.affine.then(|| leaf(&channels)).transpose()?,
            residual: None,
        };
        if kind.residual {
            let shape = convoke_autograd::no_grad(|| trial.forward(Keep::Recompute))?.shape().to_vec();
            trial.residual = Some(leaf(&shape)?.to_format(kind.format)?.detach().with_grad());
        }
        Ok(trial)
    }

    fn forward(&self, keep: Keep) -> Result<Tensor> {
        let parameters = ConvBnParameters {
            weight: &self.weight,
            bias: self.bias.as_ref(),
            gamma: self.gamma.as_ref(),
            beta: self.beta.as_ref(),
        };
        let block = ConvBnBlock {
            convolution: self.kind.convolution,
            norm: BatchNormOptions { activation: self.kind.activation, ..BatchNormOptions::default() },
            residual: self.residual.as_ref(),
            pool: self.kind.pool,
            keep,
        };
        Ok(conv_bn_block2d(&self.x, &parameters, &block)?.0)
    }

    /// Seconds of a forward and a backward. A reader after the block reads its output in both, as the next layer would.
    pub(super) fn run(&self, keep: Keep) -> Result<f64> {
        let start = Instant::now();
        let output = self.forward(keep)?;
        let read = apply(Reader, &[&output])?;
        drop(output);
        read.backward_with(BackwardOptions::default())?;
        Ok(start.elapsed().as_secs_f64())
    }
}

/// Numbers that look random and are cheap to make.
fn noise(device: &Device, shape: &[usize], dtype: DType) -> Result<Tensor> {
    fn fill<T: Element>(out: &mut [T]) {
        for (index, out) in out.iter_mut().enumerate() {
            let bits = (index as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
            *out = T::of(bits as f64 / f64::from(1u32 << 23) - 1.0);
        }
    }
    let format = MemoryFormat::Contiguous;
    match dtype {
        DType::F64 => Tensor::build(device, shape, format, |out: &mut [f64]| {
            fill(out);
            Ok(())
        }),
        _ => Tensor::build(device, shape, format, |out: &mut [f32]| {
            fill(out);
            Ok(())
        }),
    }
}

/// Stands in for the next layer: reads the block's output a few images at a time in forward, and again in backward.
struct Reader;

/// The number of images to read at a time: about as many as a tile has.
fn at_a_time(x: &Tensor) -> usize {
    let image = x.len() / x.shape()[0].max(1) * x.dtype().size();
    ((2 << 20) / image.max(1)).max(1)
}

fn read(x: &Tensor) -> Result<f64> {
    fn sum<T: Element>(x: &Tensor) -> Result<f64> {
        let (mut scratch, mut sum) = (None, 0.0);
        let (images, step) = (x.shape()[0], at_a_time(x));
        for first in (0..images).step_by(step) {
            let part = x.images::<T>(first..(first + step).min(images), &mut scratch)?;
            sum += elementwise::sum(x.device().compute(), part);
        }
        Ok(sum)
    }
    match x.dtype() {
        DType::F64 => sum::<f64>(x),
        _ => sum::<f32>(x),
    }
}

impl Function for Reader {
    type Saved = Tensor;

    fn name(&self) -> &'static str {
        "reader"
    }

    fn forward(&self, inputs: &[&Tensor], _: &Needs) -> Result<(Tensor, Tensor)> {
        let x = inputs[0];
        Ok((Tensor::full(x.device(), &[], x.dtype(), read(x)?)?, x.keep()))
    }

    fn backward(&self, x: Tensor, _: Tensor, _: &Needs) -> Result<Vec<Option<Tensor>>> {
        let value = if read(&x)?.is_nan() { 0.0 } else { 1e-3 };
        let (device, shape, format) = (x.device(), x.shape(), x.format());
        let dx = match x.dtype() {
            DType::F64 => Tensor::build(device, shape, format, |dx: &mut [f64]| {
                dx.fill(value);
                Ok(())
            }),
            _ => Tensor::build(device, shape, format, |dx: &mut [f32]| {
                dx.fill(value as f32);
                Ok(())
            }),
        };
        Ok(vec![Some(dx?)])
    }
}
