//! The program: `convoke train`, `compare`, `bench`, `tune`, `cache`, `info`.

mod cli;

use std::process::ExitCode;

fn main() -> ExitCode {
    cli::main()
}
