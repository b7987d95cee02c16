//! Depthwise convolution: every channel has its own filter, so there are no matrices to multiply.
//!
//! ```text
//! y[q]  = sum over taps k of x[stride q + offset k] w[k]
//! dx[i] = sum over the taps k of i's phase of dy[q + offset k] w[k]      i = phase + stride q
//! dw[k] = sum over outputs q of dy[q] x[stride q + offset k]
//! ```
//! Forward and backward-data are the same gather, see [`gather`]: each output is written once. Channels-last works on
//! vectors of channels, contiguous tensors on vectors along a row of a padded copy of the plane. All passes read each
//! tensor about once from memory, which bounds their speed.

mod blocks;
mod gather;
mod padded;
mod pixel_weights;
mod pixels;
mod plane_weights;
mod planes;

use gather::Gather;

use super::plan::{ConvAlgorithm, ConvPlan, Cost, NotApplicable, kernel};
use super::problem::{ConvProblem, ConvTypes, Pass};
use crate::{Cpu, MemoryFormat};

/// One filter per channel, one output channel per filter.
pub(super) struct Depthwise;

/// The largest kernel size and stride, since plans list their taps and phases.
const LARGEST: usize = 1 << 10;

impl ConvAlgorithm for Depthwise {
    fn name(&self) -> &'static str {
        "depthwise"
    }

    fn revision(&self) -> u32 {
        3
    }

    fn plan(&self, problem: &ConvProblem, pass: Pass, cpu: &Cpu) -> Result<ConvPlan, NotApplicable> {
        let not = |reason: &str| Err(NotApplicable(reason.into()));
        if problem.types != ConvTypes::F32 {
            return not("for f32 only");
        }
        if problem.groups != problem.in_channels || problem.groups != problem.out_channels {
            return not("needs one input and one output channel a group");
        }
        let axes = [problem.height, problem.width];
        if axes.iter().any(|axis| axis.kernel > LARGEST || axis.stride > LARGEST) {
            return Err(NotApplicable(format!("needs kernel and stride of at most {LARGEST}")));
        }
        let gather = match pass {
            Pass::Forward | Pass::BackwardWeights => axes.map(|axis| Gather::forward(&axis)),
            Pass::BackwardData => axes.map(|axis| Gather::backward(&axis)),
        };
        let images = [problem.batch, problem.in_channels];
        let (workspace, kernel) = match (problem.format, pass) {
            (MemoryFormat::ChannelsLast, Pass::BackwardWeights) => {
                let code = pixel_weights::PixelWeights::new(gather, images, cpu);
                (code.workspace_len(), kernel::<f32>(code))
            }
            (MemoryFormat::ChannelsLast, _) => {
                let code = pixels::Pixels::new(gather, images, cpu);
                (code.workspace_len(), kernel::<f32>(code))
            }
            (MemoryFormat::Contiguous, Pass::BackwardWeights) => {
                let code = plane_weights::PlaneWeights::new(gather, images, cpu)?;
                (code.workspace_len(), kernel::<f32>(code))
            }
            (MemoryFormat::Contiguous, _) => {
                let code = planes::Planes::new(gather, images, cpu)?;
                (code.workspace_len(), kernel::<f32>(code))
            }
        };
        let cost = Cost::direct(problem, 0.2);
        Ok(ConvPlan::new(self, (problem, pass), cpu, workspace, kernel).with_cost(cost))
    }
}
