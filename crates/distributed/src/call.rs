//! What a rank says that it does, so that others can see whether they do the same.

use std::fmt::{Display, Formatter, Result};

/// What ranks do together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Collective {
    /// The sum over all ranks, to all of them.
    AllReduce,
    /// What every rank has, to all of them.
    AllGather,
    /// What one rank has, to all of them.
    Broadcast {
        /// That rank.
        root: usize,
    },
    /// Nobody goes on before all have come.
    Barrier,
    /// Smaller communicators.
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
    /// How many numbers, where all ranks must have as many.
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
