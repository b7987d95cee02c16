//! Assigns samples to batches and ranks.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};

/// Which samples an epoch has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Sampling {
    /// Each sample once.
    #[default]
    Shuffled,
    /// As many samples of each class, and as many in all as there are: those of rare classes several times, and some of common classes in
    /// each epoch. PyTorch's `WeightedRandomSampler` has such shares on average.
    Balanced,
}

/// A rank's part of `len` items. The parts of the ranks follow each other and differ by at most one item; no part is larger than
/// the last rank's. A rank beyond the last one gets nothing. A `world_size` of 0 counts as 1.
pub fn shard(len: usize, rank: usize, world_size: usize) -> Range<usize> {
    let world_size = world_size.max(1);
    // A product of two 64-bit numbers fits 128 bits; the quotient is at most `len`.
    let cut = |rank: usize| (len as u128 * rank.min(world_size) as u128 / world_size as u128) as usize;
    cut(rank)..cut(rank.saturating_add(1))
}

/// The order in which a run sees its samples. It depends on seed and epoch only, not on the number of ranks. Each rank takes its
/// part of every batch.
#[derive(Debug, Clone)]
pub struct Sampler {
    seed: u64,
    batch_size: usize,
    epoch: usize,
    order: Vec<u32>,
    /// The samples of each class, if an epoch has as many of each.
    classes: Option<Arc<[Vec<u32>]>>,
}

/// A rank's part of a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Shard<'a> {
    /// The samples.
    pub samples: &'a [u32],
    /// The number of samples of the batch on earlier ranks, which come before these.
    pub first: usize,
    /// The number of samples of all ranks.
    pub total: usize,
}

impl Sampler {
    /// Samples 0 to `len` - 1 in batches of `batch_size`, at the beginning of epoch 0; the last batch of an epoch has the rest. If the
    /// rest is a single sample, the epoch leaves it out: batch norms cannot take the variance of one value. Each epoch has another
    /// order, so it is seldom the same sample.
    ///
    /// A batch size of 0 counts as 1.
    ///
    /// # Panics
    /// If there are more than 2^32 - 1 samples, or there is no memory for the order.
    pub fn new(seed: u64, len: usize, batch_size: usize) -> Sampler {
        let order = permutation(seed, 0, len);
        Sampler { seed, batch_size: batch_size.max(1), epoch: 0, order, classes: None }
    }

    /// As [`Sampler::new`] with the class of each sample, of which an epoch has as many: see [`Sampling::Balanced`].
    ///
    /// # Panics
    /// As [`Sampler::new`].
    pub fn balanced(seed: u64, classes: &[i64], batch_size: usize) -> Sampler {
        let mut members: BTreeMap<i64, Vec<u32>> = BTreeMap::new();
        for (sample, class) in numbers(classes.len()).zip(classes) {
            members.entry(*class).or_default().push(sample);
        }
        let classes: Arc<[Vec<u32>]> = members.into_values().collect();
        let order = balanced(seed, 0, &classes);
        Sampler { seed, batch_size: batch_size.max(1), epoch: 0, order, classes: Some(classes) }
    }

    /// Goes to an epoch.
    pub fn set_epoch(&mut self, epoch: usize) {
        if epoch != self.epoch {
            self.epoch = epoch;
            self.order = match &self.classes {
                Some(classes) => balanced(self.seed, epoch, classes),
                None => permutation(self.seed, epoch, self.order.len()),
            };
        }
    }

    /// The epoch, from 0.
    pub fn epoch(&self) -> usize {
        self.epoch
    }

    /// Batches in an epoch.
    pub fn batches(&self) -> usize {
        Sampler::batches_of(self.order.len(), self.batch_size)
    }

    /// Batches in an epoch of `len` samples. A batch size of 0 counts as 1.
    pub fn batches_of(len: usize, batch_size: usize) -> usize {
        let batch_size = batch_size.max(1);
        in_batches(len, batch_size).div_ceil(batch_size)
    }

    /// A rank's part of batch `index` of this epoch; empty beyond the last one.
    pub fn batch(&self, index: usize, rank: usize, world_size: usize) -> Shard<'_> {
        let len = in_batches(self.order.len(), self.batch_size);
        let start = index.saturating_mul(self.batch_size).min(len);
        let batch = &self.order[start..start.saturating_add(self.batch_size).min(len)];
        let part = shard(batch.len(), rank, world_size);
        Shard { first: part.start, samples: &batch[part], total: batch.len() }
    }

    /// How many samples ranks take of the batches of an epoch: each number above 0 that occurs.
    pub(crate) fn shard_sizes(&self, world_size: usize) -> Vec<usize> {
        shard_sizes(in_batches(self.order.len(), self.batch_size), self.batch_size, world_size)
    }
}

/// How many of `len` samples an epoch has: all but a single one that would be the last batch.
fn in_batches(len: usize, batch_size: usize) -> usize {
    if len > batch_size && len % batch_size == 1 { len - 1 } else { len }
}

/// How many samples ranks take of `len` samples in batches of `batch_size`: each number above 0 that occurs, in descending order.
pub(crate) fn shard_sizes(len: usize, batch_size: usize, world_size: usize) -> Vec<usize> {
    let batches = [batch_size.min(len), len % batch_size];
    let parts = |batch: usize| (0..world_size).map(move |rank| shard(batch, rank, world_size).len());
    let mut sizes: Vec<usize> = batches.into_iter().flat_map(parts).filter(|&size| size > 0).collect();
    sizes.sort_unstable_by(|a, b| b.cmp(a));
    sizes.dedup();
    sizes
}

/// The numbers 0..len in an order that depends on seed and epoch only.
///
/// # Panics
/// If `len` does not fit 32 bits.
fn permutation(seed: u64, epoch: usize, len: usize) -> Vec<u32> {
    let mut order: Vec<u32> = numbers(len).collect();
    order.shuffle(&mut random(seed, epoch));
    order
}

/// As many samples as all classes have, evenly from each class and evenly from each class's members, in an order that depends on seed and
/// epoch only.
fn balanced(seed: u64, epoch: usize, classes: &[Vec<u32>]) -> Vec<u32> {
    let random = &mut random(seed, epoch);
    let len: usize = classes.iter().map(Vec::len).sum();
    let mut order = Vec::with_capacity(len);
    // Which classes have one more than the others is another choice in each epoch.
    let mut turns: Vec<&Vec<u32>> = classes.iter().collect();
    turns.shuffle(random);
    for (turn, members) in turns.into_iter().enumerate() {
        let wanted = shard(len, turn, classes.len()).len();
        for _ in 0..wanted / members.len() {
            order.extend(members);
        }
        let mut rest = members.clone();
        let (chosen, _) = rest.partial_shuffle(random, wanted % members.len());
        order.extend_from_slice(chosen);
    }
    order.shuffle(random);
    order
}

fn random(seed: u64, epoch: usize) -> ChaCha8Rng {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    random.set_stream((epoch as u64).wrapping_add(1));
    random
}

/// The numbers of `len` samples.
fn numbers(len: usize) -> Range<u32> {
    0..u32::try_from(len).unwrap_or_else(|_| panic!("{len} samples are more than 32 bits can number"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn parts_make_the_whole(len in 0usize..5000, world_size in 1usize..70) {
            let parts: Vec<_> = (0..world_size).map(|rank| shard(len, rank, world_size)).collect();
            prop_assert!(parts.iter().cloned().flatten().eq(0..len));
            let sizes = parts.iter().map(ExactSizeIterator::len);
            prop_assert_eq!(parts[world_size - 1].len(), sizes.clone().max().unwrap());
            prop_assert!(sizes.clone().max().unwrap() - sizes.min().unwrap() <= 1);
        }

        #[test]
        fn every_world_sees_the_same_batches(
            len in 0usize..300, batch_size in 1usize..40, world_size in 1usize..9, epoch in 0usize..3
        ) {
            let mut sampler = Sampler::new(3, len, batch_size);
            sampler.set_epoch(epoch);
            let mut seen = Vec::new();
            for index in 0..sampler.batches() {
                let whole = sampler.batch(index, 0, 1);
                let shards: Vec<_> =
                    (0..world_size).map(|rank| sampler.batch(index, rank, world_size)).collect();
                let mut first = 0;
                for shard in &shards {
                    prop_assert_eq!((shard.first, shard.total), (first, whole.samples.len()));
                    prop_assert!(
                        shard.samples.is_empty() || sampler.shard_sizes(world_size).contains(&shard.samples.len())
                    );
                    first += shard.samples.len();
                }
                let together: Vec<u32> = shards.iter().flat_map(|shard| shard.samples).copied().collect();
                prop_assert_eq!(&together, whole.samples);
                seen.extend(together);
            }
            seen.sort_unstable();
            let left_out = usize::from(len > batch_size && len % batch_size == 1);
            prop_assert_eq!(seen.len(), len - left_out);
            seen.dedup();
            prop_assert_eq!(seen.len(), len - left_out, "none twice an epoch");
            prop_assert!(sampler.batch(sampler.batches(), 0, 1).samples.is_empty());
        }
    }

    proptest! {
        #[test]
        fn a_balanced_epoch_has_as_many_of_each_class(
            classes in proptest::collection::vec(-1i64..5, 0..200), batch_size in 1usize..40, epoch in 0usize..3
        ) {
            let mut sampler = Sampler::balanced(3, &classes, batch_size);
            sampler.set_epoch(epoch);
            prop_assert_eq!(sampler.order.len(), classes.len());
            let mut counts = vec![0_usize; classes.len()];
            sampler.order.iter().for_each(|&sample| counts[sample as usize] += 1);
            let differ = |counts: &[usize]| counts.iter().max().unwrap_or(&0) - counts.iter().min().unwrap_or(&0);
            let mut of_classes = Vec::new();
            for class in -1..5 {
                let own: Vec<usize> =
                    counts.iter().zip(&classes).filter(|(_, own)| **own == class).map(|(count, _)| *count).collect();
                prop_assert!(differ(&own) <= 1, "samples of one class occur evenly");
                of_classes.extend((!own.is_empty()).then(|| own.iter().sum::<usize>()));
            }
            prop_assert!(differ(&of_classes) <= 1);
        }
    }

    #[test]
    fn balanced_epochs_differ_and_repeat() {
        let classes: Vec<i64> = (0..100).map(|sample| i64::from(sample % 10 == 0)).collect();
        let order = |seed: u64, epoch: usize| {
            let mut sampler = Sampler::balanced(seed, &classes, 8);
            sampler.set_epoch(epoch);
            sampler.order
        };
        assert_eq!(order(1, 1), order(1, 1));
        assert_ne!(order(1, 1), order(1, 0));
        assert_ne!(order(1, 1), order(2, 1));
    }

    #[test]
    fn an_epoch_leaves_out_a_last_batch_of_one() {
        let sizes = |len, batch_size| {
            let sampler = Sampler::new(1, len, batch_size);
            (0..sampler.batches()).map(|index| sampler.batch(index, 0, 1).total).collect::<Vec<_>>()
        };
        assert_eq!(sizes(9, 4), [4, 4]);
        assert_eq!(Sampler::new(1, 9, 4).shard_sizes(1), [4]);
        assert_eq!(sizes(10, 4), [4, 4, 2]);
        // What is all there is, or was asked for, stays.
        assert_eq!(sizes(1, 4), [1]);
        assert_eq!(sizes(3, 1), [1, 1, 1]);
        let mut sampler = Sampler::new(1, 9, 4);
        let left_out =
            |sampler: &Sampler| (0..9).find(|n| !(0..2).any(|b| sampler.batch(b, 0, 1).samples.contains(n)));
        let first = left_out(&sampler);
        assert!((1..20).any(|epoch| {
            sampler.set_epoch(epoch);
            left_out(&sampler) != first
        }));
    }

    #[test]
    fn sizes_near_the_largest_do_not_overflow() {
        assert_eq!(shard(usize::MAX, 1, 2).end, usize::MAX);
        assert_eq!(Sampler::new(1, 5, usize::MAX - 1).batch(0, 0, 1).samples.len(), 5);
    }

    #[test]
    fn every_epoch_has_its_own_order() {
        let (a, b) = (permutation(1, 0, 1000), permutation(1, 1, 1000));
        assert_ne!(a, b);
        assert_eq!(a, permutation(1, 0, 1000));
        let mut sorted = a;
        sorted.sort_unstable();
        assert!(sorted.into_iter().eq(0..1000));
    }
}
