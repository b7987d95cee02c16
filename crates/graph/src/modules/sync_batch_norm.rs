//! Statistics over the batches of all ranks, for synchronized batch norms.

use convoke_autograd::ops::{BackwardSums, Moments, Synchronize};
use convoke_distributed::Communicator;
use convoke_kernels::{Error, Result};

/// The ranks of a layer. Each rank sends one message of 2 C + 1 numbers in forward, and one of 2 C in backward.
#[derive(Debug)]
pub(super) struct Ranks {
    pub(super) communicator: Communicator,
    /// The kind of layer, for messages.
    pub(super) layer: &'static str,
}

impl Ranks {
    /// The name of a call. Calls with another number of channels, or in the other direction, do not match it.
    fn name(&self, direction: &str, channels: usize) -> String {
        format!("{} {direction}, {channels} channels", self.layer)
    }

    fn failed(&self, error: &convoke_distributed::Error) -> Error {
        Error::Communication { operation: self.layer, reason: error.to_string() }
    }
}

impl Synchronize for Ranks {
    /// Merges the moments in the order of the ranks, by the formula of Chan, Golub and LeVeque. Sums of squares would lose digits
    /// where the mean is large.
    fn moments(&self, mine: &Moments) -> Result<Moments> {
        let channels = mine.mean.len();
        let message = [&mine.mean[..], &mine.m2, &[mine.count as f64]].concat();
        let all = self.communicator.all_gather(&self.name("forward", channels), &message);
        let of_rank = |message: Vec<f64>| {
            let (mean, rest) = message.split_at(channels);
            let (m2, count) = rest.split_at(channels);
            // Counts are whole and far below 2^53.
            Moments { mean: mean.to_vec(), m2: m2.to_vec(), count: count[0] as usize }
        };
        let all: Vec<Moments> = all.map_err(|error| self.failed(&error))?.into_iter().map(of_rank).collect();
        Moments::gather_stats_with_counts(&all)
    }

    fn sums(&self, mine: &BackwardSums) -> Result<BackwardSums> {
        let channels = mine.g.len();
        let mut sums = [&mine.g[..], &mine.g_centered].concat();
        let reduced = self.communicator.all_reduce(&self.name("backward", channels), &mut sums);
        reduced.map_err(|error| self.failed(&error))?;
        let g_centered = sums.split_off(channels);
        Ok(BackwardSums { g: sums, g_centered })
    }
}
