//! Bad usage ends with exit code 2 and a message that names the flag; help explains every flag.

use convoke_testkit::Failures;

use super::program::{contents, convoke, run, text};

/// Flags of `train`, each with words that its explanation must have.
const FLAGS: [(&str, &str); 22] = [
    ("--data <DATA>", "the data set without DATA"),
    ("--data-dir <DIR>", "Folder with the data set's files"),
    ("--download", "Fetch the data set's files"),
    ("--model <MODEL>", "mnist-cnn"),
    ("--conv-bn <CONV_BN>", "keeps one tensor a block"),
    ("--epochs <N>", "[default: 5 to 50 for photographs, else 1]"),
    ("--schedule <SCHEDULE>", "else one-cycle"),
    ("--steps <N>", "Stop after this many steps"),
    ("--batch-size <N>", "Images a step"),
    ("--optimizer <OPTIMIZER>", "[possible values: adadelta, sgd, adamw, adam]"),
    ("--lr <X>", "1 for adadelta, 0.01 for sgd, and 0.001 for adamw and adam"),
    ("--lr-gamma <X>", "after each epoch"),
    ("--momentum <X>", "sgd"),
    ("--weight-decay <X>", "L2 penalty"),
    ("--seed <N>", "Seed of starting values"),
    ("--threads <N>", "all of this machine's"),
    ("--continue-on-nan", "instead of stopping"),
    ("--checkpoint <DIR>", "each epoch, after the last step, and on Ctrl-C"),
    ("--resume", "bit for bit"),
    ("--report <FILE.html>", "loss curves and memory"),
    ("--json <FILE>", "`-` is standard output"),
    ("--help", "Print help"),
];

#[test]
fn bad_usage() {
    let huge = "99999999999999999999999";
    // The arguments after `train`, and what the message must have.
    let cases: &[(&[&str], &[&str])] = &[
        (&["--fly"], &["'--fly'"]),
        (&["extra"], &["no folder is called extra", "digits, mnist"]),
        (
            &["--model", "resnet9"],
            &["resnet9", "--model", "[possible values: mnist-cnn, segnet, resnet20, resnet50, resnet18"],
        ),
        (&["--data", "imagenet"], &["imagenet", "--data", "auto, digits, mnist"]),
        (&["--optimizer", "rmsprop"], &["--optimizer", "adadelta, sgd, adamw, adam"]),
        (&["--conv-bn", "half"], &["--conv-bn", "fused, separate"]),
        (&["--batch-size", "0"], &["--batch-size", "'0'"]),
        (&["--batch-size", "-1"], &["-1"]),
        (&["--batch-size=-1"], &["--batch-size", "'-1'"]),
        (&["--batch-size", huge], &["--batch-size", huge]),
        (&["--batch-size", "1.5"], &["--batch-size", "1.5"]),
        (&["--batch-size", ""], &["--batch-size"]),
        (&["--batch-size"], &["--batch-size"]),
        (&["--epochs", "0"], &["--epochs", "'0'"]),
        (&["--epochs", "1000001"], &["--epochs", "1000000"]),
        (&["--epochs", huge], &["--epochs", huge]),
        (&["--steps", "0"], &["--steps", "'0'"]),
        (&["--lr", "nan"], &["--lr", "'nan'", "expected a number"]),
        (&["--lr", "inf"], &["--lr", "expected a number"]),
        (&["--lr", "abc"], &["--lr", "'abc'", "expected a number"]),
        (&["--lr=-1"], &["--lr", "'-1'", "must be above 0"]),
        (&["--lr", "0"], &["--lr", "must be above 0"]),
        (&["--lr-gamma", "0"], &["--lr-gamma", "must be above 0"]),
        (&["--momentum=-0.5"], &["--momentum", "must not be negative"]),
        (&["--weight-decay", "NaN"], &["--weight-decay", "expected a number"]),
        (&["--seed=-1"], &["--seed", "'-1'"]),
        (&["--seed", "1", "--seed", "2"], &["--seed", "multiple times"]),
        (&["--threads", "0"], &["--threads", "'0'"]),
        (&["--threads", "1025"], &["--threads", "1024"]),
        (&["--resume"], &["--resume", "no run in runs"]),
        (&["--time-limit", "5x"], &["--time-limit", "30m"]),
        (&["--time-limit", "1e9h"], &["--time-limit", "at most 1e9 seconds"]),
        (&["--tune-budget", "1e20"], &["--tune-budget", "at most 1e9 seconds"]),
        (&["--rank-timeout", "0"], &["--rank-timeout", "must be above 0"]),
        (&["--plan-time=-1"], &["--plan-time", "must not be negative"]),
        (&["--patience", "0"], &["--patience", "'0'"]),
        (&["--data", "digits", "--download"], &["--download", "digits is generated"]),
        (&["--data", "digits", "--data-dir", "x"], &["--data-dir", "digits is generated"]),
        (&["--data", "random", "--download"], &["--download", "random is generated"]),
        (&["--data", "random", "--data-dir", "x"], &["--data-dir", "random is generated"]),
    ];
    let mut failures = Failures::new("train with bad usage");
    for (args, needles) in cases {
        let outcome = convoke(&[&["train"], *args].concat());
        failures.check(format!("{args:?}"), outcome.check(2, needles));
        let silent = if outcome.stdout.is_empty() { Ok(()) } else { Err(outcome.stdout) };
        failures.check(format!("standard output of {args:?}"), silent);
    }
    failures.finish();
}

#[test]
fn bad_commands() {
    let mut failures = Failures::new("bad commands");
    let cases: [(&[&str], &[&str]); 6] = [
        (&["bench-norm", "--budget", "1e20"], &["--budget", "at most 1e9 seconds"]),
        (&[], &["Usage: convoke", "train", "compare", "info"]),
        (&["fly"], &["'fly'"]),
        (&["--data", "mnist"], &["'--data'"]),
        (&["info", "extra"], &["MODEL extra", "resnet20"]),
        (&["compare", "--conv-bn", "fused"], &["'--conv-bn'"]),
    ];
    for (args, needles) in cases {
        failures.check(format!("{args:?}"), convoke(args).check(2, needles));
    }
    failures.finish();
}

#[test]
fn batch_larger_than_the_data() {
    let outcome = run("train", &["--batch-size", "111"]);
    outcome.check(2, &["batch size 111", "1 to 110", "mnist"]).unwrap();
    let outcome = convoke(&["compare", "--batch-size", "60001"]);
    outcome.check(2, &["no MNIST in", "digits", "batch size 60001", "1 to 60000"]).unwrap();
}

/// What fits instead is told, in either direction, before anything is read, generated or measured.
#[test]
fn models_and_data_that_do_not_fit() {
    let mut failures = Failures::new("models and data that do not fit");
    let cases: &[(&[&str], &[&str])] = &[
        (
            &["--model", "resnet50"],
            &[
                "resnet50 takes images of 32 x 32",
                "digits has",
                "--data that fits resnet50: cifar10, folder, labels, random",
            ],
        ),
        (&["--model", "resnet50", "--data", "digits"], &["--model that fits digits: mnist-cnn, resnet20"]),
        (&["--model", "segnet"], &["label for each pixel", "--data that fits segnet: camvid, masks, random"]),
        (&["--model", "mnist-cnn", "--data", "cifar10"], &["fits mnist-cnn: digits, mnist, random"]),
        (
            &["--model", "resnet20", "--data", "camvid"],
            &["--model that fits camvid: segnet", "fits resnet20: digits"],
        ),
        (&["--model", "segnet", "--data", "cifar10"], &["--model that fits cifar10: resnet20, resnet50"]),
    ];
    for command in ["train", "compare"] {
        for (args, needles) in cases {
            let outcome = convoke(&[&[command], *args].concat());
            failures.check(format!("{command} {args:?}"), outcome.check(2, needles));
            let first = outcome.stderr.starts_with("error: ");
            let silent = if first { Ok(()) } else { Err(outcome.stderr) };
            failures.check(format!("{command} {args:?} at once"), silent);
        }
    }
    failures.finish();
}

/// More threads than processors are no mistake, but seldom what is wanted. Nothing goes to standard output.
#[test]
fn threads_beyond_the_processors_are_warned_of() {
    let folder = tempfile::tempdir().unwrap();
    let processors = std::thread::available_parallelism().unwrap().get();
    let (many, few) = ((processors + 3).to_string(), processors.to_string());
    let words = [format!("warning: --threads {many}: "), format!("{few} processor")];
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let conv = "mb1ic1ih4oc1kh1";
    let cache = text(folder.path());
    let commands: [&[&str]; 6] = [
        &[
            "train",
            "--data",
            "random",
            "--batch-size",
            "4",
            "--steps",
            "1",
            "--effort",
            "heuristic",
            "--json",
            "-",
        ],
        &[
            "compare",
            "--data",
            "random",
            "--batch-size",
            "4",
            "--steps",
            "1",
            "--effort",
            "heuristic",
            "--json",
            "-",
        ],
        &["bench", conv, "--budget", "0.01", "--json", "-"],
        &["bench-norm", "2x3", "--budget", "0.01", "--json", "-"],
        &["tune", conv, "--effort", "heuristic", "--cache", cache, "--json", "-"],
        &["plan", "--batch-size", "2", "--plan-time", "0", "--effort", "heuristic", "--json", "-"],
    ];
    for command in commands {
        let warned = convoke(&[command, &["--threads", &many]].concat());
        warned.check(0, &words).unwrap();
        assert_eq!(warned.stderr.matches("warning:").count(), 1, "{command:?}: {}", warned.stderr);
        warned.json();
        let outcome = convoke(&[command, &["--threads", "1"]].concat()).exits(0);
        assert!(!outcome.stderr.contains("warning:"), "{command:?}: {}", outcome.stderr);
        convoke(&[command, &["--threads", "0"]].concat())
            .check(2, &["--threads", "'0'", "1..=1024"])
            .unwrap();
    }
    let ranks = convoke(&[commands[0], &["--threads", "1", "--ranks", "2"]].concat());
    ranks.check(0, &["warning: --"]).unwrap();
    assert!(ranks.stderr.contains("--ranks 2"), "{}", ranks.stderr);
}

#[test]
fn a_checkpoint_is_not_overwritten() {
    let folder = tempfile::tempdir().unwrap();
    let args = ["--steps", "1", "--checkpoint", text(folder.path())];
    for command in ["train", "compare"] {
        run(command, &args).exits(0);
        let before = contents(folder.path());
        assert!(!before.is_empty());
        run(command, &args).check(2, &[text(folder.path()), "already holds a run", "--resume"]).unwrap();
        assert!(contents(folder.path()) == before, "{command} touched the checkpoint");
    }
}

#[test]
fn help_explains_every_flag() {
    let mut failures = Failures::new("help");
    let mut contains = |command: &str, text: &str, needle: &str| {
        let found = if text.contains(needle) { Ok(()) } else { Err(format!("not in {text}")) };
        failures.check(format!("{command}: {needle}"), found);
    };
    let help = |args: &[&str]| {
        let outcome = convoke(args).exits(0);
        assert_eq!(outcome.stderr, "", "{args:?}");
        outcome.stdout.split_whitespace().collect::<Vec<_>>().join(" ")
    };
    let train = help(&["train", "--help"]);
    let compare = help(&["compare", "--help"]);
    for (flag, words) in FLAGS {
        contains("train", &train, flag);
        contains("train", &train, words);
        if flag.starts_with("--conv-bn") {
            assert!(!compare.contains(flag), "compare always runs both");
        } else {
            contains("compare", &compare, flag);
            contains("compare", &compare, words);
        }
    }
    for needle in ["Examples:", "Nothing is downloaded without --download"] {
        contains("train", &train, needle);
    }
    for (args, needles) in [
        (&["--help"][..], &["train", "compare", "info", "--version", "a fraction of the memory"][..]),
        (&["info", "--help"], &["CPU, instruction sets, threads"]),
        (&["train", "-h"], &["--batch-size"]),
    ] {
        let text = help(args);
        needles.iter().for_each(|needle| contains(&args.join(" "), &text, needle));
    }
    failures.finish();
    assert_eq!(help(&["--version"]), format!("convoke {}", env!("CARGO_PKG_VERSION")));
}

#[test]
fn info_tells_about_the_machine() {
    let outcome = convoke(&["info"]).exits(0);
    assert_eq!(outcome.stderr, "");
    for needle in [
        "CPU ",
        "instruction sets ",
        "portable",
        "threads ",
        "external libraries ",
        "ranks ",
        "data set mnist ",
        "data set cifar10 ",
        "data set camvid ",
        "not there",
    ] {
        assert!(outcome.stdout.contains(needle), "{needle} is not in {}", outcome.stdout);
    }
}
