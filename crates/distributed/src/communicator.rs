//! The communicator: collectives in terms of one exchange.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::message::Message;
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
    /// Bytes that this rank gave to others, each counted once however many others there are.
    pub bytes: u64,
    /// Seconds in collectives, waiting included.
    pub seconds: f64,
}

/// How messages get from rank to rank.
pub(crate) trait Transport: Send + Sync {
    fn rank(&self) -> usize;

    fn world_size(&self) -> usize;

    /// Gives `mine` to all ranks, and takes what each of them gave, in their order.
    fn exchange(&self, call: &Call, mine: Message, timeout: Duration) -> Result<Vec<Message>>;

    /// The transport between those ranks of this one, of which this rank is one; all of them call it after the same exchange.
    fn among(&self, call: &Call, members: &[usize]) -> Box<dyn Transport>;
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
    /// If the ranks' calls, types or lengths differ; if one is gone or does not come in time. `values` are then as before.
    pub fn all_reduce<T: Number>(&self, name: &str, values: &mut [T]) -> Result<()> {
        let world_size = self.world_size();
        let elements = Some(values.len());
        let reduce = Collective::AllReduce;
        let all = self.exchange::<T>(reduce, name, elements, Message::new(values))?;
        let all: Vec<&[T]> = all.iter().map(Message::numbers).collect();
        let sum = |index: usize| T::sum(all.iter().map(|values| values[index]));
        if world_size == 1 || size_of_val(values) < SHARED_FROM {
            values.iter_mut().enumerate().for_each(|(index, value)| *value = sum(index));
            return Ok(());
        }
        let cut = |part: usize| values.len() * part / world_size;
        let mine: Vec<T> = (cut(self.rank())..cut(self.rank() + 1)).map(sum).collect();
        let parts = self.exchange::<T>(reduce, name, elements, Message::new(&mine))?;
        let sums = parts.iter().flat_map(|part| part.numbers::<T>());
        values.iter_mut().zip(sums).for_each(|(value, &sum)| *value = sum);
        Ok(())
    }

    /// What every rank has, in their order; lengths may differ.
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`], lengths apart.
    pub fn all_gather<T: Number>(&self, name: &str, values: &[T]) -> Result<Vec<Vec<T>>> {
        let all = self.exchange::<T>(Collective::AllGather, name, None, Message::new(values))?;
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
        let all = self.exchange::<T>(Collective::Broadcast { root }, name, Some(values.len()), mine)?;
        values.copy_from_slice(all[root].numbers());
        Ok(())
    }

    /// Returns when all ranks have called it.
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`].
    pub fn barrier(&self, name: &str) -> Result<()> {
        self.exchange::<u8>(Collective::Barrier, name, Some(0), Message::empty()).map(drop)
    }

    /// A communicator of the ranks that give the same color, in their order.
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`].
    pub fn split(&self, name: &str, color: u64) -> Result<Communicator> {
        let mine = Message::new(&[color]);
        let (call, colors) = self.exchange_as::<u64>(Collective::Split, name, Some(1), mine)?;
        let members: Vec<usize> =
            (0..colors.len()).filter(|&rank| colors[rank].numbers::<u64>() == [color]).collect();
        Ok(Communicator::new(self.shared.transport.among(&call, &members), self.shared.options))
    }

    fn exchange<T: Number>(
        &self,
        collective: Collective,
        name: &str,
        elements: Option<usize>,
        mine: Message,
    ) -> Result<Vec<Message>> {
        self.exchange_as::<T>(collective, name, elements, mine).map(|(_, messages)| messages)
    }

    /// What all ranks gave, in their order, and the call that it was.
    fn exchange_as<T: Number>(
        &self,
        collective: Collective,
        name: &str,
        elements: Option<usize>,
        mine: Message,
    ) -> Result<(Call, Vec<Message>)> {
        let mut traffic = self.shared.traffic.lock().unwrap_or_else(PoisonError::into_inner);
        traffic.calls += 1;
        let (name, number) = (name.to_owned(), traffic.calls);
        let call = Call { collective, name, number, dtype: T::DTYPE, elements };
        let (bytes, start) = (mine.bytes() as u64, Instant::now());
        let result = self.shared.transport.exchange(&call, mine, self.shared.options.timeout);
        traffic.bytes += if self.world_size() > 1 { bytes } else { 0 };
        traffic.seconds += start.elapsed().as_secs_f64();
        Ok((call, result?))
    }
}

impl std::fmt::Debug for Communicator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Communicator(rank {} of {})", self.rank(), self.world_size())
    }
}
