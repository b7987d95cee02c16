//! The communicator: collectives in terms of one exchange.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::message::{Message, Outgoing, sum};
use crate::threads::Place;
use crate::{Call, Collective, Error, Number, Result};

/// How a communicator behaves.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Options {
    /// How long a rank waits for others in a collective before that is an error.
    pub timeout: Duration,
}

impl Default for Options {
    /// Five minutes: more than the slowest part of a step, also while one rank measures convolutions.
    fn default() -> Options {
        Options { timeout: Duration::from_secs(300) }
    }
}

/// What a rank has sent, and how long it was in collectives.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Traffic {
    /// Calls of collectives.
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

    /// What others must know of this rank to reach it in a communicator that is about to be made.
    fn address(&self) -> u64;

    /// The transport between those ranks of this one, in rising order, of which this rank is one; all of them call it after
    /// they have exchanged their addresses.
    fn among(&self, call: &Call, members: &[usize], addresses: &[u64]) -> Result<Box<dyn Transport>>;
}

/// A rank's place among others, and what they do together. Clones are the same place.
///
/// One thread at a time may be in a collective: others wait for it.
#[derive(Clone)]
pub struct Communicator {
    shared: Arc<Shared>,
}

struct Shared {
    transport: Box<dyn Transport>,
    options: Options,
    traffic: Mutex<Traffic>,
}

/// Sums of more bytes are taken in parts, one by each rank.
const SHARED_FROM: usize = 1 << 16;

/// Names of calls have at most as many bytes.
const LONGEST_NAME: usize = 1024;

impl Communicator {
    pub(crate) fn new(transport: Box<dyn Transport>, options: Options) -> Communicator {
        Communicator { shared: Arc::new(Shared { transport, options, traffic: Mutex::default() }) }
    }

    /// A communicator of one rank.
    pub fn solo() -> Communicator {
        Communicator::new(Box::new(Place::alone()), Options::default())
    }

    /// This rank: 0 to the world's size less 1.
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
    /// If the ranks' calls, types or lengths differ; if one is gone or does not come in time; if `name` has more than 1024
    /// bytes. `values` are then as before.
    pub fn all_reduce<T: Number>(&self, name: &str, values: &mut [T]) -> Result<()> {
        let world_size = self.world_size();
        let elements = Some(values.len());
        let reduce = Collective::AllReduce;
        let all = Message::new(values);
        if world_size == 1 || size_of_val(values) < SHARED_FROM {
            let all = self.exchange::<T>(reduce, name, elements, Outgoing::Same(all))?;
            sum(&all, values);
            return Ok(());
        }
        // Every rank sums the part that is its own.
        let len = values.len();
        let cut = |part: usize| len * part / world_size;
        let parts = (0..world_size).map(|part| all.part::<T>(cut(part)..cut(part + 1))).collect();
        let parts = self.exchange::<T>(reduce, name, elements, Outgoing::Each(parts))?;
        let mine = cut(self.rank())..cut(self.rank() + 1);
        let sums = Message::write(mine.len(), |sums: &mut [T]| sum(&parts, sums));
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
        let mine = Outgoing::Same(Message::new(values));
        let all = self.exchange::<T>(Collective::AllGather, name, None, mine)?;
        Ok(all.iter().map(|message| message.numbers().to_vec()).collect())
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
        let mine = if self.rank() == root { Message::new(values) } else { Message::empty() };
        let collective = Collective::Broadcast { root };
        let all = self.exchange::<T>(collective, name, Some(values.len()), Outgoing::Same(mine))?;
        values.copy_from_slice(all[root].numbers());
        Ok(())
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
        let mine = Outgoing::Same(Message::new(&[color, transport.address()]));
        let (call, all) = self.exchange_as::<u64>(Collective::Split, name, Some(2), mine)?;
        let members: Vec<usize> =
            (0..all.len()).filter(|&rank| all[rank].numbers::<u64>()[0] == color).collect();
        let addresses: Vec<u64> = members.iter().map(|&rank| all[rank].numbers()[1]).collect();
        Ok(Communicator::new(transport.among(&call, &members, &addresses)?, self.shared.options))
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
