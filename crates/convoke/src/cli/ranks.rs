//! Runs on several ranks: threads of this process, or processes that MPI started.

use std::sync::Arc;
use std::time::Duration;

use clap::{Args, value_parser};
use convoke::distributed::{Communicator, Options, run_threads};
use convoke::nn::data::TrainTest;

use super::args::{RunArgs, warn_of_threads};
use super::console::Console;
use super::{Failure, Result, dataset, train};

/// Who takes part in a training run.
#[derive(Args)]
pub(crate) struct RankArgs {
    /// Train on N ranks, threads of this process: each has the whole model and a part of every batch.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = value_parser!(u16).range(1..=1024),
          conflicts_with = "mpi", help_heading = "Ranks")]
    pub(crate) ranks: u16,

    /// Train on the processes that `mpirun` started, each of them one rank.
    #[arg(long, help_heading = "Ranks")]
    pub(crate) mpi: bool,

    /// Take batch norm's statistics over the images of all ranks, not of each alone: the same training as on one rank.
    #[arg(long, help_heading = "Ranks")]
    pub(crate) sync_bn: bool,

    /// Seconds that a rank waits for others before it gives up.
    #[arg(long, value_name = "SECONDS", default_value_t = 300.0, value_parser = super::args::positive,
          help_heading = "Ranks")]
    pub(crate) rank_timeout: f64,
}

/// One rank's place in a command.
pub(crate) struct Rank<'a> {
    pub(crate) communicator: &'a Communicator,
    /// Shows something on rank 0 only.
    pub(crate) console: &'a Console,
    pub(crate) data: &'a Arc<TrainTest>,
    /// Ranks that share this process's threads.
    pub(crate) in_process: usize,
}

impl Rank<'_> {
    /// Whether this rank reads and writes files, and says what there is to say.
    pub(crate) fn is_first(&self) -> bool {
        self.communicator.rank() == 0
    }
}

/// Does `work` on every rank that the flags ask for; what it may write to is tried first, and the data is loaded.
pub(crate) fn run(args: &RunArgs, work: impl Fn(&Rank<'_>) -> Result<()> + Sync) -> Result<()> {
    let options = Options { timeout: Duration::from_secs_f64(args.ranks.rank_timeout.min(1e9)) };
    if args.ranks.mpi {
        return run_mpi(args, &options, work);
    }
    let world_size = usize::from(args.ranks.ranks);
    check_batch(args, world_size)?;
    let (console, quiet) = (Console::new()?, Console::of_thread());
    train::check_output(args)?;
    warn_of_threads(&console, args.threads, world_size);
    let data = dataset::load(args, &console)?;
    let results = run_threads(world_size, &options, |communicator| {
        let console = if communicator.rank() == 0 { &console } else { &quiet };
        let rank = Rank { communicator: &communicator, console, data: &data, in_process: world_size };
        work(&rank)
    })?;
    // A rank that failed for want of another tells less than that other one.
    let failures: Vec<(usize, Failure)> =
        results.into_iter().enumerate().filter_map(|(rank, result)| Some((rank, result.err()?))).collect();
    let cause = failures.iter().position(|(_, failure)| !matches!(failure, Failure::OtherRanks(_)));
    match failures.into_iter().nth(cause.unwrap_or(0)) {
        None => Ok(()),
        Some((0, failure)) => Err(failure),
        Some((rank, failure)) => Err(failure.on_rank(rank)),
    }
}

/// This process is one rank. Rank 0 alone prints; the others tell why they end, if they fail.
#[cfg(feature = "mpi")]
fn run_mpi(args: &RunArgs, options: &Options, work: impl Fn(&Rank<'_>) -> Result<()>) -> Result<()> {
    let communicator = convoke::distributed::mpi::world(options)?;
    let number = communicator.rank();
    let run = || -> Result<()> {
        check_batch(args, communicator.world_size())?;
        let console = Console::of_process(number)?;
        if number == 0 {
            train::check_output(args)?;
            warn_of_threads(&console, args.threads, 1);
        }
        // Rank 0 downloads what the others, on the same machine, then read.
        let data = match number {
            0 => Some(dataset::load(args, &console)?),
            _ => None,
        };
        communicator.barrier("data").map_err(|error| Failure::OtherRanks(error.to_string()))?;
        let data = data.map_or_else(|| dataset::load(args, &console), Ok)?;
        work(&Rank { communicator: &communicator, console: &console, data: &data, in_process: 1 })
    };
    run().map_err(|failure| if number == 0 { failure } else { failure.on_rank(number) })
}

#[cfg(not(feature = "mpi"))]
fn run_mpi(_: &RunArgs, _: &Options, _: impl Fn(&Rank<'_>) -> Result<()>) -> Result<()> {
    Err(Failure::Usage(
        "--mpi: this program was built without MPI: with Open MPI or MPICH installed, build it with \
         `--features mpi` (docs/data-parallel.md), or use --ranks for threads"
            .into(),
    ))
}

/// Each rank must have an image of every whole batch.
fn check_batch(args: &RunArgs, world_size: usize) -> Result<()> {
    let batch_size = args.batch_size;
    match world_size <= batch_size as usize {
        true => Ok(()),
        false => Err(Failure::Usage(format!(
            "--batch-size {batch_size}: {world_size} ranks share the images of a batch, so some would have none"
        ))),
    }
}
