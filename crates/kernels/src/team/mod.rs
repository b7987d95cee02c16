//! Threads that help the calling thread with one job at a time.
//!
//! The kernels of a training step are short and follow each other closely, so this does two things that a general thread
//! pool does not. A helper spins for a moment to wait for the next job before it sleeps, because waking it takes as long as
//! a small kernel. And the caller never waits for a helper that has not begun: it does the work of a late helper itself.

pub(crate) mod sync;

use std::any::Any;
use std::io::ErrorKind;
use std::mem::forget;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::PoisonError;

use sync::{
    Arc, AtomicBool, AtomicU64, AtomicUsize, Builder, Condvar, Mutex, Ordering, Starting, UnsafeCell, Watch,
    spin_loop, yield_now,
};

/// A team of helpers; they end when it is dropped.
pub(crate) struct Team {
    shared: Arc<Shared>,
}

type Job = *const (dyn Fn() + Sync);
/// The payload of a panic.
type Payload = Box<dyn Any + Send>;

struct Shared {
    /// The process that has the helpers: after a fork, the child has none.
    process: u32,
    /// A [`State`].
    state: AtomicU64,
    /// The job; helpers read it only between entering and leaving.
    job: UnsafeCell<Option<Job>>,
    /// How many helpers have left the current job.
    left: AtomicUsize,
    /// Whether a caller has a job open or is about to; then no other caller can open one.
    taken: AtomicBool,
    /// The first panic in a helper.
    panic: Mutex<Option<Payload>>,
    /// How many helpers sleep, or are about to sleep.
    sleeping: AtomicUsize,
    /// How many threads help that are not the team's own.
    guests: AtomicUsize,
    asleep: Mutex<()>,
    wake: Condvar,
}

// SAFETY: `job` is written by the caller that holds `taken`, while no helper is in a job; helpers read it after an acquiring
// exchange of `state` that follows the release of that write. What it points to is `Sync`.
unsafe impl Sync for Shared {}
// SAFETY: the pointer is followed only while the caller that owns what it points to waits in `Team::run`.
unsafe impl Send for Shared {}

/// The bits, from the lowest: open, ended, 15 bits for how many helpers have entered, 15 bits for how many may enter, the
/// number of the job.
#[derive(Clone, Copy)]
struct State(u64);

impl State {
    const OPEN: u64 = 1;
    const ENDED: u64 = 2;
    const ONE_ENTERED: u64 = 4;

    /// The state that follows this one: the next job is open to `helpers` helpers.
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
    /// A team of `helpers` threads, 1 to 1023. Each runs `prepare` first.
    pub(crate) fn new(helpers: usize, prepare: fn()) -> std::io::Result<Team> {
        let team = Team {
            shared: Arc::new(Shared {
                process: std::process::id(),
                state: AtomicU64::new(0),
                job: UnsafeCell::new(None),
                left: AtomicUsize::new(0),
                taken: AtomicBool::new(false),
                panic: Mutex::new(None),
                sleeping: AtomicUsize::new(0),
                guests: AtomicUsize::new(0),
                asleep: Mutex::new(()),
                wake: Condvar::new(),
            }),
        };
        let starting =
            Starting::new(helpers).map_err(|error| std::io::Error::new(ErrorKind::OutOfMemory, error))?;
        for index in 1..=helpers {
            let (shared, started) = (team.shared.clone(), starting.thread());
            Builder::new().name(format!("convoke-{index}")).spawn(move || {
                drop(started);
                prepare();
                shared.help(None);
            })?;
        }
        Ok(team)
    }

    /// Runs `job` on the calling thread, and on up to `helpers` others at the same time; returns when all have left it.
    ///
    /// If the team already has a job, from another thread or around this call, only the calling thread runs `job`. So it does in a
    /// process that was forked, where no helper comes.
    pub(crate) fn run(&self, helpers: usize, job: &(dyn Fn() + Sync)) {
        let shared = &*self.shared;
        if shared.taken.swap(true, Ordering::Acquire) {
            return job();
        }
        shared.open(helpers, job);
        // The caller must not leave before the helpers do, not even by a panic.
        let own = catch_unwind(AssertUnwindSafe(job)).err();
        shared.close();
        let helpers = shared.panic.lock().unwrap_or_else(PoisonError::into_inner).take();
        shared.taken.store(false, Ordering::Release);
        match (own, helpers) {
            (Some(own), surplus) => {
                surplus.into_iter().for_each(discard);
                resume_unwind(own)
            }
            (None, Some(panic)) => resume_unwind(panic),
            (None, None) => {}
        }
    }
}

impl Team {
    /// Makes the calling thread a helper until `goes_on` is false. It never sleeps, and for each such guest a job wakes one helper less.
    pub(crate) fn help_while(&self, goes_on: &dyn Fn() -> bool) {
        if self.shared.is_forked() {
            return;
        }
        self.shared.guests.fetch_add(1, Ordering::Relaxed);
        self.shared.help(Some(goes_on));
        self.shared.guests.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Drop for Team {
    fn drop(&mut self) {
        self.shared.state.fetch_or(State::ENDED, Ordering::Release);
        self.shared.wake_up(usize::MAX);
    }
}

impl Shared {
    /// Whether this is a copy that a fork made, whose helpers do not exist.
    fn is_forked(&self) -> bool {
        std::process::id() != self.process
    }

    fn open(&self, helpers: usize, job: &(dyn Fn() + Sync)) {
        let job: *const (dyn Fn() + Sync + '_) = job;
        // SAFETY: only the lifetime changes. The pointer is followed by helpers that have entered, and `close` waits for
        // those before the caller's borrow ends.
        let job = unsafe { std::mem::transmute::<*const (dyn Fn() + Sync + '_), Job>(job) };
        self.left.store(0, Ordering::Relaxed);
        // SAFETY: `taken` is held, and all helpers that entered the last job have left it: no other thread accesses it.
        self.job.with_mut(|place| unsafe { *place = Some(job) });
        let state = State(self.state.load(Ordering::Relaxed));
        self.state.store(state.next(helpers).0, Ordering::Release);
        self.wake_up(helpers.saturating_sub(self.guests.load(Ordering::Relaxed)));
    }

    /// Lets no more helpers in, and waits until those inside have left.
    fn close(&self) {
        let state = State(self.state.fetch_and(!State::OPEN, Ordering::AcqRel));
        let mut pause = Pause::default();
        while self.left.load(Ordering::Acquire) < state.entered() {
            pause.wait();
        }
    }

    /// Wakes up to `helpers` of the sleeping helpers, after the state has changed.
    fn wake_up(&self, helpers: usize) {
        // A read-modify-write that adds 0, so that it is ordered with the `fetch_add` of a helper that falls asleep. Either
        // this one comes second and counts that helper, or the helper's comes second and the helper sees the new state.
        let sleeping = self.sleeping.fetch_add(0, Ordering::AcqRel).min(helpers);
        // In a forked process a helper that does not exist may hold the lock. The system is asked for the process only here, because the
        // call takes as long as a part of a small kernel.
        if sleeping > 0 && !self.is_forked() {
            // A helper that is counted as asleep but does not wait yet holds this lock until it waits.
            drop(self.asleep.lock().unwrap_or_else(PoisonError::into_inner));
            (0..sleeping).for_each(|_| self.wake.notify_one());
        }
    }

    /// The main loop of a helper, or of a guest while it goes on.
    fn help(&self, goes_on: Option<&dyn Fn() -> bool>) {
        let mut last = 0;
        while let Some(number) = self.enter_next(last, goes_on) {
            last = number;
            let _leaves = Leaves(&self.left);
            // SAFETY: this thread has entered. The caller wrote the job before that, and it writes the next one, and ends
            // the borrow behind this one, only after this thread has left, which it does at the end of this round.
            let job = self.job.with(|job| unsafe { (*job).map(|job| &*job) });
            if let Some(job) = job
                && let Err(panic) = catch_unwind(AssertUnwindSafe(job))
            {
                self.keep(panic);
            }
        }
    }

    /// Keeps a helper's panic for the caller if it is the job's first.
    fn keep(&self, panic: Payload) {
        let mut first = self.panic.lock().unwrap_or_else(PoisonError::into_inner);
        let surplus = if first.is_none() { first.replace(panic) } else { Some(panic) };
        // Release the lock first: dropping a payload may run any code, for any time.
        drop(first);
        surplus.into_iter().for_each(discard);
    }

    /// Enters the next job after number `last`; `None` when the team has ended, or the guest does not go on.
    fn enter_next(&self, last: u32, goes_on: Option<&dyn Fn() -> bool>) -> Option<u32> {
        let mut pause = Pause::default();
        let mut watch = Watch::default();
        loop {
            let state = State(self.state.load(Ordering::Acquire));
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
            if let Some(goes_on) = goes_on {
                if !goes_on() {
                    return None;
                }
            } else if watch.is_over() {
                self.sleep_until_another(state);
                watch = Watch::default();
            }
        }
    }

    /// Sleeps unless the state has already changed from `known`.
    fn sleep_until_another(&self, known: State) {
        let guard = self.asleep.lock().unwrap_or_else(PoisonError::into_inner);
        self.sleeping.fetch_add(1, Ordering::AcqRel);
        if self.state.load(Ordering::Acquire) == known.0 {
            drop(self.wake.wait(guard).unwrap_or_else(PoisonError::into_inner));
        }
        self.sleeping.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Counts a helper as having left its job, whatever happens to it.
struct Leaves<'a>(&'a AtomicUsize);

impl Drop for Leaves<'_> {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::Release);
    }
}

/// Drops a panic's payload that is not passed on. If that drop panics, the new payload is leaked: dropping it could panic
/// again.
fn discard(panic: Payload) {
    if let Err(another) = catch_unwind(AssertUnwindSafe(|| drop(panic))) {
        forget(another);
    }
}

/// Spins while another thread is about to act, and yields the processor now and then.
#[derive(Default)]
struct Pause {
    rounds: u32,
}

impl Pause {
    fn wait(&mut self) {
        self.rounds = self.rounds.wrapping_add(1);
        if self.rounds.is_multiple_of(32) {
            yield_now();
        } else {
            spin_loop();
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests;
