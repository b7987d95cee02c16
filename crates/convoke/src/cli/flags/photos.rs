//! How photographs of the user's are prepared and varied.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use crate::cli::failure::{Failure, Result};
use crate::cli::system;
use crate::nn::data::photos::{Normalisation, PhotoAugmentation, PhotoSettings};

use super::augment::Augment;
use super::values::{ImageSize, given, image_size, name, probability, share};

#[derive(Args)]
pub(crate) struct PhotoArgs {
    /// Height and width that photographs are brought to, such as 224 or 96x128.
    ///
    /// The default is what the model takes, usually 224; photographs with masks stay as they are.
    #[arg(long, value_name = "HxW", value_parser = image_size, help_heading = "Data")]
    pub(crate) image_size: Option<ImageSize>,

    /// The share of the photographs that is for validation, if the folder has no part for it: of each class, by --seed
    /// [default: 0.2].
    #[arg(long, value_name = "SHARE", value_parser = share, help_heading = "Data")]
    pub(crate) validation: Option<f64>,

    /// Mean and standard deviation by which photographs are normalised; a trained model keeps them.
    #[arg(long, alias = "normalization", value_enum, default_value_t = NormalisationName::Imagenet, help_heading = "Data")]
    pub(crate) normalisation: NormalisationName,

    /// Change each training photograph in one more way, drawn at random: TrivialAugment.
    #[arg(long, help_heading = "Data")]
    pub(crate) trivial_augment: bool,

    /// The probability that a rectangle of a training photograph is filled with the mean colour: 0.25 for a quarter of them.
    #[arg(long, value_name = "P", default_value_t = 0.0, value_parser = probability, help_heading = "Data")]
    pub(crate) erasing: f64,

    /// The file that tells which class a colour of a mask is: lines of red, green, blue and a name [default: colours.txt in the folder
    /// of the photographs; without it each colour is a class].
    #[arg(long, alias = "mask-colors", value_name = "FILE", help_heading = "Data")]
    pub(crate) mask_colours: Option<PathBuf>,

    /// Keep decoded photographs in memory, up to half of what is free, so that later epochs need not decode them. This changes
    /// only the speed.
    #[arg(long, help_heading = "Data")]
    pub(crate) cache_images: bool,

    /// Leave out photographs that cannot be decoded, and list them; each is decoded once for that, before training.
    #[arg(long, help_heading = "Data")]
    pub(crate) skip_broken: bool,

    /// Follow links that lead out of the folder of photographs.
    #[arg(long, help_heading = "Data")]
    pub(crate) follow_links: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum NormalisationName {
    /// Mean and standard deviation of ImageNet, which pretrained weights expect.
    Imagenet,
    /// Mean and standard deviation of the training photographs, measured on at most 1000 of them.
    Measured,
}

impl PhotoArgs {
    /// The usual settings, changed as these flags say. `processes` is how many processes share the memory of the machine.
    pub(crate) fn change(&self, usual: PhotoSettings, augment: Augment, processes: usize) -> PhotoSettings {
        PhotoSettings {
            size: self.image_size.map(|ImageSize(size)| size).or(usual.size),
            validation_share: self.validation.unwrap_or(usual.validation_share),
            normalisation: match self.normalisation {
                NormalisationName::Imagenet => Normalisation::ImageNet,
                NormalisationName::Measured => Normalisation::Measured,
            },
            augmentation: Some(self.augmentation(augment, usual.augmentation.unwrap_or_default())),
            follow_links: self.follow_links,
            skip_broken: self.skip_broken,
            colours: self.mask_colours.clone(),
            cache_bytes: match self.cache_images {
                true => system::free_memory().unwrap_or(0) / 2 / processes,
                false => 0,
            },
            ..usual
        }
    }

    fn augmentation(&self, augment: Augment, usual: PhotoAugmentation) -> PhotoAugmentation {
        let base = if augment == Augment::None { PhotoAugmentation::none() } else { usual };
        PhotoAugmentation { trivial_augment: self.trivial_augment, erasing: self.erasing, ..base }
    }

    /// Fails if one of these flags is given for other data.
    pub(crate) fn check_absent(&self, augment: Augment, data: impl std::fmt::Display) -> Result<()> {
        let given = [
            ("--image-size", self.image_size.is_some()),
            ("--validation", self.validation.is_some()),
            ("--normalisation", self.normalisation != NormalisationName::Imagenet),
            ("--trivial-augment", self.trivial_augment),
            ("--erasing", self.erasing > 0.0),
            ("--cache-images", self.cache_images),
            ("--skip-broken", self.skip_broken),
            ("--mask-colours", self.mask_colours.is_some()),
            ("--follow-links", self.follow_links),
            ("--augment standard", augment == Augment::Standard),
        ];
        match given.into_iter().find(|(_, given)| *given) {
            Some((flag, _)) => Err(Failure::Usage(format!(
                "{flag} is for photographs, --data folder, labels and masks, not for {data}"
            ))),
            None => Ok(()),
        }
    }

    /// The flags by name and as text, for ranks to compare.
    pub(crate) fn settings(&self) -> Vec<(&'static str, String)> {
        let PhotoArgs {
            image_size,
            validation,
            normalisation,
            trivial_augment,
            erasing,
            cache_images: _,
            skip_broken,
            follow_links,
            mask_colours: _,
        } = self;
        vec![
            (
                "--image-size",
                given(&image_size.map(|ImageSize([height, width])| format!("{height}x{width}"))),
            ),
            ("--validation", given(validation)),
            ("--normalisation", name(*normalisation)),
            ("--trivial-augment", trivial_augment.to_string()),
            ("--erasing", erasing.to_string()),
            ("--skip-broken", skip_broken.to_string()),
            ("--follow-links", follow_links.to_string()),
        ]
    }
}
