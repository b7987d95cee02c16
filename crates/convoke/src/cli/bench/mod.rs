//! `convoke bench`: every algorithm on every pass of the problems.

mod bars;
mod gains;
mod report;
pub(crate) mod results;
pub(crate) mod table;

use std::sync::Arc;

use crate::conv::{ConvProblem, Pass};
use crate::kernels::{Error, machine};
use crate::tune::{Event, Tuner, TunerOptions};
use crate::{Cpu, DType};

use super::console::Console;
use super::tuning_args::BenchArgs;
use super::{Failure, Result, info, json, output, problems};
use results::{PassResult, Row};

pub(crate) fn run(args: &BenchArgs) -> Result<()> {
    let console = Console::new()?;
    check_output(args)?;
    let problems = problems::load(&args.problems)?;
    if problems.is_empty() {
        return Err(Failure::Usage("name a problem, such as mb16ic64ih56oc64kh3ph1, or a --suite".into()));
    }
    let jobs = problems::jobs(&args.problems, &problems);
    let tuner = tuner(args, &console)?;
    problems::check_memory(&jobs)?;
    args.candidates.warn_of_threads(&console);
    let cpu = args.candidates.cpu()?;
    let mut machine = Machine::measure(&cpu, args.problems.dtype())?;
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
        return Err(Failure::Run(format!("interrupted after {done} of {all} passes")));
    }
    Ok(())
}

/// The machine and its limits, with which results are compared.
pub(crate) struct Machine {
    name: String,
    cpu: Cpu,
    /// Floating-point operations a second that multiply-adds in registers reached, or that a convolution reached if it did more:
    /// other programs may have used the machine during the measurement.
    pub(crate) peak: f64,
    /// Bytes read and written a second by copying.
    bandwidth: f64,
    dtype: DType,
}

impl Machine {
    fn measure(cpu: &Cpu, dtype: DType) -> Result<Machine> {
        // A vector holds half as many f64 as f32.
        let part = if dtype == DType::F64 { 0.5 } else { 1.0 };
        Ok(Machine {
            name: info::cpu_name().unwrap_or_else(|| "unknown CPU".into()),
            cpu: cpu.clone(),
            peak: part * machine::peak_flops(cpu),
            bandwidth: machine::copy_bandwidth(cpu)?,
            dtype,
        })
    }

    /// Raises the peak if a convolution exceeded it, and returns a line that says so.
    fn learn(&mut self, result: &PassResult) -> Option<String> {
        let rates = result.timed().filter_map(|(row, seconds)| Some((row, row.operations? / seconds)));
        let (row, rate) = rates.max_by(|a, b| a.1.total_cmp(&b.1)).filter(|(_, rate)| *rate > self.peak)?;
        self.peak = rate;
        Some(format!("the peak is {:.0} GFLOP/s at least: {} reached it", rate / 1e9, row.algorithm))
    }

    fn title(&self) -> String {
        let Machine { name, cpu, peak, bandwidth, dtype } = self;
        let threads =
            if cpu.threads() == 1 { "1 thread".into() } else { format!("{} threads", cpu.threads()) };
        format!(
            "{name}, {threads}, {}: peak {:.0} GFLOP/s ({dtype}), copies {:.1} GB/s, both measured now",
            cpu.isa(),
            peak / 1e9,
            bandwidth / 1e9
        )
    }
}

/// A tuner without a cache; unknown names of algorithms are bad usage.
fn tuner(args: &BenchArgs, console: &Console) -> Result<Tuner> {
    let line = console.line_writer();
    let options = TunerOptions {
        budget: args.budget,
        observer: Some(Arc::new(move |event| {
            if let Event::Warning(text) = event {
                line(&format!("warning: {text}"));
            }
        })),
        ..args.candidates.options(args.effort)
    };
    Tuner::new(options).map_err(|error| Failure::Usage(error.to_string()))
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
    output::check("--json", args.json.as_deref().filter(|file| !json::to_stdout(Some(file))))
}

/// Writes the files that the flags ask for; if one cannot be written, the others still are.
fn publish(args: &BenchArgs, machine: &Machine, results: &[PassResult]) -> Result<()> {
    let reported = args
        .report
        .as_deref()
        .map_or(Ok(()), |file| output::write("--report", file, report::page(machine, results).as_bytes()));
    let rows: Vec<&Row> = results.iter().flat_map(|result| &result.rows).collect();
    let json = args.json.as_deref().map_or(Ok(()), |file| json::write_value(file, &rows));
    reported.and(json)
}
