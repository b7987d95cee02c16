//! Files made to harm: text that commands terminals, pipes and devices in the place of files, planted links, small files that
//! would fill the memory.
#![cfg(unix)]

use std::fs;
use std::io::Read;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use convoke_testkit::Failures;
use serde_json::{Value, json};

use super::program::{Outcome, command, idx, on_tiny_data, run, text, tiny_mnist, write_png};

/// Sets a terminal's title, clears it, writes over lines, turns text around.
const TRICKS: [&str; 5] =
    ["\u{1b}]0;x\u{7}", "\u{1b}[2J", "\nerror: all is well\r", "\u{202e}\u{2066}x", "\u{9b}2J\u{7f}\u{0}"];

/// Runs the program, which must end within a minute.
fn outcome_in_time(mut command: Command) -> Outcome {
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let (mut stdout, mut stderr) = (child.stdout.take().unwrap(), child.stderr.take().unwrap());
    let reading = std::thread::spawn(move || {
        let mut text = String::new();
        stdout.read_to_string(&mut text).map(|_| text)
    });
    let began = Instant::now();
    let code = loop {
        match child.try_wait().unwrap() {
            Some(status) => break status.code(),
            None if began.elapsed() > Duration::from_secs(60) => {
                child.kill().unwrap();
                break None;
            }
            None => std::thread::sleep(Duration::from_millis(10)),
        }
    };
    let mut text = String::new();
    stderr.read_to_string(&mut text).unwrap();
    Outcome { code, stdout: reading.join().unwrap().unwrap(), stderr: text }
}

fn in_time(args: &[&str]) -> Outcome {
    outcome_in_time(command(args))
}

fn mkfifo(path: &Path) {
    assert!(Command::new("mkfifo").arg(path).status().unwrap().success());
}

/// Whether nothing but line ends and tabs commands a terminal, and no line pretends to be another one's.
fn check_harmless(text: &str) -> Result<(), String> {
    let bad = |c: char| {
        (c.is_control() && !matches!(c, '\n' | '\t'))
            || matches!(c, '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
    };
    match text.contains(bad) || text.lines().any(|line| line.starts_with("error: all is well")) {
        true => Err(format!("obeyed, not shown: {text:?}")),
        false => Ok(()),
    }
}

fn check_outcome(outcome: &Outcome, code: i32, needles: &[&str]) -> Result<(), String> {
    outcome.check(code, needles)?;
    check_harmless(&outcome.stdout).and_then(|()| check_harmless(&outcome.stderr))
}

/// A plan for the tiny data set.
fn plan(folder: &Path) -> Value {
    let file = folder.join("sound-plan.json");
    let args = ["--batch-size", "16", "--plan-time", "0", "--effort", "heuristic", "--json", text(&file)];
    let outcome = in_time(&[&["plan", "--model", "mnist-cnn"], &args[..]].concat());
    outcome.check(0, &[]).unwrap();
    serde_json::from_str(&fs::read_to_string(&file).unwrap()).unwrap()
}

#[test]
fn text_out_of_files_is_shown_and_not_obeyed() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let plan = plan(folder.path());
    let mut failures = Failures::new("hostile text");
    for (index, trick) in TRICKS.into_iter().enumerate() {
        let (file, page) = (at(&format!("file{index}")), at("page.html"));
        let mut try_plan = |what: &str, change: &dyn Fn(&mut Value)| {
            let mut changed = plan.clone();
            change(&mut changed["plan"]);
            fs::write(&file, changed.to_string()).unwrap();
            let outcome = run(
                "train",
                &[
                    "--steps",
                    "1",
                    "--batch-size",
                    "16",
                    "--memory-plan",
                    text(&file),
                    "--report",
                    text(&page),
                ],
            );
            failures.check(
                format!("plan {trick:?}: {what}"),
                check_outcome(&outcome, 1, &[]).or_else(|_| check_outcome(&outcome, 2, &[])),
            );
            let page = fs::read_to_string(&page).unwrap_or_default();
            failures.check(format!("page of plan {trick:?}: {what}"), check_harmless(&page));
        };
        try_plan("model", &|plan| plan["model"] = json!(trick));
        try_plan("path", &|plan| plan["blocks"][0]["path"] = json!(trick));
        try_plan("keep", &|plan| plan["blocks"][0]["keep"] = json!(trick));

        for line in [format!("mb{trick}"), format!("{trick}mb1ic1"), format!("i1x2x3,k{trick}x3x3")] {
            fs::write(&file, &line).unwrap();
            let outcome = in_time(&["tune", "--suite", text(&file), "--cache", text(&at("cache"))]);
            failures.check(format!("suite {line:?}"), check_outcome(&outcome, 2, &["--suite"]));
        }

        let run_folder = at(&format!("run{index}"));
        let step = run_folder.join("step-0000000001");
        fs::create_dir_all(&step).unwrap();
        for manifest in
            [json!({"format": trick}).to_string(), trick.to_owned(), format!("{{\"format\": {trick}}}")]
        {
            fs::write(step.join("training.json"), &manifest).unwrap();
            let outcome = run("train", &["--steps", "2", "--checkpoint", text(&run_folder), "--resume"]);
            failures
                .check(format!("checkpoint {manifest:?}"), check_outcome(&outcome, 1, &["training.json"]));
        }

        let scope = at("cache").join("convoke-0.1_some-cpu_avx2");
        fs::create_dir_all(&scope).unwrap();
        let name = format!("{}.json", trick.replace('\0', ""));
        fs::write(scope.join(&name), json!({"version": trick}).to_string()).unwrap();
        fs::create_dir_all(at("cache").join(trick.replace('\0', ""))).unwrap();
        for what in ["list", "verify", "prune"] {
            let outcome = in_time(&["cache", "--cache", text(&at("cache")), what]);
            let code = outcome.code.unwrap_or(-1);
            failures.check(format!("cache {what} {trick:?}"), check_outcome(&outcome, code, &[]));
        }
    }
    failures.finish();
}

/// What an import brings in would be shown by `list` and `show` later.
#[test]
fn an_import_brings_no_commands() {
    let folder = tempfile::tempdir().unwrap();
    let (cache, export) = (folder.path().join("cache"), folder.path().join("export.json"));
    let problem = "mb1ic4ih8iw8oc4oh8ow8kh3kw3sh1sw1ph1pw1";
    let on = |args: &[&str]| in_time(&[&["cache", "--cache", text(&cache)], args].concat());
    let tuned = ["tune", problem, "--pass", "fwd", "--threads", "1", "--cache", text(&cache)];
    in_time(&tuned).exits(0);
    on(&["export", text(&export)]).exits(0);
    let sound: Value = serde_json::from_str(&fs::read_to_string(&export).unwrap()).unwrap();
    let skipped = sound["entries"][0]["record"]["candidates"].as_array().unwrap();
    let skipped = skipped.iter().position(|candidate| candidate["skipped"].is_string()).unwrap();
    on(&["prune", "--all"]).exits(0);
    let mut failures = Failures::new("hostile exports");
    for trick in TRICKS {
        for place in [
            "/entries/0/scope",
            "/entries/0/record/chosen",
            "/entries/0/record/key/problem",
            "/entries/0/record/key/dtype",
            "/entries/0/record/candidates/0/algorithm",
            &format!("/entries/0/record/candidates/{skipped}/skipped"),
        ] {
            let mut changed = sound.clone();
            *changed.pointer_mut(place).unwrap_or_else(|| panic!("no {place}")) = json!(trick);
            fs::write(&export, changed.to_string()).unwrap();
            let refused = check_outcome(&on(&["import", text(&export)]), 1, &["export.json"]);
            failures.check(format!("{place} = {trick:?}"), refused);
            for args in [&["list"][..], &["show", problem], &["verify"]] {
                let outcome = on(args);
                let code = outcome.code.unwrap_or(-1);
                failures.check(format!("{args:?} after {place}"), check_outcome(&outcome, code, &[]));
            }
        }
    }
    failures.finish();
    fs::write(&export, sound.to_string()).unwrap();
    assert!(on(&["import", text(&export)]).exits(0).stdout.contains("1 result added"));
}

/// Reading a pipe would wait for ever, reading a device would never end.
#[test]
fn only_regular_files_are_read() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    mkfifo(&at("pipe"));
    symlink("/dev/zero", at("zero")).unwrap();
    fs::create_dir(at("folder")).unwrap();
    let mut failures = Failures::new("what is no regular file");
    let cases = [("pipe", "a named pipe"), ("zero", "a device"), ("folder", "a folder")];
    for (name, what) in cases {
        let place = at(name);
        let plan = outcome_in_time(command(&on_tiny_data(
            "train",
            &["--steps", "1", "--memory-plan", text(&place)],
        )));
        failures.check(format!("--memory-plan {name}"), check_outcome(&plan, 1, &["--memory-plan", what]));
        let suite = in_time(&["bench", "--suite", text(&place)]);
        failures.check(format!("--suite {name}"), check_outcome(&suite, 1, &["--suite", what]));
        let import = in_time(&["cache", "--cache", text(&at("cache")), "import", text(&place)]);
        failures.check(format!("cache import {name}"), check_outcome(&import, 1, &[text(&place), what]));
    }
    // In the place of an entry of the cache.
    let scope = at("cache").join("convoke-0.1_some-cpu_avx2");
    fs::create_dir_all(&scope).unwrap();
    mkfifo(&scope.join("pipe.json"));
    symlink("/dev/zero", scope.join("zero.json")).unwrap();
    let verified = in_time(&["cache", "--cache", text(&at("cache")), "verify"]);
    failures.check("cache verify", check_outcome(&verified, 1, &["2 results damaged"]));
    let shown = verified.stdout.contains("a named pipe") && verified.stdout.contains("a device");
    failures.check("cache verify says why", if shown { Ok(()) } else { Err(verified.stdout) });
    let pruned = in_time(&["cache", "--cache", text(&at("cache")), "prune"]);
    failures.check("cache prune", check_outcome(&pruned, 0, &[]));
    // In the place of data.
    for (data, name) in [
        ("mnist", "train-images-idx3-ubyte"),
        ("cifar10", "cifar-10-binary.tar.gz"),
        ("cifar10", "data_batch_1.bin"),
        ("camvid", "train/a.png"),
        ("camvid", "trainannot/a.png"),
    ] {
        for (link, what) in &cases[..2] {
            let set = tempfile::tempdir().unwrap();
            if data == "mnist" {
                for entry in fs::read_dir(tiny_mnist()).unwrap() {
                    let path = entry.unwrap().path();
                    fs::copy(&path, set.path().join(path.file_name().unwrap())).unwrap();
                }
            }
            for part in ["train", "trainannot", "test", "testannot"] {
                let (color, len) = if part.ends_with("annot") {
                    (png::ColorType::Grayscale, 64)
                } else {
                    (png::ColorType::Rgb, 192)
                };
                write_png(&set.path().join(part).join("a.png"), [8, 8], color, &vec![0; len]);
            }
            fs::write(set.path().join("test_batch.bin"), [0; 3073]).unwrap();
            let file = set.path().join(name);
            let _ = fs::remove_file(&file);
            symlink(at(link), &file).unwrap();
            let outcome = in_time(&["train", "--data", data, "--data-dir", text(set.path()), "--steps", "1"]);
            failures.check(format!("{name} as {link}"), check_outcome(&outcome, 1, &[text(&file), what]));
        }
    }
    failures.finish();
}

/// A header that claims more than MNIST's images can be is refused before any data is read.
#[test]
fn a_claim_of_gigabytes_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(tiny_mnist()).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, folder.path().join(path.file_name().unwrap())).unwrap();
    }
    let file = folder.path().join("train-images-idx3-ubyte");
    fs::write(&file, idx(&[5_400_000, 28, 28], [])).unwrap();
    let data = fs::File::options().write(true).open(&file).unwrap();
    data.set_len(16 + 5_400_000 * 784).unwrap();
    let outcome = in_time(&["train", "--data", "mnist", "--data-dir", text(folder.path()), "--steps", "1"]);
    check_outcome(&outcome, 1, &[text(&file), "sizes", "[5400000, 28, 28]"]).unwrap();
}

/// Links are replaced by the file that was asked for; what they led to is not touched. A process's open file is no link to
/// replace: it is written to.
#[test]
fn links_lead_nowhere() {
    let folder = tempfile::tempdir().unwrap();
    let [victim, link, page] = ["victim", "out.json", "out.html"].map(|name| folder.path().join(name));
    fs::write(&victim, "precious").unwrap();
    symlink(&victim, &link).unwrap();
    symlink(folder.path().join("none"), &page).unwrap();
    run("train", &["--steps", "1", "--json", text(&link), "--report", text(&page)]).exits(0);
    assert_eq!(fs::read(&victim).unwrap(), b"precious");
    assert!([&link, &page].iter().all(|path| fs::symlink_metadata(path).unwrap().is_file()));
    assert!(!folder.path().join("none").exists());

    let stdout = folder.path().join("stdout");
    symlink("/proc/self/fd/1", &stdout).unwrap();
    let mut program = command(&on_tiny_data("train", &["--steps", "1", "--json", text(&stdout)]));
    let file = folder.path().join("redirected");
    let status = program.stdout(fs::File::create(&file).unwrap()).stderr(Stdio::null()).status().unwrap();
    assert!(status.success() && fs::symlink_metadata(&stdout).unwrap().is_symlink());
    assert!(fs::read_to_string(&file).unwrap().contains("\"runs\""));
}

/// A file in the making that a killed run left is taken away; that of a run still at work is not.
#[test]
fn leftovers_of_killed_runs_are_removed() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    fs::write(at(".convoke-AbCdEf012345.tmp"), "half").unwrap();
    fs::write(at(".convoke-AbCdEf543210.tmp"), "half").unwrap();
    let held = fs::File::open(at(".convoke-AbCdEf543210.tmp")).unwrap();
    held.lock().unwrap();
    run("train", &["--steps", "1", "--json", text(&at("out.json"))]).exits(0);
    assert!(!at(".convoke-AbCdEf012345.tmp").exists() && at(".convoke-AbCdEf543210.tmp").exists());
    drop(held);
    run("train", &["--steps", "1", "--json", text(&at("out.json"))]).exits(0);
    assert!(!at(".convoke-AbCdEf543210.tmp").exists());
}
