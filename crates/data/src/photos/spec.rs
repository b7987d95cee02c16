//! Folders of photographs as data sets by name.

use std::path::{Path, PathBuf};

use super::super::{DataError, DatasetInfo, DatasetSpec, LoadOptions, Targets};
use super::augmentation::PhotoAugmentation;
use super::folder::{FolderOptions, folder};
use super::geometry::{Preparation, setting};
use super::labels::{has_labels, labels};
use super::masks::{MaskOptions, NO_CLASS, has_masks, masks};
use super::measure::Normalisation;

/// How a folder of photographs is loaded by name. What is `None` is usual for the kind of folder.
#[derive(Clone, Debug, PartialEq)]
pub struct PhotoSettings {
    /// Height and width of the images that the model sees. Without it 224 x 224 for photographs with classes; with masks, that of the
    /// images.
    pub size: Option<[usize; 2]>,
    /// 3 (red, green, blue) or 1 (luma).
    pub channels: usize,
    /// See [`Preparation::crop_fraction`]; images with masks are always seen whole.
    pub crop_fraction: Option<f64>,
    /// The share of the images that is for validation, where the folder has no such part.
    pub validation_share: f64,
    /// By what pixels are normalised.
    pub normalisation: Normalisation,
    /// How training varies the images.
    pub augmentation: Option<PhotoAugmentation>,
    /// Whether links may lead out of the folder.
    pub follow_links: bool,
    /// Whether images that cannot be decoded are left out.
    pub skip_broken: bool,
    /// See [`MaskOptions::colours`].
    pub colours: Option<PathBuf>,
    /// See [`FolderOptions::cache_bytes`].
    pub cache_bytes: usize,
}

impl Default for PhotoSettings {
    fn default() -> PhotoSettings {
        PhotoSettings::USUAL
    }
}

impl PhotoSettings {
    /// The default.
    pub(crate) const USUAL: PhotoSettings = PhotoSettings {
        size: None,
        channels: 3,
        crop_fraction: None,
        validation_share: 0.2,
        normalisation: Normalisation::ImageNet,
        augmentation: None,
        follow_links: false,
        skip_broken: false,
        colours: None,
        cache_bytes: 0,
    };

    /// The settings for photographs with a class each.
    pub fn for_folder(&self, seed: u64) -> FolderOptions {
        let usual = Preparation::default();
        FolderOptions {
            preparation: Preparation {
                size: self.size.unwrap_or(usual.size),
                channels: self.channels,
                crop_fraction: self.crop_fraction.unwrap_or(usual.crop_fraction),
            },
            validation_share: self.validation_share,
            seed,
            normalisation: self.normalisation.clone(),
            augmentation: self.augmentation.unwrap_or_default(),
            follow_links: self.follow_links,
            skip_broken: self.skip_broken,
            cache_bytes: self.cache_bytes,
        }
    }

    /// The settings for photographs with masks.
    pub fn for_masks(&self, seed: u64) -> MaskOptions {
        MaskOptions {
            size: self.size,
            channels: self.channels,
            classes: None,
            validation_share: self.validation_share,
            seed,
            normalisation: self.normalisation.clone(),
            augmentation: self.augmentation.unwrap_or_else(PhotoAugmentation::for_masks),
            follow_links: self.follow_links,
            skip_broken: self.skip_broken,
            colours: self.colours.clone(),
            cache_bytes: self.cache_bytes,
        }
    }
}

/// Photographs whose class is the folder they lie in.
pub(crate) fn folder_spec() -> DatasetSpec {
    let usual = DatasetInfo::of_noise("folder", [3, 224, 224], 2, Targets::Image);
    DatasetSpec::new(
        "folder",
        "Your own photographs: in --data-dir, a folder of images for each class",
        |options| Ok(folder(place(options)?, &options.photos.for_folder(options.seed), options.progress)?),
    )
    .with_info_of_any_size(usual)
    .with_model("resnet18")
    .with_files(
        Path::is_dir,
        "Name the folder with --data-dir. It holds train/CLASS/IMAGE and val/CLASS/IMAGE, or CLASS/IMAGE",
    )
    .of_photos()
}

/// Photographs with labels or numbers, which a table or folders give.
pub(crate) fn labels_spec() -> DatasetSpec {
    let usual = DatasetInfo::of_noise("labels", [3, 224, 224], 2, Targets::Labels { count: 2 });
    DatasetSpec::new(
        "labels",
        "Your own photographs with labels: in --data-dir, images and labels.csv, whose columns are an image's file and its labels (0 or 1), \
         numbers, or class; or labels/LABEL/IMAGE, with an image in the folder of each of its labels",
        |options| Ok(labels(place(options)?, &options.photos.for_folder(options.seed), options.progress)?),
    )
    .with_info_of_any_size(usual)
    .with_model("resnet18")
    .with_files(
        has_labels,
        "Name the folder with --data-dir. It holds labels.csv, or train/labels.csv and val/labels.csv, whose first column names images; or \
         labels/LABEL/IMAGE",
    )
    .of_photos()
}

/// Photographs with a class for each pixel.
pub(crate) fn masks_spec() -> DatasetSpec {
    let targets = Targets::Pixels { ignore: Some(i64::from(NO_CLASS)) };
    let usual = DatasetInfo::of_noise("masks", [3, 96, 128], 2, targets);
    DatasetSpec::new("masks", "Your own photographs with masks: in --data-dir, images and PNGs of classes", |options| {
        Ok(masks(place(options)?, &options.photos.for_masks(options.seed), options.progress)?)
    })
    .with_info_of_any_size(usual)
    .with_model("segnet")
    .with_files(
        |folder| [folder.to_owned(), folder.join("train")].iter().any(|part| has_masks(part)),
        "Name the folder with --data-dir. It holds train/images, train/masks, val/images and val/masks, or images and masks",
    )
    .of_photos()
}

fn place<'a>(options: &LoadOptions<'a>) -> Result<&'a Path, DataError> {
    options.folder.ok_or_else(|| setting("folder", "the one that LoadOptions::folder names", "none"))
}
