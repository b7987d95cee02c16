//! MNIST files that are missing or damaged: exit code 1, and a message that names file and field.

use std::fs;
use std::path::Path;

use convoke_testkit::Failures;
use tempfile::TempDir;

use super::program::{Outcome, TEST, TRAIN, convoke, idx, text, tiny_mnist};

/// The tiny data set with one file replaced, or removed.
fn with_file(name: &str, bytes: Option<&[u8]>) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(tiny_mnist()).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, folder.path().join(path.file_name().unwrap())).unwrap();
    }
    match bytes {
        Some(bytes) => fs::write(folder.path().join(name), bytes).unwrap(),
        None => fs::remove_file(folder.path().join(name)).unwrap(),
    }
    folder
}

fn train_on(folder: &Path) -> Outcome {
    convoke(&["train", "--data", "mnist", "--data-dir", text(folder), "--batch-size", "10", "--steps", "1"])
}

/// A gzip stream (RFC 1952) of one stored block (RFC 1951), without the checksum at its end.
fn gzip_without_end(bytes: &[u8]) -> Vec<u8> {
    let len = u16::try_from(bytes.len()).expect("one block");
    let mut gzip = vec![0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 255, 1];
    gzip.extend([len.to_le_bytes(), (!len).to_le_bytes()].concat());
    gzip.extend(bytes);
    gzip
}

#[test]
fn missing() {
    let empty = tempfile::tempdir().unwrap();
    let none = empty.path().join("none");
    let mut failures = Failures::new("missing MNIST");
    let needles = ["train-images-idx3-ubyte", "--download", "--data-dir"];
    for folder in [empty.path(), none.as_path()] {
        failures
            .check(folder.display(), train_on(folder).check(1, &[&needles[..], &[text(folder)]].concat()));
    }
    failures.check("default folder", convoke(&["train", "--data", "mnist"]).check(1, &needles));
    let name = "t10k-labels-idx1-ubyte";
    let folder = with_file(name, None);
    failures.check(name, train_on(folder.path()).check(1, &[name, text(folder.path()), "--download"]));
    failures.finish();
}

#[test]
fn damaged() {
    let [train_images, train_labels] = ["train-images-idx3-ubyte", "train-labels-idx1-ubyte"];
    let [test_images, test_labels] = ["t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"];
    let labels = |count: usize| idx(&[count], vec![1; count]);
    let images = |sizes: [usize; 3]| idx(&sizes, vec![0; sizes.iter().product()]);
    let gz = "train-labels-idx1-ubyte.gz";
    let whole = gzip_without_end(&labels(TRAIN));
    let cases: Vec<(&str, Vec<u8>, Vec<&str>)> = vec![
        (train_images, vec![], vec!["magic", "cut off"]),
        (train_images, b"\x89PNG\r\n\x1a\n".to_vec(), vec!["magic", "[89, 50, 4e, 47]"]),
        (train_images, images([TRAIN, 28, 28])[..5000].to_vec(), vec!["data", "cut off"]),
        (train_images, images([TRAIN, 27, 28]), vec!["sizes", "[110, 27, 28]", "[N, 28, 28]"]),
        (train_images, idx(&[0, 28, 28], []), vec!["sizes", "N above 0"]),
        (train_images, idx(&[4_000_000_000; 3], [1]), vec!["sizes"]),
        (train_images, [0, 0, 13, 3].to_vec(), vec!["element type", "float"]),
        (train_labels, labels(TRAIN - 1), vec!["label count", "110", "109"]),
        (train_labels, labels(TRAIN + 1), vec!["label count", "110", "111"]),
        (train_labels, [labels(TRAIN), vec![0]].concat(), vec!["data", "more bytes"]),
        (train_labels, images([TRAIN, 1, 1]), vec!["sizes", "[N]"]),
        (test_images, images([TEST, 28, 28])[..100].to_vec(), vec!["data", "cut off"]),
        (test_labels, idx(&[TEST], vec![10; TEST]), vec!["label[0]", "10"]),
        (gz, vec![0x1f, 0x8b], vec!["cut off"]),
        (gz, whole[..100].to_vec(), vec!["data", "cut off"]),
        (gz, whole.clone(), vec!["data", "cut off"]),
        (gz, [&whole[..], &[0; 8]].concat(), vec!["data", "damaged"]),
    ];
    let mut failures = Failures::new("damaged MNIST");
    for (index, (name, bytes, needles)) in cases.iter().enumerate() {
        let folder = with_file(name, Some(bytes));
        let file = folder.path().join(name);
        let outcome = train_on(folder.path());
        let checked = outcome.check(1, &[&needles[..], &[text(&file)]].concat());
        failures.check(format!("{index}: {name} with {needles:?}"), checked);
        let silent = if outcome.stdout.is_empty() { Ok(()) } else { Err(outcome.stdout) };
        failures.check(format!("standard output of {index}"), silent);
    }
    failures.finish();
}
