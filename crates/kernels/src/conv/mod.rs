//! Convolution: problems, algorithms, and plans that run one pass of one problem.
//!
//! An algorithm is a value of [`ConvAlgorithm`] in the table [`algorithms`]. It answers a problem with a
//! [`ConvPlan`], which is the proof that it can run it, or with the reason why not. The plain reference is last in
//! the table, always applies, sums in f64 and is the oracle that the others are tested against.

mod gemm_views;
mod im2col;
mod notation;
mod plan;
mod pointwise;
mod problem;
mod reference;
mod winograd;

pub use notation::parse_suite;
pub use plan::{ConvAlgorithm, ConvKernel, ConvOperands, ConvPlan, Kernel, NotApplicable};
pub use problem::{ConvAxis, ConvProblem, ConvSpec, Pass};

use crate::Cpu;

/// Every algorithm, in the order in which [`plan`] prefers them. Names are append-only: saved caches hold them.
pub fn algorithms() -> &'static [&'static dyn ConvAlgorithm] {
    &[
        &pointwise::Pointwise,
        &im2col::Im2col,
        &winograd::Winograd4,
        &winograd::Winograd2,
        &reference::Reference,
    ]
}

/// The algorithm of this name.
pub fn algorithm(name: &str) -> Option<&'static dyn ConvAlgorithm> {
    algorithms().iter().copied().find(|algorithm| algorithm.name() == name)
}

/// A plan of the first algorithm in the table that applies.
pub fn plan(problem: &ConvProblem, pass: Pass, cpu: &Cpu) -> ConvPlan {
    algorithms()
        .iter()
        .find_map(|algorithm| algorithm.plan(problem, pass, cpu).ok())
        .expect("the reference always applies")
}
