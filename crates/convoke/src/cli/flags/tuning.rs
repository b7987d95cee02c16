//! The flags that say how convolution algorithms are chosen, and the tuner made from them.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::cli::console::Console;
use crate::cli::failure::{Failure, Result};
use crate::cli::places;
use crate::tune::{self, Event, Source, Tuner, TunerOptions, Tuning};
use bytesize::ByteSize;
use clap::{Args, ValueEnum};

use super::values::{accuracy, seconds_or_none, size};
use crate::conv::Accuracy;

/// How a training run chooses convolution algorithms.
#[derive(Args)]
pub(crate) struct TuningArgs {
    /// How convolution algorithms are chosen: `heuristic` by estimate, `measure` by timing the likely ones on the first steps,
    /// `exhaustive` by timing all. Measured results are stored for later runs.
    #[arg(long, value_enum, default_value_t = Effort::Measure, help_heading = "Convolutions")]
    pub(crate) effort: Effort,

    /// Seconds that timing may take in this run; after that, algorithms are chosen by estimate.
    #[arg(long, value_name = "SECONDS", default_value = "30", value_parser = seconds_or_none,
          help_heading = "Convolutions")]
    pub(crate) tune_budget: Duration,

    /// Time nothing: use what earlier runs found, else estimates.
    #[arg(long = "no-tuning", alias = "frozen", help_heading = "Convolutions")]
    pub(crate) frozen: bool,

    /// Use only algorithms that give the same bits each time.
    #[arg(long, help_heading = "Convolutions")]
    pub(crate) deterministic: bool,

    /// How far the errors of convolutions may exceed those of plain sums: not at all (strict), in transforms with errors of the same size
    /// (standard), some ten times (relaxed: on processors that multiply bf16, three such products stand for one of f32), or as far as
    /// numbers rounded to bf16 have them (rounded).
    #[arg(long, value_parser = accuracy(), default_value = "standard", help_heading = "Convolutions")]
    pub(crate) accuracy: Accuracy,

    /// The most workspace (scratch memory) that one convolution may use.
    #[arg(long, value_name = "SIZE", default_value = "256MiB", value_parser = size, help_heading = "Convolutions")]
    pub(crate) workspace_limit: ByteSize,

    /// Folder where results are kept [default: see `convoke cache path`].
    #[arg(long = "tuning-cache", alias = "cache", value_name = "DIR", help_heading = "Convolutions")]
    pub(crate) cache: Option<PathBuf>,

    /// Show every choice: each candidate with its time or why it was not tried, then `= winner`.
    #[arg(long, short, help_heading = "Convolutions")]
    pub(crate) verbose: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Effort {
    Heuristic,
    Measure,
    Exhaustive,
}

impl From<Effort> for tune::Effort {
    fn from(effort: Effort) -> tune::Effort {
        match effort {
            Effort::Heuristic => tune::Effort::Heuristic,
            Effort::Measure => tune::Effort::Measure,
            Effort::Exhaustive => tune::Effort::Exhaustive,
        }
    }
}

impl TuningArgs {
    /// A tuner that shows what it does on the console.
    pub(crate) fn tuner(&self, console: &Console) -> Result<Tuner> {
        let line = console.line_writer();
        let (verbose, announced) = (self.verbose, AtomicBool::new(false));
        let chosen = move |tuning: &Tuning| {
            if tuning.source == Source::Measured && !announced.swap(true, Ordering::Relaxed) {
                line("measuring convolutions for this run and later ones (-v shows them)");
            }
            if verbose {
                line(&tuning.to_string());
            }
        };
        let options = TunerOptions {
            effort: self.effort.into(),
            frozen: self.frozen,
            accuracy: self.accuracy,
            deterministic: self.deterministic,
            workspace_limit: usize::try_from(self.workspace_limit.as_u64()).unwrap_or(usize::MAX),
            total_budget: self.tune_budget,
            cache: self.cache.clone().or_else(places::default_cache_folder),
            ..TunerOptions::default()
        };
        tuner(options, console, chosen)
    }
}

/// A tuner that shows its warnings on the console, and tells `chosen` of each choice.
pub(crate) fn tuner(
    options: TunerOptions,
    console: &Console,
    chosen: impl Fn(&Tuning) + Send + Sync + 'static,
) -> Result<Tuner> {
    let line = console.line_writer();
    let observer = move |event: &Event<'_>| match event {
        Event::Chosen(tuning) => chosen(tuning),
        Event::Warning(text) => line(&format!("warning: {text}")),
        _ => {}
    };
    let options = TunerOptions { observer: Some(Arc::new(observer)), ..options };
    Tuner::new(options).map_err(|error| Failure::Usage(error.to_string()))
}
