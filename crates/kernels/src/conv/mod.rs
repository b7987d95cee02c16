//! Convolution: problems, algorithms, and plans that run one pass of one problem.
//!
//! An algorithm is a value of [`ConvAlgorithm`] in the table [`algorithms`]. For a problem it returns either a [`ConvPlan`],
//! which proves that it can run the problem, or the reason why it cannot. The plain reference is the last entry of the table:
//! it always applies, sums in f64, and is the oracle that the others are tested against.

mod adapters;
mod bf16;
mod depthwise;
mod direct;
mod even;
mod fft;
mod gemm_views;
mod im2col;
mod implicit_gemm;
mod notation;
mod onednn;
mod plan;
mod pointwise;
mod problem;
mod reference;
mod small_channels;
mod tiled;
mod winograd;
mod workspace;

pub(crate) use bf16::Unit;
pub use notation::parse_suite;
pub use onednn::onednn_version;
pub use plan::{
    Accuracy, ConvAlgorithm, ConvKernel, ConvOperands, ConvPlan, Cost, NotApplicable, TypedKernel, kernel,
    kernel_of,
};
pub use problem::{ConvAxis, ConvProblem, ConvSpec, ConvTypes, Pass};
pub(crate) use reference::element as reference_element;
pub use tiled::{BiasGradient, Filter, Gradient, TiledConv};
pub(crate) use tiled::{InputGradient, PartsOfTiles, Place, Reader, WeightGradient};

use std::sync::{Arc, LazyLock};

use winograd::{F2, F4, F4Of2, F6, Winograd};

use crate::Cpu;

/// The repertoire: all base algorithms. Only add names, never change or remove one: saved caches hold them.
fn repertoire() -> Vec<Arc<dyn ConvAlgorithm>> {
    vec![
        Arc::new(pointwise::Pointwise),
        Arc::new(im2col::Im2col),
        Arc::new(implicit_gemm::ImplicitGemm),
        Arc::new(direct::Direct),
        Arc::new(small_channels::SmallChannels),
        Arc::new(depthwise::Depthwise),
        Arc::new(Winograd::<F4>::new()),
        Arc::new(Winograd::<F2>::new()),
        Arc::new(Winograd::<F4Of2>::new()),
        Arc::new(Winograd::<F6>::new()),
        Arc::new(fft::Fft),
        Arc::new(onednn::External),
    ]
}

/// Every algorithm: each of the repertoire, followed by the algorithms derived from it (`NAME+relayout`, `NAME+swap`,
/// `NAME+phases`, `NAME+widen`), those of units that multiply bf16, which need none of these, and last the
/// reference.
pub fn algorithms() -> &'static [Arc<dyn ConvAlgorithm>] {
    static ALGORITHMS: LazyLock<Vec<Arc<dyn ConvAlgorithm>>> = LazyLock::new(|| {
        let mut algorithms: Vec<_> = repertoire().into_iter().flat_map(with_derived).collect();
        algorithms.extend(Unit::ALL.map(|unit| Arc::new(bf16::Bf16(unit)) as Arc<dyn ConvAlgorithm>));
        algorithms.extend(bf16::split::algorithms());
        algorithms.push(Arc::new(reference::Reference));
        algorithms
    });
    &ALGORITHMS
}

/// The algorithm of this name.
pub fn algorithm(name: &str) -> Option<&'static dyn ConvAlgorithm> {
    algorithms().iter().find(|algorithm| algorithm.name() == name).map(Arc::as_ref)
}

/// `algorithm`, followed by the algorithms derived from it: `NAME+relayout` runs it on tensors of the other memory format,
/// `NAME+swap` computes each pass as another pass, `NAME+phases` runs a dilated convolution as one without dilation, `NAME+widen` runs it on tensors of 16
/// bits.
pub(crate) fn with_derived(algorithm: Arc<dyn ConvAlgorithm>) -> Vec<Arc<dyn ConvAlgorithm>> {
    let derived = adapters::derived(&algorithm);
    [algorithm].into_iter().chain(derived).collect()
}

/// The plan with the lowest estimated cost. Nothing is measured; [`crate::tune`] measures and so chooses better.
pub fn plan(problem: &ConvProblem, pass: Pass, cpu: &Cpu) -> ConvPlan {
    cheapest(
        algorithms()
            .iter()
            .filter(|algorithm| algorithm.accuracy(&problem.types) <= Accuracy::Standard)
            .filter_map(|algorithm| algorithm.plan(problem, pass, cpu).ok()),
    )
    .expect("the reference always applies")
}

/// The plan with the lowest estimated cost; the first one if several are equal.
pub(crate) fn cheapest(plans: impl Iterator<Item = ConvPlan>) -> Option<ConvPlan> {
    plans.min_by(|a, b| a.cost().seconds(a.cpu()).total_cmp(&b.cost().seconds(b.cpu())))
}
