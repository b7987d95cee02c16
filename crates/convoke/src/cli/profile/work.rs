//! What spans did, and the sums over all spans of one name.

use std::collections::BTreeMap;

use serde::Serialize;

/// What a span did.
#[derive(Clone, Copy, Default, Serialize)]
pub(super) struct Work {
    /// Floating-point operations as they are usually counted: for a convolution, those of direct convolution.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) flops: Option<f64>,
    /// The operations that it really did.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) operations: Option<f64>,
    /// The bytes that it had to read and write.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) bytes: Option<u64>,
}

impl Work {
    /// The work of so many threads that do the same.
    pub(super) fn times(&self, threads: u64) -> Work {
        let many = |number: f64| number * threads as f64;
        Work {
            flops: self.flops.map(many),
            operations: self.operations.map(many),
            bytes: self.bytes.map(|bytes| bytes * threads),
        }
    }
}

/// All spans of one name.
#[derive(Clone, Default)]
pub(super) struct Total {
    pub(super) calls: usize,
    pub(super) seconds: f64,
    /// Seconds spent outside of the spans within.
    pub(super) own: f64,
    pub(super) flops: f64,
    pub(super) bytes: f64,
    /// The work done, grouped by [`size_of`] the bytes of a call.
    pub(super) loads: BTreeMap<u32, Load>,
}

/// The work of calls that have about the same number of bytes.
#[derive(Clone, Copy, Default)]
pub(super) struct Load {
    pub(super) operations: f64,
    pub(super) bytes: f64,
    /// The most operations and bytes a second of any call.
    pub(super) fastest: [f64; 2],
}

/// The exponent of the power of two at or below a call's bytes: of 4 KiB at least, and of 128 MiB at most, which is more than
/// caches hold.
pub(super) fn size_of(bytes: u64) -> u32 {
    bytes.max(1).ilog2().clamp(12, 27)
}

impl Total {
    /// One call of `seconds`, of which `within` were spent in the spans within it.
    pub(super) fn of_call(seconds: f64, within: f64, work: &Work) -> Total {
        let [flops, bytes] = [work.flops.unwrap_or(0.0), work.bytes.unwrap_or(0) as f64];
        let operations = work.operations.unwrap_or(flops);
        let fastest = [operations, bytes].map(|amount| amount / seconds);
        let load = Load { operations, bytes, fastest };
        let loads = match operations + bytes > 0.0 {
            true => BTreeMap::from([(size_of(work.bytes.unwrap_or(0)), load)]),
            false => BTreeMap::new(),
        };
        Total { calls: 1, seconds, own: seconds - within, flops, bytes, loads }
    }

    pub(super) fn add(&mut self, other: &Total) {
        self.calls += other.calls;
        self.seconds += other.seconds;
        self.own += other.own;
        self.flops += other.flops;
        self.bytes += other.bytes;
        for (size, load) in &other.loads {
            let sum = self.loads.entry(*size).or_default();
            sum.operations += load.operations;
            sum.bytes += load.bytes;
            sum.fastest = [0, 1].map(|of| sum.fastest[of].max(load.fastest[of]));
        }
    }
}
