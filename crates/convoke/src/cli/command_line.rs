//! Reads the command line and, for `train`, the file of settings that `--config FILE` or `--resume RUN` names.
//!
//! Values in the file become arguments, so that they are read, checked and refused as those of the command line. A flag that the
//! command line has counts more than its line in the file.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use clap::{Arg, ArgAction, ArgMatches, FromArgMatches};
use convoke_files::escaped;
use toml::{Table, Value};

use super::command::{Args, Command, definition};
use super::failure::{Failure, Result};
use super::model_folder::{CHECKPOINT, RUNS};
use super::settings::{Flag, OWN, PLACE, SETTINGS, Settings, as_arguments, as_text, is_given, refused};
use super::text::shell;

/// What a run that is resumed keeps, because other values would make it another run.
const KEPT: [&str; 37] = [
    "data",
    "augment",
    "image-size",
    "validation",
    "normalisation",
    "trivial-augment",
    "erasing",
    "skip-broken",
    "model",
    "weights",
    "precision",
    "batch-size",
    "optimizer",
    "lr",
    "momentum",
    "weight-decay",
    "label-smoothing",
    "schedule",
    "lr-gamma",
    "lr-step",
    "warmup",
    "head-lr",
    "nesterov",
    "decay",
    "freeze",
    "frozen-epochs",
    "freeze-bn",
    "sampler",
    "clip-norm",
    "ema",
    "mixup",
    "cutmix",
    "progressive",
    "class-weights",
    "seed",
    "sync-bn",
    "checkpoint",
];
const TRAIN: &str = "train";
const SEARCH: &str = "search";

/// Reads the command line and, for `train`, the file of settings that it names. As clap does, it ends the process for `--help`,
/// `--version`, and arguments that do not exist.
pub(crate) fn parse(arguments: Vec<OsString>) -> Result<Args> {
    let matches = matches(&arguments).unwrap_or_else(|error| error.exit());
    let Some(train) = matches.subcommand_matches(TRAIN) else { return with_trials(&matches) };
    let flags = flags_of(TRAIN);
    let (file, run) = match (train.get_one::<PathBuf>("config"), resumed(train)?) {
        (Some(file), _) => (file.clone(), None),
        (None, Some(run)) => (run.join(SETTINGS), Some(run)),
        (None, None) => return with_settings(&matches, &flags),
    };
    let Settings(settings) = Settings::read(&file, &flags)?;
    if run.is_some() {
        check_kept(train, &flags, &settings, &file)?;
    }
    let given = |name: &str| flags.iter().any(|flag| flag.name == name && flag.is_given(train));
    // An argument that names data stands for both flags about it.
    let is_replaced =
        |name: &str| given(name) || ["data", "data-dir"].contains(&name) && is_given(train, PLACE);
    let mut all = arguments;
    for (name, value) in settings.iter().filter(|(name, _)| !is_replaced(name)) {
        all.extend(as_arguments(name, value).map_err(|reason| refused(&file, &reason))?);
    }
    if let Some(run) = run.filter(|_| !is_given(train, "output")) {
        all.extend(["--output".into(), run.into()]);
    }
    // What is wrong now came from the file.
    with_settings(&self::matches(&all).map_err(|error| refused(&file, &first_lines(&error)))?, &flags)
}

fn matches(arguments: &[OsString]) -> std::result::Result<ArgMatches, clap::Error> {
    definition().try_get_matches_from(arguments)
}

fn args(matches: &ArgMatches) -> Args {
    Args::from_arg_matches(matches).unwrap_or_else(|error| error.exit())
}

/// The arguments, with the settings that `train` writes into the run's folder.
fn with_settings(matches: &ArgMatches, flags: &[Flag]) -> Result<Args> {
    let mut args = args(matches);
    if let (Command::Train(train), Some(matches)) = (&mut args.command, matches.subcommand_matches(TRAIN)) {
        train.keep.settings = Settings::of(matches, flags)?;
    }
    Ok(args)
}

/// The arguments of another command than `train`; those of `search` with the flags that its trials have.
fn with_trials(matches: &ArgMatches) -> Result<Args> {
    let mut args = args(matches);
    if let (Command::Search(search), Some(matches)) = (&mut args.command, matches.subcommand_matches(SEARCH))
    {
        let flags = flags_of(SEARCH);
        let of_trials: Vec<Flag> = flags
            .into_iter()
            .filter(|flag| !["trials", "time-limit"].contains(&flag.name.as_str()))
            .collect();
        search.settings = Settings::of(matches, &of_trials)?;
    }
    Ok(args)
}

/// The folder of the run that is resumed, if its flags are to be found there.
fn resumed(train: &ArgMatches) -> Result<Option<PathBuf>> {
    if !is_given(train, "resume") {
        return Ok(None);
    }
    let named = train.get_one::<PathBuf>("resume").cloned();
    let output = train.get_one::<PathBuf>("output").cloned();
    let run = match (named, output) {
        (Some(run), Some(output)) if run != output => {
            return Err(Failure::Usage("--resume and --output name two runs: leave --output out".into()));
        }
        (Some(run), _) => run,
        // The flags of a run that is named by its output or checkpoint may all be there again, as they had to be once.
        (None, Some(output)) => return Ok(Some(output).filter(|run| run.join(SETTINGS).is_file())),
        (None, None) if is_given(train, "checkpoint") => return Ok(None),
        (None, None) => newest()?,
    };
    match run.join(SETTINGS).is_file() {
        true => Ok(Some(run)),
        false => Err(no_run(&run)),
    }
}

/// Why a folder cannot be resumed.
fn no_run(run: &Path) -> Failure {
    let name = escaped(run.display());
    if !run.is_dir() {
        return Failure::Usage(format!("--resume: there is no folder {name}"));
    }
    let is_older = run.join(CHECKPOINT).is_dir();
    Failure::Usage(match is_older {
        true => format!(
            "--resume: {name} holds no {SETTINGS}, so its flags are not known: give them again, with --output {name} --resume"
        ),
        false => format!("--resume: {name} is no folder of a run: it holds no {SETTINGS}"),
    })
}

/// The run that was written to last.
fn newest() -> Result<PathBuf> {
    let runs = fs::read_dir(RUNS).into_iter().flatten().flatten().map(|entry| entry.path());
    let runs = runs.filter(|run| run.join(SETTINGS).is_file());
    let changed = |run: &PathBuf| fs::metadata(run).and_then(|found| found.modified()).ok();
    runs.max_by_key(changed)
        .ok_or_else(|| Failure::Usage(format!("--resume: there is no run in {RUNS}: name the folder of one")))
}

/// The flags of `train` or `search` that are settings.
fn flags_of(command: &str) -> Vec<Flag> {
    let mut definition = definition();
    definition.build();
    let command = definition.find_subcommand(command).expect("there is such a command");
    let flag = |arg: &Arg| {
        let name = arg.get_long().filter(|name| !OWN.contains(name))?.to_owned();
        let is_switch = matches!(arg.get_action(), ArgAction::SetTrue);
        Some(Flag { id: arg.get_id().to_string(), name, is_switch })
    };
    command.get_arguments().filter_map(flag).collect()
}

/// Fails if the command line has another value than the run for what a run keeps.
fn check_kept(train: &ArgMatches, flags: &[Flag], settings: &Table, file: &Path) -> Result<()> {
    // Such a run has another schedule than one that knows its epochs.
    let is_open = settings.contains_key("steps") && !settings.contains_key("epochs");
    if is_open && is_given(train, "epochs") {
        return Err(Failure::Usage(
            "--epochs: the run was begun with --steps alone: --steps prolongs it".into(),
        ));
    }
    let mut given: Vec<(&str, Value)> = Vec::new();
    for flag in flags.iter().filter(|flag| KEPT.contains(&flag.name.as_str()) && flag.is_given(train)) {
        given.push((&flag.name, flag.value(train)?));
    }
    for (name, value) in given {
        let before = settings.get(name);
        if before.and_then(as_text) != as_text(&value) {
            let before = before
                .and_then(as_text)
                .map_or_else(|| "its default".to_owned(), |text| escaped(text).to_string());
            let run = file.parent().unwrap_or(Path::new(""));
            let (text, run) = (as_text(&value).unwrap_or_default(), shell(run.display()));
            return Err(Failure::Usage(format!(
                "--{name} {text}: the run was begun with {before}, and a run that is resumed keeps it. Leave the flag out, or begin \
                 another run with `convoke train --config {run}/{SETTINGS} --{name} {text}`"
            )));
        }
    }
    Ok(())
}

/// What clap says first of an error, without the usage.
fn first_lines(error: &clap::Error) -> String {
    let text = error.render().to_string();
    let text = text.strip_prefix("error: ").unwrap_or(&text);
    text.split("\n\nUsage:")
        .next()
        .unwrap_or(text)
        .split("\n\nFor more")
        .next()
        .unwrap_or(text)
        .trim_end()
        .to_owned()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::cli::settings::PATHS;

    #[test]
    fn lists_of_flags_name_flags() {
        let mut command = definition();
        command.build();
        let train = command.find_subcommand(TRAIN).unwrap();
        let all: BTreeSet<&str> = train.get_arguments().filter_map(Arg::get_long).collect();
        for name in KEPT.iter().chain(&OWN).chain(&PATHS) {
            assert!(all.contains(name), "{name}");
        }
        assert!(KEPT.iter().all(|name| !OWN.contains(name)));
        assert!(train.get_arguments().any(|arg| arg.get_id() == PLACE));
    }
}
