//! The commands, each with the flags that its own file defines.

use clap::{CommandFactory, Parser, Subcommand};

use super::bench::BenchArgs;
use super::bench_norm::BenchNormArgs;
use super::cache::CacheArgs;
use super::evaluate::EvaluateArgs;
use super::export::ExportArgs;
use super::failure::Result;
use super::flags::run::RunArgs;
use super::info::InfoArgs;
use super::manual::{CompletionsArgs, ManArgs};
use super::plan::PlanArgs;
use super::predict::PredictArgs;
use super::search::SearchArgs;
use super::train::TrainArgs;
use super::tune::TuneArgs;
use super::{
    bench, bench_norm, cache, compare, evaluate, export, info, manual, plan, predict, search, train, tune,
};

/// Train convolutional networks on CPUs, with fused convolution + batch norm that needs a fraction of the memory.
#[derive(Parser)]
#[command(version, max_term_width = 110, subcommand_required = true, arg_required_else_help = true)]
pub(crate) struct Args {
    /// No progress and no notes on standard error; results and errors only.
    #[arg(short, long, global = true)]
    pub(crate) quiet: bool,

    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Subcommand)]
pub(crate) enum Command {
    /// Train a model, and report its accuracy, speed and memory.
    ///
    /// `convoke train photos` trains on a folder of photographs, and keeps the model in `runs/photos-1`. Without DATA: one epoch of the
    /// model mnist-cnn, on MNIST if it is there, else on `digits`, a data set of drawn digits that is generated on the spot. Nothing is
    /// downloaded without --download.
    #[command(after_help = "Examples:\n  \
        convoke train photos\n  \
        convoke train photos --dry-run\n  \
        convoke train photos --epochs 20 --image-size 128\n  \
        convoke train --resume\n  \
        convoke train mnist --download --epochs 5")]
    #[command(after_long_help = "Examples:\n  \
        convoke train photos\n  \
        convoke train photos --dry-run\n  \
        convoke train photos --output runs/small --image-size 128 --batch-size 32 --epochs 10\n  \
        convoke train --resume runs/small --epochs 20\n  \
        convoke train --config runs/small/run.toml --model mobilenet-v2\n  \
        convoke train scenes --batch-size 8 --epochs 10\n  \
        convoke train camvid --data-dir camvid --batch-size 8 --epochs 10\n  \
        convoke train cifar10 --download --optimizer sgd --lr 0.1 --weight-decay 1e-4 --epochs 10\n  \
        convoke train mnist --ranks 2 --sync-bn --batch-size 256\n  \
        convoke train random --model resnet50 --batch-size 32 --steps 8\n  \
        convoke train --steps 50 --json - --report report.html")]
    Train(TrainArgs),
    /// Judge a trained model on labelled images: loss, accuracy, and how it does on each class.
    ///
    /// Images are prepared as in the model's training; its batch norms are joined to its convolutions first.
    #[command(after_help = "Examples:\n  \
        convoke evaluate runs/photos-1 photos\n  \
        convoke evaluate runs/photos-1 other-photos --split all --flip --json results.json\n  \
        convoke evaluate runs/photos-1/last.safetensors photos --split train\n  \
        convoke evaluate runs/photos-1 photos --report page.html --explain\n  \
        convoke evaluate model.onnx photos --data folder")]
    Evaluate(EvaluateArgs),
    /// Show what a trained model finds in images: the most likely classes, or a mask of the class of each pixel.
    #[command(after_help = "Examples:\n  \
        convoke predict runs/photos-1 cat.jpg dog.jpg\n  \
        convoke predict runs/photos-1 holiday/ --top 1 --csv holiday.csv\n  \
        convoke predict runs/photos-1 cat.jpg --explain explained\n  \
        convoke predict runs/scenes-1 street.png --masks masks\n  \
        convoke predict model.onnx cat.jpg --json -")]
    Predict(PredictArgs),
    /// Find the learning rate, augmentation and image size that do best, within a time.
    ///
    /// Many trials are trained for a few epochs, the best third of them for three times as many, and so on until one has all --epochs. What a
    /// flag names is the same in all trials; the rest of the three is searched. Each trial is a run in the folder of the search, which
    /// `evaluate`, `predict`, `export` and `train --resume` take. All flags of `train` that say how to train may be given.
    #[command(after_help = "Examples:\n  \
        convoke search photos\n  \
        convoke search photos --time-limit 1h --trials 27\n  \
        convoke search photos --model mobilenet-v2 --image-size 128\n  \
        convoke search --resume runs/photos-search-1")]
    Search(SearchArgs),
    /// Train the same model twice, with separate and with fused Conv+BN, and compare memory, speed and accuracy.
    ///
    /// Both start from the same values and see the same batches. Their steps alternate, so that changes in the machine's speed
    /// affect both alike. The ratio of times is the median over pairs of steps, after the first, with the range of the medians of
    /// eight groups of consecutive pairs. If that holds 1, or the ratio differs from 1 by less than 5 %, it is "within noise". Without
    /// --steps, further steps are timed after the training, for 20 seconds at most, until the range is narrower than 10 %; they change
    /// no result.
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
    /// convolving again, whole or tile by tile. Times are measured; bytes are exact. Gradients are the same to the last bit.
    #[command(after_help = "Examples:\n  \
        convoke plan --model mnist-cnn --batch-size 2048 --memory-budget 650MB\n  \
        convoke plan --model resnet50 --batch-size 16 --curve --steps 8 --report plan.html\n  \
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
    /// Write a model to a file that other programs read: ONNX, or safetensors by PyTorch's names.
    ///
    /// ONNX files run in onnxruntime and many other programs, and train here again with `--model FILE.onnx`. Batch norms stay,
    /// unless --fold joins them to the convolutions, which makes inference faster.
    #[command(after_help = "Examples:\n  \
        convoke export runs/photos-1 --to photos.onnx\n  \
        convoke export runs/mine --to mine.onnx --fold --opset 13\n  \
        convoke export model.onnx --to weights.safetensors")]
    Export(ExportArgs),
    /// Show what a model consists of, or what this machine offers.
    ///
    /// With MODEL: its layers, shapes, parameters and operations, and which convolutions run fused. Without: CPU, instruction sets,
    /// threads, and where data lies.
    #[command(after_help = "Examples:\n  \
        convoke info\n  \
        convoke info model.onnx --image-size 96x128\n  \
        convoke info resnet20")]
    Info(InfoArgs),
    /// Print what a shell needs to complete commands and flags.
    #[command(after_help = "Examples:\n  \
        convoke completions bash > ~/.local/share/bash-completion/completions/convoke\n  \
        convoke completions zsh > ~/.zfunc/_convoke\n  \
        convoke completions fish > ~/.config/fish/completions/convoke.fish")]
    Completions(CompletionsArgs),
    /// Write manual pages, one for each command.
    #[command(after_help = "Examples:\n  \
        convoke man ~/.local/share/man/man1\n  \
        man convoke-train")]
    Man(ManArgs),
}

/// The flags of `train` that `-h` shows; `--help` shows all.
const SHORT: [&str; 15] = [
    "download",
    "image-size",
    "model",
    "weights",
    "precision",
    "epochs",
    "batch-size",
    "lr",
    "optimizer",
    "time-limit",
    "threads",
    "memory-budget",
    "output",
    "resume",
    "dry-run",
];
/// The commands that users of trained models need, and those that most never need.
const COMMANDS: [(&str, &[&str]); 2] = [
    ("Commands", &["train", "search", "evaluate", "predict", "export", "info"]),
    ("For specialists", &["compare", "plan", "bench", "bench-norm", "tune", "cache", "completions", "man"]),
];

/// The command line: what [`Args`] defines, and what of it is shown where.
pub(crate) fn definition() -> clap::Command {
    let short = |command: clap::Command| {
        command.mut_args(|arg| {
            let is_shown = arg.get_long().is_none_or(|name| SHORT.contains(&name));
            arg.hide_short_help(!is_shown)
        })
    };
    let command = Args::command()
        .mut_subcommand("train", short)
        .mut_subcommand("compare", short)
        .mut_subcommand("search", |command| of_search(short(command)));
    let (header, literal) = (*command.get_styles().get_header(), *command.get_styles().get_literal());
    let line = |name: &&str| {
        let about = command.find_subcommand(name).and_then(clap::Command::get_about);
        format!("  {literal}{name:<13}{literal:#}{}\n", about.map(ToString::to_string).unwrap_or_default())
    };
    let lists = COMMANDS.map(|(title, names)| {
        format!("{header}{title}:{header:#}\n{}", names.iter().map(line).collect::<String>())
    });
    let template = format!(
        "{{about-with-newline}}\n{{usage-heading}} {{usage}}\n\n{}\n{header}Options:{header:#}\n{{options}}\n",
        lists.join("\n")
    );
    command.help_template(template)
}

/// The flags that `search` shares with `train`, as it takes them.
fn of_search(command: clap::Command) -> clap::Command {
    let resume = |arg: clap::Arg| {
        let help = "Go on with the search in this folder";
        arg.value_name("DIR")
            .help(help)
            .long_help(format!("{help}. It knows its flags; --time-limit and --json may be given again"))
    };
    let command = command.mut_arg("trials", |arg| arg.hide_short_help(false)).mut_arg("resume", resume);
    search::UNUSED.iter().fold(command, |command, (id, _)| command.mut_arg(*id, |arg| arg.hide(true)))
}

impl Command {
    /// Runs the command to its end.
    pub(crate) fn run(self) -> Result<()> {
        match self {
            Command::Train(args) => train::run(args),
            Command::Evaluate(args) => evaluate::run(&args),
            Command::Predict(args) => predict::run(&args),
            Command::Search(args) => search::run(args),
            Command::Compare(args) => compare::run(args),
            Command::Bench(args) => bench::run(&args),
            Command::BenchNorm(args) => bench_norm::run(&args),
            Command::Tune(args) => tune::run(&args),
            Command::Plan(args) => plan::run(&args),
            Command::Cache(args) => cache::run(&args),
            Command::Export(args) => export::run(&args),
            Command::Info(args) => info::run(&args),
            Command::Completions(args) => manual::completions(&args, definition()),
            Command::Man(args) => manual::man(&args, definition()),
        }
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn flags_are_consistent() {
        super::definition().debug_assert();
    }
}
