//! Direct convolution for first layers: few input channels, any kernel, stride, padding and dilation.
//!
//! All passes are products of register blocks (see [`kernel`]): broadcast values of one operand times vectors of the other.
//! There are too few channels in the T = C * R * S taps to fill vectors, so vectors lie along a longer axis:
//!
//! | pass | channels-last | contiguous |
//! |---|---|---|
//! | forward | outputs x K, over the taps | K x outputs, over the taps |
//! | backward-data | outputs x taps, over K | taps x outputs, over K |
//! | backward-weights | taps x K, over the outputs | taps x K, over vectors of outputs |
//!
//! Inputs are read from copies of the few rows in use, padded with zeros. Backward-data writes its products to a buffer in
//! the L2 cache, from which each element of dx then gathers its taps: sums stay in registers, unlike in col2im.

// Register blocks are written with their indices, as the formulas are.
#![allow(clippy::needless_range_loop)]

mod backward_data;
mod backward_weights;
mod backward_weights_planes;
mod forward;
mod gather;
mod kernel;
mod rows;
mod strips;

use backward_data::BackwardData;
use backward_weights::BackwardWeights;
use backward_weights_planes::BackwardWeightsPlanes;
use forward::Forward;

use super::plan::{ConvAlgorithm, ConvPlan, Cost, NotApplicable, kernel};
use super::problem::{ConvProblem, ConvTypes, Pass};
use crate::{Cpu, MemoryFormat};

/// Direct convolution of few input channels.
pub(super) struct SmallChannels;

/// The most input channels taken; with more, other algorithms fill vectors.
const MOST_CHANNELS: usize = 8;

/// Elements of the largest weight.
const LARGEST_WEIGHT: usize = 1 << 20;

impl ConvAlgorithm for SmallChannels {
    fn name(&self) -> &'static str {
        "small-channels"
    }

    fn revision(&self) -> u32 {
        2
    }

    fn plan(&self, problem: &ConvProblem, pass: Pass, cpu: &Cpu) -> Result<ConvPlan, NotApplicable> {
        let not = |reason: &str| NotApplicable(reason.into());
        if problem.types != ConvTypes::F32 {
            return Err(not("for f32 only"));
        }
        if problem.in_channels > MOST_CHANNELS || problem.groups != 1 {
            return Err(not("needs at most 8 input channels and one group"));
        }
        if problem.weight_len() > LARGEST_WEIGHT {
            return Err(not("needs a weight of at most 2^20 elements"));
        }
        let too_large = || not("one output row reads or writes too much");
        let (workspace, kernel) = match pass {
            Pass::Forward => {
                let forward = Forward::new(problem, cpu).ok_or_else(too_large)?;
                (forward.workspace_len(), kernel::<f32>(forward))
            }
            Pass::BackwardData => {
                let backward = BackwardData::new(problem, cpu).ok_or_else(too_large)?;
                (backward.workspace_len(), kernel::<f32>(backward))
            }
            Pass::BackwardWeights => match problem.format {
                MemoryFormat::ChannelsLast => {
                    let backward = BackwardWeights::new(problem, cpu).ok_or_else(too_large)?;
                    (backward.workspace_len(), kernel::<f32>(backward))
                }
                MemoryFormat::Contiguous => {
                    let backward = BackwardWeightsPlanes::new(problem, cpu).ok_or_else(too_large)?;
                    (backward.workspace_len(), kernel::<f32>(backward))
                }
            },
        };
        let cost = Cost::direct(problem, if pass == Pass::BackwardData { 0.4 } else { 0.5 });
        Ok(ConvPlan::new(self, (problem, pass), cpu, workspace, kernel).with_cost(cost))
    }
}

/// T: taps of a filter.
fn taps(problem: &ConvProblem) -> usize {
    problem.weight_len() / problem.out_channels
}

/// The index of tap `tap` in a filter of the weight; taps are numbered as (c, r, s), or (r, s, c) for channels-last.
fn place_in_filter(problem: &ConvProblem, tap: usize) -> usize {
    match problem.format {
        MemoryFormat::Contiguous => tap,
        MemoryFormat::ChannelsLast => {
            let (c, area) = (problem.in_channels, problem.height.kernel * problem.width.kernel);
            tap % c * area + tap / c
        }
    }
}

/// Writes a `depth` x `width` matrix in panels of `panel` columns, the last one filled up with zeros:
/// `to[column / panel][row][column % panel]`.
fn pack(to: &mut [f32], panel: usize, [depth, width]: [usize; 2], value: impl Fn(usize, usize) -> f32) {
    for (first, to) in (0..width).step_by(panel).zip(to.chunks_exact_mut(depth * panel)) {
        for (row, to) in to.chunks_exact_mut(panel).enumerate() {
            for (column, to) in (first..).zip(to) {
                *to = if column < width { value(row, column) } else { 0.0 };
            }
        }
    }
}
