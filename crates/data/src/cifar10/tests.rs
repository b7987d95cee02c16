//! CIFAR-10 folders made by hand: the archive and its files, missing batches, labels, damage.

use std::cell::RefCell;
use std::fs;
use std::io::Write;
use std::ops::ControlFlow;

use flate2::Compression;
use flate2::write::GzEncoder;

use super::super::tar::testing::archive;
use super::super::{Targets, silent, testing};
use super::*;

/// Records whose labels count up from `first`, and whose pixels follow from label, channel and place.
fn records(count: usize, first: u8) -> Vec<u8> {
    let record = |index: usize| {
        let label = (usize::from(first) + index) % 10;
        let pixel = move |place: usize| (label * 20 + place / 1024 + place % 1024 % 7) as u8;
        std::iter::once(label as u8).chain((0..IMAGE).map(pixel))
    };
    (0..count).flat_map(record).collect()
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

/// The files of a small set: batches 1 and 3 to train, in another order than theirs.
fn files() -> Vec<(&'static str, Vec<u8>)> {
    vec![
        ("cifar-10-batches-bin/batches.meta.txt", b"airplane\n".to_vec()),
        ("cifar-10-batches-bin/data_batch_3.bin", records(3, 7)),
        ("cifar-10-batches-bin/data_batch_1.bin", records(2, 4)),
        ("cifar-10-batches-bin/test_batch.bin", records(4, 0)),
    ]
}

/// A folder with an archive of these files.
fn archived(files: &[(&str, Vec<u8>)]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join(ARCHIVE), gzip(&archive(files))).unwrap();
    folder
}

/// A folder with the files of the small set, below `place`.
fn unpacked(place: &str) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir_all(folder.path().join(place)).unwrap();
    for (name, bytes) in files() {
        let name = name.rsplit('/').next().unwrap();
        fs::write(folder.path().join(place).join(name), bytes).unwrap();
    }
    folder
}

/// The error's text after the name of the archive.
#[track_caller]
fn refusal(files: &[(&str, Vec<u8>)]) -> String {
    testing::refusal(archived(&[]).path(), load, ARCHIVE, &gzip(&archive(files)))
}

#[test]
fn archive_folder_and_files_are_the_same_set() {
    let folders = [archived(&files()), unpacked(FOLDER), unpacked("")];
    let sets = folders.each_ref().map(|folder| {
        assert!(is_present(folder.path()));
        load(folder.path(), &silent).unwrap()
    });
    let TrainTest { train, test } = &sets[0];
    assert_eq!((train.labels(), test.labels()), (&[4, 5, 7, 8, 9][..], &[0, 1, 2, 3][..]));
    assert_eq!(train.image(0), &records(1, 4)[1..]);
    assert_eq!(train.image(4), &records(1, 9)[1..]);
    assert_eq!(test.image(3), &records(1, 3)[1..]);
    let info = train.info();
    assert_eq!((info.name.as_str(), info.channels, info.height, info.width), ("cifar10", 3, 32, 32));
    assert_eq!((info.classes, info.targets), (10, Targets::Image));
    assert_eq!((&info.mean[..], &info.std[..]), (&MEAN[..], &STD[..]));
    assert_eq!(test.info(), info);
    assert!(sets[1] == sets[0] && sets[2] == sets[0]);
    // The archive comes first, and may have been decompressed by a browser.
    fs::write(folders[2].path().join(ARCHIVE), archive(&files())).unwrap();
    fs::write(folders[2].path().join("test_batch.bin"), b"damaged").unwrap();
    assert!(load(folders[2].path(), &silent).unwrap() == sets[0]);
}

#[test]
fn missing_batches_are_named() {
    let missing = |folder: &Path| {
        assert!(!is_present(folder) || folder.join(ARCHIVE).is_file());
        load(folder, &silent).unwrap_err().to_string()
    };
    let empty = tempfile::tempdir().unwrap();
    for folder in [empty.path(), &empty.path().join("none")] {
        let expected = format!(
            "{}: no file named cifar-10-binary.tar.gz or cifar-10-batches-bin/data_batch_1.bin or data_batch_1.bin",
            folder.display()
        );
        assert_eq!(missing(folder), expected);
    }
    let no_test = unpacked(FOLDER);
    fs::remove_file(no_test.path().join(FOLDER).join("test_batch.bin")).unwrap();
    let place = no_test.path().join(FOLDER);
    assert_eq!(missing(no_test.path()), format!("{}: no file named test_batch.bin", place.display()));
    let no_train = unpacked("");
    for name in ["data_batch_1.bin", "data_batch_3.bin"] {
        fs::remove_file(no_train.path().join(name)).unwrap();
    }
    let expected = "no file named data_batch_1.bin or data_batch_2.bin or data_batch_3.bin or data_batch_4.bin or \
                    data_batch_5.bin";
    assert_eq!(missing(no_train.path()), format!("{}: {expected}", no_train.path().display()));

    assert_eq!(refusal(&files()[..3]), "no file named test_batch.bin");
    assert_eq!(refusal(&files()[3..]), expected);
    assert_eq!(refusal(&[]), expected);
}

/// Errors name the file that is wrong, in the archive and outside.
#[test]
fn wrong_contents_are_named_with_their_place() {
    let mut label = records(3, 0);
    label[2 * RECORD] = 10;
    let cases = [
        (label, "label: expected 0 to 9, found 10 at byte 6146, in image 2"),
        (
            records(2, 0)[..RECORD + 5].to_vec(),
            "size: expected a multiple of 3073 bytes, above 0 and at most 536870912, found 3078",
        ),
        (vec![], "size: expected a multiple of 3073 bytes, above 0 and at most 536870912, found 0"),
    ];
    for (bytes, expected) in cases {
        for name in ["data_batch_1.bin", "test_batch.bin"] {
            let found = testing::refusal(unpacked("").path(), load, name, &bytes);
            assert_eq!(found, expected, "{name}");
            let mut files = files();
            let path = format!("{FOLDER}/{name}");
            files.iter_mut().find(|(known, _)| *known == path).unwrap().1 = bytes.clone();
            let folder = archived(&files);
            let found = load(folder.path(), &silent).unwrap_err().to_string();
            let file = folder.path().join(ARCHIVE).join(&path);
            assert_eq!(found, format!("{}: {expected}", file.display()));
        }
    }
    let folder = archived(&[files(), files()].concat());
    let found = load(folder.path(), &silent).unwrap_err().to_string();
    assert!(found.ends_with("data_batch_3.bin: name: expected one file of this name, found two"), "{found}");
}

#[test]
fn damaged_archives_are_refused() {
    let tar = archive(&files());
    let sound = gzip(&tar);
    let folder = archived(&files());
    let load_of = |bytes: &[u8]| {
        fs::write(folder.path().join(ARCHIVE), bytes).unwrap();
        load(folder.path(), &silent).map_err(|error| error.to_string())
    };
    load_of(&sound).unwrap();
    // Cut at any place, compressed or not; the last two blocks are zeros that may be missing.
    for part in 0..50 {
        let error = load_of(&sound[..part * sound.len() / 50]).unwrap_err();
        assert!(error.contains(ARCHIVE), "{part}: {error}");
        let error = load_of(&tar[..part * (tar.len() - 1024) / 50]).unwrap_err();
        assert!(error.contains("cut off") || error.contains("no file named"), "{part}: {error}");
    }
    assert!(load_of(&sound[..sound.len() - 1]).unwrap_err().contains("a compressed stream that is cut off"));
    let mut changed = sound.clone();
    // The checksum of the whole, which comes after the last batch.
    changed[sound.len() - 8] ^= 1;
    assert!(load_of(&changed).unwrap_err().contains("contents: expected a sound gzip stream"));
    assert!(load_of(b"<html>not found</html>").unwrap_err().contains("header: expected 512 bytes"));
    let page = [&b"<html>"[..], &[b' '; 600]].concat();
    assert!(load_of(&page).unwrap_err().contains("checksum of a header"));
}

#[test]
fn progress_counts_bytes_and_can_cancel() {
    for folder in [archived(&files()), unpacked("")] {
        let seen = RefCell::new(Vec::new());
        let watch = |event: ProgressEvent<'_>| {
            assert_eq!((event.stage, event.unit), (STAGE, ProgressUnit::Bytes));
            seen.borrow_mut().push((event.done, event.total.unwrap()));
            ControlFlow::Continue(())
        };
        load(folder.path(), &watch).unwrap();
        let seen = seen.take();
        let total = seen[0].1;
        assert_eq!((seen[0], *seen.last().unwrap()), ((0, total), (total, total)));
        assert!(seen.is_sorted());
        let error = load(folder.path(), &|_| ControlFlow::Break(())).unwrap_err();
        assert_eq!(error.to_string(), "cancelled during loading cifar10");
    }
    // Also in the middle of a file.
    let folder = unpacked("");
    fs::write(folder.path().join("data_batch_1.bin"), records(1001, 0)).unwrap();
    let stop = |event: ProgressEvent<'_>| match event.done {
        0 => ControlFlow::Continue(()),
        _ => ControlFlow::Break(()),
    };
    load(folder.path(), &stop).unwrap_err();
}

#[cfg(feature = "download")]
#[test]
fn what_is_downloaded_is_the_archive() {
    // Without a mirror a download fails: the archive here is not the published one.
    let folder = archived(&files());
    let offline = DownloadOptions::new([] as [&str; 0]);
    match download(folder.path(), &offline, &silent) {
        Err(DataError::Download { file, .. }) => assert_eq!(file, ARCHIVE),
        other => panic!("expected a failed download, found {other:?}"),
    }
    load(folder.path(), &silent).unwrap();
    let digit = |digit: u8| matches!(digit, b'0'..=b'9' | b'a'..=b'f');
    assert!(REMOTE.sha256.len() == 64 && REMOTE.sha256.bytes().all(digit));
}
