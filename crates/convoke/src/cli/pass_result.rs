//! The results of every algorithm on one pass of one problem, as tables, JSON and the report show them.

use std::sync::Arc;

use crate::Cpu;
use crate::conv::{ConvAlgorithm, ConvProblem, Pass};
use crate::tune::{Candidate, TIE, Tuner, Tuning};
use serde::Serialize;

use super::statistics::{WITHIN_NOISE, is_clearly_less, notch};
use super::text::milliseconds;

/// The algorithm by which convolution is usually explained; others are compared with it.
pub(crate) const BASELINE: &str = "im2col";

/// One pass of one problem.
pub(crate) struct PassResult {
    pub(crate) problem: ConvProblem,
    pub(crate) pass: Pass,
    /// The timed algorithms first, the fastest one first.
    pub(crate) rows: Vec<Row>,
}

/// One algorithm; the serialized fields are the contract of `--json`. Values that are missing because an algorithm did not run
/// are null.
#[derive(Clone, Serialize)]
pub(crate) struct Row {
    problem: String,
    pass: String,
    pub(crate) algorithm: String,
    /// The lower quartile of the samples. Choices are made by this time, and tables, rates and gains use it.
    pub(crate) seconds: Option<f64>,
    seconds_min: Option<f64>,
    seconds_median: Option<f64>,
    /// GFLOP/s: the operations of direct convolution over `seconds`.
    pub(crate) gflops: Option<f64>,
    pub(crate) workspace_bytes: Option<usize>,
    pub(crate) max_relative_error: Option<f64>,
    pub(crate) chosen: bool,
    pub(crate) skipped: Option<String>,
    /// How far noise may move `seconds`.
    #[serde(skip)]
    pub(crate) notch: f64,
    /// Floating-point operations that it really does, if [`PassResult::count_operations`] has counted them.
    #[serde(skip)]
    pub(crate) operations: Option<f64>,
}

impl PassResult {
    /// A tuner's choice. One made without measuring has no times.
    pub(crate) fn of(problem: &ConvProblem, pass: Pass, tuning: &Tuning) -> PassResult {
        let row = |candidate: &Candidate| {
            let chosen = candidate.algorithm == tuning.chosen;
            Row { chosen, ..Row::of(problem, pass, candidate) }
        };
        let mut rows: Vec<Row> = tuning.candidates.iter().map(row).collect();
        if !rows.iter().any(|row| row.chosen) {
            rows.push(Row { chosen: true, ..Row::empty(problem, pass, &tuning.chosen, None) });
        }
        let seconds = |row: &Row| row.seconds.unwrap_or(f64::INFINITY);
        rows.sort_by(|a, b| seconds(a).total_cmp(&seconds(b)));
        PassResult { problem: *problem, pass, rows }
    }

    /// The result if no algorithm was allowed and able to run.
    pub(crate) fn without_choice(problem: &ConvProblem, pass: Pass, tuner: &Tuner, cpu: &Cpu) -> PassResult {
        let row = |algorithm: &Arc<dyn ConvAlgorithm>| {
            let reason = match algorithm.plan(problem, pass, cpu) {
                Ok(_) => "left out by the flags, or wrong".into(),
                Err(reason) => reason.to_string(),
            };
            Row::empty(problem, pass, algorithm.name(), Some(reason))
        };
        PassResult { problem: *problem, pass, rows: tuner.algorithms().iter().map(row).collect() }
    }

    /// Counts the operations of the timed algorithms.
    pub(crate) fn count_operations(&mut self, tuner: &Tuner, cpu: &Cpu) {
        for row in self.rows.iter_mut().filter(|row| row.seconds.is_some()) {
            let algorithm = tuner.algorithms().iter().find(|algorithm| algorithm.name() == row.algorithm);
            let plan = algorithm.and_then(|algorithm| algorithm.plan(&self.problem, self.pass, cpu).ok());
            row.operations = plan.map(|plan| plan.operations());
        }
    }

    pub(crate) fn chosen(&self) -> Option<&Row> {
        self.rows.iter().find(|row| row.chosen)
    }

    pub(crate) fn seconds(&self, algorithm: &str) -> Option<f64> {
        self.rows.iter().find(|row| row.algorithm == algorithm)?.seconds
    }

    /// The timed algorithms with their seconds, the fastest first.
    pub(crate) fn timed(&self) -> impl Iterator<Item = (&Row, f64)> {
        self.rows.iter().filter_map(|row| Some((row, row.seconds?)))
    }

    /// What the choice gains: `1.32x as fast as direct, the best of the others; 2.10x as fast as im2col+GEMM`. If noise may have
    /// ordered the times, they are `within noise of direct`. If another algorithm is faster, but not by enough to matter, the text
    /// says why this one was chosen.
    pub(crate) fn gains(&self) -> String {
        let Some(chosen) = self.chosen() else { return "no algorithm is left".into() };
        let Some(seconds) = chosen.seconds else { return "by estimate".into() };
        let next = self.timed().find(|(row, _)| !row.chosen);
        let next = next.map(|(row, next)| match next < seconds {
            true => format!(
                "within {:.0} % of {} ({:+.1} %), and {}",
                100.0 * (TIE - 1.0),
                row.algorithm,
                100.0 * (seconds / next - 1.0),
                if chosen.workspace_bytes < row.workspace_bytes {
                    "needs less workspace"
                } else {
                    "was chosen before"
                }
            ),
            false => format!("{}, the best of the others", compared(chosen, row, &row.algorithm)),
        });
        let baseline = self.timed().find(|(row, _)| row.algorithm == BASELINE && !row.chosen);
        let baseline = baseline.map(|(row, _)| compared(chosen, row, &format!("{BASELINE}+GEMM")));
        let gains: Vec<String> = next.into_iter().chain(baseline).collect();
        if gains.is_empty() { "the only one timed".into() } else { gains.join("; ") }
    }

    /// The choice, its time, and what it gains.
    pub(crate) fn verdict(&self) -> String {
        let name = self.chosen().map_or("none", |chosen| &chosen.algorithm);
        let time = self.chosen().and_then(|chosen| chosen.seconds);
        let time = time.map_or_else(String::new, |seconds| format!(", {} ms", milliseconds(seconds)));
        format!("{name}{time}: {}", self.gains())
    }
}

/// `1.32x as fast as direct`, or `within noise of direct`.
fn compared(chosen: &Row, other: &Row, name: &str) -> String {
    let [Some(seconds), Some(others)] = [chosen.seconds, other.seconds] else { return String::new() };
    // One that is faster is within a tie.
    if is_clearly_less([seconds, chosen.notch], [others, other.notch]) {
        format!("{:.2}x as fast as {name}", others / seconds)
    } else {
        format!("{WITHIN_NOISE} of {name}")
    }
}

impl Row {
    fn of(problem: &ConvProblem, pass: Pass, candidate: &Candidate) -> Row {
        let empty = Row::empty(problem, pass, &candidate.algorithm, candidate.skipped.clone());
        let Some(times) = &candidate.times else { return empty };
        Row {
            seconds: Some(times.score),
            seconds_min: Some(times.min),
            seconds_median: Some(times.median),
            gflops: Some(problem.flops() / times.score / 1e9),
            workspace_bytes: Some(candidate.workspace_bytes),
            max_relative_error: Some(times.max_relative_error),
            notch: notch(times),
            ..empty
        }
    }

    fn empty(problem: &ConvProblem, pass: Pass, algorithm: &str, skipped: Option<String>) -> Row {
        Row {
            problem: problem.to_string(),
            pass: pass.to_string(),
            algorithm: algorithm.to_owned(),
            seconds: None,
            seconds_min: None,
            seconds_median: None,
            gflops: None,
            workspace_bytes: None,
            max_relative_error: None,
            chosen: false,
            skipped,
            notch: 0.0,
            operations: None,
        }
    }
}
