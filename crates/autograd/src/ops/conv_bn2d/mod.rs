//! Convolution, batch norm and what follows them as one operation, which keeps as little for backward as it is asked to.
//!
//! Separate layers keep the convolution's output for the backward of batch norm, and the block's own output for the next
//! layer. One of the two is enough: the output is the convolution's output normalised, and that is the input convolved. [`Keep`]
//! says which is kept; the other is made again, tile by tile where that is possible: a tile is a run of images that caches hold.
//! Statistics are taken once, in forward. docs/memory.md has the derivation.
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

/// What a block of convolution and batch norm keeps for backward.
///
/// Values and gradients are the same to the last bit for all but [`Keep::Compact`] and [`Keep::Invert`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub enum Keep {
    /// About what is fastest: [`Keep::Renormalize`], or [`Keep::Store`] with a residual or a pool, whose output costs more to make
    /// again.
    #[default]
    Auto,
    /// The convolution's output and its own: nothing is made again.
    Store,
    /// The convolution's output. Its own output is normalised again where a later operation kept it.
    Renormalize,
    /// Its own output, and the convolution's less its mean, rounded to bf16: half of its bytes. Gradients are off by some
    /// thousandths of their size. [`Keep::Store`] for f64.
    Compact,
    /// Its own output. The convolution's is convolved again, whole.
    Recompute,
    /// Its own output. The convolution's is convolved again twice, tile by tile, and never exists as a whole in backward.
    RecomputeInTiles,
    /// Neither: the convolution's output is convolved again, and its own normalised from that.
    RecomputeBoth,
    /// Its own output, from which the convolution's is worked out: normalisation undone. [`Keep::RecomputeInTiles`] where it
    /// cannot be: with a ReLU, a residual or a pool, and where a gamma is too near to 0.
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

    /// The one of this name.
    pub fn named(name: &str) -> Option<Keep> {
        Keep::ALL.into_iter().find(|keep| keep.name() == name)
    }

    /// What [`Keep::Auto`] is in a block with a residual, with a pool; others are what they are.
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

/// How a [`conv_bn_block2d`] runs: everything but its input and parameters.
#[derive(Debug, Clone, Default)]
pub struct ConvBnBlock<'a> {
    /// The convolution.
    pub convolution: ConvOptions,
    /// The batch norm, and the activation at the end.
    pub norm: BatchNormOptions,
    /// Added to the normalised values, before the activation; of their shape.
    pub residual: Option<&'a Tensor>,
    /// Max pooling behind the activation. Not with a residual; of at most 256 elements a window.
    pub pool: Option<PoolOptions>,
    /// What is kept for backward.
    pub keep: Keep,
}

impl ConvBnBlock<'_> {
    /// Whether a block can have this pool: whether a byte counts the elements of a window.
    pub fn can_pool(pool: &PoolOptions) -> bool {
        let elements = pool.kernel.iter().try_fold(1usize, |len, &size| len.checked_mul(size));
        elements.is_some_and(|elements| elements <= 256)
    }
}

/// Exactly [`super::batch_norm`] of [`super::conv2d`], in value, saving one tensor beside `x` rather than two;
/// [`conv_bn_block2d`] can save less.
///
/// Also returns the batch's moments if they were taken, for the caller's running statistics.
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

/// As [`conv_bn2d`], with what may follow: `pool(activation(batch_norm(conv2d(x)) + residual))`.
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
    /// Which element of each window won.
    taken: Option<Arc<Buffer<u8>>>,
}

impl ConvBn {
    /// Where bias, gamma, beta and residual stand among the inputs.
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
