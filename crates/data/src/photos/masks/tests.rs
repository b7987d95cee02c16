//! Images with masks made by hand: pairs, classes, sizes, and one geometry for both.

use std::fs;

use image::ImageFormat;
use png::{BitDepth, ColorType};

use super::super::decode::decode;
use super::super::testing::{encode, refusal, scene, write};
use super::*;
use crate::png_file::testing::encode as encode_png;
use crate::{Loader, Request, TargetBatch, silent};

const SIZE: [usize; 2] = [12, 16];

fn load(dir: &Path) -> Result<TrainTest<PhotoMasks>, DataError> {
    masks(dir, &MaskOptions::default(), &silent)
}

fn grey(size: [usize; 2], bytes: &[u8]) -> Vec<u8> {
    encode_png(size, ColorType::Grayscale, BitDepth::Eight, bytes)
}

/// A mask whose left half is of one class, its right half of another.
fn halves(size: [usize; 2], [left, right]: [u8; 2]) -> Vec<u8> {
    let classes: Vec<u8> =
        (0..size[0] * size[1]).map(|at| if at % size[1] < size[1] / 2 { left } else { right }).collect();
    grey(size, &classes)
}

fn photo(seed: u8) -> Vec<u8> {
    encode(&scene(SIZE, seed), ImageFormat::Jpeg)
}

fn parts() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    // Two pixels a byte, of the classes 5 and 2.
    let palette = encode_png(SIZE, ColorType::Indexed, BitDepth::Four, &[0x52; 96]);
    for (name, bytes) in [
        ("train/images/b.jpg", photo(1)),
        ("train/images/deep/a.JPG", photo(2)),
        ("train/masks/b.png", halves(SIZE, [0, 255])),
        ("train/masks/deep/a.png", palette),
        ("train/masks/notes.txt", b"not a mask".to_vec()),
        ("val/images/v.jpg", photo(3)),
        ("val/masks/v.png", halves(SIZE, [1, 6])),
        ("test/images/t.jpg", photo(4)),
        ("test/masks/t.png", halves(SIZE, [3, 3])),
    ] {
        write(&folder.path().join(name), &bytes);
    }
    folder
}

fn classes(set: &PhotoMasks, index: usize) -> Vec<u8> {
    match set.sample(index, None).unwrap().target {
        Target::Bytes(bytes) => bytes.into_owned(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn images_are_paired_with_masks() {
    let folder = parts();
    let TrainTest { train, test } = load(folder.path()).unwrap();
    let info = train.info();
    assert_eq!((info.name.as_str(), info.shape(), info.classes), ("masks", [3, 12, 16], 7));
    assert_eq!(info.targets, Targets::Pixels { ignore: Some(255) });
    assert_eq!((train.len(), test.len(), test.info()), (2, 1, info));
    assert_eq!(train.path(1), Path::new("train").join("images").join("deep").join("a.JPG"));
    assert_eq!(train.mask_path(1), Path::new("train").join("masks").join("deep").join("a.png"));
    assert_eq!(train.class_names(), ["0", "1", "2", "3", "4", "5", "6"]);
    assert_eq!(classes(&train, 0), [vec![0; 8], vec![255; 8]].concat().repeat(12));
    assert_eq!(classes(&train, 1), [5, 2].repeat(96));
    // As they are, without a size to resize to.
    let Pixels::Interleaved(image) = train.sample(0, None).unwrap().image else { panic!("floats") };
    let expected = decode(&photo(1), Path::new("x")).unwrap();
    assert_eq!(image.into_owned(), expected.bytes);
    let part = train.part("test", &silent).unwrap();
    assert_eq!((part.len(), part.info(), classes(&part, 0)), (1, info, vec![3; 192]));
}

#[test]
fn a_share_is_for_validation_without_parts() {
    let folder = tempfile::tempdir().unwrap();
    for index in 0..10 {
        write(&folder.path().join(format!("images/{index}.jpg")), &photo(index));
        write(&folder.path().join(format!("masks/{index}.png")), &halves(SIZE, [0, 1]));
    }
    let set = load(folder.path()).unwrap();
    assert_eq!((set.train.len(), set.test.len()), (8, 2));
    // Whole batches of them can be made.
    let loader = Loader::new(set.train, 1).unwrap();
    let views = crate::Augmentation::default().views(3, 0);
    let request = Request { samples: (0..8).collect(), views: Some(views) };
    let mut images = vec![0.0; loader.shape(&request).unwrap().iter().product()];
    let targets = loader.load(&request, &mut images).unwrap();
    assert!(matches!(targets, TargetBatch::Labels(labels) if labels.len() == 8 * 12 * 16));
}

#[test]
fn classes_are_named_by_a_file() {
    let folder = parts();
    let file = folder.path().join("classes.txt");
    fs::write(&file, "\u{feff}sky\r\nroad \ncar\ntree\nsea\nbus\nrail\n\n").unwrap();
    let set = load(folder.path()).unwrap();
    assert_eq!(set.train.class_names(), ["sky", "road", "car", "tree", "sea", "bus", "rail"]);
    let refused = |text: &str, classes: Option<usize>| {
        fs::write(&file, text).unwrap();
        let options = MaskOptions { classes, ..MaskOptions::default() };
        let message = refusal(masks(folder.path(), &options, &silent));
        message.strip_prefix(&format!("{}: names: expected ", file.display())).unwrap().to_owned()
    };
    assert_eq!(refused("", None), "1 to 255 names, one a line, found 0");
    assert_eq!(refused("a\n\nb", None), "1 to 255 names, one a line, found an empty line, the 2. of 3");
    assert_eq!(refused("a\nb", Some(3)), "3, as many as there are to be classes, found 2");
    // Fewer than there are in the masks shows when one is read.
    fs::write(&file, "a\nb").unwrap();
    let error = load(folder.path()).unwrap().train.sample(1, None).unwrap_err().to_string();
    let expected = "train/masks/deep/a.png: class: expected below 2, the number of classes, or 255, found 5";
    assert_eq!(error.replace('\\', "/"), expected);
    fs::remove_file(&file).unwrap();
    let options = MaskOptions { classes: Some(256), ..MaskOptions::default() };
    let error = refusal(masks(folder.path(), &options, &silent));
    assert_eq!(error, "data set of photographs: classes: expected 1 to 255, found 256");
    let options = MaskOptions { classes: Some(21), ..MaskOptions::default() };
    assert_eq!(masks(folder.path(), &options, &silent).unwrap().train.info().classes, 21);
    for (part, name) in [("train", "b"), ("train", "deep/a"), ("val", "v")] {
        let file = folder.path().join(format!("{part}/masks/{name}.png"));
        fs::write(file, halves(SIZE, [255, 255])).unwrap();
    }
    let error = refusal(load(folder.path()));
    assert!(
        error.ends_with(
            "masks: expected a class for at least one pixel, found 255, which stands for no class, everywhere"
        ),
        "{error}"
    );
}

#[test]
fn what_does_not_fit_is_named() {
    let message = |name: &str, bytes: Option<&[u8]>| {
        let folder = parts();
        let file = folder.path().join(name);
        match bytes {
            Some(bytes) => write(&file, bytes),
            None if file.is_dir() => fs::remove_dir_all(file).unwrap(),
            None => fs::remove_file(file).unwrap(),
        }
        let message = match load(folder.path()) {
            Err(error) => error.to_string(),
            Ok(set) => set.train.sample(0, None).unwrap_err().to_string(),
        };
        message.replace(&folder.path().display().to_string(), "DIR").replace('\\', "/")
    };
    assert_eq!(message("train/masks/b.png", None), "DIR/train/masks: no file named b.png");
    assert_eq!(message("train/images/b.jpg", None), "DIR/train/images: no file named b.jpg");
    assert_eq!(message("val/images/v.jpg", None), "DIR/val/images: no file named v.jpg");
    let layout = "train/images and train/masks, val/images and val/masks, or images and masks";
    assert_eq!(
        message("val/masks", None),
        format!("DIR/val: layout: expected {layout}, found no folder masks")
    );
    assert_eq!(message("train", None), format!("DIR: layout: expected {layout}, found no folder images"));
    assert_eq!(
        message("train/images/b.png", Some(b"x")),
        "DIR/train/images/b.png: name: expected one that no other has, found train/images/b.jpg beside it"
    );
    assert_eq!(
        message("train/masks/b.png", Some(&halves([12, 15], [0, 1]))),
        "train/masks/b.png: size: expected 12x16 (height x width) as train/images/b.jpg, found 12x15"
    );
    assert_eq!(
        message("val/images/v.jpg", Some(&encode(&scene([8, 16], 1), ImageFormat::Png))),
        "val/images/v.jpg: size: expected 12x16 (height x width) as train/images/b.jpg, or a size that all are resized to, \
         found 8x16"
    );
    let colours = encode(&scene(SIZE, 1), ImageFormat::Png);
    assert_eq!(
        message("train/masks/b.png", Some(&colours)),
        "train/masks/deep/a.png: colour type: expected 8-bit RGB, found 4-bit Indexed",
        "the first mask is one of colours"
    );
    let cut = halves(SIZE, [0, 1]);
    let error = message("train/masks/b.png", Some(&cut[..cut.len() / 2]));
    assert!(error.starts_with("train/masks/b.png: contents: expected a sound PNG"), "{error}");
}

#[test]
fn broken_pairs_are_left_out_if_that_is_asked_for() {
    let folder = parts();
    fs::write(folder.path().join("train/masks/b.png"), b"").unwrap();
    fs::write(folder.path().join("train/masks/c.png"), halves([3, 3], [0, 1])).unwrap();
    fs::write(folder.path().join("train/images/c.jpg"), photo(9)).unwrap();
    let options = MaskOptions { skip_broken: true, ..MaskOptions::default() };
    let set = masks(folder.path(), &options, &silent).unwrap();
    assert_eq!((set.train.len(), set.test.len()), (1, 1));
    let skipped: Vec<_> = set.train.skipped().iter().map(|(path, _)| path.file_name().unwrap()).collect();
    assert_eq!(skipped, ["b.jpg", "c.jpg"]);
    assert!(set.train.skipped()[1].1.contains("size: expected 12x16"), "{:?}", set.train.skipped());
}

/// An image that is white where the mask has class 1, and black elsewhere: whatever is drawn, that stays so.
#[test]
fn image_and_mask_have_one_geometry() {
    let folder = tempfile::tempdir().unwrap();
    let size = [60, 84];
    let class = |at: usize| u8::from((at / 84 / 20 + at % 84 / 28).is_multiple_of(2));
    let classes: Vec<u8> = (0..60 * 84).map(class).collect();
    let image: Vec<u8> = classes.iter().map(|class| class * 255).collect();
    for name in ["a", "b"] {
        write(&folder.path().join(format!("images/{name}.png")), &grey(size, &image));
        write(&folder.path().join(format!("masks/{name}.png")), &grey(size, &classes));
    }
    let augmentation = PhotoAugmentation {
        brightness: 0.0,
        contrast: 0.0,
        saturation: 0.0,
        trivial_augment: true,
        ..PhotoAugmentation::for_masks()
    };
    let options = MaskOptions { size: Some([32, 48]), channels: 1, augmentation, ..MaskOptions::default() };
    let set = masks(folder.path(), &options, &silent).unwrap().train;
    assert_eq!(set.info().shape(), [1, 32, 48]);
    let (mut ignored, mut grey_pixels) = (0, 0);
    for seed in (0..300).map(Some).chain([None]) {
        // Changes of colours would change what is white.
        let seed_changes = seed.map(|seed| augmentation.draw(seed, size, [32, 48]).trivial);
        if matches!(seed_changes, Some(super::super::trivial::Change::Colour(_))) {
            continue;
        }
        let sample = set.sample(0, seed).unwrap();
        let (Pixels::Interleaved(image), Target::Bytes(mask)) = (sample.image, sample.target) else {
            panic!()
        };
        for (byte, class) in image.iter().zip(mask.iter()) {
            match (byte, class) {
                // Beyond the image.
                (0, 255) => ignored += 1,
                (0..=100, 0) | (155..=255, 1) => {}
                // At the border of a square.
                (101..=154, _) => grey_pixels += 1,
                _ => panic!("{byte} at a pixel of class {class}, seed {seed:?}"),
            }
        }
    }
    assert!(ignored > 1000 && grey_pixels > 0, "{ignored} {grey_pixels}");
}

/// A mask whose left half has one colour, its right half another.
fn coloured([left, right]: [[u8; 3]; 2]) -> Vec<u8> {
    let colour = |at: usize| if at % SIZE[1] < SIZE[1] / 2 { left } else { right };
    let bytes: Vec<u8> = (0..SIZE[0] * SIZE[1]).flat_map(colour).collect();
    encode_png(SIZE, ColorType::Rgb, BitDepth::Eight, &bytes)
}

const ROAD: [u8; 3] = [128, 64, 128];
const SKY: [u8; 3] = [70, 130, 180];
const TREE: [u8; 3] = [1, 2, 3];

/// Four images with masks of colours, and these files.
fn of_colours(files: &[(&str, &str)]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for (name, colours) in [
        ("train/masks/a.png", [SKY, ROAD]),
        ("train/masks/b.png", [ROAD, TREE]),
        ("val/masks/c.png", [TREE, SKY]),
        ("test/masks/d.png", [ROAD, ROAD]),
    ] {
        write(&folder.path().join(name), &coloured(colours));
        let image = name.replace("masks", "images").replace("png", "jpg");
        write(&folder.path().join(image), &photo(1));
    }
    for (name, text) in files {
        write(&folder.path().join(name), text.as_bytes());
    }
    folder
}

/// The classes of the left and of the right half.
fn left_and_right(set: &PhotoMasks, index: usize) -> [u8; 2] {
    let classes = classes(set, index);
    assert_eq!(classes, [vec![classes[0]; 8], vec![classes[15]; 8]].concat().repeat(12));
    [classes[0], classes[15]]
}

#[test]
fn colours_are_classes_by_a_file_or_by_themselves() {
    let folder = of_colours(&[("colours.txt", "70 130 180\tsky\n128 64 128  the road\n\n1 2 3 Void\n")]);
    let parts = load(folder.path()).unwrap();
    assert_eq!(parts.train.class_names(), ["sky", "the road"]);
    assert_eq!([left_and_right(&parts.train, 0), left_and_right(&parts.train, 1)], [[0, 1], [1, 255]]);
    assert_eq!(left_and_right(&parts.test, 0), [255, 0]);
    assert_eq!(left_and_right(&parts.train.part("test", &silent).unwrap(), 0), [1, 1]);

    let folder = of_colours(&[]);
    let parts = load(folder.path()).unwrap();
    assert_eq!(parts.train.class_names(), ["#010203", "#4682b4", "#804080"]);
    assert_eq!([left_and_right(&parts.train, 0), left_and_right(&parts.train, 1)], [[1, 2], [2, 0]]);
    assert_eq!(left_and_right(&parts.test, 0), [0, 1]);
    // A part may lack colours.
    assert_eq!(left_and_right(&parts.train.part("test", &silent).unwrap(), 0), [2, 2]);
}

#[test]
fn the_colours_file_that_options_name_counts() {
    let folder = of_colours(&[
        ("colours.txt", "70 130 180 sky\n128 64 128 road\n1 2 3 tree\n"),
        ("other.txt", "1 2 3 wood\n70 130 180 air\n128 64 128 void\n"),
    ]);
    let options = MaskOptions { colours: Some(folder.path().join("other.txt")), ..MaskOptions::default() };
    let parts = masks(folder.path(), &options, &silent).unwrap();
    assert_eq!(parts.train.class_names(), ["wood", "air"]);
    assert_eq!([left_and_right(&parts.train, 0), left_and_right(&parts.train, 1)], [[1, 255], [255, 0]]);
    assert_eq!(left_and_right(&parts.train.part("test", &silent).unwrap(), 0), [255, 255]);
    let missing = MaskOptions { colours: Some(folder.path().join("none.txt")), ..MaskOptions::default() };
    assert!(refusal(masks(folder.path(), &missing, &silent)).contains("none.txt"));
}

#[test]
fn colours_that_tell_no_class_are_refused() {
    for (text, expected) in [
        ("70 130 180 sky\n128 64 128\n", "line: expected red, green and blue from 0 to 255, and a name"),
        ("70 130 256 sky\n", "found \"70 130 256 sky\", line 1"),
        ("70 130 180 sky\n70 130 180 sea\n", "found #4682b4 sea twice"),
        ("70 130 180 sky\n128 64 128 sky\n", "found #804080 sky twice"),
        ("", "colours: expected 1 to 255"),
    ] {
        let error = refusal(load(of_colours(&[("label_colors.txt", text)]).path()));
        assert!(error.contains(expected), "{expected}: {error}");
    }
    let folder = of_colours(&[("colors.txt", "70 130 180 sky\n128 64 128 road\n")]);
    let parts = load(folder.path()).unwrap();
    let error = parts.train.sample(1, None).unwrap_err().to_string();
    assert!(error.contains("colour: expected a colour of one of the classes, found #010203"), "{error}");
    // Both parts have to keep an image.
    let broken = masks(folder.path(), &MaskOptions { skip_broken: true, ..MaskOptions::default() }, &silent);
    assert!(refusal(broken).contains("only such that cannot be decoded"));
}
