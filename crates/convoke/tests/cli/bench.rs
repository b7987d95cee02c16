//! `convoke bench`: its JSON, its tables, its page, and what it refuses.

use std::collections::BTreeMap;
use std::fs;

use convoke_testkit::Failures;
use serde_json::Value;

use super::program::{Outcome, convoke, text};
use super::report::assert_self_contained;

const SMALL: &str = "mb1ic4ih8iw8oc4oh8ow8kh3kw3sh1sw1ph1pw1";
const STRIDED: &str = "mb2ic4ih9iw7oc6oh4ow3kh3kw3sh2sw2ph0pw0";

/// Runs on two threads, half a second a pass at most.
fn bench(args: &[&str]) -> Outcome {
    convoke(&[&["bench", "--budget", "0.5", "--threads", "2"], args].concat())
}

/// The rows of `--json -`, by problem and pass.
#[track_caller]
fn passes(args: &[&str]) -> BTreeMap<(String, String), Vec<Value>> {
    let outcome = bench(&[args, &["--json", "-"]].concat()).exits(0);
    let mut passes: BTreeMap<_, Vec<Value>> = BTreeMap::new();
    for row in outcome.json().as_array().expect("a list") {
        let name = |key: &str| row[key].as_str().expect("a name").to_owned();
        passes.entry((name("problem"), name("pass"))).or_default().push(row.clone());
    }
    passes
}

fn check_row(row: &Value, flops: f64) -> Result<(), String> {
    let fields = row.as_object().ok_or("not an object")?;
    let mut names: Vec<&str> = fields.keys().map(String::as_str).collect();
    names.sort_unstable();
    let expected = [
        "algorithm",
        "chosen",
        "gflops",
        "max_relative_error",
        "pass",
        "problem",
        "seconds",
        "seconds_median",
        "seconds_min",
        "skipped",
        "workspace_bytes",
    ];
    let measured =
        ["seconds", "seconds_min", "seconds_median", "gflops", "workspace_bytes", "max_relative_error"];
    let numbers: Vec<Option<f64>> = measured.iter().map(|name| row[name].as_f64()).collect();
    let sound = match numbers[..] {
        [Some(seconds), Some(least), Some(median), Some(gflops), Some(_), Some(error)] => {
            let rate = flops / seconds / 1e9;
            let ordered = 0.0 < least && least <= seconds && seconds <= median;
            ordered && (gflops - rate).abs() <= 1e-9 * rate && error < 1e-4 && row["skipped"].is_null()
        }
        _ => {
            let none = measured.iter().all(|name| row[name].is_null());
            none && row["skipped"].as_str().is_some_and(|reason| !reason.is_empty()) && row["chosen"] == false
        }
    };
    if sound && names == expected { Ok(()) } else { Err(format!("{row}")) }
}

/// The choice has the least `seconds` of the rows; within 3 % the least workspace, and then the least time.
#[track_caller]
pub(crate) fn check_choice(rows: &[Value]) {
    let timed: Vec<(f64, f64, bool)> = rows
        .iter()
        .filter_map(|row| {
            let number = |name: &str| row[name].as_f64();
            Some((number("workspace_bytes")?, number("seconds")?, row["chosen"].as_bool()?))
        })
        .collect();
    let least = timed.iter().map(|row| row.1).fold(f64::INFINITY, f64::min);
    let mut equals: Vec<_> = timed.iter().filter(|row| row.1 <= 1.03 * least).collect();
    equals.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.total_cmp(&b.1)));
    assert!(equals[0].2, "{equals:?} of {timed:?}");
    assert_eq!(timed.iter().filter(|row| row.2).count(), 1, "{timed:?}");
}

#[test]
fn json_holds_every_algorithm_and_one_choice() {
    let found = passes(&[SMALL, STRIDED]);
    let keys: Vec<_> = found.keys().map(|(problem, pass)| (problem.as_str(), pass.as_str())).collect();
    let expected =
        [SMALL, STRIDED].map(|problem| ["bwd-data", "bwd-weights", "fwd"].map(|pass| (problem, pass)));
    assert_eq!(keys, expected.concat());
    let mut failures = Failures::new("rows of bench");
    for ((problem, pass), rows) in &found {
        let flops = problem.parse::<convoke::conv::ConvProblem>().unwrap().flops();
        for row in rows {
            failures.check(format!("{problem} {pass} {}", row["algorithm"]), check_row(row, flops));
        }
        assert_eq!(rows.iter().filter(|row| row["chosen"] == true).count(), 1, "{problem} {pass}");
        let mut names: Vec<&str> = rows.iter().map(|row| row["algorithm"].as_str().unwrap()).collect();
        let mut known: Vec<&str> = convoke::conv::algorithms().iter().map(|known| known.name()).collect();
        names.sort_unstable();
        known.sort_unstable();
        assert_eq!(names, known, "{problem} {pass}");
        let seconds = rows.iter().map(|row| row["seconds"].as_f64().unwrap_or(f64::INFINITY));
        assert!(seconds.is_sorted(), "{problem} {pass}");
        check_choice(rows);
    }
    failures.finish();
}

/// Tables of text are sorted by time and mark one choice, whatever the effort; and no algorithm does more than the machine can.
#[test]
fn tables_agree_with_the_choice() {
    for effort in ["measure", "exhaustive"] {
        let args = [SMALL, STRIDED, "mb4ic16ih14oc16kh3ph1", "mb2ic32ih7oc32kh3ph1g32", "--effort", effort];
        let text = bench(&args).exits(0).stdout;
        let tables: Vec<&str> = text.split("\n\n").filter(|part| part.contains("% of peak")).collect();
        assert_eq!(tables.len(), 12, "{text}");
        for table in tables {
            let mut lines = table.lines().skip(2).take_while(|line| !line.starts_with("= "));
            let cells: Vec<Vec<&str>> =
                lines.by_ref().map(|line| line.split_whitespace().collect()).collect();
            let number = |row: &[&str], column: usize| row[column].parse::<f64>().unwrap();
            let times: Vec<f64> = cells.iter().map(|row| number(row, 1)).collect();
            assert!(times.is_sorted(), "{table}");
            let chosen: Vec<usize> =
                (0..cells.len()).filter(|&row| cells[row].last() == Some(&"chosen")).collect();
            assert_eq!(chosen.len(), 1, "{table}");
            // To the digits shown.
            assert!(times[chosen[0]] <= 1.031 * times[0] + 1e-4, "{table}");
            let told = table.lines().find(|line| line.starts_with("= ")).unwrap();
            assert!(told.contains("within 3 % of") || times[chosen[0]] <= times[0], "{table}");
            for row in &cells {
                assert!((0.0..=100.0).contains(&number(row, 3)), "{table}");
            }
        }
    }
}

#[test]
fn algorithms_by_name() {
    let timed = |args: &[&str]| {
        let found = passes(&[&[SMALL, "--pass", "fwd"], args].concat());
        assert_eq!(found.len(), 1);
        let rows = found.into_values().next().unwrap();
        let timed = rows.into_iter().filter_map(|row| match row["skipped"].as_str() {
            Some(_) => None,
            None => Some(row["algorithm"].as_str().unwrap().to_owned()),
        });
        timed.collect::<Vec<String>>()
    };
    assert_eq!(timed(&["--only", "im2col"]), ["im2col"]);
    let mut both = timed(&["--only", "im2col,reference", "--format", "nchw", "--dtype", "f64"]);
    both.sort_unstable();
    assert_eq!(both, ["im2col", "reference"]);
    let others = timed(&["--skip", "im2col*,reference"]);
    assert!(others.iter().all(|name| !name.starts_with("im2col") && name != "reference"), "{others:?}");
    // Nobody is left: said, but no failure.
    let outcome = bench(&[SMALL, "--pass", "fwd", "--only", "pointwise", "-v"]).exits(0);
    assert!(outcome.stdout.contains("no algorithm is left"), "{}", outcome.stdout);
    assert!(outcome.stdout.contains("not timed: pointwise: "), "{}", outcome.stdout);
}

#[test]
fn tables_and_reasons() {
    let outcome = bench(&[SMALL, STRIDED, "--pass", "fwd,bwd-weights", "-v"]).exits(0);
    let lines: Vec<&str> = outcome.stdout.lines().collect();
    assert!(lines[0].contains("2 threads") && lines[0].contains("peak") && lines[0].contains("GB/s"));
    assert!(outcome.stdout.contains(&format!("{SMALL}: fwd, nhwc f32, 0.00")), "{}", outcome.stdout);
    assert_eq!(outcome.stdout.matches("  chosen\n").count(), 4, "{}", outcome.stdout);
    assert_eq!(lines.iter().filter(|line| line.starts_with("= ")).count(), 4, "{lines:#?}");
    assert!(outcome.stdout.contains("  not timed: pointwise: "), "{}", outcome.stdout);
    assert!(lines.iter().any(|line| line.starts_with("bwd-weights, 2 problems: ")), "{lines:#?}");
    assert!(!outcome.stderr.contains("warning"), "{}", outcome.stderr);
}

#[test]
fn bad_usage() {
    let folder = tempfile::tempdir().unwrap();
    let suite = |name: &str, content: &str| {
        let file = folder.path().join(name);
        fs::write(&file, content).unwrap();
        text(&file).to_owned()
    };
    let bad = suite("bad.txt", &format!("# a comment\n{SMALL}\n\nmb1ic4oops  # wrong\n"));
    let empty = suite("empty.txt", "# nothing\n\n");
    let cases: &[(&[&str], &[&str])] = &[
        (&[], &["name a problem", "--suite"]),
        (&["mb1ic4"], &["mb1ic4", "`oc` is missing"]),
        (&["nonsense"], &["nonsense"]),
        (&["mb1ic4ih2oc4kh3"], &["larger than the padded input"]),
        (&[SMALL, "--only", "fastest"], &["no algorithm fastest", "im2col", "reference"]),
        (&[SMALL, "--skip", "im3col*"], &["no algorithm im3col*", "im2col"]),
        (&[SMALL, "--pass", "sideways"], &["--pass", "fwd, bwd-data, bwd-weights"]),
        (&[SMALL, "--format", "chwn"], &["--format", "nchw, nhwc"]),
        (&[SMALL, "--effort", "heuristic"], &["--effort", "measure, exhaustive"]),
        (&[SMALL, "--workspace-limit", "much"], &["--workspace-limit", "'much'"]),
        (&[SMALL, "--accuracy", "high"], &["--accuracy", "strict, standard, relaxed, rounded"]),
        (&["--suite", &bad], &["bad.txt", "line 4", "mb1ic4oops"]),
        (&["--suite", &empty], &["empty.txt", "no problem"]),
    ];
    let mut failures = Failures::new("bench with bad usage");
    for (args, needles) in cases {
        let outcome = bench(args);
        failures.check(format!("{args:?}"), outcome.check(2, needles));
        let silent = if outcome.stdout.is_empty() { Ok(()) } else { Err(outcome.stdout) };
        failures.check(format!("standard output of {args:?}"), silent);
    }
    let budget = convoke(&["bench", SMALL, "--budget", "0"]);
    failures.check("--budget 0", budget.check(2, &["--budget", "must be above 0"]));
    let missing = bench(&["--suite", text(&folder.path().join("none.txt"))]);
    failures.check("no such suite", missing.check(1, &["none.txt", "No such file"]));
    let huge = bench(&["mb10000ic1000ih300oc1kh3"]);
    failures.check("a huge problem", huge.check(1, &["GB for its tensors", "are free"]));
    failures.finish();
}

#[test]
fn suites_add_up_and_problems_count_once() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("suite.txt");
    fs::write(&file, format!("{STRIDED} # first\n{SMALL}\n{STRIDED}\n")).unwrap();
    let args = [SMALL, "--suite", text(&file), "--suite", text(&file), "--pass", "fwd", "--only", "im2col"];
    assert_eq!(passes(&args).len(), 2);
}

#[test]
fn the_page_needs_nothing_else() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("bench.html");
    bench(&[SMALL, STRIDED, "--report", text(&file)]).exits(0);
    let page = fs::read_to_string(file).unwrap();
    assert_self_contained(&page);
    assert_eq!(page.matches("<svg").count(), 6, "a chart for each problem and pass");
    assert_eq!(page.matches("class=\"bar chosen\"").count(), 6);
    for needle in
        ["<h2>Forward</h2>", "<h2>Backward-weights</h2>", "gain of choosing", SMALL, "not timed</summary>"]
    {
        assert!(page.contains(needle), "no {needle}");
    }
}

/// Ctrl-C: what is done is still written.
#[cfg(unix)]
#[test]
fn interrupted() {
    use std::process::{Command, Stdio};
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("bench.json");
    let problems: Vec<String> = (8..40).map(|size| format!("mb8ic32ih{size}oc32kh3ph1")).collect();
    let mut args = vec!["bench", "--budget", "0.2", "--json", text(&file)];
    args.extend(problems.iter().map(String::as_str));
    let mut command = super::program::command(&args);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    // The first table comes when the first pass is done.
    let mut out = std::io::BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    while !line.starts_with("= ") {
        line.clear();
        assert!(std::io::BufRead::read_line(&mut out, &mut line).unwrap() > 0, "ended without a table");
    }
    assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
    std::io::Read::read_to_string(&mut out, &mut line).unwrap();
    let output = child.wait_with_output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(130), "{stderr}");
    assert!(stderr.contains("interrupted after "), "{stderr}");
    let rows: Value = serde_json::from_str(&fs::read_to_string(file).unwrap()).unwrap();
    let chosen = rows.as_array().unwrap().iter().filter(|row| row["chosen"] == true).count();
    assert!((1..90).contains(&chosen), "{chosen} passes of 96");
}
