//! The contract of `--json`.

use std::collections::BTreeSet;
use std::fs;

use convoke_testkit::{Tolerance, assert_close};
use serde_json::Value;

use super::program::{contents, losses, run, runs, text};
use super::report::without_pictures;

const FIELDS: [&str; 31] = [
    "conv_bn",
    "data",
    "model",
    "batch_size",
    "ranks",
    "sync_bn",
    "send_gradients",
    "train_loss",
    "validation",
    "optimizer",
    "learning_rate",
    "precision",
    "seed",
    "threads",
    "version",
    "test_loss",
    "test_accuracy",
    "test_mean_iou",
    "test_metrics",
    "loading_share",
    "step_seconds_median",
    "step_seconds_quartiles",
    "images_per_second",
    "bytes_end_of_forward",
    "bytes_peak",
    "parameters",
    "bytes_communicated_per_step",
    "communication_seconds",
    "rank_images_per_second",
    "memory_plan",
    "process_peak_bytes",
];

#[track_caller]
fn assert_fields(value: &Value, fields: &[&str]) {
    let found: BTreeSet<&str> = value.as_object().expect("an object").keys().map(String::as_str).collect();
    assert_eq!(found, fields.iter().copied().collect());
}

#[test]
fn standard_output_has_json_and_nothing_else() {
    let outcome = run("train", &["--steps", "3", "--json", "-"]).exits(0);
    let json = outcome.json();
    assert_fields(&json, &["runs"]);
    let runs = json["runs"].as_array().unwrap();
    assert_eq!(runs.len(), 1);
    let run = &runs[0];
    assert_fields(run, &FIELDS);
    for (field, value) in [("conv_bn", "fused"), ("data", "mnist"), ("model", "mnist-cnn")] {
        assert_eq!(run[field], value);
    }
    assert_eq!((&run["batch_size"], &run["ranks"]), (&Value::from(25), &Value::from(1)));
    assert_eq!(losses(run).len(), 3);
    assert!(losses(run).iter().all(|loss| loss.is_finite() && *loss > 0.0), "{run}");
    let [parameters, end_of_forward, peak] =
        ["parameters", "bytes_end_of_forward", "bytes_peak"].map(|field| run[field].as_u64().unwrap());
    assert!(parameters > 1_000_000 && end_of_forward > 4 * parameters && peak >= end_of_forward, "{run}");
    let accuracy = run["test_accuracy"].as_f64().unwrap();
    assert!((0.0..=1.0).contains(&accuracy) && run["test_loss"].as_f64().unwrap() > 0.0, "{run}");
    let [seconds, rate] =
        ["step_seconds_median", "images_per_second"].map(|field| run[field].as_f64().unwrap());
    assert!(seconds > 0.0 && (0.2..5.0).contains(&(seconds * rate / 25.0)), "{run}");
    assert!(outcome.stderr.contains("validation accuracy"), "the table goes to standard error");
    // Three steps are no epoch.
    assert_eq!(run["validation"], Value::Array(vec![]));
    assert_eq!((&run["optimizer"], &run["learning_rate"]), (&Value::from("adamw"), &Value::from(0.001)));
    assert_eq!((&run["seed"], &run["version"]), (&Value::from(1), &Value::from(env!("CARGO_PKG_VERSION"))));
    assert!(run["threads"].as_u64().is_some_and(|threads| threads > 0), "{run}");
}

#[test]
fn a_file_is_written_whole() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("out.json");
    fs::write(&file, "{}").unwrap();
    let args = ["--steps", "1", "--conv-bn", "separate", "--json", text(&file)];
    let outcome = run("train", &args).exits(0);
    assert!(outcome.stdout.contains("validation accuracy"), "the table goes to standard output");
    let json: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    assert_fields(&json["runs"][0], &FIELDS);
    assert_eq!(json["runs"][0]["conv_bn"], "separate");
    assert_eq!(contents(folder.path()).len(), 1, "temporary files are left");
}

#[test]
fn compare_has_two_runs_that_differ_in_memory_only() {
    let runs = runs("compare", &["--steps", "4", "--batch-size", "100"]);
    let [separate, fused] = &runs[..] else { panic!("expected two runs, found {}", runs.len()) };
    for (run, mode) in [(separate, "separate"), (fused, "fused")] {
        assert_fields(run, &FIELDS);
        assert_eq!(run["conv_bn"], mode);
    }
    for field in ["data", "model", "batch_size", "ranks", "parameters"] {
        assert_eq!(separate[field], fused[field], "{field}");
    }
    assert_eq!(losses(separate).len(), 4);
    // 1e-3 is the contract; the two modes sum in different orders.
    assert_close("train_loss", &losses(fused), &losses(separate), Tolerance { atol: 0.0, rtol: 1e-3 });
    // Parameters and AdamW's two averages are the same in both, and matter less at larger batches.
    let number = |run: &Value, field: &str| run[field].as_f64().unwrap();
    let kept = |run: &Value| number(run, "bytes_end_of_forward") - 12.0 * number(run, "parameters");
    assert!(kept(fused) / kept(separate) <= 0.62, "{} of {}", kept(fused), kept(separate));
    let peaks = [fused, separate].map(|run| number(run, "bytes_peak"));
    assert!(peaks[0] <= 0.75 * peaks[1], "{peaks:?}");
}

/// Three steps cannot tell which is faster, whatever times they took: neither the table, nor the JSON, nor the page says so.
#[test]
fn a_few_steps_are_within_noise() {
    let folder = tempfile::tempdir().unwrap();
    let page = folder.path().join("compare.html");
    let args = ["--steps", "3", "--effort", "heuristic", "--report", text(&page), "--json", "-"];
    let outcome = run("compare", &args).exits(0);
    let json = outcome.json();
    assert_fields(&json, &["runs", "step_ratio"]);
    let ratio = &json["step_ratio"];
    assert_fields(ratio, &["median", "range", "pairs", "verdict"]);
    assert_eq!((&ratio["pairs"], &ratio["verdict"]), (&Value::from(2), &Value::from("within noise")));
    assert_eq!(ratio["range"], Value::Null);
    for said in [outcome.stderr, fs::read_to_string(&page).unwrap()] {
        assert!(said.contains("Step times: within noise. 3 steps cannot tell fused from separate"), "{said}");
        assert!(!said.contains("faster") && !said.contains("slower"), "{said}");
    }
    // Each run's times are told with their spread.
    let run = &json["runs"][0];
    let [low, high] = [0, 1].map(|end| run["step_seconds_quartiles"][end].as_f64().unwrap());
    let median = run["step_seconds_median"].as_f64().unwrap();
    assert!(0.0 < low && low <= median && median <= high, "{run}");
}

/// Steps that are timed after the run belong to no result of it.
#[test]
fn steps_for_times_only_change_nothing() {
    let whole = &runs("train", &["--effort", "heuristic"])[0];
    let folder = tempfile::tempdir().unwrap();
    let args = ["--effort", "heuristic", "--checkpoint", text(folder.path()), "--json", "-"];
    let outcome = run("compare", &args).exits(0).json();
    let fused = &outcome["runs"][1];
    for field in ["train_loss", "validation", "test_loss", "test_accuracy"] {
        assert_eq!(fused[field], whole[field], "{field}");
    }
    // An epoch has five steps, and the first does not count.
    assert!(outcome["step_ratio"]["pairs"].as_u64() > Some(4), "{}", outcome["step_ratio"]);
    let kept = fs::read_dir(folder.path().join("fused")).unwrap();
    let kept: Vec<_> = kept.map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(kept, ["step-0000000005"]);
}

#[test]
fn the_same_flags_give_the_same_losses() {
    let args = ["--steps", "3", "--conv-bn", "fused"];
    let first = &runs("train", &args)[0];
    assert_eq!(losses(first), losses(&runs("train", &args)[0]));
    let other = &runs("train", &[&args[..], &["--seed", "2"]].concat())[0];
    assert_ne!(losses(first), losses(other));
}

const DIVERGES: [&str; 6] = ["--steps", "4", "--optimizer", "sgd", "--lr", "1e30"];

#[test]
fn divergence_stops_the_run() {
    for command in ["train", "compare"] {
        let outcome = run(command, &DIVERGES);
        outcome.check(1, &["the loss of step 2", "epoch 1", "--lr", "--continue-on-nan"]).unwrap();
        assert_eq!(outcome.stdout, "");
    }
}

/// JSON has no NaN: the losses that are not finite are null.
#[test]
fn divergence_can_be_ignored() {
    let folder = tempfile::tempdir().unwrap();
    let report = folder.path().join("report.html");
    let args = [&DIVERGES[..], &["--continue-on-nan", "--report", text(&report)]].concat();
    let run = &runs("train", &args)[0];
    assert_fields(run, &FIELDS);
    let losses = run["train_loss"].as_array().unwrap();
    assert!(losses.len() == 4 && losses[0].is_f64() && losses[3].is_null(), "{losses:?}");
    assert!(run["test_loss"].is_null(), "{run}");
    let page = without_pictures(&fs::read_to_string(report).unwrap());
    let drawings = page.split("<svg").skip(1).filter_map(|rest| rest.split("</svg>").next());
    let svg: String = drawings.collect();
    assert!(!svg.is_empty(), "{page}");
    assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
}
