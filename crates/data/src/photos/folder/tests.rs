//! Folders of classes made by hand: layouts, splits, links, names, broken and vanishing files.

use std::cell::RefCell;
use std::collections::HashSet;
use std::fs;
use std::ops::ControlFlow;

use image::ImageFormat;

use super::super::listing::{Listed, images_below};
use super::super::testing::{encode, refusal, write, write_scenes};
use super::*;
use crate::{ProgressEvent, Targets, silent};

/// Small images, so that tests are quick.
fn options() -> FolderOptions {
    let preparation = Preparation { size: [8, 10], ..Preparation::default() };
    FolderOptions { preparation, ..FolderOptions::default() }
}

fn load(dir: &Path) -> Result<TrainTest<PhotoFolder>, DataError> {
    folder(dir, &options(), &silent)
}

fn paths(part: &PhotoFolder) -> Vec<String> {
    (0..part.len()).map(|index| part.path(index).to_str().unwrap().replace('\\', "/")).collect()
}

/// The text of an error about something in a folder.
#[track_caller]
fn refusal_in(dir: &Path, place: &str) -> String {
    let error = refusal(load(dir));
    let place = if place.is_empty() { dir.to_owned() } else { dir.join(place) };
    let rest = error.strip_prefix(&format!("{}: ", place.display()));
    rest.unwrap_or_else(|| panic!("expected {} named first, found {error}", place.display())).to_owned()
}

/// A folder with parts, and what is none of the set's.
fn parts() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let files = [
        "train/dog/b.jpg",
        "train/dog/a.PNG",
        "train/cat/deep/er/c.png",
        "train/cat/1.jpg",
        "train/cat/.hidden.jpg",
        "train/.cache/x.jpg",
        "train/README.jpg",
        "val/dog/v.png",
        "test/cat/t.jpg",
        "test/dog/t.jpg",
    ];
    write_scenes(folder.path(), &files);
    for name in ["README.md", ".DS_Store", "train/dog/notes.txt", "train/dog/Thumbs.db", "val/labels.csv"] {
        write(&folder.path().join(name), b"not an image");
    }
    folder
}

#[test]
fn parts_are_loaded_in_the_order_of_names() {
    let folder = parts();
    let TrainTest { train, test } = load(folder.path()).unwrap();
    assert_eq!(train.class_names(), ["cat", "dog"]);
    assert_eq!(
        paths(&train),
        ["train/cat/1.jpg", "train/cat/deep/er/c.png", "train/dog/a.PNG", "train/dog/b.jpg"]
    );
    assert_eq!((0..4).filter_map(|index| train.label(index)).collect::<Vec<_>>(), [0, 0, 1, 1]);
    assert_eq!((paths(&test), test.class_counts()), (vec!["val/dog/v.png".to_owned()], vec![0, 1]));
    let info = train.info();
    assert_eq!((info.name.as_str(), info.shape(), info.classes), ("folder", [3, 8, 10], 2));
    assert_eq!((info.targets, &info.mean), (Targets::Image, &vec![0.485, 0.456, 0.406]));
    assert_eq!(train.info(), test.info());
    assert!(info.check().is_ok() && train.skipped().is_empty());

    let test = train.part("test", &silent).unwrap();
    assert_eq!(paths(&test), ["test/cat/t.jpg", "test/dog/t.jpg"]);
    assert_eq!((test.info(), test.class_names()), (info, train.class_names()));
    let whole = PhotoPart { name: None, class_names: train.class_names() };
    let same = folder_part(&folder.path().join("test"), whole, &options(), &silent).unwrap();
    assert_eq!(paths(&same), ["cat/t.jpg", "dog/t.jpg"]);
    assert_eq!(same.sample(1, None).unwrap(), test.sample(1, None).unwrap());
    let error = refusal(train.part("extra", &silent));
    assert_eq!(error, format!("{}: no file named extra", folder.path().display()));
    // Any of its names finds the part for validation.
    assert_eq!(paths(&train.part("validation", &silent).unwrap()), ["val/dog/v.png"]);
}

#[test]
fn the_part_for_validation_has_several_names() {
    for name in ["val", "valid", "validation"] {
        let folder = parts();
        fs::rename(folder.path().join("val"), folder.path().join(name)).unwrap();
        assert_eq!(paths(&load(folder.path()).unwrap().test), [format!("{name}/dog/v.png")]);
    }
    let folder = parts();
    write_scenes(folder.path(), &["valid/dog/x.jpg"]);
    assert_eq!(
        refusal_in(folder.path(), ""),
        "layout: expected one of val, valid, validation, found val and valid"
    );
    // Without any, it is the test part, then a share.
    for name in ["val", "valid"] {
        fs::remove_dir_all(folder.path().join(name)).unwrap();
    }
    assert_eq!(paths(&load(folder.path()).unwrap().test), ["test/cat/t.jpg", "test/dog/t.jpg"]);
    fs::remove_dir_all(folder.path().join("test")).unwrap();
    let set = load(folder.path()).unwrap();
    assert_eq!([set.train.class_counts(), set.test.class_counts()], [[1, 1], [1, 1]]);
    assert!(paths(&set.train).iter().all(|path| path.starts_with("train/")));
}

#[test]
fn a_share_of_each_class_is_for_validation() {
    let folder = tempfile::tempdir().unwrap();
    let names = (0..10).map(|index| format!("ant/{index}.png"));
    let names: Vec<String> = names.chain((0..5).map(|index| format!("train/{index}.png"))).collect();
    let mut names: Vec<&str> = names.iter().map(String::as_str).collect();
    names.push("zebra/only.png");
    write_scenes(folder.path(), &names);
    // A class may be called train.
    let set = load(folder.path()).unwrap();
    assert_eq!(set.train.class_names(), ["ant", "train", "zebra"]);
    assert_eq!([set.train.class_counts(), set.test.class_counts()], [[8, 4, 1], [2, 1, 0]]);
    let (train, test) = (paths(&set.train), paths(&set.test));
    let all: HashSet<&String> = train.iter().chain(&test).collect();
    assert_eq!(all.len(), 16);
    assert!(train.is_sorted() && test.is_sorted());
    let again = load(folder.path()).unwrap();
    assert_eq!((paths(&again.train), paths(&again.test)), (train, test.clone()));
    let other = folder_with_seed(folder.path(), 2);
    assert_ne!(other, test);

    let ants: Vec<&str> = vec!["a/1.png", "b/1.png"];
    let folder = tempfile::tempdir().unwrap();
    write_scenes(folder.path(), &ants);
    let expected =
        "contents: expected a class with two images or more, as one of them is for validation, found one";
    assert!(refusal_in(folder.path(), "").starts_with(expected));
}

fn folder_with_seed(dir: &Path, seed: u64) -> Vec<String> {
    paths(&folder(dir, &FolderOptions { seed, ..options() }, &silent).unwrap().test)
}

#[test]
fn folders_without_images_are_no_classes() {
    let folder = tempfile::tempdir().unwrap();
    write_scenes(folder.path(), &["cat/a.jpg", "cat/b.jpg", "dog/a.jpg", "dog/more/b.jpg", "cow/a.txt"]);
    fs::create_dir_all(folder.path().join("ant/none/at/all")).unwrap();
    let found = load(folder.path()).unwrap();
    assert_eq!(found.train.class_names(), ["cat", "dog"]);
    let skipped: Vec<&Path> = found.train.skipped().iter().map(|(path, _)| path.as_path()).collect();
    assert_eq!(skipped, [Path::new("ant"), Path::new("cow")]);
}

#[test]
fn other_layouts_are_refused_with_what_is_expected() {
    let expected = "layout: expected train/CLASS/IMAGE and val/CLASS/IMAGE, or CLASS/IMAGE, with a folder for each class and \
                    images that are JPEG, PNG, GIF, TIFF, WebP or BMP files";
    let found = |files: &[&str], place: &str| {
        let folder = tempfile::tempdir().unwrap();
        write_scenes(folder.path(), files);
        let message = refusal_in(folder.path(), place);
        message.replace(expected, "LAYOUT")
    };
    assert_eq!(found(&[], ""), "LAYOUT; at least two classes, found an empty folder");
    assert_eq!(
        found(&["a.jpg", "b.jpg"], ""),
        "LAYOUT; at least two classes, found 2 files and no folder of a class with images"
    );
    assert_eq!(
        found(&["cat/a.jpg"], ""),
        "LAYOUT; at least two classes, found images in one folder of a class, cat"
    );
    // Images of no class are not classes called train and test.
    assert_eq!(
        found(&["train/a.jpg", "test/a.jpg"], "train"),
        "LAYOUT; at least two classes, found one file and no folder of a class with images"
    );
    assert_eq!(
        found(&["train/cat/a.jpg", "train/dog/a.jpg", "val/a.jpg"], "val"),
        "LAYOUT, found no folder of a class"
    );
    assert_eq!(
        found(&["train/cat/a.jpg", "train/dog/a.jpg", "val/cow/a.jpg"], "val/cow"),
        "class: expected a class of the training part, found one that it lacks"
    );
    assert_eq!(
        found(&["cat/a.jpg", "dog/a.txt"], ""),
        "LAYOUT; at least two classes, found images in one folder of a class, cat"
    );
    assert_eq!(
        found(&["cat/a.txt", "dog/a.txt"], ""),
        "LAYOUT; at least two classes, found folders without images"
    );
    let none = tempfile::tempdir().unwrap().path().join("none");
    assert!(refusal(load(&none)).starts_with(&format!("cannot list {}: ", none.display())));
    let folder = tempfile::tempdir().unwrap();
    for class in 0..=MAX_CLASSES {
        let class = folder.path().join(class.to_string());
        fs::create_dir(&class).and_then(|()| fs::write(class.join("a.jpg"), "")).unwrap();
    }
    assert_eq!(refusal_in(folder.path(), ""), "classes: expected 2 to 4096 folders of classes, found 4097");
}

#[test]
fn impossible_settings_are_refused() {
    let folder = parts();
    for (options, field) in [
        (FolderOptions { validation_share: 1.0, ..options() }, "validation share"),
        (
            FolderOptions { preparation: Preparation { channels: 4, ..Preparation::default() }, ..options() },
            "channels",
        ),
        (
            FolderOptions {
                normalisation: Normalisation::Given { mean: vec![0.5], std: vec![1.0; 3] },
                ..options()
            },
            "mean",
        ),
        (
            FolderOptions {
                normalisation: Normalisation::Given { mean: vec![0.5; 3], std: vec![1.0, 0.0, 1.0] },
                ..options()
            },
            "std",
        ),
    ] {
        let error = refusal(super::folder(folder.path(), &options, &silent));
        assert!(error.starts_with(&format!("data set of photographs: {field}: expected ")), "{error}");
    }
    let options = FolderOptions { normalisation: Normalisation::Measured, ..options() };
    let part = PhotoPart { name: Some("test"), class_names: &["cat".into(), "dog".into()] };
    let error = refusal(folder_part(folder.path(), part, &options, &silent));
    assert!(
        error.starts_with("data set of photographs: normalisation: expected the training set's"),
        "{error}"
    );
}

#[test]
fn samples_are_those_of_photographs() {
    let folder = parts();
    let set = load(folder.path()).unwrap().train;
    let sample = set.sample(2, None).unwrap();
    let expected = Photo::open(&folder.path().join("train/dog/a.PNG")).unwrap();
    let expected = expected.interleaved(&options().preparation).unwrap();
    assert_eq!(sample, Sample { image: Pixels::Interleaved(expected.into()), target: Target::Class(1) });
    let [first, again, other] = [1, 1, 2].map(|seed| set.sample(2, Some(seed)).unwrap());
    assert!(first == again && first != other && first != sample);

    let grey = Preparation { channels: 1, ..options().preparation };
    let grey = FolderOptions { preparation: grey, ..options() };
    let set = super::folder(folder.path(), &grey, &silent).unwrap().train;
    assert_eq!((set.info().shape(), &set.info().mean), ([1, 8, 10], &vec![0.449]));
    for seed in [None, Some(1)] {
        assert!(
            matches!(set.sample(0, seed).unwrap().image, Pixels::Interleaved(bytes) if bytes.len() == 80)
        );
    }
    let same = FolderOptions { augmentation: PhotoAugmentation::none(), ..options() };
    let set = super::folder(folder.path(), &same, &silent).unwrap().train;
    assert_eq!(set.sample(2, Some(9)).unwrap(), sample);
}

#[test]
fn files_that_vanish_or_change_are_named() {
    let folder = parts();
    let set = load(folder.path()).unwrap().train;
    let file = folder.path().join("train/cat/1.jpg");
    let whole = fs::read(&file).unwrap();
    for (bytes, reason) in [
        (&whole[..whole.len() / 2], "contents: expected a sound image, found a JPEG that is cut off"),
        (b"", "contents: expected an image, found an empty file"),
    ] {
        fs::write(&file, bytes).unwrap();
        let error = set.sample(0, None).unwrap_err().to_string();
        assert_eq!(error.replace('\\', "/"), format!("train/cat/1.jpg: {reason}"));
    }
    fs::remove_file(&file).unwrap();
    let error = set.sample(0, Some(1)).unwrap_err().to_string();
    assert!(error.replace('\\', "/").starts_with("cannot read train/cat/1.jpg: "), "{error}");
    fs::create_dir(&file).unwrap();
    let error = set.sample(0, Some(1)).unwrap_err().to_string();
    assert!(error.ends_with("it is a folder, not a regular file"), "{error}");
}

/// Phones write HEIC: whoever has such photographs is told that they are not read.
#[test]
fn images_of_kinds_that_are_not_read_are_told_of() {
    let folder = parts();
    for name in [
        "train/dog/IMG_1.HEIC",
        "train/cat/deep/old.jp2",
        "val/dog/x.avif",
        "train/cat/.hidden.heic",
        "scan.jp2",
    ] {
        write(&folder.path().join(name), b"whatever");
    }
    let set = load(folder.path()).unwrap();
    assert_eq!((set.train.len(), set.test.len()), (4, 1));
    let told: Vec<_> =
        set.train.skipped().iter().map(|(file, _)| file.to_str().unwrap().replace('\\', "/")).collect();
    assert_eq!(told, ["train/cat/deep/old.jp2", "train/dog/IMG_1.HEIC", "val/dog/x.avif"]);
    let reason = &set.train.skipped()[1].1;
    assert!(reason.ends_with("IMG_1.HEIC: HEIC is not read: convert it to JPEG or PNG"), "{reason}");
    let Listed { files, unread } = images_below(folder.path(), false, &silent).unwrap();
    assert_eq!((files.len(), unread.len()), (8, 4));
    assert!(unread.iter().all(|(file, _)| file.is_file()));
}

#[test]
fn broken_files_are_left_out_if_that_is_asked_for() {
    let folder = parts();
    let broken = folder.path().join("train/cat/0.jpg");
    fs::write(&broken, b"").unwrap();
    fs::write(folder.path().join("val/dog/w.png"), b"text").unwrap();
    assert_eq!(load(folder.path()).unwrap().train.len(), 5);
    let skip = FolderOptions { skip_broken: true, ..options() };
    let set = super::folder(folder.path(), &skip, &silent).unwrap();
    assert_eq!((set.train.len(), set.test.len()), (4, 1));
    let [(path, reason)] = set.train.skipped() else { panic!("{:?}", set.train.skipped()) };
    assert_eq!(path, &Path::new("train").join("cat").join("0.jpg"));
    assert!(reason.ends_with("contents: expected an image, found an empty file"), "{reason}");
    assert_eq!(set.test.skipped().len(), 1);
    // A class of which nothing is left.
    fs::write(folder.path().join("val/dog/v.png"), b"text").unwrap();
    let error = refusal(super::folder(folder.path(), &skip, &silent));
    assert!(error.starts_with(&folder.path().join("val/dog").display().to_string()), "{error}");
    assert!(error.ends_with("found only such that cannot be decoded"), "{error}");
}

#[test]
fn pixels_are_measured_if_that_is_asked_for() {
    let folder = tempfile::tempdir().unwrap();
    let flat = |value: u8| {
        encode(&image::GrayImage::from_pixel(20, 20, image::Luma([value])).into(), ImageFormat::Png)
    };
    for (name, value) in
        [("train/a/1.png", 10), ("train/b/1.png", 30), ("val/a/1.png", 255), ("val/b/1.png", 255)]
    {
        write(&folder.path().join(name), &flat(value));
    }
    let measured = FolderOptions { normalisation: Normalisation::Measured, ..options() };
    let events = RefCell::new(Vec::new());
    let note = |event: ProgressEvent<'_>| {
        events.borrow_mut().push(format!("{} {}/{:?}", event.stage, event.done, event.total));
        ControlFlow::Continue(())
    };
    let set = super::folder(folder.path(), &measured, &note).unwrap();
    for part in [&set.train, &set.test] {
        let info = part.info();
        for (mean, std) in info.mean.iter().zip(&info.std) {
            assert!((mean * 255.0 - 20.0).abs() < 1e-4 && (std * 255.0 - 10.0).abs() < 1e-4, "{info:?}");
        }
    }
    let expected = ["listing images 4/Some(4)", "measuring images 0/Some(2)", "measuring images 2/Some(2)"];
    assert_eq!(*events.borrow(), expected);
    for stage in ["listing images", "measuring images"] {
        let stop = |event: ProgressEvent<'_>| match event.stage == stage {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        };
        let error = refusal(super::folder(folder.path(), &measured, &stop));
        assert_eq!(error, format!("cancelled during {stage}"));
    }
    fs::write(folder.path().join("train/b/1.png"), b"").unwrap();
    let error = refusal(super::folder(folder.path(), &measured, &silent));
    assert!(error.replace('\\', "/").starts_with("train/b/1.png: contents: "), "{error}");
}

/// What is special about links and names on Unix.
#[cfg(unix)]
mod unix {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn links_within_the_folder_are_followed() {
        let folder = tempfile::tempdir().unwrap();
        write_scenes(
            folder.path(),
            &["pool/a.jpg", "pool/b.jpg", "train/cat/1.jpg", "train/dog/1.jpg", "val/dog/1.jpg"],
        );
        symlink("../../pool", folder.path().join("train/cat/more")).unwrap();
        symlink("../../pool/a.jpg", folder.path().join("train/dog/link.jpg")).unwrap();
        symlink("nowhere", folder.path().join("train/dog/note")).unwrap();
        let set = load(folder.path()).unwrap();
        let expected = [
            "train/cat/1.jpg",
            "train/cat/more/a.jpg",
            "train/cat/more/b.jpg",
            "train/dog/1.jpg",
            "train/dog/link.jpg",
        ];
        assert_eq!(paths(&set.train), expected);
        assert!(set.train.sample(1, None).is_ok() && set.train.sample(4, None).is_ok());
        // A broken link with an image's name is an image that is not there.
        symlink("nowhere", folder.path().join("train/dog/gone.png")).unwrap();
        let error = refusal(load(folder.path()));
        assert!(error.starts_with("cannot follow the link "), "{error}");
    }

    #[test]
    fn links_out_of_the_folder_need_leave() {
        let outside = tempfile::tempdir().unwrap();
        write_scenes(outside.path(), &["x/a.jpg", "x/b.jpg"]);
        for (link, target) in [("dog/a.jpg", "x/a.jpg"), ("dog/more", "x"), ("cow", "x")] {
            let folder = tempfile::tempdir().unwrap();
            write_scenes(folder.path(), &["cat/1.jpg", "dog/1.jpg", "dog/2.jpg"]);
            let target = fs::canonicalize(outside.path()).unwrap().join(target);
            symlink(&target, folder.path().join(link)).unwrap();
            let message = refusal_in(folder.path(), link);
            let expected = format!("one that stays within {}", folder.path().display());
            assert_eq!(message, format!("link: expected {expected}, found one to {}", target.display()));
            let leave = FolderOptions { follow_links: true, ..options() };
            let set = folder_of(folder.path(), &leave).unwrap();
            assert!(set.train.len() + set.test.len() > 3);
        }
        // A link to what is no image does not matter.
        let folder = tempfile::tempdir().unwrap();
        write_scenes(folder.path(), &["cat/1.jpg", "dog/1.jpg", "dog/2.jpg"]);
        symlink("/dev/zero", folder.path().join("dog/zero.jpg")).unwrap();
        symlink("/etc/hostname", folder.path().join("dog/note")).unwrap();
        assert_eq!(load(folder.path()).unwrap().train.len(), 2);
    }

    fn folder_of(dir: &Path, options: &FolderOptions) -> Result<TrainTest<PhotoFolder>, DataError> {
        super::super::folder(dir, options, &silent)
    }

    #[test]
    fn loops_end() {
        for (link, target, place, found) in [
            ("cat/loop", ".", "cat/loop", "a loop: it is cat again"),
            ("cat/deep/loop", "..", "cat/deep/loop", "a loop: it is cat again"),
            // By way of the set's folder and back into it.
            ("cat/loop", "..", "cat/loop/cat", "a loop: it is cat again"),
            ("cat/twice", "deep", "cat/twice", "cat/deep again, by a link"),
        ] {
            let folder = tempfile::tempdir().unwrap();
            write_scenes(folder.path(), &["cat/1.jpg", "cat/deep/2.jpg", "dog/1.jpg", "dog/2.jpg"]);
            symlink(target, folder.path().join(link)).unwrap();
            let message = refusal_in(folder.path(), place);
            assert_eq!(
                message,
                format!("folder: expected each folder once, found {found}"),
                "{link} -> {target}"
            );
        }
        let folder = tempfile::tempdir().unwrap();
        write_scenes(folder.path(), &["cat/1.jpg", "dog/1.jpg", "dog/2.jpg"]);
        symlink("self", folder.path().join("dog/self")).unwrap();
        assert!(refusal(load(folder.path())).starts_with("cannot follow the link "));
        let deep: PathBuf = std::iter::repeat_n("d", 40).collect();
        let folder = tempfile::tempdir().unwrap();
        write_scenes(folder.path(), &["cat/1.jpg", "dog/2.jpg"]);
        fs::create_dir_all(folder.path().join("cat").join(deep)).unwrap();
        assert!(
            refusal(load(folder.path())).ends_with("folder: expected at most 32 levels, found a deeper one")
        );
    }

    #[test]
    fn names_need_not_be_utf8() {
        let folder = tempfile::tempdir().unwrap();
        write_scenes(folder.path(), &["cat/1.jpg", "dog/1.jpg", "dog/2.jpg"]);
        let name = OsStr::from_bytes(b"caf\xe9.jpg");
        let Ok(()) = fs::rename(folder.path().join("cat/1.jpg"), folder.path().join("cat").join(name)) else {
            // Some systems have no such names.
            return;
        };
        let set = load(folder.path()).unwrap();
        assert!(set.train.path(0).as_os_str().as_bytes() == b"cat/caf\xe9.jpg");
        assert!(set.train.sample(0, None).is_ok());
        let class = folder.path().join(OsStr::from_bytes(b"cow\xff"));
        fs::create_dir(&class).unwrap();
        assert!(refusal(load(folder.path())).ends_with(": class name: expected UTF-8, found other bytes"));
    }

    /// Pipes are not opened when a folder is listed.
    #[test]
    fn pipes_are_no_images() {
        let folder = tempfile::tempdir().unwrap();
        write_scenes(folder.path(), &["cat/1.jpg", "dog/1.jpg", "dog/2.jpg"]);
        let pipe = folder.path().join("cat/pipe.jpg");
        assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        let set = load(folder.path()).unwrap();
        assert_eq!(set.train.class_counts(), [1, 1]);
        // One that takes an image's place while the set is in use is noticed.
        fs::rename(pipe, folder.path().join("cat/1.jpg")).unwrap();
        let error = set.train.sample(0, None).unwrap_err().to_string();
        assert!(error.ends_with("it is a named pipe, not a regular file"), "{error}");
    }
}
