//! Runs on several ranks: threads of this process, or processes that MPI started.

#[cfg(feature = "mpi")]
use crate::distributed::Error;
use crate::distributed::{Communicator, Options, run_threads};
use crate::nn::data::Datasets;

use super::console::Console;
use super::failure::{Failure, Result};
use super::flags::memory::{MemoryArgs, PlannerArgs};
use super::flags::ranks::RankArgs;
use super::flags::run::RunArgs;
use super::flags::threads;
use super::flags::values::{given, name};
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
    /// Whether this is the first rank, which reads and writes files and prints for all.
    pub(crate) fn is_first(&self) -> bool {
        self.communicator.rank() == 0
    }
}

impl Rank<'_> {
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
    args: &RunArgs,
    own: &[(&'static str, String)],
    work: impl Fn(&Rank<'_>) -> Result<()> + Sync,
) -> Result<()> {
    args.recipe.check(args.optimizer, args.momentum)?;
    let work = |rank: &Rank<'_>| work(rank).map_err(|failure| dataset::with_remedy(args.dataset(), failure));
    let options = Options { timeout: args.ranks.rank_timeout };
    if args.ranks.mpi {
        let settings: Vec<_> = own.iter().cloned().chain(settings(args)).collect();
        return run_mpi(args, &options, &settings, work);
    }
    let world_size = usize::from(args.ranks.ranks);
    check_batch(args, world_size)?;
    let (console, quiet) = (Console::new()?, Console::of_thread());
    check_output(args)?;
    threads::warn(&console, args.threads, world_size);
    let data = dataset::load(args, 1, &console)?;
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
    args: &RunArgs,
    options: &Options,
    settings: &[(&str, String)],
    work: impl Fn(&Rank<'_>) -> Result<()>,
) -> Result<()> {
    let communicator = crate::distributed::mpi::world(options)?;
    let number = communicator.rank();
    let run = || -> Result<()> {
        communicator.check_settings("flags", settings).map_err(|error| match error {
            Error::Setting { .. } => Failure::Usage(error.to_string()),
            error => Failure::OtherRanks(error.to_string()),
        })?;
        check_batch(args, communicator.world_size())?;
        let console = Console::of_process(number)?;
        if number == 0 {
            check_output(args)?;
            threads::warn(&console, args.threads, 1);
        }
        let load = || dataset::load(args, communicator.world_size(), &console);
        // Rank 0 downloads what the others, on the same machine, then read.
        let data = match number {
            0 => Some(communicator.at_work(load)??),
            _ => None,
        };
        communicator.barrier("data").map_err(|error| Failure::OtherRanks(error.to_string()))?;
        let data = data.map_or_else(load, Ok)?;
        work(&Rank { communicator: &communicator, console: &console, data: &data, in_process: 1 })
    };
    run().map_err(|failure| if number == 0 { failure } else { failure.on_rank(number) })
}

#[cfg(not(feature = "mpi"))]
fn run_mpi(
    _: &RunArgs,
    _: &Options,
    _: &[(&str, String)],
    _: impl Fn(&Rank<'_>) -> Result<()>,
) -> Result<()> {
    Err(Failure::Usage(
        "--mpi: this program was built without MPI: with Open MPI or MPICH installed, build it with \
         `--features mpi` (docs/data-parallel.md), or use --ranks for threads"
            .into(),
    ))
}

/// The settings that must be the same on all processes that train one model, by the names of the flags. Those that may differ are
/// left out, such as threads, the folder of the data, the output, and how the first rank chooses convolutions for all.
fn settings(args: &RunArgs) -> Vec<(&'static str, String)> {
    let RunArgs {
        data,
        data_dir: _,
        weights,
        download: _,
        workers: _,
        augment,
        photos,
        model: _,
        epochs,
        steps,
        batch_size: _,
        optimizer,
        lr: _,
        momentum,
        weight_decay,
        label_smoothing,
        recipe,
        seed,
        threads: _,
        continue_on_nan,
        ranks: RankArgs { ranks: _, mpi: _, sync_bn, rank_timeout },
        memory:
            MemoryArgs { memory_budget, memory_plan, planner: PlannerArgs { inexact_memory, plan_time: _ } },
        tuning: _,
        checkpoint,
        resume,
        report: _,
        json: _,
    } = args;
    let mut settings = vec![
        ("--data", data.to_string()),
        ("--augment", name(*augment)),
        ("--model", args.model().to_string()),
        ("--weights", given(&weights.as_ref().map(|file| file.display()))),
        ("--epochs", given(epochs)),
        ("--steps", given(steps)),
        ("--batch-size", args.batch_size().to_string()),
        ("--optimizer", name(*optimizer)),
        ("--lr", args.rule().learning_rate().to_string()),
        ("--momentum", momentum.to_string()),
        ("--weight-decay", given(weight_decay)),
        ("--label-smoothing", label_smoothing.to_string()),
        ("--seed", seed.to_string()),
        ("--continue-on-nan", continue_on_nan.to_string()),
        ("--sync-bn", sync_bn.to_string()),
        ("--rank-timeout", rank_timeout.as_secs_f64().to_string()),
        ("--memory-budget", given(memory_budget)),
        ("--memory-plan", given(&memory_plan.as_ref().map(|file| file.display()))),
        ("--inexact-memory", inexact_memory.to_string()),
        ("--checkpoint", given(&checkpoint.as_ref().map(|folder| folder.display()))),
        ("--resume", resume.to_string()),
    ];
    settings.extend(photos.settings());
    settings.extend(recipe.settings());
    settings
}

/// Fails unless each rank gets an image of every whole batch.
fn check_batch(args: &RunArgs, world_size: usize) -> Result<()> {
    let batch_size = args.batch_size();
    match world_size <= batch_size {
        true => Ok(()),
        false => Err(Failure::Usage(format!(
            "--batch-size {batch_size}: {world_size} ranks share the images of a batch, so some would have none"
        ))),
    }
}

/// Fails before any work is done if the results could not be written afterwards.
fn check_output(args: &RunArgs) -> Result<()> {
    output::check("--report", args.report.as_deref())?;
    json::check(args.json.as_deref())
}
