//! CamVid folders made by hand: sizes, labels, missing and damaged files.

use std::cell::RefCell;
use std::fs;
use std::ops::ControlFlow;

use png::{BitDepth, ColorType};

use super::super::png_file::testing::encode;
use super::super::{ProgressEvent, ProgressUnit, silent, testing};
use super::*;

const SIZE: [usize; 2] = [2, 3];

fn image(size: [usize; 2], first: u8) -> Vec<u8> {
    let bytes: Vec<u8> = (0..size[0] * size[1] * 3).map(|index| first + index as u8).collect();
    encode(size, ColorType::Rgb, BitDepth::Eight, &bytes)
}

fn annotation(classes: &[u8]) -> Vec<u8> {
    encode(SIZE, ColorType::Grayscale, BitDepth::Eight, classes)
}

/// A sound folder: two images to train, one to validate, one to test, and files that are none of the set's.
fn folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for (name, bytes) in [
        // Written in another order than that of the names.
        ("train/b.png", image(SIZE, 100)),
        ("train/a.PNG", image(SIZE, 0)),
        ("trainannot/a.PNG", annotation(&[0, 1, 2, 3, 4, 5])),
        ("trainannot/b.png", encode(SIZE, ColorType::Indexed, BitDepth::Four, &[0xab, 0x10, 0xbb, 0xb0])),
        ("val/v.png", image(SIZE, 7)),
        ("valannot/v.png", annotation(&[6; 6])),
        ("test/t.png", image(SIZE, 9)),
        ("testannot/t.png", annotation(&[7, 8, 9, 10, 11, 11])),
        ("train/notes.txt", b"not an image".to_vec()),
        ("trainannot/Thumbs.db", b"not an image".to_vec()),
    ] {
        let file = folder.path().join(name);
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(file, bytes).unwrap();
    }
    folder
}

/// The error's text after one of the files of a sound folder was replaced; it must name that file.
#[track_caller]
fn refusal(name: &str, bytes: &[u8]) -> String {
    testing::refusal(folder().path(), load, name, bytes)
}

#[test]
fn the_parts_are_loaded_in_the_order_of_their_names() {
    let folder = folder();
    assert!(is_present(folder.path()));
    let parts = load_parts(folder.path(), &silent).unwrap();
    let info = parts.train.info();
    assert_eq!((info.name.as_str(), info.channels, info.height, info.width), ("camvid", 3, 2, 3));
    assert_eq!((info.classes, info.targets), (11, Targets::Pixels { ignore: Some(11) }));
    assert_eq!([&parts.val, &parts.test].map(InMemory::info), [info; 2]);
    assert_eq!([&parts.train, &parts.val, &parts.test].map(InMemory::len), [2, 1, 1]);
    // Stored as planes: every third byte of the file is red.
    let planes = [0, 3, 6, 9, 12, 15, 1, 4, 7, 10, 13, 16, 2, 5, 8, 11, 14, 17];
    assert_eq!(parts.train.image(0), planes);
    assert_eq!(parts.train.image(1), planes.map(|byte| byte + 100));
    assert_eq!(parts.train.labels(), [0, 1, 2, 3, 4, 5, 10, 11, 1, 11, 11, 11]);
    assert_eq!(parts.val.labels(), [6; 6]);
    assert_eq!(parts.test.class_counts(), [0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1]);

    // The validation set is not needed to train.
    fs::remove_dir_all(folder.path().join("val")).unwrap();
    let TrainTest { train, test } = load(folder.path(), &silent).unwrap();
    assert!(*train == parts.train && *test == parts.test);
    let error = load_parts(folder.path(), &silent).unwrap_err().to_string();
    assert_eq!(error, format!("{}: no file named val", folder.path().display()));
}

#[test]
fn normalisation_is_that_of_the_training_pixels() {
    let set = load(folder().path(), &silent).unwrap();
    let info = set.train.info();
    for channel in 0..3 {
        let values = [0, 3, 6, 9, 12, 15, 100, 103, 106, 109, 112, 115];
        let values = values.map(|value| (value + channel as i32) as f64 / 255.0);
        let mean = values.iter().sum::<f64>() / 12.0;
        let variance = values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / 12.0;
        for (found, expected) in [(info.mean[channel], mean), (info.std[channel], variance.sqrt())] {
            // Rounded to f32 once.
            assert!((f64::from(found) - expected).abs() <= 1e-7, "{found} is not {expected}");
        }
    }
}

#[test]
fn a_channel_without_contrast_has_a_deviation_of_one() {
    let folder = folder();
    let bytes: Vec<u8> = (0..6).flat_map(|index| [5, index, 255]).collect();
    for name in ["train/a.PNG", "train/b.png"] {
        let file = encode(SIZE, ColorType::Rgb, BitDepth::Eight, &bytes);
        fs::write(folder.path().join(name), file).unwrap();
    }
    let set = load(folder.path(), &silent).unwrap();
    let info = set.train.info();
    assert_eq!((info.mean[0], info.std[0], info.mean[2], info.std[2]), ((5.0 / 255.0), 1.0, 1.0, 1.0));
    assert!(info.std[1] < 0.1, "{:?}", info.std);
}

#[test]
fn missing_files_are_named() {
    for (gone, place, name) in [
        ("trainannot/b.png", "trainannot", "b.png"),
        ("test/t.png", "test", "*.png"),
        ("train/a.PNG", "train", "a.PNG"),
        ("testannot", "", "testannot"),
        ("train", "", "train"),
    ] {
        let folder = folder();
        let gone = folder.path().join(gone);
        if gone.is_dir() { fs::remove_dir_all(gone) } else { fs::remove_file(gone) }.unwrap();
        assert_eq!(is_present(folder.path()), !place.is_empty());
        let error = load(folder.path(), &silent).unwrap_err();
        assert!(matches!(&error, DataError::Missing { .. }), "{error}");
        let place = if place.is_empty() { folder.path().to_owned() } else { folder.path().join(place) };
        assert_eq!(error.to_string(), format!("{}: no file named {name}", place.display()));
    }
}

#[test]
fn a_file_in_the_place_of_a_folder_is_refused() {
    let folder = folder();
    fs::remove_dir_all(folder.path().join("test")).unwrap();
    fs::write(folder.path().join("test"), b"").unwrap();
    assert!(!is_present(folder.path()));
    let error = load(folder.path(), &silent).unwrap_err();
    assert!(matches!(&error, DataError::Io { action: "list", .. }), "{error}");
}

#[test]
fn labels_beyond_void_are_refused() {
    for (name, label, place) in [("trainannot/a.PNG", 12, "[0, 1, 2]"), ("testannot/t.png", 255, "[0, 1, 1]")]
    {
        let mut classes = [11, 10, 0, 1, 0, 0];
        classes[if label == 12 { 5 } else { 4 }] = label;
        assert_eq!(
            refusal(name, &annotation(&classes)),
            format!(
                "label{place}: expected below 11, the number of classes, or 11, which is ignored, found {label}"
            )
        );
    }
    let indexed = encode(SIZE, ColorType::Indexed, BitDepth::Four, &[0, 0, 0xc0, 0]);
    assert!(refusal("trainannot/b.png", &indexed).starts_with("label[0, 1, 0]: "));
}

#[test]
fn other_sizes_and_kinds_are_refused() {
    let size = "size: expected 2x3 (height x width) as the set's first image, found 3x2";
    for name in ["train/b.png", "test/t.png"] {
        assert_eq!(refusal(name, &image([3, 2], 0)), size);
    }
    let turned = encode([3, 2], ColorType::Grayscale, BitDepth::Eight, &[0; 6]);
    assert_eq!(refusal("testannot/t.png", &turned), size);

    let kind =
        |found: &str| format!("colour type: expected 8-bit grayscale or palette indices, found {found}");
    let deep = encode(SIZE, ColorType::Grayscale, BitDepth::Sixteen, &[0; 12]);
    assert_eq!(refusal("trainannot/a.PNG", &deep), kind("16-bit Grayscale"));
    assert_eq!(refusal("testannot/t.png", &image(SIZE, 0)), kind("8-bit Rgb"));
    let grey = annotation(&[0; 6]);
    assert_eq!(refusal("train/a.PNG", &grey), "colour type: expected 8-bit RGB, found 8-bit Grayscale");
}

#[test]
fn damaged_files_are_refused() {
    let sound = image(SIZE, 3);
    for name in ["train/a.PNG", "test/t.png"] {
        let error = refusal(name, &sound[..sound.len() / 2]);
        assert_eq!(error, "contents: expected a sound PNG, found a file that is cut off");
        assert!(
            refusal(name, b"GIF89a, no PNG at all").contains("expected a sound PNG, found a damaged one")
        );
    }
    let sound = annotation(&[0; 6]);
    assert!(refusal("trainannot/b.png", &sound[..sound.len() - 1]).contains("cut off"));
    assert!(refusal("trainannot/b.png", b"").contains("cut off"));
}

#[test]
fn sets_that_take_too_much_memory_are_refused() {
    // 64 images of the largest size are exactly the most that is allowed.
    let largest = info([4096, 4096]);
    check_len(64, &largest).unwrap();
    let error = check_len(65, &largest).unwrap_err().to_string();
    let expected = "data set camvid: size: expected at most 4294967296 bytes, images and labels together, \
                    found 65 images of 4096 x 4096";
    assert_eq!(error, expected);
    check_len(usize::MAX, &largest).unwrap_err();
}

#[test]
fn progress_counts_up_and_can_cancel() {
    let folder = folder();
    for index in 0..40 {
        fs::write(folder.path().join(format!("train/{index}.png")), image(SIZE, 1)).unwrap();
        fs::write(folder.path().join(format!("trainannot/{index}.png")), annotation(&[1; 6])).unwrap();
    }
    let seen = RefCell::new(Vec::new());
    let watch = |event: ProgressEvent<'_>| {
        assert_eq!((event.stage, event.total, event.unit), (STAGE, Some(43), ProgressUnit::Images));
        seen.borrow_mut().push(event.done);
        ControlFlow::Continue(())
    };
    load(folder.path(), &watch).unwrap();
    assert_eq!(seen.take(), [0, 16, 32, 42, 43]);

    let stop = |event: ProgressEvent<'_>| match event.done {
        0..32 => ControlFlow::Continue(()),
        _ => ControlFlow::Break(()),
    };
    let error = load(folder.path(), &stop).unwrap_err();
    assert_eq!(error.to_string(), "cancelled during loading camvid");
}

/// A loss over no pixel is NaN, which would look like a run that diverges.
#[test]
fn a_part_without_any_label_is_refused() {
    let folder = folder();
    for name in ["trainannot/a.PNG", "trainannot/b.png"] {
        fs::write(folder.path().join(name), annotation(&[VOID; 6])).unwrap();
    }
    let error = load(folder.path(), &silent).unwrap_err().to_string();
    assert!(error.contains("trainannot: labels: ") && error.contains("no pixel has a label"), "{error}");
    fs::write(folder.path().join("trainannot/a.PNG"), annotation(&[11, 11, 11, 11, 11, 0])).unwrap();
    load(folder.path(), &silent).unwrap();
    fs::write(folder.path().join("testannot/t.png"), annotation(&[VOID; 6])).unwrap();
    let error = load(folder.path(), &silent).unwrap_err().to_string();
    assert!(error.contains("testannot: labels: ") && error.contains("no pixel has a label"), "{error}");
}

#[cfg(unix)]
#[test]
fn names_are_shown_and_not_obeyed() {
    let folder = folder();
    fs::write(folder.path().join("train/\x1b]0;x\x07\n\u{202e}.png"), image(SIZE, 0)).unwrap();
    let error = load(folder.path(), &silent).unwrap_err().to_string();
    assert!(error.ends_with("no file named \\u{1b}]0;x\\u{7}\\n\\u{202e}.png"), "{error:?}");
}
