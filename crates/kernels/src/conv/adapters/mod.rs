//! Algorithms derived from other algorithms: they run a pass as another pass, a memory format as the other one, a dilated
//! convolution as one without dilation, or tensors of 16 bits as tensors of f32.

mod phases;
mod relayout;
mod strided;
mod swap;
mod widen;

use std::sync::Arc;

use phases::Phases;
use relayout::Relayout;
use swap::Swap;
use widen::Widen;

use super::plan::{ConvAlgorithm, ConvOperands, ConvPlan, NotApplicable};
use super::problem::Pass;
use crate::Element;

/// The algorithms derived from `algorithm`: `NAME+swap`, `NAME+phases` if it takes no dilation, `NAME+relayout` if it takes only one
/// memory format, and `NAME+widen`, which runs the first of all these that applies.
pub(super) fn derived(algorithm: &Arc<dyn ConvAlgorithm>) -> Vec<Arc<dyn ConvAlgorithm>> {
    let mut derived: Vec<Arc<dyn ConvAlgorithm>> = Vec::new();
    if algorithm.formats().len() == 1 {
        let name = format!("{}+relayout", algorithm.name());
        derived.push(Arc::new(Relayout { name, inner: Arc::clone(algorithm) }));
    }
    let inner = [algorithm].into_iter().chain(&derived).map(Arc::clone).collect();
    derived.push(Arc::new(Swap { name: format!("{}+swap", algorithm.name()), inner }));
    if !algorithm.takes_dilation() {
        let name = format!("{}+phases", algorithm.name());
        derived.push(Arc::new(Phases { name, inner: Arc::clone(algorithm) }));
    }
    let inner = [algorithm].into_iter().chain(&derived).map(Arc::clone).collect();
    derived.push(Arc::new(Widen { name: format!("{}+widen", algorithm.name()), inner }));
    derived
}

/// The length of a workspace that holds these parts, in elements.
fn workspace_sum(parts: &[usize]) -> Result<usize, NotApplicable> {
    let sum = parts.iter().try_fold(0usize, |sum, &part| sum.checked_add(part));
    sum.ok_or_else(|| NotApplicable("the workspace does not fit any memory".into()))
}

/// Runs `inner`, a plan of the same pass, on copies of x and y at the start of the workspace. `gather` fills the copy of a
/// whole tensor, `scatter` writes a whole tensor from its copy. `sides` holds what they need to know of x and of y.
fn on_copies<T: Element, S>(
    inner: &ConvPlan,
    [x_side, y_side]: &[S; 2],
    [a, b]: [&[T]; 2],
    output: &mut [T],
    workspace: &mut [T],
    gather: impl Fn(&S, &[T], &mut [T]),
    scatter: impl Fn(&S, &[T], &mut [T]),
) {
    let (x, rest) = workspace.split_at_mut(inner.problem().input_len());
    let (y, scratch) = rest.split_at_mut(inner.problem().output_len());
    let run = |operands: ConvOperands<'_>, scratch: &mut [T]| {
        inner.run(operands, scratch.into()).expect("planned for these operands");
    };
    match inner.pass() {
        Pass::Forward => {
            gather(x_side, a, x);
            run(ConvOperands::forward(&*x, b, &mut *y), scratch);
            scatter(y_side, y, output);
        }
        Pass::BackwardData => {
            gather(y_side, a, y);
            run(ConvOperands::backward_data(&*y, b, &mut *x), scratch);
            scatter(x_side, x, output);
        }
        Pass::BackwardWeights => {
            gather(x_side, a, x);
            gather(y_side, b, y);
            run(ConvOperands::backward_weights(&*x, &*y, output), scratch);
        }
    }
}
