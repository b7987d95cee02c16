//! The flags, documented where they are defined.

use std::path::PathBuf;

use crate::Cpu;
use crate::nn::Rule;
use crate::nn::models::ModelSpec;
use crate::nn::modules::ConvBnMode;
use crate::nn::objective::Objective;
use clap::{Args as ClapArgs, Parser, Subcommand, ValueEnum, value_parser};

use super::memory_args::MemoryArgs;
use super::plan::PlanArgs;
use super::ranks::RankArgs;
use super::registry::{Data, data_parser, model, model_parser};
use super::tuning::TuningArgs;
use super::tuning_args::{BenchArgs, BenchNormArgs, CacheArgs, TuneArgs};

/// Train convolutional networks on CPUs, with fused convolution + batch norm that needs a fraction of the memory.
#[derive(Parser)]
#[command(version, max_term_width = 110, subcommand_required = true, arg_required_else_help = true)]
pub(crate) struct Args {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Subcommand)]
pub(crate) enum Command {
    /// Train a model, and report its accuracy, speed and memory.
    ///
    /// Without flags: one epoch of the model mnist-cnn, fused, on MNIST if it is there, else on `digits`, a data set
    /// of drawn digits that is generated on the spot. Nothing is downloaded without --download.
    #[command(after_help = "Examples:\n  \
        convoke train\n  \
        convoke train --data mnist --download --epochs 5 --checkpoint runs/mnist\n  \
        convoke train --data mnist --epochs 10 --checkpoint runs/mnist --resume\n  \
        convoke train --ranks 2 --sync-bn --batch-size 256\n  \
        convoke train --data camvid --data-dir camvid --batch-size 8 --optimizer adamw --epochs 10\n  \
        convoke train --data cifar10 --download --optimizer sgd --lr 0.1 --weight-decay 1e-4 --epochs 10\n  \
        convoke train --data random --model resnet50 --batch-size 32 --steps 8\n  \
        convoke train --steps 50 --json - --report report.html")]
    Train(TrainArgs),
    /// Train the same model twice, with separate and with fused Conv+BN, and compare memory, speed and accuracy.
    ///
    /// Both start from the same values and see the same batches. Their steps alternate, so that changes in the machine's speed
    /// affect both alike.
    #[command(after_help = "Examples:\n  \
        convoke compare --steps 20 --batch-size 256\n  \
        convoke compare --data mnist --batch-size 2048 --report compare.html")]
    Compare(RunArgs),
    /// Time every algorithm on convolutions, and show which is fastest.
    ///
    /// Measures afresh and stores nothing. Times are lower quartiles, and choices are made by them: of the algorithms within 3 %
    /// of the fastest, the one with the least workspace is chosen. GFLOP/s count the operations of direct convolution, so an
    /// algorithm that needs fewer (Winograd, FFT) may exceed the machine's peak; % of peak counts the operations that it really
    /// does. Each result is checked against a plain reference.
    #[command(after_help = "Examples:\n  \
        convoke bench mb16ic64ih56oc64kh3ph1\n  \
        convoke bench i128x36x12,k64x6x3,b256 --pass fwd -v\n  \
        convoke bench --suite resnet50.txt --threads 1 --report bench.html --json bench.json\n  \
        convoke bench mb1ic3ih224oc64kh7sh2ph3 --only 'im2col*,winograd*'")]
    Bench(BenchArgs),
    /// Time batch norm's training passes, and compare them with the speed of copying memory.
    ///
    /// GB/s count what each direction must move: forward reads the input twice and writes the output, backward reads input and
    /// gradient twice and writes a gradient. Tensors that fit the caches may be faster than copying memory.
    #[command(after_help = "Examples:\n  \
        convoke bench-norm\n  \
        convoke bench-norm 64x64x56x56 --relu --format nhwc --threads 1\n  \
        convoke bench-norm 32x128 32x64x8x28x28 --json -")]
    BenchNorm(BenchNormArgs),
    /// Measure which algorithm is fastest for convolutions, and store the results for later runs.
    ///
    /// Results that are stored and up to date are not measured again.
    #[command(after_help = "Examples:\n  \
        convoke tune --model mnist-cnn --batch-size 128\n  \
        convoke tune --suite resnet50.txt --budget 60\n  \
        convoke tune mb16ic64ih56oc64kh3ph1 --effort exhaustive --again -v")]
    Tune(TuneArgs),
    /// Find what each block of a model should keep for backward, and how much time it costs to save memory.
    ///
    /// A block of convolution and batch norm can keep its tensors, or recompute them in backward: by normalising again, or by
    /// convolving again, whole or tile by tile. Times are measured; bytes are exact. Gradients are the same to the last bit,
    /// unless --inexact-memory is given.
    #[command(after_help = "Examples:\n  \
        convoke plan --model mnist-cnn --batch-size 2048 --memory-budget 650MB\n  \
        convoke plan --model resnet50 --batch-size 16 --curve --steps 5 --report plan.html\n  \
        convoke plan --model resnet20 --memory-budget 200MB --json plan.json\n  \
        convoke train --data cifar10 --memory-plan plan.json")]
    Plan(PlanArgs),
    /// Manage the stored tuning results: list, explain, check, remove, copy.
    #[command(after_help = "Examples:\n  \
        convoke cache list\n  \
        convoke cache show mb16ic64ih56oc64kh3ph1 --pass fwd\n  \
        convoke cache export tuning.json\n  \
        convoke cache prune --older-than 365")]
    Cache(CacheArgs),
    /// Show what this machine offers: CPU, instruction sets, threads, where data lies.
    Info,
}

#[derive(ClapArgs)]
pub(crate) struct TrainArgs {
    #[command(flatten)]
    pub(crate) run: RunArgs,

    /// How convolution + batch norm blocks run: `fused` keeps one tensor a block for backward (two with a residual or a pool) and
    /// recomputes the rest; `separate` keeps a tensor for every layer. The results are the same.
    #[arg(long, value_enum, default_value_t = ConvBn::Fused, help_heading = "Model")]
    pub(crate) conv_bn: ConvBn,

    /// Show where the time of a step goes and how near it is to the machine's limits, and write a trace: open it in
    /// ui.perfetto.dev or chrome://tracing. The first step, which measures algorithms, is in the trace but not in the table.
    #[arg(long, value_name = "FILE.json", help_heading = "Output")]
    pub(crate) profile: Option<PathBuf>,
}

#[derive(ClapArgs)]
pub(crate) struct RunArgs {
    /// What to train on. `auto` is MNIST if its files are there, else `digits`. The model mnist-cnn takes mnist and digits,
    /// segnet takes camvid, resnet50 takes cifar10, resnet20 takes all but camvid; random fits every model.
    #[arg(long, value_parser = data_parser(), default_value = "auto", help_heading = "Data")]
    pub(crate) data: Data,

    /// Folder with the data set's files [default: see `convoke info`].
    #[arg(long, value_name = "DIR", help_heading = "Data")]
    pub(crate) data_dir: Option<PathBuf>,

    /// Fetch the data set's files if they are missing (MNIST: 11 MB, CIFAR-10: 170 MB; checked by SHA-256; uses HTTPS_PROXY).
    #[arg(long, help_heading = "Data")]
    pub(crate) download: bool,

    /// How training images are varied at random; seed, epoch and image decide it.
    #[arg(long, value_enum, default_value_t = Augment::Auto, help_heading = "Data")]
    pub(crate) augment: Augment,

    /// Threads that load images ahead of the steps, for data sets that are not held in memory [default: one for each of
    /// --threads, up to 4]. Their number changes only the speed.
    #[arg(long, value_name = "N", value_parser = value_parser!(u16).range(0..=256), help_heading = "Data")]
    pub(crate) workers: Option<u16>,

    /// The model [default: segnet for camvid, resnet20 for cifar10, else mnist-cnn].
    #[arg(long, value_parser = model_parser(), help_heading = "Model")]
    pub(crate) model: Option<ModelSpec>,

    /// Times to go through the training images [default: 1, or what --steps needs].
    #[arg(long, value_name = "N", value_parser = value_parser!(u32).range(1..=1_000_000), help_heading = "Training")]
    pub(crate) epochs: Option<u32>,

    /// Stop after this many steps, even within an epoch.
    #[arg(long, value_name = "N", value_parser = value_parser!(u64).range(1..), help_heading = "Training")]
    pub(crate) steps: Option<u64>,

    /// Images a step, shared among the ranks; the last step of an epoch takes what is left.
    #[arg(
        long,
        value_name = "N",
        default_value_t = 128,
        value_parser = value_parser!(u32).range(1..),
        help_heading = "Training"
    )]
    pub(crate) batch_size: u32,

    /// The optimizer, which updates parameters by their gradients.
    #[arg(long, value_enum, default_value_t = OptimizerName::Adadelta, help_heading = "Training")]
    pub(crate) optimizer: OptimizerName,

    /// Learning rate of the first epoch [default: adadelta 1, sgd 0.01, adamw 0.001].
    #[arg(long, value_name = "X", value_parser = positive, help_heading = "Training")]
    pub(crate) lr: Option<f64>,

    /// What the learning rate is multiplied by after each epoch.
    #[arg(long, value_name = "X", default_value_t = 0.7, value_parser = positive, help_heading = "Training")]
    pub(crate) lr_gamma: f64,

    /// Momentum of sgd.
    #[arg(long, value_name = "X", default_value_t = 0.9, value_parser = not_negative, help_heading = "Training")]
    pub(crate) momentum: f64,

    /// L2 penalty of sgd and adadelta, decoupled decay of adamw [default: adamw 0.01, others 0].
    #[arg(long, value_name = "X", value_parser = not_negative, help_heading = "Training")]
    pub(crate) weight_decay: Option<f64>,

    /// What part of each label is spread over all classes: 0 to 1.
    #[arg(long, value_name = "X", default_value_t = 0.0, value_parser = not_negative, help_heading = "Training")]
    pub(crate) label_smoothing: f64,

    /// Seed of starting values, data order, dropout, and of generated data sets.
    #[arg(long, value_name = "N", default_value_t = 1, help_heading = "Training")]
    pub(crate) seed: u64,

    /// Threads that kernels use, shared among the ranks of a process [default: all of this machine's]. If there are more threads
    /// than processors, they wait for each other.
    #[arg(long, value_name = "N", value_parser = value_parser!(u16).range(1..=1024), help_heading = "Training")]
    pub(crate) threads: Option<u16>,

    /// Go on when the loss is NaN or infinite, instead of stopping with an error that names the step.
    #[arg(long, help_heading = "Training")]
    pub(crate) continue_on_nan: bool,

    #[command(flatten)]
    pub(crate) ranks: RankArgs,

    #[command(flatten)]
    pub(crate) memory: MemoryArgs,

    #[command(flatten)]
    pub(crate) tuning: TuningArgs,

    /// Save model, optimizer and position here after each epoch, after the last step, and on Ctrl-C.
    #[arg(long, value_name = "DIR", help_heading = "Output")]
    pub(crate) checkpoint: Option<PathBuf>,

    /// Continue from the newest checkpoint in --checkpoint; the losses are, bit for bit, those of an uninterrupted run.
    #[arg(long, requires = "checkpoint", help_heading = "Output")]
    pub(crate) resume: bool,

    /// Write a page with loss curves and memory over a step, as one self-contained file.
    #[arg(long, value_name = "FILE.html", help_heading = "Output")]
    pub(crate) report: Option<PathBuf>,

    /// Write the results as JSON; `-` is standard output, and then nothing else goes there.
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    pub(crate) json: Option<PathBuf>,
}

impl RunArgs {
    pub(crate) fn model(&self) -> ModelSpec {
        let usual = || match self.data {
            Data::Named(spec) => model(spec.model().unwrap_or("mnist-cnn")),
            Data::Auto | Data::Random => model("mnist-cnn"),
        };
        self.model.clone().unwrap_or_else(usual)
    }

    /// The model's own objective, with smoothed labels if that is asked for.
    pub(crate) fn objective(&self) -> super::Result<Objective> {
        let own = self.model().objective();
        match self.label_smoothing {
            0.0 => Ok(own),
            smoothing => own
                .with_label_smoothing(smoothing)
                .map_err(|error| super::Failure::Usage(format!("--label-smoothing: {error}"))),
        }
    }

    pub(crate) fn rule(&self) -> Rule {
        let mut rule = rule(self.optimizer, self.lr);
        let weight_decay = match &mut rule {
            Rule::Adadelta(rule) => &mut rule.weight_decay,
            Rule::Sgd(rule) => {
                rule.momentum = self.momentum;
                &mut rule.weight_decay
            }
            Rule::AdamW(rule) => &mut rule.weight_decay,
        };
        *weight_decay = self.weight_decay.unwrap_or(*weight_decay);
        rule
    }
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Augment {
    /// Camvid: random parts of 96 x 128 pixels, half of them mirrored. Cifar10: images padded with 4 pixels of zeros on each
    /// side, then random parts of 32 x 32 pixels, half of them mirrored. Others: images as they are.
    Auto,
    /// Images as they are.
    None,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ConvBn {
    Fused,
    Separate,
}

impl From<ConvBn> for ConvBnMode {
    fn from(choice: ConvBn) -> ConvBnMode {
        match choice {
            ConvBn::Fused => ConvBnMode::Fused,
            ConvBn::Separate => ConvBnMode::Separate,
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum OptimizerName {
    Adadelta,
    Sgd,
    Adamw,
}

/// The rule of an optimizer, with this learning rate or its default one; all else is as without more flags.
pub(crate) fn rule(optimizer: OptimizerName, learning_rate: Option<f64>) -> Rule {
    match optimizer {
        OptimizerName::Adadelta => Rule::adadelta(learning_rate.unwrap_or(1.0)),
        OptimizerName::Sgd => Rule::sgd(learning_rate.unwrap_or(0.01)),
        OptimizerName::Adamw => Rule::adamw(learning_rate.unwrap_or(0.001)),
    }
}

/// The name of a flag's value on the command line.
pub(crate) fn name(value: impl ValueEnum) -> String {
    value.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
}

/// Warns if kernels will have more threads than there are processors for them, in `ranks` ranks of this process.
pub(crate) fn warn_of_threads(console: &super::console::Console, threads: Option<u16>, ranks: usize) {
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
pub(crate) fn cpu(threads: Option<u16>, ranks: usize) -> super::Result<Cpu> {
    let all = || std::thread::available_parallelism().map_or(1, |count| count.get().min(1024));
    Ok(Cpu::new((threads.map_or_else(all, usize::from) / ranks).max(1))?)
}

fn number(text: &str) -> Result<f64, String> {
    text.parse().ok().filter(|value: &f64| value.is_finite()).ok_or_else(|| "expected a number".into())
}

pub(crate) fn positive(text: &str) -> Result<f64, String> {
    number(text).and_then(|value| if value > 0.0 { Ok(value) } else { Err("must be above 0".into()) })
}

pub(crate) fn not_negative(text: &str) -> Result<f64, String> {
    number(text).and_then(|value| if value >= 0.0 { Ok(value) } else { Err("must not be negative".into()) })
}

#[cfg(test)]
mod tests {
    use super::*;

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

    #[test]
    fn flags_are_consistent() {
        <Args as clap::CommandFactory>::command().debug_assert();
    }
}
