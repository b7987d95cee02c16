//! Checkpoints: a run continued is the run not interrupted, and a checkpoint that does not fit is left alone.

use std::fs;
use std::path::Path;

use convoke_testkit::{Failures, Tolerance, assert_close};
use serde_json::Value;

use super::program::{contents, losses, run, runs, text};

/// Trains to `steps`, with or without `--resume`, and returns the runs.
#[track_caller]
fn trained(command: &str, steps: &str, args: &[&str], folder: Option<&Path>, resume: bool) -> Vec<Value> {
    let mut all = [&["--steps", steps], args].concat();
    if let Some(folder) = folder {
        all.extend(["--checkpoint", text(folder)]);
    }
    if resume {
        all.push("--resume");
    }
    runs(command, &all)
}

/// A folder with the checkpoint of a run of three steps.
fn three_steps() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    trained("train", "3", &[], Some(folder.path()), false);
    folder
}

/// Six steps cross from the first epoch, of five, to the second.
#[test]
fn losses_go_on_bit_for_bit() {
    for optimizer in ["adadelta", "sgd", "adamw"] {
        let args = ["--optimizer", optimizer];
        let folder = tempfile::tempdir().unwrap();
        let whole = trained("train", "6", &args, None, false);
        let first = trained("train", "3", &args, Some(folder.path()), false);
        let both = trained("train", "6", &args, Some(folder.path()), true);
        assert_eq!(losses(&first[0]), losses(&whole[0])[..3], "{optimizer}");
        for field in ["train_loss", "test_loss", "test_accuracy"] {
            assert_eq!(both[0][field], whole[0][field], "{field} with {optimizer}");
        }
    }
}

/// JSON has no NaN, but a checkpoint must keep losses that are.
#[test]
fn a_diverged_run_goes_on() {
    let args = ["--optimizer", "sgd", "--lr", "1e30", "--continue-on-nan"];
    let folder = tempfile::tempdir().unwrap();
    trained("train", "3", &args, Some(folder.path()), false);
    let both = &trained("train", "4", &args, Some(folder.path()), true)[0];
    assert_eq!(both["train_loss"], trained("train", "4", &args, None, false)[0]["train_loss"]);
    assert!(both["train_loss"][2].is_null() && losses(both).len() == 4, "{both}");
}

#[test]
fn compare_goes_on_too() {
    let folder = tempfile::tempdir().unwrap();
    let whole = trained("compare", "4", &[], None, false);
    trained("compare", "2", &[], Some(folder.path()), false);
    let both = trained("compare", "4", &[], Some(folder.path()), true);
    for (both, whole) in both.iter().zip(&whole) {
        assert_eq!(losses(both), losses(whole), "{}", whole["conv_bn"]);
    }
}

#[test]
fn the_mode_may_change() {
    let folder = three_steps();
    let whole = trained("train", "6", &[], None, false);
    let changed = trained("train", "6", &["--conv-bn", "separate"], Some(folder.path()), true);
    // The two modes sum in different orders.
    assert_close("train_loss", &losses(&changed[0]), &losses(&whole[0]), Tolerance { atol: 0.0, rtol: 1e-3 });
}

#[test]
fn only_the_newest_checkpoints_are_kept() {
    let folder = tempfile::tempdir().unwrap();
    trained("train", "8", &["--batch-size", "110"], Some(folder.path()), false);
    let mut names: Vec<_> =
        fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["step-0000000007", "step-0000000008"]);
}

#[test]
fn a_finished_run_is_only_tested_again() {
    let folder = three_steps();
    let before = contents(folder.path());
    let args = ["--steps", "3", "--checkpoint", text(folder.path()), "--resume", "--json", "-"];
    let outcome = run("train", &args).exits(0);
    outcome.check(0, &["resumed after step 3 of 3", "nothing left to train"]).unwrap();
    let run = &outcome.json()["runs"][0];
    assert_eq!(losses(run).len(), 3);
    assert!(run["test_accuracy"].is_f64() && run["bytes_peak"].is_null(), "{run}");
    assert!(contents(folder.path()) == before);
}

#[test]
fn another_run_is_refused() {
    let folder = three_steps();
    let before = contents(folder.path());
    let mut failures = Failures::new("resuming another run");
    for (flag, value, field) in [
        ("--batch-size", "20", "batch_size: the checkpoint has 25, this run needs 20"),
        ("--seed", "2", "seed: the checkpoint has 1, this run needs 2"),
        ("--lr", "0.5", "learning_rate: the checkpoint has 0.001, this run needs 0.5"),
        ("--lr-gamma", "0.5", "schedule: the checkpoint has constant, this run needs"),
        ("--weight-decay", "0.5", "optimizer"),
        ("--optimizer", "adadelta", "optimizer"),
    ] {
        let args = ["--steps", "6", "--checkpoint", text(folder.path()), "--resume", flag, value];
        let outcome = run("train", &args);
        failures.check(flag, outcome.check(1, &[text(folder.path()), "training.json", field]));
        let same = if contents(folder.path()) == before { Ok(()) } else { Err("the checkpoint changed") };
        failures.check(format!("checkpoint after {flag}"), same);
    }
    failures.finish();
}

#[test]
fn damaged_checkpoints_are_refused() {
    type Damage = fn(Vec<u8>) -> Vec<u8>;
    let damages: [(&str, Damage); 3] = [
        ("empty", |_| Vec::new()),
        ("cut off", |mut bytes| {
            bytes.truncate(bytes.len() / 2);
            bytes
        }),
        ("one bit", |mut bytes| {
            // In training.json this opens a brace that closes nowhere; elsewhere it spoils a number.
            let at = bytes.iter().position(|byte| *byte == b'[').unwrap_or(bytes.len() / 2);
            bytes[at] ^= 0x20;
            bytes
        }),
    ];
    let mut failures = Failures::new("damaged checkpoints");
    let folder = three_steps();
    for name in ["model.safetensors", "optimizer.safetensors", "training.json"] {
        for (what, damage) in damages {
            let file = folder.path().join("step-0000000003").join(name);
            let sound = fs::read(&file).unwrap();
            fs::write(&file, damage(sound.clone())).unwrap();
            let before = contents(folder.path());
            let outcome = run("train", &["--steps", "6", "--checkpoint", text(folder.path()), "--resume"]);
            failures.check(format!("{name}, {what}"), outcome.check(1, &[text(&file)]));
            let same = if contents(folder.path()) == before { Ok(()) } else { Err("the checkpoint changed") };
            failures.check(format!("checkpoint after {name}, {what}"), same);
            fs::write(&file, sound).unwrap();
        }
    }
    failures.finish();
}

#[test]
fn nothing_to_resume() {
    let folder = tempfile::tempdir().unwrap();
    let none = folder.path().join("none");
    for folder in [folder.path(), &none] {
        let outcome = run("train", &["--checkpoint", text(folder), "--resume"]);
        outcome.check(1, &[text(folder), "no checkpoint here"]).unwrap();
    }
    assert!(!none.exists(), "a refused run made a folder");
}

#[cfg(unix)]
mod interrupt {
    use std::io::{BufRead, BufReader, Read};
    use std::process::{Command, Stdio};

    use super::*;
    use crate::program::{Outcome, command, on_tiny_data};

    /// Runs the program and sends it SIGINT once it has shown a loss.
    fn interrupted(name: &str, args: &[&str]) -> Outcome {
        let mut program = command(&on_tiny_data(name, args));
        let mut child = program.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap());
        let mut stderr = String::new();
        while !stderr.contains("loss") {
            assert_ne!(lines.read_line(&mut stderr).unwrap(), 0, "ended before a loss: {stderr}");
        }
        assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
        lines.read_to_string(&mut stderr).unwrap();
        let output = child.wait_with_output().unwrap();
        Outcome { code: output.status.code(), stdout: String::from_utf8(output.stdout).unwrap(), stderr }
    }

    #[test]
    fn saves_and_goes_on() {
        for name in ["train", "compare"] {
            let folder = tempfile::tempdir().unwrap();
            let args = ["--steps", "40", "--checkpoint", text(folder.path()), "--json", "-"];
            let outcome = interrupted(name, &args);
            let hint = ["stopping", "interrupted after step", text(folder.path()), "--resume"];
            outcome.check(130, &hint).unwrap();
            let cut = outcome.json();
            assert!(cut["runs"][0]["test_accuracy"].is_null(), "{cut}");
            let done = losses(&cut["runs"][0]).len();
            assert!((1..40).contains(&done), "{name} did {done} steps");
            let steps = (done + 3).to_string();
            let whole = trained(name, &steps, &[], None, false);
            let both = trained(name, &steps, &[], Some(folder.path()), true);
            for ((cut, both), whole) in cut["runs"].as_array().unwrap().iter().zip(&both).zip(&whole) {
                assert_eq!(losses(cut), losses(whole)[..done], "{name}");
                assert_eq!(losses(both), losses(whole), "{name}");
            }
        }
    }

    #[test]
    fn says_when_nothing_was_saved() {
        let outcome = interrupted("train", &["--epochs", "1000"]);
        outcome.check(130, &["interrupted after step", "not saved", "--checkpoint"]).unwrap();
    }
}
