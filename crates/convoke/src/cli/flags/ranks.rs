//! The flags about ranks.

use std::time::Duration;

use clap::{Args, value_parser};

use super::values::{precision, seconds};
use crate::nn::Precision;

/// Which ranks take part in a training run.
#[derive(Args)]
pub(crate) struct RankArgs {
    /// Train on N ranks, threads of this process: each has the whole model and a part of every batch.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = value_parser!(u16).range(1..=1024),
          conflicts_with = "mpi", help_heading = "Ranks")]
    pub(crate) ranks: u16,

    /// Train on the processes that `mpirun` started, each of them one rank.
    #[arg(long, help_heading = "Ranks")]
    pub(crate) mpi: bool,

    /// Take batch norm's statistics over the images of all ranks, not of each rank alone: training is then the same as on one
    /// rank.
    #[arg(long, help_heading = "Ranks")]
    pub(crate) sync_bn: bool,

    /// Type in which gradients travel between ranks: bf16 halves the bytes, and rounds each rank's gradients and their sum to 8
    /// binary digits.
    #[arg(long, value_name = "PRECISION", value_parser = precision(), default_value = "f32", help_heading = "Ranks")]
    pub(crate) send_gradients: Precision,

    /// Seconds that a rank waits for a sign of life of other ranks before it gives up; the first rank gives such signs while it
    /// measures and loads.
    #[arg(long, value_name = "SECONDS", default_value = "300", value_parser = seconds,
          help_heading = "Ranks")]
    pub(crate) rank_timeout: Duration,
}
