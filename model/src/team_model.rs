//! Models of the thread team: which helpers enter a job, have left it, sleep and are woken.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use loom::sync::Arc;
use loom::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use crate::team::Team;
use crate::team::sync::LOOKS;
use crate::{THREE_THREADS, TWO_THREADS, explore};

/// The data that jobs borrow from their caller. All accesses are `Relaxed`: a thread is sure to see another's write only if the
/// team has ordered the two; otherwise it may see any value that was ever there.
struct Borrowed {
    /// Written by the caller before a job, read in the job, and written again right after it.
    number: AtomicUsize,
    entered: AtomicUsize,
    /// Written by each run of the job, at its own place.
    written: [AtomicUsize; 3],
}

impl Borrowed {
    fn new() -> Borrowed {
        Borrowed {
            number: AtomicUsize::new(0),
            entered: AtomicUsize::new(0),
            written: std::array::from_fn(|_| AtomicUsize::new(0)),
        }
    }

    /// Runs a job that expects `round` (above 0, rising); the job's writes must be visible afterwards.
    fn run(&self, team: &Team, helpers: usize, round: usize) {
        self.number.store(round, Ordering::Relaxed);
        self.entered.store(0, Ordering::Relaxed);
        team.run(helpers, &|| {
            assert_eq!(self.number.load(Ordering::Relaxed), round, "the job of another round, or none");
            let place = self.entered.fetch_add(1, Ordering::Relaxed);
            self.written[place].store(round, Ordering::Relaxed);
        });
        self.number.store(0, Ordering::Relaxed);
        let entered = self.entered.load(Ordering::Relaxed);
        assert!((1..=1 + helpers).contains(&entered), "{entered} runs with {helpers} helpers");
        for written in &self.written[..entered] {
            assert_eq!(written.load(Ordering::Relaxed), round, "a helper has not left");
        }
    }
}

/// Explores a model whose helpers fall asleep after looking at the state `looks` times in vain.
fn explore_with(looks: usize, preemptions: usize, model: impl Fn() + Send + Sync + 'static) {
    LOOKS.set(looks);
    explore(preemptions, model);
}

#[test]
fn guests_help_like_helpers_until_they_are_sent_home() {
    explore_with(1, THREE_THREADS, || {
        let team = Arc::new(Team::new(1, || ()).unwrap());
        let goes_on = Arc::new(AtomicBool::new(true));
        let guest = {
            let (team, goes_on) = (team.clone(), goes_on.clone());
            loom::thread::spawn(move || team.help_while(&|| goes_on.load(Ordering::Relaxed)))
        };
        Borrowed::new().run(&team, 1, 1);
        goes_on.store(false, Ordering::Relaxed);
        guest.join().unwrap();
    });
}

#[test]
fn all_who_entered_have_left_before_the_caller_goes_on() {
    explore_with(1, THREE_THREADS, || {
        let team = Team::new(2, || ()).unwrap();
        Borrowed::new().run(&team, 2, 1);
    });
}

#[test]
fn no_job_is_taken_for_the_one_before() {
    explore_with(1, TWO_THREADS, || {
        let team = Team::new(1, || ()).unwrap();
        let borrowed = Borrowed::new();
        borrowed.run(&team, 1, 1);
        borrowed.run(&team, 1, 2);
    });
}

#[test]
fn helpers_at_the_look_out_take_jobs_and_end() {
    explore_with(2, TWO_THREADS, || {
        let team = Team::new(1, || ()).unwrap();
        let borrowed = Borrowed::new();
        borrowed.run(&team, 1, 1);
        borrowed.run(&team, 1, 2);
    });
}

#[test]
fn sleeping_helpers_end_with_their_team() {
    for looks in [1, 2] {
        explore_with(looks, THREE_THREADS, || drop(Team::new(2, || ()).unwrap()));
    }
}

#[test]
fn only_one_of_two_callers_opens_a_job() {
    explore_with(1, THREE_THREADS, || {
        let team = Arc::new(Team::new(1, || ()).unwrap());
        let other = loom::thread::spawn({
            let team = team.clone();
            move || Borrowed::new().run(&team, 1, 1)
        });
        Borrowed::new().run(&team, 1, 2);
        other.join().unwrap();
    });
}

#[test]
fn a_job_in_a_job_runs_on_its_caller() {
    explore_with(1, TWO_THREADS, || {
        let team = Team::new(1, || ()).unwrap();
        team.run(1, &|| {
            let here = loom::thread::current().id();
            team.run(1, &|| assert_eq!(loom::thread::current().id(), here));
        });
    });
}

/// A panic payload whose drop panics again.
struct Bomb;

impl Drop for Bomb {
    fn drop(&mut self) {
        resume_unwind(Box::new("from a drop"));
    }
}

#[test]
fn panics_of_helpers_keep_nobody_waiting() {
    explore_with(1, THREE_THREADS, || {
        let team = Team::new(2, || ()).unwrap();
        let caller = loom::thread::current().id();
        let result = catch_unwind(AssertUnwindSafe(|| {
            team.run(2, &|| {
                if loom::thread::current().id() != caller {
                    resume_unwind(Box::new(Bomb));
                }
            });
        }));
        // A helper may or may not have entered the job in time.
        if let Err(panic) = result {
            assert!(panic.is::<Bomb>());
            std::mem::forget(panic);
        }
    });
}

#[test]
fn a_panic_of_all_reaches_the_caller_and_the_team_goes_on() {
    explore_with(1, TWO_THREADS, || {
        let team = Team::new(1, || ()).unwrap();
        let all = AssertUnwindSafe(|| team.run(1, &|| resume_unwind(Box::new(Bomb))));
        let panic = catch_unwind(all).expect_err("the caller's own at least");
        assert!(panic.is::<Bomb>());
        std::mem::forget(panic);
        Borrowed::new().run(&team, 1, 1);
    });
}
