//! The program as a library: write your own `main` with all its commands, and add your own models and data sets.
//!
//! ```no_run
//! use std::process::ExitCode;
//!
//! use convoke::cli::Registry;
//! use convoke::nn::models::ModelSpec;
//! use convoke::nn::modules::{Conv2d, ConvOptions, Flatten, GlobalAvgPool2d, LogSoftmax, Sequential};
//!
//! fn main() -> ExitCode {
//!     let model = ModelSpec::new("one-layer", [1, 28, 28], 10, |init, _| {
//!         Ok(Sequential::new()
//!             .then("conv", Conv2d::new(init, [1, 10], [5, 5], ConvOptions::default(), true)?)
//!             .then("average", GlobalAvgPool2d)
//!             .then("flatten", Flatten)
//!             .then("log_softmax", LogSoftmax))
//!     });
//!     // `my-program train --model one-layer`, `my-program plan --model one-layer` and so on.
//!     convoke::cli::main(Registry::builtin().with_model(model).expect("the name is free"))
//! }
//! ```
//!
//! Only the files of this module print, read the environment or end the process. Exit codes: 0 success, 2 bad usage, 130
//! interrupted, 1 anything else.

mod bench;
mod bench_norm;
mod cache;
mod chart;
mod command;
mod command_line;
mod compare;
mod console;
mod dataset;
mod evaluate;
mod explanation;
mod export;
mod failure;
mod find_lr;
mod fits;
mod flags;
mod in_use;
mod info;
mod json;
mod manual;
mod memory_plan;
mod model_file;
mod model_folder;
mod open_model;
mod output;
mod overview;
mod page;
mod pass_result;
mod places;
mod plan;
mod predict;
mod problems;
mod profile;
mod published;
mod quality;
mod ranks;
mod record;
mod registry;
mod report;
mod run;
mod search;
mod session;
mod settings;
mod statistics;
mod summary;
mod system;
mod tensorboard;
mod text;
mod train;
mod tune;
mod usage;

use std::io::Write;
use std::process::ExitCode;

use crate::kernels::backstop::share_small_memory;

use failure::{Failure, Result};

pub use registry::Registry;

/// Ends the process with a message and exit code 1, because an allocation failed whose caller cannot handle an error.
///
/// Only small allocations end the process this way: there are too many of them to check each. A large allocation that fails is an
/// error that says what it was for. To get this message, a program passes this function to a
/// [`Backstop`](crate::kernels::backstop::Backstop) and makes that its `#[global_allocator]`, as `convoke` does; without it the
/// process aborts.
pub extern "C" fn out_of_memory(bytes: usize) -> ! {
    // Writing this allocates nothing.
    let _ = writeln!(std::io::stderr(), "error: out of memory: {bytes} bytes cannot be had{LESS_MEMORY}");
    std::process::exit(1)
}

/// What to do when memory is short.
const LESS_MEMORY: &str = "\n\nTake less at a time (--batch-size, --image-size, --ranks, --workers; `train` also has --memory-budget), \
                           or allow the process more memory.";

/// How many bytes of the main thread's stack are mapped before anything else happens.
const STACK: usize = 1 << 20;

/// Maps the main thread's stack now. Otherwise it grows as it is used, and if no memory is left for that, the process is killed
/// without a message. Other threads have their whole stack from the start.
fn map_stack() -> Result<()> {
    fn touch(pages: usize) -> u8 {
        let page = std::hint::black_box([pages as u8; 4096]);
        if pages > 0 { touch(pages - 1) ^ page[pages % 4096] } else { page[0] }
    }
    convoke_memory::check(2 * STACK)?;
    std::hint::black_box(touch(STACK / 4096));
    Ok(())
}

/// The whole program: reads the command line and runs its command. The registry holds the models for `--model` and the data sets
/// for `--data`.
///
/// # Panics
/// If it is called twice.
pub fn main(registry: Registry) -> ExitCode {
    share_small_memory();
    registry::set(registry);
    // clap ends the process itself: with 2 for bad usage, 0 for --help and --version.
    let result = map_stack().and_then(|()| {
        let args = command_line::parse(std::env::args_os().collect())?;
        console::set_quiet(args.quiet);
        args.command.run()
    });
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(Failure::Usage(message)) => {
            console::error(&format!("{message}\n\nFor more information, try '--help'."));
            ExitCode::from(2)
        }
        Err(Failure::Run(message) | Failure::OtherRanks(message)) => {
            let advice = if message.contains("out of memory") { LESS_MEMORY } else { "" };
            console::error(&format!("{message}{advice}"));
            ExitCode::from(1)
        }
        Err(Failure::Interrupted(message)) => {
            console::error(&message);
            ExitCode::from(130)
        }
    }
}
