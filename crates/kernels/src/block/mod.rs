//! Convolution, batch norm and what follows them as one operation; [`Keep`] chooses how much it keeps for backward.
//!
//! | name | what it is |
//! |---|---|
//! | x | the input |
//! | y | the convolution's output |
//! | z | the block's output: pool(activation(batch_norm(y) + residual)) |
//! | dx, dy, dz | their gradients |
//!
//! Separate layers keep y for the backward of batch norm, and z for the next layer. One of the two is enough: y is x
//! convolved, and z is y normalised. [`Keep`] says which is kept. The other is recomputed, tile by tile where possible; a
//! tile is a run of images that fits the caches ([`TiledConv`]). Statistics are computed once, in forward. docs/memory.md has
//! the derivation. After PyTorch's tutorial "Fusing Convolution and Batch Norm using Custom Function".
//!
//! ```
//! use convoke_kernels::activation::Activation;
//! use convoke_kernels::batch_norm::{EpsPlace, Statistics};
//! use convoke_kernels::block::{
//!     Backward, Block, BlockProblem, EpilogueOperands, Keep, Operands, Parameters, Wanted,
//! };
//! use convoke_kernels::images::PlainImages;
//! use convoke_kernels::Device;
//!
//! // Two images of one channel, 2 x 2, convolved by one 1x1 filter.
//! let (x, weight) = ([1.0f32, 2., 3., 4., 5., 6., 7., 8.], [2.0f32]);
//! let device = Device::cpu()?;
//! let problem = BlockProblem::new("mb2ic1ih2iw2oc1kh1kw1".parse()?).with_activation(Activation::Relu);
//! let block = Block::new(&device, problem, 2, Keep::Renormalize)?;
//! let x = PlainImages::borrowed(&device, &x, 2)?;
//! let parameters = Parameters { weight: (&weight).into(), bias: None, gamma: None, beta: None };
//! let operands = Operands { x: &x, residual: None, parameters };
//! let forward = block.forward(&operands, &Statistics::Batch, true)?;
//! // z is not computed before it is read.
//! assert!(forward.output.is_none());
//! let mut z = [0.0f32; 8];
//! let operands = EpilogueOperands { gamma: None, beta: None, residual: None };
//! forward.saved.recipe(&block).expect("it keeps y").write(None, &operands, 0..2, (&mut z).into())?;
//! assert!(z[..4].iter().all(|&z| z == 0.0) && z[7] > 1.5);
//!
//! let dz = PlainImages::borrowed(&device, &[1.0f32; 8], 2)?;
//! let backward = Backward { saved: forward.saved, x, parameters, dz, z: None, sum: None };
//! let gradients = block.backward(backward, &Wanted { weight: true, ..Wanted::default() })?;
//! assert_eq!(gradients.weight.unwrap().len(), 1);
//! # Ok::<(), convoke_kernels::Error>(())
//! ```

mod backward;
mod epilogue;
mod forward;
mod keep;
mod lanes;
mod recompute;

pub use backward::{Backward, BlockRun, Gradients, Wanted};
pub use forward::{Forward, Saved};
pub use keep::Keep;
pub use recompute::{ConvInput, Recipe};

use std::ops::Range;

use crate::activation::Activation;
use crate::batch_norm::{EpsPlace, Normalization, Normalizer};
use crate::conv::{ConvProblem, Filter, TiledConv};
use crate::error::{check_dtype, invalid};
use crate::images::Images;
use crate::pool::PoolProblem;
use crate::{Device, Result, Slice};

const NAME: &str = "conv_bn2d";

/// Everything that decides what a block computes and costs, but for its operands, its statistics and what it keeps.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BlockProblem {
    /// The convolution of the whole batch.
    pub convolution: ConvProblem,
    /// Whether the convolution has a bias.
    pub bias: bool,
    /// Whether batch norm has a weight.
    pub gamma: bool,
    /// Whether batch norm has a bias.
    pub beta: bool,
    /// Keeps batch norm's divisor from 0.
    pub eps: f64,
    /// Where eps is added.
    pub eps_place: EpsPlace,
    /// Whether something is added before the activation.
    pub residual: bool,
    /// Applied to the normalised values, or to their sum with the residual: then not one that
    /// [needs its input](Activation::needs_input).
    pub activation: Activation,
    /// Max pooling after the activation, of the whole batch of y. Not with a residual; at most 256 elements per window.
    pub pool: Option<PoolProblem>,
}

impl BlockProblem {
    /// The elements of a window that a byte can number.
    pub const MOST_POOLED: usize = 256;

    /// A convolution without bias, and batch norm without weight and bias, with eps 1e-5 inside the root.
    pub fn new(convolution: ConvProblem) -> BlockProblem {
        BlockProblem {
            convolution,
            bias: false,
            gamma: false,
            beta: false,
            eps: 1e-5,
            eps_place: EpsPlace::InsideRoot,
            residual: false,
            activation: Activation::Identity,
            pool: None,
        }
    }

    /// The problem with this activation.
    #[must_use]
    pub fn with_activation(self, activation: Activation) -> BlockProblem {
        BlockProblem { activation, ..self }
    }

    fn check(&self) -> Result<()> {
        if self.residual && self.activation.needs_input() {
            let reason = format!(
                "the gradient of {:?} needs its input, which is not kept where a residual is added",
                self.activation
            );
            return Err(invalid(NAME, reason));
        }
        let Some(pool) = &self.pool else { return Ok(()) };
        if self.residual {
            return Err(invalid(NAME, "a block has a residual or a pool, not both"));
        }
        if pool.window_len() > BlockProblem::MOST_POOLED {
            let (len, most) = (pool.window_len(), BlockProblem::MOST_POOLED);
            return Err(invalid(NAME, format!("a pool of {len} elements a window: at most {most}")));
        }
        if pool.input_extent() != self.convolution.output_extent() {
            let reason = format!("the pool {pool} does not take the output of {}", self.convolution);
            return Err(invalid(NAME, reason));
        }
        Ok(())
    }
}

/// The parameters of a block.
#[derive(Debug, Clone, Copy)]
pub struct Parameters<'a> {
    /// The convolution's weight, K x C/groups x R x S.
    pub weight: Slice<'a>,
    /// The convolution's bias, K.
    pub bias: Option<Slice<'a>>,
    /// Batch norm's weight, K.
    pub gamma: Option<Slice<'a>>,
    /// Batch norm's bias, K.
    pub beta: Option<Slice<'a>>,
}

impl<'a> Parameters<'a> {
    /// The parameters of the convolution.
    pub fn filter(&self) -> Filter<'a> {
        Filter { weight: self.weight, bias: self.bias }
    }
}

/// What forward reads.
#[derive(Clone, Copy)]
pub struct Operands<'a> {
    /// N x C x H x W.
    pub x: &'a dyn Images,
    /// The residual, of the shape of y.
    pub residual: Option<&'a dyn Images>,
    /// The parameters.
    pub parameters: Parameters<'a>,
}

impl<'a> Operands<'a> {
    /// The operands of what follows the convolution.
    pub fn of_epilogue(&self) -> EpilogueOperands<'a> {
        let Parameters { gamma, beta, .. } = self.parameters;
        EpilogueOperands { gamma, beta, residual: self.residual }
    }
}

/// What is read after the convolution.
#[derive(Clone, Copy)]
pub struct EpilogueOperands<'a> {
    /// Batch norm's weight, K.
    pub gamma: Option<Slice<'a>>,
    /// Batch norm's bias, K.
    pub beta: Option<Slice<'a>>,
    /// The residual, of the shape of y.
    pub residual: Option<&'a dyn Images>,
}

/// A block on a device.
#[derive(Clone)]
pub struct Block {
    convolution: TiledConv,
    problem: BlockProblem,
    keep: Keep,
}

impl Block {
    /// A block for `images` images. The problem has that batch; without images it has any, and nothing runs.
    ///
    /// # Errors
    /// If the problem has a residual and a pool, a pool that does not fit, or a residual and an activation whose backward needs
    /// its input.
    pub fn new(device: &Device, problem: BlockProblem, images: usize, keep: Keep) -> Result<Block> {
        problem.check()?;
        let keep = keep.resolved(problem.residual, problem.pool.is_some());
        let convolution = TiledConv::new(device, problem.convolution, images).in_lanes();
        Ok(Block { convolution, problem, keep })
    }

    /// The normalisation of y, with the activation unless a residual is added before it.
    fn normalization<'a>(
        &self,
        normalizer: &'a Normalizer,
        [gamma, beta]: [Option<Slice<'a>>; 2],
    ) -> Normalization<'a> {
        let BlockProblem { residual, activation, .. } = self.problem;
        let activation = if residual { Activation::Identity } else { activation };
        Normalization { activation, ..normalizer.with(gamma, beta) }
    }

    /// The convolution of the block.
    pub fn convolution(&self) -> &TiledConv {
        &self.convolution
    }

    /// What it computes.
    pub fn problem(&self) -> &BlockProblem {
        &self.problem
    }

    /// N x K x height x width of z, where N may be 0.
    pub fn output_shape(&self) -> [usize; 4] {
        let [images, channels, height, width] = self.convolution.output_shape();
        match &self.problem.pool {
            None => [images, channels, height, width],
            Some(pool) => {
                let [_, channels, height, width] = pool.output_shape();
                [images, channels, height, width]
            }
        }
    }

    /// Elements of an image of z.
    fn output_image(&self) -> usize {
        self.output_shape()[1..].iter().product()
    }

    /// The place of some images in z.
    fn output_place(&self, images: &Range<usize>) -> Range<usize> {
        let image = self.output_image();
        images.start * image..images.end * image
    }

    fn device(&self) -> &Device {
        self.convolution.device()
    }

    /// Checks that the operands are those that the problem has.
    fn check(&self, parameters: &Parameters<'_>, residual: Option<bool>) -> Result<()> {
        let BlockProblem { convolution, bias, gamma, beta, .. } = &self.problem;
        check_dtype(NAME, convolution.types.weight, parameters.weight.dtype())?;
        let given = [
            ("bias", *bias, parameters.bias.is_some()),
            ("gamma", *gamma, parameters.gamma.is_some()),
            ("beta", *beta, parameters.beta.is_some()),
            ("residual", self.problem.residual, residual.unwrap_or(self.problem.residual)),
        ];
        match given.into_iter().find(|(_, expected, found)| expected != found) {
            Some((name, true, _)) => Err(invalid(NAME, format!("the {name} is missing"))),
            Some((name, false, _)) => Err(invalid(NAME, format!("the block has no {name}"))),
            None => Ok(()),
        }
    }
}
