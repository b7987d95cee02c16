//! Classification of colour images: CIFAR-10's files, and noise in a model's shape.

use std::fs;
use std::path::Path;

use super::program::{convoke, losses, text};

/// CIFAR-10's files with a few images: the class is how bright they are, and where.
pub(super) fn photographs(folder: &Path) {
    fs::create_dir_all(folder).unwrap();
    for (name, count) in [("data_batch_1.bin", 24), ("data_batch_4.bin", 16), ("test_batch.bin", 10)] {
        let mut noise = 1_u32;
        let mut bytes = Vec::new();
        for class in (0..count).map(|index| (index % 10) as u8) {
            bytes.push(class);
            bytes.extend((0..3 * 1024).map(|place: usize| {
                noise = noise.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                let bright =
                    place / 1024 == usize::from(class) % 3 && place % 32 < 3 * (1 + usize::from(class));
                (noise >> 24) as u8 / 4 + if bright { 190 } else { 0 }
            }));
        }
        fs::write(folder.join(name), bytes).unwrap();
    }
}

#[test]
fn resnet20_learns_photographs_and_is_resumed() {
    let folder = tempfile::tempdir().unwrap();
    photographs(&folder.path().join("cifar-10-batches-bin"));
    let (place, saved, cache) = (text(folder.path()), folder.path().join("run"), folder.path().join("cache"));
    let flags =
        ["train", "--data", "cifar10", "--data-dir", place, "--batch-size", "20", "--optimizer", "sgd"];
    let flags = [&flags[..], &["--lr", "0.05", "--lr-gamma", "1", "--json", "-"]].concat();
    // All runs choose alike.
    let flags = [&flags[..], &["--effort", "heuristic", "--cache", text(&cache)]].concat();
    let run = |more: &[&str]| convoke(&[&flags, more].concat()).exits(0).json()["runs"][0].clone();
    let whole = run(&["--steps", "10"]);
    assert_eq!((&whole["data"], &whole["model"]), (&"cifar10".into(), &"resnet20".into()));
    assert_eq!(whole["parameters"], 272_474);
    let found = losses(&whole);
    assert!(found.len() == 10 && found[9] < 0.8 * found[0], "{found:?}");
    // Padded crops and flips go on as they would have.
    let kept = ["--checkpoint", text(&saved)];
    run(&[&kept[..], &["--steps", "5"]].concat());
    let resumed = run(&[&kept[..], &["--steps", "10", "--resume"]].concat());
    assert_eq!(losses(&resumed), found);
    assert_ne!(losses(&run(&["--steps", "3", "--augment", "none"])), found[..3]);
}

#[test]
fn photographs_that_are_not_there() {
    let folder = tempfile::tempdir().unwrap();
    let flags = ["train", "--data", "cifar10", "--data-dir", text(folder.path())];
    let hint = ["CIFAR-10 is not there", "--download", "--data-dir"];
    convoke(&flags).check(1, &[&["no file named cifar-10-binary.tar.gz"], &hint[..]].concat()).unwrap();
    convoke(&flags[..3]).check(1, &hint).unwrap();
    photographs(folder.path());
    fs::remove_file(folder.path().join("test_batch.bin")).unwrap();
    convoke(&flags).check(1, &[&["no file named test_batch.bin"], &hint[..]].concat()).unwrap();
    photographs(folder.path());
    let refused = [&flags[..], &["--model", "mnist-cnn"]].concat();
    convoke(&refused)
        .check(2, &["mnist-cnn takes images of [1, 28, 28]", "cifar10 has [3, 32, 32]"])
        .unwrap();
    fs::write(folder.path().join("data_batch_4.bin"), [11; 3073]).unwrap();
    convoke(&flags).check(1, &["data_batch_4.bin: label", "found 11 at byte 0"]).unwrap();
}

#[test]
fn noise_has_the_shape_of_every_model() {
    for (model, shape) in [
        ("mnist-cnn", "1 x 28 x 28 in 10 classes"),
        ("segnet", "3 x 120 x 160 in 11 classes"),
        ("resnet20", "3 x 32 x 32 in 10 classes"),
    ] {
        let flags = ["train", "--data", "random", "--model", model, "--batch-size", "2", "--json", "-"];
        let flags = [&flags[..], &["--effort", "heuristic"]].concat();
        let outcome = convoke(&flags).exits(0);
        outcome.check(0, &[shape, "nothing to learn"]).unwrap();
        let run = &outcome.json()["runs"][0];
        assert_eq!((&run["data"], &run["model"]), (&"random".into(), &model.into()));
        // Four batches an epoch.
        let found = losses(run);
        assert!(found.len() == 4 && found.iter().all(|loss| loss.is_finite()), "{found:?}");
        assert_eq!(losses(&convoke(&flags).exits(0).json()["runs"][0]), found, "by the seed alone");
    }
}
