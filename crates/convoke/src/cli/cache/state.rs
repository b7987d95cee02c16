//! Whether a stored tuning result is still of use.

use crate::conv::{self, Accuracy};
use crate::tune::{Entry, Record, Tuner, TunerOptions, scope};
use crate::{Cpu, Isa};

/// Whether a stored result can be used.
pub(crate) enum State {
    /// A tuner uses it as it is.
    Current,
    /// Measured before an algorithm changed or was added; a tuner measures again.
    Stale(String),
    /// A result of another version of this library; this version does not read it.
    OtherVersion(String),
    /// Not a result; a tuner measures again and replaces it.
    Damaged(String),
}

impl State {
    pub(crate) fn name(&self) -> &'static str {
        match self {
            State::Current => "current",
            State::Stale(_) => "out of date",
            State::OtherVersion(_) => "of another version",
            State::Damaged(_) => "damaged",
        }
    }

    /// Why it is not current.
    pub(crate) fn reason(&self) -> Option<&str> {
        match self {
            State::Current => None,
            State::Stale(reason) | State::OtherVersion(reason) | State::Damaged(reason) => Some(reason),
        }
    }
}

/// Compares an entry with the algorithms of today. For entries of other machines, only the algorithms' revisions count.
pub(crate) fn state(entry: &Entry) -> State {
    let version = |scope: &str| scope.split('_').next().unwrap_or_default().to_owned();
    let (own, its) = (version(&scope(Isa::detect())), version(&entry.scope));
    if own != its {
        return State::OtherVersion(format!("of {its}, this is {own}"));
    }
    let record = match &entry.record {
        Ok(record) => record,
        Err(error) => return State::Damaged(error.to_string()),
    };
    let changed = changed(record);
    let isa = Isa::available().into_iter().find(|isa| scope(*isa) == entry.scope);
    match (changed, isa) {
        (Some(reason), _) => State::Stale(reason),
        (None, Some(isa)) => newcomer(record, isa).map_or(State::Current, State::Stale),
        (None, None) => State::Current,
    }
}

/// Why a candidate is out of date: its algorithm has another revision now.
fn changed(record: &Record) -> Option<String> {
    record.candidates.iter().find_map(|candidate| {
        let name = &candidate.algorithm;
        match conv::algorithm(name).map(|algorithm| algorithm.revision()) {
            Some(now) if now != candidate.revision => {
                Some(format!("{name} was measured in revision {}, it now is in {now}", candidate.revision))
            }
            // An unknown algorithm may be a user's own, which only their program knows; that is no reason to measure again.
            _ => None,
        }
    })
}

/// An algorithm that could run now but was not there to be measured.
fn newcomer(record: &Record, isa: Isa) -> Option<String> {
    let (problem, pass) = record.key.convolution()?;
    let cpu = Cpu::new(record.key.threads).ok()?.with_isa(isa).ok()?;
    let options = TunerOptions {
        accuracy: Accuracy::named(&record.key.accuracy)?,
        deterministic: record.key.deterministic,
        ..TunerOptions::default()
    };
    let newcomer = Tuner::new(options).ok()?.unknown_to(record, &problem, pass, &cpu)?;
    Some(format!("{newcomer} was not there to be measured"))
}
