//! `convoke search`: which learning rate, augmentation and image size do best, by successive halving (K. Jamieson, A. Talwalkar,
//! "Non-stochastic best arm identification and hyperparameter optimization", 2016).
//!
//! Many trials are trained for a few epochs, a third of them for three times as many, and so on until one has all epochs. Each trial is a
//! run of `convoke train` in a process and a folder of its own, so one that diverges or finds no memory ends alone, and each can be used,
//! resumed and looked at like any run.

mod space;
mod state;
mod trial;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::{Args, value_parser};
use convoke_files::escaped;

use super::console::{self, Console};
use super::failure::{Failure, Result};
use super::flags::run::RunArgs;
use super::flags::values::time;
use super::model_folder::ModelFolder;
use super::run::Run;
use super::settings::Settings;
use super::text::{counted, shell, thousands};
use super::{dataset, json, output};

use crate::nn::data_parallel::Sampler;
use space::Space;
use state::State;
use trial::{Ended, Process};

/// Flags of runs that a search does not take, and why.
pub(crate) const UNUSED: [(&str, &str); 4] = [
    ("steps", "trials are compared after whole epochs: --epochs says how many the last one has"),
    ("checkpoint", "each trial has a folder of its own"),
    ("report", "each trial has a page of its own"),
    ("mpi", "a search runs on one machine: --ranks N has ranks there"),
];

#[derive(Args)]
pub(crate) struct SearchArgs {
    #[command(flatten)]
    pub(crate) run: RunArgs,

    /// How many combinations to try. The first has the default settings, so that the search does no worse than `convoke train`.
    #[arg(long, value_name = "N", default_value_t = 9, value_parser = value_parser!(u16).range(2..=1000), help_heading = "Search")]
    pub(crate) trials: u16,

    /// End the search after this time with the best so far: 90s, 30m, 2h. A search that is resumed has as much time again.
    #[arg(long, value_name = "TIME", value_parser = time, help_heading = "Search")]
    pub(crate) time_limit: Option<Duration>,

    /// The folder of the search [default: runs/NAME-search-N, after the data].
    #[arg(long, value_name = "DIR", help_heading = "Output")]
    pub(crate) output: Option<PathBuf>,

    /// The flags that each trial has.
    #[arg(skip)]
    pub(crate) settings: Settings,
}

pub(crate) fn run(args: SearchArgs) -> Result<()> {
    let console = Console::new()?;
    json::check(args.run.json.as_deref())?;
    let file = args.run.json.clone();
    let limit = args.time_limit;
    let mut search = match args.run.resume.clone() {
        None => begin(args, &console)?,
        Some(folder) => {
            let folder = folder.or(args.output).ok_or_else(|| {
                Failure::Usage(
                    "--resume: name the folder of the search: --resume runs/photos-search-1".into(),
                )
            })?;
            resume(folder, &console)?
        }
    };
    search.limit = limit.map(|limit| (Instant::now(), limit));
    let done = search.run(&console);
    // What has been found is shown even if the search ended early.
    let table = search.state.table();
    if !table.is_empty() {
        console.say(&table, file.as_deref())?;
    }
    done?;
    json::write_value(file.as_deref(), &search.state)?;
    search.announce()
}

/// A search that goes on.
struct Search {
    folder: PathBuf,
    state: State,
    /// When it began, and how long it may take.
    limit: Option<(Instant, Duration)>,
}

/// A new search. The data is looked at, so that what is wrong with it or with a flag ends the search before its first trial.
fn begin(args: SearchArgs, console: &Console) -> Result<Search> {
    let SearchArgs { run, trials, time_limit: _, output, settings } = args;
    let given = [run.steps.is_some(), run.checkpoint.is_some(), run.report.is_some(), run.ranks.mpi];
    if let Some(((flag, reason), _)) = UNUSED.iter().zip(given).find(|(_, given)| *given) {
        return Err(Failure::Usage(format!("--{flag}: {reason}")));
    }
    let run = run.resolve()?;
    if run.source.spec.is_none() {
        return Err(Failure::Usage("there is nothing to find on noise: name a folder or a data set".into()));
    }
    let data = dataset::load(&run, 1, console)?;
    let (images, batch) = (data.train.len(), run.batch.images.min(data.train.len().max(1)));
    let batches = Sampler::batches_of(images, batch);
    let epochs = run.length.epochs_of(batches).expect("only --steps leaves the epochs open");
    let space = Space::of(&run, &settings, data.train.info())?;
    let state = State::new(&settings, epochs, space.trials(usize::from(trials), run.seed));
    let folder = folder(output, &run)?;
    state.save(&folder)?;
    console.line(&format!(
        "search: {} for {}; {}; {} to validate",
        space.names(),
        escaped(run.source.title()),
        state.plan(),
        counted(data.test.len(), "image")
    ));
    output::announce("search", &folder);
    Ok(Search { folder, state, limit: None })
}

fn folder(named: Option<PathBuf>, run: &Run) -> Result<PathBuf> {
    let Some(folder) = named else { return ModelFolder::new_for(&format!("{}-search", run.source.title())) };
    output::check_folder("--output", &folder)?;
    match State::is_in(&folder) {
        true => Err(Failure::Usage(format!(
            "--output: {} already holds a search: go on with it by `convoke search --resume {}`, or name another folder",
            escaped(folder.display()),
            shell(folder.display())
        ))),
        false => Ok(folder),
    }
}

/// A search that goes on where it ended.
fn resume(folder: PathBuf, console: &Console) -> Result<Search> {
    let state = State::read(&folder)?;
    console.line(&format!(
        "resumed: {} of {} done",
        thousands(state.done()),
        counted(state.all(), "training")
    ));
    Ok(Search { folder, state, limit: None })
}

impl Search {
    /// Does what is left.
    fn run(&mut self, console: &Console) -> Result<()> {
        let _held = output::hold_folder("--output", &self.folder)?;
        for rung in 0..self.state.rungs.len() {
            for index in self.state.entrants(rung) {
                if self.state.trials[index].ended_at(rung) {
                    continue;
                }
                let Some(left) = self.time_left() else {
                    console.line("--time-limit is over");
                    return Ok(());
                };
                self.train(index, rung, left, console)?;
            }
        }
        Ok(())
    }

    /// The time that is left, infinite without a limit; none if it is over.
    fn time_left(&self) -> Option<Duration> {
        match self.limit {
            None => Some(Duration::MAX),
            Some((began, limit)) => limit.checked_sub(began.elapsed()).filter(|left| !left.is_zero()),
        }
    }

    /// Trains a trial to the epochs of a rung.
    fn train(&mut self, index: usize, rung: usize, left: Duration, console: &Console) -> Result<()> {
        let (trial, epochs) = (&self.state.trials[index], self.state.rungs[rung]);
        let name = format!("trial {}, {}: epoch", trial.number, trial.settings());
        let process = Process { folder: &self.folder, common: &self.state.settings, trial, epochs, left };
        match process.run(&name, console)? {
            Ended::Trained(result) => {
                let text = result.text();
                console.line(&format!(
                    "trial {}, {}, {}: {text}",
                    trial.number,
                    trial.settings(),
                    counted(result.epochs, "epoch")
                ));
                self.state.trials[index].results.push(result);
            }
            Ended::Failed(reason) => {
                console.line(&format!("trial {}, {}: {}", trial.number, trial.settings(), escaped(&reason)));
                self.state.trials[index].failure = Some(reason);
            }
            Ended::Interrupted => {
                let folder = shell(self.folder.display());
                return Err(Failure::Interrupted(format!(
                    "interrupted; `convoke search --resume {folder}` goes on with it"
                )));
            }
        }
        self.state.save(&self.folder)
    }

    /// Tells which trial is the best, and what to do with it.
    fn announce(&self) -> Result<()> {
        let Some(best) = self.state.best() else {
            let reason = self.state.trials.iter().find_map(|trial| trial.failure.as_deref());
            let reason = reason.map_or_else(
                || "the time was over before the first ended".into(),
                |reason| escaped(reason).to_string(),
            );
            return Err(Failure::Run(format!("no trial was trained: {reason}")));
        };
        let folder = trial::folder(&self.folder, best.number);
        let name = shell(folder.display());
        console::note(&format!(
            "the best is trial {}: {}\nnext: `convoke evaluate {name} DIR`, `convoke predict {name} IMAGE...`, or `convoke train --config {name}/run.toml \
             --epochs N` for another run with its flags",
            best.number,
            escaped(folder.display()),
        ));
        Ok(())
    }
}
