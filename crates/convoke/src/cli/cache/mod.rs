//! `convoke cache`: shows and manages the tuning results on disk.

mod explain;
mod state;

use std::cell::RefCell;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use crate::Isa;
use crate::tune::{Cache, Entry};
use clap::{Args, Subcommand};
use convoke_files::escaped;

use super::failure::{Failure, Result};
use super::flags::problems::{PassName, passes};
use super::text::{align, counted, milliseconds};
use super::{console, places, problems};
use state::{State, state};

#[derive(Args)]
pub(crate) struct CacheArgs {
    /// The folder of the cache [default: see `convoke cache path`].
    #[arg(long, value_name = "DIR", global = true)]
    pub(crate) cache: Option<PathBuf>,

    #[command(subcommand)]
    pub(crate) command: CacheCommand,
}

#[derive(Subcommand)]
pub(crate) enum CacheCommand {
    /// Show where results are kept.
    Path,
    /// Show every result, one per line.
    List,
    /// Explain the choice for a problem: every candidate's times, and why the winner won.
    Show {
        /// The convolution, in either notation.
        problem: String,
        /// Passes to show [default: all].
        #[arg(long, value_enum, value_name = "PASS", value_delimiter = ',')]
        pass: Vec<PassName>,
    },
    /// Read every result, and say which are damaged (exit code 1) or out of date.
    Verify,
    /// Remove results that are damaged, out of date, or of another version.
    Prune {
        /// Remove every result.
        #[arg(long)]
        all: bool,
        /// Also remove results that were written more than this many days ago.
        #[arg(long, value_name = "DAYS")]
        older_than: Option<u32>,
    },
    /// Write every result to one file, for `import` elsewhere.
    Export {
        /// The file.
        file: PathBuf,
    },
    /// Add the results of an exported file that are not here yet.
    Import {
        /// The file.
        file: PathBuf,
    },
}

pub(crate) fn run(args: &CacheArgs) -> Result<()> {
    let folder = places::cache_folder(args.cache.as_deref())?;
    let cache = Cache::new(&folder, Isa::detect());
    match &args.command {
        CacheCommand::Path => console::print(&format!("{}\n", folder.display())),
        CacheCommand::List => list(&cache),
        CacheCommand::Show { problem, pass } => {
            let passes: Vec<String> = passes(pass).iter().map(ToString::to_string).collect();
            explain::show(&cache, &problems::parse(problem)?.to_string(), &passes)
        }
        CacheCommand::Verify => verify(&cache),
        CacheCommand::Prune { all, older_than } => prune(&cache, *all, *older_than),
        CacheCommand::Export { file } => {
            let count = cache.export(file)?;
            console::print(&format!("{} written to {}\n", results(count), file.display()))
        }
        CacheCommand::Import { file } => {
            let [added, present] = cache.import(file)?;
            let present = if present > 0 { format!("; {present} were there already") } else { String::new() };
            console::print(&format!("{} added{present}\n", results(added)))
        }
    }
}

fn results(count: usize) -> String {
    counted(count, "result")
}

/// The message about an empty cache.
fn empty(cache: &Cache) -> String {
    format!("no tuning results in {} yet; `convoke tune` makes some\n", cache.root().display())
}

/// A table for each kind of machine.
fn list(cache: &Cache) -> Result<()> {
    let entries = cache.entries()?;
    if entries.is_empty() {
        return console::print(&empty(cache));
    }
    let mut text = String::new();
    for of_scope in entries.chunk_by(|a, b| a.scope == b.scope) {
        let scope = &of_scope[0].scope;
        let mark = if scope == cache.scope() { " (this machine)" } else { "" };
        let mut rows =
            vec![["problem", "pass", "format", "threads", "ms", "algorithm", ""].map(String::from).to_vec()];
        rows.extend(of_scope.iter().map(row));
        text += &format!("{scope}{mark}: {}\n{}", results(of_scope.len()), align(&rows));
    }
    console::print(&text)
}

/// An entry's line in the list.
fn row(entry: &Entry) -> Vec<String> {
    let state = state(entry);
    let Ok(record) = &entry.record else {
        let name = entry.path.file_name().unwrap_or_default().to_string_lossy();
        let mut row = vec![escaped(name).to_string()];
        row.resize(6, String::new());
        row.push("damaged".into());
        return row;
    };
    let key = &record.key;
    let times = record.candidates.iter().find(|candidate| candidate.algorithm == record.chosen);
    let times = times.and_then(|candidate| candidate.times.as_ref());
    let classes = [
        (key.dtype != "f32").then(|| key.dtype.clone()),
        (key.accuracy != "standard").then(|| key.accuracy.clone()),
        key.deterministic.then(|| "deterministic".into()),
        (!matches!(state, State::Current)).then(|| state.name().into()),
    ];
    vec![
        key.problem.clone(),
        key.pass.clone(),
        key.format.clone(),
        key.threads.to_string(),
        times.map_or_else(|| "-".into(), |times| milliseconds(times.score)),
        record.chosen.clone(),
        classes.into_iter().flatten().collect::<Vec<_>>().join(", "),
    ]
}

/// Prints which entries are wrong, and why.
fn verify(cache: &Cache) -> Result<()> {
    let entries = cache.entries()?;
    if entries.is_empty() {
        return console::print(&empty(cache));
    }
    let states: Vec<State> = entries.iter().map(state).collect();
    let mut text = String::new();
    for (entry, state) in entries.iter().zip(&states) {
        if let Some(reason) = state.reason() {
            text += &format!("{}: {}: {reason}\n", state.name(), escaped(entry.path.display()));
        }
    }
    let count = |wanted: fn(&State) -> bool| states.iter().filter(|state| wanted(state)).count();
    let damaged = count(|state| matches!(state, State::Damaged(_)));
    let stale = count(|state| matches!(state, State::Stale(_)));
    let other = count(|state| matches!(state, State::OtherVersion(_)));
    let sound = entries.len() - damaged - stale - other;
    text += &format!("{}: {sound} sound", results(entries.len()));
    for (count, what) in [(stale, "out of date"), (other, "of another version"), (damaged, "damaged")] {
        if count > 0 {
            text += &format!(", {count} {what}");
        }
    }
    console::print(&(text + "\n"))?;
    match damaged {
        0 => Ok(()),
        count => Err(Failure::Run(format!("{} damaged; `convoke cache prune` removes them", results(count)))),
    }
}

/// Removes results that are no longer of use, and prints which.
fn prune(cache: &Cache, all: bool, older_than: Option<u32>) -> Result<()> {
    let removed = RefCell::new(String::new());
    let count = cache.prune(|entry| {
        let old = || {
            older_than
                .filter(|days| is_older(&entry.path, *days))
                .map(|days| format!("older than {days} days"))
        };
        let reason = match state(entry) {
            State::Current if all => Some("current".into()),
            State::Current => old(),
            state => Some(state.name().to_owned()),
        };
        if let Some(reason) = &reason {
            *removed.borrow_mut() += &format!("removed: {} ({reason})\n", escaped(entry.path.display()));
        }
        reason.is_some()
    })?;
    let removed = removed.into_inner();
    let unfinished = count - removed.lines().count();
    let rest = if unfinished > 0 {
        format!(", {unfinished} of them left by interrupted writers")
    } else {
        String::new()
    };
    let left = results(cache.entries()?.len());
    console::print(&format!("{removed}{} removed{rest}; {left} left\n", counted(count, "file")))
}

fn is_older(path: &Path, days: u32) -> bool {
    let limit = Duration::from_secs(86_400 * u64::from(days));
    let written = fs::metadata(path).and_then(|metadata| metadata.modified());
    written.is_ok_and(|at| SystemTime::now().duration_since(at).is_ok_and(|age| age > limit))
}
