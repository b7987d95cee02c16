//! The flags that say which algorithms may be chosen.

use crate::Cpu;
use crate::cli::console::Console;
use crate::cli::failure::Result;
use crate::conv::Accuracy;
use crate::tune::TunerOptions;
use bytesize::ByteSize;
use clap::{Args, value_parser};

use super::threads;
use super::tuning::Effort;
use super::values::accuracy;

/// Which algorithms may be chosen, and how many threads they have.
#[derive(Args)]
pub(crate) struct CandidateArgs {
    /// Only these algorithms; `NAME*` stands for all names that begin with `NAME`.
    #[arg(long, value_name = "NAMES", value_delimiter = ',', help_heading = "Candidates")]
    pub(crate) only: Vec<String>,

    /// All algorithms but these; `NAME*` stands for all names that begin with `NAME`.
    #[arg(long, value_name = "NAMES", value_delimiter = ',', help_heading = "Candidates")]
    pub(crate) skip: Vec<String>,

    /// The least accurate class of algorithms that may be used: plain sums of products (strict), also transforms whose errors are
    /// of the same size (standard), also what has errors some ten times larger (relaxed), also products rounded to bf16 (rounded).
    #[arg(long, value_parser = accuracy(), default_value = "standard", help_heading = "Candidates")]
    pub(crate) accuracy: Accuracy,

    /// Only algorithms that give the same bits each time.
    #[arg(long, help_heading = "Candidates")]
    pub(crate) deterministic: bool,

    /// The most workspace (scratch memory) that an algorithm may need, such as 256MB or 1GiB.
    #[arg(long, value_name = "SIZE", default_value = "1GiB", help_heading = "Candidates")]
    pub(crate) workspace_limit: ByteSize,

    /// Threads that kernels use [default: all of this machine's]. If there are more than processors, they wait for each other.
    #[arg(long, value_name = "N", value_parser = value_parser!(u16).range(1..=1024), help_heading = "Candidates")]
    pub(crate) threads: Option<u16>,
}

impl CandidateArgs {
    pub(crate) fn cpu(&self) -> Result<Cpu> {
        threads::cpu(self.threads, 1)
    }

    pub(crate) fn warn_of_threads(&self, console: &Console) {
        threads::warn(console, self.threads, 1);
    }

    /// The tuner options that the flags ask for, without a cache.
    pub(crate) fn options(&self, effort: Effort) -> TunerOptions {
        TunerOptions {
            effort: effort.into(),
            accuracy: self.accuracy,
            deterministic: self.deterministic,
            workspace_limit: usize::try_from(self.workspace_limit.as_u64()).unwrap_or(usize::MAX),
            only: self.only.clone(),
            skip: self.skip.clone(),
            ..TunerOptions::default()
        }
    }
}
