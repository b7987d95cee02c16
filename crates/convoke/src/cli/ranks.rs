//! Runs on several ranks: threads of this process, or processes that MPI started.

#[cfg(feature = "mpi")]
use crate::distributed::Error;
use crate::distributed::{Communicator, Options, run_threads};
use crate::nn::data::Datasets;
use crate::nn::modules::ConvBnMode;
use crate::nn::training::TrainingConfig;

use super::console::Console;
use super::failure::{Failure, Result};
use super::flags::threads;
use super::run::Run;
use super::{dataset, json, output};

/// One rank's place in a command.
pub(crate) struct Rank<'a> {
    pub(crate) communicator: &'a Communicator,
    /// Shows something on rank 0 only.
    pub(crate) console: &'a Console,
    pub(crate) data: &'a Datasets,
    /// Ranks that share this process's threads.
    pub(crate) in_process: usize,
}

impl Rank<'_> {
    /// The configuration of a run on the data.
    pub(crate) fn config(&self, run: &Run, conv_bn: ConvBnMode) -> Result<TrainingConfig> {
        let data = self.data.train.as_ref();
        run.config(conv_bn, data, || dataset::balanced_weights(data, self.console))
    }

    /// Whether this is the first rank, which reads and writes files and prints for all.
    pub(crate) fn is_first(&self) -> bool {
        self.communicator.rank() == 0
    }

    /// Runs `work`. If this is the first rank, the others wait for it, however long it takes.
    pub(crate) fn while_others_wait<R>(&self, work: impl FnOnce() -> R) -> Result<R> {
        match self.is_first() {
            true => Ok(self.communicator.at_work(work)?),
            false => Ok(work()),
        }
    }
}

/// Runs `work` on every rank that the flags ask for. Before that, it checks that the output can be written, and loads the data.
/// `own` are the settings of this command besides the flags that all runs have.
pub(crate) fn run(
    run: &Run,
    own: &[(&'static str, String)],
    work: impl Fn(&Rank<'_>) -> Result<()> + Sync,
) -> Result<()> {
    let work = |rank: &Rank<'_>| work(rank).map_err(|failure| dataset::with_remedy(run.source.spec, failure));
    let options = Options { timeout: run.ranks.rank_timeout };
    if run.ranks.mpi {
        let settings: Vec<_> = own.iter().cloned().chain(run.settings.iter().cloned()).collect();
        return run_mpi(run, &options, &settings, work);
    }
    let world_size = usize::from(run.ranks.ranks);
    check_batch(run, world_size)?;
    let (console, quiet) = (Console::new()?, Console::of_thread());
    check_output(run)?;
    threads::warn(&console, run.threads, world_size);
    let data = dataset::load(run, 1, &console)?;
    let results = run_threads(world_size, &options, |communicator| {
        let console = if communicator.rank() == 0 { &console } else { &quiet };
        let rank = Rank { communicator: &communicator, console, data: &data, in_process: world_size };
        work(&rank)
    })?;
    // If a rank failed because of another one, that other rank's error says more.
    let failures: Vec<(usize, Failure)> =
        results.into_iter().enumerate().filter_map(|(rank, result)| Some((rank, result.err()?))).collect();
    let cause = failures.iter().position(|(_, failure)| !matches!(failure, Failure::OtherRanks(_)));
    match failures.into_iter().nth(cause.unwrap_or(0)) {
        None => Ok(()),
        Some((0, failure)) => Err(failure),
        Some((rank, failure)) => Err(failure.on_rank(rank)),
    }
}

/// Runs this process as one rank. Only rank 0 prints; other ranks print only why they fail.
#[cfg(feature = "mpi")]
fn run_mpi(
    run: &Run,
    options: &Options,
    settings: &[(&str, String)],
    work: impl Fn(&Rank<'_>) -> Result<()>,
) -> Result<()> {
    let communicator = crate::distributed::mpi::world(options)?;
    let number = communicator.rank();
    let on_rank = || -> Result<()> {
        communicator.check_settings("flags", settings).map_err(|error| match error {
            Error::Setting { .. } => Failure::Usage(error.to_string()),
            error => Failure::OtherRanks(error.to_string()),
        })?;
        check_batch(run, communicator.world_size())?;
        let console = Console::of_process(number)?;
        if number == 0 {
            check_output(run)?;
            threads::warn(&console, run.threads, 1);
        }
        let load = || dataset::load(run, communicator.world_size(), &console);
        // Rank 0 downloads what the others, on the same machine, then read.
        let data = match number {
            0 => Some(communicator.at_work(load)??),
            _ => None,
        };
        communicator.barrier("data").map_err(|error| Failure::OtherRanks(error.to_string()))?;
        let data = data.map_or_else(load, Ok)?;
        work(&Rank { communicator: &communicator, console: &console, data: &data, in_process: 1 })
    };
    on_rank().map_err(|failure| if number == 0 { failure } else { failure.on_rank(number) })
}

#[cfg(not(feature = "mpi"))]
fn run_mpi(_: &Run, _: &Options, _: &[(&str, String)], _: impl Fn(&Rank<'_>) -> Result<()>) -> Result<()> {
    Err(Failure::Usage(
        "--mpi: this program was built without MPI: with Open MPI or MPICH installed, build it with \
         `--features mpi` (docs/data-parallel.md), or use --ranks for threads"
            .into(),
    ))
}

/// Fails unless each rank gets an image of every whole batch.
fn check_batch(run: &Run, world_size: usize) -> Result<()> {
    let batch_size = run.batch.images;
    match world_size <= batch_size {
        true => Ok(()),
        false => Err(Failure::Usage(format!(
            "--batch-size {batch_size}: {world_size} ranks share the images of a batch, so some would have none"
        ))),
    }
}

/// Fails before any work is done if the results could not be written afterwards.
fn check_output(run: &Run) -> Result<()> {
    output::check("--report", run.report.as_deref())?;
    json::check(run.json.as_deref())
}
