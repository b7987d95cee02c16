//! Training on labels for each pixel.

use std::path::Path;

use super::program::{convoke, losses, write_png};

/// A folder like CamVid's: `count` images in each part, sky above road, and a row without a class between them.
pub(super) fn scenes(folder: &Path, [height, width]: [usize; 2], count: usize) {
    for part in ["train", "test"] {
        let [images, classes] = [folder.join(part), folder.join(format!("{part}annot"))];
        for index in 0..count {
            let horizon = height / 3 + 4 * index;
            let class = |row: usize| match row.cmp(&horizon) {
                std::cmp::Ordering::Less => 0,
                std::cmp::Ordering::Equal => 11,
                std::cmp::Ordering::Greater => 3,
            };
            let labels: Vec<u8> = (0..height * width).map(|place| class(place / width)).collect();
            let color = |label: &u8| if *label == 0 { [90, 140, 250] } else { [70, 60, 50] };
            let pixels: Vec<u8> = labels.iter().flat_map(color).collect();
            let (size, name) = ([height, width], format!("{index}.png"));
            write_png(&images.join(&name), size, png::ColorType::Rgb, &pixels);
            write_png(&classes.join(&name), size, png::ColorType::Grayscale, &labels);
        }
    }
}

#[test]
fn segnet_learns_scenes_on_one_rank_and_on_two() {
    let folder = tempfile::tempdir().unwrap();
    scenes(folder.path(), [104, 136], 6);
    let place = folder.path().to_string_lossy().into_owned();
    let flags = ["train", "--data", "camvid", "--data-dir", &place, "--batch-size", "3", "--epochs", "4"];
    let flags = [&flags[..], &["--optimizer", "adamw", "--lr", "0.01", "--json", "-"]].concat();
    let one = convoke(&flags).exits(0);
    assert!(one.stderr.contains("validation mean IoU"), "{}", one.stderr);
    let run = &one.json()["runs"][0];
    assert_eq!((&run["data"], &run["model"]), (&"camvid".into(), &"segnet".into()));
    let found = losses(run);
    assert!(found.len() == 8 && found[7] < 0.7 * found[0], "{found:?}");
    let [accuracy, iou] =
        ["test_accuracy", "test_mean_iou"].map(|field| run[field].as_f64().expect("a number"));
    assert!((0.0..=1.0).contains(&accuracy) && (0.0..=1.0).contains(&iou), "{run}");
    // Random parts of images depend on neither ranks nor batches.
    let two = convoke(&[&flags[..], &["--ranks", "2", "--sync-bn"]].concat()).exits(0).json();
    for (one, two) in found.iter().zip(losses(&two["runs"][0])).take(3) {
        assert!((one - two).abs() <= 1e-2 * one, "{one} on one rank, {two} on two");
    }
    let whole = convoke(&[&flags[..], &["--augment", "none"]].concat()).exits(0).json();
    assert_ne!(losses(&whole["runs"][0]), found);
}

#[test]
fn data_and_model_must_fit() {
    let folder = tempfile::tempdir().unwrap();
    let place = folder.path().to_string_lossy().into_owned();
    let camvid = ["train", "--data", "camvid", "--data-dir", &place];
    convoke(&camvid).check(1, &["no file named train", "CamVid is not there", "--data-dir"]).unwrap();
    convoke(&[&camvid[..], &["--download"]].concat()).check(2, &["cannot be downloaded"]).unwrap();
    scenes(folder.path(), [50, 136], 2);
    let refused = [&camvid[..], &["--batch-size", "2", "--augment", "none"]].concat();
    convoke(&refused).check(2, &["segnet takes", "multiples of 8", "[3, 50, 136]"]).unwrap();
    let refused = [&camvid[..], &["--batch-size", "2", "--model", "mnist-cnn"]].concat();
    convoke(&refused).check(2, &["mnist-cnn takes a label for each image"]).unwrap();
}
