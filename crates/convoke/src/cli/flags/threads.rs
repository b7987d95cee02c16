//! `--threads`: how many threads kernels get. `CONVOKE_ISA`: the instruction set that they use, for comparisons.

use crate::cli::console::Console;
use crate::cli::failure::{Failure, Result};
use crate::{Cpu, Isa};

/// Warns if kernels will have more threads than there are processors for them, in `ranks` ranks of this process.
pub(crate) fn warn(console: &Console, threads: Option<u16>, ranks: usize) {
    let processors = std::thread::available_parallelism().map_or(usize::MAX, usize::from);
    if let Some(text) = too_many(threads.map(usize::from), ranks, processors) {
        console.line(&format!("warning: {text}"));
    }
}

/// The warning about this number of threads for kernels, if there is one.
fn too_many(threads: Option<usize>, ranks: usize, processors: usize) -> Option<String> {
    let there = match processors {
        1 => "there is 1 processor".to_owned(),
        _ => format!("there are {processors} processors"),
    };
    let there = format!("{there} for this process, so they will wait for each other");
    match threads {
        // Each rank takes at least one thread.
        threads if ranks > threads.unwrap_or(processors) && ranks > processors => {
            Some(format!("--ranks {ranks}: each takes a thread, and {there}"))
        }
        Some(threads) if threads > processors => Some(format!("--threads {threads}: {there}")),
        Some(threads) if ranks > threads => Some(format!(
            "--threads {threads} is less than --ranks {ranks}: each rank takes a thread, {ranks} in all"
        )),
        _ => None,
    }
}

/// A rank's share of `--threads`, or of all of this machine's threads if the flag is not given.
pub(crate) fn cpu(threads: Option<u16>, ranks: usize) -> Result<Cpu> {
    let all = || std::thread::available_parallelism().map_or(1, |count| count.get().min(1024));
    let cpu = Cpu::new((threads.map_or_else(all, usize::from) / ranks).max(1))?;
    match std::env::var("CONVOKE_ISA") {
        Ok(name) if !name.is_empty() => Ok(cpu.with_isa(isa(&name)?)?),
        _ => Ok(cpu),
    }
}

/// The instruction set of a name, in whatever case and with or without its dash.
fn isa(name: &str) -> Result<Isa> {
    let plain = |name: &str| name.replace('-', "").to_lowercase();
    Isa::ALL.into_iter().find(|isa| plain(&isa.to_string()) == plain(name)).ok_or_else(|| {
        let all = Isa::ALL.map(|isa| plain(&isa.to_string())).join(", ");
        Failure::Usage(format!("CONVOKE_ISA is {name:?}: it is one of {all}"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instruction_sets_have_names() {
        for (name, expected) in [("avx2", Isa::AVX2), ("AVX-512", Isa::AVX512), ("portable", Isa::PORTABLE)] {
            assert_eq!(isa(name).unwrap_or_else(|_| panic!("{name} is a name")), expected);
        }
        assert!(isa("avx3").is_err());
    }

    #[test]
    fn threads_beyond_the_processors_are_told() {
        let told = |threads, ranks, processors| too_many(threads, ranks, processors).unwrap_or_default();
        for (threads, ranks, processors) in
            [(None, 1, 1), (None, 1, 8), (Some(8), 1, 8), (Some(1), 1, 8), (None, 8, 8), (Some(4), 4, 8)]
        {
            assert_eq!(told(threads, ranks, processors), "", "{threads:?} {ranks} {processors}");
        }
        for (threads, ranks, processors, expected) in [
            (Some(999), 1, 2, "--threads 999: there are 2 processors"),
            (Some(2), 1, 1, "--threads 2: there is 1 processor "),
            (Some(9), 3, 8, "--threads 9: there are 8 processors"),
            (None, 9, 8, "--ranks 9: each takes a thread, and there are 8 processors"),
            (Some(2), 9, 8, "--ranks 9: each takes a thread, and there are 8 processors"),
            (Some(2), 3, 8, "--threads 2 is less than --ranks 3"),
        ] {
            let found = told(threads, ranks, processors);
            assert!(found.starts_with(expected), "{found}");
        }
    }
}
