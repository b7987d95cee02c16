//! Gradient clipping by the norm of all gradients together.

use convoke_autograd::{Gradients, Result};
use convoke_kernels::elementwise;

use crate::{Module, ModuleExt};

/// Scales the gradients of a model's parameters so that their norm, taken over all of them as if they were one vector, is at most
/// `max_norm`: multiplies them by max_norm / (norm + 1e-6) if that is below 1, as PyTorch's `clip_grad_norm_`. Returns the norm
/// before.
///
/// The norm is a sum in f64, in an order that depends on the model only: ranks and threads do not change its bits.
///
/// # Errors
/// If there is no memory for a gradient that something else still holds.
pub fn clip_grad_norm(
    model: &(impl Module + ?Sized),
    gradients: &mut Gradients,
    max_norm: f64,
) -> Result<f64> {
    let leaves: Vec<_> = model.parameters().into_iter().map(|(_, parameter)| parameter.value()).collect();
    let mut squares = 0.0;
    for gradient in leaves.iter().filter_map(|leaf| gradients.get(leaf)) {
        let cpu = gradient.device().compute();
        squares += elementwise::square_sum(cpu, gradient.elements()?)?;
    }
    let norm = squares.sqrt();
    let factor = max_norm / (norm + 1e-6);
    // Not `factor < 1.0`: a norm that is not a number makes all gradients NaN, as in PyTorch.
    if factor >= 1.0 {
        return Ok(norm);
    }
    for leaf in &leaves {
        let Some(mut gradient) = gradients.take(leaf) else { continue };
        let cpu = gradient.device().compute().clone();
        gradient.update_elements(|gradient| Ok(elementwise::scale_assign(&cpu, factor, gradient)?))?;
        gradients.set(leaf, &gradient, "clip_grad_norm")?;
    }
    Ok(norm)
}
