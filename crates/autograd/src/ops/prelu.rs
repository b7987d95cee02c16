//! PReLU: a leaky ReLU with learned slopes.

use convoke_kernels::memory_format::Extent;
use convoke_kernels::prelu::Prelu;

use super::same_dtype;
use crate::error::invalid;
use crate::{Function, Needs, Operation, Result, Tensor, apply};

/// x above 0, else slope * x, as PyTorch's `prelu`. `slopes` has the shape `[1]`, or `[C]` for an N x C x ... tensor. Saves its
/// input.
///
/// # Errors
/// If `slopes` has another shape, or the types differ.
pub fn prelu(x: &Tensor, slopes: &Tensor) -> Result<Tensor> {
    apply(PreluOp, &[x, slopes])
}

const NAME: &str = "prelu";

struct PreluOp;

/// The extent by which the slopes apply to `x`.
fn extent(x: &Tensor, slopes: &Tensor) -> Result<Extent> {
    match slopes.shape() {
        // One slope for all elements: any shape will do.
        [1] => Ok(Extent { batch: 1, channels: 1, spatial: x.len(), format: x.format() }),
        &[count] if x.shape().get(1) == Some(&count) => x.extent(NAME),
        slopes => {
            let x = x.shape();
            let one_each = x.get(1).map(|channels| format!(" or [{channels}], one for each channel"));
            let reason = format!(
                "the slopes have shape {slopes:?} for an input of shape {x:?}: expected [1]{}",
                one_each.unwrap_or_default()
            );
            Err(invalid(NAME, reason))
        }
    }
}

impl Function for PreluOp {
    /// The inputs.
    type Saved = [Tensor; 2];

    fn name(&self) -> &'static str {
        NAME
    }

    fn describe(&self) -> Option<Operation> {
        Some(Operation::PRelu)
    }

    fn forward(&self, inputs: &[&Tensor], _: &Needs) -> Result<(Tensor, [Tensor; 2])> {
        let [x, slopes] = [inputs[0], inputs[1]];
        same_dtype(NAME, inputs)?;
        let extent = extent(x, slopes)?;
        let y = x.elements_like(|y| {
            let prelu = Prelu::new(&extent, slopes.elements()?)?;
            Ok(prelu.forward(x.device().compute(), x.elements()?, y)?)
        })?;
        Ok((y, [x.keep(), slopes.constant()]))
    }

    fn backward(
        &self,
        [x, slopes]: [Tensor; 2],
        upstream: Tensor,
        needs: &Needs,
    ) -> Result<Vec<Option<Tensor>>> {
        let prelu = Prelu::new(&extent(&x, &slopes)?, slopes.elements()?)?;
        let (cpu, x, dy) = (x.device().compute(), x.elements()?, upstream.elements()?);
        let dx = || upstream.elements_like(|dx| Ok(prelu.backward(cpu, x, dy, dx)?));
        let slope_gradients = || {
            slopes.elements_like(|gradients| match cpu.is_dry() {
                true => Ok(()),
                false => Ok(prelu.backward_slopes(cpu, x, dy, gradients)?),
            })
        };
        Ok(vec![needs.input(0).then(dx).transpose()?, needs.input(1).then(slope_gradients).transpose()?])
    }
}
