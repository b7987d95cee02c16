//! The program: `convoke train`, `compare`, `bench`, `tune`, `cache`, `info`.

mod cli;

use std::process::ExitCode;

use convoke::kernels::backstop::Backstop;

#[global_allocator]
static ALLOCATOR: Backstop = Backstop::new(cli::out_of_memory);

fn main() -> ExitCode {
    cli::main()
}
