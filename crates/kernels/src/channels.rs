//! Loops over a tensor channel by channel, in either memory format, and sums in lanes.

use crate::memory_format::Extent;
use crate::{Cpu, Element, Result, Stored};

/// How elements and channels relate in memory.
#[derive(Clone, Copy)]
pub(crate) enum Layout {
    /// Runs of `inner` elements of one channel; the channel changes from run to run.
    Planes { inner: usize },
    /// Rows that hold every channel once.
    Rows,
}

/// A tensor cut into units (planes or rows). Units are grouped into blocks; each block is one task.
pub(crate) struct Units {
    pub(crate) layout: Layout,
    pub(crate) channels: usize,
    unit_len: usize,
    /// Units per block. It depends only on the shape, so that sums do not change with the number of threads.
    per_block: usize,
    total: usize,
}

/// A block of units: one task's part of the tensor.
pub(crate) struct UnitBlock {
    pub(crate) elements: std::ops::Range<usize>,
    /// Channel of the block's first plane.
    pub(crate) first_channel: usize,
    /// How many different channels its planes have.
    pub(crate) channels: usize,
}

impl Units {
    pub(crate) fn new(
        operation: &'static str,
        extent: &Extent,
        lens: &[(&'static str, usize)],
    ) -> Result<Units> {
        let total = extent.check(operation, lens)?;
        let (outer, inner) = match extent.channels {
            // A single channel is cut into pieces; else it would be a single task.
            1 => (total.div_ceil(SMALLEST), SMALLEST),
            _ => extent.around_channels(),
        };
        let (layout, unit_len, units) = match inner {
            1 => (Layout::Rows, extent.channels, outer),
            _ => (Layout::Planes { inner }, inner, outer * extent.channels),
        };
        const BLOCKS: usize = 64;
        const SMALLEST: usize = 1 << 13;
        let per_block = units.div_ceil(BLOCKS).max(SMALLEST.div_ceil(unit_len.max(1)));
        Ok(Units { layout, channels: extent.channels, unit_len, per_block, total })
    }

    fn block(&self, index: usize) -> UnitBlock {
        let start = index * self.per_block * self.unit_len;
        let end = (start + self.per_block * self.unit_len).min(self.total);
        let units = (end - start).div_ceil(self.unit_len.max(1));
        UnitBlock {
            elements: start..end,
            first_channel: index * self.per_block % self.channels,
            channels: units.min(self.channels),
        }
    }

    fn blocks(&self) -> usize {
        self.total.div_ceil((self.per_block * self.unit_len).max(1))
    }

    /// Runs `task` on every block of `out`.
    pub(crate) fn each<T: Stored>(
        &self,
        cpu: &Cpu,
        out: &mut [T],
        task: impl Fn(&UnitBlock, &mut [T]) + Send + Sync,
    ) {
        let block_len = (self.per_block * self.unit_len).max(1);
        cpu.for_each(self.total, out.chunks_mut(block_len).enumerate(), |(index, out)| {
            task(&self.block(index), out);
        });
    }

    /// Runs `task` on every block and adds up its channels' sums, block by block in order.
    pub(crate) fn reduce(&self, cpu: &Cpu, task: impl Fn(&UnitBlock) -> Vec<f64> + Send + Sync) -> Vec<f64> {
        let mut parts: Vec<Vec<f64>> = (0..self.blocks()).map(|_| Vec::new()).collect();
        cpu.for_each(self.total, parts.iter_mut().enumerate(), |(index, part)| {
            *part = task(&self.block(index))
        });
        let mut totals = vec![0.0; self.channels];
        for (index, part) in parts.iter().enumerate() {
            let first = match self.layout {
                Layout::Planes { .. } => self.block(index).first_channel,
                Layout::Rows => 0,
            };
            for (offset, value) in part.iter().enumerate() {
                totals[(first + offset) % self.channels] += value;
            }
        }
        totals
    }
}

/// Independent sums, so that the additions vectorise. The number is fixed, so that every instruction set adds in the same
/// order.
pub(crate) const LANES: usize = 16;

/// The sum of `f` over the values, taken as [`LANES`] interleaved f64 sums.
#[inline(always)]
pub(crate) fn lane_sum<T: Element>(values: &[T], f: impl Fn(T) -> f64) -> f64 {
    let mut lanes = [0.0f64; LANES];
    let mut chunks = values.chunks_exact(LANES);
    for chunk in &mut chunks {
        for (lane, &value) in lanes.iter_mut().zip(chunk) {
            *lane += f(value);
        }
    }
    for (lane, &value) in lanes.iter_mut().zip(chunks.remainder()) {
        *lane += f(value);
    }
    lanes.iter().sum()
}

/// The sum of the lanes: the upper half is added to the lower half until one lane is left.
#[inline(always)]
pub(crate) fn halved(lanes: [f64; LANES]) -> f64 {
    let eight: [f64; 8] = std::array::from_fn(|lane| lanes[lane] + lanes[lane + 8]);
    let four: [f64; 4] = std::array::from_fn(|lane| eight[lane] + eight[lane + 4]);
    (four[0] + four[2]) + (four[1] + four[3])
}
