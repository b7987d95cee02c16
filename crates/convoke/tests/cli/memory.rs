//! Little memory: whatever the limit of the address space, a command succeeds or says that memory is short.

use std::process::{Command, Stdio};
use std::sync::LazyLock;

use sha2::{Digest, Sha256};

use super::program::{Outcome, command, convoke, on_tiny_data, outcome};

/// The program, whose address space is limited to this many kilobytes.
fn within(kilobytes: u64, args: &[&str]) -> Outcome {
    let program = command(args);
    let mut shell = Command::new("sh");
    shell.args(["-c", "ulimit -v \"$0\" && exec \"$@\"", &kilobytes.to_string()]);
    shell.arg(program.get_program()).args(program.get_args()).stdin(Stdio::null());
    shell.envs(program.get_envs().filter_map(|(name, value)| Some((name, value?))));
    outcome(shell)
}

/// The least limit at which the program starts. Limits count address space, of which libraries and the heaps of threads take some,
/// more than is ever written.
static STARTS: LazyLock<u64> = LazyLock::new(|| {
    let mut limits = (1..).map(|step| 4096 * step);
    limits.find(|&limit| within(limit, &["--version"]).code == Some(0)).expect("some limit is enough")
});

/// Runs the command at `limits` limits, spread from one at which the program only just starts to one at which the command
/// succeeds. At each it must succeed, or fail with exit code 1 and a message about memory.
fn sweep(args: &[&str], limits: u64) {
    let starts = *STARTS;
    let enough =
        (0..12).map(|power| starts + (65_536 << power)).find(|&limit| within(limit, args).code == Some(0));
    let enough = enough.expect("some limit is enough");
    let mut failures = 0;
    for index in 0..limits {
        // Odd ones, which no allocation is a multiple of.
        let limit = starts + 1024 + (enough - starts) * index / limits + 12 * index;
        let Outcome { code, stdout, stderr } = within(limit, args);
        let mut errors = stderr.lines().filter(|line| line.starts_with("error: "));
        let says_so = errors.any(|line| {
            line.contains("memory") && (!line.contains("out of memory") || stderr.contains("--batch-size"))
        });
        assert!(
            code == Some(0) || code == Some(1) && says_so,
            "{args:?} within {limit} kB ended with {code:?}:\n{stdout}\n{stderr}"
        );
        assert!(!stderr.contains("panicked"), "{args:?} within {limit} kB: {stderr}");
        failures += usize::from(code == Some(1));
    }
    assert!(failures > 0, "{args:?}: {starts} kB were enough");
}

#[test]
fn training_with_little_memory_succeeds_or_says_so() {
    for flags in [&[][..], &["--ranks", "2", "--sync-bn"], &["--memory-budget", "70MB", "--plan-time", "0"]] {
        let flags = [&["--steps", "2", "--tune-budget", "0.1", "--batch-size", "100"], flags].concat();
        sweep(&on_tiny_data("train", &flags), 12);
    }
}

#[test]
fn comparing_with_little_memory_succeeds_or_says_so() {
    sweep(&on_tiny_data("compare", &["--steps", "2", "--batch-size", "100", "--effort", "heuristic"]), 12);
}

#[test]
fn generated_data_with_little_memory_succeeds_or_says_so() {
    let flags = ["--data", "random", "--steps", "1", "--effort", "heuristic", "--batch-size", "500"];
    sweep(&[&["train"], &flags[..]].concat(), 12);
}

#[test]
fn benchmarks_with_little_memory_succeed_or_say_so() {
    for problem in ["mb8ic16ih56oc32kh3ph1", "i64x64x20,k64x5x1,b32"] {
        for pass in ["fwd", "bwd-data", "bwd-weights"] {
            sweep(&["bench", problem, "--pass", pass, "--budget", "0.01", "--threads", "2"], 8);
        }
    }
    sweep(&["bench-norm", "64x32x28x28", "--budget", "0.01", "--threads", "2"], 12);
}

#[test]
fn tuning_with_little_memory_succeeds_or_says_so() {
    let cache = tempfile::tempdir().expect("a folder");
    let cache = cache.path().to_str().expect("UTF-8");
    sweep(
        &["tune", "mb16ic16ih56oc32kh3ph1", "--again", "--budget", "0.1", "--cache", cache, "--threads", "2"],
        12,
    );
}

#[test]
fn planning_with_little_memory_succeeds_or_says_so() {
    let flags =
        ["--batch-size", "64", "--plan-time", "0", "--effort", "heuristic", "--curve", "--threads", "2"];
    sweep(&[&["plan"], &flags[..]].concat(), 12);
}

/// Twenty times what these files have, where everything in them would take a hundred times as much.
#[test]
fn files_that_swell_when_they_are_parsed_take_little_memory() {
    const LEN: usize = 16 << 20;
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name).to_str().expect("UTF-8").to_owned();
    let enough = *STARTS + ((20 * LEN as u64) >> 10);
    let check = |args: &[&str], file: &str| {
        let refused = within(enough, args);
        refused.check(1, &[file]).unwrap_or_else(|error| panic!("{args:?}: {error}"));
        assert!(!refused.stderr.contains("memory"), "{}", refused.stderr);
    };

    let checkpoint = path("checkpoint");
    let flags = ["--steps", "1", "--effort", "heuristic", "--batch-size", "10", "--checkpoint", &checkpoint];
    convoke(&on_tiny_data("train", &flags)).exits(0);
    let resumed = on_tiny_data("train", &[&flags[..], &["--resume"]].concat());
    let manifest = folder.path().join("checkpoint/step-0000000001/training.json");
    for state in [
        format!("[{}[]]", "[],".repeat(LEN / 3)),
        format!("{{\"losses\": [{}0]}}", "0,".repeat(LEN / 2)),
        format!("{{\"other\": [{}{{}}]}}", "{},".repeat(LEN / 3)),
    ] {
        let (before, after) = (
            "{\n",
            format!("\"format\": \"convoke training checkpoint 2\",\n\"files\": [],\n\"state\": {state}\n}}"),
        );
        let sum: String =
            Sha256::digest(format!("{before}{after}")).iter().map(|byte| format!("{byte:02x}")).collect();
        std::fs::write(&manifest, format!("{before}  \"sha256\": \"{sum}\",\n{after}")).expect("room");
        check(&resumed, "training.json");
    }

    let weights = path("weights.safetensors");
    let with_weights =
        on_tiny_data("train", &["--steps", "1", "--effort", "heuristic", "--weights", &weights]);
    let tensor =
        |index: usize| format!("\"{index}\":{{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[0,4]}},");
    let tensors: String = (0..100_000).map(tensor).collect();
    for header in [
        format!("{{{}}}", tensors.trim_end_matches(',')),
        format!(
            "{{\"a\":{{\"dtype\":\"F32\",\"shape\":[{}0],\"data_offsets\":[0,0]}}}}",
            "0,".repeat(LEN / 2 - 99)
        ),
        " ".repeat(6 * LEN),
    ] {
        let bytes = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes()].concat();
        std::fs::write(&weights, bytes).expect("room");
        check(&with_weights, "weights.safetensors");
    }
}
