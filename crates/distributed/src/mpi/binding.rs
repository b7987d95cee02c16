//! The binding to MPI, which holds memory of ours while messages are on their way: the only unsafe code of this crate.
#![allow(unsafe_code)]

use std::mem;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use ::mpi::Threading;
use ::mpi::point_to_point;
use ::mpi::request::{Request, StaticScope};
use ::mpi::topology::SimpleCommunicator;
use ::mpi::traits::{Communicator as _, Destination as _, Equivalence as _, Source as _};

use convoke_memory::OutOfMemory;

use crate::buffers::Buffer;
use crate::message::Message;
use crate::{Error, Result};

/// A nonblocking operation on bytes that stay where they are until it is complete.
type Pending = Request<'static, [u8], StaticScope>;

/// Runs `request` a bit further, and returns whether it is complete.
fn advance(request: &mut Option<Pending>) -> bool {
    *request = request.take().and_then(|request| request.test().err());
    request.is_none()
}

/// A communicator of all processes that nothing else uses.
struct All(SimpleCommunicator);

// SAFETY: MPI gave MPI_THREAD_MULTIPLE before one of these was made, with which any thread may call it, several at once too; the
// handle is a number or an address that MPI gave and that is only passed to MPI.
unsafe impl Send for All {}
// SAFETY: a shared one is used by calls of MPI only, and with MPI_THREAD_MULTIPLE several threads may be in them at once.
unsafe impl Sync for All {}

/// The MPI library, initialized, and a communicator of all processes that nothing else uses.
///
/// MPI must be ended by the thread that initialized it, so that thread waits until then. A call of MPI in which all processes
/// must take part hangs if one does not; this way it blocks only that thread.
pub(super) struct Library {
    all: All,
    /// Ends MPI. If this is dropped instead, MPI stays as it is until the process ends.
    end: Sender<All>,
    ended: Mutex<Receiver<()>>,
    timeout: Duration,
}

impl Library {
    /// Initializes MPI, which all processes must do within `patience`. Fails if it has been initialized before, or if it does not
    /// let several threads call it. Ending it may take up to `timeout`.
    pub(super) fn start(patience: Duration, timeout: Duration) -> Result<Library> {
        let failed = |said: String| Error::Transport(format!("MPI cannot be used: {said}"));
        let no_thread = |reason: &dyn std::fmt::Display| {
            failed(format!("no thread for it, for want of memory or of threads: {reason}"))
        };
        let (start, started) = channel();
        let (end, to_end) = channel();
        let (has_ended, ended) = channel();
        let starting = convoke_memory::Starting::new(1).map_err(|error| no_thread(&error))?;
        let begun = starting.thread();
        let work = move || {
            drop(begun);
            hold(&start, &to_end, &has_ended);
        };
        std::thread::Builder::new().name("MPI".into()).spawn(work).map_err(|error| no_thread(&error))?;
        drop(starting);
        match started.recv_timeout(patience) {
            Ok(Ok(all)) => Ok(Library { all, end, ended: Mutex::new(ended), timeout }),
            Ok(Err(said)) => Err(failed(said)),
            Err(RecvTimeoutError::Timeout) => Err(failed(format!(
                "waited {:.1} s in MPI_Init for the other processes that were started with this one: does one of them not use MPI?",
                patience.as_secs_f64()
            ))),
            Err(RecvTimeoutError::Disconnected) => Err(failed("initializing it panicked".into())),
        }
    }

    /// The number of this process, and how many processes there are.
    pub(super) fn place(&self) -> (usize, usize) {
        // MPI's numbers are not negative.
        (self.all.0.rank().unsigned_abs() as usize, self.all.0.size().unsigned_abs() as usize)
    }

    /// Starts to send to a process. `message` has less than 2 GiB.
    pub(super) fn send(&self, to: usize, tag: i32, message: Message) -> Sending {
        // SAFETY: the bytes lie behind the `Arc` of `message`, which never changes them and is kept until MPI is done:
        // `Sending` forgets it if it is dropped before.
        let bytes: &'static [u8] = unsafe { &*std::ptr::from_ref(message.bytes()) };
        let request = self.all.0.process_at_rank(to as i32).immediate_send_with_tag(StaticScope, bytes, tag);
        Sending { to, request: Some(request), message }
    }

    /// A message that has come with this tag, or with any.
    pub(super) fn arrival(&self, tag: Option<i32>) -> Option<Arrival> {
        let any = self.all.0.any_process();
        let (message, status) = match tag {
            Some(tag) => any.immediate_matched_probe_with_tag(tag),
            None => any.immediate_matched_probe(),
        }?;
        let bytes = status.count(u8::equivalent_datatype());
        // A message of 2 GiB or more has a negative count; none of ours does.
        let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
        let from = status.source_rank().unsigned_abs() as usize;
        Some(Arrival { from, tag: status.tag(), bytes, message: Some(message) })
    }

    /// Ends MPI, together with all other processes; gives up after the timeout, in case one of them is killed or paused
    /// meanwhile.
    pub(super) fn finish(self) {
        if self.end.send(self.all).is_ok() {
            let ended = self.ended.into_inner().unwrap_or_else(PoisonError::into_inner);
            let _ = ended.recv_timeout(self.timeout);
        }
    }

    /// Leaves MPI as it is until the process ends.
    pub(super) fn abandon(self) {
        mem::forget(self.all);
    }
}

/// What the thread that initializes MPI does: it hands out the communicator, and ends MPI when it gets that back.
fn hold(start: &Sender<std::result::Result<All, String>>, to_end: &Receiver<All>, has_ended: &Sender<()>) {
    let universe = match ::mpi::initialize_with_threading(Threading::Multiple) {
        Some((universe, Threading::Multiple)) => universe,
        None => {
            let said = "it has been initialized before, which can be done once in a process";
            let _ = start.send(Err(said.into()));
            return;
        }
        // Dropped here, and so finalized, in all processes.
        Some((_universe, threading)) => {
            let said = format!("it was built for {threading:?} threads, not for MPI_THREAD_MULTIPLE");
            let _ = start.send(Err(said));
            return;
        }
    };
    match start.send(Ok(All(universe.world().duplicate()))) {
        Ok(()) => match to_end.recv() {
            Ok(all) => {
                drop(all);
                drop(universe);
                let _ = has_ended.send(());
            }
            Err(_) => mem::forget(universe),
        },
        // Nobody waits any more, in this process or the others. Ending MPI needs all processes, so it would hang.
        Err(unheard) => {
            mem::forget(unheard);
            mem::forget(universe);
        }
    }
}

/// A message on its way to another process.
pub(super) struct Sending {
    /// The process.
    pub(super) to: usize,
    request: Option<Pending>,
    message: Message,
}

// SAFETY: with MPI_THREAD_MULTIPLE a request may be completed by another thread than it was started by.
unsafe impl Send for Sending {}

impl Sending {
    /// Whether MPI is done with the message.
    pub(super) fn done(&mut self) -> bool {
        advance(&mut self.request)
    }
}

impl Drop for Sending {
    fn drop(&mut self) {
        if let Some(request) = self.request.take() {
            mem::forget(request);
            mem::forget(self.message.clone());
        }
    }
}

/// A message that can be received.
pub(super) struct Arrival {
    /// The process that sent it.
    pub(super) from: usize,
    /// The tag that it was sent with.
    pub(super) tag: i32,
    /// How long it is.
    pub(super) bytes: usize,
    message: Option<point_to_point::Message>,
}

// SAFETY: as a request, a matched message may be received by another thread.
unsafe impl Send for Arrival {}

impl Drop for Arrival {
    fn drop(&mut self) {
        // Dropping the message itself would panic, so one that is not received stays with MPI.
        mem::forget(self.message.take());
    }
}

/// Bytes that come from one process, in one message or in several, one after the other.
pub(super) struct Receiving {
    /// From `Box::into_raw`; MPI writes to it while there is a request.
    words: *mut [u64],
    bytes: usize,
    filled: usize,
    request: Option<Pending>,
}

// SAFETY: it is the only one that has its words, and requests may be completed by any thread.
unsafe impl Send for Receiving {}

impl Receiving {
    /// Takes what has come as the first of `bytes` bytes.
    pub(super) fn start(bytes: usize, arrival: Arrival) -> std::result::Result<Receiving, OutOfMemory> {
        let words = Buffer::with_at_least(bytes.div_ceil(size_of::<u64>()))?;
        let words = Box::into_raw(words.into_box());
        let mut receiving = Receiving { words, bytes, filled: 0, request: None };
        receiving.go_on(arrival);
        Ok(receiving)
    }

    /// Takes what has come as the next bytes, once it is idle. There must be room for it.
    pub(super) fn go_on(&mut self, mut arrival: Arrival) {
        assert!(
            self.request.is_none() && arrival.bytes <= self.bytes - self.filled,
            "as its callers have checked"
        );
        if let Some(message) = arrival.message.take() {
            // SAFETY: the words come from a box of our own, and nothing refers to them: there is no request. They are
            // neither read nor freed before the request is complete: `Receiving` forgets them if it is dropped before.
            let words: &'static mut [u64] = unsafe { &mut *self.words };
            let room = &mut bytemuck::cast_slice_mut(words)[self.filled..][..arrival.bytes];
            self.request = Some(message.immediate_matched_receive_into(StaticScope, room));
            self.filled += arrival.bytes;
        }
    }

    /// Whether everything that has come so far is received.
    pub(super) fn idle(&mut self) -> bool {
        advance(&mut self.request)
    }

    /// How many bytes have not come yet.
    pub(super) fn missing(&self) -> usize {
        self.bytes - self.filled
    }

    /// What was received; `None` before all of it is here.
    pub(super) fn message(&mut self) -> Option<Message> {
        if !self.idle() || self.missing() > 0 {
            return None;
        }
        let words = mem::replace(&mut self.words, Box::into_raw(Box::default()));
        // SAFETY: from `Box::into_raw`, replaced by another, and without a request.
        let words = unsafe { Box::from_raw(words) };
        self.filled = 0;
        Some(Message::from_words(words.into(), mem::take(&mut self.bytes)))
    }
}

impl Drop for Receiving {
    fn drop(&mut self) {
        match self.request.take() {
            Some(request) => mem::forget(request),
            // SAFETY: from `Box::into_raw`; without a request MPI does not write to it, and it is not used again.
            None => drop(Buffer::from(unsafe { Box::from_raw(self.words) })),
        }
    }
}
