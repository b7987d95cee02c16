//! Algorithms made of other algorithms: a pass run through another pass, a format through the other format, a dilated
//! convolution through one that is not.

mod phases;
mod relayout;
mod strided;
mod swap;

use std::sync::Arc;

use phases::Phases;
use relayout::Relayout;
use swap::Swap;

use super::plan::{ConvAlgorithm, ConvOperands, ConvPlan, NotApplicable};
use super::problem::Pass;
use crate::Element;

/// What can be made of `algorithm`: `NAME+swap`, `NAME+phases` if it takes no dilation, and `NAME+relayout` if it takes one memory
/// format only.
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
    derived
}

/// The workspace that holds these parts, in elements.
fn workspace_sum(parts: &[usize]) -> Result<usize, NotApplicable> {
    let sum = parts.iter().try_fold(0usize, |sum, &part| sum.checked_add(part));
    sum.ok_or_else(|| NotApplicable("the workspace does not fit any memory".into()))
}

/// Runs `inner`, a plan of the same pass, on copies of x and y in the first part of the workspace: `gather` makes one of the whole
/// tensor, `scatter` puts one back. `sides` tell them what they need of x and of y.
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
    let run = |operands: ConvOperands<'_, T>, scratch: &mut [T]| {
        inner.run(operands, scratch).expect("planned for these operands");
    };
    match inner.pass() {
        Pass::Forward => {
            gather(x_side, a, x);
            run(ConvOperands::forward(x, b, y), scratch);
            scatter(y_side, y, output);
        }
        Pass::BackwardData => {
            gather(y_side, a, y);
            run(ConvOperands::backward_data(y, b, x), scratch);
            scatter(x_side, x, output);
        }
        Pass::BackwardWeights => {
            gather(x_side, a, x);
            gather(y_side, b, y);
            run(ConvOperands::backward_weights(x, y, output), scratch);
        }
    }
}
