//! The communicator: all collectives are built on one exchange of messages.

use std::sync::PoisonError;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use convoke_memory::{OutOfMemory, Starting};

use crate::message::{Message, Outgoing, sum};
use crate::sync::{Arc, Mutex};
use crate::threads::Place;
use crate::{Call, Collective, Error, Number, Result};

/// How a communicator behaves.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Options {
    /// How long a rank waits for others in a collective before that is an error. For a rank that runs [`Communicator::at_work`],
    /// this counts from its last sign of life.
    pub timeout: Duration,
}

impl Default for Options {
    /// Five minutes: more than the slowest part of a step.
    fn default() -> Options {
        Options { timeout: Duration::from_secs(300) }
    }
}

/// What a rank has sent, and how long it was in collectives.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Traffic {
    /// Exchanges with the other ranks: one for each call of a collective, and two for a share or an all_reduce of 64 KiB or more
    /// on several ranks.
    pub calls: u64,
    /// Bytes that this rank gave to others, each counted once however many others get it.
    pub bytes: u64,
    /// Seconds in collectives, waiting included.
    pub seconds: f64,
}

/// How messages get from rank to rank.
pub(crate) trait Transport: Send + Sync {
    fn rank(&self) -> usize;

    fn world_size(&self) -> usize;

    /// Gives `mine` to all ranks, and takes what each of them gave to this one, in their order.
    fn exchange(&self, call: &Call, mine: Outgoing, timeout: Duration) -> Result<Vec<Message>>;

    /// What others must know to reach this rank in a communicator that is about to be made.
    fn address(&self) -> u64;

    /// Tells the others that this rank is alive and will come, for those that wait for it.
    fn tell_alive(&self);

    /// Ends the communicator for all ranks, before this rank has come to its next call. Returns the error that all ranks get.
    fn fail(&self, error: Error) -> Error;

    /// The transport between `members`, which are ranks of this one in rising order, with this rank among them. All members call
    /// it after they have exchanged their addresses.
    fn among(&self, call: &Call, members: &[usize], addresses: &[u64]) -> Result<Box<dyn Transport>>;
}

/// A rank's connection to the other ranks, with the collectives between them. Clones share it.
///
/// One thread at a time may be in a collective: others wait for it.
///
/// ```
/// use convoke_distributed::{Options, run_threads};
///
/// // Each of four ranks gives a number, and gets those of all.
/// let gathered = run_threads(4, &Options::default(), |communicator| {
///     communicator.all_gather("squares", &[communicator.rank() as f64 * communicator.rank() as f64])
/// })?;
/// assert!(gathered.into_iter().all(|rank| rank == Ok(vec![vec![0.0], vec![1.0], vec![4.0], vec![9.0]])));
/// # Ok::<(), convoke_distributed::Error>(())
/// ```
#[derive(Clone)]
pub struct Communicator {
    shared: Arc<Shared>,
}

struct Shared {
    transport: Box<dyn Transport>,
    options: Options,
    traffic: Mutex<Traffic>,
}

/// Sums of this many bytes or more are computed in parts, one part by each rank.
const SHARED_FROM: usize = 1 << 16;

/// The shortest and the longest time between two signs of life of a rank at work.
const SIGNS: [Duration; 2] = [Duration::from_millis(1), Duration::from_secs(5)];

/// Names of calls have at most this many bytes.
const LONGEST_NAME: usize = 1024;

impl Communicator {
    pub(crate) fn new(transport: Box<dyn Transport>, options: Options) -> Communicator {
        Communicator { shared: Arc::new(Shared { transport, options, traffic: Mutex::default() }) }
    }

    /// A communicator of one rank.
    pub fn solo() -> Communicator {
        Communicator::new(Box::new(Place::alone()), Options::default())
    }

    /// The number of this rank: 0 to the world's size less 1.
    pub fn rank(&self) -> usize {
        self.shared.transport.rank()
    }

    /// How many ranks there are.
    pub fn world_size(&self) -> usize {
        self.shared.transport.world_size()
    }

    /// What this rank has sent so far.
    pub fn traffic(&self) -> Traffic {
        *self.shared.traffic.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Each of `values` becomes its sum over all ranks, taken in their order.
    ///
    /// # Errors
    /// If the ranks' calls, types or lengths differ; if one is gone, does not come in time or has no memory; if `name` has more
    /// than 1024 bytes. `values` are then as before.
    pub fn all_reduce<T: Number>(&self, name: &str, values: &mut [T]) -> Result<()> {
        let world_size = self.world_size();
        let elements = Some(values.len());
        let reduce = Collective::AllReduce;
        let all = self.held(name, Message::new(values))?;
        if world_size == 1 || size_of_val(values) < SHARED_FROM {
            let all = self.exchange::<T>(reduce, name, elements, Outgoing::Same(all))?;
            sum(&all, values);
            return Ok(());
        }
        // Every rank computes the sums of its own part.
        let len = values.len();
        let cut = |part: usize| len * part / world_size;
        let parts = (0..world_size).map(|part| all.part::<T>(cut(part)..cut(part + 1))).collect();
        let parts = self.exchange::<T>(reduce, name, elements, Outgoing::Each(parts))?;
        let mine = cut(self.rank())..cut(self.rank() + 1);
        let sums = self.held(name, Message::write(mine.len(), |sums: &mut [T]| sum(&parts, sums)))?;
        let all = self.exchange::<T>(reduce, name, elements, Outgoing::Same(sums))?;
        for (part, sums) in all.iter().enumerate() {
            values[cut(part)..cut(part + 1)].copy_from_slice(sums.numbers());
        }
        Ok(())
    }

    /// What every rank has, in their order; lengths may differ.
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`], lengths apart.
    pub fn all_gather<T: Number>(&self, name: &str, values: &[T]) -> Result<Vec<Vec<T>>> {
        let mine = Outgoing::Same(self.held(name, Message::new(values))?);
        let all = self.exchange::<T>(Collective::AllGather, name, None, mine)?;
        all.iter().map(|message| self.held(name, convoke_memory::copied(message.numbers()))).collect()
    }

    /// `values` become those of rank `root`.
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`]; if there is no such rank.
    pub fn broadcast<T: Number>(&self, name: &str, root: usize, values: &mut [T]) -> Result<()> {
        let world_size = self.world_size();
        if root >= world_size {
            return Err(Error::Invalid(format!(
                "broadcast {name:?} from rank {root}, of {world_size} ranks"
            )));
        }
        let mine = match self.rank() == root {
            true => self.held(name, Message::new(values))?,
            false => Message::empty(),
        };
        let collective = Collective::Broadcast { root };
        let all = self.exchange::<T>(collective, name, Some(values.len()), Outgoing::Same(mine))?;
        values.copy_from_slice(all[root].numbers());
        Ok(())
    }

    /// `values` become those of rank `root`, with the same length.
    ///
    /// # Errors
    /// As [`Communicator::broadcast`].
    pub fn share<T: Number>(&self, name: &str, root: usize, values: &mut Vec<T>) -> Result<()> {
        let mut len = [values.len() as u64];
        self.broadcast(name, root, &mut len)?;
        let len = usize::try_from(len[0]).unwrap_or(usize::MAX);
        self.held(name, convoke_memory::resize(values, len, T::zeroed()))?;
        self.broadcast(name, root, values)
    }

    /// Checks that all ranks have the same settings, each a name and a value.
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`]; [`Error::Setting`], the same on all ranks, with the first one that differs.
    pub fn check_settings(&self, name: &str, settings: &[(&str, String)]) -> Result<()> {
        let own: Vec<&str> = settings.iter().flat_map(|(name, value)| [name, value.as_str()]).collect();
        let all = self.all_gather(name, own.join("\0").as_bytes())?;
        let texts: Vec<_> = all.iter().map(|text| String::from_utf8_lossy(text)).collect();
        let of = |rank: usize| texts[rank].split('\0').collect::<Vec<&str>>();
        let first = of(0);
        for other in 1..texts.len() {
            let found = of(other);
            let pair = |settings: &[&str], index: usize| {
                let at = |index: usize| {
                    settings.get(index).map_or("not there".to_owned(), |text| (*text).to_owned())
                };
                (at(2 * index), at(2 * index + 1))
            };
            let count = first.len().max(found.len()).div_ceil(2);
            if let Some(index) = (0..count).find(|&index| pair(&first, index) != pair(&found, index)) {
                let ((name, value), (other_name, other_value)) = (pair(&first, index), pair(&found, index));
                // Programs of different versions may not even have the same settings.
                let other_value = if name == other_name { other_value } else { "not there".into() };
                return Err(Error::Setting { name, value, other, other_value });
            }
        }
        Ok(())
    }

    /// Runs `work` while other ranks wait for this one, even longer than their timeout: meanwhile, this rank regularly tells them
    /// that it is alive, and they go on waiting. If this rank is killed or paused during its work, they get an error as usual.
    ///
    /// # Errors
    /// If there is no thread for these signs of life; `work` has not been run then.
    pub fn at_work<R>(&self, work: impl FnOnce() -> R) -> Result<R> {
        if self.world_size() == 1 {
            return Ok(work());
        }
        let every = (self.shared.options.timeout / 4).clamp(SIGNS[0], SIGNS[1]);
        std::thread::scope(|scope| {
            let (at_work, ended) = channel::<()>();
            let no_thread = |reason: String| {
                Error::Transport(format!("rank {} cannot tell that it is alive: {reason}", self.rank()))
            };
            let starting = Starting::new(1).map_err(|error| no_thread(error.to_string()))?;
            let started = starting.thread();
            let tell = move || {
                drop(started);
                loop {
                    self.shared.transport.tell_alive();
                    if ended.recv_timeout(every) != Err(RecvTimeoutError::Timeout) {
                        return;
                    }
                }
            };
            let thread = std::thread::Builder::new().name("alive".into()).spawn_scoped(scope, tell);
            thread.map_err(|error| no_thread(format!("no memory for a thread, or too many: {error}")))?;
            drop(starting);
            // Dropped after the work, or when it panics; this ends the thread.
            let _at_work = at_work;
            Ok(work())
        })
    }

    /// Returns when all ranks have called it.
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`].
    pub fn barrier(&self, name: &str) -> Result<()> {
        let nothing = Outgoing::Same(Message::empty());
        self.exchange::<u8>(Collective::Barrier, name, Some(0), nothing).map(drop)
    }

    /// A communicator of the ranks that give the same color, in their order.
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`].
    pub fn split(&self, name: &str, color: u64) -> Result<Communicator> {
        let transport = &self.shared.transport;
        let mine = Outgoing::Same(self.held(name, Message::new(&[color, transport.address()]))?);
        let (call, all) = self.exchange_as::<u64>(Collective::Split, name, Some(2), mine)?;
        let members: Vec<usize> =
            (0..all.len()).filter(|&rank| all[rank].numbers::<u64>()[0] == color).collect();
        let addresses: Vec<u64> = members.iter().map(|&rank| all[rank].numbers()[1]).collect();
        Ok(Communicator::new(transport.among(&call, &members, &addresses)?, self.shared.options))
    }

    /// What was allocated; or if there was no memory, an error, after ending the communicator for all ranks.
    fn held<R>(&self, name: &str, found: std::result::Result<R, OutOfMemory>) -> Result<R> {
        let failed = |OutOfMemory { bytes }| {
            let (rank, name) = (self.rank(), name.to_owned());
            self.shared.transport.fail(Error::Memory { rank, name, bytes })
        };
        found.map_err(failed)
    }

    fn exchange<T: Number>(
        &self,
        collective: Collective,
        name: &str,
        elements: Option<usize>,
        mine: Outgoing,
    ) -> Result<Vec<Message>> {
        self.exchange_as::<T>(collective, name, elements, mine).map(|(_, messages)| messages)
    }

    /// What all ranks gave, in their order, and the call that it was.
    fn exchange_as<T: Number>(
        &self,
        collective: Collective,
        name: &str,
        elements: Option<usize>,
        mine: Outgoing,
    ) -> Result<(Call, Vec<Message>)> {
        if name.len() > LONGEST_NAME {
            return Err(Error::Invalid(format!(
                "a call's name has at most {LONGEST_NAME} bytes, not {}",
                name.len()
            )));
        }
        let mut traffic = self.shared.traffic.lock().unwrap_or_else(PoisonError::into_inner);
        traffic.calls += 1;
        let (name, number) = (name.to_owned(), traffic.calls);
        let call = Call { collective, name, number, dtype: T::DTYPE, elements };
        let (bytes, start) = (mine.bytes_beside(self.rank(), self.world_size()) as u64, Instant::now());
        let result = self.shared.transport.exchange(&call, mine, self.shared.options.timeout);
        traffic.bytes += bytes;
        traffic.seconds += start.elapsed().as_secs_f64();
        Ok((call, result?))
    }
}

impl std::fmt::Debug for Communicator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Communicator(rank {} of {})", self.rank(), self.world_size())
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::run_threads;

    #[test]
    fn a_rank_without_memory_is_an_error_on_all() {
        let options = Options { timeout: Duration::from_secs(60) };
        let results = run_threads(3, &options, |communicator| match communicator.rank() {
            1 => communicator.held("gradients", Err(OutOfMemory { bytes: 1 << 40 })),
            _ => communicator.barrier("wait"),
        });
        let expected = Error::Memory { rank: 1, name: "gradients".into(), bytes: 1 << 40 };
        assert!(expected.to_string().contains("rank 1 is out of memory"), "{expected}");
        for result in results.unwrap() {
            assert_eq!(result, Err(expected.clone()));
        }
    }
}
