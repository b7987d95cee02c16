//! The fused blocks of a model.

use std::any::Any;

use convoke_autograd::ops::{Activation, ConvOptions, Keep, PoolOptions};
use convoke_autograd::{DType, MemoryFormat};

use crate::Module;
use crate::modules::ConvBn2d;

/// All blocks in a tree, with their paths.
pub(super) fn find(model: &dyn Module) -> Vec<(String, &ConvBn2d)> {
    let mut found = Vec::new();
    add(model, "", &mut found);
    found
}

fn add<'a>(module: &'a dyn Module, path: &str, found: &mut Vec<(String, &'a ConvBn2d)>) {
    if let Some(block) = (module as &dyn Any).downcast_ref::<ConvBn2d>() {
        // One that has been folded keeps nothing.
        if block.bn.is_some() {
            found.push((path.to_owned(), block));
        }
        return;
    }
    for (name, child) in module.children() {
        let path = if path.is_empty() { name.to_owned() } else { format!("{path}.{name}") };
        add(child, &path, found);
    }
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
    /// Whether the input wants a gradient: that of a first layer does not.
    pub(crate) for_input: bool,
}

impl BlockKind {
    /// The ways to keep that are worth a try.
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
