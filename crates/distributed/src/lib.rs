//! Collectives between the ranks of a training run.
//!
//! A *rank* is one of several workers that run the same program on parts of the data. They meet in collectives, which every rank
//! of a [`Communicator`] calls in the same order: [`Communicator::all_reduce`], [`Communicator::all_gather`],
//! [`Communicator::broadcast`], [`Communicator::barrier`]. Each call carries a name, a number, a type and a size. If ranks
//! disagree, or if one has ended or does not come in time, all of them get an error that names both sides, and no rank hangs.
//!
//! Sums are taken in the order of the ranks, so they have the same bits on every rank and in every run.
//!
//! Ranks are threads ([`run_threads`]), or processes that `mpirun` has started (`mpi::world`, with the feature `mpi`).
//!
//! ```
//! use convoke_distributed::{Options, run_threads};
//!
//! let sums = run_threads(3, &Options::default(), |communicator| {
//!     let mut values = [communicator.rank() as f64, 1.0];
//!     communicator.all_reduce("example", &mut values)?;
//!     Ok::<_, convoke_distributed::Error>(values)
//! })?;
//! assert!(sums.into_iter().all(|sum| sum == Ok([3.0, 3.0])));
//! # Ok::<(), convoke_distributed::Error>(())
//! ```

mod buffers;
mod call;
mod communicator;
mod error;
mod message;
#[cfg(feature = "mpi")]
pub mod mpi;
mod sync;
mod threads;

pub use call::{Call, Collective};
pub use communicator::{Communicator, Options, Traffic};
pub use error::{Error, Result};
pub use message::Number;
pub use threads::{run_threads, threads};
