//! Models of ranks in collective calls: no rank waits for ever, whatever the others do.

use std::time::Duration;

use crate::threads::threads;
use crate::{Communicator, Error, Options, Result, THREE_THREADS, TWO_THREADS, explore};

/// Runs each rank in its own thread, the last one in this thread, and returns their results in the order of the ranks.
///
/// loom has no time: a wait never times out, so a lost wake-up is a deadlock.
fn ranks<R: 'static>(world_size: usize, work: impl Fn(Communicator) -> R + Copy + 'static) -> Vec<R> {
    ranks_with(Duration::MAX, world_size, work)
}

/// As [`ranks`]; with a timeout of zero, a rank that would have to wait gives up.
fn ranks_with<R: 'static>(
    timeout: Duration,
    world_size: usize,
    work: impl Fn(Communicator) -> R + Copy + 'static,
) -> Vec<R> {
    let mut ranks = threads(world_size, &Options { timeout }).unwrap();
    let last = ranks.pop().unwrap();
    let others: Vec<_> = ranks.into_iter().map(|rank| loom::thread::spawn(move || work(rank))).collect();
    let own = work(last);
    let others = others.into_iter().map(|other| other.join().unwrap());
    others.collect::<Vec<R>>().into_iter().chain([own]).collect()
}

fn sum(rank: &Communicator, name: &str) -> Result<f64> {
    let mut values = [1.0 + rank.rank() as f64];
    rank.all_reduce(name, &mut values)?;
    Ok(values[0])
}

#[test]
fn every_rank_gets_every_sum() {
    explore(TWO_THREADS, || {
        for found in ranks(2, |rank| [sum(&rank, "a"), sum(&rank, "b"), sum(&rank, "c")]) {
            assert_eq!(found, [Ok(3.0), Ok(3.0), Ok(3.0)]);
        }
    });
}

#[test]
fn three_ranks_meet_twice() {
    explore(THREE_THREADS, || {
        for found in ranks(3, |rank| [sum(&rank, "a"), sum(&rank, "b")]) {
            assert_eq!(found, [Ok(6.0), Ok(6.0)]);
        }
    });
}

#[test]
fn a_rank_that_ends_is_an_error_on_the_others() {
    explore(THREE_THREADS, || {
        let found = ranks(3, |rank| match rank.rank() {
            0 => Ok(0.0),
            _ => sum(&rank, "a"),
        });
        for found in &found[1..] {
            assert!(matches!(found, Err(Error::Left { left: 0, .. })), "{found:?}");
        }
    });
}

#[test]
fn a_rank_that_ends_after_a_call_spoils_the_next_one_only() {
    explore(TWO_THREADS, || {
        let found = ranks(2, |rank| match rank.rank() {
            0 => (sum(&rank, "a"), Ok(0.0)),
            _ => (sum(&rank, "a"), sum(&rank, "b")),
        });
        assert_eq!((&found[0].0, &found[1].0), (&Ok(3.0), &Ok(3.0)));
        assert!(matches!(found[1].1, Err(Error::Left { left: 0, .. })), "{found:?}");
    });
}

#[test]
fn ranks_that_call_different_things_all_fail() {
    explore(TWO_THREADS, || {
        let found = ranks(2, |rank| sum(&rank, if rank.rank() == 0 { "a" } else { "b" }));
        assert!(found.iter().all(|found| matches!(found, Err(Error::Mismatch { .. }))), "{found:?}");
    });
}

#[test]
fn a_timeout_is_told_to_all() {
    explore(TWO_THREADS, || {
        let found = ranks_with(Duration::ZERO, 2, |rank| sum(&rank, "a"));
        assert!(found.iter().all(|found| matches!(found, Err(Error::Timeout { .. }))), "{found:?}");
    });
}

#[test]
fn ranks_that_part_meet_among_themselves() {
    explore(TWO_THREADS, || {
        let found = ranks(2, |rank| {
            let together = rank.split("split", 0)?;
            sum(&together, "a")
        });
        assert_eq!(found, [Ok(3.0), Ok(3.0)]);
    });
}

#[test]
fn threads_of_one_rank_take_turns() {
    explore(TWO_THREADS, || {
        let rank = threads(1, &Options { timeout: Duration::MAX }).unwrap().remove(0);
        let other = loom::thread::spawn({
            let rank = rank.clone();
            move || sum(&rank, "a")
        });
        assert_eq!((sum(&rank, "b"), other.join().unwrap()), (Ok(1.0), Ok(1.0)));
        assert_eq!(rank.traffic().calls, 2);
    });
}
