//! Ranks that are threads of one process.

use std::any::Any;
use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::PoisonError;
use std::time::{Duration, Instant};

use convoke_memory::Starting;

use crate::communicator::Transport;
use crate::message::{Message, Outgoing};
use crate::sync::{Arc, Condvar, Mutex, MutexGuard};
use crate::{Call, Communicator, Error, Options, Result};

/// A communicator for each of `world_size` ranks, in their order: each is for one thread.
///
/// A rank whose communicator is dropped has ended, for the others.
///
/// # Errors
/// If there are no ranks, or more than 1024.
pub fn threads(world_size: usize, options: &Options) -> Result<Vec<Communicator>> {
    if world_size == 0 || world_size > 1024 {
        return Err(Error::Invalid(format!("a world has 1 to 1024 ranks, not {world_size}")));
    }
    let meeting = Arc::new(Meeting::new(world_size));
    let communicator = |rank| Communicator::new(Box::new(Place { meeting: meeting.clone(), rank }), *options);
    Ok((0..world_size).map(communicator).collect())
}

/// Runs `work` on a thread for each rank, and returns what it gave, in the order of the ranks.
///
/// # Errors
/// As [`threads`]; if a thread cannot be started; if a rank panics, which the others see as a rank that has ended.
pub fn run_threads<R: Send>(
    world_size: usize,
    options: &Options,
    work: impl Fn(Communicator) -> R + Sync,
) -> Result<Vec<R>> {
    let communicators = threads(world_size, options)?;
    let starting = Starting::new(world_size).map_err(|error| no_thread(0, &error))?;
    let work = &work;
    let results: Vec<_> = std::thread::scope(|scope| {
        let spawn = |communicator: Communicator| {
            let name = format!("rank {}", communicator.rank());
            let started = starting.thread();
            let run = move || {
                drop(started);
                catch_unwind(AssertUnwindSafe(|| work(communicator))).map_err(said)
            };
            std::thread::Builder::new().name(name).spawn_scoped(scope, run)
        };
        // If a thread cannot be started, its communicator is dropped, so that the others end.
        let handles: Vec<_> = communicators.into_iter().map(spawn).collect();
        drop(starting);
        let joined = |handle: std::io::Result<std::thread::ScopedJoinHandle<'_, _>>| match handle {
            Ok(handle) => handle.join().map_err(said).flatten().map_err(Ok),
            Err(error) => Err(Err(error)),
        };
        handles.into_iter().map(joined).collect()
    });
    let known = |(rank, result): (usize, std::result::Result<R, std::io::Result<String>>)| {
        result.map_err(|cause| match cause {
            Ok(message) => Error::Panicked { rank, message },
            Err(error) => no_thread(rank, &error),
        })
    };
    results.into_iter().enumerate().map(known).collect()
}

fn no_thread(rank: usize, error: &dyn std::error::Error) -> Error {
    Error::Transport(format!("no thread for rank {rank}, for want of memory or of threads: {error}"))
}

/// The message of a panic.
fn said(panic: Box<dyn Any + Send>) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text =
        text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("without a message").to_owned();
    // Dropping the payload may panic too. The payload of that panic is leaked, since dropping it may panic again.
    if let Err(another) = catch_unwind(AssertUnwindSafe(|| drop(panic))) {
        std::mem::forget(another);
    }
    text
}

/// A rank's place in a meeting.
pub(crate) struct Place {
    meeting: Arc<Meeting>,
    rank: usize,
}

/// Where ranks bring their messages, one call after the other.
struct Meeting {
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    /// What each rank has brought to the current call.
    brought: Vec<Option<(Call, Outgoing)>>,
    /// What all have brought to the last call, until each has taken it.
    complete: Option<Vec<Outgoing>>,
    taken: usize,
    /// Which ranks have ended.
    ended: Vec<bool>,
    /// When each rank last told the others that it is at work.
    alive: Vec<Option<Instant>>,
    /// The first failure.
    failed: Option<Error>,
    /// Meetings of some of the ranks that are being made, by call number and lowest rank, with the number of ranks that have yet
    /// to come.
    groups: HashMap<(u64, usize), (Arc<Meeting>, usize)>,
}

impl Meeting {
    fn new(world_size: usize) -> Meeting {
        let state = State {
            brought: (0..world_size).map(|_| None).collect(),
            complete: None,
            taken: 0,
            ended: vec![false; world_size],
            alive: vec![None; world_size],
            failed: None,
            groups: HashMap::new(),
        };
        Meeting { state: Mutex::new(state), changed: Condvar::new() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Nothing in here panics between two changes that belong together.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Why `rank` cannot get through `call` as things are.
    fn obstacle(&self, rank: usize, call: &Call) -> Option<Error> {
        for (other, brought) in self.brought.iter().enumerate() {
            let (rank, call) = (rank, Box::new(call.clone()));
            match brought {
                Some((other_call, _)) if other_call != &*call => {
                    return Some(Error::Mismatch {
                        rank,
                        call,
                        other,
                        other_call: Box::new(other_call.clone()),
                    });
                }
                None if self.ended[other] => return Some(Error::Left { rank, call, left: other }),
                _ => {}
            }
        }
        None
    }

    /// The ranks that have not come to the current call.
    fn missing(&self) -> Vec<usize> {
        (0..self.brought.len()).filter(|&rank| self.brought[rank].is_none()).collect()
    }

    /// How long the quietest of those ranks has given no sign of life, for a rank that has waited since `start`.
    fn quiet(&self, start: Instant) -> Duration {
        let missing =
            self.missing().into_iter().map(|rank| self.alive[rank].map_or(start, |alive| alive.max(start)));
        missing.min().unwrap_or(start).elapsed()
    }

    /// All messages to `rank`, if the call is complete. Once every rank has taken its own, the table is empty for the next call.
    fn take(&mut self, rank: usize) -> Option<Vec<Message>> {
        let all = self.complete.as_ref()?;
        let messages: Vec<Message> = all.iter().map(|outgoing| outgoing.to(rank).clone()).collect();
        self.taken += 1;
        if self.taken == messages.len() {
            (self.complete, self.taken) = (None, 0);
        }
        Some(messages)
    }
}

impl Place {
    /// In a meeting of one.
    pub(crate) fn alone() -> Place {
        Place { meeting: Arc::new(Meeting::new(1)), rank: 0 }
    }

    /// Waits until `ready` returns something; fails if that cannot happen any more.
    fn wait<'a, R>(
        &self,
        mut state: MutexGuard<'a, State>,
        call: &Call,
        (start, timeout): (Instant, Duration),
        mut ready: impl FnMut(&mut State) -> Option<R>,
    ) -> Result<(MutexGuard<'a, State>, R)> {
        loop {
            if let Some(result) = ready(&mut state) {
                self.meeting.changed.notify_all();
                return Ok((state, result));
            }
            let waited = start.elapsed();
            // Signs of life matter only if the time would be over without them.
            let quiet = if waited < timeout { waited } else { state.quiet(start) };
            let call = || Box::new(call.clone());
            let failure = match &state.failed {
                Some(first) => return Err(first.clone()),
                None if quiet >= timeout => {
                    Some(Error::Timeout { rank: self.rank, call: call(), waited, missing: state.missing() })
                }
                None if state.complete.is_none() => state.obstacle(self.rank, &call()),
                None => None,
            };
            if let Some(failure) = failure {
                state.failed = Some(failure.clone());
                self.meeting.changed.notify_all();
                return Err(failure);
            }
            let rest = timeout.saturating_sub(quiet);
            state = self.meeting.changed.wait_timeout(state, rest).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl Transport for Place {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.meeting.state().brought.len()
    }

    fn exchange(&self, call: &Call, mine: Outgoing, timeout: Duration) -> Result<Vec<Message>> {
        let time = (Instant::now(), timeout);
        let state = self.meeting.state();
        if let Some(first) = &state.failed {
            return Err(first.clone());
        }
        // A fast rank may come to its next call before slow ones have taken the messages of the last one.
        let table_is_free = |state: &mut State| state.complete.is_none().then_some(());
        let (mut state, ()) = self.wait(state, call, time, table_is_free)?;
        state.brought[self.rank] = Some((call.clone(), mine));
        if state.obstacle(self.rank, call).is_none() && state.missing().is_empty() {
            let brought = state.brought.iter_mut().map(Option::take);
            state.complete = Some(brought.flatten().map(|(_, outgoing)| outgoing).collect());
        }
        let take = |state: &mut State| state.take(self.rank);
        self.wait(state, call, time, take).map(|(_state, messages)| messages)
    }

    fn tell_alive(&self) {
        self.meeting.state().alive[self.rank] = Some(Instant::now());
    }

    fn fail(&self, error: Error) -> Error {
        let first = self.meeting.state().failed.get_or_insert(error).clone();
        self.meeting.changed.notify_all();
        first
    }

    fn address(&self) -> u64 {
        // Not needed: threads find each other by the call, in `among`.
        0
    }

    fn among(&self, call: &Call, members: &[usize], _addresses: &[u64]) -> Result<Box<dyn Transport>> {
        let mut state = self.meeting.state();
        let key = (call.number, members[0]);
        let group = state.groups.entry(key);
        let (meeting, to_come) =
            group.or_insert_with(|| (Arc::new(Meeting::new(members.len())), members.len()));
        *to_come -= 1;
        let (meeting, last) = (meeting.clone(), *to_come == 0);
        if last {
            state.groups.remove(&key);
        }
        let rank = members.iter().position(|&rank| rank == self.rank).expect("a member");
        Ok(Box::new(Place { meeting, rank }))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.meeting.state().ended[self.rank] = true;
        self.meeting.changed.notify_all();
    }
}
