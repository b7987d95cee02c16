//! The ranks of a communicator that are processes: exchanges by messages, and the agreement on an error.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use convoke_memory::OutOfMemory;

use super::binding::Sending;
use super::inbox::{Inbox, PIECE};
use super::{Pauses, World, wire};
use crate::communicator::Transport;
use crate::message::{Message, Outgoing};
use crate::{Call, Error, Result};

/// How long a rank that fails waits for the others' errors, so that all return the same error.
const GRACE: Duration = Duration::from_secs(1);

/// A rank among processes; all of them know where each one listens.
///
/// Each rank has one tag of MPI for messages of calls, and the next tag for notices, which overtake calls. No other communicator
/// of its process uses these tags, so messages do not mix, and making a communicator needs no collective of MPI, which would hang
/// if a process is gone.
pub(super) struct Ranks {
    world: Arc<World>,
    rank: usize,
    /// The address of every rank, by rising process.
    addresses: Vec<Address>,
    state: Mutex<State>,
}

/// Where a rank listens.
#[derive(Debug, Clone, Copy)]
pub(super) struct Address {
    /// The process of the rank, numbered among all processes.
    pub(super) process: usize,
    /// The tag of its calls; that of its notices is the next one.
    pub(super) tag: i32,
}

struct State {
    inboxes: Vec<Inbox>,
    sendings: Vec<Sending>,
    /// How many calls there have been.
    calls: u64,
    /// The first failure.
    failed: Option<Error>,
}

impl Ranks {
    pub(super) fn new(world: Arc<World>, rank: usize, addresses: Vec<Address>) -> Ranks {
        let inboxes = addresses.iter().map(|_| Inbox::default()).collect();
        let state = State { inboxes, sendings: Vec::new(), calls: 0, failed: None };
        Ranks { world, rank, addresses, state: Mutex::new(state) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let rank = self.rank;
        (0..self.addresses.len()).filter(move |&other| other != rank)
    }

    /// The rank of a process.
    fn rank_of(&self, process: usize) -> Option<usize> {
        self.addresses.binary_search_by_key(&process, |address| address.process).ok()
    }

    /// Starts to send what this rank brings to a call.
    fn send(&self, state: &mut State, call: &Call, mine: &Outgoing) {
        let library = self.world.library();
        let mut same: Option<(Message, bool)> = None;
        for other in self.others() {
            let (numbers, Address { process, tag }) = (mine.to(other), self.addresses[other]);
            let (frame, follow) = match mine {
                Outgoing::Same(_) => same.get_or_insert_with(|| wire::came(call, numbers)).clone(),
                Outgoing::Each(_) => wire::came(call, numbers),
            };
            state.sendings.push(library.send(process, tag, frame));
            let bytes = if follow { numbers.bytes().len() } else { 0 };
            for start in (0..bytes).step_by(PIECE) {
                let piece = numbers.part::<u8>(start..bytes.min(start + PIECE));
                state.sendings.push(library.send(process, tag, piece));
            }
        }
    }

    /// Starts to send a notice to all ranks that have not ended.
    fn tell(&self, state: &mut State, notice: &Message) {
        for other in self.others().filter(|&other| !state.inboxes[other].has_left()) {
            let Address { process, tag } = self.addresses[other];
            state.sendings.push(self.world.library().send(process, tag + 1, notice.clone()));
        }
    }

    /// Takes what has come, and returns whether anything changed.
    fn advance(&self, state: &mut State) -> bool {
        let (mut changed, tag) = (false, self.addresses[self.rank].tag);
        for (tag, is_notice) in [(tag, false), (tag + 1, true)] {
            while let Some(arrival) = self.world.library().arrival(Some(tag)) {
                if let Some(rank) = self.rank_of(arrival.from) {
                    state.inboxes[rank].take_in(arrival, is_notice);
                }
            }
        }
        for inbox in &mut state.inboxes {
            changed |= inbox.advance();
        }
        let sendings = state.sendings.len();
        state.sendings.retain_mut(|sending| !sending.done());
        changed || state.sendings.len() < sendings
    }

    /// Why this rank cannot get through `call` as things are.
    fn obstacle(&self, state: &State, call: &Call) -> Option<Error> {
        let present = |rank: usize| if rank == self.rank { Some(call) } else { state.inboxes[rank].call() };
        let mut present = (0..self.addresses.len()).filter_map(|rank| Some((rank, present(rank)?)));
        // Report the lowest ranks that differ, so that ranks with the same knowledge report the same error.
        let (rank, first) = present.next()?;
        if let Some((other, other_call)) = present.find(|&(_, other_call)| other_call != first) {
            let (call, other_call) = (Box::new(first.clone()), Box::new(other_call.clone()));
            return Some(Error::Mismatch { rank, call, other, other_call });
        }
        let inboxes = || self.others().map(|other| (other, &state.inboxes[other]));
        if let Some((left, _)) = inboxes().find(|(_, inbox)| inbox.left_before(call.number)) {
            return Some(Error::Left { rank: self.rank, call: Box::new(call.clone()), left });
        }
        if let Some(OutOfMemory { bytes }) = state.inboxes.iter().find_map(Inbox::refused) {
            return Some(Error::Memory { rank: self.rank, name: call.name.clone(), bytes });
        }
        let (other, _) = inboxes().find(|(_, inbox)| inbox.is_garbled())?;
        let said = format!("rank {other} sends what rank {} cannot read: is it another program?", self.rank);
        Some(Error::Transport(said))
    }

    /// The ranks that have not come to the current call, or have not taken what this one brought.
    fn missing(&self, state: &State) -> Vec<usize> {
        let takes = |sending: &Sending, other| self.rank_of(sending.to) == Some(other);
        let sends = |other| state.sendings.iter().any(|sending| takes(sending, other));
        self.others().filter(|&other| !state.inboxes[other].is_complete() || sends(other)).collect()
    }

    /// How long the quietest of those ranks has given no sign of life to this one, which has waited since `start`.
    fn quiet(&self, state: &State, start: Instant) -> Duration {
        let last = |rank: usize| state.inboxes[rank].alive().map_or(start, |alive| alive.max(start));
        self.missing(state).into_iter().map(last).min().unwrap_or(start).elapsed()
    }

    /// Ends the communicator: tells the others, waits for their errors, and returns the error of the lowest rank.
    fn end(&self, state: &mut State, error: Error) -> Error {
        self.world.healthy.store(false, Ordering::SeqCst);
        let notice = wire::failed(state.calls, &error);
        self.tell(state, &notice);
        let mut pauses = Pauses::new();
        loop {
            let changed = self.advance(state);
            // Also wait for ranks that have not come to this call as far as this rank knows: their messages may be on the way.
            let answered = |inbox: &Inbox| inbox.failed().is_some() || inbox.has_left();
            if self.others().all(|other| answered(&state.inboxes[other])) || pauses.total() >= GRACE {
                break;
            }
            pauses.pause(changed);
        }
        let said = |rank: usize| if rank == self.rank { Some(&error) } else { state.inboxes[rank].failed() };
        let first = (0..self.addresses.len()).find_map(said).unwrap_or(&error).clone();
        state.failed = Some(first.clone());
        first
    }
}

impl Transport for Ranks {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.addresses.len()
    }

    fn exchange(&self, call: &Call, mine: Outgoing, timeout: Duration) -> Result<Vec<Message>> {
        let (state, start) = (&mut *self.state(), Instant::now());
        if let Some(first) = &state.failed {
            return Err(first.clone());
        }
        state.calls = call.number;
        self.send(state, call, &mine);
        let mut pauses = Pauses::new();
        loop {
            let changed = self.advance(state);
            let obstacle = self.obstacle(state, call);
            let notice = state.inboxes.iter().find_map(|inbox| inbox.failed_by(call.number));
            let complete = self.others().all(|other| state.inboxes[other].is_complete());
            // Sends need this rank's help to complete; if another rank has failed in a later call, they may never complete.
            let sent =
                state.sendings.is_empty() || state.inboxes.iter().any(|inbox| inbox.failed().is_some());
            if complete && sent && obstacle.is_none() && notice.is_none() {
                break;
            }
            let waited = start.elapsed();
            let failure = match (notice, obstacle) {
                (Some(notice), _) => Some(notice.clone()),
                (None, Some(obstacle)) => Some(obstacle),
                // `quiet` is called only once it may matter, because this loop runs over and over.
                (None, None) if waited >= timeout && self.quiet(state, start) >= timeout => {
                    let (call, missing) = (Box::new(call.clone()), self.missing(state));
                    Some(Error::Timeout { rank: self.rank, call, waited, missing })
                }
                (None, None) => None,
            };
            if let Some(failure) = failure {
                return Err(self.end(state, failure));
            }
            pauses.pause(changed);
        }
        let own = |inbox: &mut Inbox, rank| inbox.pop().unwrap_or_else(|| mine.to(rank).clone());
        Ok(state.inboxes.iter_mut().enumerate().map(|(rank, inbox)| own(inbox, rank)).collect())
    }

    fn tell_alive(&self) {
        let state = &mut *self.state();
        state.sendings.retain_mut(|sending| !sending.done());
        if state.failed.is_none() {
            self.tell(state, &wire::alive());
        }
    }

    fn fail(&self, error: Error) -> Error {
        let state = &mut *self.state();
        match &state.failed {
            Some(first) => first.clone(),
            None => {
                // The failure is in the next call, which this rank does not come to.
                state.calls += 1;
                self.end(state, error)
            }
        }
    }

    fn address(&self) -> u64 {
        self.world.take_tag().map_or(u64::MAX, u64::from)
    }

    fn among(&self, call: &Call, members: &[usize], addresses: &[u64]) -> Result<Box<dyn Transport>> {
        let address = |(&rank, &tag): (&usize, &u64)| {
            let tag = i32::try_from(tag).ok()?;
            Some(Address { process: self.addresses[rank].process, tag })
        };
        let addresses: Option<Vec<Address>> = members.iter().zip(addresses).map(address).collect();
        let rank = members.iter().position(|&rank| rank == self.rank);
        let (Some(addresses), Some(rank)) = (addresses, rank) else {
            return Err(Error::Transport(format!("{call}: a process has made too many communicators")));
        };
        Ok(Box::new(Ranks::new(self.world.clone(), rank, addresses)))
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.world.healthy.store(false, Ordering::SeqCst);
        }
        let mut state = self.state();
        let calls = state.calls;
        self.tell(&mut state, &wire::left(calls));
        self.world.finish_later(std::mem::take(&mut state.sendings));
    }
}
