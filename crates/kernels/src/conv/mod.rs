//! Convolution: problems, algorithms, and plans that run one pass of one problem.
//!
//! An algorithm is a value of [`ConvAlgorithm`] in the table [`algorithms`]. It answers a problem with a
//! [`ConvPlan`], which is the proof that it can run it, or with the reason why not. The plain reference is last in
//! the table, always applies, sums in f64 and is the oracle that the others are tested against.

mod fft;
mod gemm_views;
mod im2col;
mod notation;
mod plan;
mod pointwise;
mod problem;
mod reference;
mod winograd;

pub use notation::parse_suite;
pub use plan::{Accuracy, ConvAlgorithm, ConvKernel, ConvOperands, ConvPlan, Kernel, NotApplicable};
pub use problem::{ConvAxis, ConvProblem, ConvSpec, Pass};

use std::sync::{Arc, LazyLock};

use crate::Cpu;

/// The repertoire, in the order in which [`plan`] prefers it. Names are append-only: saved caches hold them.
fn repertoire() -> Vec<Arc<dyn ConvAlgorithm>> {
    vec![
        Arc::new(pointwise::Pointwise),
        Arc::new(im2col::Im2col),
        Arc::new(winograd::Winograd4),
        Arc::new(winograd::Winograd2),
        Arc::new(fft::Fft),
    ]
}

/// Every algorithm; the reference is last.
pub fn algorithms() -> &'static [Arc<dyn ConvAlgorithm>] {
    static ALGORITHMS: LazyLock<Vec<Arc<dyn ConvAlgorithm>>> = LazyLock::new(|| {
        let mut algorithms = repertoire();
        algorithms.push(Arc::new(reference::Reference));
        algorithms
    });
    &ALGORITHMS
}

/// The algorithm of this name.
pub fn algorithm(name: &str) -> Option<&'static dyn ConvAlgorithm> {
    algorithms().iter().find(|algorithm| algorithm.name() == name).map(Arc::as_ref)
}

/// A plan of the first algorithm in the table that applies.
pub fn plan(problem: &ConvProblem, pass: Pass, cpu: &Cpu) -> ConvPlan {
    algorithms()
        .iter()
        .find_map(|algorithm| algorithm.plan(problem, pass, cpu).ok())
        .expect("the reference always applies")
}
