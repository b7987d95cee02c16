//! Where results go: standard output, and files that cannot be written.

use std::fs;
use std::io;

use convoke_testkit::Failures;

use super::program::{command, contents, convoke, losses, on_tiny_data, outcome, run, runs, text};

#[test]
fn plain_lines_and_a_table() {
    let outcome = run("train", &["--steps", "3", "--effort", "heuristic"]).exits(0);
    let lines: Vec<&str> = outcome.stdout.lines().collect();
    assert!(lines[0].starts_with("mnist-cnn on mnist, batch 25, 3 steps, "), "{}", lines[0]);
    for name in ["peak memory", "memory at end of forward", "validation accuracy", "step time, median"] {
        assert!(lines.iter().any(|line| line.starts_with(name)), "no {name} in {lines:#?}");
    }
    let widths: Vec<usize> = lines[2..].iter().map(|line| line.len()).collect();
    assert!(widths.iter().all(|width| *width == widths[0]), "not aligned: {lines:#?}");
    let notes: Vec<&str> = outcome.stderr.lines().collect();
    let begins = |line: &str, words: &str| assert!(line.starts_with(words), "no {words} in {notes:#?}");
    begins(notes[0], "data: mnist, 140 images, 10 classes; 110 to train, 30 to validate");
    begins(notes[1], "  14 of each class");
    begins(notes[2], "model: mnist-cnn, 1,199,978 parameters, random weights");
    begins(notes[3], "recipe: adamw, learning rate 0.001, 3 steps, 25 images each");
    // The first step says nothing of the others.
    begins(notes[4], "epoch 1/1: 1/3 loss ");
    assert!(!notes[4].contains(" left"), "{}", notes[4]);
    begins(notes.last().unwrap(), "epoch 1/1: 3/3 loss ");
    assert!(!outcome.stderr.contains(['\r', '\x1b']), "control characters in {:?}", outcome.stderr);
}

/// `--steps` alone goes on into the next epoch, of five steps; with `--epochs` the smaller of both counts.
#[test]
fn steps_and_epochs() {
    for (args, steps) in [
        (&["--steps", "6"][..], 6),
        (&["--steps", "6", "--epochs", "1"], 5),
        (&["--steps", "4", "--epochs", "2"], 4),
        (&["--epochs", "2"], 10),
        (&[], 5),
    ] {
        assert_eq!(losses(&runs("train", args)[0]).len(), steps, "{args:?}");
    }
}

/// The trace holds every level, from the step down to the kernel; the table says what they cost.
#[test]
fn a_profile_is_a_table_and_a_trace() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("trace.json");
    let outcome = run("train", &["--steps", "3", "--profile", text(&file)]).exits(0);
    for part in ["a step of ", "kind of work", "convolution fwd ", "fwd mb25ic", "GFLOP/s", "limit: "] {
        assert!(outcome.stdout.contains(part), "no {part:?} in {}", outcome.stdout);
    }
    // No work is done faster than the machine can.
    let shares = outcome.stdout.lines().filter_map(|line| line.strip_suffix(" %")?.rsplit(' ').next());
    let shares: Vec<f64> = shares.filter_map(|share| share.parse().ok()).collect();
    assert!(shares.len() > 10 && shares.iter().all(|share| (0.0..=100.0).contains(share)), "{shares:?}");
    let trace: serde_json::Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    let named = |name: &str| events.iter().filter(|event| event["name"] == name).count();
    for name in ["step", "data", "forward", "backward", "optimizer"] {
        assert_eq!(named(name), 3, "{name}");
    }
    assert!(named("conv_bn2d forward") >= 3 && named("conv_bn2d backward") >= 3);
    let convolution = events.iter().find(|event| event["cat"] == "convolution").unwrap();
    assert!(
        convolution["args"]["flops"].as_f64() > Some(0.0) && convolution["args"]["bytes"].as_u64() > Some(0)
    );
    // Whatever asks for standard output for itself has it.
    let outcome = run("train", &["--steps", "1", "--profile", text(&file), "--json", "-"]).exits(0);
    assert!(serde_json::from_str::<serde_json::Value>(&outcome.stdout).is_ok());
    assert!(outcome.stderr.contains("kind of work"));
}

/// Whoever asked for a file is told where it is, in a line each, and nothing else where JSON goes.
#[test]
fn what_is_written_is_announced() {
    let folder = tempfile::tempdir().unwrap();
    let place = |name: &str| folder.path().join(name).to_string_lossy().into_owned();
    let (report, json, trace, saved) = (place("a.html"), place("b.json"), place("c.json"), place("run"));
    let told = |outcome: &super::program::Outcome, what: &str, place: &str| {
        let line = format!("{what}: {place}");
        assert_eq!(
            outcome.stderr.lines().filter(|told| **told == line).count(),
            1,
            "{line}: {}",
            outcome.stderr
        );
        assert!(!outcome.stdout.contains(place), "{}", outcome.stdout);
        assert!(std::path::Path::new(place).exists(), "{place}");
    };
    let files = ["--report", &report, "--json", &json];
    let training =
        run("train", &[&files[..], &["--epochs", "2", "--profile", &trace, "--checkpoint", &saved]].concat());
    let training = training.exits(0);
    for (what, place) in [("report", &report), ("json", &json), ("profile", &trace), ("checkpoint", &saved)] {
        told(&training, what, place);
    }
    let both = place("both");
    let compared =
        run("compare", &["--steps", "1", "--report", &report, "--json", "-", "--checkpoint", &both]).exits(0);
    told(&compared, "report", &report);
    told(&compared, "checkpoint", &format!("{both}/fused"));
    told(&compared, "checkpoint", &format!("{both}/separate"));
    compared.json();
    let conv = "mb1ic1ih4oc1kh1";
    let bench = convoke(&[&["bench", conv, "--budget", "0.01"], &files[..]].concat()).exits(0);
    told(&bench, "report", &report);
    told(&bench, "json", &json);
    told(&convoke(&["bench-norm", "2x3", "--budget", "0.01", "--json", &json]).exits(0), "json", &json);
    let cache = place("cache");
    told(
        &convoke(&["tune", conv, "--effort", "heuristic", "--cache", &cache, "--json", &json]).exits(0),
        "json",
        &json,
    );
    let quick = ["plan", "--batch-size", "2", "--plan-time", "0", "--effort", "heuristic"];
    let plan = convoke(&[&quick[..], &files].concat()).exits(0);
    told(&plan, "report", &report);
    told(&plan, "json", &json);
    // Nothing was written, and nothing is told.
    assert!(!run("train", &["--steps", "1"]).exits(0).stderr.contains(": /"));
}

/// What cannot be written is found out before the training, not after it.
#[test]
fn unwritable_files() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    fs::write(&file, "kept").unwrap();
    let (below_file, nowhere) = (file.join("out"), folder.path().join("none/out"));
    let mut failures = Failures::new("unwritable files");
    let cases = [
        ("--json", nowhere.as_path(), "No such file"),
        ("--json", folder.path(), "it is a folder"),
        ("--json", &below_file, "cannot write"),
        ("--report", &nowhere, "No such file"),
        ("--report", folder.path(), "it is a folder"),
        ("--profile", &nowhere, "No such file"),
        ("--checkpoint", &file, "cannot read"),
    ];
    for (flag, path, why) in cases {
        let outcome = run("train", &["--steps", "1", flag, text(path)]);
        failures.check(format!("{flag} {}", path.display()), outcome.check(1, &[text(path), why]));
        let trained = if outcome.stderr.contains("loss") { Err(outcome.stderr) } else { Ok(()) };
        failures.check(format!("{flag} {} before training", path.display()), trained);
    }
    failures.finish();
    assert_eq!(contents(folder.path()).into_iter().collect::<Vec<_>>(), [(file, b"kept".to_vec())]);
}

/// Nobody reads what is written: an error, not a panic.
#[test]
fn closed_pipes() {
    let closed = || {
        let (reader, writer) = io::pipe().unwrap();
        drop(reader);
        writer
    };
    for args in [vec!["info"], on_tiny_data("train", &["--steps", "1", "--json", "-"])] {
        let mut program = command(&args);
        let child = program.stdout(closed()).stderr(std::process::Stdio::piped()).spawn().unwrap();
        let output = child.wait_with_output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{stderr}");
        assert!(stderr.contains("cannot write to standard output"), "{stderr}");
        assert!(!stderr.contains("panicked"), "{stderr}");
    }
    let mut program = command(&on_tiny_data("train", &["--steps", "1"]));
    let child = program.stderr(closed()).stdout(std::process::Stdio::piped()).spawn().unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0), "progress that nobody reads does not end the training");
    assert!(String::from_utf8_lossy(&output.stdout).contains("validation accuracy"));
}

/// Renaming a file over a device would replace it.
#[cfg(unix)]
#[test]
fn devices_and_pipes() {
    use std::os::unix::fs::FileTypeExt;
    run("train", &["--steps", "1", "--json", "/dev/null", "--report", "/dev/null"]).exits(0);
    assert!(fs::metadata("/dev/null").unwrap().file_type().is_char_device());
    let outcome =
        outcome(command(&on_tiny_data("train", &["--steps", "1", "--json", "/dev/stdout"]))).exits(0);
    assert!(outcome.stdout.contains("validation accuracy") && outcome.stdout.contains("\"runs\""));
}
