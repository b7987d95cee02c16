//! Convolution by Fourier transforms of small tiles, stride 1, channels-last.
//!
//! ```text
//! U[f] = transform of the kernel      for each pair of channels, once a call
//! V[f] = transform of an input tile   for each channel
//! M[f] = V[f] U[f]                    a complex matrix product over the channels for each frequency f
//! y    = inverse transform of M       of which the outputs that did not wrap round are kept
//! ```
//! A block of tiles is transformed, multiplied and transformed back together. Backward-data is forward with the kernels
//! turned by 180 degrees and the channels exchanged; backward-weights multiplies transforms of x and dy and sums over the
//! tiles.
//! Mathieu, Henaff, LeCun: "Fast Training of Convolutional Networks through FFTs", ICLR 2014; in tiles: Zlateski, Jia,
//! Li, Durand: "The Anatomy of Efficient FFT and Winograd Convolutions on Modern CPUs", ICS 2019.

// Short fixed-size loops are written with their indices, as the formulas are.
#![allow(clippy::needless_range_loop)]

mod codelets;
mod images;
mod product;
mod tiling;
mod transform;
mod weights;

use images::Images;
use tiling::Tiling;
use transform::MAX_TILE;
use weights::Weights;

use super::plan::{Accuracy, ConvAlgorithm, ConvPlan, Cost, NotApplicable, kernel};
use super::problem::{ConvAxis, ConvProblem, ConvTypes, Pass};
use crate::{Cpu, MemoryFormat};

/// Extra floats between the matrices of two frequencies, so that they use different cache sets.
const SKEW: usize = 48;
/// The most floats of workspace: 1 GiB.
const MAX_WORKSPACE: usize = 1 << 28;

/// Tiled FFT convolution.
pub(super) struct Fft;

impl ConvAlgorithm for Fft {
    fn name(&self) -> &'static str {
        "fft"
    }

    fn revision(&self) -> u32 {
        1
    }

    fn accuracy(&self, _: &ConvTypes) -> Accuracy {
        Accuracy::Standard
    }

    fn formats(&self) -> &'static [MemoryFormat] {
        &[MemoryFormat::ChannelsLast]
    }

    fn plan(&self, problem: &ConvProblem, pass: Pass, cpu: &Cpu) -> Result<ConvPlan, NotApplicable> {
        let not = |reason: String| Err(NotApplicable(reason));
        if problem.types != ConvTypes::F32 {
            return not("for f32 only".into());
        }
        if problem.format != MemoryFormat::ChannelsLast {
            return not("for channels-last only".into());
        }
        if problem.height.stride != 1 || problem.width.stride != 1 {
            return not("needs stride 1".into());
        }
        if problem.height.kernel * problem.width.kernel == 1 {
            return not("needs a kernel larger than 1x1".into());
        }
        let lanes = cpu.isa().lanes();
        let Some(tiling) = Tiling::choose(problem, pass, lanes) else {
            return not(format!("needs a kernel that spans at most {MAX_TILE} points each way"));
        };
        let reads = |axis: &ConvAxis| {
            (0..axis.kernel).all(|k| {
                let (first, end) = axis.outputs_inside(k);
                first < end
            })
        };
        if !reads(&problem.height) || !reads(&problem.width) {
            // Results that should be exactly zero would be the transforms' rounding errors.
            return not("needs every kernel element to read more than padding".into());
        }
        let (workspace, kernel) = if pass == Pass::BackwardWeights {
            let weights = Weights::new(problem, tiling, cpu);
            (weights.workspace_len(), kernel::<f32>(weights))
        } else {
            let images = Images::new(problem, pass, tiling, cpu);
            (images.workspace_len(), kernel::<f32>(images))
        };
        if workspace > MAX_WORKSPACE {
            return not(format!("would need {} MiB of workspace", workspace >> 18));
        }
        let flops = problem.groups as f64 * Cost::flops_of(tiling.cycles(pass, lanes), cpu);
        let cost = Cost { flops, ..Cost::direct(problem, 0.75) };
        let plan = ConvPlan::new(self, (problem, pass), cpu, workspace, kernel);
        Ok(plan.with_cost(cost).with_operations(tiling.product_flops()))
    }
}
