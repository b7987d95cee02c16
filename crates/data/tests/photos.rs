//! Photographs of each kind, prepared for evaluation: compared with what Pillow and torchvision make of the same files. Whole batches of
//! them, as training varies them, are compared with those of earlier versions.

use std::path::{Path, PathBuf};

use convoke_data::photos::{self, FolderOptions, Photo, PhotoAugmentation, Preparation};
use convoke_data::{Augmentation, Loader, Request, TargetBatch, silent};
use sha2::{Digest, Sha256};

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

/// Fails when a batch changes: resumed runs would no longer be the runs that they resume, and others' results not those of here.
#[test]
fn whole_batches_stay_the_same() {
    let dir = tempfile::tempdir().unwrap();
    for (class, name) in [
        ("a", "wide.png"),
        ("a", "palette.png"),
        ("a", "baseline.jpg"),
        ("b", "rotated.jpg"),
        ("b", "grey.jpg"),
        ("b", "transparent.png"),
    ] {
        for part in ["train", "val"] {
            let to = dir.path().join(part).join(class);
            std::fs::create_dir_all(&to).unwrap();
            std::fs::copy(folder().join(name), to.join(name)).unwrap();
        }
    }
    let varied = Augmentation { flip: true, crop: Some([28, 30]), padding: 3 };
    let hashes = [3, 1].map(|channels| {
        let options = FolderOptions {
            preparation: Preparation { size: [32, 36], channels, ..Preparation::default() },
            augmentation: PhotoAugmentation {
                trivial_augment: true,
                erasing: 0.5,
                ..PhotoAugmentation::default()
            },
            ..FolderOptions::default()
        };
        let train = photos::folder(dir.path(), &options, &silent).unwrap().train;
        [None, Some(Augmentation::default()), Some(varied)].map(|augmentation| {
            let hashes = [0, 2].map(|workers| {
                let loader = Loader::new(train.clone(), workers).unwrap();
                let mut hash = Sha256::new();
                for epoch in 0..4 {
                    let views = augmentation.map(|augmentation| augmentation.views(5, epoch));
                    let request = Request { samples: vec![4, 0, 1, 5, 3, 2, 1], views };
                    let mut images = vec![f32::NAN; loader.shape(&request).unwrap().iter().product()];
                    let targets = loader.load(&request, &mut images).unwrap();
                    assert_eq!(targets, TargetBatch::Labels(vec![1, 0, 0, 1, 1, 0, 0]));
                    images.iter().for_each(|value| hash.update(value.to_bits().to_le_bytes()));
                }
                u64::from_be_bytes(hash.finalize()[..8].try_into().unwrap())
            });
            assert_eq!(hashes[0], hashes[1], "with workers and without");
            hashes[0]
        })
    });
    let expected = [
        [0x48ab_7927_35bb_53b0, 0x9984_6791_aa50_87b3, 0xa140_28ce_d1d1_0905],
        [0x03d5_1525_e770_d154, 0x8f29_88d3_e2b1_dde5, 0xc34c_a585_f170_683b],
    ];
    assert_eq!(hashes, expected, "{hashes:#018x?}");
}
