//! The fused blocks of a model.

use std::any::Any;

use convoke_autograd::ops::{Activation, ConvOptions, Keep, PoolOptions};
use convoke_autograd::{DType, MemoryFormat};

use crate::modules::ConvBn2d;
use crate::{Module, ModuleExt, Part};

/// All blocks in a tree, with their paths.
pub(super) fn find(model: &dyn Module) -> Vec<(String, &ConvBn2d)> {
    let mut found: Vec<_> = block(model).map(|block| (String::new(), block)).into_iter().collect();
    model.visit(&mut |path, part| {
        if let Part::Module(module) = part {
            found.extend(block(module).map(|block| (path.to_owned(), block)));
        }
    });
    found
}

/// The module as a block, if it is one. A folded block keeps nothing, so it does not count.
fn block(module: &dyn Module) -> Option<&ConvBn2d> {
    (module as &dyn Any).downcast_ref::<ConvBn2d>().filter(|block| block.bn.is_some())
}

/// Everything that decides what a block costs: blocks of one kind are timed once.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct BlockKind {
    pub(crate) input: Vec<usize>,
    pub(crate) format: MemoryFormat,
    pub(crate) dtype: DType,
    pub(crate) weight: Vec<usize>,
    pub(crate) convolution: ConvOptions,
    pub(crate) bias: bool,
    pub(crate) affine: bool,
    pub(crate) activation: Activation,
    pub(crate) pool: Option<PoolOptions>,
    pub(crate) residual: bool,
    /// Whether the input needs a gradient; the input of a first layer does not.
    pub(crate) for_input: bool,
}

impl BlockKind {
    /// The [`Keep`]s that are worth trying.
    pub(crate) fn candidates(&self, inexact: bool) -> Vec<Keep> {
        let invertible = self.pool.is_none() && !self.residual && self.activation != Activation::Relu;
        let worth = |keep: &Keep| match keep {
            Keep::Auto => false,
            Keep::Invert => inexact && invertible,
            Keep::Compact => inexact && self.dtype == DType::F32,
            _ => true,
        };
        Keep::ALL.into_iter().filter(worth).collect()
    }
}
