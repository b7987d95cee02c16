//! Choices taken over from the same problem at another batch, or from the same convolution of images of another size.

use std::collections::HashMap;

use super::Tuner;
use super::known::Known;
use crate::tune::contest::Contest;
use crate::tune::record::{Key, Record};
use crate::tune::{Source, Tuning};

/// Keys by what they have in common with others: all but the batch, or all but batch and size of the images.
#[derive(Default)]
pub(super) struct Relatives {
    groups: HashMap<Key, Vec<Key>>,
}

impl Relatives {
    pub(super) fn add(&mut self, key: &Key) {
        for (common, _) in [key.without_batch(), key.without_sizes()].into_iter().flatten() {
            let group = self.groups.entry(common).or_default();
            if !group.contains(key) {
                group.push(key.clone());
            }
        }
    }

    pub(super) fn of(&self, common: &Key) -> &[Key] {
        self.groups.get(common).map_or(&[], Vec::as_slice)
    }
}

/// The cache's results for an instruction set.
#[derive(Default)]
pub(super) struct Stored {
    records: HashMap<Key, Record>,
    relatives: Relatives,
}

impl FromIterator<Record> for Stored {
    fn from_iter<I: IntoIterator<Item = Record>>(records: I) -> Stored {
        let mut stored = Stored::default();
        for record in records {
            stored.relatives.add(&record.key);
            stored.records.insert(record.key.clone(), record);
        }
        stored
    }
}

/// Which neighbours will do.
struct Rules<'a> {
    /// How many times as large the problem of a key is.
    ratio: &'a dyn Fn(&Key) -> Option<f64>,
    /// The ratios that will do of a choice of this process, and of a cached result.
    here: &'a dyn Fn(f64) -> bool,
    stored: &'a dyn Fn(f64) -> bool,
    /// Whether a choice of this process will do that was made by estimate.
    estimated: bool,
}

impl Tuner {
    /// The choice for a neighbour: the same problem at another batch.
    ///
    /// The last, smaller batch of a run gets the choice of the run's other batches. A cached result must be of a batch within
    /// a factor of four, unless the tuner is frozen.
    pub(super) fn nearest(&self, known: &mut Known, contest: &Contest) -> Option<Tuning> {
        let (common, batch) = contest.key.without_batch()?;
        let frozen = self.inner.options.frozen;
        let rules = Rules {
            ratio: &|key| Some(key.without_batch()?.1 as f64 / batch as f64),
            here: &|ratio| ratio >= 0.5,
            stored: &|ratio| frozen || (0.25..=4.0).contains(&ratio),
            estimated: true,
        };
        let (chosen, problem) = self.neighbour(known, contest, &common, &rules)?;
        Some(contest.tuning(chosen, Source::Nearest(problem), Vec::new()))
    }

    /// The choice for a relative: the same convolution of images of another size, with a quarter to four times as many pixels in
    /// all. It may not be the best here, but was measured there.
    pub(super) fn similar(&self, known: &mut Known, contest: &Contest) -> Option<Tuning> {
        let (common, pixels) = contest.key.without_sizes()?;
        let near = |ratio: f64| (0.25..=4.0).contains(&ratio);
        let rules = Rules {
            ratio: &|key| Some(key.without_sizes()?.1 as f64 / pixels as f64),
            here: &near,
            stored: &near,
            estimated: false,
        };
        let (chosen, problem) = self.neighbour(known, contest, &common, &rules)?;
        Some(contest.tuning(chosen, Source::Similar(problem), Vec::new()))
    }

    /// Algorithm and problem of the nearest neighbour among those that have something in common.
    fn neighbour(
        &self,
        known: &mut Known,
        contest: &Contest,
        common: &Key,
        rules: &Rules<'_>,
    ) -> Option<(String, String)> {
        let isa = contest.cpu.isa();
        known.stored.entry(isa).or_insert_with(|| {
            let entries = self.cache(isa).and_then(|cache| cache.own_entries().ok()).unwrap_or_default();
            entries.into_iter().filter_map(|entry| entry.record.ok()).collect()
        });
        let (choices, stored) = (&known.choices, &known.stored[&isa]);
        let here = choices.relatives(common).iter().filter_map(|key| {
            let ratio = (rules.ratio)(key).filter(|&ratio| (rules.here)(ratio))?;
            let chosen = choices.get(&(key.clone(), isa))?;
            (rules.estimated || chosen.is_final()).then(|| (ratio, key, chosen.algorithm.clone()))
        });
        let frozen = self.inner.options.frozen;
        let stored = stored.relatives.of(common).iter().filter_map(|key| {
            let ratio = (rules.ratio)(key).filter(|&ratio| (rules.stored)(ratio))?;
            let record = stored.records.get(key)?;
            let tuning = contest.tuning_of(record, Source::Cached)?;
            (frozen || contest.is_current(record)).then_some((ratio, key, tuning.chosen))
        });
        let neighbours = here.chain(stored).filter(|(_, _, chosen)| contest.can_run(chosen));
        let distance = |ratio: f64| ratio.ln().abs();
        let (_, key, chosen) = neighbours.min_by(|a, b| distance(a.0).total_cmp(&distance(b.0)))?;
        Some((chosen, key.problem.clone()))
    }
}
