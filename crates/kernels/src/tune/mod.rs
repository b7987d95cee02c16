//! The tuner finds the fastest algorithm for every problem and pass by measurement, and remembers it.
//!
//! ```
//! use convoke_kernels::conv::{ConvProblem, Pass};
//! use convoke_kernels::tune::{Tuner, TunerOptions};
//! use convoke_kernels::Cpu;
//!
//! let problem: ConvProblem = "mb4ic16ih14oc16kh3ph1".parse()?;
//! let tuner = Tuner::new(TunerOptions::default())?;
//! let tuning = tuner.tune(&problem, Pass::Forward, &Cpu::single(), &mut |_| ())?;
//! println!("{} of {} candidates", tuning.chosen, tuning.candidates.len());
//! // From here on the choice costs a look into a table.
//! let plan = tuner.plan(&problem, Pass::Forward, &Cpu::single());
//! assert_eq!(plan.algorithm(), tuning.chosen);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod cache;
mod contest;
mod conv_trial;
mod noise;
mod pool_trial;
mod race;
mod record;
mod tuner;
mod waiting;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

pub use cache::{Cache, CacheError, Entry, scope};
pub use record::{Candidate, Choice, Key, RECORD_VERSION, Record, TIE, Times};
pub use tuner::Tuner;

use crate::conv::{self, Accuracy, ConvAlgorithm};

/// How much work may be spent on a choice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Effort {
    /// Choose by estimate, without running anything; results in the cache are used.
    Heuristic,
    /// The likely candidates are timed, the slow ones dropped early.
    #[default]
    Measure,
    /// Every candidate is timed thoroughly, unless the budget is too short for two runs of it.
    Exhaustive,
}

/// What a [`Tuner`] may do. `TunerOptions::default()` measures within a second a problem, and remembers nothing.
///
/// The options that leave algorithms out (`accuracy`, `deterministic`, `workspace_limit`, `only`, `skip`) hold as long as
/// they leave one that can run the problem. If they leave none, [`Tuner::plan`] warns and does not follow them, but
/// [`Tuner::tune`] returns an error.
#[derive(Clone)]
pub struct TunerOptions {
    /// How much work may be spent on a choice.
    pub effort: Effort,
    /// Never time anything: use results in the cache, even of older revisions, else estimates.
    pub frozen: bool,
    /// The least accurate class of algorithms that may be used.
    pub accuracy: Accuracy,
    /// Use only algorithms that give the same bits each time.
    pub deterministic: bool,
    /// The most scratch memory that a plan may need, in bytes.
    pub workspace_limit: usize,
    /// Time for one pass of one problem.
    pub budget: Duration,
    /// Time for all of this tuner's measurements; when it is spent, choices are made by estimate, and wait for
    /// [`Tuner::measure_next`].
    pub total_budget: Duration,
    /// If not empty, only these algorithms of convolution; `NAME*` stands for every name that begins with `NAME`.
    pub only: Vec<String>,
    /// Not these algorithms of convolution; `NAME*` as above.
    pub skip: Vec<String>,
    /// Where results are kept between runs.
    pub cache: Option<PathBuf>,
    /// Algorithms besides [`conv::algorithms`]: see [`TunerOptions::register`].
    pub algorithms: Vec<Arc<dyn ConvAlgorithm>>,
    /// Receives the tuner's events.
    pub observer: Option<Observer>,
}

impl Default for TunerOptions {
    fn default() -> TunerOptions {
        TunerOptions {
            effort: Effort::default(),
            frozen: false,
            accuracy: Accuracy::default(),
            deterministic: false,
            workspace_limit: 1 << 30,
            budget: Duration::from_secs(1),
            total_budget: Duration::MAX,
            only: Vec::new(),
            skip: Vec::new(),
            cache: None,
            algorithms: Vec::new(),
            observer: None,
        }
    }
}

impl TunerOptions {
    /// Adds an algorithm of your own, with the algorithms derived from it: its swap, its relayout if it takes only one memory
    /// format, and its phases if it takes no dilation.
    ///
    /// It is tried, checked against the oracle and chosen like any other; a wrong one is reported and never used.
    pub fn register(&mut self, algorithm: impl ConvAlgorithm + 'static) {
        self.algorithms.extend(conv::with_derived(Arc::new(algorithm)));
    }
}

/// Receives a tuner's events. It is called while the tuner is locked, so it must not call the same tuner.
pub type Observer = Arc<dyn Fn(&Event<'_>) + Send + Sync>;

/// What a tuner tells its observer.
#[derive(Debug)]
#[non_exhaustive]
pub enum Event<'a> {
    /// A choice was made. It holds from now on.
    Chosen(&'a Tuning),
    /// A problem that does not stop the work: a wrong algorithm, a cache that cannot be read or written.
    Warning(String),
}

/// Where a choice comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// Measured just now.
    Measured,
    /// Measured before, from the cache.
    Cached,
    /// The choice for this other problem, which differs only in the batch.
    Nearest(String),
    /// The measured choice for this other problem, which differs in batch and size of the images, as there was no time to measure.
    Similar(String),
    /// By estimate, without measuring.
    Estimated,
}

/// A choice, with what is known about every candidate.
#[derive(Debug, Clone)]
pub struct Tuning {
    /// What the choice is for.
    pub key: Key,
    /// Where the choice comes from.
    pub source: Source,
    /// Name of the algorithm.
    pub chosen: String,
    /// Every candidate: its times, or why it has none. Without a measurement there are no times.
    pub candidates: Vec<Candidate>,
}

impl std::fmt::Display for Tuning {
    /// One line: every candidate with its time or why it has none, then `= winner`.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {} {}:", self.key.problem, self.key.pass, self.key.format)?;
        for candidate in &self.candidates {
            match (&candidate.times, &candidate.skipped) {
                (Some(times), _) => write!(f, " {} {:.3} ms,", candidate.algorithm, times.score * 1e3)?,
                (None, Some(reason)) => write!(f, " {} ({reason}),", candidate.algorithm)?,
                (None, None) => {}
            }
        }
        write!(f, " = {}", self.chosen)?;
        match &self.source {
            Source::Measured => Ok(()),
            Source::Cached => f.write_str(" (cached)"),
            Source::Nearest(problem) | Source::Similar(problem) => write!(f, " (as for {problem})"),
            Source::Estimated => f.write_str(" (by estimate)"),
        }
    }
}
