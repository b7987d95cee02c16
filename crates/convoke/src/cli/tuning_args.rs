//! The flags of `bench`, `tune` and `cache`, documented where they are defined.

use std::path::PathBuf;
use std::time::Duration;

use crate::conv::{Accuracy, Pass};
use crate::nn::models::ModelSpec;
use crate::tune::TunerOptions;
use crate::{Cpu, DType, MemoryFormat};
use bytesize::ByteSize;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args as ClapArgs, Subcommand, ValueEnum, value_parser};

use super::Result;
use super::args::{cpu, positive};
use super::console::Console;
use super::registry::model_parser;
use super::tuning::Effort;

#[derive(ClapArgs)]
pub(crate) struct BenchArgs {
    #[command(flatten)]
    pub(crate) problems: ProblemArgs,

    #[command(flatten)]
    pub(crate) candidates: CandidateArgs,

    /// How thoroughly candidates are timed; `measure` drops slow ones early.
    #[arg(long, value_parser = measured(), default_value = "exhaustive", help_heading = "Measuring")]
    pub(crate) effort: Effort,

    /// Time for one pass of one problem.
    #[arg(long, value_name = "SECONDS", default_value = "2", value_parser = seconds, help_heading = "Measuring")]
    pub(crate) budget: Duration,

    /// Also show which algorithms were not timed, and why.
    #[arg(long, short, help_heading = "Output")]
    pub(crate) verbose: bool,

    /// Write a page with a chart for each problem and pass, as one self-contained file.
    #[arg(long, value_name = "FILE.html", help_heading = "Output")]
    pub(crate) report: Option<PathBuf>,

    /// Write the results as JSON; `-` is standard output, and then nothing else goes there.
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    pub(crate) json: Option<PathBuf>,
}

#[derive(ClapArgs)]
pub(crate) struct BenchNormArgs {
    /// Shapes, N x C x ... [default: four of common networks].
    #[arg(value_name = "SHAPE", default_values = ["256x32x26x26", "64x64x56x56", "64x256x14x14", "64x512x7x7"])]
    pub(crate) shapes: Vec<String>,

    /// Memory formats of the tensors.
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = [FormatName::Nhwc, FormatName::Nchw])]
    pub(crate) format: Vec<FormatName>,

    /// Include a ReLU in the same operation.
    #[arg(long)]
    pub(crate) relu: bool,

    /// Time for one shape in one format.
    #[arg(long, value_name = "SECONDS", default_value = "0.5", value_parser = positive)]
    pub(crate) budget: f64,

    /// Threads that kernels use [default: all of this machine's]. If there are more than processors, they wait for each other.
    #[arg(long, value_name = "N", value_parser = value_parser!(u16).range(1..=1024))]
    pub(crate) threads: Option<u16>,

    /// Write the results as JSON; `-` is standard output, and then nothing else goes there.
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
}

#[derive(ClapArgs)]
pub(crate) struct TuneArgs {
    #[command(flatten)]
    pub(crate) problems: ProblemArgs,

    /// Tune the convolutions of a training step of this model.
    #[arg(long, value_parser = model_parser(), conflicts_with_all = ["format", "dtype"], help_heading = "Problems")]
    pub(crate) model: Option<ModelSpec>,

    /// Images a step of --model.
    #[arg(
        long,
        value_name = "N",
        default_value_t = 128,
        value_parser = value_parser!(u32).range(1..),
        requires = "model",
        help_heading = "Problems"
    )]
    pub(crate) batch_size: u32,

    #[command(flatten)]
    pub(crate) candidates: CandidateArgs,

    /// How algorithms are chosen: by an estimate that is not stored, by timing with slow candidates dropped early, or by timing
    /// all.
    #[arg(long, value_enum, default_value_t = Effort::Measure, help_heading = "Measuring")]
    pub(crate) effort: Effort,

    /// Time for all problems together; what is not reached is left for the next run. One pass of one problem takes at most 1
    /// second, or 2 with `--effort exhaustive`.
    #[arg(long, value_name = "SECONDS", value_parser = seconds, help_heading = "Measuring")]
    pub(crate) budget: Option<Duration>,

    /// Measure again even if a result is stored.
    #[arg(long, help_heading = "Measuring")]
    pub(crate) again: bool,

    /// Folder in which results are kept [default: see `convoke cache path`].
    #[arg(long, value_name = "DIR", help_heading = "Output")]
    pub(crate) cache: Option<PathBuf>,

    /// Show each candidate with its time, or why it has none.
    #[arg(long, short, help_heading = "Output")]
    pub(crate) verbose: bool,

    /// Write the results as JSON, as `convoke bench` does; `-` is standard output, and then nothing else goes there.
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    pub(crate) json: Option<PathBuf>,
}

/// Which convolutions to take.
#[derive(ClapArgs)]
pub(crate) struct ProblemArgs {
    /// Convolutions, in benchdnn's notation (`mb32ic64ih56oc64kh3ph1`) or as `i128x36x12,k64x6x3,b256`.
    #[arg(value_name = "PROBLEM")]
    pub(crate) problems: Vec<String>,

    /// File with one problem per line, `#` starts a comment; may be given several times.
    #[arg(long, value_name = "FILE", help_heading = "Problems")]
    pub(crate) suite: Vec<PathBuf>,

    /// Passes of a training step [default: all].
    #[arg(long, value_enum, value_name = "PASS", value_delimiter = ',', help_heading = "Problems")]
    pub(crate) pass: Vec<PassName>,

    /// Memory format of the tensors; nhwc (channels-last) is what training on CPUs should use.
    #[arg(long, value_enum, default_value_t = FormatName::Nhwc, help_heading = "Problems")]
    pub(crate) format: FormatName,

    /// Type of the elements.
    #[arg(long, value_enum, default_value_t = DTypeName::F32, help_heading = "Problems")]
    pub(crate) dtype: DTypeName,
}

/// Which algorithms may be chosen, and how many threads they have.
#[derive(ClapArgs)]
pub(crate) struct CandidateArgs {
    /// Only these algorithms; `NAME*` stands for all names that begin with `NAME`.
    #[arg(long, value_name = "NAMES", value_delimiter = ',', help_heading = "Candidates")]
    pub(crate) only: Vec<String>,

    /// All algorithms but these; `NAME*` stands for all names that begin with `NAME`.
    #[arg(long, value_name = "NAMES", value_delimiter = ',', help_heading = "Candidates")]
    pub(crate) skip: Vec<String>,

    /// The least accurate class of algorithms that may be used: plain sums of products (strict), also transforms whose errors are
    /// of the same size (standard), also transforms whose errors are some ten times larger (relaxed).
    #[arg(long, value_enum, default_value_t = AccuracyName::Standard, help_heading = "Candidates")]
    pub(crate) accuracy: AccuracyName,

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

#[derive(ClapArgs)]
pub(crate) struct CacheArgs {
    /// The folder of the cache [default: see `convoke cache path`].
    #[arg(long, value_name = "DIR", global = true)]
    pub(crate) cache: Option<PathBuf>,

    #[command(subcommand)]
    pub(crate) command: CacheCommand,
}

#[derive(Subcommand)]
pub(crate) enum CacheCommand {
    /// Show where results are kept.
    Path,
    /// Show every result, one per line.
    List,
    /// Explain the choice for a problem: every candidate's times, and why the winner won.
    Show {
        /// The convolution, in either notation.
        problem: String,
        /// Passes to show [default: all].
        #[arg(long, value_enum, value_name = "PASS", value_delimiter = ',')]
        pass: Vec<PassName>,
    },
    /// Read every result, and say which are damaged (exit code 1) or out of date.
    Verify,
    /// Remove results that are damaged, out of date, or of another version.
    Prune {
        /// Remove every result.
        #[arg(long)]
        all: bool,
        /// Also remove results that were written more than this many days ago.
        #[arg(long, value_name = "DAYS")]
        older_than: Option<u32>,
    },
    /// Write every result to one file, for `import` elsewhere.
    Export {
        /// The file.
        file: PathBuf,
    },
    /// Add the results of an exported file that are not here yet.
    Import {
        /// The file.
        file: PathBuf,
    },
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum PassName {
    Fwd,
    BwdData,
    BwdWeights,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum FormatName {
    Nchw,
    Nhwc,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum DTypeName {
    F32,
    F64,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum AccuracyName {
    Strict,
    Standard,
    Relaxed,
}

impl ProblemArgs {
    pub(crate) fn format(&self) -> MemoryFormat {
        match self.format {
            FormatName::Nchw => MemoryFormat::Contiguous,
            FormatName::Nhwc => MemoryFormat::ChannelsLast,
        }
    }

    pub(crate) fn dtype(&self) -> DType {
        match self.dtype {
            DTypeName::F32 => DType::F32,
            DTypeName::F64 => DType::F64,
        }
    }
}

impl CandidateArgs {
    pub(crate) fn cpu(&self) -> Result<Cpu> {
        cpu(self.threads, 1)
    }

    pub(crate) fn warn_of_threads(&self, console: &Console) {
        super::args::warn_of_threads(console, self.threads, 1);
    }

    /// The tuner options that the flags ask for, without a cache.
    pub(crate) fn options(&self, effort: Effort) -> TunerOptions {
        TunerOptions {
            effort: effort.into(),
            accuracy: match self.accuracy {
                AccuracyName::Strict => Accuracy::Strict,
                AccuracyName::Standard => Accuracy::Standard,
                AccuracyName::Relaxed => Accuracy::Relaxed,
            },
            deterministic: self.deterministic,
            workspace_limit: usize::try_from(self.workspace_limit.as_u64()).unwrap_or(usize::MAX),
            only: self.only.clone(),
            skip: self.skip.clone(),
            ..TunerOptions::default()
        }
    }
}

/// The passes that were asked for, in the order of a training step; all if none was named.
pub(crate) fn passes(names: &[PassName]) -> Vec<Pass> {
    let asked = |pass: &Pass| {
        let name = match pass {
            Pass::Forward => PassName::Fwd,
            Pass::BackwardData => PassName::BwdData,
            Pass::BackwardWeights => PassName::BwdWeights,
        };
        names.is_empty() || names.contains(&name)
    };
    Pass::ALL.into_iter().filter(asked).collect()
}

/// Parses the efforts that time algorithms.
fn measured() -> impl TypedValueParser<Value = Effort> {
    PossibleValuesParser::new(["measure", "exhaustive"]).map(|name| match name.as_str() {
        "measure" => Effort::Measure,
        _ => Effort::Exhaustive,
    })
}

fn seconds(text: &str) -> std::result::Result<Duration, String> {
    Duration::try_from_secs_f64(positive(text)?).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passes_come_in_the_order_of_a_step() {
        assert_eq!(passes(&[]), Pass::ALL);
        assert_eq!(passes(&[PassName::BwdWeights, PassName::Fwd]), [Pass::Forward, Pass::BackwardWeights]);
    }
}
