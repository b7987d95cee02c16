//! The program: `convoke train`, `compare`, `info`.

mod cli;

use std::process::ExitCode;

fn main() -> ExitCode {
    cli::main()
}
