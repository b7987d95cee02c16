//! Tests of the team on real threads.

use std::any::Any;
use std::collections::HashSet;
use std::panic::{AssertUnwindSafe, catch_unwind, panic_any, resume_unwind};
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use super::Team;
use super::sync::WATCH;

/// Runs a job until `expected` threads are in it at the same time; returns those that were in it.
fn meet(team: &Team, helpers: usize, expected: usize) -> HashSet<thread::ThreadId> {
    let met = Mutex::new(HashSet::new());
    let deadline = Instant::now() + Duration::from_secs(60);
    team.run(helpers, &|| {
        met.lock().unwrap().insert(thread::current().id());
        while met.lock().unwrap().len() < expected && Instant::now() < deadline {
            thread::yield_now();
        }
    });
    met.into_inner().unwrap()
}

#[test]
fn helpers_take_part_awake_and_asleep_and_no_more_than_may() {
    let team = Team::new(3, || ()).unwrap();
    assert_eq!(meet(&team, 3, 4).len(), 4);
    for pause in [0, 1, 20] {
        thread::sleep(Duration::from_millis(pause));
        assert_eq!(meet(&team, 3, 4).len(), 4);
        thread::sleep(Duration::from_millis(pause));
        assert_eq!(meet(&team, 1, 2).len(), 2);
    }
}

#[test]
fn nothing_is_lost_in_many_short_jobs() {
    let team = Team::new(2, || ()).unwrap();
    for round in 0..20_000 {
        let left = AtomicUsize::new(10);
        let done = AtomicUsize::new(0);
        team.run(2, &|| {
            while left.try_update(Ordering::Relaxed, Ordering::Relaxed, |n| n.checked_sub(1)).is_ok() {
                done.fetch_add(1, Ordering::Relaxed);
            }
        });
        assert_eq!(done.into_inner(), 10);
        if round % 1000 == 0 {
            thread::sleep(2 * WATCH);
        }
    }
}

#[test]
fn jobs_in_jobs_and_of_other_threads_run_on_their_caller() {
    let team = Team::new(2, || ()).unwrap();
    let inner = AtomicU32::new(0);
    meet(&team, 2, 3);
    team.run(2, &|| {
        let here = thread::current().id();
        team.run(2, &|| {
            assert_eq!(thread::current().id(), here);
            inner.fetch_add(1, Ordering::Relaxed);
        });
    });
    assert!((1..=3).contains(&inner.load(Ordering::Relaxed)));
    let runs = AtomicU32::new(0);
    thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                for _ in 0..500 {
                    team.run(0, &|| {
                        runs.fetch_add(1, Ordering::Relaxed);
                    });
                }
            });
        }
    });
    assert_eq!(runs.into_inner(), 4000);
}

#[test]
fn a_panic_reaches_the_caller_and_the_team_goes_on() {
    let team = Team::new(2, || ()).unwrap();
    let caller = thread::current().id();
    for in_caller in [false, true] {
        let together = AtomicUsize::new(0);
        let result = catch_unwind(AssertUnwindSafe(|| {
            team.run(2, &|| {
                together.fetch_add(1, Ordering::SeqCst);
                while together.load(Ordering::SeqCst) < 3 {
                    thread::yield_now();
                }
                // The caller alone, or both helpers.
                if (thread::current().id() == caller) == in_caller {
                    panic!("out of a job");
                }
            });
        }));
        let panic = result.expect_err("it must arrive");
        assert_eq!(panic.downcast_ref::<&str>(), Some(&"out of a job"));
        assert_eq!(meet(&team, 2, 3).len(), 3);
    }
}

#[test]
fn helpers_end_with_their_team() {
    for pause in [Duration::ZERO, 10 * WATCH] {
        let team = Team::new(3, || ()).unwrap();
        let shared = Arc::downgrade(&team.shared);
        thread::sleep(pause);
        drop(team);
        let deadline = Instant::now() + Duration::from_secs(60);
        while shared.strong_count() > 0 {
            assert!(Instant::now() < deadline, "helpers still run");
            thread::yield_now();
        }
    }
}

/// A payload whose drop panics with another one, as often as its number says.
struct Bomb(usize);

impl Drop for Bomb {
    fn drop(&mut self) {
        if self.0 > 0 {
            resume_unwind(Box::new(Bomb(self.0 - 1)));
        }
    }
}

/// Runs a job on two helpers and the caller. `of_helpers` of the helpers panic, and the caller does if `caller` says so,
/// with payloads that panic when dropped.
fn throw(of_helpers: usize, caller: bool) -> Box<dyn Any + Send> {
    let team = Team::new(2, || ()).unwrap();
    let here = thread::current().id();
    let (together, thrown) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let result = catch_unwind(AssertUnwindSafe(|| {
        team.run(2, &|| {
            together.fetch_add(1, Ordering::SeqCst);
            while together.load(Ordering::SeqCst) < 3 {
                thread::yield_now();
            }
            let panics = match thread::current().id() == here {
                true => caller,
                false => thrown.fetch_add(1, Ordering::SeqCst) < of_helpers,
            };
            if panics {
                panic_any(Bomb(3));
            }
        });
    }));
    assert_eq!(meet(&team, 2, 3).len(), 3, "all go on");
    result.expect_err("it must arrive")
}

#[test]
fn a_payload_that_panics_when_dropped_keeps_nobody_waiting() {
    for (of_helpers, caller) in [(1, false), (2, false), (1, true), (2, true)] {
        let (done, result) = mpsc::channel();
        thread::spawn(move || done.send(throw(of_helpers, caller)));
        let panic = result.recv_timeout(Duration::from_secs(60));
        let panic = panic.unwrap_or_else(|_| panic!("{of_helpers} helpers, caller {caller}: no end"));
        assert!(panic.downcast_ref::<Bomb>().is_some_and(|bomb| bomb.0 == 3));
        std::mem::forget(panic);
    }
}
