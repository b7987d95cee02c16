//! What can go wrong between ranks.

use std::time::Duration;

use crate::Call;

/// Why a collective failed. All ranks get the same error, in this and in every later call, as the communicator has ended. But
/// [`Error::Invalid`] is only this rank's, and after [`Error::Setting`] the communicator goes on.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Two ranks do different things.
    #[error(
        "rank {rank} calls {call}, rank {other} calls {other_call}: all must make the same calls in the same order"
    )]
    Mismatch {
        /// One rank.
        rank: usize,
        /// What it does.
        call: Box<Call>,
        /// Another rank.
        other: usize,
        /// What the other rank does.
        other_call: Box<Call>,
    },
    /// Ranks did not come in time.
    #[error("rank {rank} waited {:.1} s in {call} for {}", .waited.as_secs_f64(), ranks(.missing))]
    Timeout {
        /// The rank that waited.
        rank: usize,
        /// The call that it is in.
        call: Box<Call>,
        /// How long.
        waited: Duration,
        /// The ranks that did not come.
        missing: Vec<usize>,
    },
    /// A rank has ended.
    #[error("rank {left} ended before it came to {call} of rank {rank}")]
    Left {
        /// The rank that needs it.
        rank: usize,
        /// The call that it is in.
        call: Box<Call>,
        /// The rank that is gone.
        left: usize,
    },
    /// A rank's thread panicked.
    #[error("rank {rank} panicked: {message}")]
    Panicked {
        /// The rank.
        rank: usize,
        /// The message of the panic.
        message: String,
    },
    /// A rank has no memory for what it sends to others or receives from them.
    #[error("rank {rank} is out of memory: {bytes} bytes for {name:?} cannot be had")]
    Memory {
        /// The rank.
        rank: usize,
        /// The call's name.
        name: String,
        /// How many bytes were asked for.
        bytes: usize,
    },
    /// Ranks were started with different settings.
    #[error("{name} is {value} on rank 0 and {other_value} on rank {other}: all ranks must have the same")]
    Setting {
        /// The first setting that differs.
        name: String,
        /// What it is on rank 0.
        value: String,
        /// The first rank where it is something else.
        other: usize,
        /// What it is there.
        other_value: String,
    },
    /// A value that makes no sense.
    #[error("{0}")]
    Invalid(String),
    /// The transport between ranks is missing or failed, or it delivered something that is not a message.
    #[error("{0}")]
    Transport(String),
}

fn ranks(ranks: &[usize]) -> String {
    let numbers: Vec<String> = ranks.iter().map(usize::to_string).collect();
    format!("rank{} {}", if ranks.len() == 1 { "" } else { "s" }, numbers.join(", "))
}

/// A result with this crate's [`Error`].
pub type Result<T> = std::result::Result<T, Error>;
