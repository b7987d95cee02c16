//! Convolution, batch norm and what follows them as one operation; [`Keep`] chooses how much it keeps for backward.
//!
//! Separate layers keep the convolution's output for the backward of batch norm, and the block's own output for the next
//! layer. One of the two is enough: the convolution's output is the input convolved, and the block's output is that normalised.
//! [`Keep`] says which is kept. The other is recomputed, tile by tile where possible; a tile is a run of images that fits the
//! caches. Statistics are computed once, in forward. docs/memory.md has the derivation.
//! After PyTorch's tutorial "Fusing Convolution and Batch Norm using Custom Function".

mod again;
mod backward;
mod epilogue;
mod forward;

use std::sync::Arc;

use convoke_kernels::batch_norm::Moments;

use self::again::{Convolved, Kept};
use self::epilogue::Epilogue;
use super::batch_norm::BatchNormOptions;
use super::conv2d::ConvOptions;
use super::pool2d::PoolOptions;
use crate::tensor::dispatch;
use crate::{Buffer, Function, Needs, Result, Tensor, apply_with_saved};

/// The parameters of [`conv_bn2d`].
#[derive(Debug, Clone, Copy)]
pub struct ConvBnParameters<'a> {
    /// The convolution's weight, K x C/groups x R x S.
    pub weight: &'a Tensor,
    /// The convolution's bias, K.
    pub bias: Option<&'a Tensor>,
    /// Batch norm's weight, K.
    pub gamma: Option<&'a Tensor>,
    /// Batch norm's bias, K.
    pub beta: Option<&'a Tensor>,
}

/// What a block of convolution and batch norm keeps for backward, besides its input.
///
/// Values are the same to the last bit for all of them, and gradients for all but [`Keep::Compact`] and [`Keep::Invert`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub enum Keep {
    /// The choice that is usually fastest: [`Keep::Renormalize`], or [`Keep::Store`] with a residual or a pool, whose output
    /// costs more to recompute.
    #[default]
    Auto,
    /// The convolution's output and the block's own output: nothing is recomputed.
    Store,
    /// The convolution's output. The block's own output is recomputed from it, by normalisation, when an operation that saved it
    /// reads it.
    Renormalize,
    /// The block's own output, and the convolution's output minus its mean, rounded to bf16, which halves its bytes. Gradients
    /// are off by some thousandths of their size. Works as [`Keep::Store`] for f64.
    Compact,
    /// The block's own output. The convolution is recomputed as a whole.
    Recompute,
    /// The block's own output. The convolution is recomputed twice, tile by tile; its output never exists as a whole in backward.
    RecomputeInTiles,
    /// Neither output: the convolution is recomputed, and the block's own output is normalised from that.
    RecomputeBoth,
    /// The block's own output, from which the convolution's output is computed by inverting the normalisation. Works as
    /// [`Keep::RecomputeInTiles`] where that is impossible: with a ReLU, a residual or a pool, and where the statistics and
    /// parameters of a channel are out of range, such as a gamma too near to 0.
    Invert,
}

impl Keep {
    /// All of them.
    pub const ALL: [Keep; 8] = [
        Keep::Auto,
        Keep::Store,
        Keep::Renormalize,
        Keep::Compact,
        Keep::Recompute,
        Keep::RecomputeInTiles,
        Keep::RecomputeBoth,
        Keep::Invert,
    ];

    /// The name in plans and files.
    pub fn name(self) -> &'static str {
        match self {
            Keep::Auto => "auto",
            Keep::Store => "store",
            Keep::Renormalize => "renormalize",
            Keep::Compact => "compact",
            Keep::Recompute => "recompute",
            Keep::RecomputeInTiles => "recompute-tiled",
            Keep::RecomputeBoth => "recompute-both",
            Keep::Invert => "invert",
        }
    }

    /// The variant with this name.
    pub fn named(name: &str) -> Option<Keep> {
        Keep::ALL.into_iter().find(|keep| keep.name() == name)
    }

    /// Replaces [`Keep::Auto`] by what it stands for in a block with a residual or with a pool; the others stay the same.
    pub fn resolved(self, residual: bool, pool: bool) -> Keep {
        match self {
            Keep::Auto if residual || pool => Keep::Store,
            Keep::Auto => Keep::Renormalize,
            keep => keep,
        }
    }

    /// Whether gradients are those of [`Keep::Store`], to the last bit.
    pub fn is_exact(self) -> bool {
        !matches!(self, Keep::Compact | Keep::Invert)
    }
}

impl std::fmt::Display for Keep {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// The options of a [`conv_bn_block2d`]: everything but its input and parameters.
#[derive(Debug, Clone, Default)]
pub struct ConvBnBlock<'a> {
    /// The convolution.
    pub convolution: ConvOptions,
    /// The batch norm, and the activation at the end.
    pub norm: BatchNormOptions,
    /// Added to the normalised values before the activation; it has their shape.
    pub residual: Option<&'a Tensor>,
    /// Max pooling after the activation. Not allowed with a residual; at most 256 elements per window.
    pub pool: Option<PoolOptions>,
    /// What is kept for backward.
    pub keep: Keep,
}

impl ConvBnBlock<'_> {
    /// Whether a block can have this pool: whether a byte can number the elements of a window.
    pub fn can_pool(pool: &PoolOptions) -> bool {
        let elements = pool.kernel.iter().try_fold(1usize, |len, &size| len.checked_mul(size));
        elements.is_some_and(|elements| elements <= 256)
    }
}

/// Gives exactly the values of [`super::batch_norm`] of [`super::conv2d`], but saves one tensor besides `x` rather than two;
/// [`conv_bn_block2d`] can save less.
///
/// Also returns the batch's moments if they were computed, for the caller's running statistics.
///
/// # Errors
/// Those of the two operations.
pub fn conv_bn2d(
    x: &Tensor,
    parameters: &ConvBnParameters<'_>,
    convolution: &ConvOptions,
    norm: &BatchNormOptions,
) -> Result<(Tensor, Option<Moments>)> {
    let block = ConvBnBlock { convolution: *convolution, norm: norm.clone(), ..ConvBnBlock::default() };
    conv_bn_block2d(x, parameters, &block)
}

/// As [`conv_bn2d`], with an optional residual and pool: `pool(activation(batch_norm(conv2d(x)) + residual))`.
///
/// # Errors
/// Those of the operations; a residual of another shape; a residual and a pool at once.
pub fn conv_bn_block2d(
    x: &Tensor,
    parameters: &ConvBnParameters<'_>,
    block: &ConvBnBlock<'_>,
) -> Result<(Tensor, Option<Moments>)> {
    let ConvBnParameters { weight, bias, gamma, beta } = *parameters;
    let optional = [bias, gamma, beta, block.residual];
    let function = ConvBn {
        convolution: block.convolution,
        norm: block.norm.clone(),
        pool: block.pool,
        keep: block.keep.resolved(block.residual.is_some(), block.pool.is_some()),
        has: optional.map(|input| input.is_some()),
    };
    let inputs: Vec<&Tensor> = [x, weight].into_iter().chain(optional.into_iter().flatten()).collect();
    apply_with_saved(function, &inputs, |saved| saved.epilogue.normalizer.moments.clone())
}

const NAME: &str = "conv_bn2d";

struct ConvBn {
    convolution: ConvOptions,
    norm: BatchNormOptions,
    pool: Option<PoolOptions>,
    keep: Keep,
    /// Whether there is a convolution bias, a gamma, a beta, a residual.
    has: [bool; 4],
}

#[derive(Clone)]
struct Saved {
    convolved: Arc<Convolved>,
    kept: Kept,
    epilogue: Epilogue,
    /// The block's own output, where backward reads the activation's mask from it.
    output: Option<Tensor>,
    /// The index of each window's largest element.
    taken: Option<Arc<Buffer<u8>>>,
}

impl ConvBn {
    /// The indices of bias, gamma, beta and residual among the inputs.
    fn places(&self) -> [Option<usize>; 4] {
        let mut next = 2;
        self.has.map(|has| {
            has.then(|| {
                next += 1;
                next - 1
            })
        })
    }
}

impl Function for ConvBn {
    type Saved = Saved;

    fn name(&self) -> &'static str {
        NAME
    }

    fn forward(&self, inputs: &[&Tensor], needs: &Needs) -> Result<(Tensor, Saved)> {
        dispatch!(inputs[0].dtype(), T => self.run_forward::<T>(inputs, needs))
    }

    fn backward(&self, saved: Saved, upstream: Tensor, needs: &Needs) -> Result<Vec<Option<Tensor>>> {
        self.backward_onto(saved, upstream, needs, &mut [])
    }

    fn backward_onto(
        &self,
        saved: Saved,
        upstream: Tensor,
        needs: &Needs,
        sums: &mut [Option<Tensor>],
    ) -> Result<Vec<Option<Tensor>>> {
        let sum = sums.first_mut().and_then(Option::take);
        dispatch!(upstream.dtype(), T => self.run_backward::<T>(saved, upstream, needs, sum))
    }
}
