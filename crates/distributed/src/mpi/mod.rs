//! Ranks that are processes, started by `mpirun` (feature `mpi`).
//!
//! Every process calls [`world`] once and gets the same [`Communicator`] as ranks on threads have, with the same results, bit for
//! bit. It uses messages of MPI, but not MPI's collectives, because they hang if a process is gone.
//!
//! ```no_run
//! use convoke_distributed::{Options, Result, mpi};
//!
//! fn train() -> Result<()> {
//!     let communicator = mpi::world(&Options::default())?;
//!     communicator.all_reduce("example", &mut [1.0])
//! } // Dropped here: this waits for the other processes, and ends MPI.
//!
//! fn main() -> std::process::ExitCode {
//!     match train() {
//!         Ok(()) => std::process::ExitCode::SUCCESS,
//!         Err(error) => {
//!             eprintln!("{error}");
//!             std::process::ExitCode::FAILURE
//!         }
//!     }
//! }
//! ```
//!
//! # How a program ends
//!
//! When the last communicator of a process is dropped, it waits for the others to do the same, at most the timeout, and all of
//! them end MPI (`MPI_Finalize`). If a collective has failed in any of them, if a rank panics, or if one does not come, none ends
//! MPI, as that could hang: then end the program with an error. If a process ends without having ended MPI, `mpirun` by default
//! kills the others; so report what went wrong before the program ends.
//!
//! # What MPI itself reports
//!
//! If MPI itself fails, for example because a network connection breaks, it ends the process. This is its default, and the
//! binding relies on it. A process that is killed is noticed by the timeout, or by `mpirun`, which by default kills the others.
//! Keep that default between machines: over TCP, Open MPI 4.1 was seen to hang in a call that does not wait, after the process at
//! the other end had been killed.

use std::sync::atomic::{AtomicBool, AtomicU16, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use binding::{Library, Receiving, Sending};
use ranks::{Address, Ranks};
use wire::Frame;

use crate::communicator::Transport;
use crate::message::{Message, Outgoing};
use crate::{Call, Collective, Communicator, Number, Options, Result};

mod binding;
mod inbox;
mod ranks;
mod wire;

/// The communicator of all processes. Call it once in a process. Communicators may be used from several threads, but each from
/// one at a time.
///
/// A process that was not started by `mpirun` is a world of one. MPI is initialized and ended on a thread of its own, so that
/// neither can block this thread.
///
/// # Errors
/// If MPI has been initialized before, also by others, or does not provide `MPI_THREAD_MULTIPLE`; if the other processes do not
/// initialize MPI and meet this one within the timeout (initializing itself takes seconds, so ten are allowed even if the timeout
/// is shorter), for example because they never use MPI; if one of them is another program, or of another version.
pub fn world(options: &Options) -> Result<Communicator> {
    let start = Instant::now();
    let patience = options.timeout.max(SHORTEST_START);
    let library = Library::start(patience, options.timeout)?;
    let (process, processes) = library.place();
    let world = Arc::new(World {
        library: Some(library),
        process,
        processes,
        timeout: options.timeout,
        next_tag: AtomicU16::new(FIRST_TAG + 2),
        healthy: AtomicBool::new(true),
        unfinished: Mutex::default(),
    });
    let addresses = (0..processes).map(|process| Address { process, tag: i32::from(FIRST_TAG) }).collect();
    let ranks = Ranks::new(world, process, addresses);
    // The first exchange finds out whether a process is another program, or of another version.
    let name = concat!("start of convoke ", env!("CARGO_PKG_VERSION")).to_owned();
    let call = Call { collective: Collective::Barrier, name, number: 0, dtype: u8::DTYPE, elements: Some(0) };
    let rest = patience.saturating_sub(start.elapsed()).max(LAST_WORDS);
    ranks.exchange(&call, Outgoing::Same(Message::empty()), rest)?;
    Ok(Communicator::new(Box::new(ranks), *options))
}

/// Tag of the messages that processes send when they end.
const GOODBYE_TAG: i32 = 0;
/// Tag at which all ranks of the world listen.
const FIRST_TAG: u16 = 2;
/// The largest tag that every MPI has.
const LAST_TAG: u16 = 32767;
/// The least time that MPI is given to be initialized in all processes.
const SHORTEST_START: Duration = Duration::from_secs(10);
/// How long a process that has failed tries to tell the others.
const LAST_WORDS: Duration = Duration::from_millis(500);

/// What all communicators of a process share. Dropping it ends MPI.
struct World {
    /// The library, until the world is dropped.
    library: Option<Library>,
    process: usize,
    processes: usize,
    timeout: Duration,
    next_tag: AtomicU16,
    /// No communicator has failed.
    healthy: AtomicBool,
    /// Messages that ended communicators were still sending.
    unfinished: Mutex<Vec<Sending>>,
}

impl World {
    fn library(&self) -> &Library {
        self.library.as_ref().expect("until it is dropped")
    }

    /// Reserves a tag and the next one, which this process uses for nothing else; there are 16 thousand such pairs.
    fn take_tag(&self) -> Option<u16> {
        let next = |tag: u16| (tag < LAST_TAG).then(|| tag + 2);
        self.next_tag.fetch_update(Ordering::SeqCst, Ordering::SeqCst, next).ok()
    }

    fn finish_later(&self, sendings: Vec<Sending>) {
        let mut unfinished = self.unfinished.lock().unwrap_or_else(PoisonError::into_inner);
        unfinished.extend(sendings);
        unfinished.retain_mut(|sending| !sending.done());
    }

    /// Tells all processes that this one ends, and waits for all of them to say the same. Returns whether none has failed.
    fn agree(&self, library: &Library, mut sendings: Vec<Sending>) -> bool {
        let mut healthy = self.healthy.load(Ordering::SeqCst) && !std::thread::panicking();
        let goodbye = wire::goodbye(healthy);
        let others = (0..self.processes).filter(|&process| process != self.process);
        sendings.extend(others.map(|process| library.send(process, GOODBYE_TAG, goodbye.clone())));
        let mut awaited = self.processes - 1;
        let (mut receiving, mut pauses) = (Vec::new(), Pauses::new());
        loop {
            // Receive whatever comes: MPI requires that before it ends.
            while let Some(arrival) = library.arrival(None) {
                match (arrival.tag, Receiving::start(arrival.bytes, arrival)) {
                    (tag, Ok(started)) => receiving.push((tag, started)),
                    // A message that is not received keeps MPI from ending.
                    (_, Err(_)) => healthy = false,
                }
            }
            receiving.retain_mut(|(tag, receiving)| match receiving.message() {
                Some(message) if *tag == GOODBYE_TAG => {
                    awaited = awaited.saturating_sub(1);
                    healthy &= wire::parse(message.bytes()) == Some(Frame::Goodbye(true));
                    false
                }
                message => message.is_none(),
            });
            sendings.retain_mut(|sending| !sending.done());
            if sendings.is_empty() && receiving.is_empty() && (awaited == 0 || !healthy) {
                return healthy;
            }
            if pauses.total() >= if healthy { self.timeout } else { LAST_WORDS } {
                return false;
            }
            pauses.pause(false);
        }
    }
}

impl Drop for World {
    fn drop(&mut self) {
        let unfinished = std::mem::take(self.unfinished.get_mut().unwrap_or_else(PoisonError::into_inner));
        if let Some(library) = self.library.take() {
            match self.agree(&library, unfinished) {
                true => library.finish(),
                false => library.abandon(),
            }
        }
    }
}

/// How a thread that polls waits: it polls closely at first, and less and less often while nothing changes.
struct Pauses {
    start: Instant,
    changed: Instant,
}

impl Pauses {
    fn new() -> Pauses {
        let start = Instant::now();
        Pauses { start, changed: start }
    }

    /// The time since polling began.
    fn total(&self) -> Duration {
        self.start.elapsed()
    }

    fn pause(&mut self, changed: bool) {
        if changed {
            self.changed = Instant::now();
        }
        match self.changed.elapsed().as_micros() {
            0..20 => std::hint::spin_loop(),
            20..2000 => std::thread::yield_now(),
            _ => std::thread::sleep(Duration::from_micros(50)),
        }
    }
}
