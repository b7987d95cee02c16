//! The fused blocks of a model.

use convoke_kernels::block::{BlockProblem, BlockRun, Wanted};

use crate::modules::{FusedBlock, NormMode};
use crate::{Module, ModuleExt, Part};

/// All blocks in a tree, with their paths.
pub fn find(model: &dyn Module) -> Vec<(String, &dyn FusedBlock)> {
    let mut found = Vec::new();
    model.visit(&mut |path, part| {
        if let Part::Block(block) = part {
            found.push((path.to_owned(), block));
        }
    });
    found
}

/// How each batch norm in a tree gets its statistics, whether or not it is part of a block.
pub(super) fn norms(model: &dyn Module) -> Vec<&NormMode> {
    let mut found = Vec::new();
    model.visit_parts(&mut |part| {
        if let Part::Statistics(norm) = part {
            found.push(norm);
        }
    });
    found
}

/// Everything that decides what a block costs: blocks of one kind are timed once.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BlockKind {
    /// What it computes.
    pub problem: BlockProblem,
    /// The gradients that backward computes: a first layer needs none of its input, a frozen one none of its parameters.
    pub wanted: Wanted,
}

/// The addresses of the blocks' weights, in the order of [`find`].
pub fn weights(model: &dyn Module) -> Vec<usize> {
    find(model).into_iter().map(|(_, block)| block.weight().value().address()).collect()
}

/// The kind of each block, by the address of its weight; `None` for a block whose backward did not run.
pub fn kinds(weights: &[usize], runs: &[BlockRun]) -> Vec<Option<BlockKind>> {
    let kind = |weight: &usize| {
        let run = runs.iter().find(|run| run.weight == *weight)?;
        Some(BlockKind { problem: run.problem, wanted: run.wanted })
    };
    weights.iter().map(kind).collect()
}
