//! Times a block with each way to keep.

use std::time::Instant;

use convoke_autograd::{Buffer, DType, Device};
use convoke_kernels::batch_norm::Statistics;
use convoke_kernels::block::{Backward, Block, BlockProblem, Keep, Operands, Parameters, Wanted};
use convoke_kernels::conv::ConvTypes;
use convoke_kernels::images::{Images, PlainImages};
use convoke_kernels::{Result, elementwise};

use super::blocks::BlockKind;

/// A block on made-up data, which can be run many times.
pub(super) struct Trial {
    device: Device,
    problem: BlockProblem,
    wanted: Wanted,
    x: Buffer,
    weight: Buffer,
    bias: Option<Buffer>,
    gamma: Option<Buffer>,
    beta: Option<Buffer>,
    residual: Option<Buffer>,
}

impl Trial {
    pub(super) fn new(device: &Device, kind: &BlockKind) -> Result<Trial> {
        let BlockKind { problem, wanted } = *kind;
        let ConvTypes { input, weight, output, .. } = problem.convolution.types;
        let noise = |dtype: DType, len: usize| noise(device, dtype, len);
        let channels = problem.convolution.out_channels;
        let vector = |there: bool| there.then(|| noise(weight, channels)).transpose();
        let residual =
            problem.residual.then(|| noise(output, problem.convolution.output_len())).transpose()?;
        Ok(Trial {
            device: device.clone(),
            problem,
            wanted,
            x: noise(input, problem.convolution.input_len())?,
            weight: noise(weight, problem.convolution.weight_len())?,
            bias: vector(problem.bias)?,
            gamma: vector(problem.gamma)?,
            beta: vector(problem.beta)?,
            residual,
        })
    }

    /// Seconds of a forward and a backward. The block's output is read after each, as the next layer would read it.
    pub(super) fn run(&self, keep: Keep) -> Result<f64> {
        let (device, images) = (&self.device, self.problem.convolution.batch);
        let parameters = Parameters {
            weight: self.weight.elements(),
            bias: self.bias.as_ref().map(Buffer::elements),
            gamma: self.gamma.as_ref().map(Buffer::elements),
            beta: self.beta.as_ref().map(Buffer::elements),
        };
        let x = PlainImages::borrowed(device, self.x.elements(), images)?;
        let residual = self
            .residual
            .as_ref()
            .map(|residual| PlainImages::borrowed(device, residual.elements(), images))
            .transpose()?;
        let residual = residual.as_ref().map(|residual| residual as &dyn Images);

        let start = Instant::now();
        let block = Block::new(device, self.problem, images, keep)?;
        let operands = Operands { x: &x, residual, parameters };
        let forward = block.forward(&operands, &Statistics::Batch, true)?;
        let image = block.output_shape()[1..].iter().product();
        let output = forward.output.map(|output| PlainImages::owned(device, output, images)).transpose()?;
        let recipe = forward.saved.recipe(&block);
        let recomputed = recipe.map(|recipe| {
            let filter = parameters.filter();
            let (of_epilogue, x) = (operands.of_epilogue(), &x);
            PlainImages::recomputed((device, self.x.dtype()), [images, image], move |images, z| {
                recipe.write(Some((x, filter)), &of_epilogue, images, z)
            })
        });
        // What can be recomputed is held without its elements, by the next layer and by the block itself.
        if let Some(output) = &output {
            read(device, output, [images, image])?;
        }
        let z = match (output, recomputed) {
            (Some(output), None) => output,
            (output, Some(recomputed)) => {
                if output.is_none() {
                    read(device, &recomputed, [images, image])?;
                }
                recomputed
            }
            (None, None) => unreachable!("an output that is not there has a recipe"),
        };
        read(device, &z, [images, image])?;
        let mut dz = device.buffer(self.x.dtype(), images * image)?;
        dz.elements_mut().fill(1e-3);
        let dz = PlainImages::owned(device, dz, images)?;
        let z = forward.saved.needs_output().then_some(z);
        let inputs = Backward { saved: forward.saved, x: x.clone(), parameters, dz, z, sum: None };
        block.backward(inputs, &self.wanted)?;
        Ok(start.elapsed().as_secs_f64())
    }
}

/// Numbers that look random and are cheap to make.
fn noise(device: &Device, dtype: DType, len: usize) -> Result<Buffer> {
    let mut noise = device.buffer(dtype, len)?;
    noise.elements_mut().update(|index, _| {
        let bits = (index as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
        bits as f64 / f64::from(1u32 << 23) - 1.0
    });
    Ok(noise)
}

/// Stands in for the next layer: reads a tensor a few images at a time, about as many as a tile has.
fn read(device: &Device, z: &dyn Images, [images, image]: [usize; 2]) -> Result<()> {
    let step = ((1 << 19) / image.max(1)).max(1);
    let mut scratch = None;
    for first in (0..images).step_by(step) {
        let part = z.read(first..(first + step).min(images), &mut scratch)?;
        std::hint::black_box(elementwise::sum(device.compute(), part)?);
    }
    Ok(())
}
