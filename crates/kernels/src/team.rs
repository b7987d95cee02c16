//! Threads that help the calling thread with one job at a time.
//!
//! The kernels of a training step are short and follow each other closely, so two things matter that a general thread pool
//! does not give. A helper looks out for the next job for a moment before it sleeps: waking it takes as long as a small
//! kernel. And nobody waits for a helper that has not begun: the caller alone finishes what a late one would have taken.

use std::any::Any;
use std::cell::UnsafeCell;
use std::io::ErrorKind;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How long a helper looks out for the next job before it sleeps.
const WATCH: Duration = Duration::from_micros(200);

/// A team of helpers; they end when it is dropped.
pub(crate) struct Team {
    shared: Arc<Shared>,
}

type Job = *const (dyn Fn() + Sync);

struct Shared {
    /// A [`State`].
    state: AtomicU64,
    /// The job; helpers read it between entering and leaving only.
    job: UnsafeCell<Option<Job>>,
    /// How many helpers have left the job.
    left: AtomicUsize,
    /// Whether a caller has a job, which keeps others from opening theirs.
    taken: AtomicBool,
    /// The first panic in a helper.
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    /// How many helpers sleep, or are about to.
    sleeping: AtomicUsize,
    asleep: Mutex<()>,
    wake: Condvar,
}

// SAFETY: `job` is written by the caller that holds `taken`, while no helper is in a job; helpers read it after an acquiring
// exchange of `state` that follows the release of that write. What it points to is `Sync`.
unsafe impl Sync for Shared {}
// SAFETY: the pointer is followed only while the caller that owns what it points to waits in `Team::run`.
unsafe impl Send for Shared {}

/// From the lowest bit: open, ended, 15 bits of helpers that entered, 15 bits of how many may, the number of the job.
#[derive(Clone, Copy)]
struct State(u64);

impl State {
    const OPEN: u64 = 1;
    const ENDED: u64 = 2;
    const ONE_ENTERED: u64 = 4;

    /// The state after this one in which a job is open to so many helpers.
    fn next(self, helpers: usize) -> State {
        State((u64::from(self.number().wrapping_add(1)) << 32) | (helpers as u64) << 17 | State::OPEN)
    }

    fn is(self, flag: u64) -> bool {
        self.0 & flag != 0
    }

    fn entered(self) -> usize {
        (self.0 >> 2) as usize & 0x7fff
    }

    fn may_enter(self) -> usize {
        (self.0 >> 17) as usize & 0x7fff
    }

    fn number(self) -> u32 {
        (self.0 >> 32) as u32
    }
}

impl Team {
    /// A team of `helpers` threads, 1 to 1023.
    pub(crate) fn new(helpers: usize) -> std::io::Result<Team> {
        let team = Team {
            shared: Arc::new(Shared {
                state: AtomicU64::new(0),
                job: UnsafeCell::new(None),
                left: AtomicUsize::new(0),
                taken: AtomicBool::new(false),
                panic: Mutex::new(None),
                sleeping: AtomicUsize::new(0),
                asleep: Mutex::new(()),
                wake: Condvar::new(),
            }),
        };
        convoke_memory::check_threads(helpers)
            .map_err(|error| std::io::Error::new(ErrorKind::OutOfMemory, error))?;
        for index in 1..=helpers {
            let shared = team.shared.clone();
            std::thread::Builder::new().name(format!("convoke-{index}")).spawn(move || shared.help())?;
        }
        Ok(team)
    }

    /// Runs `job` on the calling thread, and on up to `helpers` others at the same time; returns when all have left it.
    ///
    /// If another thread has a job for this team, or the calling thread is in one, only the calling thread runs it.
    pub(crate) fn run(&self, helpers: usize, job: &(dyn Fn() + Sync)) {
        let shared = &*self.shared;
        if shared.taken.swap(true, Ordering::Acquire) {
            return job();
        }
        shared.open(helpers, job);
        // The caller must not leave before the helpers, by a panic neither.
        let result = catch_unwind(AssertUnwindSafe(job));
        shared.close();
        let panic = shared.panic.lock().unwrap_or_else(PoisonError::into_inner).take();
        shared.taken.store(false, Ordering::Release);
        if let Some(panic) = result.err().or(panic) {
            resume_unwind(panic);
        }
    }
}

impl Drop for Team {
    fn drop(&mut self) {
        self.shared.state.fetch_or(State::ENDED, Ordering::SeqCst);
        self.shared.wake_up(usize::MAX);
    }
}

impl Shared {
    fn open(&self, helpers: usize, job: &(dyn Fn() + Sync)) {
        let job: *const (dyn Fn() + Sync + '_) = job;
        // SAFETY: only the lifetime changes. The pointer is followed by helpers that have entered, and `close` waits for
        // those before the caller's borrow ends.
        let job = unsafe { std::mem::transmute::<*const (dyn Fn() + Sync + '_), Job>(job) };
        self.left.store(0, Ordering::Relaxed);
        // SAFETY: `taken` is held, and the last job was left by all who entered it: nobody else looks at it.
        unsafe { *self.job.get() = Some(job) };
        let state = State(self.state.load(Ordering::Relaxed));
        // Before the look at who sleeps, as helpers count themselves asleep before their last look at the state.
        self.state.store(state.next(helpers).0, Ordering::SeqCst);
        self.wake_up(helpers);
    }

    /// Lets no more helpers in, and waits for those that are.
    fn close(&self) {
        let state = State(self.state.fetch_and(!State::OPEN, Ordering::AcqRel));
        let mut pause = Pause::default();
        while self.left.load(Ordering::Acquire) < state.entered() {
            pause.wait();
        }
    }

    /// Wakes up to so many of those that sleep.
    fn wake_up(&self, helpers: usize) {
        let sleeping = self.sleeping.load(Ordering::SeqCst).min(helpers);
        if sleeping > 0 {
            // Who counts as asleep and does not wait yet holds this until it does.
            drop(self.asleep.lock().unwrap_or_else(PoisonError::into_inner));
            (0..sleeping).for_each(|_| self.wake.notify_one());
        }
    }

    /// A helper's life.
    fn help(&self) {
        let mut last = 0;
        while let Some(number) = self.enter_next(last) {
            last = number;
            // SAFETY: this thread has entered: the caller wrote the job before and waits until this thread has left.
            let job = unsafe { (*self.job.get()).map(|job| &*job) };
            if let Some(job) = job
                && let Err(panic) = catch_unwind(AssertUnwindSafe(job))
            {
                self.panic.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(panic);
            }
            self.left.fetch_add(1, Ordering::Release);
        }
    }

    /// Enters the next job after number `last`; `None` when the team has ended.
    fn enter_next(&self, last: u32) -> Option<u32> {
        let mut pause = Pause::default();
        let mut idle_since = None;
        loop {
            let state = State(self.state.load(Ordering::SeqCst));
            if state.is(State::ENDED) {
                return None;
            }
            if state.is(State::OPEN) && state.number() != last && state.entered() < state.may_enter() {
                let entered = state.0 + State::ONE_ENTERED;
                let exchange =
                    self.state.compare_exchange(state.0, entered, Ordering::AcqRel, Ordering::Relaxed);
                if exchange.is_ok() {
                    return Some(state.number());
                }
                continue;
            }
            pause.wait();
            if idle_since.get_or_insert_with(Instant::now).elapsed() > WATCH {
                self.sleep_until_another(state);
                idle_since = None;
            }
        }
    }

    /// Sleeps unless the state is another already.
    fn sleep_until_another(&self, known: State) {
        let guard = self.asleep.lock().unwrap_or_else(PoisonError::into_inner);
        self.sleeping.fetch_add(1, Ordering::SeqCst);
        let same = |known: State| self.state.load(Ordering::SeqCst) == known.0;
        if same(known) {
            drop(self.wake.wait(guard).unwrap_or_else(PoisonError::into_inner));
        }
        self.sleeping.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Waits for what another thread is about to do, and lets others have the processor.
#[derive(Default)]
struct Pause {
    rounds: u32,
}

impl Pause {
    fn wait(&mut self) {
        self.rounds = self.rounds.wrapping_add(1);
        if self.rounds.is_multiple_of(32) {
            std::thread::yield_now();
        } else {
            std::hint::spin_loop();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;
    use std::sync::atomic::AtomicU32;
    use std::thread;

    /// Runs a job until so many threads have been in it together.
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
        let team = Team::new(3).unwrap();
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
        let team = Team::new(2).unwrap();
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
        let team = Team::new(2).unwrap();
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
        let team = Team::new(2).unwrap();
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
            let team = Team::new(3).unwrap();
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
}
