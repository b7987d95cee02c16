//! Weights in panels of a few vectors of output channels: [group][panel][tap][input channel][lane].

use std::ops::Range;

use crate::conv::problem::ConvProblem;
use crate::{Cpu, simd};

/// The panels of a weight of K x C/groups x R x S, with K or C/groups along the lanes.
///
/// Several groups may be joined into one: its panels have zeros where the two channels are of different groups.
pub(super) struct Panels {
    /// How many groups are joined into one.
    joined: usize,
    /// The number of groups after joining; the sizes below are those of a joined group.
    pub(super) groups: usize,
    /// Channels of a group that do not lie along the lanes: they are summed over or iterated over.
    pub(super) depth: usize,
    /// Channels of a group that lie along the lanes.
    pub(super) width: usize,
    pub(super) taps: usize,
    pub(super) lanes: usize,
    /// The most vectors of a panel.
    most: usize,
    /// Distance in the weight between neighbours along the depth and along the lanes.
    strides: [usize; 2],
}

/// Lanes that are packed together: any L1 cache can hold this many lines that fall into one set.
const PIECE: usize = 8;
/// Channels times taps that are packed before the next lanes: few enough for both sides to stay in the L1 cache.
const DEPTH: usize = 64;

/// One panel.
#[derive(Clone, Copy)]
pub(super) struct Panel {
    pub(super) group: usize,
    /// The first channel of the panel within the group.
    pub(super) first: usize,
    /// How many channels it has; the lanes beyond hold zeros.
    pub(super) channels: usize,
    pub(super) vectors: usize,
}

impl Panels {
    /// Lanes along K: for forward and backward-weights. A panel has at most `most` vectors.
    pub(super) fn of_outputs(problem: &ConvProblem, lanes: usize, most: usize) -> Panels {
        let taps = problem.height.kernel * problem.width.kernel;
        let (depth, width) = (problem.group_in_channels(), problem.group_out_channels());
        let strides = [taps, depth * taps];
        Panels { joined: 1, groups: problem.groups, depth, width, taps, lanes, most, strides }
    }

    /// Lanes along C: for backward-data.
    pub(super) fn of_inputs(problem: &ConvProblem, lanes: usize, most: usize) -> Panels {
        let p = Panels::of_outputs(problem, lanes, most);
        let [c, k] = p.strides;
        Panels { depth: p.width, width: p.depth, strides: [k, c], ..p }
    }

    /// Joins every `joined` groups into one. `joined` must divide the groups, and a joined group must fit one vector.
    pub(super) fn joining(self, joined: usize) -> Panels {
        assert!(joined == 1 || self.groups.is_multiple_of(joined) && self.width * joined <= self.lanes);
        let [groups, depth, width] = [self.groups / joined, self.depth * joined, self.width * joined];
        Panels { joined, groups, depth, width, ..self }
    }

    /// Vectors of one group.
    pub(super) fn vectors(&self) -> usize {
        self.width.div_ceil(self.lanes)
    }

    /// Vectors of a group's first panel; no other panel has more.
    pub(super) fn most_vectors(&self) -> usize {
        self.vectors().min(self.most)
    }

    /// Panels of one group.
    fn of_group(&self) -> usize {
        self.vectors().div_ceil(self.most)
    }

    /// Floats of all panels; `None` if that overflows.
    pub(super) fn len(&self) -> Option<usize> {
        [self.vectors(), self.lanes, self.taps, self.depth]
            .iter()
            .try_fold(self.groups, |len, &size| len.checked_mul(size))
    }

    /// Panels of all groups.
    pub(super) fn count(&self) -> usize {
        self.groups * self.of_group()
    }

    /// The panels of some groups.
    pub(super) fn of_groups(&self, groups: Range<usize>) -> Range<usize> {
        let of_group = self.of_group();
        groups.start * of_group..groups.end * of_group
    }

    /// Panel `index` of [`Panels::count`].
    pub(super) fn panel(&self, index: usize) -> Panel {
        let of_group = self.of_group();
        let (group, vector) = (index / of_group, index % of_group * self.most);
        let vectors = (self.vectors() - vector).min(self.most);
        let first = vector * self.lanes;
        Panel { group, first, channels: (vectors * self.lanes).min(self.width - first), vectors }
    }

    /// Where panel `index` starts; for [`Panels::count`], where the last ends.
    pub(super) fn offset(&self, index: usize) -> usize {
        let of_group = self.of_group();
        let vectors = index / of_group * self.vectors() + index % of_group * self.most;
        vectors * self.lanes * self.taps * self.depth
    }

    /// Splits off each panel's floats in turn.
    pub(super) fn split<'a>(&self, mut rest: &'a mut [f32]) -> impl Iterator<Item = (Panel, &'a mut [f32])> {
        (0..self.count()).map(move |index| {
            let (floats, others) =
                std::mem::take(&mut rest).split_at_mut(self.offset(index + 1) - self.offset(index));
            rest = others;
            (self.panel(index), floats)
        })
    }

    /// Calls `visit(place in the panel, lanes, place in the panel's part of the weight)` for all pieces of rows of lanes.
    #[inline(always)]
    fn each_piece(&self, panel: Panel, mut visit: impl FnMut(usize, usize, usize)) {
        let width = panel.vectors * self.lanes;
        let [along_depth, along_lanes] = self.strides;
        let most = (DEPTH / self.taps).max(1);
        let [depth, channels] = [self.depth, panel.channels].map(|channels| channels / self.joined);
        for member in 0..self.joined {
            let start = member * (depth * width + channels);
            let weight = member * depth * channels * self.taps;
            for first in (0..depth).step_by(most) {
                for lane in (0..channels).step_by(PIECE) {
                    let piece = (channels - lane).min(PIECE);
                    for channel in first..(first + most).min(depth) {
                        for tap in 0..self.taps {
                            let place = start + (tap * self.depth + channel) * width + lane;
                            visit(place, piece, weight + lane * along_lanes + channel * along_depth + tap);
                        }
                    }
                }
            }
        }
    }

    /// Fills the panels from the weight.
    pub(super) fn pack(&self, cpu: &Cpu, weight: &[f32], panels: &mut [f32]) {
        let group_len = weight.len() / self.groups;
        let [_, along_lanes] = self.strides;
        cpu.for_each(weight.len(), self.split(panels), |(panel, floats)| {
            let width = panel.vectors * self.lanes;
            let weight = &weight[panel.group * group_len + panel.first * along_lanes..];
            if panel.channels < width || self.joined > 1 {
                floats.fill(0.0);
            }
            self.each_piece(panel, |place, piece, from| {
                let row = &mut floats[place..][..piece];
                let from = &weight[from..];
                if let Ok(row) = <&mut [f32; PIECE]>::try_from(&mut *row) {
                    let from = &from[..(PIECE - 1) * along_lanes + 1];
                    *row = simd::array(|lane| from[lane * along_lanes]);
                } else {
                    row.iter_mut().zip(from.iter().step_by(along_lanes)).for_each(|(to, &from)| *to = from);
                }
            });
        });
    }

    /// Fills the weight, whose filters lie along the lanes, with the sum of the panels of all `parts`.
    pub(super) fn unpack_sum(&self, cpu: &Cpu, parts: &[&[f32]], weight: &mut [f32]) {
        let filter = self.depth / self.joined * self.taps;
        let panel_filters = filter * self.most * self.lanes;
        let targets =
            weight.chunks_mut(filter * self.width).flat_map(|group| group.chunks_mut(panel_filters));
        cpu.for_each(parts.len() * filter * self.width, targets.enumerate(), |(index, filters)| {
            let (panel, offset) = (self.panel(index), self.offset(index));
            self.each_piece(panel, |place, piece, to| {
                let mut sums = [0.0; PIECE];
                for part in parts {
                    let row = &part[offset + place..][..piece];
                    sums.iter_mut().zip(row).for_each(|(sum, &value)| *sum += value);
                }
                let to = &mut filters[to..];
                if piece == PIECE {
                    let to = &mut to[..(PIECE - 1) * filter + 1];
                    (0..PIECE).for_each(|lane| to[lane * filter] = sums[lane]);
                } else {
                    to.iter_mut().step_by(filter).zip(&sums[..piece]).for_each(|(to, &sum)| *to = sum);
                }
            });
        });
    }
}
