//! Photographs of each kind, prepared for evaluation: compared with what Pillow and torchvision make of the same files.

use std::path::{Path, PathBuf};

use convoke_data::photos::{Photo, Preparation};

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/photos")
}

/// The mean and the greatest difference between two images.
fn differences(found: &[u8], expected: &[u8]) -> (f64, u8) {
    assert_eq!(found.len(), expected.len());
    let differences = || found.iter().zip(expected).map(|(a, b)| a.abs_diff(*b));
    let sum: f64 = differences().map(f64::from).sum();
    (sum / found.len() as f64, differences().max().unwrap())
}

/// H x W x 3 as 3 x H x W.
fn planes(bytes: &[u8]) -> Vec<u8> {
    (0..3).flat_map(|channel| bytes.iter().skip(channel).step_by(3).copied()).collect()
}

/// To the bit, but for JPEGs of four colours, whose decoder rounds otherwise.
#[test]
fn photographs_are_prepared_as_torchvision_does() {
    let preparation = Preparation { size: [32, 32], ..Preparation::default() };
    for (name, mean, greatest) in [
        ("wide.png", 0.0, 0),
        ("small.png", 0.0, 0),
        ("palette.png", 0.0, 0),
        ("transparent.png", 0.0, 0),
        ("packed.tif", 0.0, 0),
        ("plain.bmp", 0.0, 0),
        ("baseline.jpg", 0.0, 0),
        ("subsampled.jpg", 0.0, 0),
        ("progressive.jpg", 0.0, 0),
        ("rotated.jpg", 0.0, 0),
        ("mirrored.jpg", 0.0, 0),
        ("grey.jpg", 0.0, 0),
        ("cmyk.jpg", 0.01, 1),
        ("lossy.webp", 0.0, 0),
    ] {
        let file = folder().join(name);
        let found = Photo::open(&file).unwrap().prepared(&preparation).unwrap();
        let expected = planes(&std::fs::read(file.with_extension("bin")).unwrap());
        let found = differences(&found, &expected);
        println!("{name}: mean {:.4}, greatest {}", found.0, found.1);
        assert!(found.0 <= mean && found.1 <= greatest, "{name}: {found:?}");
    }
}
