//! The program: the commands of [`convoke::cli`] with the built-in models and data sets.

use std::process::ExitCode;

use convoke::cli;
use convoke::kernels::backstop::Backstop;

#[global_allocator]
static ALLOCATOR: Backstop = Backstop::new(cli::out_of_memory);

fn main() -> ExitCode {
    cli::main(cli::Registry::builtin())
}
