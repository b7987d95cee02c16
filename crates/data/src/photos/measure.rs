//! Passes over the images of a set before training: which are broken, and the mean and standard deviation of their pixels.

use std::path::PathBuf;

use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use super::super::moments::Moments;
use super::super::progress::report_images;
use super::super::{DataError, Progress};
use super::geometry::setting;

/// Images worked on between two reports of progress.
const IMAGES_PER_REPORT: usize = 32;
/// Mean and standard deviation are those of at most this many images.
const MOST_MEASURED: usize = 1000;

/// The mean and standard deviation of each channel by which pixels are normalised, after bytes are scaled to 0..1.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Normalisation {
    /// The mean and standard deviation of ImageNet's photographs, which pretrained models expect. For grey images, the averages
    /// over its channels.
    #[default]
    ImageNet,
    /// The mean and standard deviation of the set's own training images: of at most 1000 of them, evenly chosen.
    Measured,
    /// Given numbers, one a channel.
    Given {
        /// The mean.
        mean: Vec<f32>,
        /// The standard deviation.
        std: Vec<f32>,
    },
}

/// The mean and the standard deviation of each channel.
pub(super) type MeanAndStd = (Vec<f32>, Vec<f32>);

impl Normalisation {
    /// Mean and standard deviation for a training set of `len` images, of which `image` gives one as H x W x C bytes.
    pub(super) fn of_training(
        &self,
        (len, channels): (usize, usize),
        image: impl Fn(usize) -> Result<Vec<u8>, DataError> + Sync,
        progress: &Progress<'_>,
    ) -> Result<MeanAndStd, DataError> {
        self.known(channels).map_or_else(|| moments(len, channels, image, progress), Ok)
    }

    /// Mean and standard deviation for another part.
    ///
    /// # Errors
    /// If they have to be measured, for which the training set is needed.
    pub(super) fn of_part(&self, channels: usize) -> Result<MeanAndStd, DataError> {
        self.known(channels).ok_or_else(|| setting("normalisation", "the training set's numbers", "none"))
    }

    /// Mean and standard deviation for images of 1 or 3 channels, where no training set is needed for them.
    ///
    /// # Errors
    /// [`DataError::Inconsistent`] if it is, or for other channels.
    pub fn of_channels(&self, channels: usize) -> Result<(Vec<f32>, Vec<f32>), DataError> {
        if ![1, 3].contains(&channels) {
            return Err(setting("channels", "1 or 3", channels));
        }
        self.check(channels)?;
        self.of_part(channels)
    }

    /// Mean and standard deviation, unless they have to be measured.
    fn known(&self, channels: usize) -> Option<MeanAndStd> {
        match self {
            Normalisation::ImageNet if channels == 1 => Some((vec![0.449], vec![0.226])),
            Normalisation::ImageNet => Some((vec![0.485, 0.456, 0.406], vec![0.229, 0.224, 0.225])),
            Normalisation::Measured => None,
            Normalisation::Given { mean, std } => Some((mean.clone(), std.clone())),
        }
    }

    pub(super) fn check(&self, channels: usize) -> Result<(), DataError> {
        let Normalisation::Given { mean, std } = self else { return Ok(()) };
        if mean.len() != channels || !mean.iter().all(|mean| mean.is_finite()) {
            return Err(setting("mean", format!("{channels} finite numbers"), format!("{mean:?}")));
        }
        if std.len() != channels || !std.iter().all(|std| std.is_finite() && *std > 0.0) {
            return Err(setting("std", format!("{channels} positive numbers"), format!("{std:?}")));
        }
        Ok(())
    }
}

/// Mean and standard deviation of each channel of the training images, which `image` gives as H x W x C bytes by their index.
fn moments(
    len: usize,
    channels: usize,
    image: impl Fn(usize) -> Result<Vec<u8>, DataError> + Sync,
    progress: &Progress<'_>,
) -> Result<MeanAndStd, DataError> {
    let chosen = len.min(MOST_MEASURED);
    let count = |at: usize| -> Result<Moments, DataError> {
        let mut moments = Moments::new(channels);
        moments.add_pixels(&image(at * len / chosen)?);
        Ok(moments)
    };
    let mut moments = Moments::new(channels);
    for counted in in_parallel("measuring images", chosen, count, progress)? {
        moments.add(&counted?);
    }
    Ok(moments.mean_and_std())
}

/// Files that were left out, each with the reason.
pub(super) type Skipped = Vec<(PathBuf, String)>;

/// The samples for which `check` gives no error, and the others' files with the reason. Memory that is missing ends it.
pub(super) fn sound<T: Send + Sync>(
    samples: Vec<T>,
    path: impl Fn(&T) -> PathBuf,
    check: impl Fn(&T) -> Result<(), DataError> + Sync,
    progress: &Progress<'_>,
) -> Result<(Vec<T>, Skipped), DataError> {
    let checked = in_parallel("checking images", samples.len(), |index| check(&samples[index]), progress)?;
    let (mut sound, mut skipped) = (Vec::new(), Skipped::new());
    for (sample, checked) in samples.into_iter().zip(checked) {
        match checked {
            Ok(()) => sound.push(sample),
            Err(error @ DataError::Memory(_)) => return Err(error),
            Err(error) => skipped.push((path(&sample), error.to_string())),
        }
    }
    Ok((sound, skipped))
}

/// The results of `make` for each index below `len`, in order, with progress.
pub(super) fn in_parallel<T: Send>(
    stage: &str,
    len: usize,
    make: impl Fn(usize) -> T + Sync,
    progress: &Progress<'_>,
) -> Result<Vec<T>, DataError> {
    report_images(progress, stage, [0, len])?;
    let mut made = convoke_memory::with_capacity(len)?;
    while made.len() < len {
        let chunk = made.len()..(made.len() + IMAGES_PER_REPORT).min(len);
        made.par_extend(chunk.into_par_iter().map(&make));
        report_images(progress, stage, [made.len(), len])?;
    }
    Ok(made)
}
