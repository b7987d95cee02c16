//! Training on folders of photographs, with classes and with masks.

use std::fs;
use std::path::Path;

use super::program::{convoke, losses, photographs, scenes, text};

fn flags<'a>(data: &'a str, folder: &'a Path, more: &[&'a str]) -> Vec<&'a str> {
    let own = ["train", "--data", data, "--data-dir", text(folder), "--effort", "heuristic", "--json", "-"];
    [&own[..], more].concat()
}

#[test]
fn a_folder_is_learnt_and_resumed_with_any_number_of_workers() {
    let folder = tempfile::tempdir().unwrap();
    let (photos, saved) = (folder.path().join("photos"), folder.path().join("run"));
    photographs(&photos, 10);
    let more =
        ["--image-size", "32", "--batch-size", "4", "--optimizer", "sgd", "--lr", "0.02", "--lr-gamma", "1"];
    let run = |more: &[&str]| convoke(more).exits(0).json()["runs"][0].clone();
    let whole = run(&[&flags("folder", &photos, &more)[..], &["--steps", "8", "--workers", "0"]].concat());
    assert_eq!((&whole["data"], &whole["model"]), (&"folder".into(), &"resnet18".into()));
    let found = losses(&whole);
    assert!(found.len() == 8 && found.iter().all(|loss| loss.is_finite()), "{found:?}");
    let kept = ["--checkpoint", text(&saved), "--workers", "3"];
    let kept = [&flags("folder", &photos, &more)[..], &kept].concat();
    run(&[&kept[..], &["--steps", "5"]].concat());
    let resumed = run(&[&kept[..], &["--steps", "8", "--resume"]].concat());
    assert_eq!(losses(&resumed), found);
    assert_eq!(resumed["test_loss"], whole["test_loss"]);
    // Two epochs of four steps; the first was validated before the resume.
    assert_eq!(resumed["validation"], whole["validation"]);
    let validation = whole["validation"].as_array().unwrap();
    assert_eq!(validation.iter().map(|of| of["epoch"].as_u64()).collect::<Vec<_>>(), [Some(1), Some(2)]);
    assert_eq!(
        (&validation[1]["loss"], &validation[1]["accuracy"]),
        (&whole["test_loss"], &whole["test_accuracy"])
    );
    // Random parts and colours belong to the run.
    let other = [&kept[..], &["--steps", "9", "--resume", "--augment", "none"]].concat();
    convoke(&other).check(1, &["variation"]).unwrap();
}

#[test]
fn flags_vary_photographs_and_memory_keeps_them() {
    let folder = tempfile::tempdir().unwrap();
    photographs(folder.path(), 6);
    let more = ["--image-size", "32", "--batch-size", "5", "--steps", "4"];
    let run = |own: &[&str]| {
        let own = [&more[..], own].concat();
        convoke(&flags("folder", folder.path(), &own)).exits(0).json()["runs"][0].clone()
    };
    let usual = losses(&run(&[]));
    assert_eq!(losses(&run(&["--cache-images"])), usual);
    assert_eq!(losses(&run(&["--cache-images", "--workers", "0"])), usual);
    for changed in [
        &["--trivial-augment"][..],
        &["--erasing", "1"],
        &["--normalisation", "measured"],
        &["--augment", "none"],
    ] {
        assert_ne!(losses(&run(changed)), usual, "{changed:?}");
    }
    for (refused, needle) in
        [("--erasing=1.5", "from 0 to 1"), ("--normalisation=none", "imagenet, measured")]
    {
        convoke(&["train", refused]).check(2, &[needle]).unwrap();
    }
    for flag in [
        "--trivial-augment",
        "--cache-images",
        "--erasing=0.5",
        "--normalisation=measured",
        "--validation=0.3",
    ] {
        convoke(&["train", "--data", "digits", flag]).check(2, &["is for photographs", "digits"]).unwrap();
    }
}

#[test]
fn masks_are_learnt() {
    let folder = tempfile::tempdir().unwrap();
    scenes(folder.path());
    let more = ["--batch-size", "2", "--optimizer", "adamw", "--lr", "0.01", "--epochs", "4"];
    let run = convoke(&flags("masks", folder.path(), &more)).exits(0).json()["runs"][0].clone();
    assert_eq!((&run["data"], &run["model"]), (&"masks".into(), &"segnet".into()));
    let found = losses(&run);
    assert!(found.len() == 12 && found[11] < 0.7 * found[0], "{found:?}");
    assert!(run["test_mean_iou"].as_f64().is_some_and(|iou| (0.0..=1.0).contains(&iou)), "{run}");
}

#[test]
fn broken_photographs_are_named_or_left_out() {
    let folder = tempfile::tempdir().unwrap();
    photographs(folder.path(), 5);
    // In validation or in training: either way it is met in an epoch.
    fs::write(folder.path().join("sky").join("broken.jpg"), b"\xff\xd8\xff").unwrap();
    let more = ["--image-size", "32", "--batch-size", "3"];
    convoke(&flags("folder", folder.path(), &more))
        .check(1, &["broken.jpg", "--skip-broken leaves out"])
        .unwrap();
    let more = [&more[..], &["--skip-broken"]].concat();
    convoke(&flags("folder", folder.path(), &more))
        .check(0, &["left out of training", "broken.jpg"])
        .unwrap();
    // A photograph that is broken is also refused, or left out, where a model is judged.
    let kept = tempfile::tempdir().unwrap();
    let out = kept.path().join("out");
    let more = [&more[..], &["--epochs", "1", "--output", text(&out)]].concat();
    convoke(&flags("folder", folder.path(), &more)).exits(0);
    let judge = ["evaluate", text(&out), "--data-dir", text(folder.path()), "--part", "all"];
    convoke(&judge).check(1, &["broken.jpg", "--skip-broken leaves out"]).unwrap();
    convoke(&[&judge[..], &["--skip-broken"]].concat())
        .check(0, &["left out of all images", "broken.jpg"])
        .unwrap();
}

#[test]
fn what_is_no_folder_of_photographs_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    convoke(&["train", "--data", "folder"]).check(2, &["--data-dir", "CLASS/IMAGE"]).unwrap();
    convoke(&flags("folder", folder.path(), &[])).check(1, &["an empty folder", "CLASS/IMAGE"]).unwrap();
    convoke(&flags("folder", &folder.path().join("none"), &[])).check(1, &["none"]).unwrap();
    photographs(folder.path(), 3);
    let refused = ["--model", "segnet"];
    convoke(&flags("folder", folder.path(), &refused))
        .check(2, &["segnet takes a label for each pixel"])
        .unwrap();
    let refused = ["--batch-size", "100"];
    convoke(&flags("folder", folder.path(), &refused)).check(2, &["batch"]).unwrap();
    for (flag, value) in
        [("--image-size", Some("32")), ("--skip-broken", None), ("--augment", Some("standard"))]
    {
        let all: Vec<&str> = ["train", "--data", "digits", flag].into_iter().chain(value).collect();
        convoke(&all).check(2, &[flag, "is for photographs"]).unwrap();
    }
    #[cfg(unix)]
    {
        let elsewhere = tempfile::tempdir().unwrap();
        photographs(elsewhere.path(), 3);
        std::os::unix::fs::symlink(elsewhere.path().join("sky"), folder.path().join("link")).unwrap();
        convoke(&flags("folder", folder.path(), &[])).check(1, &["link", "--follow-links"]).unwrap();
    }
}
