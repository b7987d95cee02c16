//! `convoke bench`: every algorithm on every pass of the problems.

mod gains;
mod machine;
mod report;
mod table;

use std::path::PathBuf;
use std::time::Duration;

use crate::Cpu;
use crate::conv::{ConvProblem, Pass};
use crate::kernels::Error;
use crate::tune::{Tuner, TunerOptions};
use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser};

use super::console::Console;
use super::failure::{Failure, Result};
use super::flags::candidates::CandidateArgs;
use super::flags::problems::ProblemArgs;
use super::flags::tuning::{Effort, tuner};
use super::flags::values::seconds;
use super::pass_result::{PassResult, Row};
use super::{json, output, problems};
use machine::Machine;

#[derive(Args)]
pub(crate) struct BenchArgs {
    #[command(flatten)]
    pub(crate) problems: ProblemArgs,

    #[command(flatten)]
    pub(crate) candidates: CandidateArgs,

    /// How thoroughly candidates are timed; `measure` drops slow ones early.
    #[arg(long, value_parser = measured(), default_value = "exhaustive", help_heading = "Measuring")]
    pub(crate) effort: Effort,

    /// Time for one pass of one problem.
    #[arg(long, value_name = "SECONDS", default_value = "2", value_parser = seconds, help_heading = "Measuring")]
    pub(crate) budget: Duration,

    /// Also show which algorithms were not timed, and why.
    #[arg(long, short, help_heading = "Output")]
    pub(crate) verbose: bool,

    /// Write a page with a chart for each problem and pass, as one self-contained file.
    #[arg(long, value_name = "FILE.html", help_heading = "Output")]
    pub(crate) report: Option<PathBuf>,

    /// Write the results as JSON; `-` is standard output, and then nothing else goes there.
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    pub(crate) json: Option<PathBuf>,
}

/// Parses the efforts that time algorithms.
fn measured() -> impl TypedValueParser<Value = Effort> {
    PossibleValuesParser::new(["measure", "exhaustive"]).map(|name| match name.as_str() {
        "measure" => Effort::Measure,
        _ => Effort::Exhaustive,
    })
}

pub(crate) fn run(args: &BenchArgs) -> Result<()> {
    let console = Console::new()?;
    check_output(args)?;
    let problems = problems::load(&args.problems)?;
    if problems.is_empty() {
        return Err(Failure::Usage("name a problem, such as mb16ic64ih56oc64kh3ph1, or a --suite".into()));
    }
    let jobs = problems::jobs(&args.problems, &problems);
    // Without a cache.
    let options = TunerOptions { budget: args.budget, ..args.candidates.options(args.effort) };
    let tuner = tuner(options, &console, |_| ())?;
    problems::check_memory(&jobs)?;
    args.candidates.warn_of_threads(&console);
    let cpu = args.candidates.cpu()?;
    let mut machine = Machine::measure(&cpu, args.problems.dtype)?;
    let say = |text: &str| console.say(text, args.json.as_deref());
    say(&format!("{}\n", machine.title()))?;

    let mut results = Vec::with_capacity(jobs.len());
    let mut stage = console.stage("bench", 0, Some(jobs.len() as u64));
    for (problem, pass) in &jobs {
        stage.set(results.len() as u64, &format!("{problem} {pass}"));
        let result = measure(&tuner, problem, *pass, &cpu)?;
        let reached = machine.learn(&result).map(|text| format!("{text}\n")).unwrap_or_default();
        let shown = say(&format!("\n{}{reached}", table::of(&result, &machine, args.verbose)));
        results.push(result);
        shown?;
        if console.interrupted() {
            break;
        }
    }
    stage.end();
    let summed = if problems.len() > 1 { say(&format!("\n{}", table::summary(&results))) } else { Ok(()) };
    summed.and(publish(args, &machine, &results))?;
    if results.len() < jobs.len() {
        let (done, all) = (results.len(), jobs.len());
        return Err(Failure::Interrupted(format!("interrupted after {done} of {all} passes")));
    }
    Ok(())
}

fn measure(tuner: &Tuner, problem: &ConvProblem, pass: Pass, cpu: &Cpu) -> Result<PassResult> {
    match tuner.tune(problem, pass, cpu, &mut |_| ()) {
        Ok(tuning) => {
            let mut result = PassResult::of(problem, pass, &tuning);
            result.count_operations(tuner, cpu);
            Ok(result)
        }
        Err(error @ Error::Memory(_)) => Err(error.into()),
        Err(_) => Ok(PassResult::without_choice(problem, pass, tuner, cpu)),
    }
}

/// Fails before any work is done if the results could not be written afterwards.
fn check_output(args: &BenchArgs) -> Result<()> {
    output::check("--report", args.report.as_deref())?;
    json::check(args.json.as_deref())
}

/// Writes the files that the flags ask for; if one cannot be written, the others still are.
fn publish(args: &BenchArgs, machine: &Machine, results: &[PassResult]) -> Result<()> {
    let reported = args
        .report
        .as_deref()
        .map_or(Ok(()), |file| output::write("--report", file, report::page(machine, results).as_bytes()));
    let rows: Vec<&Row> = results.iter().flat_map(|result| &result.rows).collect();
    let json = json::write_value(args.json.as_deref(), &rows);
    reported.and(json)
}
