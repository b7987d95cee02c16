//! `convoke tune` and `convoke cache`: what is measured once is kept, whatever happens in between.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use convoke_testkit::Failures;

use super::program::{Outcome, command, contents, convoke, outcome, text};

const SMALL: &str = "mb1ic4ih8iw8oc4oh8ow8kh3kw3sh1sw1ph1pw1";
const OTHER: &str = "mb2ic6ih5iw7oc4oh5ow7kh1kw1sh1sw1ph0pw0";

fn tune(folder: &Path, args: &[&str]) -> Outcome {
    outcome(tune_command(folder, args))
}

fn tune_command(folder: &Path, args: &[&str]) -> std::process::Command {
    command(&[&["tune", "--threads", "2", "--cache", text(folder)], args].concat())
}

fn cache(folder: &Path, args: &[&str]) -> Outcome {
    convoke(&[&["cache", "--cache", text(folder)], args].concat())
}

/// The files of results, without those of interrupted writers.
fn results(folder: &Path) -> Vec<PathBuf> {
    contents(folder).into_keys().filter(|path| path.extension().is_some_and(|end| end == "json")).collect()
}

#[test]
fn what_is_known_is_not_measured_again() {
    let folder = tempfile::tempdir().unwrap();
    let first = tune(folder.path(), &[SMALL, OTHER]).exits(0);
    assert!(first.stdout.contains("6 measured"), "{}", first.stdout);
    assert_eq!(first.stdout.lines().count(), 7, "a line a pass, and the summary: {}", first.stdout);
    let before = contents(folder.path());
    assert_eq!(before.len(), 6);
    let again = tune(folder.path(), &[SMALL, OTHER, "--effort", "exhaustive"]).exits(0);
    assert!(again.stdout.contains("0 measured") && again.stdout.contains("6 known"), "{}", again.stdout);
    assert!(contents(folder.path()) == before, "files were touched");
    let forced = tune(folder.path(), &[SMALL, "--pass", "fwd", "--again"]).exits(0);
    assert!(forced.stdout.contains("1 measured"), "{}", forced.stdout);
    assert_eq!(contents(folder.path()).len(), 6);
    // Other threads, another format: other problems.
    let nchw = tune(folder.path(), &[SMALL, "--format", "nchw", "--pass", "fwd"]).exits(0);
    assert!(nchw.stdout.contains("1 measured"), "{}", nchw.stdout);
    let verbose = tune(folder.path(), &[SMALL, "--pass", "fwd", "-v"]).exits(0);
    let line = verbose.stdout.lines().next().unwrap();
    assert!(line.contains("im2col ") && line.contains(" ms, ") && line.contains("pointwise ("), "{line}");
    assert!(line.contains(", = ") && line.ends_with("(cached)"), "{line}");
}

#[test]
fn json_names_the_choices() {
    let folder = tempfile::tempdir().unwrap();
    let first = tune(folder.path(), &[SMALL, "--json", "-"]).exits(0).json();
    let second = tune(folder.path(), &[SMALL, "--json", "-"]).exits(0).json();
    assert_eq!(first, second, "the cache gives back what was measured");
    let rows = first.as_array().unwrap();
    assert_eq!(rows.iter().filter(|row| row["chosen"] == true).count(), 3);
    for rows in rows.chunk_by(|a, b| a["pass"] == b["pass"]) {
        super::bench::check_choice(rows);
    }
    // By estimate, which is not stored.
    let empty = tempfile::tempdir().unwrap();
    let rows = tune(empty.path(), &[SMALL, "--effort", "heuristic", "--json", "-"]).exits(0).json();
    assert_eq!(rows.as_array().unwrap().iter().filter(|row| row["chosen"] == true).count(), 3);
    assert!(contents(empty.path()).is_empty());
}

/// The first layer's input needs no gradient: five convolutions of six.
#[test]
fn the_convolutions_of_a_model() {
    let folder = tempfile::tempdir().unwrap();
    let model = ["--model", "mnist-cnn", "--batch-size", "3"];
    let outcome = tune(folder.path(), &model).exits(0);
    assert!(outcome.stdout.contains("5 measured"), "{}", outcome.stdout);
    for start in [
        "mb3ic1ih28iw28oc32oh26ow26kh3kw3sh1sw1ph0pw0 fwd ",
        "mb3ic32ih26iw26oc64oh24ow24kh3kw3sh1sw1ph0pw0 bwd-data ",
    ] {
        assert!(outcome.stdout.lines().any(|line| line.starts_with(start)), "{start} in {}", outcome.stdout);
    }
    assert!(tune(folder.path(), &model).exits(0).stdout.contains("5 known"));
    let forward = tune(folder.path(), &[&model[..], &["--pass", "fwd"]].concat()).exits(0);
    assert!(forward.stdout.contains("2 known"), "{}", forward.stdout);
}

#[test]
fn a_budget_that_is_over_leaves_the_rest() {
    let folder = tempfile::tempdir().unwrap();
    let outcome = tune(folder.path(), &[SMALL, "--budget", "1e-9"]).exits(0);
    assert!(outcome.stdout.contains("3 left for lack of time"), "{}", outcome.stdout);
    assert!(contents(folder.path()).is_empty());
}

#[test]
fn bad_usage() {
    let mut failures = Failures::new("tune and cache with bad usage");
    let cases: &[(&[&str], &[&str])] = &[
        (&["tune"], &["name a problem", "--model"]),
        (&["tune", "mb1"], &["mb1"]),
        (&["tune", SMALL, "--only", "x"], &["no algorithm x", "im2col"]),
        (&["tune", SMALL, "--batch-size", "4"], &["--model"]),
        (&["tune", "--model", "alexnet9"], &["alexnet9", "--model"]),
        (&["tune", SMALL, "--budget=-1"], &["--budget"]),
        (&["cache"], &["Usage: convoke cache", "list", "prune"]),
        (&["cache", "fly"], &["'fly'"]),
        (&["cache", "show"], &["<PROBLEM>"]),
        (&["cache", "show", "mb1"], &["mb1"]),
        (&["cache", "prune", "--older-than", "old"], &["--older-than"]),
    ];
    for (args, needles) in cases {
        failures.check(format!("{args:?}"), convoke(args).check(2, needles));
    }
    failures.finish();
}

#[test]
fn an_empty_cache_is_no_error() {
    let folder = tempfile::tempdir().unwrap();
    let none = folder.path().join("none");
    for args in [&["list"][..], &["verify"]] {
        let outcome = cache(&none, args).exits(0);
        assert!(outcome.stdout.contains("`convoke tune` makes some"), "{}", outcome.stdout);
    }
    assert!(cache(&none, &["prune"]).exits(0).stdout.contains("0 files removed"));
    assert_eq!(cache(&none, &["path"]).exits(0).stdout, format!("{}\n", text(&none)));
    cache(&none, &["show", SMALL]).check(1, &["no result for", "convoke tune"]).unwrap();
    cache(&none, &["import", text(&none)]).check(1, &["No such file"]).unwrap();
    let default = convoke(&["cache", "path"]).exits(0);
    assert!(default.stdout.trim_end().ends_with("tuning"), "{}", default.stdout);
    assert!(!none.exists());
}

#[test]
fn results_are_listed_explained_and_carried_over() {
    let folder = tempfile::tempdir().unwrap();
    let home = folder.path().join("home");
    tune(&home, &[SMALL, OTHER]).exits(0);
    let list = cache(&home, &["list"]).exits(0).stdout;
    assert!(list.contains("(this machine): 6 results"), "{list}");
    assert_eq!(list.matches(SMALL).count(), 3, "{list}");

    let shown = cache(&home, &["show", "mb1ic4ih8oc4kh3ph1", "--pass", "fwd,bwd-data"]).exits(0).stdout;
    for needle in [
        &format!("{SMALL} fwd nhwc f32, 2 threads, standard"),
        "bwd-data",
        ", current\n",
        "samples",
        "spread",
        "im2col",
        "not timed: pointwise: ",
        "  chosen\n",
        "\n= ",
    ] {
        assert!(shown.contains(needle), "no {needle} in {shown}");
    }
    assert!(!shown.contains("bwd-weights nhwc"), "{shown}");
    cache(&home, &["show", "mb3ic4ih8oc4kh3ph1"]).check(1, &["no result for mb3"]).unwrap();

    let (file, away) = (folder.path().join("export.json"), folder.path().join("away"));
    assert!(cache(&home, &["export", text(&file)]).exits(0).stdout.contains("6 results"));
    assert!(cache(&away, &["import", text(&file)]).exits(0).stdout.contains("6 results added"));
    assert!(cache(&away, &["import", text(&file)]).exits(0).stdout.contains("6 were there already"));
    let names = |folder: &Path| -> Vec<PathBuf> {
        results(folder).iter().map(|path| path.strip_prefix(folder).unwrap().to_owned()).collect()
    };
    assert_eq!(names(&home), names(&away));
    assert!(tune(&away, &[SMALL, OTHER]).exits(0).stdout.contains("6 known"));

    assert!(cache(&away, &["prune"]).exits(0).stdout.contains("0 files removed; 6 results left"));
    assert!(cache(&away, &["prune", "--older-than", "1"]).exits(0).stdout.contains("6 results left"));
    assert!(cache(&away, &["prune", "--all"]).exits(0).stdout.contains("6 files removed; 0 results left"));
    assert_eq!((results(&away).len(), results(&home).len()), (0, 6));
}

#[test]
fn damage_is_found_and_mended() {
    let folder = tempfile::tempdir().unwrap();
    tune(folder.path(), &[SMALL]).exits(0);
    let file = results(folder.path()).into_iter().find(|path| text(path).contains("_fwd_")).unwrap();
    let good = fs::read_to_string(&file).unwrap();
    let mut failures = Failures::new("damaged results");
    let halves = good.split_at(good.len() / 2).0;
    for (what, content) in [
        ("empty", ""),
        ("cut off", halves),
        ("not JSON", "\0\u{1}garbage"),
        ("nonsense", &good.replace("\"median\": ", "\"median\": -")),
        ("another form", &good.replace("\"version\": 1", "\"version\": 77")),
    ] {
        fs::write(&file, content).unwrap();
        let verified = cache(folder.path(), &["verify"]);
        failures.check(format!("{what}: verify"), verified.check(1, &["1 result damaged"]));
        assert!(verified.stdout.contains("damaged: ") && verified.stdout.contains(text(&file)));
        let listed = cache(folder.path(), &["list"]);
        failures.check(format!("{what}: list"), listed.check(0, &[]));
        let tuned = tune(folder.path(), &[SMALL]);
        failures.check(format!("{what}: tune"), tuned.check(0, &["warning: ", "not used"]));
        let kept = tuned.stdout.contains("1 measured") && tuned.stdout.contains("2 known");
        failures.check(format!("{what}: only it is measured"), if kept { Ok(()) } else { Err(tuned.stdout) });
        failures.check(format!("{what}: mended"), cache(folder.path(), &["verify"]).check(0, &[]));
    }
    failures.finish();
    // A folder is nobody's result, whatever its name.
    let own = file.with_file_name("own.json");
    fs::create_dir(&own).unwrap();
    fs::write(own.join("notes"), "kept").unwrap();
    assert!(cache(folder.path(), &["verify"]).exits(0).stdout.contains("3 results: 3 sound"));
    fs::write(&file, "garbage").unwrap();
    let pruned = cache(folder.path(), &["prune"]).exits(0).stdout;
    assert!(pruned.contains(text(&file)) && pruned.contains("(damaged)"), "{pruned}");
    assert!(pruned.contains("1 file removed; 2 results left"), "{pruned}");
    assert!(own.join("notes").is_file());
}

#[test]
fn old_revisions_and_versions() {
    let folder = tempfile::tempdir().unwrap();
    tune(folder.path(), &[SMALL, "--pass", "fwd"]).exits(0);
    let file = results(folder.path()).remove(0);
    let good = fs::read_to_string(&file).unwrap();
    // The first candidate is said to have been measured in another revision.
    let at = good.find("\"revision\": ").unwrap();
    let end = at + good[at..].find(',').unwrap();
    fs::write(&file, format!("{}\"revision\": 99999{}", &good[..at], &good[end..])).unwrap();
    let verified = cache(folder.path(), &["verify"]).exits(0).stdout;
    assert!(verified.contains("out of date: ") && verified.contains("revision 99999"), "{verified}");
    assert!(cache(folder.path(), &["show", SMALL]).exits(0).stdout.contains("out of date"));
    assert!(tune(folder.path(), &[SMALL, "--pass", "fwd"]).exits(0).stdout.contains("1 measured"));

    let other = folder.path().join("convoke-0.0_some-cpu_avx2");
    fs::create_dir(&other).unwrap();
    fs::write(other.join(file.file_name().unwrap()), &good).unwrap();
    let verified = cache(folder.path(), &["verify"]).exits(0).stdout;
    assert!(verified.contains("1 sound, 1 of another version"), "{verified}");
    let pruned = cache(folder.path(), &["prune"]).exits(0).stdout;
    assert!(pruned.contains("(of another version)") && pruned.contains("1 result left"), "{pruned}");
}

/// Results that cannot be kept cost a warning, once.
#[test]
fn a_folder_that_cannot_be_written_to() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    fs::write(&file, "kept").unwrap();
    let outcome = tune(&file.join("cache"), &[SMALL, OTHER]);
    outcome.check(0, &["warning: "]).unwrap();
    assert_eq!(outcome.stderr.matches("warning").count(), 1, "{}", outcome.stderr);
    assert!(outcome.stdout.contains("6 measured") && !outcome.stdout.contains("results are in"));
    assert_eq!(fs::read(&file).unwrap(), b"kept");
    cache(&file.join("cache"), &["export", text(&folder.path().join("none/export"))]).check(1, &[]).unwrap();
}

/// As a full disk: not one byte can be written to a file.
#[cfg(unix)]
#[test]
fn a_disk_that_is_full() {
    let folder = tempfile::tempdir().unwrap();
    let home = folder.path().join("home");
    let program = tune_command(&home, &[SMALL]);
    let mut limited = std::process::Command::new("sh");
    limited.args(["-c", "trap '' XFSZ; ulimit -f 0; exec \"$@\"", "sh"]).stdin(Stdio::null());
    limited.arg(program.get_program()).args(program.get_args());
    limited.envs(program.get_envs().filter_map(|(key, value)| Some((key, value?))));
    let outcome = outcome(limited);
    outcome.check(0, &["warning: tuning results cannot be kept"]).unwrap();
    assert!(outcome.stdout.contains("3 measured"), "{}", outcome.stdout);
    assert!(contents(&home).is_empty(), "half-written files are left");
    tune(&home, &[SMALL]).exits(0);
    assert_eq!(contents(&home).len(), 3);
}

#[test]
fn two_processes_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let problems: Vec<String> = (4..10).map(|size| format!("mb1ic4ih{size}oc4kh3ph1")).collect();
    let args: Vec<&str> = problems.iter().map(String::as_str).chain(["--again"]).collect();
    let children: Vec<_> = (0..2)
        .map(|_| {
            let mut command = tune_command(folder.path(), &args);
            command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
        })
        .collect();
    for child in children {
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        assert!(output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
    }
    let verified = cache(folder.path(), &["verify"]).exits(0).stdout;
    assert!(verified.contains("18 results: 18 sound"), "{verified}");
    assert_eq!(contents(folder.path()).len(), 18, "temporary files are left");
}

#[test]
fn killed_in_the_middle() {
    let folder = tempfile::tempdir().unwrap();
    let problems: Vec<String> = (4..20).map(|size| format!("mb1ic4ih{size}oc4kh3ph1")).collect();
    let args: Vec<&str> = problems.iter().map(String::as_str).chain(["--again"]).collect();
    for milliseconds in [10, 25, 40, 60, 90, 130, 180, 250] {
        let mut command = tune_command(folder.path(), &args);
        let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        std::thread::sleep(Duration::from_millis(milliseconds));
        child.kill().unwrap();
        child.wait().unwrap();
        cache(folder.path(), &["verify"]).check(0, &[]).unwrap();
    }
    tune(folder.path(), &args[..2]).check(0, &[]).unwrap();
    let verified = cache(folder.path(), &["verify"]).exits(0).stdout;
    assert!(!verified.contains("damaged"), "{verified}");
}
