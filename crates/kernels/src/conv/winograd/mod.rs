//! Winograd convolution, channels-last: F(2x2,3x3), F(4x4,3x3) and F(6x6,3x3) of 3 x 3 kernels, F(4x4,2x2) of 2 x 2 kernels; and of kernels
//! with a stride of 2, whose even and odd taps are a filter each.
//!
//! ```text
//! U = G g Gᵀ           each filter, once a call
//! V = Bᵀ d B           each input tile, m + r - 1 wide, m apart
//! M[xi] = V[xi] U[xi]  (m + r - 1)² small matrix products over the channels
//! y = Aᵀ M A           each output tile, m wide
//! ```
//! F(2x2,3x3) does 2.25, F(4x4,3x3) 4 and F(6x6,3x3) 5.06 times fewer multiplications than direct convolution. Backward-data is forward
//! with the filters turned by 180 degrees and input and output channels exchanged; backward-weights transforms both its
//! inputs and sums over the tiles: `dW = Gᵀ [sum of (A dY Aᵀ) ⊙ (Bᵀ d B)] G`.
//!
//! With a stride of 2, even taps read other pixels than odd ones. So each dimension is the sum of two convolutions without a stride, of
//! every second pixel with every second tap; two dimensions have four ([`Geometry`]), which share the output's transform. Of a 3 x 3
//! kernel, a phase has 2 taps or 1 in a dimension. A filter of 1 tap is one of 2 whose last is zero, and has no product at infinity. So
//! F(4x4,2x2) does 5 x 5 + 5 x 4 + 4 x 5 + 4 x 4 = 81 instead of 144 multiplications. Of a 5 x 5 kernel, F(4x4,3x3) does 121 instead of
//! 400.
//!
//! Transformed data is multiplied while it is in the L2 cache, in blocks of tiles x outputs whose products fit there
//! (backward-weights: blocks of outputs x channels whose sums fit there). With many tiles, [`forward`] first transforms all
//! filters, then block after block of tiles; with few, first all tiles, then panel after panel of filters.
//! Lavin, Gray: "Fast Algorithms for Convolutional Neural Networks", CVPR 2016.

// Small matrices are written with their indices, as the formulas are.
#![allow(clippy::needless_range_loop)]

mod block;
mod filters;
mod forward;
mod geometry;
mod groups;
mod memory;
mod transforms;
mod weights;

use forward::Tiles;
use geometry::Geometry;
use groups::Groups;
use half::bf16;
use memory::Number;
use std::marker::PhantomData;
use std::sync::Arc;
pub(super) use transforms::{F2, F4, F4Of2, F6};

use transforms::Filter;
use weights::Weights;

use super::plan::{Accuracy, ConvAlgorithm, ConvKernel, ConvPlan, Cost, NotApplicable};
use super::problem::{ConvProblem, ConvTypes, Pass};
use crate::{Cpu, DType, MemoryFormat};

/// Winograd convolution by tiles of `F`.
pub(super) struct Winograd<F>(PhantomData<F>);

impl<F> Winograd<F> {
    pub(super) fn new() -> Self {
        Winograd(PhantomData)
    }
}

impl<F: Filter> ConvAlgorithm for Winograd<F> {
    fn name(&self) -> &str {
        F::NAME
    }

    fn revision(&self) -> u32 {
        F::REVISION
    }

    fn accuracy(&self, types: &ConvTypes) -> Accuracy {
        match types.input.computes() {
            true => F::ACCURACY,
            // Every filter's errors are far below the rounding of tensors of 16 bits.
            false => F::ACCURACY.min(Accuracy::Standard),
        }
    }

    fn formats(&self) -> &'static [MemoryFormat] {
        &[MemoryFormat::ChannelsLast]
    }

    fn takes_dilation(&self) -> bool {
        false
    }

    fn plan(&self, problem: &ConvProblem, pass: Pass, cpu: &Cpu) -> Result<ConvPlan, NotApplicable> {
        match problem.types.input {
            _ if problem.types != ConvTypes::of(problem.types.input) => {
                Err(NotApplicable(format!("does not take the types {}", problem.types)))
            }
            DType::F32 => plan::<F, f32>(self, problem, pass, cpu),
            DType::BF16 => plan::<F, bf16>(self, problem, pass, cpu),
            other => Err(NotApplicable(format!("for f32 and bf16, not for {other}"))),
        }
    }
}

/// The least channels of a group if there are several: with fewer, the matrices are mostly filled up with zeros.
const LEAST_OF_GROUP: usize = 32;

fn plan<F: Filter, T: Number>(
    algorithm: &dyn ConvAlgorithm,
    problem: &ConvProblem,
    pass: Pass,
    cpu: &Cpu,
) -> Result<ConvPlan, NotApplicable> {
    let not = |reason: &str| Err(NotApplicable(reason.into()));
    if problem.format != MemoryFormat::ChannelsLast {
        return not("for channels-last only");
    }
    let Some(geometry) = Geometry::<F, T>::of(problem, pass == Pass::BackwardData) else {
        let [plain, least, most] = [F::TAPS, 2 * F::TAPS - 1, 2 * F::TAPS];
        return not(&format!(
            "needs a {plain}x{plain} kernel with stride 1, or {least} to {most} taps with stride 2; no dilation"
        ));
    };
    let least = problem.group_in_channels().min(problem.group_out_channels());
    if problem.groups > 1 && least < LEAST_OF_GROUP {
        return not("needs 32 channels in a group");
    }
    let (workspace, kernel): (_, Arc<dyn ConvKernel>) = if pass == Pass::BackwardWeights {
        let weights = Groups::new(problem, cpu, |cpu| Weights::<F, T>::new(geometry, cpu));
        (weights.workspace_len(), Arc::new(weights))
    } else {
        let tiles = Groups::new(problem, cpu, |cpu| Tiles::<F, T>::new(geometry, cpu));
        (tiles.workspace_len(), Arc::new(tiles))
    };
    let plan = ConvPlan::new(algorithm, (problem, pass), cpu, workspace, kernel);
    Ok(plan.with_cost(cost(&geometry, problem, cpu)).with_operations(operations(&geometry)))
}

/// Operations of the products of transformed tiles and filters.
fn operations<F: Filter, T: Number>(geometry: &Geometry<F, T>) -> f64 {
    let Geometry { groups, channels, outputs, .. } = *geometry;
    let counts = [groups, geometry.products(), geometry.tiles(), channels, outputs];
    2.0 * counts.map(|count| count as f64).iter().product::<f64>()
}

/// The products, about twenty operations for each point of a transformed tile or filter, and the filters' memory.
fn cost<F: Filter, T: Number>(geometry: &Geometry<F, T>, problem: &ConvProblem, cpu: &Cpu) -> Cost {
    // The few channels of a group are multiplied as whole vectors.
    let lanes = cpu.isa().lanes();
    let (c, k) = match geometry.groups {
        1 => (geometry.channels, geometry.outputs),
        _ => {
            let pair = block::vectors(geometry.outputs, lanes) * lanes;
            (geometry.channels.next_multiple_of(lanes), geometry.outputs.next_multiple_of(pair))
        }
    };
    let (sources, targets) = (geometry.sources() * c, geometry.targets() * k);
    let counts =
        [geometry.groups, geometry.tiles(), geometry.points(), geometry.products(), c, k, sources + targets];
    let [groups, tiles, points, products, c, k, transformed] = counts.map(|count| count as f64);
    let filters = products * c * k;
    let flops = groups * (2.0 * tiles * filters + 20.0 * (points * tiles * transformed + filters));
    let filters = 8.0 * groups * filters;
    Cost { flops, ..Cost::direct(problem, 0.7) }.moving(filters as usize)
}
