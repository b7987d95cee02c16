//! How commands end without success.

use crate::nn::ConfigError;
use crate::nn::data::DataError;
use crate::nn::training::TrainingError;

/// Why a command ended without success.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The request makes no sense: exit code 2.
    Usage(String),
    /// The command was tried and failed: exit code 1.
    Run(String),
    /// Ctrl-C or SIGTERM ended it: exit code 130, as shells have it.
    Interrupted(String),
    /// The command failed because of another rank, whose own error says more: exit code 1.
    OtherRanks(String),
}

impl Failure {
    /// The same failure, with the rank it happened on in its message.
    pub(crate) fn on_rank(self, rank: usize) -> Failure {
        let named = |message| format!("rank {rank}: {message}");
        match self {
            Failure::Usage(message) => Failure::Usage(named(message)),
            Failure::Run(message) => Failure::Run(named(message)),
            Failure::Interrupted(message) => Failure::Interrupted(named(message)),
            Failure::OtherRanks(message) => Failure::OtherRanks(named(message)),
        }
    }

    /// A configuration that cannot run is bad usage, unless only memory or threads are short; every other error is a failure of the
    /// run or of other ranks.
    pub(crate) fn of_training(error: TrainingError) -> Failure {
        match error {
            TrainingError::Config(ConfigError::Data(
                error @ (DataError::Memory(_) | DataError::Threads { .. }),
            )) => Failure::Run(error.to_string()),
            TrainingError::Config(error @ ConfigError::FrozenHead(_)) => Failure::Usage(format!(
                "{error}: leave it out of --freeze, or give --frozen-epochs 0 and a --head-lr that is --lr"
            )),
            TrainingError::Config(error) => Failure::Usage(error.to_string()),
            TrainingError::NotFinite { .. } => {
                Failure::Run(format!("{error}; try a smaller --lr, or --continue-on-nan to go on regardless"))
            }
            error if error.is_about_other_ranks() => Failure::OtherRanks(error.to_string()),
            error => error.into(),
        }
    }
}

impl<E: std::error::Error> From<E> for Failure {
    fn from(error: E) -> Failure {
        Failure::Run(error.to_string())
    }
}

pub(crate) type Result<T> = std::result::Result<T, Failure>;
