//! What a tuner knows in this process.

use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::conv::{ConvPlan, ConvProblem, Pass};
use crate::tune::record::{Key, Record};
use crate::tune::waiting::{Uses, WaitingList};
use crate::{Cpu, Isa};

/// What is known in this process.
#[derive(Default)]
pub(super) struct Known {
    pub(super) choices: HashMap<(Key, Isa), Chosen>,
    /// The limit on plans' workspace for now, in bytes: see [`super::Tuner::limit_workspace`].
    pub(super) workspace_limit: Option<usize>,
    /// Choices made under this limit, used in place of those above.
    pub(super) limited: HashMap<(Key, Isa), Chosen>,
    /// Choices of both made by estimate for want of time.
    pub(super) waiting: WaitingList,
    /// The plans of choices: making one takes long.
    pub(super) plans: HashMap<(ConvProblem, Pass, Cpu), Kept>,
    /// Time spent on measurements.
    pub(super) spent: Duration,
    /// The cache's results for each instruction set, read when the first neighbour is looked for.
    pub(super) stored: HashMap<Isa, Vec<Record>>,
    /// Whether the observer has been told that results cannot be kept.
    pub(super) warned: bool,
}

#[derive(Clone)]
pub(super) struct Chosen {
    pub(super) algorithm: String,
    /// How often it was asked for, if it waits to be measured.
    pub(super) uses: Option<Uses>,
}

/// A plan, with the uses of its choice.
pub(super) struct Kept {
    pub(super) plan: ConvPlan,
    pub(super) uses: Option<Uses>,
}

/// Counts that a choice was asked for, on a CPU that runs.
pub(super) fn count(uses: Option<&Uses>, cpu: &Cpu) {
    if let Some(uses) = uses.filter(|_| !cpu.is_dry()) {
        uses.fetch_add(1, Ordering::Relaxed);
    }
}

impl Known {
    /// Where a choice that is made now is kept.
    pub(super) fn choices_now(&mut self) -> &mut HashMap<(Key, Isa), Chosen> {
        if self.workspace_limit.is_some() { &mut self.limited } else { &mut self.choices }
    }

    pub(super) fn forget_plans(&mut self, problem: &ConvProblem, pass: Pass) {
        self.plans.retain(|(other, other_pass, _), _| (other, *other_pass) != (problem, pass));
    }
}
