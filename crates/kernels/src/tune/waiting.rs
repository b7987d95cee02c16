//! Choices that were made by estimate for want of time, to be measured when there is some.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use super::record::Key;
use crate::conv::{ConvProblem, Pass};
use crate::pool::{MaxPoolPass, PoolProblem};
use crate::{Cpu, DType, Isa};

/// The most choices that wait. One more takes the place of the oldest.
const MOST: usize = 4096;

/// How often a choice was asked for. The list and the kept plan share it.
pub(super) type Uses = Arc<AtomicU64>;

/// What an algorithm is chosen for.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Operation {
    Conv(ConvProblem, Pass),
    MaxPool(PoolProblem, DType, MaxPoolPass),
}

/// A choice that waits to be measured.
pub(super) struct Waiting {
    pub(super) place: (Key, Isa),
    pub(super) operation: Operation,
    /// The CPU that runs it.
    pub(super) cpu: Cpu,
    /// Whether it was made under a limit of workspace, and ends with the limit.
    pub(super) limited: bool,
    /// Seconds of a run of the chosen algorithm, by estimate.
    pub(super) seconds: f64,
    pub(super) uses: Uses,
}

/// The choices that wait, oldest first.
#[derive(Default)]
pub(super) struct WaitingList {
    entries: VecDeque<Waiting>,
    /// Choices that another one replaces until the limit of workspace changes.
    replaced: VecDeque<Waiting>,
    /// The number of entries, for who does not hold the tuner's lock.
    count: Arc<AtomicUsize>,
}

impl WaitingList {
    /// The number of choices that wait, which follows the list.
    pub(super) fn count(&self) -> Arc<AtomicUsize> {
        Arc::clone(&self.count)
    }

    pub(super) fn push(&mut self, waiting: Waiting) {
        self.entries.push_back(waiting);
        if self.entries.len() > MOST {
            self.entries.pop_front();
        }
        self.recount();
    }

    /// A choice was made for `place`, under a limit of workspace or not: an earlier one does not wait any more. One without a limit
    /// waits again when a new one with a limit ends.
    pub(super) fn settled(&mut self, place: &(Key, Isa), limited: bool) {
        while let Some(index) = self.entries.iter().position(|waiting| waiting.place == *place) {
            let earlier = self.entries.remove(index).expect("the index of an entry");
            if limited && !earlier.limited {
                self.replaced.push_back(earlier);
            }
        }
        if !limited {
            self.replaced.retain(|waiting| waiting.place != *place);
        }
        self.recount();
    }

    /// A choice without a limit was measured under one: it waits again when the limit ends.
    pub(super) fn put_aside(&mut self, waiting: Waiting) {
        self.replaced.push_back(waiting);
    }

    /// The limit of workspace has changed, and choices made under the old one ended.
    pub(super) fn unlimited(&mut self) {
        self.entries.retain(|waiting| !waiting.limited);
        self.replaced.append(&mut self.entries);
        std::mem::swap(&mut self.replaced, &mut self.entries);
        self.entries.drain(..self.entries.len().saturating_sub(MOST));
        self.recount();
    }

    /// Takes out the choice that took the most time so far, by estimate, among those asked for at least so often that took at least
    /// so many seconds.
    pub(super) fn take(&mut self, at_least_uses: u64, at_least_seconds: f64) -> Option<Waiting> {
        let mut best = None;
        for (index, waiting) in self.entries.iter().enumerate() {
            let uses = waiting.uses.load(Ordering::Relaxed);
            let seconds = if uses == 0 { 0.0 } else { uses as f64 * waiting.seconds };
            // The oldest of equal ones.
            let is_worth_it = uses >= at_least_uses && seconds >= at_least_seconds;
            if is_worth_it && best.is_none_or(|(_, most)| seconds > most) {
                best = Some((index, seconds));
            }
        }
        let taken = self.entries.remove(best?.0);
        self.recount();
        taken
    }

    fn recount(&mut self) {
        self.count.store(self.entries.len(), Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A choice for a problem of this batch, used so often.
    fn waiting(batch: usize, limited: bool, seconds: f64, uses: u64) -> Waiting {
        let key = Key {
            problem: format!("mb{batch}"),
            pass: "fwd".into(),
            format: "nchw".into(),
            dtype: "f32".into(),
            threads: 1,
            accuracy: "standard".into(),
            deterministic: false,
        };
        let problem: ConvProblem = "mb1ic5ih9oc6kh3ph1".parse().unwrap();
        Waiting {
            place: (key, Isa::PORTABLE),
            operation: Operation::Conv(problem, Pass::Forward),
            cpu: Cpu::single(),
            limited,
            seconds,
            uses: Arc::new(AtomicU64::new(uses)),
        }
    }

    fn names(list: &WaitingList) -> Vec<&str> {
        assert_eq!(list.count.load(Ordering::Relaxed), list.entries.len());
        list.entries.iter().map(|waiting| waiting.place.0.problem.as_str()).collect()
    }

    #[test]
    fn what_took_the_most_time_comes_first() {
        let mut list = WaitingList::default();
        for (batch, seconds, uses) in [(1, 1.0, 3), (2, 0.1, 40), (3, 9.0, 0), (4, 4.0, 1), (5, 2.0, 2)] {
            list.push(waiting(batch, false, seconds, uses));
        }
        assert!(list.take(1, 4.5).is_none());
        let mut take = |at_least| list.take(at_least, 0.0).map(|waiting| waiting.place.0.problem);
        assert_eq!(take(41), None);
        assert_eq!(take(2).as_deref(), Some("mb2"));
        assert_eq!(take(2).as_deref(), Some("mb5"), "mb4 takes as long and came first, but was used once");
        assert_eq!(take(1).as_deref(), Some("mb4"));
        assert_eq!(take(1).as_deref(), Some("mb1"));
        assert_eq!(take(1), None);
        assert_eq!(take(0).as_deref(), Some("mb3"));
        assert_eq!(take(0), None);
        assert!(names(&list).is_empty());
    }

    #[test]
    fn the_list_is_bounded() {
        let mut list = WaitingList::default();
        for batch in 0..MOST + 2 {
            list.push(waiting(batch, false, 1.0, 1));
        }
        assert_eq!((names(&list).len(), names(&list)[0]), (MOST, "mb2"));
    }

    #[test]
    fn choices_under_a_limit_end_with_it() {
        let mut list = WaitingList::default();
        list.push(waiting(1, false, 1.0, 1));
        list.push(waiting(2, false, 1.0, 1));
        // Under a limit, the first does not fit.
        let small = waiting(1, true, 2.0, 1);
        list.settled(&small.place, true);
        list.push(small);
        assert_eq!(names(&list), ["mb2", "mb1"]);
        assert!(list.take(0, 0.0).unwrap().limited);
        list.push(waiting(3, true, 1.0, 1));
        list.unlimited();
        assert_eq!(names(&list), ["mb1", "mb2"], "the first waits again, the third does not exist any more");
        let first = list.take(0, 0.0).unwrap();
        let place = first.place.clone();
        list.put_aside(first);
        list.unlimited();
        assert_eq!(names(&list), ["mb1", "mb2"]);
        list.settled(&place, true);
        list.settled(&place, false);
        list.unlimited();
        assert_eq!(names(&list), ["mb2"]);
    }
}
