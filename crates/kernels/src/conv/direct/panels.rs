//! Weights in panels of one or two vectors of output channels: [group][panel][tap][input channel][lane].

use std::ops::Range;

use crate::Cpu;
use crate::conv::problem::ConvProblem;

/// The panels of a weight of K x C/groups x R x S, with K or C/groups along the lanes.
pub(super) struct Panels {
    pub(super) groups: usize,
    /// Channels of a group that are summed over, or walked, beside the lanes.
    pub(super) depth: usize,
    /// Channels of a group that lie along the lanes.
    pub(super) width: usize,
    pub(super) taps: usize,
    pub(super) lanes: usize,
    /// Distance in the weight between neighbours along the depth and along the lanes.
    strides: [usize; 2],
}

/// Runs of channels so short that both a panel's part and the weight's stay in the L1 cache.
fn blocks(depth: usize) -> impl Iterator<Item = Range<usize>> {
    (0..depth).step_by(16).map(move |first| first..(first + 16).min(depth))
}

/// One panel.
#[derive(Clone, Copy)]
pub(super) struct Panel {
    pub(super) group: usize,
    /// Its first channel within the group.
    pub(super) first: usize,
    /// How many channels it has; the lanes beyond hold zeros.
    pub(super) channels: usize,
    /// 1 or 2.
    pub(super) vectors: usize,
}

impl Panels {
    /// Lanes along K: for forward and backward-weights.
    pub(super) fn of_outputs(problem: &ConvProblem, lanes: usize) -> Panels {
        let taps = problem.height.kernel * problem.width.kernel;
        let (depth, width) = (problem.group_in_channels(), problem.group_out_channels());
        Panels { groups: problem.groups, depth, width, taps, lanes, strides: [taps, depth * taps] }
    }

    /// Lanes along C: for backward-data.
    pub(super) fn of_inputs(problem: &ConvProblem, lanes: usize) -> Panels {
        let p = Panels::of_outputs(problem, lanes);
        let [c, k] = p.strides;
        Panels { depth: p.width, width: p.depth, strides: [k, c], ..p }
    }

    /// Vectors of one group.
    pub(super) fn vectors(&self) -> usize {
        self.width.div_ceil(self.lanes)
    }

    /// Floats of all panels, unless that overflows.
    pub(super) fn len(&self) -> Option<usize> {
        [self.vectors(), self.lanes, self.taps, self.depth]
            .iter()
            .try_fold(self.groups, |len, &size| len.checked_mul(size))
    }

    /// Panels of all groups.
    pub(super) fn count(&self) -> usize {
        self.groups * self.vectors().div_ceil(2)
    }

    /// The panels of some groups.
    pub(super) fn of_groups(&self, groups: Range<usize>) -> Range<usize> {
        let of_group = self.vectors().div_ceil(2);
        groups.start * of_group..groups.end * of_group
    }

    /// Panel `index` of [`Panels::count`].
    pub(super) fn panel(&self, index: usize) -> Panel {
        let of_group = self.vectors().div_ceil(2);
        let (group, vector) = (index / of_group, index % of_group * 2);
        let vectors = (self.vectors() - vector).min(2);
        let first = vector * self.lanes;
        Panel { group, first, channels: (vectors * self.lanes).min(self.width - first), vectors }
    }

    /// Where panel `index` starts; for [`Panels::count`], where the last ends.
    pub(super) fn offset(&self, index: usize) -> usize {
        let of_group = self.vectors().div_ceil(2);
        let vectors = index / of_group * self.vectors() + index % of_group * 2;
        vectors * self.lanes * self.taps * self.depth
    }

    /// Each panel's floats in turn.
    pub(super) fn split<'a>(&self, mut rest: &'a mut [f32]) -> impl Iterator<Item = (Panel, &'a mut [f32])> {
        (0..self.count()).map(move |index| {
            let (floats, others) =
                std::mem::take(&mut rest).split_at_mut(self.offset(index + 1) - self.offset(index));
            rest = others;
            (self.panel(index), floats)
        })
    }

    /// Fills the panels from the weight.
    pub(super) fn pack(&self, cpu: &Cpu, weight: &[f32], panels: &mut [f32]) {
        let group_len = weight.len() / self.groups;
        let [along_depth, along_lanes] = self.strides;
        cpu.for_each(weight.len(), self.split(panels), |(panel, floats)| {
            let width = panel.vectors * self.lanes;
            let weight = &weight[panel.group * group_len + panel.first * along_lanes..];
            if panel.channels < width {
                floats.fill(0.0);
            }
            for channels in blocks(self.depth) {
                for lane in 0..panel.channels {
                    for channel in channels.clone() {
                        let taps = &weight[lane * along_lanes + channel * along_depth..][..self.taps];
                        let to = floats[channel * width + lane..].iter_mut().step_by(self.depth * width);
                        to.zip(taps).for_each(|(to, &tap)| *to = tap);
                    }
                }
            }
        });
    }

    /// Fills the weight, whose filters lie along the lanes, with the sum of the panels of all `parts`.
    pub(super) fn unpack_sum(&self, cpu: &Cpu, parts: &[&[f32]], weight: &mut [f32]) {
        let filter = self.depth * self.taps;
        let panel_filters = filter * 2 * self.lanes;
        let targets =
            weight.chunks_mut(filter * self.width).flat_map(|group| group.chunks_mut(panel_filters));
        cpu.for_each(parts.len() * filter * self.width, targets.enumerate(), |(index, filters)| {
            let (panel, offset) = (self.panel(index), self.offset(index));
            let width = panel.vectors * self.lanes;
            for channels in blocks(self.depth) {
                for (lane, filter) in filters.chunks_mut(filter).enumerate() {
                    for channel in channels.clone() {
                        let taps = filter[channel * self.taps..][..self.taps].iter_mut().enumerate();
                        for (tap, to) in taps {
                            let place = offset + (tap * self.depth + channel) * width + lane;
                            *to = parts.iter().map(|part| part[place]).sum();
                        }
                    }
                }
            }
        });
    }
}
