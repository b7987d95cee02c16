//! `convoke train FOLDER`: what is found in a folder, the run's own folder, and going on with it by `--resume` alone.

use std::fs;
use std::io::Write as _;
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use convoke_testkit::Failures;

use super::program::{Outcome, command, contents, outcome, photographs, scenes, text, tiny_mnist};

/// The program, run in a folder.
fn convoke_in(folder: &Path, args: &[&str]) -> Outcome {
    let mut program = command(args);
    program.current_dir(folder);
    outcome(program)
}

/// Flags that keep runs short.
const SHORT: [&str; 8] =
    ["--image-size", "32", "--batch-size", "4", "--effort", "heuristic", "--threads", "1"];

/// A folder with photographs of ten a class.
fn with_photos() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    photographs(&folder.path().join("photos"), 10);
    folder
}

fn train(folder: &Path, args: &[&str]) -> Outcome {
    convoke_in(folder, &[&["train", "photos"], &SHORT[..], args].concat())
}

/// The files of a run that two equal runs have in common.
fn results(run: &Path) -> Vec<Vec<u8>> {
    ["best.safetensors", "last.safetensors", "metrics.jsonl"]
        .map(|name| fs::read(run.join(name)).unwrap())
        .into()
}

#[test]
fn photographs_grow_and_a_killed_run_goes_on() {
    let folder = with_photos();
    let here = folder.path();
    let train = |args: &[&str]| {
        let flags = ["train", "photos", "--image-size", "64", "--batch-size", "4", "--effort", "heuristic"];
        convoke_in(here, &[&flags[..], &["--epochs", "5", "--progressive"], args].concat())
    };
    let shown = train(&["0.5", "--dry-run"]).exits(0).stderr;
    assert!(shown.contains("32 x 32 pixels at first (--progressive)"), "{shown}");
    train(&["0.5"]).exits(0);
    // Ended in an epoch of the second size.
    train(&["0.5", "--steps", "10"]).exits(0);
    convoke_in(here, &["train", "--resume", "--steps", "20"]).exits(0);
    assert_eq!(results(&here.join("runs/photos-1")), results(&here.join("runs/photos-2")));
    let refused = convoke_in(here, &["train", "--resume", "--progressive", "0.7"]);
    refused.check(2, &["--progressive"]).unwrap();
    scenes(&here.join("scenes"));
    let masks = ["train", "scenes", "--progressive", "0.5", "--batch-size", "2", "--steps", "1"];
    convoke_in(here, &masks).check(2, &["progressive", "masks have one size"]).unwrap();
    train(&["0.4"]).check(2, &["images of the first epochs", "32 x 32 pixels or more"]).unwrap();
    train(&["1.5"]).check(2, &["--progressive"]).unwrap();
}

#[test]
fn runs_have_folders_with_numbers_and_their_flags() {
    let folder = with_photos();
    let here = folder.path();
    let first =
        train(here, &["--epochs", "1", "--trivial-augment", "--freeze", "conv1", "--freeze", "layer1"])
            .exits(0);
    for words in ["run: runs/photos-1", "sand 10, sky 10", "16 to train, 4 to validate", "1 epoch of 4 steps"]
    {
        assert!(first.stderr.contains(words), "no {words} in {}", first.stderr);
    }
    train(here, &["--epochs", "1", "--seed", "2"]).exits(0);
    let settings = fs::read_to_string(here.join("runs/photos-1/run.toml")).unwrap();
    for line in
        ["data = \"folder\"", "epochs = 1", "freeze = [\"conv1\", \"layer1\"]", "trivial-augment = true"]
    {
        assert!(settings.lines().any(|found| found == line), "no {line} in {settings}");
    }
    assert!(!settings.contains("seed") && settings.contains(text(&here.join("photos"))), "{settings}");
    assert!(fs::read_to_string(here.join("runs/photos-2/run.toml")).unwrap().contains("seed = 2"));
    // Another run with the same flags but one.
    let other =
        convoke_in(here, &["train", "--config", "runs/photos-1/run.toml", "--batch-size", "8"]).exits(0);
    assert!(
        other.stderr.contains("runs/photos-3") && other.stderr.contains("8 images each"),
        "{}",
        other.stderr
    );
    // What nobody wants to keep.
    let before = contents(here);
    train(here, &["--steps", "1", "--no-output"]).exits(0);
    convoke_in(here, &["train", "random", "--model", "resnet20", "--batch-size", "2", "--steps", "1"])
        .exits(0);
    train(here, &["--dry-run"]).exits(0);
    assert!(contents(here) == before);
}

#[test]
fn resume_alone_goes_on_to_the_same_bits() {
    let folder = with_photos();
    let here = folder.path();
    let flags = ["--epochs", "6", "--ema", "0.9", "--mixup", "0.2", "--class-weights", "balanced"];
    train(here, &[&flags[..], &["--output", "whole"]].concat()).exits(0);
    // Killed without a word, once it has saved an epoch.
    let mut program = command(&[&["train", "photos"], &SHORT[..], &flags].concat());
    program.current_dir(here).stdout(Stdio::null()).stderr(Stdio::null());
    let mut child = program.spawn().unwrap();
    let run = here.join("runs/photos-1");
    let start = Instant::now();
    let has_saved = || {
        let mut names = fs::read_dir(run.join("checkpoint")).into_iter().flatten().flatten();
        names.any(|entry| entry.file_name().to_string_lossy().starts_with("step-"))
    };
    while !has_saved() && start.elapsed() < Duration::from_secs(120) {
        std::thread::sleep(Duration::from_millis(5));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    let resumed = convoke_in(here, &["train", "--resume", "--threads", "2"]).exits(0);
    assert!(resumed.stderr.contains("resumed after step"), "{}", resumed.stderr);
    assert!(results(&run) == results(&here.join("whole")));
    // From elsewhere, by its folder; longer than it was.
    let elsewhere = tempfile::tempdir().unwrap();
    let longer = convoke_in(elsewhere.path(), &["train", "--resume", text(&run), "--epochs", "7"]).exits(0);
    assert!(longer.stderr.contains("resumed after step 24 of 28"), "{}", longer.stderr);
    assert_eq!(contents(elsewhere.path()).len(), 0);
}

#[test]
fn what_a_resumed_run_keeps_is_refused_by_name() {
    let folder = with_photos();
    let here = folder.path();
    train(here, &["--epochs", "1"]).exits(0);
    convoke_in(here, &["train", "photos", "--steps", "1", "--no-output"]).exits(0);
    let before = contents(here);
    let mut failures = Failures::new("resumed with other flags");
    let cases: [(&[&str], &[&str]); 9] = [
        (
            &["--batch-size", "8"],
            &["--batch-size 8", "begun with 4", "--config runs/photos-1/run.toml --batch-size 8"],
        ),
        (&["--lr", "0.5"], &["--lr 0.5", "its default"]),
        (&["--model", "mobilenet-v2"], &["--model mobilenet-v2"]),
        (&["--image-size", "64"], &["--image-size 64", "begun with 32"]),
        (&["--mixup", "0.2"], &["--mixup 0.2"]),
        (&["--seed", "3"], &["--seed 3"]),
        (&["--nesterov"], &["--nesterov"]),
        (&["--output", "other"], &["--resume and --output name two runs"]),
        (&["--config", "runs/photos-1/run.toml"], &["--config", "cannot be used with", "--resume"]),
    ];
    for (args, needles) in cases {
        let refused = convoke_in(here, &[&["train", "--resume", "runs/photos-1"], args].concat());
        failures.check(format!("{args:?}"), refused.check(2, needles));
    }
    for (run, needles) in [("nowhere", &["no folder nowhere"][..]), ("photos", &["photos", "no run.toml"])] {
        failures.check(run, convoke_in(here, &["train", "--resume", run]).check(2, needles));
    }
    failures.finish();
    assert!(contents(here) == before);
}

/// A file of settings may come from a stranger, and from a hasty user.
#[test]
fn files_of_settings_are_checked() {
    let folder = with_photos();
    let here = folder.path();
    let mut failures = Failures::new("files of settings");
    for (settings, needles) in [
        ("epoch = 3", &["f.toml", "epoch is no flag", "did you mean epochs?"][..]),
        ("epochs = \"many\"", &["f.toml", "'many'", "--epochs"]),
        ("epochs = [1, 2]", &["f.toml", "--epochs", "multiple times"]),
        ("epochs = { a = 1 }", &["f.toml", "epochs: expected a number"]),
        ("report = \"/etc/passwd\"", &["f.toml", "report is no setting"]),
        ("output = \"/etc\"", &["f.toml", "output is no setting"]),
        ("profile = \"x\"", &["f.toml", "profile is no setting"]),
        ("json = \"x\"", &["f.toml", "json is no setting"]),
        ("download = true", &["f.toml", "download is no setting"]),
        ("epochs = ", &["f.toml", "TOML"]),
        ("\u{1b}[31m = 1", &["f.toml"]),
        ("memory-budget = 220", &["f.toml", "220MB?"]),
    ] {
        fs::write(here.join("f.toml"), settings).unwrap();
        let refused = convoke_in(here, &["train", "photos", "--config", "f.toml"]);
        assert!(!refused.stderr.contains('\u{1b}'), "{:?}", refused.stderr);
        failures.check(settings, refused.check(2, needles));
    }
    fs::create_dir(here.join("d.toml")).unwrap();
    for file in ["none.toml", "d.toml"] {
        failures.check(file, convoke_in(here, &["train", "photos", "--config", file]).check(1, &[file]));
    }
    failures.finish();
    assert!(!here.join("runs").exists());
}

#[test]
fn the_kind_of_a_folder_is_seen() {
    let folder = with_photos();
    let here = folder.path();
    scenes(&here.join("scenes"));
    fs::create_dir(here.join("digits")).unwrap();
    let says = |args: &[&str], words: &[&str]| {
        let said = convoke_in(here, &[&["train", "--dry-run"], args].concat()).exits(0).stderr;
        words.iter().for_each(|words| assert!(said.contains(words), "{args:?}: no {words} in {said}"));
    };
    says(
        &["photos"],
        &["data: photos, 20 photographs, 2 classes", "model: resnet18", "40 x 60 to 64 x 44 pixels"],
    );
    says(&["scenes"], &["data: scenes, 8 photographs", "6 to train, 2 to validate", "model: segnet"]);
    says(&[text(tiny_mnist())], &["data: mnist, 140 images, 10 classes", "model: mnist-cnn"]);
    // A name is a data set, also where a folder is called so.
    says(&["digits"], &["data: digits, 70,000 images"]);
    for (args, needles) in [
        (&["phtos"][..], &["no folder is called phtos", "did you mean photos?"][..]),
        (&["mnits"], &["did you mean mnist?"]),
        (&["photos/sky/0.png"], &["is a file"]),
        (&["digits", "--data", "mnist"], &["--data mnist", "DATA is digits already"]),
        (&["photos", "--data-dir", "photos"], &["--data-dir"]),
    ] {
        convoke_in(here, &[&["train"], args].concat()).check(2, needles).unwrap();
    }
}

#[test]
fn what_is_odd_in_a_folder_is_told() {
    let folder = with_photos();
    let here = folder.path();
    let photos = here.join("photos");
    for name in ["sky/a.heic", "sky/b.HEIC", "sand/c.avif", "sand/notes.txt"] {
        fs::write(photos.join(name), "x").unwrap();
    }
    fs::create_dir(photos.join("empty")).unwrap();
    photographs(&here.join("few"), 3);
    let said = train(here, &["--dry-run"]).exits(0).stderr;
    for words in ["ignored: 1 .avif, 2 .heic", "magick mogrify", "empty: a class without images", "2 classes"]
    {
        assert!(said.contains(words), "no {words} in {said}");
    }
    fs::rename(here.join("few/sky"), photos.join("rare")).unwrap();
    let said = train(here, &["--dry-run"]).exits(0).stderr;
    for words in ["fewer than 10 to train on for", "rare is rare beside the others: --class-weights balanced"]
    {
        assert!(said.contains(words), "no {words} in {said}");
    }
    // A class that only validation has, and a folder without classes.
    let split = here.join("split");
    for (from, to) in [("sky", "train/sky"), ("sand", "train/sand"), ("rare", "val/rare")] {
        fs::create_dir_all(split.join(to).parent().unwrap()).unwrap();
        fs::rename(photos.join(from), split.join(to)).unwrap();
    }
    convoke_in(here, &["train", "split"])
        .check(1, &["split/val/rare", "Each class needs a folder of the same name in train"])
        .unwrap();
    convoke_in(here, &["train", "split/train/sky"])
        .check(1, &["no folder of a class", "photos/cat/1.jpg"])
        .unwrap();
}

#[test]
fn weights_of_another_run_are_taken() {
    let folder = with_photos();
    let here = folder.path();
    train(here, &["--epochs", "1", "--model", "mobilenet_v2"]).exits(0);
    // Three classes instead of two: all but the last layer is taken, and the model is the run's.
    photographs(&here.join("more"), 4);
    fs::rename(here.join("more/sky"), here.join("more/sea")).unwrap();
    photographs(&here.join("more"), 4);
    let more = [&["train", "more", "--weights", "runs/photos-1"], &SHORT[..], &["--epochs", "1"]].concat();
    let said = convoke_in(here, &more).exits(0).stderr;
    for words in [
        "model: mobilenet-v2",
        "weights of runs/photos-1/best.safetensors",
        "weights: runs/photos-1/best.safetensors",
    ] {
        assert!(said.contains(words), "no {words} in {said}");
    }
    convoke_in(here, &["train", "--resume", "runs/more-1", "--epochs", "2"]).exits(0);
    for (weights, needles) in [
        ("photos", &["photos is no folder of a run", "model.json"][..]),
        (
            "imagenet",
            &["resnet18-f37072fd.pth is not there", "--download", "https://download.pytorch.org/models/"],
        ),
    ] {
        let refused = train(here, &["--weights", weights, "--dry-run"]);
        assert!([1, 2].contains(&refused.code.unwrap()));
        refused.check(refused.code.unwrap(), needles).unwrap();
    }
    train(here, &["--weights", "imagenet", "--model", "densenet121"])
        .check(2, &["none are known for densenet121", "resnet18"])
        .unwrap();
    // A file of that name with other contents is not read.
    let home = here.join("home");
    fs::create_dir_all(home.join("convoke/weights")).unwrap();
    fs::write(home.join("convoke/weights/resnet18-f37072fd.pth"), "not weights").unwrap();
    let mut program = command(&["train", "photos", "--weights", "imagenet"]);
    program.current_dir(here).env("XDG_DATA_HOME", &home);
    outcome(program).check(1, &["resnet18-f37072fd.pth"]).unwrap();
    assert!(!here.join("runs/photos-2").exists());
}

#[test]
fn predict_reads_standard_input() {
    let folder = with_photos();
    let here = folder.path();
    train(here, &["--epochs", "1"]).exits(0);
    let with_input = |input: &[u8], args: &[&str]| {
        let mut program = command(&[&["predict", "runs/photos-1", "--effort", "heuristic"], args].concat());
        program.current_dir(here).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = program.spawn().unwrap();
        child.stdin.take().unwrap().write_all(input).unwrap();
        let output = child.wait_with_output().unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        Outcome { code: output.status.code(), stdout: text(output.stdout), stderr: text(output.stderr) }
    };
    let image = fs::read(here.join("photos/sky/0.png")).unwrap();
    let by_name =
        convoke_in(here, &["predict", "runs/photos-1", "photos/sky/0.png", "--effort", "heuristic"]);
    let of = |line: &str| line.split_once(": ").unwrap().1.to_owned();
    let found = with_input(&image, &["-"]).exits(0);
    assert!(found.stdout.starts_with("-: "), "{}", found.stdout);
    assert_eq!(of(&found.stdout), of(&by_name.stdout));
    // Whoever has photographs of a kind that is not read is told so.
    fs::write(here.join("photos/sand/phone.HEIC"), "x").unwrap();
    let found = with_input(b"photos/sky/0.png\nphotos/sand\n", &["-"]).exits(0);
    assert!(found.stderr.contains("ignored: 1 .heic of photos/sand, which are not read"), "{}", found.stderr);
    assert_eq!(found.stdout.lines().count(), 11, "{}", found.stdout);
    assert_eq!(of(found.stdout.lines().next().unwrap()), of(by_name.stdout.trim_end()));
    with_input(b"", &["-"]).check(1, &["standard input is empty"]).unwrap();
    with_input(b"nowhere.png\n", &["-"]).check(1, &["nowhere.png: no such file"]).unwrap();
    with_input(b"\xff\xd8\xff", &["-"]).check(1, &["1 of 1 images could not be read"]).unwrap();
}

/// An exported file is compared with the model before it is announced, and comes with a page that says how to use it.
#[test]
fn exported_files_are_checked_and_explained() {
    let folder = with_photos();
    let here = folder.path();
    fs::rename(here.join("photos/sand"), here.join("photos/a \"b\" `c`")).unwrap();
    train(here, &["--epochs", "1"]).exits(0);
    for flags in [&[][..], &["--fold"]] {
        let said =
            convoke_in(here, &[&["export", "runs/photos-1", "--to", "m.onnx"], flags].concat()).exits(0);
        for words in ["checked: the file was read again", "import numpy, onnxruntime", "m.onnx.md"] {
            assert!(said.stderr.contains(words), "no {words} in {}", said.stderr);
        }
    }
    let page = fs::read_to_string(here.join("m.onnx.md")).unwrap();
    for words in [
        "[\"a \\\"b\\\" 'c'\", \"sky\"]",
        "37 * image.width",
        "0.485",
        "onnxruntime-web",
        "crop_fraction: 0.875",
    ] {
        assert!(page.contains(words), "no {words} in {page}");
    }
    // Neither a name nor arrays have a page.
    convoke_in(here, &["export", "resnet20", "--to", "n.onnx"]).exits(0);
    convoke_in(here, &["export", "runs/photos-1", "--to", "n.safetensors"]).exits(0);
    assert!(!here.join("n.onnx.md").exists() && !here.join("n.safetensors.md").exists());
}
