//! `convoke tune`: measures what has no stored result yet, and stores it.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::Cpu;
use crate::conv::{ConvProblem, Pass};
use crate::nn::models::ModelSpec;
use crate::tune::{Source, Tuner, TunerOptions, Tuning};
use clap::{Args, value_parser};

use super::console::Console;
use super::failure::{Failure, Result};
use super::flags::candidates::CandidateArgs;
use super::flags::problems::{ProblemArgs, passes};
use super::flags::tuning::{Effort, tuner};
use super::flags::values::seconds;
use super::pass_result::{PassResult, Row};
use super::registry::model_parser;
use super::{json, places, problems};

#[derive(Args)]
pub(crate) struct TuneArgs {
    #[command(flatten)]
    pub(crate) problems: ProblemArgs,

    /// Tune the convolutions of a training step of this model.
    #[arg(long, value_parser = model_parser(), conflicts_with = "format", help_heading = "Problems")]
    pub(crate) model: Option<ModelSpec>,

    /// Images a step of --model.
    #[arg(
        long,
        value_name = "N",
        default_value_t = 128,
        value_parser = value_parser!(u32).range(1..),
        requires = "model",
        help_heading = "Problems"
    )]
    pub(crate) batch_size: u32,

    #[command(flatten)]
    pub(crate) candidates: CandidateArgs,

    /// How algorithms are chosen: by an estimate that is not stored, by timing with slow candidates dropped early, or by timing
    /// all.
    #[arg(long, value_enum, default_value_t = Effort::Measure, help_heading = "Measuring")]
    pub(crate) effort: Effort,

    /// Time for all problems together; what is not reached is left for the next run. One pass of one problem takes at most 1
    /// second, or 2 with `--effort exhaustive`.
    #[arg(long, value_name = "SECONDS", value_parser = seconds, help_heading = "Measuring")]
    pub(crate) budget: Option<Duration>,

    /// Measure again even if a result is stored.
    #[arg(long, help_heading = "Measuring")]
    pub(crate) again: bool,

    /// Folder in which results are kept [default: see `convoke cache path`].
    #[arg(long, value_name = "DIR", help_heading = "Output")]
    pub(crate) cache: Option<PathBuf>,

    /// Show each candidate with its time, or why it has none.
    #[arg(long, short, help_heading = "Output")]
    pub(crate) verbose: bool,

    /// Write the results as JSON, as `convoke bench` does; `-` is standard output, and then nothing else goes there.
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    pub(crate) json: Option<PathBuf>,
}

pub(crate) fn run(args: &TuneArgs) -> Result<()> {
    let console = Console::new()?;
    json::check(args.json.as_deref())?;
    let problems = problems::load(&args.problems)?;
    let mut jobs = problems::jobs(&args.problems, &problems);
    args.candidates.warn_of_threads(&console);
    let cpu = args.candidates.cpu()?;
    if let Some(model) = &args.model {
        let passes = passes(&args.problems.pass);
        let found = problems::of_model(model, (args.batch_size as usize, args.problems.dtype), &cpu)?;
        jobs.extend(found.into_iter().filter(|(_, pass)| passes.contains(pass)));
    }
    if jobs.is_empty() {
        let text = "name a problem, such as mb16ic64ih56oc64kh3ph1, a --suite, or a --model";
        return Err(Failure::Usage(text.into()));
    }
    let folder = places::cache_folder(args.cache.as_deref())?;
    let run = Run::new(args, cpu, &console, &folder)?;
    problems::check_memory(&jobs)?;
    let say = |text: &str| console.say(&format!("{text}\n"), args.json.as_deref());

    let begin = Instant::now();
    let mut counts = Counts::default();
    let mut rows: Vec<Row> = Vec::new();
    let mut stage = console.stage("tune", 0, Some(jobs.len() as u64));
    let (mut shown, mut cause) = (Ok(()), String::new());
    for (index, (problem, pass)) in jobs.iter().enumerate() {
        stage.set(index as u64, &format!("{problem} {pass}"));
        let in_time = args.budget.is_none_or(|budget| begin.elapsed() < budget);
        let tuning = match run.choose(problem, *pass, in_time) {
            Ok(Some(tuning)) => tuning,
            Ok(None) => {
                counts.left += 1;
                continue;
            }
            Err(error) => {
                counts.failed += 1;
                console.line(&format!("warning: {error}"));
                cause = format!("; the last one: {error}");
                continue;
            }
        };
        match tuning.source {
            Source::Measured => counts.measured += 1,
            Source::Cached => counts.known += 1,
            _ => counts.estimated += 1,
        }
        let result = PassResult::of(problem, *pass, &tuning);
        shown = say(&if args.verbose { tuning.to_string() } else { line(&tuning, &result) });
        rows.extend(result.rows);
        if shown.is_err() || console.interrupted() {
            break;
        }
    }
    stage.end();
    let done = counts.done();
    shown.and_then(|()| say(&counts.summary(begin.elapsed(), &folder)))?;
    json::write_value(args.json.as_deref(), &rows)?;
    if console.interrupted() && done < jobs.len() {
        let all = jobs.len();
        return Err(Failure::Interrupted(format!(
            "interrupted after {done} of {all} passes; these are kept"
        )));
    }
    if counts.failed > 0 && done == counts.failed {
        return Err(Failure::Run(format!("no algorithm is left for any of the problems{cause}")));
    }
    Ok(())
}

/// A tuner with the cache, and the choice that it reported last.
struct Run<'a> {
    args: &'a TuneArgs,
    tuner: Tuner,
    cpu: Cpu,
    told: Arc<Mutex<Option<Tuning>>>,
}

impl<'a> Run<'a> {
    fn new(args: &'a TuneArgs, cpu: Cpu, console: &Console, folder: &Path) -> Result<Run<'a>> {
        let told = Arc::new(Mutex::new(None));
        let last = told.clone();
        let most = Duration::from_secs(if args.effort == Effort::Exhaustive { 2 } else { 1 });
        let options = TunerOptions {
            budget: args.budget.map_or(most, |budget| budget.min(most)),
            cache: Some(folder.to_owned()),
            ..args.candidates.options(args.effort)
        };
        let tuner = tuner(options, console, move |tuning| {
            *last.lock().unwrap_or_else(PoisonError::into_inner) = Some(tuning.clone());
        })?;
        Ok(Run { args, tuner, cpu, told })
    }

    /// The cached result, or a new measurement, or none if there is no time for one. With `--effort heuristic`, an estimate.
    fn choose(
        &self,
        problem: &ConvProblem,
        pass: Pass,
        in_time: bool,
    ) -> crate::kernels::Result<Option<Tuning>> {
        if self.args.effort == Effort::Heuristic {
            self.tuner.plan(problem, pass, &self.cpu);
            return Ok(self.told.lock().unwrap_or_else(PoisonError::into_inner).take());
        }
        let known = if self.args.again { None } else { self.tuner.cached(problem, pass, &self.cpu) };
        match known {
            Some(tuning) => Ok(Some(tuning)),
            None if !in_time => Ok(None),
            None => self.tuner.tune(problem, pass, &self.cpu, &mut |_| ()).map(Some),
        }
    }
}

/// `mb... fwd nhwc: winograd-4x4, 1.234 ms: 1.32x as fast as ...`.
fn line(tuning: &Tuning, result: &PassResult) -> String {
    let source = if tuning.source == Source::Cached { " (known)" } else { "" };
    let (problem, key) = (&result.problem, &tuning.key);
    format!("{problem} {} {}: {}{source}", key.pass, key.format, result.verdict())
}

/// How many passes ended in which way.
#[derive(Default)]
struct Counts {
    measured: usize,
    known: usize,
    estimated: usize,
    failed: usize,
    left: usize,
}

impl Counts {
    fn done(&self) -> usize {
        self.measured + self.known + self.estimated + self.failed
    }

    fn summary(&self, time: Duration, folder: &Path) -> String {
        let seconds = time.as_secs_f64();
        let mut parts = vec![format!("{} measured in {seconds:.1} s", self.measured)];
        let others = [
            (self.known, "known already"),
            (self.estimated, "by estimate"),
            (self.failed, "without an algorithm"),
            (self.left, "left for lack of time"),
        ];
        parts.extend(
            others.iter().filter(|(count, _)| *count > 0).map(|(count, what)| format!("{count} {what}")),
        );
        let place =
            if folder.is_dir() { format!("; results are in {}", folder.display()) } else { String::new() };
        format!("{}{place}", parts.join(", "))
    }
}
