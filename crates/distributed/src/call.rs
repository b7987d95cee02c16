//! The description of a call: ranks compare it to check that all of them make the same call.

use std::fmt::{Display, Formatter, Result};

/// What ranks do together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Collective {
    /// All ranks get the sum over all ranks.
    AllReduce,
    /// All ranks get what every rank has.
    AllGather,
    /// All ranks get what one rank has.
    Broadcast {
        /// The rank that the others receive from.
        root: usize,
    },
    /// No rank goes on before all have come.
    Barrier,
    /// The ranks make smaller communicators.
    Split,
}

/// One call of a collective.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Call {
    /// What is done.
    pub collective: Collective,
    /// The caller's name for it: a layer, a direction.
    pub name: String,
    /// How many calls this communicator has seen, this one included.
    pub number: u64,
    /// The type of the numbers.
    pub dtype: &'static str,
    /// How many numbers, if all ranks must have the same count.
    pub elements: Option<usize>,
}

impl Display for Call {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        match self.collective {
            Collective::AllReduce => write!(f, "all_reduce")?,
            Collective::AllGather => write!(f, "all_gather")?,
            Collective::Broadcast { root } => write!(f, "broadcast from rank {root}")?,
            Collective::Barrier => write!(f, "barrier")?,
            Collective::Split => write!(f, "split")?,
        }
        write!(f, " {:?} (call {}", self.name, self.number)?;
        match self.elements {
            Some(elements) => write!(f, ", {elements} x {})", self.dtype),
            None => write!(f, ", {})", self.dtype),
        }
    }
}
