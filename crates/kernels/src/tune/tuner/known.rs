//! What a tuner knows in this process.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::conv::{ConvPlan, ConvProblem, Pass};
use crate::tune::Tuning;
use crate::tune::record::Key;
use crate::tune::waiting::{Uses, WaitingList};
use crate::{Cpu, Isa};

use super::neighbours::{Relatives, Stored};

/// What is known in this process.
#[derive(Default)]
pub(super) struct Known {
    pub(super) choices: Choices,
    /// The limit on plans' workspace for now, in bytes: see [`super::Tuner::limit_workspace`].
    pub(super) workspace_limit: Option<usize>,
    /// Choices made under this limit, used in place of those above.
    pub(super) limited: Choices,
    /// Choices of both made by estimate for want of time.
    pub(super) waiting: WaitingList,
    /// The plans of choices: making one takes long.
    pub(super) plans: HashMap<(ConvProblem, Pass, Cpu), Kept>,
    /// Time spent on measurements.
    pub(super) spent: Duration,
    /// The cache's results for each instruction set, read when the first neighbour is looked for.
    pub(super) stored: HashMap<Isa, Stored>,
    /// Whether the observer has been told that results cannot be kept.
    pub(super) warned: bool,
}

#[derive(Clone)]
pub(super) struct Chosen {
    pub(super) algorithm: String,
    pub(super) hold: Hold,
}

/// How long a choice holds.
#[derive(Clone)]
pub(super) enum Hold {
    Final,
    /// Until it is measured. So often it was asked for.
    Waiting(Uses),
    /// Taken over from another batch's choice that is not final: until something of the same at any batch is measured.
    Following,
}

impl Chosen {
    pub(super) fn of(tuning: &Tuning) -> Chosen {
        Chosen { algorithm: tuning.chosen.clone(), hold: Hold::Final }
    }

    pub(super) fn is_final(&self) -> bool {
        matches!(self.hold, Hold::Final)
    }

    /// What counts how often it is asked for, if it waits to be measured.
    pub(super) fn uses(&self) -> Option<Uses> {
        match &self.hold {
            Hold::Waiting(uses) => Some(Arc::clone(uses)),
            Hold::Final | Hold::Following => None,
        }
    }
}

/// Choices for problems and instruction sets.
#[derive(Default)]
pub(super) struct Choices {
    made: HashMap<(Key, Isa), Chosen>,
    relatives: Relatives,
}

impl Choices {
    pub(super) fn get(&self, place: &(Key, Isa)) -> Option<&Chosen> {
        self.made.get(place)
    }

    pub(super) fn insert(&mut self, place: (Key, Isa), chosen: Chosen) {
        self.relatives.add(&place.0);
        self.made.insert(place, chosen);
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&(Key, Isa), &Chosen)> {
        self.made.iter()
    }

    /// The problems that have something in common.
    pub(super) fn relatives(&self, common: &Key) -> &[Key] {
        self.relatives.of(common)
    }

    /// Forgets what was taken over from a choice for the same at another batch, and tells what that was for.
    fn forget_followers(&mut self, (key, isa): &(Key, Isa)) -> Vec<Key> {
        let Some((common, _)) = key.without_batch() else { return Vec::new() };
        let batches = self.relatives.of(&common).iter();
        let follows = |key: &&Key| {
            let found = self.made.get(&((*key).clone(), *isa));
            found.is_some_and(|chosen| matches!(chosen.hold, Hold::Following))
        };
        let followers: Vec<Key> = batches.filter(follows).cloned().collect();
        for key in &followers {
            self.made.remove(&(key.clone(), *isa));
        }
        followers
    }
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
    pub(super) fn choices_now(&mut self) -> &mut Choices {
        if self.workspace_limit.is_some() { &mut self.limited } else { &mut self.choices }
    }

    /// What follows a choice that is measured now is taken over again when it is asked for.
    pub(super) fn forget_followers(&mut self, place: &(Key, Isa)) {
        let followers = [&mut self.choices, &mut self.limited].map(|choices| choices.forget_followers(place));
        for (problem, pass) in followers.into_iter().flatten().filter_map(|key| key.convolution()) {
            self.forget_plans(&problem, pass);
        }
    }

    pub(super) fn forget_plans(&mut self, problem: &ConvProblem, pass: Pass) {
        self.plans.retain(|(other, other_pass, _), _| (other, *other_pass) != (problem, pass));
    }
}
