//! Threads that help the calling thread with one job at a time.
//!
//! The kernels of a training step are short and follow each other closely, so two things matter that a general thread pool
//! does not give. A helper looks out for the next job for a moment before it sleeps: waking it takes as long as a small
//! kernel. And nobody waits for a helper that has not begun: the caller alone finishes what a late one would have taken.

pub(crate) mod sync;

use std::any::Any;
use std::io::ErrorKind;
use std::mem::forget;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::PoisonError;

use sync::{
    Arc, AtomicBool, AtomicU64, AtomicUsize, Builder, Condvar, Mutex, Ordering, UnsafeCell, Watch, spin_loop,
    yield_now,
};

/// A team of helpers; they end when it is dropped.
pub(crate) struct Team {
    shared: Arc<Shared>,
}

type Job = *const (dyn Fn() + Sync);
/// What a panic throws.
type Payload = Box<dyn Any + Send>;

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
    panic: Mutex<Option<Payload>>,
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
            Builder::new().name(format!("convoke-{index}")).spawn(move || shared.help())?;
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

impl Drop for Team {
    fn drop(&mut self) {
        self.shared.state.fetch_or(State::ENDED, Ordering::Release);
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
        self.job.with_mut(|place| unsafe { *place = Some(job) });
        let state = State(self.state.load(Ordering::Relaxed));
        self.state.store(state.next(helpers).0, Ordering::Release);
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

    /// Wakes up to so many of those that sleep, after the state has changed.
    fn wake_up(&self, helpers: usize) {
        // An exchange that adds nothing: it and that of a helper which falls asleep are one after the other. Either this one
        // finds the helper counted, or the helper's comes later and shows it the state as it is now.
        let sleeping = self.sleeping.fetch_add(0, Ordering::AcqRel).min(helpers);
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
            let _leaves = Leaves(&self.left);
            // SAFETY: this thread has entered: the caller wrote the job before, and writes the next one, and ends the borrow
            // behind it, only when this thread has left, which it does at the end of this round.
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
        // A payload's drop may run anything, and takes as long as it likes.
        drop(first);
        surplus.into_iter().for_each(discard);
    }

    /// Enters the next job after number `last`; `None` when the team has ended.
    fn enter_next(&self, last: u32) -> Option<u32> {
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
            if watch.is_over() {
                self.sleep_until_another(state);
                watch = Watch::default();
            }
        }
    }

    /// Sleeps unless the state is another already.
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

/// Drops what nobody will be told of. What that drop throws itself is leaked: dropping it could throw again.
fn discard(panic: Payload) {
    if let Err(another) = catch_unwind(AssertUnwindSafe(|| drop(panic))) {
        forget(another);
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
            yield_now();
        } else {
            spin_loop();
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests;
