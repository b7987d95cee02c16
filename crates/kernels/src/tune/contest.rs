//! The candidates of a choice and their results, whatever the operation is.

use convoke_files::escaped;

use super::race::{Outcome, Trial, median, minimum};
use super::record::{Candidate, Key, Record, Times};
use super::waiting::Operation;
use super::{Source, Tuning};
use crate::conv::Accuracy;
use crate::{Cpu, Result};

/// An operation on one problem, with every algorithm that may compute it.
pub(super) struct Contest {
    pub(super) key: Key,
    pub(super) cpu: Cpu,
    pub(super) entrants: Vec<Entrant>,
}

pub(super) struct Entrant {
    pub(super) name: String,
    pub(super) revision: u32,
    pub(super) accuracy: Accuracy,
    pub(super) state: State,
}

pub(super) enum State {
    Ready {
        /// Seconds of a run, by estimate.
        estimate: f64,
        workspace_bytes: usize,
    },
    /// It cannot run the problem.
    NotApplicable(String),
    /// It could, but the options forbid it.
    Filtered(String),
}

/// An operation that a [`super::Tuner`] can choose an algorithm for.
pub(super) trait Subject {
    fn contest(&self) -> &Contest;

    fn operation(&self) -> Operation;

    /// Prepares the buffers and the oracle for these entrants, which must all be ready.
    ///
    /// # Errors
    /// If there is no memory for them.
    fn trial(&self, ready: &[usize]) -> Result<Box<dyn Trial + '_>>;
}

impl Contest {
    /// The entrants that can run.
    pub(super) fn ready(&self) -> Vec<usize> {
        let is_ready = |index: &usize| matches!(self.entrants[*index].state, State::Ready { .. });
        (0..self.entrants.len()).filter(is_ready).collect()
    }

    pub(super) fn can_run(&self, name: &str) -> bool {
        self.ready().iter().any(|&index| self.entrants[index].name == name)
    }

    /// The estimated seconds of an entrant.
    pub(super) fn estimate_of(&self, name: &str) -> f64 {
        let index = self.entrants.iter().position(|entrant| entrant.name == name);
        index.map_or(f64::INFINITY, |index| self.estimate(index))
    }

    pub(super) fn estimate(&self, index: usize) -> f64 {
        match self.entrants[index].state {
            State::Ready { estimate, .. } => estimate,
            _ => f64::INFINITY,
        }
    }

    /// Whether a record has every entrant that can run now, in its present revision.
    pub(super) fn is_current(&self, record: &Record) -> bool {
        self.unknown_to(record).is_none()
    }

    /// An entrant that can run now and that a record does not have in its present revision.
    pub(super) fn unknown_to(&self, record: &Record) -> Option<&Entrant> {
        let known = |entrant: &Entrant| {
            record.candidates.iter().any(|candidate| {
                candidate.algorithm == entrant.name && candidate.revision == entrant.revision
            })
        };
        self.ready().into_iter().map(|index| &self.entrants[index]).find(|entrant| !known(entrant))
    }

    /// The choice by a record's times, among the entrants that can run.
    pub(super) fn tuning_of(&self, record: &Record, source: Source) -> Option<Tuning> {
        let allowed = |candidate: &Candidate| self.can_run(&candidate.algorithm);
        let chosen = record.select(allowed, Some(&record.chosen))?.algorithm.clone();
        Some(self.tuning(chosen, source, record.candidates.clone()))
    }

    /// The entrant with the lowest estimate.
    pub(super) fn estimated(&self) -> Option<Tuning> {
        let best = self.ready().into_iter().min_by(|&a, &b| self.estimate(a).total_cmp(&self.estimate(b)))?;
        Some(self.tuning(self.entrants[best].name.clone(), Source::Estimated, Vec::new()))
    }

    /// A choice. The entrants that the options exclude are added to the candidates. Only candidates that could have been
    /// chosen have times: a record may hold times of others, from when they could run.
    pub(super) fn tuning(&self, chosen: String, source: Source, mut candidates: Vec<Candidate>) -> Tuning {
        let left_out = self.entrants.iter().filter_map(|entrant| match &entrant.state {
            State::Filtered(reason) => Some(entrant.without_times(reason)),
            _ => None,
        });
        candidates.retain(|candidate| {
            self.entrants.iter().all(|entrant| {
                entrant.name != candidate.algorithm || !matches!(entrant.state, State::Filtered(_))
            })
        });
        for candidate in &mut candidates {
            if candidate.times.is_some() && !self.can_run(&candidate.algorithm) {
                let entrant = self.entrants.iter().find(|entrant| entrant.name == candidate.algorithm);
                *candidate = match entrant.map(|entrant| (entrant, &entrant.state)) {
                    Some((entrant, State::NotApplicable(reason))) => entrant.without_times(reason),
                    _ => Candidate {
                        times: None,
                        skipped: Some("it is not there any more".into()),
                        ..candidate.clone()
                    },
                };
            }
        }
        candidates.extend(left_out);
        Tuning { key: self.key.clone(), source, chosen, candidates }
    }

    /// The results of the race for the entrants in `ready`, and the entrants that cannot run the problem. Those that the
    /// options exclude are not recorded, because other options may allow them.
    pub(super) fn candidates(&self, ready: &[usize], outcomes: &[Outcome]) -> Vec<Candidate> {
        let raced = ready.iter().zip(outcomes).map(|(&index, outcome)| {
            let entrant = &self.entrants[index];
            match outcome {
                Outcome::Timed(times) => Candidate {
                    times: Some(Times {
                        score: times.score(),
                        min: minimum(&times.samples),
                        median: median(&times.samples),
                        spread: spread(&times.samples),
                        samples: times.measured,
                        max_relative_error: times.error,
                    }),
                    skipped: None,
                    ..entrant.without_times("")
                },
                Outcome::Wrong(reason) | Outcome::Skipped(reason) => entrant.without_times(reason),
                Outcome::NoMemory(error) => entrant.without_times(&error.to_string()),
            }
        });
        let others = self.entrants.iter().filter_map(|entrant| match &entrant.state {
            State::NotApplicable(reason) => Some(entrant.without_times(reason)),
            _ => None,
        });
        raced.chain(others).collect()
    }
}

impl Entrant {
    fn without_times(&self, reason: &str) -> Candidate {
        let workspace_bytes = match self.state {
            State::Ready { workspace_bytes, .. } => workspace_bytes,
            _ => 0,
        };
        Candidate {
            algorithm: self.name.clone(),
            revision: self.revision,
            times: None,
            workspace_bytes,
            // A user's own algorithm may give any text, and people are shown records.
            skipped: Some(escaped(reason).to_string()),
        }
    }
}

/// The interquartile range.
fn spread(samples: &[f64]) -> f64 {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    let quartile = sorted.len() / 4;
    match sorted.len() {
        0 => 0.0,
        len => sorted[len - 1 - quartile] - sorted[quartile],
    }
}
