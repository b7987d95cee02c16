//! `convoke train`: one run, from data to summary.

use std::path::{Path, PathBuf};

use crate::nn::modules::ConvBnMode;
use clap::{Args, ValueEnum};

use super::failure::{Failure, Result};
use super::flags::run::RunArgs;
use super::flags::threads;
use super::flags::values::{given, name};
use super::model_folder::{KeepArgs, ModelFolder};
use super::profile::Profile;
use super::quality::Judged;
use super::ranks::{self, Rank};
use super::record::Results;
use super::run::Run;
use super::session::{Session, SessionOptions, interruption, publish, show};
use super::{find_lr, output, overview, report};

#[derive(Args)]
pub(crate) struct TrainArgs {
    #[command(flatten)]
    pub(crate) run: RunArgs,

    /// Say what was found and what would be done, and do nothing.
    #[arg(long, help_heading = "Output")]
    pub(crate) dry_run: bool,

    /// Take the flags from this file, such as the run.toml of another run; flags that are given beside it count more.
    #[arg(long, value_name = "FILE.toml", conflicts_with = "resume", help_heading = "Output")]
    pub(crate) config: Option<PathBuf>,

    /// Find the learning rate before the first step: train a copy for up to 100 steps with rising learning rates, and take the one at
    /// which the loss falls fast. The report shows the losses, and run.toml holds the rate.
    #[arg(long, conflicts_with_all = ["lr", "resume"], help_heading = "Training")]
    pub(crate) find_lr: bool,

    /// How convolution + batch norm blocks run: `fused` keeps one tensor a block for backward (two with a residual or a pool) and
    /// recomputes the rest; `separate` keeps a tensor for every layer. The results are the same.
    #[arg(long, value_enum, default_value_t = ConvBn::Fused, help_heading = "Model")]
    pub(crate) conv_bn: ConvBn,

    #[command(flatten)]
    pub(crate) keep: KeepArgs,

    /// Show where the time of a step goes and how near it is to the machine's limits, and write a trace: open it in
    /// ui.perfetto.dev or chrome://tracing. The first step, which measures algorithms, is in the trace but not in the table.
    #[arg(long, value_name = "FILE.json", help_heading = "Output")]
    pub(crate) profile: Option<PathBuf>,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ConvBn {
    Fused,
    Separate,
}

impl From<ConvBn> for ConvBnMode {
    fn from(choice: ConvBn) -> ConvBnMode {
        match choice {
            ConvBn::Fused => ConvBnMode::Fused,
            ConvBn::Separate => ConvBnMode::Separate,
        }
    }
}

pub(crate) fn run(args: TrainArgs) -> Result<()> {
    // The file of settings has been read with the command line.
    let TrainArgs { run, dry_run, config: _, find_lr, conv_bn, keep, profile } = args;
    output::check("--profile", profile.as_deref())?;
    let run = run.resolve()?;
    let KeepArgs { output, no_output, best_by, patience, .. } = &keep;
    let settings = [
        ("command", "train".into()),
        ("--find-lr", find_lr.to_string()),
        ("--conv-bn", name(conv_bn)),
        ("--output", given(&output.as_ref().map(|folder| folder.display()))),
        ("--best-by", given(&best_by.map(name))),
        ("--patience", given(patience)),
    ];
    if run.memory.is_planned() && conv_bn == ConvBn::Separate {
        return Err(Failure::Usage(
            "--memory-budget and --memory-plan are for fused blocks, not --conv-bn separate".into(),
        ));
    }
    if run.memory.is_planned() && find_lr {
        return Err(Failure::Usage(
            "--find-lr: its steps keep to no memory budget: run it without one, then give the rate with --lr"
                .into(),
        ));
    }
    let is_kept = output.is_none() && !no_output && run.source.spec.is_some() && !run.resume;
    let options = TrainOptions {
        find_lr,
        conv_bn: conv_bn.into(),
        keep: &keep,
        name: is_kept.then(|| run.source.title()),
        profile: profile.as_deref(),
        dry_run,
    };
    ranks::run(&run, &settings, |rank| on_rank(&run, &options, rank))
}

/// What `train` has besides what all runs have.
struct TrainOptions<'a> {
    find_lr: bool,
    conv_bn: ConvBnMode,
    keep: &'a KeepArgs,
    /// What the run's folder is called, if it is a new one that no flag names.
    name: Option<String>,
    profile: Option<&'a Path>,
    dry_run: bool,
}

fn on_rank(run: &Run, own: &TrainOptions<'_>, rank: &Rank<'_>) -> Result<()> {
    let console = rank.console;
    if own.dry_run {
        return overview::of_plan(run, rank, own.find_lr);
    }
    let tuner = run.tuning.tuner(console)?;
    let cpu = threads::cpu(run.threads, rank.in_process)?;
    let mut keep = own.keep.clone();
    let found = own.find_lr.then(|| find_lr::of_run(run, rank, own.conv_bn, (&tuner, &cpu))).transpose()?;
    if let Some(found) = &found {
        keep.settings.choose_learning_rate(found.rate);
    }
    if let Some(name) = own.name.as_deref().filter(|_| rank.is_first()) {
        keep.output = Some(ModelFolder::new_for(name)?);
    }
    let in_output = keep.output.as_deref().map(ModelFolder::checkpoint_in);
    let checkpoint = run.checkpoint.as_deref().or(in_output.as_deref());
    let options = SessionOptions {
        conv_bn: own.conv_bn,
        learning_rate: found.as_ref().map(|found| found.rate),
        tuner: &tuner,
        cpu: &cpu,
        checkpoint,
        keep: Some(&keep),
    };
    let mut session = Session::start(run, rank, options)?;
    overview::show(run, rank, session.overview())?;
    if let Some(folder) = &keep.output {
        output::announce("run", folder);
    }
    session.show_resumed(run, console);
    let mut stage = session.stage(console);
    let mut interrupted = false;
    // The run that is resumed ended before this epoch was validated.
    if session.trainer.validation_is_due() {
        interrupted = !session.validate_if_due(console)?;
        session.save_if_due(rank, interrupted)?;
    }
    let profile = own.profile.filter(|_| rank.is_first()).map(Profile::start);
    while session.has_more() && !interrupted {
        if let Some(profile) = profile.as_ref().filter(|_| session.recorder.steps() == 1) {
            profile.forget_warm_up();
        }
        session.step()?;
        session.show(&mut stage, console, session.recorder.recent_rate());
        interrupted = session.agree(console.interrupted())?;
        session.end_if_late()?;
        interrupted = interrupted || !session.validate_if_due(console)?;
        session.save_if_due(rank, interrupted)?;
    }
    stage.end();
    // Stop before testing, which is no part of a step.
    let recording = profile.map(Profile::stop);
    let finished = !interrupted && session.evaluate(console)?;
    session.show_end(console);
    let (steps, cpu) = (session.trainer.steps(), session.cpu().clone());
    let (folder, board) = (session.take_folder(), session.take_board());
    let photos = session.trainer.card().photos.and_then(|photos| photos.folder);
    let mut record = session.finish()?;
    record.range_test = found.and_then(|found| found.test);
    let results = Results { runs: vec![record], step_ratio: None };
    publish(run, rank, &results)?;
    if let Some(folder) = &folder {
        report::write("--output", &folder.report()?, &results)?;
        folder.announce(finished, photos.as_deref());
    }
    if let Some(mut board) = board {
        let pictures = results.runs[0].judged.as_ref().map_or_else(Vec::new, Judged::pictures);
        board.pictures(steps, pictures)?;
        board.finish()?;
    }
    // After the record is made, because measuring the limits takes memory that the run did not take.
    if let Some(recording) = recording {
        show(run, &format!("\n{}", recording.finish(&cpu)?))?;
    }
    // The first rank reports it for all.
    match finished || !rank.is_first() {
        true => Ok(()),
        false => Err(interruption(checkpoint, steps, keep.output.as_deref())),
    }
}
