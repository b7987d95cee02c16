//! Progress on standard error: a bar on a terminal, plain lines elsewhere; and Ctrl-C.

use std::io::IsTerminal;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use convoke::nn::data::ProgressEvent;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::{Failure, Result};

/// Seconds between two plain lines.
const LINE_EVERY: Duration = Duration::from_secs(5);

/// Where a command shows how far it is.
pub(crate) struct Console {
    terminal: bool,
    interrupted: Arc<AtomicBool>,
}

impl Console {
    /// Takes over Ctrl-C: the first one asks to stop at the next good moment, the second ends the process.
    pub(crate) fn new() -> Result<Console> {
        let interrupted = Arc::new(AtomicBool::new(false));
        let flag = interrupted.clone();
        ctrlc::set_handler(move || {
            if flag.swap(true, Ordering::Relaxed) {
                std::process::exit(1);
            }
            eprintln!("\nstopping after this step (Ctrl-C again to stop at once)");
        })
        .map_err(|error| Failure::Run(format!("cannot watch for Ctrl-C: {error}")))?;
        Ok(Console { terminal: std::io::stderr().is_terminal(), interrupted })
    }

    /// Whether Ctrl-C was pressed.
    pub(crate) fn interrupted(&self) -> bool {
        self.interrupted.load(Ordering::Relaxed)
    }

    /// Whether to go on, as data sets ask.
    pub(crate) fn control(&self) -> ControlFlow<()> {
        if self.interrupted() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    }

    /// A line that stays.
    pub(crate) fn line(&self, text: &str) {
        eprintln!("{text}");
    }

    /// A stage of `total` parts.
    pub(crate) fn stage(&self, name: &str, total: u64) -> Stage {
        let bar = ProgressBar::with_draw_target(
            Some(total),
            if self.terminal { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() },
        );
        let template = "{prefix} {bar:30} {pos}/{len} {msg} [{elapsed} < {eta}]";
        bar.set_style(
            ProgressStyle::with_template(template).expect("a valid template").progress_chars("=> "),
        );
        bar.set_prefix(name.to_owned());
        Stage { bar, name: name.into(), lines: !self.terminal, last: Instant::now() }
    }

    /// Shows the progress of reading, downloading or generating data.
    pub(crate) fn data_progress(&self) -> impl Fn(ProgressEvent<'_>) -> ControlFlow<()> + '_ {
        let current = std::cell::RefCell::new(None::<Stage>);
        move |event| {
            let mut current = current.borrow_mut();
            let total = event.total.unwrap_or(0);
            if current.as_ref().is_none_or(|stage| stage.name != event.stage) {
                if let Some(finished) = current.take() {
                    finished.end();
                }
                *current = Some(self.stage(event.stage, total));
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

/// One stage in progress.
pub(crate) struct Stage {
    bar: ProgressBar,
    name: String,
    lines: bool,
    last: Instant,
}

impl Stage {
    /// Shows that `done` parts are done; plain lines come every few seconds.
    pub(crate) fn set(&mut self, done: u64, message: &str) {
        self.bar.set_position(done);
        self.bar.set_message(message.to_owned());
        if self.lines && self.last.elapsed() >= LINE_EVERY {
            self.last = Instant::now();
            let total = self.bar.length().unwrap_or(0);
            let left = self.bar.eta().as_secs();
            eprintln!("{} {done}/{total} {message} {left} s left", self.name);
        }
    }

    /// Takes the bar away.
    pub(crate) fn end(self) {
        self.bar.finish_and_clear();
    }
}
