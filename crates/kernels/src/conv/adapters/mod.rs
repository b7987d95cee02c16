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

use super::plan::{ConvAlgorithm, NotApplicable};

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
