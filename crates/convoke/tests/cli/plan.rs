//! Memory budgets and plans.

use std::fs;

use serde_json::Value;

use super::program::{convoke, losses, run, runs, text};

/// The fastest way to a plan: estimates, and each kind of block timed once.
const QUICK: [&str; 4] = ["--effort", "heuristic", "--plan-time", "0"];

fn plan(args: &[&str]) -> super::program::Outcome {
    convoke(&[&["plan", "--batch-size", "16"], args, &QUICK].concat())
}

#[test]
fn a_budget_is_kept_and_changes_no_loss() {
    let plain = &runs("train", &[&["--steps", "4"][..], &QUICK].concat())[0];
    let peak = plain["bytes_peak"].as_u64().unwrap();
    assert_eq!(plain["memory_plan"], Value::Null);
    let budget = format!("{}B", peak - 1);
    let outcome =
        run("train", &[&["--steps", "4", "--memory-budget", &budget, "--json", "-"][..], &QUICK].concat());
    let outcome = outcome.exits(0);
    assert!(outcome.stderr.contains("memory plan: "), "{}", outcome.stderr);
    let planned = &outcome.json()["runs"][0];
    let found = planned["bytes_peak"].as_u64().unwrap();
    assert!(found < peak, "{found} of {peak}");
    assert_eq!(planned["memory_plan"]["bytes_peak"].as_u64(), Some(found), "as predicted");
    assert_eq!(losses(planned), losses(plain));
}

#[test]
fn compare_plans_the_fused_run_only() {
    let args = ["--steps", "3", "--memory-budget", "1GB"];
    let runs = runs("compare", &[&args[..], &QUICK].concat());
    assert_eq!((&runs[0]["conv_bn"], &runs[0]["memory_plan"]), (&Value::from("separate"), &Value::Null));
    let peaks = [&runs[0], &runs[1]].map(|run| run["bytes_peak"].as_u64().unwrap());
    assert_eq!(runs[1]["memory_plan"]["bytes_peak"].as_u64(), Some(peaks[1]), "{peaks:?}");
    assert_eq!(losses(&runs[0]), losses(&runs[1]));
}

#[test]
fn a_budget_that_nothing_fits_says_what_would() {
    let outcome = run("train", &[&["--memory-budget", "100kB"][..], &QUICK].concat()).exits(1);
    let error = outcome.stderr;
    assert!(error.contains("mnist-cnn needs at least") && error.contains("the budget of 0.1 MB"), "{error}");
    assert!(!error.contains("would fit"), "{error}");
    let error = convoke(&[&["plan", "--batch-size", "64", "--memory-budget", "30MB"][..], &QUICK].concat())
        .exits(1)
        .stderr;
    assert!(error.contains("batch size") && error.contains("would fit"), "{error}");
}

#[test]
fn budgets_are_for_fused_blocks() {
    let args = ["--conv-bn", "separate", "--memory-budget", "1GB"];
    let error = run("train", &args).exits(2).stderr;
    assert!(error.contains("--memory-budget") && error.contains("separate"), "{error}");
}

#[test]
fn plans_are_shown_written_and_taken() {
    let folder = tempfile::tempdir().unwrap();
    let (file, page) = (folder.path().join("plan.json"), folder.path().join("plan.html"));
    let shown = plan(&["--curve", "--json", text(&file), "--report", text(&page)]).exits(0).stdout;
    for part in ["mnist-cnn at batch size 16", "separate", "unplanned", "plan 1", "block2", "saves"] {
        assert!(shown.contains(part), "{part}: {shown}");
    }
    let page = fs::read_to_string(&page).unwrap();
    assert!(page.contains("<svg") && page.contains("peak memory, MB"), "{page}");
    // The algorithms of the plan: measured ones may need other workspaces.
    let flags = ["--steps", "3", "--batch-size", "16", "--memory-plan", text(&file), "--json", "-"];
    let outcome = run("train", &[&flags[..], &["--effort", "heuristic"]].concat());
    let taken = &outcome.exits(0).json()["runs"][0];
    let planned: Value = serde_json::from_str(&fs::read_to_string(&file).unwrap()).unwrap();
    assert_eq!(taken["memory_plan"], planned["plan"]);
    assert_eq!(taken["bytes_peak"], planned["plan"]["bytes_peak"]);
    // Damaged, of another model, not there.
    fs::write(&file, "{}").unwrap();
    let take =
        |args: &[&str]| run("train", &[&["--memory-plan", text(&file)], args].concat()).exits(1).stderr;
    assert!(take(&[]).contains("it holds no plan") || take(&[]).contains("no plan"), "{}", take(&[]));
    let other = planned.to_string().replace("mnist-cnn", "segnet");
    fs::write(&file, other).unwrap();
    assert!(take(&[]).contains("the plan is for segnet"), "{}", take(&[]));
    fs::remove_file(&file).unwrap();
    assert!(take(&[]).contains("plan.json"), "{}", take(&[]));
}

/// Plans are chosen by the time of their blocks: of all points of a table that fit, the chosen one has the least.
#[test]
fn no_plan_that_fits_is_faster_than_the_chosen_one() {
    for (model, batch, budgets) in
        [("mnist-cnn", "16", ["24MB", "27MB", "1GB"]), ("resnet20", "4", ["16MB", "20MB", "1GB"])]
    {
        for budget in budgets {
            let args = [
                "plan",
                "--model",
                model,
                "--batch-size",
                batch,
                "--curve",
                "--memory-budget",
                budget,
                "--json",
                "-",
            ];
            let outcome = convoke(&[&args[..], &QUICK].concat());
            if outcome.code == Some(1) {
                outcome.check(1, &["needs at least"]).unwrap();
                continue;
            }
            let curve = outcome.exits(0).json()["curve"].clone();
            let points = curve.as_array().unwrap();
            let chosen = points.iter().find(|point| point["name"] == "chosen").unwrap();
            let limit = budget.trim_end_matches("MB").trim_end_matches("GB").parse::<f64>().unwrap()
                * if budget.ends_with("GB") { 1e9 } else { 1e6 };
            let number = |point: &Value, name: &str| point[name].as_f64();
            let time = number(chosen, "block_seconds").unwrap();
            assert!(number(chosen, "bytes_peak").unwrap() <= limit, "{chosen}");
            for point in points.iter().filter(|point| number(point, "bytes_peak").unwrap() <= limit) {
                let other = number(point, "block_seconds");
                assert!(
                    other.is_none_or(|other| time <= other * (1.0 + 1e-12)),
                    "{}: {curve}",
                    point["name"]
                );
            }
        }
    }
}

#[test]
fn steps_of_plans_are_timed_by_turns_and_take_what_was_predicted() {
    let outcome = plan(&["--curve", "--steps", "1", "--json", "-"]).exits(0);
    let curve = outcome.json()["curve"].clone();
    let points = curve.as_array().unwrap();
    assert_eq!(points[0]["name"], "separate");
    assert!(points.iter().all(|point| point["step_seconds"].as_f64().is_some_and(|seconds| seconds > 0.0)));
    // One step cannot tell which is faster, so the table does not say.
    assert!(points.iter().all(|point| point["step_ratio"]["verdict"] == "within noise"), "{curve}");
    let lines: Vec<&str> = outcome.stderr.lines().collect();
    let table = lines.iter().position(|line| line.contains("blocks alone")).unwrap();
    assert!(
        lines[table + 1].starts_with("separate") && lines[table + 2].contains("within noise"),
        "{lines:#?}"
    );
    assert!(outcome.stderr.contains("1 step of each cannot tell which is faster"), "{lines:#?}");
    let peaks =
        |name: &str| points.iter().find(|point| point["name"] == name).unwrap()["bytes_peak"].as_u64();
    assert!(peaks("unplanned") < peaks("separate"));
}

/// What has more memory and more time than another plan is in the JSON, which says so, but not in the table.
#[test]
fn plans_that_another_beats_are_not_shown() {
    for flags in [&[][..], &["--curve"], &["--curve", "--memory-budget", "1GB"]] {
        let outcome = plan(&[flags, &["--json", "-"]].concat()).exits(0);
        let curve = outcome.json()["curve"].clone();
        let points = curve.as_array().unwrap();
        let number = |point: &Value, field: &str| point[field].as_f64().unwrap();
        let rows: Vec<&str> = outcome.stderr.lines().filter(|line| line.contains(" MB")).collect();
        for point in points.iter().skip(1) {
            let name = point["name"].as_str().unwrap();
            let is_shown = rows.iter().any(|row| {
                let names = row.split("  ").next().unwrap();
                names.split(", ").any(|shown| shown == name)
            });
            let Some(by) = point["beaten_by"].as_str() else {
                assert!(is_shown, "{name}: {}", outcome.stderr);
                continue;
            };
            assert!(!is_shown && outcome.stderr.contains(&format!("{name} ({by})")), "{}", outcome.stderr);
            let other = points.iter().find(|point| point["name"] == by).unwrap();
            assert!(other["beaten_by"].is_null(), "{by}: {curve}");
            assert!(number(other, "bytes_peak") <= number(point, "bytes_peak"), "{name}: {curve}");
            let tie = 1.03 * number(point, "block_seconds");
            assert!(number(other, "block_seconds") <= tie, "{name}: {curve}");
        }
    }
}

#[test]
fn the_largest_batches_of_a_budget_are_found() {
    let args = ["--memory-budget", "60MB", "--largest-batch", "--json", "-"];
    let outcome = plan(&args).exits(0);
    let batches = &outcome.json()["largest_batch"];
    let [separate, unplanned, planned] =
        ["separate", "unplanned", "planned"].map(|name| batches[name].as_u64().unwrap());
    assert!(0 < separate && separate < unplanned && unplanned <= planned, "{batches}");
    assert!(outcome.stderr.contains("largest batch in 60.0 MB"), "{}", outcome.stderr);
}
