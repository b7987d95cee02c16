//! A trial's training, in a process of its own.

use std::ffi::OsString;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use convoke_files::{create_folder, escaped, read_text};
use toml::Table;

use super::state::{Trial, TrialResult};
use crate::cli::console::Console;
use crate::cli::failure::{Failure, Result};
use crate::cli::model_folder::METRICS;
use crate::cli::settings::{SETTINGS, as_arguments};

/// How often the process is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// How long a process may take to save its run once Ctrl-C was pressed.
const PATIENCE: Duration = Duration::from_secs(10);
/// The longest time limit that the program takes.
const NO_LIMIT: Duration = Duration::from_secs(1_000_000_000);
const MAX_BYTES: u64 = 64 << 20;

/// The training of a trial up to a number of epochs.
pub(super) struct Process<'a> {
    /// The folder of the search.
    pub(super) folder: &'a Path,
    /// The flags that all trials have.
    pub(super) common: &'a Table,
    pub(super) trial: &'a Trial,
    pub(super) epochs: u64,
    /// The time that it may take.
    pub(super) left: Duration,
}

/// How it ended.
pub(super) enum Ended {
    Trained(TrialResult),
    /// It cannot go on, and why.
    Failed(String),
    /// By Ctrl-C.
    Interrupted,
}

/// The folder of a trial's run.
pub(super) fn folder(search: &Path, number: usize) -> PathBuf {
    search.join(format!("trial-{number}"))
}

impl Process<'_> {
    /// Runs it, and shows its epochs under a name.
    ///
    /// # Errors
    /// If the process cannot be started, or refuses the flags, as it would those of every trial.
    pub(super) fn run(self, name: &str, console: &Console) -> Result<Ended> {
        let run = folder(self.folder, self.trial.number);
        let before = lines(&run).len();
        let (began, log) = (Instant::now(), self.folder.join(format!("trial-{}.log", self.trial.number)));
        let mut child = self.start(&run, &log)?;
        let mut stage = console.stage(name, before as u64, Some(self.epochs));
        let mut asked = None::<Instant>;
        let status = loop {
            if let Some(status) = child.try_wait().map_err(|error| failed(&error))? {
                break status;
            }
            stage.set(lines(&run).len() as u64, "");
            if console.interrupted() && asked.get_or_insert_with(Instant::now).elapsed() > PATIENCE {
                // The terminal has told it, too. If it has not ended, its last checkpoint is what is gone on with.
                let _ = child.kill();
            }
            std::thread::sleep(LOOK_EVERY);
        };
        stage.end();
        let message = read_text(&log, MAX_BYTES).unwrap_or_default();
        let _ = fs::remove_file(&log);
        if console.interrupted() || status.code() == Some(130) {
            return Ok(Ended::Interrupted);
        }
        self.ended(status, &message, &run, began.elapsed().as_secs_f64())
    }

    fn start(&self, run: &Path, log: &Path) -> Result<Child> {
        create_folder(run).map_err(|error| failed(&error))?;
        let log = File::create(log).map_err(|error| failed(&error))?;
        let program = std::env::current_exe().map_err(|error| failed(&error))?;
        let mut command = Command::new(program);
        command.args(["--quiet", "train"]).args(self.arguments(run)?);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        command.spawn().map_err(|error| failed(&error))
    }

    fn arguments(&self, run: &Path) -> Result<Vec<OsString>> {
        let mut all: Vec<OsString> = Vec::new();
        if run.join(SETTINGS).is_file() {
            all.extend(["--resume".into(), run.into()]);
        } else {
            for (name, value) in self.common.iter().chain(&self.trial.flags) {
                all.extend(as_arguments(name, value).map_err(Failure::Run)?);
            }
            all.extend(["--output".into(), run.into()]);
        }
        all.push(format!("--epochs={}", self.epochs).into());
        // A run that is resumed would keep the limit that it was begun with.
        let seconds = self.left.min(NO_LIMIT).as_secs_f64().max(0.001);
        all.push(format!("--time-limit={seconds}").into());
        Ok(all)
    }

    /// What became of a process that ended by itself.
    fn ended(self, status: ExitStatus, message: &str, run: &Path, seconds: f64) -> Result<Ended> {
        let message = message.trim();
        let message = message.strip_prefix("error: ").unwrap_or(message);
        if status.code() == Some(2) {
            let text = message.split("\n\nFor more").next().unwrap_or(message);
            return Err(Failure::Usage(format!("trial {}: {}", self.trial.number, text)));
        }
        if !status.success() {
            let line = message.lines().next().unwrap_or_default();
            let reason = if line.is_empty() { status.to_string() } else { line.to_owned() };
            return Ok(Ended::Failed(reason));
        }
        let epochs = lines(run);
        match epochs.iter().rev().find(|epoch| epoch["best"] == true) {
            Some(best) => Ok(Ended::Trained(TrialResult {
                epochs: epochs.len(),
                accuracy: best["accuracy"].as_f64(),
                mean_iou: best["mean_iou"].as_f64(),
                mean_f1: best["mean_f1"].as_f64(),
                loss: best["validation_loss"].as_f64(),
                seconds,
            })),
            None => Ok(Ended::Failed("no epoch could be judged".into())),
        }
    }
}

/// The epochs of a run that were validated.
fn lines(run: &Path) -> Vec<serde_json::Value> {
    let text = read_text(&run.join(METRICS), MAX_BYTES).unwrap_or_default();
    text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
}

fn failed(error: &std::io::Error) -> Failure {
    Failure::Run(format!("a trial cannot be started: {}", escaped(error)))
}
