//! Code that ends the process if it finds no memory: the start of a thread, which the standard library and the system's allocator cannot
//! undo, and libraries that throw C++ exceptions. While it runs, no thread makes a large allocation, so what was free before stays free.

use std::cell::Cell;
use std::convert::Infallible;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::{Result, check};

/// How long a thread waits for another one here. Nothing depends on it but how a lack of memory ends. In a forked process, who is waited
/// for may not exist.
const PATIENCE: Duration = Duration::from_secs(2);

struct State {
    /// Large allocations under way.
    allocating: usize,
    /// Whether a thread is [`Alone`].
    is_alone: bool,
    /// Threads that wait for a change.
    waiting: usize,
}

static STATE: Mutex<State> = Mutex::new(State { allocating: 0, is_alone: false, waiting: 0 });
static CHANGED: Condvar = Condvar::new();

thread_local! {
    static IS_ALONE: Cell<bool> = const { Cell::new(false) };
}

fn state() -> MutexGuard<'static, State> {
    // Nothing panics between two changes that belong together.
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits until the state is `free`.
fn wait_until(free: impl Fn(&State) -> bool) -> MutexGuard<'static, State> {
    let mut state = state();
    if !free(&state) {
        state.waiting += 1;
        let waited = CHANGED.wait_timeout_while(state, PATIENCE, |state| !free(state));
        let (held, result) = waited.unwrap_or_else(PoisonError::into_inner);
        state = held;
        state.waiting = state.waiting.saturating_sub(1);
        if result.timed_out() {
            (state.allocating, state.is_alone) = (0, false);
        }
    }
    state
}

fn change(make: impl FnOnce(&mut State)) {
    let mut state = state();
    make(&mut state);
    if state.waiting > 0 {
        CHANGED.notify_all();
    }
}

/// While this lives, [`crate::attempt`] waits on all other threads. So it must not wait for a thread that may make such an allocation.
pub struct Alone {
    /// Whether this is within another one on the same thread.
    inner: bool,
}

impl Alone {
    /// Waits until no other thread makes a large allocation. Within another one on the same thread, it does nothing.
    #[must_use]
    pub fn new() -> Alone {
        let inner = IS_ALONE.replace(true);
        if !inner {
            wait_until(|state| !state.is_alone && state.allocating == 0).is_alone = true;
        }
        Alone { inner }
    }
}

impl Default for Alone {
    fn default() -> Alone {
        Alone::new()
    }
}

impl Drop for Alone {
    fn drop(&mut self) {
        if !self.inner {
            IS_ALONE.set(false);
            change(|state| state.is_alone = false);
        }
    }
}

/// A large allocation of a thread that is not [`Alone`].
pub(super) struct Allocating(());

impl Allocating {
    pub(super) fn new() -> Option<Allocating> {
        if IS_ALONE.get() {
            return None;
        }
        wait_until(|state| !state.is_alone).allocating += 1;
        Some(Allocating(()))
    }
}

impl Drop for Allocating {
    fn drop(&mut self) {
        change(|state| state.allocating = state.allocating.saturating_sub(1));
    }
}

/// Bytes that a thread maps when it starts: its stack of the standard library's default size, and the rest.
const OF_A_THREAD: usize = (2 << 20) + (256 << 10);

/// Bytes that the system's allocator takes from the system at a time, if it takes any for what a thread allocates at its start.
const MORE: usize = 2 << 20;

/// Threads that are being started. Dropping it waits until they have: until each [`Starting::thread`] is dropped.
///
/// ```
/// let starting = convoke_memory::Starting::new(1)?;
/// let started = starting.thread();
/// let thread = std::thread::spawn(move || {
///     drop(started);
///     // The thread's work.
/// });
/// drop(starting);
/// thread.join().unwrap();
/// # Ok::<(), convoke_memory::OutOfMemory>(())
/// ```
pub struct Starting {
    /// Dropped first, so that `end` notices when all others are gone.
    thread: Option<Sender<Infallible>>,
    end: Receiver<Infallible>,
    _alone: Alone,
}

/// A new thread drops this first; if the thread cannot be started, its closure does.
pub struct Started(#[expect(dead_code, reason = "it is only dropped")] Sender<Infallible>);

impl Starting {
    /// Checks that there is memory now for `count` threads, and keeps it free until they have started. A thread that gets its stack but
    /// not the memory that it needs next ends the process, so call this before starting threads.
    ///
    /// # Errors
    /// If there is not enough memory.
    pub fn new(count: usize) -> Result<Starting> {
        let _alone = Alone::new();
        if count > 0 {
            check(count.saturating_mul(OF_A_THREAD).saturating_add(MORE))?;
        }
        let (thread, end) = channel();
        Ok(Starting { thread: Some(thread), end, _alone })
    }

    /// For one of the threads.
    pub fn thread(&self) -> Started {
        Started(self.thread.clone().expect("it is there until the drop"))
    }
}

impl Drop for Starting {
    fn drop(&mut self) {
        self.thread = None;
        // An error says that every thread has dropped its part.
        let _ = self.end.recv();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::Duration;

    use super::*;
    use crate::{OutOfMemory, attempt};

    /// The tests share the state.
    fn one_at_a_time() -> MutexGuard<'static, ()> {
        static ORDER: Mutex<()> = Mutex::new(());
        ORDER.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[test]
    fn large_allocations_wait_until_threads_have_started() {
        let _order = one_at_a_time();
        let (starting, allocated) = (Starting::new(2).unwrap(), AtomicBool::new(false));
        std::thread::scope(|scope| {
            let started = [starting.thread(), starting.thread()];
            scope.spawn(|| attempt(|| allocated.store(true, Ordering::SeqCst)));
            // This thread may allocate.
            attempt(|| ());
            scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(50));
                assert!(!allocated.load(Ordering::SeqCst));
                drop(started);
            });
            drop(starting);
        });
        assert!(allocated.load(Ordering::SeqCst));
    }

    #[test]
    fn one_within_another_ends_with_the_outer_one() {
        let _order = one_at_a_time();
        let outer = Alone::new();
        drop(Alone::new());
        assert!(IS_ALONE.get() && Allocating::new().is_none());
        drop(outer);
        assert!(!IS_ALONE.get() && Allocating::new().is_some());
    }

    #[test]
    fn there_is_no_memory_for_countless_threads() {
        let _order = one_at_a_time();
        assert_eq!(Starting::new(usize::MAX).map(drop), Err(OutOfMemory { bytes: usize::MAX }));
        // Nobody waits for threads that were not started, and allocations go on.
        drop(Starting::new(3).unwrap());
        std::thread::spawn(|| attempt(|| ())).join().unwrap();
    }

    /// As in a forked process, where the thread that is alone does not exist.
    #[test]
    fn nobody_waits_for_ever() {
        let _order = one_at_a_time();
        std::thread::spawn(|| std::mem::forget(Alone::new())).join().unwrap();
        attempt(|| ());
        drop(Alone::new());
        std::thread::spawn(|| std::mem::forget(Allocating::new())).join().unwrap();
        drop(Alone::new());
        attempt(|| ());
    }
}
