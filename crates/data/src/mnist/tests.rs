//! MNIST folders made by hand: names, sizes, labels, and which files a download leaves alone.

use std::cell::RefCell;
use std::fs;
use std::io::Write;
use std::ops::ControlFlow;

use flate2::Compression;
use flate2::write::GzEncoder;

use super::super::{silent, testing};
use super::*;

fn idx(sizes: &[usize], data: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0, 0, 8, sizes.len() as u8];
    sizes.iter().for_each(|&size| bytes.extend((size as u32).to_be_bytes()));
    bytes.extend(data);
    bytes
}

fn images(count: usize) -> Vec<u8> {
    let pixels: Vec<u8> = (0..count * 784).map(|index| (index % 251) as u8).collect();
    idx(&[count, 28, 28], &pixels)
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

/// A folder with four sound files: three training images, two test images.
fn folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for (name, bytes) in [
        ("train-images-idx3-ubyte.gz", gzip(&images(3))),
        ("train-labels-idx1-ubyte", idx(&[3], &[9, 0, 5])),
        ("t10k-images.idx3-ubyte", images(2)),
        // Compressed in spite of its name.
        ("t10k-labels.idx1-ubyte", gzip(&idx(&[2], &[1, 2]))),
    ] {
        fs::write(folder.path().join(name), bytes).unwrap();
    }
    folder
}

/// Replaces one of the files of a sound folder and gives the error's text, which must name that file.
#[track_caller]
fn refusal(name: &str, bytes: &[u8]) -> String {
    testing::refusal(folder().path(), load, name, bytes)
}

#[test]
fn all_spellings_are_loaded() {
    let folder = folder();
    assert!(is_present(folder.path()));
    let set = load(folder.path(), &silent).unwrap();
    assert_eq!((set.train.len(), set.test.len()), (3, 2));
    assert_eq!((set.train.labels(), set.test.labels()), (&[9, 0, 5][..], &[1, 2][..]));
    assert_eq!(set.train.images(), &images(3)[16..]);
    let info = set.test.info();
    assert_eq!((info.channels, info.height, info.width, info.classes), (1, 28, 28, 10));
    assert_eq!((&info.mean[..], &info.std[..]), (&[0.1307][..], &[0.3081][..]));
}

#[test]
fn a_missing_file_is_named_with_its_spellings() {
    let folder = folder();
    fs::remove_file(folder.path().join("t10k-images.idx3-ubyte")).unwrap();
    assert!(!is_present(folder.path()));
    assert_eq!(
        load(folder.path(), &silent).unwrap_err().to_string(),
        format!(
            "{}: no file named t10k-images-idx3-ubyte.gz or t10k-images-idx3-ubyte or \
             t10k-images.idx3-ubyte.gz or t10k-images.idx3-ubyte",
            folder.path().display()
        )
    );
    // A folder of that name is no file.
    fs::create_dir(folder.path().join("t10k-images-idx3-ubyte")).unwrap();
    assert!(!is_present(folder.path()));
    assert!(!is_present(&folder.path().join("nowhere")));
}

#[test]
fn images_of_another_shape_are_refused() {
    for sizes in [&[2, 28, 27][..], &[2, 784], &[0, 28, 28], &[1, 2, 28, 28]] {
        let bytes = idx(sizes, &vec![0; sizes.iter().product()]);
        assert_eq!(
            refusal("t10k-images.idx3-ubyte", &bytes),
            format!("sizes: expected [N, 28, 28] with N above 0, found {sizes:?}")
        );
    }
}

#[test]
fn labels_must_fit() {
    assert_eq!(
        refusal("train-labels-idx1-ubyte", &idx(&[4], &[1; 4])),
        "label count: expected 3, one for each image, found 4"
    );
    assert_eq!(
        refusal("train-labels-idx1-ubyte", &idx(&[3], &[1, 9, 10])),
        "label[2]: expected below 10, the number of classes, found 10"
    );
    assert_eq!(
        refusal("train-labels-idx1-ubyte", &idx(&[3, 1], &[1; 3])),
        "sizes: expected [N], a label for each image, found [3, 1]"
    );
    // Two files swapped.
    assert_eq!(
        refusal("train-labels-idx1-ubyte", &images(3)),
        "sizes: expected [N], a label for each image, found [3, 28, 28]"
    );
}

#[test]
fn damaged_files_are_refused() {
    let sound = gzip(&images(3));
    assert!(refusal("train-images-idx3-ubyte.gz", &sound[..sound.len() / 2]).contains("cut off"));
    assert!(refusal("train-images-idx3-ubyte.gz", b"<html>not found</html>").starts_with("magic: "));
    assert!(refusal("train-images-idx3-ubyte.gz", b"").starts_with("magic: "));
}

#[test]
fn progress_counts_files_and_can_cancel() {
    let folder = folder();
    let seen = RefCell::new(Vec::new());
    let note = |event: ProgressEvent<'_>| {
        assert_eq!((event.total, event.unit), (Some(4), ProgressUnit::Files));
        seen.borrow_mut().push(event.done);
        ControlFlow::Continue(())
    };
    load(folder.path(), &note).unwrap();
    assert_eq!(seen.into_inner(), [0, 1, 2, 3, 4]);
    let error = load(folder.path(), &|_| ControlFlow::Break(())).unwrap_err();
    assert_eq!(error.to_string(), "cancelled during loading mnist");
}

/// Two of the sound folder's files, with other checksums; what a mirror would hold does not matter, as there is none.
#[cfg(feature = "download")]
fn two_files<'a>(checksums: &'a [String; 2]) -> [MnistFile<'a>; 2] {
    let file = |real: MnistFile<'static>, contents_sha256: &'a str| MnistFile { contents_sha256, ..real };
    [file(TRAIN_IMAGES, &checksums[0]), file(TEST_LABELS, &checksums[1])]
}

#[cfg(feature = "download")]
#[test]
fn right_contents_in_any_form_are_not_downloaded_again() {
    let folder = folder();
    let checksums = [images(3), idx(&[2], &[1, 2])].map(|bytes| sha256(&mut bytes.as_slice()).unwrap());
    let offline = DownloadOptions::new([] as [&str; 0]);
    download_files(folder.path(), &two_files(&checksums), &offline, &silent).unwrap();

    // Damage of any kind makes a download necessary, which fails here because there is no mirror.
    let sound = gzip(&images(3));
    for bytes in [&sound[..sound.len() - 3], &gzip(&images(4)), b""] {
        fs::write(folder.path().join("train-images-idx3-ubyte.gz"), bytes).unwrap();
        let result = download_files(folder.path(), &two_files(&checksums), &offline, &silent);
        match result {
            Err(DataError::Download { file, .. }) => assert_eq!(file, "train-images-idx3-ubyte.gz"),
            other => panic!("expected a failed download, found {other:?}"),
        }
    }
}

#[cfg(feature = "download")]
#[test]
fn the_table_of_files_is_well_formed() {
    for file in &FILES {
        assert_eq!(file.names()[0], file.remote.name, "the downloaded name is the first to be loaded");
        for checksum in [file.remote.sha256, file.contents_sha256] {
            let lower_hex = checksum.bytes().all(|digit| matches!(digit, b'0'..=b'9' | b'a'..=b'f'));
            assert!(checksum.len() == 64 && lower_hex, "{}: {checksum}", file.stem);
        }
    }
}

/// Both headers are compared before data is read: here no data is there, and that is not noticed.
#[test]
fn headers_that_do_not_fit_cost_no_memory() {
    let [images, labels] = ["train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte"];
    let many = MAX_IMAGES + 1;
    let message = refusal(images, &gzip(&idx(&[many, 28, 28], &[])));
    assert_eq!(
        message,
        format!("sizes: expected [N, 28, 28] with N at most {MAX_IMAGES}, found [{many}, 28, 28]")
    );
    let folder = folder();
    fs::write(folder.path().join(images), gzip(&idx(&[MAX_IMAGES, 28, 28], &[]))).unwrap();
    let message = testing::refusal(folder.path(), load, labels, &idx(&[2], &[9, 0]));
    assert_eq!(message, format!("label count: expected {MAX_IMAGES}, one for each image, found 2"));
}

/// Reading it would wait for ever.
#[cfg(unix)]
#[test]
fn a_pipe_is_no_file() {
    let folder = folder();
    let pipe = folder.path().join("train-labels-idx1-ubyte");
    fs::remove_file(&pipe).unwrap();
    assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let error = load(folder.path(), &silent).unwrap_err().to_string();
    assert_eq!(error, format!("cannot open {}: it is a named pipe, not a regular file", pipe.display()));
}
