//! Runs on several ranks.

use std::fs;

use serde_json::Value;

use super::program::{losses, run};

/// The one run in this outcome's JSON.
fn only(json: &Value) -> &Value {
    let all = json["runs"].as_array().expect("an array");
    assert_eq!(all.len(), 1);
    &all[0]
}

#[test]
fn two_synchronized_ranks_train_as_one() {
    let one = run("train", &["--steps", "6", "--json", "-"]).exits(0).json();
    let outcome = run("train", &["--steps", "6", "--ranks", "2", "--sync-bn", "--json", "-"]).exits(0);
    let two = outcome.json();
    let (one, two) = (only(&one), only(&two));
    for (one, two) in losses(one).iter().zip(losses(two)) {
        assert!((one - two).abs() <= 1e-3 * one, "{one} on one rank, {two} on two");
    }
    assert_eq!([&one["ranks"], &two["ranks"]], [1, 2]);
    assert_eq!(one["test_accuracy"], two["test_accuracy"]);
    assert_eq!(one["bytes_communicated_per_step"], 0);
    // At least its gradients; half of them a second time, as sums.
    let parameters = two["parameters"].as_u64().unwrap();
    let sent = two["bytes_communicated_per_step"].as_u64().unwrap();
    assert!((4 * parameters..=7 * parameters).contains(&sent), "{sent}");
    assert!(two["communication_seconds"].as_f64().unwrap() > 0.0);
    let rates = two["rank_images_per_second"].as_array().unwrap();
    assert!(rates.len() == 2 && rates.iter().all(|rate| rate.as_f64().unwrap() > 0.0), "{rates:?}");
    // The first rank speaks for all.
    assert_eq!(outcome.stderr.matches("validation accuracy").count(), 1, "{}", outcome.stderr);
    assert!(outcome.stderr.contains("2 ranks with synchronized batch norm"), "{}", outcome.stderr);
    assert!(outcome.stderr.contains("images a second, by rank"), "{}", outcome.stderr);
    let apart = run("train", &["--steps", "6", "--ranks", "2", "--json", "-"]).exits(0).json();
    let differ = |(a, b): (&f64, &f64)| (a - b).abs() > 1e-3 * a;
    assert!(losses(two).iter().zip(&losses(only(&apart))).any(differ), "statistics of each rank alone");
}

#[test]
fn gradients_in_bf16_are_half_of_the_bytes() {
    let args = ["--steps", "3", "--ranks", "2", "--sync-bn", "--json", "-", "--send-gradients"];
    let sent = |precision: &str| run("train", &[&args[..], &[precision]].concat()).exits(0);
    let (exact, rounded) = (sent("f32"), sent("bf16"));
    let title = "2 ranks with synchronized batch norm, gradients sent in bf16";
    assert!(rounded.stderr.contains(title) && !exact.stderr.contains("gradients sent"), "{}", rounded.stderr);
    let (exact, rounded) = (exact.json(), rounded.json());
    let (exact, rounded) = (only(&exact), only(&rounded));
    assert_eq!([&exact["send_gradients"], &rounded["send_gradients"]], ["f32", "bf16"]);
    let bytes = [exact, rounded].map(|run| run["bytes_communicated_per_step"].as_f64().unwrap());
    assert!((0.5..0.55).contains(&(bytes[1] / bytes[0])), "{bytes:?}");
    for (exact, rounded) in losses(exact).iter().zip(losses(rounded)) {
        assert!((exact - rounded).abs() <= 0.05 * exact, "{exact}, with gradients in bf16 {rounded}");
    }
}

#[test]
fn ranks_resume_and_compare() {
    let folder = tempfile::tempdir().unwrap();
    let run_folder = folder.path().join("run").to_string_lossy().into_owned();
    let part = ["--ranks", "3", "--sync-bn", "--checkpoint", &run_folder, "--json", "-"];
    run("train", &[&part[..], &["--steps", "2"]].concat()).exits(0);
    let resumed = run("train", &[&part[..], &["--steps", "4", "--resume"]].concat()).exits(0);
    assert!(resumed.stderr.contains("resumed after step 2 of 4"), "{}", resumed.stderr);
    let whole = run("train", &["--ranks", "3", "--sync-bn", "--steps", "4", "--json", "-"]).exits(0).json();
    assert_eq!(losses(only(&resumed.json())), losses(only(&whole)), "bit for bit");
    let refused = run("train", &[&part[..], &["--steps", "5"]].concat());
    refused.check(2, &["--checkpoint", "already holds a run", "--resume"]).unwrap();
    let report = folder.path().join("report.html");
    let flags = ["--ranks", "2", "--steps", "2", "--json", "-", "--report", &report.to_string_lossy()];
    let compared = run("compare", &flags).exits(0).json();
    let modes = compared["runs"].as_array().unwrap();
    assert_eq!(modes.len(), 2);
    assert_eq!(losses(&modes[0]), losses(&modes[1]), "fused and separate are the same");
    assert!(fs::read_to_string(&report).unwrap().contains("by rank"));
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2, "one run, one report");
}

#[test]
fn bad_ranks_are_refused() {
    for (flags, needles) in [
        (&["--ranks", "0"][..], &["--ranks"][..]),
        (&["--ranks", "26"], &["--batch-size 25", "26 ranks"]),
        (&["--ranks", "2", "--mpi"], &["cannot be used with"]),
        (&["--rank-timeout", "0"], &["--rank-timeout"]),
    ] {
        let outcome = run("train", flags);
        outcome.check(2, needles).unwrap_or_else(|error| panic!("{flags:?}: {error}"));
    }
    // All ranks stop at the same step, and one says so.
    let outcome = run("train", &["--ranks", "2", "--lr", "1e30", "--optimizer", "sgd"]);
    outcome.check(1, &["the loss of step", "--continue-on-nan"]).unwrap();
    assert_eq!(outcome.stderr.matches("error:").count(), 1, "{}", outcome.stderr);
}

#[test]
fn ranks_with_unequal_parts_keep_a_budget() {
    // 12 and 13 images a step.
    run("train", &["--steps", "2", "--ranks", "2", "--memory-budget", "500MB"]).exits(0);
}
