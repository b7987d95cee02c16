//! Folders of labels made by hand: copies and links, parts, and what is wrong in them.

use super::super::labels::{labels, labels_part};
use super::super::testing::{refusal, write_scenes};
use super::super::{Normalisation, PhotoFolder, Preparation};
use super::*;
use crate::{Dataset, Target, TrainTest, silent};

fn load(dir: &Path, options: FolderOptions) -> Result<TrainTest<PhotoFolder>, DataError> {
    let preparation = Preparation { size: [8, 10], ..Preparation::default() };
    labels(dir, &FolderOptions { preparation, validation_share: 0.25, ..options }, &silent)
}

/// Writes photographs to the last paths, and copies of them to the others.
fn write_copies(dir: &Path, images: &[&[&str]]) {
    let last: Vec<&str> = images.iter().map(|paths| paths[paths.len() - 1]).collect();
    write_scenes(dir, &last);
    for paths in images {
        for copy in &paths[..paths.len() - 1] {
            fs::create_dir_all(dir.join(copy).parent().unwrap()).unwrap();
            fs::copy(dir.join(paths[paths.len() - 1]), dir.join(copy)).unwrap();
        }
    }
}

/// The labels of each image of a part, by its path.
fn known(part: &PhotoFolder) -> Vec<(String, Vec<f32>)> {
    let of = |index: usize| match part.target(index).unwrap() {
        Target::Values(values) => (part.path(index).display().to_string(), values.to_vec()),
        other => panic!("{other:?}"),
    };
    (0..part.len()).map(of).collect()
}

/// The labels of each image of both parts, by its path, in order.
fn all_known(parts: &TrainTest<PhotoFolder>) -> Vec<(String, Vec<f32>)> {
    let mut all = [known(&parts.train), known(&parts.test)].concat();
    all.sort_by(|a, b| a.0.cmp(&b.0));
    all
}

#[test]
fn an_image_has_the_label_of_each_folder_that_it_lies_in() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path();
    write_copies(
        dir,
        &[
            &["labels/cat/1.png", "labels/dog/1.png"],
            &["labels/cat/2.png"],
            &["labels/dog/far/3.png", "images/far/3.png"],
            &["images/4.png"],
        ],
    );
    assert!(super::super::labels_spec().is_present(dir));
    let parts = load(dir, FolderOptions::default()).unwrap();
    assert_eq!(parts.train.class_names(), ["cat", "dog"]);
    assert_eq!(parts.train.info().targets, Targets::Labels { count: 2 });
    assert_eq!((parts.train.len(), parts.test.len()), (3, 1));
    let all = all_known(&parts);
    let expected = [
        ("images/4.png", vec![0.0, 0.0]),
        ("images/far/3.png", vec![0.0, 1.0]),
        ("labels/cat/2.png", vec![1.0, 0.0]),
        ("labels/dog/1.png", vec![1.0, 1.0]),
    ];
    assert_eq!(all, expected.map(|(path, values)| (path.to_owned(), values)));
    assert!(parts.train.sample(0, Some(1)).is_ok());
}

#[test]
fn parts_may_lack_labels_and_bring_no_others() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path();
    write_copies(
        dir,
        &[
            &["train/labels/cat/1.png", "train/labels/dog/1.png"],
            &["train/labels/cat/2.png"],
            &["valid/labels/dog/1.png"],
            &["test/labels/cat/5.png"],
        ],
    );
    let parts = load(dir, FolderOptions::default()).unwrap();
    assert_eq!(known(&parts.test), [("valid/labels/dog/1.png".to_owned(), vec![0.0, 1.0])]);
    assert_eq!(known(&parts.train.part("test", &silent).unwrap())[0].1, [1.0, 0.0]);
    assert_eq!(known(&parts.train.part("val", &silent).unwrap()), known(&parts.test));
    assert!(matches!(parts.train.part("other", &silent), Err(DataError::Missing { .. })));
    // A part alone, as another folder.
    let wanted = PhotoPart { name: None, class_names: parts.train.class_names() };
    let options = FolderOptions {
        normalisation: Normalisation::Given { mean: vec![0.0; 3], std: vec![1.0; 3] },
        ..FolderOptions::default()
    };
    let test = dir.join("test");
    let of = |targets| labels_part(&test, (wanted, targets), &options, &silent);
    assert_eq!(known(&of(parts.train.info().targets).unwrap())[0].1, [1.0, 0.0]);
    assert!(refusal(of(Targets::Values { shape: [2, 1, 1] })).contains("a table of what the model predicts"));
    write_scenes(dir, &["valid/labels/bird/7.png"]);
    let error = refusal(load(dir, FolderOptions::default()));
    assert!(error.contains("label: expected a label of the training part"), "{error}");
}

#[test]
fn different_images_of_one_name_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    write_scenes(folder.path(), &["labels/cat/1.png", "labels/dog/1.png", "labels/dog/2.png"]);
    let error = refusal(load(folder.path(), FolderOptions::default()));
    assert!(
        error.contains("labels/dog/1.png") && error.contains("the image that labels/cat/1.png is"),
        "{error}"
    );
}

#[test]
fn what_else_holds_folders_called_labels_is_left_to_others() {
    for paths in [
        // Classes of images.
        &["labels/a/1.png", "cat/2.png"][..],
        &["labels/1.png", "cat/2.png"],
        // Boxes of a detector, in text files.
        &["images/train/1.png"],
    ] {
        let folder = tempfile::tempdir().unwrap();
        write_scenes(folder.path(), paths);
        fs::create_dir_all(folder.path().join("labels/train")).unwrap();
        fs::write(folder.path().join("labels/train/1.txt"), "0 0.5 0.5 1 1").unwrap();
        assert!(!are_at(folder.path()), "{paths:?}");
    }
}

#[test]
fn broken_images_are_left_out_on_demand() {
    let folder = tempfile::tempdir().unwrap();
    write_scenes(folder.path(), &["labels/cat/1.png", "labels/cat/2.png", "labels/dog/3.png"]);
    fs::write(folder.path().join("labels/dog/4.png"), "none").unwrap();
    let parts = load(folder.path(), FolderOptions { skip_broken: true, ..FolderOptions::default() }).unwrap();
    assert_eq!(parts.train.len() + parts.test.len(), 3);
    assert!(parts.train.skipped()[0].1.contains("4.png"));
}

#[cfg(unix)]
#[test]
fn links_stand_for_images_of_the_folder_alone() {
    let [folder, other] = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let dir = folder.path();
    write_scenes(dir, &["images/1.png", "images/2.png", "labels/dog/2.png"]);
    fs::copy(dir.join("images/2.png"), dir.join("labels/dog/2.png")).unwrap();
    fs::create_dir(dir.join("labels/cat")).unwrap();
    std::os::unix::fs::symlink("../../images/1.png", dir.join("labels/cat/1.png")).unwrap();
    let parts = load(dir, FolderOptions::default()).unwrap();
    let all = all_known(&parts);
    assert_eq!(all.into_iter().map(|image| image.1).collect::<Vec<_>>(), [[1.0, 0.0], [0.0, 1.0]]);
    write_scenes(other.path(), &["x.png"]);
    std::os::unix::fs::symlink(other.path().join("x.png"), dir.join("labels/cat/x.png")).unwrap();
    assert!(refusal(load(dir, FolderOptions::default())).contains("link: expected one that stays within"));
}
