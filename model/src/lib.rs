//! The sources of `kernels/team` and of `convoke-distributed`, compiled with loom's threads, and their models.
//!
//! loom runs a model once for every order of its steps and every value that a load may see, up to a number of preemptions. It
//! fails if accesses race, if an assertion does not hold, or if threads wait for each other or for a lost wake-up: a model ends
//! only when every thread has ended.

#![cfg(test)]
#![allow(dead_code)]

#[path = "../../crates/kernels/src/team/mod.rs"]
mod team;
mod team_model;

// The modules of `convoke-distributed`, under their names there.
#[path = "../../crates/distributed/src/buffers.rs"]
mod buffers;
#[path = "../../crates/distributed/src/call.rs"]
mod call;
#[path = "../../crates/distributed/src/communicator.rs"]
mod communicator;
mod communicator_model;
#[path = "../../crates/distributed/src/error.rs"]
mod error;
#[path = "../../crates/distributed/src/message.rs"]
mod message;
#[path = "../../crates/distributed/src/sync.rs"]
mod sync;
#[path = "../../crates/distributed/src/threads.rs"]
mod threads;

use call::{Call, Collective};
use communicator::{Communicator, Options};
use error::{Error, Result};
use message::Number;

/// How often threads may be preempted (interrupted where they would not wait), in models of two and of three threads. Most errors
/// need one or two preemptions; each more makes a model take about ten times as long. `LOOM_MAX_PREEMPTIONS` overrides these.
const TWO_THREADS: usize = 3;
const THREE_THREADS: usize = 2;

/// Explores `model` with up to `preemptions` preemptions.
fn explore(preemptions: usize, model: impl Fn() + Send + Sync + 'static) {
    let mut explorer = loom::model::Builder::new();
    explorer.preemption_bound = explorer.preemption_bound.or(Some(preemptions));
    explorer.max_branches = 100_000;
    explorer.check(model);
}
