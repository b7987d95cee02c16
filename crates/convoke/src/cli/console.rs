//! Progress on standard error: a bar on a terminal, plain lines elsewhere; and Ctrl-C.

use std::io::{IsTerminal, Write};
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::nn::data::{ProgressEvent, ProgressUnit};
use convoke_files::escaped_lines;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::failure::{Failure, Result};

/// Time between two plain lines.
const LINE_EVERY: Duration = Duration::from_secs(5);
/// Before this time it is not said how long the rest will take.
const FIRST_ESTIMATE: Duration = Duration::from_secs(2);
/// Two free columns at the right end with the cursor before them: room for the `^C` that a terminal shows on Ctrl-C. Without it,
/// the `^C` would begin a new line and leave the bar behind on the old one.
const ROOM: &str = "  \x1b[2D";

/// Whether `--quiet` was given.
static QUIET: AtomicBool = AtomicBool::new(false);

/// From now on, nothing but results and errors is shown, if `quiet`.
pub(crate) fn set_quiet(quiet: bool) {
    QUIET.store(quiet, Ordering::Relaxed);
}

fn is_quiet() -> bool {
    QUIET.load(Ordering::Relaxed)
}

/// Writes a line to standard error, unless `--quiet` was given.
pub(crate) fn note(text: &str) {
    if !is_quiet() {
        warn(text);
    }
}

/// Writes a line to standard error. Failing to write is ignored: it is no reason to stop. The line is written in one call,
/// because otherwise the lines of several ranks could mix where `mpirun` joins them.
///
/// Text that comes from a file is escaped where it is read. The escaping here is for other text, such as names that come from the
/// system.
pub(crate) fn warn(text: &str) {
    write_error(&format!("{}\n", escaped_lines(text)));
}

/// Writes an error to standard error, its first word in red on a terminal with colours.
pub(crate) fn error(text: &str) {
    let label = console::style("error:").for_stderr().red().bold();
    write_error(&format!("{label} {}\n", escaped_lines(text)));
}

fn write_error(line: &str) {
    let _ = std::io::stderr().write_all(line.as_bytes());
}

/// Writes text to standard output, escaped as in [`note`].
pub(crate) fn print(text: &str) -> Result<()> {
    print_exactly(&escaped_lines(text).to_string())
}

/// Writes text to standard output as it is. This is for JSON, which has its own escaping.
pub(crate) fn print_exactly(text: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    let written = out.write_all(text.as_bytes()).and_then(|()| out.flush());
    written.map_err(|error| Failure::Run(format!("cannot write to standard output: {error}")))
}

/// Whether the JSON goes to standard output, where nothing else may go then.
pub(crate) fn to_stdout(json: Option<&Path>) -> bool {
    json == Some(Path::new("-"))
}

/// Shows how far a command is, on standard error.
pub(crate) struct Console {
    terminal: bool,
    /// Whether nothing is shown at all.
    quiet: bool,
    interrupted: Arc<AtomicBool>,
    /// The bar now on the terminal; other text goes above it.
    shown: Arc<Mutex<ProgressBar>>,
}

impl Console {
    /// Takes over Ctrl-C: the first one asks to stop at the next good moment, the second ends the process.
    pub(crate) fn new() -> Result<Console> {
        Console::of(false, || std::process::exit(130))
    }

    /// A console for a process that is a rank: only the first rank shows anything. A second Ctrl-C does nothing, because `mpirun`
    /// passes Ctrl-C on more than once, and itself ends processes that take too long.
    #[cfg(feature = "mpi")]
    pub(crate) fn of_process(rank: usize) -> Result<Console> {
        Console::of(rank > 0, || ())
    }

    fn of(quiet: bool, again: impl Fn() + Send + 'static) -> Result<Console> {
        let quiet = quiet || is_quiet();
        let interrupted = Arc::new(AtomicBool::new(false));
        let shown = Arc::new(Mutex::new(ProgressBar::hidden()));
        let (flag, bar) = (interrupted.clone(), shown.clone());
        let unwatched = |error: &dyn std::fmt::Display| {
            Failure::Run(format!("cannot watch for Ctrl-C, for want of memory or of threads: {error}"))
        };
        let _starting = convoke_memory::Starting::new(1).map_err(|error| unwatched(&error))?;
        ctrlc::set_handler(move || match flag.swap(true, Ordering::Relaxed) {
            true => again(),
            false if quiet => {}
            false => lock(&bar).suspend(|| note("stopping at the next good moment (Ctrl-C again: at once)")),
        })
        .map_err(|error| unwatched(&error))?;
        let terminal = !quiet && std::io::stderr().is_terminal();
        Ok(Console { terminal, quiet, interrupted, shown })
    }

    /// A console that shows nothing and does not notice Ctrl-C, for threads that are ranks other than the first.
    pub(crate) fn of_thread() -> Console {
        let shown = Arc::new(Mutex::new(ProgressBar::hidden()));
        Console { terminal: false, quiet: true, interrupted: Arc::default(), shown }
    }

    /// Whether Ctrl-C was pressed.
    pub(crate) fn interrupted(&self) -> bool {
        self.interrupted.load(Ordering::Relaxed)
    }

    /// Whether to go on, in the form that data sets expect.
    pub(crate) fn control(&self) -> ControlFlow<()> {
        if self.interrupted() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    }

    /// Writes a line that stays, above the bar if there is one.
    pub(crate) fn line(&self, text: &str) {
        self.line_writer()(text);
    }

    /// [`Console::line`] as a function that may outlive the console.
    pub(crate) fn line_writer(&self) -> impl Fn(&str) + Send + Sync + 'static {
        let (shown, quiet) = (self.shown.clone(), self.quiet);
        move |text| {
            if !quiet {
                lock(&shown).suspend(|| note(text));
            }
        }
    }

    /// Writes text to standard output, above the bar if there is one.
    pub(crate) fn print(&self, text: &str) -> Result<()> {
        lock(&self.shown).suspend(|| print(text))
    }

    /// Writes text to standard output, or as a line that stays if `json` goes to standard output.
    pub(crate) fn say(&self, text: &str, json: Option<&Path>) -> Result<()> {
        if to_stdout(json) {
            self.line(text.trim_end());
            return Ok(());
        }
        self.print(text)
    }

    /// Begins a stage of `total` parts; `done` of them are already done.
    pub(crate) fn stage(&self, name: &str, done: u64, total: Option<u64>) -> Stage {
        self.stage_of(name, ProgressUnit::Images, done, total)
    }

    fn stage_of(&self, name: &str, unit: ProgressUnit, done: u64, total: Option<u64>) -> Stage {
        let target = if self.terminal { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
        let bar = ProgressBar::with_draw_target(total, target);
        let position = match (unit == ProgressUnit::Bytes, total.is_some()) {
            (true, true) => "{wide_bar:.cyan} {decimal_bytes}/{decimal_total_bytes}",
            (true, false) => "{decimal_bytes}",
            (false, true) => "{wide_bar:.cyan} {pos}/{len}",
            (false, false) => "{pos}",
        };
        let template = format!("{{prefix:.bold}} {position}{{msg}}{ROOM}");
        let style = ProgressStyle::with_template(&template).expect("a valid template");
        bar.set_style(style.progress_chars("=>-"));
        bar.set_position(done);
        bar.set_prefix(name.to_owned());
        *lock(&self.shown) = bar.clone();
        let now = Instant::now();
        Stage {
            bar,
            name: name.into(),
            began: now,
            first: done,
            total,
            lines: !self.terminal && !self.quiet,
            last: Some(now),
        }
    }

    /// Shows the progress of reading, downloading or generating data.
    pub(crate) fn data_progress(&self) -> impl Fn(ProgressEvent<'_>) -> ControlFlow<()> + '_ {
        let current = std::cell::RefCell::new(None::<Stage>);
        move |event| {
            let mut current = current.borrow_mut();
            if current.as_ref().is_none_or(|stage| stage.name != event.stage) {
                if let Some(finished) = current.take() {
                    finished.end();
                }
                *current = Some(self.stage_of(event.stage, event.unit, event.done, event.total));
            }
            if let Some(stage) = current.as_mut() {
                stage.set(event.done, "");
                if event.total == Some(event.done) {
                    stage.bar.finish_and_clear();
                }
            }
            self.control()
        }
    }
}

fn lock(bar: &Mutex<ProgressBar>) -> MutexGuard<'_, ProgressBar> {
    bar.lock().unwrap_or_else(PoisonError::into_inner)
}

/// One stage in progress.
pub(crate) struct Stage {
    bar: ProgressBar,
    name: String,
    began: Instant,
    /// Parts that were done when it began.
    first: u64,
    total: Option<u64>,
    lines: bool,
    /// When the last plain line was written; `None` makes the next one due.
    last: Option<Instant>,
}

impl Stage {
    pub(crate) fn is_named(&self, name: &str) -> bool {
        self.name == name
    }

    /// Shows that `done` parts are done, and when the rest will be; plain lines come every few seconds.
    pub(crate) fn set(&mut self, done: u64, message: &str) {
        let left = self.left(done, Instant::now());
        self.set_in(done, message, left.map(|left| left.as_secs_f64()));
    }

    /// As [`Stage::set`], if it is known better how many seconds are left.
    pub(crate) fn set_in(&mut self, done: u64, message: &str, left: Option<f64>) {
        let now = Instant::now();
        if done < self.first {
            // A download has begun anew.
            (self.first, self.began) = (done, now);
        }
        let mut parts: Vec<String> = if message.is_empty() { vec![] } else { vec![message.into()] };
        let left = left.and_then(|left| Duration::try_from_secs_f64(left).ok());
        parts.extend(left.map(|left| format!("{} left", clock(left))));
        let message = if parts.is_empty() { String::new() } else { format!(" {}", parts.join(", ")) };
        if self.lines && self.last.is_none_or(|last| now.duration_since(last) >= LINE_EVERY) {
            self.last = Some(now);
            self.write_line(done, &message);
        }
        self.bar.set_message(message);
        self.bar.set_position(done);
    }

    /// Writes the next plain line at once, without waiting for its time.
    pub(crate) fn line_soon(&mut self) {
        self.last = None;
    }

    fn write_line(&self, done: u64, message: &str) {
        match self.total {
            Some(total) => note(&format!("{}: {done}/{total}{message}", self.name)),
            None => note(&format!("{}: {done}{message}", self.name)),
        }
    }

    /// The time that the rest will take at the pace so far, once there is one.
    fn left(&self, done: u64, now: Instant) -> Option<Duration> {
        let spent = now.duration_since(self.began);
        let is_known = spent >= FIRST_ESTIMATE || self.total == Some(done);
        let parts = done.checked_sub(self.first).filter(|&parts| parts > 0 && is_known)?;
        let pace = spent.div_f64(parts as f64);
        Duration::try_from_secs_f64(pace.as_secs_f64() * self.total?.saturating_sub(done) as f64).ok()
    }

    /// Takes the bar away.
    pub(crate) fn end(self) {
        self.bar.finish_and_clear();
    }
}

/// `2:03`, or `1h02` from an hour on.
fn clock(time: Duration) -> String {
    let seconds = time.as_secs_f64().round() as u64;
    let (hours, minutes, seconds) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    if hours > 0 { format!("{hours}h{minutes:02}") } else { format!("{minutes}:{seconds:02}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_short() {
        assert_eq!(clock(Duration::from_millis(400)), "0:00");
        assert_eq!(clock(Duration::from_secs(59)), "0:59");
        assert_eq!(clock(Duration::from_millis(59_900)), "1:00");
        assert_eq!(clock(Duration::from_secs(3723)), "1h02");
    }
}
